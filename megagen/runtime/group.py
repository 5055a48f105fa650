"""Several GPUs of this process as the live ranks of a Plan: each one's kernels store into the others' heaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import permutations
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megagen.errors import DeviceError, HangError
from megagen.ir.plan import Plan
from megagen.runtime import driver
from megagen.runtime.rank import Layer
from megagen.runtime.session import Replayable, Session

if TYPE_CHECKING:
    import torch


class Peer(Session):
    """A rank of a :class:`Group`: what it does in the current device, it does in its own."""

    def here(self) -> AbstractContextManager[object]:
        """Makes its device the current one."""
        found: AbstractContextManager[object] = self._torch.cuda.device(self.device)
        return found

    def _send(self, words: Sequence[int]) -> None:
        with self.here():
            super()._send(words)

    def launch(self, layer: Layer, stream: torch.cuda.Stream | None = None) -> None:
        with self.here():
            super().launch(layer, stream)

    def capture(
        self, layers: Sequence[Layer], *, replays: int = 1, before: Callable[[], None] = lambda: None
    ) -> Replayable:
        with self.here():
            return super().capture(layers, replays=replays, before=before)

    def settle(self) -> None:
        """Wait for whatever its GPU still does."""
        self._torch.cuda.synchronize(self.device)

    def close(self) -> None:
        with self.here():
            super().close()


class _Together:
    """Each rank's graph."""

    def __init__(self, graphs: Sequence[tuple[Peer, Replayable]]) -> None:
        self._graphs = graphs

    def replay(self) -> None:
        for rank, graph in self._graphs:
            with rank.here():
                graph.replay()


def connect(devices: Sequence[int]) -> None:
    """Let each GPU reach the others' memory. Raises DeviceError where it cannot."""
    import torch

    api = driver.api()
    contexts = {}
    for device in devices:
        handle = driver.call(f"looking up GPU {device}", api.cuDeviceGet, device)
        contexts[device] = driver.call(f"looking up GPU {device}", api.cuDevicePrimaryCtxRetain, handle)
    for one, other in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            raise DeviceError(f"GPU {one} cannot reach the memory of GPU {other}", hint="NVLink or PCIe peer access")
        with torch.cuda.device(one):
            (status,) = api.cuCtxEnablePeerAccess(contexts[other], 0)
        if status not in (api.CUresult.CUDA_SUCCESS, api.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
            raise DeviceError(f"GPU {one} cannot reach the memory of GPU {other}: {status.name}")


class Group:
    """A live rank on each of ``devices``, the Plan's other ranks stood in for.

    Raises DeviceError when a GPU is missing or unfit, or two of them cannot reach each other's memory. Launch on all
    ranks before waiting for any. Use it in one thread. The first device is torch's current one afterwards.
    """

    def __init__(
        self,
        plan: Plan,
        artifact: Path | str,
        devices: Sequence[int],
        *,
        timeout_ms: int = 2000,
        overrides: bool = True,
    ) -> None:
        for device in devices:
            driver.require_torch(device)
        connect(devices)
        self.plan = plan
        self.ranks: tuple[Peer, ...] = tuple(
            Peer(
                plan,
                artifact,
                device=device,
                live=len(devices),
                rank=rank,
                timeout_ms=timeout_ms,
                overrides=overrides,
            )
            for rank, device in enumerate(devices)
        )
        for rank in self.ranks:
            rank.meet([r.heap.data_ptr() for r in self.ranks], [r.abort_address for r in self.ranks])
        driver.require_torch(devices[0])  # the current one again

    def capture(self, launches: Sequence[Sequence[Layer]]) -> Replayable:
        """A CUDA graph a rank, replayed together; ``launches`` has each rank's layer of each."""
        return _Together([(r, r.capture([layers[r.rank] for layers in launches])) for r in self.ranks])

    def synchronize(self) -> None:
        """Wait for what was launched on all ranks. Raises what the first of them to fail raises."""
        failed: HangError | None = None
        for rank in self.ranks:
            try:
                rank.synchronize()
            except HangError as e:
                failed = failed or e
        if failed is not None:
            raise failed

    def recover(self) -> None:
        """Make every rank's heap fresh again. None is while another may still write to it."""
        for rank in self.ranks:
            rank.settle()
        for rank in self.ranks:
            rank.recover()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, DeviceError):  # a hung device would hang the unload
            self.close()
