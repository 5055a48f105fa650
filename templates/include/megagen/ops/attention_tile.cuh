// What attentions are made of: up to 16 tokens of a head against 64 keys, by MMA. Shared by the attention op kinds.
//
// Caches keep chunks of 64 keys, and of values the transposed, in pieces of 8 rows of 16 bytes: what MMAs read from
// shared memory at once lies together. Piece (r, c) of a chunk has rows 8 r .. and columns 8 c ..; see
// megagen/ops/attention.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>

namespace megagen {

constexpr u32 kHeadDim = 64;  // of queries, keys and values
constexpr u32 kKeyChunk = 64; // keys that the caches keep together; V is transposed within them

namespace ops {

struct AttentionTile {
    static constexpr u32 kTiles = kKeyChunk / 8; // n8 tiles of keys, and of dims
    static constexpr u32 kSteps = kHeadDim / 16; // k16 steps of an MMA over dims, and over keys
    static constexpr u32 kWords = 8;             // 32-bit registers of a lane's 16 consecutive elements
    static constexpr u32 kPiece = 64;            // elements
    static constexpr u32 kPartialRow = kHeadDim + 4;
    static constexpr u32 kNone = 0xff800000u; // minus infinity
    static_assert(kHeadDim == 64 && kKeyChunk == 64, "fragments of four steps and eight tiles");

    // Of a number and a NaN the number: weights tell of the NaN.
    MEGAGEN_DEVICE float larger(float a, float b) { return fmaxf(a, b); }

    // Lanes 4 g .. 4 g + 3 have the parts of row g.
    MEGAGEN_DEVICE float quad_max(float x) {
        x = larger(x, __shfl_xor_sync(kFullMask, x, 1));
        return larger(x, __shfl_xor_sync(kFullMask, x, 2));
    }
    MEGAGEN_DEVICE float quad_sum(float x) {
        x += __shfl_xor_sync(kFullMask, x, 1);
        return x + __shfl_xor_sync(kFullMask, x, 2);
    }

    template <u32 kN>
    MEGAGEN_DEVICE void words_of(const uint4 (&v)[kN], u32 first, u32 (&word)[kWords]) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const uint4 x = v[first + i];
            word[4 * i] = x.x, word[4 * i + 1] = x.y, word[4 * i + 2] = x.z, word[4 * i + 3] = x.w;
        }
    }

    // What this lane must know of its tokens, g and g + 8.
    struct Rows {
        u32 position[2];
        u32 ancestors[2];

