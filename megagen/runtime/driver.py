"""The CUDA driver, as far as megagen uses it: checked calls that raise :class:`DeviceError` with the driver's own name.

The primary context that torch made must be current in the calling thread (any CUDA call of torch sees to it).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagen.compile.report import sections
from megagen.errors import DeviceError

CODE_ALIGNMENT = 128
PORTABLE_CLUSTER = 8  # blocks; larger clusters must be opted into
INSTALL = "install the GPU extra: pip install 'megagen[gpu]' (in a checkout: pip install -e '.[gpu]')"


def api() -> Any:
    """The bindings module; raises DeviceError when it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise DeviceError(f"cuda-bindings cannot be imported: {e}", hint=INSTALL) from e
    return driver


def call(tried: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a driver function; its value (a tuple if several), or DeviceError saying what was ``tried``."""
    try:
        status, *values = function(*args)
    except RuntimeError as e:  # the bindings load libcuda on first use
        raise DeviceError(f"{tried}: {e}", hint="is the NVIDIA driver installed? `nvidia-smi` must work") from e
    if int(status) != 0:
        driver = api()
        name, text = (f(status)[1] for f in (driver.cuGetErrorName, driver.cuGetErrorString))
        shown = name.decode() if name else f"error {int(status)}"
        raise DeviceError(f"{tried}: {shown}", hint=text.decode() if text else None)
    return values[0] if len(values) == 1 else tuple(values) or None


def require_torch(device: int) -> Any:
    """The torch module with CUDA initialised on ``device``; raises DeviceError with a hint when that is impossible."""
    try:
        import torch
    except ImportError as e:
        raise DeviceError("torch is not installed", hint=INSTALL) from e
    if not torch.cuda.is_available():
        hint = "is there an NVIDIA GPU, and does `nvidia-smi` work?"
        if torch.version.cuda is None:
            hint = f"torch {torch.__version__} was built without CUDA; install a CUDA build"
        raise DeviceError("no usable GPU", hint=hint)
    count = torch.cuda.device_count()
    if not 0 <= device < count:
        raise DeviceError(f"no GPU {device}", hint=f"this machine has {count}: 0 to {count - 1}")
    try:
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
    except RuntimeError as e:
        raise DeviceError(f"GPU {device} does not start: {first_line(e)}") from e
    return torch


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a cubin for ``arch`` (sm_90a, sm_100f, sm_90) runs on a GPU of this compute capability."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    if match[3] == "a":  # architecture-specific: this one only
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def version() -> str:
    """The kernel driver's version where the system tells it, else the CUDA version that the driver supports."""
    proc = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+[.\d]*)\s", proc.read_text()) if proc.is_file() else None
    if found:
        return found[1]
    number = int(call("asking for the driver's version", api().cuDriverGetVersion))
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


@dataclass(frozen=True)
class Geometry:
    """``blocks`` of ``threads``, in clusters of ``cluster``, with ``shared`` bytes of dynamic shared memory each."""

    blocks: int
    threads: int
    cluster: int
    shared: int
    pdl: bool


class Kernel:
    """A function of a module with its launch configuration, ready to go into any stream."""

    def __init__(self, name: str, function: Any, geometry: Geometry) -> None:
        driver = api()
        self.name, self.function, self.geometry = name, function, geometry
        attribute = driver.CUfunction_attribute
        self._set(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, geometry.shared, "dynamic shared memory")
        if geometry.cluster > PORTABLE_CLUSTER:
            self._set(attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, "a large cluster")
        self._config = driver.CUlaunchConfig()
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = geometry.blocks, 1, 1
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = geometry.threads, 1, 1
        self._config.sharedMemBytes = geometry.shared
        self._config.hStream = driver.CUstream(0)
        attributes = self._attributes()
        self._config.attrs, self._config.numAttrs = attributes, len(attributes)

    def _set(self, attribute: Any, value: int, what: str) -> None:
        tried = f"allowing {self.name} {what} ({value})"
        call(tried, api().cuFuncSetAttribute, self.function, attribute, value)

    def _attributes(self) -> list[Any]:
        driver, found = api(), []
        if self.geometry.cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dim = cluster.value.clusterDim
            dim.x, dim.y, dim.z = self.geometry.cluster, 1, 1
            found.append(cluster)
        if self.geometry.pdl:
            pdl = driver.CUlaunchAttribute()
            pdl.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            pdl.value.programmaticStreamSerializationAllowed = 1
            found.append(pdl)
        return found

    def blocks_fit(self, sms: int) -> int:
        """Blocks of this kernel that can be resident together on a GPU with ``sms`` SMs."""
        driver, g, tried = api(), self.geometry, f"asking how many blocks of {self.name} fit"
        if g.cluster == 1:
            return sms * int(
                call(tried, driver.cuOccupancyMaxActiveBlocksPerMultiprocessor, self.function, g.threads, g.shared)
            )
        return g.cluster * int(call(tried, driver.cuOccupancyMaxActiveClusters, self.function, self._config))

    def launch(self, block: ParameterBlock, stream: int) -> None:
        """Launch into the stream with handle ``stream`` (also one that is being captured). Allocates nothing there."""
        self._config.hStream = stream
        call(f"launching {self.name}", api().cuLaunchKernelEx, self._config, self.function, block.pointer, 0)


class ParameterBlock:
    """The bytes of the kernel's single by-value parameter, at an address that stays put."""

    def __init__(self, data: bytes) -> None:
        self._data = ctypes.create_string_buffer(data, len(data))
        self._list = (ctypes.c_void_p * 1)(ctypes.addressof(self._data))
        self.pointer = ctypes.addressof(self._list)  # void** kernelParams

    @property
    def bytes(self) -> bytes:
        return self._data.raw


class Module:
    """A cubin loaded into the current context."""

    def __init__(self, path: Path) -> None:
        try:
            image = path.read_bytes()
        except OSError as e:
            raise DeviceError(f"cannot read the cubin {path}: {e.strerror}", hint="build it again") from e
        self.path = path
        self._handle: Any = call(f"loading {path.name}", api().cuModuleLoadData, image)

    def kernel(self, name: str, geometry: Geometry) -> Kernel:
        tried = f"looking up kernel {name} in {self.path.name}"
        return Kernel(name, call(tried, api().cuModuleGetFunction, self._handle, name.encode()), geometry)

    def code(self, name: str) -> tuple[int, int]:
        """Address and bytes of a kernel's machine code; (0, 0) where the module does not tell (``<name>_code``)."""
        driver = api()
        status, place, _ = driver.cuModuleGetGlobal(self._handle, f"{name}_code".encode())
        if status == driver.CUresult.CUDA_ERROR_NOT_FOUND:
            return 0, 0
        tried, word = f"asking where the code of {name} lies", ctypes.c_uint64()
        if int(status) != 0:
            raise DeviceError(f"{tried}: {status.name}")
        call(tried, driver.cuMemcpyDtoH, ctypes.addressof(word), place, ctypes.sizeof(word))
        if word.value >> 32 == 0 or word.value % CODE_ALIGNMENT:
            raise DeviceError(f"{tried}: {word.value:#x} is no address of code", hint="leave warm_code out")
        return word.value, len(sections(self.path.read_bytes())[f".text.{name}"])

    def unload(self) -> None:
        """Unload; kernels and captured graphs of this module must not be used any more. Idempotent."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            call(f"unloading {self.path.name}", api().cuModuleUnload, handle)
