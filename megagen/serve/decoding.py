"""What a decoder can do, as far as this room needs to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Decoding(Protocol):
    """A model on one rank, with its caches. All ranks of a group make the same calls in the same order."""

    @property
    def vocab(self) -> int: ...

    @property
    def positions(self) -> int:
        """Numbers that the caches hold."""

    @property
    def most(self) -> int:
        """Tokens that a step takes."""

    def step(self, ids: Sequence[int], context: int) -> list[int]:
        """Run ``ids`` as a chain after ``context`` numbers: for each, the id with the largest logit after it."""

    def logits(self) -> torch.Tensor:
        """Of the last step, fp32 [its tokens, vocab], those of all ranks, on the decoder's device."""

    def statistics(self) -> Mapping[str, float]:
        """Of a step; the loop knows ``floor_s``, the rest is passed on as it is."""

    def close(self) -> None: ...
