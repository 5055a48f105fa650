// Twin of ptx/convert.cuh.
#pragma once

#include <megagen/emulate/builtins.cuh>
#include <megagen/types.cuh>

namespace megagen::ptx {

// As exact as fp32 allows.
MEGAGEN_DEVICE float exp2(float x) {
    const double y = std::exp2(double(x));
    return y < 0x1p-126 ? 0.0f : settled(float(y));
}

MEGAGEN_DEVICE float reciprocal(float x) {
    const auto flushed = [](float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; };
    return settled(flushed(1.0f / flushed(x)));
}

// To nearest, ties to even; NaN becomes 0x7fff. `x` may have more bits than fp32: it is rounded once.
inline u32 to_bf16(double x) {
    if (x != x) return 0x7fff;
    const u32 sign = std::signbit(x) ? 0x8000u : 0;
    const double size = std::fabs(x);
    if (std::isinf(size)) return sign | 0x7f80;
    if (size < 0x1p-126)
        return sign | static_cast<u32>(std::nearbyint(size * 0x1p133)); // subnormal, or the least normal
    int exponent;
    const double fraction = std::frexp(size, &exponent); // [0.5, 1)
    u32 mantissa = static_cast<u32>(std::nearbyint(fraction * 256));
    if (exponent > 128 || (exponent == 128 && mantissa == 256)) return sign | 0x7f80;
    return sign | (((exponent + 125) << 7) + mantissa); // the hidden bit adds one to the exponent
}

MEGAGEN_DEVICE u32 cvt_bf16x2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }

MEGAGEN_DEVICE u32 mul_bf16x2(u32 a, u32 b) {
    const auto wide = [](u32 half) { return static_cast<double>(__uint_as_float(half << 16)); };
    const u32 low = to_bf16(wide(a & 0xffff) * wide(b & 0xffff));
    return low | to_bf16(wide(a >> 16) * wide(b >> 16)) << 16;
}

MEGAGEN_DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    const u64 bytes = static_cast<u64>(b) << 32 | a;
    u32 v = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 pick = selector >> 4 * i & 15;
        u32 byte = static_cast<u32>(bytes >> 8 * (pick & 7)) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0; // the sign, all over the byte
        v |= byte << 8 * i;
    }
    return v;
}

MEGAGEN_DEVICE bool never_true(float value, emulate::Site at = emulate::Site::current()) {
    emulate::consume(__float_as_uint(value), at);
    return false;
}

MEGAGEN_DEVICE void keep_packed(u32&) {}

MEGAGEN_DEVICE void keep_packed(uint4&) {}

MEGAGEN_DEVICE u32 opaque(u32 v) { return v; }

} // namespace megagen::ptx
