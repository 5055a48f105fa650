"""Every hand-off uses a primitive that can carry it, with the right count, and an "empty" that nobody writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from megagen.check.finding import Finding, placed, proved, refuse, steps, title
from megagen.ir.graph import DType, RoleSpec, Scope
from megagen.ir.plan import PREFETCH_GUESS, ChannelPlan, Plan, Reset, StepPlan, SyncKind
from megagen.ir.touches import COUNTED, IN_SHARED, region

RULE = "channels"
LEGAL = {
    Scope.BLOCK: {SyncKind.MBARRIER},
    Scope.RANK: {SyncKind.LAMPORT, SyncKind.COUNTER, SyncKind.CLUSTER, SyncKind.FLAG},
    Scope.WORLD: {SyncKind.LAMPORT, SyncKind.FLAG},
}
WHY = {
    SyncKind.MBARRIER: "an mbarrier is seen by one block only",
    SyncKind.CLUSTER: "distributed shared memory ends with the cluster",
    SyncKind.COUNTER: "a counter is seen by one GPU only",
    SyncKind.FLAG: "it stays in shared memory",
    SyncKind.LAMPORT: "it stays in shared memory",
}
ALL_ONES = 0xFFFFFFFF  # a NaN that no conversion makes; neither an expert's id nor a weight's bits
MOST_COPIES = 3  # comm/channel.cuh


def channels(plan: Plan) -> Iterator[Finding]:
    """Scopes, empty values, counts, places of messages; warns of fences that wait for bulk loads."""
    specs = placed(plan)
    for step in (s for kernel in plan.kernels for _, s in steps(kernel) if s.op is not None):
        _ports(plan, specs, step)
    for c in plan.channels:
        _scope(plan, c)
        if c.kind is SyncKind.LAMPORT:
            _empty(plan, c)
        _copies(plan, c)
        _ends(plan, c)
        _counts(plan, c)
        if c.kind not in IN_SHARED:
            _layout(plan, c)
    for c in plan.channels:
        yield from _fault(c)
        if c.kind in COUNTED:
            yield from _price(plan, c)
    flags = sum(c.kind is SyncKind.LAMPORT for c in plan.channels)
    yield proved(RULE, f"{len(plan.channels)} channels: each by a primitive that reaches its readers, who wait for all")
    yield proved(RULE, f"{flags} of them are their own flag: no writer can produce the word that means empty")
    yield proved(RULE, "messages of ranks and rows stand apart, each within its copy")


def _scope(plan: Plan, c: ChannelPlan) -> None:
    if c.kind not in LEGAL[c.scope]:
        how = "between ranks" if c.scope is Scope.WORLD else f"within a {c.scope.value}"
        refuse(
            RULE,
            f"{c.name} travels {how}, {c.kind.value} cannot carry it: {WHY[c.kind]}",
            c.source,
            plan.launch.source,
            hint=f"use {_primitives(c)}",
        )
    if c.kind in IN_SHARED and c.barrier is None:
        refuse(RULE, f"{c.name} has no barrier", c.source)
    if c.kind is SyncKind.MBARRIER and not all(placed(plan)[w.op, w.role].every_block for w in c.writers):
        refuse(RULE, f"{c.name} stays in each block, but not every block writes it", c.source)
    if c.kind is SyncKind.CLUSTER:
        if plan.launch.cluster < 2:
            refuse(
                RULE,
                f"{c.name} travels within a cluster, but a cluster has one block",
                c.source,
                notes=[("the launch", plan.launch.source)],
                hint="s.launch(cluster=2)",
            )
        if {w.op for w in c.writers} != {r.op for r in c.readers} or len(c.shape) != 4 or c.shared_offset is None:
            refuse(RULE, f"{c.name} is not one op's partial sums, which is all that a cluster carries", c.source)
        if c.shared_offset != next((r.offset for r in plan.regions if r.name == region(c)), None):
            refuse(RULE, f"{c.name} is at {c.shared_offset} of shared memory, which is not its region", c.source)


def _primitives(c: ChannelPlan) -> str:
    sums = len(c.shape) == 4 and {w.op for w in c.writers} == {r.op for r in c.readers}
    kinds = [k for k in LEGAL[c.scope] if sums or k is not SyncKind.CLUSTER]
    said = " or ".join(f"{k.value}()" for k in sorted(kinds))
    return said if c.scope is not Scope.BLOCK else f"{said}, its default; name roles if another tensor was meant"


def _summed(plan: Plan, c: ChannelPlan) -> bool:
    """Whether a message is a rank's contribution to a sum, and not its shard of every row."""
    whole = (c.shape[-1], math.prod(c.shape) // plan.tp, c.shape[-1])
    own_axis = len(c.shape) > 2 and c.shape[0] == plan.tp
    return c.scope is Scope.WORLD and own_axis and (c.row_stride, c.rank_stride, c.shard) == whole


def _empty(plan: Plan, c: ChannelPlan) -> None:
    if c.empty == ALL_ONES and c.dtype in (DType.BF16, DType.FP32, DType.U32):
        return
    if c.empty == 0 and _summed(plan, c) and c.dtype in (DType.BF16, DType.FP32):
        return  # summed: +0 may travel as -0
    shown = "nothing" if c.empty is None else f"0x{c.empty:08x}"
    refuse(
        RULE,
        f"a writer of {c.name} ({c.dtype.value}) may produce {shown}, which is to mean empty",
        c.source,
        hint="use empty=ALL_ONES; POSITIVE_ZERO is for contributions of ranks that are summed",
    )


def _copies(plan: Plan, c: ChannelPlan) -> None:
    """What the header library can do; whether it suffices is the business of :mod:`megagen.check.races`."""
    if c.kind in IN_SHARED:
        if c.copies != 1 or c.reset is not Reset.NONE:
            refuse(RULE, f"{c.name} is fresh in every launch: one copy, no reset", c.source)
        return
    if not 1 <= c.copies <= MOST_COPIES:
        refuse(RULE, f"{c.name} has copies={c.copies}: 1 to {MOST_COPIES}", c.source, hint=f"copies={MOST_COPIES}")
    if c.reset is Reset.READER:
        specs = placed(plan)
        for r in c.readers:
            ports = specs[r.op, r.role].hands_back if c.kind is SyncKind.LAMPORT else ()
            if c.name not in (plan.op(r.op).channels[p] for p in ports):
                refuse(RULE, f"{r} does not empty {c.name} after it", c.source, hint="reset=by_launch")


def _layout(plan: Plan, c: ChannelPlan) -> None:
    """A message's element stands where readers of the row-major tensor look for it, and no two share a place.

    Within a rank there is one message. Between ranks each makes a shard of every row, or a contribution of its own.
    """
    if plan.tokens not in c.shape:
        refuse(RULE, f"{c.name} {list(c.shape)} has no place for each of {plan.tokens} tokens", c.source)
    row, elements = c.shape[-1], math.prod(c.shape)
    forms = {"its own": (row, 0, row)}
    if c.scope is Scope.WORLD:
        forms = {"a shard of each row": (row, row // plan.tp, row // plan.tp)}
        if c.shape[0] == plan.tp:
            forms["a contribution"] = (row, elements // plan.tp, row)
    if (c.row_stride, c.rank_stride, c.shard) not in forms.values():
        refuse(
            RULE,
            f"{c.name} {list(c.shape)}: rows {c.row_stride} elements apart, ranks {c.rank_stride}, {c.shard} in a "
            f"message's row; it is {' or '.join(f'{what}, {form}' for what, form in forms.items())}",
            c.source,
        )
    writer = c.writers[0]
    made = plan.op(writer.op).sends.get(writer.role)
    sent = c.shard * (plan.tp if c.scatter else 1) * int(c.dtype.bits) // 8
    if made is not None and made != sent:
        refuse(RULE, f"{writer} makes rows of {made} bytes, {c.name} takes {sent}", c.source)


def _counts(plan: Plan, c: ChannelPlan) -> None:
    """A counter's or flag's readers go on when all of its writers have published, and not before."""
    writer = c.writers[0]
    count, per = plan.op(writer.op).publishes.get(writer.role, (0, c.arrivals_per))
    if (c.arrivals, c.arrivals_per) != (count, per):
        refuse(
            RULE,
            f"readers of {c.name} wait for {c.arrivals} a {c.arrivals_per}, {writer} publishes {count} a {per}",
            c.source,
        )


def _ends(plan: Plan, c: ChannelPlan) -> None:
    """Writers and readers are what the programs say; a count a used expert needs the table that knows them."""
    local = {x.name for x in plan.channels if x.scope is Scope.BLOCK}
    specs, counts = placed(plan), c.kind in COUNTED and c.arrivals_per == "expert"
    found: dict[str, set[str]] = {"writers": set(), "readers": set()}
    for kernel in plan.kernels:
        for _, step in steps(kernel):
            if step.op is None:
                continue
            if (step.op, step.call) not in specs:
                continue
            if c.name in step.writes:
                found["writers"].add(title(step))
            if c.name in step.reads:
                found["readers"].add(title(step))
                if counts and not local & {*step.reads}:
                    refuse(RULE, f"{title(step)} counts experts for {c.name} without the table", step.source)
    for end, said in (("writers", c.writers), ("readers", c.readers)):
        if found[end] != {str(r) for r in said}:
            planned = ", ".join(map(str, said))
            refuse(RULE, f"{end} of {c.name}: {planned}; in the programs: {', '.join(sorted(found[end]))}", c.source)
    if len(c.writers) != 1:
        refuse(RULE, f"{c.name} has several writers ({', '.join(map(str, c.writers))}): who writes what?", c.source)


def _ports(plan: Plan, specs: Mapping[tuple[str, str], RoleSpec], step: StepPlan) -> None:
    """What a step reads and writes are the ports of its role; an L2 prefetch reads what the loads read."""
    op = plan.op(step.op or "")
    prefetch = step.call not in {s.name for s in op.specs}
    spec = op.producer if prefetch else specs[op.name, step.call]
    if spec is None and not op.prefetched:
        refuse(RULE, f"{title(step)} of an op that streams nothing", step.source)
    some = spec is not None and step.call != PREFETCH_GUESS  # which is asked before it is known what is used
    reads, writes = (spec.reads, spec.writes) if spec and some else ((), ())
    for verb, said, ports in (("reads", step.reads, reads), ("writes", step.writes, writes)):
        own = tuple(op.channels[p] for p in ports if p in op.channels)
        if said != own:
            shown = (", ".join(names) or "nothing" for names in (own, said))
            refuse(RULE, "{} {} {}, not {}".format(title(step), verb, *shown), step.source)


def _fault(c: ChannelPlan) -> Iterator[Finding]:
    if c.fault:
        message = f"{c.name} loses its first tile on purpose (fault): its reader hangs or reads what was there before"
        yield Finding(rule=RULE, level="warning", message=message, source=c.source)


def _price(plan: Plan, c: ChannelPlan) -> Iterator[Finding]:
    streaming = [k for k in plan.kernels if any(plan.loads(s) for _, s in steps(k))]
    slow = [
        w for w in c.writers if any((s.op, s.call) == (w.op, w.role) for kernel in streaming for _, s in steps(kernel))
    ]
    if slow:
        yield Finding(
            rule=RULE,
            level="warning",
            message=f"{c.kind.value} of {c.name}: the fence of {', '.join(map(str, slow))} waits for the SM's bulk "
            "loads to land, 7 to 8 µs with a full ring in flight on H200 instead of 0.3 idle; lamport() has no fence",
            source=c.source,
        )
