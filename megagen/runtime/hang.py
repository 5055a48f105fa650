"""Hang records: what each waiting warp wrote down before it gave up, and the error made from them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from megagen.errors import HangError
from megagen.ir.names import Names, ranges
from megagen.ir.plan import Plan

RECORD_BYTES = 64
_RECORD = struct.Struct("<5I 4x 5I 20x")


class State(IntEnum):
    NONE = 0
    EXPIRED = 1  # its own wait ran out
    WOKEN = 2  # it was waiting when another warp gave up


@dataclass(frozen=True)
class HangRecord:
    """One warp's wait. ``step`` is StepPlan.index, ``edge`` the index of a channel or barrier of the Plan.

    ``phase`` is the parity or count waited for, or (lamport) the copy; ``slot`` the stage or (lamport) the first
    element of what a lane was reading; ``epoch`` counts launches.
    """

    state: State
    step: int
    edge: int
    slot: int
    phase: int
    sm: int
    block: int
    warp: int
    rank: int
    epoch: int


def decode(data: bytes) -> list[HangRecord]:
    """The records in use among ``data``, the heap's bytes from ``record_offset`` on, in (block, warp) order."""
    used = (State.EXPIRED, State.WOKEN)
    return [HangRecord(State(f[0]), *f[1:]) for f in _RECORD.iter_unpack(data) if f[0] in used]


class Told(Protocol):
    """A rank that keeps hang records."""

    plan: Plan

    def hang_records(self) -> list[HangRecord]: ...


def told(groups: Iterable[Sequence[Told]], abort: int, *, timeout_ms: int) -> HangError:
    """The exception for launches of several Plans that share an abort word; ``groups``: the ranks of each Plan.

    It is about the Plan one of whose waits expired; in the others, warps were woken at most.
    """
    kept = [(ranks[0].plan, [r for rank in ranks for r in rank.hang_records()]) for ranks in groups]
    expired = [k for k in kept if any(r.state is State.EXPIRED for r in k[1])]
    plan, records = (expired or kept)[0]
    return error(plan, abort, records, timeout_ms=timeout_ms)


def error(plan: Plan, abort: int, records: Sequence[HangRecord], *, timeout_ms: int) -> HangError:
    """The exception for a launch whose abort word is ``abort``: 1 + (rank * blocks + block) * warps + warp of a warp
    that gave up.

    The first wait to run out is the one that began first, often far behind the fault: the message describes the wait
    for the edge that comes first in the Plan, its notes count the other waiting warps by what they waited for.
    """
    names = Names(plan)
    if not any(r.state is State.EXPIRED for r in records):
        place, warp = divmod(abort - 1, plan.launch.warps)
        rank, block = divmod(place, plan.launch.blocks)
        where = f"rank {rank}, block {block}, warp {warp}"
        return HangError(f"a wait expired in {where} after {timeout_ms} ms; it left no record here", record=None)
    first = min(records, key=lambda r: (names.order(r.edge), r.block, r.warp))
    groups: dict[tuple[str, str], list[HangRecord]] = {}  # (step, edge) -> the other waiting warps
    for r in records:
        if r is not first:
            groups.setdefault((names.step(r.step), names.edge(r.edge)), []).append(r)
    message = (
        f"a wait expired after {timeout_ms} ms: {names.step(first.step)} waited for {names.edge(first.edge)}, "
        f"slot {first.slot}, phase {first.phase}, in block {first.block}, "
        f"SM {first.sm}, warp {first.warp}, rank {first.rank}, launch {first.epoch}"
    )
    if groups:
        message += f"; {len(records) - 1} other warps were waiting too"
    hang = HangError(message, record=first, loc=names.loc(first.step, first.edge))
    several = len({r.rank for r in records}) > 1
    hang.notes = tuple(
        (
            f"{len(group)} × {step} waiting for {edge} in blocks {ranges([r.block for r in group])}"
            + (f" of ranks {ranges([r.rank for r in group])}" if several else ""),
            None,
        )
        for (step, edge), group in sorted(groups.items(), key=lambda g: -len(g[1]))
    )
    return hang
