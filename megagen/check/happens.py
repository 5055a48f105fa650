"""What comes before what in memory: launches, ranks, blocks and warps that stand for all of them.

A program that eight warps run is two warps here, a grid two blocks, the group two ranks, and each does the same; a
stretch of launches is as long as the copies of a channel make it matter. An edge stands only where PTX orders memory:

- program order in a warp, and all steps of a launch before its end;
- an mbarrier that completes once a launch: all that arrive, before all that wait;
- the end of a launch before the next one's attach (``griddepcontrol.wait``), or without PDL before all of it;
- a message between ranks: what its writer had attached to, before the end of the launch that read it.

A channel orders nothing else. Data that is its own flag orders the word read, and no other. A counter or flag would
order more, but only for those who wait and publish: a block to which a role gives no share of the work (fewer tokens
than blocks) passes it by.

What the roles of a stream do to the ring and the accumulators is ordered slot by slot, which is
:mod:`megagen.check.ring`'s and :mod:`megagen.check.mbarriers`' business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from graphlib import TopologicalSorter
from itertools import product
from typing import NamedTuple

from megagen.check.finding import steps
from megagen.ir.graph import Scope
from megagen.ir.plan import KernelPlan, Plan, StepPlan

LAUNCHES = 4  # one more than a channel may have copies
RANKS = BLOCKS = WARPS = 2


class At(NamedTuple):
    """A step on one warp: ``kernel`` of a launch, ``place`` in the warp's program."""

    launch: int
    kernel: int
    rank: int
    block: int
    warp: int
    place: int


# A step begins, enters its work (what its role waits for itself has come, if there is work) and ends; the end of a
# launch's kernel on a rank.
Node = tuple[At, str] | tuple[int, int, int]
BEGIN, ENTER, END = "begin", "enter", "end"


class Happens:
    """Happens-before of ``plan``; its programs must have passed the rules about roles and waits."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ranks = RANKS if any(c.scope is Scope.WORLD for c in plan.channels) else 1
        self.edges: dict[Node, set[Node]] = defaultdict(set)  # from what comes after to what comes before
        self.steps: dict[At, StepPlan] = {}
        for launch, (number, kernel), rank in product(range(LAUNCHES), enumerate(plan.kernels), range(self.ranks)):
            self._kernel(launch, number, kernel, rank)
        for launch in range(LAUNCHES):
            self._messages(launch)
        self._index: dict[Node, int] = {}
        self._before: dict[Node, int] = {}  # bit i: the node of that index comes before, or is this one
        for i, node in enumerate(TopologicalSorter(self.edges).static_order()):
            self._index[node] = i
            found = 1 << i
            for earlier in self.edges.get(node, ()):
                found |= self._before[earlier]
            self._before[node] = found

    def before(self, a: At, b: At) -> bool:
        """Whether all that ``a`` does comes before all that ``b`` does."""
        return bool(self._before[b, ENTER] >> self._index[a, END] & 1)

    def block(self) -> dict[At, StepPlan]:
        """Steps of one block in the first launch, all kernels."""
        return {at: step for at, step in self.steps.items() if (at.launch, at.rank, at.block) == (0, 0, 0)}

    # edges ------------------------------------------------------------------------------------------------------

    def _edge(self, before: Node, after: Node) -> None:
        self.edges[after].add(before)

    def _edges(self, before: Iterable[Node], after: Iterable[Node]) -> None:
        for node in after:
            self.edges[node].update(before)

    def _kernel(self, launch: int, number: int, kernel: KernelPlan, rank: int) -> None:
        end = (launch, number, rank)
        last = (launch, number - 1, rank) if number else (launch - 1, len(self.plan.kernels) - 1, rank)
        for block in range(BLOCKS):
            arrive: dict[str, list[Node]] = defaultdict(list)
            wait: dict[str, list[Node]] = defaultdict(list)
            for program in kernel.programs:
                for warp in range(program.first, program.first + min(program.count, WARPS)):
                    before: Node | None = None
                    for place, step in enumerate(program.steps):
                        at = At(launch, number, rank, block, warp, place)
                        self.steps[at] = step
                        self._edges([(at, BEGIN)], [(at, ENTER), (at, END)])
                        if before is not None:
                            self._edge(before, (at, BEGIN))
                        waits = step.call == "attach" if self.plan.launch.pdl else place == 0
                        if waits and last[0] >= 0:
                            self._edge(last, (at, BEGIN))
                        for use in step.barriers:
                            if use.per == "launch" and use.action == "arrive":
                                arrive[use.barrier].append((at, END))
                            elif use.per == "launch" and use.action == "wait":
                                wait[use.barrier].append((at, BEGIN if step.op is None else ENTER))
                        before = (at, END)
                    if before is not None:
                        self._edge(before, end)
            for name, arrivals in arrive.items():
                self._edges(arrivals, wait[name])

    def _messages(self, launch: int) -> None:
        """In every message between ranks stands something of all of them."""
        kernels = self.plan.kernels
        calls = [(i, s) for i, kernel in enumerate(kernels) for _, s in steps(kernel) if s.call != "reset"]
        for c in self.plan.channels:
            if c.scope is not Scope.WORLD:
                continue
            writing = {i for i, s in calls if c.name in s.writes}
            reading = {i for i, s in calls if c.name in s.reads}
            for w, r, sender, receiver in product(writing, reading, range(self.ranks), range(self.ranks)):
                attached = (launch, w - 1, sender) if w else (launch - 1, len(kernels) - 1, sender)
                if attached[0] >= 0:
                    self._edge(attached, (launch, r, receiver))
