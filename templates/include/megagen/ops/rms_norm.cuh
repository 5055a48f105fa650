// RMSNorm of rows, a token at a time on eight warps. See megagen/ops/rms_norm.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>

namespace megagen::ops {

template <class Op>
concept RmsNormPolicy = requires {
    Op::kWidth;
    Op::kEps;
    Op::kCentred;
    Op::kRoundInput;
    Op::kScratch;
    typename Op::In;
    typename Op::Out;
    typename Op::Group;
    &Op::gain;
};

template <RmsNormPolicy Op>
struct RmsNorm {
    static constexpr u32 kPer = 16 / Op::In::kElementBytes;
    using Slice = RowSlice<Op::kWidth, kPer>;
    static constexpr u32 kN = Slice::kVectors;
    static constexpr float kFrom = Op::kCentred != 0 ? 1.0f : 0.0f; // what the weight is counted from

    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void compute(Ctx& ctx) {
        const u32 slice = ctx.warp - kFirstWarp;
        const Range mine = ctx.rounds(share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks));
        if (mine.first == mine.last) return;
        float gain[kN][kPer];
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
#pragma unroll
            for (u32 e = 0; e < kPer; e += 4) {
                const float4 x = ptx::ld_constant_f4(Op::gain(ctx.p) + (Slice::element(slice, ctx.lane, i) + e) * 4);
                gain[i][e] = kFrom + x.x, gain[i][e + 1] = kFrom + x.y, gain[i][e + 2] = kFrom + x.z,
                gain[i][e + 3] = kFrom + x.w;
            }
        }
        if (!Op::In::wait(ctx)) return;
#pragma unroll 1
        for (u32 token = mine.first; token < mine.last; ++token) {
            uint4 v[kN];
            const u32 first = token * Op::kWidth + Slice::element(slice, ctx.lane, 0);
            if (!Op::In::read(ctx, v, true, [&](u32 i) { return static_cast<u64>(first) + i * Slice::kStep; })) return;
            float x[kN][kPer];
            float square[1] = {0};
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                unpack<kPer>(v[i], x[i]);
#pragma unroll
                for (u32 e = 0; e < kPer; ++e) {
                    if constexpr (Op::kRoundInput != 0) x[i][e] = round_bf16(x[i][e]);
                    square[0] = fmaf(x[i][e], x[i][e], square[0]);
                }
            }
            if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, token - mine.first, square))
                return;
            const float r = rsqrtf(square[0] * (1.0f / Op::kWidth) + Op::kEps);
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                u32 word[kPer / 2];
#pragma unroll
                for (u32 e = 0; e < kPer; e += 2)
                    word[e / 2] = ptx::cvt_bf16x2(x[i][e] * r * gain[i][e], x[i][e + 1] * r * gain[i][e + 1]);
                const u32 element = Slice::element(slice, ctx.lane, i);
                if constexpr (kPer == 8) {
                    Op::Out::send(ctx, token, element, uint4{word[0], word[1], word[2], word[3]});
                } else { // with what the next lane has it is 16 bytes
                    const u32 more[2] = {__shfl_xor_sync(kFullMask, word[0], 1),
                                         __shfl_xor_sync(kFullMask, word[1], 1)};
                    if (ctx.lane % 2 == 0)
                        Op::Out::send(ctx, token, element, uint4{word[0], word[1], more[0], more[1]});
                }
            }
            Op::Out::publish(ctx);
        }
    }
};

} // namespace megagen::ops
