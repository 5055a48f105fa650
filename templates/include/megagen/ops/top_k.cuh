// Expert selection and each block's expert tables. See megagen/ops/top_k.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>
#include <megagen/ops/guess.cuh>

namespace megagen {

// Shared memory of the expert tables, rebuilt by every block: work entries of an expert and up to eight of its tokens,
// ascending in both, so that an entry fits one n8 MMA tile. An expert with more tokens has two entries. The order does
// not depend on how the launch is placed, but that those that L2 was asked for may come before the others.
struct ExpertTable {
    static constexpr u32 kPairs = 128;                   // tokens * top_k at most, and so entries
    static constexpr u32 kColumns = 8;                   // tokens of an entry
    static constexpr u32 kUsed = 0;                      // u32: entries
    static constexpr u32 kAhead = 4;                     // u32: those that come first
    static constexpr u32 kMasks = 16;                    // u32[256]: tokens of each expert
    static constexpr u32 kFirst = kMasks + 4 * 256;      // u16[256]: its first entry
    static constexpr u32 kExpert = kFirst + 2 * 256;     // u16[kPairs]: an entry's expert
    static constexpr u32 kCount = kExpert + 2 * kPairs;  // u16[kPairs]: its tokens
    static constexpr u32 kEntries = kCount + 2 * kPairs; // u16[kPairs][kColumns]: token << 8 | slot
    static constexpr u32 kBytes = kEntries + 2 * kColumns * kPairs;

    u32 base;
    bool any = false; // there may be no table yet, and nobody cares what is read

    __device__ __forceinline__ u32 used() const { return ptx::ld_shared_u32(base + kUsed, any); }
    __device__ __forceinline__ u32 ahead() const { return ptx::ld_shared_u32(base + kAhead, any); }
    __device__ __forceinline__ u32 expert(u32 i) const {
        return ptx::ld_shared_u16(base + kExpert + 2 * (any ? 0 : i), any);
    }
    __device__ __forceinline__ u32 count(u32 i) const { return ptx::ld_shared_u16(base + kCount + 2 * i); }
    __device__ __forceinline__ u32 entry(u32 i, u32 column) const {
        return ptx::ld_shared_u16(base + kEntries + (i * kColumns + column) * 2);
    }
};

// The table as ops see it: wait for it once, then read.
template <class T>
struct TableChannel {
    using Description = T;

    template <class Ctx>
    MEGAGEN_DEVICE bool wait(Ctx& ctx) {
        return Event<typename T::Ready>::wait(ctx);
    }

    template <class Ctx>
    MEGAGEN_DEVICE ExpertTable get(const Ctx& ctx) {
        return {ctx.shared + T::kOffset};
    }
};

namespace ops {

template <class Op>
concept TopKPolicy = requires {
    Op::kExperts;
    Op::kTopK;
    Op::kChunks;
    Op::kMultiplier;
    Op::kSumEps;
    Op::kScale;
    typename Op::Logits;
    typename Op::Routes;
    typename Op::Table;
    &Op::bias;
};

template <TopKPolicy Op>
struct TopK {
    static constexpr u32 kPer = 8; // experts a lane
    static_assert(Op::kExperts <= 32 * kPer && Op::kExperts % kPer == 0 && Op::kTopK == 8,
                  "one warp ranks a token's experts");

