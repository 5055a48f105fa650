"""Runs a schedule file and hands back its Schedule."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from megagen import machines, resources
from megagen.dsl.schedule import Schedule, keyword
from megagen.errors import Loc, MegagenError, ScheduleError, characters, did_you_mean
from megagen.ir.plan import Machine

ONE_AT_A_TIME = RLock()  # where modules are looked for and where prints go is the whole process's


def load(
    path: str | Path,
    *,
    machine: str | Machine = "h200",
    tp: int = 8,
    tokens: int = 16,
    choices: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """Call ``schedule(machine, tp=..., tokens=..., choices=..., **options)`` of the file at ``path``.

    ``machine`` is a name, a path or a description. ``choices`` settle how the work is placed; ``options`` are the
    file's own parameters and may change what is computed: text becomes the int, float or bool that the parameter is. A
    bare name, or one below ``schedules/``, that does not exist here is looked up among the shipped schedules. While the
    file runs, its folder is importable and what it prints goes to stderr. Raises ScheduleError at the user's line for
    anything wrong in the file, and for a request that the schedule cannot honour or ignores.
    """
    file = _find(Path(path))
    description = machines.load(machine) if isinstance(machine, str) else machine
    try:
        source = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot read {file}: {error}") from error
    linecache.checkcache(str(file))
    module = ModuleType(f"megagen_schedule_{file.stem}")
    module.__file__ = str(file)
    try:
        code = compile(source, str(file), "exec")
    except SyntaxError as error:
        loc = Loc(str(file), error.lineno or 1, error.offset or 1, error.text or "")
        raise ScheduleError(f"syntax error: {error.msg}", loc=loc) from None
    except ValueError as error:  # a null byte
        raise ScheduleError(f"cannot read {file}: {error}") from None
    with _running(module, file):
        exec(code, module.__dict__)
    function = getattr(module, "schedule", None)
    if not callable(function):
        raise ScheduleError(f"{file} defines no function schedule(machine, tp, tokens, choices)")
    with _running(module, file):
        given = _options(function, file, options or {})
        schedule = function(description, tp=tp, tokens=tokens, choices=dict(choices or {}), **given)
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"schedule() of {file} returned {type(schedule).__name__}, not a Schedule")
    _refuse_ignored(schedule, file, description, tp, tokens, choices or {})
    return schedule


@contextmanager
def _running(module: ModuleType, file: Path) -> Iterator[None]:
    """The user's code runs: neighbours can be imported, prints go to stderr, errors are ScheduleErrors at its line."""
    with ONE_AT_A_TIME:
        folder, path, modules = file.parent.resolve(), list(sys.path), set(sys.modules)
        sys.modules[module.__name__] = module  # dataclasses look their module up while they are made
        sys.path.insert(0, str(folder))
        try:
            with redirect_stdout(sys.stderr):
                yield
        except MegagenError:
            raise
        except (Exception, SystemExit) as error:
            raise _user_error(error, file) from error
        finally:
            sys.path[:] = path
            sys.modules.pop(module.__name__, None)
            for name in set(sys.modules) - modules:  # another folder's schedule may have a neighbour of that name
                place = getattr(sys.modules[name], "__file__", None)
                if place and Path(place).parent == folder:
                    del sys.modules[name]


def _refuse_ignored(
    schedule: Schedule, file: Path, machine: Machine, tp: int, tokens: int, choices: Mapping[str, str]
) -> None:
    """What was asked for and did not reach the schedule would else be ignored in silence."""
    offered = sorted(schedule.offered)
    for name, value in choices.items():
        if name not in offered:
            hint = did_you_mean(name, offered) if offered else "it offers none"
            raise ScheduleError(f"{file.name} offers no choice {name!r}", hint=hint)
        if schedule.choices.get(name) != value:
            raise ScheduleError(
                f"{file.name} ignores choice {name}={value}",
                loc=schedule.loc,
                hint="pass the choices on: Schedule(..., choices=choices)",
            )
    graph = schedule.graph
    for what, asked, built in (("tp", tp, graph.tp), ("tokens", tokens, graph.tokens)):
        if asked != built:
            raise ScheduleError(
                f"{file.name} ignores {what}={asked}: its graph has {what}={built}",
                loc=schedule.loc,
                hint=f"pass it on to the graph: {what}={what}",
            )
    if schedule.machine != machine:
        raise ScheduleError(
            f"{file.name} ignores machine {machine.name}: it schedules for {schedule.machine.name}"
            + (" with other figures" if schedule.machine.name == machine.name else ""),
            loc=schedule.loc,
            hint="pass on the machine that schedule() is given",
        )


