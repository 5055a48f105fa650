"""The second half of a two-shot all-reduce: a rank adds all ranks' contributions to its slice and sends it to all.

Added in fp32 in rank order and rounded to bf16 once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing

if TYPE_CHECKING:
    import torch

GROUP = 256  # elements that a warp adds at once, eight a lane


class RankSum(Op):
    """Input ``in`` bf16 [parts, tokens, width], a rank's slice of all contributions; output ``out`` bf16
    [tokens, parts * width], gathered over the ranks."""

    kind: ClassVar[str] = "rank_sum"
    header: ClassVar[str] = "ops/rank_sum.cuh"
    struct: ClassVar[str] = "RankSum"

    width: int
    parts: int

    def roles(self) -> tuple[RoleSpec, ...]:
        return (RoleSpec(name="sum", warps=(1,), reads=("in",), writes=("out",)),)

    def constants(self) -> dict[str, int | float]:
        return {"kWidth": self.width, "kParts": self.parts}

    def publishes(self, role: str) -> tuple[int, Per]:
        return self.width // GROUP, "token"

    def sends(self, role: str) -> int | None:
        return 2 * self.width

    def cost(self, routing: Routing) -> Cost:
        t = routing.tokens
        return Cost(
            weight_bytes=0, activation_bytes=4 * t * self.width * self.parts, operations=t * self.width * self.parts
        )

    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The contributions come summed: nothing but a rounding is left."""
        return {self.outputs["out"]: env[self.inputs["in"]].to(dtype)}
