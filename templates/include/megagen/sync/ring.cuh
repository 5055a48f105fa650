// The ring of all streams: one producer warp fills stages with bulk copies, the math warps drain them in the same
// order.
#pragma once

#include <megagen/ptx/bulk.cuh>
#include <megagen/sync/barrier.cuh>

namespace megagen {

enum class Hint : u32 { kEvictNormal = 0, kEvictFirst = 1, kEvictLast = 2 };

template <Hint kHint>
MEGAGEN_DEVICE u64 cache_policy() {
    if constexpr (kHint == Hint::kEvictLast) return ptx::policy_evict_last();
    return ptx::policy_evict_first();
}

// A part of a stage: so many bytes, after those of the parts before it.
struct Piece {
    const void* source;
    u32 bytes;
};

// R: kStages, kStageBytes, kOffset, and the barrier families Full and Empty.
template <class R>
struct Ring {
    using Full = Barrier<typename R::Full>;
    using Empty = Barrier<typename R::Empty>;

    template <class Ctx>
    MEGAGEN_DEVICE u32 stage(const Ctx& ctx) {
        return ctx.shared + R::kOffset + ctx.ring.slot * R::kStageBytes;
    }

    // Producer warp. Waits for the slot, and until fewer than kInFlight earlier stages are still under way.
    template <u32 kInFlight, Hint kHint, class Ctx, u32 kPieces>
    MEGAGEN_DEVICE bool load(Ctx& ctx, const Piece (&pieces)[kPieces], u64 policy) {
        u32 bytes = 0;
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) bytes += pieces[i].bytes;
        if (!Empty::wait(ctx, ctx.ring.slot, ctx.ring.phase ^ 1)) return false;
        if constexpr (kInFlight < R::kStages) {
            if (ctx.ring_loads >= kInFlight) {
                const bool wrapped = ctx.ring.slot < kInFlight;
                const u32 slot = ctx.ring.slot + (wrapped ? R::kStages : 0) - kInFlight;
                if (!Full::wait(ctx, slot, ctx.ring.phase ^ (wrapped ? 1 : 0))) return false;
            }
        }
        if (ctx.lane == 0) {
            const u32 bar = Full::address(ctx, ctx.ring.slot);
            ptx::mbarrier_arrive_expect_tx(bar, bytes);
            u32 to = stage(ctx);
#pragma unroll
            for (u32 i = 0; i < kPieces; ++i) {
                if constexpr (kHint == Hint::kEvictNormal)
                    ptx::bulk_load(to, pieces[i].source, pieces[i].bytes, bar);
                else
                    ptx::bulk_load_hint(to, pieces[i].source, pieces[i].bytes, bar, policy);
                to += pieces[i].bytes;
            }
        }
        __syncwarp();
        ctx.stamps.loads(ctx, R::Full::kIndex, ctx.ring.slot, bytes);
        ctx.ring.advance();
        ++ctx.ring_loads;
        return true;
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool acquire(Ctx& ctx) {
        return Full::wait(ctx, ctx.ring.slot, ctx.ring.phase);
    }

    // The stage after the one that has been acquired, which is handed back later.
    template <class Ctx>
    MEGAGEN_DEVICE bool acquire_next(Ctx& ctx, u32& stage) {
        static_assert(R::kStages > 1, "two stages are held at once");
        auto next = ctx.ring;
        next.advance();
        stage = ctx.shared + R::kOffset + next.slot * R::kStageBytes;
        return Full::wait(ctx, next.slot, next.phase);
    }

    // `consumed` must be computed from everything that was read from the stage: a load that is still on its way
    // when the slot is handed back can return the next stage's bytes.
    template <class Ctx>
    MEGAGEN_DEVICE void release(Ctx& ctx, float consumed) {
        Empty::arrive_consumed(ctx, ctx.ring.slot, consumed);
        ctx.ring.advance();
    }

    // Of what no load of this warp's lanes has read, or nothing but products that it has waited for.
    template <class Ctx>
    MEGAGEN_DEVICE void release(Ctx& ctx) {
        Empty::arrive(ctx, ctx.ring.slot);
        ctx.ring.advance();
    }

    // Producer warp: waits until every copy that it issued has landed.
    template <class Ctx>
    MEGAGEN_DEVICE void drain(Ctx& ctx) {
        const u32 n = ctx.ring_loads < R::kStages ? ctx.ring_loads : R::kStages;
        for (u32 back = 1; back <= n; ++back) {
            const bool wrapped = ctx.ring.slot < back;
            const u32 slot = ctx.ring.slot + (wrapped ? R::kStages : 0) - back;
            const u32 parity = ctx.ring.phase ^ (wrapped ? 1 : 0);
            const u32 bar = Full::address(ctx, slot);
            while (!ptx::mbarrier_try_wait_parity(bar, parity))
                ptx::still_waiting(false, R::Full::kIndex, slot, parity);
        }
    }
};

} // namespace megagen
