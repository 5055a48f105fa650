"""Every hand-off uses a primitive that can carry it, with the right count, and an "empty" that nobody writes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megagen.check.finding import Finding, placed, proved, refuse, steps, title
from megagen.ir.graph import DType, Scope
from megagen.ir.plan import ChannelPlan, Plan, Reset, StepPlan, SyncKind
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
SYNCS = {s: " or ".join(f"{k.value}()" for k in sorted(kinds)) for s, kinds in LEGAL.items()}
ALL_ONES = 0xFFFFFFFF  # a NaN that no conversion makes; neither an expert's id nor a weight's bits
MOST_COPIES = 3  # comm/channel.cuh


def channels(plan: Plan) -> Iterator[Finding]:
    """Scopes, empty values, counts, places of messages; warns of fences that wait for bulk loads."""
    for c in plan.channels:
        _scope(plan, c)
        if c.kind is SyncKind.LAMPORT:
            _empty(c)
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
            hint=f"use {SYNCS[c.scope]}",
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


def _empty(c: ChannelPlan) -> None:
    if c.empty == ALL_ONES and c.dtype in (DType.BF16, DType.FP32, DType.U32):
        return
    contributions = c.scope is Scope.WORLD and c.shape[0] * c.rank_stride == math.prod(c.shape)
    if c.empty == 0 and contributions and c.dtype in (DType.BF16, DType.FP32):
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
    """Messages [rank][row][shard] fill a copy, and no two share an element."""
    ranks = plan.tp if c.scope is Scope.WORLD else 1
    elements = math.prod(c.shape)
    rows, rest = divmod(elements, max(1, ranks * c.shard))
    if rest or not rows:
        refuse(RULE, f"{c.name}: {ranks} x rows of {c.shard} elements do not make its {elements}", c.source)
    if ranks == 1 and c.rank_stride and c.scope is not Scope.WORLD:
        refuse(RULE, f"{c.name} stays on its rank, and has places for messages of others", c.source)
    if plan.tokens not in c.shape:
        refuse(RULE, f"{c.name} {list(c.shape)} has no place for each of {plan.tokens} tokens", c.source)
    made, sent = plan.op(c.writers[0].op).sends.get(c.writers[0].role), c.shard * (plan.tp if c.scatter else 1)
    if made is not None and made != sent:
        refuse(RULE, f"{c.writers[0]} makes rows of {made} elements, {c.name} takes {sent}", c.source)
    need = c.shard
    for stride, n, what in sorted([(c.row_stride, rows, "rows"), (c.rank_stride, ranks, "ranks")]):
        if n > 1 and stride < need:
            refuse(RULE, f"{c.name}: {what} stand {stride} elements apart, and {need} belong to one", c.source)
        need += (n - 1) * stride
    if need > elements:
        refuse(RULE, f"{c.name}: the last message ends at element {need} of {elements}", c.source)


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
            _ports(plan, step)
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


def _ports(plan: Plan, step: StepPlan) -> None:
    """What a step reads and writes are the ports of its role; an L2 prefetch reads what the loads read."""
    op = plan.op(step.op or "")
    prefetch = step.call not in {s.name for s in op.specs}
    spec = placed(plan)[op.name, "load_weights" if prefetch else step.call]
    for verb, said, ports in (("reads", step.reads, spec.reads), ("writes", step.writes, spec.writes)):
        own = tuple(op.channels[p] for p in ports if p in op.channels)
        if said != own:
            shown = (", ".join(names) or "nothing" for names in (own, said))
            refuse(RULE, "{} {} {}, not {}".format(title(step), verb, *shown), step.source)


def _fault(c: ChannelPlan) -> Iterator[Finding]:
    if c.fault:
        message = f"{c.name} loses its first tile on purpose (fault): its reader hangs or reads what was there before"
        yield Finding(rule=RULE, level="warning", message=message, source=c.source)


def _price(plan: Plan, c: ChannelPlan) -> Iterator[Finding]:
    streaming = [k for k in plan.kernels if any(s.call == "load_weights" for _, s in steps(k))]
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
