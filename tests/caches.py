"""Caches of keys and values as kernels keep them, from plain rows, one element's place at a time."""

from __future__ import annotations

import torch

CHUNK, D = 64, 64  # numbers, dims


def _laid(chunks: torch.Tensor) -> torch.Tensor:
    """[..., 64, 64] in pieces of 8 rows of 8, row by row."""
    row, column = torch.arange(64)[:, None], torch.arange(64)[None, :]
    place = (row // 8 * 8 + column // 8) * 64 + row % 8 * 8 + column % 8
    out = torch.empty_like(chunks).flatten(-2)
    out[..., place.flatten()] = chunks.flatten(-2)
    return out.view(chunks.shape)


def keys(rows: torch.Tensor) -> torch.Tensor:
    """[kv_heads, chunks * 64, 64] of number, dim."""
    return _laid(rows.unflatten(1, (-1, CHUNK))).flatten(1, 2)


def values(rows: torch.Tensor) -> torch.Tensor:
    """[kv_heads, chunks, 64, 64] of the same: turned within a chunk."""
    return _laid(rows.unflatten(1, (-1, CHUNK)).transpose(2, 3).contiguous())
