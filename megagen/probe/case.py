"""What a case is, what it yields, and when its readings are too noisy to lean on."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagen.machines import Figure

if TYPE_CHECKING:
    from megagen.probe.gpu import Gpu

LIMIT = 0.10  # of the median: how far p10 and p90 may be apart
DRIFT = 0.05  # of the median: how far the first and last third may be apart, if that is more than either spreads
THIRDS = 9  # readings: with fewer there are no thirds to compare


@dataclass(frozen=True)
class Sample:
    """Readings of one quantity in ``unit``, in the order in which they were taken.

    ``grain``: the step of the clock behind a reading, in ``unit``. Two equal intervals may differ by one step at each
    end, so a spread of two grains is no noise, however short the interval. ``zero``: whether the quantity may be none.
    """

    name: str
    unit: str
    values: Sequence[float]
    what: str
    grain: float = 0.0
    zero: bool = False


@dataclass(frozen=True)
class Case:
    """``measure`` takes the GPU and returns samples; its docstring says what, how, and what that decides.

    ``families``: files of ``templates/probe`` that it launches kernels of.
    """

    measure: Callable[[Gpu], list[Sample]]
    families: tuple[str, ...]
    gpus: int = 1

    @property
    def name(self) -> str:
        return self.measure.__name__

    @property
    def about(self) -> str:
        return inspect.cleandoc(self.measure.__doc__ or "")

    @property
    def title(self) -> str:
        return self.about.partition("\n")[0].rstrip(".")


def figure(sample: Sample) -> Figure:
    """The sample's median and deciles, and a verdict. Raises ValueError if it has no readings, or impossible ones."""
    values = list(sample.values)
    if not values:
        raise ValueError(f"{sample.name}: no readings")
    if statistics.median(values) == 0 and not sample.zero:
        raise ValueError(f"{sample.name}: 0 {sample.unit} cannot be")
    low, high = deciles(values)
    return Figure(
        value=tidy(statistics.median(values)),
        p10=tidy(low),
        p90=tidy(high),
        unit=sample.unit,
        runs=len(values),
        what=sample.what,
        noisy=noise(values, sample.grain),
    )


def noise(values: Sequence[float], grain: float = 0.0) -> str:
    """Why these readings are noisy, or nothing.

    Noisy: p10 and p90 are further apart than a tenth of the median and two grains. Drifting: the medians of the first
    and the last third are further apart than a twentieth of the median and two grains, and than the readings of either
    third spread: clocks moved, or somebody came or went. (The whole sample's spread would not do for that: a drift
    widens it by as much.)
    """
    median = statistics.median(values)
    low, high = deciles(values)
    if high - low > LIMIT * median + 2 * grain:
        return f"spread of {share(high - low, median)}"
    if len(values) >= THIRDS:
        n = len(values) // 3
        first, last = values[:n], values[-n:]
        moved = abs(statistics.median(last) - statistics.median(first))
        within = max(high - low for low, high in map(deciles, (first, last)))
        if moved > max(within, DRIFT * median + 2 * grain):
            return f"drift of {share(moved, median)}"
    return ""


def deciles(values: Sequence[float]) -> tuple[float, float]:
    """p10 and p90, interpolated."""
    if len(values) == 1:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%} of the median" if whole else "more than the median"


def tidy(value: float) -> float:
    """Five digits: more than any of it is good for."""
    return float(f"{value:.5g}")
