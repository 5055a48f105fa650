"""Triton kernels of the op-by-op layer: one an op, 16 rows of tokens at a time, weights streamed once.

Every launch begins with what depends on weights alone, then waits for the launch before (``PDL``), and lets the next
one begin at once. What ranks exchange is [ranks, tokens, columns of a rank]: a message is written into ``SLOTS`` places
of it, the r-th rotated by 16 r columns, as stand-ins do. What an expert GEMM multiplies is kept in *planes*: of each
rank's columns first those with number 0 to 3 in their block of 16, of all blocks, then 4 to 7, and so on.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = tl.constexpr(16)  # of tokens, the least that an MMA takes
TURN = tl.constexpr(16)  # columns by which consecutive stand-ins' messages are rotated
HEAD = tl.constexpr(64)
CHUNK = tl.constexpr(64)  # numbers that a cache keeps together
LINE = tl.constexpr(128)  # bytes
SCALE_BASE = tl.constexpr((229 << 7) * 0x10001)  # of a scale's bits, twice: see prepare.py
LEAST = tl.constexpr(-3.0e38)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # on the CPU, where a dot of bf16 is one of their bits


# -- what kernels share -----------------------------------------------------------------------------------------


@triton.jit
def _begin(PDL: tl.constexpr):
    """Wait for the launch before; let the next one begin, which waits for this one's end before it reads."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _ask(pointers):
    """Bring the lines at these addresses into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _plane(column, WIDTH: tl.constexpr):
    """Where planes of ``WIDTH`` columns keep a column."""
    return (column // 4 % 4) * (WIDTH // 4) + column // 16 * 4 + column % 4


@triton.jit
def _gathered(column, row, ROWS_: tl.constexpr, WIDTH: tl.constexpr):
    """The offset of a row's column in [ranks, ROWS_, WIDTH]."""
    return (column // WIDTH) * (ROWS_ * WIDTH) + row * WIDTH + column % WIDTH


@triton.jit
def _dot(a, b, total):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def _bf16(x):
    """Rounded to the nearest, which the interpreter's own conversion does not do."""
    if INTERPRETED:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits += 0x7FFF + (bits >> 16 & 1)
        y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(tl.bfloat16)
    return y


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _spread(
    out, value, row, column, mask, STRIDE: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, PLANES: tl.constexpr
):
    """Send a message's elements into all places."""
    for slot in tl.static_range(SLOTS):
        turned = (column + TURN * slot) % N
        if PLANES:
            turned = _plane(turned, N)
        tl.store(out + slot * STRIDE + row * N + turned, _bf16(value), mask=mask)


# -- dense ------------------------------------------------------------------------------------------------------


@triton.jit
def dense(
    x, w, out, partials, arrived,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, SLOTS: tl.constexpr, FINISH: tl.constexpr,
    FP32: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x bf16 [T, K] times w [N, K] transposed. ``SPLIT`` programs share K; with ``FINISH`` the last of them to arrive
    adds their fp32 ``partials`` [SPLIT, 16, N] in ascending order and sends ``out``, else the reader adds. An fp32
    weight is three bf16 ones: its products are exact."""
    tile, part = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    t = tl.arange(0, ROWS)
    SHARE: tl.constexpr = K // SPLIT
    k = part * SHARE + tl.arange(0, BK)
    weights = w + n[None, :] * K + k[:, None]
    if PDL:
        PER: tl.constexpr = LINE // (4 if FP32 else 2)
        line = tl.arange(0, SHARE // PER) * PER
        _ask(w + n[:, None] * K + part * SHARE + line[None, :])
    _begin(PDL)
    rows = x + t[:, None] * K + k[None, :]
    total = tl.zeros((ROWS, BN), tl.float32)
    for at in range(0, SHARE, BK):
        a = tl.load(rows + at, mask=t[:, None] < T, other=0.0)
        b = tl.load(weights + at, eviction_policy="evict_first")
        if FP32:
            high = _bf16(b)
            rest = b - high.to(tl.float32)
            middle = _bf16(rest)
            low = _bf16(rest - middle.to(tl.float32))
            total = _dot(a, low, total)
            total = _dot(a, middle, total)
            total = _dot(a, high, total)
        else:
            total = _dot(a, b, total)
    mask = t[:, None] < T
    if SPLIT == 1 and FINISH:
        _spread(out, total, t[:, None], n[None, :], mask, T * N, N, SLOTS, False)
    else:
        place = partials + t[:, None] * N + n[None, :]
        tl.store(place + part * (ROWS * N), total, mask=mask)
        if FINISH:
            tl.debug_barrier()
            if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
                total = tl.zeros((ROWS, BN), tl.float32)
                for s in tl.static_range(SPLIT):
                    total += tl.load(place + s * (ROWS * N), mask=mask, other=0.0, cache_modifier=".cg")
                _spread(out, total, t[:, None], n[None, :], mask, T * N, N, SLOTS, False)
                tl.store(arrived + tile, 0)


@triton.jit
def spread(x, out, T: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A bf16 message [T, N] into all places: after a GEMM that is not ours."""
    _begin(PDL)
    t = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _spread(out, tl.load(x + t * N + n, mask=n < N), t, n, n < N, T * N, N, SLOTS, False)


# -- experts ----------------------------------------------------------------------------------------------------


@triton.jit
def _decode(words, scale, ASM: tl.constexpr):
    """The four bf16 tensors that 16-bit words hold, e2m1 * scale * 2^-126: see prepare.py for the bits."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 u, v, s;
            prmt.b32 s, $5, $6, 0x5410;
            and.b32 u, $4, 0x81C081C0;
            mul.bf16x2 $0, u, s;
            shr.b32 u, $4, 6;
            shl.b32 v, $4, 10;
            and.b32 u, u, 0x01C001C0;
            lop3.b32 u, v, 0x80008000, u, 0xEA;
            mul.bf16x2 $1, u, s;
            shl.b32 u, $4, 4;
            and.b32 u, u, 0x81C081C0;
            mul.bf16x2 $2, u, s;
            shl.b32 u, $4, 6;
            shr.b32 v, $4, 2;
            and.b32 u, u, 0x80C080C0;
            lop3.b32 u, v, 0x01000100, u, 0xEA;
            mul.bf16x2 $3, u, s;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, scale],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        u = words.to(tl.int32) & 0xFFFF
        factor = _value(scale & 0xFFFF)
        a = _bf16(_value(u & 0x81C0) * factor)
        b = _bf16(_value(u >> 6 & 0x01C0 | u << 10 & 0x8000) * factor)
        c = _bf16(_value(u << 4 & 0x81C0) * factor)
        d = _bf16(_value(u << 6 & 0x80C0 | u >> 2 & 0x0100) * factor)
    return a, b, c, d


@triton.jit
def _value(bits):
    """The bf16 with these bits, in fp32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _expand(stored, BN: tl.constexpr, BLOCKS: tl.constexpr):
    """Bits of the bf16 that stored scales [BN, BLOCKS] are, in either half, for each of the four words of a block."""
    scale = stored.to(tl.int32) * 0x100010 + SCALE_BASE
    return scale[:, :, None].broadcast_to(BN, BLOCKS, 4).reshape(BN, BLOCKS * 4)


@triton.jit
def _times(weights, stored, x0, x1, x2, x3, total, BN: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr):
    """A step of K: rows [BN, BK / 4] of words times x [BK / 4, tokens] of each plane."""
    w = tl.load(weights, eviction_policy="evict_first")
    s = tl.load(stored, eviction_policy="evict_first")
    w0, w1, w2, w3 = _decode(w, _expand(s, BN, BK // 16), ASM)
    total = _dot(w0, x0, total)
    total = _dot(w1, x1, total)
    total = _dot(w2, x2, total)
    return _dot(w3, x3, total)


@triton.jit
def _entry(
    x, matrix, factors, scale_2, out, slots, count,
    T: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr, XN: tl.constexpr, PER_SLOT: tl.constexpr,
    SWIGLU: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's rows for at most ``TOKENS`` slots."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, TOKENS)
    mask = i[None, :] < count
    slot = tl.load(slots + i, mask=i < count, other=0)
    row = slot if PER_SLOT else slot // TOP_K
    XROWS: tl.constexpr = T * TOP_K if PER_SLOT else T
    j, b = tl.arange(0, BK // 4), tl.arange(0, BK // 16)
    rows = x + row[None, :] * XN + j[:, None]
    weights = matrix + n[:, None] * (K // 4) + j[None, :]
    stored = factors + n[:, None] * (K // 16) + b[None, :]
    first = tl.zeros((BN, TOKENS), tl.float32)
    second = tl.zeros((BN, TOKENS), tl.float32)
    for k in range(0, K, BK):
        here = rows + tl.multiple_of((k // XN) * (XROWS * XN) + k % XN // 4, 8)
        x0 = tl.load(here, mask=mask, other=0.0)
        x1 = tl.load(here + XN // 4, mask=mask, other=0.0)
        x2 = tl.load(here + XN // 4 * 2, mask=mask, other=0.0)
        x3 = tl.load(here + XN // 4 * 3, mask=mask, other=0.0)
        first = _times(weights + k // 4, stored + k // 16, x0, x1, x2, x3, first, BN, BK, ASM)
        if SWIGLU:
            up = weights + (N * (K // 4) + k // 4)
            second = _times(up, stored + (N * (K // 16) + k // 16), x0, x1, x2, x3, second, BN, BK, ASM)
    y = first * tl.load(scale_2)
    if SWIGLU:
        y = y * _sigmoid(y) * (second * tl.load(scale_2 + 1))
    _spread(out, y, slot[None, :], n[:, None], mask, T * TOP_K * N, N, SLOTS, SWIGLU)


@triton.jit
def expert_gemm(
    x, words, scales, scale_2, out, entry_expert, entry_count, entry_slots, entries,
    T: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr, XN: tl.constexpr, PER_SLOT: tl.constexpr,
    SWIGLU: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each entry's slots (token * TOP_K + place) times its expert's NVFP4 matrix, as prepare.py makes it. Rows with
    ``SWIGLU`` are N of the gate, then N of up. ``x`` [ranks, T or T * TOP_K, XN] in planes. ``EARLY``: the launch
    before did not make the entries, so that they are there before it ends."""
    tile, entry = tl.program_id(0), tl.program_id(1)
    HALVES: tl.constexpr = 2 if SWIGLU else 1
    if not (EARLY and PDL):
        _begin(PDL)
    if entry < tl.load(entries):
        count = tl.load(entry_count + entry)
        expert = tl.load(entry_expert + entry).to(tl.int64)
        matrix = words + expert * (HALVES * N * (K // 4))
        factors = scales + expert * (HALVES * N * (K // 16))
        second = scale_2 + expert * HALVES
        slots = entry_slots + entry * ROWS
        if EARLY and PDL:
            n = tile * BN + tl.arange(0, BN)
            line = tl.arange(0, K // 256) * (LINE // 2)
            for half in tl.static_range(HALVES):
                _ask(matrix + (half * N + n[:, None]) * (K // 4) + line[None, :])
            _begin(PDL)
        if count <= 8:
            _entry(
                x, matrix, factors, second, out, slots, count,
                T, TOP_K, N, K, XN, PER_SLOT, SWIGLU, SLOTS, 8, BN, BK, ASM,
            )  # fmt: skip
        else:
            _entry(
                x, matrix, factors, second, out, slots, count,
                T, TOP_K, N, K, XN, PER_SLOT, SWIGLU, SLOTS, 16, BN, BK, ASM,
            )  # fmt: skip
    elif EARLY and PDL:
        _begin(PDL)


# -- routing ----------------------------------------------------------------------------------------------------


@triton.jit
def top_k(
    partials, bias, override, ids, shares, arrived, entry_of, entry_expert, entry_count, entry_slots, entries,
    multiplier, eps, scale,
    T: tl.constexpr, E: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, SPLIT: tl.constexpr, SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A token's experts and their shares; the last program to arrive lists the used experts, ascending, and slots.

    ``E``: N experts, filled up to a power of two. ``SLOTS``: T * TOP_K, filled up likewise.
    """
    t = tl.program_id(0)
    e = tl.arange(0, E)
    place = tl.arange(0, TOP_K)
    given = tl.load(override + t * TOP_K + place)
    offset = tl.load(bias + e, mask=e < N, other=0.0)
    _begin(PDL)
    logit = tl.zeros((E,), tl.float32)
    for s in tl.static_range(SPLIT):
        logit += tl.load(partials + (s * ROWS + t) * N + e, mask=e < N, other=0.0).to(tl.float32)
    p = _sigmoid(logit * multiplier)
    score = p + offset
    score = tl.where(score == score, score, LEAST)
    score = tl.where(e < N, score, float("-inf"))
    chosen = tl.zeros((TOP_K,), tl.int32)
    for index in tl.static_range(TOP_K):
        _, best = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.where(place == index, best, chosen)
        score = tl.where(e == best, float("-inf"), score)
    chosen = tl.where(given < 0, chosen, given)
    share = tl.sum(tl.where(chosen[:, None] == e[None, :], p[None, :], 0.0), axis=1)
    share = share / (tl.sum(share, axis=0) + eps) * scale
    tl.store(ids + t * TOP_K + place, chosen)
    tl.store(shares + t * TOP_K + place, share)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == T - 1:
        a = tl.arange(0, SLOTS)
        real = a < T * TOP_K
        mine = tl.load(ids + a, mask=real, other=0, cache_modifier=".cg")
        count = tl.histogram(mine, E, mask=real)
        used = (count > 0).to(tl.int32)
        entry = tl.cumsum(used, axis=0) - 1
        tl.store(entry_expert + entry, e, mask=used != 0)
        tl.store(entry_count + entry, count, mask=used != 0)
        tl.store(entry_of + e, entry)
        tl.store(entries, tl.sum(used, axis=0))
        rank = tl.zeros((SLOTS,), tl.int32)  # of a slot among those of its expert
        for start in range(0, T * TOP_K, TOP_K):
            others = tl.load(ids + start + place, cache_modifier=".cg")
            earlier = (others[None, :] == mine[:, None]) & (start + place[None, :] < a[:, None])
            rank += tl.sum(earlier.to(tl.int32), axis=1)
        tl.debug_barrier()
        tl.store(entry_slots + tl.load(entry_of + mine) * ROWS + rank, a, mask=real)
        tl.store(arrived, 0)


# -- whole rows -------------------------------------------------------------------------------------------------


@triton.jit
def rms_norm(
    x, gain, out, eps,
    T: tl.constexpr, W: tl.constexpr, XN: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``x`` [ranks, T, XN], normalised and times 1 + gain."""
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    g = tl.load(gain + c, mask=c < W, other=0.0).to(tl.float32)
    _begin(PDL)
    y = tl.load(x + _gathered(c, t, T, XN), mask=c < W, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, axis=0) / W + eps) * (1.0 + g)
    place = _plane(c, W) if PLANES else c
    tl.store(out + t * W + place, _bf16(y), mask=c < W)


@triton.jit
def residual(
    x, stream, gate, gain, next_gain, out, normed, eps, next_eps,
    T: tl.constexpr, W: tl.constexpr, XN: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr, NEXT: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and residual gate, then the next norm. ``x``: PARTS contributions [T, W] to be added, or [ranks, T, XN].
    ``gate`` fp32: alphas, then betas."""
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < W
    alpha = tl.load(gate + c, mask=mask, other=0.0)
    beta = tl.load(gate + W + c, mask=mask, other=0.0)
    _begin(PDL)
    y = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        y += tl.load(x + part * (T * W) + _gathered(c, t, T, XN), mask=mask, other=0.0).to(tl.float32)
    s = tl.load(stream + t * W + c, mask=mask, other=0.0)
    if GAIN:
        y = y * (1.0 + tl.load(gain + c, mask=mask, other=0.0).to(tl.float32))
    y = y * tl.rsqrt(tl.sum(y * y, axis=0) / W + eps)
    s = alpha * s + beta * y
    tl.store(out + t * W + c, s, mask=mask)
    if NEXT:
        g = tl.load(next_gain + c, mask=mask, other=0.0).to(tl.float32)
        s = s * tl.rsqrt(tl.sum(s * s, axis=0) / W + next_eps) * (1.0 + g)
        tl.store(normed + t * W + c, _bf16(s), mask=mask)


@triton.jit
def combine(
    x, shares, gain, out, eps,
    T: tl.constexpr, W: tl.constexpr, XN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``x`` [ranks, T * TOP_K, XN]: a token's slots, each times 1 + gain and normalised, in shares."""
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    k = tl.arange(0, TOP_K)
    g = 1.0 + tl.load(gain + c, mask=c < W, other=0.0).to(tl.float32)
    _begin(PDL)
    place = _gathered(c[None, :], t * TOP_K + k[:, None], T * TOP_K, XN)
    y = tl.load(x + place, mask=c[None, :] < W, other=0.0).to(tl.float32) * g[None, :]
    factor = tl.load(shares + t * TOP_K + k) * tl.rsqrt(tl.sum(y * y, axis=1) / W + eps)
    y = tl.sum(y * factor[:, None], axis=0)
    tl.store(out + t * W + c, _bf16(y), mask=c < W)


# -- attention --------------------------------------------------------------------------------------------------


@triton.jit
def _laid(row, column, COLUMNS: tl.constexpr):
    """Where a chunk of a cache has an element: in pieces of 8 x 8, see :func:`megagen.ops.attention.slots`."""
    return (row // 8 * (COLUMNS // 8) + column // 8) * 64 + row % 8 * 8 + column % 8


@triton.jit
def attend(
    q, keys, values, context, positions, ancestors, sums, tops, totals, scale,
    T: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr, PER: tl.constexpr,
    BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``PER`` chunks of numbers for ``BM`` rows (token, then query head) of a key head: softmax not yet divided.

    ``sums`` fp32 [parts, KV, 16 * H / KV, 64], and as many ``tops`` (largest scores) and ``totals`` but for the 64.
    """
    kv, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // KV
    r = block * BM + tl.arange(0, BM)
    t = r // G
    d = tl.arange(0, HEAD)
    p = tl.arange(0, CHUNK)
    before = tl.load(context)
    position = tl.load(positions + t, mask=t < T, other=0)
    seen = tl.load(ancestors + t, mask=t < T, other=0)
    _begin(PDL)
    rows = tl.load(q + (t[:, None] * H + kv * G + r[:, None] % G) * HEAD + d[None, :], mask=t[:, None] < T, other=0.0)
    oldest = tl.maximum(before + 1 - WINDOW, 0)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, HEAD), tl.float32)
    for index in range(PER):
        c = oldest // CHUNK + part * PER + index
        number = c * CHUNK + p
        there = (number >= oldest) & (number < before + T)
        at = c % CHUNKS
        chunk = (kv * CHUNKS + at) * CHUNK * HEAD
        k = tl.load(keys + chunk + _laid(p[None, :], d[:, None], HEAD), mask=there[None, :], other=0.0)
        s = _dot(rows, k, tl.zeros((BM, CHUNK), tl.float32)) * scale
        bit = seen[:, None] >> tl.minimum(tl.maximum(number - before, 0), 31)[None, :] & 1
        sees = tl.where(number[None, :] < before, number[None, :] + WINDOW > position[:, None], bit != 0)
        s = tl.where(sees & there[None, :], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        s = tl.exp(s - base[:, None])
        fade = tl.exp(top - base)
        v = tl.load(values + chunk + _laid(d[None, :], p[:, None], CHUNK), mask=there[:, None], other=0.0)
        acc = _dot(_bf16(s), v, acc * fade[:, None])
        total = total * fade + tl.sum(s, axis=1)
        top = new
    row = (part * KV + kv) * (ROWS * G) + r
    tl.store(sums + row[:, None] * HEAD + d[None, :], acc)
    tl.store(tops + row, top)
    tl.store(totals + row, total)


@triton.jit
def merge(
    sums, tops, totals, gate, out, eps,
    H: tl.constexpr, KV: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The parts of a token's head, divided, normalised and gated."""
    t, h = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // KV
    part = tl.arange(0, BLOCK)
    d = tl.arange(0, HEAD)
    _begin(PDL)
    row = (part * KV + h // G) * (ROWS * G) + t * G + h % G
    top = tl.load(tops + row, mask=part < PARTS, other=float("-inf"))
    weight = tl.exp(top - tl.max(top, axis=0))  # a token sees itself: the largest is a number
    total = tl.sum(weight * tl.load(totals + row, mask=part < PARTS, other=0.0), axis=0)
    y = tl.load(sums + row[:, None] * HEAD + d[None, :], mask=part[:, None] < PARTS, other=0.0)
    y = tl.sum(y * weight[:, None], axis=0) / total
    y = y * tl.rsqrt(tl.sum(y * y, axis=0) / HEAD + eps)
    at = (t * H + h) * HEAD + d
    y = y * _sigmoid(tl.load(gate + at).to(tl.float32))
    tl.store(out + at, _bf16(y))


@triton.jit
def heads(
    partials, rotary, positions, context, q, gate, keys, values, eps, scale,
    H: tl.constexpr, KV: tl.constexpr, CHUNKS: tl.constexpr, SPLIT: tl.constexpr, ROTATE: tl.constexpr,
    BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``BH`` heads of a token from the projection's sums: norm, scale, rotation, and the write to the caches."""
    t, block = tl.program_id(0), tl.program_id(1)
    N: tl.constexpr = 2 * (H + KV) * HEAD
    HALF: tl.constexpr = HEAD // 2
    h = (block * BH + tl.arange(0, BH))[:, None]
    d = tl.arange(0, HALF)[None, :]
    number = tl.load(context) + t
    cosine = tl.full((1, HALF), 1.0, tl.float32)
    sine = tl.zeros((1, HALF), tl.float32)
    if ROTATE:
        angle = rotary + tl.load(positions + t) * HEAD + d
        cosine = tl.load(angle)
        sine = tl.load(angle + HALF)
    _begin(PDL)
    low = tl.zeros((BH, HALF), tl.float32)
    high = tl.zeros((BH, HALF), tl.float32)
    for s in tl.static_range(SPLIT):
        place = partials + (s * ROWS + t) * N + h * HEAD + d
        low += tl.load(place).to(tl.float32)
        high += tl.load(place + HALF).to(tl.float32)
    first = block * BH
    if first < H + KV:
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD
        factor = (tl.rsqrt(mean + eps) * tl.where(first < H, scale, 1.0))[:, None]
        low, high = low * factor, high * factor
        low, high = low * cosine - high * sine, high * cosine + low * sine
    low, high = _bf16(low), _bf16(high)
    if first < H:
        to = q + (t * H + h) * HEAD + d
        tl.store(to, low)
        tl.store(to + HALF, high)
    elif first < H + KV:
        key_chunk = keys + ((h - H) * CHUNKS + number // CHUNK % CHUNKS) * CHUNK * HEAD
        tl.store(key_chunk + _laid(number % CHUNK, d, HEAD), low)
        tl.store(key_chunk + _laid(number % CHUNK, d + HALF, HEAD), high)
    elif first < H + 2 * KV:
        value_chunk = values + ((h - H - KV) * CHUNKS + number // CHUNK % CHUNKS) * CHUNK * HEAD
        tl.store(value_chunk + _laid(d, number % CHUNK, CHUNK), low)
        tl.store(value_chunk + _laid(d + HALF, number % CHUNK, CHUNK), high)
    else:
        to = gate + (t * H + h - H - 2 * KV) * HEAD + d
        tl.store(to, low)
        tl.store(to + HALF, high)
