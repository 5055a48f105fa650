"""Traces and what two of them differ in, as sheets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megagen.cli.sheets import Column, Row, Sheet, counted, megabytes

if TYPE_CHECKING:
    from megagen.trace.compare import Change, Comparison
    from megagen.trace.model import Run


def sheets(run: Run) -> list[Sheet]:
    """Op by op, the critical path, the waits that cost most; the first one's note has the launch as a whole."""
    return [_ops(run), _path(run), *([_waits(run)] if run.waits else [])]


def comparison(of: Comparison) -> list[Sheet]:
    """Op by op in both runs; the note says whether their launches differ by more than they vary."""
    rows = [{"op": o.op, **{key: _both(getattr(o, key)) for key, _ in FIGURES}} for o in of.ops]
    only = [
        f"only in {name}: {', '.join(ops)}"
        for name, ops in ((of.first, of.only_first), (of.second, of.only_second))
        if ops
    ]
    moved = [f"{o.op} {o.critical.by:+.2f}" for o in of.moved]
    notes = [
        f"A launch: {_sentence(of.total)}.",
        f"No weights under way: {_sentence(of.hbm_idle)}. A block idle: {_sentence(of.idle)}.",
        f"Of the critical path, µs: {', '.join(moved) if moved else 'no op has more or less than before'}.",
        *(f"{text[0].upper()}{text[1:]}." for text in only),
    ]
    return [
        Sheet(
            "changes",
            f"{of.second} against {of.first}: µs, and by how much they differ (* by more than they vary)",
            (Column("op", "op"), *(_changed(heading, key) for key, heading in FIGURES)),
            rows,
            note="\n".join(notes),
            extra={
                "first": of.first, "second": of.second, "total": _both(of.total), "hbm_idle": _both(of.hbm_idle),
                "idle": _both(of.idle), "only_first": list(of.only_first), "only_second": list(of.only_second),
            },
        )
    ]  # fmt: skip


FIGURES = (("begin", "begin"), ("end", "end"), ("length", "length"), ("wait", "wait"), ("critical", "of the path"))


def _ops(run: Run) -> Sheet:
    rows = [
        {
            "op": row.op, "source": row.source, "blocks": row.blocks,
            "load_us": min((load.begin[1] for load in row.loads), default=None),
            "bytes": sum(load.bytes for load in row.loads if load.into == "ring") or None,
            "begin_us": row.begin[1] if row.head is None else row.head.begin[1],
            "ready_us": row.begin[1], "end_us": row.end[1], "length_us": row.length[1],
        }
        for row in run.rows
    ]  # fmt: skip
    return Sheet(
        "ops",
        f"{run.name}: {counted(run.launches, 'launch', 'es')}, medians over blocks, µs",
        (
            Column("op", "op"),
            Column("blocks", lambda r: "" if r["blocks"] == run.blocks_of else r["blocks"], right=True),
            Column("MB", lambda r: "" if r["bytes"] is None else megabytes(r["bytes"]), right=True),
            Column("first load", _us("load_us"), right=True),
            Column("taken up", _us("begin_us"), right=True),
            Column("input there", _us("ready_us"), right=True),
            Column("end", _us("end_us"), right=True),
            Column("length", _us("length_us"), right=True),
            Column("line", lambda r: r["source"].rpartition(":")[2], right=True),
        ),
        rows,
        note=_whole(run),
        extra={
            "name": run.name, "facts": dict(run.facts), "total_us": list(run.total), "floor_us": run.floor,
            "hbm_idle_us": list(run.hbm_idle), "idle_us": list(run.idle), "plain_us": run.plain,
            "stamped_us": run.stamped, "dropped": run.dropped,
        },
    )  # fmt: skip


def _whole(run: Run) -> str:
    low, total, high = run.total
    parts = [f"A launch takes {total:.2f} µs ({low:.2f} to {high:.2f})"]
    if run.floor is not None:
        parts.append(f"floor {run.floor:.2f}, ratio {total / run.floor:.2f}")
        parts.append(f"for {run.hbm_idle[1]:.2f} no SM has weights under way")
    parts.append(f"a block is idle for {run.idle[1]:.2f}")
    if run.plain and run.stamped is not None:
        more = run.stamped - run.plain
        parts.append(f"stamps cost {more:.2f} ({more / run.plain:.1%})")
    text = "; ".join(parts) + "."
    if run.dropped:
        text += f"\n{counted(run.dropped, 'span')} found no room: s.stamps(records=...) makes more."
    return text


def _path(run: Run) -> Sheet:
    kinds = sorted({s.what for s in run.shares}, key=("work", "load", "hop", "wait", "launch").index)
    found: dict[str, dict[str, Any]] = {}
    for s in run.shares:
        found.setdefault(s.op, {"op": s.op, "us": 0.0})[s.what] = s.us[1]
    for row in found.values():
        row["us"] = round(sum(v for k, v in row.items() if k in kinds), 3)
    rows = sorted(found.values(), key=lambda r: -r["us"])
    return Sheet(
        "path",
        "Where the critical path goes, medians over launches, µs",
        (
            Column("op", lambda r: r["op"] or "launch"),
            Column("all", _us("us"), right=True),
            *(Column(kind, _us(kind), right=True) for kind in kinds),
        ),
        rows,
        note="Work: its warps compute. Load: weights are on their way. Hop: data are. Launch: the one before ends.",
    )


def _waits(run: Run) -> Sheet:
    return Sheet(
        "waits",
        "Waits that cost most, µs",
        (
            Column("who", lambda r: f"{r['op']}.{r['role']}" if r["op"] else r["role"]),
            Column("for", "edge"),
            Column("at", lambda r: f"{r['begin'][1]:.2f}", right=True),
            Column("of a warp", lambda r: f"{r['us'][1]:.2f}", right=True),
            Column("of the path", _us("critical_us"), right=True),
            Column("what to do meanwhile", "cover"),
        ),
        [w.model_dump(mode="json") for w in run.waits],
        note="Of the path: since its block last had a warp at work.",
    )


def _us(key: str) -> Callable[[Row], str]:
    return lambda r: "" if r.get(key) is None else f"{r[key]:.2f}"


def _changed(heading: str, key: str) -> Column:
    def text(row: Row) -> str:
        of = row[key]
        return f"{of['second']:.2f} ({of['by']:+.2f}){'*' if of['beyond'] else ' '}"

    return Column(heading, text, right=True)


def _both(change: Change) -> dict[str, Any]:
    return {**change.model_dump(mode="json"), "beyond": change.beyond}


def _sentence(change: Change) -> str:
    than = "more than" if change.beyond else "not more than"
    return f"{change.first:.2f} to {change.second:.2f} µs, {change.by:+.2f}, {than} it varies ({change.spread:.2f})"
