"""Load, lower, check, emit, compile: the sequence behind every command. Knows nothing of terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megagen import files
from megagen.errors import MegagenError

if TYPE_CHECKING:
    from megagen.check import Finding
    from megagen.compile import Artifact
    from megagen.dsl import Schedule
    from megagen.ir.graph import Graph
    from megagen.ir.plan import Machine, Plan
    from megagen.runtime.step import Step
    from megagen.settings import Settings

MACHINE = "h200"
TINY_SMS = 4  # clusters of 1, 2 and 4
ARCHS = ("sm_90a", "sm_100a", "sm_103a")


@dataclass(frozen=True)
class Request:
    """Which Plan is wanted."""

    schedule: Path
    machine: str = MACHINE
    tp: int = 8
    tokens: int = 16
    choices: Mapping[str, str] = field(default_factory=dict)
    fused: bool = True
    options: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Path | None = None  # whose dimensions and expert format the graph takes
    stamps: bool = False  # even where the schedule asks for none
    tiny: bool = False  # least dimensions (or the checkpoint's) on a few SMs of the machine, to emulate


@dataclass(frozen=True)
class Checked:
    """A Plan that the checker let through, with its warnings and the graph that it computes.

    ``options``: what was asked of the schedule's function, which the Plan does not say. ``offered``: the schedule's
    choices in the order in which it asks for them, and the values that each has.
    """

    graph: Graph
    plan: Plan
    findings: tuple[Finding, ...]
    options: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    offered: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class Built(Checked):
    """A checked Plan with its CUDA text and one compiled artifact an architecture."""

    source: str
    artifacts: Mapping[str, Artifact]


def check(request: Request) -> Checked:
    """The request's Plan. Raises MegagenError at the user's line if it is wrong or cannot be proved safe."""
    from megagen.check import check as prove
    from megagen.dsl.schedule import STAMP_RECORDS
    from megagen.lower import lower

    schedule = _loaded(request)
    if request.stamps and schedule.stamped is None:
        schedule.stamped = (STAMP_RECORDS, None)
    plan = lower(schedule, fused=request.fused)
    asked = dict(request.options)
    if request.checkpoint is not None:
        asked["checkpoint"] = str(request.checkpoint)
    return Checked(schedule.graph, plan, prove(plan), options=asked, offered=_offered(schedule))


def offered(request: Request) -> dict[str, tuple[str, ...]]:
    """What :class:`Checked` says of that name, of a schedule that may not pass."""
    return _offered(_loaded(request))


def _offered(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    return {name: values for name, (_, values) in schedule.offered.items()}


def _loaded(request: Request) -> Schedule:
    from megagen import machines
    from megagen.dsl import load

    machine: str | Machine = request.machine
    if request.tiny:
        machine = machines.cut(machines.load(request.machine), TINY_SMS)
    return load(
        request.schedule,
        machine=machine,
        tp=request.tp,
        tokens=request.tokens,
        choices=dict(request.choices),
        options={**_sized(request), **_described(request.checkpoint), **request.options},
    )


def _sized(request: Request) -> dict[str, object]:
    """The schedule's options that make its layer tiny."""
    if not request.tiny or request.checkpoint is not None:
        return {}
    from megagen.models.muse_spark import tiny

    return {"config": tiny(request.tp, request.options.get("split", "nn"))}


def _described(checkpoint: Path | None) -> dict[str, object]:
    """The schedule's options that a checkpoint settles."""
    if checkpoint is None:
        return {}
    from megagen.models.muse_spark import read_config

    quantised = (checkpoint / "hf_quant_config.json").is_file()
    return {"config": read_config(checkpoint), "experts": "nvfp4" if quantised else "bf16"}


def step(
    checked: Checked, tokens: int, context: int | None, *, tree: bool = False, seed: int = 0, usual: int = 0
) -> Step | None:
    """What a launch of a graph with caches works on: a chain, or with ``tree`` a random one of ``seed``.

    ``usual``: the context by default, or as much of it as the launch has positions for. None for a graph
    without caches; raises MegagenError if something was asked of one.
    """
    from megagen.runtime import params
    from megagen.runtime.step import Step

    if not checked.graph.caches:
        if context is not None or tree:
            what = "--tree" if context is None else "--context"
            raise MegagenError(
                f"{what}: launches of {checked.graph.name} keep no caches",
                hint="leave it out: their tokens have nothing to do with each other",
            )
        return None
    positions = params.positions(checked.plan)
    if context is None:
        context = usual if positions is None else max(0, min(usual, positions - tokens))
    elif positions is not None and context + tokens > positions:
        raise MegagenError(
            f"--context {context} with {tokens} tokens: the launch has room for {positions} positions",
            hint="--option positions=N makes more room",
        )
    return Step.random_tree(tokens, context, seed) if tree else Step.chain(tokens, context)


