// Global and shared memory accesses, one instruction each.
#pragma once

#include <megagen/types.cuh>

namespace megagen::ptx {

// 16 bytes at once: of what one such store wrote a load has all or nothing. (Of a vector each element is an access.)
MEGAGEN_DEVICE uint4 ld_relaxed_gpu_b128(const void* p) {
    u64 low, high;
    asm volatile("{\n .reg .b128 v;\n ld.relaxed.gpu.global.b128 v, [%2];\n mov.b128 {%0, %1}, v;\n}"
                 : "=l"(low), "=l"(high)
                 : "l"(p)
                 : "memory");
    return {static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high), static_cast<u32>(high >> 32)};
}

MEGAGEN_DEVICE uint4 ld_relaxed_sys_b128(const void* p) {
    u64 low, high;
    asm volatile("{\n .reg .b128 v;\n ld.relaxed.sys.global.b128 v, [%2];\n mov.b128 {%0, %1}, v;\n}"
                 : "=l"(low), "=l"(high)
                 : "l"(p)
                 : "memory");
    return {static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high), static_cast<u32>(high >> 32)};
}

MEGAGEN_DEVICE u32 ld_relaxed_gpu(const void* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

MEGAGEN_DEVICE u32 ld_relaxed_sys(const void* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

MEGAGEN_DEVICE u32 ld_acquire_gpu(const void* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

MEGAGEN_DEVICE u32 ld_acquire_sys(const void* p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// Weights and other data that no one writes during the launch.
MEGAGEN_DEVICE float4 ld_constant_f4(const void* p) {
    float4 v;
    asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}

MEGAGEN_DEVICE float ld_constant_f32(const void* p) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}

MEGAGEN_DEVICE uint4 ld_global_v4(const void* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

MEGAGEN_DEVICE void st_global_v4(void* p, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

MEGAGEN_DEVICE void st_global_v2(void* p, uint2 v) {
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

MEGAGEN_DEVICE void st_global_u32(void* p, u32 v) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// The low half.
MEGAGEN_DEVICE void st_global_u16(void* p, u32 v) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(static_cast<u16>(v)) : "memory");
}

MEGAGEN_DEVICE void st_relaxed_gpu(void* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MEGAGEN_DEVICE void st_relaxed_gpu(void* p, uint2 v) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

MEGAGEN_DEVICE void st_relaxed_gpu(void* p, uint4 v) {
    const u64 low = static_cast<u64>(v.y) << 32 | v.x, high = static_cast<u64>(v.w) << 32 | v.z;
    asm volatile("{\n .reg .b128 v;\n mov.b128 v, {%1, %2};\n st.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(p),
                 "l"(low), "l"(high)
                 : "memory");
}

MEGAGEN_DEVICE void st_relaxed_sys(void* p, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MEGAGEN_DEVICE void st_relaxed_sys(void* p, uint2 v) {
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

MEGAGEN_DEVICE void st_relaxed_sys(void* p, uint4 v) {
    const u64 low = static_cast<u64>(v.y) << 32 | v.x, high = static_cast<u64>(v.w) << 32 | v.z;
    asm volatile("{\n .reg .b128 v;\n mov.b128 v, {%1, %2};\n st.relaxed.sys.global.b128 [%0], v;\n}" ::"l"(p),
                 "l"(low), "l"(high)
                 : "memory");
}

MEGAGEN_DEVICE void st_release_gpu(void* p, u32 v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MEGAGEN_DEVICE void st_release_sys(void* p, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MEGAGEN_DEVICE void red_add_release_gpu(void* p, u32 v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MEGAGEN_DEVICE void red_add_relaxed_sys(void* p, u32 v) {
    asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Adds one; from `last` it goes back to zero.
MEGAGEN_DEVICE void red_inc_relaxed_gpu(void* p, u32 last) {
    asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(p), "r"(last) : "memory");
}

MEGAGEN_DEVICE u32 atom_add_acq_rel_gpu(void* p, u32 v) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

MEGAGEN_DEVICE u32 atom_cas_relaxed_sys(void* p, u32 expected, u32 desired) {
    u32 old;
    asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old)
                 : "l"(p), "r"(expected), "r"(desired)
                 : "memory");
    return old;
}

MEGAGEN_DEVICE void fence_acq_rel_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }

MEGAGEN_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

MEGAGEN_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

MEGAGEN_DEVICE uint4 ld_shared_v4(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(a)
                 : "memory");
    return v;
}

MEGAGEN_DEVICE float4 ld_shared_f4(u32 a) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(a)
                 : "memory");
    return v;
}

// As above. Where `any`, nobody cares what it reads: others may be writing there, or nobody has.
MEGAGEN_DEVICE float4 ld_shared_f4(u32 a, bool any) { return ld_shared_f4(a); }

MEGAGEN_DEVICE u32 ld_shared_u32(u32 a) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
    return v;
}

// As of four.
MEGAGEN_DEVICE u32 ld_shared_u32(u32 a, bool any) { return ld_shared_u32(a); }

// Another warp may write the word just now.
MEGAGEN_DEVICE u32 ld_relaxed_shared_u32(u32 a) {
    u32 v;
    asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
    return v;
}

MEGAGEN_DEVICE u32 ld_shared_u16(u32 a) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a) : "memory");
    return v;
}

MEGAGEN_DEVICE u32 ld_shared_u16(u32 a, bool any) { return ld_shared_u16(a); }

MEGAGEN_DEVICE float ld_shared_f32(u32 a) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory");
    return v;
}

MEGAGEN_DEVICE void st_shared_f4(u32 a, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(a), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

MEGAGEN_DEVICE void st_shared_u32(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }

MEGAGEN_DEVICE void st_relaxed_shared_u32(u32 a, u32 v) {
    asm volatile("st.relaxed.cta.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory");
}

MEGAGEN_DEVICE void st_shared_v4(u32 a, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

MEGAGEN_DEVICE void st_shared_u16(u32 a, u32 v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"(static_cast<u16>(v)) : "memory");
}

MEGAGEN_DEVICE void st_shared_f32(u32 a, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory");
}

MEGAGEN_DEVICE void red_or_shared(u32 a, u32 v) {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(a), "r"(v) : "memory");
}

// Another block's shared memory, by its mapped address.
MEGAGEN_DEVICE u32 ld_shared_cluster_u32(u32 mapped) {
    u32 v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(mapped) : "memory");
    return v;
}

MEGAGEN_DEVICE void st_shared_cluster_u32(u32 mapped, u32 v) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(mapped), "r"(v) : "memory");
}

// Where the block's dynamic shared memory begins in the shared window.
MEGAGEN_DEVICE u32 dynamic_shared() {
    extern __shared__ __align__(128) u8 shared[];
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

} // namespace megagen::ptx
