"""The language model's last op: logits from the head's partial sums, and the token with the largest of them.

A logit is cap * tanh(multiplier / cap * x) in fp32, chunks of K added in ascending order. The largest logit wins, in
ties the lowest id; a NaN counts as less than any number. Each rank finds its own largest, in groups of 64 rows, and
tells all ranks, so that all choose the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing

if TYPE_CHECKING:
    import torch

ROWS = 64  # of a group
TURN = 16  # elements by which consecutive stand-ins' messages are rotated


def groups(rows: int) -> int:
    """Groups of a rank's rows, the last of which may be smaller."""
    return -(-rows // ROWS)


def bests(rows: int) -> int:
    """Words of a token's ``bests``: two a group, twice, so that a group's are 16 bytes."""
    return 4 * groups(rows)


def vote(tp: int) -> int:
    """Words of a rank's vote for a token: the same two over and over, which no rotation changes, and as many as
    rotating for the last of ``tp`` ranks takes."""
    return TURN * tp


class Choose(Op):
    """``rows`` are rank-local, the last ``padding`` of them no token's; ``chunks`` of the head's K; ``parts`` ranks.

    Input: ``partials`` fp32 [chunks, rows / 16, tokens, 16]. Outputs: ``logits`` fp32 [tokens, rows], minus infinity
    where there is padding; ``ids`` u32 [tokens]; and pairs of a logit's key (mem/row.cuh) and its row, ``bests`` u32
    [tokens, :func:`bests`] and ``votes`` u32 [tokens, parts * :func:`vote`].
    """

    kind: ClassVar[str] = "choose"
    header: ClassVar[str] = "ops/choose.cuh"
    struct: ClassVar[str] = "Choose"

    rows: int
    padding: int
    chunks: int
    parts: int
    multiplier: float
    cap: float

    def roles(self) -> tuple[RoleSpec, ...]:
        return (
            RoleSpec(
                name="score", warps=(8,), align=4, reads=("partials",), writes=("logits", "bests"),
                hands_back=("partials",), registers=72,
            ),
            RoleSpec(name="pick", warps=(1,), reads=("bests",), writes=("votes",), hands_back=("bests",)),
            RoleSpec(name="agree", warps=(1,), reads=("votes",), writes=("ids",)),
        )  # fmt: skip

    def constants(self) -> dict[str, int | float]:
        return {
            "kRows": self.rows,
            "kPadding": self.padding,
            "kChunks": self.chunks,
            "kParts": self.parts,
            "kMultiplier": self.multiplier / self.cap,
            "kCap": self.cap,
        }

    def publishes(self, role: str) -> tuple[int, Per]:
        return (groups(self.rows) if role == "score" else 1), "token"

    def sends(self, role: str) -> int | None:
        return {"score": 4 * bests(self.rows), "pick": 4 * vote(self.parts)}.get(role)

    def cost(self, routing: Routing) -> Cost:
        t = routing.tokens
        words = self.rows * (self.chunks + 1) + 2 * bests(self.rows) + 2 * vote(self.parts) * self.parts + 1
        return Cost(weight_bytes=0, activation_bytes=4 * t * words, operations=t * self.rows * (self.chunks + 4))

    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gives ``logits`` [tokens, vocabulary] and ``ids`` int64 [tokens]."""
        import torch

        # The steps of transformers, each rounded to dtype.
        x = env[self.inputs["partials"]].to(dtype) * self.multiplier
        logits = torch.tanh(x / self.cap) * self.cap
        return {self.outputs["logits"]: logits, self.outputs["ids"]: choice(logits)}


def choice(logits: torch.Tensor) -> torch.Tensor:
    """int64 [tokens]: of each row of ``logits`` the index of the largest, in ties the lowest; NaN is less than any."""
    import torch

    known = torch.where(logits.isnan(), -torch.inf, logits)
    return (known == known.amax(-1, keepdim=True)).int().argmax(-1)
