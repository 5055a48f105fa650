"""What steps touch: what the emulator's code does is what the checker's model says, of every step, and nothing else."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_emulate_mutants import Bench, Mutant, Variant, mutated
from test_emulate_swa import few, small

from megagen.bench.emulation import Weights
from megagen.bench.verify import Verifier
from megagen.cli import pipeline
from megagen.emulate.build import compile_library
from megagen.emulate.engine import Engine, Geometry, Kind
from megagen.emulate.footprint import WRITES, Footprint, Footprints, arrivals, completed, observed
from megagen.emulate.report import HEAP
from megagen.errors import MegagenError
from megagen.ir.plan import Plan, ProgramPlan, StepPlan, SyncKind
from megagen.ir.touches import COUNTED, IN_SHARED, Touch, touches
from megagen.runtime.emulated import World
from megagen.runtime.step import Step
from megagen.settings import Settings

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """Three launches use every copy of every channel; which one a launch uses is the same code in all placements."""

    schedule: str
    more: dict[str, Any]
    launches: int = 1
    ranks: int = 1  # of two; one stands in for the other
    context: int = 100


def layer(**more: Any) -> dict[str, Any]:
    return {"options": small(2), **more}


# Every way to synchronise, homes of a weight, roles on other warps: each is other code.
CASES = {
    "block": Case("muse_moe.py", {}, ranks=2),
    "block-counter": Case("muse_moe.py", {"choices": {"sync": "counter"}}),
    "block-flag": Case("muse_moe.py", {"choices": {"sync": "flag"}}, ranks=2, launches=3),
    "block-cluster": Case("muse_moe.py", {"choices": {"sync": "cluster", "cluster": "2"}}),
    "block-unfused": Case("muse_moe.py", {"fused": False}),
    "block-capped": Case("muse_moe.py", {"choices": {"in_flight": "36", "accumulators": "4", "unpooler": "both"}}),
    "layer": Case("muse_swa.py", layer(), launches=3),
    "layer-counter": Case("muse_swa.py", layer(choices={"sync": "counter", "early_trigger": "True"}), launches=3),
    "layer-flag": Case("muse_swa.py", layer(choices={"sync": "flag", "o_proj": "quarter"}), launches=3),
    "layer-cluster": Case(
        "muse_swa.py", layer(choices={"sync": "cluster", "cluster": "2", "next_qkvg": "3/8", "ring_stages": "3"})
    ),
    "layer-unfused": Case("muse_swa.py", layer(fused=False), launches=3),
    "layer-moved": Case(
        "muse_swa.py", layer(choices={"roles": "moved", "ring_stages": "5", "summed": "0", "in_flight": "none"})
    ),
    "layer-ahead": Case(
        "muse_swa.py",
        layer(choices={"experts_guess": "4", "next_keys": "combine", "warm_code": "4", "warm_next": "residual"}),
    ),
    "layer-global": Case("muse_global.py", {"options": {"positions": 256, **small(2)}}, launches=3),
    "layer-global-counter": Case(
        "muse_global.py", {"options": {"positions": 256, **small(2)}, "choices": {"sync": "counter"}}
    ),
    "layer-global-warpgroups": Case(
        "muse_global.py",
        {"options": {"positions": 256, **small(2)}, "choices": {"attend": "warpgroups"}},
        context=140,  # a stage that is seen whole
    ),
    "layer-two-shot": Case("muse_swa.py", {"options": {"all_reduce": "two_shot", "following": "global"}}),
}


def launch(verifier: Verifier, launches: int, context: int = 100) -> None:
    """One token, after as many as two chunks of attention hold."""
    verifier.launch(verifier.inputs(1, 0, Step.chain(1, context)), few(1), launches=launches)


def steps(plan: Plan) -> Iterator[tuple[ProgramPlan, StepPlan]]:
    return ((p, s) for k in plan.kernels for p in k.programs for s in p.steps)


def reads_at_once(plan: Plan, program: ProgramPlan) -> bool:
    """Whether the router's step reads for the pooler's math too: that follows, and neither is dealt to clusters."""
    calls = [(s.op, s.call) for s in program.steps]
    dealt = SyncKind.CLUSTER in (plan.channel(name).kind for name in ("logits", "pooled_partials"))
    return (("router", "math"), ("pooler", "math")) in pairwise(calls) and not dealt


def expected(plan: Plan, program: ProgramPlan, step: StepPlan, stages: Counter[int]) -> frozenset[Touch]:
    """The model's touches. ``stages``: how many a block loads, by step.

    A producer that may have so many stages under way waits for one only when it has loaded as many; and the model has
    whoever waits for the table read it.
    """
    known = touches(plan, step)
    if plan.loads(step):
        loaded = sum(stages[s.index] for s in program.steps if s.index <= step.index)
        if loaded <= step.args[2]:
            known -= {Touch("wait", "barrier", plan.ring.full)}
    if step.op == "pooler" and reads_at_once(plan, program):
        known = frozenset(touch for touch in known if touch.name != plan.op("pooler").channels["in"])
    if plan.guess is not None:  # which copy it is a word in it says: bytes of a tensor are not told apart
        known -= {touch for touch in known if touch.name == plan.guess.parameter}
    if step.op == "combine" and plan.channel("expert_out").kind not in COUNTED:
        known -= {Touch("read", "region", "table")}  # which says how many experts there are to count
    return known


def differences(plan: Plan, found: Footprints, blocks: int) -> dict[str, tuple[list[Touch], list[Touch]]]:
    """Steps by name, with what they do not touch and should, and the other way round. ``blocks`` ran the plan."""
    seen = observed(plan, found)
    told = arrivals(plan, found, "expect_tx")
    # a block that loads at all loads whole tiles
    tile = {step.index: plan.op(step.op or "").stream for _, step in steps(plan) if plan.loads(step)}
    stages = Counter(
        {
            s: max(n.total() // blocks, of.per_tile if (of := tile[s]) else 0)
            for (s, barrier), n in told.items()
            if barrier == plan.ring.full
        }
    )
    wrong = {}
    taken: dict[str | None, frozenset[Touch]] = {}  # by either of two warps, which may take turns
    for _, step in steps(plan):
        if step.call == "reduce":
            taken[step.op] = taken.get(step.op, frozenset()) | seen.get(step.index, frozenset())
    for program, step in steps(plan):
        want, got = expected(plan, program, step, stages), seen.pop(step.index, frozenset())
        got = taken[step.op] if step.call == "reduce" else got
        if want != got:
            wrong[f"{step.op or step.index}.{step.call}"] = (sorted(want - got), sorted(got - want))
    assert not seen, f"steps that are not in the plan: {seen}"
    return wrong


def unread(plan: Plan, found: Footprints) -> dict[str, list[tuple[str, int]]]:
    """Channels in the heap with what a launch writes and some rank does not read in it: (step, how many words of its).

    Nobody waits for that. Where a place is emptied by the next launch, or written by another rank, it could come after;
    and what its readers empty stays. Ranks write to the same places of each other's heaps.
    """
    by_index = {s.index: s for _, s in steps(plan)}
    writes: dict[tuple[int, int], int] = {}  # launch, step -> a bit a word
    reads: dict[tuple[int, int], int] = {}  # launch, rank
    for f in found.touched:
        if f.space != "global" or f.name != HEAP or f.step not in by_index or by_index[f.step].call == "reset":
            continue
        words = sum((1 << last // 4) - (1 << first // 4) for first, last in f.ranges)
        number = f.launch // len(plan.kernels)
        if f.verb in WRITES:
            writes[number, f.step] = writes.get((number, f.step), 0) | words
        elif f.verb == "read":
            reads[number, f.rank] = reads.get((number, f.rank), 0) | words
    assert {number for number, _ in writes} == {number for number, _ in reads} != set()
    missed: dict[str, dict[str, int]] = {}
    for c in plan.channels:
        if c.kind in IN_SHARED:
            continue
        own = (1 << (c.offset + c.copies * c.bytes) // 4) - (1 << c.offset // 4)
        for (number, step), written in writes.items():
            seen = [x for (n, _), x in reads.items() if n == number]
            words = sum((written & own & ~x).bit_count() for x in seen)
            if words:
                who = f"{by_index[step].op}.{by_index[step].call}"
                missed.setdefault(c.name, {}).setdefault(who, 0)
                missed[c.name][who] += words
    return {name: sorted(who.items()) for name, who in missed.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_step_touches_what_the_model_says(emulate: Any, name: str) -> None:
    schedule, more, launches, ranks, context = CASES[name]
    kernel = emulate(schedule, ranks=ranks, tp=2, footprints=True, **more)
    launch(kernel.verifier, launches, context)
    plan, found = kernel.plan, kernel.world.engine.footprints()
    blocks = plan.launch.blocks * ranks * launches
    assert not differences(plan, found, blocks)
    assert not unread(plan, found)

    # copies complete the barrier that their readers wait for
    signals = {s.index: {plan.ring.full} for _, s in steps(plan) if plan.loads(s)}
    for _, s in steps(plan):
        sent = {c.barrier for c in map(plan.channel, s.writes) if c.kind is SyncKind.CLUSTER}
        signals |= {s.index: sent} if sent else {}
    assert completed(plan, found) == signals

    # every warp of a step arrives as often in a phase as the model says, once a launch in each block or once a tile
    made = arrivals(plan, found)
    filled = Counter[tuple[str, str | None]]()
    freed = Counter[tuple[str, str | None, int]]()  # by a program's warps, each of which hands all of it back
    for program, step in steps(plan):
        for use in step.barriers:
            if use.action == "wait":
                continue
            times = made.pop((step.index, use.barrier))
            assert set(times) == {use.count * program.count}, (step, use)
            if use.per == "launch":
                assert times.total() == blocks, (step, use)
            elif use.barrier in (plan.ring.full, "accum_full"):
                filled[use.per, step.op] += times.total()
            elif use.barrier in (plan.ring.empty, "accum_empty"):
                freed[use.per, step.op, program.first] += times.total()
    assert not made
    assert {(per, op) for per, op, _ in freed} == set(filled)
    assert all(n == filled[per, op] for (per, op, _), n in freed.items())
    assert {per for per, _ in filled} == {"stage", "tile"}


def test_a_step_that_touches_something_else_is_noticed(tmp_path: Path) -> None:
    """Two faults that leave every result alone."""
    ahead = "which(ctx, D::kCopies - 1)"
    scratch = "group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, token - mine.first, square)"
    edits = [
        ("comm/reset.cuh", ahead, ahead.replace("D::kCopies - 1", "1")),  # of three copies: a launch too late
        ("ops/rms_norm.cuh", scratch, scratch.replace("Op::kScratch", "Ctx::Kernel::Accum::kOffset")),
    ]
    bench, on = Bench(tmp_path), Variant()
    checked = bench.checked(on)
    plan, weights = checked.plan, Weights.random(checked.graph, 1)
    library = bench.library(on, mutated(Mutant("elsewhere", edits)))
    with World(plan, library, live=1, footprints=True) as world:
        launch(Verifier(world, checked.graph, weights.packed, weights.env), 1)
        wrong = differences(plan, world.engine.footprints(), plan.launch.blocks)
    late = [c.name for c in plan.channels if c.kind is SyncKind.LAMPORT and c.copies == 3]
    assert late
    reset = next(s for _, s in steps(plan) if s.call == "reset")
    want = {
        f"{reset.index}.reset": tuple(sorted(Touch("empty", "channel", c, ahead) for c in late) for ahead in (2, 1)),
    }
    for norm in ("pre_ffn_norm", "pre_expert_norm"):
        regions = (f"scratch_{norm}", "accum")
        want[f"{norm}.compute"] = tuple(
            [Touch("read", "region", region), Touch("write", "region", region)] for region in regions
        )
    assert wrong == want


# -- what is recorded ------------------------------------------------------------------------------------------

KERNEL = """
#include <megagen/ptx/bulk.cuh>
#include <megagen/ptx/control.cuh>
#include <megagen/ptx/mbarrier.cuh>
#include <megagen/ptx/memory.cuh>

