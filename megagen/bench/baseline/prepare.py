"""A rank's weights as the kernels of the baseline take them, from their logical form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from megagen.ir.graph import Graph
from megagen.ops.packing import BLOCK, Nvfp4
from megagen.weights.random import LayerWeights

BATCH = 16  # experts at a time: their unpacked bits take eight times as much
SCALE_EXPONENT = 14  # a word's value * scale is short of 2^14, see below
# Where a 16-bit word keeps its four e2m1: magnitude bits 0 and 1, magnitude bit 2, and the sign. The first lies as a
# bf16 worth value * 2^-126 has it; the others get there by shifts.
PLACES = ((6, 8, 15), (12, 14, 5), (2, 4, 11), (0, 10, 9))


class Words(NamedTuple):
    """An NVFP4 matrix per expert: ``words`` int16 [experts, rows, k / 4], ``scales`` uint8 [experts, rows, k / 16],
    ``scale_2`` fp32 [experts, 1 or 2].

    Word j of a block of 16 holds its k = j, j + 4, j + 8 and j + 12. A block scale (1 + m / 8) * 2^e is stored as
    (e + 10) * 8 + m, so that a multiplication and an addition make it a bf16 worth scale * 2^112. ``scale_2`` has
    the 2^14 that are missing then.
    """

    words: torch.Tensor
    scales: torch.Tensor
    scale_2: torch.Tensor


Prepared = Mapping[str, "torch.Tensor | Words"]


def prepare(layer: LayerWeights) -> dict[str, torch.Tensor | Words]:
    """By weight name: NVFP4 as :class:`Words`; matrices as they are; vectors fp32, as the ops want them packed."""
    found: dict[str, torch.Tensor | Words] = {}
    vectors = {w.name: (op, port) for op in layer.graph.ops for port, w in op.weights.items() if w.k == 1}
    for name, value in layer.values.items():
        if isinstance(value, Nvfp4):
            found[name] = words(value)
        elif name in vectors:
            op, port = vectors[name]
            found[name] = op.pack_vector(port, value).float().contiguous()
        else:
            found[name] = value.contiguous()
    return found


def words(weight: Nvfp4) -> Words:
    """Weights of a block whose scale is zero become zero: the stored scale cannot."""
    codes, scales = weight.codes, weight.scales.view(torch.uint8)
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] // 2, dtype=torch.int16, device=codes.device)
    stored = torch.empty_like(scales)
    for at in range(0, len(codes), BATCH):
        some = slice(at, at + BATCH)
        raw = codes[some]
        nibbles = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)
        parts = nibbles.unflatten(-1, (-1, 4, BLOCK // 4)).int()  # [experts, rows, block, place in a word, word]
        parts = torch.where((scales[some] == 0)[..., None, None], 0, parts)
        word = torch.zeros_like(parts[..., 0, :])
        for place, (low, top, sign) in enumerate(PLACES):
            code = parts[..., place, :]
            word |= (code & 3) << low | (code >> 2 & 1) << top | (code >> 3) << sign
        out[some] = word.flatten(-2).to(torch.int16)
        mantissa, exponent = torch.frexp(scales[some].view(torch.float8_e4m3fn).float())  # in [0.5, 1)
        byte = (exponent + 9 << 3) + ((mantissa * 16).int() - 8)
        stored[some] = torch.where(scales[some] == 0, 0, byte).to(torch.uint8)
    return Words(out, stored, weight.scale_2.float().reshape(len(codes), -1) * 2.0**SCALE_EXPONENT)


def nbytes(graph: Graph, prepared: Prepared) -> int:
    """What a rank's prepared weights of ``graph`` take in memory."""
    parts = (x if isinstance(x, Words) else (x,) for name, x in prepared.items() if name in graph.weights())
    return sum(t.numel() * t.element_size() for some in parts for t in some)
