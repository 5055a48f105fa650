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
    static constexpr u32 kPairs = 128;                // tokens * top_k at most, and so entries
    static constexpr u32 kColumns = 8;                // tokens of an entry
    static constexpr u32 kUsed = 0;                   // u32: entries
    static constexpr u32 kAhead = 4;                  // u32: those that come first
    static constexpr u32 kMasks = 16;                 // u32[256]: tokens of each expert
    static constexpr u32 kSome = kMasks + 4 * 256;    // u32[16]: a bit an expert that has any, by rank among all
    static constexpr u32 kMany = kSome + 4 * 16;      // u32[16]: the same, of those with two entries
    static constexpr u32 kOf = kMany + 4 * 16;        // u32[kPairs]: an entry's tokens << 16 | expert
    static constexpr u32 kEntries = kOf + 4 * kPairs; // u16[kPairs][kColumns]: token << 8 | slot
    static constexpr u32 kBytes = kEntries + 2 * kColumns * kPairs;

    u32 base;
    bool any = false; // there may be no table yet, and nobody cares what is read

    __device__ __forceinline__ u32 used() const { return ptx::ld_shared_u32(base + kUsed, any); }
    __device__ __forceinline__ u32 ahead() const { return ptx::ld_shared_u32(base + kAhead, any); }
    __device__ __forceinline__ u32 expert(u32 i) const {
        return ptx::ld_shared_u32(base + kOf + 4 * (any ? 0 : i), any) & 0xffffu;
    }
    __device__ __forceinline__ u32 count(u32 i) const { return ptx::ld_shared_u32(base + kOf + 4 * i) >> 16; }
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
    Op::kScratch;
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

    // Shared memory of a token's selection: the experts found, what leaves, and every expert's probability.
    static constexpr u32 kFound = Op::kScratch, kMessage = kFound + 4 * Op::kTopK, kAll = kMessage + 8 * Op::kTopK;

    // As __expf and __fdividef make it, whose care for the largest and least numbers changes nothing here.
    MEGAGEN_DEVICE float sigmoid(float x) { return ptx::reciprocal(1.0f + ptx::exp2(x * -1.44269502f)); }

    // A warp alone waits for each instruction that it meets for the first time: there are few between the logits and
    // the routes.
    template <class Ctx>
    MEGAGEN_DEVICE void select(Ctx& ctx) {
        if (!Op::Logits::wait(ctx)) return;
        const Range mine = ctx.rounds(share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks));
        const bool valid = ctx.lane * kPer < Op::kExperts;
        const u32 below = (1u << ctx.lane) - 1, slot = ctx.lane % Op::kTopK;
        const u32 own = ctx.shared + 4 * slot;
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
            u32 forced = Op::kExperts; // asked for before the logits have come
            if (ctx.p.sys.route_override != nullptr)
                forced = ptx::ld_relaxed_gpu(ctx.p.sys.route_override + token * Op::kTopK + slot);
            const auto from = [&](u32 c) {
                const u32 row_block = valid ? ctx.lane / 2 : 0, half = ctx.lane % 2 * 8;
                const u32 first =
                    ((c * (Op::kExperts / kRowBlock) + row_block) * Ctx::Kernel::kTokens + token) * kRowBlock + half;
                return [=](u32 i) {
                    return static_cast<u64>(first) + (i / 2 * (Op::kExperts * Ctx::Kernel::kTokens) + i % 2 * 4);
                };
            };
            float p[kPer];
#pragma unroll
            for (float& x : p) x = -0.0f; // whatever is added to it stays as it is
#pragma unroll 1
            for (u32 c = 0; c < ctx.rounds(Op::kChunks, kBatch); c += kBatch) {
                uint4 v[2 * kBatch];
                if (!Op::Logits::read(ctx, v, true, from(c))) return;
#pragma unroll
                for (u32 i = 0; i < kBatch; ++i) add_row(p, v[2 * i], v[2 * i + 1]);
            }
            u32 keys[kPer];