struct Params {
    const unsigned char* in;
    unsigned char* heap;
    unsigned char* out;
};

extern "C" __global__ void touches(const __grid_constant__ Params p) {
    using namespace megagen;
    const u32 base = ptx::dynamic_shared(), bar = base + 8;
    const bool first = blockIdx.x == 0;
    ptx::Step step = 0;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 3);
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (threadIdx.x == 0) {
        step = 1;
        ptx::mbarrier_arrive_expect_tx(bar, first ? 32 : 4);
        ptx::mbarrier_arrive_count(bar, 2);
        step = 2;
        if (first) {
            ptx::st_global_v4(p.heap, uint4{1, 0, ~0u, 1});
            ptx::red_add_release_gpu(p.heap + 64, 1);
            ptx::st_global_u16(p.out + 512, 1);
            ptx::bulk_load(base + 64, p.in + 16, 32, bar);
            step = 3;
            ptx::st_async(ptx::mapa(base + 128, 1), 5, ptx::mapa(bar, 1));
        }
        step = 4;
        while (!ptx::mbarrier_try_wait_parity_cluster(bar, 0)) ptx::still_waiting(false, 0, 0, 0);
        step = 5;
        const u32 x = ptx::ld_shared_u32(base + (first ? 64 : 128));
        ptx::st_shared_u16(base + 202, x);
        ptx::red_or_shared(base + (first ? 64 : 128), 1);
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
}
"""


def test_what_is_recorded() -> None:
    """Every kind of access, to the byte where it matters, by the step that began it; nothing unless asked."""
    path = compile_library(KERNEL, kernels=["touches"], settings=Settings.from_env())
    for footprints in (False, True):
        with Engine(path, arena_bytes=1 << 24, footprints=footprints) as engine:
            kinds = {"in": Kind.CONSTANT, "heap": Kind.EXCHANGE, "out": Kind.OUTPUT}
            addresses = [engine.allocate(1024, kind=kind, name=name) for name, kind in kinds.items()]
            for address in addresses:
                engine.wrote(address, 1024)
            for _ in range(2):
                engine.launch("touches", struct.pack("3Q", *addresses), Geometry(2, 32, cluster=2, shared=256))
            engine.run()
            found = engine.footprints()
        if not footprints:
            assert found == Footprints((), ())
    for number in (0, 1):
        assert {f[2:] for f in found.touched if f.launch == number} == {
            (0xFFFFFFFF, "init", "shared", "", ((8, 16),)),
            (2, "write", "global", "heap", ((0, 4), (12, 16))),
            (2, "zeros", "global", "heap", ((4, 8),)),
            (2, "ones", "global", "heap", ((8, 12),)),
            (2, "atomic", "global", "heap", ((64, 68),)),
            (2, "write", "global", "out", ((512, 768),)),
            (2, "bulk_read", "global", "in", ((0, 256),)),
            (2, "bulk_write", "shared", "", ((64, 96),)),
            (2, "complete_tx", "shared", "", ((8, 16),)),
            (3, "write", "cluster", "", ((128, 132),)),
            (3, "complete_tx", "cluster", "", ((8, 16),)),
            (4, "wait", "shared", "", ((8, 16),)),
            (5, "read", "shared", "", ((64, 68), (128, 132))),
            (5, "write", "shared", "", ((200, 204),)),
            (5, "atomic", "shared", "", ((64, 68), (128, 132))),
        }
        assert {p[2:] for p in found.phases if p.launch == number} == {
            (1, "arrive", 8, 3, 2),
            (1, "expect_tx", 8, 1, 2),
        }


def test_a_place_that_nobody_has_is_an_error() -> None:
    plan = pipeline.check(pipeline.Request(Path("muse_moe.py"), tp=2, tiny=True)).plan
    step = next(s for _, s in steps(plan) if s.call == "merge" or s.call == "reduce")
    end = max(c.offset + c.copies * c.bytes for c in plan.channels)
    assert end < plan.heap.bytes + 4
    for space, name, byte in (("global", "heap", plan.heap.bytes), ("shared", "", plan.launch.shared_bytes)):
        wild = Footprint(0, 0, step.index, "write", space, name, ((byte, byte + 4),))
        with pytest.raises(MegagenError, match=rf"{step.op}\.{step.call} touches byte {byte} of the .* nobody"):
            observed(plan, Footprints((wild,), ()))
