// Attention over a window of cached keys, chunks of 64, up to 16 tokens at once. See megagen/ops/attention.py.
#pragma once

#include <megagen/ops/attention_tile.cuh>
#include <megagen/ops/stream.cuh>
#include <megagen/sync/barrier.cuh>

namespace megagen::ops {

template <class Op>
concept AttentionPolicy = requires {
    Op::kHeads;
    Op::kKvHeads;
    Op::kChunks;
    Op::kWindow;
    Op::kScale;
    Op::kEps;
    Op::kStageBytes;
    Op::kHint;
    Op::kScratch;
    typename Op::Q;
    typename Op::Gate;
    typename Op::Keys;
    typename Op::Values;
    typename Op::Partials;
    typename Op::Out;
};

// A block has a chunk at a time, for a team of heads that share it: each warp has one of them, and half of the tokens.
// 33 chunks of 2 kv heads of 8, in teams of 4, are a unit for each of 132 blocks.
//
// Bytes: 16 KB a unit, of which the producer asks for what is old before the launch before has ended. So what attention
// waits for when it begins is its queries.
//
// Tokens are the columns of both products, S' = K Q' and O' = V' P': eight of them fill an MMA, as rows they would fill
// half of one. Keys and values are left sides, which come by ldmatrix as they are; weights are turned in between. All
// of it is met once a launch, and what that costs is its instructions: there are few.
//
// Partials: rows (slot, head, token) of 64 weighted sums of V, then the largest score and the sum of weights. Of each
// four sums in a row the e-th is of dim e ^ m, where m is the row of a piece of V that a lane reads first: lanes begin
// with different ones, so that no two read one bank.
template <AttentionPolicy Op>
struct Attention : AttentionTile {
    static constexpr u32 kWarps = 8;
    static constexpr u32 kTeam = 4; // heads
    static constexpr u32 kGroup = Op::kHeads / Op::kKvHeads;
    static constexpr u32 kTeams = (kGroup + kTeam - 1) / kTeam; // of a kv head
    static constexpr u32 kWidth = Op::kHeads * kHeadDim;
    static constexpr u32 kSideBytes = kKeyChunk * kHeadDim * 2; // of keys, and of values
    static constexpr u32 kPieceBytes = kPiece * 2, kPieces = 8; // in a row of a chunk's
    static constexpr float kBinary = kLog2E * Op::kScale;       // of scores
    static_assert(Op::kHeads % Op::kKvHeads == 0, "a group of heads shares keys");
    static_assert(Op::kStageBytes == 2 * kSideBytes, "a stage is keys and values of a chunk");
    static_assert(!Op::Partials::kClustered, "partial results are read by other blocks");

    // Keys that some token of this launch sees have numbers first .. end - 1, in chunks begin .. begin + chunks - 1.
    // Chunks are of absolute numbers and slots follow from them: what a token sees is summed in the same order in every
    // launch.
    struct Live {
        u32 first;
        u32 end;
        u32 begin;
        u32 chunks;

        template <class Ctx>
        __device__ __forceinline__ explicit Live(const Ctx& ctx)
            : first(ctx.context + 1 > Op::kWindow ? ctx.context + 1 - Op::kWindow : 0)
            , end(ctx.context + ctx.tokens)
            , begin(first / kKeyChunk)
            , chunks((end - 1) / kKeyChunk - begin + 1) {}

        // Whether some token sees something of what is in a slot. There may be none of that number.
        __device__ __forceinline__ bool has(u32 slot) const {
            const u32 oldest = begin % Op::kChunks;
            return slot < Op::kChunks && (slot < oldest ? slot + Op::kChunks : slot) - oldest < chunks;
        }

        template <class Ctx>
        __device__ __forceinline__ Range units(const Ctx& ctx) const {
            return share_of(chunks * Op::kKvHeads * kTeams, ctx.block, Ctx::Kernel::kBlocks);
        }
    };

    struct Unit {
        u32 chunk;
        u32 slot;
        u32 kv_head;
        u32 team; // of its kv head's

        __device__ __forceinline__ Unit(const Live& live, u32 i)
            : chunk(live.begin + i / (Op::kKvHeads * kTeams))
            , slot(chunk % Op::kChunks)
            , kv_head(i / kTeams % Op::kKvHeads)
            , team(i % kTeams) {}
    };

    // The first number that a token sees.
    MEGAGEN_DEVICE u32 oldest(u32 position) { return position + 1 > Op::kWindow ? position + 1 - Op::kWindow : 0; }

