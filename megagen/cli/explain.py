"""What a Plan says, as sheets: roles, shared memory, syncs, ring, costs. Reads the Plan and nothing above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megagen.cli.sheets import Column, Sheet, counted, megabytes, size, span
from megagen.ir.plan import WARMS, Plan, Source, StepPlan

LAUNCH = "launch"  # the column of steps that belong to no op
MBARRIER_BYTES = 8
WHOLE = 1024  # the unit of shares (templates/include/megagen/ops/stream.cuh)
BEGIN = "begin_"  # before an op in the name of a barrier that says that it begins
POINT = "point_"  # starts the names of barriers that end an op in the block


def place(source: Source) -> str | None:
    """ "file:line" of what asked for something, None for a default."""
    return f"{source.file}:{source.line}" if source.line else None


def line(row: Any) -> str:
    """The same for people: the file is nearly always the same one, so only its line, see :func:`of_file`."""
    return "default" if row["source"] is None else "line " + row["source"].rpartition(":")[2]


def of_file(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of which file the lines are."""
    files = dict.fromkeys(r["source"].rpartition(":")[0] for r in rows if r["source"] is not None)
    return f"Lines are of {', '.join(files)}." if files else ""


def stream_us(plan: Plan, nbytes: int) -> float:
    """The least time in µs in which the plan's machine streams ``nbytes`` from HBM."""
    return round(nbytes / plan.machine.hbm_bytes_per_s * 1e6, 3)


def nominal(plan: Plan, experts: int | None = None, tokens: int | None = None) -> str:
    """The tokens, and if there are any the experts (default: the plan's nominal ones), that bytes are stated for."""
    experts = experts or plan.nominal_experts
    text = counted(tokens or plan.nominal_tokens, "token")
    return f"{text} on {counted(experts, 'expert')}" if plan.nominal_experts else text


def words(step: StepPlan) -> str:
    """What a step of :func:`loads` does."""
    if step.call in ("wait_point", "signal_point"):
        (use,) = step.barriers
        begins = use.barrier.startswith(BEGIN)
        op = use.barrier.removeprefix(BEGIN if begins else POINT)
        what = f"{op} {'begins' if begins else 'is done'} in the block"
        return f"{'waits until' if step.call == 'wait_point' else 'says that'} {what}"
    if step.call in WARMS:
        whose = "its own code" if step.call == "warm_code" else "the code of the kernel that follows"
        return f"asks L2 for {whose}, each piece in {counted(step.args[0], 'block')}"
    first, last, *cap = step.args
    share, to = f"{100 * first / WHOLE:.3g} %", f"{100 * last / WHOLE:.3g} %"
    if (first, last) == (0, WHOLE):
        text = "all of a block's stages"
    elif first == 0:
        text = f"first {to} of a block's stages"
    elif last == WHOLE:
        text = f"last {100 - 100 * first / WHOLE:.3g} % of a block's stages"
    else:
        text = f"{share} to {to} of a block's stages"
    if step.call == "prefetch_l2":
        text += " into L2"
    return text + "".join(f", at most {counted(stages, 'stage')} in flight" for stages in cap)


def roles(plan: Plan) -> Sheet:
    """Rows are warps, columns ops; warps and ops with the same entries share a row or column."""
    jobs: dict[int, dict[str, list[str]]] = {w: {} for w in range(plan.launch.warps)}
    for kernel in plan.kernels:
        for program in kernel.programs:
            for warp in range(program.first, program.first + program.count):
                for step in program.steps:
                    calls = jobs[warp].setdefault(step.op or LAUNCH, [])
                    if step.call not in calls:
                        calls.append(step.call)

    rows: list[dict[str, Any]] = []
    for job, group in groupby(jobs, key=jobs.__getitem__):
        warps = list(group)
        rows.append({"first": warps[0], "count": len(warps), "jobs": job})

    kinds = {op.name: op.kind for op in plan.ops} | {LAUNCH: LAUNCH}
    alike: dict[tuple[str, ...], list[str]] = {}
    for op, kind in kinds.items():
        entries = tuple(" ".join(row["jobs"].get(op, ())) for row in rows)
        if any(entries):
            alike.setdefault((kind, *entries), []).append(op)

    def column(ops: list[str]) -> Column:
        return Column("\n".join(ops), lambda row: ", ".join(c.replace("_", " ") for c in row["jobs"].get(ops[0], ())))

    columns = [Column("warps", lambda row: span(row["first"], row["count"])), *map(column, alike.values())]
    return Sheet("roles", f"Roles: {plan.launch.warps} warps, and what they do for each op", columns, rows)


