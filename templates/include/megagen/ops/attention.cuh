// Attention over a ring of chunks of 64 keys, up to 16 tokens of a head at once. See megagen/ops/attention.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>

namespace megagen {

constexpr u32 kHeadDim = 64;  // of queries, keys and values
constexpr u32 kKeyChunk = 64; // keys that the caches keep together; V is transposed within them

namespace ops {

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
struct Attention {
    static constexpr u32 kWarps = 8;
    static constexpr u32 kTiles = kKeyChunk / 8; // n8 tiles of keys, and of dims
    static constexpr u32 kSteps = kHeadDim / 16; // k16 steps of an MMA over dims, and over keys
    static constexpr u32 kWords = 8;             // 32-bit registers of a lane's 16 consecutive elements
    static constexpr u32 kPartialRow = kHeadDim + 4;
    static constexpr u32 kWidth = Op::kHeads * kHeadDim;
    static constexpr u32 kNone = 0xff800000u; // minus infinity
    static_assert(Op::kHeads % Op::kKvHeads == 0, "a group of heads shares keys");
    static_assert(kHeadDim == 64 && kKeyChunk == 64, "fragments of four steps and eight tiles");
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

    MEGAGEN_DEVICE float larger(float a, float b) { return a > b ? a : b; }

    // Lanes 4 g .. 4 g + 3 have the parts of row g.
    MEGAGEN_DEVICE float quad_max(float x) {
        x = larger(x, __shfl_xor_sync(kFullMask, x, 1));
        return larger(x, __shfl_xor_sync(kFullMask, x, 2));
    }
    MEGAGEN_DEVICE float quad_sum(float x) {
        x += __shfl_xor_sync(kFullMask, x, 1);
        return x + __shfl_xor_sync(kFullMask, x, 2);
    }

    template <u32 kN>
    MEGAGEN_DEVICE void words_of(const uint4 (&v)[kN], u32 first, u32 (&word)[kWords]) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const uint4 x = v[first + i];
            word[4 * i] = x.x, word[4 * i + 1] = x.y, word[4 * i + 2] = x.z, word[4 * i + 3] = x.w;
        }
    }

    // What this lane must know of its tokens, g and g + 8.
    struct Rows {
        u32 position[2];
        u32 ancestors[2];
    };

    // Ones in the places of those of 16 numbers from `first` that come before `end`.
    MEGAGEN_DEVICE u32 before(u32 first, u32 end) {
        const u32 n = end > first ? end - first : 0;
        return n < 16 ? (1u << n) - 1 : 0xffffu;
    }

    // Which of 16 numbers from `first` a token sees, a bit each.
    template <class Ctx>
    MEGAGEN_DEVICE u32 seen(const Ctx& ctx, u32 position, u32 ancestors, u32 first) {
        const u32 oldest = position + 1 > Op::kWindow ? position + 1 - Op::kWindow : 0;
        const u32 old = before(first, ctx.context) & ~before(first, oldest);
        const u32 own = first - ctx.context, ahead = ctx.context - first; // one of them is small, or both are far off
        return old | (own < 32 ? ancestors >> own : ahead < 16 ? ancestors << ahead : 0);
    }

    // Warps kFirstWarp .. kFirstWarp + 7, each a head and a slot at a time. No lane permutes anything: in all operands
    // lane (g, t) has 16 consecutive elements, the keys' order within a chunk and the dims' within a head being free as
    // long as both sides of a product agree.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void attend(Ctx& ctx) {
        if (!Op::Q::wait(ctx) || !Op::Keys::wait(ctx) || !Op::Values::wait(ctx)) return;
        const Range mine = share_of(Op::kChunks * Op::kHeads, ctx.block, Ctx::Kernel::kBlocks);
        const Live live(ctx);
        Rows rows;
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const u32 token = ctx.lane / 4 + 8 * h;
            rows.position[h] = ctx.position(token);
            rows.ancestors[h] = ctx.ancestors(token);
        }
