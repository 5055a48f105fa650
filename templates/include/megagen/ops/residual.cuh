// Norm and residual gate, then the norm of the result, a token at a time on eight warps. See megagen/ops/residual.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>

namespace megagen::ops {

template <class Op>
concept ResidualPolicy = requires {
    Op::kWidth;
    Op::kEps;
    Op::kParts;
    Op::kScratch;
    typename Op::In;
    typename Op::Stream;
    typename Op::Out;
    typename Op::Group;
    &Op::gate;
};

// gate(params) points to all alphas, then all betas. Besides: gain(params), where the first norm is input-scaled; and
// for the second norm Normed, kNextEps and next_gain(params).
template <ResidualPolicy Op>
struct Residual {
    using Slice = RowSlice<Op::kWidth, 8>;
    static constexpr u32 kN = Slice::kVectors;
    static constexpr bool kScaled = requires { &Op::gain; };
    static constexpr bool kNorms = requires { typename Op::Normed; };
    static constexpr u32 kEarly = kN > 2 ? 2 * kN - 2 : 2 * kN; // halves of vectors whose gates come before the sum
    static constexpr u32 kRounds = kNorms ? 2 : 1;              // sums a token

    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void compute(Ctx& ctx) {
        const u32 slice = ctx.warp - kFirstWarp;
        const Range mine = ctx.rounds(share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks));
        if (mine.first == mine.last) return;
        fetch(ctx, slice);
        if (!Op::In::wait(ctx) || !Op::Stream::wait(ctx)) return;
#pragma unroll 1
        for (u32 token = mine.first; token < mine.last; ++token) {
            if (!one(ctx, token, slice, (token - mine.first) * kRounds)) return;
        }
    }

    // A token. Everything but what the branch made is on its way before it is wanted. Arrays are filled in every case,
    // or they would stay in registers from token to token.
    template <class Ctx>
    MEGAGEN_DEVICE bool one(Ctx& ctx, u32 token, u32 slice, u32 round) {
        // Constant distances from one address: many addresses would stay in registers.
        const u32 first = Slice::element(slice, ctx.lane, 0), row = token * Op::kWidth + first;
        const auto at = [](u32 i) { return i / 2 * Slice::kStep + i % 2 * 4; };
        const auto half = [&](u32 i) { return static_cast<u64>(row) + at(i); };
        const u8* gates = Op::gate(ctx.p) + first * 4;
        float gain[kScaled ? kN : 1][8];
        if constexpr (kScaled) {
#pragma unroll
            for (u32 i = 0; i < kN; ++i) load_gain(Op::gain(ctx.p) + first * 4, i * Slice::kStep, gain[i]);
        }
        uint4 s[2 * kN];
        float n[kN][8] = {};
        float4 factor[4 * kN] = {};
        const auto load_gate = [&](u32 i) {
            factor[2 * i] = load_here(gates + at(i) * 4);
            factor[2 * i + 1] = load_here(gates + (Op::kWidth + at(i)) * 4);
        };
        // The stream has been there for long, and the gate for ever: 96 KB of a wide row, which take one SM longer than
        // most waits. Where contributions take many registers, they come after them.
        if constexpr (Op::kParts == 1) {
#pragma unroll
            for (u32 i = 0; i < kEarly; ++i) load_gate(i);
        }
        if (Op::kParts == 1 && !Op::Stream::read(ctx, s, true, half, false)) return false;
        if (!branch(ctx, ptx::opaque(row), n)) return false;
        if (Op::kParts > 1 && !Op::Stream::read(ctx, s, true, half, false)) return false;
        float square[1] = {0};
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
#pragma unroll
            for (u32 e = 0; e < 8; ++e) {
                if constexpr (kScaled) n[i][e] *= gain[i][e];
                square[0] = fmaf(n[i][e], n[i][e], square[0]);
            }
        }
        // The gate's, then the second norm's: on their way during the sum before, as far as registers allow.
        if constexpr (Op::kParts > 1) {
#pragma unroll
            for (u32 i = 0; i < kEarly; ++i) load_gate(i);
        }
#pragma unroll 1
        for (u32 i = 0;; ++i) { // both sums in one piece of code
            const auto meanwhile = [&] {
                if constexpr (kNorms) {
                    if (i == 0) return;
#pragma unroll
                    for (u32 h = 0; h < 2 * kN; ++h)
                        factor[h] = load_here(Op::next_gain(ctx.p) + first * 4 + at(h) * 4);
                }
            };
            if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, round + i, square, meanwhile))
                return false;
            const float r = rsqrtf(square[0] * (1.0f / Op::kWidth) + eps(i));
            if (i == 0) {
                square[0] = 0;
#pragma unroll
                for (u32 h = kEarly; h < 2 * kN; ++h) load_gate(h);
#pragma unroll
                for (u32 h = 0; h < 2 * kN; ++h) {
                    s[h] = mix(s[h], n[h / 2] + h % 2 * 4, r, factor[2 * h], factor[2 * h + 1]);
                    float x[4];
                    unpack<4>(s[h], x);
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) square[0] = fmaf(x[e], x[e], square[0]);
                }
                if (kNorms) continue;
            }
            if constexpr (kNorms) norm(ctx, token, first, s, factor, r);
            break;
        }
        // Nobody waits for the stream, and for the places least of all: stores before a sum would hold its shuffles up.
