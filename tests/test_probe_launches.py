"""Every launch that the probe's cases make, against a GPU's limits: made and launched by a driver on paper."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megagen.compile import compile_source
from megagen.compile.artifact import KernelReport
from megagen.probe.case import Case
from megagen.probe.cases import CASES
from megagen.probe.gpu import BARRIERS, Gpu, Library, kernels, source
from megagen.runtime import driver
from megagen.settings import Settings

ARCH = "sm_90a"
H200 = {"sms": 132, "shared": 227 * 1024, "l2": 60 << 20}
TIGHT = {"sms": 170, "shared": 99 * 1024, "l2": 96 << 20}  # as of compute capability 12.0
A_SM = 64 * 1024  # registers
RESERVED = 1024  # bytes of shared memory a block, on top of the opt-in limit
CHUNKS = 52  # icache.cu
PAIR = 4352  # bytes of a pair's mail, hop.cu

Extents = list[tuple[int, int]]


def facts(family: str) -> Mapping[str, KernelReport]:
    text = source(family)
    return compile_source(text, kernels=kernels(text), archs=[ARCH], settings=Settings.from_env())[ARCH].kernels


def bounds(family: str) -> dict[str, int]:
    """Threads that a kernel is compiled for."""
    found = re.findall(r"__launch_bounds__\((\w+)[\w, ]*\) (probe_\w+)\(", source(family))
    return {name: int(n) if n.isdigit() else 384 for n, name in found}


# -- what kernels touch --------------------------------------------------------------------------------------------


def ring(words: Sequence[int], blocks: int, shared: int) -> Extents:
    """Of a ``Load``: a ring that its block has room for, pieces that bulk loads can have."""
    data, share, stages, size, flight = words
    assert data % 128 == share % 16 == size % 16 == 0 and share > 0 and size > 0
    assert flight <= stages <= 64 and BARRIERS + stages * size <= shared
    return [(data, share * blocks)]


def _stream(w: Sequence[int], b: int, shared: int) -> Extents:
    return ring(w[:5], b, shared)


def _arrive(w: Sequence[int], b: int, shared: int) -> Extents:
    data, size, rounds, _, clks = w
    assert size % 16 == 0 and BARRIERS + size <= shared
    return [(data, rounds * b * size), (clks, 4 * rounds * b)]


def _hop(w: Sequence[int], b: int, shared: int) -> Extents:
    moved, mail, trips, capacity, _, first, pairs = w[5:]
    assert first + pairs <= b // 2
    return [*ring(w[:5], b, shared), (moved, 16 * b), (mail, b // 2 * PAIR), (trips, b // 2 * capacity * 4)]


def _poll(w: Sequence[int], b: int, shared: int) -> Extents:
    moved, words, clks, _ = w[5:]
    return [*ring(w[:5], b, shared), (moved, 16 * b), (words, 128 * b), (clks, 4 * b)]


def _fence(w: Sequence[int], b: int, shared: int) -> Extents:
    moved, words, clks, rounds, state, ahead = w[5:]
    assert ahead % w[3] == 0 and rounds <= 64
    if state >= 4:  # prefetches: each round other bytes, and no more than one instruction can tell
        assert rounds * ahead <= w[1] and ahead < 1 << 20
    elif state >= 2:
        assert rounds * w[2] * w[3] <= w[1]
    return [*ring(w[:5], b, shared), (moved, 16 * b), (words, 256 * b), (clks, 4 * rounds * b)]


def _broadcast(w: Sequence[int], b: int, shared: int) -> Extents:
    data, words, rounds, begins, ends = w
    assert rounds <= 32
    return [(data, 16 * words), (begins, 8 * rounds), (ends, 8 * rounds * b)]


def _code(w: Sequence[int], b: int, shared: int) -> Extents:
    first, second, n, m, passes, clks, sink = w
    assert n > 0 and first + n <= CHUNKS and second + m <= CHUNKS and (not m or second >= first + n)
    return [(clks, 8 * passes * b), (sink, 4)]


def _timer(w: Sequence[int], b: int, shared: int) -> Extents:
    seen, count, costs, sink = w
    return [(seen, 8 * count), (costs, 20), (sink, 8)]


def _spread(w: Sequence[int], b: int, shared: int) -> Extents:
    times, rounds = w
    assert rounds <= 64
    return [(times, 8 * rounds * b)]


def _peer_hop(w: Sequence[int], b: int, shared: int) -> Extents:
    theirs, mine, trips, capacity, _, leads = w
    assert b == 1
    return [(theirs, 16), (mine, 16), *([(trips, 4 * capacity)] if leads else [])]


def _peer(w: Sequence[int], b: int, shared: int) -> Extents:
    theirs, words, sink = w
    assert words % (b * 512 * 8) == 0
    return [(theirs, 16 * words), (sink, 4)]


TOUCHES: dict[str, Callable[[Sequence[int], int, int], Extents]] = {
    "probe_stream": _stream,
    "probe_arrive": _arrive,
    "probe_hop": _hop,
    "probe_poll_": _poll,
    "probe_fence_": _fence,
    "probe_amid_": _fence,
    "probe_grid_step": lambda w, b, _: [(w[0], 4 * b)],
    "probe_broadcast": _broadcast,
    "probe_code": _code,
    "probe_empty": lambda w, b, _: [],
    "probe_mark": lambda w, b, _: [(w[0], 8 * b), (w[1], 8 * b)],
    "probe_cluster": lambda w, b, _: [(at, 4 * b) for at in w[:3]],
    "probe_timer_read": _timer,
    "probe_timer_spread": _spread,
    "probe_peer_hop": _peer_hop,
    "probe_peer_load": _peer,
    "probe_peer_store": _peer,
}


# -- the driver ----------------------------------------------------------------------------------------------------


class Paper:
    """The driver's part in a launch. Refuses what the real one does; as there, a function has one limit of shared
    memory, and the last that was set holds."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared", CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED=""
    )
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster", CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="pdl"
    )
    CUlaunchConfig = SimpleNamespace
    CUstream = int

    def __init__(self, families: Sequence[str], limits: Mapping[str, int]) -> None:
        self.sms, self.shared = limits["sms"], limits["shared"]
        self.facts = {name: report for family in families for name, report in facts(family).items()}
        self.bounds = {name: n for family in families for name, n in bounds(family).items()}
        self.allowed: dict[str, int] = {}
        self.buffers: list[tuple[int, int]] = []
        self.launched: list[str] = []
        self.words = 0  # of the next launch's argument

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:
        return SimpleNamespace(id="", value=SimpleNamespace(clusterDim=SimpleNamespace(x=1, y=1, z=1)))

    def cuModuleLoadData(self, image: bytes) -> tuple[int, bytes]:
        return 0, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, str]:
        assert name.decode() in self.facts
        return 0, name.decode()

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[int]:
        assert attribute == "shared" and 0 <= value <= self.shared - self.facts[function].shared_bytes, (
            function,
            value,
        )
        self.allowed[function] = value
        return (0,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: str, threads: int, shared: int) -> tuple[int, int]:
        block = shared + self.facts[function].shared_bytes + RESERVED
        return 0, min((self.shared + RESERVED) // block, A_SM // self._registers(function, threads), 2048 // threads)

    def cuOccupancyMaxActiveClusters(self, function: str, config: Any) -> tuple[int, int]:
        return 0, self.sms // 10 * 9 // config.attrs[0].value.clusterDim.x

    def cuMemcpyPeerAsync(self, to: int, _: Any, at: int, __: Any, size: int, ___: int) -> tuple[int]:
        self._inside("a copy", [(to, size), (at, size)])
        return (0,)

    def cuLaunchKernelEx(self, config: Any, function: str, pointer: int, _: int) -> tuple[int]:
        cluster = next((a.value.clusterDim.x for a in config.attrs if a.id == "cluster"), 1)
        assert 0 < config.blockDimX <= self.bounds[function] <= 1024, function
        assert 0 < config.gridDimX < 1 << 31 and config.gridDimX % cluster == 0, function
        assert config.gridDimY == config.gridDimZ == config.blockDimY == config.blockDimZ == 1
        assert config.sharedMemBytes <= self.allowed[function], (function, config.sharedMemBytes, self.allowed)
        assert self._registers(function, config.blockDimX) <= A_SM
        words = self._words(pointer)
        assert words[0] % 128 == 0
        key = max((k for k in TOUCHES if function.startswith(k)), key=len)
        touched = TOUCHES[key](words[1:], config.gridDimX, config.sharedMemBytes)
        self._inside(function, [(words[0], 256), *touched])
        self.launched.append(function)
        return (0,)

    def _registers(self, function: str, threads: int) -> int:
        return -(-threads // 32) * -(-32 * self.facts[function].registers // 256) * 256

    def _words(self, pointer: int) -> Sequence[int]:
        (block,) = struct.unpack("P", ctypes.string_at(pointer, ctypes.sizeof(ctypes.c_void_p)))
        return struct.unpack(f"{self.words}Q", ctypes.string_at(block, 8 * self.words))

    def _inside(self, what: str, touched: Extents) -> None:
        for at, size in touched:
            assert any(begin <= at and at + size <= begin + room for begin, room in self.buffers), (what, at, size)


class Bytes:
    """The data that streams read, without the memory."""

    nbytes = 4 << 30

    def data_ptr(self) -> int:
        return 1 << 44


class PaperGpu(Gpu):
    """A GPU on which nothing runs: a launch writes one, two, three... wherever it may write."""

    def __init__(self, library: Library, paper: Paper, limits: Mapping[str, int]) -> None:
        import torch

        cuda = SimpleNamespace(synchronize=lambda: None, current_stream=lambda: SimpleNamespace(cuda_stream=0))
        self.torch: Any = SimpleNamespace(cuda=cuda)
        self.real = torch
        self._api = self.paper = paper
        self.index, self.quick, self.peer, self.library, self.context = 0, True, None, library, None
        self.sms, self.shared, self.l2 = (limits[k] for k in ("sms", "shared", "l2"))
        self._modules, self._most, self._next = {}, {}, 0
        self.made: list[Any] = []
        self.head = self.zeros(32)
        self.__dict__["data"] = Bytes()
        paper.buffers.append((self.data.data_ptr(), self.data.nbytes))

    def zeros(self, *shape: int, words: int = 8) -> Any:
        dtype = self.real.int64 if words == 8 else self.real.int32
        room = self.real.zeros(shape, dtype=dtype).numel() * words + 128
        raw = self.real.zeros(room, dtype=self.real.uint8)
        skip = -raw.data_ptr() % 128  # as torch's allocator on a GPU aligns, or better
        tensor = raw[skip : skip + room - 128].view(dtype).view(*shape)
        self.made.append(tensor)
        self.paper.buffers.append((tensor.data_ptr(), tensor.nbytes))
        return tensor

    def runs(self, usual: int) -> int:
        return 2

    def enter(self) -> None:
        pass

    def launch(self, kernel: Any, *args: Any) -> None:
        self.paper.words = len(args)
        super().launch(kernel, *args)

    def finish(self, what: str) -> float:
        for tensor in self.made:
            tensor.view(-1).copy_(self.real.arange(1, tensor.numel() + 1))
        return 0.5

    def time(self, work: Mapping[str, Callable[[], object]], runs: int, *, warm: int = 2) -> dict[str, list[float]]:
        for do in work.values():
            do()
        return {name: [8e9 + i] * runs for i, name in enumerate(work)}

    def row(self, launch: Callable[[], object], times: int) -> Callable[[], object]:
        for _ in range(times):
            launch()
        return lambda: None


@pytest.mark.parametrize("limits", [H200, TIGHT], ids=["h200", "tight"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_launches_are_possible(case: Case, limits: Mapping[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    paper = Paper(case.families, limits)
    monkeypatch.setattr(driver, "api", lambda: paper)
    library = Library(case.families, ARCH, Settings.from_env(), lambda: None)
    gpu = PaperGpu(library, paper, limits)
    gpu.peer = PaperGpu(library, paper, limits)
    assert case.measure(gpu) and paper.launched
