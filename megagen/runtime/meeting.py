"""Ranks in processes of their own: how kernels reach the others' memory, and how hosts wait for each other."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megagen.errors import DeviceError
from megagen.runtime import driver
from megagen.runtime.params import ALIGNMENT

if TYPE_CHECKING:
    import torch

PATIENCE_S = 60.0  # for the slowest rank to start
LOADING_S = 24 * 3600.0  # for it to load: packing may take one rank many minutes longer; who ends is noticed at once
SIGNAL_MS = 2000  # for a barrier on the device
NEEDED = ("MASTER_ADDR", "MASTER_PORT")


class Meeting:
    """Rank ``rank`` of ``live`` processes of this machine, each with its GPU ``device``.

    They find each other as torch.distributed does, by MASTER_ADDR and MASTER_PORT, or in the process group that there
    is already. Raises DeviceError when these are not set, when a rank does not come within a minute, when the group is
    another one, or when GPUs cannot reach each other's memory.
    """

    def __init__(self, rank: int, live: int, device: int) -> None:
        # Symmetric memory without NVLink multicast: nothing here uses it, and not every machine has it.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._torch = torch = driver.require_torch(device)
        import torch.distributed as dist

        self.rank, self.live, self.device = rank, live, torch.device("cuda", device)
        self._dist = dist
        own = not dist.is_initialized()
        if own:
            if missing := [name for name in NEEDED if name not in os.environ]:
                raise DeviceError(f"rank {rank} of {live} cannot find the others: {' and '.join(missing)} not set")
            try:
                dist.init_process_group("gloo", rank=rank, world_size=live, timeout=timedelta(seconds=PATIENCE_S))
            except (RuntimeError, ValueError) as e:
                raise DeviceError(
                    f"rank {rank} cannot meet the others: {driver.first_line(e)}",
                    hint=f"they meet at {' '.join(f'{name}={os.environ[name]}' for name in NEEDED)}",
                ) from e
        elif (dist.get_rank(), dist.get_world_size()) != (rank, live):
            raise DeviceError(
                f"rank {rank} of {live} is rank {dist.get_rank()} of {dist.get_world_size()} in torch's process group"
            )
        self._group: Any = dist.group.WORLD if own else dist.new_group(backend="gloo")
        self.places: list[list[int]] = []  # of each rank, where its parts are

    def memory(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """uint8 tensors of these sizes, of which every rank has the like: ``places`` then has all ranks' addresses.

        All ranks call it, once, with the same sizes.
        """
        from torch.distributed import _symmetric_memory as symmetric

        torch = self._torch
        offsets, size = [], 0
        for n in sizes:
            offsets.append(size)
            size += -(-n // ALIGNMENT) * ALIGNMENT
        try:
            arena = symmetric.empty(size, dtype=torch.uint8, device=self.device)
            self._handle: Any = symmetric.rendezvous(arena, self._group)
        except RuntimeError as e:
            raise DeviceError(
                f"rank {self.rank} cannot share {size:,} bytes with the others: {driver.first_line(e)}",
                hint="the GPUs must reach each other's memory, over NVLink or PCIe",
            ) from e
        self._arena, self._offsets = arena, offsets
        self.places = [[base + offset for offset in offsets] for base in self._handle.buffer_ptrs]
        return [arena[offset : offset + n] for offset, n in zip(offsets, sizes, strict=True)]

    def wait(self) -> None:
        """Until all ranks are here, however long they load. Raises DeviceError when one has ended."""
        self._torch.cuda.synchronize(self.device)
        try:
            self._dist.monitored_barrier(self._group, timedelta(seconds=LOADING_S))
        except RuntimeError as e:
            named = re.search(r"Rank (\d+) failed", str(e))
            who = f"rank {named[1]}" if named else "one of them"
            raise DeviceError(
                f"rank {self.rank} waits for the others to load, and {who} has ended", hint="what it said tells why"
            ) from e

    def gather(self, part: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``part`` of the memory, with the type and shape of ``like``: copies, made in the current stream
        after all ranks' streams have come as far. All ranks call it."""
        offset = self._offsets[part] // like.element_size()
        self._handle.barrier(timeout_ms=SIGNAL_MS)
        copies = [
            self._handle.get_buffer(r, tuple(like.shape), like.dtype, offset).to(self.device, copy=True)
            for r in range(self.live)
        ]
        self._handle.barrier(timeout_ms=SIGNAL_MS)  # nobody writes there again before all have read
        return copies

    def close(self) -> None:
        """Leave. A process group that was there stays, and the memory until nobody has the meeting or a part of it."""
        if self._group is not None:
            self._dist.destroy_process_group(self._group)
            self._group = None
