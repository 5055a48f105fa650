"""The command line: thin. It turns arguments into a request, and sheets into text or JSON.

Exit codes: 0 done, 1 megagen refused (message on stderr), 2 wrong usage, 70 a bug in megagen, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from megagen.cli.pipeline import ARCHS, MACHINE, Built, Checked, Request
from megagen.errors import DeviceError, MegagenError

if TYPE_CHECKING:
    from megagen.cli.sheets import Sheet
    from megagen.trace.spans import Trace

BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130
ENDINGS = (".trace", ".html", ".pftrace")  # of what a trace's files are called


class Only(StrEnum):
    fused = "fused"
    unfused = "unfused"


class Baseline(StrEnum):
    torch = "torch"
    all = "all"


class Size(StrEnum):
    tiny = "tiny"
    full = "full"


class Guarded(TyperGroup):
    """Every error that leaves a command becomes a message and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MegagenError as error:
            typer.echo(error.render(), err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("stopping…", err=True)
            _leave_threads()
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if hasattr(error, "exit_code"):  # typer's own usage errors
                raise
            if os.environ.get("MEGAGEN_TRACEBACK", "0") not in ("", "0"):
                import traceback

                traceback.print_exc()
            else:
                text = " ".join(str(error).split())
                typer.echo(f"internal error: {type(error).__name__}: {text}", err=True)
                typer.echo("  help: a bug in megagen; MEGAGEN_TRACEBACK=1 shows where", err=True)
            raise typer.Exit(BUG) from None


app = typer.Typer(
    cls=Guarded,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ScheduleFile = Annotated[Path, typer.Argument(metavar="SCHEDULE", help="The schedule: a Python file.")]
MachineName = Annotated[
    str, typer.Option("--machine", help="The GPU to place the work on: b200, gb300, h200, or a path to a .toml file.")
]
Tp = Annotated[int, typer.Option("--tp", help="Ranks of the tensor-parallel group: 1, 2, 4 or 8.")]
Tokens = Annotated[int, typer.Option("--tokens", help="The most tokens of one launch.")]
Choose = Annotated[list[str] | None, typer.Option("--choose", metavar="NAME=VALUE", help="Settle a choice(); repeats.")]
Options = Annotated[
    list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="A parameter of the schedule file; repeats.")
]
Unfused = Annotated[bool, typer.Option("--unfused", help="The same ops, a kernel each.")]
Context = Annotated[
    int | None,
    typer.Option("--context", min=0, help="Tokens in the caches before the launch's, for a layer that has caches."),
]
Tree = Annotated[bool, typer.Option("--tree", help="The launch's tokens are a random tree, not a chain.")]
Guessed = Annotated[
    float,
    typer.Option("--guessed", min=0, max=1, help="Share of the experts guessed by a schedule that are used again."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output and nothing else.")]


@app.callback(invoke_without_command=True)
def _about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """megagen: megakernels from a page of Python."""
    if version:
        from importlib import metadata

        try:
            _print(f"megagen {metadata.version('megagen')}")
        except metadata.PackageNotFoundError:
            raise MegagenError("megagen runs from a folder that is not installed: no version is known") from None
        raise typer.Exit


@app.command()
def build(
    ctx: typer.Context,
    schedule: Annotated[Path | None, typer.Argument(metavar="SCHEDULE", help="The schedule: a Python file.")] = None,
    machine: MachineName = MACHINE,
    tp: Tp = 8,
    tokens: Tokens = 16,
    choose: Choose = None,
    option: Options = None,
    unfused: Unfused = False,
    arch: Annotated[
        str | None, typer.Option("--arch", help=f"Architectures, separated by commas: {','.join(ARCHS)} if not told.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the text, Plan and cubins into this folder.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare generated/ with what schedules emit.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Bring generated/ up to date.")] = False,
    as_json: Json = False,
) -> None:
    """Check, lower, emit and compile a schedule, and say what came out."""
    if check or update:
        if check and update:
            raise typer.BadParameter("--check compares, --update writes: choose one")
        _alone(ctx, "--update" if update else "--check")
        return _generated([schedule] if schedule else [], update, as_json)
    if schedule is None:
        raise typer.BadParameter("a SCHEDULE is needed, or --check or --update")
    archs = list(dict.fromkeys(a.strip() for a in (arch or "").split(",") if a.strip()))
    if arch is not None and not archs:
        raise typer.BadParameter("--arch names no architecture")
    from megagen.cli import pipeline

    checked = _checked(_request(schedule, machine, tp, tokens, choose, unfused, option))
    built = _built(checked, archs or pipeline.archs_of(checked.plan))
    if out is not None:
        from megagen.cli.pipeline import export

        export(built, out)
    from megagen.cli import explain, report

    if as_json:
        return _print_json(explain.header(built.plan, built.options) | report.record(built))
    _print(explain.headline(built.plan, built.options) + "\n")
    return _show([report.kernels(built)])


@app.command("check")
def check_(
    schedule: ScheduleFile,
    machine: MachineName = MACHINE,
    tp: Tp = 8,
    tokens: Tokens = 16,
    choose: Choose = None,
    option: Options = None,
    unfused: Unfused = False,
    as_json: Json = False,
) -> None:
    """Prove roles, memory, barriers, ring order, waits without cycles and slot reuse. Compiles nothing."""
    from megagen.cli import explain, report

    checked = _checked(_request(schedule, machine, tp, tokens, choose, unfused, option))
    if as_json:
        return _print_json(explain.header(checked.plan, checked.options) | {"findings": report.findings(checked)})
    for finding in checked.findings:
        if finding.level != "warning":
            _print(finding.render())
    return _print(f"{explain.headline(checked.plan, checked.options)}: ok")


@app.command("explain")
def explain_(
    schedule: ScheduleFile,
    machine: MachineName = MACHINE,
    tp: Tp = 8,
    tokens: Tokens = 16,
    choose: Choose = None,
    option: Options = None,
    unfused: Unfused = False,
    as_json: Json = False,
) -> None:
    """Show roles, shared memory, syncs, ring, and each op's bytes, operations and floor. Compiles nothing."""
    from megagen.cli import explain

    checked = _checked(_request(schedule, machine, tp, tokens, choose, unfused, option))
    plan, options = checked.plan, checked.options
    sheets = explain.sheets(plan)
    if as_json:
        found: dict[str, Any] = explain.header(plan, options) | {"launch": plan.launch.model_dump(mode="json")}
        for sheet in sheets:
            found |= sheet.json()
        return _print_json(found)
    _print(explain.headline(plan, options) + "\n")
    return _show(sheets)


@app.command()
def run(
    schedule: ScheduleFile,
    machine: MachineName = MACHINE,
    tp: Tp = 8,
    tokens: Tokens = 16,
    choose: Choose = None,
    option: Options = None,
    unfused: Unfused = False,
    launch: Annotated[
        int | None, typer.Option("--launch", min=1, help="Tokens of the launch.  [default: --tokens]")
    ] = None,
    experts: Annotated[int | None, typer.Option("--experts", min=1, help="Force this many distinct experts.")] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Random inputs to judge together.")] = 1,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Weights from here, not random.")] = None,
    layer: Annotated[int, typer.Option("--layer", help="The checkpoint's layer.")] = 1,
    context: Context = None,
    tree: Tree = False,
    as_json: Json = False,
) -> None:
    """Launch on the GPU and compare the routing and every op's output with the reference.

    Without a GPU, a tiny layer is emulated on the CPU.
    """
    from megagen.cli import device, pipeline

    if checkpoint is not None and tp != 1:
        raise MegagenError(
            f"--checkpoint with --tp {tp}: one GPU holds one shard, and stand-ins repeat it", hint="use --tp 1"
        )
    request = _request(schedule, machine, tp, tokens, choose, unfused, option, checkpoint)
    if device.absent():
        what = "a tiny layer" if checkpoint is None else "the checkpoint's layer"
        typer.echo(f"no GPU here: emulating {what} on the CPU", err=True)
        plan = replace(request, tiny=True)
        return _emulated(
            plan, 1, range(seeds), launch or tokens, experts, layer, context=context, tree=tree, as_json=as_json
        )
    checked = _checked(request)
    step = pipeline.step(checked, launch or tokens, context, tree=tree, usual=device.CONTEXT)
    device.require()
    built = _built(checked, [checked.plan.machine.arch])
    with _working(f"running {built.plan.name}"):
        sheet = device.run(built, launch or tokens, experts, seeds, checkpoint, layer, step)
    return _judged(built, sheet, as_json)


@app.command()
def emulate(
    schedule: ScheduleFile,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=8, help="Live ranks, each with its own memory.")] = 1,
    size: Annotated[Size, typer.Option("--size", help="Least dimensions on four SMs, or the whole layer.")] = Size.tiny,
    machine: MachineName = MACHINE,
    tp: Annotated[
        int | None,
        typer.Option("--tp", help="Ranks of the group; those that do not live are stood in for.  [default: --ranks]"),
    ] = None,
    tokens: Tokens = 16,
    choose: Choose = None,
    option: Options = None,
    unfused: Unfused = False,
    launch: Annotated[
        int | None, typer.Option("--launch", min=1, help="Tokens of the launch.  [default: --tokens]")
    ] = None,
    launches: Annotated[int, typer.Option("--launches", min=1, help="Launches in a row, the last one judged.")] = 1,
    experts: Annotated[int | None, typer.Option("--experts", min=1, help="Force this many distinct experts.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first interleaving, and input.")] = 0,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many, from --seed on.")] = 1,
    race: Annotated[bool, typer.Option("--race", help="Report accesses that nothing orders.")] = False,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Weights from here, not random.")] = None,
    layer: Annotated[int, typer.Option("--layer", help="The checkpoint's layer.")] = 1,
    context: Context = None,
    tree: Tree = False,
    as_json: Json = False,
) -> None:
    """Run the kernel's own text on the CPU, find its faults, and compare it with the reference. Needs no GPU."""
    request = _request(schedule, machine, ranks if tp is None else tp, tokens, choose, unfused, option, checkpoint)
    chosen = range(seed, seed + seeds)
    return _emulated(
        replace(request, tiny=size is Size.tiny),
        ranks,
        chosen,
        launch or tokens,
        experts,
        layer,
        race=race,
        launches=launches,
        context=context,
        tree=tree,
        as_json=as_json,
    )


