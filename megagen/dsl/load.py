"""Runs a schedule file and hands back its Schedule."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from megagen import machines, resources
from megagen.dsl.schedule import Schedule
from megagen.errors import Loc, MegagenError, ScheduleError, characters, did_you_mean


def load(
    path: str | Path,
    *,
    machine: str = "h200",
    tp: int = 8,
    tokens: int = 16,
    choices: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """Call ``schedule(machine, tp=..., tokens=..., choices=..., **options)`` of the file at ``path``.

    ``choices`` settle how the work is placed; ``options`` are the file's own parameters and may change what is
    computed. A bare name, or one below ``schedules/``, that does not exist here is looked up among the shipped
    schedules. Raises ScheduleError at the user's line for anything wrong in the file, and for a choice that the
    schedule does not offer.
    """
    file = _find(Path(path))
    description = machines.load(machine)
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
    sys.modules[module.__name__] = module  # dataclasses look their module up while they are made
    try:
        exec(code, module.__dict__)
    except MegagenError:
        raise
    except Exception as error:
        raise _user_error(error, file) from error
    finally:
        del sys.modules[module.__name__]
    function = getattr(module, "schedule", None)
    if not callable(function):
        raise ScheduleError(f"{file} defines no function schedule(machine, tp, tokens, choices)")
    try:
        _refuse_unknown(function, file, options or {})
        schedule = function(description, tp=tp, tokens=tokens, choices=dict(choices or {}), **(options or {}))
    except MegagenError:
        raise
    except Exception as error:
        raise _user_error(error, file) from error
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"schedule() of {file} returned {type(schedule).__name__}, not a Schedule")
    for name in choices or {}:
        if name not in schedule.offered:
            raise ScheduleError(
                f"{file.name} offers no choice {name!r}", hint=did_you_mean(name, sorted(schedule.offered))
            )
    return schedule


def _refuse_unknown(function: Callable[..., object], file: Path, options: Mapping[str, Any]) -> None:
    known = [n for n in inspect.signature(function).parameters if n not in ("machine", "tp", "tokens", "choices")]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) if known else "it takes none"
            raise ScheduleError(f"{file.name} takes no option {name!r}", hint=hint)


def _find(path: Path) -> Path:
    shipped = resources.schedules() / path.name
    if path.is_file():
        return path
    if path.parent in (Path(), Path("schedules")) and shipped.is_file():
        return shipped
    known = sorted(p.name for p in resources.schedules().glob("*.py"))
    raise ScheduleError(f"no schedule at {path}", hint=did_you_mean(path.name, known))


def _user_error(error: Exception, file: Path) -> ScheduleError:
    """An ordinary Python error of the user's file, at its line there."""
    frames = [f for f in traceback.extract_tb(sys.exc_info()[2]) if f.filename == str(file)]
    loc = Loc(str(file), 1)  # no frame: schedule() itself could not be called
    if frames:
        last = frames[-1]
        text = linecache.getline(str(file), last.lineno or 1)
        loc = Loc(str(file), last.lineno or 1, characters(text, (last.colno or 0) + 1), text)
    return ScheduleError(f"{type(error).__name__}: {error}", loc=loc)
