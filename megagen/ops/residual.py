"""Norm and residual gate, s' = alpha * s + beta * n elementwise in fp32, and the norm of what comes out.

n is the norm of the branch's output: input-scaled where there is a gain, else weightless. With
w = gate / temperature, beta = sigmoid(w) and alpha = sqrt(max(sigmoid(-w) * (1 + beta), clamp)). Ranks' contributions
to the branch's output are summed first, in rank order. ``normed`` is the centred norm that the next op begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing
from megagen.ops.row import group_scratch

if TYPE_CHECKING:
    import torch


class Residual(Op):
    """Inputs: ``in`` bf16 [tokens, width] (or [parts, tokens, width]), ``stream`` fp32 [tokens, width].

    Outputs: ``out`` fp32 [tokens, width] and, with a weight ``next_gain``, ``normed`` bf16 [tokens, width]. Weights:
    ``gate``, and ``gain`` where the branch's norm is input-scaled.
    """

    kind: ClassVar[str] = "residual"
    header: ClassVar[str] = "ops/residual.cuh"
    struct: ClassVar[str] = "Residual"

    width: int
    eps: float
    temperature: float
    clamp: float
    parts: int = 1
    next_eps: float = 0.0

    def roles(self) -> tuple[RoleSpec, ...]:
        writes = ("out", "normed") if "normed" in self.outputs else ("out",)
        return (
            RoleSpec(
                name="compute", warps=(8,), align=4, reads=("in", "stream"), writes=writes, hands_back=("stream",),
                regions=("scratch",), registers=160,
            ),
        )  # fmt: skip

    def constants(self) -> dict[str, int | float]:
        found: dict[str, int | float] = {"kWidth": self.width, "kEps": self.eps, "kParts": self.parts}
        return found | ({"kNextEps": self.next_eps} if "normed" in self.outputs else {})

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
            weight_bytes=sum(w.device_bytes for w in self.weights.values()),
            activation_bytes=t * self.width * (2 * self.parts + 4 + 4 + (2 if "normed" in self.outputs else 0)),
            operations=(12 + self.parts) * t * self.width,
        )

    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The stream is rounded to ``dtype`` on both sides (the bf16 model keeps it in bf16); the gate is fp32."""
        import torch

        from megagen.ops.reference import centred_norm, input_scaled_norm, plain_norm

        y = env[self.inputs["in"]].to(dtype)
        gain = self.weights.get("gain")
        n = plain_norm(y, self.eps) if gain is None else input_scaled_norm(y, env[gain.name], self.eps)
        w = env[self.weights["gate"].name].float() / self.temperature
        beta = torch.sigmoid(w)
        alpha = torch.sqrt(torch.clamp(torch.sigmoid(-w) * (1 + beta), min=self.clamp))
        out = (alpha * env[self.inputs["stream"]].to(dtype) + beta * n).to(dtype)
        if "normed" not in self.outputs:
            return {self.outputs["out"]: out}
        normed = centred_norm(out, env[self.weights["next_gain"].name], self.next_eps)
        return {self.outputs["out"]: out, self.outputs["normed"]: normed}
