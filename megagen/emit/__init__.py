"""Plan to CUDA C++ text, through ``templates/kernel``. The only user of jinja2; no arithmetic happens here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import groupby
from pathlib import PurePath
from typing import TYPE_CHECKING

from megagen import resources
from megagen.ir.plan import Hint, KernelPlan, OpPlan, Plan, ProgramPlan, Source, StepPlan, SyncKind

if TYPE_CHECKING:
    import jinja2

_HINTS = {Hint.EVICT_NORMAL: 0, Hint.EVICT_FIRST: 1, Hint.EVICT_LAST: 2}
WARPGROUP = 4
EXPERTS = "ExpertGemm"
DENSE_MATH, EXPERT_MATH = "dense_math", "expert_math"  # of several ops one after the other
STREAM = "load_weights"  # the role of a producer
REDUCE = "reduce"  # the role that takes accumulators
UNBOUNDED_WAITS = "MEGAGEN_UNBOUNDED_WAITS"  # a macro of the kernel template, for final timing


def emit(plan: Plan) -> str:
    """The translation unit of ``plan``: parameter block, policies and one kernel per ``plan.kernels``."""
    template = _environment().get_template("kernel.cu.j2")
    return template.render(
        plan=plan,
        headers=sorted({op.header for op in plan.ops}),
        accum_slot_bytes=plan.region("accum").bytes // plan.barrier("accum_full").slots,
        ports=lambda op: list(_ports(plan, op)),
        branches=lambda kernel: list(_branches(plan, kernel)),
    )


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.templates() / "kernel"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="/*%",
        block_end_string="%*/",
        comment_start_string="/*#",
        comment_end_string="#*/",
        line_statement_prefix="//%",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    env.filters |= {"camel": camel, "at": at, "hex": _hex, "number": _number, "hint": lambda h: _HINTS[h]}
    return env


def camel(name: str) -> str:
    """``pre_ffn_norm`` -> ``PreFfnNorm``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def at(source: Source, comment: str = ", ") -> str:
    """Where the schedule asked for it, as a comment's tail; nothing for a default."""
    return f"{comment}{PurePath(source.file).name}:{source.line}" if source.line else ""


def _hex(word: int | None) -> str:
    return f"0x{word or 0:08x}u"


def _number(value: int | float) -> str:
    if isinstance(value, int):
        return str(int(value))
    text = repr(value)  # exact: nine digits would round twice
    return (text if any(c in text for c in ".en") else text + ".0") + "f"


def _ports(plan: Plan, op: OpPlan) -> Iterator[tuple[str, str]]:
    params = {p.name: p for p in plan.params}
    for port, name in op.tensors.items():
        kind = "Input" if params[name].what == "input" else "Output"
        yield port, f"{kind}<tensor::{camel(name)}>"
    for port, name in op.channels.items():
        if plan.channel(name).kind is SyncKind.MBARRIER:
            yield port, "TableChannel<TablePolicy>"
        else:
            yield port, f"Channel<channel::{camel(name)}>"


@dataclass(frozen=True)
class _Program:
    head: str
    title: str
    lines: list[str]


@dataclass(frozen=True)
class _Branch:
    head: str
    registers: tuple[str, int] | None
    programs: list[_Program]


def _branches(plan: Plan, kernel: KernelPlan) -> Iterator[_Branch]:
    """One, or with setmaxnreg two: warpgroup 0 and the rest, because it takes effect where each has a branch."""
    if plan.launch.registers is None:
        yield _Branch("", None, _programs(plan, kernel.programs))
        return
    even = plan.machine.registers // (32 * plan.launch.warps) // 8 * 8
    heads = (f"if (ctx.warp >= {WARPGROUP})", "else")
    for i, head in zip((1, 0), heads, strict=True):
        n = plan.launch.registers[i]
        mine = [p for p in kernel.programs if (p.first >= WARPGROUP) == bool(i)]
        yield _Branch(head, ("dec" if n <= even else "inc", n), _programs(plan, mine))


def _programs(plan: Plan, programs: Sequence[ProgramPlan]) -> list[_Program]:
    """The last branch's code comes first in the machine code: that is the producer's, whom everybody waits for."""
    groups: list[list[ProgramPlan]] = []
    for program in programs:
        if groups and len(groups[-1]) == 1 and _take_together(groups[-1][0], program):
            groups[-1].append(program)
        else:
            groups.append([program])
    return [_program(plan, group, k == 0) for k, group in enumerate(reversed(groups))]


def _take_together(a: ProgramPlan, b: ProgramPlan) -> bool:
    """Whether these are two warps that take the same accumulators."""
    alone = a.count == b.count == 1 and not any(s.call == STREAM for p in (a, b) for s in p.steps)
    return alone and bool({s.op for s in a.steps if s.call == REDUCE} & {s.op for s in b.steps if s.call == REDUCE})


