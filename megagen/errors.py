"""Every error that megagen raises on purpose.

All derive from :class:`MegagenError`; the command line prints them without a traceback and exits with
``exit_code``. Anything else that escapes is a bug in megagen.
"""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FrameType


@dataclass(frozen=True, order=True)
class Loc:
    """A place in the user's schedule: file, 1-based line and column, and the text of that line."""

    file: str
    line: int
    column: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


_PACKAGE = Path(__file__).resolve().parent


def _is_ours(file: str) -> bool:
    path = Path(file)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "_data")


def here(name: str = "") -> Loc | None:
    """The innermost place outside the package on the call stack: the user's line.

    With ``name``, the column is where that name ends the expression being evaluated (``g.nmae``).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_ours(frame.f_code.co_filename) or "pydantic" in frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    line, column = frame.f_lineno, 1
    positions = list(frame.f_code.co_positions())
    index = frame.f_lasti // 2
    if index < len(positions):
        first, last, start, end = positions[index]
        if first is not None and start is not None:
            line, column = first, start + 1
            if name and end is not None and last is not None:
                line, column = last, end - len(name) + 1
    text = linecache.getline(frame.f_code.co_filename, line)
    return Loc(frame.f_code.co_filename, line, characters(text, max(1, column)), text)


def characters(text: str, column: int) -> int:
    """A 1-based column that Python counts in UTF-8 bytes, in characters of ``text``."""
    return len(text.encode()[: column - 1].decode(errors="ignore")) + 1


def did_you_mean(name: str, known: list[str]) -> str:
    """A hint that names the closest of ``known``, or all of them."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"


class MegagenError(Exception):
    """Base of all deliberate errors.

    ``loc`` is where in the user's schedule the cause stands, ``hint`` what would fix it, ``notes`` further
    lines (a cycle's edges, candidate names), each with its own place if it has one.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        loc: Loc | None = None,
        hint: str | None = None,
        notes: tuple[tuple[str, Loc | None], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.loc = loc
        self.hint = hint
        self.notes = notes

    def render(self) -> str:
        """The message as the terminal shows it: text, the user's line with a caret, notes, hint."""
        lines = [f"error: {self.message}"]
        if self.loc is not None:
            lines += caret(self.loc)
        for note, loc in self.notes:
            lines.append(f"  note: {note}" + (f"  ({loc})" if loc is not None else ""))
        if self.hint:
            lines.append(f"  help: {self.hint}")
        return "\n".join(lines)


def caret(loc: Loc) -> list[str]:
    """Two or three lines that show ``loc`` with a caret under its column."""
    lines = [f"  --> {loc.file}:{loc.line}:{loc.column}"]
    if loc.text.strip():
        before = loc.text[: loc.column - 1].expandtabs(4)
        lines += [f"   {loc.line:>5} | {loc.text.rstrip().expandtabs(4)}", f"         | {' ' * len(before)}^"]
    return lines


class ScheduleError(MegagenError):
    """The schedule file is wrong: unknown op, bad directive value, role on too many warps."""


class UnknownName(ScheduleError, AttributeError):
    """An attribute that a graph, op or schedule does not have."""


class CheckError(MegagenError):
    """The checker refused the Plan: it could hang, race, or does not fit the machine."""


class MachineError(MegagenError):
    """Unknown machine, or one that lacks what the Plan needs."""


class CompileError(MegagenError):
    """No compiler, or the compiler refused the emitted code (a bug in megagen unless templates were edited)."""


class EmulationError(MegagenError):
    """The emulator found a fault in a kernel: a race, a deadlock, a read of what was never written, and the like.

    ``report`` holds what it recorded, ``seed`` the choice of interleaving that repeats it.
    """

    def __init__(
        self,
        message: str,
        *,
        report: object,
        seed: int,
        loc: Loc | None = None,
        hint: str | None = None,
        notes: tuple[tuple[str, Loc | None], ...] = (),
    ) -> None:
        super().__init__(message, loc=loc, hint=hint, notes=notes)
        self.report = report
        self.seed = seed


class CacheError(MegagenError):
    """The cache directory cannot be read or written."""


class WeightError(MegagenError):
    """A checkpoint lacks a tensor, or one has the wrong shape, type or content."""


class DeviceError(MegagenError):
    """No GPU, no driver, a driver call that failed, or results outside their bound."""


class HangError(DeviceError):
    """A bounded wait expired on the device. ``record`` holds what the waiting warp wrote down."""

    def __init__(self, message: str, *, record: object, loc: Loc | None = None) -> None:
        super().__init__(message, loc=loc)
        self.record = record


class RankError(DeviceError):
    """A rank's process ended, hung, or chose another token than the others. ``rank`` and ``pid`` say which."""

    def __init__(
        self, message: str, *, rank: int, pid: int, hint: str | None = None, notes: tuple[tuple[str, None], ...] = ()
    ) -> None:
        super().__init__(message, hint=hint, notes=notes)
        self.rank = rank
        self.pid = pid
