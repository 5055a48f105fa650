"""Traces that are read wrongly pass for right ones: files that are none, blocks that move, waits that no span says."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from test_emulate_swa import few
from test_stamps import FACTS, TOKENS, checked, launched, library, recorded, slot, small_plan, weights
from test_trace_view import LOADER, REDUCER, gemm, one, row
from trace_made import Maker, tiny

from megagen.errors import MegagenError
from megagen.ir.plan import Plan, StampPlan
from megagen.trace import offset, path, view
from megagen.trace.record import Recorder, Slots
from megagen.trace.spans import Kind, Trace
from megagen.trace.table import check, launches


def pair(first: int, second: int, plan: Plan | None = None) -> Slots:
    """A launch of two blocks, on these SMs."""
    data = b"".join(slot(1000, 0, [(1010, 1100, 5 << 4, 0)], sm=sm) for sm in (first, second))
    return Slots.read(plan or small_plan(), np.frombuffer(data, "u1"))


# -- files -----------------------------------------------------------------------------------------------------------


def test_no_bytes_become_a_traceback(tmp_path: Path) -> None:
    """Bits of every part of the file the other way round, and any length: zlib, zip and JSON have their own errors."""
    whole, bad = tmp_path / "whole.trace", tmp_path / "bad.trace"
    gemm(Maker(tiny())).trace().save(whole)
    data, seen = whole.read_bytes(), 0
    for at in range(0, len(data), len(data) // 150):
        for broken in (data[:at], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]):
            bad.write_bytes(broken)
            try:
                Trace.load(bad)
            except MegagenError:
                seen += 1
    assert seen > 200
    with pytest.raises(zlib.error):  # which is no ValueError
        zlib.decompress(b"x\x9c\xff\xff")


@pytest.mark.parametrize("header", ["[]", "3", "{}", "[" * 100_000, json.dumps({"version": 1})])
def test_a_header_that_is_none(header: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.trace"
    with file.open("wb") as out:
        np.savez(out, header=np.frombuffer(header.encode(), "u1"))
    with pytest.raises(MegagenError, match="no trace"):
        Trace.load(file)


@pytest.mark.parametrize("part", ["sms", "sms1", "blocks", "launches", "more"])
def test_arrays_of_other_shapes(part: str, tmp_path: Path) -> None:
    made = gemm(Maker(tiny())).trace()
    sms, table = made.sms, made.launches
    if part == "sms":
        sms = sms[0]
    elif part == "sms1":
        sms = np.zeros((0,), "<u2")
    elif part == "blocks":
        sms = sms[:, :-1]
    elif part == "more":
        sms = np.stack([sms] * (len(table) + 1))
    else:
        table = table.reshape(-1, 1)
    Trace(made.facts, made.plan, table, sms, made.spans).save(tmp_path / "x.trace")
    with pytest.raises(MegagenError, match="no trace"):
        Trace.load(tmp_path / "x.trace")


# -- recording -------------------------------------------------------------------------------------------------------


def test_blocks_move_between_launches(tmp_path: Path) -> None:
    """With programmatic dependent launch a block takes the SM that is left first, another one each time."""
    recorder = Recorder(small_plan())
    for index, sms in enumerate(((3, 8), (8, 3), (5, 3))):
        recorder.launches.append((index, 0, [pair(*sms)]))
    recorder.trace(FACTS.model_copy(update={"ranks": 1})).save(tmp_path / "x.trace")
    found = Trace.load(tmp_path / "x.trace")
    assert [[found.sm(i, 0, b) for b in (0, 1)] for i in range(3)] == [[3, 8], [8, 3], [5, 3]]
    assert found.ranks == 1


def test_what_is_not_written_is_not_kept() -> None:
    """A recording of many launches keeps what warps wrote, not the room they had."""
    plan = small_plan(records=60_000)
    data = slot(1000, 0, [(1010, 1100, 5 << 4, 0)] * 3, room=60_000) + slot(1000, 0, [], room=60_000)
    kept = Slots.read(plan, np.frombuffer(data, "u1"))
    assert kept.records.nbytes == 3 * 16 and kept.room == 60_000


def test_an_offset_is_no_more_exact_than_the_rounds_that_count() -> None:
    """Each may be wrong by half of what it took: one round of 100 ns says little for those of 200 beside it, which are
    all late one way."""
    left = np.arange(8, dtype="i8") * 10_000
    away = np.array([100, 200, 900, 900, 900, 900, 900, 900])
    served = np.stack([left + 1, left + 1 + away], axis=1)
    came = left + 1 + np.array([50, 199, 450, 450, 450, 450, 450, 450])
    found = offset.Offset.of(served, np.stack([came, came], axis=1))
    assert found.ns == pytest.approx((0 + 99) / 2) and abs(found.ns - 0.0) <= found.error_ns == 100.0


@pytest.mark.slow
def test_a_full_slot_ends_before_the_next_warps() -> None:
    """With room for five records, the same launches leave each warp's first five, whole, and count the rest."""
    import torch

    from megagen.bench.emulation import Emulation
    from megagen.bench.inputs import Inputs
    from megagen.cli import pipeline
    from megagen.emulate.build import compile_library
    from megagen.runtime.stack import Stack
    from megagen.runtime.step import Step
    from megagen.settings import Settings

    whole = recorded("block", launched("block", library("block"), seed=7)[3])
    found = checked("block")
    warps = found.plan.launch.blocks * found.plan.launch.warps
    assert found.plan.stamps is not None
    stamps = StampPlan(records=5, cycles=False, bytes=found.plan.stamps.bytes)  # so that buffers lie where they lay
    plan = found.plan.model_copy(update={"stamps": stamps})
    text = compile_library(pipeline.emit(plan), kernels=[k.name for k in plan.kernels], settings=Settings.from_env())
    with Emulation(plan, found.graph, text, weights("block")).world(7, race=True, footprints=True) as world:
        given = Inputs.random(found.graph, 2, TOKENS, 0, torch.device("cpu"), Step.chain(TOKENS, 0))
        for rank in world.ranks:
            rank.set_step(given.step)
            rank.set_route_override(few(TOKENS))
        stack = Stack(world, [weights("block").packed], given.ranks, layers=2)
        stack.launch()
        world.synchronize()
        recorder, size = Recorder(plan), warps * (4 + 5) * 16
        for index, bound in enumerate(stack.bound):
            assert not any(layer.stamps[size:].any() for layer in bound if layer.stamps is not None)
            recorder.add(index, 0, [layer.stamps[:size] for layer in bound if layer.stamps is not None])
    cut = recorder.trace(FACTS)
    names = ["launch", "rank", "block", "warp"]
    place, count = np.unique(whole.spans[names], return_counts=True)
    kept = dict(zip(*(x.tolist() for x in np.unique(cut.spans[names], return_counts=True)), strict=True))
    asked = count + 1  # what comes before a warp's program is a job too, which is not shown
    assert (asked > 5).sum() > 20
    assert [kept.get(p, 0) for p in place.tolist()] == (np.minimum(asked, 5) - 1).tolist()
    assert int(cut.launches["dropped"].sum()) == int(np.maximum(asked - 5, 0).sum())
    assert set(cut.spans.tolist()) <= set(whole.spans.tolist())
    full = whole.spans[(whole.spans["kind"] == Kind.WAIT) & (whole.spans["edge"] == plan.barrier("ring_full").index)]
    assert set(full["slot"].tolist()) == set(range(plan.ring.stages))  # which stage was waited for


