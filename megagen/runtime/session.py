"""A built Plan on one GPU: its buffers, its launches, and what they left behind."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from megagen.errors import DeviceError
from megagen.ir.plan import ChannelPlan, Plan, Reset, SyncKind
from megagen.runtime import driver, hang, heap, params

if TYPE_CHECKING:
    import torch

GRACE_S = 1.0  # how much longer than the device's own bound the host waits
UNBOUNDED_S = 30.0  # the host's patience when the device's waits have no bound


class Replayable(Protocol):
    """A ``torch.cuda.CUDAGraph``, of which only this much is used."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class Layer:
    """Parameters bound for launching. Keeps its tensors alive; ``tensors`` has them by parameter name."""

    tensors: Mapping[str, torch.Tensor]
    block: driver.ParameterBlock


class Session:
    """One live rank's side of a Plan.

    Allocates the heap, the control words, the route overrides and one set of outputs, and loads the cubin at
    ``artifact``; launches allocate nothing. ``live`` ranks of ``plan.tp`` are live, the others stood in for.
    ``timeout_ms`` bounds every wait on the device (0: none, for final timing). ``overrides``: give the kernel
    the table of route overrides (all "keep" at first). ``tokens`` starts at the Plan's maximum.

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
    ) -> None:
        self._torch = torch = driver.require_torch(device)
        self.plan, self.device, self.timeout_ms = plan, torch.device("cuda", device), timeout_ms
        self.live, self.rank = live, rank
        properties = torch.cuda.get_device_properties(self.device)
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

        route = next((o.constants for o in plan.ops if o.kind == "top_k"), None)
        self.top_k = int(route["kTopK"]) if route else 0
        self.experts = int(route["kExperts"]) if route else 0
        try:
            self.heap = torch.empty(plan.heap.bytes, dtype=torch.uint8, device=self.device)
            self._control = torch.zeros(params.CONTROL_WORDS, dtype=torch.int32, device=self.device)
            self._routes = torch.full((plan.tokens, max(1, self.top_k)), -1, dtype=torch.int32, device=self.device)
            self.outputs = {
                p.name: torch.empty(p.shape, dtype=self._dtype(p.dtype), device=self.device)
                for p in plan.params
                if p.what == "output"
            }
        except torch.OutOfMemoryError as e:
            raise DeviceError(f"allocating the session's buffers: {driver.first_line(e)}") from e
        self._system = params.System(
            heaps=[self.heap.data_ptr()],  # live peers' heaps join here
            control=self._control.data_ptr(),
            route_override=self._routes.data_ptr() if overrides and self.top_k else 0,
            rank=rank,
            live=live,
            world=plan.tp,
            timeout_ms=timeout_ms,
        )
        self._system.pack()  # refuse an impossible world now
        self._expected = params.expected(plan)
        self._side = torch.cuda.Stream(self.device)  # reads progress while the launch stream is busy
        self._progress = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.tokens = plan.tokens
        self.set_tokens(plan.tokens)
        self.poison()
        self.recover()

    # -- what the launches work on ---------------------------------------------------------------------------

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> Layer:
        """Check and bind a tensor for each parameter; the session's own outputs stand in for outputs not given.

        Weights are in the packed layout of :mod:`megagen.ops.packing`, on this session's device. Raises DeviceError
        that names every parameter that is missing, unknown, of wrong type or size, strided or misaligned.
        """
        given = {**self.outputs, **tensors}
        problems = [f"{name}: no such parameter" for name in given if name not in self._expected]
        problems += [
            f"{name}: {problem}"
            for name, want in self._expected.items()
            if (problem := self._problem(want, given.get(name))) is not None
        ]
        if problems:
            raise DeviceError(
                f"{self.plan.name}: {len(problems)} of {len(self._expected)} parameters cannot be bound",
                notes=tuple((p, None) for p in problems),
                hint="parameters: " + ", ".join(self._expected),
            )
        # A launch may read its weights before the stream's previous work is done (PDL): what is being uploaded is not.
        if self.device.type == "cuda":
            self._torch.cuda.current_stream(self.device).synchronize()
        data = params.pack(self.plan, self._system, {name: t.data_ptr() for name, t in given.items()})
        return Layer(tensors=given, block=driver.ParameterBlock(data))

    def _problem(self, want: params.Expected, t: torch.Tensor | None) -> str | None:
        if t is None:
            return f"missing {want.what}"
        size = t.numel() * t.element_size()
        if t.dtype is not self._dtype(want.dtype):
            return f"is {t.dtype}, must be torch.{want.dtype}"
        if size != want.bytes:
            return f"has {size:,} bytes, must have {want.bytes:,}"
        if t.device != self.device:
            return f"is on {t.device}, must be on {self.device}"
        if not t.is_contiguous():
            return "is not contiguous"
        if t.data_ptr() % params.ALIGNMENT:
            return f"starts at {t.data_ptr():#x}, must be aligned to {params.ALIGNMENT} bytes"
        return None

    def _dtype(self, name: Any) -> torch.dtype:
        """torch's dtype for a DType of the Plan or a torch name."""
        found: torch.dtype = getattr(self._torch, params.TORCH_NAMES.get(name, name))
        return found

    def set_tokens(self, tokens: int) -> None:
        """Tokens of the launches that follow in the current stream, captured graphs included; 1 to plan.tokens."""
        if not 1 <= tokens <= self.plan.tokens:
            raise DeviceError(f"{tokens} tokens: a launch of {self.plan.name} takes 1 to {self.plan.tokens}")
        self.tokens = tokens
        self._control[:1].fill_(tokens)

    def set_route_override(self, table: torch.Tensor | None) -> None:
        """Expert ids that replace the router's in the launches that follow; int32 [tokens, top_k], distinct in a row.

        A row of -1 keeps the router's choice, None all of them. For benches and tests. Takes a host tensor, whose ids
        are checked, or a device tensor, whose are not (that would stall the stream): the caller vouches for them.
        """
        if table is None:
            self._routes.fill_(-1)
            return
        if not self._system.route_override:
            raise DeviceError("this session takes no route overrides")
        rows = table.shape[0] if table.dim() == 2 else 0
        if not 1 <= rows <= self.plan.tokens or table.shape[1] != self.top_k or table.dtype is not self._torch.int32:
            raise DeviceError(
                f"a route override of {table.dtype} {list(table.shape)}",
                hint=f"it must be torch.int32 [1 to {self.plan.tokens}, {self.top_k}]",
            )
        if table.device.type == "cpu":
            self._refuse_routes(table)
        self._routes[rows:].fill_(-1)
        self._routes[:rows].copy_(table, non_blocking=True)

    def _refuse_routes(self, table: torch.Tensor) -> None:
        """An expert twice in a row would leave one of its slots without a producer: a hang."""
        if not bool(((table >= -1) & (table < self.experts)).all()):
            raise DeviceError(f"a route override names an expert outside -1 to {self.experts - 1}")
        whole = (table >= 0).all(1)
        if bool(((table >= 0).any(1) & ~whole).any()):
            raise DeviceError(
                "a route override forces some of a token's experts", hint="force all of them, or none (-1)"
            )
        ordered = table[whole].sort(1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise DeviceError("a route override names an expert twice for one token")

    def poison(self) -> None:
        """Fill the session's outputs with NaN, so that what a launch leaves out shows."""
        for out in self.outputs.values():
            out.fill_(float("nan") if out.is_floating_point() else -1)

    # -- launches --------------------------------------------------------------------------------------------

    def launch(self, layer: Layer, stream: torch.cuda.Stream | None = None) -> None:
        """Launch the Plan's kernels in order into ``stream`` (default: torch's current). Returns at once."""
        handle = (stream or self._torch.cuda.current_stream(self.device)).cuda_stream
        for kernel in self.kernels:
            kernel.launch(layer.block, handle)

    def capture(self, layers: Sequence[Layer], *, replays: int = 1) -> Replayable:
        """A CUDA graph that launches ``layers`` in order, ``replays`` times over. Keep the layers as long as it."""
        torch = self._torch
        graph: Replayable = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
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
            abort = int(self._u32(self.plan.heap.abort_offset))
            if abort == 0:
                return
            start = self.plan.heap.record_offset
            size = hang.RECORD_BYTES * self.plan.launch.blocks * self.plan.launch.warps
            records = hang.decode(bytes(self.heap[start : start + size].cpu().numpy().tobytes()))
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

    # -- what the launches left ------------------------------------------------------------------------------

    def epoch(self) -> int:
        """Completed launches since the last reset. Raises DeviceError when the blocks disagree."""
        counts = set(heap.epochs(self.heap, self.plan))
        if len(counts) != 1:
            raise DeviceError(f"the blocks disagree on the number of launches: {sorted(counts)}")
        return counts.pop()

    def unreadable(self, channel: ChannelPlan) -> str | None:
        """Why a channel's data is not in the heap after a launch, or None when it is."""
        if channel.kind in (SyncKind.MBARRIER, SyncKind.CLUSTER):
            return "lives in shared memory"
        if channel.reset is Reset.READER:
            return "is reset by its reader"
        return None

    def read(self, name: str) -> torch.Tensor:
        """What the last completed launch left in channel ``name``: a copy, typed and shaped as in the Plan.

        u32 comes as int32. Rows past the launch's tokens hold whatever the channel's empty word means.
        """
        channel = self.plan.channel(name)
        reason, epoch = self.unreadable(channel), self.epoch()
        if reason or epoch == 0:
            raise DeviceError(f"channel {name} cannot be read: it {reason or 'has not been written since the reset'}")
        start = channel.offset + (epoch - 1) % channel.copies * channel.bytes
        dtype = self._dtype(channel.dtype)
        copy = self.heap[start : start + channel.bytes].clone().view(dtype)
        return heap.values(copy, channel, self.plan.tp)

    def leftovers(self) -> list[heap.Leftover]:
        """Slots that should be empty for the next launch and are not."""
        return heap.leftovers(self.heap, self.plan, self.epoch())

    def _u32(self, offset: int) -> int:
        return int(self.heap[offset : offset + 4].view(self._torch.int32).item()) & 0xFFFFFFFF

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
