"""Traces and what two of them differ in, as sheets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megagen.cli.sheets import Column, Row, Sheet, counted, megabytes

if TYPE_CHECKING:
    from megagen.trace.compare import Change, Comparison
    from megagen.trace.model import Run


def sheets(run: Run) -> list[Sheet]:
    """Op by op, the critical path, the waits that cost most; the first one's note has the launch as a whole."""
    return [_ops(run), _path(run), *([_waits(run)] if run.waits else [])]


def comparison(of: Comparison, runs: Sequence[Run] = ()) -> list[Sheet]:
    """Op by op in both runs; the note says whether their launches differ by more than they vary, and, with ``runs``,
    what else is not the same in them."""
    rows = [{"op": o.op, **{key: _both(getattr(o, key)) for key, _ in FIGURES}} for o in of.ops]
    only = [
        f"only in {name}: {', '.join(ops)}"
        for name, ops in ((of.first, of.only_first), (of.second, of.only_second))
        if ops
    ]
    moved = [f"{o.op} {o.critical.by:+.2f}" for o in of.moved]
    notes = [
        "Begin, end: by how much later. The rest: as it is now, and by how much more. *: by more than it varies.",
        f"A launch: {_sentence(of.total)}.",
        *_plain(runs),
        f"No weights under way: {_sentence(of.hbm_idle)}.",
        f"A block idle: {_sentence(of.idle)}.",
        f"Of the critical path, µs: {', '.join(moved) if moved else 'no op has more or less by more than it varies'}.",
        *(f"{text[0].upper()}{text[1:]}." for text in only),
        *_unlike(runs),
    ]
    return [
        Sheet(
            "changes",
            f"{of.second} against {of.first}, µs",
            (Column("op", "op"), *(_changed(heading, key) for key, heading in FIGURES)),
            rows,
            note="\n".join(notes),
            extra={
                "first": of.first, "second": of.second, "total": _both(of.total), "hbm_idle": _both(of.hbm_idle),
                "idle": _both(of.idle), "only_first": list(of.only_first), "only_second": list(of.only_second),
            },
        )
    ]  # fmt: skip


FIGURES = (("begin", "begin"), ("end", "end"), ("length", "length"), ("wait", "wait"), ("critical", "path"))
# Where two runs differ in these, their figures mean different things.
ALIKE = ("origin", "schedule", "machine", "tokens", "context", "experts", "ranks", "waits")
EMULATED = "Emulated: times count what the emulator did. They show order, not length."


