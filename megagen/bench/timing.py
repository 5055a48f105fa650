"""Times of variants, taken in turns so that clocks and heat treat them alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megagen.errors import DeviceError

MIN_LAYERS = 8  # fewer weight sets would be found in L2 again
PRIME_CYCLES = 400_000  # about 0.2 ms: long enough for the host to queue a whole replay behind it


@dataclass(frozen=True)
class Variant:
    """``replay`` runs ``layers`` distinct layers in the current stream (a CUDA graph's replay).

    ``before``, called with the sample's number outside of the timed stretch, changes the routing.
    """

    name: str
    replay: Callable[[], None]
    layers: int
    before: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Timing:
    """µs per layer over ``samples`` replays of a variant, or what :func:`host` says."""

    name: str
    median: float
    p10: float
    p90: float
    samples: int

    @staticmethod
    def of(name: str, samples: Sequence[float]) -> Timing:
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return Timing(name, statistics.median(samples), deciles[0], deciles[-1], len(samples))


def interleave(
    variants: Sequence[Variant],
    *,
    rounds: int = 50,
    warmup: int = 5,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """What :func:`sample` finds, of each variant."""
    found = sample(variants, rounds=rounds, warmup=warmup, seed=seed, progress=progress)
    return {name: Timing.of(name, times) for name, times in found.items()}


def sample(
    variants: Sequence[Variant],
    *,
    rounds: int = 50,
    warmup: int = 5,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Time every variant once a round, in an order drawn anew each round; the first ``warmup`` rounds do not count.

    µs per layer of each variant, round by round. The GPU spins before each sample until the host has queued it, so
    launch latency is not timed. ``progress`` is called after each round. Raises DeviceError for a variant of fewer than
    8 layers (L2 would hold its weights).
    """
    import torch

    for v in variants:
        if v.layers < MIN_LAYERS:
            raise DeviceError(f"{v.name} replays {v.layers} layers: fewer than {MIN_LAYERS} distinct ones stay in L2")
    rng = random.Random(seed)
    samples: dict[str, list[float]] = {v.name: [] for v in variants}
    for index in range(warmup + rounds):
        pending = []
        for v in rng.sample(list(variants), len(variants)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if v.before is not None:
                v.before(index)
            torch.cuda._sleep(PRIME_CYCLES)
            start.record()
            v.replay()
            end.record()
            pending.append((v, start, end))
        torch.cuda.synchronize()
        if index >= warmup:
            for v, start, end in pending:
                samples[v.name].append(start.elapsed_time(end) * 1e3 / v.layers)
        progress()
    return samples


def paired(name: str, times: Sequence[float], base: Sequence[float]) -> Timing:
    """How much longer than ``base`` something takes: what is alike in a round (its routing, the clocks) drops out."""
    return Timing.of(name, [time - other for time, other in zip(times, base, strict=True)])


def host(
    name: str,
    work: Callable[[], object],
    settle: Callable[[], object],
    *,
    rounds: int = 50,
    warmup: int = 5,
    progress: Callable[[], None] = lambda: None,
) -> Timing:
    """µs that ``work`` keeps the host; ``settle`` brings all to rest after it. The first ``warmup`` do not count."""
    samples = []
    for index in range(warmup + rounds):
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        settle()
        if index >= warmup:
            samples.append(took * 1e6)
        progress()
    return Timing.of(name, samples)
