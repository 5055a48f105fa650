"""What the engine reports of a fault, and the error made from it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import ConfigDict, ValidationError

from megagen.errors import EmulationError, Loc
from megagen.ir.graph import Frozen
from megagen.ir.names import Names, ranges
from megagen.ir.plan import Plan

NO_STEP = 0xFFFFFFFF  # of a warp that has begun none yet
HEAP = "heap"  # the name of a rank's exchange memory
BRIEF = 12  # groups of waiting warps that a report shows


class Record(Frozen):
    model_config = ConfigDict(extra="ignore")  # the engine may say more than is shown


class Thread(Record):
    """Who did something, and where in the code. ``launch`` counts a rank's launches, ``step`` is StepPlan.index."""

    rank: int
    launch: int
    block: int
    warp: int | None
    lane: int | None = None
    step: int = NO_STEP
    file: str = ""
    line: int = 0
    function: str = ""


class Other(Thread):
    """The second access of a race or an overwrite; ``what`` it was."""

    what: str


class Place(Record):
    """``bytes`` of memory. ``name``: the allocation's, empty for shared memory."""

    space: str
    rank: int
    block: int | None = None
    name: str = ""
    offset: int
    bytes: int = 0


class Waiting(Record):
    """Lanes (a mask) of a warp in a deadlock. ``edge``: index of a channel or barrier of the Plan, if it is one's."""

    rank: int
    launch: int
    block: int
    warp: int
    lanes: int = 0xFFFFFFFF
    step: int = NO_STEP
    file: str = ""
    line: int = 0
    what: str
    edge: int | None = None
    slot: int | None = None
    phase: int | None = None

    @property
    def place(self) -> tuple[int, int, int, int]:
        return (self.rank, self.launch, self.block, self.warp)


