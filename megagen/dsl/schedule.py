"""Schedule and its directives. Every directive remembers the user's line; none changes a bit of the result."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from megagen.errors import Loc, ScheduleError, UnknownName, did_you_mean, here
from megagen.ir.graph import EdgeHandle, Graph, Op, OpHandle, RoleHandle, WeightHandle
from megagen.ir.plan import Hint, Machine, Reset, SyncKind

KiB = 1024
ALL_ONES = 0xFFFFFFFF
POSITIVE_ZERO = 0
evict_first, evict_last, evict_normal = Hint.EVICT_FIRST, Hint.EVICT_LAST, Hint.EVICT_NORMAL
no_allocate = Hint.NO_ALLOCATE
by_reader, by_launch = Reset.READER, Reset.LAUNCH
T = TypeVar("T")
KEYWORDS = frozenset(  # of C++20: a kernel cannot be called so
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class
    compl concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype
    default delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline int
    long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
    reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template
    this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t
    while xor xor_eq""".split()
)

# templates/kernel: what stands beside a kernel, by whose name it would be hidden
TAKEN = frozenset({"barrier", "channel", "tensor", "policy", "Params", "RingPolicy", "AccumPolicy", "TablePolicy",
                   "GuessPolicy", "KernelPolicy", "Ctx", "megagen", "main"})  # fmt: skip


@dataclass(frozen=True)
class Warps:
    """Consecutive warps ``first`` to ``first + count - 1``."""

    first: int
    count: int

    def indices(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.first + self.count))


@dataclass(frozen=True)
class Into:
    """Where a prefetched weight waits; ``ring | L2`` for both."""

    ring: bool
    l2: bool

    def __or__(self, other: Into) -> Into:
        return Into(self.ring or other.ring, self.l2 or other.l2)


L2 = Into(ring=False, l2=True)


@dataclass(frozen=True)
class Ring(Into):
    """The shared-memory ring that all weights pass through: ``stages`` of ``stage_bytes``."""

    stages: int = 0
    stage_bytes: int = 0
    in_flight: int | None = None
    loc: Loc | None = None


@dataclass(frozen=True)
class Sync:
    """A synchronisation primitive for an edge. ``copies`` None: as many as are safe without a fence."""

    kind: SyncKind
    empty: int | None = None
    copies: int | None = None
    reset: Reset = Reset.NONE


def lamport(empty: int = ALL_ONES, copies: int | None = None, reset: Reset = Reset.LAUNCH) -> Sync:
    """Data is its own flag: a 32-bit word equal to ``empty`` is not there yet.

    ``reset=by_launch``: a housekeeping warp empties the copy that this launch does not use (2 copies within a GPU, 3
    across ranks). ``reset=by_reader``: the only reader empties each slot right after use (1 copy, 2 across ranks).
    """
    loc = here()
    if not 0 <= _integer(empty, "empty", loc) <= ALL_ONES:
        raise ScheduleError(f"empty={empty} is no 32-bit word", loc=loc)
    if copies is not None and not 1 <= _integer(copies, "copies", loc) <= 3:
        raise ScheduleError(f"copies={copies}: a channel has 1 to 3", loc=loc)
    if not isinstance(reset, Reset):
        raise ScheduleError(f"reset={reset!r}", loc=loc, hint="reset is by_launch or by_reader")
    return Sync(SyncKind.LAMPORT, empty, copies, reset)


def counter() -> Sync:
    """A GPU-scope counter: stores, ``red.release``; readers poll with acquire loads. Within a GPU only."""
    return Sync(SyncKind.COUNTER)


def flag() -> Sync:
    """The textbook hand-off: stores, system-scope fence, a flag on every rank; readers poll with acquire loads."""
    return Sync(SyncKind.FLAG)


def cluster() -> Sync:
    """Distributed shared memory: ``st.async`` that completes on the reader's mbarrier. Within a cluster only."""
    return Sync(SyncKind.CLUSTER)


def mbarrier() -> Sync:
    """An mbarrier in shared memory: for tensors of block scope, and their only choice."""
    return Sync(SyncKind.MBARRIER)


