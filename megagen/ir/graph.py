"""What is computed: tensors, weights and ops of one stretch of a decoder layer, as one rank sees it.

The graph fixes everything that changes a bit of the result: the tensor-parallel split, exchange types and
reduction trees. How the work is placed on warps is the schedule's business (:mod:`megagen.dsl`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from megagen.errors import ScheduleError, UnknownName, did_you_mean, here

if TYPE_CHECKING:
    import torch


class Frozen(BaseModel):
    """Immutable, strict pydantic model: unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)


class DType(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    U32 = "u32"
    NVFP4 = "nvfp4"  # weights only: e2m1 in blocks of 16 along K, e4m3 block scale, fp32 second-level scale

    @property
    def bits(self) -> float:
        """Bits of memory an element costs, block scales included."""
        return {"fp32": 32.0, "bf16": 16.0, "u32": 32.0, "nvfp4": 4.5}[self.value]


class Scope(StrEnum):
    """How far a tensor travels between its writer and its reader."""

    BLOCK = "block"  # shared memory of one thread block, rebuilt by each block
    RANK = "rank"  # global memory of one GPU
    WORLD = "world"  # every rank's writer stores into every rank's copy: an exchange


class TensorKind(StrEnum):
    INPUT = "input"  # given by the caller
    OUTPUT = "output"  # read by the caller after the launch
    STATE = "state"  # kept by the caller over launches: a launch writes a part of it and leaves the rest
    INTERNAL = "internal"  # lives within the launch; needs a sync edge


class Tensor(Frozen):
    """An activation.

    ``shape`` is what one rank holds after any exchange; the leading dimension is the compiled maximum of
    tokens unless ``scope`` is BLOCK or it is a partial sum. For WORLD tensors ``shard_axis`` is the axis of
    which each rank writes ``shape[axis] / tp`` elements; ``reduce`` says that ranks' contributions are summed
    (the shape then has a leading axis of tp contributions); ``scatter``, that each rank receives only its slice of
    every contribution's last axis. For what stays on its rank (queries, caches) it is the
    axis along which the ranks' tensors, in rank order, make the whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    kind: TensorKind = TensorKind.INTERNAL
    scope: Scope = Scope.RANK
    shard_axis: int | None = None
    reduce: bool = False
    scatter: bool = False

    @property
    def elements(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def bytes(self) -> int:
        return int(self.elements * self.dtype.bits // 8)


class Shard(StrEnum):
    """Which axis of the checkpoint's [rows, k] matrix tensor parallelism cuts."""

    NONE = "none"
    ROWS = "rows"
    K = "k"


class Weight(Frozen):
    """A matrix or vector of the checkpoint, as one rank holds it.

    ``rows`` and ``k`` are rank-local; vectors have ``k`` = 1. ``experts`` is 0 for a plain weight, else the
    number of such matrices. ``gate_up`` marks [gate; up] stacked along rows: a rank takes the same slice of
    both halves. ``parts``: rows of a rank from each of several checkpoint matrices stacked along rows, one for each
    of ``names``. ``planes``: how many vectors :meth:`Op.pack_vector` makes of one. ``padding``: rows of zeros at the
    end of a rank's share, which the checkpoint does not have. ``names`` are the checkpoint's tensor names below the
    layer prefix, or with ``top`` whole ones. ``next_layer``: of the layer after the launch's own.

    ``local``: what a rank has on this weight's sharded side (its own rows, or its own K) never leaves the rank, so
    stand-ins have the very same there; else theirs is rotated, as their messages are. ``scattered``: its output is a
    sum of which each rank makes a slice and sends it on.
    """

    name: str
    rows: int
    k: int
    dtype: DType
    names: tuple[str, ...]
    shard: Shard = Shard.NONE
    experts: int = 0
    gate_up: bool = False
    parts: tuple[int, ...] = ()
    planes: int = 1
    local: bool = False
    scattered: bool = False
    next_layer: bool = False
    top: bool = False
    padding: int = 0

    @property
    def bytes_one(self) -> int:
        """Bytes of one matrix (one expert's, for expert weights)."""
        return int(self.rows * self.k * self.dtype.bits // 8)

    @property
    def bytes(self) -> int:
        return self.bytes_one * max(1, self.experts)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, where vectors are fp32 in ``planes``."""
        return 4 * self.rows * self.planes if self.k == 1 else self.bytes


class RoleSpec(Frozen):
    """A part of an op that one group of warps runs.

    ``warps``: the counts it accepts. ``align``: the first warp's index must divide by it (4 for a warpgroup).
    ``reads`` / ``writes``: ports (keys of ``Op.inputs`` and ``Op.outputs``, an op may read its own outputs).
    ``every_block``: runs in each block (block-scope outputs), else its tiles are spread over the blocks.
    ``stream``: loads the op's weight through the ring, or if it has none the tensors that the role reads; ``ahead``:
    waits for the launch before by itself, where that may have written what it reads; ``ring``: consumes the stream;
    ``accum``: 'out' hands accumulators to the op's reduce role through shared memory, 'in' takes them.
    ``hands_back``: ports of which it reads each element in one block only, and which it can empty for the next launch.
    ``regions``: purposes of :meth:`Op.shared` that it uses. ``fours``: its warps meet four at a time, each four at a
    named barrier. ``warpgroups``: its products can be those of whole warpgroups, which meet likewise. ``registers``:
    below this many a thread ptxas spills (seen in the op's own kernel on sm_90a); 0: any number will do.
    """

    name: str
    warps: tuple[int, ...]
    align: int = 1
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    every_block: bool = False
    stream: bool = False
    ahead: bool = False
    ring: bool = False
    accum: str | None = None
    hands_back: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    fours: bool = False
    warpgroups: bool = False
    registers: int = 0

    @property
    def meets(self) -> bool:
        """Whether all its warps share the op's scratch, and so meet at a barrier of their own. One alone needs none."""
        return "scratch" in self.regions and max(self.warps) > 1 and not self.fours

    @property
    def rehearsable(self) -> bool:
        """Whether a dry run of it changes nothing: the ring would lose what passes through it."""
        return not self.stream and not self.ring


class Cost(Frozen):
    """What an op must move and compute on one rank, for one launch.

    ``weight_bytes`` come from HBM; ``activation_bytes`` is input plus output, each once; ``operations`` are
    multiply-adds counted as two.
    """

    weight_bytes: int
    activation_bytes: int
    operations: int


Per = Literal["launch", "token", "expert"]


class Routing(Frozen):
    """What the cost of expert ops depends on: tokens in the launch and distinct experts they use."""

    tokens: int = 16
    experts: int = 49


class Op(Frozen, ABC):
    """One op of the graph. Concrete kinds live in :mod:`megagen.ops`, one file each."""

    kind: ClassVar[str]
    header: ClassVar[str]  # below include/megagen/
    struct: ClassVar[str]  # the C++ class template in that header: ops::<struct><Policy>

    name: str
    inputs: Mapping[str, str]  # port -> tensor name
    outputs: Mapping[str, str]
    weights: Mapping[str, Weight]

    @abstractmethod
    def roles(self) -> tuple[RoleSpec, ...]:
        """The roles of this op, in the order in which one warp would run them."""

    @abstractmethod
    def constants(self) -> dict[str, int | float]:
        """What the device policy struct needs, besides channels and pointers. Names are C++ identifiers."""

    @abstractmethod
    def publishes(self, role: str) -> tuple[int, Per]:
        """How many times ``role`` publishes its output over all blocks of a rank, per launch, token or used expert."""

    def sends(self, role: str) -> int | None:
        """Bytes of a row of a message that ``role`` makes on one rank; None: the row is the op's own matter."""
        return None

    @abstractmethod
    def cost(self, routing: Routing) -> Cost:
        """Bytes and operations of one launch on one rank."""

    @abstractmethod
    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The op in plain torch.

        ``env`` maps tensor names and weight names to tensors: activations with as many token rows as the
        launch has, weights as one whole (world-wide) dequantised matrix. ``dtype`` is torch.float32 for the
        reference or torch.bfloat16 for what the transformers bf16 model computes, rounding where it rounds.
        Returns tensor name -> value for every output that is not a partial sum.
        """

    def pack_vector(self, port: str, vector: torch.Tensor) -> torch.Tensor:
        """A vector of the checkpoint [rows] as the kernel reads it: fp32 [planes * rows]."""
        return vector.float()

    def shared(self) -> Mapping[str, int]:
        """Shared memory of the op's own, purpose -> bytes; the policy struct gets each offset as ``k<Purpose>``."""
        return {}

    def stage(self) -> Mapping[str, int] | None:
        """Shape of a ring stage of this op's stream, or None: rows, k, bytes, per_tile; held, if several at once."""
        return None

    @property
    def held(self) -> tuple[str, ...]:
        """Ports of outputs in which the next launch also reads what was there before, and for which L2 may be asked."""
        return ()

    @property
    def producer(self) -> RoleSpec | None:
        """The role that streams."""
        return next((r for r in self.roles() if r.stream), None)

    def role(self, name: str) -> RoleSpec:
        for r in self.roles():
            if r.name == name:
                return r
        raise KeyError(name)


class WeightHandle(NamedTuple):
    """A weight as a schedule names it: ``g.pooler.weight``."""

    op: str
    weight: Weight

    def __repr__(self) -> str:
        return f"g.{self.op}.{self.weight.name.rpartition('_')[2]}"  # weights are named <what>_<port>


class RoleHandle(NamedTuple):
    """A role as a schedule names it: ``g.pooler.reduce``."""

    op: str
    role: str

    def __repr__(self) -> str:
        return f"g.{self.op}.{self.role}"

    def __rshift__(self, reader: object) -> EdgeHandle:
        return EdgeHandle(self.op, self.role, *_end(reader))


class EdgeHandle(NamedTuple):
    """A hand-off as a schedule names it, ``g.pooler.reduce >> g.pooler.finish``; roles may be left out."""

    writer: str
    writer_role: str | None
    reader: str
    reader_role: str | None

    def __str__(self) -> str:
        ends = [f"{op}.{role}" if role else op for op, role in (self[:2], self[2:])]
        return " >> ".join(ends)

    def __repr__(self) -> str:
        return " >> ".join(f"g.{end}" for end in str(self).split(" >> "))


class OpHandle:
    """An op as a schedule names it: ``g.pooler``. Attributes are its weights and roles."""

    def __init__(self, op: Op) -> None:
        self._op = op

    def __repr__(self) -> str:
        return f"g.{self._op.name}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        op = self._op
        if name in op.weights:
            return WeightHandle(op.name, op.weights[name])
        roles = [r.name for r in op.roles()]
        if name == "roles":
            return tuple(roles)
        if name in roles:
            return RoleHandle(op.name, name)
        raise UnknownName(
            f"op {op.name!r} ({op.kind}) has no weight or role {name!r}",
            loc=here(name),
            hint=did_you_mean(name, [*op.weights, *roles]),
        )

    def __rshift__(self, reader: object) -> EdgeHandle:
        return EdgeHandle(self._op.name, None, *_end(reader))


def _end(reader: object) -> tuple[str, str | None]:
    if isinstance(reader, OpHandle):
        return reader._op.name, None
    if isinstance(reader, RoleHandle):
        return reader.op, reader.role
    raise ScheduleError(f"{reader!r} reads nothing", loc=here(), hint="an edge is g.<op>[.role] >> g.<op>[.role]")


class Graph(Frozen):
    """Ops in topological order with their tensors. ``tp`` ranks, at most ``tokens`` tokens a launch."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    tp: int
    tokens: int
    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]
    attributes: Mapping[str, Any] = {}

    def op(self, name: str) -> Op:
        for o in self.ops:
            if o.name == name:
                return o
        raise KeyError(name)

    def weights(self) -> dict[str, Weight]:
        """All weights by their unique name."""
        return {w.name: w for o in self.ops for w in o.weights.values()}

    @property
    def caches(self) -> bool:
        """Whether launches read or write keys, and so come after a context."""
        return any("keys" in ports for o in self.ops for ports in (o.inputs, o.outputs))

    def __contains__(self, op: object) -> bool:
        """Whether there is an op of that name."""
        return any(o.name == op for o in self.ops)

    def __getattr__(self, name: str) -> Any:
        # pydantic asks for private names of its own
        if name.startswith("_") or "ops" not in self.__dict__:
            return super().__getattr__(name)  # type: ignore[misc]
        for o in self.ops:
            if o.name == name:
                return OpHandle(o)
        raise UnknownName(
            f"graph {self.name!r} has no op {name!r}",
            loc=here(name),
            hint=did_you_mean(name, [o.name for o in self.ops]),
        )
