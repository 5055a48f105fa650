"""What comes before what in memory: launches, ranks, blocks and warps that stand for all of them.

A program that eight warps run is two warps here, a grid two blocks, the group two ranks, and each does the same; a
stretch of launches is as long as the copies of a channel make it matter. An edge stands only where PTX orders memory:

- program order in a warp;
- an mbarrier that completes once a launch: all that arrive, before all that wait;
- a counter or flag: all that publish (a rank's, or every rank's), before all that wait for it;
- the block's own barriers: its start before all steps, all steps before its end;
- the end of a launch before the next one's attach (``griddepcontrol.wait``), or without PDL before all of it;
- data that is its own flag orders the word read, and no other. But the end of a launch is a fence, and so is attach:
  who has read such a word from a rank comes, once its own launch has ended, after all that the writer had attached to.

What the roles of a stream do to the ring and the accumulators is ordered slot by slot, which is
:mod:`megagen.check.ring`'s and :mod:`megagen.check.mbarriers`' business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

import networkx as nx

from megagen.ir.graph import Scope
from megagen.ir.plan import ChannelPlan, KernelPlan, Plan, StepPlan, SyncKind
from megagen.ir.touches import COUNTED

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


Node = tuple[At, bool] | tuple[int, int, int]  # begin or end of a step; the end of a launch's kernel on a rank


class Happens:
    """Happens-before of ``plan``; its programs must have passed the rules about roles and waits."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ranks = RANKS if any(c.scope is Scope.WORLD for c in plan.channels) else 1
        self.graph: nx.DiGraph = nx.DiGraph()
        self.steps: dict[At, StepPlan] = {}
        for launch, (number, kernel), rank in product(range(LAUNCHES), enumerate(plan.kernels), range(self.ranks)):
            self._kernel(launch, number, kernel, rank)
        for launch in range(LAUNCHES):
            self._channels(launch)
        self._index: dict[Node, int] = {}
        self._after: dict[Node, int] = {}  # bit i: the node of that index comes after
        for i, node in enumerate(reversed(list(nx.topological_sort(self.graph)))):
            self._index[node] = i
            found = 0
            for after in self.graph.successors(node):
                found |= self._after[after] | 1 << self._index[after]
            self._after[node] = found

    def before(self, a: At, b: At) -> bool:
        """Whether all that ``a`` does comes before all that ``b`` does."""
        return bool(self._after[a, True] >> self._index[b, False] & 1)

    def block(self) -> dict[At, StepPlan]:
        """Steps of one block in the first launch, all kernels."""
        return {at: step for at, step in self.steps.items() if (at.launch, at.rank, at.block) == (0, 0, 0)}

    # edges ------------------------------------------------------------------------------------------------------

    def _edges(self, before: Iterable[Node], after: Iterable[Node]) -> None:
        self.graph.add_edges_from(product(before, after))

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
                        self.graph.add_edge((at, False), (at, True))
                        if before is not None:
                            self.graph.add_edge(before, (at, False))
                        waits = step.call == "attach" if self.plan.launch.pdl else place == 0
                        if waits and last[0] >= 0:
                            self.graph.add_edge(last, (at, False))
                        for use in step.barriers:
                            if use.per == "launch" and use.action == "arrive":
                                arrive[use.barrier].append((at, True))
                            elif use.per == "launch" and use.action == "wait":
                                wait[use.barrier].append((at, False))
                        before = (at, True)
                    if before is not None:
                        self.graph.add_edge(before, end)
            for name, arrivals in arrive.items():
                self._edges(arrivals, wait[name])

    def _channels(self, launch: int) -> None:
        writers, readers = defaultdict(list), defaultdict(list)
        for at, step in self.steps.items():
            if at.launch == launch and step.call != "reset":
                for name in step.writes:
                    writers[name].append(at)
                for name in step.reads:
                    readers[name].append(at)
        for c in self.plan.channels:
            if c.kind in COUNTED:
                for w, r in product(writers[c.name], readers[c.name]):
                    if w.rank == r.rank or c.scope is Scope.WORLD:
                        self.graph.add_edge((w, True), (r, False))
            elif c.kind is SyncKind.LAMPORT and c.scope is Scope.WORLD:
                self._heard(launch, c, {w.kernel for w in writers[c.name]}, {r.kernel for r in readers[c.name]})

    def _heard(self, launch: int, c: ChannelPlan, writing: set[int], reading: set[int]) -> None:
        """Its readers hear from every rank: in each message stands something of all of them."""
        for w, r, (writer, reader) in product(writing, reading, product(range(self.ranks), repeat=2)):
            attached = (launch, w - 1, writer) if w else (launch - 1, len(self.plan.kernels) - 1, writer)
            if attached[0] >= 0:
                self.graph.add_edge(attached, (launch, r, reader))
