"""Whatever the Plan names is there, and every number in a hang report means one thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from megagen.check.finding import Finding, proved, refuse, steps
from megagen.ir.plan import PREFETCH_GUESS, WARMS, Plan, StepPlan
from megagen.ir.touches import ACCUM, ACCUM_EMPTY, ACCUM_FULL, RING, RING_EMPTY, RING_FULL, TABLE

RULE = "references"
SERVICES = ("attach", "trigger", "drain", "reset", "signal_point", "wait_point", *WARMS)
PREFETCH = "prefetch_l2"
# Template arguments of a stream: (first stage, last stage, in flight); of a prefetch, (first, last); of other roles,
# where their warps begin.
STREAM_ARGUMENTS, PREFETCH_ARGUMENTS = 3, 2


def references(plan: Plan) -> Iterator[Finding]:
    """Names of ops, roles, channels, barriers and regions; numbers of steps and edges."""
    ops, params = {op.name: op for op in plan.ops}, {p.name for p in plan.params}
    barriers, regions = {b.name for b in plan.barriers}, {r.name for r in plan.regions}
    channels = {c.name for c in plan.channels}
    for what, names in (
        ("op", [op.name for op in plan.ops]), ("parameter", [p.name for p in plan.params]),
        ("barrier", [b.name for b in plan.barriers]), ("region", [r.name for r in plan.regions]),
        ("channel", [c.name for c in plan.channels]), ("kernel", [k.name for k in plan.kernels]),
    ):  # fmt: skip
        _once(f"{what}s", names)
    if not plan.kernels:
        refuse(RULE, "there is no kernel", plan.launch.source)

    def known(what: str, names: Iterable[str], there: Iterable[str], step: StepPlan | None = None) -> None:
        missing = sorted({*names} - {*there})
        if missing:
            refuse(RULE, f"there is no {what} {missing[0]!r}", step.source if step else plan.launch.source)

    known("barrier", (plan.ring.full, plan.ring.empty, RING_FULL, RING_EMPTY, ACCUM_FULL, ACCUM_EMPTY), barriers)
    known("region", (RING, ACCUM, TABLE), regions)
    if (plan.ring.region, plan.ring.full, plan.ring.empty) != (RING, RING_FULL, RING_EMPTY):
        refuse(RULE, f"the ring is {plan.ring.region} with {plan.ring.full} and {plan.ring.empty}", plan.ring.source)
    for op in plan.ops:
        known("channel", op.channels.values(), channels)
        known("parameter", (*op.tensors.values(), *op.weights.values()), params)
        known("barrier", op.barriers.values(), barriers)
        known("region", op.regions.values(), regions)
        specs = {s.name: s for s in op.specs}
        known("role", op.roles, specs)
        if any(s.stream for s in op.specs) != (op.stream is not None):
            refuse(RULE, f"{op.name} has a weight to stream, or a role that streams one, and not both", op.source)
        if (n := sum(kernel.ops.count(op.name) for kernel in plan.kernels)) != 1:
            refuse(RULE, f"{op.name} is in {n or 'no'} kernel{'s' * (n > 1)}", op.source)
        used = {purpose for s in op.specs for purpose in s.regions}
        touched = {port for s in op.specs for port in (*s.reads, *s.writes)}
        if left := sorted({*op.regions} - used | {*op.channels, *op.tensors} - touched):
            refuse(RULE, f"no role of {op.name} uses its {left[0]}", op.source)
        for spec in op.specs:
            known(f"port of {op.name}", (*spec.reads, *spec.writes), {*op.channels, *op.tensors})
            known(f"port of {op.name}.{spec.name}", spec.hands_back, spec.reads)
            known(f"region of {op.name}", spec.regions, op.regions)
    if plan.guess is not None:
        known("op", plan.guess.ops, ops)
        known("parameter", [plan.guess.parameter], params)
    for c in plan.channels:
        if c.barrier is not None:
            known("barrier", [c.barrier], barriers)
        for r in (*c.writers, *c.readers):
            known("op", [r.op], ops)
            known("role", [str(r)], [f"{r.op}.{s.name}" for s in ops[r.op].specs])
    for kernel in plan.kernels:
        known("op", kernel.ops, ops)
        for _, step in steps(kernel):
            known("channel", (*step.reads, *step.writes), channels, step)
            known("barrier", [use.barrier for use in step.barriers], barriers, step)
            if step.op is None:
                known("step", [step.call], SERVICES, step)
            else:
                known("op", [step.op], ops, step)
                calls = [s.name for s in ops[step.op].specs] + [PREFETCH] * ops[step.op].prefetched
                calls += [PREFETCH_GUESS] * (plan.guess is not None and step.op in plan.guess.ops)
                known(f"role of {step.op}", [step.call], calls, step)
            needed = PREFETCH_ARGUMENTS if step.call == PREFETCH else STREAM_ARGUMENTS if plan.loads(step) else 0
            if len(step.args) < needed:
                refuse(RULE, f"{step.op}.{step.call} needs {needed} arguments, it has {step.args}", step.source)
            if (
                step.op is None
                and step.call in WARMS
                and not (len(step.args) == 1 and 1 <= step.args[0] <= plan.launch.blocks)
            ):
                refuse(RULE, f"{step.call} in {step.args} of {plan.launch.blocks} blocks", step.source)
            if step.call in ("signal_point", "wait_point") and len(step.barriers) != 1:
                refuse(RULE, f"a {step.call} is about one barrier, not {len(step.barriers)}", step.source)
    n = sum(len(p.steps) for k in plan.kernels for p in k.programs)
    yield proved(RULE, f"{len(ops)} ops, {n} steps, {len(channels)} channels: all that they name is there")


def numbers(plan: Plan) -> Iterator[Finding]:
    """What a hang report says by number."""
    _once("steps", [s.index for k in plan.kernels for _, s in steps(k)])
    _once("edges", [*(c.index for c in plan.channels), *(b.index for b in plan.barriers)])
    yield proved(RULE, "every number in a hang report is one step's or one edge's")


def _once(what: str, names: Iterable[str | int]) -> None:
    twice = sorted(str(name) for name, n in Counter(names).items() if n > 1)
    if twice:
        refuse(RULE, f"two {what} are called {twice[0]}")
