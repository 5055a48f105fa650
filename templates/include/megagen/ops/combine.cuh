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
    static constexpr u32 kLanes = 32 / kTopK; // that get the same slot's sum
    static_assert(kTopK % 4 == 0 && 32 % kTopK == 0, "four weights are a vector, and lanes share sums evenly");

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
            // Of the slot whose sum this lane gets. There for long; after the sum they would be waited for.
            const u32 own = ctx.lane / kLanes;
            uint4 weights[1];
            const u32 first_weight = token * 2 * kTopK + kTopK + own / 4 * 4;
            if (!Op::Routes::read(ctx, weights, true, [&](u32) { return first_weight; })) return;
            uint4 x[kTopK * kN]; // bf16 pairs, slot by slot
            if (!read_slots(ctx, token * kTopK, slice, x)) return;
            float square[kTopK];
#pragma unroll
            for (u32 s = 0; s < kTopK; ++s) square[s] = scaled_square(x + s * kN, gain);
            if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, token - mine.first, square))
                return;
            const u32 low = own % 2 == 0 ? weights[0].x : weights[0].y,
                      high = own % 2 == 0 ? weights[0].z : weights[0].w;
            const float factor =
                __uint_as_float(own % 4 < 2 ? low : high) * rsqrtf(square[0] * (1.0f / Op::kWidth) + Op::kEps);
            float factors[kTopK], out[kN][8] = {};
#pragma unroll
            for (u32 s = 0; s < kTopK; ++s) factors[s] = __shfl_sync(kFullMask, factor, s * kLanes);
#pragma unroll
            for (u32 s = 0; s < kTopK; ++s) add(factors[s], x + s * kN, out);
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                u32 word[4];
#pragma unroll
                for (u32 e = 0; e < 4; ++e)
                    word[e] = ptx::cvt_bf16x2(out[i][2 * e] * gain[i][2 * e], out[i][2 * e + 1] * gain[i][2 * e + 1]);
                Op::Out::send(ctx, token, static_cast<u64>(Slice::element(slice, ctx.lane, 0)) + i * Slice::kStep,
                              uint4{word[0], word[1], word[2], word[3]});
            }
            Op::Out::publish(ctx);
        }
    }

    MEGAGEN_DEVICE void add(float factor, const uint4* x, float (&out)[kN][8]) {
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
            float each[8];
            unpack<8>(x[i], each);
#pragma unroll
            for (u32 e = 0; e < 8; ++e) out[i][e] = fmaf(factor, each[e], out[i][e]);
        }
    }

    // The lane's sum of (x * gain)^2.
    MEGAGEN_DEVICE float scaled_square(const uint4* x, const float (&gain)[kN][8]) {
        float square = 0;
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
            float each[8];
            unpack<8>(x[i], each);
#pragma unroll
            for (u32 e = 0; e < 8; ++e) {
                const float scaled = each[e] * gain[i][e];
                square = fmaf(scaled, scaled, square);
            }
        }
        return square;
    }

    // All slots of a token from (token, slot) row `row` on, at once if registers allow.
    template <class Ctx>
    MEGAGEN_DEVICE bool read_slots(Ctx& ctx, u32 row, u32 slice, uint4 (&x)[kTopK * kN]) {
        const u64 at = row * Op::kWidth + Slice::element(slice, ctx.lane, 0);
        if constexpr (Op::kParts == 1) {
            return Op::In::read(ctx, x, true,
                                [&](u32 i) { return at + (i / kN * Op::kWidth + i % kN * Slice::kStep); });
        } else {
#pragma unroll
            for (u32 i = 0; i < kTopK * kN; ++i) x[i] = {0, 0, 0, 0};
#pragma unroll 1
            for (u32 s = 0; s < kTopK; ++s) {
                move_down<kN>(x);
#pragma unroll
                for (u32 i = 0; i < kN; ++i) {
                    if (!sum_parts(ctx, at + (s * Op::kWidth + i * Slice::kStep), x[(kTopK - 1) * kN + i]))
                        return false;
                }
            }
            return true;
        }
    }

    // A vector when K was sharded: the ranks' contributions added in rank order, rounded to bf16 once.
    template <class Ctx>
    MEGAGEN_DEVICE bool sum_parts(Ctx& ctx, u64 element, uint4& to) {
        constexpr u32 kPartStride = Ctx::Kernel::kTokens * kTopK * Op::kWidth;
        uint4 v[Op::kParts];
        if (!Op::In::read(ctx, v, true, [&](u32 part) { return part * kPartStride + element; })) return false;
        float sum[8];
        megagen::sum_parts<Op::kParts>(v, sum);
        to = {ptx::cvt_bf16x2(sum[0], sum[1]), ptx::cvt_bf16x2(sum[2], sum[3]), ptx::cvt_bf16x2(sum[4], sum[5]),
              ptx::cvt_bf16x2(sum[6], sum[7])};
        return true;
    }
};

} // namespace megagen::ops
