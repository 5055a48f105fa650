"""Runs of traces made by hand, with figures from arithmetic; HBM's queue against one that is served in steps."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_made import HOP, ROOT, Maker, layer, made, random, tiny

from megagen.check import check
from megagen.cli import traces
from megagen.dsl import L2, KiB, Schedule, load
from megagen.errors import MegagenError
from megagen.ir.plan import Plan
from megagen.lower import lower
from megagen.machines import load as machine
from megagen.trace import hbm, table, view
from megagen.trace.compare import compare
from megagen.trace.model import Row, Run, Stat
from megagen.trace.spans import SPAN, Trace

LOADER, TABLES, REDUCER, FINISHER, MATH = 0, 1, 2, 3, range(4, 12)
RATE = 4580  # bytes a ns of an h200


def row(run: Run, op: str) -> Row:
    return next(r for r in run.rows if r.op == op)


def one(us: float) -> Stat:
    """Of things that all take so long."""
    return us, us, us


def gemm(m: Maker, block: int = 0, late: int = 0, launch: int = 0) -> Maker:
    """o_proj on two math warps: input there at 3 and 3.2 µs, ended at 6 and 5 µs, reduced at 6.5."""
    at = {"block": block, "launch": launch}
    m.job(LOADER, "o_proj.load_weights", 100, 4000 + late, **at)
    m.load(LOADER, "o_proj.load_weights", 200 + late, 32768, 0, **at)
    m.load(LOADER, "o_proj.load_weights", 2500 + late, 32768, 1, **at)
    waits = [
        ("attended", 1500 + late, 2000 + late),
        ("attended", 2100 + late, 3000 + late),
        ("ring_full", 3100 + late, 3500 + late),
    ]
    m.job(4, "o_proj.math", 1000 + late, 6000 + late, [*waits, ("attended", 3600 + late, 3900 + late)], **at)
    m.job(5, "o_proj.math", 1100 + late, 5000 + late, [("attended", 1500 + late, 3200 + late)], **at)
    m.job(REDUCER, "o_proj.reduce", 900 + late, 6500 + late, [("accum_full", 1000 + late, 6100 + late)], **at)
    return m


def test_an_op_in_a_block() -> None:
    """Waits for input count until the first other wait: what is waited for between stages does not."""
    found = row(view.run(gemm(Maker(tiny())).trace()), "o_proj")
    math, reduce, loads = (next(p for p in found.parts if p.role == r) for r in ("math", "reduce", "load_weights"))
    assert [p.role for p in found.parts] == ["load_weights", "math", "reduce"]
    assert (math.begin, math.ready, math.end) == (one(1), one(3.2), one(6))
    assert math.waits == (1.74, 1.9, 2.06)  # 1.7 and 2.1 µs of its two warps, and between them
    assert (reduce.begin, reduce.ready, reduce.end) == (one(0.9), one(6.1), one(6.5))
    assert (loads.begin, loads.ready, loads.end) == (one(0.1), one(0.1), one(4))
    assert (found.begin, found.end, found.length, found.blocks) == (one(3.2), one(6.5), one(3.3), 1)
    (asked,) = found.loads
    assert (asked.into, asked.begin, asked.end, asked.bytes, asked.blocks) == ("ring", one(0.2), one(2.5), 65536, 1)
    assert re.fullmatch(r"_layer.py:\d+", found.source)
    assert (math.warps, reduce.warps) == (tuple(MATH), (REDUCER, FINISHER))


def test_figures_are_over_blocks_and_launches() -> None:
    """Eleven launches of one block, each 0.1 µs later than the one before: p10 is the second, p90 the last but one."""
    m = Maker(tiny())
    for i in range(11):
        gemm(m, late=100 * i, launch=i)
    run = view.run(m.trace())
    assert run.launches == 11
    assert run.total == (6.6, 7.0, 7.4)
    assert row(run, "o_proj").begin == (3.3, 3.7, 4.1)
    assert row(run, "o_proj").length == one(3.3)
    assert row(run, "o_proj").loads[0].begin == (0.3, 0.7, 1.1)
    assert row(run, "o_proj").loads[0].bytes == 65536  # of a launch
    assert max(b.end for b in run.blocks) == 7.0  # of the usual launch


@pytest.mark.parametrize(("late", "ready"), [(700, 3.0), (701, 1.0)])
def test_a_reduce_role_begins_with_its_first_accumulators(late: int, ready: float) -> None:
    """If they were there at once, no span says so, and what it waits for later is not its beginning."""
    m = gemm(Maker(tiny()), block=1).load(LOADER, "pooler.load_weights", 900, 32768)
    m.job(REDUCER, "pooler.reduce", 1000, 4000, [("accum_full", 1000 + late, 3000), ("accum_full", 3100, 3500)])
    (part,) = row(view.run(m.trace()), "pooler").parts
    assert part.ready == one(ready)


def test_blocks_without_a_share_of_a_gemm_load_none_of_it() -> None:
    """Theirs may take long all the same."""
    m = gemm(gemm(Maker(tiny())), block=2)
    for block in (1, 3):
        m.job(4, "o_proj.math", 100, 1900, block=block).job(REDUCER, "o_proj.reduce", 100, 6900, block=block)
        m.job(LOADER, "o_proj.load_weights", 100, 900, block=block)
    found = row(view.run(m.trace()), "o_proj")
    assert (found.blocks, found.begin, found.end) == (2, one(3.2), one(6.5))
    assert all(p.begin[0] >= 0.1 and p.end[2] <= 6.5 for p in found.parts)


def test_blocks_without_a_share_of_a_norm_wait_for_nothing() -> None:
    m = Maker(tiny())
    m.job(4, "pre_expert_norm.compute", 1000, 5000, [("pooled", 1200, 4000)])
    for block in (1, 2, 3):  # code is fetched for 2 µs, only to return
        m.job(4, "pre_expert_norm.compute", 1000, 3000, block=block)
    found = row(view.run(m.trace()), "pre_expert_norm")
    assert (found.blocks, found.begin, found.end) == (1, one(4), one(5))


def test_blocks_without_a_share_may_wait_for_a_counter() -> None:
    """They find out afterwards that there is nothing for them: 0.1 µs of work are none."""
    m = Maker(tiny(sync="counter"))
    m.job(FINISHER, "pooler.finish", 1000, 4600, [("pooled_partials", 1050, 4000)])
    m.job(FINISHER, "pooler.finish", 1000, 4100, [("pooled_partials", 1050, 4050)], block=1)
    found = row(view.run(m.trace()), "pooler")
    assert (found.blocks, found.begin, found.end) == (1, one(4), one(4.6))


def test_tables_are_made_in_every_block() -> None:
    m = Maker(tiny())
    for block in range(4):
        m.job(TABLES, "top_k.tables", 1000, 1100, [("routes", 1010, 1090)] if block else [], block=block)
        m.job(TABLES, "top_k.select", 900, 1000, block=block)  # no logits are waited for, and it is quick: no share
    found = row(view.run(m.trace()), "top_k")
    assert [p.role for p in found.parts] == ["tables"]
    assert found.blocks == 4


def test_ops_of_an_unfused_plan() -> None:
    """A kernel that makes the table once more is no part of top_k; it may begin before the last one has ended."""
    m = Maker(tiny(fused=False))
    at = next(i for i, k in enumerate(m.plan.kernels) if k.ops == ("top_k",))
    m.job(TABLES, "top_k.tables", 1000, 2000, [("routes", 1100, 1500)], kernel=at)
    m.job(TABLES, "top_k.tables", 1900, 9000, [("routes", 2000, 8000)], kernel=at + 2)
    m.job(4, "gate_up.math", 1800, 9500, [("table_ready", 1900, 9050)])
    run = view.run(m.trace())
    assert (row(run, "top_k").begin, row(run, "top_k").end) == (one(1.5), one(2))
    assert (row(run, "gate_up").begin, row(run, "gate_up").end) == (one(9.05), one(9.5))


def test_prefetches_are_loads_into_l2() -> None:
    m = Maker(tiny("muse_moe", unpooler="l2"))
    m.job(4, "unpooler.math", 3000, 5000, [("combined", 3000, 3500)])
    m.job(TABLES, "unpooler.prefetch_l2", 1000, 1100).prefetch(TABLES, "unpooler.prefetch_l2", 1050, 98304)
    m.prefetch(TABLES, "unpooler.prefetch_l2", 1060, 0, block=1)  # nothing falls to this block
    m.job(LOADER, "unpooler.load_weights", 2000, 4000).load(LOADER, "unpooler.load_weights", 2500, 32768)
    loads = {x.into: x for x in row(view.run(m.trace()), "unpooler").loads}
    assert (loads["l2"].begin, loads["l2"].bytes, loads["l2"].blocks) == (one(1.05), 98304, 1)
    assert (loads["ring"].begin, loads["ring"].bytes) == (one(2.5), 32768)


def test_idle_blocks() -> None:
    """Block 0 works from 1 to 2 µs, and to 3 on another warp from 1.5; a load of it is under way from 4 to 6 and is
    waited for. Attaching is no work. Then there is one as short as the shortest. The launch takes 10 µs."""
    m = Maker(tiny())
    m.job(4, "attach", 0, 1000).job(4, "o_proj.math", 1000, 6000, [("attended", 2000, 5900)])
    m.job(REDUCER, "o_proj.reduce", 500, 3000, [("accum_full", 500, 1500)])
    m.job(LOADER, "o_proj.load_weights", 3000, 6000, [("ring_empty", 3000, 4000), ("ring_full", 4000, 6000, 2)])
    m.load(LOADER, "o_proj.load_weights", 4000, 32768, 2)
    m.load(LOADER, "next_qkvg.load_weights", 8000, 458_000, 1)
    trace = m.trace(ends=[10_000])
    run = view.run(trace)
    idle = [10 - (3 - 1) - (6 - 4) - 0.64, 10, 10, 10]
    assert run.idle == pytest.approx(np.percentile(idle, (10, 50, 90)), abs=0.001)


def test_waits_are_grouped_and_the_costliest_first() -> None:
    m = Maker(tiny())
    for block, us in enumerate((1000, 2000, 6000)):
        m.job(4, "residual.compute", 1000, 9000, [("unpooled", 1000, 1500), ("unpooled", 2000, 1500 + us)], block=block)
    m.job(5, "combine.compute", 1000, 1300, [("expert_out", 1100, 1200)])
    waits = {(w.op, w.edge): w for w in view.run(m.trace()).waits}
    # 500 ns and then 500, 1500 or 5500
    assert waits["residual", "unpooled"].us == (1.2, 2, 5.2)
    assert waits["residual", "unpooled"].begin == one(1)
    assert waits["combine", "expert_out"].us == one(0.1)


def test_what_a_run_says_of_its_plan() -> None:
    plan = tiny()
    m = gemm(Maker(plan)).trace(dropped=7, plain_us=80.0, stamped_us=82.0, experts=plan.nominal_experts, context=640)
    run = view.run(m)
    assert [s.index for s in run.steps] == list(range(len(run.steps)))
    assert {(s.op, s.call) for s in run.steps} >= {("", "attach"), ("gate_up", "math"), ("o_proj", "load_weights")}
    assert {e.name: e.kind for e in run.edges} | {"attended": "lamport", "ring_full": "barrier"} == {
        e.name: e.kind for e in run.edges
    }
    assert (run.dropped, run.plain, run.stamped, run.blocks_of) == (7, 80, 82, 4)
    assert dict(run.facts)["stamps"] == "+2.00 µs (+2.5%)"
    assert run.floor == pytest.approx(sum(op.weight_bytes for op in plan.ops) / RATE / 1000, abs=0.001)
    titles = [w.title for w in run.blocks[0].warps]
    assert titles[LOADER] == "loads for attention, loads weights"
    assert titles[REDUCER] == "reduce of 7 ops"
    assert titles[FINISHER] == "reduce of 7 ops, sum of all_reduce, finish of " + " and ".join(
        op.name for op in plan.ops if "finish" in op.roles
    )
    # kind, step, edge, slot, bytes, begin, end: the first of the producer's
    loads = next(s.index for s in run.steps if (s.op, s.call) == ("o_proj", "load_weights"))
    assert next(b for b in run.blocks if b.block == 0).warps[LOADER].spans[0] == (0, loads, 0, 0, 0, 100, 4000)


def test_the_floor_follows_the_experts_of_the_trace() -> None:
    plan = lower(load(ROOT / "schedules/muse_swa.py"))
    bytes_of = {op.name: op.weight_bytes for op in plan.ops}
    experts = bytes_of["gate_up"] + bytes_of["down"]
    facts = Maker(plan).job(4, "attach", 0, 9).trace(experts=8).facts
    assert view.floor(plan, facts) == pytest.approx(
        (sum(bytes_of.values()) - experts * 41 / 49) / RATE / 1000, abs=0.001
    )


def test_an_emulators_time_is_no_machines() -> None:
    """Neither a floor nor bytes that HBM could deliver are said of it."""
    trace = layer(tiny())
    run = view.run(replace(trace, facts=trace.facts.model_copy(update={"origin": "emulated"})))
    assert run.floor is None and not any(w.cover for w in run.waits)
    assert any(w.cover for w in view.run(trace).waits)
    assert "HBM" not in traces.sheets(run)[0].note


def test_blocks_are_of_every_rank_from_the_first_to_end_to_the_last() -> None:
    m = Maker(tiny(), ranks=2)
    for rank in range(2):
        for block in range(4):
            m.job(4, "attach", 0, 1000 + 100 * block + rank, block=block, rank=rank)
    trace = m.trace()
    assert [(b.rank, b.block) for b in view.run(trace, blocks=4).blocks] == [(0, 0), (0, 3), (1, 0), (1, 3)]
    assert [(b.rank, b.block) for b in view.run(trace, blocks=1).blocks] == [(0, 2), (1, 2)]
    assert len(view.run(trace).blocks) == 8
    assert [b.end for b in view.run(trace, blocks=6).blocks] == [1, 1.2, 1.3, 1.001, 1.201, 1.301]


def test_ranks_are_counted_apart() -> None:
    m = Maker(tiny(), ranks=2)
    for rank in range(2):
        for block in range(1 + rank, 4):
            m.job(4, "pre_expert_norm.compute", 1000, 5000, [("pooled", 1000, 3000)], block=block, rank=rank)
        m.load(LOADER, "o_proj.load_weights", 100, 45_800, block=2, rank=rank)
    run = view.run(m.trace())
    assert row(run, "pre_expert_norm").blocks == 2  # three on one rank, two on the other, halves rounded down
    assert run.hbm_idle == one(4.36)  # each has an HBM of its own, from which a load takes 0.64 µs


def test_waits_whose_job_found_no_room() -> None:
    """A warp out of room has written a wait of the job that it could not write any more."""
    m = Maker(tiny()).job(4, "attach", 0, 1000)
    step = m.step(4, "o_proj.math").index
    m.spans.append((0, 0, step, m.edge("attended"), 0, 4, 1, 0, 0, 1500, 2000))
    run = view.run(m.trace(ends=[3000], dropped=4))
    assert (run.waits, run.rows, run.dropped) == ((), (), 4)
    assert run.path[-1].end == 3
    assert run.idle == one(3)


def test_launches_without_spans_do_not_count() -> None:
    m = gemm(gemm(Maker(tiny())), launch=2)
    run = view.run(m.trace(ends=[6500, 0, 6500, 0]))
    assert (run.launches, run.total) == (2, one(6.5))


def test_a_trace_without_spans_is_refused() -> None:
    for ends in ([], [0], [0, 0]):
        with pytest.raises(MegagenError, match="the trace has no spans"):
            view.run(made(tiny(), np.zeros(0, SPAN), ends=ends))


@pytest.mark.parametrize(("field", "value"), [("step", 60), ("rank", 1), ("block", 4), ("warp", 12), ("launch", 1)])
def test_a_trace_of_another_plan_is_refused(field: str, value: int) -> None:
    trace = gemm(Maker(tiny())).trace()
    trace.spans[field][-1] = value
    with pytest.raises(MegagenError, match=f"the trace names {field} {value}, and its plan muse_swa has") as caught:
        view.run(trace)
    assert caught.value.hint is not None


def test_the_order_of_spans_does_not_matter() -> None:
    trace = layer(tiny(), 3)
    mixed = np.random.default_rng(1).permutation(trace.spans)
    assert view.run(Trace(trace.facts, trace.plan, trace.launches, trace.sms, mixed)).rows == view.run(trace).rows


# HBM ------------------------------------------------------------------------------------------------------------------


def test_a_queue_of_bytes() -> None:
    """10 bytes a ns. At 100: 1,000 bytes, delivered at 200; at 150: 2,000, at 400; at 600, twice 1,000: at 800."""
    f = hbm.flow(np.array([100, 150, 600, 600]), np.array([1000, 2000, 1000, 1000]), 10.0, 1000)
    assert f.done.tolist() == [200, 400, 700, 800]
    assert list(zip(f.begin, f.end, strict=True)) == [(100, 400), (600, 800)]
    assert (f.busy, f.idle) == (500, 500)
    assert f.spare(np.array([0, 150, 350, 900]), np.array([1000, 400, 650, 1000])).tolist() == [500, 0, 200, 100]


def test_a_queue_that_the_launch_does_not_empty() -> None:
    f = hbm.flow(np.array([900]), np.array([9000]), 10.0, 1000)
    assert (f.done.tolist(), f.busy, f.idle) == ([1800], 100, 900)


def test_nothing_asked_for() -> None:
    for times in ([], [5, 7]):
        f = hbm.flow(np.array(times, "i8"), np.zeros(len(times), "i8"), 10.0, 1000)
        assert (f.idle, f.done.tolist(), f.spare(np.array([2]), np.array([5])).tolist()) == (1000, times, [3])


ASKS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=30)


@given(ASKS)
def test_a_queue_is_served_byte_by_byte(asks: list[tuple[int, int]]) -> None:
    """Against a clock that ticks: one byte a ns."""
    asks = sorted(asks, key=lambda a: a[0])
    times, sizes = (np.array([a[i] for a in asks], "i8") for i in range(2))
    f = hbm.flow(times, sizes, 1.0, 100)
    left, busy = 0, 0
    for now in range(100):
        left += sum(n for t, n in asks if t == now)
        busy += left > 0
        left -= left > 0
    assert f.busy == pytest.approx(busy)
    assert f.busy + f.idle == 100
    assert (f.begin[1:] > f.end[:-1] - 1e-6).all()


def test_what_l2_was_asked_for_counts_once() -> None:
    """The prefetch is of the first half of a block's stages. Of four loads the first two were asked for before."""
    m = Maker(tiny("muse_moe", unpooler="l2"))
    step = m.step(TABLES, "unpooler.prefetch_l2")
    m.plan = _shared(m.plan, step.index, 512)
    m.job(TABLES, "unpooler.prefetch_l2", 900, 1100).prefetch(TABLES, "unpooler.prefetch_l2", 1000, 65536)
    for block in range(2):
        for k in range(4):
            m.load(LOADER, "unpooler.load_weights", 2000 + k + block, 32768, k % 3, block=block)
    m.job(4, "attach", 0, 3000)
    trace = m.trace()
    (launch,) = table.launches(trace, table.check(trace), [0])
    got = [
        (int(p), bool(r), int(n)) for p, r, n in zip(launch.ask_place, launch.ask_ring, hbm.fresh(launch), strict=True)
    ]
    assert got == [
        (0, False, 65536), (0, True, 0), (0, True, 0), (0, True, 32768), (0, True, 32768), *[(1, True, 32768)] * 4,
    ]  # fmt: skip
    busy = 640 + (2004 + 640 - 2001)  # the prefetch; from the other block's first load to its last one
    assert view.run(trace).hbm_idle[1] == pytest.approx((3000 - busy) / 1000, abs=0.002)


