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
    static constexpr u32 kRounds = kNorms ? 2 : 1; // sums a token

    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void compute(Ctx& ctx) {
        const u32 slice = ctx.warp - kFirstWarp;
        const Range mine = share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks);
        if (mine.first == mine.last) return;
        float gain[kScaled ? kN : 1][8];
        if constexpr (kScaled) {
#pragma unroll
            for (u32 i = 0; i < kN; ++i) load_gain(Op::gain(ctx.p), Slice::element(slice, ctx.lane, i), gain[i]);
        }
        if (!Op::In::wait(ctx) || !Op::Stream::wait(ctx)) return;
#pragma unroll 1
        for (u32 token = mine.first; token < mine.last; ++token) {
            const u32 round = (token - mine.first) * kRounds;
            const auto element = [&](u32 i) { return token * Op::kWidth + Slice::element(slice, ctx.lane, i); };
            const auto half = [&](u32 i) { return element(i / 2) + i % 2 * 4; };
            uint4 s[2 * kN];
            if (!Op::Stream::read(ctx, s, true, half)) return;
            Op::Stream::template release<2 * kN>(ctx, true, half);
            Branch y;
            if (!y.read(ctx, element)) return;
            float square[1] = {0};
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                float x[8];
                y.get(i, x);
#pragma unroll
                for (u32 e = 0; e < 8; ++e) {
                    if constexpr (kScaled) x[e] *= gain[i][e];
                    square[0] = fmaf(x[e], x[e], square[0]);
                }
            }
            if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, round, square)) return;
            const float r = rsqrtf(square[0] * (1.0f / Op::kWidth) + Op::kEps);
            y.keep();
            square[0] = 0;
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                float x[8];
                y.get(i, x);
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    const u32 at = Slice::element(slice, ctx.lane, i) + 4 * h;
                    const float4 alpha = ptx::ld_constant_f4(Op::gate(ctx.p) + at * 4);
                    const float4 beta = ptx::ld_constant_f4(Op::gate(ctx.p) + (Op::kWidth + at) * 4);
                    const float a[4] = {alpha.x, alpha.y, alpha.z, alpha.w}, b[4] = {beta.x, beta.y, beta.z, beta.w};
                    float old[4];
                    unpack<4>(s[2 * i + h], old);
                    u32 mixed[4];
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) {
                        float n = x[4 * h + e];
                        if constexpr (kScaled) n *= gain[i][4 * h + e];
                        const float m = fmaf(a[e], old[e], b[e] * (n * r));
                        square[0] = fmaf(m, m, square[0]);
                        mixed[e] = __float_as_uint(m);
                    }
                    s[2 * i + h] = {mixed[0], mixed[1], mixed[2], mixed[3]};
                    Op::Out::send(ctx, token, at, s[2 * i + h]);
                }
            }
            Op::Out::publish(ctx);
            if constexpr (kNorms) {
                if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, round + 1, square)) return;
                norm(ctx, token, slice, s, rsqrtf(square[0] * (1.0f / Op::kWidth) + Op::kNextEps));
            }
        }
    }

    // What the branch made, this lane's part of a token's row: bf16 as it came, or the fp32 sum of the ranks'
    // contributions in rank order.
    struct Branch {
        uint4 packed[Op::kParts == 1 ? kN : 1];
        float sum[Op::kParts == 1 ? 1 : kN][8];

        template <class Ctx, class Element>
        __device__ __forceinline__ bool read(Ctx& ctx, Element element) {
            if constexpr (Op::kParts == 1) {
                return Op::In::read(ctx, packed, true, element);
            } else {
                constexpr u32 kBatch = kN % 2 == 0 && Op::kParts <= 8 ? 2 : 1; // loads on their way, as registers allow
                constexpr u32 kPartStride = Ctx::Kernel::kTokens * Op::kWidth;
#pragma unroll
                for (u32 i = 0; i < kN; i += kBatch) {
                    uint4 v[kBatch * Op::kParts];
                    if (!Op::In::read(ctx, v, true, [&](u32 j) {
                            return j % Op::kParts * kPartStride + element(i + j / Op::kParts);
                        }))
                        return false;
#pragma unroll
                    for (u32 j = 0; j < kBatch; ++j) {
                        unpack<8>(v[j * Op::kParts], sum[i + j]);
#pragma unroll
                        for (u32 part = 1; part < Op::kParts; ++part) {
                            float more[8];
                            unpack<8>(v[j * Op::kParts + part], more);
#pragma unroll
                            for (u32 e = 0; e < 8; ++e) sum[i + j][e] += more[e];
                        }
                    }
                }
                return true;
            }
        }

        // Unpacked again after the sum over the row rather than kept in twice the registers.
        __device__ __forceinline__ void keep() {
            if constexpr (Op::kParts == 1) {
#pragma unroll
                for (u32 i = 0; i < kN; ++i) ptx::keep_packed(packed[i]);
            }
        }

        __device__ __forceinline__ void get(u32 i, float (&x)[8]) const {
            if constexpr (Op::kParts == 1) {
                unpack<8>(packed[i], x);
            } else {
#pragma unroll
                for (u32 e = 0; e < 8; ++e) x[e] = sum[i][e];
            }
        }
    };

    template <class Ctx>
    MEGAGEN_DEVICE void norm(Ctx& ctx, u32 token, u32 slice, const uint4 (&s)[2 * kN], float r) {
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
            const u32 at = Slice::element(slice, ctx.lane, i);
            float gain[8], low[4], high[4];
            load_gain(Op::next_gain(ctx.p), at, gain);
            unpack<4>(s[2 * i], low);
            unpack<4>(s[2 * i + 1], high);
            u32 word[4];
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                word[e] = ptx::cvt_bf16x2(low[2 * e] * r * gain[2 * e], low[2 * e + 1] * r * gain[2 * e + 1]);
                word[2 + e] = ptx::cvt_bf16x2(high[2 * e] * r * gain[4 + 2 * e], high[2 * e + 1] * r * gain[5 + 2 * e]);
            }
            Op::Normed::send(ctx, token, at, uint4{word[0], word[1], word[2], word[3]});
        }
        Op::Normed::publish(ctx);
    }
};

} // namespace megagen::ops
