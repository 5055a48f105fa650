"""What rules report, and the few views of a Plan that they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Literal, NoReturn

from megagen.errors import CheckError, Loc
from megagen.ir.graph import Frozen, RoleSpec
from megagen.ir.plan import KernelPlan, Plan, ProgramPlan, Source, StepPlan


class Finding(Frozen):
    """Something a rule found out. ``source`` is the schedule's line, if one asked for it."""

    rule: str
    level: Literal["proved", "warning"]
    message: str
    source: Source | None = None

    def render(self) -> str:
        """One line for the terminal."""
        where = f"  ({PurePath(self.source.file).name}:{self.source.line})" if self.source and self.source.line else ""
        return f"{self.level}: {self.message} [{self.rule}]{where}"


def proved(rule: str, message: str) -> Finding:
    return Finding(rule=rule, level="proved", message=message)


def refuse(
    rule: str,
    message: str,
    *sources: Source | None,
    hint: str | None = None,
    notes: Iterable[tuple[str, Source | None]] = (),
) -> NoReturn:
    """Raises CheckError at the first of ``sources`` that is a line of the schedule."""
    at = next((loc for s in sources if (loc := _loc(s))), None)
    raise CheckError(f"{message} [{rule}]", loc=at, hint=hint, notes=tuple((text, _loc(s)) for text, s in notes))


def _loc(source: Source | None) -> Loc | None:
    if source is None or not source.line:
        return None
    return Loc(source.file, source.line, source.column, source.text)


def steps(kernel: KernelPlan) -> Iterator[tuple[ProgramPlan, StepPlan]]:
    """Every step of a kernel with the program it stands in."""
    return ((program, step) for program in kernel.programs for step in program.steps)


def warps(program: ProgramPlan) -> range:
    return range(program.first, program.first + program.count)


def placed(plan: Plan) -> dict[tuple[str, str], RoleSpec]:
    """(op, role) -> what the role is like."""
    return {(op.name, spec.name): spec for op in plan.ops for spec in op.specs}


def title(step: StepPlan) -> str:
    """A step as a person would name it."""
    if step.op is not None:
        return f"{step.op}.{step.call}"
    if step.call in ("signal_point", "wait_point") and step.barriers:
        return f"the end of {step.barriers[0].barrier.removeprefix('point_')}"
    return step.call


def group(indices: Iterable[int]) -> str:
    """Warps in words: ``warp 3``, ``warps 4 to 11``."""
    ordered = sorted(set(indices))
    if len(ordered) == 1:
        return f"warp {ordered[0]}"
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"warps {ordered[0]} to {ordered[-1]}"
    return f"warps {', '.join(map(str, ordered))}"
