"""Ways to break a Plan in one place. A family walks a Plan and breaks it wherever its kind applies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any, TypeVar

from megagen.ir.graph import DType, Frozen, Scope
from megagen.ir.plan import ChannelPlan, KernelPlan, Plan, ProgramPlan, Reset, RoleRef, StepPlan, SyncKind

WHOLE = 1024  # shares of a stream
ONE = {DType.BF16: 0x3F803F80, DType.FP32: 0x3F800000, DType.U32: 3}  # words that data may well be
COUNTED = (SyncKind.COUNTER, SyncKind.FLAG)
IN_SHARED = (SyncKind.MBARRIER, SyncKind.CLUSTER)
SERVICES = ("trigger", "reset", "drain")

Broken = Iterator[tuple[str, str, Plan]]  # where, how, and what that makes of the Plan
Family = Callable[[Plan], Broken]
FAMILIES: dict[str, Family] = {}
Place = tuple[int, int]  # kernel, program
T = TypeVar("T", bound=Frozen)


def family(kind: str) -> Callable[[Family], Family]:
    def add(made: Family) -> Family:
        assert kind not in FAMILIES, kind
        FAMILIES[kind] = made
        return made

    return add


# -- a Plan with one thing changed -------------------------------------------------------------------------------


def with_(x: T, **changes: Any) -> T:
    return x.model_copy(update=changes)


def part(plan: Plan, where: str, name: str | None = None, **changes: Any) -> Plan:
    """``plan.<where>``, or in it the element of that name, changed."""
    old = getattr(plan, where)
    if name is None:
        return with_(plan, **{where: with_(old, **changes)})
    assert sum(x.name == name for x in old) == 1, name
    return with_(plan, **{where: tuple(with_(x, **changes) if x.name == name else x for x in old)})


def programs(plan: Plan) -> Iterator[tuple[Place, ProgramPlan]]:
    return (((k, i), p) for k, kernel in enumerate(plan.kernels) for i, p in enumerate(kernel.programs))


def program(plan: Plan, at: Place) -> ProgramPlan:
    return plan.kernels[at[0]].programs[at[1]]


def steps(plan: Plan) -> Iterator[tuple[Place, int, StepPlan]]:
    return ((at, i, s) for at, p in programs(plan) for i, s in enumerate(p.steps))


def find(plan: Plan, call: str, op: str | None = None) -> list[tuple[Place, int, StepPlan]]:
    return [x for x in steps(plan) if x[2].call == call and op in (None, x[2].op)]


def repeopled(plan: Plan, at: Place, new: Iterable[ProgramPlan]) -> Plan:
    """With other programs instead of one."""
    k, i = at
    kernel = plan.kernels[k]
    changed = with_(kernel, programs=(*kernel.programs[:i], *new, *kernel.programs[i + 1 :]))
    return with_(plan, kernels=(*plan.kernels[:k], changed, *plan.kernels[k + 1 :]))


def run(plan: Plan, at: Place, steps: Iterable[StepPlan]) -> Plan:
    """With other steps in one program."""
    return repeopled(plan, at, [with_(program(plan, at), steps=tuple(steps))])


def put(plan: Plan, at: Place, i: int, *new: StepPlan) -> Plan:
    """With other steps instead of the i-th."""
    old = program(plan, at).steps
    return run(plan, at, (*old[:i], *new, *old[i + 1 :]))


def again(plan: Plan, s: StepPlan, **changes: Any) -> StepPlan:
    """Once more, changed, with a number of its own."""
    return with_(s, index=1 + max(x.index for _, _, x in steps(plan)), **changes)


def title(plan: Plan, at: Place, s: StepPlan) -> str:
    """A step's name, which no other step of a fused Plan has."""
    first = program(plan, at).first
    if s.op is None:
        return f"{s.call} {s.barriers[0].barrier} of warp {first}" if s.barriers else f"{s.call} of warp {first}"
    stream = s.call in ("load_weights", "prefetch_l2")
    share = f" {s.args[0]} to {s.args[1]}" if stream and s.args[:2] != (0, WHOLE) else ""
    return f"{s.op}.{s.call}{share}"


def streams(plan: Plan) -> list[str]:
    return [op.name for op in plan.ops if op.stream is not None]