        template <class Ctx>
        __device__ __forceinline__ explicit Rows(const Ctx& ctx) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const u32 token = ctx.lane / 4 + 8 * h;
                position[h] = ctx.position(token);
                ancestors[h] = ctx.ancestors(token);
            }
        }
    };

    // Of rows g and g + 8 the one of h, in a rolled loop over both.
    template <class T>
    MEGAGEN_DEVICE T row_of(u32 h, T low, T high) {
        return h == 0 ? low : high;
    }

    // Ones in the places of those of 32 numbers from `first` that come before `end`.
    MEGAGEN_DEVICE u32 before(u32 first, u32 end) {
        const u32 n = end > first ? end - first : 0;
        return n < 32 ? (1u << n) - 1 : ~0u;
    }

    // Which of 32 numbers from `first` a token sees, a bit each, if of those in the caches it sees `oldest` and later.
    template <class Ctx>
    MEGAGEN_DEVICE u32 seen(const Ctx& ctx, u32 oldest, u32 ancestors, u32 first) {
        const u32 old = before(first, ctx.context) & ~before(first, oldest);
        const u32 own = first - ctx.context, ahead = ctx.context - first; // one of them is small, or both are far off
        return old | (own < 32 ? ancestors >> own : ahead < 32 ? ancestors << ahead : 0);
    }

    // The larger of `most` and this lane's scores of row h.
    MEGAGEN_DEVICE float most_of(const float (&s)[kTiles][4], u32 h, float most) {
        float x[kTiles];
#pragma unroll
        for (u32 n = 0; n < kTiles; ++n) x[n] = larger(s[n][2 * h], s[n][2 * h + 1]);
#pragma unroll
        for (u32 d = kTiles / 2; d > 0; d /= 2) {
#pragma unroll
            for (u32 n = 0; n < d; ++n) x[n] = larger(x[n], x[n + d]);
        }
        return larger(most, x[0]);
    }

    // Weights of row h's scores, unnormalised, and `sum` with what they add to it.
    MEGAGEN_DEVICE float weights_of(const float (&s)[kTiles][4], u32 h, float scale, float shift, float sum,
                                    u32 (&p)[kTiles][2]) {
#pragma unroll
        for (u32 n = 0; n < kTiles; ++n) {
            p[n][h] =
                ptx::cvt_bf16x2(__expf(fmaf(s[n][2 * h], scale, shift)), __expf(fmaf(s[n][2 * h + 1], scale, shift)));
            sum += bf16_low(p[n][h]);
            sum += bf16_high(p[n][h]);
        }
        return sum;
    }

    // Half of the tiles: four at once hide the MMA's latency, and then their fragments are gone. Registers a(j, 0..3)
    // are of the left side's step j, b[i] and b[i + 1] of tile `half` kTiles / 2 + i / 2.
    template <u32 kN, class Left>
    MEGAGEN_DEVICE void multiply(float (&c)[kTiles][4], u32 half, Left a, const uint4 (&b)[kN], u32 first) {
#pragma unroll
        for (u32 j = 0; j < kSteps; ++j) {
#pragma unroll
            for (u32 i = 0; i < kTiles / 2; ++i) {
                u32 word[kWords];
                words_of(b, first + 2 * i, word);
                ptx::mma_m16n8k16_bf16(c[half * kTiles / 2 + i], a(j, 0), a(j, 1), a(j, 2), a(j, 3), word[2 * j],
                                       word[2 * j + 1]);
            }
        }
    }

    // Left sides: queries, by dims; weights, by keys.
    MEGAGEN_DEVICE auto left_of(const u32 (&q)[2][kWords]) {
        return [&q](u32 j, u32 i) { return q[i % 2][2 * j + i / 2]; };
    }
    MEGAGEN_DEVICE auto left_of(const u32 (&p)[kTiles][2]) {
        return [&p](u32 j, u32 i) { return p[2 * j + i / 2][i % 2]; };
    }

    // A head's sums for both tokens, as rows first + token of the partial results: 64 weighted sums of V, then the
    // largest score and the sum of weights. Of tiles n and n + 1 this lane has four dims in a row, from dim(n).
    // `kUnroll` 1: less code; 2: fewer registers.
    template <class Partials, u32 kUnroll, class Ctx, class Dim>
    MEGAGEN_DEVICE void send_partials(Ctx& ctx, u32 first, const float (&o)[kTiles][4], const float (&most)[2],
                                      const float (&sum)[2], Dim dim) {
        const u32 g = ctx.lane / 4, t = ctx.lane % 4;
#pragma unroll(kUnroll)
        for (u32 h = 0; h < 2; ++h) {
            const u32 token = g + 8 * h;
            if (token >= ctx.tokens) break;
            const u32 row = first + token;
            const auto word = [&](u32 n, u32 i) { return __float_as_uint(row_of(h, o[n][i], o[n][2 + i])); };
#pragma unroll
            for (u32 n = 0; n < kTiles; n += 2)
                Partials::send(ctx, row, dim(n), uint4{word(n, 0), word(n, 1), word(n + 1, 0), word(n + 1, 1)});
            const u32 stat[2] = {__float_as_uint(row_of(h, most[0], most[1])),
                                 __float_as_uint(row_of(h, sum[0], sum[1]))};
            if (t == 0) Partials::send(ctx, row, kHeadDim, uint4{stat[0], stat[1], 0, 0});
        }
    }

    // How far four dims' gates are open, those from `dim` of a vector.
    MEGAGEN_DEVICE void opened(uint4 gate, u32 dim, float (&open)[4]) {
        const u32 pair[2] = {dim % 8 ? gate.z : gate.x, dim % 8 ? gate.w : gate.y};
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            open[2 * e] = __fdividef(1.0f, 1.0f + __expf(-bf16_low(pair[e])));
            open[2 * e + 1] = __fdividef(1.0f, 1.0f + __expf(-bf16_high(pair[e])));
        }
    }

    // Four dims of a token's head, x of every second partial sum in each half of the warp, `scale` one over the sum of
    // weights: added, normed, gated and sent.
    template <class Op, u32 kWidth, class Ctx>
    MEGAGEN_DEVICE void finish(Ctx& ctx, u32 token, u32 head, float (&x)[4], float scale, const float (&open)[4]) {
        const u32 half = ctx.lane / 16, dim = ctx.lane % 16 * 4;
        float square = 0;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            x[e] += __shfl_xor_sync(kFullMask, x[e], 16);
            x[e] *= scale;
            square = fmaf(x[e], x[e], square);
        }
#pragma unroll
        for (u32 d = 8; d > 0; d /= 2) square += __shfl_xor_sync(kFullMask, square, d);
        const float r = rsqrtf(fmaf(square, 1.0f / kHeadDim, Op::kEps));
        u32 word[2];
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            word[e] = ptx::cvt_bf16x2(x[2 * e] * r * open[2 * e], x[2 * e + 1] * r * open[2 * e + 1]);
        }
        const u32 above[2] = {__shfl_xor_sync(kFullMask, word[0], 1), __shfl_xor_sync(kFullMask, word[1], 1)};
        if (half == 0 && ctx.lane % 2 == 0)
            Op::Out::send(ctx, token, head * kHeadDim + dim, uint4{word[0], word[1], above[0], above[1]});
        Op::Out::publish(ctx);
    }

    // This lane's partial sums' weights, those that it `has`, and one over the sum of all keys' weights.
    template <u32 kStats, u32 kN, class Has>
    MEGAGEN_DEVICE float weigh(Has has, float scale, const uint4 (&v)[kN], float (&weight)[kStats]) {
        float most = __uint_as_float(kNone), sum = 0;
#pragma unroll
        for (u32 j = 0; j < kStats; ++j) most = larger(most, has(j) ? __uint_as_float(v[j].x) : __uint_as_float(kNone));
#pragma unroll
        for (u32 d = 16; d > 0; d /= 2) most = larger(most, __shfl_xor_sync(kFullMask, most, d));
        const float shift = -(most * scale); // a token sees itself, so there is a largest score
#pragma unroll
        for (u32 j = 0; j < kStats; ++j) {
            weight[j] = has(j) ? __expf(fmaf(__uint_as_float(v[j].x), scale, shift)) : 0.0f;
            sum = fmaf(weight[j], __uint_as_float(v[j].y), sum);
        }
        return __fdividef(1.0f, warp_sum(sum));
    }
};

} // namespace ops
} // namespace megagen
