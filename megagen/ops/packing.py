"""Layouts of weights in device memory, and back.

A matrix is stored as the ring stages that the kernel streams, each of ``stage_rows`` x ``stage_k`` weights, so that a
stage is one contiguous bulk copy. Within a stage: 16-row blocks, then eight slices of K (one a math warp), then
groups of 64 K. An expert's slice is a stretch of its stage's K; a dense matrix deals groups to slices in turns, so that
a warp has the same K of a unit whatever its stages are. Of a group, lane 4 g + t owns rows g and g + 8 and
k = 16 t .. 16 t + 15, which is one NVFP4 scale block a row; both its MMA fragments and its loads are 16 bytes wide.
With [gate; up] a row block holds 8 gate rows and the 8 matching up rows. Vectors are plain fp32. A matrix of an op that
streams none (the embedding) stays as it is, row after row.

NVFP4 weights are permuted within 32-bit words (see :func:`_pair_bits`) so that one AND, after at most a shift,
yields a bf16 pair worth value * 2^-126; scales are stored so that a shift yields bf16 worth scale * 2^119. The
missing 2^7 is in the second-level scale that the kernel applies to its fp32 accumulators, see :func:`device_scale`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from megagen.errors import WeightError
from megagen.ir.graph import DType, Graph, Weight

if TYPE_CHECKING:
    import torch

SLICES, GROUP_K, BLOCK = 8, 64, 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by magnitude code; code bit 3 is the sign
SCALE_EXPONENT = 7  # the device's value * scale is short of 2^7


class Nvfp4(NamedTuple):
    """``codes`` uint8 [..., rows, k / 2], two e2m1 a byte, low nibble = even k; ``scales`` float8_e4m3fn
    [..., rows, k / 16]; ``scale_2`` fp32 [experts, 2] (gate, up) or [experts], or one expert's [2] or []."""

    codes: torch.Tensor
    scales: torch.Tensor
    scale_2: torch.Tensor

    def dequantise(self) -> torch.Tensor:
        """fp32 [rows, k] of one expert."""
        factors = self.scale_2.float().reshape(-1)
        return dequantise(self.codes, self.scales, factors.repeat_interleave(len(self.codes) // len(factors))[:, None])


@dataclass(frozen=True)
class Tiles:
    """How one matrix (one expert's) is cut into stages. Raises WeightError if it does not divide."""

    rows: int
    k: int
    stage_rows: int
    stage_k: int
    dtype: DType
    gate_up: bool = False
    chunk_major: bool = True  # dense: K chunks outermost; experts: row groups outermost

    def __post_init__(self) -> None:
        if (
            self.stage_rows % 16
            or self.rows % self.stage_rows
            or self.stage_k % (SLICES * GROUP_K)
            or self.k % self.stage_k
        ):
            raise WeightError(
                f"a matrix of {self.rows} x {self.k} does not divide into stages of {self.stage_rows} x {self.stage_k}",
                hint=f"stages are whole 16-row blocks by multiples of {SLICES * GROUP_K} along K",
            )

    @staticmethod
    def of(weight: Weight, stage_rows: int, stage_k: int) -> Tiles:
        return Tiles(
            weight.rows, weight.k, stage_rows, stage_k, weight.dtype, weight.gate_up, chunk_major=not weight.experts
        )

    @property
    def bytes(self) -> int:
        return int(self.rows * self.k * self.dtype.bits // 8)

    @property
    def groups(self) -> int:
        """Groups of a slice."""
        return self.stage_k // SLICES // GROUP_K

    @property
    def dealt(self) -> bool:
        """Groups of K go to slices in turns: slice s has the 64 that begin at 64 (8 i + s), for each i."""
        return self.chunk_major

    def split(self, matrix: torch.Tensor, *last: int) -> torch.Tensor:
        """[rows, n] as [chunk, row group, row block, slice, group, h, g, t, *last], the first two swapped for experts:
        row 8 h + g of a block (h = 0 gate, 1 up, with both stacked), and ``last`` what a lane owns of a group's K."""
        groups, blocks = self.rows // self.stage_rows, self.stage_rows // 16
        rows = (2, groups, blocks, 8) if self.gate_up else (groups, blocks, 2, 8)
        if self.dealt:
            x = matrix.reshape(*rows, self.k // self.stage_k, self.groups, SLICES, 4, *last).transpose(5, 6)
        else:
            x = matrix.reshape(*rows, self.k // self.stage_k, SLICES, self.groups, 4, *last)
        x = x.permute(*((1, 2, 0, 3) if self.gate_up else (0, 1, 2, 3)), *range(4, x.ndim))
        # [row group, block, h, g, chunk, slice, group, t, *last]
        outer = (4, 0) if self.chunk_major else (0, 4)
        return x.permute(*outer, 1, 5, 6, 2, 3, 7, *range(8, x.ndim))

    def join(self, parts: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`split`: [rows, n]."""
        chunk, group = (0, 1) if self.chunk_major else (1, 0)
        head = (5, group, 2, 6) if self.gate_up else (group, 2, 5, 6)
        k = (4, 3) if self.dealt else (3, 4)
        return parts.permute(*head, chunk, *k, 7, *range(8, parts.ndim)).reshape(self.rows, -1)


def pack_dense(tiles: Tiles, matrix: torch.Tensor) -> torch.Tensor:
    """uint8 [tiles.bytes] of a bf16 or fp32 matrix [rows, k]. Raises WeightError where it is not finite."""
    import torch

    expect = _plain_dtype(tiles.dtype)
    if matrix.shape != (tiles.rows, tiles.k) or matrix.dtype is not expect:
        raise WeightError(f"found {matrix.dtype} {tuple(matrix.shape)}, expected {expect} {(tiles.rows, tiles.k)}")
    if not bool(matrix.isfinite().all()):
        raise WeightError("has NaN or infinity")
    e = 4 // matrix.element_size()  # elements of a 32-bit word
    x = tiles.split(matrix, 8 // e, 2, e)  # ..., h, g, t, j, p, e
    return x.permute(0, 1, 2, 3, 4, 8, 6, 7, 9, 5, 10).contiguous().view(torch.uint8).flatten()


def pack_nvfp4(tiles: Tiles, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [tiles.bytes] of codes uint8 [rows, k / 2] and e4m3 scales [rows, k / 16] (float8 or their bits).

    Weights of a block with scale zero are stored as zero: the device cannot express a zero scale. Raises WeightError
    for negative or NaN scales.
    """
    import torch

    bits = scales.view(torch.uint8)
    if codes.dtype is not torch.uint8 or codes.shape != (tiles.rows, tiles.k // 2):
        raise WeightError(f"codes are {codes.dtype} {tuple(codes.shape)}, expected uint8 {(tiles.rows, tiles.k // 2)}")
    if bits.shape != (tiles.rows, tiles.k // BLOCK):
        raise WeightError(f"scales are {tuple(bits.shape)}, expected {(tiles.rows, tiles.k // BLOCK)}")
    if bool((bits >= 0x7F).any()):
        raise WeightError(f"{int((bits >= 0x7F).sum())} block scales are negative or NaN")
    pairs = torch.where(bits.unsqueeze(-1) == 0, 0, codes.reshape(*bits.shape, BLOCK // 2))
    x = tiles.split(pairs, 4, 2)  # ..., h, g, t, j, p
    x = x.permute(0, 1, 2, 3, 4, 6, 7, 8, 9, 5).flatten(-2)  # ..., group, g, t, j, pair
    table = torch.tensor(_pair_bits(), dtype=torch.int32, device=codes.device)
    words = table[0][x[..., 0].int()]
    for pair in range(1, 4):
        words |= table[pair][x[..., pair].int()]
    stored = torch.tensor(_scale_bytes(), dtype=torch.uint8, device=codes.device)[tiles.split(bits).int()]
    stored = stored.permute(0, 1, 2, 3, 6, 7, 4, 5)  # ..., slice, g, t, group, h
    parts = [words.contiguous().view(torch.uint8).flatten(4), stored.flatten(4)]
    return torch.cat(parts, dim=-1).flatten()


def unpack(tiles: Tiles, data: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, k] of what :func:`pack_dense` or :func:`pack_nvfp4` made; NVFP4 without its second-level scale."""
    import torch

    outer = (tiles.rows // tiles.stage_rows, tiles.k // tiles.stage_k)
    head = (*(outer[::-1] if tiles.chunk_major else outer), tiles.stage_rows // 16, SLICES)
    if tiles.dtype is not DType.NVFP4:
        e = 2 if tiles.dtype is DType.BF16 else 1
        x = data.view(torch.bfloat16 if e == 2 else torch.float32)
        x = x.view(*head, tiles.groups, 8 // e, 8, 4, 2, 2, e)  # ..., group, j, g, t, p, h, e
        return tiles.join(x.permute(0, 1, 2, 3, 4, 9, 6, 7, 5, 8, 10)).float()
    x = data.view(*head, -1)
    words = x[..., : tiles.groups * 512].contiguous().view(torch.int32).view(*head, tiles.groups, 8, 4, 4)
    value = torch.stack([_pair_values(words, pair) for pair in range(4)], dim=-2)  # ..., g, t, j, pair, e
    value = value.view(*value.shape[:-2], 2, 2, 2).permute(0, 1, 2, 3, 4, 9, 5, 6, 7, 8, 10)  # ..., h, g, t, j, p, e
    byte = x[..., tiles.groups * 512 :].reshape(*head, 8, 4, tiles.groups, 2).permute(0, 1, 2, 3, 6, 7, 4, 5).int()
    table = torch.zeros(256)
    table[_scale_bytes()] = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scale = tiles.join(table.to(data.device)[byte])
    return tiles.join(value) * scale.repeat_interleave(BLOCK, dim=1)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, scale_2: torch.Tensor | float) -> torch.Tensor:
    """fp32 [..., rows, k] = e2m1 * scale * scale_2, of codes [..., rows, k / 2] and float8 scales [..., rows, k / 16];
    ``scale_2`` broadcasts to [..., rows, k]. Only the last product rounds."""
    import torch

    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float32, device=codes.device)
    value = table[torch.stack((codes & 15, codes >> 4), dim=-1).int()]  # [..., k / 2, 2]
    value = value.reshape(*scales.shape, BLOCK) * scales.float().unsqueeze(-1)
    return value.flatten(-2) * scale_2


def device_scale(scale_2: torch.Tensor) -> torch.Tensor:
    """fp32 [experts, 2 | 1]: what the accumulator is multiplied by, the second-level scale times 2^7."""
    return scale_2.float().reshape(len(scale_2), -1) * 2.0**SCALE_EXPONENT


def pack_weight(
    weight: Weight,
    stage: tuple[int, int] | None,
    get: Callable[[int], torch.Tensor | Nvfp4],
    *,
    device: torch.device | str = "cpu",
    step: Callable[[], object] = lambda: None,
    vector: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """A weight's kernel parameters by name, packed one matrix at a time on ``device``.

    ``stage`` is (stage_rows, stage_k), None for a vector or a matrix that is not streamed; ``get(expert)`` gives the
    rank's logical matrix (0 for plain weights); ``vector``: see :meth:`megagen.ir.graph.Op.pack_vector`. Result: uint8
    [bytes], fp32 [planes * rows] for a vector, or the matrix [rows, k] that is not streamed; for NVFP4 also
    ``<name>_scale`` fp32 [experts, 2 | 1]. ``step`` is called after each matrix. Errors name the weight and the expert.
    """
    import torch

    if stage is None:
        plain = get(0)
        assert isinstance(plain, torch.Tensor)
        step()
        plain = plain.to(device)
        if weight.k > 1:
            return {weight.name: pack_rows(weight, plain)}
        return {weight.name: (plain.float() if vector is None else vector(plain)).contiguous()}
    tiles = Tiles.of(weight, *stage)
    out = torch.empty(max(1, weight.experts), tiles.bytes, dtype=torch.uint8, device=device)
    scale_2 = []
    for index, row in enumerate(out):
        matrix = get(index)
        try:
            if isinstance(matrix, torch.Tensor):
                row.copy_(pack_dense(tiles, matrix.to(device)))
            else:
                row.copy_(pack_nvfp4(tiles, matrix.codes.to(device), matrix.scales.to(device)))
                scale_2.append(matrix.scale_2.to(device))
        except WeightError as error:
            raise WeightError(f"{weight.name}, matrix {index}: {error.message}", hint=error.hint) from None
        step()
    packed = {weight.name: out.flatten()}
    if scale_2:
        packed[f"{weight.name}_scale"] = device_scale(torch.stack(scale_2))
    return packed


def pack_rows(weight: Weight, matrix: torch.Tensor) -> torch.Tensor:
    """[n, k] of a matrix that no ring streams, or of some of its rows, as it is. Raises WeightError for another type or
    width, and where it is not finite."""
    expect = _plain_dtype(weight.dtype)
    if matrix.ndim != 2 or matrix.shape[1] != weight.k or matrix.dtype is not expect:
        raise WeightError(f"found {matrix.dtype} {tuple(matrix.shape)}, expected {expect} rows of {weight.k}")
    if not bool(matrix.isfinite().all()):
        raise WeightError(f"{weight.name} has NaN or infinity")
    return matrix.contiguous()


def _plain_dtype(dtype: DType) -> torch.dtype:
    import torch

    return torch.bfloat16 if dtype is DType.BF16 else torch.float32


def vectors(graph: Graph) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """How each weight that is a vector is packed, by weight name."""
    return {w.name: partial(op.pack_vector, port) for op in graph.ops for port, w in op.weights.items()}


def stages(graph: Graph) -> dict[str, tuple[int, int] | None]:
    """(stage_rows, stage_k) by weight name, None for vectors and for matrices that no ring streams."""
    found: dict[str, tuple[int, int] | None] = {}
    for op in graph.ops:
        stage = op.stage()
        for weight in op.weights.values():
            found[weight.name] = (stage["rows"], stage["k"]) if stage is not None and weight.k > 1 else None
    return found


# Where a word keeps its four pairs (row g, row g + 8, then both again two k further): the bit within a half of
# magnitude bits 0 and 1, of magnitude bit 2, and of the sign; the low half is the lower k. Each pair lines up at
# sign 15, magnitude 8..6 (value * 2^-126 as bf16) under its operation: none, rotate right 6, shift left 4, and for
# the last shift left 6 with the top magnitude bit coming from shift right 2.
_PLACES = ((6, 8, 15), (12, 14, 5), (2, 4, 11), (0, 10, 9))
_CROSSED = 1  # the pair whose sign lies in the other half, from where the rotation brings it over


@cache
def _pair_bits() -> list[list[int]]:
    """[pair][byte of two codes] -> its bits of the word, as signed 32-bit numbers."""

    def half(pair: int, byte: int, e: int) -> int:
        code = byte >> 4 * e & 15
        low, top, sign = _PLACES[pair]
        signs_half = 1 - e if pair == _CROSSED else e
        magnitude = (code & 3) << low | (code >> 2 & 1) << top
        return magnitude << 16 * e | (code >> 3) << sign + 16 * signs_half

    words = [[half(pair, byte, 0) | half(pair, byte, 1) for byte in range(256)] for pair in range(4)]
    return [[w - (w >> 31 << 32) for w in row] for row in words]


def _pair_values(words: torch.Tensor, pair: int) -> torch.Tensor:
    """fp32 [..., 2]: both values of a pair, read back bit by bit."""
    import torch

    low, top, sign = _PLACES[pair]
    halves = []
    for e in range(2):
        signs_half = 1 - e if pair == _CROSSED else e
        code = words >> low + 16 * e & 3 | (words >> top + 16 * e & 1) << 2 | (words >> sign + 16 * signs_half & 1) << 3
        halves.append(torch.tensor([*E2M1, *(-v for v in E2M1)], device=words.device)[code])
    return torch.stack(halves, dim=-1)


@cache
def _scale_bytes() -> list[int]:
    """e4m3 bits, neither negative nor NaN -> stored byte: e5m3, worth (1 + m / 8) * 2^(e - 22), with its nibbles
    swapped; 0 for zero."""
    stored = [0]
    for bits in range(1, 0x7F):
        exponent, mantissa = bits >> 3, bits & 7
        if exponent == 0:  # subnormal: mantissa * 2^-9, made normal
            shift = mantissa.bit_length() - 1
            exponent, mantissa = shift - 9, (mantissa << 3 - shift) & 7
        else:
            exponent -= 7
        byte = exponent + 22 << 3 | mantissa
        stored.append((byte >> 4 | byte << 4) & 0xFF)
    return stored