# -- reading ---------------------------------------------------------------------------------------------------------


def test_input_of_another_share_is_not_the_ops_beginning() -> None:
    """The wait for a stage in between was too short to be written: the work says that there was one."""
    m = gemm(Maker(tiny()), block=1)
    m.job(4, "o_proj.math", 1000, 9000, [("attended", 1500, 2500), ("attended", 2700, 3000), ("attended", 6000, 7000)])
    m.job(REDUCER, "o_proj.reduce", 900, 9500, [("accum_full", 1000, 8000)])
    m.load(LOADER, "o_proj.load_weights", 200, 32768, 0).job(LOADER, "o_proj.load_weights", 100, 4000)
    made = m.trace()
    (launch,) = launches(made, check(made), [0])
    ready = launch.ready()[~launch.waits & (launch.place == 0) & (launch.step == m.step(4, "o_proj.math").index)]
    assert ready.tolist() == [3000]


def test_an_op_does_not_begin_with_who_sums_it_up() -> None:
    """The reduce role of an expert GEMM waits for the table too, long before the accumulators."""
    m = Maker(tiny())
    m.job(LOADER, "gate_up.load_weights", 100, 7000).load(LOADER, "gate_up.load_weights", 2200, 32768)
    m.job(4, "gate_up.math", 1000, 8000, [("table_ready", 1100, 2000), ("expert_in", 2300, 5000)])
    m.job(REDUCER, "gate_up.reduce", 1000, 9000, [("table_ready", 1100, 2000), ("accum_full", 3000, 7000)])
    assert row(view.run(m.trace()), "gate_up").begin == one(5)


def test_accumulators_are_filled_by_the_ops_own_math() -> None:
    """Which goes on with its next op before the reduce role has seen it."""
    m = Maker(tiny())
    m.job(4, "router.math", 100, 3000).job(4, "pooler.math", 3000, 6000, [("normed", 3050, 3400)])
    m.job(REDUCER, "router.reduce", 50, 9000, [("accum_full", 100, 3060)])
    made = m.trace()
    names = check(made)
    (launch,) = launches(made, names, [0])
    legs = path.legs(launch, path.walk(launch))
    assert [(g.op, g.what) for g in legs[-3:]] == [("router", "work"), ("router", "hop"), ("router", "work")]
