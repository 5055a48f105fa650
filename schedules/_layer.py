"""How a layer of Muse Spark is placed, whatever its attention and whatever follows it.

Warp 0 streams every weight of the layer through one ring that runs ahead across ops: while one op waits for its input,
the next op's weights already land. Only the experts' wait for the routing. Warps 4 to 11 attend, multiply and
normalise; warps 2 and 3 sum the partial results and send them, warp 3 finishes what has several of them, warp 1 routes
and keeps house. Nothing waits for a fence.
"""

from megagen.dsl import (
    ALL_ONES,
    L2,
    POSITIVE_ZERO,
    Graph,
    KiB,
    Machine,
    Schedule,
    by_reader,
    cluster,
    counter,
    evict_first,
    flag,
    in_l2,
    lamport,
    previous_step,
)

WARPS = 12


def named(stem: str, experts: str, following: str) -> str:
    """A kernel's name says what is not usual about it."""
    return "_".join([stem, *["bf16"] * (experts == "bf16"), *[f"then_{following}"] * (following != "sliding")])


def layer(name: str, g: Graph, machine: Machine, choices: dict[str, str] | None, all_reduce: str) -> Schedule:
    """The schedule of ``g``, all of a layer."""
    s = Schedule(name, g, machine, warps=WARPS, choices=choices)

    ring = s.ring(stages=s.choice("ring_stages", 4, 3, 5), stage_bytes=36 * KiB)
    swap = s.choice("roles", "usual", "moved") == "moved"
    producer, tables, reducer, finisher = (s.warp(i) for i in ((3, 2, 1, 0) if swap else (0, 1, 2, 3)))
    if s.choice("reducers", 2, 1) == 2:
        reducer = s.warps(0, 2) if swap else s.warps(2, 4)
    math = s.warps(4, 12)

    projection = [g.next_qkvg] if "next_qkvg" in g else []
    dense = [g.o_proj, g.router, g.pooler, g.unpooler, *projection]
    streams = [*dense, g.gate_up, g.down]
    s.assign(streams, load_weights=producer, math=math, reduce=reducer)
    finished = [op for op in dense if "finish" in op.roles]
    s.assign(finished, finish=finisher)
    s.assign(g.attention, attend=math, merge=math)
    s.assign([g.post_attention, g.pre_expert_norm, g.combine, g.residual], compute=math)
    s.assign([g.post_attention, g.combine, g.residual], measure=math)
    s.assign(g.top_k, select=finisher if swap else tables, tables=tables)
    s.reset(by=tables)

    s.hint([op.weight for op in streams], evict_first)
    # One stage under way at a time is enough of a stream, and hand-offs pass quicker beside it.
    cap = s.choice("in_flight", "36", "72", "none")
    if cap != "none":
        s.in_flight(int(cap) * KiB)

    s.accumulators(s.choice("accumulators", 2, 4))

    # Keys and values come through the ring too: what is old of them before the launch before has ended.
    s.assign(g.attention, load=producer)
    attends_to_all = g.op("attention").kind == "global_attention"
    if attends_to_all:
        s.in_flight(72 * KiB, during=g.attention)  # the math warps have nothing else to wait for
    elif s.choice("o_proj", "ring", "quarter") == "quarter":
        # While attention runs the ring fills with o_proj's weights: as many as it holds, or a quarter of them.
        s.prefetch(g.o_proj.weight, into=ring, share=1 / 4, during=g.attention)
    # Hopper's warpgroups multiply keys and values where they are. Other machines have no such products.
    if attends_to_all and machine.arch == "sm_90a" and s.choice("attend", "warpgroups", "warps") == "warpgroups":
        s.warpgroups(g.attention.attend)

    # Before the routing is known HBM has time for experts: those that the layer used most a step ago may be used again.
    guess = s.choice("experts_guess", "off", "4", "8", "14")
    if guess != "off":
        for op in (g.gate_up, g.down):
            s.prefetch(op.weight, into=L2, experts=previous_step(top=int(guess)), by=finisher, during=g.attention)
        s.experts_first(g.top_k, in_l2)

    # Machine code passes through L2, where weights push it out; who has nothing to do when a launch begins asks for it.
    warm = s.choice("warm_code", "16", "4", "off")
    if warm != "off":
        s.warm_code(by=tables, blocks=int(warm))
    ahead = s.choice("warm_next", "off", "combine", "residual")
    if ahead != "off":
        s.warm_code(by=tables, next=True, before=getattr(g, ahead))

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
    s.sync(g.post_attention.measure >> g.post_attention.compute, local)
    s.sync(g.post_attention >> g.residual, local)
    s.sync(g.post_attention >> g.router, local)
    s.sync(g.router.reduce >> g.top_k.select, local)
    s.sync(g.pooler >> g.pre_expert_norm, exchange)
    s.sync(g.pre_expert_norm >> g.gate_up, local)
    s.sync(g.gate_up >> g.down, exchange)
    s.sync(g.down >> g.combine, exchange)
    s.sync(g.combine.measure >> g.combine.compute, local)
    s.sync(g.combine >> g.unpooler, local)
    s.sync(g.unpooler >> g.residual, exchange)
    s.sync(g.residual.measure >> g.residual.compute, local)

    if projection:
        # During the layer's last norm the ring holds the first of the next projection's weights. L2 may be asked for
        # the rest; on an H200 that costs more in the norm's own hand-offs than it saves afterwards.
        share = s.choice("next_qkvg", "ring", "3/8", "1/2")
        points = {"residual": g.residual, "combine": g.combine}
        point = points[s.choice("next_qkvg_before", "residual", "combine")]
        if share != "ring":
            above, below = map(int, share.split("/"))
            s.prefetch(g.next_qkvg.weight, into=ring | L2, share=above / below, by=finisher, before=point)
        s.assign(g.next_heads, write=math)
        if s.choice("next_in_flight", "72", "36") == "72":
            s.in_flight(72 * KiB, during=g.next_qkvg)
        # What the next layer's window holds, 1 MB a rank at TP8, has left L2 since the last step.
        keys = s.choice("next_keys", "combine", "residual", "off")
        if keys != "off" and g.op("next_heads").held:
            s.prefetch(g.next_heads, into=L2, by=tables, before=points[keys])
        s.sync(g.residual >> g.next_qkvg, local)
        s.sync(g.next_qkvg >> g.next_heads, handed)

    if s.choice("dry_run", "off", "on") == "on":
        # What runs once a launch, for a token or two a block, finds its instructions and constants at hand.
        s.dry_run(g.attention.merge, g.post_attention, g.top_k, g.pre_expert_norm, g.combine, g.residual)
        s.dry_run(*(op.finish for op in finished), *(op.reduce for op in (g.o_proj, g.gate_up, g.down)))
        if projection:
            s.dry_run(g.next_qkvg.reduce, g.next_heads)

    s.launch(
        cluster=s.choice("cluster", 1, 2),
        pdl=True,
        early_trigger=s.choice("early_trigger", False, True),
        registers=(128, 184),
    )
    return s
