"""A built Plan on one GPU: its buffers, its launches, and what they left behind."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from megagen.errors import DeviceError
from megagen.ir.plan import Plan
from megagen.runtime import driver, hang, heap, params
from megagen.runtime.rank import Layer, Rank

if TYPE_CHECKING:
    import torch

GRACE_S = 1.0  # how much longer than the device's own bound the host waits
UNBOUNDED_S = 30.0  # the host's patience when the device's waits have no bound
IN_FLIGHT = 64  # control words on their way to the device before the host waits; even


class Replayable(Protocol):
    """A ``torch.cuda.CUDAGraph``, of which only this much is used."""

    def replay(self) -> None: ...


class Uploads:
    """Words on their way to the device: the host writes them into one of many pinned ``buffers`` and goes on.

    ``event`` makes one that, recorded in the current stream, says when what came before is done. Recording takes as
    long as a copy, so there is one for each half of the buffers: copies must follow one another, as launches do.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], event: Callable[[], Any]) -> None:
        self._buffers: list[tuple[torch.Tensor, Any]] = [(b, b.numpy()) for b in buffers]
        self._half = len(buffers) // 2
        self._read = [event() for _ in range(2)]  # of each half
        self._format = struct.Struct(f"<{buffers[0].numel()}i")
        self._next = 0

    def send(self, words: Sequence[int], to: torch.Tensor) -> None:
        """Copy ``words`` to the device tensor ``to``, in the current stream."""
        half, place = divmod(self._next, self._half)
        if place == 0:
            self._read[half].synchronize()
        buffer, view = self._buffers[self._next]
        self._format.pack_into(view, 0, *words)
        to.copy_(buffer, non_blocking=True)
        if place == self._half - 1:
            self._read[half].record()
        self._next = (self._next + 1) % (2 * self._half)