@app.command()
def bench(
    schedule: ScheduleFile,
    machine: MachineName = MACHINE,
    tp: Tp = 8,
    tokens: Tokens = 16,
    choose: Choose = None,
    option: Options = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Time only fused or unfused; with --ablate, a choice; repeats."),
    ] = None,
    baseline: Annotated[
        Baseline | None, typer.Option("--baseline", help="Time the same ops in kernels of torch and Triton as well.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option("--experts", min=1, help="Distinct experts of a launch.  [default: the plan's]")
    ] = None,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Distinct layers of a replay.")] = 8,
    context: Context = None,
    tree: Tree = False,
    whole: Annotated[
        bool, typer.Option("--step", help="Time a graph of the model's every layer instead, and the host's part.")
    ] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Time the schedule with each choice() changed alone instead.")
    ] = False,
    from_off: Annotated[
        bool, typer.Option("--from-off", help="With --ablate, also each choice alone on, from all off.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", metavar="NAME=VALUES", help="Time launches of several experts, context or tokens."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Replays that count.")] = 50,
    guessed: Guessed = 0.5,
    unbounded: Annotated[bool, typer.Option("--unbounded", help="Compile the bound of waits out.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Append the figures to docs/measurements/.")] = False,
    as_json: Json = False,
) -> None:
    """Time the fused kernel and the same ops as one kernel each, beside the bytes and the floor."""
    from megagen.cli import device, pipeline

    modes = [name for name, asked in (("--step", whole), ("--ablate", ablate), ("--sweep", sweep is not None)) if asked]
    if len(modes) > 1:
        raise typer.BadParameter(f"{' and '.join(modes)} time different things: choose one")
    if from_off and not ablate:
        raise typer.BadParameter("--from-off is about --ablate")
    chosen = [] if ablate else _kernels(only)
    if modes and Only.unfused in chosen:
        raise typer.BadParameter(f"{modes[0]} times the fused kernel: leave out --only unfused")
    if baseline is not None and modes:
        raise typer.BadParameter(f"{modes[0]} times the fused kernel: leave out --baseline")
    baselines = () if baseline is None else device.BASELINES if baseline is Baseline.all else (baseline.value,)
    request = _request(schedule, machine, tp, tokens, choose, False, option)
    more: dict[str, Any] = {
        "experts": experts, "layers": layers, "rounds": rounds, "context": context, "tree": tree,
        "bounded": not unbounded, "record": record, "as_json": as_json,
    }  # fmt: skip
    if ablate:
        return _ablated(request, only or [], from_off=from_off, **more)
    if sweep is not None:
        return _swept(request, sweep, **more)
    wanted = [Only.fused] if whole else chosen or list(Only)
    found = {o.value: _checked(replace(request, fused=o is Only.fused)) for o in wanted}
    one = next(iter(found.values()))
    _refuse_stamps(one, record)
    step = pipeline.step(one, one.graph.tokens, context, tree=tree, usual=device.CONTEXT)
    device.require()
    if baselines:
        from megagen.bench.baseline import refuse_unfit

        refuse_unfit(one.graph)
    built = {n: _built(c, [c.plan.machine.arch], bounded=not unbounded) for n, c in found.items()}
    command = _command()
    some = next(iter(built.values()))
    with _working(f"timing {' and '.join((*built, *baselines))}", device.steps(layers, rounds, 1 + whole)) as progress:
        how: dict[str, Any] = {"bounded": not unbounded, "step": step, "guessed": guessed}
        if whole:
            sheet = device.bench_step(some, experts, layers, rounds, command, record, progress, **how)
        else:
            sheet = device.bench(built, experts, layers, rounds, command, record, progress, **how, baselines=baselines)
    return _timed(some, [sheet], as_json)


def _kernels(only: Sequence[str] | None) -> list[Only]:
    """Which of the fused and the unfused kernel ``--only`` asks for: none of them said, both."""
    found = list(dict.fromkeys(only or ()))
    if len(found) > 1 or any(name not in list(Only) for name in found):
        asked = ", ".join(repr(name) for name in found)
        raise typer.BadParameter(f"--only takes fused or unfused (with --ablate, choices), not {asked}")
    return [Only(name) for name in found]


def _refuse_stamps(checked: Checked, record: bool) -> None:
    if checked.plan.stamps is not None:
        if record:
            raise MegagenError("the schedule asks for stamps, which take time: no figures are recorded of that")
        typer.echo("warning: the schedule asks for stamps, which take time", err=True)


def _ablated(
    request: Request,
    only: Sequence[str],
    *,
    from_off: bool,
    experts: int | None,
    layers: int,
    rounds: int,
    context: int | None,
    tree: bool,
    bounded: bool,
    record: bool,
    as_json: bool,
) -> None:
    """Build and time a schedule's variants, print what each choice is worth."""
    from megagen.cli import ablating, device, pipeline, report
    from megagen.settings import Settings

    base = _checked(request)
    _refuse_stamps(base, record)
    wanted = ablating.variants(request, base, only, from_off=from_off)
    step = pipeline.step(base, base.graph.tokens, context, tree=tree, usual=device.CONTEXT)
    device.refuse_routes(base.plan, experts or base.plan.nominal_experts, base.graph.tokens)
    device.require()
    settings = Settings.from_env()
    with _working(f"compiling {len(wanted)} variants of {base.plan.name}", len(wanted)) as progress:
        builds, refused = ablating.build(request, wanted, settings, bounded=bounded, progress=progress)
    for name, built in builds.items():
        for text in report.warnings(built):
            typer.echo(f"warning: {name}: {text}", err=True)
    with _working(f"timing {len(builds)} variants", ablating.steps(len(builds), layers, rounds)) as progress:
        sheets = ablating.bench(
            wanted, builds, refused, experts, layers, rounds, _command(), record, progress, bounded=bounded, step=step
        )
    return _timed(base, sheets, as_json)


def _swept(
    request: Request,
    sweep: str,
    *,
    experts: int | None,
    layers: int,
    rounds: int,
    context: int | None,
    tree: bool,
    bounded: bool,
    record: bool,
    as_json: bool,
) -> None:
    """Time one kernel at several points, print them and the line through them."""
    from megagen.bench.sweep import Sweep
    from megagen.cli import device, sweeping

    asked = Sweep.parse(sweep)
    for name, value in (("experts", experts), ("context", context)):
        if asked.name == name and value is not None:
            raise typer.BadParameter(f"--sweep {name} says what --{name} does: leave one out")
    checked = _checked(request)
    _refuse_stamps(checked, record)
    points = sweeping.points(checked, asked, experts, context, tree=tree)
    device.require()
    built = _built(checked, [checked.plan.machine.arch], bounded=bounded)
    with _working(f"timing {built.plan.name}", sweeping.steps(len(points), layers, rounds)) as progress:
        sheet = sweeping.bench(built, asked, points, layers, rounds, _command(), record, progress, bounded=bounded)
    return _timed(built, [sheet], as_json)


def _timed(checked: Checked, sheets: Sequence[Sheet], as_json: bool) -> None:
    """Print figures."""
    from megagen.cli import explain

    if as_json:
        found = explain.header(checked.plan, checked.options)
        joined: dict[str, Any] = {k: v for k, v in found.items() if k != "fused"}
        for sheet in sheets:
            joined |= sheet.json()
        return _print_json(joined)
    _print(explain.headline(checked.plan, checked.options) + "\n")
    return _show(sheets)


@app.command()
def trace(
    schedule: ScheduleFile,
    machine: MachineName = MACHINE,
    tp: Tp = 8,
    tokens: Tokens = 16,
    choose: Choose = None,
    option: Options = None,
    unfused: Unfused = False,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=8, help="Live ranks, each on a GPU of its own.")] = 1,
    experts: Annotated[
        int | None, typer.Option("--experts", min=1, help="Distinct experts of a launch.  [default: the plan's]")
    ] = None,
    context: Context = None,
    tree: Tree = False,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Distinct layers of a replay.")] = 8,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Replays without and with stamps, to compare.")] = 30,
    replays: Annotated[int, typer.Option("--replays", min=1, help="Replays to record.")] = 5,
    guessed: Guessed = 0.5,
    emulate: Annotated[bool, typer.Option("--emulate", help="Record a tiny layer in the emulator.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The emulator's interleaving.")] = 0,
    name: Annotated[str | None, typer.Option("--name", help="What to call the run.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Files to write, less their endings.  [default: the plan's name]")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Append both times to docs/measurements/.")] = False,
    as_json: Json = False,
) -> None:
    """Record what every warp does and when, and show it: a page, a Perfetto trace, and where the time goes.

    Without a GPU, a tiny layer is emulated on the CPU.
    """
    from megagen.cli import device, emulator, pipeline, tracing
    from megagen.settings import Settings

    request = _request(schedule, machine, tp, tokens, choose, unfused, option)
    if tp % ranks:
        raise MegagenError(f"{ranks} live ranks in a group of {tp}", hint="a divisor of --tp")
    settings = Settings.from_env()
    if not emulate and device.absent():
        typer.echo("no GPU here: emulating a tiny layer on the CPU", err=True)
        emulate = True
    stamped = _checked(replace(request, stamps=True, tiny=emulate))
    base = _base(out, stamped.plan.name if stamped.plan.fused else f"{stamped.plan.name}.unfused")
    step = pipeline.step(stamped, tokens, context, tree=tree, usual=emulator.CONTEXT if emulate else device.CONTEXT)
    label = name or " ".join([stamped.plan.name, *(["unfused"] if unfused else []), *(choose or ()), *(option or ())])
    more: dict[str, Any] = {"name": label, "experts": experts, "step": step, "command": _command()}
    if emulate:
        if record:
            raise typer.BadParameter("--record keeps times of a GPU, and this is emulated")
        with _working(f"compiling {stamped.plan.name} for the CPU"):
            library = pipeline.emulated(stamped, settings)
        with _working(f"emulating {stamped.plan.name}") as progress:
            found = tracing.emulate(
                stamped, library, ranks=ranks, replays=replays, seed=seed, progress=progress, **more
            )
    else:
        device.require(ranks)
        target = device.measurements(stamped.plan.name) if record else None
        bare = replace(stamped, plan=stamped.plan.model_copy(update={"stamps": None}))
        plain, built = (_built(c, [c.plan.machine.arch]) for c in (bare, stamped))
        with _working(f"tracing {built.plan.name}", tracing.steps(layers, rounds, replays)) as progress:
            found = tracing.record(
                plain, built, settings, gpus=ranks, layers=layers, rounds=rounds, replays=replays,
                target=target, progress=progress, guessed=guessed, **more,
            )  # fmt: skip
    kept = _suffixed(base, ".trace")
    found.save(kept)
    _shown([found], base, as_json, kept)


