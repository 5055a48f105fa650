"""What ``bench --ablate`` does: every variant built and timed in turns, and what each choice is worth as a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagen.bench import ablate
from megagen.bench.ablate import Result, Variant
from megagen.cli import device as devices
from megagen.cli import pipeline
from megagen.cli.explain import nominal
from megagen.cli.pipeline import Built, Checked, Request
from megagen.cli.sheets import Column, Sheet, counted
from megagen.errors import CheckError, CompileError, DeviceError, HangError, MachineError, MegagenError, ScheduleError

if TYPE_CHECKING:
    import torch

    from megagen.bench.measure import Row
    from megagen.runtime.session import Replayable, Session
    from megagen.runtime.stack import Stack
    from megagen.runtime.step import Step
    from megagen.settings import Settings

REFUSALS = (ScheduleError, CheckError, MachineError, CompileError)
KEYS = {ablate.DEFAULT: "changes", ablate.ALL_OFF: "alone_on"}  # of the tables' rows in JSON
TITLES = {
    ablate.DEFAULT: "One choice changed, against the default",
    ablate.ALL_OFF: "One choice on, against all off that can be",
}


def variants(request: Request, base: Checked, only: Sequence[str], *, from_off: bool) -> list[Variant]:
    """What is to be timed. ``base``: of the request. Raises MegagenError for ``only`` that the schedule does not offer,
    and where there is nothing to vary."""
    name, settled = request.schedule.name, request.choices
    names = ablate.varied(name, base.offered, settled, only)
    found = ablate.changes(settled, base.offered, base.plan.choices, names)
    if from_off:
        found += ablate.alone(name, settled, lambda c: pipeline.offered(replace(request, choices=c)), names)
    return found


def build(
    request: Request,
    wanted: Sequence[Variant],
    settings: Settings,
    *,
    bounded: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Built], dict[str, str]]:
    """The variants by name, compiled side by side; and why some are refused. Raises the refusal of a base."""

    def one(variant: Variant) -> Built | MegagenError:
        try:
            checked = pipeline.check(replace(request, choices=variant.choices))
            return pipeline.build(checked, [checked.plan.machine.arch], settings, bounded=bounded)
        except REFUSALS as error:
            return error
        finally:
            progress()

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        made = list(pool.map(one, wanted))
    except BaseException:  # no compiler can be stopped: leave it behind
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    builds: dict[str, Built] = {}
    refused: dict[str, str] = {}
    for variant, found in zip(wanted, made, strict=True):
        if isinstance(found, MegagenError):
            if variant.is_base:
                raise found
            refused[variant.name] = ablate.reason(found)
        elif builds and found.graph != next(iter(builds.values())).graph:
            refused[variant.name] = "it computes something else, and no choice may change that"
        else:
            builds[variant.name] = found
    return builds, refused


def steps(wanted: int, layers: int, rounds: int) -> int:
    """How often :func:`bench` reports progress."""
    return 2 * wanted + devices.steps(layers, rounds)


def bench(
    wanted: Sequence[Variant],
    builds: Mapping[str, Built],
    refused: Mapping[str, str],
    experts: int | None,
    layers: int,
    rounds: int,
    command: str,
    record: bool,
    progress: Callable[[], None],
    *,
    bounded: bool = True,
    step: Step | None = None,
) -> list[Sheet]:
    """Time the variants that differ, in turns, on the same weights, input and routing, and compare their bits."""
    some = builds[wanted[0].name]
    experts = experts or some.plan.nominal_experts
    target = devices.measurements(some.plan.name) if record else None
    same = ablate.same_code({name: b.plan for name, b in builds.items()})
    apart = {name: b for name, b in builds.items() if same[name] == name}
    needed = {same[v.name] for v in wanted if v.is_base}
    times, unfit = time(apart, needed, experts, layers, rounds, progress, bounded=bounded, step=step)
    found = ablate.results(wanted, times, same, {**refused, **unfit})
    if target is not None:
        from megagen.bench import measure

        told = devices.notes(some, experts, layers, rounds, bounded=bounded, step=step)
        measure.append(target, rows(found, some, experts, command, told))
    title = f"{nominal(some.plan, experts)}{pipeline.placed(step)}, {counted(layers, 'layer')}, {rounds} rounds"
    note = "All that were timed left the same bits. Stand-ins take the place of the other ranks."
    if target is not None:
        note += f"\nAppended to {target}."
    at = {v.base: builds[v.name].plan.choices for v in wanted if v.is_base}
    return sheets(found, at, title, note)


def time(
    builds: Mapping[str, Built],
    needed: Collection[str],
    experts: int,
    layers: int,
    rounds: int,
    progress: Callable[[], None],
    *,
    bounded: bool,
    step: Step | None,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """µs a layer of each round of each variant, and why some do not fit on the GPU. Raises DeviceError for one of those
    ``needed``, and where the variants' results differ."""
    from megagen.bench.inputs import Inputs
    from megagen.bench.timing import Variant as Timed
    from megagen.bench.timing import sample
    from megagen.runtime.session import Session
    from megagen.runtime.stack import Stack

    some = next(iter(builds.values()))
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for name, b in builds.items():
            path = b.artifacts[b.plan.machine.arch].path
            try:
                sessions[name] = stack.enter_context(Session(b.plan, path, timeout_ms=2000 if bounded else 0))
            except DeviceError as error:
                if name in needed:
                    raise
                refused[name] = ablate.reason(error)
        device = next(iter(sessions.values())).device
        inputs = Inputs.random(some.graph, 1, some.graph.tokens, 0, device, step)
        packed = devices.random_weights(some, layers, device, progress)
        stacks: dict[str, Stack] = {}  # which the graphs launch
        graphs: dict[str, Replayable] = {}
        for name, session in sessions.items():
            stacks[name] = Stack(session, packed, inputs.ranks)
            session.set_step(inputs.step)
            graphs[name] = stacks[name].capture(restore=False)

        def timed(name: str) -> Timed:
            return Timed(name, graphs[name].replay, layers, lambda i: devices.reroute(sessions[name], some, experts, i))

        def replay(name: str, index: int) -> Callable[[], Sequence[Mapping[str, torch.Tensor]]]:
            def outputs() -> Sequence[Mapping[str, torch.Tensor]]:
                devices.reroute(sessions[name], some, experts, index)
                stacks[name].restore()
                graphs[name].replay()
                try:
                    sessions[name].synchronize()
                except HangError as error:
                    raise HangError(f"{name}: {error.message}", record=error.record, loc=error.loc) from error
                progress()
                return stacks[name].outputs

            return outputs

        ablate.same_results({name: replay(name, 0) for name in sessions})
        times = sample([timed(name) for name in sessions], rounds=rounds, warmup=devices.WARMUP, progress=progress)
        for session in sessions.values():
            session.synchronize()  # a launch that gave up is quick: it must not pass for a time
        ablate.same_results({name: replay(name, 1) for name in sessions})
    return times, refused


