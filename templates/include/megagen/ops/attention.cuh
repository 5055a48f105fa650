// Attention over a ring of chunks of 64 keys, up to 16 tokens of a head at once. See megagen/ops/attention.py.
#pragma once

#include <megagen/ops/attention_tile.cuh>

namespace megagen::ops {

template <class Op>
concept AttentionPolicy = requires {
    Op::kHeads;
    Op::kKvHeads;
    Op::kChunks;
    Op::kWindow;
    Op::kScale;
    Op::kEps;
    typename Op::Q;
    typename Op::Gate;
    typename Op::Keys;
    typename Op::Values;
    typename Op::Partials;
    typename Op::Out;
};

// Partials: rows (slot, head, token) of 64 weighted sums of V, then the largest score and the sum of weights.
template <AttentionPolicy Op>
struct Attention : AttentionTile {
    static constexpr u32 kWarps = 8;
    static constexpr u32 kWidth = Op::kHeads * kHeadDim;
    static_assert(Op::kHeads % Op::kKvHeads == 0, "a group of heads shares keys");
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

        __device__ __forceinline__ u32 slot() const { return begin % Op::kChunks; } // of the first

        // How many chunks after the first the one in `slot` is.
        __device__ __forceinline__ u32 after(u32 slot) const {
            const u32 s = this->slot();
            return slot >= s ? slot - s : slot + Op::kChunks - s;
        }
        __device__ __forceinline__ bool has(u32 slot) const { return slot < Op::kChunks && after(slot) < chunks; }

        // All that has() says, a bit a slot.
        __device__ __forceinline__ u64 slots() const {
            const u64 ones = ~0ull >> (64 - chunks), held = ~0ull >> (64 - Op::kChunks);
            const u32 s = this->slot();
            return (ones << s | (s == 0 ? 0 : ones >> (Op::kChunks - s))) & held;
        }
    };

    // The first number that a token sees.
    MEGAGEN_DEVICE u32 oldest(u32 position) { return position + 1 > Op::kWindow ? position + 1 - Op::kWindow : 0; }

    // Warps kFirstWarp .. kFirstWarp + 7, each a head and a slot at a time.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void attend(Ctx& ctx) {
        if (!Op::Q::wait(ctx) || !Op::Keys::wait(ctx) || !Op::Values::wait(ctx)) return;
        const Range mine = ctx.rounds(share_of(Op::kChunks * Op::kHeads, ctx.block, Ctx::Kernel::kBlocks), kWarps);
        const Live live(ctx);
        const Rows rows(ctx);
#pragma unroll 1
        for (u32 unit = mine.first + ctx.warp - kFirstWarp; unit < mine.last; unit += kWarps) {
            const u32 slot = unit / Op::kHeads, head = unit % Op::kHeads;
            if (live.has(slot) && !attend(ctx, live, rows, slot, head)) return;
            Op::Partials::publish(ctx);
        }
    }

    // Both tokens' queries of a head; zeros past the launch's tokens. A product's left side is four registers in a row:
    // those of a load would be copied before every product, those of a choice are made there.
    template <class Ctx>
    MEGAGEN_DEVICE bool chosen_queries(Ctx& ctx, u32 head, u32 (&a)[2][kWords]) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const u32 token = ctx.lane / 4 + 8 * h;
            const bool valid = token < ctx.tokens;
            const u32 first = (valid ? token : 0) * kWidth + head * kHeadDim + ctx.lane % 4 * 16;
            uint4 q[2];
            if (!Op::Q::read(ctx, q, true, [=](u32 i) { return first + i * 8; })) return false;
            words_of(q, 0, a[h]);