def _shared(plan: Plan, index: int, last: int) -> Plan:
    """The plan, with a prefetch of only the first ``last`` of 1024."""
    data = json.loads(plan.to_json())
    for program in data["kernels"][0]["programs"]:
        for s in program["steps"]:
            if s["index"] == index:
                s["args"] = [0, last]
    return Plan.model_validate(data)


def test_when_loads_have_landed() -> None:
    """As the first warp that waits for the stage saw it. Where none had to, not before any load has ever landed, and
    before the stage is loaded again."""
    m = Maker(tiny()).job(LOADER, "o_proj.load_weights", 0, 9000)
    for asked, stage in ((100, 0), (200, 1), (3000, 0)):
        m.load(LOADER, "o_proj.load_weights", asked, 32768, stage)
    m.job(4, "o_proj.math", 0, 9000, [("ring_full", 500, 700, 1), ("ring_full", 3500, 4000, 0)])
    m.job(5, "o_proj.math", 0, 9000, [("ring_full", 3500, 4010, 0)])
    trace = m.trace()
    (launch,) = table.launches(trace, table.check(trace), [0])
    seen, known = launch.loaded()
    assert (seen.tolist(), known.tolist()) == ([3000, 700, 4000], [False, True, True])
    assert view.landed(launch, hbm.flows(launch)).tolist() == [740, 700, 4000]