def _ops(run: Run) -> Sheet:
    rows = [
        {
            "op": row.op, "source": row.source, "blocks": row.blocks,
            "load_us": min((load.begin[1] for load in row.loads), default=None),
            "bytes": sum(load.bytes for load in row.loads if load.into == "ring") or None,
            "taken_up_us": row.begin[1] if row.head is None else row.head.begin[1],
            "begin_us": row.begin[1], "end_us": row.end[1], "length_us": row.length[1],
        }
        for row in run.rows
    ]  # fmt: skip
    return Sheet(
        "ops",
        f"{run.name}: {counted(run.launches, 'launch', 'es')}, medians over blocks and launches, µs",
        (
            Column("op", "op"),
            Column("blocks", lambda r: "" if r["blocks"] == run.blocks_of else r["blocks"], right=True),
            Column("MB", lambda r: "" if r["bytes"] is None else megabytes(r["bytes"]), right=True),
            Column("load", _us("load_us"), right=True),
            Column("taken up", _us("taken_up_us"), right=True),
            Column("begin", _us("begin_us"), right=True),
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
    lines = ["Load: the first one. Begin: input is there. Length: of a block, begin to end."]
    lines += [EMULATED] if _emulated(run) else []
    lines.append(f"A launch takes {total:.2f} µs (p10 to p90: {low:.2f} to {high:.2f}).")
    if run.plain and run.stamped is not None:
        more = run.stamped - run.plain
        lines.append(f"Back to back: {run.plain:.2f} without stamps, which cost {more:.2f} ({more / run.plain:.1%}).")
    if run.floor is not None:
        lines.append(f"The floor is {run.floor:.2f}: {run.over_floor:.2f} times that.")
    lines.append(f"For {run.hbm_idle[1]:.2f} µs no SM has weights under way; for {run.idle[1]:.2f} a block is idle.")
    if run.dropped:
        lines.append(f"{counted(run.dropped, 'span')} found no room: s.stamps(records=...) makes more.")
    return "\n".join(lines)


def _emulated(run: Run) -> bool:
    return dict(run.facts).get("origin") == "emulated"


def _path(run: Run) -> Sheet:
    kinds = sorted({s.what for s in run.shares}, key=list(KINDS).index)
    found: dict[str, dict[str, Any]] = {}
    for s in run.shares:
        found.setdefault(s.op, {"op": s.op, "us": 0.0})[s.what] = s.us[1]
    for row in found.values():
        row["us"] = round(sum(v for k, v in row.items() if k in kinds), 3)
    rows = sorted(found.values(), key=lambda r: -r["us"])
    whole = run.total[1]
    return Sheet(
        "path",
        "Where the critical path goes, medians over launches, µs",
        (
            Column("op", lambda r: r["op"] or "launch"),
            Column("all", _us("us"), right=True),
            Column("of a launch", lambda r: f"{r['us'] / whole:.1%}" if whole else "", right=True),
            *(Column(kind, _us(kind), right=True) for kind in kinds),
        ),
        rows,
        note=" ".join(KINDS[kind] for kind in kinds),
    )


KINDS = {
    "work": "Work: its warps compute.",
    "load": "Load: weights are on their way.",
    "hop": "Hop: data are.",
    "wait": "Wait: nobody is known to end it.",
    "launch": "Launch: the one before ends.",
}


def _waits(run: Run) -> Sheet:
    rows = [w.model_dump(mode="json") for w in run.waits]
    covers = [f"{_who(row)}: {row['cover'].replace(': s.', ':' + chr(10) + '    s.')}" for row in rows if row["cover"]]
    return Sheet(
        "waits",
        "Waits that cost most, µs",
        (
            Column("who", _who),
            Column("for", "edge"),
            Column("from", lambda r: f"{r['begin'][1]:.2f}", right=True),
            Column("a warp's", lambda r: f"{r['us'][1]:.2f}", right=True),
            Column("on the path", _us("critical_us"), right=True),
        ),
        rows,
        note="\n".join(["On the path: what the critical path has of it, while no warp of the block works.", *covers]),
    )


def _who(row: Row) -> str:
    return f"{row['op']}.{row['role']}" if row["op"] else str(row["role"])


def _us(key: str) -> Callable[[Row], str]:
    return lambda r: "" if r.get(key) is None else f"{r[key]:.2f}"


def _changed(heading: str, key: str) -> Column:
    def text(row: Row) -> str:
        of = row[key]
        now = "" if key in ("begin", "end") else f"{of['second']:.2f} "
        return f"{now}{of['by']:+.2f}{'*' if of['beyond'] else ' '}"

    return Column(heading, text, right=True)


def _both(change: Change) -> dict[str, Any]:
    return {**change.model_dump(mode="json"), "beyond": change.beyond}


def _plain(runs: Sequence[Run]) -> list[str]:
    """How long launches take without stamps, if both runs know: what to judge a change by."""
    times = [run.plain for run in runs if run.plain]
    if len(times) < 2:
        return []
    return [f"A launch without stamps: {times[0]:.2f} to {times[1]:.2f} µs, {times[1] - times[0]:+.2f}."]


def _unlike(runs: Sequence[Run]) -> list[str]:
    """What makes figures of two runs hard to compare."""
    facts = [dict(run.facts) for run in runs]
    pairs = {key: [of.get(key, "none") for of in facts] for key in ALIKE}
    unlike = [f"{key} {' and '.join(values)}" for key, values in pairs.items() if len(set(values)) > 1]
    return [f"Not alike: {'; '.join(unlike)}."] * bool(unlike) + [EMULATED] * any(map(_emulated, runs))


def _sentence(change: Change) -> str:
    than = "more than" if change.beyond else "not more than"
    return f"{change.first:.2f} to {change.second:.2f} µs, {change.by:+.2f}, {than} it varies ({change.spread:.2f})"
