"""What a kernel's time is made of: a part that is always there, and bytes at a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megagen.errors import MegagenError, did_you_mean

LEAST = {"context": 0, "experts": 1, "tokens": 1}  # what can be swept, and the least value
EXAMPLE = "--sweep experts=8,16,32"


@dataclass(frozen=True)
class Sweep:
    """What changes from launch to launch, and its values in ascending order."""

    name: str
    values: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """NAME=VALUE,VALUE,... Raises MegagenError for anything else, and for fewer than two values."""
        name, equals, rest = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise MegagenError(f"--sweep takes NAME=VALUE,VALUE,... and not {text!r}", hint=EXAMPLE)
        if name not in LEAST:
            raise MegagenError(f"--sweep {name}: no such thing to sweep", hint=did_you_mean(name, sorted(LEAST)))
        values = set()
        for item in rest.split(","):
            try:
                value = int(item)
            except ValueError:
                raise MegagenError(f"--sweep {name}: {item.strip()!r} is no whole number", hint=EXAMPLE) from None
            if value < LEAST[name]:
                raise MegagenError(f"--sweep {name}: {value} is less than {LEAST[name]}")
            values.add(value)
        if len(values) < 2:
            raise MegagenError(f"--sweep {name}: a line needs two values or more", hint=EXAMPLE)
        return cls(name, tuple(sorted(values)))


@dataclass(frozen=True)
class Fit:
    """``a`` µs + bytes * ``slope`` µs. ``deviations``: how much longer than that each point takes, of what it takes."""

    a: float
    slope: float
    deviations: tuple[float, ...]

    @property
    def rate(self) -> float | None:
        """Bytes per second, or None where time does not grow with bytes."""
        return 1e6 / self.slope if self.slope > 0 else None

    @property
    def worst(self) -> int:
        """The point that deviates most."""
        return max(range(len(self.deviations)), key=lambda i: abs(self.deviations[i]))


def fit(nbytes: Sequence[int], us: Sequence[float]) -> Fit:
    """The line with the least squares of relative deviations: short launches weigh as much as long ones.

    Raises MegagenError where all points have the same bytes.
    """
    import numpy as np

    if len(set(nbytes)) < 2:
        raise MegagenError("no line through points of one number of bytes", hint="sweep what changes the bytes")
    x, y = np.array(nbytes, dtype=float), np.array(us, dtype=float)
    middle, scale = x.mean(), np.ptp(x)
    centred = (x - middle) / scale  # or the columns would be nearly the same
    (at_middle, rise), *_ = np.linalg.lstsq(np.stack([1 / y, centred / y], axis=1), np.ones(len(y)), rcond=None)
    off = (y - at_middle - rise * centred) / y
    return Fit(float(at_middle - rise * middle / scale), float(rise / scale), tuple(off.tolist()))