def _options(function: Callable[..., object], file: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that ``function`` takes, text converted to what the parameter is."""
    parameters = _signature(function).parameters
    known = {
        n: p
        for n, p in parameters.items()
        if n not in ("machine", "tp", "tokens", "choices") and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = dict(options)
    for name, value in options.items():
        if name not in known and not anything:
            hint = did_you_mean(name, list(known)) if known else "it takes none"
            raise ScheduleError(f"{file.name} takes no option {name!r}", hint=hint)
        if name in known and isinstance(value, str):
            given[name] = _converted(known[name], value, file)
    return given


def _signature(function: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # an annotation that is only good for a type checker
        return inspect.signature(function)


def _converted(parameter: inspect.Parameter, text: str, file: Path) -> Any:
    """``text`` as the parameter's annotation, else its default, says. Literals, Any and no hint at all stay text."""
    annotation, default = parameter.annotation, parameter.default
    if annotation is parameter.empty:
        annotation = str if default in (None, parameter.empty) else type(default)
    shown = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kinds = set(re.findall(r"\w+", shown)) - {"None", "Optional", "Union", "typing"}
    if kinds & {"Literal", "Any", "object"} or ("str" in kinds and kinds <= {"str", "int", "float", "bool"}):
        return text
    if len(kinds) != 1 or not kinds <= {"int", "float", "bool"}:
        raise ScheduleError(
            f"option {parameter.name!r} of {file.name} cannot be given as text: it is {shown}",
            hint="text can be a str, int, float or bool; give other objects from Python, load(..., options={...})",
        )
    (kind,) = kinds
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return int(text) if kind == "int" else float(text)
    except (ValueError, KeyError):
        hint = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise ScheduleError(f"option {parameter.name}={text}: {file.name} takes {hint}") from None


def _find(path: Path) -> Path:
    shipped = resources.schedules() / path.name
    if path.is_file():
        return path
    if path.parent in (Path(), Path("schedules")) and shipped.is_file():
        return shipped
    known = sorted(p.name for p in resources.schedules().glob("*.py"))
    raise ScheduleError(f"no schedule at {path}", hint=did_you_mean(path.name, known))


def _user_error(error: BaseException, file: Path) -> ScheduleError:
    """An ordinary Python error of the user's file, at its line there."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    loc = Loc(str(file), 1)  # no frame: schedule() itself could not be called
    if frames:
        last = frames[-1]
        text = linecache.getline(str(file), last.lineno or 1)
        loc = Loc(str(file), last.lineno or 1, characters(text, (last.colno or 0) + 1), text)
    message = str(error)
    if isinstance(error, SystemExit):
        return ScheduleError(
            f"the schedule calls sys.exit({message})", loc=loc, hint="return a Schedule, or raise an error"
        )
    if isinstance(error, TypeError):
        if found := re.match(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'", message):
            known = _parameters(found[1])
            if known:
                name = found[1].removesuffix(".__init__").rpartition(".")[2]
                return ScheduleError(
                    f"{name}() takes no {found[2]!r}", loc=keyword(loc, found[2]), hint=did_you_mean(found[2], known)
                )
        if "for >>: 'EdgeHandle'" in message:
            return ScheduleError(
                "an edge has two ends", loc=loc, hint="say a >> b >> c as two edges: a >> b and b >> c"
            )
    hint = None
    if isinstance(error, ImportError) and (
        found := re.match(r"cannot import name '(\w+)' from '(megagen[\w.]*)'", message)
    ):
        module = sys.modules[found[2]]
        public = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        hint = did_you_mean(found[1], list(public))
    return ScheduleError(f"{type(error).__name__}: {message}", loc=loc, hint=hint)


def _parameters(qualified: str) -> list[str]:
    """Of megagen's own function of that qualified name; empty if there is none."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megagen":
            found: Any = module
            for part in qualified.split("."):
                found = getattr(found, part, None)
            if inspect.isfunction(found) and found.__qualname__ == qualified:
                return [p for p in inspect.signature(found).parameters if p != "self"]
    return []
