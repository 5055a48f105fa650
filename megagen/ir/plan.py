"""The Plan: a lowered schedule as flat, ordered data.

Only numbers, enums and names; frozen; JSON round-trips; the same input gives the same bytes. Emitter, checker
and runtime read the Plan and nothing above it, so host and device cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from megagen.ir.graph import DType, Frozen, Per, RoleSpec, Scope


class Source(Frozen):
    """The schedule's line that asked for something (``line`` 0: a default that no line asked for)."""

    file: str = ""
    line: int = 0
    column: int = 1
    text: str = ""


class Machine(Frozen):
    """A GPU as the Plan needs it. Loaded from ``machines/*.toml``; every figure there names its source.

    ``blocks_fit``: cluster size -> blocks co-resident at one a SM. Rates in bytes/s.
    """

    name: str
    arch: str  # sm_90a
    sms: int
    blocks_fit: Mapping[int, int]
    shared_bytes: int  # a block may use
    registers: int  # 32-bit registers of a SM
    barriers: int  # named barriers a block
    icache_bytes: int
    l2_bytes: int
    hbm_bytes_per_s: float
    timer_step_ns: float  # of the GPU's nanosecond timer
    sources: Mapping[str, str] = {}


PREFETCH_GUESS = "prefetch_guess"  # asks L2 for weights of experts that may be used
WARMS = ("warm_code", "warm_next")  # services that ask L2 for machine code


class SyncKind(StrEnum):
    MBARRIER = "mbarrier"  # within a block
    CLUSTER = "cluster"  # distributed shared memory, st.async with complete_tx
    LAMPORT = "lamport"  # the data is its own flag
    COUNTER = "counter"  # GPU scope: red.release + acquire poll
    FLAG = "flag"  # system scope: fence, then a flag on each rank


class Reset(StrEnum):
    """Who makes a lamport slot empty again."""

    NONE = "none"
    READER = "reader"  # the one reader, right after use; one copy; rank scope only
    LAUNCH = "launch"  # a housekeeping warp, the copy that this launch does not use


class Hint(StrEnum):
    EVICT_NORMAL = "evict_normal"
    EVICT_FIRST = "evict_first"
    EVICT_LAST = "evict_last"
    NO_ALLOCATE = "no_allocate"


class RoleRef(Frozen):
    op: str
    role: str

    def __str__(self) -> str:
        return f"{self.op}.{self.role}"


