"""The unit kernels of this folder: geometry, inputs and what they must write, for a GPU and for the emulator alike.

Every kernel takes one struct of 64-bit pointers: :attr:`Case.inputs` in order, then the output. All of them point to
32-bit words, at addresses divisible by 256; the output's are all written. Expected words come from the PTX ISA's and
the CUDA programming guide's definitions. Needs numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
Words = np.ndarray[Any, np.dtype[np.uint32]]
Reals = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Data:
    """``expected``: words, or real numbers with the ``unit`` that errors are measured in and their ``bound`` in it.

    A bound of infinity: nothing is promised. ``any_nan``: every NaN is as good as another.
    """

    inputs: tuple[Words, ...]
    expected: np.ndarray[Any, Any]
    any_nan: bool = False
    unit: Reals | None = None
    bound: Reals | None = None


@dataclass(frozen=True)
class Case:
    """One launch. ``written``: which inputs the kernel writes too; each launch wants all of them fresh.

    ``unit``: what the errors of an approximation are measured in, or empty where every bit is given. ``only``: the
    architecture that the whole file is for, or empty if it is for all.
    """

    name: str
    file: str
    kernel: str
    make: Callable[[], Data] = field(repr=False, compare=False)
    blocks: int = 1
    threads: int = 128
    cluster: int = 1
    shared_bytes: int = 0
    written: tuple[int, ...] = ()
    unit: str = ""
    only: str = ""

    @cached_property
    def data(self) -> Data:
        return self.make()

    @property
    def source(self) -> str:
        return (HERE / self.file).read_text("utf-8")

    @property
    def inputs(self) -> tuple[Words, ...]:
        return self.data.inputs

    @property
    def words(self) -> int:
        """Length of the output."""
        return self.data.expected.size

    def check(self, out: Words) -> tuple[float, float]:
        """Worst error of an output in :attr:`unit`, and as a share of its bound; AssertionError where it is wrong."""
        data = self.data
        out = np.ascontiguousarray(out, np.uint32).reshape(-1)
        assert out.size == self.words, f"{self.name}: {out.size} words for {self.words}"
        if data.unit is None or data.bound is None:
            want = data.expected.reshape(-1)
            good = out == want
            if data.any_nan:
                good |= _is_nan(out) & _is_nan(want)
            self._all(good, out, want)
            return 0.0, 0.0
        got, real = out.view(np.float32).astype(np.float64), data.expected.reshape(-1)
        unit, bound = data.unit.reshape(-1), data.bound.reshape(-1)
        finite = np.isfinite(real)
        with np.errstate(invalid="ignore"):
            error = np.where(finite, np.abs(got - real) / unit, 0.0)
        same = np.where(np.isnan(real), np.isnan(got), got == real)
        self._all(np.where(finite, error <= bound, same) | np.isinf(bound), out, real)
        told = finite & np.isfinite(bound) & (bound > 0)
        return float(error[told].max()), float((error[told] / bound[told]).max())

    def _all(self, good: np.ndarray[Any, Any], out: Words, want: np.ndarray[Any, Any]) -> None:
        bad = np.flatnonzero(~good)
        show = (lambda v: f"0x{v:08x}") if want.dtype == np.uint32 else lambda v: repr(float(v))
        got = out if want.dtype == np.uint32 else out.view(np.float32)
        first = ", ".join(f"[{i}] is {show(got[i])} for {show(want[i])}" for i in bad[:4])
        assert not bad.size, f"{self.name}: {bad.size} of {out.size} words wrong: {first}"


# -- numbers -------------------------------------------------------------------------------------------------------


def _is_nan(words: Words) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return (words & 0x7FFFFFFF) > 0x7F800000


def _f32(words: Words) -> np.ndarray[Any, np.dtype[np.float32]]:
    return words.view(np.float32)


def _bits(values: Any) -> Words:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def _random(seed: int, *shape: int) -> Words:
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, np.uint32)


def _zeros(n: int) -> Words:
    return np.zeros(n, np.uint32)


SPECIAL = np.array(
    [
        *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000),  # 0, 1, infinity
        *(0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF),  # NaNs, one of them signalling
        *(0x00000001, 0x80000001, 0x00400000, 0x007FFFFF, 0x807FFFFF),  # subnormals
        *(0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF),  # the least and the most of the normal numbers
        *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7F8000, 0x7F7F7FFF, 0x00008000, 0x00018000),  # bf16 ties
        *(0x0DA24260, 0x8DA24260, 0x1F800000, 0x5F800000, 0x33800000, 0xB3800000),  # products at the lower end, 2^-24
    ],
    np.uint32,
)


def _bf16_of_f32(words: Words) -> Words:
    """To nearest even; NaN becomes 0x7fff."""
    wide = words.astype(np.uint64)
    rounded = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint32)
    return np.where(_is_nan(words), np.uint32(0x7FFF), rounded)


def _bf16_of_f64(x: Reals) -> Words:
    """The same of a real number, in one rounding, subnormals kept."""
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0))
    last = np.maximum(exponent - 1, -126) - 7
    with np.errstate(invalid="ignore", over="ignore"):
        value = np.where(np.isfinite(x), np.ldexp(np.rint(np.ldexp(x, -last)), last), x)
        words = _bits(value)
    return np.where(_is_nan(words), np.uint32(0x7FFF), words >> 16)


def _fma(a: Words, b: Words, c: Words) -> Words:
    """a b + c in one rounding: the product is exact in double, the sum is rounded to odd there."""
    with np.errstate(all="ignore"):
        x, y = _f32(a).astype(np.float64) * _f32(b), _f32(c).astype(np.float64)
        s = x + y
        back = s - x
        rest = (x - (s - back)) + (y - back)  # of the sum, exactly
        even = s.view(np.uint64) & 1 == 0
        outward = (rest > 0) == (s > 0)
        step = np.where(np.isfinite(s) & (rest != 0) & even, np.where(outward, 1, -1), 0)
        return _bits((s.view(np.int64) + step).view(np.float64).astype(np.float32))


def _ulp(x: Reals) -> Reals:
    """Distance of neighbours among fp32 numbers, below the least normal one that of subnormals."""
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0))
    return np.ldexp(1.0, np.maximum(exponent - 1, -126) - 23)


def _overflowing(x: Reals) -> Reals:
    """What cannot be written in fp32 is infinite."""
    return np.where(np.abs(x) >= 2.0**128 * (1 - 2.0**-25), np.copysign(np.inf, x), x)


# -- memory.cu -----------------------------------------------------------------------------------------------------


def _loads() -> Data:
    v = np.concatenate([_random(1, 64 * 4 - SPECIAL.size), SPECIAL]).reshape(64, 4)
    return Data((v.reshape(-1),), np.concatenate([v, v, v, v, v[:, 1:2], v], axis=1))


def _stores() -> Data:
    v = _random(2, 64 * 24)
    assert 0xFFFFFFFF not in v  # which a kernel says that it expects nowhere
    return Data((v,), v)


def _shared_memory() -> Data:
    v = np.concatenate([SPECIAL, _random(3, 64 * 8 - SPECIAL.size)]).reshape(64, 8)
    parts = [v[:, :4], v[:, :4], v[:, 4:6], v[:, 6] & 0xFFFF, v[:, 7] >> 16, v[:, 6] | v[:, 7], v[:, [7, 0, 6, 1]]]
    own = np.column_stack(parts)
    odd = (v[:, 4] & 1).reshape(2, 32)
    votes = [sum(int(bit) << lane for lane, bit in enumerate(warp)) for warp in odd]
    expected = np.concatenate([np.roll(own, -1, axis=0).reshape(-1), np.array([*votes, 0], np.uint32)])
    return Data((v.reshape(-1),), expected)


def _word_of_mouth() -> Data:
    more = _random(33, 64) % 1000 + 1
    heard = np.append(1, 1 + np.cumsum(more)[:-1]).astype(np.uint32)
    return Data((more,), np.append(np.repeat(heard, 32), np.ones(128, np.uint32)))


def _atomics() -> Data:
    n = 256
    words, threads = np.concatenate([_zeros(8), _random(4, n)]), _random(5, n, 3)
    words[2] = 100  # the first increment takes it to zero
    own = words[8:].copy()
    threads[::2, 1] = own[::2]
    equal = own == threads[:, 1]
    total = int(threads[:, 0].sum(dtype=np.uint64)) & 0xFFFFFFFF
    state = np.array([total, total, (n - 1) % 10, n, 1, 1, 4, 0], np.uint32)
    after = np.where(equal, threads[:, 2], own)
    return Data((words, threads.reshape(-1)), np.concatenate([state, np.ones(n, np.uint32), own, after]))


def _flags() -> Data:
    first, rounds = _random(6, 64, 4), np.arange(36, dtype=np.uint32)[:, None]
    x, y, z, w = (first[:, i][None] for i in range(4))
    said = np.stack([x + rounds, y ^ rounds, z - rounds, w + 2 * rounds], axis=2)
    return Data((first.reshape(-1), _zeros(64), _zeros(256)), np.append(said.reshape(-1), np.ones(2, np.uint32)))


# -- convert.cu ----------------------------------------------------------------------------------------------------

ELEMENTS = 4 * 128 * 32


def _values(seed: int, pairs: int) -> tuple[Words, ...]:
    """All ``pairs`` (2 or 3) of special values, then random words: any bits, and numbers of like size."""
    rng = np.random.default_rng(seed)
    grid = np.meshgrid(*([SPECIAL] * 2), indexing="ij")
    made = [np.resize(g.reshape(-1), ELEMENTS) for g in grid][:pairs]
    while len(made) < pairs:
        made.append(rng.choice(SPECIAL, ELEMENTS))
    at = SPECIAL.size**2 * 2
    for i, words in enumerate(made):
        words[at : at + 5000] = _random(seed + 1 + i, 5000)
        words[at + 5000 :] = _bits(rng.standard_normal(ELEMENTS - at - 5000) * 2.0 ** rng.integers(-3, 4))
    return tuple(made)


def _convert() -> Data:
    a, b, _ = _values(7, 3)
    selector = _random(8, ELEMENTS)
    low, high = (_bf16_of_f32(x) for x in (a, b))

    def half(words: Words, shift: int) -> Reals:
        return _f32(np.ascontiguousarray((words >> shift & 0xFFFF) << 16)).astype(np.float64)

    with np.errstate(invalid="ignore"):
        products = [_bf16_of_f64(half(a, s) * half(b, s)) for s in (0, 16)]
    octets = np.concatenate([a[:, None].view(np.uint8), b[:, None].view(np.uint8)], axis=1)  # little-endian
    permuted = _zeros(ELEMENTS)
    for i in range(4):
        nibble = selector >> (4 * i) & 0xF
        octet = np.take_along_axis(octets, (nibble & 7)[:, None].astype(np.int64), axis=1)[:, 0].astype(np.uint32)
        permuted |= np.where(nibble & 8, octet // 128 * 0xFF, octet) << np.uint32(8 * i)
    expected = [low | high << 16, products[0] | products[1] << 16, permuted, a, a ^ b ^ selector ^ np.uint32(1)]
    return Data((a, b, selector), np.stack(expected, axis=1))


def _arithmetic() -> Data:
    a, b, c = _values(9, 3)
    tail = slice(-4000, None)
    with np.errstate(all="ignore"):
        c[tail] = _bits(-(_f32(a)[tail] * _f32(b)[tail]))  # what is left is the product's rounding
        x, y, z = _f32(a), _f32(b), _f32(c)
        expected = [_fma(a, b, c), *(_bits(v) for v in (x * y + z, x + y, x - y, x * y))]
    return Data((a, b, c), np.stack(expected, axis=1), any_nan=True)


def _exponential() -> Data:
    """CUDA programming guide, intrinsic functions: __expf is good to 2 + floor(abs(1.173 x)) ulp of the rounded result.

    Half an ulp more against the exact one: an H200 was seen at 2.02 where the guide says 2.
    """
    rng = np.random.default_rng(10)
    wide, near = rng.uniform(-110, 95, ELEMENTS // 2), rng.standard_normal(ELEMENTS)
    x = _f32(np.concatenate([SPECIAL, _bits(wide), _bits(near)])[:ELEMENTS])
    with np.errstate(all="ignore"):
        x[np.abs(x - 88.72284) < 0.01] = 0.5  # either side of the largest number
        real = x.astype(np.float64)
        want = _overflowing(np.exp(real))
        bound = 2.5 + np.floor(np.abs(1.173 * real))
    unit = _ulp(want)
    return Data((_bits(x),), want, unit=unit, bound=np.where(np.isfinite(bound), bound, 0))


def _power_of_two() -> Data:
    """PTX ISA, ex2.approx.ftz: 2 ulp of the rounded result, half an ulp more of the exact one; a subnormal one is 0."""
    rng = np.random.default_rng(15)
    wide, near = rng.uniform(-160, 140, ELEMENTS // 2), rng.standard_normal(ELEMENTS)
    x = _f32(np.concatenate([SPECIAL, _bits(wide), _bits(near)])[:ELEMENTS])
    with np.errstate(all="ignore"):
        x[(np.abs(x - 128) < 0.01) | (np.abs(x + 126) < 0.01)] = 0.5  # either side of the largest and least number
        want = _overflowing(np.exp2(x.astype(np.float64)))
        want = np.where(want < 2.0**-126, 0.0, want)
    return Data((_bits(x),), want, unit=_ulp(want), bound=np.full(ELEMENTS, 2.5))


def _quotient() -> Data:
    """PTX ISA, div.approx: 2 ulp for a denominator of 2^-126 to 2^126; above, 0, or NaN for an infinite numerator."""
    rng = np.random.default_rng(11)
    x, y = _values(12, 2)
    n = 4000  # numerators of all sizes over denominators beyond 2^126
    y[-n:] = rng.integers(0x7E800001, 0x7F800000, n, np.uint32) | (rng.integers(0, 2, n, np.uint32) << 31)
    x[-n:] = _random(13, n)
    y[-2 * n : -n] = rng.integers(0x00800000, 0x7E800001, n, np.uint32)
    with np.errstate(all="ignore"):
        a, b = _f32(x).astype(np.float64), _f32(y).astype(np.float64)
        huge = (np.abs(b) > 2.0**126) & np.isfinite(b)
        want = _overflowing(a / b)
        want = np.where(huge, np.where(np.isfinite(a), 0.0, np.nan), want)
        unit = _ulp(want)
        tiny = (np.abs(b) < 2.0**-126) & (b != 0)  # nothing is said of these
        near = np.abs(np.abs(a / b) / 2.0**128 - 1) < 1e-6  # either side of the largest number
    return Data((x, y), want, unit=unit, bound=np.where(tiny | near, np.inf, np.where(huge, 0.0, 2.0)))


def _reciprocal() -> Data:
    """PTX ISA, rcp.approx.ftz: 1 ulp; subnormal numbers are zeros, of operands and results."""
    rng = np.random.default_rng(16)
    x = np.concatenate([SPECIAL, _random(17, ELEMENTS // 2), _bits(rng.uniform(1, 4, ELEMENTS))])[:ELEMENTS]
    with np.errstate(all="ignore"):
        real = _f32(x).astype(np.float64)
        assert not (np.abs(np.abs(real) / 2.0**126 - 1) < 1e-6).any(), "either side of the least normal result"
        flushed = np.where(np.abs(real) < 2.0**-126, np.copysign(0.0, real), real)
        want = _overflowing(1 / flushed)
        want = np.where(np.abs(want) < 2.0**-126, np.copysign(0.0, want), want)
    return Data((x,), want, unit=_ulp(want), bound=np.full(ELEMENTS, 1.5))


def _inverse_root() -> Data:
    """CUDA programming guide, standard functions: rsqrtf is good to 2 ulp; subnormal numbers are numbers."""
    rng = np.random.default_rng(14)
    every, near = rng.integers(0, 0x7F800000, ELEMENTS // 2, np.uint32), _bits(rng.uniform(0.25, 4, ELEMENTS))
    x = np.concatenate([SPECIAL, rng.integers(1, 0x00800000, 1000, np.uint32), every, near])[:ELEMENTS]
    with np.errstate(all="ignore"):
        real = _f32(x).astype(np.float64)
        want = np.where(real == 0, np.copysign(np.inf, real), 1 / np.sqrt(real))
    return Data((x,), want, unit=_ulp(want), bound=np.full(ELEMENTS, 2.0))


# -- mma.cu --------------------------------------------------------------------------------------------------------

TILES = 4 * 4 * 32
LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4
# PTX ISA, "Matrix Fragments": where register i of a lane lies. bf16 registers hold two neighbours in k.
A_ROW = np.stack([GROUP, GROUP + 8, GROUP, GROUP + 8], axis=1)
C_ROW = np.stack([GROUP, GROUP, GROUP + 8, GROUP + 8], axis=1)
C_COLUMN = np.stack([2 * THREAD, 2 * THREAD + 1] * 2, axis=1)
MMA_BOUND = 2.0**-20  # of sum(abs(a b)) + abs(c): k + 1 terms cut off at 2^-25 of the largest, and the sum at 2^-23


def _operands(rng: np.random.Generator, shape: tuple[int, ...], digits: int, way: int) -> Reals:
    """Random numbers with ``digits`` binary digits after the leading one."""
    sign = rng.choice([-1.0, 1.0], shape)
    mantissa = 1 + rng.integers(0, 1 << digits, shape) / (1 << digits)
    match way:
        case 0:  # of like size
            return sign * mantissa * 2.0 ** rng.integers(-2, 3, shape)
        case 1:  # far apart
            return sign * mantissa * 2.0 ** rng.integers(-40, 41, shape)
        case 2:  # some of them zero
            return sign * np.where(rng.random(shape) < 0.5, 0.0, mantissa * 2.0 ** rng.integers(-8, 9, shape))
        case _:  # far apart within a row, most products far below the largest
            return sign * mantissa * 2.0 ** (-2.0 * rng.integers(0, 14, shape))


def _matrices(seed: int, k: int, digits: int) -> tuple[Reals, Reals, Reals]:
    """A [tile][16][k], B [tile][k][8], C [tile][16][8], all in numbers that their formats have."""
    rng = np.random.default_rng(seed)
    a, b, c = np.zeros((TILES, 16, k)), np.zeros((TILES, k, 8)), np.zeros((TILES, 16, 8))
    for tile in range(TILES):
        way = tile % 4
        a[tile], b[tile] = _operands(rng, (16, k), digits, way), _operands(rng, (k, 8), digits, way)
        match tile // 4 % 4:
            case 0:
                pass  # C = 0
            case 1:
                c[tile] = -(a[tile] @ b[tile])  # all but nothing is left
            case 2:
                c[tile] = _operands(rng, (16, 8), 23, way)
            case _:
                c[tile] = _operands(rng, (16, 8), 23, 1)
    c = c.astype(np.float32).astype(np.float64)
    least = 2.0 ** (-126 - digits)  # the least subnormal number
    a[-4] = rng.integers(1, 1 << digits, (16, k)) * least
    b[-4] = _operands(rng, (k, 8), digits, 0) * 2.0**90
    c[-4] = 0
    for tile, at in ((-3, np.inf), (-2, -np.inf), (-1, np.nan)):
        a[tile], b[tile], c[tile] = 1, 2, 3
        a[tile, 5, 3] = b[tile, 1, 6] = c[tile, 9, 2] = at
    c[-3, 5, 1] = -np.inf  # against A's infinity
    b[-2, 3, 4] = 0  # times A's infinity
    return a, b, c


def _multiplied(a: Reals, b: Reals, c: Reals) -> tuple[Reals, Reals]:
    """D rounded once, to double, and the sum of the terms' absolute values, in the order of C's registers."""
    with np.errstate(invalid="ignore"):
        terms = np.concatenate([a[:, :, :, None] * b[:, None], c[:, :, None]], axis=2)  # exact in double
        d = terms.sum(axis=2)
    scale = np.abs(terms).sum(axis=2)
    for at in np.argwhere(np.isfinite(d)):
        t, row, column = at
        d[t, row, column] = math.fsum(terms[t, row, :, column])
    return d[:, C_ROW, C_COLUMN], scale[:, C_ROW, C_COLUMN]


def _mma(inputs: tuple[Words, ...], a: Reals, b: Reals, c: Reals) -> Data:
    d, scale = _multiplied(a, b, c)
    unit = np.where(np.isfinite(scale) & (scale > 0), scale, 1.0)
    return Data(inputs, d, unit=unit, bound=np.full(d.shape, MMA_BOUND))


def _multiply_bf16() -> Data:
    a, b, c = _matrices(15, 16, 7)
    half_a, half_b = (_bits(x) >> 16 for x in (a, b))
    k = 2 * THREAD[:, None] + np.array([0, 0, 8, 8])
    words_a = half_a[:, A_ROW, k] | half_a[:, A_ROW, k + 1] << 16
    k, n = 2 * THREAD[:, None] + np.array([0, 8]), GROUP[:, None]
    words_b = half_b[:, k, n] | half_b[:, k + 1, n] << 16
    return _mma((words_a.reshape(-1), words_b.reshape(-1), _bits(c[:, C_ROW, C_COLUMN]).reshape(-1)), a, b, c)


def _tf32(low: int) -> Data:
    """``low``: which of the 13 bits that tf32 lacks are set in the registers; they do not count."""
    a, b, c = _matrices(16, 8, 10)
    words_a = _bits(a)[:, A_ROW, THREAD[:, None] + np.array([0, 0, 4, 4])]
    words_b = _bits(b)[:, THREAD[:, None] + np.array([0, 4]), GROUP[:, None]]
    # infinity with such a bit is a NaN
    noise_a, noise_b = (_random(17, *w.shape) & low & np.where(_is_nan(w | 1), 0, low) for w in (words_a, words_b))
    words = (words_a | noise_a, words_b | noise_b, _bits(c[:, C_ROW, C_COLUMN]))
    return _mma(tuple(np.ascontiguousarray(w, np.uint32).reshape(-1) for w in words), a, b, c)


def _matrix_loads() -> Data:
    words = _random(18, 128 * 4)
    halves = words.view(np.uint16).reshape(128, 8).astype(np.uint32)
    rows = np.random.default_rng(19).integers(0, 128, (16, 2, 32), np.uint32)
    pieces = halves[rows.reshape(16, 2, 4, 8)]  # [round][warp][piece][row][column]
    straight = pieces[..., 0::2] | pieces[..., 1::2] << 16
    turned = pieces.swapaxes(-1, -2)
    turned = turned[..., 0::2] | turned[..., 1::2] << 16
    of_lane = [np.moveaxis(x[..., GROUP, THREAD], 2, -1) for x in (straight, turned)]  # [round][warp][lane][piece]
    return Data(
        (words, rows.reshape(-1)), np.concatenate([*of_lane, of_lane[0][..., :2], of_lane[1][..., :1]], axis=-1)
    )


# -- wgmma.cu ------------------------------------------------------------------------------------------------------

PRODUCT_BOUND = 4 * MMA_BOUND  # of four instructions; an H200 stays within it


def _product_operands(seed: int, groups: int, tiles: int, whole: bool) -> tuple[Reals, Reals, Reals]:
    """A [warpgroup][64][64] and C [warpgroup][64][64], B [tile][n][k]; ``whole``: every sum is exact in fp32."""
    rng = np.random.default_rng(seed)
    shapes = (groups, 64, 64), (tiles, 64, 64), (groups, 64, 64)
    if whole:
        a, b, c = (rng.integers(-9, 10, shape).astype(np.float64) for shape in shapes)
        return a, b, c
    a, b = (_operands(rng, shape, 7, 0) for shape in shapes[:2])
    return a, b, _operands(rng, shapes[2], 23, 0)


def _core_matrices(b: Words) -> Words:
    """B's words as bulk copies bring them: core matrices of 8 n by 8 k, all of 8 n in a row."""
    return b.reshape(-1, 8, 8, 8, 4).swapaxes(2, 3)


