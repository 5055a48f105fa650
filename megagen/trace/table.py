"""A trace as columns: what its numbers mean, and a launch's spans in the order in which warps ran them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megagen.errors import MegagenError
from megagen.ir.plan import PREFETCH_GUESS, ChannelPlan, Plan, Source, StepPlan
from megagen.ir.touches import ACCUM_FULL
from megagen.trace.model import RING_LOADS
from megagen.trace.spans import Kind, Trace

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

INTO_L2 = ("prefetch_l2", PREFETCH_GUESS)
LOADS = (*RING_LOADS, *INTO_L2)  # calls that ask for what streams
IDLE = ("attach", "drain")  # services that only wait, which no span says
LEAD = 700  # ns: between waits for one thing less is done than this, though code may have to come
NEVER = np.iinfo("i8").max


def place(source: Source) -> str:
    """ "_layer.py:41", or nothing for a default."""
    return f"{Path(source.file).name}:{source.line}" if source.line else ""


@dataclass(frozen=True)
class Names:
    """What steps and edges of spans are. ``kernel``: of a step. ``role``: place of a step's (op, call) in ``roles``;
    services have op "". ``own``: a step of one of its kernel's ops, not one that rebuilds what an earlier kernel had.
    ``input``: bool [steps, edges], edges that carry what a step reads."""

    plan: Plan
    steps: tuple[StepPlan, ...]
    kernel: Ints
    role: Ints
    roles: tuple[tuple[str, str], ...]
    own: Bools
    input: Bools
    edges: tuple[tuple[str, str], ...]  # name, kind
    channels: Mapping[int, ChannelPlan]  # by edge: their own number, or that of the barrier which completes them

    @staticmethod
    def of(plan: Plan) -> Names:
        found = {s.index: (k, s) for k, kernel in enumerate(plan.kernels) for p in kernel.programs for s in p.steps}
        steps = [found[i][1] for i in range(len(found))]
        called = [(s.op or "", s.call) for s in steps]
        roles = tuple(dict.fromkeys(called))
        edges = {e.index: (e.name, "barrier") for e in plan.barriers}
        edges |= {c.index: (c.name, c.kind.value) for c in plan.channels}
        completes = {plan.barrier(c.barrier).index: c for c in plan.channels if c.barrier is not None}
        channels = completes | {c.index: c for c in plan.channels}
        carries = np.zeros((len(steps), len(edges)), np.bool_)
        for edge, channel in channels.items():
            carries[:, edge] = [channel.name in s.reads for s in steps]
        return Names(
            plan, tuple(steps), np.array([found[i][0] for i in range(len(found))]),
            np.array([roles.index(c) for c in called]), roles,
            np.array([s.op in plan.kernels[found[s.index][0]].ops for s in steps]), carries,
            tuple(edges[i] for i in range(len(edges))), channels,
        )  # fmt: skip

    def edge(self, index: int) -> str:
        return self.edges[index][0] if index < len(self.edges) else f"edge {index}"

    def having(self, **wanted: object) -> Bools:
        """Steps with these attributes."""
        return np.array([all(getattr(s, name) == value for name, value in wanted.items()) for s in self.steps])


@dataclass(frozen=True)
class Launch:
    """One launch; times are whole ns, 0 to ``total``.

    A place is ``rank * blocks + block``, a thread a warp within one kernel, ``(place * kernels + kernel) * warps +
    warp``. Rows are jobs and waits, by thread and time. After each, its warp works, from ``free`` to ``until``, when it
    waits again or ends the job. Asks are loads and prefetches, by place and time.
    """

    names: Names
    ranks: int
    total: int
    thread: Ints
    step: Ints
    edge: Ints
    slot: Ints
    waits: Bools
    begin: Ints
    end: Ints
    job: Ints  # row of the job that a row belongs to, itself for a job
    free: Ints
    until: Ints
    ask_place: Ints
    ask_thread: Ints
    ask_step: Ints
    ask_slot: Ints
    ask_bytes: Ints
    ask_time: Ints
    ask_ring: Bools  # a load into the ring; else L2 is asked

    @property
    def blocks(self) -> int:
        return self.names.plan.launch.blocks

    @property
    def places(self) -> int:
        return self.ranks * self.blocks

    @property
    def threads(self) -> int:
        return self.places * self.per_place

    @property
    def per_place(self) -> int:
        return len(self.names.plan.kernels) * self.names.plan.launch.warps

    @property
    def place(self) -> Ints:
        """Of each row."""
        return self.thread // self.per_place

    def ready(self) -> Ints:
        """Of each row that is a job: the end of its last wait for input before any other wait, else its begin.

        Waits too short to be written are known by the work that follows them: input that is waited for after some is
        another share's. Accumulators are a reduce role's input: the first of them counts, if it is waited for at once.
        """
        inputs = self.waits & self.names.input[self.step, np.minimum(self.edge, len(self.names.edges) - 1)]
        accum = self.waits & (self.edge == self.names.plan.barrier(ACCUM_FULL).index)
        before = np.roll(self.until - self.free, 1)
        inputs |= accum & (_counted(accum, self.job) == 1) & (before <= LEAD)
        later = inputs & (_counted(inputs, self.job) > 1) & (before > LEAD)
        head = inputs & (_counted((self.waits & ~inputs) | later, self.job) == 0)
        found = self.begin.copy()
        found[self.job[head]] = self.end[head]  # in order, so that the last one stays
        return found

    def working(self) -> Bools:
        """Rows that are followed by work: services that only wait do none."""
        return ~np.isin(self.step, [s.index for s in self.names.steps if s.call in IDLE])

    def loaded(self) -> tuple[Ints, Bools]:
        """When each ask's bytes had certainly landed as warps saw it (the end of the first wait for its stage, or when
        the stage is loaded again), and whether a wait says so. Prefetches: never."""
        full = self.names.plan.barrier(self.names.plan.ring.full).index
        rows = np.flatnonzero(self.waits & (self.edge == full))
        stages = self.names.plan.ring.stages
        span = self.total + 1
        seen = np.sort((self.place[rows] * stages + self.slot[rows]) * span + self.end[rows])
        found, known = np.full(len(self.ask_time), NEVER), np.zeros(len(self.ask_time), np.bool_)
        loads = np.flatnonzero(self.ask_ring)
        if not len(loads):
            return found, known
        stage = self.ask_place[loads] * stages + self.ask_slot[loads]
        order = np.lexsort((self.ask_time[loads], stage))
        loads, stage = loads[order], stage[order]
        again = np.full(len(loads), NEVER)
        same = stage[1:] == stage[:-1]
        again[:-1][same] = self.ask_time[loads[1:]][same]
        at = np.searchsorted(seen, stage * span + self.ask_time[loads], side="right")
        hit = np.append(seen, NEVER)[at] - stage * span
        known[loads] = (at < len(seen)) & (hit < span) & (hit <= again)
        found[loads] = np.where(known[loads], hit, again)
        return found, known


def _counted(flags: Bools, job: Ints) -> Ints:
    """How many rows of a row's job are flagged, up to and with the row."""
    total: Ints = np.cumsum(flags)
    found: Ints = total - total[job] + flags[job]
    return found


