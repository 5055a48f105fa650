"""Traces for tests: by hand, span by span; at random; and of a whole layer, as a machine might have made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megagen.cli import pipeline
from megagen.ir.plan import OpPlan, Plan, StepPlan
from megagen.trace.spans import LAUNCH, SPAN, Facts, Kind, Trace

ROOT = Path(__file__).resolve().parent.parent
HOP = 700  # ns, of what goes from a block to another
FIRST = 300  # ns, when weights are first asked for
LATENCY = 1_500  # ns from a load's issue until it has landed, at least
NOTICED = 64  # ns: shorter waits leave no span
Wait = tuple[str, int, int] | tuple[str, int, int, int]


@cache
def tiny(schedule: str = "muse_swa", fused: bool = True, **choices: str) -> Plan:
    """A schedule's least layer, for four blocks."""
    path = ROOT / f"schedules/{schedule}.py"
    return pipeline.check(pipeline.Request(path, tp=2, tokens=4, tiny=True, fused=fused, choices=choices)).plan


@dataclass
class Maker:
    """Spans by hand. Steps are "pooler.math", "attach", "signal_point@point_residual", edges names; times are ns."""

    plan: Plan
    ranks: int = 1
    spans: list[tuple[int, ...]] = field(default_factory=list)

    def step(self, warp: int, name: str, kernel: int | None = None) -> StepPlan:
        name, _, barrier = name.partition("@")
        op, _, call = name.rpartition(".")
        for i, k in enumerate(self.plan.kernels):
            for p in k.programs:
                if p.first <= warp < p.first + p.count and (kernel is None or kernel == i):
                    for s in p.steps:
                        if s.call == call and (s.op or "") == op and barrier in ("", *(u.barrier for u in s.barriers)):
                            return s
        raise KeyError(f"warp {warp} runs no {name}")

    def edge(self, name: str) -> int:
        return next(e.index for e in (*self.plan.barriers, *self.plan.channels) if e.name == name)

    def job(
        self, warp: int, name: str, begin: int, end: int, waits: Sequence[Wait] = (), *,
        block: int = 0, rank: int = 0, launch: int = 0, kernel: int | None = None,
    ) -> Maker:  # fmt: skip
        """A job and its waits: (edge, begin, end) or (edge, begin, end, slot)."""
        step = self.step(warp, name, kernel).index
        self.spans.append((launch, block, step, 0, rank, warp, Kind.JOB, 0, 0, begin, end))
        for edge, since, until, *slot in waits:
            where = slot[0] if slot else 0
            self.spans.append((launch, block, step, self.edge(edge), rank, warp, Kind.WAIT, where, 0, since, until))
        return self

    def load(
        self, warp: int, name: str, time: int, nbytes: int, stage: int = 0, *,
        block: int = 0, rank: int = 0, launch: int = 0,
    ) -> Maker:  # fmt: skip
        step, edge = self.step(warp, name).index, self.edge("ring_full")
        self.spans.append((launch, block, step, edge, rank, warp, Kind.LOAD, stage, nbytes, time, time))
        return self

    def prefetch(
        self, warp: int, name: str, time: int, nbytes: int, *, block: int = 0, rank: int = 0, launch: int = 0
    ) -> Maker:  # fmt: skip
        step = self.step(warp, name).index
        self.spans.append((launch, block, step, 0, rank, warp, Kind.PREFETCH, 0, nbytes, time, time))
        return self

    def trace(self, ends: Sequence[int] | None = None, dropped: int = 0, **facts: object) -> Trace:
        """``ends``: of each launch; by default there are as many as spans name, and each ends with its last span."""
        return made(self.plan, np.array(self.spans, SPAN), self.ranks, ends, dropped, **facts)


def made(
    plan: Plan, spans: NDArray[np.void], ranks: int = 1, ends: Sequence[int] | None = None, dropped: int = 0,
    **facts: object,
) -> Trace:  # fmt: skip
    """A Trace of these spans, in the format's order."""
    wait = spans["kind"] == Kind.WAIT
    spans = spans[np.lexsort((wait, spans["begin"], spans["warp"], spans["block"], spans["rank"], spans["launch"]))]
    if ends is None:
        count = int(spans["launch"].max(initial=0)) + 1
        ends = [int(spans["end"][spans["launch"] == i].max(initial=0)) for i in range(count)]
    table = np.zeros(len(ends), LAUNCH)
    table["end"], table["layer"], table["dropped"] = ends, np.arange(len(ends)) % 8, dropped
    table["replay"], table["begin"] = np.arange(len(ends)) // 8, np.cumsum([0, *ends])[:-1]
    sms = np.tile(np.arange(plan.launch.blocks, dtype="<u2"), (ranks, 1))
    known: dict[str, object] = {
        "origin": "simulated", "name": "made", "machine": plan.machine.name, "tokens": plan.tokens, "ranks": ranks,
        "offsets_ns": (0.0,) * ranks, "offset_error_ns": (0.0,) * ranks,
    }  # fmt: skip
    return Trace(Facts.model_validate(known | facts), plan, table, sms, spans)


