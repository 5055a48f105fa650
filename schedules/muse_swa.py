"""A sliding-window layer of Muse Spark in one persistent kernel: its attention to the next layer's KV write.

Warp 0 streams every weight of the layer through one ring that runs ahead across ops: while one op waits for its input,
the next op's weights already land. Only the experts' wait for the routing. Warps 4 to 11 attend, multiply and
normalise; warp 2 sums the partial results and sends them, warp 3 finishes what has several of them, warp 1 routes and
keeps house. Nothing waits for a fence.
"""

from megagen.dsl import (
    ALL_ONES,
    L2,
    POSITIVE_ZERO,
    KiB,
    Machine,
    Schedule,
    by_reader,
    cluster,
    counter,
    evict_first,
    flag,
    lamport,
)
from megagen.models import muse_spark


def schedule(
    machine: Machine,
    tp: int = 8,
    tokens: int = 16,
    choices: dict[str, str] | None = None,
    split: str = "nn",
    experts: str = "nvfp4",
    all_reduce: str = "one_shot",
    next_rope: str = "yes",
    positions: int = muse_spark.POSITIONS,
    config: muse_spark.MuseSparkConfig | None = None,
) -> Schedule:
    g = muse_spark.sliding_layer(
        tp=tp,
        tokens=tokens,
        split=split,
        experts=experts,
        all_reduce=all_reduce,
        next_rope=next_rope == "yes",
        positions=positions,
        config=config,
    )
    s = Schedule("muse_swa", g, machine, warps=12, choices=choices)

    ring = s.ring(stages=s.choice("ring_stages", 3, 4, 5), stage_bytes=36 * KiB)
    swap = s.choice("roles", "usual", "moved") == "moved"
    producer, tables, reducer, finisher = (s.warp(i) for i in ((3, 2, 1, 0) if swap else (0, 1, 2, 3)))
    math = s.warps(4, 12)

    dense = [g.o_proj, g.router, g.pooler, g.unpooler, g.next_qkvg]
    streams = [*dense, g.gate_up, g.down]
    s.assign(streams, load_weights=producer, math=math, reduce=reducer)
    finished = [op for op in dense if "finish" in op.roles]
    s.assign(finished, finish=finisher)
    s.assign(g.attention, attend=math, merge=math)
    s.assign([g.post_attention, g.pre_expert_norm, g.combine, g.residual], compute=math)
    s.assign(g.next_heads, write=math)
    s.assign(g.top_k, select=finisher if swap else tables, tables=tables)
    s.reset(by=tables)

    s.hint([op.weight for op in streams], evict_first)
    # One stage under way at a time is enough of a stream, and hand-offs pass quicker beside it.
    cap = s.choice("in_flight", "36", "72", "none")
    if cap != "none":
        s.in_flight(int(cap) * KiB)

    # While attention runs the ring fills with o_proj's weights: as many as it holds, or a quarter of them.
    if s.choice("o_proj", "ring", "quarter") == "quarter":
        s.prefetch(g.o_proj.weight, into=ring, share=1 / 4, during=g.attention)
    # During the layer's last norm the ring holds the first of the next projection's weights. L2 may be asked for the
    # rest; on an H200 that costs more in the norm's own hand-offs than it saves afterwards.
    share = s.choice("next_qkvg", "ring", "3/8", "1/2")
    point = {"residual": g.residual, "combine": g.combine}[s.choice("next_qkvg_before", "residual", "combine")]
    if share != "ring":
        above, below = map(int, share.split("/"))
        s.prefetch(g.next_qkvg.weight, into=ring | L2, share=above / below, by=finisher, before=point)

    kind = s.choice("sync", "lamport", "counter", "cluster", "flag")
    others = {"counter": counter(), "cluster": cluster(), "flag": flag()}
    partials = others.get(kind, lamport(ALL_ONES, reset=by_reader))
    handed = others[kind] if kind in ("counter", "flag") else lamport(ALL_ONES, reset=by_reader)
    local = lamport(ALL_ONES) if kind in ("lamport", "cluster") else others[kind]
    exchange = flag() if kind == "flag" else lamport(ALL_ONES, copies=3)
    empty = s.choice("summed", ALL_ONES, POSITIVE_ZERO)
    summed = flag() if kind == "flag" else lamport(empty, copies=3)

    for op in finished:
        s.sync(op.reduce >> op.finish, partials)
    s.sync(g.attention.attend >> g.attention.merge, handed)
    s.sync(g.attention >> g.o_proj, local)
    if all_reduce == "two_shot":
        s.assign(g.all_reduce, sum=finisher)
        s.sync(g.o_proj >> g.all_reduce, summed)
        s.sync(g.all_reduce >> g.post_attention, exchange)
    else:
        s.sync(g.o_proj >> g.post_attention, summed)
    s.sync(g.post_attention >> g.residual, handed)
    s.sync(g.post_attention >> g.router, local)
    s.sync(g.router.reduce >> g.top_k.select, local)
    s.sync(g.pooler >> g.pre_expert_norm, exchange)
    s.sync(g.pre_expert_norm >> g.gate_up, local)
    s.sync(g.gate_up >> g.down, exchange)
    s.sync(g.down >> g.combine, exchange)
    s.sync(g.combine >> g.unpooler, local)
    s.sync(g.unpooler >> g.residual, exchange)
    s.sync(g.residual >> g.next_qkvg, local)
    s.sync(g.next_qkvg >> g.next_heads, handed)
    s.launch(
        cluster=s.choice("cluster", 1, 2),
        pdl=True,
        early_trigger=s.choice("early_trigger", False, True),
        registers=(120, 192),
    )
    return s