    // The producer: a stage for each of the block's units, ascending.
    template <u32 kFirst, u32 kLast, u32 kInFlight, class Ctx>
    MEGAGEN_DEVICE void load(Ctx& ctx) {
        static_assert(kFirst == 0 && kLast == kWhole, "a stream of tensors comes in one piece");
        constexpr Hint kHint = static_cast<Hint>(Op::kHint);
        ctx.look();
        bool attached = false;
        const Live live(ctx);
        const Range mine = live.units(ctx);
        const u64 policy = cache_policy<kHint>();
#pragma unroll 1
        for (u32 i = mine.first; i < mine.last; ++i) {
            const Unit unit(live, i);
            if (!await_keys<Op>(ctx, (unit.chunk + 1) * kKeyChunk, attached)) return;
            const u64 element = static_cast<u64>(unit.kv_head * Op::kChunks + unit.slot) * (kKeyChunk * kHeadDim);
            const Piece pieces[2] = {{Op::Keys::address(ctx, element), kSideBytes},
                                     {Op::Values::address(ctx, element), kSideBytes}};
            if (!Ctx::Ring::template load<kInFlight, kHint>(ctx, pieces, policy)) return;
        }
    }

    // Warps kFirstWarp .. kFirstWarp + 7, each a head of the team and tokens 0 .. 7 or 8 .. 15. Who has no such head,
    // or no tokens, hands the stages on.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void attend(Ctx& ctx) {
        if (!Op::Q::wait(ctx)) return;
        const u32 warp = ctx.warp - kFirstWarp, token = warp / kTeam * 8;
        const Live live(ctx);
        const Range mine = live.units(ctx);
        // Nobody works on slots that no token sees, and those who read the others count them.
        const Range idle = share_of((Op::kChunks - live.chunks) * Op::kHeads * 2, ctx.block * kWarps + warp,
                                    Ctx::Kernel::kBlocks * kWarps);
        u32 done = idle.last - idle.first;
#pragma unroll 1
        for (u32 i = mine.first; i < mine.last; ++i) {
            const Unit unit(live, i);
            const u32 own = unit.team * kTeam + warp % kTeam, head = unit.kv_head * kGroup + own;
            const bool has = kGroup % kTeam == 0 || own < kGroup;
            if (has && token < ctx.tokens) {
                if (!attend(ctx, live, unit, head, token)) return;
            } else {
                if (!Ctx::Ring::acquire(ctx)) return;
                Ctx::Ring::release(ctx);
            }
            done += has ? 1 : 0;
        }
        Op::Partials::publish(ctx, done);
    }

    // What this lane must know of its tokens, from the warp's first one on: 2 t and the next.
    struct Columns {
        u32 position[2];
        u32 ancestors[2];

        template <class Ctx>
        __device__ __forceinline__ explicit Columns(const Ctx& ctx, u32 first) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                const u32 token = first + ctx.lane % 4 * 2 + e;
                position[e] = ctx.position(token);
                ancestors[e] = ctx.ancestors(token);
            }
        }
    };

    // A unit's stage for a head and eight tokens from `token` on. Of scores this lane has keys 8 k + g of tokens 2 t
    // and the next, k = 2 i + h; of sums dims dim(k) of the same tokens.
    template <class Ctx>
    MEGAGEN_DEVICE bool attend(Ctx& ctx, const Live& live, const Unit& unit, u32 head, u32 token) {
        const u32 g = ctx.lane / 4, start = unit.chunk * kKeyChunk, after = start + kKeyChunk;
        // Past the launch's tokens stands its last one, for nobody.
        const u32 own = token + g < ctx.tokens ? token + g : ctx.tokens - 1;
        const u64 query = own * kWidth + head * kHeadDim;
        const auto part = [=](u32 i) { return query + 8 * i; };
        uint4 of[kWords];
        Op::Q::template ask<kWords>(ctx, of, part);
        const Columns columns(ctx, token);
        if (!Ctx::Ring::acquire(ctx) || !Op::Q::take(ctx, of, part)) return false;
        u32 q[kWords];
        own_words(ctx, of, q);
        const u32 stage = Ctx::Ring::stage(ctx);

        // Lanes 8 i .. 8 i + 7 name the rows of piece i of four: two below each other, then those beside them.
        const u32 row = ctx.lane % 8, below = ctx.lane / 8 % 2, beside = ctx.lane / 16;
        const u32 keys = stage + (below * kPieces + beside) * kPieceBytes + row * 16;
        float s[kSteps][4] = {};
#pragma unroll
        for (u32 j = 0; j < kSteps; ++j) {
#pragma unroll
            for (u32 i = 0; i < kSteps; ++i) {
                u32 k[4];
                ptx::ldmatrix_x4(k, keys + (2 * i * kPieces + 2 * j) * kPieceBytes);
                ptx::mma_m16n8k16_bf16(s[i], k[0], k[1], k[2], k[3], q[2 * j], q[2 * j + 1]);
            }
        }
        const bool whole = after <= ctx.context && start + Op::kWindow > ctx.context + kMostTokens - 1;
        if (!whole) hide(ctx, columns, start, s);
        float most[2], by[2];
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            most[e] = largest(s, e);
            by[e] = most[e] == __uint_as_float(kNone) ? 0.0f : -(most[e] * kBinary);
        }
        u32 p[kSteps][2]; // of step j keys 16 j + 2 t and the next, and those 8 farther, of token g
