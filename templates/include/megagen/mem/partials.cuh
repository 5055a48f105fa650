// Partial sums of a dense GEMM [chunk of K][row block][token][16], added by whoever needs few rows of a token at a
// time.
#pragma once

#include <megagen/mem/row.cuh>

namespace megagen {

// Chunks whose sums are on their way at once, as registers allow: at most eight.
template <u32 kChunks>
MEGAGEN_DEVICE constexpr u32 chunk_batch() {
    u32 n = kChunks < 8 ? kChunks : 8;
    while (kChunks % n != 0) --n;
    return n;
}

// Where the first of chunk c's sums of a token is: rows `row` to `row` + 3.
template <u32 kRowBlocks, class Ctx>
MEGAGEN_DEVICE u64 chunk_sum(const Ctx&, u32 c, u32 row, u32 token) {
    return ((c * kRowBlocks + row / kRowBlock) * Ctx::Kernel::kTokens + token) * kRowBlock + row % kRowBlock;
}

// x += rows `row` to `row` + 3 of a token, chunks of K in ascending order.
template <class Partials, u32 kRowBlocks, u32 kChunks, class Ctx>
MEGAGEN_DEVICE bool sum_chunks(Ctx& ctx, u32 row, u32 token, bool valid, float (&x)[4]) {
    static_assert(!Partials::kClustered, "partial sums are read by other blocks");
    constexpr u32 kBatch = chunk_batch<kChunks>();
#pragma unroll 1
    for (u32 c = 0; c < ctx.rounds(kChunks, kBatch); c += kBatch) {
        uint4 v[kBatch];
        const u64 first = chunk_sum<kRowBlocks>(ctx, c, row, token);
        const auto index = [&](u32 i) { return first + i * (kRowBlocks * Ctx::Kernel::kTokens * kRowBlock); };
        if (!Partials::read(ctx, v, valid, index)) return false;
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            float more[4];
            unpack<4>(v[i], more);
#pragma unroll
            for (u32 e = 0; e < 4; ++e) x[e] += more[e];
        }
    }
    return true;
}

// Hands the places back: once what was made of them is sent, as stores hold up what comes after.
template <class Partials, u32 kRowBlocks, u32 kChunks, class Ctx>
MEGAGEN_DEVICE void release_chunks(const Ctx& ctx, u32 row, u32 token, bool valid) {
#pragma unroll 1
    for (u32 c = 0; c < kChunks; ++c)
        Partials::template release<1>(ctx, valid, [&](u32) { return chunk_sum<kRowBlocks>(ctx, c, row, token); });
}

} // namespace megagen