def rows(found: Sequence[Result], built: Built, experts: int, command: str, told: str) -> list[Row]:
    """Of docs/measurements: a base's µs per layer, and the effect in µs of every other variant that was timed.

    ``told``: what all of them are of.
    """
    from megagen.bench import measure

    made = []
    for r in found:
        v = r.variant
        if r.timing is None:
            continue
        if r.effect is None:
            what = f"ablation.{v.base}"
            picked = ", ".join(f"{k}={x}" for k, x in v.choices.items())
            notes = f"{picked}; {told}" if picked else told
            made.append(
                measure.row(r.timing, plan=built.plan, experts=experts or None, what=what, command=command, notes=notes)
            )
            continue
        kind = "ablation" if v.base == ablate.DEFAULT else "ablation.alone"
        notes = f"µs per layer more than {v.base}, in the same round"
        notes += f"; the same code as {r.same}" if r.same else ""
        made.append(
            measure.figure(
                r.effect, floor=None, unit="µs", what=f"{kind}.{v.choice}.{v.value}", command=command,
                notes=f"{notes}; {told}",
            )
        )  # fmt: skip
    return made


def sheets(found: Sequence[Result], at: Mapping[str, Mapping[str, str]], title: str, note: str) -> list[Sheet]:
    """A table a base. ``at``: the choices of each base."""
    bases = list(dict.fromkeys(r.variant.base for r in found))
    return [
        Sheet(
            KEYS[base],
            f"{TITLES[base]}: {title}",
            (
                Column("choice", lambda r: r["choice"] or f"({r['base']})"),
                Column("value", "value"),
                Column("not", "base_value"),
                Column("µs a layer", lambda r: _number(r["us"]), right=True),
                Column("effect", lambda r: _signed(r["effect_us"]), right=True),
                Column("p10", lambda r: _signed(r["p10_us"]), right=True),
                Column("p90", lambda r: _signed(r["p90_us"]), right=True),
                Column("", _remark),
            ),
            [record(r, at[base]) for r in found if r.variant.base == base],
            note=note if base == bases[-1] else "",
        )
        for base in bases
    ]


def record(r: Result, at: Mapping[str, str]) -> dict[str, Any]:
    """A row of the table. Of the effect: its median, and how it varies from round to round. ``at``: the base's
    choices."""
    timing, effect = r.timing, r.effect
    return {
        "base": r.variant.base,
        "choice": r.variant.choice or None,
        "value": r.variant.value or None,
        "base_value": at.get(r.variant.choice),
        "us": None if timing is None else round(timing.median, 2),
        "effect_us": None if effect is None else round(effect.median, 2),
        "p10_us": None if effect is None else round(effect.p10, 2),
        "p90_us": None if effect is None else round(effect.p90, 2),
        "same_as": r.same or None,
        "refused": r.refused or None,
        "choices": dict(r.variant.choices),
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def _remark(row: Mapping[str, Any]) -> str:
    if row["refused"]:
        return f"refused: {row['refused']}"
    return f"same code as {row['same_as']}" if row["same_as"] else ""