class ChannelPlan(Frozen):
    """A tensor on its way from writers to readers, with the primitive that orders them.

    ``offset`` is into the rank's heap, ``bytes`` one copy. ``empty`` is the 32-bit word that means "not yet
    written" (lamport). ``counter_offset`` is the heap offset of the counter word (counter, flag).
    ``arrivals`` publishes, each ``arrivals_per`` launch, token or used expert, complete a counter or flag
    (times tp for WORLD). An element of a message stands at ``rank * rank_stride + row * row_stride + e``,
    e < ``shard``; ``row`` flattens the leading axes. ``scatter``: a writer's row is ``shard`` elements for each rank in
    turn. ``fault``: drop the first tile's store, to test the hang report.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    scope: Scope
    kind: SyncKind
    empty: int | None
    copies: int
    reset: Reset
    offset: int
    bytes: int
    counter_offset: int | None
    shared_offset: int | None = None  # cluster: where the reader's block keeps it
    barrier: str | None = None  # mbarrier and cluster: the barrier that completes it
    writers: tuple[RoleRef, ...]
    readers: tuple[RoleRef, ...]
    row_stride: int
    rank_stride: int
    shard: int
    scatter: bool = False
    arrivals: int
    arrivals_per: Per
    index: int  # edge number in hang records
    fault: bool = False
    source: Source = Source()


class RegionPlan(Frozen):
    """A stretch of dynamic shared memory."""

    name: str
    offset: int
    bytes: int
    align: int


class BarrierPlan(Frozen):
    """``slots`` mbarriers of one purpose, each initialised with ``count`` expected arrivals.

    ``tx``: completion also waits for bytes (bulk copies or st.async).
    """

    name: str
    offset: int
    slots: int
    count: int
    tx: bool = False
    index: int  # number in hang records; channels and barriers share one numbering


class BarrierUse(Frozen):
    """What one warp of a step does to a barrier, ``per`` unit of its loop.

    ``start``: the first phase parity waited for (empty barriers are waited with the opposite one).
    """

    barrier: str
    action: Literal["wait", "arrive", "expect_tx"]
    per: Literal["stage", "tile", "launch"]
    count: int = 1  # arrivals of one warp in one unit
    start: int = 0


class StepPlan(Frozen):
    """One call in a warp's program: ``ops::<Struct><Policy>::<call><args>(ctx)``.

    ``call`` is the role, ``prefetch_l2``, ``prefetch_guess`` or a service (``reset``, ``signal_point``, ...). ``args``
    are integer template arguments in order. ``index`` numbers the steps of the plan for hang records. ``rehearsal``:
    the line that has it run once without effect before it runs.
    """

    op: str | None
    call: str
    args: tuple[int, ...] = ()
    reads: tuple[str, ...] = ()  # channels waited for
    writes: tuple[str, ...] = ()
    barriers: tuple[BarrierUse, ...] = ()
    index: int
    source: Source = Source()
    rehearsal: Source | None = None


class ProgramPlan(Frozen):
    """What a group of consecutive warps runs; all of them the same steps."""

    first: int
    count: int
    steps: tuple[StepPlan, ...]


class StreamPlan(Frozen):
    """A weight on its way through the ring, or ``tensors`` that are given to the launch: tiles of ``per_tile`` stages
    of ``stage_bytes``, of which those who read them hold ``held`` at a time."""

    weight: str  # "": tensors
    tensors: tuple[str, ...] = ()
    stage_bytes: int
    per_tile: int
    held: int = 1
    stage_rows: int
    stage_k: int
    hint: Hint = Hint.EVICT_NORMAL
    l2_hint: Hint = Hint.EVICT_NORMAL
    source: Source = Source()


class OpPlan(Frozen):
    """An op with its policy: integer and float constants, channel ports and pointers for the device."""

    name: str
    kind: str
    header: str
    struct: str
    constants: Mapping[str, int | float]
    channels: Mapping[str, str]  # port -> channel name
    tensors: Mapping[str, str]  # port -> parameter name (launch inputs and outputs)
    weights: Mapping[str, str]  # port -> parameter name
    barriers: Mapping[str, str]  # purpose -> barrier name ("group", ...)
    regions: Mapping[str, str]  # purpose -> region name ("scratch", ...)
    shared: Mapping[str, int] = {}  # purpose -> bytes that its header uses
    held: tuple[str, ...] = ()  # ports of outputs whose old contents L2 may be asked for
    roles: Mapping[str, tuple[int, ...]]  # role -> warps that the schedule gave it
    specs: tuple[RoleSpec, ...]  # what the roles accept
    publishes: Mapping[str, tuple[int, Per]] = {}  # role that writes -> how often, over all blocks of a rank
    sends: Mapping[str, int] = {}  # role that writes -> bytes of a row that it makes on a rank
    sources: Mapping[str, Source] = {}  # role -> the line that placed it
    stream: StreamPlan | None
    weight_bytes: int  # of one launch at the plan's nominal routing
    activation_bytes: int
    operations: int
    source: Source = Source()

    @property
    def prefetched(self) -> bool:
        """Whether L2 can be asked for what it streams, or holds, before its time."""
        return bool(self.held) or (self.stream is not None and self.stream.weight != "")

    @property
    def producer(self) -> RoleSpec | None:
        """The role that streams."""
        return next((s for s in self.specs if s.stream), None)


class WeightPlan(Frozen):
    """A packed weight in global memory. ``layout`` names the packing of :mod:`megagen.ops.packing`: ring stages, fp32,
    or the checkpoint's matrix as it is."""

    name: str
    parameter: str
    layout: Literal["tiles", "vector", "rows"]
    dtype: DType
    rows: int
    k: int
    experts: int
    stage_rows: int
    stage_k: int
    bytes: int
    gate_up: bool
    names: tuple[str, ...]
    shard: str


