// Rows of the embedding to the residual stream and its norm, a token at a time on eight warps. See
// megagen/ops/embed.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>

namespace megagen::ops {

template <class Op>
concept EmbedPolicy = requires {
    Op::kVocab;
    Op::kWidth;
    Op::kEps;
    Op::kScratch;
    typename Op::Ids;
    typename Op::Out;
    typename Op::Normed;
    typename Op::Group;
    &Op::table;
    &Op::next_gain;
};

template <EmbedPolicy Op>
struct Embed {
    using Slice = RowSlice<Op::kWidth, 8>;
    static constexpr u32 kN = Slice::kVectors;

    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void compute(Ctx& ctx) {
        const u32 slice = ctx.warp - kFirstWarp;
        const Range mine = ctx.rounds(share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks));
        const u32 first = Slice::element(slice, ctx.lane, 0);
        if (!Op::Ids::wait(ctx)) return;
#pragma unroll 1
        for (u32 token = mine.first; token < mine.last; ++token) {
            const u32 round = (token - mine.first) * 2;
            uint4 v[kN];
            float square[1] = {0};
            load(ctx, Op::Ids::word(ctx, token), first, v, square[0]);
            if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, round, square)) return;
            const float r = scale(square[0]);
            square[0] = 0;
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                float x[8];
                unpack<8>(v[i], x);
                v[i] = packed(x, [&](u32 e) { return x[e] * r; });
                unpack<8>(v[i], x);
                add_squares(x, square[0]);
                const u32 at = first + i * Slice::kStep;
                Op::Out::send(ctx, token, at, words(x[0], x[1], x[2], x[3]));
                Op::Out::send(ctx, token, at + 4, words(x[4], x[5], x[6], x[7]));
            }
            Op::Out::publish(ctx);
            if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, round + 1, square)) return;
            const float again = scale(square[0]);
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                float x[8], gain[8];
                unpack<8>(v[i], x);
                load_gain(Op::next_gain(ctx.p) + first * 4, i * Slice::kStep, gain);
                Op::Normed::send(ctx, token, first + i * Slice::kStep,
                                 packed(x, [&](u32 e) { return x[e] * again * gain[e]; }));
            }
            Op::Normed::publish(ctx);
        }
    }

    // This lane's part of a row. Whoever makes ids answers for them; here none may lead out of the table.
    template <class Ctx>
    MEGAGEN_DEVICE void load(const Ctx& ctx, u32 id, u32 first, uint4 (&v)[kN], float& square) {
        const u64 row = id < Op::kVocab ? id : Op::kVocab - 1;
        const u8* at = Op::table(ctx.p) + (row * Op::kWidth + first) * 2;
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
            const float4 x = ptx::ld_constant_f4(at + i * Slice::kStep * 2);
            v[i] = words(x.x, x.y, x.z, x.w);
        }
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
            float x[8];
            unpack<8>(v[i], x);
            add_squares(x, square);
        }
    }

    MEGAGEN_DEVICE float scale(float square) { return rsqrtf(square * (1.0f / Op::kWidth) + Op::kEps); }

    MEGAGEN_DEVICE void add_squares(const float (&x)[8], float& square) {
#pragma unroll
        for (u32 e = 0; e < 8; ++e) square = fmaf(x[e], x[e], square);
    }

    MEGAGEN_DEVICE uint4 words(float a, float b, float c, float d) {
        return {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
    }

    template <class Of>
    MEGAGEN_DEVICE uint4 packed(const float (&x)[8], Of of) {
        return {ptx::cvt_bf16x2(of(0), of(1)), ptx::cvt_bf16x2(of(2), of(3)), ptx::cvt_bf16x2(of(4), of(5)),
                ptx::cvt_bf16x2(of(6), of(7))};
    }
};

} // namespace megagen::ops
