"""How far the timers of several GPUs are apart: a ball goes to and fro, and both sides write down when.

The one that serves sees it leave at a and come back at b, the other sees it at c. If both ways take as long, the timer
of the other is ahead by c - (a + b) / 2; whatever they take, that is wrong by at most (b - a) / 2.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megagen import resources
from megagen.errors import DeviceError
from megagen.settings import Settings

KERNEL = "timer_offset"
ROUNDS = 2000
SKIPPED = 100  # the first ones: the other side has to begin, and code has to come
TIMEOUT_NS = 500_000_000
QUICKEST = 0.25  # share of rounds that count


@dataclass(frozen=True)
class Offset:
    """When the first timer showed ``at_ns``, the other was ``ns`` ahead of it, give or take ``error_ns`` at most; balls
    took ``round_trip_ns``."""

    at_ns: int
    ns: float
    error_ns: float
    round_trip_ns: float

    @staticmethod
    def of(served: NDArray[np.int64], returned: NDArray[np.int64]) -> Offset:
        """``served``, ``returned``: ns [rounds, 2], by each side's own timer. The quickest rounds count: what delays a
        ball on one way makes it late. Raises DeviceError where rounds were not played."""
        if not (served.all() and returned.all()):
            raise DeviceError("two GPUs did not hear from each other while their timers were compared")
        away = served[:, 1] - served[:, 0]
        ahead = returned[:, 0] - served[:, 0] - away / 2
        quick = away <= np.quantile(away, QUICKEST)
        middle = int(served[len(served) // 2, 0])
        return Offset(middle, float(np.mean(ahead[quick])), float(away[quick].max()) / 2, float(np.median(away)))


@dataclass(frozen=True)
class Drift:
    """Two measurements, and what lies between: timers drift evenly for as long as a recording takes."""

    before: Offset
    after: Offset

    def at(self, timer_ns: int) -> float:
        """How far the other timer is ahead when the first shows ``timer_ns``."""
        took = self.after.at_ns - self.before.at_ns
        share = (timer_ns - self.before.at_ns) / took if took else 0.0
        return self.before.ns + share * (self.after.ns - self.before.ns)

    @property
    def error_ns(self) -> float:
        return max(self.before.error_ns, self.after.error_ns)


def source() -> str:
    """The text of the kernel that plays."""
    return (resources.templates() / "trace" / "offset.cu").read_text()


def parameters(mine: int, other: int, times: int, *, serves: bool, rounds: int, timeout_ns: int = TIMEOUT_NS) -> bytes:
    """The kernel's parameter block; addresses are device addresses."""
    return struct.pack("<3Q3I4x", mine, other, times, serves, rounds, timeout_ns)


def measure(devices: Sequence[int], arch: str, settings: Settings) -> list[Offset]:
    """How far each GPU's timer is ahead of the first one's. They must reach each other's memory (runtime/group.py)."""
    import torch

    from megagen.compile import compile_source
    from megagen.runtime.driver import Geometry, Module, ParameterBlock

    path = compile_source(source(), kernels=[KERNEL], archs=[arch], settings=settings)[arch].path
    found = [Offset(0, 0.0, 0.0, 0.0)]
    for other in devices[1:]:
        pair = (devices[0], other)
        balls, times, kernels = [], [], []
        for device in pair:
            with torch.cuda.device(device):
                balls.append(torch.zeros(64, dtype=torch.int32, device=f"cuda:{device}"))
                times.append(torch.zeros(SKIPPED + ROUNDS, 2, dtype=torch.int64, device=f"cuda:{device}"))
                geometry = Geometry(blocks=1, threads=32, cluster=1, shared=0, pdl=False)
                kernels.append(Module(path).kernel(KERNEL, geometry))
                torch.cuda.synchronize(device)
        for side, device in enumerate(pair):
            with torch.cuda.device(device):
                block = parameters(
                    balls[side].data_ptr(),
                    balls[1 - side].data_ptr(),
                    times[side].data_ptr(),
                    serves=side == 0,
                    rounds=SKIPPED + ROUNDS,
                )
                kernels[side].launch(ParameterBlock(block), torch.cuda.current_stream(device).cuda_stream)
        for device in pair:
            torch.cuda.synchronize(device)
        served, returned = (t[SKIPPED:].cpu().numpy() for t in times)
        found.append(Offset.of(served, returned))
    return found
