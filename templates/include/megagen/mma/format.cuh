// Weight formats: how a lane turns its bytes of a ring stage into MMA A operands.
//
// A stage holds row blocks of 16 rows; a row block eight slices of K, one a math warp; a slice groups of 64 k, which of
// an expert's stage lie in a row, and of a dense GEMM's are dealt to the slices in turns. In a
// group, lane (g = lane / 4, t = lane % 4) owns rows g and g + 8 at k = 16 t .. 16 t + 15, so that its B operands are
// 32 consecutive bytes of a token's bf16 row, and an NVFP4 block (16 k) has one owner a row.
#pragma once

#include <megagen/ptx/convert.cuh>
#include <megagen/ptx/memory.cuh>
#include <megagen/ptx/mma.cuh>

namespace megagen {

enum class WeightFormat : u32 { kBf16 = 0, kFp32 = 1, kNvfp4 = 2 };

constexpr u32 kSlices = 8;     // of K in a stage; as many as math warps
constexpr u32 kRowBlock = 16;  // rows of an MMA
constexpr u32 kGroup = 64;     // k of a group
constexpr u32 kGroupWords = 8; // 32-bit B registers a lane and group: 16 k of one token

// Two chains of accumulators hide the MMA's latency; added at the end, even groups first.
template <u32 kTiles>
struct Accumulators {
    float c[2][kTiles][4] = {};

    __device__ __forceinline__ float sum(u32 tile, u32 i) const { return c[0][tile][i] + c[1][tile][i]; }
};

template <u32 kTiles>
MEGAGEN_DEVICE void mma_bf16(float (&c)[kTiles][4], u32 a0, u32 a1, u32 a2, u32 a3, const u32 (&b)[kTiles][kGroupWords],
                             u32 j) {
#pragma unroll
    for (u32 n = 0; n < kTiles; ++n) ptx::mma_m16n8k16_bf16(c[n], a0, a1, a2, a3, b[n][2 * j], b[n][2 * j + 1]);
}

template <WeightFormat kFormat>
struct Format;

template <>
struct Format<WeightFormat::kBf16> {
    static __device__ __forceinline__ constexpr u32 slice_bytes(u32 k) { return 16 * k * 2; }

    // acc += A(kGroups groups of one slice at `slice`) * b, as many.
    template <u32 kGroups, u32 kTiles>
    MEGAGEN_DEVICE void multiply(Accumulators<kTiles>& acc, u32 slice, u32 lane, const u32 (*b)[kTiles][kGroupWords]) {
#pragma unroll
        for (u32 q = 0; q < kGroups; ++q) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const uint4 a = ptx::ld_shared_v4(slice + ((q * 4 + j) * 32 + lane) * 16);
                mma_bf16(acc.c[q % 2], a.x, a.y, a.z, a.w, b[q], j);
            }
        }
    }
};

// fp32 weights times bf16 activations: each weight is split into two tf32 parts, hi exact to 11 bits and the rest, so
// the product is good to 2^-22.
template <>
struct Format<WeightFormat::kFp32> {
    static __device__ __forceinline__ constexpr u32 slice_bytes(u32 k) { return 16 * k * 4; }

    template <u32 kGroups, u32 kTiles>
    MEGAGEN_DEVICE void multiply(Accumulators<kTiles>& acc, u32 slice, u32 lane, const u32 (*b)[kTiles][kGroupWords]) {
#pragma unroll
        for (u32 q = 0; q < kGroups; ++q) {
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                const float4 a = ptx::ld_shared_f4(slice + ((q * 8 + j) * 32 + lane) * 16);
                const u32 h[4] = {__float_as_uint(a.x) & 0xffffe000u, __float_as_uint(a.y) & 0xffffe000u,
                                  __float_as_uint(a.z) & 0xffffe000u, __float_as_uint(a.w) & 0xffffe000u};
                const u32 l[4] = {
                    __float_as_uint(a.x - __uint_as_float(h[0])), __float_as_uint(a.y - __uint_as_float(h[1])),
                    __float_as_uint(a.z - __uint_as_float(h[2])), __float_as_uint(a.w - __uint_as_float(h[3]))};
#pragma unroll
                for (u32 n = 0; n < kTiles; ++n) {
                    const u32 b0 = b[q][n][j] << 16, b1 = b[q][n][j] & 0xffff0000u;
                    ptx::mma_m16n8k8_tf32(acc.c[q % 2][n], l[0], l[1], l[2], l[3], b0, b1);
                    ptx::mma_m16n8k8_tf32(acc.c[q % 2][n], h[0], h[1], h[2], h[3], b0, b1);
                }
            }
        }
    }
};

// e2m1 times its e4m3 block scale is exact in bf16. The bits of a word are placed so that masking makes a bf16 pair
// worth value * 2^-126; the scale comes as bf16 worth scale * 2^119; their product is value * scale * 2^-7, and the
// second-level scale, kept times 2^7, makes it whole in the epilogue.
template <>
struct Format<WeightFormat::kNvfp4> {
    static __device__ __forceinline__ constexpr u32 slice_bytes(u32 k) { return 16 * k / 2 + k; }

    // `exponent`: of 2^97, in a register; beside another constant it would take an instruction of its own.
    MEGAGEN_DEVICE u32 scale_pair(u32 scales, u32 byte, u32 exponent) {
        return (ptx::prmt(scales, 0, byte * 0x1111u) & 0x0ff00ff0u) | exponent;
    }