def random(plan: Plan, seed: int, ranks: int = 1, launches: int = 1) -> Trace:
    """Every warp's program with durations, waits and loads drawn at random: in form a trace, otherwise nonsense."""
    rng = np.random.default_rng(seed)
    edges = len(plan.barriers) + len(plan.channels)
    spans: list[tuple[int, ...]] = []
    for launch, rank, block in np.ndindex(launches, ranks, plan.launch.blocks):
        for warp, kernel in np.ndindex(plan.launch.warps, len(plan.kernels)):
            now = int(rng.integers(0, 500)) + kernel * int(rng.integers(0, 5000))
            steps = next(p.steps for p in plan.kernels[kernel].programs if p.first <= warp < p.first + p.count)
            for s in steps[: int(rng.integers(0, 2 * len(steps) + 1))]:
                at = (launch, block, s.index)
                times = np.sort(rng.integers(0, int(rng.choice([1, 10, 4000])), 2 * int(rng.integers(0, 4))))
                last = now + int(times.max(initial=0)) + int(rng.integers(0, 100))
                spans.append((*at, 0, rank, warp, Kind.JOB, 0, 0, now, last))
                for a, b in zip(times[::2], times[1::2], strict=True):
                    edge, slot = int(rng.integers(edges)), int(rng.integers(plan.ring.stages))
                    spans.append((*at, edge, rank, warp, Kind.WAIT, slot, 0, now + a, now + b))
                if s.call in ("load_weights", "prefetch_l2") or rng.random() < 0.1:
                    kind = Kind.PREFETCH if s.call == "prefetch_l2" else Kind.LOAD
                    for t in rng.integers(now, last + 1, int(rng.integers(0, 4))):
                        size = int(rng.choice([0, 1, 36864, 10**6]))
                        spans.append((*at, 0, rank, warp, kind, int(rng.integers(plan.ring.stages)), size, t, t))
                now = last
    return made(plan, np.array(spans, SPAN), ranks, ends=None if spans else [0])


def layer(plan: Plan, launches: int = 1, ranks: int = 1, seed: int = 0) -> Trace:
    """A fused plan's launches: waits last as long as what they wait for, loads as HBM's rate allows. Launches differ by
    a factor."""
    one = _Simulated(plan, ranks, np.random.default_rng(seed))
    spans = np.array(one.spans(), SPAN)
    factors = 1 + 0.03 * np.random.default_rng(seed + 1).standard_normal(launches)
    every = np.tile(spans, launches)
    every["launch"] = np.repeat(np.arange(launches), len(spans))
    for name in ("begin", "end"):
        every[name] = np.rint(every[name] * np.repeat(factors, len(spans)))
    return made(plan, every, ranks)


