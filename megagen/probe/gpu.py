"""One GPU as the cases see it: its sizes, its kernels, launches that end, and memory that is in no cache."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megagen import resources
from megagen.compile import Artifact, compile_source
from megagen.compile.compiler import KNOWN
from megagen.errors import DeviceError
from megagen.runtime import driver
from megagen.runtime.driver import Geometry, Kernel, Module, ParameterBlock, call
from megagen.settings import Settings

if TYPE_CHECKING:
    import torch

COMMON = '#include "common.cuh"\n'
NAME = re.compile(r"__global__ void __launch_bounds__\([\w, ]+\) (probe_\w+)\(")
HEAD_WORDS = 32  # of 8 bytes; common.cuh's Head
PATIENCE_S = 10.0  # of the host: waits on the device give up after 0.1 s each
PRIME_CYCLES = 400_000  # that the GPU spins while the host queues what is timed
WARM_S = 0.5
BUFFER = 1 << 32  # bytes, if the GPU has so many free: many times its L2
BARRIERS = 1024  # bytes of shared memory before the ring
KB = 1024
EXACT = 1 << 53  # float64 keeps whole numbers up to here; %globaltimer is beyond


def source(family: str) -> str:
    """The text of a family's kernels, with what it shares with the others."""
    folder = resources.templates() / "probe"
    return (folder / f"{family}.cu").read_text("utf-8").replace(COMMON, (folder / "common.cuh").read_text("utf-8"))


def families() -> list[str]:
    """The files of ``templates/probe``."""
    return sorted(p.stem for p in (resources.templates() / "probe").glob("*.cu"))


def kernels(text: str) -> list[str]:
    """Names of the kernels in a family's text."""
    return NAME.findall(text)


class Library:
    """Families of kernels compiled side by side; a family that does not compile fails the cases that ask for it."""

    def __init__(self, wanted: Sequence[str], arch: str, settings: Settings, progress: Callable[[], None]) -> None:
        self._made: dict[str, Future[Artifact]] = {}
        pool = ThreadPoolExecutor(max(1, len(wanted)))
        try:
            for family in wanted:
                self._made[family] = pool.submit(_compiled, family, arch, settings)
            for made in self._made.values():
                made.exception()  # waits
                progress()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def artifact(self, family: str) -> Artifact:
        """Raises CompileError if the compiler refused it."""
        return self._made[family].result()


def _compiled(family: str, arch: str, settings: Settings) -> Artifact:
    text = source(family)
    return compile_source(text, kernels=kernels(text), archs=[arch], settings=settings)[arch]


def architecture(capability: tuple[int, int]) -> str:
    """The architecture that kernels are compiled for. Raises DeviceError if the code is for none of this GPU's."""
    for arch in KNOWN:
        if driver.runs(arch, capability):
            return arch
    raise DeviceError(
        f"no kernels for a GPU of compute capability {capability[0]}.{capability[1]}",
        hint=f"the probe's kernels are for: {', '.join(KNOWN)}",
    )