@app.command()
def decode(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="The checkpoint: a Hugging Face folder.")],
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="What to continue.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option("--prompt-ids", metavar="IDS", help="The same as token ids, separated by commas.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="The same from a file; - is standard input.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's turn: apply the chat template.")] = False,
    tp: Annotated[int, typer.Option("--tp", min=1, max=8, help="GPUs, a rank each.")] = 1,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", min=1, help="The most tokens to make.  [default: 256; with --context, what fits]"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Tokens that the caches hold.  [default: as many as are needed]"),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0: the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Of the so many likeliest; 0: of all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Of the likeliest that are so probable together.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn.")] = 0,
    emulate: Annotated[bool, typer.Option("--emulate", help="In the emulator, on the CPU. Very slow.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Times, on standard error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Nothing on standard error but errors.")] = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a checkpoint's model, token by token."""
    from megagen.cli import decoding
    from megagen.serve.engine import Engine, foresee
    from megagen.serve.generate import Stop
    from megagen.serve.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    with nullcontext() if quiet or str(prompt_file) == "-" else _working(f"reading {model}"):
        given = decoding.given(model, prompt, prompt_ids, prompt_file, chat=chat)
        positions, wanted = decoding.sizes(len(given.ids), max_new_tokens, context)
        needs = None if emulate else foresee(model, tp=tp, positions=positions)
    if needs and not quiet:
        decoding.say_memory(needs)
    with nullcontext(_ignored) if quiet else _working(f"loading {model}") as progress:
        engine = Engine.from_pretrained(
            model, tp=tp, max_positions=positions, emulate=emulate, progress=progress, needs=needs, text=given.text
        )
    with engine:
        run = engine.generate(given.ids, max_new_tokens=wanted, sampling=sampling)
        for token in run:
            if engine.rank == 0 and not as_json:
                _continue(token.text if given.text else "" if token.stop is Stop.TOKEN else f"{token.id} ")
    if engine.rank != 0:
        return
    if as_json:
        _print_json(decoding.record(run))
    else:
        _print("")
    if run.stop is Stop.FULL and not quiet:
        typer.echo(f"the caches are full: they hold {positions:,} tokens (--context)", err=True)
    if stats:
        decoding.say_times(run)


