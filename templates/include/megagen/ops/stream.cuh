// The weight side of a GEMM: which stages a block loads, into the ring or into L2. Shared by the GEMM op kinds.
//
// Tiles: count(ctx) stages of this block, and source(ctx, i), the address of the i-th.
#pragma once

#include <megagen/kernel.cuh>

namespace megagen::ops {

constexpr u32 kWhole = 1024; // shares of a block's stages are given in 1/1024

// Stages that lie one after the other in memory.
struct Stretch {
    const u8* at;
    u32 stages; // none: the stream has ended
};

// Where the loop over streams is in a step's stream, and how it is to load.
struct StreamState {
    Stretch next = {nullptr, 0};
    u32 done = 0; // stages of this stream
    u32 bytes;
    u32 in_flight; // at most so many on their way at once
    Hint hint;
};

// Producer warp. Waits for the slot, and until fewer than in_flight earlier stages are still under way.
template <class Ctx>
MEGAGEN_DEVICE bool load_stage(Ctx& ctx, const StreamState& s) {
    using Policy = typename Ctx::Kernel::Ring;
    using Ring = typename Ctx::Ring;
    constexpr u32 kStages = Policy::kStages;
    const u32 slot = ctx.ring.slot, phase = ctx.ring.phase;
    if (!Ring::Empty::wait(ctx, slot, phase ^ 1)) return false;
    if (s.in_flight < kStages && ctx.ring_loads >= s.in_flight) {
        const bool wrapped = slot < s.in_flight;
        if (!Ring::Full::wait(ctx, slot + (wrapped ? kStages : 0) - s.in_flight, phase ^ (wrapped ? 1 : 0)))
            return false;
    }
    if (ctx.lane == 0) {
        const u32 bar = Ring::Full::address(ctx, slot), to = Ring::stage(ctx);
        ptx::mbarrier_arrive_expect_tx(bar, s.bytes);
        if (s.hint == Hint::kEvictNormal)
            ptx::bulk_load(to, s.next.at, s.bytes, bar);
        else if (s.hint == Hint::kEvictLast)
            ptx::bulk_load_hint(to, s.next.at, s.bytes, bar, ptx::policy_evict_last());
        else
            ptx::bulk_load_hint(to, s.next.at, s.bytes, bar, ptx::policy_evict_first());
    }
    __syncwarp();
    ctx.stamps.loads(ctx, Policy::Full::kIndex, slot, s.bytes);
    ctx.ring.advance();
    ++ctx.ring_loads;
    return true;
}

// Steps kFirst .. kEnd - 1 of the producer's program, its streams and what comes between them: all in the machine code
// of one loop, which is at hand after the first stream. `next(s)` finds the next stretch of the stream of ctx.step; of
// another step it does what the step says, and leaves none.
template <u32 kFirst, u32 kEnd, class Ctx, class Next>
MEGAGEN_DEVICE void load_streams(Ctx& ctx, Next next) {
#pragma unroll 1
    for (u32 step = kFirst; step < kEnd; ++step) {
        ctx.enter(step);
        StreamState s;
#pragma unroll 1
        for (;;) {
            s.next.stages = 0;
            ctx.block = ptx::opaque(ctx.block); // or all streams' shares would be found before the first load
            next(s);
            if (s.next.stages == 0) break;
            s.done += s.next.stages;
#pragma unroll 1
            for (; s.next.stages > 0 && load_stage(ctx, s); --s.next.stages) s.next.at += s.bytes;
            if (ctx.dead) break;
        }
    }
}

template <class Tiles, u32 kBytes, Hint kHint>
struct WeightStream {
    static_assert(kBytes < 1u << 20, "an L2 prefetch of 1 MB is encoded as one of nothing");

    // The next stretch of stages [first, last) of a block's n, in shares, at most kInFlight on their way at once.
    // from(i): the stages from the i-th on that lie in a row.
    template <u32 kFirst, u32 kLast, u32 kInFlight, class From>
    MEGAGEN_DEVICE void next(StreamState& s, u32 n, From from) {
        const u32 i = n * kFirst / kWhole + s.done, last = n * kLast / kWhole;
        s.bytes = kBytes, s.in_flight = kInFlight, s.hint = kHint;
        if (i >= last) return;
        s.next = from(i);
        if (s.next.stages > last - i) s.next.stages = last - i;
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
