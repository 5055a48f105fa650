"""The critical path of a launch: from its end backwards, through whatever each warp had waited for.

A warp that works does so since its last wait ended, or its job began; whoever ended that wait is where the path goes
on. Spans do not say who that was. It is taken to be, among the warps that can have, the one whose stretch of work
ended last before the wait did; of warps that have all been waiting for longer than a hand-off takes, one that is still
at work, if there is any: it hands over results while it runs. Of a ring's stage, it is its latest load. What was done
before the wait began did not cause it: then the path stays with the warp, whose own reading took so long. Where many
blocks write what one waits for, the op and role that the path goes on in are right; the block need not be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from megagen.ir.graph import Scope
from megagen.ir.plan import ChannelPlan, SyncKind
from megagen.ir.touches import ACCUM_FULL
from megagen.trace import model
from megagen.trace.table import Bools, Floats, Ints, Launch

HOP = 3000  # ns: more than a hand-off between SMs or ranks takes, queued behind a SM's loads
ARRIVE = 300  # ns: the same for a barrier of a block
LOOK = 256  # ns: to look at what is there already may take as long (kernels write no shorter waits)
LANDS = 8000  # ns: more than a load takes, even behind full rings of all SMs
What = Literal["work", "wait", "load", "hop", "launch"]


class Stretch(NamedTuple):
    """A leg, in ns. ``role``: place in Names.roles, -1 for what no warp does."""

    role: int
    what: What
    edge: int  # waited for, or -1
    thread: int
    begin: int
    end: int


@dataclass(frozen=True)
class Path:
    """``stretches`` tile the launch, in order. ``waits``: ns, by (role, edge), that the path's waits lasted since their
    block last had a warp at work; where two lasted at the same time, it counts for the later one."""

    stretches: tuple[Stretch, ...]
    waits: dict[tuple[int, int], int]


def walk(launch: Launch, error_ns: tuple[float, ...] = ()) -> Path:
    """The path of a launch. ``error_ns``: by how much each rank's times may be off."""
    return _Walk(launch, np.array(error_ns or (0.0,) * launch.ranks)).path()


def legs(launch: Launch, path: Path) -> tuple[model.Leg, ...]:
    """The path with names, in µs."""

    def leg(s: Stretch) -> model.Leg:
        op, role = launch.names.roles[s.role] if s.role >= 0 else ("", "")
        place, warp = divmod(s.thread, launch.per_place)
        rank, block = divmod(place, launch.blocks)
        return model.Leg(
            op=op, role=role, what=s.what, detail=launch.names.edge(s.edge) if s.edge >= 0 else "", rank=rank,
            block=block, warp=warp % launch.names.plan.launch.warps, begin=s.begin / 1000, end=s.end / 1000,
        )  # fmt: skip

    return tuple(leg(s) for s in path.stretches)