#pragma unroll
        for (u32 h = 0; h < 2 * kN; ++h) Op::Out::send(ctx, token, static_cast<u64>(first) + at(h), s[h]);
        Op::Out::publish(ctx);
        Op::Stream::template release<2 * kN>(ctx, true, half);
        return true;
    }

    MEGAGEN_DEVICE float eps(u32 i) {
        if constexpr (kNorms) return i == 0 ? Op::kEps : Op::kNextEps;
        return Op::kEps;
    }

    // What is wanted after the first sum has come from HBM by then.
    template <class Ctx>
    MEGAGEN_DEVICE void fetch(const Ctx& ctx, u32 slice) {
        constexpr u32 kBytes = Slice::kSlice * 4;
        if (ctx.lane != 0 || ctx.dry) return;
        const u8* from = Op::gate(ctx.p) + slice * kBytes;
#pragma unroll 1
        for (u32 i = 0; i < (kNorms ? 3 : 2); ++i) {
            ptx::bulk_prefetch_l2(from, kBytes);
            from += Op::kWidth * 4;
            if constexpr (kNorms) {
                if (i == 1) from = Op::next_gain(ctx.p) + slice * kBytes;
            }
        }
    }

    // This lane's part of what the branch made for a token, contributions of ranks added in rank order.
    template <class Ctx>
    MEGAGEN_DEVICE bool branch(Ctx& ctx, u32 row, float (&n)[kN][8]) {
        if constexpr (Op::kParts == 1) {
            uint4 v[kN];
            const bool ok = Op::In::read(ctx, v, true, [&](u32 i) { return static_cast<u64>(row) + i * Slice::kStep; });
#pragma unroll
            for (u32 i = 0; i < kN; ++i) unpack<8>(v[i], n[i]);
            return ok;
        } else {
            // Half of the next vectors is asked for before these are added, half when the first of these are done with:
            // as registers allow.
            constexpr u32 kPartStride = Ctx::Kernel::kTokens * Op::kWidth;
            constexpr u32 kBatch = kN % 2 ? 1 : 2, kHalf = (kBatch + 1) / 2;
            u64 from = row;
            const auto place = [&](u32 j) {
                return from + (j / Op::kParts * Slice::kStep + j % Op::kParts * kPartStride);
            };
            uint4 v[kBatch * Op::kParts];
            if (!Op::In::template await<kBatch * Op::kParts>(ctx, [](u32) { return true; }, place)) return false;
            Op::In::template ask<kBatch * Op::kParts>(ctx, v, place);
#pragma unroll 1
            for (u32 i = 0;;) {
                if (!Op::In::take(ctx, v, place)) return false;
#pragma unroll
                for (u32 k = 0; k < kN - kBatch; ++k) copy(n[k + kBatch], n[k]);
                i += kBatch, from += kBatch * Slice::kStep;
                uint4 next[kHalf * Op::kParts] = {};
                if (i < kN) Op::In::template ask<kHalf * Op::kParts>(ctx, next, place);
#pragma unroll
                for (u32 j = 0; j < kBatch; ++j) sum_parts<Op::kParts>(v + j * Op::kParts, n[kN - kBatch + j]);
                if (i >= kN) break;
                if constexpr (kBatch > kHalf) {
                    Op::In::template ask<(kBatch - kHalf) * Op::kParts>(
                        ctx, v + kHalf * Op::kParts, [&](u32 j) { return place(j + kHalf * Op::kParts); });
                }
#pragma unroll
                for (u32 j = 0; j < kHalf * Op::kParts; ++j) v[j] = next[j];
            }
        }
        return true;
    }

    MEGAGEN_DEVICE void copy(const float (&from)[8], float (&to)[8]) {
#pragma unroll
        for (u32 e = 0; e < 8; ++e) to[e] = from[e];
    }

    MEGAGEN_DEVICE uint4 mix(uint4 old, const float* n, float r, float4 alpha, float4 beta) {
        const auto one = [&](u32 was, u32 e, float a, float b) {
            return __float_as_uint(fmaf(a, __uint_as_float(was), b * (n[e] * r)));
        };
        return {one(old.x, 0, alpha.x, beta.x), one(old.y, 1, alpha.y, beta.y), one(old.z, 2, alpha.z, beta.z),
                one(old.w, 3, alpha.w, beta.w)};
    }

    template <class Ctx>
    MEGAGEN_DEVICE void norm(Ctx& ctx, u32 token, u32 first, const uint4 (&s)[2 * kN], const float4* gain, float r) {
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
            u32 word[4];
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                float x[4];
                unpack<4>(s[2 * i + h], x);
                const float4 g = gain[2 * i + h];
                word[2 * h] = ptx::cvt_bf16x2(x[0] * r * (1.0f + g.x), x[1] * r * (1.0f + g.y));
                word[2 * h + 1] = ptx::cvt_bf16x2(x[2] * r * (1.0f + g.z), x[3] * r * (1.0f + g.w));
            }
            Op::Normed::send(ctx, token, static_cast<u64>(first) + i * Slice::kStep,
                             uint4{word[0], word[1], word[2], word[3]});
        }
        Op::Normed::publish(ctx);
    }
};

} // namespace megagen::ops
