"""What a step begins with: each token's row of the embedding, its weightless norm as the residual stream, and the first
layer's input norm of that.

The stream is bf16(x * rsqrt(mean(x^2) + eps)), kept in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing
from megagen.ops.row import group_scratch

if TYPE_CHECKING:
    import torch


class Embed(Op):
    """Input ``ids`` u32 [tokens], whose rows of ``table`` bf16 [vocab, width] are taken; one outside of it takes the
    last row. Outputs: ``out`` fp32 [tokens, width] and ``normed`` bf16 [tokens, width], by ``next_gain``.
    """

    kind: ClassVar[str] = "embed"
    header: ClassVar[str] = "ops/embed.cuh"
    struct: ClassVar[str] = "Embed"

    vocab: int
    width: int
    eps: float

    def roles(self) -> tuple[RoleSpec, ...]:
        return (
            RoleSpec(
                name="compute", warps=(8,), align=4, reads=("ids",), writes=("out", "normed"), regions=("scratch",)
            ),
        )

    def constants(self) -> dict[str, int | float]:
        return {"kVocab": self.vocab, "kWidth": self.width, "kEps": self.eps}

    def shared(self) -> Mapping[str, int]:
        return {"scratch": group_scratch(1)}

    def publishes(self, role: str) -> tuple[int, Per]:
        return 8, "token"  # each of its eight warps

    def cost(self, routing: Routing) -> Cost:
        t = routing.tokens
        return Cost(
            weight_bytes=2 * t * self.width + self.weights["next_gain"].device_bytes,  # the tokens' rows alone
            activation_bytes=t * (4 + self.width * (4 + 2)),
            operations=7 * t * self.width,
        )

    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        from megagen.ops.reference import centred_norm, plain_norm

        table = env[self.weights["table"].name]
        ids = env[self.inputs["ids"]].to(table.device).long()
        out = plain_norm(table[ids].to(dtype), self.eps)
        normed = centred_norm(out, env[self.weights["next_gain"].name], self.eps)
        return {self.outputs["out"]: out, self.outputs["normed"]: normed}
