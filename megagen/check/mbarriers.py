"""Each phase of an mbarrier gets exactly the arrivals it was initialised for, and all that is waited for comes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from megagen.check.finding import Finding, proved, refuse, steps, title
from megagen.ir.plan import KernelPlan, Plan, StepPlan

RULE = "mbarriers"
ACCUM_FULL, ACCUM_EMPTY = "accum_full", "accum_empty"


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
    if plan.barrier(ring.empty).count != ring.consumers:
        refuse(RULE, f"{ring.empty} counts {plan.barrier(ring.empty).count} of {ring.consumers} consumers", ring.source)
    for kernel in plan.kernels:
        _kernel(plan, kernel)
    yield proved(RULE, f"arrivals and phases of {len(plan.barriers)} barriers")


def _kernel(plan: Plan, kernel: KernelPlan) -> None:
    known = {b.name: b for b in plan.barriers}
    # A phase is one launch, or one stage or tile of an op: the same part of it (args) on all warps that arrive.
    arrivals: dict[tuple[str, str | None], Counter[tuple[int, ...]]] = defaultdict(Counter)
    arriver: dict[tuple[str, str | None], StepPlan] = {}
    waits: dict[tuple[str, str | None], StepPlan] = {}
    expects: set[tuple[str, str | None]] = set()
    for program, step in steps(kernel):
        for use in step.barriers:
            if use.barrier not in known:
                refuse(RULE, f"{title(step)} uses the unknown barrier {use.barrier!r}", step.source)
            once = use.per == "launch"
            key = (use.barrier, None if once else step.op)
            if use.action == "wait":
                waits[key] = step
                start = int(use.barrier in (plan.ring.empty, ACCUM_EMPTY))
                if use.start != start:
                    state = "free" if start else "missing"
                    refuse(
                        RULE,
                        f"{title(step)} first waits for {use.barrier} at {use.start}: at first it is {state}, {start}",
                        step.source,
                    )
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
        if op is None and barrier.slots != 1:
            refuse(RULE, f"{name} completes once a launch but has {barrier.slots} slots", step.source)
