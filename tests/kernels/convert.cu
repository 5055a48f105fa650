// Conversions and arithmetic, one result a thread and turn. Geometry and values: cases.py.
#include <megagen/ptx/convert.cuh>
#include <megagen/ptx/memory.cuh>

namespace {

using namespace megagen;

template <u32 kInputs>
struct Params {
    u32* in[kInputs];
    u32* out;
};

constexpr u32 kThreads = 128, kTurns = 32;

MEGAGEN_DEVICE u32 first() { return (blockIdx.x * kThreads + threadIdx.x) * kTurns; }

MEGAGEN_DEVICE u32 get(const u32* in, u32 i) { return ptx::ld_relaxed_gpu(in + i); }

MEGAGEN_DEVICE float get_f32(const u32* in, u32 i) { return __uint_as_float(get(in, i)); }

MEGAGEN_DEVICE void put(u32* out, u32 i, u32 v) { ptx::st_global_u32(out + i, v); }

MEGAGEN_DEVICE void put_f32(u32* out, u32 i, float v) { put(out, i, __float_as_uint(v)); }

} // namespace

extern "C" __global__ void convert(const __grid_constant__ Params<3> p) {
#pragma unroll 1
    for (u32 i = first(); i < first() + kTurns; ++i) {
        const u32 a = get(p.in[0], i), b = get(p.in[1], i), selector = get(p.in[2], i);
        put(p.out, 5 * i, ptx::cvt_bf16x2(__uint_as_float(a), __uint_as_float(b)));
        put(p.out, 5 * i + 1, ptx::mul_bf16x2(a, b));
        put(p.out, 5 * i + 2, ptx::prmt(a, b, selector));
        u32 pair = a;
        ptx::keep_packed(pair);
        put(p.out, 5 * i + 3, ptx::opaque(pair));
        uint4 pairs{a, b, selector, 1};
        ptx::keep_packed(pairs);
        put(p.out, 5 * i + 4, pairs.x ^ pairs.y ^ pairs.z ^ pairs.w);
    }
}

extern "C" __global__ void arithmetic(const __grid_constant__ Params<3> p) {
#pragma unroll 1
    for (u32 i = first(); i < first() + kTurns; ++i) {
        const float a = get_f32(p.in[0], i), b = get_f32(p.in[1], i), c = get_f32(p.in[2], i);
        put_f32(p.out, 5 * i, fmaf(a, b, c));
        put_f32(p.out, 5 * i + 1, a * b + c); // two roundings
        put_f32(p.out, 5 * i + 2, a + b);
        put_f32(p.out, 5 * i + 3, a - b);
        put_f32(p.out, 5 * i + 4, a * b);
    }
}

extern "C" __global__ void exponential(const __grid_constant__ Params<1> p) {
#pragma unroll 1
    for (u32 i = first(); i < first() + kTurns; ++i) put_f32(p.out, i, __expf(get_f32(p.in[0], i)));
}

extern "C" __global__ void power_of_two(const __grid_constant__ Params<1> p) {
#pragma unroll 1
    for (u32 i = first(); i < first() + kTurns; ++i) put_f32(p.out, i, ptx::exp2(get_f32(p.in[0], i)));
}

extern "C" __global__ void reciprocal(const __grid_constant__ Params<1> p) {
#pragma unroll 1
    for (u32 i = first(); i < first() + kTurns; ++i) put_f32(p.out, i, ptx::reciprocal(get_f32(p.in[0], i)));
}

extern "C" __global__ void quotient(const __grid_constant__ Params<2> p) {
#pragma unroll 1
    for (u32 i = first(); i < first() + kTurns; ++i)
        put_f32(p.out, i, __fdividef(get_f32(p.in[0], i), get_f32(p.in[1], i)));
}

extern "C" __global__ void inverse_root(const __grid_constant__ Params<1> p) {
#pragma unroll 1
    for (u32 i = first(); i < first() + kTurns; ++i) put_f32(p.out, i, rsqrtf(get_f32(p.in[0], i)));
}
