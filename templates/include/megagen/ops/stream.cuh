// The weight side of a GEMM: which stages a block loads, into the ring or into L2. Shared by the GEMM op kinds.
//
// Tiles: count(ctx) stages of this block, and source(ctx, i), the address of the i-th.
#pragma once

#include <megagen/kernel.cuh>

namespace megagen::ops {

constexpr u32 kWhole = 1024; // shares of a block's stages are given in 1/1024

template <class Tiles, u32 kBytes, Hint kHint>
struct WeightStream {
    static_assert(kBytes < 1u << 20, "an L2 prefetch of 1 MB is encoded as one of nothing");

    // Stages [first, last) of this block, in shares, at most kInFlight on their way at once.
    template <u32 kFirst, u32 kLast, u32 kInFlight, class Ctx>
    MEGAGEN_DEVICE void load(Ctx& ctx) {
        const u32 n = Tiles::count(ctx);
        const u32 last = n * kLast / kWhole;
        const u64 policy = cache_policy<kHint>();
#pragma unroll 1
        for (u32 i = n * kFirst / kWhole; i < last; ++i)
            if (!Ctx::Ring::template load<kInFlight, kHint>(ctx, {{Tiles::source(ctx, i), kBytes}}, policy)) return;
    }

    template <u32 kFirst, u32 kLast, Hint kL2Hint, class Ctx>
    MEGAGEN_DEVICE void prefetch_l2(Ctx& ctx) {
        if (ctx.dead) return;
        const u32 n = Tiles::count(ctx);
        const u32 first = n * kFirst / kWhole, last = n * kLast / kWhole;
        const u64 policy = cache_policy<kL2Hint>();
#pragma unroll 1
        for (u32 i = first + ctx.lane; i < last; i += 32) {
            if constexpr (kL2Hint == Hint::kEvictNormal)
                ptx::bulk_prefetch_l2(Tiles::source(ctx, i), kBytes);
            else
                ptx::bulk_prefetch_l2_hint(Tiles::source(ctx, i), kBytes, policy);
        }
        __syncwarp();
        ctx.stamps.prefetches(ctx, (last - first) * kBytes);
    }
};

} // namespace megagen::ops
