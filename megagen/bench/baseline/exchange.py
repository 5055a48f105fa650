"""How the ranks of an op-by-op layer exchange messages: where a message is written, and what brings it to all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Place:
    """An exchange. The writer's kernel fills ``write`` [places, rows, columns], the r-th rotated by 16 r columns; then
    ``send``, if there is any, brings it to ``read`` [ranks, rows, columns]: all messages, or what is to be added."""

    write: torch.Tensor
    read: torch.Tensor
    send: Callable[[], object] | None = None


class Exchange(Protocol):
    def gathered(self, rows: int, columns: int) -> Place:
        """Every rank's message in rank order."""

    def reduced(self, rows: int, columns: int) -> Place:
        """Contributions to a sum."""


class StandIns:
    """One GPU for all ``tp`` ranks. Writers store the other ranks' messages themselves, so an exchange costs those
    stores and no launch: less than any that leaves the GPU."""

    def __init__(self, tp: int, device: torch.device) -> None:
        self.tp, self.device = tp, device

    def gathered(self, rows: int, columns: int) -> Place:
        both = torch.zeros(self.tp, rows, columns, dtype=torch.bfloat16, device=self.device)
        return Place(both, both)

    reduced = gathered


class Ranks:
    """A process and a GPU a rank. Gathers are NCCL's, sums torch's one-shot all-reduce, which wants symmetric
    memory."""

    def __init__(self, group: Any, device: torch.device) -> None:
        import torch.distributed as dist

        self.group, self.device = group, device
        self.tp, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def gathered(self, rows: int, columns: int) -> Place:
        import torch.distributed as dist

        read = torch.zeros(self.tp, rows, columns, dtype=torch.bfloat16, device=self.device)
        write = read[self.rank : self.rank + 1]
        return Place(write, read, lambda: dist.all_gather_into_tensor(read.flatten(), write.flatten(), self.group))

    def reduced(self, rows: int, columns: int) -> Place:
        from torch.distributed import _symmetric_memory as symmetric

        write = symmetric.empty(1, rows, columns, dtype=torch.bfloat16, device=self.device)
        symmetric.rendezvous(write, self.group)
        read, name = torch.zeros_like(write), self.group.group_name
        return Place(write, read, lambda: torch.ops.symm_mem.one_shot_all_reduce_out(write, "sum", name, read))