def _products(
    seed: int, sums: Callable[[int], list[Any]], groups: int = 2, tiles: int = 1, whole: bool = False
) -> Data:
    """``sums``: for each output a list of (factor of C, k16 steps of every tile of B that are multiplied)."""
    a, b, c = _product_operands(seed, groups, tiles, whole)
    k, row = 2 * THREAD[:, None] + np.array([0, 0, 8, 8]), A_ROW
    half_a, half_b = (_bits(x) >> 16 for x in (a, b))
    steps = half_a.reshape(groups, 4, 16, 4, 16).transpose(0, 1, 3, 2, 4)  # [group][warp][step][row][k]
    words_a = steps[..., row, k] | steps[..., row, k + 1] << 16
    words_b = half_b[..., 0::2] | half_b[..., 1::2] << 16

    def fragments(d: Reals) -> Reals:
        """[group][64][64] as [group][warp][lane][32]."""
        tiled = d.reshape(groups, 4, 16, 8, 8).transpose(0, 1, 3, 2, 4)  # [group][warp][n8][row][column]
        return np.moveaxis(tiled[..., C_ROW, C_COLUMN], 2, 3).reshape(groups, 4, 32, 32)

    expected, scales = [], []
    for factor, parts in sums(tiles):
        left = np.concatenate([a[..., 16 * step : 16 * step + 16] for _, step in parts], axis=2)
        right = np.concatenate([b[tile, :, 16 * step : 16 * step + 16] for tile, step in parts], axis=1)
        expected.append(fragments(left @ right.T + factor * c))
        scales.append(fragments(np.abs(left) @ np.abs(right).T + factor * np.abs(c)))
    moved_b = words_b if tiles == 1 else _core_matrices(words_b)
    inputs = tuple(np.ascontiguousarray(x, np.uint32).reshape(-1) for x in (words_a, moved_b, _bits(fragments(c))))
    d, scale = np.stack(expected), np.stack(scales)
    if whole:
        assert (np.abs(scale) < 1 << 24).all()
        return Data(inputs, _bits(d))
    return Data(inputs, d, unit=scale, bound=np.full(d.shape, PRODUCT_BOUND))


