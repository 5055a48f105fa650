// The way a role waits: bounded, warp-uniform, and it says where.
#pragma once

#include <megagen/debug/hang.cuh>

namespace megagen {

// Polls `ready` until it holds in every lane; a rehearsal asks once. False: this launch is being given up; the caller
// returns at once. `slot`: what a lane is waiting for, for the hang record.
template <class Ctx, class Ready>
MEGAGEN_DEVICE bool wait_until(Ctx& ctx, u32 edge, u32 slot, u32 phase, Ready ready) {
    using K = typename Ctx::Kernel;
    if (ctx.dead) return false;
    constexpr u32 kPollsPerCheck = K::kBoundedWaits ? 16 : 1024;
    u32 began = 0;
    const u32 from = ctx.stamps.now();
#pragma unroll 1
    for (u32 spin = 0;; ++spin) {
        const bool ok = ready();
        if (__all_sync(kFullMask, ok)) {
            ctx.stamps.waited(ctx, from, edge, slot);
            return true;
        }
        if (ctx.dry) return true;
        ptx::still_waiting(ok, edge, slot, phase);
        if (spin % kPollsPerCheck == kPollsPerCheck - 1) {
            const u32 now = ptx::globaltimer_lo();
            if (spin == kPollsPerCheck - 1) began = now;
            const bool expired = K::kBoundedWaits && now - began > ctx.p.sys.timeout_ns && ctx.p.sys.timeout_ns != 0;
            const bool woken = ptx::ld_relaxed_sys(ctx.aborted()) != 0;
            if (__any_sync(kFullMask, expired || woken)) {
                debug::give_up(ctx, !ok, woken ? debug::kWoken : debug::kExpired, edge, slot, phase);
                return false;
            }
        }
    }
}

} // namespace megagen
