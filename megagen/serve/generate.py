"""The loop: a prompt in chunks, then a token a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter

from megagen.errors import MegagenError
from megagen.serve.decoding import Decoding
from megagen.serve.sampling import GREEDY, Sampling, sample


class Stop(StrEnum):
    """Why there are no more tokens."""

    TOKEN = "stop token"
    LENGTH = "max_new_tokens"
    FULL = "caches full"


@dataclass(frozen=True)
class Token:
    """``text``: what became complete with it. ``stop``: of the last token of a run, why it is the last."""

    id: int
    stop: Stop | None = None
    text: str = ""


@dataclass
class Meter:
    """Times of a run, in seconds. ``steps``: in the decoder and in choosing the token, of each token after the first;
    ``others``: what else passed between the one before and it."""

    prompt: int = 0
    prefill: float = 0.0
    decode: float = 0.0
    steps: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def statistics(self, decoder: Mapping[str, float]) -> dict[str, float]:
        """Rates are as delivered: with whatever the taker of the tokens did between two."""
        found: dict[str, float] = {
            "prompt_tokens": self.prompt,
            "new_tokens": len(self.steps) + 1,
            "prefill_s": self.prefill,
            "prefill_tokens_per_s": self.prompt / max(self.prefill, 1e-9),
        }
        if self.steps:
            ordered, step = sorted(self.steps), statistics.median(self.steps)
            found |= {
                "decode_s": self.decode,
                "decode_tokens_per_s": len(self.steps) / max(self.decode, 1e-9),
                "step_ms": step * 1e3,
                "step_ms_p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3,
                "host_us": statistics.median(self.others) * 1e6,
            }
            if floor := decoder.get("floor_s"):
                found["floor_ratio"] = step / floor
        return {**found, **decoder}


def budget(ids: Sequence[int], max_new_tokens: int | None, vocab: int, positions: int) -> int:
    """How many tokens may follow ``ids``. Raises MegagenError for a request that cannot be met.

    The last token is never run, so caches of ``positions`` numbers leave room for one more than that.
    """
    if not ids:
        raise MegagenError("an empty prompt: there is nothing to continue", hint="one token at least")
    if bad := [i for i in ids if not 0 <= i < vocab]:
        raise MegagenError(f"token {bad[0]} of the prompt: the vocabulary has {vocab:,}", hint=f"0 to {vocab - 1}")
    room = positions - len(ids) + 1
    if room < 1:
        raise MegagenError(
            f"a prompt of {len(ids):,} tokens: the caches hold {positions:,}", hint=f"a context of {len(ids):,} or more"
        )
    if max_new_tokens is None:
        return room
    if max_new_tokens < 1:
        raise MegagenError(f"{max_new_tokens} new tokens", hint="1 or more")
    if max_new_tokens > room:
        raise MegagenError(
            f"a prompt of {len(ids):,} tokens and {max_new_tokens:,} new ones: the caches hold {positions:,}",
            hint=f"a context of {len(ids) + max_new_tokens - 1:,}, or at most {room:,} new tokens",
        )
    return max_new_tokens


def generate(
    decoding: Decoding,
    ids: Sequence[int],
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling = GREEDY,
    stop: Collection[int] = (),
    meter: Meter | None = None,
    proceed: Callable[[int], bool] = lambda made: True,
) -> Iterator[Token]:
    """What follows ``ids``, up to a token of ``stop``, ``max_new_tokens`` or (None) the end of the caches.

    ``proceed`` is asked before every step, with the number of tokens made so far, and ends the run with False.
    Raises MegagenError before anything runs; see :func:`budget`.
    """
    ids = list(ids)
    wanted = budget(ids, max_new_tokens, decoding.vocab, decoding.positions)
    end = Stop.FULL if max_new_tokens is None else Stop.LENGTH
    return _run(decoding, ids, wanted, end, sampling, frozenset(stop), meter or Meter(), proceed)


def _run(
    decoding: Decoding,
    ids: Sequence[int],
    wanted: int,
    end: Stop,
    sampling: Sampling,
    stop: frozenset[int],
    meter: Meter,
    proceed: Callable[[int], bool],
) -> Iterator[Token]:
    position = len(ids)
    meter.prompt, began = position, perf_counter()
    for start in range(0, position, decoding.most):
        if not proceed(0):
            return
        best = decoding.step(ids[start : start + decoding.most], start)
    for made in range(1, wanted + 1):
        token = best[-1] if sampling.greedy else sample(decoding.logits()[-1], sampling, position)
        chosen = perf_counter()
        if made == 1:
            meter.prefill, first = chosen - began, chosen
        else:
            meter.steps.append(chosen - began)
            meter.decode = chosen - first
        reason = Stop.TOKEN if token in stop else end if made == wanted else None
        yield Token(token, reason)
        if reason is not None or not proceed(made):
            return
        began = perf_counter()
        meter.others.append(began - chosen)
        best = decoding.step([token], position)
        position += 1
