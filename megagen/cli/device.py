"""What ``run`` and ``bench`` do on a GPU. torch is imported when they do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagen.cli import report
from megagen.cli.explain import computed, nominal
from megagen.cli.pipeline import Built, placed
from megagen.cli.sheets import Column, Sheet, counted, megabytes
from megagen.errors import MegagenError

if TYPE_CHECKING:
    import torch

    from megagen.bench.measure import Row
    from megagen.bench.routes import Draws
    from megagen.bench.timing import Timing
    from megagen.ir.plan import Plan
    from megagen.runtime.session import Session
    from megagen.runtime.step import Step
    from megagen.weights.random import LayerWeights

WARMUP = 5  # rounds that do not count
CONTEXT = 4096  # tokens in the caches, of layers that have some: more than a window
WHOLE = 62  # layers of a step, where the graph does not say
BASELINES = ("torch",)


def require(gpus: int = 1) -> None:
    """Raises DeviceError without so many usable GPUs: before minutes of compiling, not after."""
    from megagen.runtime.driver import require_torch

    for device in reversed(range(gpus)):  # the first stays the current one
        require_torch(device)


def absent() -> bool:
    """Whether torch is here and sees no GPU."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return False
    import torch

    return not torch.cuda.is_available()


def run(
    built: Built,
    tokens: int,
    experts: int | None,
    seeds: int,
    checkpoint: Path | None,
    layer: int,
    step: Step | None = None,
) -> Sheet:
    """Launch once a seed and judge all that the launches left. Weights are random unless there is a checkpoint."""
    from megagen.bench.verify import Verifier
    from megagen.runtime.session import Session

    plan, graph = built.plan, built.graph
    with Session(plan, built.artifacts[plan.machine.arch].path) as session:
        if checkpoint is None:
            from megagen.weights.random import random_layer

            weights = random_layer(graph, seed=0, device=session.device)
            packed, env = weights.packed(), weights.env(graph.tp)
        else:
            from megagen.weights.checkpoint import load_layer, load_reference

            packed = load_layer(checkpoint, layer, graph, rank=0, device=session.device)
            env = load_reference(checkpoint, layer, graph, device=session.device)
        override = None if experts is None else table(session.experts, session.top_k, experts, tokens, seed=0)
        verifier = Verifier(session, graph, packed, env)
        checks = verifier.check(tokens, route_override=override, seeds=range(seeds), step=step)

    return report.checks(checks, f"{counted(tokens, 'token')}{placed(step)}, {counted(seeds, 'seed')}")


def steps(layers: int, rounds: int, stretches: int = 1) -> int:
    """How often :func:`bench` reports progress; :func:`bench_step` times two stretches."""
    return layers + stretches * (WARMUP + rounds)


def whole(built: Built) -> int:
    """Layers of the whole model."""
    return int(getattr(built.graph.attributes.get("config"), "layers", WHOLE))


