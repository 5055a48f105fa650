"""Attention of a launch's tokens over a sliding window of cached keys, normed and gated: what o_proj multiplies.

The caches are rings of chunks of 64 numbers. Work unit: a chunk and four query heads that share it, whose keys and
values pass through the block's ring; each warp has a head and eight tokens. The attend role gives each token's softmax
over the chunk unnormalised; the merge role adds all slots that some token sees, even ones and odd ones in ascending
order, the odd sum to the even one. A token's chunks and their slots follow from absolute numbers alone, and what it
does not see leaves its sums as they were, so its bits do not depend on the launch that it comes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing

if TYPE_CHECKING:
    import torch

CHUNK = 64  # positions that a cache keeps together
PIECE = 8  # rows of a piece, each of 16 bytes: a core matrix of wgmma without swizzle, which ldmatrix reads as well


def slots(cache: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, tuple[slice | torch.Tensor, ...]]:
    """A view of a cache of keys (three axes) or values (four), and an index of it: what it has of these ``numbers``,
    int64 [n], counted around the ring. ``view[index]`` is [n, kv_heads, head_dim / 8, 8].

    A chunk is in pieces of 8 x 8 in a row each: of keys [64, head_dim], of values [head_dim, 64].
    """
    rows = cache.shape[-2] if cache.dim() == 4 else CHUNK  # of a chunk
    view = cache.view(len(cache), -1, rows // PIECE, CHUNK // PIECE, PIECE, PIECE)
    chunk, block, place = numbers // CHUNK % view.shape[1], numbers % CHUNK // PIECE, numbers % PIECE
    every = slice(None)
    if cache.dim() == 4:
        return view, (every, chunk, every, block, every, place)
    return view, (every, chunk, block, every, place, every)


def held(cache: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """What a cache has of these numbers: [kv_heads, n, head_dim]."""
    view, index = slots(cache, numbers)
    return view[index].flatten(2).transpose(0, 1)


def merge_scratch(head_dim: int) -> int:
    """Bytes of the sums of eight merging warps: two rounds, so that a fast warp overwrites nothing."""
    return 2 * 8 * head_dim * 4


class Attention(Op):
    """``heads`` and ``kv_heads`` are rank-local; a token sees ``window`` positions, its own included.

    Inputs: ``q`` and ``gate`` bf16 [tokens, heads * head_dim]; in the order of :func:`slots`, ``keys`` bf16 [kv_heads,
    chunks * 64, head_dim] and ``values`` bf16 [kv_heads, chunks, head_dim, 64]. Outputs: ``partials`` fp32 [chunks,
    heads, tokens, head_dim + 4], ``out`` bf16 [tokens, heads * head_dim].
    """

    kind: ClassVar[str] = "attention"
    header: ClassVar[str] = "ops/attention.cuh"
    struct: ClassVar[str] = "Attention"

    heads: int
    kv_heads: int
    head_dim: int = 64
    chunks: int
    window: int
    scale: float
    eps: float

    def roles(self) -> tuple[RoleSpec, ...]:
        return (
            RoleSpec(name="load", warps=(1,), reads=("keys", "values"), stream=True, ahead=True),
            RoleSpec(
                name="attend", warps=(8,), align=4, reads=("q",), writes=("partials",), ring=True, registers=136
            ),
            RoleSpec(
                name="merge", warps=(8,), align=4, reads=("partials", "gate"), writes=("out",),
                hands_back=("partials",), regions=("scratch",), fours=True, registers=96,
            ),
        )  # fmt: skip

    def constants(self) -> dict[str, int | float]:
        return {
            "kHeads": self.heads,
            "kKvHeads": self.kv_heads,
            "kChunks": self.chunks,
            "kWindow": self.window,
            "kScale": self.scale,
            "kEps": self.eps,
        }

    def stage(self) -> Mapping[str, int]:
        return {"rows": CHUNK, "k": self.head_dim, "bytes": 2 * CHUNK * self.head_dim * 2, "per_tile": 1}

    def shared(self) -> Mapping[str, int]:
        return {"scratch": merge_scratch(self.head_dim)}

    def publishes(self, role: str) -> tuple[int, Per]:
        return (self.chunks * self.heads * 2, "launch") if role == "attend" else (self.heads, "token")

    def cost(self, routing: Routing) -> Cost:
        """The window is full; what tokens share is read once."""
        t, d = routing.tokens, self.head_dim
        keys = self.window + t - 1
        return Cost(
            weight_bytes=0,
            activation_bytes=2 * keys * self.kv_heads * d * 2 + 3 * t * self.heads * d * 2,
            operations=4 * t * keys * self.heads * d,
        )

    def reference(self, env: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gives ``out``. Caches are whole; what no token sees in them may be anything.

        ``env["context"]``: tokens in the caches before the launch's; ``env["positions"]`` int64 [t];
        ``env["ancestors"]`` bool [t, t]: whether row i's token sees column j's.
        """
        import torch

        from megagen.ops.reference import plain_norm

        d = self.head_dim
        q = env[self.inputs["q"]].to(dtype).unflatten(1, (-1, d)).transpose(0, 1)  # [heads, t, d]
        t, context, device = q.shape[1], int(env["context"]), q.device
        first = max(0, context + 1 - self.window)
        number = torch.arange(first, context + t, device=device)
        groups = self.heads // self.kv_heads
        keys, values = (
            held(env[self.inputs[x]], number).to(dtype).repeat_interleave(groups, dim=0) for x in ("keys", "values")
        )
        seen = number + self.window > env["positions"].to(device)[:, None]
        seen[:, context - first :] = env["ancestors"].to(device)

        scores = (q @ keys.transpose(1, 2)) * self.scale
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)
        y = plain_norm((weights @ values).transpose(0, 1), self.eps).flatten(1)
        return {self.outputs["out"]: y * torch.sigmoid(env[self.inputs["gate"]].to(dtype))}
