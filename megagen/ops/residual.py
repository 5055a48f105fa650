"""Post-FFN norm and residual gate: s' = alpha * s + beta * n, elementwise in fp32.

n is the input-scaled norm of the unpooler's output; with w = gate / temperature, beta = sigmoid(w) and
alpha = sqrt(max(sigmoid(-w) * (1 + beta), clamp)).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing
from megagen.ops.row import group_scratch

if TYPE_CHECKING:
    import torch


class Residual(Op):
    """Inputs: ``in`` bf16 [tokens, width], ``stream`` fp32 [tokens, width]; output ``out`` fp32 [tokens, width]."""

    kind: ClassVar[str] = "residual"
    header: ClassVar[str] = "ops/residual.cuh"
    struct: ClassVar[str] = "Residual"

    width: int
    eps: float
    temperature: float
    clamp: float

    def roles(self) -> tuple[RoleSpec, ...]:
        return (RoleSpec(name="compute", warps=(8,), align=4, reads=("in", "stream"), writes=("out",), registers=160),)

    def constants(self) -> dict[str, int | float]:
        return {"kWidth": self.width, "kEps": self.eps}

    def pack_vector(self, port: str, vector: torch.Tensor) -> torch.Tensor:
        """The gate becomes all alphas, then all betas: they depend on nothing else."""
        if port != "gate":
            return super().pack_vector(port, vector)
        import torch

        w = vector.float() / self.temperature
        beta = w.sigmoid()
        alpha = ((-w).sigmoid() * (1 + beta)).clamp(min=self.clamp).sqrt()
        return torch.cat((alpha, beta))

    def shared(self) -> Mapping[str, int]:
        return {"scratch": group_scratch(1)}

    def publishes(self, role: str) -> tuple[int, Per]:
        return 8, "token"  # each of its eight warps

    def cost(self, routing: Routing) -> Cost:
        t = routing.tokens
        return Cost(
            weight_bytes=self.weights["gain"].device_bytes + self.weights["gate"].device_bytes,
            activation_bytes=t * self.width * (2 + 4 + 4),
            operations=12 * t * self.width,
        )

    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The stream is rounded to ``dtype`` on both sides (the bf16 model keeps it in bf16); the gate is fp32."""
        import torch

        from megagen.ops.reference import input_scaled_norm

        n = input_scaled_norm(env[self.inputs["in"]].to(dtype), env[self.weights["gain"].name], self.eps)
        w = env[self.weights["gate"].name].float() / self.temperature
        beta = torch.sigmoid(w)
        alpha = torch.sqrt(torch.clamp(torch.sigmoid(-w) * (1 + beta), min=self.clamp))
        return {self.outputs["out"]: (alpha * env[self.inputs["stream"]].to(dtype) + beta * n).to(dtype)}
