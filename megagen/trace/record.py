"""Device stamps to a Trace: what the warps of a launch wrote down, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megagen.errors import DeviceError
from megagen.ir.plan import Plan
from megagen.trace.offset import Drift
from megagen.trace.spans import LAUNCH, SPAN, Facts, Kind, Trace

if TYPE_CHECKING:
    import torch

# include/megagen/debug/stamp.cuh
HEADER = np.dtype(
    [
        ("timer", "<u8"), ("clock", "<u8"), ("timer_end", "<u8"), ("clock_end", "<u8"),
        ("asked", "<u4"), ("sm", "<u4"), ("ended", "<u4"), ("rest", "<u4", 5),
    ]
)  # fmt: skip
RECORD = np.dtype([("begin", "<u4"), ("end", "<u4"), ("what", "<u4"), ("slot", "<u4")])
OPENING = 0xFFF  # the step of what comes before a warp's program
NOTICED = {False: "256 ns", True: "512 cycles"}  # by whether cycles are stamped


def least_wait(plan: Plan) -> str:
    """What a wait must take for a kernel of the stamped Plan to write it."""
    assert plan.stamps is not None
    return NOTICED[plan.stamps.cycles]


@dataclass(frozen=True)
class Slots:
    """One rank's stamps of a launch: ``header`` HEADER [kernels, blocks, warps], ``records`` RECORD of one warp after
    the other, as many as were asked for, but no more than there was ``room`` for."""

    header: NDArray[np.void]
    records: NDArray[np.void]
    room: int

    @staticmethod
    def read(plan: Plan, raw: NDArray[np.uint8]) -> Slots:
        """``raw``: uint8 [plan.stamps.bytes]. Raises DeviceError for a warp that left nothing: it has not ended."""
        assert plan.stamps is not None
        shape = (len(plan.kernels), plan.launch.blocks, plan.launch.warps)
        slots = np.ascontiguousarray(raw).reshape(*shape, HEADER.itemsize + plan.stamps.records * RECORD.itemsize)
        header = slots[..., : HEADER.itemsize].copy().view(HEADER)[..., 0]
        if (header["ended"] == 0).any():
            kernel, block, warp = (int(i[0]) for i in np.nonzero(header["ended"] == 0))
            raise DeviceError(f"warp {warp} of block {block} of {plan.kernels[kernel].name} left no stamps")
        room = plan.stamps.records
        used = np.arange(room) < header["asked"][..., None]
        return Slots(header, slots[..., HEADER.itemsize :].copy().view(RECORD)[used], room)


@dataclass
class Recorder:
    """Collects launches of a stamped Plan. ``drifts``: how each rank's timer goes beside rank 0's, where it does not go
    with it."""

    plan: Plan
    drifts: Sequence[Drift] = ()
    launches: list[tuple[int, int, list[Slots]]] = field(default_factory=list)

    def add(self, layer: int, replay: int, stamps: Sequence[torch.Tensor]) -> None:
        """A completed launch: each rank's stamps (uint8 [plan.stamps.bytes], any device)."""
        self.launches.append((layer, replay, [Slots.read(self.plan, s.cpu().numpy()) for s in stamps]))

    def trace(self, facts: Facts) -> Trace:
        """All launches so far. Raises DeviceError when there are none."""
        if not self.launches:
            raise DeviceError("no launch was recorded")
        found: list[NDArray[np.void]] = []
        table = np.zeros(len(self.launches), LAUNCH)
        for index, (layer, replay, ranks) in enumerate(self.launches):
            spans, first, dropped = self._launch(index, ranks, self._rates(replay))
            spans["begin_ns"] -= first
            spans["end_ns"] -= first
            table[index] = (layer, replay, first, spans["end_ns"].max(initial=0), dropped)
            found.append(_narrow(spans))
        table["begin"] -= table["begin"].min()
        sms = np.array([[s.header["sm"][0, :, 0] for s in ranks] for _, _, ranks in self.launches]).astype("<u2")
        return Trace(facts, self.plan, table, sms, np.concatenate(found))

    def _rates(self, replay: int) -> list[Clocks] | None:
        """How each rank's SM clocks went during a replay; None where the timer itself is stamped."""
        assert self.plan.stamps is not None
        if not self.plan.stamps.cycles:
            return None
        of = [ranks for _, r, ranks in self.launches if r == replay]
        return [Clocks.fit([ranks[i].header for ranks in of]) for i in range(len(of[0]))]

    def _launch(
        self, index: int, ranks: Sequence[Slots], clocks: Sequence[Clocks] | None
    ) -> tuple[NDArray[np.void], int, int]:
        """A launch's spans with absolute times, sorted; when it began; how many spans found no room."""
        parts, first, dropped = [], [], 0
        for rank, slots in enumerate(ranks):
            shift = -round(self.drifts[rank].at(int(ranks[0].header["timer"].min()))) if self.drifts else 0
            room, asked = slots.room, slots.header["asked"]
            dropped += int(np.maximum(asked.astype("i8") - room, 0).sum())
            kernel, block, warp, place = np.nonzero(np.arange(room) < asked[..., None])
            r, h = slots.records, slots.header[kernel, block, warp]
            kind = r["what"] & 15
            step = r["what"] >> 4 & OPENING
            point = (kind == Kind.LOAD) | (kind == Kind.PREFETCH)
            ends = np.where(point, r["begin"], r["end"])
            if clocks is None:
                begin, end = (_near(h["timer"], t) + shift for t in (r["begin"], ends))
                first.append(int(slots.header["timer"].min()) + shift)
            else:
                begin, end = (clocks[rank].ns(h, t) + shift for t in (r["begin"], ends))
                first.append(int(clocks[rank].ns(slots.header, slots.header["clock"].astype("<u4")).min()) + shift)
            made = np.zeros(len(r), _WIDE)
            made["launch"], made["rank"], made["block"], made["warp"] = index, rank, block, warp
            made["step"], made["kind"], made["edge"], made["slot"] = step, kind, r["what"] >> 16, r["slot"]
            made["bytes"] = np.where(point, r["end"], 0)
            made["begin_ns"], made["end_ns"] = begin, end
            # A job is written when it ends: it comes before what it holds, whatever the timer's step.
            is_job = kind == Kind.JOB
            order = np.lexsort((place, ~is_job, np.cumsum(is_job) - is_job, kernel, warp, block))
            parts.append(made[order][made["step"][order] != OPENING])
        return np.concatenate(parts), min(first), dropped