ALL_STEPS = [(0, step) for step in range(4)]


def _chain(seed: int, whole: bool = False) -> Data:
    return _products(seed, lambda _: [(0, ALL_STEPS), (1, ALL_STEPS)], whole=whole)


def _product_groups(seed: int, whole: bool = False) -> Data:
    def sums(_: int) -> list[Any]:
        return [(1, ALL_STEPS[:2]), (1, ALL_STEPS[2:]), (1, ALL_STEPS), (0, [(0, 0)] * 3)]

    return _products(seed, sums, whole=whole)


def _product_ring() -> Data:
    data = _products(40, lambda tiles: [(1, [(t, s) for t in range(tiles) for s in range(4)])], 1, 6, whole=True)
    return Data(data.inputs, np.append(data.expected.reshape(-1), np.ones(160, np.uint32)))


# -- warp.cu -------------------------------------------------------------------------------------------------------


def _lanes() -> Data:
    rng = np.random.default_rng(20)
    rounds = np.arange(32)[:, None, None]
    x = _random(21, 32, 4, 32)
    x[:, 1] = rng.choice(SPECIAL, (32, 32))
    x[:, 2] = x[:, 2] & ~np.uint32(63) | np.uint32(5)  # none of the votes' remainders ...
    x[::2, 2, 7], x[1::4, 2, 9] = 64, 65  # ... but in some rounds
    source = rng.integers(0, 64, x.shape, np.uint32)

    def of(lanes: Any) -> Words:
        return np.take_along_axis(x, np.broadcast_to(lanes, x.shape).astype(np.int64), axis=2)

    def all_lanes(per_warp: Any) -> Words:
        return np.broadcast_to(per_warp[..., None], x.shape).astype(np.uint32)

    def funnel() -> Words:
        both = (x ^ source).astype(np.uint64) << 32 | x
        return (both >> (source & 31) & 0xFFFFFFFF).astype(np.uint32)

    asked, crossed = of(source % 32), of(LANE ^ rounds)
    ballot = ((x >> 1 & 1).astype(np.uint64) << LANE.astype(np.uint64)).sum(axis=2)
    bit = np.array([(int(v) & -int(v)).bit_length() for v in x.reshape(-1)]).reshape(x.shape)
    results = [
        *(asked, asked),
        of(np.where(rounds <= LANE, LANE - rounds, LANE)),
        *(crossed, crossed),
        all_lanes((x % 64 == 0).any(axis=2)),
        all_lanes((x % 64 != 1).all(axis=2)),
        all_lanes(ballot),
        all_lanes(x.max(axis=2)),
        np.array([int(v).bit_count() for v in x.reshape(-1)]).reshape(x.shape),
        bit,
        funnel(),
        of((LANE + 1) % 32),
        np.roll(x, -1, axis=1) + np.uint32(1),
        ~_is_nan(x),
        all_lanes(x.min(axis=2)),
        np.array([32 - int(v).bit_length() for v in x.reshape(-1)]).reshape(x.shape),
    ]
    expected = np.stack([np.asarray(r).astype(np.uint32) for r in results], axis=-1)
    return Data((np.stack([x, source], axis=-1).reshape(-1),), expected)


