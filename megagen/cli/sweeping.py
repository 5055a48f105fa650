"""What ``bench --sweep`` does: one kernel timed on launches of several sizes, and the line through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megagen.bench.sweep import Fit, Sweep, fit
from megagen.cli import device as devices
from megagen.cli import pipeline
from megagen.cli.explain import nominal
from megagen.cli.pipeline import Built, Checked
from megagen.cli.sheets import Column, Sheet, counted, megabytes
from megagen.errors import MegagenError

if TYPE_CHECKING:
    from megagen.bench.measure import Row
    from megagen.bench.timing import Timing
    from megagen.runtime.step import Step


@dataclass(frozen=True)
class Point:
    """A launch of ``tokens`` on ``experts`` distinct experts (0: it has none), which reads ``nbytes``."""

    name: str
    tokens: int
    experts: int
    step: Step | None  # of a graph with caches
    nbytes: int

    @property
    def context(self) -> int:
        return 0 if self.step is None else self.step.context


def points(checked: Checked, sweep: Sweep, experts: int | None, context: int | None, *, tree: bool) -> list[Point]:
    """The launches of ``sweep``, the rest as ``experts`` and ``context`` say; by default on as many experts as is usual
    for so many tokens. Raises MegagenError for what the kernel or its routing cannot do."""
    from megagen.bench import measure
    from megagen.lower import distinct

    graph, plan = checked.graph, checked.plan
    route = next((o.constants for o in plan.ops if o.kind == "top_k"), None)
    if route is None and sweep.name == "experts":
        raise MegagenError(f"--sweep experts: launches of {plan.name} have none")
    found = []
    for value in sweep.values:
        tokens = value if sweep.name == "tokens" else graph.tokens
        if tokens > graph.tokens:
            raise MegagenError(
                f"--sweep tokens: {tokens} is more than the {graph.tokens} that a launch of {plan.name} may have",
                hint="--tokens N compiles for another number",
            )
        after = value if sweep.name == "context" else context
        step = pipeline.step(checked, tokens, after, tree=tree, usual=devices.CONTEXT)
        used = 0
        if route is not None:
            used = value if sweep.name == "experts" else experts or distinct(tokens, int(route["kTopK"]))
            devices.refuse_routes(plan, used, tokens)
        nbytes = measure.bytes_read(graph, tokens, used, 0 if step is None else step.context)
        found.append(Point(f"{sweep.name}={value}", tokens, used, step, nbytes))
    return found


def steps(points: int, layers: int, rounds: int) -> int:
    """How often :func:`bench` reports progress."""
    return points + devices.steps(layers, rounds)


def bench(
    built: Built,
    sweep: Sweep,
    wanted: Sequence[Point],
    layers: int,
    rounds: int,
    command: str,
    record: bool,
    progress: Callable[[], None],
    *,
    bounded: bool = True,
) -> Sheet:
    """Time the kernel at all points, in turns."""
    from megagen.bench import measure

    target = devices.measurements(built.plan.name) if record else None
    timings = time(built, wanted, layers, rounds, progress, bounded=bounded)
    try:
        line = fit([p.nbytes for p in wanted], [timings[p.name].median for p in wanted])
    except MegagenError:  # the times are good all the same
        line = None
    figures = [
        figure(built, sweep, p, timings[p.name], command, devices.notes(
            built, p.experts, layers, timings[p.name].samples, bounded=bounded, step=p.step, tokens=p.tokens
        ))
        for p in wanted
    ]  # fmt: skip
    rows = [*figures]
    if line is not None:
        span = f"{counted(len(wanted), 'point')} of {wanted[0].name} to {wanted[-1].name}"
        rows += fitted(built, sweep, line, command, f"{span}; {figures[0].notes}")
    if target is not None:
        measure.append(target, rows)
    return sheet(built, sweep, wanted, figures, line, layers, rounds, f"\nAppended to {target}." if target else "")


def time(
    built: Built, wanted: Sequence[Point], layers: int, rounds: int, progress: Callable[[], None], *, bounded: bool
) -> Mapping[str, Timing]:
    """µs a layer at each point: a CUDA graph each, over the same weights, in one session."""
    from megagen.bench.inputs import Inputs
    from megagen.bench.timing import Variant, interleave
    from megagen.runtime.session import Session
    from megagen.runtime.stack import Stack

    plan, graph = built.plan, built.graph
    with Session(plan, built.artifacts[plan.machine.arch].path, timeout_ms=2000 if bounded else 0) as session:
        packed = devices.random_weights(built, layers, session.device, progress)
        stacks = []  # which the graphs launch

        def variant(point: Point) -> Variant:
            inputs = Inputs.random(graph, 1, point.tokens, 0, session.device, point.step)
            stacks.append(Stack(session, packed, inputs.ranks))
            step = inputs.step
            session.set_step(step)
            replay = stacks[-1].capture(restore=False)

            def before(sample: int) -> None:
                session.set_step(step)
                devices.reroute(session, built, point.experts, sample, point.tokens)

            progress()
            return Variant(point.name, replay.replay, layers, before)

        variants = [variant(p) for p in wanted]
        timings = interleave(variants, rounds=rounds, warmup=devices.WARMUP, progress=progress)
        session.synchronize()  # a launch that gave up is quick: it must not pass for a time
    return timings


def figure(built: Built, sweep: Sweep, point: Point, timing: Timing, command: str, notes: str) -> Row:
    """A point's row of docs/measurements."""
    from megagen.bench import measure

    return measure.figure(
        timing,
        floor=point.nbytes / built.plan.machine.hbm_bytes_per_s * 1e6,
        unit="µs per layer",
        what=f"{built.graph.attributes['figure']}.sweep.{point.name.replace('=', '.')}",
        command=command,
        notes=notes,
    )