def bench(
    built: Mapping[str, Built],
    experts: int | None,
    layers: int,
    rounds: int,
    command: str,
    record: bool,
    progress: Callable[[], None],
    *,
    bounded: bool = True,
    step: Step | None = None,
    guessed: float = 0.5,
    baselines: Sequence[str] = (),
) -> Sheet:
    """Time the variants in turns: CUDA graphs over the same ``layers`` layers, routing drawn anew each replay.

    Each layer works on what the one before made. ``experts``: distinct ones of a launch, by default the plan's nominal
    number; a graph may have none. ``step``: of all the plan's tokens, for layers with caches. ``guessed``: the share of
    the experts that a plan guesses which are used again.
    ``baselines``: which of :data:`BASELINES` are timed beside them.
    """
    from megagen.bench import measure
    from megagen.bench.inputs import Inputs
    from megagen.bench.timing import Variant, interleave
    from megagen.runtime.session import Session
    from megagen.runtime.stack import Stack, handed_on

    some = next(iter(built.values()))
    graph, plan = some.graph, some.plan
    experts = experts or plan.nominal_experts
    routed = nominal(plan, experts)
    drawn = draws((b.plan for b in built.values()), experts, guessed)
    target = measurements(plan.name) if record else None
    cuts: dict[str, Mapping[str, str]] = {}  # of each baseline's kernels
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(
                Session(b.plan, b.artifacts[b.plan.machine.arch].path, timeout_ms=2000 if bounded else 0)
            )
            for name, b in built.items()
        }
        device = next(iter(sessions.values())).device
        inputs = Inputs.random(graph, 1, graph.tokens, 0, device, step)
        prepared: list[Any] = []  # the same weights, as a baseline has them

        def prepare(made: LayerWeights) -> None:
            from megagen.bench.baseline.prepare import prepare

            prepared.append(prepare(made))

        packed = random_weights(some, layers, device, progress, prepare if baselines else None)
        stacks: list[Any] = []  # which the graphs launch

        def variant(name: str, session: Session) -> Variant:
            stacks.append(Stack(session, packed, inputs.ranks))
            session.set_step(inputs.step)
            replay = stacks[-1].capture(restore=False)
            return Variant(name, replay.replay, layers, lambda sample: reroute(session, drawn, sample))

        def op_by_op(name: str) -> Variant:
            from megagen.bench.baseline.layer import OpByOp

            assert drawn is not None, "a graph that a baseline can compute has routing"
            ops = OpByOp(graph, prepared, inputs.ranks[0], inputs.step, handed_on(plan), table=drawn[0])
            stacks.append(ops)
            cuts[name] = ops.described()
            return Variant(name, ops.capture().replay, layers, lambda sample: ops.reroute(drawn[sample]))

        variants = [*(variant(*s) for s in sessions.items()), *map(op_by_op, baselines)]
        timings = interleave(variants, rounds=rounds, warmup=WARMUP, progress=progress)
        for session in sessions.values():
            session.synchronize()  # a launch that gave up is quick: it must not pass for a time

    def figure(timing: Timing) -> measure.Row:
        return measure.row(
            timing,
            plan=plan,
            experts=experts or None,
            what=f"{graph.attributes['figure']}.{timing.name}",
            command=command,
            notes="; ".join(
                (
                    notes(some, experts, layers, timing.samples, bounded=bounded, step=step, guessed=guessed),
                    *(f"{op}: {cut}" for op, cut in cuts.get(timing.name, {}).items()),
                )
            ),
        )

    figures = {name: figure(timing) for name, timing in timings.items()}
    if target is not None:
        measure.append(target, list(figures.values()))
    nbytes = measure.weight_bytes(plan, experts or None)
    return Sheet(
        "figures",
        f"µs a layer: {routed}{placed(step)}, {counted(layers, 'layer')}, {rounds} replays",
        (
            Column("variant", "variant"),
            Column("median", lambda r: f"{r['value']:.1f}", right=True),
            Column("p10", lambda r: f"{r['spread'][0]:.1f}", right=True),
            Column("p90", lambda r: f"{r['spread'][1]:.1f}", right=True),
            Column("HBM MB", lambda r: megabytes(r["hbm_bytes"]), right=True),
            Column("floor", lambda r: f"{r['floor']:.1f}", right=True),
            Column("ratio", lambda r: f"{r['ratio']:.2f}", right=True),
        ),
        [{"variant": n, "hbm_bytes": nbytes, **f.model_dump(mode="json")} for n, f in figures.items()],
        note="\n".join(
            (
                "Stand-ins take the place of the other ranks: the time of their links is not in these figures.",
                *(f"{name}, {op}: {cut}" for name, found in cuts.items() for op, cut in found.items()),
                *([f"Appended to {target}."] if target else []),
            )
        ),
    )


def bench_step(
    built: Built,
    experts: int | None,
    layers: int,
    rounds: int,
    command: str,
    record: bool,
    progress: Callable[[], None],
    *,
    bounded: bool = True,
    step: Step | None = None,
    guessed: float = 0.5,
) -> Sheet:
    """Time one CUDA graph over all layers of the model, with ``layers`` distinct weights in turn, and the host's part:
    telling the device what to work on and replaying the graph."""
    import torch

    from megagen.bench import measure
    from megagen.bench.inputs import Inputs
    from megagen.bench.timing import Variant, host, interleave
    from megagen.runtime.session import Session
    from megagen.runtime.stack import Stack

    graph, plan, count = built.graph, built.plan, whole(built)
    experts = experts or plan.nominal_experts
    drawn = draws([plan], experts, guessed)
    target = measurements(plan.name) if record else None
    path = built.artifacts[plan.machine.arch].path
    with Session(plan, path, timeout_ms=2000 if bounded else 0) as session:
        inputs = Inputs.random(graph, 1, graph.tokens, 0, session.device, step)
        stack = Stack(session, random_weights(built, layers, session.device, progress), inputs.ranks, layers=count)
        session.set_step(inputs.step)
        name = f"layers{count}"
        replay = stack.capture(restore=False)
        variant = Variant(name, replay.replay, count, lambda sample: reroute(session, drawn, sample))
        timing = interleave([variant], rounds=rounds, warmup=WARMUP, progress=progress)[name]

        def work() -> None:
            session.set_step(inputs.step)
            replay.replay()

        # As one who waits for a step's tokens does: without sleeping, which would leave the processor cold.
        busy = host("host", work, torch.cuda.synchronize, rounds=rounds, warmup=WARMUP, progress=progress)
        session.synchronize()  # a launch that gave up must not pass for a time

    def row(of: Timing, unit: str, per: float, floor: float | None) -> Row:
        return measure.figure(
            of,
            floor=floor,
            unit=unit,
            per=per,
            what=f"step.{of.name}",
            command=command,
            notes=notes(
                built, experts, layers, of.samples, bounded=bounded, step=step, launches=count, guessed=guessed
            ),
        )

    least = measure.floor_us(plan, experts or None)
    figures = [row(timing, "ms", 1e3 / count, least), row(busy, "µs", 1.0, None)]
    if target is not None:
        measure.append(target, figures)
    return Sheet(
        "figures",
        f"A step of {counted(count, 'layer')}: {nominal(plan, experts)}{placed(step)}, {rounds} replays",
        (
            Column("what", "what"),
            Column("median", lambda r: f"{r['value']:.2f}", right=True),
            Column("p10", lambda r: f"{r['spread'][0]:.2f}", right=True),
            Column("p90", lambda r: f"{r['spread'][1]:.2f}", right=True),
            Column("unit", "unit"),
            Column("floor", lambda r: "" if r["floor"] is None else f"{r['floor']:.2f}", right=True),
            Column("ratio", lambda r: "" if r["ratio"] is None else f"{r['ratio']:.2f}", right=True),
        ),
        [f.model_dump(mode="json") for f in figures],
        note="Stand-ins take the place of the other ranks: the time of their links is not in these figures."
        + (f"\nAppended to {target}." if target else ""),
    )