    template <class Ctx>
    MEGAGEN_DEVICE void select(Ctx& ctx) {
        if (!Op::Logits::wait(ctx)) return;
        const Range mine = ctx.rounds(share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks));
        const bool valid = ctx.lane * kPer < Op::kExperts;
        float bias[kPer] = {};
        if (valid) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const float4 x = ptx::ld_constant_f4(Op::bias(ctx.p) + (ctx.lane * kPer + 4 * h) * 4);
                bias[4 * h] = x.x, bias[4 * h + 1] = x.y, bias[4 * h + 2] = x.z, bias[4 * h + 3] = x.w;
            }
        }
#pragma unroll 1
        for (u32 token = mine.first; token < mine.last; ++token) {
            constexpr u32 kBatch = Op::kChunks % 8 == 0 ? 8 : Op::kChunks % 4 == 0 ? 4 : Op::kChunks;
            float p[kPer] = {};
#pragma unroll 1
            for (u32 c = 0; c < ctx.rounds(Op::kChunks, kBatch); c += kBatch) {
                uint4 v[2 * kBatch];
                const u32 row_block = valid ? ctx.lane / 2 : 0, half = ctx.lane % 2 * 8;
                const u32 first =
                    ((c * (Op::kExperts / kRowBlock) + row_block) * Ctx::Kernel::kTokens + token) * kRowBlock + half;
                const auto index = [&](u32 i) {
                    return static_cast<u64>(first) + (i / 2 * (Op::kExperts * Ctx::Kernel::kTokens) + i % 2 * 4);
                };
                if (!Op::Logits::read(ctx, v, true, index)) return;
                Op::Logits::template release<2 * kBatch>(ctx, valid, index);
#pragma unroll
                for (u32 i = 0; i < kBatch; ++i) add_row(p, v[2 * i], v[2 * i + 1]);
            }
            u32 keys[kPer];
#pragma unroll
            for (u32 i = 0; i < kPer; ++i) {
                p[i] = __fdividef(1.0f, 1.0f + __expf(-(p[i] * Op::kMultiplier)));
                keys[i] = valid ? order_key(p[i] + bias[i]) : 0; // 0: taken already
            }
            u32 id = 0; // lane s: the expert of slot s
#pragma unroll 1
            for (u32 slot = 0; slot < Op::kTopK; ++slot) {
                u32 most[kPer];
#pragma unroll
                for (u32 i = 0; i < kPer; ++i) most[i] = keys[i];
#pragma unroll
                for (u32 d = kPer / 2; d > 0; d /= 2) {
#pragma unroll
                    for (u32 i = 0; i < d; ++i) most[i] = most[i + d] > most[i] ? most[i + d] : most[i];
                }
                const u32 best = most[0];
                const u32 top = __reduce_max_sync(kFullMask, best);
                const u32 winner = __ffs(__ballot_sync(kFullMask, best == top)) - 1;
                u32 at = 0;
#pragma unroll
                for (u32 i = kPer; i-- > 0;) at = keys[i] == top ? i : at;
#pragma unroll
                for (u32 i = 0; i < kPer; ++i) {
                    if (ctx.lane == winner && at == i) keys[i] = 0; // no need to wait for what the others are told
                }
                const u32 chosen = __shfl_sync(kFullMask, ctx.lane * kPer + at, winner);
                if (ctx.lane == slot) id = chosen;
            }
            if (ctx.p.sys.route_override != nullptr) { // a row forces all of a token's experts or none
                const u32 slot = ctx.lane % Op::kTopK;
                const u32 forced = ptx::ld_relaxed_gpu(ctx.p.sys.route_override + token * Op::kTopK + slot);
                if (__all_sync(kFullMask, forced < Op::kExperts) && ctx.lane < Op::kTopK) id = forced;
            }
            float mine_p = 0, sum = 0;
#pragma unroll
            for (u32 i = 0; i < kPer; ++i) {
                const float theirs = __shfl_sync(kFullMask, p[i], id / kPer);
                if (id % kPer == i) mine_p = theirs;
            }
#pragma unroll
            for (u32 slot = 0; slot < Op::kTopK; ++slot) sum += __shfl_sync(kFullMask, mine_p, slot);
            const u32 weight = __float_as_uint(__fdividef(mine_p, sum + Op::kSumEps) * Op::kScale);
            u32 word[4]; // lanes 0 and 1 have four ids each, 2 and 3 four weights
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 from = ctx.lane % 2 * 4 + i;
                const u32 chosen = __shfl_sync(kFullMask, id, from), weighs = __shfl_sync(kFullMask, weight, from);
                word[i] = ctx.lane < 2 ? chosen : weighs;
            }
            if (ctx.lane < 4) Op::Routes::send(ctx, token, ctx.lane * 4, uint4{word[0], word[1], word[2], word[3]});
            Op::Routes::publish(ctx);
        }
    }

    MEGAGEN_DEVICE u32 tokens_of(u32 table, u32 expert) {
        return __popc(ptx::ld_shared_u32(table + ExpertTable::kMasks + 4 * expert));
    }

    // Lane: four (token, slot) pairs, and every 32nd expert. Ids are masked, so that garbage stays in bounds. A
    // rehearsal makes a table too: nobody reads one before the barrier.
    template <class Ctx>
    MEGAGEN_DEVICE void tables(Ctx& ctx) {
        using Past = Guess<typename Op::Table::Description>;
        static_assert(Ctx::Kernel::kTokens <= 2 * ExpertTable::kColumns, "two entries of an expert at most");
        const u32 marks = Past::template marks<kPer>(ctx);
        const u32 base = Op::Table::get(ctx).base;
#pragma unroll
        for (u32 i = 0; i < kPer; ++i) ptx::st_shared_u32(base + ExpertTable::kMasks + 4 * (i * 32 + ctx.lane), 0);
        if (!Op::Routes::wait(ctx)) return;
        const u32 token = ctx.lane / 2, first = ctx.lane % 2 * 4;
        const bool valid = token < ctx.tokens;
        uint4 v[1];
        if (!Op::Routes::read(ctx, v, valid, [&](u32) { return token * 2 * Op::kTopK + first; })) return;
        const u32 ids[4] = {v[0].x & 255, v[0].y & 255, v[0].z & 255, v[0].w & 255};
        __syncwarp();
        if (valid) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) ptx::red_or_shared(base + ExpertTable::kMasks + 4 * ids[i], 1u << token);
        }
        __syncwarp();
        u32 entries = 0;                // of those that come first
        const auto leads = [&](u32 i) { // does expert i * 32 + lane?
            if constexpr (!Past::kFirst) return false;
            constexpr u32 kLanes = 32 / kPer; // whose marks are of 32 experts
            return (__shfl_sync(kFullMask, marks, i * kLanes + ctx.lane / kPer) >> ctx.lane % kPer & 1) != 0;
        };
        const u32 below = (1u << ctx.lane) - 1;
        const auto expert_of = [&](u32 i) { return i % kPer * 32 + ctx.lane; };
        if constexpr (Past::kFirst) {
#pragma unroll 1
            for (u32 i = 0; i < kPer; ++i) {
                const u32 n = leads(i) ? tokens_of(base, expert_of(i)) : 0;
                entries += __popc(__ballot_sync(kFullMask, n > 0)) +
                           __popc(__ballot_sync(kFullMask, n > ExpertTable::kColumns));
            }
            if (ctx.lane == 0) ptx::st_shared_u32(base + ExpertTable::kAhead, entries);
        }
        u32 rest = entries, front = 0; // where the next entry is, of those behind and of those that come first
        u32 ahead = tokens_of(base, expert_of(0));