def in_heap(plan: Plan) -> list[ChannelPlan]:
    return [c for c in plan.channels if c.kind not in IN_SHARED]


def counted(plan: Plan) -> list[ChannelPlan]:
    return [c for c in plan.channels if c.kind in COUNTED]


# -- steps -------------------------------------------------------------------------------------------------------


@family("step left out")
def left_out(plan: Plan) -> Broken:
    for at, i, s in steps(plan):
        yield title(plan, at, s), "", put(plan, at, i)


@family("step twice or elsewhere")
def twice_or_elsewhere(plan: Plan) -> Broken:
    """Elsewhere: in the next program, where the order of ops puts it."""
    order = {op.name: i for i, op in enumerate(plan.ops)}
    for at, i, s in steps(plan):
        if s.call != "attach" or i:
            yield title(plan, at, s), "twice", put(plan, at, i, s, again(plan, s))
        if s.call in ("attach", "trigger"):
            continue
        k, j = at
        to = (k, (j + 1) % len(plan.kernels[k].programs))
        there = program(plan, to).steps
        rank = len(order) if s.op is None else order[s.op]
        later = (n for n, x in enumerate(there) if n and (order.get(x.op or "", -1) > rank or x.call in SERVICES))
        place = next(later, len(there))
        moved = run(plan, to, (*there[:place], s, *there[place:]))
        yield title(plan, at, s), f"on warp {program(plan, to).first}", put(moved, at, i)


@family("neighbours exchanged")
def exchanged(plan: Plan) -> Broken:
    for at, p in programs(plan):
        for i, (a, b) in enumerate(pairwise(p.steps)):
            swapped = (*p.steps[:i], b, a, *p.steps[i + 2 :])
            yield f"{title(plan, at, a)} / {title(plan, at, b)}", "", run(plan, at, swapped)


@family("attach at the end")
def attach_late(plan: Plan) -> Broken:
    for at, p in programs(plan):
        rest = [s for s in p.steps if s.call != "attach"]
        yield f"warp {p.first}", "", run(plan, at, [*rest, *(s for s in p.steps if s.call == "attach")])


@family("trigger before attach")
def trigger_early(plan: Plan) -> Broken:
    service = again(plan, find(plan, "trigger")[0][2])
    for at, p in programs(plan):
        yield f"warp {p.first}", "", run(plan, at, (service, *p.steps))


@family("ring order")
def ring_order(plan: Plan) -> Broken:
    """Two streams exchanged for one of the three who walk them; next to each other they are neighbours."""
    names = streams(plan)
    of_tensors = {"load_weights": "load", "math": "attend"}
    for call in ("load_weights", "math", "reduce"):
        found = {name: find(plan, call, name) or find(plan, of_tensors.get(call, call), name) for name in names}
        for a, b in combinations((name for name in names if found[name]), 2):
            (at, i, first), (to, j, second) = found[a][0], found[b][-1]
            if names.index(b) == names.index(a) + 1 and (at != to or abs(i - j) > 1):
                yield f"{call} of {a} / {b}", "", put(put(plan, at, i, second), to, j, first)


@family("share")
def share(plan: Plan) -> Broken:
    for at, i, s in [*find(plan, "load_weights"), *find(plan, "load"), *find(plan, "prefetch_l2")]:
        first, last, *cap = s.args
        half = (first + last) // 2
        parts = {
            "a hole": ((first, half), (half + 64, last)),
            "an overlap": ((first, half + 64), (half, last)),
            "cut short": ((first, last - 64),),
            "past the end": ((first, last + 64),),
        }
        for how, spans in parts.items():
            first_part, *more = (with_(s, args=(*span, *cap)) for span in spans)
            yield title(plan, at, s), how, put(plan, at, i, first_part, *(again(plan, x) for x in more))


@family("none in flight")
def none_in_flight(plan: Plan) -> Broken:
    for at, i, s in [*find(plan, "load_weights"), *find(plan, "load")]:
        yield title(plan, at, s), "", put(plan, at, i, with_(s, args=(*s.args[:2], 0)))


