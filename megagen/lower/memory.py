"""Laying things out one after another: shared memory and the heap."""

from __future__ import annotations


class Arena:
    """Hands out aligned offsets."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, size: int, align: int) -> int:
        """Offset of ``size`` fresh bytes."""
        offset = -(-self.size // align) * align
        self.size = offset + size
        return offset
