"""What is known of two GPUs, to set beside the figures of a third."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """Figures by name, in the unit that the name ends in; a pair is a range."""

    machine: str
    source: str
    figures: Mapping[str, float | tuple[float, float]]

    def text(self, name: str) -> str:
        """The figure as people read it, or nothing."""
        found = self.figures.get(name)
        if found is None:
            return ""
        return "–".join(map(number, found)) if isinstance(found, tuple) else number(found)


def number(value: float) -> str:
    """Three digits, more of large numbers."""
    if value == int(value) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


H200 = Known(
    "H200",
    "one NVIDIA H200 (two for messages and copies between GPUs), driver 580.159, CUDA 13.0; one run each, by hand",
    {
        "sm_clock_mhz": 1980,
        "timer_step_ns": 32,
        "hbm_ring_2x32kb_tb_s": 4.58,
        "hbm_ring_3x32kb_tb_s": 4.58,
        "hbm_ring_5x32kb_tb_s": 4.58,
        "hbm_48mb_us": 18.4,
        "hbm_99mb_us": 29.2,
        "hbm_242mb_us": 60.4,
        "l2_quarter_us": 4.5,
        "l2_two_thirds_us": 7.3,
        "load_32kb_hbm_clk": 4250,
        "load_32kb_l2_own_clk": 2200,
        "poll_acquire_gpu_ns": 151,
        "poll_relaxed_sys_ns": 148,
        "hop_gpu_ns": 680,
        "fence_gpu_idle_ns": 280,
        "fence_sys_idle_ns": 710,
        "fence_gpu_streaming_ns": (7000, 8000),
        "fence_sys_streaming_ns": (7000, 8000),
        "fence_red_streaming_ns": (7000, 8000),
        "fence_cluster_streaming_ns": (7000, 8000),
        "fence_gpu_landed_ns": (270, 320),
        "fence_gpu_prefetched_ns": 350,
        "hop_sm_ns": 280,
        "grid_step_ns": 930,
        "broadcast_4kb_ns": 550,
        "broadcast_16kb_ns": 1000,
        "broadcast_64kb_ns": 3000,
        "broadcast_128kb_ns": 5400,
        "blocks_fit_1": 132,
        "blocks_fit_2": 132,
        "blocks_fit_4": 120,
        "blocks_fit_8": 120,
        "cluster_4_load_clk": (30, 59),
        "cluster_4_barrier_clk": (430, 460),
        "icache_112kb_clk": 3.2,
        "icache_128kb_clk": (6, 18),
        "icache_100_and_20kb_clk": 3.2,
        "icache_100_and_48kb_clk": 4.5,
        "icache_100_and_100kb_clk": 4.7,
        "icache_kb": 112,
        "launch_plain_us": 0.89,
        "launch_pdl_us": 0.57,
        "peer_copy_gb_s": 373,
        "peer_load_gb_s": 373,
        "hop_at_0kb_clk": 554,
        "hop_at_16kb_clk": (700, 733),
        "hop_at_32kb_clk": 789,
        "hop_at_48kb_clk": 1031,
        "hop_at_64kb_clk": (1370, 1465),
        "hop_at_96kb_clk": 2326,
        "hop_at_128kb_clk": 3052,
        "hop_at_160kb_clk": 4432,
        "stream_at_16kb_share": 0.58,
        "stream_at_32kb_share": 0.84,
        "stream_at_48kb_share": 0.96,
        "stream_at_64kb_share": (0.99, 1.0),
        "stream_at_96kb_share": 1.0,
        "stream_at_128kb_share": 1.0,
        "stream_at_160kb_share": 0.98,
    },
)

GB300 = Known(
    "GB300",
    "published: LMSYS, Muse Spark Open Ultrafast",
    {
        "poll_acquire_gpu_ns": (141, 145),
        "poll_acquire_gpu_streaming_ns": (1000, 2600),
        "hop_gpu_ns": 1900,
        "fence_gpu_idle_ns": 400,
        "fence_gpu_streaming_ns": (3600, 4000),
        "blocks_fit_4": 144,
        "icache_kb": 128,
        "icache_100_and_20kb_us": 12.4,
        "icache_100_and_100kb_us": 19.5,
    },
)
