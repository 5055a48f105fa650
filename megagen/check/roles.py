"""Every role runs on warps it accepts, and every warp's program begins and ends as the header library expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from megagen.check.finding import Finding, group, placed, proved, refuse, steps, warps
from megagen.check.references import PREFETCH
from megagen.ir.graph import RoleSpec
from megagen.ir.plan import WARMS, KernelPlan, OpPlan, Plan, ProgramPlan, Reset, StepPlan

RULE = "roles"


def roles(plan: Plan) -> Iterator[Finding]:
    """Placement, warp counts, streams' ends, attach, trigger, drain, housekeeper."""
    for op in plan.ops:
        for spec in op.specs:
            _place(plan, op, spec)
    _together(plan, lambda s: s.stream, "one producer fills the ring in order")
    _together(plan, lambda s: s.ring, "every consumer counts the ring's stages and has to see them all")
    _together(plan, lambda s: s.accum == "in", "each of its warps takes all accumulators in order")
    _groups(plan)
    specs = placed(plan)
    for kernel in plan.kernels:
        _cover(plan, kernel)
        _ran(plan, kernel)
        for program in kernel.programs:
            _frame(plan, specs, program)
            _accumulators(plan, kernel, program)
    _housekeeper(plan)
    advancing = [k.name for k in plan.kernels if k.advances_epoch]
    if advancing != [plan.kernels[-1].name]:
        refuse(RULE, f"the epoch must advance once, in the last kernel, not in {advancing}", plan.launch.source)
    for kernel in plan.kernels:
        yield from _copies(plan, kernel)
    n = sum(len(op.specs) for op in plan.ops)
    yield proved(RULE, f"{n} roles on {plan.launch.warps} warps: each on as many as it takes, and run there once")
    waiting = "every warp waits for the launch before this one before it reads anything but weights"
    ahead = [f"{op.name}.{spec.name}" for op in plan.ops for spec in op.specs if spec.ahead]
    yield proved(RULE, "; ".join((waiting, *(f"{name} waits by itself" for name in ahead))))
    yield proved(RULE, "no block leaves while its bulk loads are under way, and the launch is counted once")


def _place(plan: Plan, op: OpPlan, spec: RoleSpec) -> None:
    name, given = f"{op.name}.{spec.name}", op.roles.get(spec.name, ())
    where = (op.sources.get(spec.name, op.source), plan.launch.source)
    if not given:
        refuse(RULE, f"role {name} is on no warp", *where, hint=f"s.assign(g.{op.name}, {spec.name}=s.warp(...))")
    accepted = " or ".join(map(str, spec.warps))
    if len(given) not in spec.warps:
        refuse(RULE, f"role {name} is on {len(given)} warps, it takes {accepted}", *where, hint=f"give it {accepted}")
    if list(given) != list(range(given[0], given[0] + len(given))):
        refuse(RULE, f"role {name} is on {group(given)}, which are not consecutive", *where)
    if given[0] % spec.align:
        refuse(
            RULE,
            f"role {name} begins at warp {given[0]}, it must begin at a multiple of {spec.align}",
            *where,
            hint=f"begin at warp {-(-given[0] // spec.align) * spec.align}",
        )
    if given[0] < 0 or given[-1] >= plan.launch.warps:
        refuse(RULE, f"role {name} is on {group(given)} of a block that has {plan.launch.warps}", *where)


def _copies(plan: Plan, kernel: KernelPlan) -> Iterator[Finding]:
    """Math that several programs run has its code several times: right, but the instruction cache is small."""
    for op in plan.ops:
        for role in (s.name for s in op.specs if s.ring):
            homes = [p for p in kernel.programs if any((s.op, s.call) == (op.name, role) for s in p.steps)]
            if len(homes) > 1:
                at = " and ".join(group(range(p.first, p.first + p.count)) for p in homes)
                message = f"{op.name}.{role} is emitted {len(homes)} times, for {at}: their other steps differ"
                yield Finding(rule=RULE, level="warning", message=message, source=op.sources.get(role, op.source))


def _together(plan: Plan, like: Callable[[RoleSpec], bool], why: str) -> None:
    """All roles like that are on the same warps."""
    found = [(op, spec.name, op.roles[spec.name]) for op in plan.ops for spec in op.specs if like(spec)]
    for op, role, given in found[1:]:
        first, other, expected = found[0]
        if given != expected:
            refuse(
                RULE,
                f"{first.name}.{other} is on {group(expected)} but {op.name}.{role} on {group(given)}: {why}",
                op.sources.get(role, op.source),
                notes=[(f"{first.name} was assigned here", first.sources.get(other, first.source))],
                hint=f"assign {' and '.join(dict.fromkeys((other, role)))} of all ops to the same warps",
            )


def _groups(plan: Plan) -> None:
    """Warps that meet at a barrier, and the scratch that they meet for, belong to one op."""
    owners: dict[str, OpPlan] = {}
    for op in plan.ops:
        spec = next((s for s in op.specs if "scratch" in s.regions and s.name in op.roles), None)
        if spec is None:
            continue
        wanted = {"scratch": op.regions.get("scratch")}
        if spec.meets:
            wanted["group barrier"] = op.barriers.get("group")
        for what, name in wanted.items():
            if name is None:
                refuse(RULE, f"{op.name}.{spec.name} has no {what}", op.source)
            if name in owners:
                refuse(RULE, f"{op.name} and {owners[name].name} share the {what} {name}", op.source)
            owners[name] = op


