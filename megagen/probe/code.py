"""What code costs: the instruction cache, and launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megagen.probe.case import Sample
from megagen.probe.gpu import KB, Gpu
from megagen.probe.grid import SHARED, THREADS
from megagen.runtime.driver import Kernel

CHUNKS = 52  # of icache.cu's code
INSTRUCTIONS = 250  # of a chunk: 248 FFMA, a test and a branch
SIZES = (16, 32, 48, 64, 96, 112, 128, 144, 160, 192)  # KB
PAIRS = ((100, 20), (100, 48), (100, 100))
PASSES = 8
SKIP = 2  # passes that fill the cache
LEVEL = 1.3  # times the clocks of a level's least size: code of another level
EMPTY = 100  # launches of a graph
MARKED = 16
WORK = 5_000  # ns of a marked launch


def icache(gpu: Gpu) -> list[Sample]:
    """How fast straight-line code runs, by its size: what fits into an instruction cache runs at one speed.

    One warp a SM, all SMs, runs a stretch of independent FFMA over and over; clocks an instruction, after two passes
    that fill the cache. Then two stretches in turn: clocks of the first, 100 KB, beside a second of 20, 48 and 100 KB.
    Sizes come from the cubin. Speeds are levels, one a cache, and the last jump is where the SM's own caches end.

    Decides how much code a phase of a kernel may run at full speed, and so what to unroll.
    """
    kernel = gpu.kernel("icache", "probe_code")
    chunk = gpu.code_bytes("icache", "probe_code") / CHUNKS
    clks = gpu.zeros(2, PASSES, gpu.sms, words=4)
    sink = gpu.zeros(1)
    single: dict[int, list[float]] = {kb: [] for kb in SIZES}
    first: dict[tuple[int, int], list[tuple[float, float]]] = {pair: [] for pair in PAIRS}

    def chunks(kb: int) -> int:
        return min(CHUNKS, round(kb * KB / chunk))

    def clocks(a: int, b: int) -> tuple[float, float]:
        """(clocks an instruction, µs) of a stretch of ``a`` KB with one of ``b`` KB after it."""
        n, m = chunks(a), chunks(b)
        each = gpu.run(kernel, 0, CHUNKS - m if m else 0, n, m, PASSES, clks, sink)
        clk = float(gpu.read(clks)[0, SKIP:].median())
        return clk / (n * INSTRUCTIONS), clk * each / 1e3

    for _ in range(gpu.runs(21)):
        for kb in SIZES:
            single[kb].append(clocks(kb, 0)[0])
        for pair in PAIRS:
            first[pair].append(clocks(*pair))
    held = [
        knees({chunks(kb) * chunk / KB: clk for kb, clk in zip(SIZES, clks_, strict=True)})
        for clks_ in zip(*single.values(), strict=True)
    ]
    found = [
        Sample(f"icache_{kb}kb_clk", "clk", values, f"an instruction of {chunks(kb) * chunk / KB:.1f} KB, alone")
        for kb, values in single.items()
    ]
    for (a, b), values in first.items():
        what = f"{chunks(a) * chunk / KB:.1f} KB of code with {chunks(b) * chunk / KB:.1f} KB after it"
        found.append(Sample(f"icache_{a}_and_{b}kb_clk", "clk", [v[0] for v in values], f"an instruction of {what}"))
        found.append(Sample(f"icache_{a}_and_{b}kb_us", "us", [v[1] for v in values], f"a pass of {what}"))
    found.append(Sample("icache_kb", "KB", [k[-1] for k in held], "the most code before the last jump of its clocks"))
    if all(len(k) > 1 for k in held):  # a smaller cache, nearer
        found.append(Sample("icache_near_kb", "KB", [k[0] for k in held], "the most code before the first jump"))
    return found


def knees(clks: Mapping[float, float]) -> list[float]:
    """The sizes that caches hold, ascending, from the clocks an instruction of straight-line code by its size.

    Sizes of about one speed are a level. Within, a single size is on the way from one level to the next, not one. The
    last level's code is in no cache, unless there is no other level: then the largest size is all that is known.
    """
    levels: list[list[float]] = []
    for size in sorted(clks):
        if levels and clks[size] <= LEVEL * clks[levels[-1][0]]:
            levels[-1].append(size)
        else:
            levels.append([size])
    first, *between = levels[:-1] or levels
    return [level[-1] for level in (first, *(level for level in between if len(level) > 1))]


def launch(gpu: Gpu) -> list[Sample]:
    """What a launch costs in a CUDA graph, plain and with programmatic dependent launch, and the gap between two.

    A hundred empty kernels of 384 threads on all SMs, each waiting for the one before. The gap is from the last block's
    end of one launch to the median block's begin of the next (after griddepcontrol.wait), which works for 5 µs; with
    200 KB of shared memory a block can only start where one has left, with none it may be there before.

    Decides whether to cut a kernel in two, and what may be left to the end of a launch.
    """
    shared = min(SHARED, gpu.shared)
    work = {"plain": _empty(gpu, pdl=False), "pdl": _empty(gpu, pdl=True)}
    times = gpu.time(work, gpu.runs(31))
    found = [
        Sample(
            "launch_plain_us", "us", [t / EMPTY for t in times["plain"]], f"an empty launch, one of {EMPTY} in a graph"
        ),
        Sample("launch_pdl_us", "us", [t / EMPTY for t in times["pdl"]], "the same with programmatic dependent launch"),
    ]
    for name, pdl, room, what in (
        ("plain", False, shared, "plain"),
        ("pdl", True, shared, "with programmatic dependent launch, blocks that fill their SM"),
        ("pdl_small", True, 0, "with programmatic dependent launch, blocks that leave room for the next launch's"),
    ):
        mark = gpu.kernel("launch", "probe_mark", threads=THREADS, shared=room, alone=False, pdl=pdl)
        found.append(
            Sample(f"gap_{name}_ns", "ns", _gaps(gpu, mark), f"end of a launch to begin of the next, {what}", 32, True)
        )
    return found


def _empty(gpu: Gpu, *, pdl: bool) -> Callable[[], object]:
    kernel = gpu.kernel("launch", "probe_empty", threads=THREADS, alone=False, pdl=pdl)
    return gpu.row(lambda: gpu.launch(kernel, gpu.head), EMPTY)


def _gaps(gpu: Gpu, mark: Kernel) -> list[float]:
    """ns between one launch's last end and the next one's median begin, a median a replay."""
    begins, ends = gpu.zeros(MARKED, gpu.sms), gpu.zeros(MARKED, gpu.sms)
    rows = iter(zip(begins, ends, strict=True))
    replay, gaps = gpu.row(lambda: gpu.launch(mark, gpu.head, *next(rows), WORK), MARKED), []
    for _ in range(gpu.runs(21)):
        replay()
        gpu.finish(mark.name)
        began, ended = gpu.times(begins, ends)
        gap = began[1:].median(1).values - ended[:-1].amax(1)
        gaps.append(max(0.0, float(gap.median())))
    return gaps