#pragma unroll
            for (u32 i = 0; i < kPer; ++i) {
                p[i] = sigmoid(p[i] * Op::kMultiplier);
                keys[i] = valid ? order_key(p[i] + bias[i]) : 0; // 0: taken already
            }
            if (valid) {
#pragma unroll
                for (u32 h = 0; h < 2; ++h)
                    ptx::st_shared_f4(ctx.shared + kAll + (ctx.lane * kPer + 4 * h) * 4,
                                      {p[4 * h], p[4 * h + 1], p[4 * h + 2], p[4 * h + 3]});
            }
#pragma unroll 1
            for (u32 found = 0; found < Op::kTopK; ++found) {
                const auto most = [](u32 a, u32 b) { return a > b ? a : b; }; // of three at once
                const u32 low = most(most(keys[0], keys[1]), keys[2]), high = most(most(keys[3], keys[4]), keys[5]);
                const u32 best = most(most(low, high), most(keys[6], keys[7]));
                u32 at = 0;
                const u32 top = __reduce_max_sync(kFullMask, best);
#pragma unroll
                for (u32 i = kPer; i-- > 0;) at = keys[i] == best ? i : at; // not of `top`, which is on its way
                const u32 equals = __ballot_sync(kFullMask, best == top);
                const bool winner = best == top && (equals & below) == 0;
#pragma unroll
                for (u32 i = 0; i < kPer; ++i) {
                    if (winner && at == i) keys[i] = 0;
                }
                if (winner) ptx::st_shared_u32(ctx.shared + kFound + 4 * found, ctx.lane * kPer + at);
            }
            __syncwarp();
            u32 id = ptx::ld_shared_u32(own + kFound);
            if (__all_sync(kFullMask, forced < Op::kExperts)) id = forced; // a row forces all experts or none
            const float chosen = ptx::ld_shared_f32(ctx.shared + kAll + 4 * id);
            float sum = -0.0f;
#pragma unroll
            for (u32 i = 0; i < Op::kTopK; ++i) sum += __shfl_sync(kFullMask, chosen, i);
            if (ctx.lane < Op::kTopK) {
                ptx::st_shared_u32(own + kMessage, id);
                ptx::st_shared_f32(own + kMessage + 4 * Op::kTopK, __fdividef(chosen, sum + Op::kSumEps) * Op::kScale);
            }
            __syncwarp();
            if (ctx.lane < Op::kTopK / 2) // four ids or weights each
                Op::Routes::send(ctx, token, ctx.lane * 4, ptx::ld_shared_v4(ctx.shared + kMessage + 16 * ctx.lane));
            Op::Routes::publish(ctx);
