// Input-scaled norm and residual gate, a token at a time on eight warps. See megagen/ops/residual.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>

namespace megagen::ops {

template <class Op>
concept ResidualPolicy = requires {
    Op::kWidth;
    Op::kEps;
    Op::kScratch;
    typename Op::In;
    typename Op::Stream;
    typename Op::Out;
    typename Op::Group;
    &Op::gain;
    &Op::gate;
};

// gate(params) points to all alphas, then all betas.
template <ResidualPolicy Op>
struct Residual {
    using Slice = RowSlice<Op::kWidth, 8>;
    static constexpr u32 kN = Slice::kVectors;

    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void compute(Ctx& ctx) {
        const u32 slice = ctx.warp - kFirstWarp;
        const Range mine = share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks);
        if (mine.first == mine.last) return;
        float gain[kN][8];
#pragma unroll
        for (u32 i = 0; i < kN; ++i) load_gain(Op::gain(ctx.p), Slice::element(slice, ctx.lane, i), gain[i]);
        if (!Op::In::wait(ctx) || !Op::Stream::wait(ctx)) return;
#pragma unroll 1
        for (u32 token = mine.first; token < mine.last; ++token) {
            uint4 v[kN], s[2 * kN];
            if (!Op::Stream::read(ctx, s, true, [&](u32 i) {
                    return token * Op::kWidth + Slice::element(slice, ctx.lane, i / 2) + i % 2 * 4;
                }))
                return;
            if (!Op::In::read(ctx, v, true,
                              [&](u32 i) { return token * Op::kWidth + Slice::element(slice, ctx.lane, i); }))
                return;
            float square[1] = {0};
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                float x[8];
                unpack<8>(v[i], x);
#pragma unroll
                for (u32 e = 0; e < 8; ++e) square[0] = fmaf(x[e] * gain[i][e], x[e] * gain[i][e], square[0]);
            }
            if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, token - mine.first, square))
                return;
            const float r = rsqrtf(square[0] * (1.0f / Op::kWidth) + Op::kEps);
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                float x[8];
                ptx::keep_packed(v[i]);
                unpack<8>(v[i], x);
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    const u32 element = Slice::element(slice, ctx.lane, i) + 4 * h;
                    const float4 alpha = ptx::ld_constant_f4(Op::gate(ctx.p) + element * 4);
                    const float4 beta = ptx::ld_constant_f4(Op::gate(ctx.p) + (Op::kWidth + element) * 4);
                    const uint4 old = s[2 * i + h];
                    const float* y = x + 4 * h;
                    const float* g = gain[i] + 4 * h;
                    Op::Out::send(ctx, token, element,
                                  uint4{mix(old.x, y[0] * g[0] * r, alpha.x, beta.x),
                                        mix(old.y, y[1] * g[1] * r, alpha.y, beta.y),
                                        mix(old.z, y[2] * g[2] * r, alpha.z, beta.z),
                                        mix(old.w, y[3] * g[3] * r, alpha.w, beta.w)});
                }
            }
            Op::Out::publish(ctx);
        }
    }

    MEGAGEN_DEVICE u32 mix(u32 old, float n, float alpha, float beta) {
        return __float_as_uint(fmaf(alpha, __uint_as_float(old), beta * n));
    }
};

} // namespace megagen::ops