#pragma unroll
        for (u32 i = 0; i < kSteps; ++i) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h)
                p[i][h] = ptx::movmatrix_trans(
                    ptx::cvt_bf16x2(power<Op>(s[i][2 * h], by[0]), power<Op>(s[i][2 * h + 1], by[1])));
        }

        const u32 values =
            stage + kSideBytes + (row % 4 * kPieces + beside) * kPieceBytes + (row / 4 * 4 + (below ^ row % 4)) * 16;
        const bool edge = start < live.first || after > live.end;
        float o[kSteps][4] = {}, sum[4] = {};
#pragma unroll
        for (u32 j = 0; j < kSteps; ++j) {
            u32 v[kSteps][4];
#pragma unroll
            for (u32 i = 0; i < kSteps; ++i)
                ptx::ldmatrix_x4(v[i], (values ^ i % 2 * 32) + (i / 2 * 4 * kPieces + 2 * j) * kPieceBytes);
            if (edge) drop_unseen(ctx, live, start + 16 * j, v);
#pragma unroll
            for (u32 i = 0; i < kSteps; ++i)
                ptx::mma_m16n8k16_bf16(o[i], v[i][0], v[i][1], v[i][2], v[i][3], p[j][0], p[j][1]);
            ptx::mma_m16n8k16_bf16(sum, kOnes, kOnes, kOnes, kOnes, p[j][0], p[j][1]);
        }
        float consumed = 0; // every product of values is in it, and theirs are weights of all keys
#pragma unroll
        for (u32 i = 0; i < kSteps; ++i) consumed += o[i][0];
        Ctx::Ring::release(ctx, consumed);

        const u32 first = (unit.slot * Op::kHeads + head) * Ctx::Kernel::kTokens, dim = 8 * (g % 4) + g / 4 * 4;
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            const u32 at = token + ctx.lane % 4 * 2 + e;
            if (at >= ctx.tokens) break;
            const auto word = [&](u32 k) { return __float_as_uint(o[k / 2][2 * (k % 2) + e]); };
#pragma unroll
            for (u32 k = 0; k < kTiles; k += 4)
                Op::Partials::send(ctx, first + at, 8 * k + dim, uint4{word(k), word(k + 1), word(k + 2), word(k + 3)});
            if (g == e)
                Op::Partials::send(ctx, first + at, kHeadDim,
                                   uint4{__float_as_uint(most[e]), __float_as_uint(sum[e]), 0, 0});
        }
        return true;
    }

    // The largest of a token's scores.
    MEGAGEN_DEVICE float largest(const float (&s)[kSteps][4], u32 e) {
        float x = larger(s[0][e], s[0][2 + e]);
#pragma unroll
        for (u32 i = 1; i < kSteps; ++i) x = larger(x, larger(s[i][e], s[i][2 + e]));
#pragma unroll
        for (u32 d = 4; d < 32; d *= 2) x = larger(x, __shfl_xor_sync(kFullMask, x, d));
        return x;
    }

    // Scores of what a token does not see of a chunk from number `start`: minus infinity.
    template <class Ctx>
    MEGAGEN_DEVICE void hide(const Ctx& ctx, const Columns& columns, u32 start, float (&s)[kSteps][4]) {
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 own =
                    seen(ctx, oldest(columns.position[e]), columns.ancestors[e], start + half * 32) >> ctx.lane / 4;
#pragma unroll
                for (u32 k = 0; k < 4; ++k) {
                    if ((own >> 8 * k & 1) == 0) s[half * 2 + k / 2][2 * (k % 2) + e] = __uint_as_float(kNone);
                }
            }
        }
    }

    // Values whose numbers nobody sees may be anything, and a weight of zero does not help against a NaN. This lane has
    // numbers start + 2 t and the next, and those 8 farther.
    template <class Ctx>
    MEGAGEN_DEVICE void drop_unseen(const Ctx& ctx, const Live& live, u32 start, u32 (&v)[kSteps][4]) {
        const u32 kept = (before(start, live.end) & ~before(start, live.first)) >> ctx.lane % 4 * 2;
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const u32 mask = (kept >> 8 * h & 1) * 0xffffu | (kept >> 8 * h & 2) * 0x7fff8000u;
#pragma unroll
            for (u32 i = 0; i < kSteps; ++i) v[i][2 * h] &= mask, v[i][2 * h + 1] &= mask;
        }
    }

    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void merge(Ctx& ctx) {
        const Live live(ctx);
        merge_rows<Op, kFirstWarp, Op::kChunks, true>(ctx, Op::kChunks, [=](u32 slot) { return live.has(slot); });
    }
};

} // namespace megagen::ops
