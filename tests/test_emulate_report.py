"""Names for places, and the errors made of the emulator's reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megagen.cli import pipeline
from megagen.emulate.report import NO_STEP, Report, error
from megagen.errors import EmulationError
from megagen.ir.names import Names, ranges
from megagen.ir.plan import Plan, SyncKind


@pytest.fixture(scope="module")
def plan() -> Plan:
    return pipeline.check(pipeline.Request(Path("muse_moe.py"), tp=2, tiny=True)).plan


def step(plan: Plan, op: str, call: str) -> int:
    steps = (s for k in plan.kernels for p in k.programs for s in p.steps)
    return next(s.index for s in steps if (s.op, s.call) == (op, call))


def who(**more: Any) -> dict[str, Any]:
    given = {"rank": 0, "launch": 3, "block": 1, "warp": 5, "lane": 3, "step": NO_STEP}
    return (
        given
        | {
            "file": "megagen/mma/format.cuh",
            "line": 80,
            "function": "static void megagen::Mma<D>::multiply(const Ctx&) [with D = X]",
        }
        | more
    )


def made(plan: Plan | None, **more: Any) -> EmulationError:
    given: dict[str, Any] = {"kind": "unwritten", "message": "reads 16 bytes of which 4 were never written", "seed": 7}
    return error(plan, Report.model_validate(given | more))


# -- names of places -------------------------------------------------------------------------------------------


def test_every_element_of_every_channel_is_found_at_its_offset(plan: Plan) -> None:
    """The Plan's strides, read backwards: a corner of each axis."""
    names = Names(plan)
    for c in plan.channels:
        if c.kind in (SyncKind.MBARRIER, SyncKind.CLUSTER):
            continue
        size, ranks = int(c.dtype.bits) // 8, plan.tp if c.scope == "world" else 1
        gathered = c.shape[-1] == ranks * c.shard
        lead = c.shape[:-1] if gathered else c.shape[1:-1]
        for copy in range(c.copies):
            for rank in {0, ranks - 1}:
                for corner in (0, -1):
                    at = [0 if corner == 0 else n - 1 for n in lead]
                    row = 0
                    for i, n in zip(at, lead, strict=True):
                        row = row * n + i
                    e = 0 if corner == 0 else c.shard - 1
                    offset = c.offset + copy * c.bytes + size * (rank * c.rank_stride + row * c.row_stride + e)
                    want = [*at, rank * c.shard + e] if gathered else [rank, *at, e]
                    assert names.heap(offset) == f"channel '{c.name}' ({c.kind}), copy {copy}, element {want}"


def test_other_words_of_the_heap(plan: Plan) -> None:
    names, heap = Names(plan), plan.heap
    assert names.heap(heap.abort_offset) == "the abort word"
    assert names.heap(heap.epoch_offset + 4) == "the epoch of block 1"
    record = heap.record_offset + 64 * (2 * plan.launch.warps + 5) + 8
    assert names.heap(record) == "the hang record of block 2, warp 5"
    assert names.heap(heap.bytes + 4096) is None


def test_shared_memory(plan: Plan) -> None:
    names, ring, full = Names(plan), plan.region(plan.ring.region), plan.barrier(plan.ring.full)
    assert names.shared(ring.offset + plan.ring.stage_bytes + 16) == "region 'ring', stage 1, byte 16"
    assert names.shared(full.offset + 8) == f"barrier '{full.name}', slot 1"
    assert names.shared(1 << 30) is None


def test_parameters(plan: Plan) -> None:
    names, experts = Names(plan), next(w for w in plan.weights if w.layout == "tiles" and w.experts)
    each = experts.bytes // experts.experts
    assert names.parameter(experts.parameter, 3 * each + 32) == f"{experts.parameter}, expert 3, byte 32"
    assert names.parameter("stream_out", 4 * (2048 + 5)) == "stream_out, element [1, 5]"
    assert names.parameter("control", 4) == "control, byte 4"
    assert Names(None).parameter("stream_out", 4) == "stream_out, byte 4"


def test_ranges() -> None:
    assert ranges([7, 0, 1, 2, 7]) == "0-2, 7"


# -- faults ----------------------------------------------------------------------------------------------------


