"""Attention of a launch's tokens over all that came before them, normed and gated: what o_proj multiplies.

A cache grows with its sequence: number n stands in chunk n // 64, at place n % 64. It is cut into spans, short ones
first and longer ones further on, so that a long sequence has a few hundred at most. Work unit: a kv head and a span.
Its keys and values come from HBM once, through the block's ring, two chunks a stage; each warp of the attend role
folds them into one query head's sums, chunk by chunk in ascending order. The merge role adds the spans, even ones and
odd ones in ascending order, the odd sum to the even one. Chunks and spans follow from absolute numbers, and what a
token does not see leaves its sums as they were, so its bits do not depend on the launch that it comes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from megagen.errors import ScheduleError, here
from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing
from megagen.ops.attention import CHUNK, held, merge_scratch

if TYPE_CHECKING:
    import torch

FIRST_SPANS, FIRST_SPAN = 64, 256  # so many spans at the beginning have so many numbers each
OCTAVE_SPANS = 32  # from there on, each doubling of the sequence is cut into so many
MOST = 1 << 20  # numbers of a cache
STAGE_CHUNKS = 2  # a stage of the ring holds so many chunks of keys, then as many of values


def span(i: int) -> tuple[int, int]:
    """First number and length of span ``i``."""
    if i < FIRST_SPANS:
        return i * FIRST_SPAN, FIRST_SPAN
    octave, j = divmod(i - FIRST_SPANS, OCTAVE_SPANS)
    base = FIRST_SPANS * FIRST_SPAN << octave
    return base + j * (base // OCTAVE_SPANS), base // OCTAVE_SPANS


def span_of(number: int) -> int:
    """The span that ``number`` is in."""
    base = FIRST_SPANS * FIRST_SPAN
    if number < base:
        return number // FIRST_SPAN
    octave = (number // base).bit_length() - 1
    return FIRST_SPANS + octave * OCTAVE_SPANS + ((number >> octave) - base) // (base // OCTAVE_SPANS)


def spans(capacity: int) -> int:
    """Spans that ``capacity`` numbers are cut into; the last one may be cut short."""
    return span_of(capacity - 1) + 1


class GlobalAttention(Op):
    """``heads`` and ``kv_heads`` are rank-local; a cache holds ``capacity`` numbers.

    Inputs: ``q`` and ``gate`` bf16 [tokens, heads * head_dim]; in the order of :func:`megagen.ops.attention.slots`,
    ``keys`` bf16 [kv_heads, capacity, head_dim] and ``values`` bf16 [kv_heads, capacity / 64, head_dim, 64]. Outputs:
    ``partials`` fp32 [spans, heads, tokens, head_dim + 4], ``out`` bf16 [tokens, heads * head_dim].
    """

    kind: ClassVar[str] = "global_attention"
    header: ClassVar[str] = "ops/global_attention.cuh"
    struct: ClassVar[str] = "GlobalAttention"

    heads: int
    kv_heads: int
    head_dim: int = 64
    capacity: int
    scale: float
    eps: float

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.heads % self.kv_heads or self.heads // self.kv_heads not in (1, 2, 4, 8):
            raise ScheduleError(
                f"{self.name}: {self.heads} heads on {self.kv_heads} of keys and values",
                loc=here(),
                hint="1, 2, 4 or 8 query heads share one of keys and values",
            )
        if self.capacity % (STAGE_CHUNKS * CHUNK) or not 0 < self.capacity <= MOST:
            raise ScheduleError(
                f"{self.name}: a cache of {self.capacity:,} numbers",
                loc=here(),
                hint=f"a multiple of {STAGE_CHUNKS * CHUNK}, at most {MOST:,}",
            )
        return self

    def roles(self) -> tuple[RoleSpec, ...]:
        return (
            RoleSpec(name="load", warps=(1,), reads=("keys", "values"), stream=True, ahead=True),
            RoleSpec(
                name="attend", warps=(8,), align=4, reads=("q",), writes=("partials",), ring=True, warpgroups=True,
                registers=184,
            ),
            RoleSpec(
                name="merge", warps=(8,), align=4, reads=("partials", "gate"), writes=("out",),
                hands_back=("partials",), regions=("scratch",), fours=True, registers=112,
            ),
        )  # fmt: skip

    def constants(self) -> dict[str, int | float]:
        return {
            "kHeads": self.heads,
            "kKvHeads": self.kv_heads,
            "kCapacity": self.capacity,
            "kSpans": spans(self.capacity),
            "kScale": self.scale,
            "kEps": self.eps,
        }

    def shared(self) -> Mapping[str, int]:
        return {"scratch": merge_scratch(self.head_dim)}

    def stage(self) -> Mapping[str, int]:
        rows = STAGE_CHUNKS * CHUNK
        return {"rows": rows, "k": self.head_dim, "bytes": 2 * rows * self.head_dim * 2, "per_tile": 1, "held": 2}

    def publishes(self, role: str) -> tuple[int, Per]:
        return (spans(self.capacity) * self.heads, "launch") if role == "attend" else (self.heads, "token")

    def cost(self, routing: Routing) -> Cost:
        """The cache is full; what tokens share is read once. Keys and values are activations, though they come from
        HBM: the floor is that of the weights."""
        t, d = routing.tokens, self.head_dim
        return Cost(
            weight_bytes=0,
            activation_bytes=2 * self.capacity * self.kv_heads * d * 2 + 3 * t * self.heads * d * 2,
            operations=4 * t * self.capacity * self.heads * d,
        )

    def reference(self, env: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gives ``out``. Caches are whole; what no token sees in them may be anything.

        ``env["context"]``: tokens in the caches before the launch's; ``env["ancestors"]`` bool [t, t]: whether row
        i's token sees column j's.
        """
        import torch

        from megagen.ops.reference import plain_norm

        d = self.head_dim
        q = env[self.inputs["q"]].to(dtype).unflatten(1, (-1, d)).transpose(0, 1)  # [heads, t, d]
        t, context = q.shape[1], int(env["context"])
        end, groups = context + t, self.heads // self.kv_heads
        number = torch.arange(end, device=q.device)
        keys, values = (
            held(env[self.inputs[x]], number).to(dtype).repeat_interleave(groups, dim=0) for x in ("keys", "values")
        )
        seen = torch.ones(t, end, dtype=torch.bool, device=q.device)
        seen[:, context:] = env["ancestors"].to(q.device)

        scores = ((q @ keys.transpose(1, 2)) * self.scale).masked_fill(~seen, -torch.inf)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)
        y = plain_norm((weights @ values).transpose(0, 1), self.eps).flatten(1)
        return {self.outputs["out"]: y * torch.sigmoid(env[self.inputs["gate"]].to(dtype))}