#pragma unroll 1
        for (u32 i = 0; i < kPer; ++i) {
            const u32 expert = expert_of(i), n = ahead;
            ahead = tokens_of(base, expert_of(i + 1)); // on its way
            u32 place = 0;
            const auto deal = [&](bool here, u32& next) {
                const u32 some = __ballot_sync(kFullMask, here && n > 0);
                const u32 many = __ballot_sync(kFullMask, here && n > ExpertTable::kColumns);
                if (here) place = next + __popc(some & below) + __popc(many & below);
                next += __popc(some) + __popc(many);
            };
            const bool leading = leads(i);
            deal(!leading, rest);
            if constexpr (Past::kFirst) deal(leading, front);
            ptx::st_shared_u16(base + ExpertTable::kFirst + 2 * expert, place);
            const auto enter = [&](u32 at, u32 count) {
                ptx::st_shared_u16(base + ExpertTable::kExpert + 2 * at, expert);
                ptx::st_shared_u16(base + ExpertTable::kCount + 2 * at, count);
            };
            if (n > 0) enter(place, n < ExpertTable::kColumns ? n : ExpertTable::kColumns);
            if (n > ExpertTable::kColumns) enter(place + 1, n - ExpertTable::kColumns);
        }
        if (ctx.lane == 31) ptx::st_shared_u32(base + ExpertTable::kUsed, rest);
        u32 entry[4];
        __syncwarp();
        if (valid) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 rank =
                    __popc(ptx::ld_shared_u32(base + ExpertTable::kMasks + 4 * ids[i]) & ((1u << token) - 1));
                entry[i] = ptx::ld_shared_u16(base + ExpertTable::kFirst + 2 * ids[i]) * ExpertTable::kColumns + rank;
            }
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                if (!ctx.dry) // two lanes may have found the same place
                    ptx::st_shared_u16(base + ExpertTable::kEntries + 2 * entry[i], token << 8 | (first + i));
            }
        }
        Event<typename Op::Table::Description::Ready>::arrive(ctx);
        if constexpr (Past::kTop > 0) {
            if (ctx.block == 0) Past::template remember<kPer>(ctx, [&](u32 expert) { return tokens_of(base, expert); });
        }
    }
};

} // namespace ops
} // namespace megagen