def test_busy_and_idle_make_a_launch() -> None:
    run = view.run(layer(tiny(), 3))
    begins, ends = zip(*run.hbm_busy, strict=True)
    assert all(a <= b for a, b in zip(ends[:-1], begins[1:], strict=True))
    assert sum(ends) - sum(begins) + run.hbm_idle[1] == pytest.approx(run.total[1], abs=0.005)


# what could be done meanwhile ----------------------------------------------------------------------------------------


def waiting(m: Maker, loads: int, nbytes: int = 4_580_000) -> str:
    """unpooler's math waits for combine from 2 to 5 µs, and its weights are asked for at ``loads``."""
    m.job(4, "combine.compute", 1000, 2000).job(4, "unpooler.math", 2000, 9000, [("combined", 2000, 5000)])
    m.job(REDUCER, "down.reduce", 500, 1950).job(FINISHER, "pooler.finish", 500, 1500)
    m.job(LOADER, "unpooler.load_weights", 1000, 9000)
    m.job(TABLES, "top_k.tables", 500, 1900).load(LOADER, "unpooler.load_weights", loads, nbytes)
    return next(w.cover for w in view.run(m.trace()).waits if w.edge == "combined")


def test_weights_that_could_have_been_asked_for() -> None:
    """3 µs of HBM are 13.7 MB, twice over; unpooler's 4.58 MB are asked for 1.5 µs after the wait, by the producer."""
    assert waiting(Maker(tiny()), 6500) == (
        "HBM could deliver 13.7 MB in it; unpooler's 4.6 MB are asked for 1.5 µs after it ends: "
        "s.prefetch(g.unpooler.weight, into=L2, by=s.warp(3), before=g.combine)"
    )


