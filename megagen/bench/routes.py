"""Route tables that replace the router's choice in benches and tests: int32 [tokens, top_k] on the host."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megagen.errors import MegagenError

if TYPE_CHECKING:
    import torch

EXPERTS, TOP_K = 256, 8  # of Muse Spark


def routes(
    experts: int,
    tokens: int,
    top_k: int = TOP_K,
    seed: int = 0,
    *,
    max_per_expert: int = 8,
    pool: int = EXPERTS,
    previous: Sequence[int] = (),
    overlap: float | None = None,
) -> torch.Tensor:
    """A table with exactly ``experts`` distinct ids out of ``pool``, ``top_k`` distinct ones a token.

    ``experts`` = ``top_k`` sends all tokens to the same experts; at most ``tokens`` * ``top_k`` and ``pool``. No expert
    has more than ``max_per_expert`` tokens unless so few experts force the load up (then it is as even as can be).
    ``overlap`` is the share of the ids that are among ``previous``, rounded to whole experts. The same seed gives
    the same table. Raises MegagenError for what cannot be had.
    """
    slots = tokens * top_k
    if not top_k <= experts <= min(pool, slots):
        hint = f"{top_k} to {min(pool, slots)} are possible"
        raise MegagenError(f"{experts} distinct experts for {tokens} tokens of {top_k}", hint=hint)
    rng = random.Random(seed)
    chosen = _choose(rng, experts, pool, set(previous), overlap)
    cap = max(max_per_expert, -(-slots // experts))  # never over `tokens`, as experts >= top_k
    load = [1] * experts
    for _ in range(slots - experts):
        open_ = [e for e in range(experts) if load[e] < min(cap, tokens)]
        load[rng.choice(open_)] += 1
    # Dealing each expert's tokens in turn gives no token the same expert twice (load <= tokens), and each top_k.
    dealt = [expert for expert, n in zip(chosen, load, strict=True) for _ in range(n)]
    return _table([dealt[t::tokens] for t in range(tokens)], rng)


def most_used(table: torch.Tensor, top: int) -> list[int]:
    """The ``top`` ids that most tokens have, as a kernel remembers them: of two alike the lower one."""
    load = Counter(int(e) for e in table.flatten().tolist())
    return sorted(load, key=lambda e: (-load[e], e))[:top]


class Draws:
    """The routing of samples one after the other, by number.

    ``top``: as many experts as a kernel guesses by the sample before, of which a share ``guessed`` is used again,
    rounded to whole ones; 0: each table is drawn for itself.
    """

    def __init__(self, experts: int, tokens: int, top_k: int, *, pool: int, top: int = 0, guessed: float = 0.5) -> None:
        self.experts, self.tokens, self.top_k, self.pool = experts, tokens, top_k, pool
        self.top, self.guessed = top, guessed
        self._drawn: list[torch.Tensor] = []

    def __getitem__(self, sample: int) -> torch.Tensor:
        while len(self._drawn) <= sample:
            before = most_used(self._drawn[-1], self.top) if self._drawn and self.top else []
            right = round(self.guessed * len(before))
            self._drawn.append(
                routes(
                    self.experts, self.tokens, self.top_k, len(self._drawn), pool=self.pool, previous=before,
                    overlap=right / self.experts if before else None,
                )
            )  # fmt: skip
        return self._drawn[sample]


def shared_one(tokens: int, top_k: int = TOP_K, seed: int = 0, *, pool: int = EXPERTS) -> torch.Tensor:
    """One expert used by all tokens, all other ids distinct: 113 experts for 16 tokens."""
    if 1 + tokens * (top_k - 1) > pool:
        raise MegagenError(f"{tokens} tokens cannot have {top_k - 1} experts each of their own out of {pool}")
    rng = random.Random(seed)
    shared, *own = rng.sample(range(pool), 1 + tokens * (top_k - 1))
    return _table([[shared, *own[t::tokens]] for t in range(tokens)], rng)


def distinct(table: torch.Tensor) -> list[int]:
    """The expert ids in a table, ascending."""
    return sorted({int(e) for e in table.flatten().tolist()})


def _choose(rng: random.Random, experts: int, pool: int, previous: set[int], overlap: float | None) -> list[int]:
    if overlap is None:
        return rng.sample(range(pool), experts)
    if not 0 <= overlap <= 1:
        raise MegagenError(f"an overlap of {overlap} is not a share")
    kept = round(overlap * experts)
    others = sorted(set(range(pool)) - previous)
    if kept > len(previous) or experts - kept > len(others):
        raise MegagenError(f"{experts} experts cannot share {kept} with a table of {len(previous)} out of {pool}")
    chosen = rng.sample(sorted(previous), kept) + rng.sample(others, experts - kept)
    rng.shuffle(chosen)
    return chosen


def _table(rows: list[list[int]], rng: random.Random) -> torch.Tensor:
    """Rows, and ids within a row, in random order."""
    import torch

    rng.shuffle(rows)
    return torch.tensor([rng.sample(row, len(row)) for row in rows], dtype=torch.int32)
