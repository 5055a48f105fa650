"""The critical path: who ended each kind of wait, by hand; that legs tile a launch, on traces drawn at random."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_made import Maker, layer, random, tiny

from megagen.trace import path, view
from megagen.trace.model import Leg
from megagen.trace.spans import Trace

LOADER, TABLES, REDUCER, FINISHER, MATH = 0, 1, 2, 3, range(4, 12)
Short = tuple[str, str, str, int, int, float, float]  # op.role, what, edge, block, warp, begin, end


def legs(trace: Trace) -> list[Short]:
    found = view.run(trace).path
    tiles(found, int(trace.launches["end"].max()))
    return [(f"{x.op}.{x.role}".strip("."), x.what, x.detail, x.block, x.warp, x.begin, x.end) for x in found]


def tiles(found: tuple[Leg, ...], total: int) -> None:
    assert found[0].begin == 0
    assert found[-1].end == total / 1000
    assert all(a.end == b.begin for a, b in pairwise(found))
    assert all(leg.begin < leg.end for leg in found)


def attached(maker: Maker, *warps: int, until: int = 1000, **where: int) -> Maker:
    for warp in warps:
        maker.job(warp, "attach", 0, until, **where)
    return maker


def test_weights_go_back_to_their_load_and_its_producer_to_who_made_room() -> None:
    """Stage 0 is loaded at 3 µs, when warp 5 was done with what it held before; warp 4 was done sooner."""
    m = attached(Maker(tiny()), 4, 5)
    m.job(LOADER, "o_proj.load_weights", 100, 3000, [("ring_empty", 150, 3000, 0)])
    m.load(LOADER, "o_proj.load_weights", 100, 32768, 0).load(LOADER, "o_proj.load_weights", 3000, 32768, 0)
    m.job(4, "o_proj.math", 1000, 8000, [("ring_full", 2500, 6000, 0)])
    m.job(5, "o_proj.math", 1000, 7000, [("ring_full", 2900, 6000, 0)])
    assert legs(m.trace()) == [
        ("attach", "launch", "", 0, 5, 0, 1),
        ("o_proj.math", "work", "", 0, 5, 1, 2.9),
        ("o_proj.load_weights", "hop", "ring_empty", 0, LOADER, 2.9, 3),
        ("o_proj.load_weights", "load", "ring_full", 0, LOADER, 3, 6),
        ("o_proj.math", "work", "", 0, 4, 6, 8),
    ]


def test_a_load_that_is_the_first_thing_of_a_launch() -> None:
    m = Maker(tiny()).job(LOADER, "o_proj.load_weights", 200, 500).load(LOADER, "o_proj.load_weights", 300, 32768, 1)
    attached(m, 4).job(4, "o_proj.math", 1000, 4000, [("ring_full", 1000, 2000, 1)])
    assert legs(m.trace()) == [
        ("", "launch", "", 0, LOADER, 0, 0.2),
        ("o_proj.load_weights", "work", "", 0, LOADER, 0.2, 0.3),
        ("o_proj.load_weights", "load", "ring_full", 0, LOADER, 0.3, 2),
        ("o_proj.math", "work", "", 0, 4, 2, 4),
    ]


def test_accumulators_go_back_to_the_last_of_the_math_warps() -> None:
    """Of those that have filled them: warp 6 waits for its next stage since 4.9 µs, warp 7 came to it sooner."""
    m = attached(Maker(tiny()), *MATH, REDUCER)
    for warp, done in ((6, 4900), (7, 4000)):
        m.job(warp, "o_proj.math", 1000, 9000, [("ring_full", done, 8900, 0)])
    m.job(REDUCER, "o_proj.reduce", 1000, 9500, [("accum_full", 1000, 5000)])
    assert legs(m.trace()) == [
        ("attach", "launch", "", 0, 6, 0, 1),
        ("o_proj.math", "work", "", 0, 6, 1, 4.9),
        ("o_proj.reduce", "hop", "accum_full", 0, REDUCER, 4.9, 5),
        ("o_proj.reduce", "work", "", 0, REDUCER, 5, 9.5),
    ]


def test_room_for_accumulators_goes_back_to_the_reduce_role() -> None:
    m = attached(Maker(tiny()), 4, REDUCER)
    m.job(REDUCER, "o_proj.reduce", 1000, 5000, [("accum_full", 2950, 4900)])
    m.job(4, "o_proj.math", 1000, 6000, [("accum_empty", 2000, 3000)])
    assert [x[:3] for x in legs(m.trace())[1:]] == [
        ("o_proj.reduce", "work", ""),
        ("o_proj.math", "hop", "accum_empty"),
        ("o_proj.math", "work", ""),
    ]


def test_a_group_goes_back_to_the_last_that_came() -> None:
    m = Maker(tiny())
    for warp in MATH:
        came = 3900 if warp == 9 else 2000 + warp
        waits = [("group_pre_expert_norm", came, 4000)] if came < 3900 else []
        attached(m, warp).job(warp, "pre_expert_norm.compute", 1000, 4500 + (warp == 4), waits)
    # warp 9 came last and waits no longer than is noticed: its one stretch of work still goes on
    assert legs(m.trace())[1:] == [
        ("pre_expert_norm.compute", "work", "", 0, 9, 1, 4),
        ("pre_expert_norm.compute", "work", "", 0, 4, 4, 4.501),
    ]


def test_a_point_goes_back_to_who_signals_it() -> None:
    """Two math warps signal that residual has ended in the block; the producer goes on with the weights."""
    plan = tiny(next_qkvg="3/8")
    m = attached(Maker(plan), LOADER, 4, 5)
    m.job(4, "residual.compute", 1000, 4000).job(4, "signal_point@point_residual", 4000, 4000)
    m.job(5, "residual.compute", 1000, 5000).job(5, "signal_point@point_residual", 5000, 5000)
    m.job(LOADER, "wait_point", 1000, 5100, [("point_residual", 1000, 5100)])
    m.job(LOADER, "next_qkvg.load_weights", 5100, 6000)
    assert [x for x in legs(m.trace()) if x[1] != "launch"] == [
        ("residual.compute", "work", "", 0, 5, 1, 5),
        ("wait_point", "hop", "point_residual", 0, LOADER, 5, 5.1),
        ("next_qkvg.load_weights", "work", "", 0, LOADER, 5.1, 6),
    ]


def reading(m: Maker, **where: int) -> Maker:
    """Block 0 of rank 0 finishes the pooler's sums, which it waited for until 6 µs."""
    attached(m, FINISHER)
    return m.job(FINISHER, "pooler.finish", 1000, 7000, [("pooled_partials", 1000, 6000)], **where)


