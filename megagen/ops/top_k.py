"""Routing: logits to the top-k experts of each token, and the tables that expert ops work from.

p = sigmoid(logits * multiplier); the k experts with the largest p + bias, ties to the lowest id; weights are the
unbiased p over their sum. A NaN score counts as the smallest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing

if TYPE_CHECKING:
    import torch


class TopK(Op):
    """Inputs: ``logits``, the router's partial sums. Outputs: ``routes`` u32 [tokens, 2 * k], the k ids followed
    by the k weights' fp32 bits; ``table``, block scope: used experts ascending with their (token, slot) lists.
    """

    kind: ClassVar[str] = "top_k"
    header: ClassVar[str] = "ops/top_k.cuh"
    struct: ClassVar[str] = "TopK"

    experts: int
    k: int
    chunks: int  # partial sums per logit
    multiplier: float
    eps: float
    scale: float

    def roles(self) -> tuple[RoleSpec, ...]:
        return (
            RoleSpec(
                name="select", warps=(1,), reads=("logits",), writes=("routes",), hands_back=("logits",),
                regions=("scratch",),
            ),
            RoleSpec(name="tables", warps=(1,), reads=("routes",), writes=("table",), every_block=True),
        )  # fmt: skip

    def constants(self) -> dict[str, int | float]:
        return {
            "kExperts": self.experts,
            "kTopK": self.k,
            "kChunks": self.chunks,
            "kMultiplier": self.multiplier,
            "kSumEps": self.eps,
            "kScale": self.scale,
        }

    def shared(self) -> Mapping[str, int]:
        return {"scratch": 4 * (3 * self.k + self.experts)}  # the k ids, twice, k weights, and all probabilities

    def publishes(self, role: str) -> tuple[int, Per]:
        return 1, "token"

    def sends(self, role: str) -> int | None:
        return 8 * self.k if role == "select" else None

    def cost(self, routing: Routing) -> Cost:
        t = routing.tokens
        return Cost(
            weight_bytes=self.weights["bias"].device_bytes,
            activation_bytes=4 * t * (self.experts + 2 * self.k),
            operations=t * self.experts * 4,
        )

    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gives ``<routes>.ids`` int64 and ``<routes>.weights`` fp32, both [tokens, k], best expert first; the ids
        again under the name of ``table``, whose content they determine.

        ``env["route_override"]``, if there, is an int tensor [tokens, k] of ids to use instead, -1 to keep.
        """
        import torch

        p = torch.sigmoid(env[self.inputs["logits"]].float() * self.multiplier)
        score = p + env[self.weights["bias"].name].float()
        score = torch.where(score.isnan(), -torch.inf, score)
        ids = score.sort(dim=-1, descending=True, stable=True).indices[:, : self.k]  # stable: ties to the lowest id
        if "route_override" in env:
            override = env["route_override"][: len(ids)].to(ids)
            ids = torch.where(override < 0, ids, override)
        chosen = p.gather(1, ids)
        weights = chosen / (chosen.sum(-1, keepdim=True) + self.eps) * self.scale
        routes = self.outputs["routes"]
        return {f"{routes}.ids": ids, f"{routes}.weights": weights, self.outputs["table"]: ids}
