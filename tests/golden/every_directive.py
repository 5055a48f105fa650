"""Every directive of the schedule language once, and every primitive. ``# @name`` marks lines that tests look up.

To be lowered and compiled, not run: it drops a message on purpose.
"""

from megagen.dsl import (
    ALL_ONES,
    L2,
    POSITIVE_ZERO,
    KiB,
    Machine,
    Schedule,
    by_launch,
    by_reader,
    cluster,
    counter,
    evict_first,
    evict_last,
    flag,
    in_l2,
    lamport,
    mbarrier,
    previous_step,
)
from megagen.models import muse_spark


def schedule(machine: Machine, tp: int = 8, tokens: int = 16, choices: dict[str, str] | None = None) -> Schedule:
    g = muse_spark.expert_block(tp=tp, tokens=tokens)
    s = Schedule("every", g, machine, warps=12, blocks=120, choices=choices)
    ring = s.ring(stages=s.choice("stages", 4, 3), stage_bytes=36 * KiB, in_flight=72 * KiB)  # @ring
    math = s.warps(4, 12)
    s.assign([g.router, g.pooler, g.gate_up, g.down, g.unpooler], load_weights=s.warp(0))  # @loads
    s.assign([g.router, g.pooler, g.gate_up, g.down, g.unpooler], math=math, reduce=s.warp(2))  # @math
    s.assign(  # @finish
        [g.pooler, g.unpooler],
        finish=s.warp(3),
    )
    s.assign(g.top_k, select=s.warp(1), tables=s.warp(1))  # @top_k
    s.assign([g.pre_ffn_norm, g.pre_expert_norm], compute=math)  # @norms
    s.assign([g.combine, g.residual], measure=math, compute=math)  # @pieces
    s.reset(by=s.warp(1))  # @reset
    s.accumulators(3)
    s.hint(g.pooler.weight, evict_last)  # @hint
    s.hint([g.gate_up.weight, g.down.weight], evict_first)
    s.in_flight(36 * KiB, during=[g.gate_up, g.down])
    s.prefetch(g.unpooler.weight, into=ring | L2, share=1 / 4, by=s.warp(1), during=g.down)  # @both
    s.prefetch(g.down.weight, into=L2, share=1 / 2, by=s.warp(3), before=g.gate_up)  # @l2
    s.prefetch(g.pooler.weight, into=ring, share=1)
    s.prefetch(g.gate_up.weight, into=L2, experts=previous_step(top=4), by=s.warp(3), during=g.router)  # @guess
    s.experts_first(g.top_k, in_l2)
    s.warm_code(by=s.warp(1), blocks=6)  # @warm
    s.warm_code(by=s.warp(3), next=True, before=g.combine)  # @warm_next
    s.sync(g.pre_ffn_norm >> g.router, counter())  # @counter
    s.sync(g.router.reduce >> g.top_k.select, lamport(empty=ALL_ONES, reset=by_reader))  # @by_reader
    s.sync(g.top_k.tables >> g.gate_up.math, mbarrier())  # @mbarrier
    s.sync(g.pooler.reduce >> g.pooler.finish, cluster())  # @cluster
    s.sync(g.pooler.finish >> g.pre_expert_norm, flag())  # @flag
    s.sync(g.gate_up >> g.down, lamport(empty=POSITIVE_ZERO, copies=3, reset=by_launch))  # @zero
    s.dry_run(g.top_k.select, g.combine)  # @dry_run
    s.fault(g.down >> g.combine)
    s.stamps(records=300)  # @stamps
    s.launch(cluster=2, pdl=True, early_trigger=True, registers=(104, 200))  # @launch
    return s
