// The head's partial sums to logits, and each token's largest over all ranks. See megagen/ops/choose.py.
//
// Candidates travel as a logit's key and its row, both u32. No key is the word that means empty (order_key), nor is a
// row. What is no candidate has key 0, which no real one has: every rank has rows of the vocabulary, and the key of a
// NaN is 1.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/partials.cuh>

namespace megagen::ops {

template <class Op>
concept ChoosePolicy = requires {
    Op::kRows;
    Op::kPadding;
    Op::kChunks;
    Op::kParts;
    Op::kMultiplier;
    Op::kCap;
    typename Op::Partials;
    typename Op::Logits;
    typename Op::Bests;
    typename Op::Votes;
    typename Op::Ids;
};

template <ChoosePolicy Op>
struct Choose {
    static constexpr u32 kWarps = 8;
    static constexpr u32 kTogether = 64; // rows of a group
    static constexpr u32 kGroups = (Op::kRows + kTogether - 1) / kTogether;
    static constexpr u32 kReal = Op::kRows - Op::kPadding;
    static constexpr u32 kVote = 16 * Op::kParts; // words: a pair over and over, which no rotation changes
    static_assert(Op::kRows % kRowBlock == 0 && kReal > 0 && kReal <= Op::kRows, "whole row blocks, with some rows");

    struct Candidate {
        u32 key;
        u32 row;

        // The larger logit, or the lower row.
        __device__ __forceinline__ void meet(u32 other_key, u32 other_row) {
            if (other_key > key || (other_key == key && other_row < row)) key = other_key, row = other_row;
        }

        __device__ __forceinline__ Candidate over_warp() const {
            const u32 top = __reduce_max_sync(kFullMask, key);
            return {top, __reduce_min_sync(kFullMask, key == top ? row : ~0u)};
        }
    };

    // Half a warp has a token of a group, a lane four consecutive rows.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void score(Ctx& ctx) {
        const u32 pairs = (ctx.tokens + 1) / 2;
        const Range mine = ctx.rounds(share_of(kGroups * pairs, ctx.block, Ctx::Kernel::kBlocks), kWarps);
        if (mine.first == mine.last || !Op::Partials::wait(ctx)) return;
#pragma unroll 1
        for (u32 unit = mine.first + ctx.warp - kFirstWarp; unit < mine.last; unit += kWarps) {
            const u32 group = unit / pairs, first = unit % pairs * 2, token = first + ctx.lane / 16;
            const u32 row = group * kTogether + ctx.lane % 16 * 4;
            const bool valid = token < ctx.tokens && row < Op::kRows;
            float x[4] = {};
            if (!sum_chunks<typename Op::Partials, Op::kRows / kRowBlock, Op::kChunks>(ctx, row, token, valid, x))
                return;
            Candidate best{0, row};
            u32 word[4];
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const bool real = row + e < kReal;
                const float logit = cap(x[e]);
                word[e] = real ? __float_as_uint(logit) : 0xff800000u;
                if (real) best.meet(order_key(logit), row + e);
            }
            if (valid) Op::Logits::send(ctx, token, row, uint4{word[0], word[1], word[2], word[3]});
#pragma unroll
            for (u32 d = 8; d > 0; d /= 2)
                best.meet(__shfl_xor_sync(kFullMask, best.key, d), __shfl_xor_sync(kFullMask, best.row, d));
            if (ctx.lane % 16 == 0 && token < ctx.tokens)
                Op::Bests::send(ctx, token, 4 * group, uint4{best.key, best.row, best.key, best.row});
            Op::Bests::publish(ctx);
            if (first + 1 < ctx.tokens) Op::Bests::publish(ctx);
            release_chunks<typename Op::Partials, Op::kRows / kRowBlock, Op::kChunks>(ctx, row, token, valid);
        }
    }

    // Zero is +0, so that both zeros are alike.
    MEGAGEN_DEVICE float cap(float x) { return Op::kCap * tanhf(x * Op::kMultiplier) + 0.0f; }

    // This rank's vote for a token goes to all ranks.
    template <class Ctx>
    MEGAGEN_DEVICE void pick(Ctx& ctx) {
        constexpr u32 kEach = (kGroups + 31) / 32, kBatch = kEach < 8 ? kEach : 8;
        const Range mine = ctx.rounds(share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks));
        if (mine.first == mine.last || !Op::Bests::wait(ctx)) return;
#pragma unroll 1
        for (u32 token = mine.first; token < mine.last; ++token) {
            Candidate best{0, 0};
#pragma unroll 1
            for (u32 at = 0; at < ctx.rounds(kGroups, 32 * kBatch); at += 32 * kBatch) {
                uint4 v[kBatch];
                const auto vector = [&](u32 i) { return at + i * 32 + ctx.lane; };
                const auto wanted = [&](u32 i) { return vector(i) < kGroups; };
                const auto index = [&](u32 i) { return (token * kGroups + vector(i)) * 4; };
                if (!Op::Bests::read_where(ctx, v, wanted, index)) return;
                Op::Bests::template release_where<kBatch>(ctx, wanted, index);
#pragma unroll
                for (u32 i = 0; i < kBatch; ++i) best.meet(v[i].x, v[i].y);
            }
            best = best.over_warp();
#pragma unroll 1
            for (u32 e = ctx.lane * 4; e < kVote; e += 128)
                Op::Votes::send(ctx, token, e, uint4{best.key, best.row, best.key, best.row});
            Op::Votes::publish(ctx);
        }
    }

    // All ranks choose the same. A rank's rows are lower ids than those of the ranks after it. All of a vote is read:
    // what nobody waits for could come after its place has been emptied.
    template <class Ctx>
    MEGAGEN_DEVICE void agree(Ctx& ctx) {
        constexpr u32 kAll = Op::kParts * kVote / 4,
                      kEach = (kAll + 31) / 32; // vectors of a token's votes, and a lane's
        const Range mine = ctx.rounds(share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks));
        if (mine.first == mine.last || !Op::Votes::wait(ctx)) return;
#pragma unroll 1
        for (u32 token = mine.first; token < mine.last; ++token) {
            uint4 v[kEach];
            const auto vector = [&](u32 i) { return i * 32 + ctx.lane; };
            if (!Op::Votes::read(ctx, v, ctx.lane < kAll, [&](u32 i) { return (token * kAll + vector(i)) * 4; }))
                return;
            Candidate best{0, 0};
#pragma unroll
            for (u32 i = 0; i < kEach; ++i) {
                const u32 first = vector(i) * 4 / kVote * kReal; // of this rank's ids
                best.meet(v[i].x, first + v[i].y), best.meet(v[i].z, first + v[i].w);
            }
            const u32 id = best.over_warp().row;
            if (ctx.lane == 0) Op::Ids::send(ctx, 0, token, id);
        }
    }
};

} // namespace megagen::ops
