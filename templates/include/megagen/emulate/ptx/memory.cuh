// Twin of ptx/memory.cuh.
#pragma once

#include <megagen/emulate/builtins.cuh>
#include <megagen/types.cuh>

namespace megagen::ptx {

using emulate::Order;
using emulate::Rmw;
using emulate::Scope;
using emulate::Site;

template <class T>
inline T load(const void* p, Scope scope, Order order, Site at) {
    T v;
    emulate::global_load(&v, p, sizeof v, scope, order, at);
    return v;
}
template <class T>
inline void store(void* p, const T& v, Scope scope, Order order, Site at) {
    emulate::global_store(p, &v, sizeof v, scope, order, at);
}
template <class T>
inline T load_shared(u32 a, bool remote, Site at) {
    T v;
    emulate::shared_load(&v, a, sizeof v, remote, at);
    return v;
}

#define MEGAGEN_LOAD(name, type, scope, order)                                                                         \
    MEGAGEN_DEVICE type name(const void* p, Site at = Site::current()) {                                               \
        return load<type>(p, Scope::scope, Order::order, at);                                                          \
    }
MEGAGEN_LOAD(ld_relaxed_gpu_b128, uint4, kGpu, kRelaxed)
MEGAGEN_LOAD(ld_relaxed_sys_b128, uint4, kSys, kRelaxed)
MEGAGEN_LOAD(ld_relaxed_gpu, u32, kGpu, kRelaxed)
MEGAGEN_LOAD(ld_relaxed_sys, u32, kSys, kRelaxed)
MEGAGEN_LOAD(ld_acquire_gpu, u32, kGpu, kAcquire)
MEGAGEN_LOAD(ld_acquire_sys, u32, kSys, kAcquire)
MEGAGEN_LOAD(ld_global_v4, uint4, kNone, kRelaxed)
#undef MEGAGEN_LOAD

MEGAGEN_DEVICE float4 ld_constant_f4(const void* p, Site at = Site::current()) {
    float4 v;
    emulate::constant_load(&v, p, sizeof v, at);
    return v;
}

MEGAGEN_DEVICE float ld_constant_f32(const void* p, Site at = Site::current()) {
    float v;
    emulate::constant_load(&v, p, sizeof v, at);
    return v;
}

#define MEGAGEN_STORE(name, type, scope, order)                                                                        \
    MEGAGEN_DEVICE void name(void* p, type v, Site at = Site::current()) {                                             \
        store(p, v, Scope::scope, Order::order, at);                                                                   \
    }
MEGAGEN_STORE(st_global_v4, uint4, kNone, kRelaxed)
MEGAGEN_STORE(st_global_v2, uint2, kNone, kRelaxed)
MEGAGEN_STORE(st_global_u32, u32, kNone, kRelaxed)
MEGAGEN_STORE(st_relaxed_gpu, u32, kGpu, kRelaxed)
MEGAGEN_STORE(st_relaxed_gpu, uint2, kGpu, kRelaxed)
MEGAGEN_STORE(st_relaxed_sys, u32, kSys, kRelaxed)
MEGAGEN_STORE(st_relaxed_sys, uint2, kSys, kRelaxed)
MEGAGEN_STORE(st_release_gpu, u32, kGpu, kRelease)
MEGAGEN_STORE(st_release_sys, u32, kSys, kRelease)
#undef MEGAGEN_STORE

// One access of 16 bytes, which arrives at once.
MEGAGEN_DEVICE void st_relaxed_gpu(void* p, uint4 v, Site at = Site::current()) {
    emulate::global_store(p, &v, sizeof v, Scope::kGpu, Order::kRelaxed, at, true);
}
MEGAGEN_DEVICE void st_relaxed_sys(void* p, uint4 v, Site at = Site::current()) {
    emulate::global_store(p, &v, sizeof v, Scope::kSys, Order::kRelaxed, at, true);
}

MEGAGEN_DEVICE void st_global_u16(void* p, u32 v, Site at = Site::current()) {
    store(p, static_cast<u16>(v), Scope::kNone, Order::kRelaxed, at);
}

MEGAGEN_DEVICE void red_add_release_gpu(void* p, u32 v, Site at = Site::current()) {
    emulate::global_rmw(p, Rmw::kAdd, v, 0, false, Scope::kGpu, Order::kRelease, at);
}

MEGAGEN_DEVICE void red_add_relaxed_sys(void* p, u32 v, Site at = Site::current()) {
    emulate::global_rmw(p, Rmw::kAdd, v, 0, false, Scope::kSys, Order::kRelaxed, at);
}

MEGAGEN_DEVICE void red_inc_relaxed_gpu(void* p, u32 last, Site at = Site::current()) {
    emulate::global_rmw(p, Rmw::kInc, last, 0, false, Scope::kGpu, Order::kRelaxed, at);
}

MEGAGEN_DEVICE u32 atom_cas_relaxed_sys(void* p, u32 expected, u32 desired, Site at = Site::current()) {
    return emulate::global_rmw(p, Rmw::kCas, desired, expected, true, Scope::kSys, Order::kRelaxed, at);
}

MEGAGEN_DEVICE u32 atom_add_acq_rel_gpu(void* p, u32 v, Site at = Site::current()) {
    return emulate::global_rmw(p, Rmw::kAdd, v, 0, true, Scope::kGpu, Order::kAcqRel, at);
}

MEGAGEN_DEVICE void fence_acq_rel_cluster(Site at = Site::current()) { emulate::fence(Scope::kCluster, at); }

MEGAGEN_DEVICE void fence_acq_rel_gpu(Site at = Site::current()) { emulate::fence(Scope::kGpu, at); }

MEGAGEN_DEVICE void fence_acq_rel_sys(Site at = Site::current()) { emulate::fence(Scope::kSys, at); }

MEGAGEN_DEVICE uint4 ld_shared_v4(u32 a, Site at = Site::current()) { return load_shared<uint4>(a, false, at); }

MEGAGEN_DEVICE float4 ld_shared_f4(u32 a, Site at = Site::current()) { return load_shared<float4>(a, false, at); }

MEGAGEN_DEVICE float4 ld_shared_f4(u32 a, bool any, Site at = Site::current()) {
    return any ? float4{} : ld_shared_f4(a, at);
}

MEGAGEN_DEVICE u32 ld_shared_u32(u32 a, Site at = Site::current()) { return load_shared<u32>(a, false, at); }

MEGAGEN_DEVICE u32 ld_relaxed_shared_u32(u32 a, Site at = Site::current()) { return emulate::shared_poll(a, at); }

MEGAGEN_DEVICE u32 ld_shared_u16(u32 a, Site at = Site::current()) { return load_shared<u16>(a, false, at); }

MEGAGEN_DEVICE u32 ld_shared_u32(u32 a, bool any, Site at = Site::current()) { return any ? 0 : ld_shared_u32(a, at); }

MEGAGEN_DEVICE u32 ld_shared_u16(u32 a, bool any, Site at = Site::current()) { return any ? 0 : ld_shared_u16(a, at); }

MEGAGEN_DEVICE float ld_shared_f32(u32 a, Site at = Site::current()) { return load_shared<float>(a, false, at); }

MEGAGEN_DEVICE void st_shared_f4(u32 a, float4 v, Site at = Site::current()) {
    emulate::shared_store(a, &v, sizeof v, false, at);
}

MEGAGEN_DEVICE void st_shared_u32(u32 a, u32 v, Site at = Site::current()) {
    emulate::shared_store(a, &v, sizeof v, false, at);
}

MEGAGEN_DEVICE void st_relaxed_shared_u32(u32 a, u32 v, Site at = Site::current()) { emulate::shared_tell(a, v, at); }

MEGAGEN_DEVICE void st_shared_v4(u32 a, uint4 v, Site at = Site::current()) {
    emulate::shared_store(a, &v, sizeof v, false, at);
}

MEGAGEN_DEVICE void st_shared_u16(u32 a, u32 v, Site at = Site::current()) {
    const u16 low = static_cast<u16>(v);
    emulate::shared_store(a, &low, sizeof low, false, at);
}

MEGAGEN_DEVICE void st_shared_f32(u32 a, float v, Site at = Site::current()) {
    emulate::shared_store(a, &v, sizeof v, false, at);
}

MEGAGEN_DEVICE void red_or_shared(u32 a, u32 v, Site at = Site::current()) { emulate::shared_rmw(a, Rmw::kOr, v, at); }

MEGAGEN_DEVICE u32 ld_shared_cluster_u32(u32 mapped, Site at = Site::current()) {
    return load_shared<u32>(mapped, true, at);
}

MEGAGEN_DEVICE void st_shared_cluster_u32(u32 mapped, u32 v, Site at = Site::current()) {
    emulate::shared_store(mapped, &v, sizeof v, true, at);
}

MEGAGEN_DEVICE u32 dynamic_shared() { return emulate::dynamic_shared(); }

} // namespace megagen::ptx