def _control() -> Data:
    v = _random(22, 384)
    value = v + np.where(np.arange(384) < 128, 1, 2).astype(np.uint32)
    ones = np.ones(384, np.uint32)
    return Data((v,), np.stack([value, ones, ones, ones], axis=1))


def _stamps() -> Data:
    v = _random(29, 64)
    ones = np.ones(64, np.uint32)
    return Data((v,), np.stack([v, ones, ones, np.arange(64, dtype=np.uint32)], axis=1))


# -- barriers.cu ---------------------------------------------------------------------------------------------------


def _phases() -> Data:
    v = _random(23, 28)
    first, second, third = [1, 0, 0, 1, 0, 1, 0], [0, 1, *v[:16]], [0, 1, *v[16:], 0, 1]
    return Data((v,), np.array([*first, *second, *third], np.uint32))


def _rounds() -> Data:
    v = _random(24, 16, 3, 32)
    sums = v[:, 0] + (v[:, 1] << 1) + (v[:, 2] << 2)
    return Data((v.reshape(-1),), np.append(sums.reshape(-1), np.ones(128, np.uint32)))


def _named() -> Data:
    v = _random(25, 16, 64)
    ids = np.arange(128, dtype=np.uint32).reshape(2, 64)
    return Data((v.reshape(-1),), np.append(np.roll(v, -33, axis=1), np.roll(ids * 5 + 1, -32, axis=1)))