@app.command()
def step(
    tp: Tp = 8,
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=8, help="Live ranks, a GPU each.")] = 1,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=1, max=16, help="Of a step; repeats.  [default: 1 and 16]")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option("--context", min=0, help="Numbers in the caches; repeats.  [default: 4096]")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Replays that count.")] = 50,
    endure: Annotated[
        int, typer.Option("--endure", min=0, help="Run the first of them so often, and compare bits.")
    ] = 0,
    unbounded: Annotated[bool, typer.Option("--unbounded", help="Compile the bound of waits out.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Append the figures to docs/measurements/.")] = False,
    as_json: Json = False,
) -> None:
    """Time a whole decoding step of Muse Spark Open on random weights, beside its bytes and the floor."""
    from megagen.cli import device
    from megagen.cli.stepping import time_steps
    from megagen.settings import Settings

    if tp % gpus:
        raise typer.BadParameter(f"{gpus} GPUs do not divide {tp} ranks")
    device.require(gpus)
    works = (tokens or [1, 16], context or [device.CONTEXT])
    with _working("timing a step", None) as progress:
        sheet = time_steps(
            tp=tp,
            gpus=gpus,
            tokens=works[0],
            contexts=works[1],
            rounds=rounds,
            endure=endure,
            bounded=not unbounded,
            record=record,
            command=_command(),
            settings=Settings.from_env(),
            progress=progress,
        )
    if as_json:
        return _print_json(sheet.json())
    return _show([sheet])