MOST_GUESSED = 32  # a lane each


@dataclass(frozen=True)
class Guess:
    """Experts that may be used: the ``top`` most used of the layer's last launch."""

    top: int
    hint: Hint
    loc: Loc | None


def previous_step(top: int, hint: Hint = Hint.EVICT_NORMAL) -> Guess:
    """The ``top`` experts that most tokens had when this layer was last launched, a step before. ``hint``: of what L2
    is asked for."""
    loc = here()
    if not 1 <= _integer(top, "top", loc) <= MOST_GUESSED:
        raise ScheduleError(f"top={top}: 1 to {MOST_GUESSED} experts are guessed", loc=loc)
    if hint not in (Hint.EVICT_NORMAL, Hint.EVICT_FIRST, Hint.EVICT_LAST):
        raise ScheduleError(f"hint={hint!r} of what L2 is asked for", loc=loc, hint="evict_normal or evict_last")
    return Guess(top, hint, loc)


class InL2:
    """Experts whose weights L2 has been asked for, as a guess."""


in_l2 = InL2()
STAMP_RECORDS = 512  # a launch: several times what the shipped schedules' busiest warps need
MOST_STAMP_RECORDS = 1 << 16


@dataclass(frozen=True)
class Prefetch:
    op: str
    into: Into
    share: float
    warp: int | None
    at: str | None  # op at whose beginning an L2 prefetch goes out, and until whose end the ring waits
    loc: Loc | None
    experts: Guess | None = None  # a prefetch of experts that may be used


@dataclass(frozen=True)
class Warm:
    """A warp that asks L2 for machine code, each piece in ``blocks`` blocks: the kernel's own when the launch begins,
    or when op ``at`` does that of the kernel that is launched ``next``."""

    warp: int
    blocks: int
    next: bool
    at: str | None
    loc: Loc | None


@dataclass(frozen=True)
class Cap:
    bytes: int
    op: str | None
    loc: Loc | None


@dataclass(frozen=True)
class Launch:
    cluster: int = 1
    pdl: bool = True
    early_trigger: bool = False
    registers: tuple[int, int] | None = None
    loc: Loc | None = None


