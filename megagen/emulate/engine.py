"""The emulator's engine: memory that remembers who wrote what, launches, and time that passes only while it runs."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megagen.emulate.footprint import Footprints
from megagen.emulate.report import Report, error
from megagen.errors import DeviceError, EmulationError
from megagen.ir.plan import Plan

ALIGNMENT = 256  # of allocations
SLICE_S = 0.1  # how long the engine runs before Python sees interrupts and reports progress
FIRST_SLICES, GROWTH = 64, 8


class Kind(IntEnum):
    """What the device may do with an allocation."""

    CONSTANT = 0  # only read it: weights, inputs, control words
    EXCHANGE = 1  # a rank's heap: all ranks write there
    OUTPUT = 2


class Expire(IntEnum):
    """When bounded waits expire, on the device's clock."""

    NEVER = 0  # a deadlock is reported instead
    STUCK = 1  # when nothing else can happen
    ANY = 2  # from some moment on that the seed picks, whatever goes on


class _Config(ctypes.Structure):
    """``megagen_emulator_config`` (include/megagen/emulate/abi.hpp)."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("arena_bytes", ctypes.c_uint64),
        ("race", ctypes.c_uint32),
        ("expire", ctypes.c_uint32),
        ("footprints", ctypes.c_uint32),
    ]


_P, _I, _U32, _U64, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "create": (_P, (ctypes.POINTER(_Config),)),
    "destroy": (None, (_P,)),
    "allocate": (_U64, (_P, _U64, _U32, _U32, _TEXT)),
    "host_wrote": (None, (_P, _U64, _U64)),
    "launch": (_I, (_P, _U32, _TEXT, _TEXT, _U64, _U32, _U32, _U32, _U32, _U32)),
    "run": (_I, (_P, _U64)),
    "error": (_TEXT, (_P,)),
    "statistics": (_TEXT, (_P,)),
    "footprints": (_TEXT, (_P,)),
}


@dataclass(frozen=True)
class Geometry:
    """``blocks`` of ``threads``, in clusters of ``cluster``, with ``shared`` bytes of dynamic shared memory each."""

    blocks: int
    threads: int
    cluster: int = 1
    shared: int = 0
    pdl: bool = False


class _Handle:
    """The engine's own memory, destroyed when neither an Engine nor a buffer of it is left."""

    def __init__(self, library: Path, config: _Config) -> None:
        self.pointer: int | None = None
        try:
            loaded = ctypes.CDLL(str(library))
            self.functions: dict[str, Any] = {}
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(loaded, f"megagen_emulator_{name}")
                function.restype, function.argtypes = result, arguments
                self.functions[name] = function
        except (OSError, AttributeError) as e:
            raise DeviceError(f"cannot load the emulated kernel {library}: {e}", hint="build it again") from e
        self.pointer = self.functions["create"](ctypes.byref(config))
        if not self.pointer:
            raise DeviceError(f"the emulator cannot reserve {config.arena_bytes:,} bytes of address space")

    def __del__(self) -> None:
        if self.pointer:
            self.functions["destroy"](self.pointer)


class Engine:
    """An engine over the library that :func:`megagen.emulate.build.compile_library` made.

    ``arena_bytes`` bounds the sum of all allocations. ``race``: report accesses that nothing orders. ``expire``
    (:class:`Expire`; True is STUCK): instead of a deadlock's report, time passes until bounded waits expire. ``seed``
    picks the interleaving; the same one repeats it. ``plans`` give errors their names. ``footprints``: remember what
    each step touches. Use it in one thread at a time. Raises DeviceError when the library cannot be loaded or there is
    no memory. Buffers outlive :meth:`close`.
    """

    def __init__(
        self,
        library: Path | str,
        *,
        arena_bytes: int,
        seed: int = 0,
        race: bool = False,
        expire: Expire | bool = False,
        footprints: bool = False,
        plans: Sequence[Plan] = (),
    ) -> None:
        self.seed = seed
        self._plans = {kernel.name: plan for plan in plans for kernel in plan.kernels}
        self._launched: dict[int, list[str]] = {}  # by each rank, in order
        config = _Config(seed=seed, arena_bytes=arena_bytes, race=race, expire=expire, footprints=footprints)
        self._live: _Handle | None = _Handle(Path(library), config)
        self._slices = FIRST_SLICES
        self._failed = False

    # -- memory ----------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, rank: int = 0, kind: Kind, name: str) -> int:
        """The address of fresh memory, which the kernel sees as never written. Raises DeviceError when it is full."""
        address = int(self._call("allocate", nbytes, rank, kind, name.encode()))
        if not address:
            raise DeviceError(f"the emulator's memory is full: no {nbytes:,} bytes for {name} of rank {rank}")
        return address

    def view(self, address: int, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Allocated memory as a buffer, to read and, before :meth:`wrote`, to write."""
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        buffer._handle = self._handle  # type: ignore[attr-defined]  # the memory lives as long as its buffers
        return buffer

    def wrote(self, address: int, nbytes: int) -> None:
        """The host has written there, before all launches that follow."""
        self._call("host_wrote", address, nbytes)

    # -- launches --------------------------------------------------------------------------------------------

    def launch(self, kernel: str, parameters: bytes, geometry: Geometry, *, rank: int = 0) -> None:
        """Queue a launch in the rank's stream; nothing runs before :meth:`run`. Raises DeviceError if it cannot be."""
        g = geometry
        status = self._call(
            "launch",
            rank,
            kernel.encode(),
            parameters,
            len(parameters),
            g.blocks,
            g.threads,
            g.cluster,
            g.shared,
            g.pdl,
        )
        if status:
            why = {1: "the library has no such kernel", 2: f"no grid can be {g}"}.get(status, f"status {status}")
            raise DeviceError(f"cannot launch {kernel} in the emulator: {why}")
        self._launched.setdefault(rank, []).append(kernel)

    def run(self, progress: Callable[[], None] = lambda: None) -> None:
        """Run until all queued launches are complete and their writes are visible. ``progress`` is called every 0.1 s.

        Raises EmulationError for a fault, after which the engine is only good for being closed. An interrupt leaves
        the launches where they are.
        """
        while True:
            began = time.perf_counter()
            status = self._call("run", self._slices)
            if status == 0:
                return
            if status != 1:
                raise self._error()
            took = max(time.perf_counter() - began, 1e-6)
            factor = min(max(SLICE_S / took, 1 / GROWTH), GROWTH)
            self._slices = max(1, round(self._slices * factor))
            progress()

    def _error(self) -> EmulationError:
        report = Report.read(self._call("error") or b"", self.seed)
        self._failed = True
        found = next((w for w in (report.who, *report.waiting, report.other) if w is not None), None)
        kernels = self._launched.get(found.rank, []) if found else []
        kernel = kernels[found.launch] if found and found.launch < len(kernels) else ""
        return error(self._plans.get(kernel), report)

    def statistics(self) -> dict[str, int | float]:
        """Counters of what ran so far."""
        found: dict[str, int | float] = json.loads(self._call("statistics"))
        return found

    def footprints(self) -> Footprints:
        """What each step of all launches so far touched; nothing unless that was asked for."""
        return Footprints.read(self._call("footprints"))

    def close(self) -> None:
        """Let go of the engine. Idempotent."""
        self._live = None

    @property
    def _handle(self) -> _Handle:
        if self._live is None:
            raise DeviceError("this emulator is closed")
        return self._live

    def _call(self, name: str, *arguments: Any) -> Any:
        handle = self._handle
        if self._failed:
            raise DeviceError("this emulator has reported a fault and cannot go on", hint="start a new one")
        return handle.functions[name](handle.pointer, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