def writing(m: Maker, end: int, since: int = 0, **where: int) -> Maker:
    attached(m, REDUCER, **where)
    return m.job(REDUCER, "pooler.reduce", 1000, end, [("accum_full", 1000, since)] if since else [], **where)


def test_a_channel_goes_back_to_its_last_writer_of_the_rank() -> None:
    """Not to one that ended after the wait did, nor to another rank's."""
    m = reading(Maker(tiny(), ranks=2))
    writing(writing(writing(m, 4000, block=1), 5200, block=2), 6500, 6100, block=3)
    writing(m, 5900, block=1, rank=1)
    assert legs(m.trace())[-3:] == [
        ("pooler.reduce", "work", "", 2, REDUCER, 1, 5.2),
        ("pooler.finish", "hop", "pooled_partials", 0, FINISHER, 5.2, 6),
        ("pooler.finish", "work", "", 0, FINISHER, 6, 7),
    ]


def test_a_channel_between_ranks_goes_back_to_any_rank() -> None:
    m = attached(Maker(tiny(), ranks=2), 4)
    m.job(4, "pre_expert_norm.compute", 1000, 7000, [("pooled", 1000, 6000)])
    for rank, end in ((0, 4000), (1, 5000)):
        attached(m, FINISHER, rank=rank, block=1).job(FINISHER, "pooler.finish", 1000, end, rank=rank, block=1)
    found = view.run(m.trace()).path
    assert [(x.op, x.what, x.rank, x.begin, x.end) for x in found[1:]] == [
        ("pooler", "work", 1, 1, 5),
        ("pre_expert_norm", "hop", 0, 5, 6),
        ("pre_expert_norm", "work", 0, 6, 7),
    ]