@family("first warp")
def first_warp(plan: Plan) -> Broken:
    for at, i, s in steps(plan):
        if s.op is not None and len(s.args) == 1:
            yield title(plan, at, s), "", put(plan, at, i, with_(s, args=(s.args[0] - 4,)))


@family("prefetch of experts")
def prefetch_of_experts(plan: Plan) -> Broken:
    """L2 is asked for experts' weights where nobody knows them yet."""
    template = find(plan, "load_weights", "down")[0][2]
    asked = again(plan, template, call="prefetch_l2", args=(0, WHOLE), barriers=template.barriers[:1])
    for at, p in programs(plan):
        calls = [s.call for s in p.steps]
        if p.count == 1 and "load_weights" not in calls:
            yield f"warp {p.first}", "before attach", run(plan, at, (asked, *p.steps))
        if "tables" in calls:
            i = calls.index("tables")
            yield f"warp {p.first}", "before the table", run(plan, at, (*p.steps[:i], asked, *p.steps[i:]))


@family("prefetch")
def prefetch(plan: Plan) -> Broken:
    for at, i, s in find(plan, "prefetch_l2"):
        other = next(n for n in streams(plan) if n != s.op and not plan.op(n).specs[0].reads)
        yield title(plan, at, s), f"of {other} instead", put(plan, at, i, with_(s, op=other))
        rest = (x for x in program(plan, at).steps if x is not s)
        yield title(plan, at, s), "before attach", run(plan, at, (s, *rest))


@family("program")
def warps_of_programs(plan: Plan) -> Broken:
    for at, p in programs(plan):
        yield f"warp {p.first}", "left out", repeopled(plan, at, [])
        yield f"warp {p.first}", "on a warp more", repeopled(plan, at, [with_(p, count=p.count + 1)])


@family("kernel without an op")
def op_unlisted(plan: Plan) -> Broken:
    kernel = plan.kernels[0]
    for name in kernel.ops:
        ops = tuple(n for n in kernel.ops if n != name)
        yield "an op", name, with_(plan, kernels=(with_(kernel, ops=ops), *plan.kernels[1:]))


@family("epoch")
def epoch(plan: Plan) -> Broken:
    yield "never advanced", "", with_(plan, kernels=tuple(with_(k, advances_epoch=False) for k in plan.kernels))


# -- what steps and roles say of themselves ----------------------------------------------------------------------


@family("read or write not said")
def not_said(plan: Plan) -> Broken:
    for at, i, s in steps(plan):
        for what in ("reads", "writes") if s.op else ():
            for name in getattr(s, what):
                rest = tuple(n for n in getattr(s, what) if n != name)
                yield title(plan, at, s), f"{what} {name}", put(plan, at, i, with_(s, **{what: rest}))


@family("ends of a channel")
def ends(plan: Plan) -> Broken:
    stranger = RoleRef(op=plan.ops[0].name, role=plan.ops[0].specs[0].name)
    for c in plan.channels:
        yield c.name, "a reader left out", part(plan, "channels", c.name, readers=c.readers[:-1])
        yield c.name, "a writer more", part(plan, "channels", c.name, writers=(*c.writers, stranger))


def _uses(plan: Plan) -> Iterator[tuple[str, str, str, Callable[..., Plan]]]:
    """Each use of a barrier once for all steps alike: barrier, action, who, and the Plan with it changed."""
    seen = set()
    for at, i, s in steps(plan):
        for n, u in enumerate(s.barriers):
            key = (u.barrier, u.action, s.call)
            if key in seen:
                continue
            seen.add(key)

            def changed(at: Place = at, i: int = i, s: StepPlan = s, n: int = n, **changes: Any) -> Plan:
                """Without the use, or with another one."""
                new = [with_(s.barriers[n], **changes)] if changes else []
                return put(plan, at, i, with_(s, barriers=(*s.barriers[:n], *new, *s.barriers[n + 1 :])))

            yield u.barrier, u.action, title(plan, at, s), changed


@family("use of a barrier not said")
def use_not_said(plan: Plan) -> Broken:
    for barrier, action, who, changed in _uses(plan):
        yield barrier, f"{action} of {who}", changed()


@family("first phase")
def first_phase(plan: Plan) -> Broken:
    for barrier, action, who, changed in _uses(plan):
        if action == "wait":
            yield barrier, f"of {who}", changed(start=0 if barrier.endswith("_empty") else 1)