def placed(step: Step | None) -> str:
    """Where a step's tokens stand, to follow their number in a title."""
    if step is None:
        return ""
    return f"{'' if step.is_chain else ' in a tree'} after {step.context}"


def emit(plan: Plan) -> str:
    """The Plan's CUDA text."""
    from megagen.emit import emit as text

    return text(plan)


def archs_of(plan: Plan) -> tuple[str, ...]:
    """What a Plan is compiled for unless told: all of ARCHS, or its machine's own where it uses what others lack."""
    own = any(op.constants.get("kWarpgroups") for op in plan.ops)
    return (plan.machine.arch,) if own else ARCHS


def build(checked: Checked, archs: Sequence[str], settings: Settings, *, bounded: bool = True) -> Built:
    """Compile a checked Plan for each of ``archs``; a warm cache makes this a look-up."""
    from megagen.compile import compile_source
    from megagen.emit import UNBOUNDED_WAITS

    source = emit(checked.plan)
    kernels = [k.name for k in checked.plan.kernels]
    defines = {} if bounded else {UNBOUNDED_WAITS: "1"}
    artifacts = compile_source(source, kernels=kernels, archs=archs, settings=settings, defines=defines)
    return Built(
        checked.graph,
        checked.plan,
        checked.findings,
        source,
        artifacts,
        options=checked.options,
        offered=checked.offered,
    )


def emulated(checked: Checked, settings: Settings) -> Path:
    """The library in which a checked Plan runs on the CPU; a warm cache makes this a look-up."""
    from megagen.emulate import compile_library

    plan = checked.plan
    return compile_library(emit(plan), kernels=[k.name for k in plan.kernels], settings=settings)


def export(built: Built, folder: Path) -> None:
    """Write what was built into ``folder``: <name>.cu, <name>.plan.json and <name>.<arch>.cubin, and nothing older.

    The name is the plan's, or <plan>.unfused.
    """
    name = built.plan.name if built.plan.fused else f"{built.plan.name}.unfused"
    cubins = {folder / f"{name}.{arch}.cubin": artifact for arch, artifact in built.artifacts.items()}
    files.write(folder / f"{name}.cu", built.source.encode(), folders=True)
    files.write(folder / f"{name}.plan.json", built.plan.to_json().encode(), folders=True)
    for path, artifact in cubins.items():
        files.write(path, artifact.path.read_bytes(), folders=True)
    for stale in set(folder.glob(f"{name}.sm_*.cubin")) - set(cubins):
        try:
            stale.unlink()
        except OSError as error:
            raise MegagenError(f"cannot remove {stale} of an earlier build: {error.strerror or error}") from error


@dataclass(frozen=True)
class Drift:
    """A file of ``generated/`` that is not what its schedule emits: ``text``, or None if no schedule makes it.

    ``diff``: the hunks of a unified difference.
    """

    path: Path
    text: str | None
    diff: tuple[str, ...]


def generated() -> Path:
    """The folder of the shipped schedules' committed text. Raises MegagenError outside a source checkout."""
    from megagen import resources

    folder = resources.schedules().parent / "generated"
    if not folder.is_dir():
        raise MegagenError("there is no generated/ folder here", hint="run this in a source checkout of megagen")
    return folder


def drift(schedules: Sequence[Path] = ()) -> list[Drift]:
    """Compare ``generated/`` with what the schedules (default: all shipped ones) emit now with default options."""
    import difflib

    from megagen import resources

    folder = generated()
    shipped = sorted(resources.schedules().glob("[!_]*.py"))
    chosen = list(schedules) or shipped
    found = []
    for schedule in chosen:
        path = folder / f"{schedule.stem}.cu"
        text = emit(check(Request(schedule)).plan)
        old = path.read_text() if path.exists() else ""
        if text != old:
            diff = difflib.unified_diff(old.splitlines(), text.splitlines(), n=1, lineterm="")
            found.append(Drift(path, text, tuple(diff)[2:]))  # less the two lines of file names
    if not schedules:
        known = {s.stem for s in shipped}
        found += [Drift(p, None, ()) for p in sorted(folder.glob("*.cu")) if p.stem not in known]
    return found


def update(drifts: Sequence[Drift]) -> None:
    """Bring ``generated/`` up to date."""
    for d in drifts:
        if d.text is None:
            d.path.unlink()
        else:
            files.write(d.path, d.text.encode(), folders=True)