def fitted(built: Built, sweep: Sweep, line: Fit, command: str, notes: str) -> list[Row]:
    """The line's rows of docs/measurements."""
    from megagen.bench import measure

    name = f"{built.graph.attributes['figure']}.fit.{sweep.name}"
    figures = [("a", line.a, "µs"), ("worst", 100 * abs(line.deviations[line.worst]), "%")]
    if line.rate is not None:
        figures.insert(1, ("b", line.rate / 1e12, "TB/s"))
    return [
        measure.count(v, unit=unit, what=f"{name}.{what}", command=command, notes=notes) for what, v, unit in figures
    ]


def sheet(
    built: Built,
    sweep: Sweep,
    wanted: Sequence[Point],
    figures: Sequence[Row],
    line: Fit | None,
    layers: int,
    rounds: int,
    more: str = "",
) -> Sheet:
    """The points and the line."""
    off = [None] * len(wanted) if line is None else [round(100 * d, 2) for d in line.deviations]
    rows = [
        {
            "tokens": p.tokens,
            "experts": p.experts,
            "context": None if p.step is None else p.step.context,
            "hbm_bytes": p.nbytes,
            "deviation_percent": d,
            **f.model_dump(mode="json"),
        }
        for p, f, d in zip(wanted, figures, off, strict=True)
    ]
    one = wanted[0]
    fixed = {
        "experts": counted(one.tokens, "token") + pipeline.placed(one.step),
        "tokens": f"any tokens{pipeline.placed(one.step)}",
        "context": nominal(built.plan, one.experts, one.tokens),
    }[sweep.name]
    return Sheet(
        "figures",
        f"µs a layer by {sweep.name}: {fixed}, {counted(layers, 'layer')}, {rounds} replays",
        (
            Column("tokens", "tokens", right=True),
            Column("experts", lambda r: r["experts"] or "", right=True),
            Column("after", lambda r: "" if r["context"] is None else f"{r['context']:,}", right=True),
            Column("median", lambda r: f"{r['value']:.1f}", right=True),
            Column("p10", lambda r: f"{r['spread'][0]:.1f}", right=True),
            Column("p90", lambda r: f"{r['spread'][1]:.1f}", right=True),
            Column("HBM MB", lambda r: megabytes(r["hbm_bytes"]), right=True),
            Column("floor", lambda r: f"{r['floor']:.1f}", right=True),
            Column("ratio", lambda r: f"{r['ratio']:.2f}", right=True),
            Column(
                "off the line", lambda r: "" if (d := r["deviation_percent"]) is None else f"{d:+.1f} %", right=True
            ),
        ),
        rows,
        note=words(line, wanted, built.plan.machine.hbm_bytes_per_s)
        + "\nStand-ins take the place of the other ranks: the time of their links is not in these figures."
        + more,
        extra={"fit": told(line, wanted, built.plan.machine.hbm_bytes_per_s)},
    )


def told(line: Fit | None, wanted: Sequence[Point], peak: float) -> dict[str, Any] | None:
    """The line for JSON."""
    if line is None:
        return None
    rate = line.rate
    return {
        "a_us": round(line.a, 2),
        "b_tb_per_s": None if rate is None else round(rate / 1e12, 3),
        "hbm_share": None if rate is None else round(rate / peak, 3),
        "worst_percent": round(100 * abs(line.deviations[line.worst]), 2),
        "worst_at": wanted[line.worst].name,
    }


def words(line: Fit | None, wanted: Sequence[Point], peak: float) -> str:
    """The line for people."""
    if line is None:
        return "No line: all points read the same bytes."
    worst = f"at worst {100 * abs(line.deviations[line.worst]):.1f} % off, at {wanted[line.worst].name}"
    if line.rate is None:
        return f"No rate: the time does not grow with the bytes. Line through {line.a:.1f} µs; {worst}."
    share = f"{100 * line.rate / peak:.0f} % of the {peak / 1e12:.2f} TB/s of HBM"
    return f"Line: {line.a:.1f} µs + bytes / {line.rate / 1e12:.2f} TB/s ({share}); {worst}."
