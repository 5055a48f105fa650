"""A rank's heap: its initial image, and what must be empty again between launches."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from megagen.ir.graph import Scope
from megagen.ir.plan import ChannelPlan, Plan, SyncKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fill:
    """``bytes`` from ``offset`` hold the 32-bit ``word`` over and over. All else in a fresh heap is zero."""

    offset: int
    bytes: int
    word: int


def fills(plan: Plan) -> list[Fill]:
    """What to write over zeros: every copy of every lamport channel holds its empty word.

    Counters, epochs, the abort word and the hang records start at zero.
    """
    lamport = (c for c in plan.channels if c.kind is SyncKind.LAMPORT)
    return [Fill(c.offset, c.bytes * c.copies, c.empty) for c in lamport if c.empty]


def image(plan: Plan) -> bytearray:
    """A fresh heap as bytes on the host."""
    data = bytearray(plan.heap.bytes)
    for f in fills(plan):
        data[f.offset : f.offset + f.bytes] = f.word.to_bytes(4, "little") * (f.bytes // 4)
    return data


def reset(heap: torch.Tensor, plan: Plan) -> None:
    """Make ``heap`` (uint8 [plan.heap.bytes]) fresh, in the current stream."""
    heap.zero_()
    for f in fills(plan):
        _words(heap, f.offset, f.bytes).fill_(_signed(f.word))


def epochs(heap: torch.Tensor, plan: Plan) -> list[int]:
    """Completed launches since the reset, as each block counts them."""
    return [int(w) for w in _words(heap, plan.heap.epoch_offset, 4 * plan.launch.blocks).tolist()]


@dataclass(frozen=True)
class Leftover:
    """``words`` words of a channel's copy that should be empty after a launch and are not; ``first`` is the lowest."""

    channel: str
    copy: int
    words: int
    first: int

    def __str__(self) -> str:
        return f"{self.channel}[copy {self.copy}]: {self.words} words not empty, the first is word {self.first}"


def leftovers(heap: torch.Tensor, plan: Plan, epoch: int) -> list[Leftover]:
    """Slots and counters that the next launch expects empty and that are not, after ``epoch`` launches."""
    found = []
    for c in plan.channels:
        copy = epoch % c.copies  # the one that the next launch uses
        if c.kind is SyncKind.LAMPORT and c.empty is not None:
            offset, size, empty = c.offset + copy * c.bytes, c.bytes, c.empty
        elif c.counter_offset is not None:
            offset, size, empty = c.counter_offset + 4 * copy, 4, 0
        else:
            continue
        full = (_words(heap, offset, size) != _signed(empty)).nonzero()
        if len(full):
            found.append(Leftover(channel=c.name, copy=copy, words=len(full), first=int(full[0])))
    return found


def values(copy: torch.Tensor, channel: ChannelPlan, world: int) -> torch.Tensor:
    """A channel's ``copy`` (typed, flat) in the Plan's shape; a view or a copy.

    In memory a rank's message is rows of ``shard`` elements at the channel's strides; ranks either share the last
    axis (a gather) or are the first axis (contributions to a sum).
    """
    ranks = world if channel.scope is Scope.WORLD else 1
    gathered = channel.shape[-1] == ranks * channel.shard
    rows = prod(channel.shape[:-1] if gathered else channel.shape[1:-1])
    parts = copy.as_strided((ranks, rows, channel.shard), (channel.rank_stride, channel.row_stride, 1))
    return (parts.transpose(0, 1) if gathered else parts).reshape(channel.shape)


def _words(heap: torch.Tensor, offset: int, size: int) -> torch.Tensor:
    import torch

    return heap[offset : offset + size].view(torch.int32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
