"""What ``run`` and ``bench`` do on a GPU. torch is imported when they do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from megagen.cli import report
from megagen.cli.explain import computed, nominal
from megagen.cli.pipeline import Built
from megagen.cli.sheets import Column, Sheet, counted, megabytes
from megagen.errors import MegagenError

if TYPE_CHECKING:
    import torch

    from megagen.bench.timing import Timing

WARMUP = 5  # rounds that do not count


def require() -> None:
    """Raises DeviceError without a usable GPU: before minutes of compiling, not after."""
    from megagen.runtime.driver import require_torch

    require_torch(0)


def absent() -> bool:
    """Whether torch is here and sees no GPU."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return False
    import torch

    return not torch.cuda.is_available()


def run(built: Built, tokens: int, experts: int | None, seeds: int, checkpoint: Path | None, layer: int) -> Sheet:
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
        checks = Verifier(session, graph, packed, env).check(tokens, route_override=override, seeds=range(seeds))

    return report.checks(checks, f"{counted(tokens, 'token')}, {counted(seeds, 'seed')}")


def steps(layers: int, rounds: int) -> int:
    """How often :func:`bench` reports a step."""
    return layers + WARMUP + rounds


def bench(
    built: Mapping[str, Built],
    experts: int | None,
    layers: int,
    rounds: int,
    command: str,
    record: bool,
    step: Callable[[], None],
    *,
    bounded: bool = True,
) -> Sheet:
    """Time the variants in turns: CUDA graphs over the same ``layers`` layers, routing drawn anew each replay.

    ``experts``: distinct ones of a launch, by default the plan's nominal number; a graph may have none.
    """
    from megagen.bench import measure
    from megagen.bench.timing import Variant, interleave
    from megagen.bench.verify import random_stream
    from megagen.ir.graph import TensorKind
    from megagen.runtime.session import Session
    from megagen.weights.random import random_layer

    some = next(iter(built.values()))
    graph, plan = some.graph, some.plan
    experts = experts or plan.nominal_experts
    routed = nominal(plan, experts)
    target = _measurements(plan.name) if record else None
    (stream,) = (t.name for t in graph.tensors.values() if t.kind is TensorKind.INPUT)
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(
                Session(b.plan, b.artifacts[b.plan.machine.arch].path, timeout_ms=2000 if bounded else 0)
            )
            for name, b in built.items()
        }
        device = next(iter(sessions.values())).device
        rows = random_stream(graph.tokens, graph, 0, device)
        packed = []
        for seed in range(layers):
            packed.append(random_layer(graph, seed, device).packed())
            step()

        def variant(name: str, session: Session) -> Variant:
            replay = session.capture([session.bind({**weights, stream: rows}) for weights in packed])

            def reroute(sample: int) -> None:
                if not plan.nominal_experts:
                    return
                session.set_route_override(table(session.experts, session.top_k, experts, graph.tokens, sample))

            return Variant(name, replay.replay, layers, reroute)

        timings = interleave([variant(*s) for s in sessions.items()], rounds=rounds, warmup=WARMUP, progress=step)
        for session in sessions.values():
            session.synchronize()  # a launch that gave up is quick: it must not pass for a time

    def figure(timing: Timing) -> measure.Row:
        return measure.row(
            timing,
            plan=plan,
            experts=experts or None,
            what=f"{graph.attributes['figure']}.{timing.name}",
            command=command,
            notes=notes(some, experts, layers, timing.samples, bounded=bounded),
        )

    figures = {name: figure(timing) for name, timing in timings.items()}
    if target is not None:
        measure.append(target, list(figures.values()))
    nbytes = measure.weight_bytes(plan, experts or None)
    return Sheet(
        "figures",
        f"µs a layer: {routed}, {counted(layers, 'layer')}, {rounds} replays",
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
        note="Stand-ins take the place of the other ranks: the time of their links is not in these figures."
        + (f"\nAppended to {target}." if target else ""),
    )


def notes(built: Built, experts: int, layers: int, replays: int, *, bounded: bool) -> str:
    """What a recorded figure is of, beyond the plan's name."""
    plan = built.plan
    return "; ".join(
        (
            computed(plan, built.options),
            f"tp {plan.tp} on one GPU, stand-ins for the other ranks",
            nominal(plan, experts) + (", new routing each replay" if plan.nominal_experts else ""),
            f"{counted(layers, 'distinct layer')} in a CUDA graph, {counted(replays, 'replay')}",
            "bounded waits" if bounded else "unbounded waits",
        )
    )


def table(pool: int, top_k: int, experts: int, tokens: int, seed: int) -> torch.Tensor:
    from megagen.bench.routes import routes

    return routes(experts, tokens, top_k, seed, pool=pool)


def _measurements(name: str) -> Path:
    """The file of a plan's figures. Raises MegagenError outside a source checkout, before anything is timed."""
    from megagen import resources

    docs = resources.schedules().parent / "docs"
    if not docs.is_dir():
        raise MegagenError("--record writes to docs/, which is not here", hint="run it in a source checkout of megagen")
    return docs / "measurements" / f"{name}.jsonl"