@dataclass(frozen=True)
class Clocks:
    """The SMs' clocks of one GPU as its timer saw them: ns = ``rate`` * (clock - ``base``[SM]) + ``start``[SM]."""

    rate: float
    base: NDArray[np.int64]
    start: NDArray[np.float64]  # counted from origin, so that doubles hold it; NaN for SMs without blocks
    origin: int

    @staticmethod
    def fit(headers: Sequence[NDArray[np.void]]) -> Clocks:
        """By least squares over all warps' anchors, of one rate and a start for each SM."""
        h = np.concatenate([x.reshape(-1) for x in headers])
        origin = int(h["timer"].min())
        sm = np.concatenate([h["sm"], h["sm"]])
        timer = (np.concatenate([h["timer"], h["timer_end"]]) - np.uint64(origin)).astype("f8")
        whole = np.concatenate([h["clock"], h["clock_end"]]).astype("i8")
        base = np.full(int(sm.max()) + 1, np.iinfo("i8").max)
        np.minimum.at(base, sm, whole)
        clock = (whole - base[sm]).astype("f8")
        count = np.bincount(sm)
        with np.errstate(invalid="ignore"):
            mean_clock, mean_timer = (np.bincount(sm, x) / count for x in (clock, timer))
        x, y = clock - mean_clock[sm], timer - mean_timer[sm]
        if not (x * x).sum() > 0:
            raise DeviceError("the SMs' clocks stood still")
        rate = float((x * y).sum() / (x * x).sum())
        return Clocks(rate, base, mean_timer - rate * mean_clock, origin)

    def ns(self, header: NDArray[np.void], clock: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Times of clocks' low words, near the warp's first anchor."""
        sm = header["sm"]
        cycles = (_near(header["clock"], clock) - self.base[sm]).astype("f8")
        found: NDArray[np.int64] = np.rint(self.rate * cycles + self.start[sm]).astype("i8") + self.origin
        return found


_WIDE = np.dtype(
    [(n, SPAN[n]) for n in ("launch", "block", "step", "edge", "rank", "warp", "kind", "slot", "bytes")]
    + [("begin_ns", "<i8"), ("end_ns", "<i8")]
)


def _near(whole: NDArray[np.uint64], low: NDArray[np.uint32]) -> NDArray[np.int64]:
    """The 64-bit counts with these low words that are nearest to ``whole``."""
    found: NDArray[np.int64] = whole.astype("i8") + (low - whole.astype("<u4")).astype("<i4")
    return found


def _narrow(spans: NDArray[np.void]) -> NDArray[np.void]:
    made = np.zeros(len(spans), SPAN)
    for name in SPAN.names or ():
        made[name] = spans[f"{name}_ns" if name in ("begin", "end") else name]
    return made