    template <u32 kGroups, u32 kTiles>
    MEGAGEN_DEVICE void multiply(Accumulators<kTiles>& acc, u32 slice, u32 lane, const u32 (*b)[kTiles][kGroupWords]) {
        u32 scales[(kGroups + 1) / 2];
        const u32 scale_base = slice + kGroups * 512 + lane * kGroups * 2;
        if constexpr (kGroups == 1) {
            scales[0] = ptx::ld_shared_u16(scale_base);
        } else if constexpr (kGroups % 8 == 0) {
#pragma unroll
            for (u32 i = 0; i < kGroups / 8; ++i) {
                const uint4 s = ptx::ld_shared_v4(scale_base + 16 * i);
                scales[4 * i] = s.x, scales[4 * i + 1] = s.y, scales[4 * i + 2] = s.z, scales[4 * i + 3] = s.w;
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < kGroups / 2; ++i) scales[i] = ptx::ld_shared_u32(scale_base + 4 * i);
        }
        const u32 exponent = ptx::opaque(0x70007000u);
#pragma unroll
        for (u32 q = 0; q < kGroups; ++q)
            group<kTiles>(acc.c[q % 2], ptx::ld_shared_v4(slice + (q * 32 + lane) * 16), scales[q / 2], q % 2, b[q],
                          exponent);
    }

    // c += one group of A * its B. scales: of this group and its neighbour, `which` of them it is.
    template <u32 kTiles>
    MEGAGEN_DEVICE void group(float (&c)[kTiles][4], uint4 w, u32 scales, u32 which,
                              const u32 (&b)[kTiles][kGroupWords], u32 exponent) {
        constexpr u32 kMask = 0x81c081c0u;
        const u32 words[4] = {w.x, w.y, w.z, w.w};
        const u32 low = scale_pair(scales, which * 2, exponent), high = scale_pair(scales, which * 2 + 1, exponent);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 x = words[j];
            const u32 p0 = x & kMask;
            const u32 p1 = __funnelshift_r(x, x, 6) & kMask;
            const u32 p2 = (x << 4) & kMask;
            const u32 p3 = ((x << 6) & 0x80c080c0u) | ((x >> 2) & 0x01000100u);
            mma_bf16(c, ptx::mul_bf16x2(p0, low), ptx::mul_bf16x2(p1, high), ptx::mul_bf16x2(p2, low),
                     ptx::mul_bf16x2(p3, high), b, j);
        }
    }
};

// Accumulators on their way from the eight math warps to the reduce role's: each of these waits for every slot, takes
// its part of it or nothing, and hands it back. A: kSlots, kOffset, kSlotBytes, barrier families Full and Empty.
template <class A>
struct AccumRing {
    using Full = Barrier<typename A::Full>;
    using Empty = Barrier<typename A::Empty>;
    static constexpr u32 kTakers = A::Empty::kCount;

    template <class Ctx>
    MEGAGEN_DEVICE u32 address(const Ctx& ctx, u32 slice, u32 tile) {
        return ctx.shared + A::kOffset + ctx.accum.slot * A::kSlotBytes + ((slice * 2 + tile) * 32 + ctx.lane) * 16;
    }

    template <u32 kTiles, class Ctx>
    MEGAGEN_DEVICE bool put(Ctx& ctx, u32 slice, const Accumulators<kTiles>& acc) {
        if (!Empty::wait(ctx, ctx.accum.slot, ctx.accum.phase ^ 1)) return false;
#pragma unroll
        for (u32 n = 0; n < kTiles; ++n)
            ptx::st_shared_f4(address(ctx, slice, n), {acc.sum(n, 0), acc.sum(n, 1), acc.sum(n, 2), acc.sum(n, 3)});
        Full::arrive(ctx, ctx.accum.slot);
        ctx.accum.advance();
        return true;
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool acquire(Ctx& ctx) {
        return Full::wait(ctx, ctx.accum.slot, ctx.accum.phase);
    }

    // Whether the slot is warp `taker`'s where they take turns. A rehearsal goes through all of its code.
    template <class Ctx>
    MEGAGEN_DEVICE bool turn(const Ctx& ctx, u32 taker) {
        return kTakers == 1 || ctx.dry || ctx.accum.slot % kTakers == taker;
    }

    // Sums the slices of n8 tiles from `tile` on, in ascending order, and hands the slot back. Lane (g, t) gets rows g
    // (0, 1) and g + 8 (2, 3) of columns 2 t and 2 t + 1. All loads are on their way before the first sum, and none
    // when the slot goes back: the vote depends on the sums of what each load brought first.
    template <u32 kTiles, class Ctx>
    MEGAGEN_DEVICE void take(Ctx& ctx, u32 tile, float (&c)[kTiles][4]) {
        const u32 from = address(ctx, 0, tile);
        float4 part[kTiles][kSlices];
#pragma unroll
        for (u32 n = 0; n < kTiles; ++n) {
#pragma unroll
            for (u32 s = 0; s < kSlices; ++s) part[n][s] = ptx::ld_shared_f4(from + (s * 2 + n) * 512, ctx.dry);
        }
        float consumed = 0;
#pragma unroll
        for (u32 n = 0; n < kTiles; ++n) {
            float4 sum = part[n][0];
#pragma unroll
            for (u32 s = 1; s < kSlices; ++s) {
                sum.x += part[n][s].x, sum.y += part[n][s].y, sum.z += part[n][s].z, sum.w += part[n][s].w;
            }
            c[n][0] = sum.x, c[n][1] = sum.y, c[n][2] = sum.z, c[n][3] = sum.w;
            consumed = n == 0 ? sum.x : consumed + sum.x;
        }
        Empty::arrive_consumed(ctx, ctx.accum.slot, consumed);
        if (!ctx.dry) ctx.accum.advance();
    }

    // Hands back what another warp takes.
    template <class Ctx>
    MEGAGEN_DEVICE void pass(Ctx& ctx) {
        Empty::arrive(ctx, ctx.accum.slot);
        ctx.accum.advance();
    }
};

} // namespace megagen
