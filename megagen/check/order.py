"""Nothing waits for what waits for it: program order and hand-offs make no cycle.

Every step has a begin and an end. The graph says more than the device needs (a reader begins after all its writers
have ended, a ring has no spare stage, a block may have any number of tiles), so what passes holds for every routing.
It stands for all blocks and ranks, which run the same programs. Streams need their steps to run side by side:

    math.begin, reduce.begin -> math.run -> load.end -> math.end -> reduce.end
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import networkx as nx

from megagen.check.finding import Finding, group, placed, proved, refuse, steps, title, warps
from megagen.ir.graph import Scope
from megagen.ir.plan import KernelPlan, Plan, ProgramPlan, Source, StepPlan, SyncKind

RULE = "order"
Node = tuple[int, int, str]  # first warp of the program, place in it, event


def order(plan: Plan) -> Iterator[Finding]:
    """Acyclic within a kernel; across kernels, written before read."""
    written: set[str] = set()
    edges = 0
    for kernel in plan.kernels:
        graph = _Graph(plan, kernel, written).graph
        if not nx.is_directed_acyclic_graph(graph):
            _refuse(kernel, graph)
        edges += graph.number_of_edges()
        written |= {name for _, s in steps(kernel) if s.call != "reset" for name in s.writes}
    n = len(plan.kernels)
    yield proved(RULE, f"no cycle in what waits for what, in a block, on a GPU or across ranks ({edges} waits, {n} "
                 f"kernel{'s' * (n > 1)})")  # fmt: skip
    yield proved(RULE, "what a kernel waits for, it makes itself, or a kernel before it has made")


class _Graph:
    def __init__(self, plan: Plan, kernel: KernelPlan, written: set[str]) -> None:
        self.plan, self.kernel = plan, kernel
        self.graph = nx.DiGraph()
        self.places: list[tuple[int, int, ProgramPlan, StepPlan]] = [
            (program.first, i, program, step) for program in kernel.programs for i, step in enumerate(program.steps)
        ]
        for warp, i, _, _ in self.places:
            self._edge((warp, i, "begin"), (warp, i, "end"), "")
        for (warp, i, program, _), (other, j, _, _) in pairwise(self.places):
            if warp == other:
                self._edge((warp, i, "end"), (warp, j, "begin"), f"in the program of {group(warps(program))}")
        self._channels(written)
        self._events()
        self._streams()

    def _edge(self, before: Node, after: Node, why: str) -> None:
        """``after`` waits for ``before``."""
        if not self.graph.has_edge(before, after):
            self.graph.add_edge(before, after, why=why)

    def _channels(self, written: set[str]) -> None:
        writers = defaultdict(list)
        for warp, i, _, step in self.places:
            for name in step.writes if step.call != "reset" else ():
                writers[name].append((warp, i, step))
        for warp, i, _, step in self.places:
            for name in step.reads:
                channel = self.plan.channel(name)
                local = channel.scope is Scope.BLOCK or channel.kind is SyncKind.CLUSTER
                if not writers[name] and (local or name not in written):
                    refuse(
                        RULE,
                        f"{title(step)} of {self.kernel.name} reads {name} before anything writes it",
                        step.source,
                        channel.source,
                    )
                for w, j, _ in writers[name]:
                    self._edge((w, j, "end"), (warp, i, "begin"), f"for {name} ({channel.kind.value})")

    def _events(self) -> None:
        """Barriers that complete once a launch; and a group's warps meet at every tile."""
        arrive, meet = defaultdict(list), defaultdict(list)
        for warp, i, _, step in self.places:
            for use in step.barriers:
                if use.per == "launch" and use.action == "arrive":
                    arrive[use.barrier].append((warp, i))
                if use.per == "tile" and use.action == "arrive" and step.call == "compute":
                    meet[use.barrier].append((warp, i))
        for warp, i, _, step in self.places:
            for use in step.barriers:
                if use.action == "wait" and use.per == "launch":
                    for w, j in arrive[use.barrier]:
                        self._edge((w, j, "end"), (warp, i, "begin"), f"for {use.barrier}")
                if use.action == "wait" and step.call == "compute":
                    for w, j in meet[use.barrier]:
                        self._edge((w, j, "begin"), (warp, i, "end"), f"for {use.barrier}")

    def _streams(self) -> None:
        specs = placed(self.plan)
        parts: dict[str, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for warp, i, _, step in self.places:
            spec = specs.get((step.op or "", step.call))
            if spec is None or step.op is None:
                continue
            kind = "load" if spec.stream else "math" if spec.ring else "reduce" if spec.accum == "in" else None
            if kind:
                parts[step.op][kind].append((warp, i))
        for part in parts.values():
            for m in part["math"]:
                run: Node = (*m, "run")
                self._edge((*m, "begin"), run, "")
                self._edge(run, (*m, "end"), "")
                for r in part["reduce"]:
                    self._edge((*r, "begin"), run, "to take its accumulators")
                    self._edge((*m, "end"), (*r, "end"), "for its accumulators")
                for load in part["load"]:
                    self._edge(run, (*load, "end"), "to drain the ring")
                    self._edge((*load, "end"), (*m, "end"), "for its weights")


def _refuse(kernel: KernelPlan, graph: nx.DiGraph) -> None:
    """Shows the shortest cycle as a person would walk it: backwards, from who waits to what it waits for."""
    cycle = _shortest(graph)
    program = {p.first: p for p in kernel.programs}

    def step(node: Node) -> StepPlan:
        return program[node[0]].steps[node[1]]

    # begin at a hand-off, so that a run of one program's steps stays in one piece
    hops: list[tuple[Node, Node, str]] = []
    for before, after in pairwise([*cycle, cycle[0]]):
        hops.append((before, after, graph.edges[before, after]["why"]))
    start = next((i for i, (a, b, _) in enumerate(hops) if a[0] != b[0]), 0)
    merged: list[tuple[Node, Node, str]] = []
    for before, after, why in hops[start:] + hops[:start]:
        if before[:2] == after[:2]:
            continue
        if merged and merged[-1][1][0] == merged[-1][0][0] == before[0] == after[0] and merged[-1][2] == why:
            merged[-1] = (merged[-1][0], after, why)
        else:
            merged.append((before, after, why))
    chain: list[tuple[str, Source | None]] = []
    for before, after, why in reversed(merged):
        verb = "comes after" if why.startswith("in the program") else "waits for"
        if title(step(after)) != title(step(before)):
            chain.append((f"{title(step(after))} {verb} {title(step(before))} {why}", step(after).source))
    involved = [step(after) for _, after, _ in reversed(merged)]
    points = [s for s in involved if s.call == "wait_point"]
    asked = [s for s in involved if s.call in ("wait_point", "prefetch_l2")]
    first, *rest = dict.fromkeys(title(s) for s in involved)
    streams = not asked and any(why.startswith("to ") for _, _, why in hops)
    hint = (
        "let the rest of the weight wait for an earlier op, or prefetch all of it (share=1)"
        if points
        else "give these roles different warps: they hand data to each other while both run"
        if streams
        else "move one of these roles to another warp, or ask for the prefetch later"
    )
    refuse(
        RULE,
        f"deadlock in {kernel.name}: {first} waits for {', that for '.join([*rest, first])}",
        *(s.source for s in (*asked, *involved)),
        notes=chain,
        hint=hint,
    )


def _shortest(graph: nx.DiGraph) -> list[Node]:
    best: list[Node] = []
    for part in nx.strongly_connected_components(graph):
        if len(part) < 2:
            continue
        inner = graph.subgraph(part)
        for before, after in sorted(inner.edges):  # sorted: the same words every time
            path: list[Node] = nx.shortest_path(inner, after, before)
            if not best or len(path) < len(best):
                best = path
    return best