class Gpu:
    """``index`` as torch and the driver count. ``quick``: fewer runs. Use it as a context, in one thread.

    Raises DeviceError when there is no such GPU, or the kernels cannot be compiled for it.
    """

    def __init__(self, index: int, *, quick: bool = False) -> None:
        self.torch = driver.require_torch(index)
        self.index, self.quick = index, quick
        self.device = self.torch.device("cuda", index)
        self._api = driver.api()
        self._handle = call("asking for the GPU", self._api.cuDeviceGet, index)
        self.context = call("retaining the context", self._api.cuDevicePrimaryCtxRetain, self._handle)
        self._modules: dict[str, Module] = {}
        self._most: dict[str, int] = {}
        self._next = 0
        properties = self.torch.cuda.get_device_properties(self.device)
        self.name: str = properties.name
        self.uuid = str(getattr(properties, "uuid", ""))
        self.capability: tuple[int, int] = (properties.major, properties.minor)
        self.arch = architecture(self.capability)
        self.sms = self._attribute("MULTIPROCESSOR_COUNT")
        self.l2 = self._attribute("L2_CACHE_SIZE")
        self.shared = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.registers = self._attribute("MAX_REGISTERS_PER_MULTIPROCESSOR")
        self.enter()
        self.head = self.zeros(HEAD_WORDS)  # every kernel's first argument
        self.library: Library | None = None
        self.peer: Gpu | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.__dict__.pop("data", None)
        with suppress(DeviceError):  # of a GPU that has stopped
            self.enter()
            for module in self._modules.values():
                module.unload()
            call("releasing the context", self._api.cuDevicePrimaryCtxRelease, self._handle)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(f"asking for {name}", self._api.cuDeviceGetAttribute, attribute, self._handle))

    @property
    def rated_bytes_per_s(self) -> float:
        """Of the memory: clock, two transfers each, and the width of its bus."""
        return 2e3 * self._attribute("MEMORY_CLOCK_RATE") * self._attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8

    def runs(self, usual: int) -> int:
        """How many readings to take: at least as many as a drift can be told from."""
        return max(9, usual // 3) if self.quick else usual

    def warm(self) -> None:
        """Keep the GPU busy until its clocks have risen."""
        self.enter()
        end = time.monotonic() + WARM_S
        while time.monotonic() < end:
            self.torch.cuda._sleep(10 * PRIME_CYCLES)
            self.torch.cuda.synchronize()

    # -- several GPUs ----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Make this GPU's context current."""
        self.torch.cuda.set_device(self.index)
        call("entering the context", self._api.cuCtxSetCurrent, self.context)

    def reaches(self, other: int) -> bool:
        """Whether this GPU and another can use each other's memory."""
        handle = call("asking for the GPU", self._api.cuDeviceGet, other)
        ask = self._api.cuDeviceCanAccessPeer
        pairs = ((self._handle, handle), (handle, self._handle))
        return all(call("asking for peer access", ask, a, b) for a, b in pairs)

    def befriend(self, other: Gpu) -> None:
        """Let both use each other's memory."""
        already = int(self._api.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        for gpu, peer in ((other, self), (self, other)):
            gpu.enter()
            (status,) = self._api.cuCtxEnablePeerAccess(peer.context, 0)
            if int(status) not in (0, already):
                raise DeviceError(f"GPU {gpu.index} cannot use GPU {peer.index}'s memory: {status.name}")
        self.peer = other

    # -- memory ----------------------------------------------------------------------------------------------

    def zeros(self, *shape: int, words: int = 8) -> torch.Tensor:
        """Zeros of four or eight bytes each on this GPU."""
        dtype = self.torch.int64 if words == 8 else self.torch.int32
        made: torch.Tensor = self.torch.zeros(shape, dtype=dtype, device=self.device)
        return made

    @cached_property
    def data(self) -> torch.Tensor:
        """Random bytes, many times what L2 holds."""
        free, _ = self.torch.cuda.mem_get_info(self.device)
        size = min(BUFFER, int(0.4 * free)) // (1 << 20) << 20
        if size < 4 * self.l2:
            raise DeviceError(f"only {free / 1e9:.1f} GB are free on GPU {self.index}", hint="end what else uses it")
        made: torch.Tensor = self.torch.empty(size // 8, dtype=self.torch.int64, device=self.device)
        return made.random_()

    @property
    def size(self) -> int:
        """Bytes of :attr:`data`."""
        return self.data.nbytes

    def fresh(self, size: int) -> int:
        """The address of bytes that were not read for as long as :attr:`data` allows: they are in no cache."""
        if size > self.size:
            raise DeviceError(f"{size / 1e6:.0f} MB are wanted, of {self.size / 1e6:.0f}", hint="free GPU memory")
        if self._next + size > self.size:
            self._next = 0
        at = self._next
        self._next += -(-size // 128) * 128
        return self.data.data_ptr() + at

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """As float64 on the host. Raises ValueError for what that rounds: of stamps take :meth:`times`."""
        host = tensor.cpu()
        if int(host.abs().max()) > EXACT:
            raise ValueError("float64 would round these")
        return host.double()

    def times(self, *stamps: torch.Tensor) -> list[torch.Tensor]:
        """Readings of %globaltimer on the host, in ns since the first of all of them."""
        hosts = [tensor.cpu() for tensor in stamps]
        first = min(int(host.min()) for host in hosts)
        return [self.read(host - first) for host in hosts]

    def ring(self, most: int, stage: int) -> int:
        """How many stages of so many bytes a block has room for, ``most`` bytes at most."""
        return min(most, self.shared - BARRIERS) // stage

    # -- launches --------------------------------------------------------------------------------------------

    def code_bytes(self, family: str, name: str) -> int:
        assert self.library is not None
        return self.library.artifact(family).kernels[name].code_bytes

    def kernel(
        self,
        family: str,
        name: str,
        *,
        blocks: int = 0,
        threads: int = 32,
        shared: int = 0,
        alone: bool = True,
        pdl: bool = False,
    ) -> Kernel:
        """A kernel, by default of one block a SM. Raises DeviceError if its blocks cannot run together.

        ``alone``: with so much shared memory that no SM takes two.
        """
        shared = max(shared, self.shared // 2 + KB) if alone else shared
        made = self.shaped(family, name, Geometry(blocks or self.sms, threads, 1, shared, pdl))
        if made.geometry.blocks > (fit := made.blocks_fit(self.sms)):
            raise DeviceError(f"{name}: of {made.geometry.blocks} blocks only {fit} can run together")
        return made

    def shaped(self, family: str, name: str, geometry: Geometry) -> Kernel:
        """A kernel whose blocks may be too many to run together."""
        self.enter()
        if family not in self._modules:
            assert self.library is not None
            self._modules[family] = Module(self.library.artifact(family).path)
        made = self._modules[family].kernel(name, geometry)
        self._allow(made)
        return made

    def _allow(self, kernel: Kernel) -> None:
        """Let a function have the most shared memory that any kernel made of it asks for.

        The driver has one limit a function, and making a kernel sets it: one with less would forbid those with more.
        """
        most = self._most[kernel.name] = max(self._most.get(kernel.name, 0), kernel.geometry.shared)
        attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        tried = f"allowing {kernel.name} {most} bytes of shared memory"
        call(tried, self._api.cuFuncSetAttribute, kernel.function, attribute, most)

    def launch(self, kernel: Kernel, *args: int | torch.Tensor) -> None:
        """Into torch's current stream. Every argument is eight bytes, a tensor's its address."""
        self.enter()
        words = [a if isinstance(a, int) else a.data_ptr() for a in args]
        kernel.launch(
            ParameterBlock(struct.pack(f"{len(words)}Q", *words)), self.torch.cuda.current_stream().cuda_stream
        )

    def begin(self, kernel: Kernel, *args: int | torch.Tensor) -> None:
        """Launch with the head (which leads ``args``) cleared."""
        self.enter()
        self.head.zero_()
        self.launch(kernel, self.head, *args)

    def finish(self, what: str) -> float:
        """Wait for what was launched; nanoseconds a clock, if the kernel told them. Raises DeviceError if it failed."""
        self.enter()
        done = self.torch.cuda.Event()
        deadline = time.monotonic() + PATIENCE_S
        try:
            done.record()
            while not done.query():
                if time.monotonic() > deadline:
                    raise DeviceError(f"{what} does not end", hint="this process must be ended to free the GPU")
            failed, clk, ns = self.head[:3].tolist()
        except RuntimeError as e:
            raise DeviceError(f"{what} failed on the device: {driver.first_line(e)}") from e
        if failed & 0xFFFFFFFF:
            raise DeviceError(f"{what}: a wait on the device ran out")
        return ns / clk if clk else 0.0

    def run(self, kernel: Kernel, *args: int | torch.Tensor) -> float:
        """:meth:`begin` and :meth:`finish`."""
        self.begin(kernel, *args)
        return self.finish(kernel.name)

    def time(self, work: Mapping[str, Callable[[], object]], runs: int, *, warm: int = 2) -> dict[str, list[float]]:
        """µs of each piece of work, in turns. The GPU spins until the host has queued it, so that is not timed."""
        cuda = self.torch.cuda
        self.enter()
        self.head.zero_()
        found: dict[str, list[float]] = {name: [] for name in work}
        for run in range(warm + runs):
            pending = []
            for name, do in work.items():
                start, end = (cuda.Event(enable_timing=True) for _ in range(2))
                cuda._sleep(PRIME_CYCLES)
                start.record()
                do()
                end.record()
                pending.append((name, start, end))
            self.finish(" and ".join(work))
            if run >= warm:
                for name, start, end in pending:
                    found[name].append(start.elapsed_time(end) * 1e3)
        return found

    def row(self, launch: Callable[[], object], times: int) -> Callable[[], object]:
        """The replay of one CUDA graph that has ``launch`` in it so many times, in order."""
        self.enter()
        self.torch.cuda.synchronize()
        made = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(made):
            for _ in range(times):
                launch()
        replay: Callable[[], Any] = made.replay
        return replay
