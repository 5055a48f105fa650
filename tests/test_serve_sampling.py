"""Sampling against a model of its own in float64, against the distribution it promises, and at its edges."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from megagen.errors import DeviceError, MegagenError
from megagen.serve.sampling import Sampling, sample, uniform

KNOWN = [
    0.0564663990004608,
    0.44008326622012284,
    0.6487508310490744,
    0.8855916890489005,
]  # of (0, 0), (0, 1), (1, 0), (2**64 - 1, 100_000)


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """id -> probability, likeliest first: the definition, in float64 and plain loops."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    order = order[: top_k or None]
    weights = [math.exp((float(logits[i]) - float(logits[order[0]])) / temperature) for i in order]
    total, mass, kept = math.fsum(weights), 0.0, []
    for i, w in zip(order, weights, strict=True):
        if kept and mass >= top_p:
            break
        kept.append((i, w / total))
        mass += w / total
    return {i: p / mass for i, p in kept}


def drawn(found: dict[int, float], u: float) -> tuple[int, float]:
    """The inverse of the distribution function at u, and how near u is to where the answer changes."""
    reach = 0.0
    for i, p in found.items():
        if u < reach + p:
            return i, min(u - reach, reach + p - u)
        reach += p
    return i, 0.0


def test_against_the_definition() -> None:
    rng, dice, compared = np.random.default_rng(1), random.Random(1), 0
    for case in range(400):
        vocab = dice.choice([1, 2, 7, 50, 3000])
        logits = (rng.normal(size=vocab) * dice.choice([0.1, 3, 20])).astype(np.float32)
        if dice.random() < 0.3:
            logits = np.round(logits)  # many ties
        temperature, top_k = dice.choice([0.2, 0.7, 1.0, 3.0]), dice.choice([0, 2, 5, 40, 10_000])
        top_p = dice.choice([1.0, 0.95, 0.6, 0.1])
        found = distribution(logits, temperature, top_k, top_p)
        got = sample(torch.from_numpy(logits), Sampling(temperature, top_k, top_p, seed=case), case * 3)
        if top_k == 1:
            assert got == int(np.argmax(logits))
            continue
        wanted, margin = drawn(found, uniform(case, case * 3))
        assert got in found
        if margin > 1e-9:
            compared += 1
            assert got == wanted, (case, vocab, temperature, top_k, top_p)
    assert compared > 380


def chi_square(counts: dict[int, int], wanted: dict[int, float], n: int) -> float:
    """In standard deviations from what it should be, cells of less than five together."""
    cells = [(counts.get(i, 0), p * n) for i, p in wanted.items()]
    big = [c for c in cells if c[1] >= 5]
    small = [c for c in cells if c[1] < 5]
    if sum(e for _, e in small) >= 5:
        big.append((sum(o for o, _ in small), sum(e for _, e in small)))
    value = sum((o - e) ** 2 / e for o, e in big)
    return (value - (len(big) - 1)) / math.sqrt(2 * max(1, len(big) - 1))


@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_are_distributed_as_promised(by: str) -> None:
    n = 6000
    logits = torch.randn(24, generator=torch.Generator().manual_seed(3)) * 2
    wanted = distribution(logits.numpy(), 0.8, 16, 0.97)
    counts: dict[int, int] = {}
    for i in range(n):
        seed, position = (i, 11) if by == "seed" else (11, i)
        got = sample(logits, Sampling(0.8, 16, 0.97, seed), position)
        counts[got] = counts.get(got, 0) + 1
    assert set(counts) <= set(wanted)
    assert chi_square(counts, wanted, n) < 4
    for other in ((0.7, 16, 0.97), (0.8, 16, 0.8), (0.8, 0, 1.0)):  # and it would have been noticed
        off = distribution(logits.numpy(), *other)
        assert set(counts) - set(off) or chi_square(counts, off, n) > 4


def test_uniform_numbers() -> None:
    """Of (seed, position) alone: these values must never change. Spread evenly, and neighbours are unrelated."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(2**64 - 1, 100_000)] == pytest.approx(KNOWN, abs=1e-15)
    grid = np.array([[uniform(s, p) for p in range(100)] for s in range(100)])
    assert grid.min() >= 0 and grid.max() < 1
    for pair in (grid, np.mod(grid[1:] - grid[:-1], 1), np.mod(grid[:, 1:] - grid[:, :-1], 1)):
        counts = dict(enumerate(np.histogram(pair, 20, (0, 1))[0].tolist()))
        assert chi_square(counts, dict.fromkeys(range(20), 1 / 20), pair.size) < 4


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0, 40, 0.5), Sampling(5.0, top_k=1)])
def test_greedy_is_the_lowest_of_the_largest(sampling: Sampling) -> None:
    for seed in range(50):
        logits = torch.randint(0, 4, (500,), generator=torch.Generator().manual_seed(seed)).float()
        assert sample(logits, sampling, seed) == int(np.argmax(logits.numpy()))
    assert sampling.greedy


def test_edges() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0, -50.0])
    seeds = range(200)
    assert {sample(logits, Sampling(1.0, top_p=1e-9, seed=s), 0) for s in seeds} == {1}  # keeps one, always
    assert {sample(logits, Sampling(1.0, top_k=2, seed=s), 0) for s in seeds} == {1, 2}
    assert {sample(logits, Sampling(1.0, top_k=10**6, seed=s), 0) for s in seeds} == {0, 1, 2, 3}
    assert {sample(logits, Sampling(1e30, seed=s), 0) for s in seeds} == {0, 1, 2, 3, 4}  # evenly
    assert {sample(logits, Sampling(1e-300, seed=s), 0) for s in seeds} == {1, 2}  # a tie stays one
    assert {sample(torch.tensor([7.0]), Sampling(1.0, seed=s), 0) for s in range(5)} == {0}
    everything = torch.zeros(202_048)  # sums stay exact and in range
    assert sample(everything, Sampling(1.0, seed=0), 0) == int(uniform(0, 0) * 202_048)
    assert {sample(torch.tensor([-1e38, 3e38]), Sampling(1.0, seed=s), 0) for s in range(5)} == {1}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, top_k=1), Sampling(1.0, top_k=3, top_p=0.5)])
def test_logits_that_are_no_numbers_are_refused(bad: float, sampling: Sampling) -> None:
    logits = torch.randn(100)
    logits[60] = bad
    with pytest.raises(DeviceError, match="position 17 are not finite"):
        sample(logits, sampling, 17)


@pytest.mark.parametrize(
    "given",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0},
     {"top_p": 1.1}, {"top_p": math.nan}, {"seed": -1}, {"seed": 2**64}],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(MegagenError):
        Sampling(**given)  # type: ignore[arg-type]
