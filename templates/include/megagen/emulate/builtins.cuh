// CUDA's language on a plain C++20 compiler: keywords, vector types, built-in variables and functions.
#pragma once

#include <cmath>
#include <megagen/emulate/machine.hpp>
#include <tuple>
#include <utility>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

#define threadIdx (::megagen::emulate::thread_index())
#define blockIdx  (::megagen::emulate::block_index())
#define blockDim  (::megagen::emulate::block_size())
#define gridDim   (::megagen::emulate::grid_size())

namespace megagen::emulate {

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline u32 exchange(Collective what, u32 mask, u32 a, u32 b, Site at) {
    const u32 in[2] = {a, b};
    u32 out;
    collective(what, mask, in, 2, &out, 1, at);
    return out;
}

// Parameters lie one after the other, each at its own alignment.
template <class... P>
constexpr u32 parameter_bytes() {
    u32 end = 0;
    ((end = (end + alignof(P) - 1) / alignof(P) * alignof(P) + sizeof(P)), ...);
    return end;
}

template <class P>
const P& parameter(const u8* base, u32& end) {
    end = (end + alignof(P) - 1) / alignof(P) * alignof(P);
    const P& found = *reinterpret_cast<const P*>(base + end);
    end += sizeof(P);
    return found;
}

template <auto kKernel, class... P>
Registration registration(const char* name, void (*)(P...)) {
    return {name, parameter_bytes<P...>(), [](const void* base) {
                u32 end = 0;
                const std::tuple<const P&...> all{parameter<P>(static_cast<const u8*>(base), end)...};
                std::apply(kKernel, all);
            }};
}

} // namespace megagen::emulate

#define MEGAGEN_EMULATED(name)                                                                                         \
    static const auto megagen_registration_##name = ::megagen::emulate::registration<name>(#name, name);

using MegagenSite = ::megagen::emulate::Site;
using MegagenCollective = ::megagen::emulate::Collective;

inline void __syncthreads(MegagenSite at = MegagenSite::current()) { ::megagen::emulate::block_sync(at); }

inline void __syncwarp(unsigned mask = 0xffffffffu, MegagenSite at = MegagenSite::current()) {
    ::megagen::emulate::collective(MegagenCollective::kSync, mask, nullptr, 0, nullptr, 0, at);
}

template <class T>
inline T __shfl_sync(unsigned mask, T v, unsigned lane, MegagenSite at = MegagenSite::current()) {
    using namespace ::megagen::emulate;
    return bits<T>(exchange(Collective::kShuffle, mask, bits<u32>(v), lane, at));
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned by, MegagenSite at = MegagenSite::current()) {
    using namespace ::megagen::emulate;
    return bits<T>(exchange(Collective::kShuffleUp, mask, bits<u32>(v), by, at));
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned by, MegagenSite at = MegagenSite::current()) {
    using namespace ::megagen::emulate;
    return bits<T>(exchange(Collective::kShuffleDown, mask, bits<u32>(v), by, at));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, unsigned by, MegagenSite at = MegagenSite::current()) {
    using namespace ::megagen::emulate;
    return bits<T>(exchange(Collective::kShuffleXor, mask, bits<u32>(v), by, at));
}

inline int __any_sync(unsigned mask, int v, MegagenSite at = MegagenSite::current()) {
    return int(::megagen::emulate::exchange(MegagenCollective::kAny, mask, v != 0, 0, at));
}
inline int __all_sync(unsigned mask, int v, MegagenSite at = MegagenSite::current()) {
    return int(::megagen::emulate::exchange(MegagenCollective::kAll, mask, v != 0, 0, at));
}
inline unsigned __ballot_sync(unsigned mask, int v, MegagenSite at = MegagenSite::current()) {
    return ::megagen::emulate::exchange(MegagenCollective::kBallot, mask, v != 0, 0, at);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, MegagenSite at = MegagenSite::current()) {
    return ::megagen::emulate::exchange(MegagenCollective::kMax, mask, v, 0, at);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, MegagenSite at = MegagenSite::current()) {
    return ::megagen::emulate::exchange(MegagenCollective::kMin, mask, v, 0, at);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v, MegagenSite at = MegagenSite::current()) {
    return ::megagen::emulate::exchange(MegagenCollective::kAdd, mask, v, 0, at);
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned(((::megagen::emulate::u64(high) << 32) | low) >> (by & 31));
}
inline unsigned __float_as_uint(float v) { return ::megagen::emulate::bits<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return ::megagen::emulate::bits<float>(v); }

// A GPU's arithmetic makes one NaN of any; the host's keeps sign and payload, and a negated one would read as "empty".
inline float settled(float x) { return x != x ? __uint_as_float(0x7fffffffu) : x; }

// Approximations on a GPU, here as exact as fp32 allows: tests/gpu measures how far apart they are.
inline float __expf(float x) { return settled(float(std::exp(double(x)))); }
inline float rsqrtf(float x) { return settled(float(1.0 / std::sqrt(double(x)))); }
inline float __fdividef(float x, float y) { // zero beyond 2^126, as CUDA documents
    const float size = std::fabs(y);
    if (size > 0x1p126f && size < INFINITY) return settled(std::isfinite(x) ? std::copysign(0.0f, x) * y : NAN);
    return settled(x / y);
}