class Report(Record):
    """A fault. ``message`` says what is wrong, without the place."""

    kind: str
    message: str
    seed: int
    who: Thread | None = None
    place: Place | None = None
    other: Other | None = None
    waiting: tuple[Waiting, ...] = ()

    @classmethod
    def read(cls, text: bytes | str, seed: int) -> Report:
        """The engine's JSON; what cannot be read as such is itself reported, as ``internal``."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            shown = text.decode(errors="replace") if isinstance(text, bytes) else text
            return cls(kind="internal", message=f"the emulator reports what cannot be read: {shown[:500]!r}", seed=seed)


def error(plan: Plan | None, report: Report) -> EmulationError:
    """The exception for a report, in the names of the Plan if there is one."""
    names = Names(plan)
    if report.waiting:
        return _deadlock(names, report)
    who, place = report.who, report.place
    doer = _step(names, who.step) if who else ""
    text = f"{doer} {report.message}" if doer else report.message
    if who is None and report.other is not None and report.other.step != NO_STEP:
        text += f", begun by {_step(names, report.other.step)}"
    if place is not None:
        text += f": {_place(names, place)}"
    notes: list[tuple[str, Loc | None]] = []
    if who is not None:
        notes.append((f"in {_where(who)}", None))
    if report.other is not None:
        step = _step(names, report.other.step) or "a warp"
        other = f"the other access is a {report.other.what} by {step}, {_where(report.other)}"
        notes.append((other, names.loc(report.other.step)))
    return EmulationError(
        f"{text}; {_seed(report)}",
        report=report,
        seed=report.seed,
        loc=names.loc(who.step) if who else None,
        notes=tuple(notes),
        hint="a fault of the emulator itself" if report.kind == "internal" else None,
    )


def _deadlock(names: Names, report: Report) -> EmulationError:
    """A wait that no other explains leads; of several the one for what comes first in the flow of data."""

    # Lanes that wait for the others of their warp say nothing where those wait for an edge.
    edged = {w.place for w in report.waiting if w.edge is not None}
    told = [w for w in report.waiting if w.edge is not None or w.place not in edged]

    causes = _causes(names, told)

    def order(w: Waiting) -> tuple[bool, bool, int, int, int, int]:
        edge = -1 if w.edge is None else w.edge
        return (w.edge is None, edge not in causes, names.order(edge), w.rank, w.block, w.warp)

    groups: dict[tuple[str, str, int | None], list[Waiting]] = {}
    for w in sorted(told, key=order):
        key = (_step(names, w.step) or "a warp", _awaited(names, w), None if w.edge is None else w.phase)
        groups.setdefault(key, []).append(w)
    first = min(told, key=order)
    text = f"no warp can go on: {_step(names, first.step) or 'a warp'} waits for {_awaited(names, first)}"
    if first.edge is not None:
        text += f", slot {first.slot}, phase {first.phase}"
    text += f", in rank {first.rank}, block {first.block}, warp {first.warp}, launch {first.launch}"
    shown = list(groups.items())[:BRIEF]
    notes = [(_group(*key, found), names.loc(found[0].step, found[0].edge)) for key, found in shown]
    if len(groups) > len(shown):
        left = list(groups.values())[BRIEF:]
        warps = {w.place for found in left for w in found}
        notes.append((f"{len(warps)} more warps, waiting for {len(left)} other things", None))
    return EmulationError(
        f"{text}; {_seed(report)}",
        report=report,
        seed=report.seed,
        loc=names.loc(first.step, first.edge),
        notes=tuple(notes),
    )


def _causes(names: Names, waiting: Sequence[Waiting]) -> set[int]:
    """The edges waited for whose own makers wait for nothing else, or for each other: what stands still because of
    nothing outside of it."""
    awaited = {w.edge for w in waiting if w.edge is not None}
    behind: dict[int, set[int]] = {edge: set() for edge in awaited}  # what must come before it can
    for w in waiting:
        if w.edge is not None:
            for edge in awaited & names.still_to_produce(w.step) - {w.edge}:
                behind[edge].add(w.edge)

    def reach(edge: int) -> set[int]:
        found, todo = set[int](), [edge]
        while todo:
            new = behind[todo.pop()] - found
            found |= new
            todo += new
        return found

    reached = {edge: reach(edge) for edge in awaited}
    return {edge for edge in awaited if all(edge in reached[other] for other in reached[edge])}


def _group(step: str, awaited: str, phase: int | None, found: Sequence[Waiting]) -> str:
    text = f"{len({w.place for w in found})} × {step} waiting for {awaited}"
    if phase is not None:
        text += f", slot {_few(ranges([w.slot for w in found if w.slot is not None]))}, phase {phase}"
    places = {"rank": 0, "block": 2, "warp": 3, "launch": 1}
    text += ": " + ", ".join(f"{n} {_few(ranges([w.place[i] for w in found]))}" for n, i in places.items())
    return text + (f", at {found[0].file}:{found[0].line}" if found[0].file else "")


def _few(listed: str, most: int = 6) -> str:
    """A list's beginning."""
    items = listed.split(", ")
    return listed if len(items) <= most else ", ".join([*items[: most - 1], "..."])


def _awaited(names: Names, w: Waiting) -> str:
    return w.what if w.edge is None else names.edge(w.edge)


def _step(names: Names, step: int) -> str:
    return "" if step == NO_STEP else names.step(step)


def _where(who: Thread) -> str:
    text = f"rank {who.rank}, launch {who.launch}, block {who.block}"
    if who.warp is not None:
        text += f", warp {who.warp}"
    if who.warp is not None and who.lane is not None:
        text += f", lane {who.lane}"
    if who.file:
        name = re.search(r"(\w+)\(", who.function)  # of all that a compiler says of a function
        text += f", at {who.file}:{who.line}" + (f" ({name[1] if name else who.function})" if who.function else "")
    return text


def _place(names: Names, place: Place) -> str:
    """The memory's own name for a place, and whose it is."""
    if place.space == "shared":
        block = "" if place.block is None else f" of block {place.block}"
        found = names.shared(place.offset) or f"byte {place.offset}"
        return f"{found}, in the shared memory{block}, rank {place.rank}"
    if place.name == HEAP:
        return f"{names.heap(place.offset) or f'byte {place.offset}'}, in the heap of rank {place.rank}"
    if not place.name:
        return f"address {place.offset:#x}"
    return f"{names.parameter(place.name, place.offset)}, of rank {place.rank}"


def _seed(report: Report) -> str:
    return f"seed {report.seed} repeats it"
