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

// No lane permutes anything: in all operands lane (g, t) has 16 consecutive elements, the keys' order within a chunk
// and the dims' within a head being free as long as both sides of a product agree. Column g of tile n is key, or dim,
// 16 (g / 2) + 2 n + g % 2, so that lane t gets 16 t .. 16 t + 15 in all.
//
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
    };

    // The first number that a token sees.
    MEGAGEN_DEVICE u32 oldest(u32 position) { return position + 1 > Op::kWindow ? position + 1 - Op::kWindow : 0; }

    // Warps kFirstWarp .. kFirstWarp + 7, each a head and a slot at a time. Of a slot that no token sees too: those who
    // merge do not tell one from the others.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void attend(Ctx& ctx) {
        if (!Op::Q::wait(ctx) || !Op::Keys::wait(ctx) || !Op::Values::wait(ctx)) return;
        const Range mine = ctx.rounds(share_of(Op::kChunks * Op::kHeads, ctx.block, Ctx::Kernel::kBlocks), kWarps);
        const Live live(ctx);
        const Rows rows(ctx);
#pragma unroll 1
        for (u32 unit = mine.first + ctx.warp - kFirstWarp; unit < mine.last; unit += kWarps) {
            const u32 slot = unit / Op::kHeads, head = unit % Op::kHeads;
            if (!live.has(slot))
                send_nothing(ctx, (slot * Op::kHeads + head) * Ctx::Kernel::kTokens);
            else if (!attend(ctx, live, rows, slot, head))
                return;
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

    // What send_partials sends, of no keys: a lane has four dims of a token, then one its largest score and sum.
    template <class Ctx>
    MEGAGEN_DEVICE void send_nothing(const Ctx& ctx, u32 first) {
        const u32 e = ctx.lane * 4, none = e < kHeadDim ? 0 : kNone;
#pragma unroll 1
        for (u32 token = 0; token < ctx.tokens; ++token) {
            if (e <= kHeadDim) Op::Partials::send(ctx, first + token, e, uint4{none, 0, 0, 0});
        }
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool attend(Ctx& ctx, const Live& live, const Rows& rows, u32 slot, u32 head) {
        const u32 g = ctx.lane / 4, t = ctx.lane % 4;
        const u32 start = (live.begin + live.after(slot)) * kKeyChunk;
        const u32 chunk = (head / (Op::kHeads / Op::kKvHeads) * Op::kChunks + slot) * kKeyChunk;
        const u32 own = chunk * 64 + g / 2 * 16 * kPiece + t * 2 * kPiece + g % 2 * 8;
        const auto fragment = [=](u32 i) { return own + i / 8 * 8 * kPiece + i % 2 * kPiece + i / 2 % 4 * 16; };
        u32 a[2][kWords];
        uint4 k[2 * kTiles], v[2 * kTiles];
        if (!chosen_queries(ctx, head, a) || !Op::Keys::read(ctx, k, true, fragment)) return false;

        float s[kTiles][4] = {}; // rows g (0, 1) and g + 8 (2, 3), keys 16 t + 2 n and the next
#pragma unroll
        for (u32 half = 0; half < 2; ++half) multiply(s, half, left_of(a), k, half * kTiles);
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
                mask(seen(ctx, oldest(position), row_of(h, rows.ancestors[0], rows.ancestors[1]), start + t * 16), x);
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
        for (u32 half = 0; half < 2; ++half) multiply(o, half, left_of(p), v, half * kTiles);
        send_partials<typename Op::Partials, 1>(ctx, (slot * Op::kHeads + head) * Ctx::Kernel::kTokens, o, most, sum,
                                                [=](u32 n) { return t * 16 + 2 * n; });
        return true;
    }

    // Scores of a row's 16 keys that it does not see are minus infinity.
    MEGAGEN_DEVICE void mask(u32 seen, float (&s)[kTiles][4]) {
#pragma unroll
        for (u32 i = 0; i < 16; ++i) {
            if ((seen >> i & 1) == 0) s[i / 2][i % 2] = __uint_as_float(kNone);
        }
    }

    // Values whose numbers nobody sees may be anything, and a weight of zero does not help against a NaN. Registers
    // hold numbers number .. number + 15; those from `first` to `end` are seen.
    template <u32 kN>
    MEGAGEN_DEVICE void drop_unseen(u32 first, u32 end, u32 number, uint4 (&v)[kN]) {
        const u32 kept = before(number, end) & ~before(number, first);
        const u32 pairs = (kept & 0x5555) | (kept & 0xaaaa) << 15; // two neighbours, 16 places apart
        const auto keep = [=](u32 i) { // at the tops of bytes 0 and 2, which fill the two below
            return ptx::prmt(i < 4 ? pairs << (7 - 2 * i) : pairs >> (2 * i - 7), 0, 0xaa88);
        };
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 mask[4] = {keep(4 * half), keep(4 * half + 1), keep(4 * half + 2), keep(4 * half + 3)};
#pragma unroll
            for (u32 i = half; i < kN; i += 2)
                v[i].x &= mask[0], v[i].y &= mask[1], v[i].z &= mask[2], v[i].w &= mask[3];
        }
    }

    // A warp has a token of a head: lane i the statistics of slots i and i + 32, and of every second slot four dims.
    // All of it is asked for at once.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void merge(Ctx& ctx) {
        static_assert(Op::kChunks <= 64, "a bit a slot, and two a lane");
        constexpr u32 kStats = (Op::kChunks + 31) / 32, kSums = (Op::kChunks + 1) / 2;
        constexpr u32 kBatches = (kSums + 16) / 17, kBatch = (kSums + kBatches - 1) / kBatches; // as registers allow
        constexpr u64 kSlotStride = static_cast<u64>(Op::kHeads) * Ctx::Kernel::kTokens * kPartialRow;
        const Range mine = ctx.rounds(share_of(ctx.tokens * Op::kHeads, ctx.block, Ctx::Kernel::kBlocks), kWarps);
        if (mine.first == mine.last || !Op::Partials::wait(ctx) || !Op::Gate::wait(ctx)) return;
        const u32 half = ctx.lane / 16, dim = ctx.lane % 16 * 4;
        const u32 warp = kFirstWarp + kWarps - 1 - ctx.warp; // the first ones had more to attend to
#pragma unroll 1
        for (u32 i = mine.first + warp; i < mine.last; i += kWarps) {
            const u32 token = i / Op::kHeads, head = i % Op::kHeads;
            uint4 gate[1];
            if (!Op::Gate::read(ctx, gate, true, [&](u32) { return token * kWidth + head * kHeadDim + dim / 8 * 8; }))
                return;
            const u64 row = static_cast<u64>(head * Ctx::Kernel::kTokens + token) * kPartialRow;
            const u64 stats = row + ctx.lane * kSlotStride + kHeadDim, sums = row + half * kSlotStride + dim;
            const auto has = [&](u32 j) { return 32 * j + ctx.lane < Op::kChunks; };
            const auto sums_of = [&](u32 j) { return 2 * j + half < Op::kChunks; };
            float open[4], weight[kStats], scale = 0, x[4] = {};
            opened(gate[0], dim, open);
#pragma unroll 1
            for (u32 b = 0; b < ctx.rounds(kBatches); ++b) {
                uint4 v[kStats + kBatch];
                const u32 begin = b * kBatch;
                const u64 at = sums + begin * 2 * kSlotStride;
                const auto wanted = [&](u32 j) { return j < kStats ? b == 0 && has(j) : sums_of(begin + j - kStats); };
                const auto index = [&](u32 j) {
                    return j < kStats ? stats + j * 32 * kSlotStride : at + (j - kStats) * 2 * kSlotStride;
                };
                if (!Op::Partials::read_where(ctx, v, wanted, index)) return;
                if (b == 0) scale = weigh(has, Op::kScale, v, weight);
                const float below = weight[0], above = weight[kStats - 1]; // of slots up to 31, and from 32
#pragma unroll
                for (u32 j = 0; j < kBatch; ++j) {
                    const u32 even = 2 * (begin + j);
                    const float w = __shfl_sync(kFullMask, even < 32 ? below : above, (even + half) % 32);
                    float o[4];
                    unpack<4>(v[kStats + j], o);
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) x[e] = fmaf(w, o[e], x[e]);
                }
            }
            finish<Op, kWidth>(ctx, token, head, x, scale, open);
            // Nobody waits for the rest.
#pragma unroll 1
            for (u32 j = 0; j < ctx.rounds(kSums); ++j) {
                const auto index = [&](u32) { return sums + j * 2 * kSlotStride; };
                Op::Partials::template release_where<1>(ctx, [&](u32) { return sums_of(j); }, index);
            }
            const auto index = [&](u32 j) { return stats + j * 32 * kSlotStride; };
            Op::Partials::template release_where<kStats>(ctx, has, index);
        }
    }
};

} // namespace megagen::ops
