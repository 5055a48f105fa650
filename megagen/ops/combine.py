"""Per-expert norm and weighted sum over a token's experts.

Input-scaled norm of each slot, before its routing weight: y = bf16(x * (1 + w)), n = bf16(y * rsqrt(mean(y^2) + eps));
out = bf16(sum over slots, ascending, of weight * n in fp32). Sharded-K contributions are summed first, in rank order.

A unit is a token's 256 columns, all slots. The measure role sends its sums of y^2, a slot each; the compute role adds
those of a row, in a tree over the pieces that its width alone decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing
from megagen.ops.row import PIECE

if TYPE_CHECKING:
    import torch


class Combine(Op):
    """Inputs: ``in`` bf16 [tokens, top_k, width] (or [parts, tokens, top_k, width]), ``routes``.
    Outputs: ``moments`` fp32 [tokens, width / 256, top_k], ``out`` bf16 [tokens, width]."""

    kind: ClassVar[str] = "combine"
    header: ClassVar[str] = "ops/combine.cuh"
    struct: ClassVar[str] = "Combine"

    width: int
    top_k: int
    eps: float
    parts: int = 1

    def roles(self) -> tuple[RoleSpec, ...]:
        return (
            RoleSpec(name="measure", warps=(8,), align=4, reads=("in", "table"), writes=("moments",), registers=96),
            RoleSpec(
                name="compute", warps=(8,), align=4, reads=("in", "routes", "table", "moments"), writes=("out",),
                registers=96,
            ),
        )  # fmt: skip

    def constants(self) -> dict[str, int | float]:
        return {"kWidth": self.width, "kTopK": self.top_k, "kEps": self.eps, "kParts": self.parts}

    def publishes(self, role: str) -> tuple[int, Per]:
        return self.width // PIECE, "token"

    def cost(self, routing: Routing) -> Cost:
        t = routing.tokens
        return Cost(
            weight_bytes=self.weights["gain"].device_bytes,
            activation_bytes=2 * t * self.width * (self.top_k * self.parts + 1),
            operations=8 * t * self.width * self.top_k,
        )

    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Terms and their sum are fp32 in both types, as in transformers' default (grouped) experts; its "eager"
        ones, which round every term and every sum to bf16, would allow more error."""
        from megagen.ops.reference import input_scaled_norm

        n = input_scaled_norm(env[self.inputs["in"]].to(dtype), env[self.weights["gain"].name], self.eps)
        terms = n * env[f"{self.inputs['routes']}.weights"].unsqueeze(-1)
        return {self.outputs["out"]: terms.sum(1).to(dtype)}
