"""What the engine recorded of the memory that steps touch, and the same in the names of a Plan."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megagen.emulate.report import HEAP
from megagen.errors import MegagenError
from megagen.ir.names import MBARRIER_BYTES, WORD, Names
from megagen.ir.plan import Plan, SyncKind
from megagen.ir.touches import IN_SHARED, Touch, Verb, What

WRITES = ("write", "zeros", "ones", "atomic", "bulk_write")
# What is done to places of each kind, from what the engine calls it; nothing: not told of here.
VERBS: Mapping[What, Mapping[str, Verb]] = {
    "channel": {"read": "read", "bulk_read": "read", **dict.fromkeys(WRITES, "write")},
    "counter": {"read": "poll", "atomic": "publish", "zeros": "empty", "write": "write", "ones": "write"},
    "region": {"read": "read", "bulk_read": "read", **dict.fromkeys(WRITES, "write"), "bulk_write": "copy"},
    "barrier": {"wait": "wait"},
    "tensor": {"read": "read", "bulk_read": "read", **dict.fromkeys(WRITES, "write")},
}
NOTES = "notes"  # of waits that expire, cleared before any step and polled in all: the kernel's own, like hang records
EMPTY = {0: "zeros", 0xFFFFFFFF: "ones"}  # an empty word -> the verb of a store of it


class Footprint(NamedTuple):
    """Bytes of one memory that a step touched in a rank's launch: [first, last) pairs.

    ``launch`` counts the kernels of the rank. ``verb``: read, write (zeros and ones: of words all of whose bits are),
    atomic, bulk_read, bulk_write, prefetch, init, wait, complete_tx. ``space``: global (``name`` is the allocation's),
    shared, or cluster for the shared memory of another block.
    """

    rank: int
    launch: int
    step: int
    verb: str
    space: str
    name: str
    ranges: tuple[tuple[int, int], ...]


class Phases(NamedTuple):
    """In how many phases of the mbarrier at ``offset``, over all blocks, a step did ``verb`` so many ``times``."""

    rank: int
    launch: int
    step: int
    verb: str  # arrive, expect_tx
    offset: int
    times: int
    phases: int


@dataclass(frozen=True)
class Footprints:
    """Of all launches of an engine."""

    touched: tuple[Footprint, ...]
    phases: tuple[Phases, ...]

    @classmethod
    def read(cls, text: bytes | str) -> Footprints:
        """The engine's JSON."""
        found = json.loads(text)
        touched = [x | {"ranges": tuple((first, last) for first, last in x["ranges"])} for x in found["touched"]]
        return cls(tuple(Footprint(**x) for x in touched), tuple(Phases(**x) for x in found["phases"]))


def observed(plan: Plan, found: Footprints) -> dict[int, frozenset[Touch]]:
    """What each step did, in the terms of :func:`megagen.ir.touches.touches`, by StepPlan.index.

    Of a world whose heaps have been fresh only once, at its start: copies are told by the number of the launch. Raises
    MegagenError for a place that the Plan gives to nobody.
    """
    places = _Places(plan)
    steps: dict[int, set[Touch]] = {}
    for f in found.touched:
        steps.setdefault(f.step, set()).update(places.touches(f))
    expecting = arrivals(plan, found, "expect_tx")
    for (step, barrier), times in arrivals(plan, found).items():
        told, mine = expecting.get((step, barrier)), steps.setdefault(step, set())
        if told:
            mine.add(Touch("expect_tx", "barrier", barrier))
        if times != told:  # expecting bytes arrives as well
            mine.add(Touch("arrive", "barrier", barrier))
    return {step: frozenset(touched) for step, touched in steps.items() if touched}


def arrivals(plan: Plan, found: Footprints, verb: str = "arrive") -> dict[tuple[int, str], Counter[int]]:
    """By step and barrier: how often it arrives in one phase of one block's mbarrier -> in how many phases it does."""
    places = _Places(plan)
    made: dict[tuple[int, str], Counter[int]] = {}
    for p in found.phases:
        if p.verb == verb:
            barrier = places.shared[p.offset].name
            made.setdefault((p.step, barrier), Counter())[p.times] += p.phases
    return made


def completed(plan: Plan, found: Footprints) -> dict[int, set[str]]:
    """The barriers that count the bytes of what a step copies, or sends with st.async, by StepPlan.index."""
    places = _Places(plan)
    made: dict[int, set[str]] = {}
    for f in found.touched:
        if f.verb == "complete_tx":
            made.setdefault(f.step, set()).update(p.name for p in places.of(f))
    return made


class _Place(NamedTuple):
    first: int
    last: int
    what: What | None  # None: the kernel's own words
    name: str = ""
    copy: int = 0


class _Memory:
    """Places that share one numbering of bytes."""

    def __init__(self, places: list[_Place]) -> None:
        self.places = sorted(places)
        self.firsts = [p.first for p in self.places]

    def __getitem__(self, byte: int) -> _Place:
        at = bisect_right(self.firsts, byte) - 1
        if at < 0 or byte >= self.places[at].last:
            raise KeyError(byte)
        return self.places[at]


class _Places:
    def __init__(self, plan: Plan) -> None:
        self.plan, heap = plan, plan.heap
        words = [(heap.epoch_offset, plan.launch.blocks * WORD), (heap.abort_offset, WORD)]
        words.append((heap.record_offset, heap.record_bytes))
        places = [_Place(first, first + size, None) for first, size in words]
        for c in plan.channels:
            if c.kind in IN_SHARED:
                continue
            for i in range(c.copies):
                first = c.offset + i * c.bytes
                places.append(_Place(first, first + c.bytes, "channel", c.name, i))
                if c.counter_offset is not None:
                    first = c.counter_offset + i * WORD
                    places.append(_Place(first, first + WORD, "counter", c.name, i))
        self.heap = _Memory(places)
        self.shared = _Memory(
            [_Place(r.offset, r.offset + r.bytes, None if r.name == NOTES else "region", r.name) for r in plan.regions]
            + [_Place(b.offset, b.offset + MBARRIER_BYTES * b.slots, "barrier", b.name) for b in plan.barriers]
        )
        tensors = {p.name for p in plan.params if p.what in ("input", "output", "state")}
        self.tensors = {name: _Place(0, 0, "tensor", name) for name in tensors}
        self.channels = {c.name: c for c in plan.channels}

    def of(self, f: Footprint) -> Iterator[_Place]:
        """The places that a footprint covers, each at least once. Memory that only the host writes is none."""
        if f.space == "global" and f.name != HEAP:
            if f.name in self.tensors:
                yield self.tensors[f.name]
            return
        memory = self.heap if f.space == "global" else self.shared
        for first, last in f.ranges:
            byte = first
            while byte < last:
                try:
                    place = memory[byte]
                except KeyError:
                    text = f"{Names(self.plan).step(f.step)} touches byte {byte} of the {f.name or 'shared memory'}"
                    raise MegagenError(f"{text} ({f.verb}), which {self.plan.name} gives to nobody") from None
                yield place
                byte = place.last

    def touches(self, f: Footprint) -> Iterator[Touch]:
        for place in set(self.of(f)):
            verb = VERBS[place.what].get(f.verb) if place.what else None
            if verb is None:
                continue
            ahead = 0
            if place.what in ("channel", "counter"):
                c = self.channels[place.name]
                ahead = (place.copy - f.launch // len(self.plan.kernels)) % c.copies
                # Data is never the word that means "not yet written": who stores that makes it so.
                if place.what == "channel" and c.kind is SyncKind.LAMPORT and f.verb == EMPTY[c.empty or 0]:
                    verb = "empty"
            yield Touch(verb, place.what or "region", place.name, ahead)