#pragma unroll
            for (u32 i = 0; i < kWords; ++i) a[h][i] = valid ? a[h][i] : 0;
        }
        return true;
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool attend(Ctx& ctx, const Live& live, const Rows& rows, u32 slot, u32 head) {
        const u32 g = ctx.lane / 4, t = ctx.lane % 4;
        const u32 start = (live.begin + live.after(slot)) * kKeyChunk;
        const u32 chunk = (head / (Op::kHeads / Op::kKvHeads) * Op::kChunks + slot) * kKeyChunk;
        const auto fragment = [&](u32 i) { return (chunk + g / 2 * 16 + i / 2 * 2 + g % 2) * 64 + t * 16 + i % 2 * 8; };
        u32 a[2][kWords];
        uint4 k[2 * kTiles], v[2 * kTiles];
        if (!chosen_queries(ctx, head, a) || !Op::Keys::read(ctx, k, true, fragment)) return false;

        float s[kTiles][4] = {}; // rows g (0, 1) and g + 8 (2, 3), keys 16 t + 2 n and the next
#pragma unroll
        for (u32 half = 0; half < 2; ++half) multiply(s, half, left(a), k, half * kTiles);
        // Values are asked for when the keys do not need their registers any more.
        if (ptx::never_true(s[0][0] + s[kTiles - 1][0]) || !Op::Values::read(ctx, v, true, fragment)) return false;
        const bool whole = start + kKeyChunk <= ctx.context && start + Op::kWindow > ctx.context + 15;
        float most[2] = {}, sum[2] = {};
        u32 p[kTiles][2] = {};
#pragma unroll 1
        for (u32 h = ctx.tokens > 8 ? 2 : 1; h-- > 0;) { // rolled, or it would be twice the code
            float x[kTiles][4];
#pragma unroll
            for (u32 n = 0; n < kTiles; ++n)
                x[n][0] = row_of(h, s[n][0], s[n][2]), x[n][1] = row_of(h, s[n][1], s[n][3]);
            if (!whole) {
                const u32 position = row_of(h, rows.position[0], rows.position[1]);
                mask(seen(ctx, oldest(position), row_of(h, rows.ancestors[0], rows.ancestors[1]), start + t * 16), 0,
                     x);
            }
#pragma unroll
            for (u32 n = 0; n < kTiles; ++n) p[n][1] = p[n][0];
            most[1] = most[0], sum[1] = sum[0];
            most[0] = quad_max(most_of(x, 0, x[0][0]));
            const float shift = most[0] == __uint_as_float(kNone) ? 0.0f : -(most[0] * Op::kScale);
            sum[0] = quad_sum(weights_of(x, 0, Op::kScale, shift, 0, p));
        }

        if (start < live.first || start + kKeyChunk > live.end) drop_unseen(live.first, live.end, start + t * 16, v);
        float o[kTiles][4] = {};
#pragma unroll
        for (u32 half = 0; half < 2; ++half) multiply(o, half, left(p), v, half * kTiles);
        send_partials<typename Op::Partials, 1>(ctx, (slot * Op::kHeads + head) * Ctx::Kernel::kTokens, o, most, sum);
        return true;
    }

    // A warp has a token of a head: lane i the statistics of slots i and i + 32, then of every second slot four dims.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void merge(Ctx& ctx) {
        static_assert(Op::kChunks <= 64, "a bit a slot, and two a lane");
        constexpr u32 kStats = (Op::kChunks + 31) / 32, kSums = (Op::kChunks + 1) / 2;
        constexpr u32 kBatches = (kSums + 8) / 9, kBatch = (kSums + kBatches - 1) / kBatches; // rolled: less code
        constexpr u64 kSlotStride = static_cast<u64>(Op::kHeads) * Ctx::Kernel::kTokens * kPartialRow;
        const Range mine = ctx.rounds(share_of(ctx.tokens * Op::kHeads, ctx.block, Ctx::Kernel::kBlocks), kWarps);
        if (mine.first == mine.last || !Op::Partials::wait(ctx) || !Op::Gate::wait(ctx)) return;
        const u64 live = Live(ctx).slots();
        const u32 half = ctx.lane / 16, dim = ctx.lane % 16 * 4;
        const u32 whose[2] = {static_cast<u32>(live) >> ctx.lane, static_cast<u32>(live >> 32) >> ctx.lane};
        const u64 mine_of = live >> half; // every second bit: the slots of this half
#pragma unroll 1
        for (u32 i = mine.first + ctx.warp - kFirstWarp; i < mine.last; i += kWarps) {
            const u32 token = i / Op::kHeads, head = i % Op::kHeads;
            uint4 gate[1];
            if (!Op::Gate::read(ctx, gate, true, [&](u32) { return token * kWidth + head * kHeadDim + dim / 8 * 8; }))
                return;
            const u64 row = static_cast<u64>(head * Ctx::Kernel::kTokens + token) * kPartialRow;
            const u64 stats = row + ctx.lane * kSlotStride + kHeadDim, sums = row + half * kSlotStride + dim;
            float weight[kStats], x[4] = {};
            uint4 most[kStats];
            const auto has = [&](u32 j) { return (whose[j] & 1) != 0; };
            const auto stat = [&](u32 j) { return stats + j * 32 * kSlotStride; };
            if (!Op::Partials::read_where(ctx, most, has, stat)) return;
            Op::Partials::template release_where<kStats>(ctx, has, stat);
            const float scale = weigh(has, Op::kScale, most, weight);
            const float below = weight[0], above = weight[kStats - 1]; // of slots up to 31, and from 32
#pragma unroll 1
            for (u32 b = 0; b < ctx.rounds(kBatches); ++b) {
                uint4 v[kBatch];
                const u32 begin = b * kBatch;
                const u32 here = static_cast<u32>(mine_of >> 2 * begin);
                const auto wanted = [&](u32 j) { return (here >> 2 * j & 1) != 0; };
                const u64 at = sums + begin * 2 * kSlotStride;
                const auto index = [&](u32 j) { return at + j * 2 * kSlotStride; };
                if (!Op::Partials::read_where(ctx, v, wanted, index)) return;
                Op::Partials::template release_where<kBatch>(ctx, wanted, index);
#pragma unroll
                for (u32 j = 0; j < kBatch; ++j) {
                    const u32 even = 2 * (begin + j);
                    const float w = __shfl_sync(kFullMask, even < 32 ? below : above, (even + half) % 32);
                    float o[4];
                    unpack<4>(v[j], o);
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) x[e] = fmaf(w, o[e], x[e]);
                }
            }
            finish<Op, kWidth>(ctx, token, head, x, scale, gate[0]);
        }
    }
};

} // namespace megagen::ops