@family("use of a barrier")
def use_of_a_barrier(plan: Plan) -> Broken:
    for barrier, action, who, changed in _uses(plan):
        if action != "wait":
            other = "expect_tx" if action == "arrive" else "arrive"
            yield barrier, f"{other} of {who}", changed(action=other)
            yield barrier, f"two of {who}", changed(count=2)
            yield barrier, f"nobody's of {who}", changed(barrier="nobody")


@family("placement")
def placement(plan: Plan) -> Broken:
    """A role is on other warps than the programs run it on."""
    for op in plan.ops:
        for role, warps in op.roles.items():
            by = 1 if len(warps) == 1 else -4
            yield op.name, role, part(plan, "ops", op.name, roles={**op.roles, role: tuple(w + by for w in warps)})


@family("role")
def role(plan: Plan) -> Broken:
    """A role is said to do less than it does."""
    fields = ("stream", "ring", "every_block", "hands_back", "reads", "writes", "regions", "accum")
    for op in plan.ops:
        for n, s in enumerate(op.specs):
            said = {f: getattr(s, f) for f in fields if getattr(s, f)}
            less = {f: x[1:] if isinstance(x, tuple) else False if x is True else None for f, x in said.items()}
            for what, value in less.items():
                specs = (*op.specs[:n], with_(s, **{what: value}), *op.specs[n + 1 :])
                yield op.name, f"{what} of {s.name}", part(plan, "ops", op.name, specs=specs)


