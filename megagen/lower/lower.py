"""The lowering itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from megagen.dsl.schedule import Prefetch, Schedule, Warm
from megagen.errors import Loc, ScheduleError
from megagen.ir.graph import DType, Graph, Op, Per, Routing, Scope, TensorKind
from megagen.ir.plan import (
    PREFETCH_GUESS,
    BarrierPlan,
    BarrierUse,
    ChannelPlan,
    GuessPlan,
    HeapPlan,
    Hint,
    KernelPlan,
    LaunchPlan,
    OpPlan,
    ParamPlan,
    Plan,
    ProgramPlan,
    RegionPlan,
    Reset,
    RingPlan,
    RoleRef,
    Source,
    StampPlan,
    StepPlan,
    StreamPlan,
    SyncKind,
    WeightPlan,
)
from megagen.ir.touches import HISTORY_COPIES, TABLE_BYTES, prefetch_uses, role_uses
from megagen.lower.channels import Edges, counted, layout
from megagen.lower.memory import Arena
from megagen.ops.expert_gemm import ExpertGemm

WHOLE = 1024  # shares are given to the device in 1/1024 (ops/stream.cuh)
SLICES, ROW_BLOCK = 8, 16  # mma/format.cuh
WARPGROUP = 4
HANG_RECORD, NOTE_BYTES = 64, 16  # debug/hang.cuh
STAMP, STAMP_HEADER = 16, 4  # bytes of a record, records before a warp's (debug/stamp.cuh)
MOST_STAMPS, MOST_STAMPED_STEPS = 1 << 32, 0xFFF
COARSE_TIMER_NS = 64  # a GPU's timer of larger steps is too coarse for stamps
MEASURED_EXPERTS = 49
HISTORY, HISTORY_WORDS = "history", 64  # of a layer's launches, words of a copy (ops/guess.cuh)
PARAMETER: dict[TensorKind, Literal["input", "output", "state"]] = {
    TensorKind.INPUT: "input", TensorKind.OUTPUT: "output", TensorKind.STATE: "state",
}  # fmt: skip


def lower(schedule: Schedule, *, fused: bool = True) -> Plan:
    """``schedule`` as a Plan: one kernel, or with ``fused=False`` one kernel an op, from the same description.

    Raises ScheduleError where a directive cannot be expressed.
    """
    return _Lowering(schedule, fused).plan()


def nominal(graph: Graph) -> Routing:
    """The routing that a Plan's bytes are stated for: all its tokens, on as many distinct experts as experience says.

    One token uses top_k experts; the LMSYS article on Muse Spark Open Ultrafast measured 49 for 16 tokens of GSM8K;
    between them a power law.
    """
    top_k = max((op.top_k for op in graph.ops if isinstance(op, ExpertGemm)), default=0)
    return Routing(tokens=graph.tokens, experts=distinct(graph.tokens, top_k))


def distinct(tokens: int, top_k: int) -> int:
    """How many experts so many tokens use, of ``top_k`` each; see :func:`nominal`."""
    growth = math.log(MEASURED_EXPERTS / 8, 16)
    return round(top_k * math.pow(tokens, growth))


def source(loc: Loc | None) -> Source:
    return Source() if loc is None else Source(file=loc.file, line=loc.line, column=loc.column, text=loc.text)


class _Lowering:
    def __init__(self, schedule: Schedule, fused: bool) -> None:
        self.s, self.g, self.fused = schedule, schedule.graph, fused
        self.edges = Edges(schedule)
        self.steps = 0
        self.edge_index = 0
        if not schedule.rings:
            raise ScheduleError(
                "the schedule has no weight ring", loc=schedule.loc, hint="s.ring(stages=4, stage_bytes=36 * KiB)"
            )
        self.ring = schedule.rings[0]
        self.launch = schedule.launch_
        fit = schedule.machine.blocks_fit.get(self.launch.cluster, 0)
        self.blocks = schedule.blocks or fit
        self.roles: dict[tuple[str, str], tuple[int, ...]] = {k: w.indices() for k, (w, _) in schedule.roles.items()}
        self.producers = {(op.name, r.name) for op in self.g.ops for r in op.roles() if r.stream}
        self.points = self._points()
        self.begins = self._begins()
        self.nominal = nominal(schedule.graph)
        self.guess = self._guess()

    # pieces -----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        s, g = self.s, self.g
        shared, heap = Arena(), Arena()
        regions: list[RegionPlan] = []

        def region(name: str, size: int, align: int = 128) -> RegionPlan:
            regions.append(RegionPlan(name=name, offset=shared.take(size, align), bytes=size, align=align))
            return regions[-1]

        region("ring", self.ring.stages * self.ring.stage_bytes)
        region("accum", s.accum_slots * SLICES * 2 * 32 * 16)
        region("table", TABLE_BYTES)
        region("notes", NOTE_BYTES * (s.warps_per_block + 1), 16)
        for op in g.ops:
            for purpose, size in op.shared().items():
                region(f"{purpose}_{op.name}", size, 16)
        epoch_offset = heap.take(4 * self.blocks, 256)
        abort_offset = heap.take(4, 256)
        record_offset = heap.take(self.blocks * s.warps_per_block * HANG_RECORD, 256)

        cluster_regions = {}
        for t in self.edges.internal():
            if self.edges.sync(t)[0].kind is SyncKind.CLUSTER:
                if len(t.shape) != 4 or t.scope is not Scope.RANK:
                    raise ScheduleError(
                        f"tensor {t.name!r} cannot travel within a cluster", loc=self.edges.sync(t)[1],
                        hint="cluster() is for the partial sums of a dense GEMM (g.op.reduce >> g.op.finish)",
                    )  # fmt: skip
                clusters = max(1, self.blocks // self.launch.cluster)
                mine = math.ceil(math.ceil(t.shape[1] / clusters) / self.launch.cluster)
                cluster_regions[t.name] = region(f"cluster_{t.name}", mine * t.shape[0] * g.tokens * ROW_BLOCK * 4)

        barriers = self._barriers(shared)
        channels = self._channels(heap, {n: r.offset for n, r in cluster_regions.items()})
        ops = tuple(self._op(op) for op in g.ops)
        params, weights = self._params()
        kernels = self._kernels(channels)
        return Plan(
            name=s.name, graph=g.name, tp=g.tp, tokens=g.tokens, machine=s.machine, fused=self.fused,
            launch=LaunchPlan(
                blocks=self.blocks, cluster=self.launch.cluster, warps=s.warps_per_block,
                shared_bytes=-(-shared.size // 128) * 128, pdl=self.launch.pdl, early_trigger=self.launch.early_trigger,
                registers=self.launch.registers, source=source(self.launch.loc or s.loc),
            ),
            ring=RingPlan(
                stages=self.ring.stages, stage_bytes=self.ring.stage_bytes, region="ring", full="ring_full",
                empty="ring_empty", consumers=self._ring_consumers(), source=source(self.ring.loc),
            ),
            heap=HeapPlan(
                bytes=-(-heap.size // 256) * 256, epoch_offset=epoch_offset, abort_offset=abort_offset,
                record_offset=record_offset, record_bytes=self.blocks * s.warps_per_block * HANG_RECORD,
            ),
            params=params, weights=weights, regions=tuple(regions), barriers=barriers, channels=channels, ops=ops,
            kernels=kernels, choices={name: value for name, (value, _) in sorted(s.offered.items())},
            nominal_experts=self.nominal.experts, nominal_tokens=self.nominal.tokens, stamps=self._stamps(len(kernels)),
            guess=self.guess,
        )  # fmt: skip

    def _stamps(self, kernels: int) -> StampPlan | None:
        if self.s.stamped is None:
            return None
        records, loc = self.s.stamped
        warps = kernels * self.blocks * self.s.warps_per_block
        if warps * (STAMP_HEADER + records) > MOST_STAMPS or self.steps >= MOST_STAMPED_STEPS:
            raise ScheduleError(
                f"stamps(records={records}) of {warps:,} warps with {self.steps:,} steps: more than can be numbered",
                loc=loc, hint=f"{MOST_STAMPS:,} records of a launch, {MOST_STAMPED_STEPS:,} steps",
            )  # fmt: skip
        return StampPlan(
            records=records,
            cycles=self.s.machine.timer_step_ns > COARSE_TIMER_NS,
            bytes=warps * (STAMP_HEADER + records) * STAMP,
            source=source(loc),
        )

    def _guess(self) -> GuessPlan | None:
        """One kernel asks for its experts before it knows them; of several, each begins when all is known."""
        asked = [p for p in self.s.prefetches if p.experts is not None]
        first = self.s.first_experts
        if first is not None and not asked:
            raise ScheduleError(
                "no experts are asked for that could come first", loc=first,
                hint="s.prefetch(g.gate_up.weight, into=L2, experts=previous_step(top=8), ...)",
            )  # fmt: skip
        if not asked or not self.fused:
            return None
        (guess, *_) = (p.experts for p in asked if p.experts is not None)
        weights = {p.op: self.g.op(p.op).weights["weight"] for p in asked}
        if guess.top > min(w.experts for w in weights.values()):
            raise ScheduleError(f"top={guess.top}: there are fewer experts", loc=guess.loc)
        return GuessPlan(
            top=guess.top, hint=guess.hint, first=first is not None, ops=tuple(weights), parameter=HISTORY,
            source=source(asked[0].loc),
        )  # fmt: skip

    def _index(self) -> int:
        self.edge_index += 1
        return self.edge_index - 1

    def _points(self) -> dict[str, Prefetch]:
        """Ops whose end in the block something waits for."""
        return {p.at: p for p in self.s.prefetches if p.into.ring and p.share < 1 and p.at is not None}

    def _begins(self) -> dict[str, tuple[list[int], Loc | None]]:
        """Ops whose beginning in the block a warp waits for, to ask L2 for a weight: the other warps, who say so."""
        asked: dict[str, list[Prefetch | Warm]] = {}
        some: list[Prefetch | Warm] = [*(p for p in self.s.prefetches if p.into.l2), *self.s.warms]
        for p in some:
            if p.at is not None and self.fused:
                asked.setdefault(p.at, []).append(p)
        found = {
            op: ([w for w in self._point_warps(op) if w not in {p.warp for p in ps}], ps[0].loc)
            for op, ps in asked.items()
        }
        return {op: (warps, loc) for op, (warps, loc) in found.items() if warps}

    def _point_warps(self, op: str) -> list[int]:
        return sorted(
            {w for role, ws in self.roles.items() if role[0] == op and role not in self.producers for w in ws}
        )

    def _ring_consumers(self) -> int:
        drain = {(op.name, r.name) for op in self.g.ops for r in op.roles() if r.ring}
        return max((len(ws) for role, ws in self.roles.items() if role in drain), default=0)

    def _takers(self) -> int:
        """Warps that take the accumulators."""
        takes = {(op.name, r.name) for op in self.g.ops for r in op.roles() if r.accum == "in"}
        return max((len(ws) for role, ws in self.roles.items() if role in takes), default=1)

    def _publishes(self, op: Op, role: str) -> tuple[int, Per]:
        """Of a role that takes accumulators each warp publishes every tile, whichever part of it was its own."""
        count, per = op.publishes(role)
        return count * (len(self.roles.get((op.name, role), (0,))) if op.role(role).accum == "in" else 1), per

    def _barriers(self, shared: Arena) -> tuple[BarrierPlan, ...]:
        out: list[BarrierPlan] = []

        def add(name: str, slots: int, count: int, tx: bool = False) -> None:
            out.append(
                BarrierPlan(
                    name=name, offset=shared.take(8 * slots, 8), slots=slots, count=count, tx=tx, index=self._index()
                )
            )

        consumers = self._ring_consumers()
        add("ring_full", self.ring.stages, 1, tx=True)
        add("ring_empty", self.ring.stages, consumers)
        add("accum_full", self.s.accum_slots, consumers)
        add("accum_empty", self.s.accum_slots, self._takers())
        add("table_ready", 1, 1)
        for op in self.g.ops:
            for role in op.roles():
                if role.meets:
                    add(f"group_{op.name}", 1, len(self.roles.get((op.name, role.name), ())))
        for op_name in sorted(self.points):
            add(f"point_{op_name}", 1, len(self._point_warps(op_name)))
        for op_name in sorted(self.begins):
            add(f"begin_{op_name}", 1, len(self.begins[op_name][0]))
        for t in self.edges.internal():
            if self.edges.sync(t)[0].kind is SyncKind.CLUSTER:
                add(f"done_{t.name}", 1, 1, tx=True)
        return tuple(out)

    def _channels(self, heap: Arena, cluster: dict[str, int]) -> tuple[ChannelPlan, ...]:
        out = []
        for t in self.edges.internal():
            sync, loc = self.edges.sync(t)
            copies = sync.copies or 1
            writers, readers = self.edges.writers.get(t.name, []), self.edges.readers.get(t.name, [])
            row_stride, rank_stride, shard = layout(t, self.g.tp)
            arrivals, per = self._publishes(*writers[0])
            size = -(-t.bytes // 256) * 256
            in_heap = sync.kind not in (SyncKind.MBARRIER, SyncKind.CLUSTER)
            out.append(
                ChannelPlan(
                    name=t.name, dtype=t.dtype, shape=t.shape, scope=t.scope, kind=sync.kind,
                    empty=sync.empty if sync.kind is SyncKind.LAMPORT else None, copies=copies,
                    reset=Reset.LAUNCH if counted(sync) else sync.reset,
                    offset=heap.take(copies * size, 256) if in_heap else 0, bytes=size if in_heap else 0,
                    counter_offset=heap.take(4 * copies, 256) if counted(sync) else None,
                    shared_offset=cluster.get(t.name),
                    barrier={SyncKind.MBARRIER: "table_ready", SyncKind.CLUSTER: f"done_{t.name}"}.get(sync.kind),
                    writers=tuple(RoleRef(op=o.name, role=r) for o, r in writers),
                    readers=tuple(RoleRef(op=o.name, role=r) for o, r in readers),
                    row_stride=row_stride, rank_stride=rank_stride, shard=shard, scatter=t.scatter,
                    arrivals=arrivals, arrivals_per=per,
                    index=self._index(), fault=t.name in self.edges.faults, source=source(loc),
                )
            )  # fmt: skip
        return tuple(out)

    def _params(self) -> tuple[tuple[ParamPlan, ...], tuple[WeightPlan, ...]]:
        params, weights = [], []
        for t in self.g.tensors.values():
            if t.kind is not TensorKind.INTERNAL:
                what = PARAMETER[t.kind]
                ctype = "const u8*" if what == "input" else "u8*"
                params.append(ParamPlan(name=t.name, ctype=ctype, what=what, dtype=t.dtype, shape=t.shape))
        for op in self.g.ops:
            stage = op.stage()
            for w in op.weights.values():
                tiles = stage is not None and w.k > 1
                if tiles and stage is not None:
                    rows, k, size = stage["rows"], stage["k"], w.bytes
                else:
                    rows, k, size = 0, 0, w.device_bytes
                weights.append(
                    WeightPlan(
                        name=w.name, parameter=w.name, dtype=w.dtype,
                        layout="tiles" if tiles else "rows" if w.k > 1 else "vector",
                        rows=w.rows, k=w.k, experts=w.experts, stage_rows=rows, stage_k=k, bytes=size,
                        gate_up=w.gate_up, names=w.names, shard=w.shard,
                    )
                )  # fmt: skip
                plain = (w.rows, w.k) if w.k > 1 else (w.planes, w.rows)
                shape = (w.experts, w.rows, w.k) if w.experts else plain
                params.append(ParamPlan(name=w.name, ctype="const u8*", what="weight", dtype=w.dtype, shape=shape))
                if w.dtype is DType.NVFP4:
                    params.append(
                        ParamPlan(
                            name=f"{w.name}_scale", ctype="const u8*", what="weight", dtype=DType.FP32,
                            shape=(w.experts, 2 if w.gate_up else 1),
                        )
                    )  # fmt: skip
        if self.guess is not None:
            shape = (HISTORY_COPIES, HISTORY_WORDS)
            params.append(ParamPlan(name=HISTORY, ctype="u8*", what="history", dtype=DType.U32, shape=shape))
        return tuple(params), tuple(weights)

    def _op(self, op: Op) -> OpPlan:
        internal = {t.name for t in self.edges.internal()}
        ports = {**op.inputs, **op.outputs}
        stage, weight = op.stage(), op.weights.get("weight")
        stream = None
        if stage is not None:
            hint, loc = self.s.hints.get(op.name, (Hint.EVICT_NORMAL, None))
            producer = op.producer
            stream = StreamPlan(
                weight=weight.name if weight else "",
                tensors=tuple(ports[p] for p in producer.reads) if producer and not weight else (),
                stage_bytes=stage["bytes"], per_tile=stage["per_tile"], held=stage.get("held", 1),
                stage_rows=stage["rows"], stage_k=stage["k"],
                hint=hint, l2_hint=Hint.EVICT_NORMAL, source=source(loc),
            )  # fmt: skip
        pointers = {port: w.name for port, w in op.weights.items()}
        if stage is not None and weight is not None and weight.dtype is DType.NVFP4:
            pointers["scale"] = f"{weight.name}_scale"
        cost = op.cost(self.nominal)
        locs = [loc for (o, _), (_, loc) in self.s.roles.items() if o == op.name]
        able = [r.name for r in op.roles() if r.warpgroups]
        together = {"kWarpgroups": int(any((op.name, r) in self.s.together for r in able))} if able else {}
        return OpPlan(
            name=op.name, kind=op.kind, header=op.header, struct=op.struct, constants=op.constants() | together,
            channels={p: n for p, n in ports.items() if n in internal},
            tensors={p: n for p, n in ports.items() if n not in internal},
            weights=pointers,
            barriers={"group": f"group_{op.name}"} if any(r.meets for r in op.roles()) else {},
            regions={purpose: f"{purpose}_{op.name}" for purpose in op.shared()}, shared=op.shared(), held=op.held,
            roles={r.name: self.roles[op.name, r.name] for r in op.roles() if (op.name, r.name) in self.roles},
            specs=op.roles(), publishes={r.name: self._publishes(op, r.name) for r in op.roles() if r.writes},
            sends={r.name: n for r in op.roles() if r.writes and (n := op.sends(r.name)) is not None},
            sources={role: source(loc) for (o, role), (_, loc) in self.s.roles.items() if o == op.name}, stream=stream,
            weight_bytes=cost.weight_bytes, activation_bytes=cost.activation_bytes, operations=cost.operations,
            source=source(locs[0] if locs else None),
        )  # fmt: skip

    # programs ---------------------------------------------------------------------------------------------------

    def _kernels(self, channels: tuple[ChannelPlan, ...]) -> tuple[KernelPlan, ...]:
        if self.fused:
            return (self._kernel(self.s.name, list(self.g.ops), channels, first=True, last=True),)
        return tuple(
            self._kernel(f"{self.s.name}_{op.name}", [op], channels, first=i == 0, last=i == len(self.g.ops) - 1)
            for i, op in enumerate(self.g.ops)
        )

    def _kernel(
        self, name: str, ops: list[Op], channels: tuple[ChannelPlan, ...], *, first: bool, last: bool
    ) -> KernelPlan:
        by_name = {c.name: c for c in channels}
        programs: list[list[StepPlan]] = [[] for _ in range(self.s.warps_per_block)]
        for warp, steps in enumerate(programs):
            steps += self._program(warp, ops, by_name, first)
        grouped: list[ProgramPlan] = []
        for warp, steps in enumerate(programs):
            previous = grouped[-1] if grouped else None
            # setmaxnreg gives the first warpgroup its own branch
            apart = warp == WARPGROUP and self.launch.registers is not None
            if previous is not None and not apart and _same(previous.steps, steps):
                grouped[-1] = previous.model_copy(update={"count": previous.count + 1})
            else:
                grouped.append(ProgramPlan(first=warp, count=1, steps=tuple(self._numbered(steps))))
        return KernelPlan(name=name, ops=tuple(o.name for o in ops), programs=tuple(grouped), advances_epoch=last)

    def _numbered(self, steps: list[StepPlan]) -> list[StepPlan]:
        out = []
        for step in steps:
            out.append(step.model_copy(update={"index": self.steps}))
            self.steps += 1
        return out

    def _program(
        self, warp: int, ops: list[Op], channels: dict[str, ChannelPlan], first_kernel: bool
    ) -> list[StepPlan]:
        steps: list[StepPlan] = []
        for op in ops:
            if not self.fused:
                steps += self._tables_first(op, warp, channels)
            begin = self.begins.get(op.name)
            if begin is not None and warp in begin[0]:
                steps.append(self._point("signal_point", f"begin_{op.name}", begin[1]))
            for p in self.s.prefetches:
                mine = p.into.l2 and p.at == op.name and p.warp == warp
                if mine and (self.fused or (p.op == op.name and p.experts is None)):
                    if begin is not None:
                        steps.append(self._point("wait_point", f"begin_{op.name}", p.loc))
                    steps.append(self._prefetch_l2(p, channels) if p.experts is None else self._prefetch_guess(p))
            for w in self.s.warms if self.fused else ():
                if w.next and w.at == op.name and w.warp == warp:
                    if begin is not None:
                        steps.append(self._point("wait_point", f"begin_{op.name}", w.loc))
                    steps.append(self._warm(w))
            for role in op.roles():
                warps = self.roles.get((op.name, role.name), ())
                if warp in warps:
                    steps += self._role(op, role.name, warps, channels)
            if op.name in self.points and self.fused and warp in self._point_warps(op.name):
                steps.append(self._point("signal_point", f"point_{op.name}", self.points[op.name].loc))
        return self._framed(warp, ops, steps, channels, first_kernel)

    def _point(self, call: Literal["signal_point", "wait_point"], barrier: str, loc: Loc | None) -> StepPlan:
        use = BarrierUse(barrier=barrier, action="arrive" if call == "signal_point" else "wait", per="launch")
        return StepPlan(op=None, call=call, barriers=(use,), index=0, source=source(loc))

    def _last_warps(self, ops: list[Op]) -> tuple[int, ...]:
        last = ops[-1]
        return self.roles.get((last.name, last.roles()[-1].name), ())

    def _first_attached(self, ops: list[Op]) -> int:
        """The first warp that streams nothing: it reads what the previous launch wrote, so it waits first thing."""
        names = {o.name for o in ops}
        producers = {w for role in self.producers if role[0] in names for w in self.roles.get(role, ())}
        return min((w for w in range(self.s.warps_per_block) if w not in producers), default=0)

    def _framed(
        self, warp: int, ops: list[Op], steps: list[StepPlan], channels: dict[str, ChannelPlan], first_kernel: bool
    ) -> list[StepPlan]:
        """Attach as late as nothing depends on earlier launches; trigger, housekeeping and draining at the end."""
        lead = 0
        while lead < len(steps) and self._early(steps[lead]):
            lead += 1
        # a launch's code depends on nothing; of several kernels each runs but once, and no other's is known
        warm = [self._warm(w) for w in self.s.warms if self.fused and not w.next and w.warp == warp]
        framed = [*warm, *steps[:lead], _service("attach")]
        # whoever triggers has waited for the previous launch by then
        early, last = self.launch.early_trigger, warp in self._last_warps(ops)
        if self.launch.pdl and early and warp == self._first_attached(ops):
            framed.append(_service("trigger", self.launch.loc))
        framed += steps[lead:]
        if first_kernel and self.s.housekeeper is not None and warp == self.s.housekeeper[0].first:
            names = tuple(n for n, c in channels.items() if c.reset is Reset.LAUNCH)
            framed.append(_service("reset", self.s.housekeeper[1], writes=names))
        if self.launch.pdl and last and not early:
            framed.append(_service("trigger", self.launch.loc))
        if any((s.op, s.call) in self.producers for s in steps):
            framed.append(_service("drain"))
        return framed

    def _warm(self, w: Warm) -> StepPlan:
        call = "warm_next" if w.next else "warm_code"
        return StepPlan(op=None, call=call, args=(min(w.blocks, self.blocks),), index=0, source=source(w.loc))

    def _early(self, step: StepPlan) -> bool:
        """Whether a step streams a weight, and waits for nothing to know which of it, or waits by itself."""
        if (step.op, step.call) not in self.producers:
            return False
        spec = self.g.op(step.op or "").role(step.call)
        return spec.ahead or not spec.reads

    def _tables_first(self, op: Op, warp: int, channels: dict[str, ChannelPlan]) -> list[StepPlan]:
        """A kernel of its own has to rebuild what its op reads from shared memory."""
        steps: list[StepPlan] = []
        for name in dict.fromkeys(op.inputs.values()):
            if name in channels and channels[name].scope is Scope.BLOCK:
                for writer, role in self.edges.writers[name]:
                    if writer.name != op.name and warp in self.roles.get((writer.name, role), ()):
                        steps += self._role(writer, role, self.roles[writer.name, role], channels)
        return steps

    def _role(self, op: Op, role: str, warps: tuple[int, ...], channels: dict[str, ChannelPlan]) -> list[StepPlan]:
        spec = op.role(role)
        ports = {**op.inputs, **op.outputs}
        reads = tuple(ports[p] for p in spec.reads if ports[p] in channels)
        writes = tuple(ports[p] for p in spec.writes if ports[p] in channels)
        where = source(self.s.roles[op.name, role][1])
        rehearsed = self.s.rehearsed.get((op.name, role))

        barriers = {"group": f"group_{op.name}"} if spec.meets else {}
        uses = role_uses(spec, barriers, [channels[n] for n in reads], [channels[n] for n in writes])

        def step(*args: int) -> StepPlan:
            return StepPlan(
                op=op.name, call=role, args=args, reads=reads, writes=writes, barriers=uses, index=0, source=where,
                rehearsal=None if rehearsed is None else source(rehearsed),
            )  # fmt: skip

        if spec.stream:
            return self._loads(op, step)
        return [step(*warps[:1])] if max(spec.warps) > 1 else [step()]  # each of several counts from the first one

    def _loads(self, op: Op, step: Callable[..., StepPlan]) -> list[StepPlan]:
        stage = op.stage()
        assert stage is not None
        cap = self._cap(op.name, stage["bytes"])
        for p in self.s.prefetches:
            if p.op == op.name and p.into.ring and p.share < 1 and p.at is not None and self.fused:
                split = round(p.share * WHOLE)
                point = self._point("wait_point", f"point_{p.at}", p.loc)
                before = [step(0, split, cap)] if split else []
                return [*before, point, step(split, WHOLE, cap)]
        return [step(0, WHOLE, cap)]

    def _cap(self, op: str, stage_bytes: int) -> int:
        """Stages in flight: the last directive that speaks of the op, else the last general one."""
        caps = [c for c in self.s.caps if c.op == op] or [c for c in self.s.caps if c.op is None]
        if not caps:
            return self.ring.stages
        stages = caps[-1].bytes // stage_bytes
        if stages < 1:
            raise ScheduleError(
                f"in_flight={caps[-1].bytes} is less than one stage of {op} ({stage_bytes} bytes)", loc=caps[-1].loc,
                hint=f"allow at least {stage_bytes} bytes",
            )  # fmt: skip
        return min(stages, self.ring.stages)

    def _prefetch_l2(self, p: Prefetch, channels: dict[str, ChannelPlan]) -> StepPlan:
        op = self.g.op(p.op)
        split = round(p.share * WHOLE)
        first, last = (split, WHOLE) if p.into.ring else (0, split)
        ports = {**op.inputs, **op.outputs}
        reads = tuple(ports[x] for x in op.producer.reads) if op.producer else ()
        return StepPlan(
            op=op.name,
            call="prefetch_l2",
            args=(first, last),
            reads=reads,
            barriers=prefetch_uses(channels[name] for name in reads),
            index=0,
            source=source(p.loc),
        )

    def _prefetch_guess(self, p: Prefetch) -> StepPlan:
        return StepPlan(op=p.op, call=PREFETCH_GUESS, index=0, source=source(p.loc))


def _service(call: str, loc: Loc | None = None, writes: tuple[str, ...] = ()) -> StepPlan:
    return StepPlan(op=None, call=call, writes=writes, index=0, source=source(loc))


def _same(a: tuple[StepPlan, ...], b: list[StepPlan]) -> bool:
    return [x.model_copy(update={"index": 0}) for x in a] == b
