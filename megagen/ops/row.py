"""What ops that work on whole rows share: eight warps a row, one fixed tree for its sums (mem/row.cuh)."""

from __future__ import annotations

SLICES = 8  # of a row, one a warp


def group_scratch(sums: int) -> int:
    """Bytes in which eight warps add ``sums`` numbers: two rounds, so that a fast warp overwrites nothing."""
    return 2 * SLICES * sums * 4
