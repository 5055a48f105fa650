// Ranks' contributions to this rank's slice of a row, added in rank order. See megagen/ops/rank_sum.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>

namespace megagen::ops {

template <class Op>
concept RankSumPolicy = requires {
    Op::kWidth;
    Op::kParts;
    typename Op::In;
    typename Op::Out;
};

template <RankSumPolicy Op>
struct RankSum {
    static constexpr u32 kGroups = Op::kWidth / 256;

    template <class Ctx>
    MEGAGEN_DEVICE void sum(Ctx& ctx) {
        if (!Op::In::wait(ctx)) return;
        const Range mine = ctx.rounds(share_of(ctx.tokens * kGroups, ctx.block, Ctx::Kernel::kBlocks));
#pragma unroll 1
        for (u32 i = mine.first; i < mine.last; ++i) {
            const u32 token = i / kGroups, element = i % kGroups * 256 + ctx.lane * 8;
            uint4 v[Op::kParts];
            if (!Op::In::read(ctx, v, true,
                              [&](u32 part) { return (part * Ctx::Kernel::kTokens + token) * Op::kWidth + element; }))
                return;
            float total[8];
            sum_parts<Op::kParts>(v, total);
            Op::Out::send(ctx, token, element,
                          uint4{ptx::cvt_bf16x2(total[0], total[1]), ptx::cvt_bf16x2(total[2], total[3]),
                                ptx::cvt_bf16x2(total[4], total[5]), ptx::cvt_bf16x2(total[6], total[7])});
            Op::Out::publish(ctx);
        }
    }
};

} // namespace megagen::ops