def test_weights_that_come_late_in_part() -> None:
    m = Maker(tiny()).load(LOADER, "unpooler.load_weights", 100, 4_580_000, 1)
    assert waiting(m, 6500, 3 * 4_580_000) == (
        "HBM could deliver 13.7 MB in it; the rest of unpooler's, 13.7 MB, is asked for 1.5 µs after it ends: "
        "s.prefetch(g.unpooler.weight, into=ring | L2, share=1/4, by=s.warp(3), before=g.combine)"
    )


def test_a_weight_whose_share_of_the_ring_is_said_already() -> None:
    """The producer cannot wait for two points with one weight: only L2 is left to say."""
    m = Maker(tiny(o_proj="quarter")).load(LOADER, "o_proj.load_weights", 100, 4_580_000)
    m.load(LOADER, "o_proj.load_weights", 6500, 3 * 4_580_000)
    m.job(4, "o_proj.math", 2000, 9000, [("attended", 2000, 5000)])
    (wait,) = view.run(m.trace()).waits
    assert re.search(
        r"the rest of o_proj's, 13.7 MB, .* s.prefetch\(g.o_proj.weight, into=L2, share=\d/\d, by=", wait.cover
    )


def test_more_weights_than_the_wait_is_long() -> None:
    """Of 18.3 MB, 13.7 are three quarters."""
    assert "into=L2, share=3/4, by=" in waiting(Maker(tiny()), 6500, 18_300_000)


