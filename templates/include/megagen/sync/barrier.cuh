// Families of mbarriers: B gives kOffset (into dynamic shared memory), kSlots, kCount and kIndex (hang records).
#pragma once

#include <megagen/ptx/convert.cuh>
#include <megagen/ptx/mbarrier.cuh>
#include <megagen/sync/wait.cuh>

namespace megagen {

template <class B>
struct Barrier {
    template <class Ctx>
    MEGAGEN_DEVICE u32 address(const Ctx& ctx, u32 slot) {
        return ctx.shared + B::kOffset + 8 * slot;
    }

    template <class Ctx>
    MEGAGEN_DEVICE void init(const Ctx& ctx) {
        for (u32 slot = 0; slot < B::kSlots; ++slot) ptx::mbarrier_init(address(ctx, slot), B::kCount);
    }

    // Whole warp. `parity`: that of the phase whose completion is awaited.
    template <class Ctx>
    MEGAGEN_DEVICE bool wait(Ctx& ctx, u32 slot, u32 parity) {
        if (ctx.dry) return !ctx.dead;
        const u32 bar = address(ctx, slot);
        return wait_until<false>(ctx, B::kIndex, slot, parity,
                                 [&] { return ptx::mbarrier_try_wait_parity(bar, parity); });
    }

    // Whole warp, one arrival: everything its lanes did before is visible to those who wait.
    template <class Ctx>
    MEGAGEN_DEVICE void arrive(const Ctx& ctx, u32 slot) {
        __syncwarp();
        if (ctx.lane == 0 && !ctx.dry) ptx::mbarrier_arrive(address(ctx, slot));
    }

    // Hands a buffer back. The vote makes the arrival wait for the lanes' loads from it: whichever way it goes, one
    // lane arrives.
    template <class Ctx>
    MEGAGEN_DEVICE void arrive_consumed(const Ctx& ctx, u32 slot, float consumed) {
        const u32 leader = __any_sync(kFullMask, ptx::never_true(consumed)) ? 1 : 0;
        if (ctx.lane == leader && !ctx.dry) ptx::mbarrier_arrive(address(ctx, slot));
    }
};

// A barrier that completes once a launch.
template <class B>
struct Event : Barrier<B> {
    template <class Ctx>
    MEGAGEN_DEVICE bool wait(Ctx& ctx) {
        return Barrier<B>::wait(ctx, 0, 0);
    }

    template <class Ctx>
    MEGAGEN_DEVICE void arrive(const Ctx& ctx) {
        Barrier<B>::arrive(ctx, 0);
    }
};

// Position in a circular buffer that several warps walk in the same order.
template <u32 kSlots>
struct Cursor {
    u32 slot = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

} // namespace megagen