def test_a_fault_names_op_line_channel_place_and_seed(plan: Plan) -> None:
    c = plan.channel("expert_mid")
    place = {"space": "global", "rank": 1, "name": "heap", "offset": c.offset + c.bytes + 34, "bytes": 16}
    other = {"what": "bulk copy", **who(step=step(plan, "gate_up", "reduce"), rank=1, line=12, lane=0)}
    e = made(plan, who=who(step=step(plan, "down", "math")), place=place, other=other)
    assert e.message == (
        "down.math reads 16 bytes of which 4 were never written: channel 'expert_mid' (lamport), copy 1, "
        "element [0, 0, 17], in the heap of rank 1; seed 7 repeats it"
    )
    assert e.seed == 7
    assert e.loc is not None
    assert "s.assign" in e.loc.text
    (first, _), (second, line) = e.notes
    assert first == "in rank 0, launch 3, block 1, warp 5, lane 3, at megagen/mma/format.cuh:80 (multiply)"
    assert second.startswith("the other access is a bulk copy by gate_up.reduce, rank 1, launch 3, block 1, warp 5")
    assert line is not None
    assert line.file.endswith("muse_moe.py")
    assert f"--> {e.loc.file}:{e.loc.line}" in e.render()


def test_a_fault_in_shared_memory(plan: Plan) -> None:
    full = plan.barrier(plan.ring.full)
    place = {"space": "shared", "rank": 0, "block": 2, "name": "", "offset": full.offset + 8, "bytes": 8}
    e = made(plan, kind="too_many_arrivals", message="arrives once too often", who=who(), place=place)
    assert e.message == (
        f"arrives once too often: barrier '{full.name}', slot 1, in the shared memory of block 2, rank 0; "
        "seed 7 repeats it"
    )
    assert e.loc is None  # before the first step


def test_without_a_plan_the_numbers_stand(plan: Plan) -> None:
    place = {"space": "global", "rank": 0, "block": None, "name": "heap", "offset": 34, "bytes": 16}
    e = made(None, who=who(step=22), place=place)
    assert e.message.startswith("step 22 reads 16 bytes")
    assert "byte 34, in the heap of rank 0" in e.message
    place |= {"space": "shared", "name": ""}
    assert "byte 34, in the shared memory, rank 0" in made(None, who=who(step=22), place=place).message
    assert made(None).message == "reads 16 bytes of which 4 were never written; seed 7 repeats it"


def waiting(**more: Any) -> dict[str, Any]:
    given = {"rank": 0, "launch": 1, "block": 0, "warp": 4, "lanes": 0xFFFFFFFF, "step": NO_STEP, "what": "poll"}
    return given | {"file": "megagen/sync/wait.cuh", "line": 14, "edge": None, "slot": None, "phase": None} | more


def test_a_deadlock_leads_with_what_comes_first_in_the_flow(plan: Plan) -> None:
    mid, ring = plan.channel("expert_mid"), plan.barrier(plan.ring.full)
    down, load = step(plan, "down", "math"), step(plan, "down", "load_weights")
    stuck = [
        waiting(what="__syncthreads", warp=1, slot=0, phase=1),
        waiting(what="a vote", rank=1, block=2, warp=4, lanes=7),  # of a warp whose other lanes poll
        waiting(step=load, what="mbarrier", edge=ring.index, slot=2, phase=1, warp=0),
        *(
            waiting(
                step=down, edge=mid.index, slot=16 * w + half, phase=0, rank=r, block=b, warp=4 + w, lanes=1 << half
            )
            for r in (0, 1)
            for b in (1, 2, 3)
            for w in range(8)
            for half in (0, 1)
        ),
    ]
    e = made(plan, kind="deadlock", message="", waiting=stuck)
    assert e.message == (
        "no warp can go on: down.math waits for channel 'expert_mid' (lamport), slot 0, phase 0, "
        "in rank 0, block 1, warp 4, launch 1; seed 7 repeats it"
    )
    notes = [n for n, _ in e.notes]
    where = "rank 0-1, block 1-3, warp 4-11, launch 1, at megagen/sync/wait.cuh:14"
    assert notes == [
        "48 × down.math waiting for channel 'expert_mid' (lamport), slot 0-1, 16-17, 32-33, 48-49, 64-65, ..., "
        f"phase 0: {where}",
        f"1 × down.load_weights waiting for barrier '{ring.name}', slot 2, phase 1: rank 0, block 0, warp 0, launch 1, "
        "at megagen/sync/wait.cuh:14",
        "1 × a warp waiting for __syncthreads: rank 0, block 0, warp 1, launch 1, at megagen/sync/wait.cuh:14",
    ]
    assert e.loc is not None
    assert e.notes[0][1] == e.loc


def test_a_deadlock_of_many_sorts_is_cut_short(plan: Plan) -> None:
    found = {(s.op, s.call): s.index for k in plan.kernels for p in k.programs for s in p.steps}
    steps = list(found.values())[:20]
    e = made(plan, kind="deadlock", message="", waiting=[waiting(step=s, warp=i) for i, s in enumerate(steps)])
    assert len(e.notes) == 13
    assert e.notes[-1][0] == "8 more warps, waiting for 8 other things"
