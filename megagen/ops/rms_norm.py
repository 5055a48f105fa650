"""RMSNorm of whole rows: bf16(x * rsqrt(mean(x^2) + eps) * (1 + w)), one final rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, DType, Op, Per, RoleSpec, Routing
from megagen.ops.row import group_scratch

if TYPE_CHECKING:
    import torch


class RmsNorm(Op):
    """Input ``in`` [tokens, width], fp32 (a launch input) or bf16; output ``out`` bf16 [tokens, width].

    ``centred``: the weight is counted from one, else it is the factor itself. ``round_input``: to bf16, first of all.
    """

    kind: ClassVar[str] = "rms_norm"
    header: ClassVar[str] = "ops/rms_norm.cuh"
    struct: ClassVar[str] = "RmsNorm"

    width: int
    eps: float
    in_dtype: DType
    centred: bool = True
    round_input: bool = False

    def roles(self) -> tuple[RoleSpec, ...]:
        return (RoleSpec(name="compute", warps=(8,), align=4, reads=("in",), writes=("out",), regions=("scratch",)),)

    def constants(self) -> dict[str, int | float]:
        return {
            "kWidth": self.width,
            "kEps": self.eps,
            "kCentred": int(self.centred),
            "kRoundInput": int(self.round_input),
        }

    def shared(self) -> Mapping[str, int]:
        return {"scratch": group_scratch(1)}

    def publishes(self, role: str) -> tuple[int, Per]:
        return 8, "token"  # each of its eight warps

    def cost(self, routing: Routing) -> Cost:
        t = routing.tokens
        return Cost(
            weight_bytes=self.weights["gain"].device_bytes,
            activation_bytes=int(t * self.width * (self.in_dtype.bits + 16) // 8),
            operations=4 * t * self.width,
        )

    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        from megagen.ops.reference import centred_norm, scaled_norm

        norm = centred_norm if self.centred else scaled_norm
        x = env[self.inputs["in"]].to(dtype)  # round_input is what the bf16 model does anyway
        return {self.outputs["out"]: norm(x, env[self.weights["gain"].name], self.eps)}
