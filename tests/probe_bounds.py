"""What figures of the probe must be like on any GPU, whether just measured or recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megagen.machines import Figure

# By unit: from a tenth of what is plausible to ten times of it, on any GPU that the kernels are for.
BOUNDS = {
    "ns": (0, 200_000),
    "us": (0.05, 2_000),
    "clk": (0, 100_000),
    "MHz": (300, 5_000),
    "TB/s": (0.3, 80),
    "GB/s": (1, 5_000),
    "KB": (8, 1_000),
    "of best": (0.05, 1.2),
    "blocks": (0, 1_000),
}
MAY_BE_ZERO = ("gap_", "timer_offset", "timer_spread", "blocks_fit")


def possible(figures: Mapping[str, Figure]) -> None:
    assert len(figures) > 80
    for name, found in figures.items():
        low, high = BOUNDS[found.unit]
        assert math.isfinite(found.value) and low <= found.value <= high, (name, found)
        assert found.p10 <= found.value <= found.p90 and found.runs >= 1, (name, found)
        assert found.value > 0 or name.startswith(MAY_BE_ZERO), (name, found)


def consistent(figures: Mapping[str, Figure], rated_bytes_per_s: float, sms: int) -> None:
    """Orders that hold on every GPU, and figures that follow from others, with room for noise."""
    value = {name: found.value for name, found in figures.items()}
    assert value["hbm_48mb_us"] < value["hbm_99mb_us"] < value["hbm_242mb_us"]
    hbm = max(v for name, v in value.items() if name.startswith("hbm_ring_"))
    assert 0.5 * rated_bytes_per_s < hbm * 1e12 < rated_bytes_per_s
    for size in ("quarter", "two_thirds"):
        assert value[f"l2_{size}_tb_s"] > hbm
    moved = {size: value[f"l2_{size}_us"] for size in ("quarter", "two_thirds")}
    assert moved["quarter"] < moved["two_thirds"]
    assert value["hop_at_160kb_ns"] > value["hop_at_0kb_ns"]
    assert value["hop_sm_least_ns"] <= value["hop_sm_ns"] <= value["hop_sm_most_ns"]
    assert value["stream_at_16kb_share"] < value["stream_at_64kb_share"]
    assert value["poll_relaxed_gpu_streaming_ns"] > value["poll_relaxed_gpu_ns"]
    ring = 160 * 1024 * sms / (hbm * 1e3)  # ns
    assert 0.7 * ring < value["fence_gpu_in_flight_ns"] < 3 * ring  # it waits for all of a ring to land
    assert value["fence_gpu_landed_ns"] < value["fence_gpu_in_flight_ns"] / 2
    assert value["load_32kb_l2_own_clk"] < value["load_32kb_hbm_clk"]
    assert value["broadcast_128kb_ns"] > value["broadcast_4kb_ns"]
    assert value["icache_192kb_clk"] > value["icache_16kb_clk"]
    assert value.get("icache_near_kb", 0) < value["icache_kb"]
    assert value["timer_offset_ns"] <= value["timer_spread_ns"] + value["timer_step_ns"]
    assert value["timer_step_ns"] < value["timer_meeting_ns"]