#pragma unroll 1
        for (u32 unit = mine.first + ctx.warp - kFirstWarp; unit < mine.last; unit += kWarps) {
            const u32 slot = unit / Op::kHeads, head = unit % Op::kHeads;
            if (live.has(slot) && !attend(ctx, live, rows, slot, head)) return;
            Op::Partials::publish(ctx);
        }
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool attend(Ctx& ctx, const Live& live, const Rows& rows, u32 slot, u32 head) {
        const u32 g = ctx.lane / 4, t = ctx.lane % 4;
        const u32 start = (live.begin + live.after(slot)) * kKeyChunk;
        // Column g of tile n is key, or dim, 16 (g / 2) + 2 n + g % 2, so that lane t gets 16 t .. 16 t + 15 in all.
        const u32 chunk = (head / (Op::kHeads / Op::kKvHeads) * Op::kChunks + slot) * kKeyChunk;
        const auto fragment = [&](u32 i) { return (chunk + g / 2 * 16 + i / 2 * 2 + g % 2) * 64 + t * 16 + i % 2 * 8; };
        const auto query = [&](u32 h) {
            return [=](u32 i) { return (g + 8 * h) * kWidth + head * kHeadDim + t * 16 + i * 8; };
        };
        uint4 q[2][2], k[2 * kTiles], v[2 * kTiles];
        bool ok = Op::Q::read(ctx, q[0], g < ctx.tokens, query(0));
        ok = ok && Op::Q::read(ctx, q[1], g + 8 < ctx.tokens, query(1));
        ok = ok && Op::Keys::read(ctx, k, true, fragment) && Op::Values::read(ctx, v, true, fragment);
        if (!ok) return false;

        float s[kTiles][4]; // rows g (0, 1) and g + 8 (2, 3), keys 16 t + 2 n and the next
        scores(q, k, s);
        const bool whole = start + kKeyChunk <= ctx.context && start + Op::kWindow > ctx.context + 15;
        if (!whole) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const u32 bits = seen(ctx, rows.position[h], rows.ancestors[h], start + t * 16);
#pragma unroll
                for (u32 i = 0; i < 16; ++i) {
                    if ((bits >> i & 1) == 0) s[i / 2][2 * h + i % 2] = __uint_as_float(kNone);
                }
            }
        }
        float most[2], sum[2];
        u32 p[kTiles][2];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            most[h] = s[0][2 * h];
#pragma unroll
            for (u32 n = 0; n < kTiles; ++n) most[h] = larger(larger(most[h], s[n][2 * h]), s[n][2 * h + 1]);
            most[h] = quad_max(most[h]);
            const float shift = most[h] == __uint_as_float(kNone) ? 0.0f : -(most[h] * Op::kScale);
            sum[h] = 0;
#pragma unroll
            for (u32 n = 0; n < kTiles; ++n) {
                p[n][h] = ptx::cvt_bf16x2(__expf(fmaf(s[n][2 * h], Op::kScale, shift)),
                                          __expf(fmaf(s[n][2 * h + 1], Op::kScale, shift)));
                sum[h] += bf16_low(p[n][h]);
                sum[h] += bf16_high(p[n][h]);
            }
            sum[h] = quad_sum(sum[h]);
        }

        if (start < live.first || start + kKeyChunk > live.end) drop_unseen(live, start + t * 16, v);
        float o[kTiles][4] = {};
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
#pragma unroll
            for (u32 j = 0; j < kSteps; ++j) {
#pragma unroll
                for (u32 n = half * kTiles / 2; n < (half + 1) * kTiles / 2; ++n) {
                    u32 b[kWords];
                    words_of(v, 2 * n, b);
                    ptx::mma_m16n8k16_bf16(o[n], p[2 * j][0], p[2 * j][1], p[2 * j + 1][0], p[2 * j + 1][1], b[2 * j],
                                           b[2 * j + 1]);
                }
            }
        }
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const u32 token = g + 8 * h;
            if (token < ctx.tokens) {
                const u32 row = (slot * Op::kHeads + head) * Ctx::Kernel::kTokens + token;
                const auto word = [&](u32 n, u32 i) { return __float_as_uint(o[n][2 * h + i]); };
#pragma unroll
                for (u32 n = 0; n < kTiles; n += 2)
                    Op::Partials::send(ctx, row, t * 16 + 2 * n,
                                       uint4{word(n, 0), word(n, 1), word(n + 1, 0), word(n + 1, 1)});
                if (t == 0)
                    Op::Partials::send(ctx, row, kHeadDim,
                                       uint4{__float_as_uint(most[h]), __float_as_uint(sum[h]), 0, 0});
            }
        }
        return true;
    }

    MEGAGEN_DEVICE void scores(const uint4 (&q)[2][2], const uint4 (&k)[2 * kTiles], float (&s)[kTiles][4]) {
        u32 a[2][kWords];
        words_of(q[0], 0, a[0]);
        words_of(q[1], 0, a[1]);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) { // four tiles at once hide the MMA's latency; then their keys are gone
#pragma unroll
            for (u32 j = 0; j < kSteps; ++j) {
#pragma unroll
                for (u32 n = half * kTiles / 2; n < (half + 1) * kTiles / 2; ++n) {
                    if (j == 0) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
                    u32 b[kWords];
                    words_of(k, 2 * n, b);
                    ptx::mma_m16n8k16_bf16(s[n], a[0][2 * j], a[1][2 * j], a[0][2 * j + 1], a[1][2 * j + 1], b[2 * j],
                                           b[2 * j + 1]);
                }
            }
        }
    }

    // Values whose numbers nobody sees may be anything, and a weight of zero does not help against a NaN. Registers
    // hold numbers number .. number + 15.
    MEGAGEN_DEVICE void drop_unseen(const Live& live, u32 number, uint4 (&v)[2 * kTiles]) {
        u32 keep[kWords];
#pragma unroll
        for (u32 i = 0; i < kWords; ++i) {
            const u32 low = number + 2 * i, high = low + 1;
            keep[i] = (low >= live.first && low < live.end ? 0x0000ffffu : 0) |
                      (high >= live.first && high < live.end ? 0xffff0000u : 0);
        }
#pragma unroll
        for (u32 i = 0; i < 2 * kTiles; ++i) {
            const u32* mask = keep + i % 2 * 4;
            v[i].x &= mask[0], v[i].y &= mask[1], v[i].z &= mask[2], v[i].w &= mask[3];
        }
    }

    // A warp has a token of a head: lane i the statistics of slots i and i + 32, then of every second slot four dims.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void merge(Ctx& ctx) {
        constexpr u32 kStats = (Op::kChunks + 31) / 32, kSums = (Op::kChunks + 1) / 2;
        constexpr u32 kBatches = (kSums + 23) / 24, kBatch = (kSums + kBatches - 1) / kBatches; // as registers allow
        constexpr u64 kSlotStride = static_cast<u64>(Op::kHeads) * Ctx::Kernel::kTokens * kPartialRow;
        const Range mine = share_of(ctx.tokens * Op::kHeads, ctx.block, Ctx::Kernel::kBlocks);
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
            float weight[kStats], scale = 0, x[4] = {};
