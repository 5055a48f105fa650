"""What ``trace`` does: launches of a stamped kernel, on GPUs or emulated, and the Trace that their stamps make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagen.cli import device as devices
from megagen.cli.pipeline import Built, Checked
from megagen.errors import DeviceError

if TYPE_CHECKING:
    from megagen.runtime.group import Group
    from megagen.runtime.session import Session
    from megagen.runtime.stack import Stack
    from megagen.runtime.step import Step
    from megagen.settings import Settings
    from megagen.trace.spans import Trace

WARMUP = 5  # replays that are neither timed nor recorded
EMULATED_LAYERS = 2


def steps(layers: int, rounds: int, replays: int) -> int:
    """How often :func:`record` reports progress."""
    return layers + WARMUP + rounds + replays


def record(
    plain: Built,
    stamped: Built,
    settings: Settings,
    *,
    name: str,
    gpus: int,
    experts: int | None,
    layers: int,
    rounds: int,
    replays: int,
    command: str,
    progress: Callable[[], None],
    step: Step | None,
    target: Path | None = None,
    guessed: float = 0.5,
) -> Trace:
    """Time a stack of ``layers`` without and with stamps in turns, ``rounds`` times; then record ``replays`` of it.

    A live rank on each of ``gpus``, the others stood in for; routing drawn anew each replay, with a share ``guessed``
    of the experts that the plan guesses. ``target``: a file of measurements, for both times.
    """
    import torch

    from megagen.bench import measure
    from megagen.bench.inputs import Inputs
    from megagen.bench.timing import Variant, interleave
    from megagen.runtime import driver
    from megagen.runtime.stack import Stack
    from megagen.trace import offset
    from megagen.trace.record import Recorder, least_wait
    from megagen.trace.spans import Facts
    from megagen.weights.random import random_layer

    graph, plan, ranks = stamped.graph, stamped.plan, range(gpus)
    experts = experts or plan.nominal_experts
    arch, drawn = plan.machine.arch, devices.draws([plan], experts, guessed)
    with _live(plain, gpus) as without, _live(stamped, gpus) as live:
        home = torch.device("cuda", 0)
        given = Inputs.random(graph, gpus, graph.tokens, 0, home, step)
        inputs = [{n: x.to(f"cuda:{r}") for n, x in given.ranks[r].items()} for r in ranks]
        packed = []
        for seed in range(layers):
            packed.append([random_layer(graph, seed, f"cuda:{r}", rank=r).packed() for r in ranks])
            progress()

        def reroute(on: Session | Group, sample: int) -> None:
            if drawn is not None:
                for rank in on.ranks:
                    rank.set_route_override(drawn[sample])

        def variant(name: str, on: Session | Group) -> tuple[Variant, Stack]:
            stack = Stack(on, packed, inputs)
            for rank in on.ranks:
                rank.set_step(given.step)
            replay = stack.capture(restore=False)

            return Variant(name, replay.replay, layers, lambda sample: reroute(on, sample)), stack

        (first, _), (second, stack) = variant("plain", without), variant("stamped", live)
        with torch.cuda.device(home):
            timings = interleave([first, second], rounds=rounds, warmup=WARMUP, progress=progress)
        for on in (without, live):
            on.synchronize()

        before = offset.measure(list(ranks), arch, settings)
        recorder = Recorder(plan)
        for replay in range(replays):
            reroute(live, WARMUP + rounds + replay)
            _clear(stack)
            second.replay()
            live.synchronize()
            for index, bound in enumerate(stack.bound):
                recorder.add(index, replay, [layer.stamps for layer in bound if layer.stamps is not None])
            progress()
        after = offset.measure(list(ranks), arch, settings)

    notes = devices.notes(stamped, experts, layers, rounds, bounded=True, step=step, gpus=gpus, guessed=guessed)
    if target is not None:
        figure, kind = graph.attributes["figure"], "fused" if plan.fused else "unfused"
        names = {"plain": f"{figure}.{kind}", "stamped": f"{figure}.{kind}.stamped"}
        more: dict[str, Any] = {"plan": plan, "experts": experts or None, "command": command, "notes": notes}
        measure.append(target, [measure.row(timings[n], what=what, **more) for n, what in names.items()])
    recorder.drifts = drifts = [offset.Drift(*pair) for pair in zip(before, after, strict=True)]
    return recorder.trace(
        Facts(
            origin="measured",
            name=name,
            machine=torch.cuda.get_device_name(),
            driver=driver.version(),
            versions=measure.versions(),
            commit=measure.commit(),
            command=command,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            tokens=graph.tokens,
            context=None if step is None else step.context,
            experts=experts or None,
            ranks=gpus,
            clock="clock64" if plan.stamps is not None and plan.stamps.cycles else "globaltimer",
            clock_ns=plan.machine.timer_step_ns,
            least_wait=least_wait(plan),
            offsets_ns=tuple(-d.before.ns for d in drifts),
            offset_error_ns=tuple(d.error_ns for d in drifts),
            drift_ns=tuple(d.before.ns - d.after.ns for d in drifts),
            plain_us=timings["plain"].median,
            stamped_us=timings["stamped"].median,
            notes=notes,
        )
    )


def emulate(
    checked: Checked,
    library: Path,
    *,
    name: str,
    ranks: int,
    experts: int | None,
    replays: int,
    seed: int,
    command: str,
    progress: Callable[[], None],
    step: Step | None,
) -> Trace:
    """The same of ``replays`` worlds in the emulator, of EMULATED_LAYERS each. Its time is no GPU's: it counts what
    the emulator did, and shows order, not length."""
    try:
        from megagen.bench.emulation import Emulation, Weights, refuse_too_large
        from megagen.bench.inputs import Inputs
    except ImportError as e:
        from megagen.runtime.driver import INSTALL

        raise DeviceError(f"emulated launches need torch: {e}", hint=INSTALL) from e
    import torch

    from megagen.bench import measure
    from megagen.runtime.stack import Stack
    from megagen.trace.record import Recorder, least_wait
    from megagen.trace.spans import Facts

    plan, graph = checked.plan, checked.graph
    refuse_too_large(plan, ranks)
    emulation = Emulation(plan, graph, library, Weights.random(graph, ranks))
    recorder = Recorder(plan)
    for replay in range(replays):
        with emulation.world(seed + replay, layers=EMULATED_LAYERS + 1, progress=progress) as world:
            given = Inputs.random(graph, ranks, graph.tokens, seed + replay, torch.device("cpu"), step)
            for rank in world.ranks:
                rank.set_step(given.step)
                if experts is not None:
                    rank.set_route_override(devices.table(rank.experts, rank.top_k, experts, graph.tokens, replay))
            stack = Stack(world, [emulation.weights.packed], given.ranks, layers=EMULATED_LAYERS)
            stack.launch()
            world.synchronize()
            for index, bound in enumerate(stack.bound):
                recorder.add(index, replay, [layer.stamps for layer in bound if layer.stamps is not None])
    return recorder.trace(
        Facts(
            origin="emulated",
            name=name,
            machine=plan.machine.name,
            versions=measure.versions(),
            commit=measure.commit(),
            command=command,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            tokens=graph.tokens,
            context=None if step is None else step.context,
            experts=experts,
            ranks=ranks,
            clock="the emulator's",
            least_wait=least_wait(plan),
            offsets_ns=(0.0,) * ranks,
            offset_error_ns=(0.0,) * ranks,
            notes="time in the emulator counts what it did: it shows order, not length",
        )
    )


@contextmanager
def _live(built: Built, gpus: int) -> Iterator[Any]:
    from megagen.runtime.group import Group
    from megagen.runtime.session import Session

    path = built.artifacts[built.plan.machine.arch].path
    with Session(built.plan, path) if gpus == 1 else Group(built.plan, path, range(gpus)) as live:
        yield live


def _clear(stack: Stack) -> None:
    """What an earlier launch wrote must not pass for this one's."""
    for bound in stack.bound:
        for layer in bound:
            if layer.stamps is not None:
                layer.stamps.zero_()
