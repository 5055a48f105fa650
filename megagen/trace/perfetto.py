"""A trace in Perfetto's format, for ui.perfetto.dev: a process a rank, in it a group a block, in it a track a warp."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megagen import files
from megagen.errors import MegagenError
from megagen.trace import hbm
from megagen.trace.spans import Trace
from megagen.trace.table import Ints, Launch, Names, check, launches, nearest, usual
from megagen.trace.view import landed, title

SEQUENCE = 1
COUNTERS = ("weights asked for", "weights under way")  # of a rank, after its process


def write(trace: Trace, path: Path, launches: Sequence[int] | None = None) -> None:
    """Write launches of a trace (by default the one nearest to the median), in one step.

    Times are ns since the first of them began; those of all ranks are rank 0's. Raises MegagenError when it cannot.
    """
    try:
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError as e:
        raise MegagenError("the package perfetto is not installed", hint="pip install perfetto") from e
    builder = TraceProtoBuilder()
    _Writer(trace, builder).write(launches)
    files.write(path, builder.serialize())


class _Writer:
    def __init__(self, trace: Trace, builder: Any) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

        self.trace, self.builder, self.names = trace, builder, check(trace)
        self.event, self.tracks, self.sequence = pb.TrackEvent, pb.TrackDescriptor, pb.TracePacket
        self.per_place = trace.plan.launch.warps * len(trace.plan.kernels)

    def write(self, wanted: Sequence[int] | None) -> None:
        long = usual(self.trace)
        wanted = [nearest(long)] if wanted is None else sorted(wanted)
        for i in wanted:
            if not 0 <= i < len(long) or not long[i]:
                raise MegagenError(f"the trace has no launch {i}", hint=f"there are {len(long)}, from 0")
        self._describe(wanted)
        begins = self.trace.launches["begin"]
        for i, launch in zip(wanted, launches(self.trace, self.names, wanted), strict=True):
            origin = int(begins[i] - begins[wanted[0]])
            for row in _slices(launch):
                self._slice(launch, row, origin)
            for ask in range(len(launch.ask_time)):
                self._ask(launch, ask, origin)
            self._count(launch, origin)

    # tracks: a rank's process and its counters, then the ranks' blocks, each with its warps ---------------------

    def _process(self, rank: int) -> int:
        return 1 + rank * (1 + len(COUNTERS))

    def _group(self, place: int) -> int:
        return self._process(self.trace.ranks) + place * (1 + self.per_place)

    def _warp(self, thread: int) -> int:
        """A track for each kernel that a warp has: one kernel's warps may begin before those of the last have ended.
        They have one name, so they are shown as one where they can be."""
        place, within = divmod(thread, self.per_place)
        return self._group(place) + 1 + within

    def _describe(self, launches: Sequence[int]) -> None:
        plan, blocks = self.trace.plan, self.trace.plan.launch.blocks
        titles = [f"warp {warp}: {title(plan, warp)}" for warp in range(plan.launch.warps)]
        for rank in range(self.trace.ranks):
            process = self._track(self._process(rank))
            process.process.pid = rank + 1
            process.process.process_name = f"rank {rank}: {self.trace.facts.name}"
            process.child_ordering = self.tracks.ChildTracksOrdering.EXPLICIT
            for i, name in enumerate(COUNTERS):
                counter = self._track(self._process(rank) + 1 + i, self._process(rank), i, name)
                counter.counter.unit = counter.counter.Unit.UNIT_SIZE_BYTES
            for block in range(blocks):
                at = self._group(rank * blocks + block)
                sms = sorted({self.trace.sm(i, rank, block) for i in launches})
                name = f"block {block}, SM {', '.join(map(str, sms))}"
                group = self._track(at, self._process(rank), block + len(COUNTERS), name)
                group.child_ordering = self.tracks.ChildTracksOrdering.EXPLICIT
                for i in range(self.per_place):
                    warp = i % plan.launch.warps
                    self._track(at + 1 + i, at, warp, titles[warp])

    def _track(self, uuid: int, parent: int | None = None, order: int = 0, name: str = "") -> Any:
        descriptor = self._packet(0).track_descriptor
        descriptor.uuid = uuid
        if parent is not None:
            descriptor.parent_uuid, descriptor.sibling_order_rank, descriptor.name = parent, order, name
        return descriptor

    # events -----------------------------------------------------------------------------------------------------

    def _packet(self, time: int) -> Any:
        packet = self.builder.add_packet()
        packet.trusted_packet_sequence_id, packet.timestamp = SEQUENCE, time
        return packet

    def _event(self, kind: int, track: int, time: int, name: str = "") -> Any:
        event = self._packet(time).track_event
        event.type, event.track_uuid = kind, track
        if name:
            event.name = name
        return event

    def _slice(self, launch: Launch, row: int, origin: int) -> None:
        """The beginning of a job or wait; with ``~row`` its end."""
        begins, row = row >= 0, row if row >= 0 else ~row
        track = self._warp(int(launch.thread[row]))
        if not begins:
            self._event(self.event.TYPE_SLICE_END, track, origin + int(launch.end[row]))
            return
        name = (
            f"wait {self.names.edge(int(launch.edge[row]))}"
            if launch.waits[row]
            else _called(self.names, launch.step[row])
        )
        event = self._event(self.event.TYPE_SLICE_BEGIN, track, origin + int(launch.begin[row]), name)
        event.categories.append("wait" if launch.waits[row] else "job")
        if launch.waits[row]:
            _annotate(event, "slot", int(launch.slot[row]))

    def _ask(self, launch: Launch, ask: int, origin: int) -> None:
        ring, (op, call) = bool(launch.ask_ring[ask]), self.names.roles[self.names.role[launch.ask_step[ask]]]
        track, time = self._warp(int(launch.ask_thread[ask])), origin + int(launch.ask_time[ask])
        event = self._event(self.event.TYPE_INSTANT, track, time, f"{'load' if ring else 'prefetch'} {op or call}")
        event.categories.append("load" if ring else "prefetch")
        _annotate(event, "bytes", int(launch.ask_bytes[ask]))
        if ring:
            _annotate(event, "stage", int(launch.ask_slot[ask]))

    def _count(self, launch: Launch, origin: int) -> None:
        """What each rank has asked for so far, and what of it is not there yet."""
        there = np.rint(landed(launch, hbm.flows(launch))).astype("i8")
        for rank, asks in enumerate(hbm.asks(launch)):
            times, nbytes = launch.ask_time[asks], launch.ask_bytes[asks]
            both = np.concatenate([times, there[asks]]), np.concatenate([nbytes, -nbytes])
            for i, steps in enumerate(((times, nbytes), both)):
                for time, value in _summed(*steps):
                    track = self._process(rank) + 1 + i
                    self._event(self.event.TYPE_COUNTER, track, origin + time).counter_value = value


def _slices(launch: Launch) -> Iterator[int]:
    """Rows as they begin, and ``~row`` as they end, warp by warp: what lies within another ends before it."""
    open_: list[int] = []
    begin, end, job = (x.tolist() for x in (launch.begin, launch.end, launch.job))
    for row in range(len(begin)):
        # a job ends before another job begins; a wait, before another wait of its job does
        while open_ and (job[row] != job[open_[-1]] or (job[open_[-1]] != open_[-1] and end[open_[-1]] <= begin[row])):
            yield ~open_.pop()
        yield row
        open_.append(row)
    while open_:
        yield ~open_.pop()


def _summed(times: Ints, by: Ints) -> Iterable[tuple[int, int]]:
    """A count that changes by so much at these times, once for each of them."""
    order = np.argsort(times, kind="stable")
    times, count = times[order], np.cumsum(by[order])
    last = np.flatnonzero(np.append(times[1:] != times[:-1], np.ones(min(1, len(times)), np.bool_)))
    return zip(times[last].tolist(), count[last].tolist(), strict=True)


def _called(names: Names, step: int) -> str:
    op, call = names.roles[names.role[step]]
    return f"{op}.{call}" if op else call


def _annotate(event: Any, name: str, value: int) -> None:
    note = event.debug_annotations.add()
    note.name, note.uint_value = name, value