@family("number twice")
def number_twice(plan: Plan) -> Broken:
    """Of steps or edges: a hang report would name the wrong one."""
    found = list(steps(plan))
    for (_, _, a), (at, i, b) in list(pairwise(found))[:: max(1, len(found) // 4)]:
        yield "step", title(plan, at, b), put(plan, at, i, with_(b, index=a.index))
    first, *_, last = plan.channels
    full = plan.barrier("ring_full").index
    yield "channel", last.name, part(plan, "channels", last.name, index=first.index)
    yield "barrier", "ring_empty", part(plan, "barriers", "ring_empty", index=full)
    yield "channel and barrier", first.name, part(plan, "channels", first.name, index=full)


# -- barriers and shared memory ----------------------------------------------------------------------------------


@family("count")
def count(plan: Plan) -> Broken:
    for b in plan.barriers:
        for by in (1, -1):
            yield b.name, f"{by:+d}", part(plan, "barriers", b.name, count=b.count + by)


@family("slots")
def slots(plan: Plan) -> Broken:
    for b in plan.barriers:
        for by in (-1, 1) if b.slots > 1 else (1,):
            yield b.name, f"{by:+d}", part(plan, "barriers", b.name, slots=b.slots + by)


@family("bytes counted")
def bytes_counted(plan: Plan) -> Broken:
    for b in plan.barriers:
        yield b.name, f"{not b.tx}", part(plan, "barriers", b.name, tx=not b.tx)


@family("region over another")
def region_over(plan: Plan) -> Broken:
    """A buffer that is used again an op early."""
    for a, b in pairwise(sorted(plan.regions, key=lambda r: r.offset)):
        changed = part(plan, "regions", b.name, offset=a.offset)
        channels = (with_(c, shared_offset=a.offset) if b.name == f"cluster_{c.name}" else c for c in plan.channels)
        yield f"{b.name} over {a.name}", "", with_(changed, channels=tuple(channels))


@family("region too small")
def region_small(plan: Plan) -> Broken:
    for r in plan.regions:
        yield r.name, "", part(plan, "regions", r.name, bytes=r.bytes // 2)


@family("barrier over another")
def barrier_over(plan: Plan) -> Broken:
    for a, b in pairwise(plan.barriers):
        yield f"{b.name} over {a.name}", "", part(plan, "barriers", b.name, offset=a.offset)
    ready = plan.barrier("table_ready")
    yield "table_ready over accum", "", part(plan, "barriers", ready.name, offset=plan.region("accum").offset)
    yield "table_ready crooked", "", part(plan, "barriers", ready.name, offset=ready.offset + 4)


@family("ring")
def ring(plan: Plan) -> Broken:
    r = plan.ring
    changes: dict[str, dict[str, Any]] = {
        "a stage more": {"stages": r.stages + 1}, "a stage less": {"stages": r.stages - 1}, "no stage": {"stages": 0},
        "bigger stages": {"stage_bytes": r.stage_bytes + 1024}, "smaller stages": {"stage_bytes": r.stage_bytes - 4096},
        "full and empty exchanged": {"full": r.empty, "empty": r.full}, "over accum": {"region": "accum"},
        "full is accum_full": {"full": "accum_full"}, "a consumer more": {"consumers": r.consumers + 1},
        "a consumer less": {"consumers": r.consumers - 1},
    }  # fmt: skip
    for how, change in changes.items():
        yield how, "", part(plan, "ring", **change)


# -- channels ----------------------------------------------------------------------------------------------------


@family("copies")
def copies(plan: Plan) -> Broken:
    for c in plan.channels:
        fewer = range(1, c.copies) if c.reset is Reset.LAUNCH else [2]
        for n in fewer:
            yield c.name, f"{c.copies} → {n}", part(plan, "channels", c.name, copies=n)


@family("reset")
def reset(plan: Plan) -> Broken:
    """Who makes a channel's slots empty, by the channel."""
    for c in plan.channels:
        for other in Reset:
            if other is not c.reset and c.kind is not SyncKind.MBARRIER:
                yield c.name, f"{c.reset.value} → {other.value}", part(plan, "channels", c.name, reset=other)


@family("housekeeper")
def housekeeper(plan: Plan) -> Broken:
    (at, i, s), *_ = find(plan, "reset")
    for name in s.writes:
        yield name, "left out", put(plan, at, i, with_(s, writes=tuple(n for n in s.writes if n != name)))
    for c in plan.channels:
        if c.reset is Reset.READER:
            yield c.name, "emptied too", put(plan, at, i, with_(s, writes=(*s.writes, c.name)))
    yield "all", "before attach", run(plan, at, (s, *(x for x in program(plan, at).steps if x is not s)))


@family("empty")
def empty(plan: Plan) -> Broken:
    for c in plan.channels:
        if c.kind is SyncKind.LAMPORT:
            words = {"0": 0, "a value": ONE[c.dtype], "no word": None}
            for how, word in words.items():
                yield c.name, how, part(plan, "channels", c.name, empty=word)


@family("kind")
def kind(plan: Plan) -> Broken:
    for c in plan.channels:
        for other in SyncKind:
            if other is not c.kind:
                yield c.name, other.value, part(plan, "channels", c.name, kind=other)


@family("scope")
def scope(plan: Plan) -> Broken:
    for c in plan.channels:
        other = Scope.WORLD if c.scope is Scope.RANK else Scope.RANK
        yield c.name, f"{c.scope.value} → {other.value}", part(plan, "channels", c.name, scope=other)
        if c.scope is Scope.WORLD:
            yield c.name, f"scatter {not c.scatter}", part(plan, "channels", c.name, scatter=not c.scatter)


@family("channel over another")
def channel_over(plan: Plan) -> Broken:
    for a, b in pairwise(in_heap(plan)):
        yield f"{b.name} over {a.name}", "", part(plan, "channels", b.name, offset=a.offset)
    first = in_heap(plan)[0]
    yield f"{first.name} over control words", "", part(plan, "channels", first.name, offset=0)
    yield f"{first.name} crooked", "", part(plan, "channels", first.name, offset=first.offset + 4)


@family("copy over copy")
def copy_over(plan: Plan) -> Broken:
    for c in in_heap(plan):
        if c.copies > 1:
            yield c.name, "", part(plan, "channels", c.name, bytes=c.bytes - 256)


@family("stride")
def stride(plan: Plan) -> Broken:
    """Messages of two rows or ranks meet, or leave their copy."""
    for c in in_heap(plan):
        by, at = 16 if c.row_stride > 16 else 8, (plan, "channels", c.name)
        yield c.name, "rows nearer", part(*at, row_stride=c.row_stride - by)
        if c.scope is Scope.WORLD:
            yield c.name, "ranks nearer", part(*at, rank_stride=c.rank_stride - 16)
            yield c.name, "shard longer", part(*at, shard=c.shard + 16)
            yield c.name, "ranks further", part(*at, rank_stride=c.rank_stride + 16)
        yield c.name, "rows further", part(*at, row_stride=c.row_stride + by)
        yield c.name, "elements", part(*at, dtype=DType.FP32 if c.dtype is DType.BF16 else DType.BF16)


@family("arrivals")
def arrivals(plan: Plan) -> Broken:
    for c in counted(plan):
        for n in (c.arrivals - 1, c.arrivals + 1):
            yield c.name, f"{c.arrivals} → {n}", part(plan, "channels", c.name, arrivals=n)
    for c in counted(plan)[:1]:
        yield f"{c.name}, none", "", part(plan, "channels", c.name, arrivals=0)


@family("arrivals of another unit")
def arrivals_per(plan: Plan) -> Broken:
    for c in counted(plan):
        other = {"launch": "token", "token": "launch", "expert": "token"}[c.arrivals_per]
        yield c.name, f"{c.arrivals_per} → {other}", part(plan, "channels", c.name, arrivals_per=other)


@family("counter over another")
def counter_over(plan: Plan) -> Broken:
    for a, b in pairwise(counted(plan)):
        yield f"{b.name} over {a.name}", "", part(plan, "channels", b.name, counter_offset=a.counter_offset)
    for c in counted(plan)[:1]:
        yield f"{c.name}, none", "", part(plan, "channels", c.name, counter_offset=None)


@family("cluster memory")
def cluster_memory(plan: Plan) -> Broken:
    found = [c for c in plan.channels if c.kind is SyncKind.CLUSTER]
    for a, b in pairwise([*found, *found[:1]]):
        changes: dict[str, dict[str, Any]] = {
            f"over {b.name}": {"shared_offset": b.shared_offset}, f"barrier of {b.name}": {"barrier": b.barrier},
            "over accum": {"shared_offset": plan.region("accum").offset}, "no memory": {"shared_offset": None},
            "table_ready for a barrier": {"barrier": "table_ready"}, "no barrier": {"barrier": None},
            "a chunk more": {"shape": (a.shape[0] + 1, *a.shape[1:])},
            "more row blocks": {"shape": (a.shape[0], a.shape[1] + 4, *a.shape[2:])},
        }  # fmt: skip
        for how, change in changes.items():
            yield f"{a.name} {how}", "", part(plan, "channels", a.name, **change)


# -- ops, parameters, launch, heap -------------------------------------------------------------------------------


def _ports(plan: Plan, what: str, names: Sequence[str], like: Callable[[str, str], bool]) -> Broken:
    for op in plan.ops:
        for port, name in getattr(op, what).items():
            other = next((n for n in names if n != name and like(name, n)), None)
            if other is not None:
                ports = {**getattr(op, what), port: other}
                yield op.name, f"{port} is {other}", part(plan, "ops", op.name, **{what: ports})


@family("port")
def port(plan: Plan) -> Broken:
    """An op's port is another channel, barrier or region of the same sort."""
    sort = {c.name: (c.dtype, c.kind) for c in plan.channels}
    yield from _ports(plan, "channels", list(sort)[::-1], lambda a, b: sort[a] == sort[b])
    yield from _ports(plan, "barriers", [b.name for b in plan.barriers], lambda a, b: b.startswith("group"))
    yield from _ports(plan, "regions", [r.name for r in plan.regions], lambda a, b: a.split("_")[0] == b.split("_")[0])


@family("stage")
def stage(plan: Plan) -> Broken:
    for name in streams(plan):
        s = plan.op(name).stream
        assert s is not None
        yield name, "half as long", part(plan, "ops", name, stream=with_(s, stage_bytes=s.stage_bytes // 2))
        yield name, "too long", part(plan, "ops", name, stream=with_(s, stage_bytes=1 << 16))
        yield name, "no stream", part(plan, "ops", name, stream=None)


@family("parameter")
def parameter(plan: Plan) -> Broken:
    last = plan.params[-1]
    yield "left out", "", with_(plan, params=plan.params[:-1])
    yield "twice", "", with_(plan, params=(*plan.params, last))


@family("launch")
def launch(plan: Plan) -> Broken:
    a = plan.launch
    fit = plan.machine.blocks_fit[a.cluster]
    changes: dict[str, dict[str, Any]] = {
        "clusters of 3": {"cluster": 3}, "half a cluster": {"cluster": 2, "blocks": a.blocks - 1},
        "a block too many": {"blocks": fit + a.cluster}, "no block": {"blocks": 0}, "no cluster": {"cluster": 0},
        "too many registers": {"registers": (128, 192)}, "odd registers": {"registers": (100, 188)},
        "few registers": {"registers": (16, 160)}, "no pdl, a trigger": {"pdl": False},
        "too little shared memory": {"shared_bytes": a.shared_bytes - 128},
        "too much shared memory": {"shared_bytes": plan.machine.shared_bytes + 128},
        "a warp less": {"warps": a.warps - 1}, "a warp more": {"warps": a.warps + 1}, "33 warps": {"warps": 33},
        "another early trigger": {"early_trigger": not a.early_trigger},
    }  # fmt: skip
    for how, change in changes.items():
        yield how, "", part(plan, "launch", **change)
    yield "more tokens", "", with_(plan, tokens=plan.tokens + 8)
    yield "fewer tokens", "", with_(plan, tokens=plan.tokens // 2)
    yield "more ranks", "", with_(plan, tp=2 * plan.tp)


@family("heap")
def heap(plan: Plan) -> Broken:
    h, first = plan.heap, plan.channels[0].offset
    changes: dict[str, dict[str, Any]] = {
        "epoch over abort": {"epoch_offset": h.abort_offset}, "abort over epoch": {"abort_offset": h.epoch_offset + 4},
        "records over epoch": {"record_offset": h.epoch_offset}, "records over a channel": {"record_offset": first},
        "abort in a channel": {"abort_offset": first}, "epoch crooked": {"epoch_offset": h.epoch_offset + 2},
        "epoch past the end": {"epoch_offset": h.bytes}, "too small": {"bytes": h.bytes // 2},
        "few records": {"record_bytes": 64},
    }  # fmt: skip
    for how, change in changes.items():
        yield how, "", part(plan, "heap", **change)


# -- one kernel an op --------------------------------------------------------------------------------------------


@family("kernels")
def kernels(plan: Plan) -> Broken:
    ks = plan.kernels
    short = [k.name.removeprefix(f"{plan.name}_") for k in ks]

    def become(new: Iterable[KernelPlan]) -> Plan:
        return with_(plan, kernels=tuple(new))

    for i in range(len(ks)):
        yield short[i], "left out", become([*ks[:i], *ks[i + 1 :]])
        if i:
            yield short[i], "first of all", become([ks[i], *ks[:i], *ks[i + 1 :]])
        at = (i, len(ks[i].programs) - 1)
        attach = next(n for n, s in enumerate(program(plan, at).steps) if s.call == "attach")
        yield short[i], "no attach of the last warps", put(plan, at, attach)
    for i in (0, len(ks) // 2, len(ks) - 2):
        early = (with_(k, advances_epoch=j == i) for j, k in enumerate(ks))
        yield f"epoch advanced by {short[i]}", "", become(early)
    yield "epoch never advanced", "", become(with_(k, advances_epoch=False) for k in ks)
    yield "epoch advanced twice", "", become(with_(k, advances_epoch=j in (0, len(ks) - 1)) for j, k in enumerate(ks))
    yield "one name for two", "", become([ks[0], with_(ks[1], name=ks[0].name), *ks[2:]])
    (at, i, s), *_ = find(plan, "reset")
    yield "reset left out", "", put(plan, at, i)
    warp = (program(plan, at).first, 1)
    to = [there for there, p in programs(plan) if (p.first, p.count) == warp][-1]
    there = program(plan, to).steps
    yield "reset in a later kernel", "", put(run(plan, to, (*there, s)), at, i)
    yield "reset in two kernels", "", run(plan, to, (*there, again(plan, s)))
    for at, i, s in find(plan, "tables"):
        if short[at[0]] != s.op:
            yield f"no table for {short[at[0]]}", "", put(plan, at, i)
    for call in ("drain", "trigger"):
        at, i, _ = find(plan, call)[0]
        yield f"no {call} in {short[at[0]]}", "", put(plan, at, i)
