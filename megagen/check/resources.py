"""What a block and a rank need is there, and no two things stand in one place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from megagen.check.finding import Finding, proved, refuse
from megagen.ir.plan import OpPlan, Plan, Source, SyncKind
from megagen.ir.touches import ACCUM, ACCUM_FULL, TABLE, TABLE_BYTES

RULE = "resources"
WARPGROUP = 4
MBARRIER = 8  # bytes
NOTE_BYTES = 16  # a warp's, and as many for the alarm: debug/hang.cuh
ACCUM_SLOT = 8 * 2 * 32 * 16  # slices, n8 tiles, lanes, bytes a lane: mma/format.cuh
CLUSTER_ROW = 16 * 4  # bytes of a token's partial sums in a row block: comm/channel.cuh
PADDING = 256  # bytes that a copy is rounded up to
GUESSED = 2 / 3  # of L2, at most, for weights that may be used
VECTOR = 16  # bytes that a lane reads or empties at once
Span = tuple[int, int, str, int]  # offset, bytes, what, alignment


def resources(plan: Plan) -> Iterator[Finding]:
    """Shared memory, registers, barriers, co-residency, heap."""
    launch, machine = plan.launch, plan.machine
    if not 1 <= launch.warps <= 32:
        refuse(RULE, f"{launch.warps} warps a block: there can be 1 to 32", launch.source)
    _shared(plan)
    registers = _registers(plan)
    _resident(plan)
    _heap(plan)
    barriers = _named_barriers(plan)
    if machine.barriers <= max(barriers):
        needs = f"a block needs number {max(barriers)}" if len(barriers) > 2 else "a block needs two"
        refuse(RULE, f"{machine.name} has {machine.barriers} named barriers, {needs}", launch.source)
    yield from _tight(plan)
    yield from _guess(plan)
    fit = machine.blocks_fit[launch.cluster]
    for what in (
        f"{launch.shared_bytes} of {machine.shared_bytes} bytes of shared memory, no two things in one place",
        f"{registers} registers a thread, of {machine.registers} an SM; "
        f"{'two' if len(barriers) == 2 else len(barriers)} named barriers of {machine.barriers}",
        f"{launch.blocks} blocks in clusters of {launch.cluster} run at once: {machine.name} holds {fit}",
        f"a heap of {plan.heap.bytes} bytes a rank, no two things in one place",
    ):
        yield proved(RULE, what)


def _named_barriers(plan: Plan) -> set[int]:
    """That of __syncthreads, the one that says that the mbarriers are made, and one each four warps that meet."""
    meet = (
        op.roles.get(spec.name, ())
        for op in plan.ops
        for spec in op.specs
        if spec.fours or (spec.warpgroups and op.constants.get("kWarpgroups"))
    )
    return {0, 1} | {2 + warp // 4 for group in meet for warp in group}


def _guess(plan: Plan) -> Iterator[Finding]:
    """What L2 is asked for before it is known to be used leaves room for what passes."""
    if plan.guess is None:
        return
    names = {plan.op(op).weights["weight"] for op in plan.guess.ops}
    each = sum(w.bytes // w.experts for w in plan.weights if w.parameter in names)
    room, asked = plan.machine.l2_bytes - plan.heap.bytes, plan.guess.top * each
    what = f"{plan.guess.top} experts of {each / 1e6:.2f} MB are {asked / 1e6:.1f} MB, {plan.machine.name} has"
    most = f"previous_step(top={max(1, int(room * GUESSED // each))})"
    if asked > room:
        message = f"{what} {room / 1e6:.1f} MB of L2 beside the exchanges"
        refuse(RULE, message, plan.guess.source, hint=most)
    if asked > room * GUESSED:
        message = f"{what} {room / 1e6:.1f} MB of L2 beside the exchanges, of which 2/3 stay: {most}"
        yield Finding(rule=RULE, level="warning", message=message, source=plan.guess.source)


def _apart(spans: Iterable[Span], size: int, where: str, source: Source) -> None:
    """Inside ``size`` bytes, aligned, and none over another."""
    end, before = 0, "its beginning"
    for offset, count, what, align in sorted(spans):
        if offset % align:
            refuse(RULE, f"{what} stands at {offset} of {where}, not at a multiple of {align}", source)
        if count and offset < end:
            refuse(RULE, f"{what} overlaps {before} in {where}", source)
        if offset + count > size:
            refuse(RULE, f"{what} ends at {offset + count}, past the {size} bytes of {where}", source)
        if count:
            end, before = offset + count, what


def _shared(plan: Plan) -> None:
    launch, ring, limit = plan.launch, plan.ring, plan.machine.shared_bytes
    if launch.shared_bytes > limit:
        others = launch.shared_bytes - ring.stages * ring.stage_bytes
        fit = max(0, limit - others) // max(1, ring.stage_bytes)
        parts = {"ring": ring.stages * ring.stage_bytes, "accumulators": plan.barrier(ACCUM_FULL).slots * ACCUM_SLOT}
        parts |= {c.name: r.bytes for c in plan.channels for r in plan.regions if r.name == f"cluster_{c.name}"}
        shown = ", ".join(f"{what} {size}" for what, size in sorted(parts.items(), key=lambda x: -x[1]))
        refuse(
            RULE,
            f"a block needs {launch.shared_bytes} bytes of shared memory, {plan.machine.name} has {limit}",
            ring.source,
            launch.source,
            hint=f"a ring of {fit} stages of {ring.stage_bytes} bytes would fit" if fit else f"of these: {shown}",
        )
    regions: list[Span] = [(r.offset, r.bytes, r.name, max(r.align, VECTOR)) for r in plan.regions]
    barriers: list[Span] = [(b.offset, MBARRIER * b.slots, b.name, MBARRIER) for b in plan.barriers]
    _apart([*regions, *barriers], launch.shared_bytes, "shared memory", launch.source)
    accum = plan.barrier(ACCUM_FULL).slots * ACCUM_SLOT
    sizes = {ring.region: ring.stages * ring.stage_bytes, ACCUM: accum, TABLE: TABLE_BYTES}
    sizes["notes"] = NOTE_BYTES * (launch.warps + 1)
    for op in plan.ops:
        for purpose, size in op.shared.items():
            sizes[op.regions[purpose]] = max(size, sizes.get(op.regions[purpose], 0))
    for c in plan.channels:
        if c.kind is SyncKind.CLUSTER and launch.cluster > 0:
            clusters = max(1, launch.blocks // launch.cluster)
            places = math.ceil(math.ceil(c.shape[1] / clusters) / launch.cluster)
            sizes[f"cluster_{c.name}"] = places * c.shape[0] * plan.tokens * CLUSTER_ROW
    held = {r.name: r.bytes for r in plan.regions}
    for name, size in sizes.items():
        if held.get(name, 0) < size:
            refuse(RULE, f"region {name} of shared memory has {held.get(name, 0)} bytes, {size} are used", ring.source)
    if ring.stage_bytes % VECTOR:
        refuse(RULE, f"a stage of {ring.stage_bytes} bytes: bulk copies take multiples of {VECTOR}", ring.source)
    largest = max((op for op in plan.ops if op.stream), key=_stage, default=None)
    if largest is not None and _stage(largest) > ring.stage_bytes:
        refuse(
            RULE,
            f"ring too small: a stage of {largest.name} is {_stage(largest)} bytes, the ring's {ring.stage_bytes}",
            ring.source,
            largest.source,
            hint=f"s.ring(stages={ring.stages}, stage_bytes={-(-_stage(largest) // 1024)} * KiB)",
        )


def _stage(op: OpPlan) -> int:
    return op.stream.stage_bytes if op.stream else 0


def _registers(plan: Plan) -> str:
    launch, machine, pair = plan.launch, plan.machine, plan.launch.registers
    even = _even(plan)
    pool = machine.registers // (32 * launch.warps) // 8 * 8 * 32 * launch.warps
    if pair is not None:
        if any(n % 8 or not 24 <= n <= 256 for n in pair):
            refuse(RULE, f"registers={pair}: setmaxnreg takes multiples of 8 from 24 to 256", launch.source)
        if launch.warps % WARPGROUP:
            refuse(
                RULE,
                f"setmaxnreg needs whole warpgroups, a block of {launch.warps} warps is none",
                launch.source,
                hint=f"warps={-(-launch.warps // WARPGROUP) * WARPGROUP}, or leave registers out",
            )
        for program in (p for k in plan.kernels for p in k.programs):
            if program.first < WARPGROUP < program.first + program.count:
                refuse(RULE, f"setmaxnreg needs a branch a warpgroup, a program begins at warp {program.first} and "
                       f"takes {program.count}", launch.source)  # fmt: skip
        used = 32 * (WARPGROUP * pair[0] + (launch.warps - WARPGROUP) * pair[1])
        if used > pool:
            refuse(
                RULE,
                f"registers={pair} of {launch.warps} warps add up to {used}, a launch starts with {pool}",
                launch.source,
                hint="a warp waits for ever for registers that no other gives back: lower one of the two",
            )
    return f"{even}" if pair is None else " and ".join(map(str, pair))


def _tight(plan: Plan) -> Iterator[Finding]:
    """Roles whose warps have fewer registers than ptxas wants: right, but slower."""
    even, pair = _even(plan), plan.launch.registers
    for op in plan.ops:
        for spec in op.specs:
            has = even if pair is None else pair[op.roles[spec.name][0] >= WARPGROUP]
            if spec.registers > has:
                message = (
                    f"{op.name}.{spec.name} wants {spec.registers} registers a thread, its warps have {has}: spills"
                )
                yield Finding(rule=RULE, level="warning", message=message, source=op.source)


def _even(plan: Plan) -> int:
    """Registers a thread when all have the same."""
    return min(255, plan.machine.registers // (32 * plan.launch.warps) // 8 * 8)


def _resident(plan: Plan) -> None:
    """Blocks wait for each other, so all have to run at once."""
    launch, fit = plan.launch, plan.machine.blocks_fit
    if launch.cluster not in fit:
        known = f"it knows {', '.join(map(str, sorted(fit)))}"
        refuse(RULE, f"{plan.machine.name} knows no clusters of {launch.cluster} blocks", launch.source, hint=known)
    if launch.blocks < 1 or launch.blocks % launch.cluster:
        whole = max(1, launch.blocks // launch.cluster) * launch.cluster
        refuse(
            RULE,
            f"{launch.blocks} blocks do not make whole clusters of {launch.cluster}",
            launch.source,
            hint=f"blocks={whole}",
        )
    if launch.blocks > fit[launch.cluster]:
        refuse(
            RULE,
            f"{launch.blocks} blocks in clusters of {launch.cluster} wait for each other, {plan.machine.name} runs "
            f"{fit[launch.cluster]} at once",
            launch.source,
            hint=f"at most {fit[launch.cluster]} blocks",
        )


def _heap(plan: Plan) -> None:
    heap, launch = plan.heap, plan.launch
    if heap.record_bytes < 64 * launch.blocks * launch.warps:
        refuse(RULE, f"hang records of {launch.blocks} x {launch.warps} warps need more than {heap.record_bytes} bytes")
    spans: list[Span] = [
        (heap.epoch_offset, 4 * launch.blocks, "the epoch words", 4),
        (heap.abort_offset, 4, "the abort word", 4),
        (heap.record_offset, heap.record_bytes, "the hang records", VECTOR),
    ]
    for c in plan.channels:
        if c.kind in (SyncKind.MBARRIER, SyncKind.CLUSTER):
            continue
        size = math.prod(c.shape) * int(c.dtype.bits) // 8
        if not 0 <= c.bytes - size < PADDING or c.bytes % VECTOR:
            refuse(RULE, f"a copy of {c.name} has {c.bytes} bytes, its tensor {size}", c.source)
        spans += [(c.offset + i * c.bytes, c.bytes, f"copy {i} of {c.name}", VECTOR) for i in range(c.copies)]
        if c.kind in (SyncKind.COUNTER, SyncKind.FLAG):
            if c.counter_offset is None:
                refuse(RULE, f"{c.name} has no counter", c.source)
            spans.append((c.counter_offset, 4 * c.copies, f"the counter of {c.name}", 4))
    _apart(spans, heap.bytes, "the heap", launch.source)