def random_weights(
    built: Built,
    layers: int,
    device: torch.device,
    progress: Callable[[], None],
    also: Callable[[LayerWeights], None] | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Random weights of so many layers. ``also`` is given each before it is packed."""
    from megagen.weights.random import random_layer

    found = []
    for seed in range(layers):
        made = random_layer(built.graph, seed, device)
        if also is not None:
            also(made)
        found.append(made.packed())
        progress()
    return found


def draws(plans: Iterable[Plan], experts: int, guessed: float = 0.5, tokens: int | None = None) -> Draws | None:
    """The routing of samples, if there is any; the same for all ``plans``. ``tokens``: if not all of theirs."""
    from megagen.bench.routes import Draws

    some = [*plans]
    route = next((op.constants for op in some[0].ops if op.kind == "top_k"), None)
    if route is None:
        return None
    top = max(plan.guess.top if plan.guess else 0 for plan in some)
    pool, top_k = int(route["kExperts"]), int(route["kTopK"])
    return Draws(experts, tokens or some[0].tokens, top_k, pool=pool, top=top, guessed=guessed)


def reroute(session: Session, drawn: Draws | None, sample: int) -> None:
    if drawn is not None:
        session.set_route_override(drawn[sample])


def notes(
    built: Built,
    experts: int,
    layers: int,
    replays: int,
    *,
    bounded: bool,
    step: Step | None = None,
    launches: int | None = None,
    gpus: int = 1,
    tokens: int | None = None,
    guessed: float = 0.5,
) -> str:
    """What a recorded figure is of, beyond the plan's name. ``launches``: of a replay, if not one a distinct layer.
    ``gpus``: with a live rank each. ``tokens``: of a launch, if not all the plan's."""
    plan = built.plan
    new = ", new routing each replay" if plan.nominal_experts else ""
    if plan.guess is not None:
        new += f", with {round(guessed * plan.guess.top)} of {plan.guess.top} guessed experts"
    of = "" if launches is None else f"{counted(launches, 'layer')} with the weights of "
    return "; ".join(
        (
            computed(plan, built.options),
            f"tp {plan.tp} on {'one GPU' if gpus == 1 else f'{gpus} GPUs'}, stand-ins for the other ranks",
            nominal(plan, experts, tokens) + placed(step) + new,
            f"{of}{counted(layers, 'distinct layer')} in a CUDA graph, {counted(replays, 'replay')}",
            "bounded waits" if bounded else "unbounded waits",
        )
    )


def refuse_routes(plan: Plan, experts: int, tokens: int) -> None:
    """Raises MegagenError, before anything is compiled, if so many tokens cannot have so many distinct experts."""
    if route := next((o.constants for o in plan.ops if o.kind == "top_k"), None):
        table(int(route["kExperts"]), int(route["kTopK"]), experts, tokens, seed=0)


def table(pool: int, top_k: int, experts: int, tokens: int, seed: int) -> torch.Tensor:
    from megagen.bench.routes import routes

    return routes(experts, tokens, top_k, seed, pool=pool)


def measurements(name: str) -> Path:
    """The file of a plan's figures. Raises MegagenError outside a source checkout, before anything is timed."""
    from megagen import resources

    docs = resources.schedules().parent / "docs"
    if not docs.is_dir():
        raise MegagenError("--record writes to docs/, which is not here", hint="run it in a source checkout of megagen")
    return docs / "measurements" / f"{name}.jsonl"
