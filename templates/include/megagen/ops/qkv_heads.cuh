// A projection's partial sums to queries, gates and new rows of the caches. See megagen/ops/qkv_heads.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/partials.cuh>
#include <megagen/ops/stream.cuh>

namespace megagen::ops {

template <class Op>
concept QkvHeadsPolicy = requires {
    Op::kHeads;
    Op::kKvHeads;
    Op::kChunks;
    Op::kRing;
    Op::kEps;
    Op::kScale;
    Op::kRotate;
    typename Op::Partials;
    typename Op::Q;
    typename Op::Gate;
    typename Op::Keys;
    typename Op::Values;
};

// Besides: Rotary, where kRotate is not 0.
template <QkvHeadsPolicy Op>
struct QkvHeads {
    static constexpr u32 kWarps = 8;
    static constexpr u32 kDim = 64;      // of a head
    static constexpr u32 kKeyChunk = 64; // numbers that the caches keep together
    static constexpr u32 kAll = 2 * Op::kHeads + 2 * Op::kKvHeads;
    static constexpr u32 kRowBlocks = kAll * kDim / kRowBlock;
    static constexpr u32 kRingChunks = Op::kRing / kKeyChunk;
    static_assert(Op::kRing % kKeyChunk == 0, "a ring of whole chunks");

    // Heads as the projection's rows have them.
    static constexpr u32 kFirstKey = Op::kHeads;
    static constexpr u32 kFirstValue = kFirstKey + Op::kKvHeads;
    static constexpr u32 kFirstGate = kFirstValue + Op::kKvHeads;

    // Half a warp has a token of a head, a lane four consecutive dims.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void write(Ctx& ctx) {
        const u32 pairs = (ctx.tokens + 1) / 2;
        const Range mine = ctx.rounds(share_of(kAll * pairs, ctx.block, Ctx::Kernel::kBlocks), kWarps);
        if (mine.first == mine.last || !Op::Partials::wait(ctx)) return;
        const u32 dim = ctx.lane % 16 * 4;
#pragma unroll 1
        for (u32 unit = mine.first + ctx.warp - kFirstWarp; unit < mine.last; unit += kWarps) {
            const u32 head = unit % kAll, token = unit / kAll * 2 + ctx.lane / 16;
            const bool valid = token < ctx.tokens;
            uint4 turn[2] = {}; // of the position: on its way while the sums are awaited
            if constexpr (Op::kRotate != 0) {
                if (head < kFirstValue && !angles(ctx, token, dim, valid, turn)) return;
            }
            float x[4] = {};
            if (!sum_chunks<typename Op::Partials, kRowBlocks, Op::kChunks>(ctx, head * kDim + dim, token, valid, x))
                return;
            if (head < kFirstValue) {
                norm(x, head < kFirstKey ? Op::kScale : 1.0f);
                if constexpr (Op::kRotate != 0) rotate(dim, turn, x);
            }
            if (valid) put(ctx, head, token, dim, uint2{ptx::cvt_bf16x2(x[0], x[1]), ptx::cvt_bf16x2(x[2], x[3])});
            release_chunks<typename Op::Partials, kRowBlocks, Op::kChunks>(ctx, head * kDim + dim, token, valid);
        }
    }

    // Asks L2 for the chunks that hold something, which the next launch's attention reads: the launch's own tokens will
    // be there anyway.
    template <u32 kFirst, u32 kLast, class Ctx>
    MEGAGEN_DEVICE void prefetch_l2(Ctx& ctx) {
        static_assert(kFirst == 0 && kLast == kWhole, "all of it");
        constexpr u32 kBytes = kKeyChunk * kDim * 2;
        if (ctx.dead || ctx.context == 0) return;
        const u32 newest = (ctx.context + ctx.tokens - 1) / kKeyChunk;
        const u32 first = newest < kRingChunks ? 0 : newest + 1 - kRingChunks;
        const u32 chunks = (ctx.context - 1) / kKeyChunk + 1 - first;
        const Range mine = share_of(2 * Op::kKvHeads * chunks, ctx.block, Ctx::Kernel::kBlocks);
#pragma unroll 1
        for (u32 i = mine.first + ctx.lane; i < mine.last; i += 32) {
            const u32 head = i / chunks;
            const u64 at = (head / 2 * kRingChunks + (first + i % chunks) % kRingChunks) * static_cast<u64>(kBytes);
            ptx::bulk_prefetch_l2(head % 2 == 0 ? Op::Keys::place(ctx, at) : Op::Values::place(ctx, at), kBytes);
        }
        __syncwarp();
        ctx.stamps.prefetches(ctx, (mine.last - mine.first) * kBytes);
    }

    MEGAGEN_DEVICE void norm(float (&x)[4], float scale) {
        float square = 0;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) square = fmaf(x[e], x[e], square);
#pragma unroll
        for (u32 d = 8; d > 0; d /= 2) square += __shfl_xor_sync(kFullMask, square, d);
        const float r = rsqrtf(fmaf(square, 1.0f / kDim, Op::kEps)) * scale;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) x[e] *= r;
    }

    // Dims d and d + 32 turn together; the table has the cosines of a position's 32 pairs, then their sines.
    template <class Ctx>
    MEGAGEN_DEVICE bool angles(Ctx& ctx, u32 token, u32 dim, bool valid, uint4 (&v)[2]) {
        const u32 position = valid ? ctx.position(token) : 0;
        return Op::Rotary::read(ctx, v, valid, [&](u32 i) { return position * kDim + i * 32 + dim % 32; });
    }

    MEGAGEN_DEVICE void rotate(u32 dim, const uint4 (&v)[2], float (&x)[4]) {
        float cosine[4], sine[4];
        unpack<4>(v[0], cosine);
        unpack<4>(v[1], sine);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const float partner = __shfl_xor_sync(kFullMask, x[e], 8);
            x[e] = fmaf(partner, dim < 32 ? -sine[e] : sine[e], x[e] * cosine[e]);
        }
    }

    template <class Ctx>
    MEGAGEN_DEVICE void put(const Ctx& ctx, u32 head, u32 token, u32 dim, uint2 v) {
        const u32 number = ctx.context + token;
        if (head < kFirstKey) {
            Op::Q::send(ctx, token, head * kDim + dim, v);
        } else if (head < kFirstValue) {
            const u32 row = (head - kFirstKey) * Op::kRing + number % Op::kRing / 8 * 8 + dim / 8;
            Op::Keys::send(ctx, row, number % 8 * 8 + dim % 8, v);
        } else if (head < kFirstGate) {
            const u32 chunk = (head - kFirstValue) * kRingChunks + number / kKeyChunk % kRingChunks;
            const u32 row = chunk * kDim + dim / 8 * 8 + number % kKeyChunk / 8, at = dim % 8 * 8 + number % 8;
            Op::Values::send_half(ctx, row, at, v.x & 0xffffu);
            Op::Values::send_half(ctx, row, at + 8, v.x >> 16);
            Op::Values::send_half(ctx, row, at + 16, v.y & 0xffffu);
            Op::Values::send_half(ctx, row, at + 24, v.y >> 16);
        } else {
            Op::Gate::send(ctx, token, (head - kFirstGate) * kDim + dim, v);
        }
    }
};

} // namespace megagen::ops
