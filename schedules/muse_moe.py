"""The expert block of a Muse Spark layer: pre-FFN norm to residual gate in one persistent kernel.

Warp 0 streams every weight through one ring that runs ahead of the math; warps 4 to 11 hold the activations in
registers and multiply; warps 2 and 3 sum their partial results and send them; nothing waits for a fence.
"""

from megagen.dsl import (
    ALL_ONES,
    L2,
    KiB,
    Machine,
    Schedule,
    by_reader,
    cluster,
    counter,
    evict_first,
    evict_normal,
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
    config: muse_spark.MuseSparkConfig | None = None,
) -> Schedule:
    g = muse_spark.expert_block(tp=tp, tokens=tokens, split=split, experts=experts, config=config)
    s = Schedule("muse_moe", g, machine, warps=12, choices=choices)

    ring = s.ring(stages=s.choice("ring_stages", 3, 4, 5), stage_bytes=36 * KiB)
    swap = s.choice("roles", "usual", "moved") == "moved"
    producer, tables, reducer, finisher = (s.warp(i) for i in ((3, 2, 1, 0) if swap else (0, 1, 2, 3)))
    if s.choice("reducers", 2, 1) == 2:
        reducer = s.warps(0, 2) if swap else s.warps(2, 4)
    math = s.warps(4, 12)

    dense, experts = [g.pooler, g.unpooler], [g.gate_up, g.down]
    s.assign([*dense, *experts, g.router], load_weights=producer, math=math, reduce=reducer)
    s.assign(dense, finish=finisher)
    s.assign(g.top_k, select=finisher if swap else tables, tables=tables)
    s.assign([g.pre_ffn_norm, g.pre_expert_norm, g.combine, g.residual], compute=math)
    s.assign([g.combine, g.residual], measure=math)
    s.reset(by=tables)
    s.accumulators(s.choice("accumulators", 2, 4))

    weights = [op.weight for op in (g.router, *dense, *experts)]
    s.hint(weights, s.choice("hint", evict_first, evict_normal))
    cap = s.choice("in_flight", "none", "72", "36")
    if cap != "none":
        s.in_flight(int(cap) * KiB)

    # The ring runs ahead into the unpooler's weights while the last experts are worked on; the other ways ask L2 for
    # them, or hold some or all of them back until the experts are done.
    where = s.choice("unpooler", "ring", "l2", "both", "half", "late")
    if where == "l2":
        s.prefetch(g.unpooler.weight, into=L2, by=tables, during=g.down)
    elif where == "both":
        s.prefetch(g.unpooler.weight, into=ring | L2, share=1 / 2, by=tables, during=g.down)
    elif where == "half":
        s.prefetch(g.unpooler.weight, into=ring, share=1 / 2, during=g.down)
    elif where == "late":
        s.prefetch(g.unpooler.weight, into=ring, share=0, during=g.down)

    kind = s.choice("sync", "lamport", "counter", "cluster", "flag")
    others = {"counter": counter(), "cluster": cluster(), "flag": flag()}
    partials = others.get(kind, lamport(ALL_ONES, reset=by_reader))
    local = lamport(empty=ALL_ONES) if kind in ("lamport", "cluster") else others[kind]
    exchange = flag() if kind == "flag" else lamport(empty=ALL_ONES, copies=3)
    s.sync(g.pre_ffn_norm >> g.router, local)
    s.sync(g.router.reduce >> g.top_k.select, local)
    s.sync(g.pooler.reduce >> g.pooler.finish, partials)
    s.sync(g.pooler >> g.pre_expert_norm, exchange)
    s.sync(g.pre_expert_norm >> g.gate_up, local)
    s.sync(g.gate_up >> g.down, exchange)
    s.sync(g.down >> g.combine, exchange)
    s.sync(g.combine.measure >> g.combine.compute, local)
    s.sync(g.combine >> g.unpooler, local)
    s.sync(g.unpooler.reduce >> g.unpooler.finish, partials)
    s.sync(g.unpooler >> g.residual, exchange)
    s.sync(g.residual.measure >> g.residual.compute, local)
    s.launch(
        cluster=s.choice("cluster", 1, 2),
        pdl=True,
        early_trigger=s.choice("early_trigger", False, True),
        registers=(120, 192),
    )
    return s