#pragma unroll
            for (u32 b = 0; b < kBatches; ++b) {
                uint4 v[kStats + kBatch];
                const auto wanted = [&](u32 j) {
                    if (j < kStats) return b == 0 && (whose[j] & 1) != 0;
                    const u32 even = 2 * (b * kBatch + j - kStats);
                    return even < Op::kChunks && (mine_of >> even & 1) != 0;
                };
                const auto index = [&](u32 j) {
                    return j < kStats ? stats + j * 32 * kSlotStride
                                      : sums + (b * kBatch + j - kStats) * 2 * kSlotStride;
                };
                if (!Op::Partials::read_where(ctx, v, wanted, index)) return;
                Op::Partials::template release_where<kStats + kBatch>(ctx, wanted, index);
                if (b == 0) scale = weigh(whose, v, weight);
#pragma unroll
                for (u32 j = 0; j < kBatch; ++j) {
                    const u32 even = 2 * (b * kBatch + j);
                    if (even >= Op::kChunks) continue;
                    const float w = __shfl_sync(kFullMask, weight[even / 32], (even + half) % 32);
                    float o[4];
                    unpack<4>(v[kStats + j], o);
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) x[e] = fmaf(w, o[e], x[e]);
                }
            }
            float square = 0;
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                x[e] += __shfl_xor_sync(kFullMask, x[e], 16);
                x[e] *= scale;
                square = fmaf(x[e], x[e], square);
            }
#pragma unroll
            for (u32 d = 8; d > 0; d /= 2) square += __shfl_xor_sync(kFullMask, square, d);
            const float r = rsqrtf(fmaf(square, 1.0f / kHeadDim, Op::kEps));
            const u32 pair[2] = {dim % 8 ? gate[0].z : gate[0].x, dim % 8 ? gate[0].w : gate[0].y};
            u32 word[2];
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                const float low = __fdividef(1.0f, 1.0f + __expf(-bf16_low(pair[e])));
                const float high = __fdividef(1.0f, 1.0f + __expf(-bf16_high(pair[e])));
                word[e] = ptx::cvt_bf16x2(x[2 * e] * r * low, x[2 * e + 1] * r * high);
            }
            if (half == 0) Op::Out::send(ctx, token, head * kHeadDim + dim, uint2{word[0], word[1]});
            Op::Out::publish(ctx);
        }
    }

    // This lane's slots' weights, and one over the sum of all keys' weights.
    template <u32 kStats, u32 kN>
    MEGAGEN_DEVICE float weigh(const u32 (&whose)[2], const uint4 (&v)[kN], float (&weight)[kStats]) {
        float most = __uint_as_float(kNone), sum = 0;
#pragma unroll
        for (u32 j = 0; j < kStats; ++j)
            most = larger(most, whose[j] & 1 ? __uint_as_float(v[j].x) : __uint_as_float(kNone));
#pragma unroll
        for (u32 d = 16; d > 0; d /= 2) most = larger(most, __shfl_xor_sync(kFullMask, most, d));
        const float shift = -(most * Op::kScale); // a token sees itself, so there is a largest score
#pragma unroll
        for (u32 j = 0; j < kStats; ++j) {
            weight[j] = whose[j] & 1 ? __expf(fmaf(__uint_as_float(v[j].x), Op::kScale, shift)) : 0.0f;
            sum = fmaf(weight[j], __uint_as_float(v[j].y), sum);
        }
        return __fdividef(1.0f, warp_sum(sum));
    }
};

} // namespace ops
} // namespace megagen
