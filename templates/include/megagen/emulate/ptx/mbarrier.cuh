// Twin of ptx/mbarrier.cuh.
#pragma once

#include <megagen/emulate/builtins.cuh>
#include <megagen/types.cuh>

namespace megagen::ptx {

using emulate::Scope;
using emulate::Site;

MEGAGEN_DEVICE void mbarrier_init(u32 bar, u32 count, Site at = Site::current()) {
    emulate::mbarrier_init(bar, count, at);
}

MEGAGEN_DEVICE void fence_mbarrier_init(Site at = Site::current()) { emulate::fence_mbarrier_init(at); }

MEGAGEN_DEVICE void fence_proxy_async(Site at = Site::current()) { emulate::fence_proxy_async(false, at); }

MEGAGEN_DEVICE void fence_proxy_async_global(Site at = Site::current()) { emulate::fence_proxy_async(true, at); }

MEGAGEN_DEVICE void mbarrier_arrive_count(u32 bar, u32 count, Site at = Site::current()) {
    emulate::mbarrier_arrive(bar, count, false, at);
}

MEGAGEN_DEVICE void mbarrier_arrive_remote(u32 mapped_bar, Site at = Site::current()) {
    emulate::mbarrier_arrive(mapped_bar, 1, true, at);
}

MEGAGEN_DEVICE void mbarrier_expect_tx(u32 bar, u32 bytes, Site at = Site::current()) {
    emulate::mbarrier_expect_tx(bar, bytes, at);
}

MEGAGEN_DEVICE void mbarrier_arrive(u32 bar, Site at = Site::current()) { emulate::mbarrier_arrive(bar, 1, false, at); }

MEGAGEN_DEVICE void mbarrier_arrive_expect_tx(u32 bar, u32 bytes, Site at = Site::current()) {
    emulate::mbarrier_expect_tx(bar, bytes, at);
    emulate::mbarrier_arrive(bar, 1, false, at);
}

MEGAGEN_DEVICE bool mbarrier_try_wait_parity(u32 bar, u32 parity, Site at = Site::current()) {
    return emulate::mbarrier_try_wait(bar, parity, Scope::kCta, at);
}

MEGAGEN_DEVICE bool mbarrier_try_wait_parity_cluster(u32 bar, u32 parity, Site at = Site::current()) {
    return emulate::mbarrier_try_wait(bar, parity, Scope::kCluster, at);
}

} // namespace megagen::ptx
