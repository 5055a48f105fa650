"""A projection's sums to a layer's queries, gates, keys and values: norm, scale, rotation, and the write to the caches.

Chunks of K are added in ascending order; everything is fp32 until the one rounding at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing

if TYPE_CHECKING:
    import torch

HEAD_DIM = 64


class QkvHeads(Op):
    """``heads`` and ``kv_heads`` are rank-local, the projection's rows are q, k, v and gate heads; ``chunks`` of its K;
    a cache holds ``ring`` numbers; queries are scaled by ``scale``.

    Inputs: ``partials`` fp32 [chunks, rows / 16, tokens, 16] and, if it is to ``rotate``, ``rotary`` fp32
    [positions, 64]: 32 cosines, 32 sines. Outputs: ``q`` and ``gate`` bf16 [tokens, heads * 64]; of the caches ``keys``
    bf16 [kv_heads, ring, 64] and ``values`` bf16 [kv_heads, ring / 64, 64, 64] the launch's own tokens, in the order of
    :func:`megagen.ops.attention.slots`.
    """

    kind: ClassVar[str] = "qkv_heads"
    header: ClassVar[str] = "ops/qkv_heads.cuh"
    struct: ClassVar[str] = "QkvHeads"

    heads: int
    kv_heads: int
    chunks: int
    ring: int
    eps: float
    scale: float
    rotate: bool

    def roles(self) -> tuple[RoleSpec, ...]:
        reads = ("partials", "rotary") if self.rotate else ("partials",)
        return (
            RoleSpec(
                name="write", warps=(8,), align=4, reads=reads, writes=("q", "gate", "keys", "values"),
                hands_back=("partials",), registers=80,
            ),
        )  # fmt: skip

    def constants(self) -> dict[str, int | float]:
        return {
            "kHeads": self.heads,
            "kKvHeads": self.kv_heads,
            "kChunks": self.chunks,
            "kRing": self.ring,
            "kEps": self.eps,
            "kScale": self.scale,
            "kRotate": int(self.rotate),
        }

    @property
    def held(self) -> tuple[str, ...]:
        return ("keys", "values") if self.rotate else ()  # what grows comes through the ring, and would fill L2

    @property
    def rows(self) -> int:
        return 2 * (self.heads + self.kv_heads) * HEAD_DIM

    def publishes(self, role: str) -> tuple[int, Per]:
        return 2 * (self.heads + self.kv_heads), "token"

    def cost(self, routing: Routing) -> Cost:
        t = routing.tokens
        rotated = (self.heads + self.kv_heads) * HEAD_DIM
        return Cost(
            weight_bytes=0,
            activation_bytes=t * self.rows * (4 * self.chunks + 2) + (4 * t * HEAD_DIM if self.rotate else 0),
            operations=t * (self.rows * self.chunks + rotated * (7 if self.rotate else 4)),
        )

    def reference(self, env: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gives ``q`` and ``gate`` [t, heads * 64] and, under the names of the caches, the rows [t, kv_heads * 64] of
        the launch's tokens. ``env["positions"]``: int64 [t]."""
        import torch

        from megagen.ops.reference import plain_norm

        y = env[self.inputs["partials"]].to(dtype)
        parts = [self.heads, self.kv_heads, self.kv_heads, self.heads]
        share = y.shape[1] // sum(parts)  # of a head here: all ranks have the same number of heads
        q, k, v, gate = y.split([n * share for n in parts], dim=1)

        def heads(x: torch.Tensor) -> torch.Tensor:
            return plain_norm(x.unflatten(1, (-1, HEAD_DIM)), self.eps)

        def turn(x: torch.Tensor) -> torch.Tensor:
            if not self.rotate:
                return x.flatten(1)
            table = env[self.inputs["rotary"]]
            table = table[env["positions"].to(table.device)].to(x.device, dtype)[:, None]
            cosine, sine = (half.repeat(1, 1, 2) for half in table.chunk(2, dim=-1))
            low, high = x.chunk(2, dim=-1)
            turned: torch.Tensor = x * cosine + torch.cat((-high, low), dim=-1) * sine
            return turned.flatten(1)

        out = self.outputs
        return {
            out["q"]: turn(heads(q) * self.scale), out["gate"]: gate, out["keys"]: turn(heads(k)), out["values"]: v,
        }  # fmt: skip


def rotary(positions: int, head_dim: int = HEAD_DIM, theta: float = 500_000.0) -> torch.Tensor:
    """fp32 [positions, head_dim]: of each position the cosines, then the sines, as transformers computes them."""
    import torch

    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)
    angles = torch.arange(positions).float().unsqueeze(1) * inv_freq
    return torch.cat([angles.cos(), angles.sin()], dim=1)