def _votes() -> Data:
    against = np.array([*range(0, 128, 9), 200], np.uint32)  # by round, the last one nobody
    seen = [sum(1 << i for i, other in enumerate(against) if other // 64 != tid // 64) for tid in range(128)]
    return Data((against,), np.array(seen, np.uint32))


def _ring() -> Data:
    v = _random(26, 20 * 128)
    return Data((v, _zeros(128)), np.append(v, np.ones(5, np.uint32)))


# -- copies.cu -----------------------------------------------------------------------------------------------------


def _stages() -> Data:
    v = _random(27, 24, 128, 4)
    got, tiles = v.copy(), np.arange(24, dtype=np.uint32)[:, None]
    got[..., 0] += tiles
    got[..., 3] ^= tiles
    return Data((v.reshape(-1),), np.append(got.reshape(-1), np.ones(160, np.uint32)))


def _round_trip() -> Data:
    v, rounds = _random(28, 128, 4), np.arange(8, dtype=np.uint32)[:, None]
    x, y, z, w = (np.broadcast_to(v[:, i], (8, 128)) for i in range(4))
    out = np.stack([x + rounds, y, z - rounds, w ^ rounds], axis=2)
    return Data((v.reshape(-1), _zeros(1024)), np.concatenate([out, out[-1:], v[None, :, ::-1]]))


# -- cluster.cu ----------------------------------------------------------------------------------------------------


def _exchange() -> Data:
    v = _random(29, 4, 12, 128)
    got = np.roll(v[[1, 0, 3, 2]], -1, axis=2)
    return Data((v.reshape(-1),), np.append(got.reshape(-1), np.ones(4 * 128, np.uint32)))


def _neighbours() -> Data:
    v = _random(30, 2, 4, 64)
    left = np.roll(v, 1, axis=1)
    return Data((v.reshape(-1),), np.stack([left, 3 * np.roll(v, -2, axis=1), left], axis=-1))


def _multicast() -> Data:
    v = _random(31, 2, 12, 256)
    return Data((v.reshape(-1),), np.append(np.repeat(v, 2, axis=0), np.ones(4 * 128, np.uint32)))


CASES: tuple[Case, ...] = (
    Case("loads", "memory.cu", "loads", _loads, threads=64),
    Case("stores", "memory.cu", "stores", _stores, threads=64),
    Case("shared_memory", "memory.cu", "shared_memory", _shared_memory, threads=64, shared_bytes=64 * 48 + 8),
    Case("word_of_mouth", "memory.cu", "word_of_mouth", _word_of_mouth, shared_bytes=16),
    Case("atomics", "memory.cu", "atomics", _atomics, blocks=4, threads=64, shared_bytes=4, written=(0,)),
    Case("flags", "memory.cu", "flags", _flags, blocks=2, threads=64, shared_bytes=4, written=(1, 2)),
    Case("convert", "convert.cu", "convert", _convert, blocks=4),
    Case("arithmetic", "convert.cu", "arithmetic", _arithmetic, blocks=4),
    Case("exponential", "convert.cu", "exponential", _exponential, blocks=4, unit="ulp"),
    Case("power_of_two", "convert.cu", "power_of_two", _power_of_two, blocks=4, unit="ulp"),
    Case("reciprocal", "convert.cu", "reciprocal", _reciprocal, blocks=4, unit="ulp"),
    Case("quotient", "convert.cu", "quotient", _quotient, blocks=4, unit="ulp"),
    Case("inverse_root", "convert.cu", "inverse_root", _inverse_root, blocks=4, unit="ulp"),
    Case("multiply_bf16", "mma.cu", "multiply_bf16", _multiply_bf16, blocks=4, unit="of the terms' sum"),
    Case("multiply_tf32", "mma.cu", "multiply_tf32", lambda: _tf32(0), blocks=4, unit="of the terms' sum"),
    Case("multiply_tf32_low", "mma.cu", "multiply_tf32", lambda: _tf32(0x1FFF), blocks=4, unit="of the terms' sum"),
    Case("matrix_loads", "mma.cu", "matrix_loads", _matrix_loads, threads=64, shared_bytes=128 * 16),
    *(
        Case(
            name,
            "wgmma.cu",
            kernel,
            make,
            blocks=256 // threads,  # two warpgroups in all
            threads=threads,
            shared_bytes=shared,
            unit="" if name.endswith("whole") else "of the terms' sum",
            only="sm_90a",
        )
        for name, kernel, make, threads, shared in (
            ("product_rows", "product_rows", lambda: _chain(34), 128, 8192),
            ("product_columns", "product_columns", lambda: _chain(35), 256, 8192),
            ("product_apart", "product_apart", lambda: _chain(36), 256, 8 * 1168),
            ("product_rows_whole", "product_rows", lambda: _chain(37, whole=True), 256, 8192),
            ("product_columns_whole", "product_columns", lambda: _chain(37, whole=True), 128, 8192),
            ("product_groups", "product_groups", lambda: _product_groups(38), 256, 8192),
            ("product_groups_whole", "product_groups", lambda: _product_groups(39, whole=True), 128, 8192),
        )
    ),
    Case(
        "product_ring",
        "wgmma.cu",
        "product_ring",
        _product_ring,
        threads=160,
        shared_bytes=128 + 2 * 8192,
        only="sm_90a",
    ),
    Case("lanes", "warp.cu", "lanes", _lanes, shared_bytes=128 * 4),
    Case("control", "warp.cu", "control", _control, threads=384),
    Case("stamps", "warp.cu", "stamps", _stamps, threads=64),
    Case("phases", "barriers.cu", "phases", _phases, threads=32, shared_bytes=128 + 112),
    Case("rounds", "barriers.cu", "rounds", _rounds, shared_bytes=128 + 96 * 4),
    Case("named", "barriers.cu", "named", _named, shared_bytes=4 * 64 * 4),
    Case("votes", "barriers.cu", "votes", _votes),
    Case("ring", "barriers.cu", "ring", _ring, threads=160, shared_bytes=128 + 3 * 512 + 6 * 16, written=(1,)),
    Case("stages", "copies.cu", "stages", _stages, threads=160, shared_bytes=128 + 3 * 2048),
    Case("round_trip", "copies.cu", "round_trip", _round_trip, shared_bytes=128 + 3 * 2048, written=(1,)),
    Case("exchange", "cluster.cu", "exchange", _exchange, blocks=4, cluster=2, shared_bytes=128 + 2 * 512),
    Case("neighbours", "cluster.cu", "neighbours", _neighbours, blocks=8, threads=64, cluster=4, shared_bytes=512),
    Case("multicast", "cluster.cu", "multicast", _multicast, blocks=4, cluster=2, shared_bytes=128 + 2 * 1024),
)
FILES: dict[str, tuple[str, ...]] = {
    f: tuple(dict.fromkeys(c.kernel for c in CASES if c.file == f)) for f in dict.fromkeys(c.file for c in CASES)
}
"""The kernels of each file."""