class _Simulated:
    def __init__(self, plan: Plan, ranks: int, rng: np.random.Generator) -> None:
        self.plan, self.ranks, self.rng = plan, ranks, rng
        self.made: list[tuple[int, ...]] = []
        self.places = ranks * plan.launch.blocks
        self.steps = {(s.op, s.call): s for p in plan.kernels[0].programs for s in p.steps}
        self.edges = {e.name: e.index for e in (*plan.barriers, *plan.channels)}
        self.done: dict[str, NDArray[np.int64]] = {}  # channel -> when written, by place
        self.free = np.full((plan.launch.warps, self.places), 900)  # every warp attaches until then
        self.emptied: list[list[int]] = [[] for _ in range(self.places)]  # when a stage's math was done, in order
        self.asked = np.full(self.places, FIRST)
        self.accum = [0] * self.places

    def spans(self) -> list[tuple[int, ...]]:
        for program in self.plan.kernels[0].programs:
            if program.steps[0].call != "attach":  # the producer's first loads come before it, and it takes no time
                continue
            attach = program.steps[0].index
            for place, w in np.ndindex(self.places, program.count):
                self._span(place, program.first + w, attach, Kind.JOB, 0, 900)
        for op in self.plan.ops:
            for spec in op.specs:
                if spec.name not in op.roles:
                    continue
                if spec.stream and spec.name == "load":  # keys are there at once
                    step = self.steps[op.name, spec.name].index
                    for place in range(self.places):
                        self._span(place, op.roles[spec.name][0], step, Kind.JOB, 0, FIRST)
                elif "load" in op.roles or not (spec.stream or spec.ring or spec.accum):
                    self._plain(op, spec.name)
                elif spec.ring:
                    self._gemm(op)
        return self.made

    def _span(self, place: int, warp: int, step: int, kind: Kind, begin: int, end: int, edge: int = 0, slot: int = 0,
              size: int = 0) -> None:  # fmt: skip
        rank, block = divmod(place, self.plan.launch.blocks)
        if kind != Kind.WAIT or end - begin >= NOTICED:
            self.made.append((0, block, step, edge, rank, warp, kind, slot, size, begin, end))

    def _ready(self, step: StepPlan, place: int) -> list[tuple[int, int]]:
        """Edges that a step reads and when they are there."""
        found = []
        for name in step.reads:
            c = self.plan.channel(name)
            near = c.barrier is not None
            edge = self.edges[c.barrier] if c.barrier is not None else self.edges[name]
            of_rank = self.done[name].reshape(self.ranks, -1)
            when = (
                self.done[name][place]
                if near
                else of_rank.max()
                if c.scope == "world"
                else of_rank[place // self.plan.launch.blocks].max()
            )
            found.append((edge, int(when) + (0 if near else HOP)))
        return sorted(found, key=lambda e: e[1])

    def _publish(self, step: StepPlan, place: int, time: int) -> None:
        for name in step.writes:
            self.done.setdefault(name, np.zeros(self.places, np.int64))[place] = time

    def _units(self, op: OpPlan, role: str) -> int:
        count, per = op.publishes.get(role, (self.plan.launch.blocks, "launch"))
        several = len(op.roles[role])
        return max(1, count * (self.plan.tokens if per == "token" else 1) // several)

    def _share(self, units: int, place: int) -> int:
        blocks, block = self.plan.launch.blocks, place % self.plan.launch.blocks
        return units * (block + 1) // blocks - units * block // blocks

    def _plain(self, op: OpPlan, role: str) -> None:
        step = self.steps[op.name, role]
        every = next(s.every_block for s in op.specs if s.name == role)
        for place in range(self.places):
            units = 1 if every else self._share(self._units(op, role), place)
            ready, ends = self._ready(step, place), []
            for warp in op.roles[role]:
                begin = now = int(self.free[warp, place])
                for edge, when in ready if units else []:
                    self._span(place, warp, step.index, Kind.WAIT, now, max(now, when), edge)
                    now = max(now, when)
                now += int(self.rng.integers(900, 1400)) if units else 30
                self._span(place, warp, step.index, Kind.JOB, begin, now)
                self.free[warp, place] = now
                ends.append(now)
            self._publish(step, place, max(ends) if units else 0)

    def _gemm(self, op: OpPlan) -> None:
        assert op.stream is not None
        load, math = (self.steps[op.name, call] for call in ("load_weights", "math"))
        routed = any(w.experts for w in self.plan.weights if w.parameter in op.weights.values())
        total = -(-op.weight_bytes // op.stream.stage_bytes)
        stage_ns = round(op.stream.stage_bytes * self.plan.launch.blocks / self.plan.machine.hbm_bytes_per_s * 1e9)
        producer, reducer = op.roles["load_weights"][0], op.roles["reduce"][0]
        full, empty, acc = (self.edges[n] for n in ("ring_full", "ring_empty", "accum_full"))
        for place in range(self.places):
            n = self._share(total, place)
            known = int(self.done["table"][place]) if routed else 0
            began = self.asked[place]
            asked = max(int(self.asked[place]), known)
            if routed and known > began:
                self._span(place, producer, load.index, Kind.WAIT, int(began), known, self.edges["table_ready"])
            warps = {w: int(self.free[w, place]) for w in op.roles["math"]}
            starts = dict(warps)
            for edge, when in self._ready(math, place):
                for w, now in warps.items():
                    self._span(place, w, math.index, Kind.WAIT, now, max(now, when), edge)
                    warps[w] = max(now, when)
            reduced = begun = int(self.free[reducer, place])
            for _ in range(n):
                k = len(self.emptied[place])
                stage = k % self.plan.ring.stages
                room = self.emptied[place][k - self.plan.ring.stages] if k >= self.plan.ring.stages else 0
                self._span(place, producer, load.index, Kind.WAIT, asked, max(asked, room), empty, stage)
                asked = max(asked, room)
                self._span(place, producer, load.index, Kind.LOAD, asked, asked, full, stage, op.stream.stage_bytes)
                landed = asked + LATENCY + int(self.rng.integers(0, 300))
                for w, now in warps.items():
                    self._span(place, w, math.index, Kind.WAIT, now, max(now, landed), full, stage)
                    warps[w] = max(now, landed) + int(stage_ns * self.rng.uniform(0.6, 0.9))
                done = max(warps.values())
                self.emptied[place].append(done)
                self._span(place, reducer, self.steps[op.name, "reduce"].index, Kind.WAIT, reduced, max(reduced, done),
                           acc, self.accum[place] % 2)  # fmt: skip
                reduced = max(reduced, done) + 100
                self.accum[place] += 1
            self._span(place, producer, load.index, Kind.JOB, int(began), asked)
            self.asked[place] = asked
            for w, now in warps.items():
                self._span(place, w, math.index, Kind.JOB, starts[w], now)
                self.free[w, place] = now
            self._span(place, reducer, self.steps[op.name, "reduce"].index, Kind.JOB, begun, reduced)
            self.free[reducer, place] = reduced
            self._publish(self.steps[op.name, "reduce"], place, reduced)
