"""What a step of a program touches: the model that the checker proves things of.

The emulator records what the code of a step really touches; ``tests/test_footprints.py`` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from megagen.ir.graph import RoleSpec
from megagen.ir.plan import PREFETCH_GUESS, BarrierUse, ChannelPlan, Plan, Reset, StepPlan, SyncKind

Verb = Literal["read", "write", "empty", "poll", "publish", "copy", "wait", "arrive", "expect_tx"]
What = Literal["channel", "counter", "region", "barrier", "tensor"]
COUNTED = (SyncKind.COUNTER, SyncKind.FLAG)
IN_SHARED = (SyncKind.MBARRIER, SyncKind.CLUSTER)  # kinds of channels that take no room in the heap
RING_FULL, RING_EMPTY, ACCUM_FULL, ACCUM_EMPTY, TABLE_READY = (
    "ring_full", "ring_empty", "accum_full", "accum_empty", "table_ready"
)  # fmt: skip
RING, ACCUM, TABLE = "ring", "accum", "table"
TABLE_BYTES = 16 + 4 * 256 + 2 * 4 * 16 + (4 + 16) * 128  # ops/top_k.cuh, ExpertTable


HISTORY_COPIES = 2


class Touch(NamedTuple):
    """``ahead``: of a channel, its counter or a history, the copy that the launch so many after this one uses."""

    verb: Verb
    what: What
    name: str
    ahead: int = 0


def touches(plan: Plan, step: StepPlan) -> frozenset[Touch]:
    """Exchange memory, shared memory, barriers and tensors.

    Not what cannot change while a kernel runs (weights, control words), nor the kernel's own words (epoch, abort,
    hang records, notes of waits that expire).
    """
    return frozenset(_touches(plan, step))


def _touches(plan: Plan, step: StepPlan) -> Iterable[Touch]:
    for use in step.barriers:
        yield Touch(use.action, "barrier", use.barrier)
    if step.call == "drain" or (plan.loads(step) and step.args[2] < plan.ring.stages):
        yield Touch("wait", "barrier", RING_FULL)  # for its own copies, which land whatever others do
    if step.call == "reset":
        for name in step.writes:
            c = plan.channel(name)
            if c.kind is SyncKind.LAMPORT and c.reset is Reset.LAUNCH:
                yield Touch("empty", "channel", name, c.copies - 1)
            elif c.kind in COUNTED:
                yield Touch("empty", "counter", name, c.copies - 1)
        return
    op = plan.op(step.op) if step.op is not None else None
    spec = next((s for s in op.specs if s.name == step.call), None) if op else None
    back = {op.channels[port] for port in spec.hands_back if port in op.channels} if op and spec else set()
    for name in step.reads:
        yield from _reads(plan.channel(name), name in back)
    for name in step.writes:
        yield from _writes(plan.channel(name))
    if plan.guess is not None and step.call == PREFETCH_GUESS:
        yield Touch("read", "tensor", plan.guess.parameter, HISTORY_COPIES - 1)
    if op is None or spec is None:  # a service, an L2 prefetch
        return
    if plan.guess is not None and any(plan.channel(name).kind is SyncKind.MBARRIER for name in step.writes):
        yield Touch("read", "tensor", plan.guess.parameter, HISTORY_COPIES - 1)
        yield Touch("write", "tensor", plan.guess.parameter)
    for port in spec.reads:
        if port in op.tensors:
            yield Touch("read", "tensor", op.tensors[port])
    for port in spec.writes:
        if port in op.tensors:
            yield Touch("write", "tensor", op.tensors[port])
    if spec.stream:
        yield Touch("copy", "region", plan.ring.region)
    if spec.ring:
        yield Touch("read", "region", plan.ring.region)
    if spec.accum is not None:
        yield Touch("write" if spec.accum == "out" else "read", "region", ACCUM)
    for purpose in spec.regions:
        yield Touch("read", "region", op.regions[purpose])
        yield Touch("write", "region", op.regions[purpose])


def _reads(c: ChannelPlan, hands_back: bool) -> Iterable[Touch]:
    if c.kind in IN_SHARED:
        yield Touch("read", "region", region(c))
        return
    yield Touch("read", "channel", c.name)
    if c.kind in COUNTED:
        yield Touch("poll", "counter", c.name)
    if hands_back and c.kind is SyncKind.LAMPORT and c.reset is Reset.READER:
        yield Touch("empty", "channel", c.name)


def _writes(c: ChannelPlan) -> Iterable[Touch]:
    if c.kind in IN_SHARED:
        yield Touch("write", "region", region(c))
        if c.kind is SyncKind.MBARRIER:
            yield Touch("read", "region", region(c))  # the table is made in several passes
        return
    yield Touch("write", "channel", c.name)
    if c.kind in COUNTED:
        yield Touch("publish", "counter", c.name)


def region(c: ChannelPlan) -> str:
    """The stretch of shared memory that a channel lives in, if it takes no room in the heap."""
    return TABLE if c.kind is SyncKind.MBARRIER else f"cluster_{c.name}"


def role_uses(
    spec: RoleSpec, barriers: Mapping[str, str], reads: Iterable[ChannelPlan], writes: Iterable[ChannelPlan]
) -> tuple[BarrierUse, ...]:
    """What a role does to barriers, as its header does it. ``barriers``: the op's own, by purpose."""
    reads = list(reads)
    uses = [BarrierUse(barrier=c.barrier, action="wait", per="launch") for c in reads if c.barrier is not None]
    if spec.stream:
        uses += [
            BarrierUse(barrier=RING_EMPTY, action="wait", per="stage", start=1),
            BarrierUse(barrier=RING_FULL, action="expect_tx", per="stage"),
        ]
    if spec.ring:
        uses += [
            BarrierUse(barrier=RING_FULL, action="wait", per="stage"),
            BarrierUse(barrier=RING_EMPTY, action="arrive", per="stage"),
        ]
    if spec.accum == "out":
        uses += [
            BarrierUse(barrier=ACCUM_EMPTY, action="wait", per="tile", start=1),
            BarrierUse(barrier=ACCUM_FULL, action="arrive", per="tile"),
        ]
    if spec.accum == "in":
        uses += [
            BarrierUse(barrier=ACCUM_FULL, action="wait", per="tile"),
            BarrierUse(barrier=ACCUM_EMPTY, action="arrive", per="tile"),
        ]
    if spec.meets:
        uses += [
            BarrierUse(barrier=barriers.get("group", ""), action="arrive", per="tile"),
            BarrierUse(barrier=barriers.get("group", ""), action="wait", per="tile"),
        ]
    uses += [
        BarrierUse(barrier=c.barrier or "", action="arrive", per="launch")
        for c in writes
        if c.kind is SyncKind.MBARRIER
    ]
    # the reader says how many bytes its cluster will send
    uses += [
        BarrierUse(barrier=c.barrier or "", action="expect_tx", per="launch")
        for c in reads
        if c.kind is SyncKind.CLUSTER
    ]
    return tuple(uses)


def prefetch_uses(reads: Iterable[ChannelPlan]) -> tuple[BarrierUse, ...]:
    """What an L2 prefetch does to barriers."""
    return tuple(BarrierUse(barrier=c.barrier or "", action="wait", per="launch") for c in reads)