def test_nothing_is_gained_while_hbm_is_busy() -> None:
    m = Maker(tiny()).load(LOADER, "gate_up.load_weights", 1900, 5 * 4_580_000)
    assert waiting(m, 6500) == "HBM is busy all through it: what is asked for sooner comes no sooner."


def test_all_has_been_asked_for() -> None:
    assert waiting(Maker(tiny()), 1000).endswith("but every weight whose address is known by then has been asked for.")


@pytest.mark.parametrize(("tables", "known"), [(900, True), (4000, False)])
def test_experts_are_known_when_the_tables_are(tables: int, known: bool) -> None:
    m = Maker(tiny()).job(TABLES, "top_k.tables", 500, tables)
    m.job(4, "pre_expert_norm.compute", 2000, 9000, [("pooled", 2000, 5000)]).load(
        LOADER, "down.load_weights", 7000, 10**7
    )
    m.job(FINISHER, "pooler.finish", 500, 1500)
    (wait,) = view.run(m.trace()).waits
    assert ("g.down.weight" in wait.cover) == known
    assert wait.cover.startswith("HBM could deliver 13.7 MB in it")


def test_a_prefetch_that_stands_too_late() -> None:
    plan = tiny("muse_moe", unpooler="l2")
    m = (
        Maker(plan)
        .job(TABLES, "unpooler.prefetch_l2", 6500, 6600)
        .prefetch(TABLES, "unpooler.prefetch_l2", 6500, 4_580_000)
    )
    m.job(4, "down.math", 2000, 9000, [("expert_mid", 2000, 5000)]).job(TABLES, "top_k.tables", 500, 1900)
    m.load(LOADER, "down.load_weights", 1000, 32768)
    (wait,) = view.run(m.trace()).waits
    assert re.search(
        r"are asked for 1.5 µs after it ends: let its prefetch \(muse_moe.py:\d+\) stand before=g.down$", wait.cover
    )