@dataclass
class Schedule:
    """How ``graph`` runs on ``machine``, with ``warps`` warps a block.

    ``blocks`` defaults to as many as the machine holds at once. The directives below fill the rest;
    :func:`megagen.lower.lower` turns it into a Plan. Raises ScheduleError at the user's line.
    """

    name: str
    graph: Graph
    machine: Machine
    warps_per_block: int = 12
    blocks: int | None = None
    loc: Loc | None = None
    rings: list[Ring] = field(default_factory=list)
    roles: dict[tuple[str, str], tuple[Warps, Loc | None]] = field(default_factory=dict)
    prefetches: list[Prefetch] = field(default_factory=list)
    warms: list[Warm] = field(default_factory=list)
    caps: list[Cap] = field(default_factory=list)
    hints: dict[str, tuple[Hint, Loc | None]] = field(default_factory=dict)
    syncs: list[tuple[EdgeHandle, Sync, Loc | None]] = field(default_factory=list)
    launch_: Launch = Launch()
    housekeeper: tuple[Warps, Loc | None] | None = None
    faults: list[tuple[EdgeHandle, Loc | None]] = field(default_factory=list)
    choices: Mapping[str, str] = field(default_factory=dict)
    offered: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    accum_slots: int = 2
    first_experts: Loc | None = None
    stamped: tuple[int, Loc | None] | None = None
    rehearsed: dict[tuple[str, str], Loc | None] = field(default_factory=dict)
    together: dict[tuple[str, str], Loc | None] = field(default_factory=dict)
    said: dict[str, Loc | None] = field(default_factory=dict)  # where, of what may be said only once

    def __init__(
        self, name: str, graph: Graph, machine: Machine, *, warps: int = 12, blocks: int | None = None,
        choices: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.loc = loc = here()
        _kernel_name(name, loc)
        _instance(graph, Graph, "graph", loc, "Schedule(name, graph, machine, ...)")
        _instance(machine, Machine, "machine", loc, "pass on the machine that schedule() is given")
        _instance({} if choices is None else choices, Mapping, "choices", loc, "pass on those that schedule() is given")
        if not 1 <= _integer(warps, "warps", loc) <= 32:
            raise ScheduleError(f"warps={warps}: a block has 1 to 32 warps", loc=loc)
        if blocks is not None and _integer(blocks, "blocks", loc) < 1:
            raise ScheduleError(f"blocks={blocks}: at least one", loc=loc)
        self.name, self.graph, self.machine = name, graph, machine
        self.warps_per_block, self.blocks = warps, blocks
        self.rings, self.roles, self.prefetches, self.caps = [], {}, [], []
        self.hints, self.syncs, self.launch_, self.housekeeper = {}, [], Launch(), None
        self.faults, self.choices, self.offered, self.accum_slots = [], dict(choices or {}), {}, 2
        self.said, self.stamped, self.rehearsed, self.together = {}, None, {}, {}
        self.warms, self.first_experts = [], None

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            known = [n for n, f in vars(Schedule).items() if inspect.isfunction(f) and not n.startswith("_")]
            raise UnknownName(f"a schedule has no directive {name!r}", loc=here(name), hint=did_you_mean(name, known))

    # warps ------------------------------------------------------------------------------------------------------

    def warp(self, index: int) -> Warps:
        """One warp of the block."""
        return self.warps(_integer(index, "warp", here()), index + 1)

    def warps(self, first: int, end: int) -> Warps:
        """Warps ``first`` to ``end - 1``."""
        loc = here()
        if not 0 <= _integer(first, "warp", loc) < _integer(end, "end", loc) <= self.warps_per_block:
            raise ScheduleError(f"warps {first} to {end - 1} of a block that has {self.warps_per_block}", loc=loc)
        return Warps(first, end - first)

    def assign(self, op: OpHandle | Iterable[OpHandle], **roles: Warps) -> None:
        """Give roles of one op, or of several alike, to warps: ``s.assign(g.pooler, load_weights=s.warp(0), ...)``."""
        loc = here()
        for handle in _several(op):
            known = [r.name for r in self._op(handle, loc).roles()]
            for role, warps in roles.items():
                if role not in known:
                    raise ScheduleError(
                        f"op {handle._op.name!r} has no role {role!r}",
                        loc=keyword(loc, role),
                        hint=did_you_mean(role, known),
                    )
                if not isinstance(warps, Warps):
                    raise ScheduleError(
                        f"{handle._op.name}.{role}={warps!r} is not a set of warps",
                        loc=loc,
                        hint="use s.warp(i) or s.warps(first, end)",
                    )
                if (handle._op.name, role) in self.roles:
                    raise ScheduleError(
                        f"role {handle._op.name}.{role} is assigned twice", loc=loc,
                        notes=(("first assigned here", self.roles[handle._op.name, role][1]),),
                    )  # fmt: skip
                self.roles[handle._op.name, role] = (warps, loc)

    # weights ----------------------------------------------------------------------------------------------------

    def ring(self, stages: int, stage_bytes: int, in_flight: int | None = None) -> Ring:
        """The weight ring. ``in_flight``: default cap on outstanding bulk-load bytes of a SM."""
        loc = here()
        if self.rings:
            raise ScheduleError(
                "a schedule has one weight ring", loc=loc, notes=(("the first one", self.rings[0].loc),)
            )
        if _integer(stages, "stages", loc) < 1:
            raise ScheduleError(f"a ring of {stages} stages: at least one", loc=loc)
        if _integer(stage_bytes, "stage_bytes", loc) < 1 or stage_bytes % 128:
            raise ScheduleError(f"stage_bytes={stage_bytes}: a stage is a multiple of 128 bytes", loc=loc)
        self.rings.append(
            Ring(ring=True, l2=False, stages=stages, stage_bytes=stage_bytes, in_flight=in_flight, loc=loc)
        )
        if in_flight is not None:
            self._cap(in_flight, None, loc)
        return self.rings[0]

    def in_flight(self, bytes: int, during: OpHandle | Iterable[OpHandle] | None = None) -> None:
        """Cap the bytes of bulk loads that a SM has outstanding while weights stream: those of ``during``, or all."""
        loc = here()
        if during is None:
            self._cap(bytes, None, loc)
            return
        for handle in _several(during):
            op = self._op(handle, loc)
            if op.stage() is None:
                raise ScheduleError(f"op {op.name!r} streams no weights or tensors", loc=loc)
            self._cap(bytes, op.name, loc)

    def _cap(self, bytes: int, op: str | None, loc: Loc | None) -> None:
        if _integer(bytes, "in_flight", loc) < 1:
            raise ScheduleError(f"in_flight={bytes}: nothing could ever be loaded", loc=loc)
        self.caps.append(Cap(bytes, op, loc))

    def prefetch(
        self, weight: WeightHandle | OpHandle, into: Into, *, share: float = 1.0, by: Warps | None = None,
        during: OpHandle | RoleHandle | None = None, before: OpHandle | RoleHandle | None = None,
        experts: Guess | None = None,
    ) -> None:  # fmt: skip
        """Where ``weight`` waits before its op needs it.

        ``into=ring``: the first ``share`` of each block's stages may enter the ring as soon as slots are free; the rest
        waits until ``during`` is done in the block. ``into=L2``: warp ``by`` asks L2 for the first ``share`` when the
        block's warps begin with ``during`` (or ``before``). ``ring | L2``: the ring takes ``share``, L2 the rest.

        ``experts``: not those of the launch, but a guess, before the routing is known.
        Of an op that writes the next layer's caches: all that they hold already, into L2, for the next launch.
        """
        loc = here()
        if isinstance(weight, OpHandle) and weight._op.kind == "qkv_heads":
            op, what = self._held(weight, into, share, loc), f"what {weight!r} adds to"
        else:
            self._streamed(weight, loc)
            op, what = weight.op, weight.weight.name
        if not isinstance(into, Into):
            raise ScheduleError(f"into={into!r}", loc=loc, hint="into is the ring, L2, or ring | L2")
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise ScheduleError(f"share={share!r} is not a number", loc=loc)
        if not 0.0 <= share <= 1.0:
            raise ScheduleError(f"share={share} of {what}: a share is between 0 and 1", loc=loc)
        if share == 0 and not into.ring:
            raise ScheduleError(f"share=0 of {what} asks L2 for nothing", loc=loc, hint="leave the prefetch out")
        if during is not None and before is not None:
            raise ScheduleError("a prefetch has one point of the program", loc=loc, hint="say either during or before")
        if experts is not None:
            self._guessed(experts, weight, into, share, loc)
        for p in self.prefetches:
            if (
                p.op == op
                and (p.experts is None) == (experts is None)
                and ((p.into.ring and into.ring) or (p.into.l2 and into.l2))
            ):
                raise ScheduleError(
                    f"{what} is prefetched twice into the same place",
                    loc=loc,
                    notes=(("the first time", p.loc),),
                )
        if by is not None:
            _instance(by, Warps, "by", loc, "say by=s.warp(i)")
        point = during if during is not None else before
        if into.l2 and (by is None or by.count != 1):
            raise ScheduleError("an L2 prefetch needs the one warp that asks for it", loc=loc, hint="say by=s.warp(i)")
        if share < 1 and into.ring and point is None:
            raise ScheduleError(
                "a share of the ring needs the op that the rest waits for", loc=loc, hint="say during=g.<op>"
            )
        if share == 1 and point is not None and not into.l2:
            raise ScheduleError(
                "the whole weight may enter the ring: nothing waits for a point of the program",
                loc=loc,
                hint="leave the point out, or say a share below 1",
            )
        if into.l2 and point is None:
            raise ScheduleError("an L2 prefetch needs a point of the program", loc=loc, hint="say during=g.<op>")
        at = None if point is None else self._point(point, loc)
        self.prefetches.append(Prefetch(op, into, share, by.first if by else None, at, loc, experts))

    def experts_first(self, op: OpHandle, which: InL2) -> None:
        """Of the experts that a launch uses, those that L2 was asked for come first in ``op``'s table: every block
        works on its share of these, then on one of the others."""
        loc = here()
        if self._op(op, loc).kind != "top_k":
            raise ScheduleError(f"{op!r} makes no table of experts", loc=loc, hint="s.experts_first(g.top_k, in_l2)")
        _instance(which, InL2, "which", loc, "s.experts_first(g.top_k, in_l2)")
        self._once("which experts come first", loc)
        self.first_experts = loc

    def warm_code(
        self, *, by: Warps, blocks: int = 8, next: bool = False,
        during: OpHandle | RoleHandle | None = None, before: OpHandle | RoleHandle | None = None,
    ) -> None:  # fmt: skip
        """Warp ``by`` asks L2 for the kernel's machine code, and to keep it, as the first thing of every launch.

        Each piece is asked for in ``blocks`` blocks (or all), far apart. ``next=True``: instead that of the kernel
        whose launch follows, where it is another one, when the block's warps begin with ``during`` (or ``before``).
        """
        loc = here()
        _instance(next, bool, "next", loc, "True or False")
        _instance(by, Warps, "by", loc, "say by=s.warp(i)")
        if by.count != 1:
            raise ScheduleError("one warp of a block asks for code", loc=loc, hint="say by=s.warp(i)")
        if _integer(blocks, "blocks", loc) < 1:
            raise ScheduleError(f"blocks={blocks}: nobody would ask for code", loc=loc, hint="at least one")
        if during is not None and before is not None:
            raise ScheduleError("code is asked for at one point of the program", loc=loc, hint="during or before")
        point = during if during is not None else before
        if next and point is None:
            raise ScheduleError(
                "the next kernel's code needs a point of the program", loc=loc, hint="say before=g.<op>, a late one"
            )
        if not next and point is not None:
            raise ScheduleError(
                "a kernel's own code is asked for when its launch begins",
                loc=loc,
                hint="leave the point out, or say next=True",
            )
        at = None if point is None else self._point(point, loc)
        self._once("the next kernel's code" if next else "the kernel's own code", loc)
        self.warms.append(Warm(by.first, blocks, next, at, loc))

    def hint(self, weights: WeightHandle | OpHandle | Iterable[WeightHandle | OpHandle], hint: Hint) -> None:
        """The L2 cache hint that bulk loads of a weight carry, or of the tensors that an op streams."""
        loc = here()
        if hint not in list(Hint):
            legal = ", ".join(h.value for h in Hint if h is not Hint.NO_ALLOCATE)
            raise ScheduleError(f"{hint!r} is not a cache hint", loc=loc, hint=f"there are: {legal}")
        for w in _several(weights):
            name, op = self._hinted(w, loc)
            if hint is Hint.NO_ALLOCATE:
                raise ScheduleError(
                    "bulk loads cannot bypass L2: PTX has no such policy for cp.async.bulk",
                    loc=loc,
                    hint="use evict_first",
                )
            self._once(f"the hint of {name}", loc)
            self.hints[op] = (Hint(hint), loc)

    # order ------------------------------------------------------------------------------------------------------

    def sync(self, edge: EdgeHandle, how: Sync) -> None:
        """The primitive that orders a hand-off; it holds for every reader of the tensor."""
        loc = here()
        if not isinstance(edge, EdgeHandle) or not isinstance(how, Sync):
            raise ScheduleError("sync takes an edge and a primitive", loc=loc, hint="s.sync(g.a >> g.b, lamport())")
        self.syncs.append((edge, how, loc))

    def dry_run(self, *roles: OpHandle | RoleHandle) -> None:
        """Let warps go through these roles, or all that can of an op, once without effect before they do it for good:
        what is run once a launch then finds its instructions and constants at hand when its input comes."""
        loc = here()
        if not roles:
            raise ScheduleError("dry_run of nothing", loc=loc, hint="s.dry_run(g.<op>, g.<op>.<role>, ...)")
        for handle in roles:
            for name in self._rehearsed(handle, loc):
                if name in self.rehearsed:
                    raise ScheduleError(
                        f"{'.'.join(name)} is rehearsed twice", loc=loc,
                        notes=(("the first time", self.rehearsed[name]),),
                    )  # fmt: skip
                self.rehearsed[name] = loc

    def _rehearsed(self, handle: Any, loc: Loc | None) -> list[tuple[str, str]]:
        if not isinstance(handle, OpHandle | RoleHandle):
            raise ScheduleError(f"{handle!r} is neither an op nor a role", loc=loc, hint="name one as g.<op>.<role>")
        op = self.graph.op(self._point(handle, loc))
        able = [(op.name, r.name) for r in op.roles() if r.rehearsable]
        if isinstance(handle, OpHandle):
            return able
        if (handle.op, handle.role) not in able:
            roles = ", ".join(f"g.{o}.{r}" for o, r in able)
            raise ScheduleError(
                f"{handle!r} cannot be rehearsed: it fills or drains the ring", loc=loc, hint=f"of this op: {roles}"
            )
        return [(handle.op, handle.role)]

    def warpgroups(self, *roles: RoleHandle) -> None:
        """Let four warps at a time make the products of these roles, straight from shared memory: Hopper's wgmma.

        Sums have the same terms, instruction by instruction. Raises ScheduleError for a role that cannot, or a machine
        without it.
        """
        loc = here()
        able = [(op.name, r.name) for op in self.graph.ops for r in op.roles() if r.warpgroups]
        for handle in roles:
            name = (handle.op, handle.role) if isinstance(handle, RoleHandle) else None
            if name not in able:
                hint = f"of this graph: {', '.join(f'g.{o}.{r}' for o, r in able) or 'none'}"
                raise ScheduleError(f"{handle!r} has no products of a warpgroup", loc=loc, hint=hint)
            if self.machine.arch != "sm_90a":
                raise ScheduleError(
                    f"{self.machine.name} is {self.machine.arch}, and only sm_90a has wgmma", loc=loc,
                    hint="leave it out on other machines",
                )  # fmt: skip
            self._once(f"warpgroups of {'.'.join(name)}", loc)
            self.together[name] = loc

    def reset(self, by: Warps) -> None:
        """The warp that empties idle copies of lamport channels and counters."""
        if not isinstance(by, Warps) or by.count != 1:
            raise ScheduleError("one warp keeps house", loc=here(), hint="say by=s.warp(i)")
        self._once("reset", here())
        self.housekeeper = (by, here())

    def accumulators(self, slots: int) -> None:
        """Slots between the math warps and those of the reduce role (8 KiB each)."""
        loc = here()
        if _integer(slots, "accumulators", loc) < 1:
            raise ScheduleError(f"accumulators({slots}): at least one", loc=loc)
        self._once("accumulators", loc)
        self.accum_slots = slots

    def launch(
        self,
        *,
        cluster: int = 1,
        pdl: bool = True,
        early_trigger: bool = False,
        registers: tuple[int, int] | None = None,
    ) -> None:
        """Cluster size; PDL and when dependents may start; registers a thread of warps 0-3 and of the rest."""
        loc = here()
        if _integer(cluster, "cluster", loc) not in (1, 2, 4, 8):
            raise ScheduleError(f"cluster={cluster}: clusters have 1, 2, 4 or 8 blocks", loc=loc)
        _instance(pdl, bool, "pdl", loc, "True or False")
        _instance(early_trigger, bool, "early_trigger", loc, "True or False")
        if early_trigger and not pdl:
            raise ScheduleError("early_trigger without pdl triggers nothing", loc=loc, hint="pdl=True")
        if registers is not None:
            if not isinstance(registers, tuple) or len(registers) != 2:
                raise ScheduleError(
                    f"registers={registers!r} is not a pair",
                    loc=loc,
                    hint="of warps 0 to 3 and of the rest: (120, 192)",
                )
            for count in registers:
                _integer(count, "registers", loc)
        self._once("launch", loc)
        self.launch_ = Launch(cluster, pdl, early_trigger, registers, loc)

    def stamps(self, records: int = STAMP_RECORDS) -> None:
        """Let every warp write down when it began each job, wait and load: up to ``records`` times a launch.

        ``megagen trace`` says so for a schedule that does not; results stay the same to the last bit.
        """
        loc = here()
        if not 1 <= _integer(records, "records", loc) <= MOST_STAMP_RECORDS:
            raise ScheduleError(f"stamps(records={records}): 1 to {MOST_STAMP_RECORDS:,} of a warp", loc=loc)
        self._once("stamps", loc)
        self.stamped = (records, loc)

    def fault(self, edge: EdgeHandle) -> None:
        """Drop the first tile's store on an edge, to see what becomes of it: a lamport reader hangs and the report says
        where; after a counter or flag, which is raised all the same, it reads what was there before."""
        loc = here()
        _instance(edge, EdgeHandle, "edge", loc, "s.fault(g.a >> g.b)")
        self.faults.append((edge, loc))

    def choice(self, name: str, *options: T) -> T:
        """A point that can be varied from outside; the first option is the default.

        Raises ScheduleError when the value asked for is none of ``options``.
        """
        loc = here()
        _instance(name, str, "a choice's name", loc, "s.choice(name, option, ...)")
        names = tuple(str(o) for o in options)
        if not names:
            raise ScheduleError(f"choice {name!r} has no options", loc=loc, hint="s.choice(name, option, ...)")
        if self.offered.get(name, ("", names))[1] != names:
            raise ScheduleError(
                f"choice {name!r} is offered with other options", loc=loc,
                notes=(("the first time", self.said[f"choice {name}"]),),
            )  # fmt: skip
        wanted = self.choices.get(name, names[0])
        if wanted not in names:
            raise ScheduleError(f"choice {name}={wanted}", loc=loc, hint=f"options: {', '.join(names)}")
        self.said.setdefault(f"choice {name}", loc)
        self.offered[name] = (wanted, names)
        return options[names.index(wanted)]

    # what directives have in common ---------------------------------------------------------------------------------

    def _once(self, what: str, loc: Loc | None) -> None:
        if what in self.said:
            raise ScheduleError(f"{what} is said twice", loc=loc, notes=(("the first time", self.said[what]),))
        self.said[what] = loc

    def _op(self, handle: Any, loc: Loc | None) -> Op:
        if not isinstance(handle, OpHandle):
            raise ScheduleError(f"{handle!r} is not an op", loc=loc, hint="name one as g.<op>")
        self._mine(handle, any(handle._op is op for op in self.graph.ops), loc)
        return handle._op

    def _point(self, handle: OpHandle | RoleHandle, loc: Loc | None) -> str:
        if not isinstance(handle, RoleHandle):
            return self._op(handle, loc).name
        self._mine(handle, handle.op in {op.name for op in self.graph.ops}, loc)
        return handle.op

    def _hinted(self, handle: Any, loc: Loc | None) -> tuple[str, str]:
        """What is hinted, and its op."""
        if isinstance(handle, OpHandle) and _streams_tensors(handle._op):
            return self._op(handle, loc).name, handle._op.name
        self._streamed(handle, loc)
        return handle.weight.name, handle.op

    def _streamed(self, handle: Any, loc: Loc | None) -> None:
        if isinstance(handle, OpHandle) and _streams_tensors(handle._op):
            raise ScheduleError(
                f"{handle!r} streams what earlier launches have written, which cannot be asked for before its time",
                loc=loc, hint="only weights are prefetched",
            )  # fmt: skip
        if not isinstance(handle, WeightHandle):
            raise ScheduleError(f"{handle!r} is not a weight", loc=loc, hint="name one as g.<op>.weight")
        self._mine(handle, any(handle.weight is w for op in self.graph.ops for w in op.weights.values()), loc)
        if handle.weight.k == 1:
            raise ScheduleError(f"{handle.weight.name} is a vector: only matrices are streamed", loc=loc)

    def _guessed(
        self, experts: Guess, weight: WeightHandle | OpHandle, into: Into, share: float, loc: Loc | None
    ) -> None:
        """Refuse what is no guess of an expert's weight."""
        _instance(experts, Guess, "experts", loc, "experts=previous_step(top=8)")
        if not isinstance(weight, WeightHandle) or not weight.weight.experts:
            raise ScheduleError(f"{weight!r} is of no expert: nothing is guessed", loc=loc, hint="leave experts out")
        if into != L2 or share != 1:
            raise ScheduleError("a guess is asked for as a whole, into L2", loc=loc, hint="into=L2, and no share")
        others = [(p.experts, p.loc) for p in self.prefetches if p.experts is not None]
        other = next((loc for g, loc in others if (g.top, g.hint) != (experts.top, experts.hint)), None)
        if other is not None:
            raise ScheduleError(
                "all weights of a layer have one guess",
                loc=loc,
                notes=(("another one", other),),
                hint="the same top and hint",
            )

    def _held(self, handle: OpHandle, into: Into, share: float, loc: Loc | None) -> str:
        """The op whose outputs hold what the next launch reads."""
        op = self._op(handle, loc)
        if not op.held:
            raise ScheduleError(
                f"the caches of {handle!r} grow: their reader streams them through its ring",
                loc=loc,
                hint="only caches of a window are asked for",
            )
        if into != L2 or share != 1:
            raise ScheduleError(f"what {handle!r} adds to is asked for as a whole, into L2", loc=loc, hint="into=L2")
        return op.name

    def _mine(self, handle: object, found: bool, loc: Loc | None) -> None:
        if not found:
            raise ScheduleError(
                f"{handle!r} is of another graph than the schedule's",
                loc=loc,
                hint="name it from the graph of Schedule()",
            )


def _streams_tensors(op: Op) -> bool:
    return op.producer is not None and not op.weights


def _integer(value: Any, what: str, loc: Loc | None) -> int:
    """``value``, which must be an int: True and 12.0 are mistakes."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ScheduleError(f"{what}={value!r} is not a whole number", loc=loc)
    return value


def _instance(value: Any, kind: type, what: str, loc: Loc | None, hint: str) -> None:
    if not isinstance(value, kind):
        raise ScheduleError(f"{what} is of type {type(value).__name__}, not {kind.__name__}", loc=loc, hint=hint)


def _several(handles: Any) -> list[Any]:
    """One handle or many as a list. Some handles are tuples themselves."""
    one = isinstance(handles, OpHandle | WeightHandle | RoleHandle | EdgeHandle | str)
    return [handles] if one or not isinstance(handles, Iterable) else list(handles)


def _kernel_name(name: Any, loc: Loc | None) -> None:
    _instance(name, str, "the schedule's name", loc, "Schedule(name, graph, machine, ...)")
    hint = None
    if name in KEYWORDS:
        hint = f"{name!r} is a keyword of C++"
    elif name in TAKEN:
        hint = f"the emitted code has a {name!r} of its own"
    elif re.match(r"__|_[A-Z]", name):
        hint = "C++ keeps names that begin with two underscores, or one and a capital, to itself"
    elif not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", name):
        hint = "ASCII letters, digits and underscores, no digit first"
    if hint is not None:
        raise ScheduleError(
            f"schedule name {name!r} must be an identifier: it becomes the kernel's name", loc=loc, hint=hint
        )


def keyword(call: Loc | None, name: str) -> Loc | None:
    """Where ``name=`` stands in the call that begins at ``call``."""
    if call is None:
        return None
    column = call.column
    for line in range(call.line, len(linecache.getlines(call.file)) + 1):
        text = linecache.getline(call.file, line)
        found = re.search(rf"\b{name}\s*=", text[column - 1 :])
        if found:
            return replace(call, line=line, column=column + found.start(), text=text)
        column = 1
    return call