class Session(Rank):
    """One live rank's side of a Plan.

    Allocates the heap, the control words, the route overrides and one set of outputs, and loads the cubin at
    ``artifact``; launches allocate nothing. ``live`` ranks of ``plan.tp`` are live, the others stood in for.
    ``timeout_ms`` bounds every wait on the device (0: none, for final timing). ``overrides``: give the kernel
    the table of route overrides (all "keep" at first). ``tokens`` starts at the Plan's maximum. One of several live
    ranks can launch once they have met (:class:`megagen.runtime.group.Group` makes them). ``beside`` and
    ``control``: see :class:`Rank`. ``heap``: uint8 [plan.heap.bytes] that other processes reach too, else the session
    allocates it.

    Raises DeviceError when there is no usable GPU, it is of another architecture than the Plan's, or the blocks
    cannot all be resident (the kernel would hang). Use it in one thread, one launch sequence at a time: launches
    of one session share its heap, so they must be ordered by their streams.
    """

    def __init__(
        self,
        plan: Plan,
        artifact: Path | str,
        *,
        device: int = 0,
        live: int = 1,
        rank: int = 0,
        timeout_ms: int = 2000,
        overrides: bool = True,
        beside: Session | None = None,
        heap: torch.Tensor | None = None,
        control: torch.Tensor | None = None,
    ) -> None:
        self._own_heap = heap
        self._torch = torch = driver.require_torch(device)
        device_ = torch.device("cuda", device)
        properties = torch.cuda.get_device_properties(device_)
        capability = (properties.major, properties.minor)
        if not driver.runs(plan.machine.arch, capability):
            raise DeviceError(
                f"the plan is for {plan.machine.name} ({plan.machine.arch}), GPU {device} is a {properties.name} "
                f"(compute capability {capability[0]}.{capability[1]})",
                hint="build the schedule for this GPU with --machine",
            )
        self._module = driver.Module(Path(artifact))
        geometry = driver.Geometry(
            blocks=plan.launch.blocks,
            threads=32 * plan.launch.warps,
            cluster=plan.launch.cluster,
            shared=plan.launch.shared_bytes,
            pdl=plan.launch.pdl,
        )
        self.kernels = [self._module.kernel(k.name, geometry) for k in plan.kernels]
        for kernel in self.kernels:
            fit = kernel.blocks_fit(properties.multi_processor_count)
            if geometry.blocks > fit:
                raise DeviceError(
                    f"{kernel.name} has {geometry.blocks} blocks in clusters of {geometry.cluster}, of which "
                    f"only {fit} can be resident on {properties.name}: it would hang",
                    hint=f"launch at most {fit} blocks",
                )

        pinned = torch.zeros(IN_FLIGHT, params.CONTROL_WORDS, dtype=torch.int32, pin_memory=True)
        self._uploads = Uploads(list(pinned), torch.cuda.Event)
        if plan.fused:
            self.code = self._module.code(plan.kernels[0].name)
        super().__init__(
            plan,
            device_,
            live=live,
            rank=rank,
            timeout_ms=timeout_ms,
            overrides=overrides,
            beside=beside,
            control=control,
        )
        self._side = torch.cuda.Stream(self.device)  # reads progress while the launch stream is busy
        self._progress = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        if live == 1:
            self.meet([self.heap.data_ptr()], [self.abort_address])

    def meet(self, heaps: Sequence[int], aborts: Sequence[int]) -> None:
        """Ends the making of one of several live ranks: their heaps and abort words are at these addresses."""
        self._join(heaps, aborts)
        self.recover()

    def _empty(self, name: str, what: str, dtype: Any, shape: Sequence[int]) -> torch.Tensor:
        if what == "exchange" and self._own_heap is not None:
            return self._own_heap
        try:
            made: torch.Tensor = self._torch.empty(tuple(shape), dtype=self._dtype(dtype), device=self.device)
        except self._torch.OutOfMemoryError as e:
            raise DeviceError(f"allocating the session's buffers: {driver.first_line(e)}") from e
        return made

    def _settled(self, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        # A launch may read its weights before the stream's previous work is done (PDL): what is being uploaded is not.
        if self.device.type == "cuda":
            self._torch.cuda.current_stream(self.device).synchronize()
        return given

    def _send(self, words: Sequence[int]) -> None:
        self._uploads.send(words, self._control)

    # -- launches --------------------------------------------------------------------------------------------

    def launch(self, layer: Layer, stream: torch.cuda.Stream | None = None) -> None:
        """Launch the Plan's kernels in order into ``stream`` (default: torch's current). Returns at once."""
        handle = (stream or self._torch.cuda.current_stream(self.device)).cuda_stream
        for kernel in self.kernels:
            kernel.launch(layer.block, handle)

    def capture(
        self, layers: Sequence[Layer], *, replays: int = 1, before: Callable[[], None] = lambda: None
    ) -> Replayable:
        """A CUDA graph that launches ``layers`` in order, ``replays`` times over. Keep the layers as long as it.

        ``before`` queues what the graph begins with, into the current stream.
        """
        torch = self._torch
        graph: Replayable = torch.cuda.CUDAGraph()
        try:
            # torch's own stream for this belongs to the device that captured first
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.device)):
                before()
                for _ in range(replays):
                    for layer in layers:
                        self.launch(layer)
        except RuntimeError as e:
            raise DeviceError(f"capturing {len(layers)} launches in a CUDA graph: {driver.first_line(e)}") from e
        return graph

    def synchronize(self, stream: torch.cuda.Stream | None = None) -> None:
        """Wait for what was launched into ``stream`` (default: torch's current).

        Raises HangError when a wait on the device expired: call :meth:`recover` before the next launch. Raises
        DeviceError when a launch failed, or when the device makes no progress for longer than its own bound.
        """
        torch = self._torch
        done = torch.cuda.Event()
        try:
            done.record(stream or torch.cuda.current_stream(self.device))
            self._wait(done)
            abort = self.aborted()
            if abort == 0:
                return
            records = self.hang_records()
        except RuntimeError as e:
            raise DeviceError(
                f"{self.plan.name} failed on the device: {driver.first_line(e)}",
                hint="CUDA work in this process cannot go on; compute-sanitizer shows the faulty access",
            ) from e
        raise hang.error(self.plan, abort, records, timeout_ms=self.timeout_ms)

    def _wait(self, done: torch.cuda.Event) -> None:
        """Poll ``done``; give up when no launch completes for longer than the device's own waits may take."""
        patience = self.timeout_ms / 1000 + GRACE_S if self.timeout_ms else UNBOUNDED_S
        deadline, seen = time.monotonic() + patience, self._epoch_aside()
        while not done.query():
            if time.monotonic() > deadline:
                now = self._epoch_aside()
                if now is None or now == seen:
                    raise DeviceError(
                        f"{self.plan.name}: no launch completed within {patience:.1f} s, nor reported an expired wait",
                        hint="the device hangs outside any bounded wait; this process must be ended to free it",
                    )
                deadline, seen = time.monotonic() + patience, now
            time.sleep(20e-6)

    def _epoch_aside(self) -> int | None:
        """Block 0's epoch word, read past the busy stream; None if that takes longer than 0.2 s."""
        torch = self._torch
        start = self.plan.heap.epoch_offset
        with torch.cuda.stream(self._side):
            self._progress.copy_(self.heap[start : start + 4].view(torch.int32), non_blocking=True)
            landed = torch.cuda.Event()
            landed.record(self._side)
        deadline = time.monotonic() + 0.2
        while not landed.query():
            if time.monotonic() > deadline:
                return None
            time.sleep(20e-6)
        return int(self._progress[0])

    def recover(self) -> None:
        """Make the heap fresh again: after a HangError, or to start counting epochs anew."""
        self._torch.cuda.synchronize(self.device)
        heap.reset(self.heap, self.plan)
        self._torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Unload the module. Layers and graphs of this session must not be launched any more."""
        self._torch.cuda.synchronize(self.device)
        self._module.unload()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, DeviceError):  # a hung device would hang the unload
            self.close()
