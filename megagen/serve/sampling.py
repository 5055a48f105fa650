"""The next token from its logits: greedy, or drawn so that every rank, and every run with that seed, draws the same.

Sums of floating-point numbers depend on their order, which a GPU does not promise. So weights become integers: exp of
the distance to the largest logit, in units of vocab / 2**62, rounded down. Their sums are exact, whoever adds them.
What is less likely than the likeliest token by more than that (2**44 for 202,048 tokens) is never drawn.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagen.errors import DeviceError, MegagenError

if TYPE_CHECKING:
    import torch

SEEDS = 1 << 64
_SUM_BITS = 62  # of all weights together, in 63 bits


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0, or ``top_k`` 1, takes the token with the largest logit, the lowest id among equals.

    Otherwise: the ``top_k`` most likely (0: all; the lower id of equals), softmax of logits / temperature over those,
    then the fewest of the likeliest whose probabilities sum to ``top_p``. Raises MegagenError for other values.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise MegagenError(f"a temperature of {self.temperature}", hint="0 (greedy) or more, and finite")
        if self.top_k < 0:
            raise MegagenError(f"top_k {self.top_k}", hint="a number of tokens; 0 keeps all")
        if not 0 < self.top_p <= 1:
            raise MegagenError(f"top_p {self.top_p}", hint="more than 0, at most 1")
        if not 0 <= self.seed < SEEDS:
            raise MegagenError(f"seed {self.seed}", hint="0 or more, below 2**64")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


GREEDY = Sampling()


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that draws the token at ``position``: of these two alone, 53 bits of a BLAKE2b hash."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def sample(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """The id of the token at ``position``, from its logits [vocab]: the inverse of the distribution function at
    :func:`uniform`, tokens in order of falling probability, equals in order of their ids.

    Raises DeviceError for logits that are not finite.
    """
    import torch

    values, order = torch.sort(logits, descending=True, stable=True)
    kept = 1 if sampling.greedy else min(sampling.top_k or len(values), len(values))
    shift = _SUM_BITS - (len(values) - 1).bit_length()
    best = values[:kept].double()
    distance = (best - best[0]) / (sampling.temperature or 1.0)
    weights = (distance.exp() * 2.0**shift).long()
    sums = weights.cumsum(0)
    before = (sums - weights).double()
    inside = before < sums[-1].double() * sampling.top_p  # the first is, whatever top_p
    total = sums[inside.sum() - 1]
    drawn = (total.double() * uniform(sampling.seed, position)).long().clamp(max=total - 1)
    place = torch.searchsorted(sums, drawn, right=True).clamp(max=kept - 1)  # of what is not finite, too
    token, fine = torch.stack([order[place], torch.isfinite(logits).all().long()]).tolist()  # one wait for the device
    if not fine:
        raise DeviceError(f"logits of the token at position {position} are not finite", hint="damaged weights?")
    return int(token)
