"""The layouts of :mod:`megagen.ops.packing` made on a CPU: the same bytes, several times as fast on one core.

NVFP4 words come from two tables of 65,536 entries, by four codes of a row at once, and what is worked on at a time
stays in a core's cache. numpy lets go of the interpreter and starts no threads, so matrices are packed side by side.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from megagen.errors import WeightError
from megagen.ir.graph import DType
from megagen.ops.packing import BLOCK, Tiles, _pair_bits, _scale_bytes
from megagen.weights.shards import Array, Buffer, fresh

CACHED = 1 << 18  # bytes of a matrix that are packed at once


def pack_dense(tiles: Tiles, matrix: torch.Tensor, buffer: Buffer = fresh) -> Array:
    """:func:`megagen.ops.packing.pack_dense`, of a matrix that its caller has checked the type and shape of."""
    halves = tiles.dtype is DType.BF16
    finite(matrix)
    j = 4 if halves else 8
    x = _view(tiles.split(matrix.view(torch.int32), j, 2))  # outer, outer, block, slice, group, h, g, t, j, p
    out = buffer("packed", tiles.bytes).view(np.int32).reshape(*x.shape[:5], j, 8, 4, 2, 2)  # ..., j, g, t, p, h
    for some in _pieces(x):
        for h in range(2):
            out[some][..., h] = x[some][:, :, :, :, :, h].transpose(0, 1, 2, 3, 4, 7, 5, 6, 8)
    return out.view(np.uint8).reshape(-1)


def pack_nvfp4(tiles: Tiles, codes: torch.Tensor, scales: torch.Tensor, buffer: Buffer = fresh) -> Array:
    """:func:`megagen.ops.packing.pack_nvfp4`, of tensors that its caller has checked the types and shapes of."""
    bits = scales.view(torch.uint8)
    plain = bits.numpy()
    if plain.max(initial=0) >= 0x7F:
        raise WeightError(f"{int((plain >= 0x7F).sum())} block scales are negative or NaN")
    if plain.min(initial=1) == 0:
        blocks = codes.numpy().reshape(*plain.shape, BLOCK // 2)
        masked = buffer("masked", codes.numel()).reshape(blocks.shape)
        codes = torch.from_numpy(np.multiply(blocks, plain[..., None] != 0, out=masked).reshape(codes.shape))
    x = _view(tiles.split(codes.view(torch.int16), 4)).view(np.uint16)  # outer, outer, block, slice, group, h, g, t, j
    y = _view(tiles.split(bits)).transpose(0, 1, 2, 3, 6, 7, 4, 5)  # ..., slice, g, t, group, h
    words, table = tiles.groups * 128, _words()
    out = buffer("packed", tiles.bytes).view(np.int32).reshape(*x.shape[:4], tiles.groups * 144)
    stored = out.view(np.uint8)[..., words * 4 :]
    for some in _pieces(x):
        low, high = (table[h].take(x[some][:, :, :, :, :, h], mode="clip") for h in range(2))
        np.bitwise_or(low, high, out=low)
        out[some][..., :words] = low.reshape(*low.shape[:4], words)
        stored[some] = _scales().take(y[some], mode="clip").reshape(*low.shape[:4], -1)
    return out.view(np.uint8).reshape(-1)


def finite(matrix: torch.Tensor) -> None:
    """Raises WeightError where a bf16 or fp32 matrix is not finite."""
    halves = matrix.dtype is torch.bfloat16
    bits = _view(matrix.view(torch.int16 if halves else torch.int32)).reshape(-1)
    infinite = np.int16(0x7F80) if halves else np.int32(0x7F800000)
    step = CACHED // bits.itemsize
    if any((bits[i : i + step] & infinite).max() == infinite for i in range(0, len(bits), step)):
        raise WeightError("has NaN or infinity")


def _view(x: torch.Tensor) -> Array:
    found: Array = x.numpy()
    return found


def _pieces(x: Array) -> list[slice]:
    """Slices of the outermost axis that are small enough for a cache."""
    n = max(1, CACHED * len(x) // max(1, x.nbytes))
    return [slice(i, i + n) for i in range(0, len(x), n)]


@cache
def _words() -> tuple[Array, Array]:
    """A word's bits of row g and of row g + 8, by four codes: pairs 0 and 2, and pairs 1 and 3."""
    pairs, four = np.array(_pair_bits(), np.int32), np.arange(1 << 16)
    a, b = (pairs[h][four & 0xFF] | pairs[h + 2][four >> 8] for h in range(2))
    return a, b


@cache
def _scales() -> Array:
    return np.array([*_scale_bytes(), *[0] * (256 - len(_scale_bytes()))], np.uint8)
