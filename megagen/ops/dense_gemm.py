"""Dense GEMM of a few tokens: y = x W^T, weights streamed once through the ring.

Work unit: 16 rows x ``unit_k`` of K, in ring stages of ``stage_k``. Groups of 64 K are dealt to eight slices in turns,
slice s has those that begin at 64 (8 i + s). A slice's groups add up in the accumulators, slices in ascending order in
the reduce role, then units in ascending K in the finish role: a fixed tree, whatever the placement. Where one unit
spans K, the reduce role sends the result itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, DType, Op, Per, RoleSpec, Routing

if TYPE_CHECKING:
    import torch

ROW_BLOCK = 16  # rows of a unit: the M of an MMA
FORMATS = {DType.BF16: 0, DType.FP32: 1, DType.NVFP4: 2}  # WeightFormat of mma/format.cuh


class DenseGemm(Op):
    """``rows`` are rank-local, ``world_rows`` what all ranks make together.

    Inputs: ``in`` bf16 [tokens, k]. Outputs: ``partials`` fp32 [k / unit_k, rows / 16, tokens, 16], unless one unit
    spans K; and, unless ``partials_only``, ``out`` bf16: [tokens, world_rows], gathered over the ranks, or where K is
    sharded [tp, tokens, rows], the ranks' contributions to a sum.
    """

    kind: ClassVar[str] = "dense_gemm"
    header: ClassVar[str] = "ops/dense_gemm.cuh"
    struct: ClassVar[str] = "DenseGemm"

    rows: int
    world_rows: int
    k: int
    unit_k: int
    stage_k: int = 0  # 0: a unit is one stage
    partials_only: bool = False

    @property
    def direct(self) -> bool:
        """One unit spans K: there are no partial sums to add."""
        return "partials" not in self.outputs

    def roles(self) -> tuple[RoleSpec, ...]:
        sums = "out" if self.direct else "partials"
        roles = [
            RoleSpec(name="load_weights", warps=(1,), stream=True),
            RoleSpec(name="math", warps=(8,), align=4, reads=("in",), ring=True, accum="out", registers=96),
            RoleSpec(name="reduce", warps=(1, 2), accum="in", writes=(sums,), regions=tuple(self.shared())),
        ]
        if not self.partials_only and not self.direct:
            ports = ("partials",)
            roles.append(RoleSpec(name="finish", warps=(1,), reads=ports, writes=("out",), hands_back=ports))
        return tuple(roles)

    def constants(self) -> dict[str, int | float]:
        return {
            "kRows": self.rows,
            "kK": self.k,
            "kUnitK": self.unit_k,
            "kStageK": self.stage_k or self.unit_k,
            "kFormat": FORMATS[self.weights["weight"].dtype],
        }

    def stage(self) -> Mapping[str, int]:
        bits, k = self.weights["weight"].dtype.bits, self.stage_k or self.unit_k
        return {
            "rows": ROW_BLOCK,
            "k": k,
            "bytes": int(ROW_BLOCK * k * bits // 8),
            "per_tile": self.unit_k // k,
        }

    def shared(self) -> Mapping[str, int]:
        return {"outbox": 16 * ROW_BLOCK * 2} if self.direct else {}  # a row block of all tokens in bf16

    def publishes(self, role: str) -> tuple[int, Per]:
        blocks = self.rows // ROW_BLOCK
        return (blocks if role == "finish" else blocks * self.k // self.unit_k), "launch"

    def sends(self, role: str) -> int | None:
        return 2 * self.rows if role == "finish" or self.direct else 4 * ROW_BLOCK

    def cost(self, routing: Routing) -> Cost:
        t = routing.tokens
        out = 4 * t * self.rows if self.partials_only else 2 * t * self.world_rows
        return Cost(
            weight_bytes=self.weights["weight"].bytes,
            activation_bytes=2 * t * self.k + out,
            operations=2 * t * self.rows * self.k,
        )

    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gives ``out`` [tokens, world_rows], or fp32 [tokens, rows] under the name of ``partials`` when there is
        nothing else; fp32 weights (the router's) compute in fp32 whatever ``dtype`` is."""
        import torch
        from torch.nn.functional import linear

        weight = self.weights["weight"]
        compute = torch.float32 if weight.dtype is DType.FP32 else dtype
        y = linear(env[self.inputs["in"]].to(dtype).to(compute), env[weight.name].to(compute))
        return {self.outputs["partials"]: y.float()} if self.partials_only else {self.outputs["out"]: y}
