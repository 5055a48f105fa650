"""What memory and L2 deliver to bulk loads of all SMs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from megagen.probe.case import Sample
from megagen.probe.gpu import BARRIERS, KB, Gpu
from megagen.runtime.driver import Kernel

RINGS = ((1, 32), (2, 32), (3, 32), (5, 32), (4, 16), (8, 16))  # stages, KB
LAUNCHES = (48, 99, 242)  # MB, as the stretches of a sliding-window layer
ROW = 8  # launches of a graph
CUT = 48  # MB of each
SHARES = (("quarter", 1, 4), ("two_thirds", 2, 3))  # of L2
FEW, MANY = 8, 64  # passes over what is in L2
LOAD = 32 * KB


def stream(gpu: Gpu, stages: int, stage: int) -> Kernel:
    return gpu.kernel("stream", "probe_stream", shared=BARRIERS + stages * stage)


def usual(gpu: Gpu) -> tuple[int, int]:
    """A ring of five stages of 32 KB, or as many as there is room for."""
    return gpu.ring(5 * LOAD, LOAD), LOAD


def part(gpu: Gpu, size: int) -> int:
    """A block's share of so many bytes."""
    return size // gpu.sms // 128 * 128


def hbm(gpu: Gpu) -> list[Sample]:
    """What memory delivers: a steady stream by depth of the ring, and launches that read 48, 99 and 242 MB.

    Every SM reads its own stretch of a 4 GB buffer by bulk loads into a ring in shared memory; nothing reads what
    lands. A launch alone is timed by events around it: they, the launch, its ramp and its last loads are in it. A cut
    is what one of eight launches in a graph takes beyond its bytes at the best steady rate. None of it is in a cache.

    Decides the floor that times are judged by, how deep a ring must be, and what cutting work into launches costs.
    """
    share = part(gpu, gpu.size)
    streams: dict[str, Callable[[], object]] = {}
    for stages, kb in RINGS:
        if stages * kb * KB + BARRIERS > gpu.shared:
            continue
        streams[f"{stages}x{kb}kb"] = _launch(gpu, gpu.data.data_ptr(), share, stages, kb * KB)
    rates = {
        name: [share * gpu.sms / t / 1e6 for t in times] for name, times in gpu.time(streams, gpu.runs(31)).items()
    }
    streamed = f"{share * gpu.sms / 1e9:.2f} GB streamed through a ring of"
    found = [
        Sample(f"hbm_ring_{name}_tb_s", "TB/s", values, f"{streamed} {name.replace('kb', ' KB')} a SM")
        for name, values in rates.items()
    ]
    single: dict[str, Callable[[], object]] = {f"{mb}mb": _fresh(gpu, mb * 10**6) for mb in LAUNCHES}
    row = gpu.row(_fresh(gpu, CUT * 10**6), ROW)
    times = gpu.time({**single, "row": row}, gpu.runs(31))
    found += [
        Sample(f"hbm_{name}_us", "us", times[name], "a launch alone that reads so much, launch and ramp included")
        for name in single
    ]
    steady = part(gpu, CUT * 10**6) * gpu.sms / max(map(statistics.median, rates.values())) / 1e6
    cut = [t / ROW - steady for t in times["row"]]
    what = f"one of {ROW} launches in a graph that read {CUT} MB each, beyond the best steady rate"
    return [*found, Sample("hbm_cut_us", "us", cut, what)]


def load(address: int, share: int, stages: int, stage: int, flight: int | None = None) -> tuple[int, ...]:
    """The kernels' ``Load``: ``flight`` stages of the ring may be under way, by default all."""
    return address, share, stages, stage, stages if flight is None else flight


def _launch(gpu: Gpu, address: int, share: int, stages: int, stage: int, passes: int = 1) -> Callable[[], object]:
    kernel = stream(gpu, stages, stage)
    return lambda: gpu.launch(kernel, gpu.head, *load(address, share, stages, stage), passes)


def _fresh(gpu: Gpu, size: int) -> Callable[[], object]:
    stages, stage = usual(gpu)
    kernel = stream(gpu, stages, stage)
    return lambda: gpu.launch(kernel, gpu.head, *load(gpu.fresh(size), part(gpu, size), stages, stage), 1)


def l2(gpu: Gpu) -> list[Sample]:
    """What L2 delivers when it holds what is read: a quarter of it and two thirds, read again and again.

    As `hbm`, over the same bytes; each pass a block reads another block's share. The steady rate is the slope between
    a launch of 64 passes and one of 8: no launch and no ramp are in it. The launch is one of a row of eight with one
    pass each, and has both. Bulk loads pass by the SM's own cache, and memory is slower: what is read comes from L2.

    Decides how much of a wait a prefetch into L2 covers: what is there still needs this trip.
    """
    stages, stage = usual(gpu)
    found = []
    for name, a, b in SHARES:
        share = part(gpu, gpu.l2 * a // b)
        once, few_, many_ = (
            _launch(gpu, gpu.data.data_ptr(), share, stages, stage, passes) for passes in (1, FEW, MANY)
        )
        times = gpu.time({"row": gpu.row(once, ROW), "few": few_, "many": many_}, gpu.runs(31))
        few, many, row = (times[k] for k in ("few", "many", "row"))
        size = share * gpu.sms
        rates = [size * (MANY - FEW) / (m - f) / 1e6 for f, m in zip(few, many, strict=True)]
        mb = f"{size / 1e6:.1f} MB that are in L2"
        found += [
            Sample(f"l2_{name}_tb_s", "TB/s", rates, f"{mb}, read over and over, steady"),
            Sample(
                f"l2_{name}_us",
                "us",
                [t / ROW for t in row],
                f"a launch that reads {mb}, launch and ramp included, one of {ROW} in a graph",
            ),
        ]
    return found


def prefetch(gpu: Gpu) -> list[Sample]:
    """How long 32 KB take to land when all SMs load at once: from memory, and after a prefetch into L2.

    All SMs meet, then each loads 32 KB and waits. The prefetch (cp.async.bulk.prefetch.L2) was asked for by the same SM
    or by another, 20 µs before. L2 may be in two halves; whose SM asked could matter.

    Decides whether a prefetch pays, and whether any SM may do it for another.
    """
    rounds = 8
    kernel = gpu.kernel("stream", "probe_arrive", shared=BARRIERS + LOAD)
    clks = gpu.zeros(rounds, gpu.sms, words=4)
    asked = {
        "hbm": "from memory",
        "l2_own": "after a prefetch into L2 by the same SM",
        "l2_other": "after a prefetch into L2 by another SM",
    }
    values: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(gpu.runs(31)):
        for ahead, name in enumerate(asked):
            gpu.run(kernel, gpu.fresh(rounds * gpu.sms * LOAD), LOAD, rounds, ahead, clks)
            values[name].append(float(gpu.read(clks)[1:].median()))
    return [
        Sample(f"load_32kb_{name}_clk", "clk", values[name], f"32 KB a SM, all SMs at once, {text}")
        for name, text in asked.items()
    ]