def shared(plan: Plan) -> Sheet:
    """The map of a block's dynamic shared memory."""
    rows: list[dict[str, Any]] = [
        {"name": r.name, "offset": r.offset, "bytes": r.bytes, "align": r.align} for r in plan.regions
    ]
    rows += [
        {"name": f"mbarrier {b.name}", "offset": b.offset, "bytes": b.slots * MBARRIER_BYTES, "align": MBARRIER_BYTES}
        for b in plan.barriers
    ]
    rows.sort(key=lambda row: (row["offset"], -row["bytes"]))
    used, limit = plan.launch.shared_bytes, plan.machine.shared_bytes
    return Sheet(
        "shared",
        f"Shared memory: {size(used)} of {size(limit)}, {size(limit - used)} free",
        (
            Column("offset", "offset", right=True),
            Column("bytes", "bytes", right=True),
            Column("align", "align", right=True),
            Column("region", "name"),
        ),
        rows,
        extra={"shared_bytes": used, "shared_limit": limit},
    )


def syncs(plan: Plan) -> Sheet:
    """Every edge between writers and readers, with the primitive that orders it."""
    rows = [
        {
            "index": c.index,
            "edge": c.name,
            "kind": c.kind.value,
            "scope": c.scope.value,
            "dtype": c.dtype.value,
            "shape": list(c.shape),
            "bytes": c.bytes,
            "writers": [str(r) for r in c.writers],
            "readers": [str(r) for r in c.readers],
            "empty": None if c.empty is None else f"0x{c.empty:08x}",
            "copies": c.copies,
            "reset": c.reset.value,
            "source": place(c.source),
        }
        for c in plan.channels
    ]
    return Sheet(
        "syncs",
        "Syncs: who waits for whom, by what",
        (
            Column("#", "index", right=True),
            Column("edge", "edge"),
            Column("kind", lambda r: f"{r['kind']}, {r['scope']}"),
            Column("data", lambda r: f"{r['dtype']} {'×'.join(map(str, r['shape']))}"),
            Column("bytes", lambda r: size(r["bytes"]), right=True),
            Column("from", lambda r: _named(r["writers"])),
            Column("to", lambda r: _named(r["readers"])),
            Column("empty", "empty"),
            Column("copies, reset", lambda r: f"{r['copies']}, {r['reset']}"),
            Column("from line", line),
        ),
        rows,
        note=of_file(rows),
    )


def _named(roles: list[str]) -> str:
    """ "op.role" as "op role": a narrow column wraps between words."""
    return ",\n".join(r.replace(".", " ") for r in roles)


def barriers(plan: Plan) -> Sheet:
    """The mbarriers of a block, with who waits and who arrives."""
    used: dict[str, dict[str, set[int]]] = {b.name: {"wait": set(), "arrive": set()} for b in plan.barriers}
    for kernel in plan.kernels:
        for program in kernel.programs:
            for use in (u for step in program.steps for u in step.barriers):
                side = "wait" if use.action == "wait" else "arrive"
                used[use.barrier][side].update(range(program.first, program.first + program.count))
    rows = [
        {
            "index": b.index,
            "barrier": b.name,
            "slots": b.slots,
            "count": b.count,
            "bytes_too": b.tx,
            "arrive": sorted(used[b.name]["arrive"]),
            "wait": sorted(used[b.name]["wait"]),
        }
        for b in plan.barriers
    ]
    return Sheet(
        "barriers",
        "Barriers in the block",
        (
            Column("#", "index", right=True),
            Column("barrier", "barrier"),
            Column("slots", "slots", right=True),
            Column("arrivals", lambda r: f"{r['count']}{' + bytes' if r['bytes_too'] else ''}", right=True),
            Column("arriving warps", lambda r: runs(r["arrive"])),
            Column("waiting warps", lambda r: runs(r["wait"])),
        ),
        rows,
    )


def streams(plan: Plan) -> Sheet:
    """The weights and tensors that go through the ring."""
    ring = plan.ring
    rows = [
        {
            "op": op.name,
            "weight": op.stream.weight or ", ".join(op.stream.tensors),
            "stage_rows": op.stream.stage_rows,
            "stage_k": op.stream.stage_k,
            "stage_bytes": op.stream.stage_bytes,
            "stages_per_tile": op.stream.per_tile,
            "hint": op.stream.hint.value,
            "l2_hint": op.stream.l2_hint.value,
            "source": place(op.stream.source),
        }
        for op in plan.ops
        if op.stream is not None
    ]
    total = ring.stages * ring.stage_bytes
    return Sheet(
        "streams",
        f"Ring: {ring.stages} stages of {size(ring.stage_bytes)}, {size(total)} a block; "
        f"{ring.consumers} warps release a stage",
        (
            Column("op", "op"),
            Column("weight", "weight"),
            Column("stage", lambda r: f"{r['stage_rows']} rows × {r['stage_k']}"),
            Column("bytes", lambda r: size(r["stage_bytes"]), right=True),
            Column("stages a tile", "stages_per_tile", right=True),
            Column("hint", "hint"),
            Column("hint in L2", "l2_hint"),
            Column("from line", line),
        ),
        rows,
        note=of_file(rows),
        extra={
            "ring": {"stages": ring.stages, "stage_bytes": ring.stage_bytes, "bytes": total}
            | {"consumers": ring.consumers, "source": place(ring.source)}
        },
    )


