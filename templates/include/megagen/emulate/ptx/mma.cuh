// Twin of ptx/mma.cuh. The engine multiplies as an H200 does, to the bit: see meet.cpp.
#pragma once

#include <megagen/emulate/builtins.cuh>
#include <megagen/types.cuh>

namespace megagen::ptx {

using emulate::Site;

inline void mma(emulate::Collective what, float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Site at) {
    u32 in[10] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(in + 6, d, sizeof d);
    u32 out[4];
    emulate::collective(what, kFullMask, in, 10, out, 4, at);
    std::memcpy(d, out, sizeof d);
}

MEGAGEN_DEVICE void mma_m16n8k16_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                                      Site at = Site::current()) {
    mma(emulate::Collective::kMmaBf16, d, a0, a1, a2, a3, b0, b1, at);
}

MEGAGEN_DEVICE void mma_m16n8k8_tf32(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                                     Site at = Site::current()) {
    mma(emulate::Collective::kMmaTf32, d, a0, a1, a2, a3, b0, b1, at);
}

template <u32 kPieces>
inline void matrices(u32 (&r)[kPieces], u32 row, bool transposed, Site at) {
    u32 in[6] = {0, 0, 0, 0, kPieces, transposed};
    if (threadIdx.x % 32 < 8 * kPieces) emulate::shared_load(in, row, 16, false, at);
    emulate::collective(emulate::Collective::kMatrix, kFullMask, in, 6, r, kPieces, at);
}

MEGAGEN_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 row, Site at = Site::current()) { matrices(r, row, false, at); }

MEGAGEN_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 row, Site at = Site::current()) { matrices(r, row, true, at); }

MEGAGEN_DEVICE void ldmatrix_x2(u32 (&r)[2], u32 row, Site at = Site::current()) { matrices(r, row, false, at); }

// Element (r, c) is in lane 4 r + c / 2, the even ones below.
MEGAGEN_DEVICE u32 movmatrix_trans(u32 piece, Site at = Site::current()) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, from = lane % 4 * 8 + g / 2;
    const u32 even = __shfl_sync(kFullMask, piece, from, at), odd = __shfl_sync(kFullMask, piece, from + 4, at);
    return g % 2 == 0 ? (even & 0xffffu) | odd << 16 : even >> 16 | (odd & 0xffff0000u);
}

} // namespace megagen::ptx
