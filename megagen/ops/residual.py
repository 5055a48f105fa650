"""Norm and residual gate, s' = alpha * s + beta * n elementwise in fp32, and the norm of what comes out.

n is the norm of the branch's output: input-scaled where there is a gain, else weightless. With
w = gate / temperature, beta = sigmoid(w) and alpha = sqrt(max(sigmoid(-w) * (1 + beta), clamp)). Ranks' contributions
to the branch's output are summed first, in rank order. ``normed`` is the centred norm that the next op begins with.

A unit is a token's 256 columns, so that a row is spread over blocks. With n0 the branch's output times the gain, r the
first norm's factor and s' = alpha * s + beta * n0 * r, the second norm needs sum(s'^2) = m1 + 2 r m2 + r^2 m3: so both
norms follow from four sums that want neither, m0 = sum(n0^2), m1 = sum((alpha s)^2), m2 = sum(alpha s beta n0) and
m3 = sum((beta n0)^2), and a row is added up once (as SGLang's fused layer boundary does). The measure role sends a
unit's sums; the compute role adds those of a row, in a tree over the pieces that its width alone decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing
from megagen.ops.row import PIECE

if TYPE_CHECKING:
    import torch


class Residual(Op):
    """Inputs: ``in`` bf16 [tokens, width] (or [parts, tokens, width]), ``stream`` fp32 [tokens, width].

    Outputs: ``moments`` fp32 [tokens, width / 256, 4], ``out`` fp32 [tokens, width] and, with a weight ``next_gain``,
    ``normed`` bf16 [tokens, width]. Weights: ``gate``, and ``gain`` where the branch's norm is input-scaled.
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
            RoleSpec(name="measure", warps=(8,), align=4, reads=("in", "stream"), writes=("moments",), registers=112),
            RoleSpec(
                name="compute", warps=(8,), align=4, reads=("in", "stream", "moments"), writes=writes, registers=112
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

    def publishes(self, role: str) -> tuple[int, Per]:
        return self.width // PIECE, "token"

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
