"""Device layouts: exact round trips, and a slow decoder that follows the layout's description element by element."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagen.errors import WeightError
from megagen.ir.graph import DType, Weight
from megagen.models.muse_spark import expert_block
from megagen.ops import packing
from megagen.ops.packing import Nvfp4, Tiles, dequantise, device_scale, pack_dense, pack_nvfp4, pack_weight, unpack

CODE_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def e4m3(bits: int) -> float:
    """OCP FP8 E4M3: bias 7, subnormals."""
    exponent, mantissa = bits >> 3, bits & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def bf16(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16))[0])


def device_value(data: bytes, t: Tiles, row: int, k: int) -> float:
    """Weight (row, k) as a kernel lane reads it: addresses by counting loops, values by bf16 arithmetic."""
    if t.gate_up:  # a 16-row block: 8 gate rows, then the 8 matching up rows
        up, r = divmod(row, t.rows // 2)
        row = r // 8 * 16 + up * 8 + r % 8
    group_of_rows, row = divmod(row, t.stage_rows)
    chunk, k = divmod(k, t.stage_k)
    stages_k, stages_rows = t.k // t.stage_k, t.rows // t.stage_rows
    stage = chunk * stages_rows + group_of_rows if t.chunk_major else group_of_rows * stages_k + chunk
    row_block, row = divmod(row, 16)
    slice_k = t.stage_k // 8
    groups = slice_k // 64
    if t.chunk_major:  # a dense matrix deals groups of 64 in turns
        group, k = divmod(k, 512)
        which_slice, k = divmod(k, 64)
    else:
        which_slice, k = divmod(k, slice_k)
        group, k = divmod(k, 64)
    lane, below, k = row % 8 * 4 + k // 16, row // 8, k % 16
    slice_bytes = int(16 * slice_k * t.dtype.bits / 8)
    base = stage * int(t.stage_rows * t.stage_k * t.dtype.bits / 8) + (row_block * 8 + which_slice) * slice_bytes

    def u32(offset: int) -> int:
        return int.from_bytes(data[base + offset : base + offset + 4], "little")

    if t.dtype is DType.BF16:
        j, k = divmod(k, 4)
        word = u32(((group * 4 + j) * 32 + lane) * 16 + 4 * (k // 2 * 2 + below))
        return bf16(word >> 16 * (k % 2))
    if t.dtype is DType.FP32:
        j, k = divmod(k, 2)
        word = u32(((group * 8 + j) * 32 + lane) * 16 + 4 * (k * 2 + below))
        return float(struct.unpack("<f", struct.pack("<I", word))[0])
    j, k = divmod(k, 4)
    word = u32((group * 32 + lane) * 16 + 4 * j)
    pair = k // 2 * 2 + below
    if pair == 0:
        aligned = word & 0x81C081C0
    elif pair == 1:
        aligned = (word >> 6 | word << 26) & 0x81C081C0
    elif pair == 2:
        aligned = word << 4 & 0x81C081C0
    else:
        aligned = word << 6 & 0x80C080C0 | word >> 2 & 0x01000100
    weight = bf16(aligned >> 16 * (k % 2))  # value * 2^-126
    stored = data[base + groups * 512 + lane * groups * 2 + group * 2 + below]
    b = (stored << 4 | stored >> 4) & 0xFF
    return weight * bf16(0x7000 | b << 4) * 2.0**7


SHAPES = st.builds(
    lambda blocks, row_stages, stage_k, chunks, chunk_major, gate_up: (
        blocks * row_stages * 16, stage_k * chunks, blocks * 16, stage_k, gate_up, chunk_major
    ),
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([512, 1024, 1536]), st.integers(1, 3), st.booleans(),
    st.booleans(),
)  # fmt: skip


def tiles_of(shape, dtype):
    rows, k, stage_rows, stage_k, gate_up, chunk_major = shape
    return Tiles(rows, k, stage_rows, stage_k, dtype, gate_up, chunk_major)


def agrees_with_decoder(tiles, packed, want, seed, count=400):
    data, rng = packed.numpy().tobytes(), random.Random(seed)
    assert len(data) == tiles.bytes
    for _ in range(count):
        row, k = rng.randrange(tiles.rows), rng.randrange(tiles.k)
        assert device_value(data, tiles, row, k) == want[row, k].item(), (row, k)


@settings(max_examples=20, deadline=None)
@given(SHAPES, st.sampled_from([DType.BF16, DType.FP32]), st.integers(0, 2**31))
def test_dense_layout(shape, dtype, seed):
    tiles = tiles_of(shape, dtype)
    matrix = torch.randn(tiles.rows, tiles.k, generator=torch.Generator().manual_seed(seed))
    matrix = matrix.bfloat16() if dtype is DType.BF16 else matrix
    packed = pack_dense(tiles, matrix)
    assert torch.equal(unpack(tiles, packed), matrix.float())
    agrees_with_decoder(tiles, packed, matrix.float(), seed)


@settings(max_examples=20, deadline=None)
@given(SHAPES, st.integers(0, 2**31))
def test_nvfp4_layout(shape, seed):
    tiles = tiles_of(shape, DType.NVFP4)
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (tiles.rows, tiles.k // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(0x7F, (tiles.rows, tiles.k // 16), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
    want = dequantise(codes, scales, 1.0)
    packed = pack_nvfp4(tiles, codes, scales)
    assert torch.equal(unpack(tiles, packed), want)
    agrees_with_decoder(tiles, packed, want, seed)


def test_every_code_with_every_scale():
    """127 scales x 16 codes at all 16 places of a block, against tables written out here."""
    rows, k = 128, 16 * 512
    tiles = Tiles(rows, k, 16, 4096, DType.NVFP4, chunk_major=False)
    code = (torch.arange(k) % 16 + torch.arange(k) // 16) % 16  # block b starts at code b % 16
    code = code.repeat(rows, 1)
    scale = torch.arange(rows).clamp(max=0x7E).to(torch.uint8).unsqueeze(1).repeat(1, k // 16)
    packed = pack_nvfp4(tiles, (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8), scale.view(torch.float8_e4m3fn))
    value = torch.tensor(CODE_VALUES)[code]
    want = value * torch.tensor([e4m3(b) for b in range(0x7F)])[scale.long()].repeat_interleave(16, 1)
    assert torch.equal(unpack(tiles, packed), want)
    data = packed.numpy().tobytes()
    for row in range(0x7F):
        for k in range(256):  # one turn of the codes through the block's places
            assert device_value(data, tiles, row, k) == want[row, k].item()


def test_a_zero_scale_zeroes_its_codes():
    tiles = Tiles(16, 512, 16, 512, DType.NVFP4)
    scales = torch.full((16, 32), 0x38, dtype=torch.uint8)
    scales[2, 5] = 0
    got = unpack(tiles, pack_nvfp4(tiles, torch.full((16, 256), 0x77, dtype=torch.uint8), scales))
    want = torch.full((16, 512), 6.0)
    want[2, 80:96] = 0
    assert torch.equal(got, want)


@pytest.mark.parametrize("bits", [0x7F, 0x80, 0x81, 0xB8, 0xFF])
def test_negative_and_nan_scales_are_refused(bits):
    scales = torch.full((16, 32), 0x38, dtype=torch.uint8)
    scales[3, 4] = bits
    with pytest.raises(WeightError, match="1 block scales are negative or NaN"):
        pack_nvfp4(Tiles(16, 512, 16, 512, DType.NVFP4), torch.zeros(16, 256, dtype=torch.uint8), scales)


def test_dequantise_multiplies_all_three():
    codes = torch.tensor([[0x21] * 8 + [0xF7] * 8], dtype=torch.uint8)  # low nibble first: 0.5, 1.0, ... and 6, -6, ...
    scales = torch.tensor([[2.0, 448.0]]).to(torch.float8_e4m3fn)
    assert dequantise(codes, scales, 0.25).tolist() == [[0.25, 0.5] * 8 + [672.0, -672.0] * 8]


@pytest.mark.parametrize("experts", ["nvfp4", "bf16"])
@pytest.mark.parametrize("split", ["nn", "nk"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_stages_of_the_real_model_divide_and_fill_its_weights(tp, split, experts):
    graph = expert_block(tp=tp, split=split, experts=experts)
    stage = packing.stages(graph)
    streamed = [op for op in graph.ops if op.stage() is not None]
    assert len(streamed) == 5
    for op in streamed:
        weight, s = op.weights["weight"], op.stage()
        tiles = Tiles.of(weight, *stage[weight.name])
        assert (tiles.stage_rows, tiles.stage_k) == (s["rows"], s["k"])
        assert tiles.bytes == weight.bytes_one
        assert weight.rows * weight.k % (s["rows"] * s["k"]) == 0
        assert tiles.bytes == s["bytes"] * (weight.rows * weight.k // (s["rows"] * s["k"]))
    assert all(stage[name] is None for name, w in graph.weights().items() if w.k == 1)


def expert_weight(**more):
    return Weight(name="w", rows=32, k=512, dtype=DType.NVFP4, names=("w",), experts=3, **more)


def random_nvfp4(*lead, second):
    return Nvfp4(
        torch.randint(256, (*lead, 32, 256), dtype=torch.uint8),
        torch.randint(0x7F, (*lead, 32, 32), dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.rand(second),
    )


@pytest.mark.parametrize("gate_up", [True, False])
def test_pack_weight_gives_all_experts_and_second_level_scales(gate_up):
    values = random_nvfp4(3, second=(3, 2) if gate_up else (3,))
    steps = []
    weight = expert_weight(gate_up=gate_up)
    got = pack_weight(weight, (16, 512), lambda e: Nvfp4(*(x[e] for x in values)), step=lambda: steps.append(1))
    assert len(steps) == 3
    assert {n: (x.dtype, tuple(x.shape)) for n, x in got.items()} == {
        "w": (torch.uint8, (weight.bytes,)),
        "w_scale": (torch.float32, (3, 2 if gate_up else 1)),
    }
    tiles = Tiles.of(weight, 16, 512)
    for e, data in enumerate(got["w"].view(3, -1)):
        logical = Nvfp4(*(x[e] for x in values)).dequantise()
        # 2^-7 stays in the weights on the device
        accumulator = unpack(tiles, data) * 2.0**-7
        factors = got["w_scale"][e].repeat_interleave(16 if gate_up else 32).unsqueeze(1)
        torch.testing.assert_close(accumulator * factors, logical, rtol=1e-6, atol=0)
    assert torch.equal(device_scale(values.scale_2).flatten(), values.scale_2.flatten() * 128)


def test_vectors_become_fp32():
    weight = Weight(name="gain", rows=8, k=1, dtype=DType.BF16, names=("g",))
    vector = torch.randn(8).bfloat16()
    (packed,) = pack_weight(weight, None, lambda e: vector).values()
    assert packed.dtype is torch.float32
    assert torch.equal(packed, vector.float())


def test_errors_name_the_weight_and_the_expert():
    def get(expert):
        value = random_nvfp4(second=())
        return value._replace(scales=value.scales.fill_(torch.nan)) if expert == 2 else value

    with pytest.raises(WeightError, match="w, matrix 2: 1024 block scales are negative or NaN"):
        pack_weight(expert_weight(), (16, 512), get)
    with pytest.raises(WeightError, match="w, matrix 0: codes are"):
        pack_weight(expert_weight(), (16, 512), lambda e: random_nvfp4(2, second=()))


@pytest.mark.parametrize("shape", [(16, 256, 16, 256), (16, 1024, 16, 768), (24, 512, 16, 512), (16, 512, 24, 512)])
def test_stages_that_do_not_divide_are_refused(shape):
    with pytest.raises(WeightError, match="does not divide"):
        Tiles(*shape, DType.BF16)


def test_dense_of_the_wrong_type_or_shape_is_refused():
    tiles = Tiles(16, 512, 16, 512, DType.BF16)
    for bad in (torch.zeros(16, 512), torch.zeros(512, 16).bfloat16()):
        with pytest.raises(WeightError, match=r"expected torch\.bfloat16"):
            pack_dense(tiles, bad)