def totals(trace: Trace) -> Ints:
    """ns of each launch; 0 where it has no spans."""
    found = np.zeros(len(trace.launches), np.int64)
    np.maximum.at(found, trace.spans["launch"].astype("i8"), trace.spans["end"].astype("i8"))
    return np.where(found > 0, np.maximum(found, trace.launches["end"]), 0)


def usual(trace: Trace) -> Ints:
    """:func:`totals`, and 0 where a graph begins, if there are others: on a GPU such a launch takes longer than those
    that follow one."""
    long = totals(trace)
    first = trace.launches["layer"] == 0
    if trace.facts.origin == "measured" and (long[~first] > 0).any():
        long[first] = 0
    return long


def check(trace: Trace) -> Names:
    """What the trace's numbers mean. Raises MegagenError for one that is not of its plan."""
    names, spans = Names.of(trace.plan), trace.spans
    limits = {
        "launch": len(trace.launches), "rank": trace.ranks, "block": trace.plan.launch.blocks,
        "warp": trace.plan.launch.warps, "step": len(names.steps),
    }  # fmt: skip
    for name, limit in limits.items():
        most = int(spans[name].max(initial=0))
        if len(spans) and most >= limit:
            raise MegagenError(
                f"the trace names {name} {most}, and its plan {trace.plan.name} has {limit}",
                hint="the trace was made with another plan: record it again",
            )
    return names


