// Bulk copies (TMA without a tensor map) both ways, L2 prefetch and cache policies.
#pragma once

#include <megagen/types.cuh>

namespace megagen::ptx {

MEGAGEN_DEVICE void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}

MEGAGEN_DEVICE void bulk_load_hint(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(dst),
        "l"(src), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}

// To the same offset in every block of the cluster whose bit is set in `mask`; each is told by its own barrier at
// `bar`'s offset, so each must expect the bytes.
MEGAGEN_DEVICE void bulk_load_multicast(u32 dst, const void* src, u32 bytes, u32 bar, u16 mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar), "h"(mask)
                 : "memory");
}

MEGAGEN_DEVICE void bulk_load_multicast_hint(u32 dst, const void* src, u32 bytes, u32 bar, u16 mask, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4, %5;" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar), "h"(mask), "l"(policy)
                 : "memory");
}

// What threads wrote to `src` needs fence_proxy_async before this. The thread that stores also commits and waits.
MEGAGEN_DEVICE void bulk_store(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
                 : "memory");
}

// Makes a group of this thread's stores since the last one.
MEGAGEN_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but this thread's last kGroups groups have been read: their sources may be written again.
template <u32 kGroups>
MEGAGEN_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

// Until they have been written, for this thread to see.
template <u32 kGroups>
MEGAGEN_DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

MEGAGEN_DEVICE void bulk_prefetch_l2(const void* src, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

MEGAGEN_DEVICE void bulk_prefetch_l2_hint(const void* src, u32 bytes, u64 policy) {
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(src), "r"(bytes), "l"(policy)
                 : "memory");
}

MEGAGEN_DEVICE u64 policy_evict_first() {
    u64 p;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}

MEGAGEN_DEVICE u64 policy_evict_last() {
    u64 p;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
    return p;
}

} // namespace megagen::ptx
