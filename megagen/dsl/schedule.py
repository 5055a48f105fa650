"""Schedule and its directives. Every directive remembers the user's line; none changes a bit of the result."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megagen.errors import Loc, ScheduleError, did_you_mean, here
from megagen.ir.graph import EdgeHandle, Graph, Op, OpHandle, RoleHandle, WeightHandle
from megagen.ir.plan import Hint, Machine, Reset, SyncKind

KiB = 1024
ALL_ONES = 0xFFFFFFFF
POSITIVE_ZERO = 0
evict_first, evict_last, evict_normal = Hint.EVICT_FIRST, Hint.EVICT_LAST, Hint.EVICT_NORMAL
no_allocate = Hint.NO_ALLOCATE
by_reader, by_launch = Reset.READER, Reset.LAUNCH
T = TypeVar("T")


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
    across ranks). ``reset=by_reader``: the only reader empties each slot right after use (1 copy, within a GPU).
    """
    if copies not in (None, 1, 2, 3):
        raise ScheduleError(f"copies={copies}: a channel has 1 to 3", loc=here())
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


@dataclass(frozen=True)
class Prefetch:
    op: str
    into: Into
    share: float
    warp: int | None
    at: str | None  # op at whose beginning an L2 prefetch goes out, and until whose end the ring waits
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
    caps: list[Cap] = field(default_factory=list)
    hints: dict[str, tuple[Hint, Loc | None]] = field(default_factory=dict)
    syncs: list[tuple[EdgeHandle, Sync, Loc | None]] = field(default_factory=list)
    launch_: Launch = Launch()
    housekeeper: tuple[Warps, Loc | None] | None = None
    faults: list[tuple[EdgeHandle, Loc | None]] = field(default_factory=list)
    choices: Mapping[str, str] = field(default_factory=dict)
    offered: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    accum_slots: int = 2

    def __init__(
        self, name: str, graph: Graph, machine: Machine, *, warps: int = 12, blocks: int | None = None,
        choices: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.graph, self.machine = name, graph, machine
        self.warps_per_block, self.blocks = warps, blocks
        self.loc = here()
        self.rings, self.roles, self.prefetches, self.caps = [], {}, [], []
        self.hints, self.syncs, self.launch_, self.housekeeper = {}, [], Launch(), None
        self.faults, self.choices, self.offered, self.accum_slots = [], dict(choices or {}), {}, 2
        if not name.isidentifier():
            raise ScheduleError(
                f"schedule name {name!r} must be an identifier: it becomes the kernel's name", loc=self.loc
            )
        if not 1 <= warps <= 32:
            raise ScheduleError(f"warps={warps}: a block has 1 to 32 warps", loc=self.loc)
        if blocks is not None and blocks < 1:
            raise ScheduleError(f"blocks={blocks}: at least one", loc=self.loc)

    # warps ------------------------------------------------------------------------------------------------------

    def warp(self, index: int) -> Warps:
        """One warp of the block."""
        return self.warps(index, index + 1)

    def warps(self, first: int, end: int) -> Warps:
        """Warps ``first`` to ``end - 1``."""
        if not 0 <= first < end <= self.warps_per_block:
            raise ScheduleError(f"warps {first} to {end - 1} of a block that has {self.warps_per_block}", loc=here())
        return Warps(first, end - first)

    def assign(self, op: OpHandle | Iterable[OpHandle], **roles: Warps) -> None:
        """Give roles of one op, or of several alike, to warps: ``s.assign(g.pooler, load_weights=s.warp(0), ...)``."""
        loc = here()
        for handle in [op] if isinstance(op, OpHandle) else list(op):
            known = [r.name for r in self._op(handle, loc).roles()]
            for role, warps in roles.items():
                if role not in known:
                    raise ScheduleError(
                        f"op {handle._op.name!r} has no role {role!r}",
                        loc=_keyword(loc, role),
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
        if stages < 1 or stage_bytes < 1 or stage_bytes % 128:
            raise ScheduleError(
                f"ring of {stages} stages of {stage_bytes} bytes: stages are multiples of 128 bytes", loc=loc
            )
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
        for handle in [during] if isinstance(during, OpHandle) else list(during):
            op = self._op(handle, loc)
            if op.stage() is None:
                raise ScheduleError(f"op {op.name!r} streams no weights", loc=loc)
            self._cap(bytes, op.name, loc)

    def _cap(self, bytes: int, op: str | None, loc: Loc | None) -> None:
        if bytes < 1:
            raise ScheduleError(f"in_flight={bytes}: nothing could ever be loaded", loc=loc)
        self.caps.append(Cap(bytes, op, loc))

    def prefetch(
        self, weight: WeightHandle, into: Into, *, share: float = 1.0, by: Warps | None = None,
        during: OpHandle | RoleHandle | None = None, before: OpHandle | RoleHandle | None = None,
    ) -> None:  # fmt: skip
        """Where ``weight`` waits before its op needs it.

        ``into=ring``: the first ``share`` of each block's stages may enter the ring as soon as slots are free; the rest
        waits until ``during`` is done in the block. ``into=L2``: warp ``by`` asks L2 for the first ``share`` when it
        reaches ``during`` (or ``before``) in its program. ``ring | L2``: the ring takes ``share``, L2 the rest.
        """
        loc = here()
        self._streamed(weight, loc)
        if not isinstance(into, Into):
            raise ScheduleError(f"into={into!r}", loc=loc, hint="into is the ring, L2, or ring | L2")
        if not 0.0 <= share <= 1.0:
            raise ScheduleError(f"share={share} of {weight.weight.name}: a share is between 0 and 1", loc=loc)
        if during is not None and before is not None:
            raise ScheduleError("a prefetch has one point of the program", loc=loc, hint="say either during or before")
        for p in self.prefetches:
            if p.op == weight.op and ((p.into.ring and into.ring) or (p.into.l2 and into.l2)):
                raise ScheduleError(
                    f"{weight.weight.name} is prefetched twice into the same place",
                    loc=loc,
                    notes=(("the first time", p.loc),),
                )
        point = during if during is not None else before
        if into.l2 and (by is None or by.count != 1):
            raise ScheduleError("an L2 prefetch needs the one warp that asks for it", loc=loc, hint="say by=s.warp(i)")
        if share < 1 and into.ring and point is None:
            raise ScheduleError(
                "a share of the ring needs the op that the rest waits for", loc=loc, hint="say during=g.<op>"
            )
        if into.l2 and point is None:
            raise ScheduleError("an L2 prefetch needs a point of the program", loc=loc, hint="say during=g.<op>")
        at = None if point is None else point.op if isinstance(point, RoleHandle) else self._op(point, loc).name
        self.prefetches.append(Prefetch(weight.op, into, share, by.first if by else None, at, loc))

    def hint(self, weights: WeightHandle | Iterable[WeightHandle], hint: Hint) -> None:
        """The L2 cache hint that bulk loads of a weight carry."""
        loc = here()
        for w in [weights] if isinstance(weights, WeightHandle) else list(weights):
            self._streamed(w, loc)
            if hint is Hint.NO_ALLOCATE:
                raise ScheduleError(
                    "bulk loads cannot bypass L2: PTX has no such policy for cp.async.bulk",
                    loc=loc,
                    hint="use evict_first",
                )
            self.hints[w.op] = (Hint(hint), loc)

    # order ------------------------------------------------------------------------------------------------------

    def sync(self, edge: EdgeHandle, how: Sync) -> None:
        """The primitive that orders a hand-off; it holds for every reader of the tensor."""
        loc = here()
        if not isinstance(edge, EdgeHandle) or not isinstance(how, Sync):
            raise ScheduleError("sync takes an edge and a primitive", loc=loc, hint="s.sync(g.a >> g.b, lamport())")
        self.syncs.append((edge, how, loc))

    def reset(self, by: Warps) -> None:
        """The warp that empties idle copies of lamport channels and counters."""
        if not isinstance(by, Warps) or by.count != 1:
            raise ScheduleError("one warp keeps house", loc=here(), hint="say by=s.warp(i)")
        self.housekeeper = (by, here())

    def accumulators(self, slots: int) -> None:
        """Slots between the math warps and the reduce warp (8 KiB each)."""
        if slots < 1:
            raise ScheduleError(f"accumulators({slots}): at least one", loc=here())
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
        if cluster not in (1, 2, 4, 8):
            raise ScheduleError(f"cluster={cluster}: clusters have 1, 2, 4 or 8 blocks", loc=loc)
        self.launch_ = Launch(cluster, pdl, early_trigger, registers, loc)

    def fault(self, edge: EdgeHandle) -> None:
        """Drop the first tile's store on an edge, to see what becomes of it: a lamport reader hangs and the report says
        where; after a counter or flag, which is raised all the same, it reads what was there before."""
        self.faults.append((edge, here()))

    def choice(self, name: str, *options: T) -> T:
        """A point that can be varied from outside; the first option is the default.

        Raises ScheduleError when the value asked for is none of ``options``.
        """
        names = tuple(str(o) for o in options)
        wanted = self.choices.get(name, names[0])
        if wanted not in names:
            raise ScheduleError(f"choice {name}={wanted}", loc=here(), hint=f"options: {', '.join(names)}")
        self.offered[name] = (wanted, names)
        return options[names.index(wanted)]

    def _op(self, handle: Any, loc: Loc | None) -> Op:
        if not isinstance(handle, OpHandle):
            raise ScheduleError(f"{handle!r} is not an op", loc=loc, hint="name one as g.<op>")
        return handle._op

    def _streamed(self, handle: Any, loc: Loc | None) -> None:
        if not isinstance(handle, WeightHandle):
            raise ScheduleError(f"{handle!r} is not a weight", loc=loc, hint="name one as g.<op>.weight")
        if handle.weight.k == 1:
            raise ScheduleError(f"{handle.weight.name} is a vector: only matrices are streamed", loc=loc)


def _keyword(call: Loc | None, name: str) -> Loc | None:
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
