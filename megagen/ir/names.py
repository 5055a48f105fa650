"""What the numbers mean that a kernel leaves behind: steps, edges, and places in the heap and in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from megagen.errors import Loc
from megagen.ir.graph import Scope
from megagen.ir.plan import ChannelPlan, ParamPlan, Plan, Source, StepPlan
from megagen.ir.touches import IN_SHARED

MBARRIER_BYTES = 8
WORD = 4  # bytes of a counter, an epoch, the abort word


class Names:
    """Names for one Plan's numbers; without a Plan (a kernel that no schedule made) the numbers themselves."""

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan
        kernels, channels, barriers = (plan.kernels, plan.channels, plan.barriers) if plan else ((), (), ())
        self._steps: dict[int, StepPlan] = {
            s.index: s for k in kernels for program in k.programs for s in program.steps
        }
        # Data comes before the barriers that stall because it is missing.
        edges = (*(c.index for c in channels), *(b.index for b in barriers))
        self._order = {edge: i for i, edge in enumerate(edges)}
        self._edges = {c.index: (f"channel '{c.name}' ({c.kind})", c.source) for c in channels}
        self._edges |= {b.index: (f"barrier '{b.name}'", Source()) for b in barriers}
        self._unknown = " (not in this plan)" if plan else ""

    def step(self, index: int) -> str:
        """op.role, or the service's name."""
        step = self._steps.get(index)
        if step is None:
            return f"step {index}{self._unknown}"
        return f"{step.op}.{step.call}" if step.op else step.call

    def edge(self, index: int) -> str:
        return self._edges[index][0] if index in self._edges else f"edge {index}{self._unknown}"

    def order(self, index: int) -> int:
        """Where an edge stands in the flow of data; unknown ones last."""
        return self._order.get(index, len(self._order))

    def still_to_produce(self, step: int) -> set[int]:
        """The edges that a warp in ``step`` may yet signal or write to, in it or in a later step of its program."""
        for kernel in self.plan.kernels if self.plan else ():
            for program in kernel.programs:
                at = next((i for i, s in enumerate(program.steps) if s.index == step), None)
                if at is not None:
                    return set().union(*(self._signalled(s) for s in program.steps[at:]))
        return set()

    def _signalled(self, step: StepPlan) -> set[int]:
        assert self.plan is not None
        written = {self.plan.channel(name).index for name in step.writes}
        signals = {u.barrier for u in step.barriers if u.action != "wait"}
        return written | {b.index for b in self.plan.barriers if b.name in signals}

    def loc(self, step: int, edge: int | None = None) -> Loc | None:
        """The schedule's line of the step, else of the edge."""
        found = self._steps.get(step)
        _, line = self._edges.get(-1 if edge is None else edge, ("", Source()))
        for s in (found.source if found else Source(), line):
            if s.line:
                return Loc(file=s.file, line=s.line, column=s.column, text=s.text)
        return None

    def heap(self, offset: int) -> str | None:
        """What stands at a byte of a rank's heap; None: nothing that the Plan names."""
        if self.plan is None:
            return None
        heap, launch = self.plan.heap, self.plan.launch
        if heap.abort_offset <= offset < heap.abort_offset + WORD:
            return "the abort word"
        if 0 <= (block := (offset - heap.epoch_offset) // WORD) < launch.blocks:
            return f"the epoch of block {block}"
        if 0 <= offset - heap.record_offset < heap.record_bytes:
            each = heap.record_bytes // (launch.blocks * launch.warps)
            block, warp = divmod((offset - heap.record_offset) // each, launch.warps)
            return f"the hang record of block {block}, warp {warp}"
        for c in self.plan.channels:
            if c.kind in IN_SHARED:
                continue
            copy, byte = divmod(offset - c.offset, c.bytes)
            if 0 <= copy < c.copies:
                return f"channel '{c.name}' ({c.kind}), copy {copy}, {self._element(c, byte)}"
            if c.counter_offset is not None and 0 <= (copy := (offset - c.counter_offset) // WORD) < c.copies:
                return f"the counter of channel '{c.name}' ({c.kind}), copy {copy}"
        return None

    def _element(self, c: ChannelPlan, byte: int) -> str:
        """Where in the channel's shape a byte of a copy stands; see ChannelPlan for the strides."""
        at, within = divmod(byte, int(c.dtype.bits) // 8)
        ranks = self.plan.tp if self.plan and c.scope is Scope.WORLD else 1
        rank = row = 0
        strides = sorted((("rank", c.rank_stride), ("row", c.row_stride)), key=lambda s: -s[1])
        for name, stride in strides:
            if stride == 0 or (name == "rank" and ranks == 1):
                continue
            index, at = divmod(at, stride)
            rank, row = (index, row) if name == "rank" else (rank, index)
        gathered = c.shape[-1] == ranks * c.shard
        lead = c.shape[:-1] if gathered else c.shape[1:-1]
        if at >= c.shard or rank >= ranks or row >= prod(lead):
            return f"byte {byte} of it, which is padding"
        index_ = [*unravel(row, lead), rank * c.shard + at] if gathered else [rank, *unravel(row, lead), at]
        return f"element {index_}" + (f", byte {within}" if within else "")

    def shared(self, offset: int) -> str | None:
        """What stands at a byte of a block's dynamic shared memory; None: nothing that the Plan names."""
        if self.plan is None:
            return None
        for b in self.plan.barriers:
            if 0 <= offset - b.offset < MBARRIER_BYTES * b.slots:
                return f"barrier '{b.name}', slot {(offset - b.offset) // MBARRIER_BYTES}"
        for r in self.plan.regions:
            byte = offset - r.offset
            if 0 <= byte < r.bytes:
                if r.name == self.plan.ring.region:
                    stage, byte = divmod(byte, self.plan.ring.stage_bytes)
                    return f"region '{r.name}', stage {stage}, byte {byte}"
                return f"region '{r.name}', byte {byte}"
        return None

    def parameter(self, name: str, offset: int) -> str:
        """What stands at a byte of a tensor that a kernel is given."""
        weights = {w.parameter: w for w in self.plan.weights} if self.plan else {}
        if (w := weights.get(name)) and w.layout == "tiles" and w.experts:
            expert, byte = divmod(offset, w.bytes // w.experts)
            return f"{name}, expert {expert}, byte {byte}"
        params = {p.name: p for p in self.plan.params} if self.plan else {}
        p: ParamPlan | None = params.get(name)
        if p is None or p.dtype is None or not p.shape or (w and w.layout == "tiles"):
            return f"{name}, byte {offset}"
        vector = w and w.layout == "vector"
        size = WORD if vector else int(p.dtype.bits) // 8  # vectors of weights are fp32 on the device
        return f"{name}, element {unravel(offset // size, p.shape)}"


def unravel(index: int, shape: Sequence[int]) -> list[int]:
    """The indices of a flat row-major ``index``."""
    found = []
    for size in reversed(shape):
        index, here = divmod(index, size)
        found.append(here)
    return found[::-1]


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 7, 7] -> '0-2, 7'."""
    runs: list[tuple[int, int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
