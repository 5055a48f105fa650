"""The ring is first in, first out: loaded in the order in which it is drained, each stage once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

from megagen.check.finding import Finding, group, placed, proved, refuse, steps, title, warps
from megagen.ir.graph import DType
from megagen.ir.plan import KernelPlan, OpPlan, Plan, StepPlan, StreamPlan

RULE = "ring"
WHOLE = 1024  # ops/stream.cuh


def ring(plan: Plan) -> Iterator[Finding]:
    """Order of streams, shares, caps."""
    if plan.ring.stages < 1:
        refuse(RULE, "a ring needs at least one stage", plan.ring.source)
    for op in plan.ops:
        if op.stream is not None:
            _whole(plan, op, op.stream)
    for kernel in plan.kernels:
        _kernel(plan, kernel)
    streams = sum(op.stream is not None for op in plan.ops)
    stages = plan.ring.stages
    yield proved(RULE, f"{streams} streams pass the ring's {stages} stages in the order in which they are drained")
    yield proved(RULE, "every weight is loaded once and whole, and no load leaves it")


def _whole(plan: Plan, op: OpPlan, s: StreamPlan) -> None:
    """The stages of a stream are its weight, from the first byte to the last, or are cut from its tensors."""
    if not s.weight:
        _tensors(plan, op, s)
        return
    w = next((w for w in plan.weights if w.name == s.weight), None)
    if w is None or w.layout != "tiles":
        refuse(RULE, f"{op.name} streams {s.weight}, which is no matrix of the plan", op.source)
    stages = max(1, w.experts) * (w.rows // s.stage_rows) * (w.k // s.stage_k)
    if (w.stage_rows, w.stage_k) != (s.stage_rows, s.stage_k) or stages * s.stage_bytes != w.bytes:
        refuse(
            RULE,
            f"{stages} stages of {s.stage_rows} x {s.stage_k} in {s.stage_bytes} bytes are not {w.name}: "
            f"{w.bytes} bytes packed by {w.stage_rows} x {w.stage_k}",
            op.source,
        )
    if s.per_tile * s.stage_k != w.k and w.experts:
        refuse(RULE, f"{s.per_tile} stages of {op.name} are not a tile of its {w.k} columns", op.source)


def _tensors(plan: Plan, op: OpPlan, s: StreamPlan) -> None:
    given = {p.name: p for p in plan.params if p.what == "input"}
    read = tuple(op.tensors.get(port, "") for port in op.producer.reads) if op.producer else ()
    if s.tensors != read or not s.tensors or not {*s.tensors} <= {*given}:
        streamed = ", ".join(s.tensors) or "nothing"
        refuse(RULE, f"{op.name} streams {streamed}, which are not the inputs that its producer reads", op.source)
    wide = {t: int((given[t].dtype or DType.BF16).bits) for t in s.tensors}
    sizes = {math.prod(given[t].shape) * wide[t] // 8 for t in s.tensors}
    part = s.stage_rows * s.stage_k * max(wide.values()) // 8
    if plan.ring.stages < s.held:
        holds = "two" if s.held == 2 else s.held
        refuse(RULE, f"{op.name} holds {holds} stages at once, and the ring has {plan.ring.stages}", plan.ring.source)
    if len(sizes) != 1 or next(iter(sizes)) % part or s.stage_bytes != part * len(s.tensors):
        refuse(
            RULE, f"{s.stage_bytes} bytes of {', '.join(s.tensors)} of {op.name} are no equal parts of whole stages",
            op.source,
        )  # fmt: skip


def _kernel(plan: Plan, kernel: KernelPlan) -> None:
    specs = placed(plan)
    loads: list[StepPlan] = []
    for _, step in steps(kernel):
        if plan.loads(step):
            _share(step)
            loads.append(step)
            if step.args[2] < 1:
                refuse(RULE, f"{title(step)} with {step.args[2]} stages in flight loads nothing", step.source)
        elif step.call == "prefetch_l2":
            _share(step)
            if step.args[:2] != (0, WHOLE) and not _weight(plan, step):
                refuse(RULE, f"{title(step)} takes a share of caches, which are asked for as a whole", step.source)
    order = [op for op, _ in groupby(loads, key=lambda s: s.op)]
    if len(set(order)) != len(order):
        refuse(RULE, f"a stream is interrupted by another: {', '.join(map(str, order))}", loads[0].source)
    for op, parts in groupby(loads, key=lambda s: s.op):
        at = 0
        for step in parts:
            if step.args[0] != at:
                what = "left out" if step.args[0] > at else "loaded twice"
                refuse(RULE, f"stages {_span(at, step.args[0])} of {op} are {what}", step.source)
            at = step.args[1]
            if step.args[:2] != (0, WHOLE) and not _weight(plan, step):
                refuse(RULE, f"{title(step)} takes a share of tensors, which come in one piece", step.source)
        if at != WHOLE:
            refuse(RULE, f"stages {_span(at, WHOLE)} of {op} are never loaded", plan.op(str(op)).source)
    for program in kernel.programs:
        drained = [s.op for s in program.steps if s.op and s.call in plan.op(s.op).roles and specs[s.op, s.call].ring]
        if drained and drained != order:
            refuse(
                RULE,
                f"the ring is filled with {', '.join(map(str, order))} but {group(warps(program))} drains "
                f"{', '.join(map(str, drained))}",
                plan.ring.source,
            )
    if loads and not any(s.op and specs[s.op, s.call].ring for _, s in steps(kernel) if (s.op, s.call) in specs):
        refuse(RULE, f"nobody drains the ring of {kernel.name}", plan.ring.source)


def _weight(plan: Plan, step: StepPlan) -> bool:
    stream = plan.op(step.op or "").stream
    return stream is not None and stream.weight != ""


def _share(step: StepPlan) -> None:
    first, last = step.args[:2]
    if not 0 <= first <= last <= WHOLE:
        refuse(RULE, f"{title(step)} takes the share {_span(first, last)}", step.source)


def _span(a: int, b: int) -> str:
    return f"{min(a, b)} to {max(a, b)} of {WHOLE}"
