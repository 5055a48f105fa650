// Twin of ptx/wgmma.cuh. The engine multiplies as mma.sync does: that an H200's wgmma rounds its sums as mma.sync does
// was not measured.
#pragma once

#include <megagen/emulate/builtins.cuh>
#include <megagen/types.cuh>

namespace megagen::ptx {

using emulate::Site;

MEGAGEN_DEVICE u64 wgmma_descriptor(u32 shared, u32 leading_bytes, u32 stride_bytes, Site at = Site::current()) {
    return emulate::product_descriptor(shared, leading_bytes, stride_bytes, at);
}

MEGAGEN_DEVICE void wgmma_fence(Site at = Site::current()) { emulate::product_fence(at); }

MEGAGEN_DEVICE void wgmma_commit(Site at = Site::current()) { emulate::product_commit(at); }

template <u32 kGroups>
MEGAGEN_DEVICE void wgmma_wait(Site at = Site::current()) {
    emulate::product_wait(kGroups, at);
}

MEGAGEN_DEVICE void wgmma_hold(const u32 (&)[8][2]) {}

MEGAGEN_DEVICE void wgmma_pin(float (&)[8][4]) {}

// d must stay where it is until the wait: that is where the sums go.
MEGAGEN_DEVICE void wgmma_m64n64k16_bf16(float (&d)[8][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate,
                                         Site at = Site::current()) {
    const u32 a[4] = {a0, a1, a2, a3};
    emulate::product(&d[0][0], a, b, accumulate, at);
}

} // namespace megagen::ptx