#pragma unroll 1
            for (u32 c = 0; c < Op::kChunks; c += kBatch) // nobody waits
                Op::Logits::template release<2 * kBatch>(ctx, valid, from(c));
        }
    }

    MEGAGEN_DEVICE u32 tokens_of(u32 table, u32 expert) {
        return __popc(ptx::ld_shared_u32(table + ExpertTable::kMasks + 4 * expert));
    }

    static constexpr u32 kFirstRest = 256; // rank of the first expert that no guess has
    template <class Ctx>
    static constexpr u32 kWords = Guess<typename Op::Table::Description>::kFirst ? 16 : 8;

    // place += bits set before each rank. Lane i: bits of words 0 to i, for i < kWords.
    template <class Ctx>
    MEGAGEN_DEVICE u32 place_after(const Ctx& ctx, u32 bits, const u32 (&rank)[4], u32 (&place)[4]) {
        const u32 own = ctx.lane % kWords<Ctx>, word = ptx::ld_shared_u32(bits + 4 * own), set = __popc(word);
        u32 sum = set;
#pragma unroll
        for (u32 d = 1; d < kWords<Ctx>; d *= 2) {
            const u32 more = __shfl_up_sync(kFullMask, sum, d);
            if (own >= d) sum += more;
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 within = __shfl_sync(kFullMask, word, rank[i] / 32) & ((1u << rank[i] % 32) - 1);
            place[i] += __shfl_sync(kFullMask, sum - set, rank[i] / 32) + __popc(within);
        }
        return sum;
    }

    // Lane: four (token, slot) pairs. Ids are masked, so that garbage stays in bounds. A
    // rehearsal makes a table too: nobody reads one before the barrier.
    template <class Ctx>
    MEGAGEN_DEVICE void tables(Ctx& ctx) {
        using Past = Guess<typename Op::Table::Description>;
        static_assert(Ctx::Kernel::kTokens <= 2 * ExpertTable::kColumns, "two entries of an expert at most");
        const u32 marks = Past::template marks<kPer>(ctx);
        const u32 base = Op::Table::get(ctx).base;
#pragma unroll
        for (u32 i = 0; i < kPer; ++i) ptx::st_shared_u32(base + ExpertTable::kMasks + 4 * (i * 32 + ctx.lane), 0);
        ptx::st_shared_u32(base + ExpertTable::kSome + 4 * ctx.lane, 0);
        if (!Op::Routes::wait(ctx)) return;
        const u32 token = ctx.lane / 2, first = ctx.lane % 2 * 4;
        const bool valid = token < ctx.tokens;
        uint4 v[1];
        if (!Op::Routes::read(ctx, v, valid, [&](u32) { return token * 2 * Op::kTopK + first; })) return;
        const u32 ids[4] = {v[0].x & 255, v[0].y & 255, v[0].z & 255, v[0].w & 255};
        u32 rank[4]; // of an expert among all: by its id, but those that the guess has come first
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            rank[i] = ids[i];
            if constexpr (Past::kFirst) {
                if ((__shfl_sync(kFullMask, marks, ids[i] / kPer) >> ids[i] % kPer & 1) == 0) rank[i] += kFirstRest;
            }
        }
        __syncwarp();
        if (valid) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                ptx::red_or_shared(base + ExpertTable::kMasks + 4 * ids[i], 1u << token);
                ptx::red_or_shared(base + ExpertTable::kSome + rank[i] / 32 * 4, 1u << rank[i] % 32);
            }
        }
        __syncwarp();
        u32 n[4], column[4], place[4] = {}, most = 0; // an expert's tokens, this one among them, its first entry
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 mask = ptx::ld_shared_u32(base + ExpertTable::kMasks + 4 * ids[i]);
            n[i] = __popc(mask), column[i] = __popc(mask & ((1u << token) - 1));
            most = n[i] > most ? n[i] : most;
        }
        u32 entries = place_after(ctx, base + ExpertTable::kSome, rank, place);
        if (__any_sync(kFullMask, most > ExpertTable::kColumns)) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                if (valid && n[i] > ExpertTable::kColumns)
                    ptx::red_or_shared(base + ExpertTable::kMany + rank[i] / 32 * 4, 1u << rank[i] % 32);
            }
            __syncwarp();
            entries += place_after(ctx, base + ExpertTable::kMany, rank, place);
        }
        if (Past::kFirst && ctx.lane == kFirstRest / 32 - 1) ptx::st_shared_u32(base + ExpertTable::kAhead, entries);
        if (ctx.lane == kWords<Ctx> - 1) ptx::st_shared_u32(base + ExpertTable::kUsed, entries);
        if (valid) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                constexpr u32 kColumns = ExpertTable::kColumns;
                const u32 at = place[i] * kColumns + column[i], left = n[i] - column[i];
                if (ctx.dry) continue; // two lanes may have found the same place
                ptx::st_shared_u16(base + ExpertTable::kEntries + 2 * at, (token << 8 | first) + i);
                if (at % kColumns == 0)
                    ptx::st_shared_u32(base + ExpertTable::kOf + at / (kColumns / 4),
                                       (left < kColumns ? left : kColumns) << 16 | ids[i]);
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
