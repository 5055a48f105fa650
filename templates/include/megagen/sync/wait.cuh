// The only way to wait: bounded, warp-uniform, and it says where.
#pragma once

#include <megagen/debug/hang.cuh>

namespace megagen {

// Polls `ready` until it holds in every lane. False: this launch is being given up; the caller returns at once.
template <class Ctx, class Ready>
MEGAGEN_DEVICE bool wait_until(Ctx& ctx, u32 edge, u32 slot, u32 phase, Ready ready) {
  using K = typename Ctx::Kernel;
  if (ctx.dead) return false;
  u32 began = 0;
#pragma unroll 1
  for (u32 spin = 0;; ++spin) {
    if (__all_sync(kFullMask, ready())) return true;
    if (K::kBoundedWaits && spin % 16 == 15) {
      const u32 now = ptx::globaltimer_lo();
      if (spin == 15) began = now;
      const bool expired = now - began > ctx.p.sys.timeout_ns && ctx.p.sys.timeout_ns != 0;
      const bool woken = ptx::ld_relaxed_sys(ctx.heap + K::kAbortOffset) != 0;
      if (__any_sync(kFullMask, expired || woken)) {
        debug::give_up(ctx, woken ? debug::kWoken : debug::kExpired, edge, slot, phase);
        return false;
      }
    }
  }
}

}  // namespace megagen
