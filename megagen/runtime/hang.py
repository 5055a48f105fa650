"""Hang records: what each waiting warp wrote down before it gave up, and the error made from them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from megagen.errors import HangError, Loc
from megagen.ir.plan import Plan, Source, StepPlan

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


def error(plan: Plan, abort: int, records: Sequence[HangRecord], *, timeout_ms: int) -> HangError:
    """The exception for a launch whose abort word is ``abort``: 1 + (rank * blocks + block) * warps + warp of a warp
    that gave up.

    The first wait to run out is the one that began first, often far behind the fault: the message describes the wait
    for the edge that comes first in the Plan, its notes count the other waiting warps by what they waited for.
    """
    names = _Names(plan)
    if not any(r.state is State.EXPIRED for r in records):
        place, warp = divmod(abort - 1, plan.launch.warps)
        rank, block = divmod(place, plan.launch.blocks)
        where = f"rank {rank}, block {block}, warp {warp}"
        return HangError(f"a wait expired in {where} after {timeout_ms} ms; it left no record here", record=None)
    first = min(records, key=lambda r: (names.order(r.edge), r.block, r.warp))
    groups: dict[tuple[str, str], list[int]] = {}  # (step, edge) -> a block for each other waiting warp
    for r in records:
        if r is not first:
            groups.setdefault((names.step(r.step), names.edge(r.edge)), []).append(r.block)
    message = (
        f"a wait expired after {timeout_ms} ms: {names.step(first.step)} waited for {names.edge(first.edge)}, "
        f"slot {first.slot}, phase {first.phase}, in block {first.block}, "
        f"SM {first.sm}, warp {first.warp}, rank {first.rank}, launch {first.epoch}"
    )
    if groups:
        message += f"; {len(records) - 1} other warps were waiting too"
    hang = HangError(message, record=first, loc=names.loc(first))
    hang.notes = tuple(
        (f"{len(blocks)} × {step} waiting for {edge} in blocks {_ranges(blocks)}", None)
        for (step, edge), blocks in sorted(groups.items(), key=lambda g: -len(g[1]))
    )
    return hang


class _Names:
    """What the numbers in records mean."""

    def __init__(self, plan: Plan) -> None:
        self._steps: dict[int, StepPlan] = {
            s.index: s for k in plan.kernels for program in k.programs for s in program.steps
        }
        # Data comes before the barriers that stall because it is missing.
        edges = (*(c.index for c in plan.channels), *(b.index for b in plan.barriers))
        self._order = {edge: i for i, edge in enumerate(edges)}
        self._edges = {c.index: (f"channel '{c.name}' ({c.kind})", c.source) for c in plan.channels}
        self._edges |= {b.index: (f"barrier '{b.name}'", Source()) for b in plan.barriers}

    def step(self, index: int) -> str:
        step = self._steps.get(index)
        if step is None:
            return f"step {index} (not in this plan)"
        return f"{step.op}.{step.call}" if step.op else step.call

    def edge(self, index: int) -> str:
        return self._edges[index][0] if index in self._edges else f"edge {index} (not in this plan)"

    def order(self, index: int) -> int:
        """Where an edge stands in the flow of data; unknown ones last."""
        return self._order.get(index, len(self._order))

    def loc(self, record: HangRecord) -> Loc | None:
        """The schedule's line of the step, else of the edge."""
        step = self._steps.get(record.step)
        for s in (step.source if step else Source(), self._edges.get(record.edge, ("", Source()))[1]):
            if s.line:
                return Loc(file=s.file, line=s.line, column=s.column, text=s.text)
        return None


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 7, 7] -> '0-2, 7'."""
    runs: list[tuple[int, int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