@dataclass
class _Walk:
    launch: Launch
    error: Floats
    found: list[Stretch] = field(default_factory=list)
    waits: dict[tuple[int, int], int] = field(default_factory=dict)
    counted: int = 0  # waits after this have been
    resolved: set[int] = field(default_factory=set)

    def path(self) -> Path:
        row, time = self._last(np.flatnonzero(~self.launch.waits), self.launch.total)
        self.counted = self.launch.total
        thread = int(self.launch.thread[row]) if row >= 0 else 0
        self._add(-1, "launch", -1, thread, time, self.launch.total)
        while time > 0:
            thread, time = self._back(thread, time)
        return Path(tuple(reversed(self.found)), self.waits)

    def _add(self, role: int, what: What, edge: int, thread: int, begin: int, end: int) -> None:
        if end <= begin:
            return
        after = self.found[-1] if self.found else None
        if after is not None and what == "work" and after[:5] == (role, what, edge, thread, end):
            self.found[-1] = after._replace(begin=begin)
        else:
            self.found.append(Stretch(role, what, edge, thread, begin, end))

    def _back(self, thread: int, time: int) -> tuple[int, int]:
        """From a warp at a time to where the path was before that: an earlier time, or at the same one elsewhere."""
        of, first, last = self.launch, self.starts[thread], self.starts[thread + 1]
        row = int(first + np.searchsorted(of.begin[first:last], time) - 1)
        if row < first:
            return self._launched(thread, time, -1)
        if time > of.until[row]:  # its spans found no room
            self._add(-1, "wait", -1, thread, int(of.until[row]), time)
            time = int(of.until[row])
        role, begin, free = int(of.names.role[of.step[row]]), int(of.begin[row]), int(of.free[row])
        if of.names.steps[int(of.step[row])].call == "attach":
            return self._launched(thread, time, role)
        if not of.waits[row]:
            self._add(role, "work", -1, thread, begin, time)
            return thread, begin
        if free - begin < LOOK:
            self._add(role, "work", -1, thread, begin, time)
            return thread, begin
        if time > free:
            self._add(role, "work", -1, thread, free, time)
        ender = self._ender(row) if time >= free and row not in self.resolved else None
        time = min(time, free)
        self.resolved.add(row)
        self._count(row, time)
        if ender is None:
            self._add(role, "wait", int(of.edge[row]), thread, begin, time)
            return thread, begin
        load, other, then = ender
        if load >= 0 and then + LANDS < begin:  # it was there: who reads it took so long
            load, other, then = -1, thread, begin
        if load < 0 and then < begin:
            other, then = thread, begin
        if load >= 0:
            self._add(load, "load", int(of.edge[row]), other, then, time)
        else:
            self._add(role, "hop", int(of.edge[row]), thread, then, time)
        return other, then

    def _count(self, row: int, time: int) -> None:
        """A wait on the path, which lasted until ``time``."""
        of = self.launch
        first, last = (int(i) for i in np.searchsorted(self.place, [self.place[row], self.place[row] + 1]))
        worked = self.works[first:last] & (of.free[first:last] < time) & (of.until[first:last] > of.free[first:last])
        begin = max(int(of.begin[row]), int(of.until[first:last][worked].max(initial=0)))
        key = int(of.names.role[of.step[row]]), int(of.edge[row])
        self.waits[key] = self.waits.get(key, 0) + max(0, min(time, self.counted) - begin)
        self.counted = min(self.counted, begin)

    def _launched(self, thread: int, time: int, role: int) -> tuple[int, int]:
        """A kernel's beginning waits for the end of the one before it; the first one's is the launch's."""
        warps, kernels = self.launch.names.plan.launch.warps, len(self.launch.names.plan.kernels)
        rank = thread // self.launch.per_place // self.launch.blocks
        kernel = thread // warps % kernels
        jobs, before = self.jobs, -1
        if kernel:
            own = jobs[self.rank[jobs] == rank]
            before, then = self._last(own[self.launch.thread[own] // warps % kernels < kernel], time)
        if before < 0:
            self._add(role, "launch", -1, thread, 0, time)
            return thread, 0
        self._add(role, "launch", -1, thread, then, time)
        return int(self.launch.thread[before]), then

    def _ender(self, row: int) -> tuple[int, int, int] | None:
        """Who ended a wait: a loading role or -1, thread, since when it was done. None if nobody is known."""
        of, time = self.launch, int(self.launch.free[row])
        edge = int(of.edge[row])
        if edge >= len(of.names.edges):
            return None
        channel = of.names.channels.get(edge)
        if channel is not None:
            rows = self._writers(channel, row)
            error = self.error[self.rank[rows]] + self.error[self.rank[row]]
            return self._pick(rows, time, HOP, np.where(self.rank[rows] == self.rank[row], 0.0, error))
        if of.names.edge(edge) == of.names.plan.ring.full:
            return self._load(row, time)
        first, last = self._block(row)
        arrive = self._arrives(edge)
        if of.names.edge(edge) == ACCUM_FULL:  # by the op's own; its next one may have begun
            arrive &= of.names.having(op=of.names.steps[int(of.step[row])].op)
        return self._pick(first + np.flatnonzero(arrive[of.step[first:last]]), time, ARRIVE)

    def _load(self, row: int, time: int) -> tuple[int, int, int] | None:
        of = self.launch
        place = of.thread[row] // of.per_place
        first, last = (int(i) for i in np.searchsorted(of.ask_place, [place, place + 1]))
        same = of.ask_ring[first:last] & (of.ask_slot[first:last] == of.slot[row]) & (of.ask_time[first:last] < time)
        same &= of.names.kernel[of.ask_step[first:last]] == of.names.kernel[of.step[row]]
        if not same.any():
            return None
        ask = first + int(np.flatnonzero(same)[-1])
        return int(of.names.role[of.ask_step[ask]]), int(of.ask_thread[ask]), int(of.ask_time[ask])

    def _pick(self, rows: Ints, time: int, far: int, slack: Floats | float = 0.0) -> tuple[int, int, int] | None:
        """Of stretches of work that began before ``time``, the one that ended last by then, or one still going on."""
        begin, end = self.launch.free[rows], self.launch.until[rows]
        began = begin < time
        over = began & (end <= time + slack)
        best = _most(end, begin, over)
        if best is None or time - end[best] > far:
            running = _most(begin, end, began & ~over)
            if running is not None:
                return -1, int(self.launch.thread[rows[running]]), time
        return None if best is None else (-1, int(self.launch.thread[rows[best]]), min(time, int(end[best])))

    def _writers(self, channel: ChannelPlan, row: int) -> Ints:
        """Rows of roles that write what a row waits for, as far as the channel reaches."""
        rows = self.written.get(channel.name)
        if rows is None:
            roles = {(w.op, w.role) for w in channel.writers}
            steps = np.array(
                [(s.op, s.call) in roles and channel.name in s.writes for s in self.launch.names.steps], np.bool_
            )
            rows = self.written[channel.name] = np.flatnonzero(steps[self.launch.step])
        if channel.scope is Scope.WORLD:
            return rows
        launch = self.launch.names.plan.launch
        near = {SyncKind.MBARRIER: 1, SyncKind.CLUSTER: launch.cluster}.get(channel.kind, launch.blocks)
        found: Ints = rows[self.place[rows] // near == self.place[row] // near]
        return found

    def _arrives(self, edge: int) -> Bools:
        name = self.launch.names.edge(edge)
        return np.array(
            [any(u.barrier == name and u.action == "arrive" for u in s.barriers) for s in self.launch.names.steps],
            np.bool_,
        )

    def _last(self, rows: Ints, time: int) -> tuple[int, int]:
        """The job among ``rows`` that ended last by ``time``, and when; -1 and 0 if none did."""
        end = self.launch.end[rows]
        best = _most(end, self.launch.begin[rows], (end <= time) & (self.launch.begin[rows] < time))
        return (-1, 0) if best is None else (int(rows[best]), int(end[best]))

    def _block(self, row: int) -> tuple[int, int]:
        """Rows of the same block and kernel."""
        warps = self.launch.names.plan.launch.warps
        first = int(self.launch.thread[row]) // warps * warps
        return int(self.starts[first]), int(self.starts[first + warps])

    @cached_property
    def starts(self) -> Ints:
        """Each thread's first row."""
        found: Ints = np.searchsorted(self.launch.thread, np.arange(self.launch.threads + 1))
        return found

    @cached_property
    def place(self) -> Ints:
        found: Ints = self.launch.place
        return found

    @cached_property
    def rank(self) -> Ints:
        found: Ints = self.place // self.launch.blocks
        return found

    @cached_property
    def works(self) -> Bools:
        return self.launch.working()

    @cached_property
    def jobs(self) -> Ints:
        return np.flatnonzero(~self.launch.waits)

    @cached_property
    def written(self) -> dict[str, Ints]:
        return {}


def _most(first: Ints, second: Ints, wanted: Bools) -> int | None:
    """Where ``first`` is largest, then ``second``, among the wanted."""
    among = np.flatnonzero(wanted)
    if not len(among):
        return None
    most = among[first[among] == first[among].max()]
    return int(most[np.argmax(second[most])])


def sums(path: Path) -> Iterator[tuple[tuple[int, What], int]]:
    """ns by role and kind of leg."""
    found: dict[tuple[int, What], int] = {}
    for s in path.stretches:
        found[s.role, s.what] = found.get((s.role, s.what), 0) + s.end - s.begin
    yield from found.items()