def _cover(plan: Plan, kernel: KernelPlan) -> None:
    found = [w for program in kernel.programs for w in warps(program)]
    if found != list(range(plan.launch.warps)):
        refuse(RULE, f"{kernel.name} has programs for {group(found)}, not one for each of {plan.launch.warps} warps")


def _ran(plan: Plan, kernel: KernelPlan) -> None:
    """The programs do what the placement says: each role once, on its warps, told its first one."""
    specs, wanted = placed(plan), {name: plan.op(name) for name in kernel.ops}
    ran: dict[tuple[str, str], list[int]] = {(n, s.name): [] for n, op in wanted.items() for s in op.specs}
    for program, step in steps(kernel):
        if step.op is None or (step.op, step.call) not in specs:
            continue
        spec, given = specs[step.op, step.call], plan.op(step.op).roles[step.call]
        if step.op not in wanted and not spec.every_block:
            refuse(RULE, f"{kernel.name} runs {step.op}.{step.call}, which another kernel does", step.source)
        seen = ran.setdefault((step.op, step.call), [])
        seen += [w for w in warps(program) if not (spec.stream and w in seen)]  # a stream may come in shares
        if not spec.stream and step.args != (given[:1] if max(spec.warps) > 1 else ()):
            refuse(RULE, f"{step.op}.{step.call} counts its warps from {step.args}, not {given[0]}", step.source)
    for (name, role), seen in ran.items():
        op = plan.op(name)
        if sorted(seen) != list(op.roles[role]):
            runs = ", ".join(map(str, sorted(seen))) or "none"
            refuse(RULE, f"{name}.{role} is on {group(op.roles[role])}, {kernel.name} runs it on {runs}", op.source)


def _early(plan: Plan, specs: Mapping[tuple[str, str], RoleSpec], step: StepPlan) -> bool:
    """What may run before a warp has waited for the launch before: it touches weights and code, or waits by itself."""
    if step.call == PREFETCH:  # of what a cache holds, it must know how much that is
        return plan.op(step.op or "").stream is not None
    spec = specs.get((step.op or "", step.call))
    return step.call in WARMS or (plan.loads(step) and spec is not None and (spec.ahead or not spec.reads))


def _frame(plan: Plan, specs: Mapping[tuple[str, str], RoleSpec], program: ProgramPlan) -> None:
    who, calls = group(warps(program)), [s.call for s in program.steps]
    if calls.count("attach") != 1:
        refuse(RULE, f"{who} must attach exactly once, not {calls.count('attach')} times", plan.launch.source)
    for step in program.steps:
        spec = specs.get((step.op or "", step.call))
        if step.rehearsal is not None and (spec is None or not spec.rehearsable):
            name = f"{step.op}.{step.call}" if step.op else step.call
            refuse(RULE, f"{who} rehearses {name}, which would have an effect", step.rehearsal, step.source)
    for step in program.steps[: calls.index("attach")]:
        if step.call == "trigger":
            refuse(RULE, f"{who} lets dependents start before waiting for the previous launch", step.source)
        if step.reads or step.writes or not _early(plan, specs, step):
            refuse(RULE, f"{who} runs {step.op or step.call} before it attaches to the launch", step.source)
    loads = [i for i, step in enumerate(program.steps) if plan.loads(step)]
    if loads and "drain" not in calls[loads[-1] :]:
        refuse(RULE, f"{who} could leave while its bulk loads are under way: no drain after them", plan.ring.source)


def _accumulators(plan: Plan, kernel: KernelPlan, program: ProgramPlan) -> None:
    """Each reduce warp walks the accumulators of all GEMMs in the order in which the math warps fill them."""
    specs = placed(plan)

    def accum(step: StepPlan) -> str | None:
        spec = specs.get((step.op or "", step.call))
        return spec.accum if spec else None

    walked = [s for s in program.steps if accum(s) == "in"]
    if not walked:
        return
    for other in kernel.programs:
        filled = [s.op for s in other.steps if accum(s) == "out"]
        if filled and filled != [s.op for s in walked]:
            refuse(
                RULE,
                f"{group(warps(program))} takes accumulators of {', '.join(str(s.op) for s in walked)}, "
                f"{group(warps(other))} fill those of {', '.join(map(str, filled))}",
                walked[0].source,
            )


def _housekeeper(plan: Plan) -> None:
    needed = {c.name for c in plan.channels if c.reset is Reset.LAUNCH}
    found = [(p, s) for k in plan.kernels for p, s in steps(k) if s.call == "reset"]
    sources = (*(s.source for _, s in found), plan.launch.source)
    if needed and sum(p.count for p, _ in found) != 1:
        where = ", ".join(group(warps(p)) for p, _ in found) or "no warp"
        refuse(
            RULE,
            f"one warp has to empty idle copies ({', '.join(sorted(needed))}), but {where} does",
            *sources,
            hint="s.reset(by=s.warp(i))",
        )
    if found and set(found[0][1].writes) != needed:
        refuse(RULE, f"the housekeeper does not empty {sorted(needed ^ set(found[0][1].writes))}", *sources)
