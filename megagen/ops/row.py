"""What ops that work on rows share: eight warps a row, or a warp a piece of it, and one fixed tree for its sums
(mem/row.cuh)."""

from __future__ import annotations

SLICES = 8  # of a row, one a warp
PIECE = 256  # columns of a row, where a warp has so many: a vector of 16 bytes of bf16 a lane


def group_scratch(sums: int) -> int:
    """Bytes in which eight warps add ``sums`` numbers: two rounds, so that a fast warp overwrites nothing."""
    return 2 * SLICES * sums * 4