def test_more_stages_in_flight() -> None:
    """HBM has delivered the 32 KiB after 7 ns, and one stage at a time is allowed."""
    m = Maker(tiny()).load(LOADER, "o_proj.load_weights", 1000, 32768, 0)
    m.job(4, "o_proj.math", 1000, 5000, [("ring_full", 1000, 3000, 0)]).job(LOADER, "o_proj.load_weights", 900, 3000)
    (wait,) = view.run(m.trace()).waits
    stage = m.plan.op("o_proj").stream.stage_bytes // 1024
    assert wait.cover == (
        "HBM has nothing to do for 2.0 of its 2.0 µs, and a SM may have 1 stage on its way: "
        f"s.in_flight({2 * stage} * KiB, during=g.o_proj)"
    )
    free = Maker(tiny(in_flight="none")).load(LOADER, "o_proj.load_weights", 1000, 32768, 0)
    free.job(4, "o_proj.math", 1000, 5000, [("ring_full", 1000, 3000, 0)])
    assert view.run(free.trace()).waits[0].cover == ""


def test_what_is_proposed_is_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directive proposed for any wait of the shipped layer passes the checker, where the schedule has none."""
    monkeypatch.setattr(view, "WAITS", 100)
    path, tried = ROOT / "schedules/muse_swa.py", set()
    for wait in view.run(layer(lower(load(path)))).waits:
        _, found, directive = wait.cover.partition("s.")
        if not found or directive in tried:
            continue
        tried.add(directive)
        s: Schedule = load(path)
        exec(f"s.{directive}", {"s": s, "g": s.graph, "ring": s.rings[0], "L2": L2, "KiB": KiB})
        check(lower(s))
    assert len(tried) >= 5
    assert any("ring | L2" in d for d in tried)


# all of it ------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.booleans())
def test_a_run_of_anything(seed: int, ranks: int, fused: bool) -> None:
    """p10, median and p90 ascend; times are within the launches; no share is larger than the whole."""
    trace = random(tiny("muse_moe", fused), seed, ranks, launches=2)
    if not (table.totals(trace) > 0).any():
        return
    run = view.run(trace)
    longest = table.totals(trace).max() / 1000
    for r in run.rows:
        parts = [x for p in r.parts for x in (p.begin, p.ready, p.end, p.waits)]
        for stat in (r.begin, r.end, r.length, *parts, *(x for asked in r.loads for x in (asked.begin, asked.end))):
            assert 0 <= stat[0] <= stat[1] <= stat[2] <= longest + 0.001
        assert 0 < r.blocks <= 4 or ranks == 2
    for stat in (run.hbm_idle, run.idle, *(s.us for s in run.shares)):
        assert -0.001 <= stat[0] <= stat[1] <= stat[2] <= longest + 0.001
    assert Run.model_validate_json(run.model_dump_json()) == run


def test_a_layer_of_two_ranks() -> None:
    """What each op was made to take: 0.9 to 1.4 µs a role without weights, a hop between two of them, longer with."""
    plan = tiny()
    run = view.run(layer(plan, launches=2, ranks=2))
    assert [r.op for r in run.rows] == [op.name for op in plan.ops]
    for op in ("post_attention", "pre_expert_norm", "combine", "residual"):
        roles = len(plan.op(op).roles)
        least, most = 0.85 * roles, 1.45 * roles + HOP / 1000 * (roles - 1)
        assert least <= row(run, op).length[0] <= row(run, op).length[2] <= most
        assert row(run, op).blocks == 4  # as many tokens
    assert run.total[1] > run.floor


@pytest.mark.slow
def test_a_view_of_forty_launches_takes_seconds() -> None:
    trace = layer(lower(load(ROOT / "schedules/muse_swa.py")), launches=20, ranks=3)
    spans = np.tile(trace.spans, 2)
    spans["launch"][len(trace.spans) :] += 20
    twice = made(trace.plan, spans, 3)
    assert len(spans) > 5_000_000
    began = time.process_time()
    assert view.run(twice).launches == 40
    assert time.process_time() - began < 15


# two runs ------------------------------------------------------------------------------------------------------------


def changed(begin: int, late: int = 0, name: str = "a") -> Run:
    """Eleven launches with norms that take 1 µs, 10 ns later in each."""
    m = Maker(tiny())
    for i in range(11):
        m.job(4, "attach", 0, begin + 10 * i, launch=i)
        m.job(
            4,
            "residual.compute",
            begin + 10 * i,
            begin + 3000 + 10 * i + late,
            [("unpooled", begin + 10 * i, begin + 2000 + 10 * i)],
            launch=i,
        )
    return view.run(m.trace(name=name))


def test_runs_are_compared_op_by_op() -> None:
    found = compare(changed(1000), changed(1020, late=500, name="b"))
    assert (found.first, found.second) == ("a", "b")
    (op,) = found.ops
    assert (op.begin.first, op.begin.second, op.begin.by, op.begin.spread) == (3.05, 3.07, 0.02, 0.04)
    assert (op.length.by, op.length.spread, op.length.beyond) == (0.5, 0, True)
    assert (op.wait.first, op.wait.by) == (2, 0)
    assert not op.begin.beyond
    assert (found.total.by, found.total.beyond) == (0.52, True)
    assert (op.critical.first, op.critical.by) == (3, 0.5)  # its wait is on the path: nobody is known to end it
    assert [o.op for o in found.moved] == ["residual"]


def test_a_run_against_itself_is_no_change() -> None:
    run = view.run(layer(tiny(), 3))
    found = compare(run, run)
    assert len(found.ops) == len(run.rows)
    assert not found.total.beyond and not found.moved
    assert all(c.by == 0 for o in found.ops for c in (o.begin, o.end, o.length, o.wait, o.critical))


def test_ops_in_one_run_only() -> None:
    both = view.run(layer(tiny(), 2)), view.run(layer(tiny("muse_moe"), 2))
    found = compare(*both)
    assert found.only_first == ("attention", "o_proj", "all_reduce", "post_attention", "next_qkvg", "next_heads")
    assert found.only_second == ("pre_ffn_norm",)
    text = traces.comparison(found)[0].note
    assert "Only in made: attention, o_proj" in text


# sheets --------------------------------------------------------------------------------------------------------------


def test_a_run_as_sheets() -> None:
    run = view.run(gemm(Maker(tiny())).trace(dropped=3, plain_us=6.0, stamped_us=6.3))
    ops, way, waits = traces.sheets(run)
    assert [c.text(ops.rows[0]) for c in ops.columns][:8] == (
        ["o_proj", "1", "0.07", "0.20", "1.00", "3.20", "6.50", "3.30"]
    )
    assert "A launch takes 6.50 µs (p10 to p90: 6.50 to 6.50)." in ops.note
    assert "Back to back: 6.00 without stamps, which cost 0.30 (5.0%)." in ops.note
    assert f"The floor is 8.72: {6 / 8.716:.2f} times that." in ops.note
    assert "3 spans found no room" in ops.note
    assert sum(r["us"] for r in way.rows) == pytest.approx(6.5)
    assert [c.text(waits.rows[0]) for c in waits.columns][:2] == ["o_proj.reduce", "accum_full"]
    json.dumps([s.json() for s in (ops, way, waits)], allow_nan=False)


def test_a_comparison_as_a_sheet() -> None:
    (sheet,) = traces.comparison(compare(changed(1000), changed(1020, late=500, name="b")))
    assert [c.text(sheet.rows[0]) for c in sheet.columns] == (
        ["residual", "+0.02 ", "+0.52*", "1.50 +0.50*", "2.00 +0.00 ", "3.50 +0.50*"]
    )
    assert "A launch: 4.05 to 4.57 µs, +0.52, more than it varies (0.04)." in sheet.note
    json.dumps(sheet.json(), allow_nan=False)


def test_a_graphs_first_launch_does_not_count() -> None:
    """Three layers, twice: the first takes 9 µs, the others 6.5. In the emulator there is no graph."""
    found = gemm(Maker(tiny())).trace()
    spans, launches = [], np.zeros(6, found.launches.dtype)
    for i in range(6):
        mine = found.spans.copy()
        mine["launch"] = i
        if i % 3 == 0:
            mine["end"][mine["end"] == mine["end"].max()] = 9000
        spans.append(mine)
        launches[i] = (i % 3, i // 3, 0, mine["end"].max(), 0)
    for origin, want in (("measured", 4), ("emulated", 6)):
        facts = found.facts.model_copy(update={"origin": origin})
        trace = replace(found, facts=facts, launches=launches, spans=np.concatenate(spans))
        run = view.run(trace)
        assert run.launches == want and run.total[2] == (6.5 if want == 4 else 9.0)
        assert ("less the first of each" in dict(run.facts)["launches"]) == (want == 4)
        alone = replace(found, facts=facts, launches=launches[:1], spans=spans[0])
        assert view.run(alone).total[1] == 9.0  # there are no others


def test_the_machine_of_these_tests() -> None:
    """Figures above are of its rate."""
    assert machine("h200").hbm_bytes_per_s == RATE * 1e9 == tiny().machine.hbm_bytes_per_s