@pytest.mark.parametrize(("error", "rank", "hop"), [(0.0, 0, 2.0), (150.0, 1, None)])
def test_clocks_of_ranks_may_be_off(error: float, rank: int, hop: float | None) -> None:
    """Rank 1 seems to have written 0.2 µs after the wait ended: true if either clock is off by 0.15 µs."""
    m = attached(Maker(tiny(), ranks=2), 4)
    m.job(4, "pre_expert_norm.compute", 1000, 7000, [("pooled", 1000, 6000)])
    for r, end in ((0, 4000), (1, 6200)):
        attached(m, FINISHER, rank=r, block=1)
        m.job(
            FINISHER, "pooler.finish", 1000, end, [("pooled_partials", 1000, 6100)] if r == 2 else [], rank=r, block=1
        )
    found = view.run(m.trace(offset_error_ns=(error, error))).path
    assert [x.rank for x in found if x.op == "pooler"] == [rank]
    assert [x.end - x.begin for x in found if x.what == "hop"] == ([] if hop is None else [hop])


@pytest.mark.parametrize(("ended", "block"), [(4000, 2), (2500, 1)])
def test_a_writer_that_streams(ended: int, block: int) -> None:
    """Block 1 still hands over results when the wait ends at 6 µs. It is believed only where all others have been done
    for longer than a hand-off takes."""
    m = reading(Maker(tiny()))
    writing(writing(m, 9000, 1500, block=1), ended, block=2)
    m.job(FINISHER, "unpooler.finish", 7000, 9500)
    found = [x for x in legs(m.trace()) if x[0] == "pooler.reduce"]
    assert [(x[3], x[6]) for x in found if x[1] == "work"] == [(block, ended / 1000 if block == 2 else 6)]


def test_what_had_been_written_long_before() -> None:
    """The reader came to it at 5 µs: that it then took 0.4 µs is its own affair, and the path stays with it."""
    m = writing(Maker(tiny()), 2000, block=1)
    attached(m, FINISHER).job(FINISHER, "pooler.finish", 1000, 6000, [("pooled_partials", 5000, 5400)])
    assert legs(m.trace())[1:] == [
        ("pooler.finish", "work", "", 0, FINISHER, 1, 5),
        ("pooler.finish", "hop", "pooled_partials", 0, FINISHER, 5, 5.4),
        ("pooler.finish", "work", "", 0, FINISHER, 5.4, 6),
    ]


def test_within_a_cluster() -> None:
    """Blocks 0 and 1 are a cluster: what block 2 writes goes elsewhere."""
    m = reading(Maker(tiny("muse_moe", sync="cluster", cluster="2")))
    writing(writing(m, 4000, block=1), 5500, block=2)
    assert [x[3] for x in legs(m.trace()) if x[0] == "pooler.reduce"] == [1]


def test_tables_are_the_blocks_own() -> None:
    m = attached(Maker(tiny()), LOADER, TABLES).job(
        LOADER, "gate_up.load_weights", 1000, 6000, [("table_ready", 1000, 5000)]
    )
    m.job(TABLES, "top_k.tables", 1000, 4900)
    attached(m, TABLES, block=1).job(TABLES, "top_k.tables", 1000, 4990, block=1)
    assert legs(m.trace())[1:] == [
        ("top_k.tables", "work", "", 0, TABLES, 1, 4.9),
        ("gate_up.load_weights", "hop", "table_ready", 0, LOADER, 4.9, 5),
        ("gate_up.load_weights", "work", "", 0, LOADER, 5, 6),
    ]


