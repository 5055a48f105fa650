"""Each phase of an mbarrier gets exactly the arrivals it was initialised for, and all that is waited for comes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from megagen.check.finding import Finding, placed, proved, refuse, steps, title
from megagen.ir.plan import BarrierUse, KernelPlan, Plan, StepPlan
from megagen.ir.touches import ACCUM_EMPTY, ACCUM_FULL, RING_EMPTY, RING_FULL, prefetch_uses, role_uses

RULE = "mbarriers"


def mbarriers(plan: Plan) -> Iterator[Finding]:
    """Arrivals, counts, parities and transaction barriers, kernel by kernel."""
    ring = plan.ring
    slots = {b.name: b.slots for b in plan.barriers}
    for name, expected in (
        (ring.full, ring.stages),
        (ring.empty, ring.stages),
        (ACCUM_EMPTY, slots[ACCUM_FULL]),
    ):
        if slots[name] != expected:
            refuse(RULE, f"{name} has {slots[name]} slots for a buffer of {expected}", ring.source)
    for b in plan.barriers:
        if b.slots != 1 and b.name not in (RING_FULL, RING_EMPTY, ACCUM_FULL, ACCUM_EMPTY):
            refuse(RULE, f"{b.name} has {b.slots} slots, and is only used at one", ring.source)
    if plan.barrier(ring.empty).count != ring.consumers:
        refuse(RULE, f"{ring.empty} counts {plan.barrier(ring.empty).count} of {ring.consumers} consumers", ring.source)
    for kernel in plan.kernels:
        _kernel(plan, kernel)
    n = sum(b.slots for b in plan.barriers)
    yield proved(RULE, f"{n} mbarriers: each phase gets as many arrivals as it counts, and all bytes are announced")
    yield proved(RULE, "every wait is for the phase that the next arrivals complete: a full slot or a free one")


def _as_written(plan: Plan, step: StepPlan) -> None:
    """The step does to barriers what its role's header does."""
    if step.op is None:
        action = {"signal_point": "arrive", "wait_point": "wait"}.get(step.call)
        wanted = tuple(BarrierUse(barrier=u.barrier, action=action, per="launch") for u in step.barriers if action)
    else:
        reads, writes = ([plan.channel(name) for name in names] for names in (step.reads, step.writes))
        spec = placed(plan).get((step.op, step.call))
        wanted = prefetch_uses(reads) if spec is None else role_uses(spec, plan.op(step.op).barriers, reads, writes)
    planned, written = Counter(step.barriers), Counter(wanted)
    for use in (written - planned).elements():
        refuse(RULE, f"{title(step)} does not {_does(use)}", step.source)
    for use in (planned - written).elements():
        refuse(RULE, f"{title(step)} is said to {_does(use)}, which it does not", step.source)


def _does(use: BarrierUse) -> str:
    if use.action == "wait":
        state = "free" if use.start else "missing"
        return f"wait for {use.barrier} every {use.per}, at first at {use.start} ({state})"
    if use.action == "expect_tx":
        return f"announce bytes to {use.barrier} every {use.per}"
    return f"arrive at {use.barrier} {'' if use.count == 1 else f'{use.count} times '}every {use.per}"


def _kernel(plan: Plan, kernel: KernelPlan) -> None:
    known = {b.name: b for b in plan.barriers}
    # A phase is one launch, or one stage or tile of an op: the same part of it (args) on all warps that arrive.
    arrivals: dict[tuple[str, str | None], Counter[tuple[int, ...]]] = defaultdict(Counter)
    arriver: dict[tuple[str, str | None], StepPlan] = {}
    waits: dict[tuple[str, str | None], StepPlan] = {}
    expects: set[tuple[str, str | None]] = set()
    for program, step in steps(kernel):
        _as_written(plan, step)
        for use in step.barriers:
            once = use.per == "launch"
            key = (use.barrier, None if once else step.op)
            if use.action == "wait":
                waits[key] = step
                continue
            arrivals[key][() if once else step.args] += program.count * use.count
            arriver[key] = step
            if use.action == "expect_tx":
                expects.add(key)
    for key, step in waits.items():
        if key not in arrivals:
            refuse(RULE, f"{title(step)} waits for {key[0]}, and nothing in {kernel.name} arrives there", step.source)
    for (name, op), found in arrivals.items():
        barrier, step = known[name], arriver[name, op]
        for n in found.values():
            if n != barrier.count:
                refuse(
                    RULE,
                    f"{name} expects {barrier.count} arrivals a phase, {title(step)} makes {n} in {kernel.name}",
                    step.source,
                )
        if barrier.tx != ((name, op) in expects):
            missing = "counts bytes that nobody announces" if barrier.tx else "is told of bytes that it does not count"
            refuse(RULE, f"{name} {missing} ({title(step)})", step.source)
