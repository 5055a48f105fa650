// The way a role waits: bounded, warp-uniform, and it says where.
#pragma once

#include <megagen/debug/hang.cuh>

namespace megagen {

// Polls `ready` until it holds in every lane; a rehearsal asks once. False: this launch is being given up; the caller
// returns at once. `slot`: what a lane is waiting for, for the hang record.
//
// Its code is in every role many times over, and mostly run through without waiting: hence so short. kFar: what is
// awaited comes from another block. Of a block whose warps do not go on one waits for such, or for nothing at all:
// those look at the word by which other ranks and blocks tell, and the rest at the one by which they tell it on.
template <bool kFar, class Ctx, class Ready>
MEGAGEN_DEVICE bool wait_until(Ctx& ctx, u32 edge, u32 slot, u32 phase, Ready ready) {
    using K = typename Ctx::Kernel;
    if (ctx.dead) return false;
    u32 began = ptx::opaque(0), spins = began; // opaque, or the first round would be code of its own
    const u32 from = ctx.stamps.now();
#pragma unroll 1
    for (;;) {
        const bool ok = ready();
        if (__all_sync(kFullMask, ok)) {
            ctx.stamps.waited(ctx, from, edge, slot);
            return true;
        }
        if (ctx.dry) return true;
        ptx::still_waiting(ok, edge, slot, phase);
        bool expired = false, woken = ptx::ld_relaxed_shared_u32(debug::alarm(ctx)) != 0;
        if (++spins % 16 == 0) {
            if constexpr (K::kBoundedWaits) {
                const u32 now = ptx::globaltimer_lo();
                if (began == 0) began = now;
                expired = now - began > ctx.p.sys.timeout_ns - 1; // 0: never
            }
            if constexpr (kFar) woken |= ptx::ld_relaxed_sys(ctx.aborted()) != 0;
        }
        if (__any_sync(kFullMask, expired || woken)) {
            debug::give_up<kFar>(ctx, !ok, woken ? debug::kWoken : debug::kExpired, edge, slot, phase);
            return false;
        }
    }
}

} // namespace megagen