@app.command("show")
def show_(
    recorded: Annotated[Path, typer.Argument(metavar="TRACE", help="A file that `megagen trace` wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a page and a Perfetto trace: their name less its ending.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a recorded trace again; with --out, write its page and Perfetto trace."""
    from megagen.trace.spans import Trace

    base = None if out is None else _base(out, recorded.stem)
    _shown([Trace.load(recorded)], base, as_json)


@app.command()
def compare(
    one: Annotated[Path, typer.Argument(metavar="A", help="A file that `megagen trace` wrote.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write a page with both: its name less its ending.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two traces op by op: when each begins and ends, what the critical path spends on it."""
    from megagen.trace.spans import Trace

    base = None if out is None else _base(out, f"{one.stem}-{other.stem}")
    traces = [Trace.load(one), Trace.load(other)]
    if traces[0].facts.name == traces[1].facts.name:  # before and after an edit
        named = zip(traces, (one, other), strict=True)
        traces = [replace(t, facts=t.facts.model_copy(update={"name": path.stem})) for t, path in named]
    _shown(traces, base, as_json)


def _shown(traces: Sequence[Trace], base: Path | None, as_json: bool, *kept: Path) -> None:
    """Write a page of one trace or two (of one, a Perfetto trace too), and print what they say and where it is.

    ``kept``: what has been written already.
    """
    from megagen.cli import traces as sheets
    from megagen.trace import compare, page, view
    from megagen.trace import perfetto as tracks
    from megagen.trace.model import Page

    with _working("reading the trace"):
        runs = tuple(view.run(t) for t in traces)
        written = [*kept]
        if base is not None:
            page.write(Page(title=" and ".join(r.name for r in runs), runs=runs), _suffixed(base, ".html"))
            written.append(_suffixed(base, ".html"))
            if len(traces) == 1:
                tracks.write(traces[0], _suffixed(base, ".pftrace"))
                written.append(_suffixed(base, ".pftrace"))
    found = sheets.sheets(runs[0]) if len(runs) == 1 else sheets.comparison(compare.compare(*runs), runs)
    if as_json:
        joined: dict[str, Any] = {}
        for sheet in found:
            joined |= sheet.json()
        _print_json(joined | {"files": [str(p) for p in written]})
    else:
        _show(found)
        for path in written:
            _print(f"wrote {path}")


def _base(out: Path | None, usual: str) -> Path:
    """What the names of files begin with: ``out``, or ``usual`` in it if it is a folder. Raises MegagenError, before
    anything runs, where nothing can be written."""
    base = Path(usual) if out is None else out / usual if out.is_dir() else out
    if base.suffix in ENDINGS:
        base = base.with_suffix("")
    folder = base.parent
    if not folder.is_dir():
        raise MegagenError(f"--out {out}: there is no folder {folder}", hint=f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK):
        raise MegagenError(f"cannot write {base}.*: the folder {folder.absolute()} is not writable")
    return base


def _suffixed(base: Path, ending: str) -> Path:
    return base.with_name(base.name + ending)


def _command() -> str:
    return shlex.join(["megagen", *sys.argv[1:]])


@app.command()
def probe(
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.toml", help="Write a machine description.")] = None,
    only: Annotated[str | None, typer.Option("--only", metavar="CASES", help="Cases, separated by commas.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer runs of each.")] = False,
    gpu: Annotated[int, typer.Option("--device", min=0, help="Which GPU.")] = 0,
    record: Annotated[bool, typer.Option("--record", help="Append the figures to docs/measurements/.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this GPU: what decides a schedule, as a table and as a file for --machine."""
    from megagen.cli import probing
    from megagen.probe.cases import chosen
    from megagen.probe.run import steps

    cases = chosen(only)
    if listing:
        return _sheet(probing.listing(cases), as_json)
    target = probing.targets(out, record)
    with _working("probing", steps(cases)) as progress:
        report = probing.run(cases, gpu, quick, progress)
    if out is not None:
        probing.describe(report, out)
    if target is not None:
        probing.record(report, target, f"megagen {' '.join(sys.argv[1:])}")
    _sheet(probing.sheet(report, out=out, recorded=target), as_json)
    if report.failed:
        _tell(report.failed)
        raise DeviceError(f"failed: {', '.join(o.case.name for o in report.failed)}")
    return None


def _sheet(sheet: Sheet, as_json: bool) -> None:
    return _print_json(sheet.json()) if as_json else _show([sheet])


def _tell(outcomes: Sequence[Any]) -> None:
    """Tracebacks of what cases raised, if they are wanted."""
    if os.environ.get("MEGAGEN_TRACEBACK", "0") not in ("", "0"):
        import traceback

        for outcome in outcomes:
            traceback.print_exception(outcome.error)


def _emulated(
    request: Request,
    ranks: int,
    seeds: range,
    tokens: int,
    experts: int | None,
    layer: int,
    *,
    race: bool = False,
    launches: int = 1,
    context: int | None,
    tree: bool,
    as_json: bool,
) -> None:
    """Build for the CPU, run, judge, print."""
    from megagen.cli import emulator, pipeline
    from megagen.settings import Settings

    if request.tp % ranks:
        raise MegagenError(f"{ranks} live ranks in a group of {request.tp}", hint="a divisor of --tp")
    checked, settings = _checked(request), Settings.from_env()
    step = pipeline.step(checked, tokens, context, tree=tree, seed=seeds[0], usual=emulator.CONTEXT)
    with _working(f"compiling {checked.plan.name} for the CPU"):
        library = pipeline.emulated(checked, settings)
    with _working(f"emulating {checked.plan.name}") as progress:
        sheet = emulator.run(
            checked, library, ranks, seeds, tokens, experts, request.checkpoint, layer, race, launches, progress, step
        )
    return _judged(checked, sheet, as_json)


def _judged(checked: Checked, sheet: Sheet, as_json: bool) -> None:
    """Print the checks of a launch. Raises DeviceError for those that fail."""
    from megagen.cli import explain

    if as_json:
        _print_json(explain.header(checked.plan, checked.options) | sheet.json())
    else:
        _print(explain.headline(checked.plan, checked.options) + "\n")
        _show([sheet])
    if failed := [row["check"] for row in sheet.rows if not row["ok"]]:
        raise DeviceError(f"outside the bound: {', '.join(failed)}")


def _request(
    schedule: Path,
    machine: str,
    tp: int,
    tokens: int,
    choose: Sequence[str] | None,
    unfused: bool,
    option: Sequence[str] | None,
    checkpoint: Path | None = None,
) -> Request:
    choices, options = _pairs("--choose", choose), _pairs("--option", option)
    return Request(schedule, machine, tp, tokens, choices, not unfused, options, checkpoint)


def _pairs(flag: str, given: Sequence[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in given or ():
        name, equals, value = item.partition("=")
        if not (name and equals and value):
            raise typer.BadParameter(f"{flag} takes NAME=VALUE, not {item!r}")
        if found.setdefault(name, value) != value:
            raise typer.BadParameter(f"{flag} {name} is given twice")
    return found


def _checked(request: Request) -> Checked:
    from megagen.cli import pipeline

    checked = pipeline.check(request)
    for finding in checked.findings:
        if finding.level == "warning":
            typer.echo(finding.render(), err=True)
    return checked


def _built(checked: Checked, archs: Sequence[str], *, bounded: bool = True) -> Built:
    from megagen.cli import pipeline, report
    from megagen.settings import Settings

    settings = Settings.from_env()
    with _working(f"compiling {checked.plan.name} for {', '.join(archs)}"):
        built = pipeline.build(checked, archs, settings, bounded=bounded)
    for text in report.warnings(built):
        typer.echo(f"warning: {text}", err=True)
    return built


def _alone(ctx: typer.Context, mode: str) -> None:
    """``build --check`` and ``--update`` are about what shipped schedules emit by default: no option changes it."""
    ignored = [
        p.opts[0]
        for p in ctx.command.params
        if p.name not in ("schedule", "check", "update", "as_json")
        and p.name is not None
        and getattr(ctx.get_parameter_source(p.name), "name", "DEFAULT") != "DEFAULT"
    ]
    if ignored:
        raise typer.BadParameter(f"{mode} is about default options: leave out {', '.join(ignored)}")


def _generated(schedules: Sequence[Path], write: bool, as_json: bool) -> None:
    from megagen import resources
    from megagen.cli import pipeline

    for schedule in schedules:
        if schedule.resolve().parent != resources.schedules().resolve():
            raise typer.BadParameter(
                f"generated/ holds what the schedules of {resources.schedules()} emit, and {schedule} is none of them; "
                "`megagen build --out` writes the text of your own"
            )
    found = pipeline.drift(schedules)
    if write:
        pipeline.update(found)
    if as_json:
        _print_json({"written" if write else "differ": [d.path.name for d in found]})
    elif write:
        for d in found:
            _print(f"{'removed' if d.text is None else 'wrote'} {d.path}")
    elif not found:
        _print("generated/ is up to date")
    if found and not write:
        for d in found:
            typer.echo(_summary(d), err=True)
        raise MegagenError("generated/ is not what the schedules emit", hint="megagen build --update")


def _summary(drift: Any, lines: int = 20) -> str:
    """The first lines of a difference."""
    from megagen.cli.sheets import counted

    if drift.text is None:
        return f"{drift.path.name}: no schedule makes it"
    body = [d for d in drift.diff if d[:1] in "+-@"]
    added, removed = (sum(d[0] == sign for d in body) for sign in "+-")
    more = [f"  ... {len(body) - lines} more lines"] if len(body) > lines else []
    return "\n".join([f"{drift.path.name}: {counted(added, 'line')} added, {removed} removed", *body[:lines], *more])


def _show(sheets: Sequence[Sheet]) -> None:
    from megagen.cli.sheets import show

    with _stdout():
        show(sheets)


def _print_json(value: Mapping[str, Any]) -> None:
    _print(json.dumps(value, indent=1))


def _print(text: str) -> None:
    with _stdout():
        typer.echo(text)


def _ignored(*told: object) -> None:
    """Progress that nobody wants to see."""


def _continue(text: str) -> None:
    with _stdout():
        typer.echo(text, nl=False)


@contextmanager
def _stdout() -> Iterator[None]:
    """A full disk behind standard output is no bug. A closed pipe is nobody's trouble: typer ends silently."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError):  # what is buffered would fail again, when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise MegagenError(f"cannot write to standard output: {error.strerror or error}") from None


def _leave_threads() -> None:
    """End the process here if threads that cannot be stopped (a compiler's, abandoned by now) would keep it alive."""
    if any(t is not threading.current_thread() and not t.daemon for t in threading.enumerate()):
        os._exit(INTERRUPTED)


@contextmanager
def _working(text: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar with the time on a terminal's standard error, gone when the work is done.

    What it gives is to be called once for each of ``total`` steps, without a total the bar only moves; or with what is
    being done, how much of it, and of how much.
    """
    if not sys.stderr.isatty():
        yield _ignored
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=total)

        def told(what: str | None = None, done: float = 0.0, of: float | None = None) -> None:
            if what is None:
                progress.advance(task)
            else:
                progress.update(task, description=what, completed=done, total=of)

        yield told
