"""What a wait could be used for: weights that HBM could deliver meanwhile, and the directive that asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megagen.ir.plan import OpPlan, StepPlan
from megagen.trace import hbm
from megagen.trace.model import RING_LOADS
from megagen.trace.table import Ints, Launch, place

LITTLE = 0.1  # of a wait or of a weight: not worth a directive
EIGHTHS = 8  # shares are proposed in


class Late(NamedTuple):
    """Bytes of an op's weight that a rank has asked for when a wait ends, and those that come ``after`` it (ns)."""

    op: OpPlan
    early: float
    late: float
    after: float


@dataclass(frozen=True)
class Cover:
    """Judges the waits of one launch. ``flows``: HBM of each rank. ``awaited``: ops whose weights the critical path
    waits for, by default all: to have others sooner would gain nothing."""

    launch: Launch
    flows: Sequence[hbm.Flow]
    awaited: frozenset[str] | None = None

    def sentence(self, role: int, edge: int) -> str:
        """About a role's waits for an edge; empty where nothing is known to help."""
        of, plan = self.launch, self.launch.names.plan
        rows = np.flatnonzero(of.waits & (of.edge == edge) & (of.names.role[of.step] == role))
        name, _ = of.names.roles[role]
        if not len(rows) or not name:
            return ""
        length, spare = self._usual(rows)
        weights = of.names.edge(edge) == plan.ring.full
        if not weights and edge not in of.names.channels:
            return ""
        if spare < LITTLE * length:
            return "HBM is busy all through it: what is asked for sooner comes no sooner."
        if weights:
            return self._uncap(name, length, spare)
        return self._ask(plan.op(name), rows, spare) if plan.fused else ""

    def _usual(self, rows: Ints) -> tuple[float, float]:
        """ns that a warp waits in these rows, and for how much of it HBM has nothing to do."""
        of = self.launch
        rank = of.place[rows] // of.blocks
        spare = np.zeros(len(rows))
        for r, flow in enumerate(self.flows):
            spare[rank == r] = flow.spare(of.begin[rows[rank == r]], of.end[rows[rank == r]])
        threads, which = np.unique(of.thread[rows], return_inverse=True)
        sums = [np.bincount(which, weights=x, minlength=len(threads)) for x in (of.end[rows] - of.begin[rows], spare)]
        return float(np.median(sums[0])), float(np.median(sums[1]))

    def _uncap(self, op: str, length: float, spare: float) -> str:
        """Weights are waited for, and HBM could send more of them at once."""
        plan, steps = self.launch.names.plan, self._loading(op)
        stream = plan.op(op).stream
        if stream is None or not steps or (allowed := min(s.args[2] for s in steps)) >= plan.ring.stages:
            return ""
        more = (allowed + 1) * stream.stage_bytes // 1024
        return (
            f"HBM has nothing to do for {spare / 1000:.1f} of its {length / 1000:.1f} µs, and a SM may have {allowed} "
            f"stage{'s' * (allowed > 1)} on its way: s.in_flight({more} * KiB, during=g.{op})"
        )

    def _ask(self, waiting: OpPlan, rows: Ints, spare: float) -> str:
        """The first weight that is asked for too late, if any."""
        could = spare * self.rate / 1e6
        head = f"HBM could deliver {could:.1f} MB in it"
        found = self._late(waiting, rows)
        if found is None:
            which = "weight" if self.awaited is None else "weight that the path waits for and"
            return f"{head}, but every {which} whose address is known by then has been asked for."
        late, after = f"{found.late / 1e6:.1f} MB", f"asked for {found.after / 1000:.1f} µs after it ends"
        if found.early > LITTLE * found.late:
            what = f"the rest of {found.op.name}'s, {late}, is {after}"
        else:
            what = f"{found.op.name}'s {late} are {after}"
        return f"{head}; {what}: {self._directive(waiting, found, could * 1e6)}"

    def _late(self, waiting: OpPlan, rows: Ints) -> Late | None:
        """The first op from ``waiting`` on with weights that could have been asked for by the end of these waits."""
        of, ops = self.launch, self.launch.names.plan.ops
        rank, ask_rank = of.place[rows] // of.blocks, of.ask_place // of.blocks
        ends, begins = np.full((2, of.ranks), np.nan)
        for r in np.unique(rank):
            mine = rows[rank == r]
            threads, which = np.unique(of.thread[mine], return_inverse=True)
            last = np.zeros(len(threads), np.int64)
            np.maximum.at(last, which, of.end[mine])
            ends[r], begins[r] = np.median(last), np.median(of.begin[mine])
        nbytes = hbm.fresh(of)
        for op in ops[ops.index(waiting) :]:
            own = of.names.having(op=op.name)[of.ask_step] & (nbytes > 0)
            if self.awaited is not None and op.name not in self.awaited:
                continue
            if (
                op.stream is None
                or not op.stream.weight
                or not own.any()
                or not self._known(op, float(np.nanmin(begins)))
            ):
                continue
            late = own & (of.ask_time > ends[ask_rank])
            early = own & (of.ask_time <= ends[ask_rank])
            if nbytes[late].sum() > LITTLE * nbytes[own].sum():
                first = np.full(of.places, np.nan)
                np.fmin.at(first, of.ask_place[late], of.ask_time[late] - ends[ask_rank[late]])
                share = 1 / of.ranks
                return Late(op, nbytes[early].sum() * share, nbytes[late].sum() * share, float(np.nanmedian(first)))
        return None

    def _known(self, op: OpPlan, time: float) -> bool:
        """Whether an op's weights have an address by then: experts' do when the tables are there."""
        of = self.launch
        reads = {name for s in self._loading(op.name) for name in s.reads}
        writers = [s.index for s in of.names.steps if s.op is not None and not reads.isdisjoint(s.writes)]
        jobs = np.flatnonzero(~of.waits & np.isin(of.step, writers))
        return not reads or (len(jobs) > 0 and float(np.median(of.end[jobs])) <= time)

    def _directive(self, waiting: OpPlan, late: Late, could: float) -> str:
        names, ops = self.launch.names, self.launch.names.plan.ops
        # an op's weights cannot wait in the ring for the op's own end
        at = ops[max(0, ops.index(waiting) - 1)] if late.op == waiting else waiting
        steps = [s for s in names.steps if s.op == late.op.name and s.call == "prefetch_l2"]
        if steps:
            where = f" ({place(steps[0].source)})" if steps[0].source.line else ""
            return f"let its prefetch{where} stand before=g.{at.name}"
        whole = late.early + late.late
        ring = int(late.early / whole * EIGHTHS)
        # where the producer waits for a point already, the ring has its share
        if ring and len(self._loading(late.op.name)) > 1:
            ring = 0
        into = "ring | L2" if ring else "L2"
        eighths = ring or max(1, min(EIGHTHS, int(could / whole * EIGHTHS)))
        share = "" if eighths == EIGHTHS else f", share={Fraction(eighths, EIGHTHS)}"
        weight = f"g.{late.op.name}.weight"
        return f"s.prefetch({weight}, into={into}{share}, by=s.warp({self._asker(at)}), before=g.{at.name})"

    def _asker(self, at: OpPlan) -> int:
        """The warp that is first done with all ops before ``at``, of those that neither load nor work for it."""
        of, plan = self.launch, self.launch.names.plan
        earlier = [op.name for op in plan.ops[: plan.ops.index(at)]]
        busy = {w for op in plan.ops for role, ws in op.roles.items() if op == at or role in RING_LOADS for w in ws}
        jobs = np.flatnonzero(~of.waits & np.array([s.op in earlier for s in of.names.steps])[of.step])
        warp = of.thread[jobs] % plan.launch.warps
        free = [w for w in range(plan.launch.warps) if w not in busy] or [plan.launch.warps - 1]
        return min(free, key=lambda w: float(np.median(of.end[jobs[warp == w]])) if (warp == w).any() else 0.0)

    def _loading(self, op: str) -> list[StepPlan]:
        return [s for s in self.launch.names.steps if s.op == op and s.call in RING_LOADS]

    @cached_property
    def rate(self) -> float:
        """Bytes a ns."""
        return self.launch.names.plan.machine.hbm_bytes_per_s / 1e9
