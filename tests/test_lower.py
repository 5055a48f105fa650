"""The lowering: whatever the placement, the numbers of the Plan add up. Expectations come from arithmetic done here."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import ceil, prod
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagen import machines, resources
from megagen.dsl import (
    L2,
    KiB,
    Schedule,
    by_reader,
    cluster,
    counter,
    evict_first,
    evict_last,
    flag,
    lamport,
    load,
)  # fmt: skip
from megagen.emit import emit
from megagen.ir.graph import Graph
from megagen.ir.plan import KernelPlan, Plan, StepPlan
from megagen.lower import lower
from megagen.models.muse_spark import expert_block

GOLDEN = Path(__file__).parent / "golden"
STREAMS = ("router", "pooler", "gate_up", "down", "unpooler")
ROLES = {  # ops in graph order, roles in the order in which one warp runs them
    "pre_ffn_norm": ("compute",), "router": ("load_weights", "math", "reduce"),
    "pooler": ("load_weights", "math", "reduce", "finish"), "top_k": ("select", "tables"),
    "pre_expert_norm": ("compute",), "gate_up": ("load_weights", "math", "reduce"),
    "down": ("load_weights", "math", "reduce"), "combine": ("measure", "compute"),
    "unpooler": ("load_weights", "math", "reduce", "finish"), "residual": ("measure", "compute"),
}  # fmt: skip
NEEDS_TABLE = {"gate_up", "down", "combine"}
STAGE = {  # 16-row blocks by K: stage bytes and tiles follow from the model's dimensions
    "nvfp4": 4096 * 16 * 9 // 16,  # e2m1 is half a byte, and a byte of scale for 16
    "bf16": 1024 * 16 * 2, "dense": 1024 * 16 * 2, "router": 512 * 16 * 4,
}  # fmt: skip


@dataclass(frozen=True)
class Placement:
    """One way to place the block. ``warps``: producer, housekeeper, reducer, finisher, selector, first of math."""

    tp: int = 8
    tokens: int = 16
    split: str = "nn"
    experts: str = "nvfp4"
    fused: bool = True
    stages: int = 4
    cap: int | None = None
    down_cap: int | None = None
    shares: dict[str, float] = field(default_factory=dict)  # of the ring, up to the end of the op before
    l2: frozenset[str] = frozenset()
    local: str = "lamport"
    partials: str = "by_reader"
    exchange: str = "lamport"
    cluster: int = 1
    blocks: int | None = None
    early: bool = False
    accumulators: int = 2
    warps: tuple[int, ...] = (0, 1, 2, 3, 1, 4)
    per_block: int = 12

    def assigned(self) -> dict[tuple[str, str], tuple[int, ...]]:
        producer, house, reducer, finisher, selector, first = self.warps
        math = tuple(range(first, first + 8))
        roles: dict[tuple[str, str], tuple[int, ...]] = {}
        for op, names in ROLES.items():
            for role in names:
                roles[op, role] = {
                    "load_weights": (producer,), "math": math, "measure": math, "compute": math, "reduce": (reducer,),
                    "finish": (finisher,), "select": (selector,), "tables": (house,),
                }[role]  # fmt: skip
        return roles

    def schedule(self) -> Schedule:
        g = expert_block(self.tp, self.tokens, split=self.split, experts=self.experts)
        s = Schedule("placed", g, machines.load("h200"), warps=self.per_block, blocks=self.blocks)
        ring = s.ring(self.stages, 36 * KiB, in_flight=self.cap)
        for (op, role), warps in self.assigned().items():
            s.assign(getattr(g, op), **{role: s.warps(warps[0], warps[-1] + 1)})
        s.reset(by=s.warp(self.warps[1]))
        s.accumulators(self.accumulators)
        if self.down_cap is not None:
            s.in_flight(self.down_cap, during=g.down)
        before = dict(zip(STREAMS[1:], STREAMS, strict=False))
        for op in STREAMS[1:]:
            share = self.shares.get(op, 1.0)
            if op in self.shares or op in self.l2:
                into = ring | L2 if op in self.l2 and op in self.shares else L2 if op in self.l2 else ring
                by = s.warp(self.warps[1]) if op in self.l2 else None
                s.prefetch(
                    getattr(g, op).weight,
                    into,
                    share=share,
                    by=by,
                    during=getattr(g, before[op]) if op in self.l2 or share < 1 else None,
                )
        made: dict[str, Callable[[], object]] = {
            "lamport": lamport, "by_reader": lambda: lamport(reset=by_reader), "counter": counter, "cluster": cluster,
            "flag": flag,
        }  # fmt: skip
        for kind, edges in (
            (self.local, (g.pre_ffn_norm >> g.router, g.pre_expert_norm >> g.gate_up, g.combine >> g.unpooler)),
            (self.partials, (g.pooler.reduce >> g.pooler.finish, g.unpooler.reduce >> g.unpooler.finish)),
            (self.exchange, (g.pooler >> g.pre_expert_norm, g.down >> g.combine, g.unpooler >> g.residual)),
        ):
            for edge in edges:
                s.sync(edge, made[kind]())  # type: ignore[arg-type]
        s.launch(cluster=self.cluster, early_trigger=self.early)
        return s

    def plan(self) -> Plan:
        return lower(self.schedule(), fused=self.fused)

    def stage_bytes(self, op: str) -> int:
        return STAGE["router" if op == "router" else self.experts if op in ("gate_up", "down") else "dense"]


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    def sometimes(strategy: st.SearchStrategy[int]) -> int | None:
        return draw(st.none() | strategy)

    def one(*names: str) -> str:
        return draw(st.sampled_from(names))

    low = draw(st.permutations(range(4)))
    per_block = draw(st.sampled_from((12, 13, 16)))
    share = st.floats(0, 1) | st.sampled_from((0.0, 1 / 4, 1 / 3, 1.0))
    return Placement(
        tp=draw(st.sampled_from((1, 2, 4, 8))), tokens=draw(st.integers(1, 16)), split=one("nn", "nk"),
        experts=one("nvfp4", "bf16"), fused=draw(st.booleans()), stages=draw(st.integers(1, 6)),
        cap=sometimes(st.integers(36 * KiB, 300 * KiB)), down_cap=sometimes(st.integers(36 * KiB, 300 * KiB)),
        shares=draw(st.dictionaries(st.sampled_from(STREAMS[1:]), share)),
        l2=draw(st.frozensets(st.sampled_from(STREAMS[1:]))), local=one("lamport", "counter"),
        partials=one("lamport", "by_reader", "counter", "cluster"), exchange=one("lamport", "flag"),
        cluster=draw(st.sampled_from((1, 2, 4, 8))), blocks=sometimes(st.integers(1, 20).map(lambda n: 8 * n)),
        early=draw(st.booleans()), accumulators=draw(st.integers(1, 4)),
        warps=(*low, draw(st.sampled_from(low[1:])), per_block // 4 * 4 - 8),
        per_block=per_block,
    )  # fmt: skip


def apart(spans: Iterable[tuple[int, int, int, str]], size: int) -> None:
    """(offset, bytes, alignment, name) within ``size``: aligned, and none touches another."""
    end, last = 0, "the beginning"
    for offset, length, align, name in sorted(spans):
        assert offset >= end, f"{name} at {offset} lies over {last}"
        assert offset % align == 0 and length > 0, name
        end, last = offset + length, name
    assert end <= size, f"{last} ends at {end} of {size}"


def steps(kernel: KernelPlan) -> Iterator[tuple[int, list[StepPlan]]]:
    """(warp, its steps), in order."""
    for program in kernel.programs:
        for warp in range(program.first, program.first + program.count):
            yield warp, list(program.steps)


def calls(program: list[StepPlan], *names: str) -> list[StepPlan]:
    return [s for s in program if s.call in names]


# -- any placement -------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(placements())
def test_any_placement(p: Placement) -> None:
    plan = p.plan()
    check_memory(p, plan)
    check_programs(p, plan)
    check_streams(p, plan)
    check_arithmetic(p, plan)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.to_json() == plan.to_json()
    assert emit(again) == emit(plan)  # 1 and 1.0 are equal but not the same constant


def check_memory(p: Placement, plan: Plan) -> None:
    blocks = p.blocks or {1: 132, 2: 132, 4: 120, 8: 120}[p.cluster]
    assert (plan.launch.blocks, plan.launch.cluster, plan.launch.warps) == (blocks, p.cluster, p.per_block)
    assert plan.region("ring").bytes == p.stages * 36 * KiB
    assert plan.region("accum").bytes == p.accumulators * 8 * 2 * 16 * 8 * 4  # slices x n8 tiles of 16 x 8 fp32
    apart(
        [(r.offset, r.bytes, max(16, r.align), r.name) for r in plan.regions]
        + [(b.offset, 8 * b.slots, 8, b.name) for b in plan.barriers],
        plan.launch.shared_bytes,
    )
    heap, spans = plan.heap, []
    spans.append((heap.epoch_offset, 4 * blocks, 256, "epochs"))
    spans.append((heap.abort_offset, 4, 256, "abort"))
    spans.append((heap.record_offset, 64 * blocks * p.per_block, 256, "records"))
    assert heap.record_bytes == 64 * blocks * p.per_block
    tensors = p.schedule().graph.tensors
    for c in plan.channels:
        size = prod(tensors[c.name].shape) * {"bf16": 2, "fp32": 4, "u32": 4}[c.dtype]
        in_heap = c.kind in ("lamport", "counter", "flag")
        assert (c.bytes >= size and c.bytes % 16 == 0) if in_heap else c.bytes == 0
        if in_heap:
            spans += [(c.offset + i * c.bytes, c.bytes, 256, f"{c.name}[{i}]") for i in range(c.copies)]
        assert (c.counter_offset is not None) == (c.kind in ("counter", "flag"))
        if c.counter_offset is not None:
            spans.append((c.counter_offset, 4 * c.copies, 4, f"{c.name}'s counters"))
        assert (c.empty is not None) == (c.kind == "lamport")
        wanted = {"mbarrier": 1, "cluster": 1}.get(c.kind, 3 if c.scope == "world" else 2)
        assert c.copies == (1 if c.reset == "reader" else wanted)
        if c.kind == "cluster":
            check_cluster_region(p, plan, c.name, tensors[c.name].shape, blocks)
    apart(spans, heap.bytes)
    assert heap.bytes % 256 == 0


def check_cluster_region(p: Placement, plan: Plan, name: str, shape: tuple[int, ...], blocks: int) -> None:
    """The furthest word that comm/channel.cuh's ClusterMap can touch lies in the region."""
    chunks, row_blocks, region = shape[0], shape[1], plan.region(f"cluster_{name}")
    assert plan.channel(name).shared_offset == region.offset
    most = max(last - first for first, last in shares(row_blocks, blocks // p.cluster))
    assert region.bytes >= ceil(most / p.cluster) * chunks * p.tokens * 16 * 4


def check_programs(p: Placement, plan: Plan) -> None:
    assert [k.ops for k in plan.kernels] == ([tuple(ROLES)] if p.fused else [(op,) for op in ROLES])
    assert [k.advances_epoch for k in plan.kernels] == [False] * (len(plan.kernels) - 1) + [True]
    indices = [s.index for k in plan.kernels for program in k.programs for s in program.steps]
    assert indices == list(range(len(indices)))
    edges = [x.index for x in (*plan.channels, *plan.barriers)]
    assert sorted(edges) == list(range(len(edges)))
    assigned, house = p.assigned(), p.warps[1]
    for number, kernel in enumerate(plan.kernels):
        assert [warp for warp, _ in steps(kernel)] == list(range(p.per_block))
        if plan.launch.registers is not None:  # setmaxnreg is a warpgroup's
            assert not any(x.first < 4 < x.first + x.count for x in kernel.programs)
        triggers = 0
        for warp, program in steps(kernel):
            want = []
            for op in kernel.ops:
                if not p.fused and op in NEEDS_TABLE and warp in assigned["top_k", "tables"]:
                    want.append(("top_k", "tables"))
                want += [(op, role) for role in ROLES[op] if warp in assigned[op, role]]
            mine = [(s.op, s.call) for s in program if s.op is not None and s.call != "prefetch_l2"]
            assert list(dict.fromkeys(mine)) == want
            # only a load is cut in parts
            assert all(n == 1 for (_, call), n in Counter(mine).items() if call != "load_weights")
            for s in calls(program, "math", "measure", "compute"):
                assert s.args == (p.warps[-1],)
            names = [s.call for s in program]
            attach = names.index("attach")
            assert names.count("attach") == 1
            assert all(s.call == "load_weights" and s.op not in ("gate_up", "down") for s in program[:attach])
            assert names.count("drain") == ("load_weights" in names) and "drain" not in names[:-1]
            assert names.count("reset") == (number == 0 and warp == house)
            triggers += names.count("trigger")
        assert triggers > 0


def check_streams(p: Placement, plan: Plan) -> None:
    for kernel in plan.kernels:
        loads = {
            op: [s for _, program in steps(kernel) for s in calls(program, "load_weights") if s.op == op]
            for op in kernel.ops
        }
        for op in (op for op in kernel.ops if op in STREAMS):
            size = p.stage_bytes(op)
            stream = plan.op(op).stream
            assert stream is not None and stream.stage_bytes == size
            cap = p.down_cap if op == "down" and p.down_cap is not None else p.cap
            in_flight = p.stages if cap is None else min(p.stages, cap // size)
            assert {s.args[2] for s in loads[op]} == {in_flight}
            edges = [(s.args[0], s.args[1]) for s in loads[op]]
            assert edges[0][0] == 0 and edges[-1][1] == 1024
            assert all(a[1] == b[0] for a, b in pairwise(edges))
            share = p.shares.get(op, 1.0) if p.fused else 1.0
            held = [(a, b) for a, b in edges if b <= round(share * 1024)]
            assert sum(b - a for a, b in held) == round(share * 1024)
            if p.fused:
                asked = [s.args for _, program in steps(kernel) for s in calls(program, "prefetch_l2") if s.op == op]
                rest = (round(share * 1024), 1024) if op in p.shares else (0, 1024)
                assert asked == ([rest] if op in p.l2 else [])
        if p.fused:
            late = [op for op in STREAMS[1:] if p.shares.get(op, 1.0) < 1]
            waits = [s.barriers[0].barrier for _, program in steps(kernel) for s in calls(program, "wait_point")]
            points = [b for b in waits if b.startswith("point_")]
            assert points == [f"point_{STREAMS[STREAMS.index(op) - 1]}" for op in late]
            for point in points:
                signals = sum(
                    x.barriers[0].barrier == point
                    for _, program in steps(kernel)
                    for x in calls(program, "signal_point")
                )
                op = point.removeprefix("point_")
                workers = {
                    w for (o, role), ws in p.assigned().items() if o == op and role != "load_weights" for w in ws
                }
                assert plan.barrier(point).count == signals == len(workers)
            check_begins(p, plan)


def check_begins(p: Placement, plan: Plan) -> None:
    """Who asks L2 for a weight waits for the op's other warps to begin, and they say so just before they do."""
    (kernel,) = plan.kernels
    begins = {b.name.removeprefix("begin_"): b.count for b in plan.barriers if b.name.startswith("begin_")}
    askers = {op: {warp for warp, program in steps(kernel) if f"begin_{op}" in points(program, "wait_point")}
              for op in begins}  # fmt: skip
    for warp, program in steps(kernel):
        for i, s in enumerate(program):
            if s.call == "prefetch_l2":
                before = program[i - 1].barriers
                waited = bool(before) and before[0].barrier.startswith("begin_")
                assert waited or not begins
            if s.call == "signal_point" and s.barriers[0].barrier.startswith("begin_"):
                op = s.barriers[0].barrier.removeprefix("begin_")
                assert program[i + 1].op == op and warp not in askers[op]
    for op, count in begins.items():
        workers = {w for (o, role), ws in p.assigned().items() if o == op and role != "load_weights" for w in ws}
        said = [warp for warp, program in steps(kernel) if f"begin_{op}" in points(program, "signal_point")]
        assert count == len(said) and set(said) == workers - askers[op] and askers[op]


def points(program: list[StepPlan], call: str) -> list[str]:
    return [s.barriers[0].barrier for s in calls(program, call)]


def check_arithmetic(p: Placement, plan: Plan) -> None:
    """What the device computes with depends on the graph alone."""
    assert arithmetic(plan) == arithmetic(usual(p.tp, p.tokens, p.split, p.experts))


@cache
def usual(tp: int, tokens: int, split: str, experts: str) -> Plan:
    return Placement(tp=tp, tokens=tokens, split=split, experts=experts).plan()


def arithmetic(plan: Plan) -> tuple[object, ...]:
    ops = tuple((o.name, o.kind, o.struct, tuple(o.constants.items()), tuple(o.weights.items())) for o in plan.ops)
    messages = tuple((c.name, c.dtype, c.shape, c.row_stride, c.rank_stride, c.shard) for c in plan.channels)
    return ops, messages, plan.params, plan.weights


# -- shares of tiles -----------------------------------------------------------------------------------------------


def share_of() -> Callable[[int, int, int], tuple[int, int]]:
    """The device's rule, as types.cuh has it."""
    text = resources.headers()["megagen/types.cuh"]
    found = re.search(r"Range share_of\(u32 n, u32 part, u32 parts\)\s*\{\s*return \{([^,]+),([^}]+)\};\s*\}", text)
    assert found, "share_of is no longer one expression"
    first, last = (compile(x.strip().replace("/", "//"), "share_of", "eval") for x in found.groups())

    def rule(n: int, part: int, parts: int) -> tuple[int, int]:
        names = {"n": n, "part": part, "parts": parts}
        assert n * parts < 2**32, "the device counts in 32 bits"
        return eval(first, names), eval(last, names)

    return rule


def shares(n: int, parts: int) -> list[tuple[int, int]]:
    rule = share_of()
    return [rule(n, i, parts) for i in range(parts)]


@pytest.mark.parametrize("n", [0, 1, 16, 128, 131, 256, 512, 49 * 64, 128 * 512])
def test_tiles_are_shared_out_whole_and_evenly(n: int) -> None:
    rule = share_of()
    for blocks in range(1, 161):
        runs = [rule(n, i, blocks) for i in range(blocks)]
        assert runs[0][0] == 0 and runs[-1][1] == n
        assert all(a[1] == b[0] for a, b in pairwise(runs))
        assert {last - first for first, last in runs} <= {n // blocks, ceil(n / blocks)}


@pytest.mark.parametrize("experts", ["nvfp4", "bf16"])
@pytest.mark.parametrize("split", ["nn", "nk"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_blocks_load_every_stage_once(tp: int, split: str, experts: str) -> None:
    """Tiles over blocks, stages over a block's parts: the bytes that all blocks load are the weight's bytes."""
    shares_of_a_block = (0, 1 / 3, 1)
    used = 49
    down = (4096 // tp, 4096) if split == "nn" else (4096, 4096 // tp)
    per_weight = 9 / 16 if experts == "nvfp4" else 2
    want = {
        "router": 256 * 8192 * 4, "pooler": 4096 // tp * 8192 * 2, "unpooler": 8192 // tp * 4096 * 2,
        "gate_up": used * 8192 // tp * 4096 * per_weight, "down": used * down[0] * down[1] * per_weight,
    }  # fmt: skip
    rule = share_of()
    for share in shares_of_a_block:
        plan = Placement(tp=tp, split=split, experts=experts, shares=dict.fromkeys(STREAMS[1:], share)).plan()
        parts: dict[str, list[tuple[int, ...]]] = {op: [] for op in STREAMS}
        for s in (s for _, program in steps(plan.kernels[0]) for s in calls(program, "load_weights")):
            parts[str(s.op)].append(s.args[:2])
        for op in STREAMS:
            stream = plan.op(op).stream
            weight = next(w for w in plan.weights if w.name == f"{op}_weight")
            assert stream is not None
            tiles = (
                weight.rows
                * weight.k
                // (stream.stage_rows * stream.stage_k * stream.per_tile)
                * (used if weight.experts else 1)
            )
            loaded = []
            for block in range(plan.launch.blocks):
                first, last = rule(tiles, block, plan.launch.blocks)
                n = (last - first) * stream.per_tile
                loaded += [
                    first * stream.per_tile + i for a, b in parts[op] for i in range(n * a // 1024, n * b // 1024)
                ]
            assert loaded == list(range(tiles * stream.per_tile))
            assert len(loaded) * stream.stage_bytes == want[op]


# -- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["nn", "nk"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_write_every_element_of_an_exchange_once(tp: int, split: str) -> None:
    import numpy as np

    plan = Placement(tp=tp, split=split, tokens=3).plan()
    exchanges = [c for c in plan.channels if c.scope == "world"]
    names = {"pooled", "expert_out", "unpooled"} | ({"expert_mid"} if split == "nn" else set())
    assert {c.name for c in exchanges} == names
    for c in exchanges:
        n = prod(c.shape)
        rank, row, e = np.ogrid[:tp, : n // (tp * c.shard), : c.shard]
        at = rank * c.rank_stride + row * c.row_stride + e
        assert (np.bincount(at.ravel(), minlength=n) == 1).all()
        # where a reader looks: rows of the last axis, contributions outermost when they are summed
        axis = at.reshape(tp, -1, c.shard)
        if c.name == "expert_out" and split == "nk":
            assert (axis.reshape(c.shape) == np.arange(n).reshape(c.shape)).all()
        else:
            gathered = np.concatenate(list(axis), axis=-1)
            assert (gathered == np.arange(n).reshape(-1, c.shape[-1])).all()


@pytest.mark.parametrize(("tp", "split"), [(1, "nn"), (8, "nn"), (8, "nk")])
def test_arrivals_are_what_writers_publish(tp: int, split: str) -> None:
    plan = Placement(tp=tp, split=split, local="counter", partials="counter", exchange="flag").plan()
    found = {c.name: (c.arrivals, c.arrivals_per) for c in plan.channels if c.kind in ("counter", "flag")}
    assert found == {
        "normed": (8, "token"), "expert_in": (8, "token"), "combined": (16, "token"),  # eight warps a token
        "pooled_partials": (8 * 256 // tp, "launch"), "unpooled_partials": (4 * 512 // tp, "launch"),  # a unit each
        "pooled": (256 // tp, "launch"), "unpooled": (512 // tp, "launch"),  # a row block each
        # a stage of 16 rows with K = 4096; of 128 rows with K = 512
        "expert_out": (4096 // tp // 16 if split == "nn" else 4096 // 128, "expert"),
    }  # fmt: skip


# -- bytes ---------------------------------------------------------------------------------------------------------


def test_weight_bytes_at_tp8_with_49_experts() -> None:
    """Per rank: router 256 x 8192 fp32, two poolers of 1/8, 49 experts of 3 x 4096 x 4096 / 8 at 4.5 bits; vectors in
    fp32, the residual gate as two."""
    plan = load("muse_moe.py")
    matrices = 256 * 8192 * 4 + 2 * 4096 * 8192 * 2 // 8 + 49 * 3 * 4096 * 4096 // 8 * 9 // 16
    vectors = 4 * (8192 + 256 + 4096 + 4096 + 8192 + 2 * 8192)
    assert (matrices, vectors) == (198_574_080, 164_864)
    total = sum(op.weight_bytes for op in lower(plan).ops)
    assert total == matrices + vectors


@pytest.mark.parametrize("experts", ["nvfp4", "bf16"])
def test_packed_bytes_are_what_the_kernel_is_charged_for(experts: str) -> None:
    """With all 256 experts in use, the ops' bytes are those of the packed weights, second-level scales aside."""
    plan = Placement(experts=experts).plan()
    packed = {w.name: w.bytes for w in plan.weights}
    for op in plan.ops:
        mine = sum(packed[w] for port, w in op.weights.items() if port != "scale")
        assert op.weight_bytes * (256 if op.kind == "expert_gemm" else 49) == mine * 49


# -- from the same description -------------------------------------------------------------------------------------


def runs(plan: Plan) -> Counter[tuple[str | None, str, int]]:
    return Counter(
        (s.op, s.call, warp) for k in plan.kernels for warp, program in steps(k) for s in program
        if s.op is not None and s.call != "prefetch_l2"
    )  # fmt: skip


@pytest.mark.parametrize("choices", [{}, {"roles": "moved"}, {"sync": "cluster", "cluster": "2"}, {"unpooler": "l2"}])
def test_unfused_kernels_hold_the_roles_of_the_fused_one(choices: dict[str, str]) -> None:
    fused, unfused = (runs(lower(load("muse_moe.py", choices=choices), fused=f)) for f in (True, False))
    house = 2 if "roles" in choices else 1
    assert unfused - fused == {("top_k", "tables", house): 3}  # rebuilt for the three ops that read it
    assert not fused - unfused


@pytest.mark.parametrize(("early", "want"), [(False, list(range(4, 12))), (True, [1])])
def test_who_triggers(early: bool, want: list[int]) -> None:
    """At the end the warps of the last role; early the first one that has nothing to do before it attaches."""
    plan = Placement(early=early).plan()
    assert [w for w, program in steps(plan.kernels[0]) if calls(program, "trigger")] == want
    for _, program in steps(plan.kernels[0]):
        names = [s.call for s in program]
        assert "trigger" not in names or names.index("attach") < names.index("trigger")
        assert "trigger" not in names or (names.index("trigger") == 1) == early


def test_the_table_matches_the_header() -> None:
    text = resources.headers()["megagen/ops/top_k.cuh"]
    names: dict[str, int] = {}
    for name, value in re.findall(r"static constexpr u32 (k\w+) = ([^;]+);", text[text.index("struct ExpertTable") :]):
        names[name] = eval(value, dict(names))
        if name == "kBytes":
            break
    assert Placement().plan().region("table").bytes == names["kBytes"]


# -- determinism ---------------------------------------------------------------------------------------------------

SCRIPT = """
import hashlib, sys
from megagen.dsl import load
from megagen.emit import emit
from megagen.lower import lower
for name in sys.argv[1:]:
    for fused in (True, False):
        plan = lower(load(name), fused=fused)
        print(hashlib.sha256((plan.to_json() + emit(plan)).encode()).hexdigest())
"""


def test_the_same_bytes_whatever_the_hash_seed() -> None:
    names = ["muse_moe.py", str(GOLDEN / "every_directive.py")]
    here = []
    for name in names:
        for fused in (True, False):
            plan = lower(load(name), fused=fused)
            here.append(hashlib.sha256((plan.to_json() + emit(plan)).encode()).hexdigest())
    for seed in ("1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SCRIPT, *names]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.split() == here


def test_a_plan_does_not_change_and_knows_no_strangers() -> None:
    plan = Placement().plan()
    with pytest.raises(ValueError, match="frozen"):
        plan.tp = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match="extra"):
        Plan.from_json(plan.to_json().replace('"tp"', '"tpp"', 1))


def test_graphs_are_not_changed_by_lowering() -> None:
    s = Placement().schedule()
    before: Graph = s.graph.model_copy(deep=True)
    assert lower(s) == lower(s) and s.graph.ops == before.ops and s.graph.tensors == before.tensors


def test_hints_reach_their_streams() -> None:
    s = Placement().schedule()
    s.hint(s.graph.pooler.weight, evict_last)
    s.hint([s.graph.gate_up.weight, s.graph.down.weight], evict_first)
    hints = {op.name: op.stream.hint for op in lower(s).ops if op.stream}
    assert hints == {
        "router": "evict_normal", "pooler": "evict_last", "gate_up": "evict_first", "down": "evict_first",
        "unpooler": "evict_normal",
    }  # fmt: skip


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (2, 13), (4, 20), (8, 31), (16, 49)])
def test_bytes_are_stated_for_experts_that_the_tokens_can_reach(tokens: int, experts: int) -> None:
    """8 * tokens ** (ln(49 / 8) / ln 16): by hand, 8 * 2 ** 0.6535 = 12.6, 8 * 4 ** 0.6535 = 19.8, and so on."""
    plan = lower(load("muse_moe.py", tokens=tokens))
    assert (plan.nominal_tokens, plan.nominal_experts) == (tokens, experts)
    assert plan.op("gate_up").weight_bytes == experts * (1024 * 4096 // 2 + 1024 * 4096 // 16)
