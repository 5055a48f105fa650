"""What blocks can do together: all of a grid, and those of a cluster."""

from __future__ import annotations

from dataclasses import replace

from megagen.probe.case import Sample
from megagen.probe.gpu import KB, Gpu
from megagen.runtime.driver import Geometry, Kernel

THREADS = 384  # as the kernels that megagen emits
SHARED = 200 * KB
SIZES = (1, 2, 4, 8)  # blocks of a cluster
STEPS = 64
SENT = (4, 16, 64, 128)  # KB
ROUNDS = 16
COUNT = 64  # barriers, loads


def grid_step(gpu: Gpu) -> list[Sample]:
    """A step that all blocks take together: each adds to one counter (red.release) and polls it (ld.acquire).

    64 steps in a row, one thread a SM, SMs otherwise idle.

    Decides what a counter between all blocks costs at best, against ending the launch.
    """
    kernel = gpu.kernel("grid", "probe_grid_step")
    clks, values = gpu.zeros(gpu.sms, words=4), []
    for _ in range(gpu.runs(31)):
        each = gpu.run(kernel, clks, STEPS)
        values.append(float(gpu.read(clks).median()) / STEPS * each)
    return [Sample("grid_step_ns", "ns", values, f"one of {STEPS} steps, {gpu.sms} blocks, one counter")]


def broadcast(gpu: Gpu) -> list[Sample]:
    """One block to all: how long until every block has read 4 to 128 KB that one block writes.

    384 threads write words that are their own flag (relaxed stores), the threads of all other blocks poll all of them.
    From the timer before the first store to that of a block that has everything: the median block, and the last one.

    Decides whether a small result is computed once and sent, or by every block for itself.
    """
    kernel = gpu.kernel("grid", "probe_broadcast", threads=THREADS)
    begins, ends = gpu.zeros(ROUNDS), gpu.zeros(ROUNDS, gpu.sms)
    data = gpu.zeros(max(SENT) * KB // 8)
    usual: dict[int, list[float]] = {kb: [] for kb in SENT}
    last: dict[int, list[float]] = {kb: [] for kb in SENT}
    for _ in range(gpu.runs(31)):
        for kb in SENT:
            data.zero_()
            gpu.run(kernel, data, kb * KB // 16, ROUNDS, begins, ends)
            began, ended = gpu.times(begins, ends)
            took = (ended - began[:, None])[1:, 1:]  # block 0 reads its own
            usual[kb].append(float(took.median()))
            last[kb].append(float(took.amax(1).median()))
    return [
        sample
        for kb in SENT
        for sample in (
            Sample(f"broadcast_{kb}kb_ns", "ns", usual[kb], f"{kb} KB from one block to all, median block", 32),
            Sample(f"broadcast_{kb}kb_last_ns", "ns", last[kb], f"{kb} KB from one block to all, last block", 32),
        )
    ]


def occupied(gpu: Gpu, size: int) -> Kernel:
    """The cluster kernel with as much shared memory and as many threads as an emitted one, as many blocks as fit."""
    geometry = Geometry(gpu.sms // size * size, THREADS, size, min(SHARED, gpu.shared), pdl=False)
    fit = gpu.shaped("cluster", "probe_cluster", geometry).blocks_fit(gpu.sms)
    return gpu.shaped("cluster", "probe_cluster", replace(geometry, blocks=fit))


def cluster(gpu: Gpu) -> list[Sample]:
    """How many blocks fit in clusters of 1, 2, 4 and 8, and what a cluster's barrier and shared memory cost.

    Blocks of 384 threads and 200 KB. 64 barriers in a row by all threads (arrive.release, wait.acquire), then 64 loads,
    each waiting for the one before, from the block's own shared memory and from its neighbour's, through the cluster's
    window.

    Decides the cluster size: SMs that no cluster covers stand idle.
    """
    found = []
    for size in SIZES:
        kernel = occupied(gpu, size)
        fit = kernel.geometry.blocks
        what = f"blocks at {THREADS} threads and {kernel.geometry.shared // KB} KB in clusters of {size}"
        found.append(Sample(f"blocks_fit_{size}", "blocks", [fit], what, zero=True))
        if size == 1 or fit == 0:
            continue
        clks = gpu.zeros(3, fit, words=4)
        runs = []
        for _ in range(gpu.runs(21)):
            gpu.run(kernel, clks[0], clks[1], clks[2], COUNT, size)
            runs.append((gpu.read(clks).median(1).values / COUNT).tolist())
        texts = ("barrier", "own load", "load")
        what_ = (
            f"barrier of a cluster of {size}, {THREADS} threads a block",
            f"load from the block's own shared memory, cluster of {size}",
            f"load from the next block's shared memory, cluster of {size}",
        )
        for i, text in enumerate(texts):
            name = f"cluster_{size}_{text.replace(' ', '_')}_clk"
            found.append(Sample(name, "clk", [r[i] for r in runs], what_[i], 1))
    return found
