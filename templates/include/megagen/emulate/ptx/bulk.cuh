// Twin of ptx/bulk.cuh.
#pragma once

#include <megagen/emulate/builtins.cuh>
#include <megagen/types.cuh>

namespace megagen::ptx {

using emulate::Site;

MEGAGEN_DEVICE void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar, Site at = Site::current()) {
    emulate::bulk_load(dst, src, bytes, bar, 0, emulate::kNoPolicy, at);
}

MEGAGEN_DEVICE void bulk_load_hint(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy,
                                   Site at = Site::current()) {
    emulate::bulk_load(dst, src, bytes, bar, 0, policy, at);
}

MEGAGEN_DEVICE void bulk_load_multicast(u32 dst, const void* src, u32 bytes, u32 bar, u16 mask,
                                        Site at = Site::current()) {
    emulate::bulk_load(dst, src, bytes, bar, mask, emulate::kNoPolicy, at);
}

MEGAGEN_DEVICE void bulk_load_multicast_hint(u32 dst, const void* src, u32 bytes, u32 bar, u16 mask, u64 policy,
                                             Site at = Site::current()) {
    emulate::bulk_load(dst, src, bytes, bar, mask, policy, at);
}

MEGAGEN_DEVICE void bulk_store(void* dst, u32 src, u32 bytes, Site at = Site::current()) {
    emulate::bulk_store(dst, src, bytes, at);
}

MEGAGEN_DEVICE void bulk_commit() { emulate::bulk_commit(); }

template <u32 kGroups>
MEGAGEN_DEVICE void bulk_wait_read(Site at = Site::current()) {
    emulate::bulk_wait(kGroups, true, at);
}

template <u32 kGroups>
MEGAGEN_DEVICE void bulk_wait(Site at = Site::current()) {
    emulate::bulk_wait(kGroups, false, at);
}

MEGAGEN_DEVICE void bulk_prefetch_l2(const void* src, u32 bytes, Site at = Site::current()) {
    emulate::bulk_prefetch(src, bytes, emulate::kNoPolicy, at);
}

MEGAGEN_DEVICE void bulk_prefetch_l2_hint(const void* src, u32 bytes, u64 policy, Site at = Site::current()) {
    emulate::bulk_prefetch(src, bytes, policy, at);
}

MEGAGEN_DEVICE u64 policy_evict_first() { return emulate::kEvictFirst; }

MEGAGEN_DEVICE u64 policy_evict_last() { return emulate::kEvictLast; }

} // namespace megagen::ptx