def loads(plan: Plan) -> Sheet:
    """Steps that ask for weights or that such a step waits for, in the order in which their warp comes to them."""
    rows = [
        {
            "kernel": kernel.name,
            "first": program.first,
            "count": program.count,
            "step": step.index,
            "op": step.op,
            "call": step.call,
            "args": list(step.args),
            "words": words(step),
            "source": place(step.source),
        }
        for kernel in plan.kernels
        for program in kernel.programs
        for step in program.steps
        if plan.loads(step) or step.call in ("prefetch_l2", "wait_point", "signal_point", *WARMS)
    ]
    return Sheet(
        "loads",
        "Weight loads and prefetches, in program order",
        (
            Column("warps", lambda r: span(r["first"], r["count"])),
            Column("step", "step", right=True),
            Column("op", "op"),
            Column("call", "call"),
            Column("in words", "words"),
            Column("from line", line),
        ),
        rows,
        note=of_file(rows),
    )


def costs(plan: Plan) -> Sheet:
    """Bytes, operations and floor of every op, at the plan's nominal routing."""
    rows: list[dict[str, Any]] = [
        {
            "op": op.name,
            "kind": op.kind,
            "weight_bytes": op.weight_bytes,
            "activation_bytes": op.activation_bytes,
            "operations": op.operations,
            "floor_us": stream_us(plan, op.weight_bytes),
        }
        for op in plan.ops
    ]
    weights = sum(op.weight_bytes for op in plan.ops)
    total: dict[str, Any] = {
        "op": "total",
        "kind": "",
        "weight_bytes": weights,
        "activation_bytes": sum(op.activation_bytes for op in plan.ops),
        "operations": sum(op.operations for op in plan.ops),
        "floor_us": stream_us(plan, weights),
    }
    rate = plan.machine.hbm_bytes_per_s
    return Sheet(
        "costs",
        f"Bytes, operations and floor: {nominal(plan)}",
        (
            Column("op", "op"),
            Column("kind", "kind"),
            Column("weights MB", lambda r: megabytes(r["weight_bytes"]), right=True),
            Column("activations MB", lambda r: megabytes(r["activation_bytes"]), right=True),
            Column("Mop", lambda r: f"{r['operations'] / 1e6:.1f}", right=True),
            Column("floor µs", lambda r: f"{r['floor_us']:.2f}", right=True),
        ),
        rows,
        total,
        note=f"Floor: weights once from HBM at {rate / 1e12:.2f} TB/s ({plan.machine.name}); activations stay in L2",
        extra={"total": {k: v for k, v in total.items() if k not in ("op", "kind")}},
    )


def header(plan: Plan, options: Mapping[str, str]) -> dict[str, Any]:
    """What plan this is: the first keys of every command's JSON. ``options``: what its schedule was asked for."""
    return {
        "plan": plan.name,
        "machine": plan.machine.name,
        "tp": plan.tp,
        "tokens": plan.tokens,
        "fused": plan.fused,
        "choices": dict(plan.choices),
        "graph": plan.graph,
        "options": dict(options),
    }


def computed(plan: Plan, options: Mapping[str, str]) -> str:
    """The graph, and what was asked of it: "muse_spark.expert_block.nn with experts=bf16"."""
    asked = ", ".join(f"{k}={v}" for k, v in options.items())
    return f"{plan.graph} with {asked}" if asked else plan.graph


def headline(plan: Plan, options: Mapping[str, str]) -> str:
    """The same in one line."""
    kernels = "one fused kernel" if plan.fused else f"{len(plan.kernels)} kernels, one an op"
    picked = "".join(f", {k}={v}" for k, v in plan.choices.items())
    at = plan.launch
    return (
        f"{plan.name}: {kernels}, for {computed(plan, options)} on {plan.machine.name}, tp {plan.tp}, "
        f"up to {counted(plan.tokens, 'token')}{picked}; "
        f"{counted(at.blocks, 'block')} (cluster {at.cluster}) of {counted(at.warps, 'warp')}"
    )


def sheets(plan: Plan) -> list[Sheet]:
    """All of them, in reading order."""
    return [part(plan) for part in (roles, shared, syncs, barriers, streams, loads, costs)]


def runs(warps: list[int]) -> str:
    """[0, 4, 5, 6] as "0 4-6"."""
    spans: list[list[int]] = []
    for w in warps:
        if spans and w == sum(spans[-1]):
            spans[-1][1] += 1
        else:
            spans.append([w, 1])
    return " ".join(span(first, count) for first, count in spans)
