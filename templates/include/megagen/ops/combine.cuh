// Per-expert norm and weighted sum, a token at a time on eight warps. See megagen/ops/combine.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>
#include <megagen/ops/top_k.cuh>

namespace megagen::ops {

template <class Op>
concept CombinePolicy = requires {
    Op::kWidth;
    Op::kTopK;
    Op::kEps;
    Op::kParts;
    Op::kScratch;
    typename Op::In;
    typename Op::Routes;
    typename Op::Table;
    typename Op::Out;
    typename Op::Group;
    &Op::gain;
};

template <CombinePolicy Op>
struct Combine {
    using Slice = RowSlice<Op::kWidth, 8>;
    static constexpr u32 kN = Slice::kVectors;
    static constexpr u32 kTopK = Op::kTopK;
    static constexpr u32 kBatch = Op::kParts == 1 ? kTopK : 1; // slots on their way at once, as registers allow

    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void compute(Ctx& ctx) {
        const u32 slice = ctx.warp - kFirstWarp;
        const Range mine = ctx.rounds(share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks));
        if (mine.first == mine.last) return;
        float gain[kN][8];
#pragma unroll
        for (u32 i = 0; i < kN; ++i) load_gain(Op::gain(ctx.p), Slice::element(slice, ctx.lane, i), gain[i]);
        if (!Op::Table::wait(ctx) || !Op::Routes::wait(ctx) || !Op::In::wait(ctx)) return;
#pragma unroll 1
        for (u32 token = mine.first; token < mine.last; ++token) {
            uint4 weights[2]; // there for long; after the sum they would be waited for
            if (!Op::Routes::read(ctx, weights, true, [&](u32 i) { return token * 2 * kTopK + kTopK + 4 * i; })) return;
            u32 x[kTopK][kN][4]; // bf16 pairs
            float square[kTopK];
#pragma unroll
            for (u32 s = 0; s < kTopK; s += kBatch) {
                if (!read_slots(ctx, token * kTopK + s, slice, x, s)) return;
#pragma unroll
                for (u32 i = 0; i < kBatch; ++i) square[s + i] = scaled_square(x[s + i], gain);
            }
            if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, token - mine.first, square))
                return;
            const u32 w[kTopK] = {weights[0].x, weights[0].y, weights[0].z, weights[0].w,
                                  weights[1].x, weights[1].y, weights[1].z, weights[1].w};
            float out[kN][8] = {};
#pragma unroll
            for (u32 s = 0; s < kTopK; ++s) {
                const float factor = __uint_as_float(w[s]) * rsqrtf(square[s] * (1.0f / Op::kWidth) + Op::kEps);
#pragma unroll
                for (u32 i = 0; i < kN; ++i) {
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) {
                        ptx::keep_packed(x[s][i][e]);
                        out[i][2 * e] = fmaf(factor, bf16_low(x[s][i][e]), out[i][2 * e]);
                        out[i][2 * e + 1] = fmaf(factor, bf16_high(x[s][i][e]), out[i][2 * e + 1]);
                    }
                }
            }
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                u32 word[4];
#pragma unroll
                for (u32 e = 0; e < 4; ++e)
                    word[e] = ptx::cvt_bf16x2(out[i][2 * e] * gain[i][2 * e], out[i][2 * e + 1] * gain[i][2 * e + 1]);
                Op::Out::send(ctx, token, Slice::element(slice, ctx.lane, i),
                              uint4{word[0], word[1], word[2], word[3]});
            }
            Op::Out::publish(ctx);
        }
    }

    // The lane's sum of (x * gain)^2.
    MEGAGEN_DEVICE float scaled_square(const u32 (&x)[kN][4], const float (&gain)[kN][8]) {
        float square = 0;
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const float low = bf16_low(x[i][e]) * gain[i][2 * e], high = bf16_high(x[i][e]) * gain[i][2 * e + 1];
                square = fmaf(high, high, fmaf(low, low, square));
            }
        }
        return square;
    }

    // kBatch (token, slot) rows of the slice.
    template <class Ctx>
    MEGAGEN_DEVICE bool read_slots(Ctx& ctx, u32 row, u32 slice, u32 (&x)[kTopK][kN][4], u32 first) {
        const u32 at = row * Op::kWidth + Slice::element(slice, ctx.lane, 0);
        const auto element = [&](u32 s, u32 i) { return static_cast<u64>(at) + (s * Op::kWidth + i * Slice::kStep); };
        if constexpr (Op::kParts == 1) {
            uint4 v[kBatch * kN];
            if (!Op::In::read(ctx, v, true, [&](u32 i) { return element(i / kN, i % kN); })) return false;
#pragma unroll
            for (u32 i = 0; i < kBatch * kN; ++i) {
                u32(&to)[4] = x[first + i / kN][i % kN];
                to[0] = v[i].x, to[1] = v[i].y, to[2] = v[i].z, to[3] = v[i].w;
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                if (!sum_parts(ctx, element(0, i), x[first][i])) return false;
            }
        }
        return true;
    }

    // A vector when K was sharded: the ranks' contributions added in rank order, rounded to bf16 once.
    template <class Ctx>
    MEGAGEN_DEVICE bool sum_parts(Ctx& ctx, u64 element, u32 (&to)[4]) {
        constexpr u32 kPartStride = Ctx::Kernel::kTokens * kTopK * Op::kWidth;
        uint4 v[Op::kParts];
        if (!Op::In::read(ctx, v, true, [&](u32 part) { return part * kPartStride + element; })) return false;
        float sum[8];
        megagen::sum_parts<Op::kParts>(v, sum);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) to[e] = ptx::cvt_bf16x2(sum[2 * e], sum[2 * e + 1]);
        return true;
    }
};

} // namespace megagen::ops
