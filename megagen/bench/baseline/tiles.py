"""How the baseline's kernels may be cut, and which cut is the fastest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megagen.errors import MegagenError
from megagen.ir.graph import DType, Op
from megagen.ops.attention import Attention
from megagen.ops.dense_gemm import DenseGemm
from megagen.ops.expert_gemm import ExpertGemm

PROGRAMS = range(100, 600)  # of a dense GEMM: no fewer than fill a GPU, no more than two or three an SM
USUAL_PROGRAMS = 264
MOST_SPLITS = 32
MOST_TRIED = 6
EXPERTS = [(32, 256, 4, 4), (32, 256, 2, 4), (32, 512, 4, 3), (64, 256, 4, 3), (16, 256, 1, 4), (16, 512, 2, 3)]
ATTENTION = [(64, 2, 4, 2), (64, 1, 4, 2), (128, 2, 4, 2), (128, 1, 8, 2), (32, 2, 2, 2)]
REPEATS = 5
LEAST_GAIN = 0.02  # by which a later candidate must be faster: else another run chooses another


@dataclass(frozen=True)
class Tile:
    """``rows`` of a program (weights' rows, or of attention's queries) by ``k`` a step; ``split`` programs share K, or
    ``split`` chunks a program of attention. ``cublas``: not our kernel at all."""

    rows: int
    k: int = 0
    split: int = 1
    warps: int = 4
    stages: int = 4
    cublas: bool = False

    def __str__(self) -> str:
        if self.cublas:
            return "cuBLAS"
        return f"{self.rows} x {self.k or 64}, split {self.split}, {self.warps} warps, {self.stages} stages"


CUBLAS = Tile(rows=0, cublas=True)


def candidates(op: Op, tp: int, gpu: bool) -> tuple[Tile, ...]:
    """The cuts that an op's kernel may have, the likeliest first; none where there is nothing to choose. Without a
    ``gpu`` large ones, since an interpreter takes its time for every operation."""
    if isinstance(op, DenseGemm):
        return _dense(op, gpu)
    if isinstance(op, ExpertGemm):
        columns = op.columns // tp
        own = op.k if op.swiglu else op.k // tp  # columns of a rank in what it reads
        usual = EXPERTS if gpu else [(128, k, 4, 1) for k in (1024, 512, 256)]
        found = [Tile(r, k, 1, w, s) for r, k, w, s in usual if columns % r == 0 and own % k == 0]
        return _some(op, found)
    if isinstance(op, Attention):
        rows = 16 * op.heads // op.kv_heads
        return _some(op, [Tile(r, 0, split, w, s) for r, split, w, s in ATTENTION if rows % r == 0])
    return ()


def _dense(op: DenseGemm, gpu: bool) -> tuple[Tile, ...]:
    fp32 = op.weights["weight"].dtype is DType.FP32
    found = []
    for rows in (32, 64, 16) if gpu else (256, 128, 64, 16):
        for split in (1 << i for i in range(MOST_SPLITS.bit_length())):
            share = op.k // split
            k = min(share, 512 if not gpu else 64 if fp32 else 128)
            programs = op.rows // rows * split
            if op.rows % rows or op.k % split or share % k or share & share - 1 or k < 64:
                continue
            if programs in PROGRAMS or not gpu:
                found.append(Tile(rows, k, split))
    if not gpu:  # few programs, some of which share
        return _some(op, sorted(found, key=lambda t: (abs(t.split - 2), -t.rows)))
    found.sort(key=lambda t: abs(op.rows // t.rows * t.split - USUAL_PROGRAMS))
    return _some(op, (*found[:MOST_TRIED], CUBLAS))


def _some(op: Op, found: Sequence[Tile]) -> tuple[Tile, ...]:
    if not found:
        raise MegagenError(f"the baseline has no kernel for the size of {op.name}")
    return tuple(found)


@dataclass
class Tuned:
    """What :func:`fastest` found, by op: a text a candidate, in µs or why it could not run."""

    log: dict[str, dict[str, str]] = field(default_factory=dict)

    def fastest(self, op: Op, tries: Mapping[Tile, Callable[[], None]], launches: int) -> Tile:
        """The quickest of several ways to run an op's ``launches`` launches, each on weights of its own. What does not
        compile or cannot be captured is left out; raises MegagenError if that is everything."""
        best: tuple[float, Tile] | None = None
        log = self.log.setdefault(op.name, {})
        for tile, work in tries.items():
            try:
                took = _time(work) / launches
            except torch.AcceleratorError:
                raise  # the device is lost, whatever else is tried
            except Exception as error:  # of Triton's compiler there is no telling which
                log[str(tile)] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                continue
            log[str(tile)] = f"{took:.2f} µs"
            if best is None or took < best[0] * (1 - LEAST_GAIN):
                best = took, tile
        if best is None:
            notes = tuple((f"{tile}: {why}", None) for tile, why in log.items())
            raise MegagenError(f"no kernel of the baseline runs {op.name}", notes=notes)
        return best[1]


def _time(work: Callable[[], None]) -> float:
    """µs of a replay of what ``work`` launches, the median of a few."""
    graph: Any = captured(work)
    graph.replay()
    found: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)


def captured(work: Callable[[], None]) -> Any:
    """A CUDA graph of what ``work`` launches, which is run once before: kernels are compiled and loaded by then."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    return graph