def nearest(values: Ints) -> int:
    """Where the value is that is nearest to the median of those above 0. Raises MegagenError if there are none."""
    if not (values > 0).any():
        raise MegagenError("the trace has no spans", hint="`megagen trace SCHEDULE` records one")
    return int(np.argmin(np.where(values > 0, np.abs(values - np.median(values[values > 0])), np.inf)))


def launches(trace: Trace, names: Names, wanted: Iterator[int] | list[int]) -> Iterator[Launch]:
    """The wanted launches, one at a time, that memory may hold them."""
    number = trace.spans["launch"]
    spans = trace.spans if (number[1:] >= number[:-1]).all() else trace.spans[np.argsort(number, kind="stable")]
    number, long = spans["launch"], totals(trace)
    for i in wanted:
        first, last = np.searchsorted(number, [i, i + 1])
        yield _launch(names, spans[first:last], trace.ranks, int(long[i]))


def _launch(names: Names, spans: NDArray[np.void], ranks: int, total: int) -> Launch:
    def column(name: str, rows: NDArray[np.void]) -> Ints:
        return rows[name].astype("i8")

    kernels, warps = len(names.plan.kernels), names.plan.launch.warps
    point = spans["kind"] >= Kind.LOAD
    rows, asks = spans[~point], spans[point]
    place, ask_place = (column("rank", s) * names.plan.launch.blocks + column("block", s) for s in (rows, asks))
    thread = (place * kernels + names.kernel[rows["step"]]) * warps + rows["warp"]
    ask_thread = (ask_place * kernels + names.kernel[asks["step"]]) * warps + asks["warp"]
    begin, end = (np.clip(column(name, rows), 0, total) for name in ("begin", "end"))
    waits = rows["kind"] == Kind.WAIT
    key = (thread << 33) | (begin << 1) | waits
    if (key[1:] < key[:-1]).any():
        order = np.argsort(key, kind="stable")
        rows, thread, begin, end, waits = rows[order], thread[order], begin[order], end[order], waits[order]
    keep = ~waits | (end > begin)
    job = _jobs(waits, thread, column("step", rows), keep)
    rows, thread, begin, end, waits = rows[keep], thread[keep], begin[keep], end[keep], waits[keep]
    until = end[job]
    begin, end = np.where(waits, np.minimum(begin, until), begin), np.minimum(end, until)
    free = np.where(waits, end, begin)
    within = waits[1:] & (job[1:] == job[:-1])
    until[:-1][within] = begin[1:][within]
    order = np.lexsort((asks["begin"], ask_place))
    asks = asks[order]
    return Launch(
        names, ranks, total, thread, column("step", rows), column("edge", rows), column("slot", rows), waits, begin,
        end, job, free, np.maximum(until, free), ask_place[order], ask_thread[order], column("step", asks),
        column("slot", asks), column("bytes", asks), np.clip(column("begin", asks), 0, total),
        asks["kind"] == Kind.LOAD,
    )  # fmt: skip


def _jobs(waits: Bools, thread: Ints, step: Ints, keep: Bools) -> Ints:
    """The row of each kept row's job. Waits whose job found no room among the stamps are no longer kept."""
    before = np.maximum.accumulate(np.where(waits, -1, np.arange(len(waits))))
    known = (before >= 0) & (thread[before] == thread) & (step[before] == step)
    keep &= known
    renumbered: Ints = np.cumsum(keep) - 1
    return renumbered[before[keep]]