def test_kernels_begin_when_the_last_one_has_ended() -> None:
    """Of an unfused plan: its second kernel attaches until 5 µs; the first ended at 4.6 µs, in block 1."""
    m = Maker(tiny(fused=False))
    for block, end in ((0, 3000), (1, 4600)):
        m.job(4, "attach", 0, 1000, block=block, kernel=0).job(4, "attention.attend", 1000, end, block=block)
    m.job(4, "attach", 2500, 5000, kernel=1).job(4, "o_proj.math", 5000, 6000)
    assert legs(m.trace()) == [
        ("attach", "launch", "", 1, 4, 0, 1),
        ("attention.attend", "work", "", 1, 4, 1, 4.6),
        ("attach", "launch", "", 0, 4, 4.6, 5),
        ("o_proj.math", "work", "", 0, 4, 5, 6),
    ]


def test_a_wait_that_nobody_ends_is_a_leg_itself() -> None:
    m = attached(Maker(tiny()), 4).job(4, "o_proj.math", 1000, 4000, [("attended", 1500, 3000)])
    assert legs(m.trace())[1:] == [
        ("o_proj.math", "work", "", 0, 4, 1, 1.5),
        ("o_proj.math", "wait", "attended", 0, 4, 1.5, 3),
        ("o_proj.math", "work", "", 0, 4, 3, 4),
    ]


def test_what_comes_after_the_last_job() -> None:
    m = attached(Maker(tiny()), 4).job(4, "o_proj.math", 1000, 4000)
    assert legs(m.trace(ends=[4500]))[-1] == ("", "launch", "", 0, 4, 4, 4.5)


def test_a_wait_costs_what_its_block_does_nothing_else_in() -> None:
    """Block 0's finisher waits from 1 to 6 µs; until 4.5 µs its math warps are at work."""
    m = writing(reading(Maker(tiny())), 5200, block=2)
    attached(m, 4).job(4, "pooler.math", 1000, 4500)
    (wait,) = view.run(m.trace()).waits
    assert (wait.op, wait.role, wait.edge) == ("pooler", "finish", "pooled_partials")
    assert (wait.begin[1], wait.us[1], wait.critical_us) == (1, 5, 1.5)


SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 2), st.sampled_from([(True, "3/8"), (True, "ring"), (False, "ring")]))
def test_legs_tile_a_launch(seed: int, ranks: int, kind: tuple[bool, str]) -> None:
    """Whatever the spans say, and however little sense they make."""
    trace = random(tiny(fused=kind[0], next_qkvg=kind[1]), seed, ranks)
    if not len(trace.spans) or trace.spans["end"].max() == 0:
        return
    run = view.run(trace)
    tiles(run.path, int(trace.spans["end"].max()))
    assert abs(sum(s.us[1] for s in run.shares) - run.total[1]) < 0.001 * len(run.shares)
    assert sum(w.critical_us for w in run.waits) <= run.total[1] + 0.005


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_path_of_a_layer(ranks: int) -> None:
    """Of a layer made as a machine makes it: most ops are on it, each handed its input in 0.7 µs."""
    trace = layer(tiny(), ranks=ranks)
    found = view.run(trace).path
    tiles(found, int(trace.spans["end"].max()))
    assert {leg.op for leg in found} >= {"attention", "o_proj", "gate_up", "down", "combine", "unpooler", "next_heads"}
    channels = {c.name for c in trace.plan.channels if c.barrier is None}
    hops = [leg.end - leg.begin for leg in found if leg.what == "hop" and leg.detail in channels]
    assert len(hops) >= 8
    assert all(abs(hop - 0.7) < 0.05 for hop in hops)


def test_sums_are_of_the_stretches() -> None:
    stretch = path.Stretch(3, "work", -1, 0, 10, 30)
    found = dict(path.sums(path.Path((stretch, stretch._replace(begin=40, end=45), stretch._replace(role=1)), {})))
    assert found == {(3, "work"): 25, (1, "work"): 20}


def test_no_time_is_counted_for_two_waits() -> None:
    """Block 0 waits from 1 to 6 µs for block 2, which itself waits from 1 to 5."""
    m = writing(reading(Maker(tiny())), 5200, 5000, block=2)
    waits = {(w.op, w.role): w.critical_us for w in view.run(m.trace()).waits}
    assert waits == {("pooler", "finish"): 5, ("pooler", "reduce"): 0}
