// Powers of two, bf16 pairs, byte permutation, and what keeps the compiler from being clever with them.
#pragma once

#include <megagen/types.cuh>

namespace megagen::ptx {

// 2^x, nearly; zero where that is a subnormal number.
MEGAGEN_DEVICE float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, nearly; subnormal numbers are zero, before and after.
MEGAGEN_DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rounds to nearest even; NaN becomes 0x7fff.
MEGAGEN_DEVICE u32 cvt_bf16x2(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

// Exact where the product has at most 8 significant bits; subnormals are kept.
MEGAGEN_DEVICE u32 mul_bf16x2(u32 a, u32 b) {
    u32 v;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

MEGAGEN_DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}

// False, which only the value can tell: a vote on it waits for every load that the value was computed from.
MEGAGEN_DEVICE bool never_true(float value) { return __float_as_uint(value) == 0x7fb00b1eu; }

// No instruction: packed pairs become fresh values to the compiler, which would otherwise keep both halves unpacked
// from the first pass over a row to the second, in twice the registers.
MEGAGEN_DEVICE void keep_packed(u32& pair) { asm volatile("" : "+r"(pair)); }

MEGAGEN_DEVICE void keep_packed(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

// No instruction: a value of which the compiler knows nothing any more.
MEGAGEN_DEVICE u32 opaque(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}

} // namespace megagen::ptx