class ParamPlan(Frozen):
    """A member of the kernel's parameter block, in order. ``ctype`` is its C++ type."""

    name: str
    ctype: str
    what: Literal["weight", "input", "output", "state", "history", "system"]
    dtype: DType | None = None
    shape: tuple[int, ...] = ()


class RingPlan(Frozen):
    stages: int
    stage_bytes: int
    region: str
    full: str
    empty: str
    consumers: int  # warps that release a stage
    source: Source = Source()


class LaunchPlan(Frozen):
    """``registers``: (first warpgroup, others) for setmaxnreg, or None to leave the compiler's even split."""

    blocks: int
    cluster: int
    warps: int
    shared_bytes: int
    pdl: bool
    early_trigger: bool
    registers: tuple[int, int] | None
    source: Source = Source()


class StampPlan(Frozen):
    """Times that each warp writes down: up to ``records`` of 16 bytes, after four of them about the warp.

    ``cycles``: by the SM's clock, else by the GPU's nanosecond timer. ``bytes``: of a launch, by kernel, block and
    warp. See include/megagen/debug/stamp.cuh.
    """

    records: int
    cycles: bool
    bytes: int
    source: Source = Source()


class GuessPlan(Frozen):
    """L2 is asked for weights of the ``top`` experts that the layer's last launch used most, which is kept in
    ``parameter``: two copies, of which a launch reads one and writes the other (ops/guess.cuh).

    ``ops``: whose weights. ``first``: those that are used then come first in the table of experts.
    """

    top: int
    hint: Hint
    first: bool
    ops: tuple[str, ...]
    parameter: str
    source: Source = Source()


class HeapPlan(Frozen):
    """The rank's exchange memory: control words, channels' copies, counters, hang records (byte offsets)."""

    bytes: int
    epoch_offset: int  # u32 a block
    abort_offset: int
    record_offset: int
    record_bytes: int


class KernelPlan(Frozen):
    """One launch: the fused kernel, or one op's when the plan is unfused."""

    name: str
    ops: tuple[str, ...]
    programs: tuple[ProgramPlan, ...]
    advances_epoch: bool


class Plan(Frozen):
    """Everything below the DSL needs. See the module's docstring."""

    version: int = 1
    name: str
    graph: str
    tp: int
    tokens: int
    machine: Machine
    fused: bool
    launch: LaunchPlan
    ring: RingPlan
    heap: HeapPlan
    params: tuple[ParamPlan, ...]
    weights: tuple[WeightPlan, ...]
    regions: tuple[RegionPlan, ...]
    barriers: tuple[BarrierPlan, ...]
    channels: tuple[ChannelPlan, ...]
    ops: tuple[OpPlan, ...]
    kernels: tuple[KernelPlan, ...]
    choices: Mapping[str, str] = {}
    nominal_experts: int
    nominal_tokens: int
    stamps: StampPlan | None = None
    guess: GuessPlan | None = None

    def to_json(self) -> str:
        return self.model_dump_json(indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        return Plan.model_validate_json(text)

    def op(self, name: str) -> OpPlan:
        return next(o for o in self.ops if o.name == name)

    @property
    def tells_code(self) -> bool:
        """Whether the emitted text says where its machine code lies: what is warmed must be found."""
        return any(s.call in WARMS for k in self.kernels for p in k.programs for s in p.steps)

    def loads(self, step: StepPlan) -> bool:
        """Whether a step fills the ring. Its arguments are the first and last share of the stream, and how many stages
        may be under way."""
        producer = self.op(step.op).producer if step.op is not None else None
        return producer is not None and producer.name == step.call

    def channel(self, name: str) -> ChannelPlan:
        return next(c for c in self.channels if c.name == name)

    def barrier(self, name: str) -> BarrierPlan:
        return next(b for b in self.barriers if b.name == name)

    def region(self, name: str) -> RegionPlan:
        return next(r for r in self.regions if r.name == name)
