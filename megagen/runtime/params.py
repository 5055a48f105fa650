"""The kernel's parameter block: ``megagen::System`` by value, then one device pointer per parameter of the Plan."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from megagen.errors import DeviceError
from megagen.ir.graph import DType
from megagen.ir.plan import ParamPlan, Plan

ALIGNMENT = 256  # bytes; bulk copies need 16, whole sectors and lines are faster
MAX_LIVE = 8
MAX_TIMEOUT_MS = 4000
STEP_TOKENS = 16  # the most that the control words describe
CONTROL_WORDS = 64  # u32: [0] tokens of the launch, then by name (include/megagen/types.cuh)
CONTROL_CONTEXT = 1  # tokens in the caches before
CONTROL_POSITIONS = 16  # of each token
CONTROL_ANCESTORS = 32  # of each token: a bit for every token of the launch that it sees
TORCH_NAMES = {DType.FP32: "float32", DType.BF16: "bfloat16", DType.U32: "int32"}

_SYSTEM = struct.Struct(f"<{MAX_LIVE}Q {MAX_LIVE}Q QQ IIII Q QQ II")


@dataclass(frozen=True)
class System:
    """``megagen::System`` (include/megagen/types.cuh), 192 bytes. Addresses are device addresses.

    ``control``: u32[64]. ``route_override``: i32[16][top_k], -1 keeps the router's choice; 0 for none.
    ``timeout_ms``: bound of every wait, 0 for none. ``stamps``: where a stamped kernel writes them. ``code``: address
    and bytes of the kernel's machine code, ``next_code``: of another one's that is launched next.
    """

    heaps: Sequence[int]  # of each live rank
    aborts: Sequence[int]  # of each live rank's abort word
    control: int
    route_override: int
    rank: int
    live: int
    world: int
    timeout_ms: int
    stamps: int = 0
    code: tuple[int, int] = (0, 0)
    next_code: tuple[int, int] = (0, 0)

    def pack(self) -> bytes:
        if not 1 <= self.live <= MAX_LIVE or self.world % self.live or not 0 <= self.rank < self.live:
            raise DeviceError(f"rank {self.rank} of {self.live} live ranks in a world of {self.world} is impossible")
        if not 0 <= self.timeout_ms <= MAX_TIMEOUT_MS:
            raise DeviceError(
                f"a timeout of {self.timeout_ms} ms: the device counts nanoseconds in 32 bits",
                hint=f"0 to {MAX_TIMEOUT_MS} ms",
            )
        if len(self.heaps) != self.live or len(self.aborts) != self.live:
            raise DeviceError(f"{len(self.heaps)} heaps and {len(self.aborts)} abort words for {self.live} live ranks")
        rest = [0] * (MAX_LIVE - self.live)
        addresses = (*self.heaps, *rest, *self.aborts, *rest)
        numbers = (self.rank, self.live, self.world, self.timeout_ms * 1_000_000)
        code = (self.code[0], self.next_code[0], self.code[1], self.next_code[1])
        return _SYSTEM.pack(*addresses, self.control, self.route_override, *numbers, self.stamps, *code)


def pointers(plan: Plan) -> tuple[ParamPlan, ...]:
    """The parameters that are device pointers, in the order of the block."""
    return tuple(p for p in plan.params if p.what != "system")


def pack(plan: Plan, system: System, addresses: Mapping[str, int]) -> bytes:
    """The block's bytes. ``addresses`` has the device address of every pointer parameter."""
    values = [addresses[p.name] for p in pointers(plan)]
    return system.pack() + struct.pack(f"<{len(values)}Q", *values)


def positions(plan: Plan) -> int | None:
    """How many positions the table of rotations has, or a growing cache, whichever is less; None without either."""
    tables = {o.tensors.get("rotary") for o in plan.ops if o.kind == "qkv_heads"}
    found = [p.shape[0] for p in plan.params if p.name in tables]
    if (most := numbers(plan)) is not None:
        found.append(most)
    return min(found, default=None)


def numbers(plan: Plan) -> int | None:
    """How many numbers its growing caches hold; None without one."""
    found = [int(op.constants["kCapacity"]) for op in plan.ops if op.kind == "global_attention"]
    found += [int(op.constants["kRing"]) for op in plan.ops if op.kind == "qkv_heads" and not op.constants["kRotate"]]
    return min(found, default=None)


@dataclass(frozen=True)
class Expected:
    """What a tensor bound to a parameter must be; ``dtype`` is torch's name for it."""

    bytes: int
    dtype: str
    what: str


def expected(plan: Plan) -> dict[str, Expected]:
    """Expected tensors by parameter name. Packed tiles are bytes, weights' vectors fp32, the rest as the Plan says."""
    weights = {w.parameter: w for w in plan.weights}
    found = {}
    for p in pointers(plan):
        weight = weights.get(p.name)
        if weight is not None and weight.layout == "tiles":
            found[p.name] = Expected(weight.bytes, "uint8", p.what)
            continue
        vector = weight is not None and weight.layout == "vector"
        dtype = DType.FP32 if vector or p.dtype is None else p.dtype
        found[p.name] = Expected(prod(p.shape) * int(dtype.bits) // 8, TORCH_NAMES[dtype], p.what)
    return found