def _program(plan: Plan, group: Sequence[ProgramPlan], first: bool) -> _Program:
    begin, last = group[0].first, group[-1].first + group[-1].count - 1
    test = f"ctx.warp == {last}" if begin == last else f"ctx.warp >= {begin}"  # an else-if: the ones before are gone
    title = f"warp {last}" if begin == last else f"warps {begin} to {last}"
    return _Program(
        head=f"{'if' if first else 'else if'} ({test})",
        title=title,
        lines=list(_lines(plan, group[0]) if len(group) == 1 else _shared(plan, *group)),
    )


def _shared(plan: Plan, a: ProgramPlan, b: ProgramPlan) -> Iterator[str]:
    """Two programs in one: what both do is the same machine code, which the first of them fetches for the other."""
    steps = [[s.model_copy(update={"index": 0}).model_dump_json() for s in p.steps] for p in (a, b)]
    for what, a1, a2, b1, b2 in SequenceMatcher(None, steps[0], steps[1], autojunk=False).get_opcodes():
        if what == "equal":
            for mine, other in zip(a.steps[a1:a2], b.steps[b1:b2], strict=True):
                index = f"ctx.warp == {a.first} ? {mine.index} : {other.index}"
                yield f"ctx.enter({index});" if plan.stamps else f"ctx.step = {index};"
                yield from _calls(plan, mine)
            continue
        for program, some in ((a, a.steps[a1:a2]), (b, b.steps[b1:b2])):
            if some:
                yield f"if (ctx.warp == {program.first}) {{"
                for step in some:
                    yield from (f"  {line}" for line in _step(plan, step))
                yield "}"


def _lines(plan: Plan, program: ProgramPlan) -> Iterator[str]:
    """A producer's streams, and what comes between them, share one loop, maths of experts' GEMMs in a row one too, and
    those of dense ones what they read."""
    streams = [i for i, step in enumerate(program.steps) if step.call == STREAM]
    first, end = (streams[0], streams[-1] + 1) if streams else (0, 0)
    for step in program.steps[:first]:
        yield from _step(plan, step)
    if streams:
        steps = program.steps[first:end]
        yield f"ops::load_streams<{steps[0].index}, {steps[-1].index + 1}>(ctx, [&](ops::StreamState& s) {{"
        yield "  switch (ctx.step) {"
        for step in steps:
            yield f"    case {step.index}:"
            yield from (f"      {line}" for line in _calls(plan, step))
            yield "      break;"
        yield "  }"
        yield "});"
    for together, group in groupby(program.steps[end:], lambda step: _together(plan, step)):
        alike = list(group)
        if together is not None and (len(alike) > 1 or together == EXPERT_MATH):
            yield from _maths(plan, together.split()[0], alike)
        else:
            for step in alike:
                yield from _step(plan, step)


def _together(plan: Plan, step: StepPlan) -> str | None:
    """What it has in common with a neighbour that it shares a call with: the call, and the input."""
    if step.op is None or step.call != "math":
        return None
    op = plan.op(step.op)
    if op.struct == EXPERTS:
        return EXPERT_MATH
    return f"{DENSE_MATH} {op.channels.get('in') or op.tensors['in']}"


def _maths(plan: Plan, call: str, steps: Sequence[StepPlan]) -> Iterator[str]:
    yield f"ops::{call}<{', '.join(map(str, (steps[0].index, *steps[0].args)))},"
    for step in steps:
        assert step.op is not None
        yield f"  policy::{camel(step.op)}{'>(ctx);' if step is steps[-1] else ','}{at(step.source, '  // ')}"


def _step(plan: Plan, step: StepPlan) -> Iterator[str]:
    yield f"ctx.enter({step.index});" if plan.stamps else f"ctx.step = {step.index};"
    yield from _calls(plan, step)


def _calls(plan: Plan, step: StepPlan) -> Iterator[str]:
    where = at(step.source, "  // ")
    if step.op is not None:
        op = plan.op(step.op)
        args = f"<{', '.join(map(str, step.args))}>" if step.args else ""
        given = "ctx, s" if step.call == STREAM else "ctx"
        call = f"ops::{op.struct}<policy::{camel(op.name)}>::{step.call}{args}({given});"
        if step.rehearsal is not None:
            call, where = f"ctx.dry_run([&] {{ {call} }});", where + at(step.rehearsal, ", dry run ")
        yield call + where
    elif step.call == "reset":
        yield f"reset_channels<{', '.join(f'channel::{camel(name)}' for name in step.writes)}>(ctx);{where}"
    elif step.call in ("signal_point", "wait_point"):
        verb = "arrive" if step.call == "signal_point" else "wait"
        yield f"Event<barrier::{camel(step.barriers[0].barrier)}>::{verb}(ctx);{where}"
    elif step.args:
        yield f"ctx.{step.call}<{', '.join(map(str, step.args))}>();{where}"
    else:
        yield f"ctx.{step.call}();{where}"
