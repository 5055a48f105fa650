// Row-wise helpers of norms: eight warps share a row, a slice each; sums follow one fixed tree.
#pragma once

#include <megagen/mma/format.cuh>
#include <megagen/ptx/convert.cuh>
#include <megagen/sync/barrier.cuh>

namespace megagen {

MEGAGEN_DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
MEGAGEN_DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
MEGAGEN_DEVICE float round_bf16(float x) { return bf16_low(ptx::cvt_bf16x2(x, 0.0f)); }

// Elements lane `lane` of slice `slice` holds of vector `i`, kPer consecutive ones.
template <u32 kWidth, u32 kPer>
struct RowSlice {
    static constexpr u32 kSlice = kWidth / kSlices;
    static constexpr u32 kVectors = kSlice / (32 * kPer);
    static_assert(kSlice % (32 * kPer) == 0, "a row is eight slices of whole warps");

    static constexpr u32 kStep = 32 * kPer; // from one of a lane's vectors to the next

    MEGAGEN_DEVICE u32 element(u32 slice, u32 lane, u32 i) { return slice * kSlice + (i * 32 + lane) * kPer; }
};

// kPer numbers of a 16-byte vector: fp32 (4) or bf16 (8).
template <u32 kPer>
MEGAGEN_DEVICE void unpack(uint4 v, float (&x)[kPer]) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if constexpr (kPer == 4) {
            x[i] = __uint_as_float(word[i]);
        } else {
            x[2 * i] = bf16_low(word[i]);
            x[2 * i + 1] = bf16_high(word[i]);
        }
    }
}

// Four lanes, l, l + 4, l + 8 and l + 12, hold a row of a 4 x 4 matrix each: lane l + 4 j gets column j.
MEGAGEN_DEVICE uint4 transpose(const float (&row)[4], u32 lane) {
    const bool odd = (lane & 4) != 0, upper = (lane & 8) != 0;
    const auto swap = [](float kept, float given, u32 distance, bool high, float& first, float& second) {
        const float got = __shfl_xor_sync(kFullMask, given, distance);
        first = high ? got : kept, second = high ? kept : got;
    };
    float x[4], y[4];
    swap(odd ? row[1] : row[0], odd ? row[0] : row[1], 4, odd, x[0], x[1]); // of lanes (0, 1): a column of this parity
    swap(odd ? row[3] : row[2], odd ? row[2] : row[3], 4, odd, x[2], x[3]);
    swap(upper ? x[2] : x[0], upper ? x[0] : x[2], 8, upper, y[0], y[2]);
    swap(upper ? x[3] : x[1], upper ? x[1] : x[3], 8, upper, y[1], y[3]);
    return {__float_as_uint(y[0]), __float_as_uint(y[1]), __float_as_uint(y[2]), __float_as_uint(y[3])};
}

// What is in registers moves down `kBy` places, so that a loop that fills or empties it has one body. Moves are
// instructions too: worth it where the body has many more. The first are lost, the last stay.
template <u32 kBy, class V, u32 kAll>
MEGAGEN_DEVICE void move_down(V (&all)[kAll]) {
#pragma unroll
    for (u32 i = 0; i + kBy < kAll; ++i) all[i] = all[i + kBy];
}

// y += eight consecutive fp32 numbers.
MEGAGEN_DEVICE void add_row(float (&y)[8], uint4 low, uint4 high) {
    const u32 word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (u32 i = 0; i < 8; ++i) y[i] += __uint_as_float(word[i]);
}

// Eight elements of kParts ranks' contributions in bf16, added in rank order. A zero is +0: whether it came as -0 may
// depend on the word that means empty.
template <u32 kParts>
MEGAGEN_DEVICE void sum_parts(const uint4* v, float (&sum)[8]) {
    unpack<8>(v[0], sum);
#pragma unroll
    for (u32 part = 1; part < kParts; ++part) {
        float more[8];
        unpack<8>(v[part], more);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) sum[e] += more[e];
    }
#pragma unroll
    for (u32 e = 0; e < 8; ++e) sum[e] += 0.0f;
}

// Larger float, larger key: NaN 1, numbers up to 0xff800000, so none is the word that means empty. 0 is left for what
// may not be chosen.
MEGAGEN_DEVICE u32 order_key(float x) {
    const u32 bits = __float_as_uint(x);
    const u32 key = bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
    return x != x ? 1 : key;
}

// Four fp32 weights, loaded where this stands. A load of constants may be moved, out of a loop over tokens or up to
// where registers are wanted for other things.
MEGAGEN_DEVICE float4 load_here(const u8* p) {
    const uint4 v = ptx::ld_global_v4(p);
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// 1 + w of eight consecutive elements; gains are kept as the checkpoint has them.
MEGAGEN_DEVICE void load_gain(const u8* base, u32 element, float (&gain)[8]) {
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const float4 x = load_here(base + (element + 4 * h) * 4);
        gain[4 * h] = 1.0f + x.x, gain[4 * h + 1] = 1.0f + x.y, gain[4 * h + 2] = 1.0f + x.z,
                 gain[4 * h + 3] = 1.0f + x.w;
    }
}

MEGAGEN_DEVICE float warp_sum(float x) {
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kFullMask, x, d);
    return x;
}

// Sums of several values at once, in the tree of warp_sum: at each of the first steps a lane hands half of them over
// and keeps the other half. Lane l is left with the sum of value l / (32 / kN). kLeast: only over lanes as far apart as
// that, so as many sums as that of each value.
template <u32 kN, u32 kLeast = 1>
MEGAGEN_DEVICE float warp_sums(const float (&x)[kN], u32 lane) {
    static_assert((kN & (kN - 1)) == 0 && kN * kLeast <= 32, "halves of halves");
    float y[kN];
#pragma unroll
    for (u32 i = 0; i < kN; ++i) y[i] = x[i];
#pragma unroll
    for (u32 d = 16, n = kN / 2; d >= kLeast; d /= 2, n /= 2) {
        const bool upper = (lane & d) != 0;
        if (n == 0) y[0] += __shfl_xor_sync(kFullMask, y[0], d);
#pragma unroll
        for (u32 i = 0; i < n; ++i) {
            const float kept = upper ? y[i + n] : y[i], given = upper ? y[i] : y[i + n];
            y[i] = kept + __shfl_xor_sync(kFullMask, given, d);
        }
    }
    return y[0];
}

// Sums kN values over the eight warps of a group, ascending. x[0] becomes a sum: in lane l that of value l / (32 / kN),
// so that what follows of each sum is done once and not by every lane. `round` counts calls on this barrier; scratch
// holds two rounds of 8 x kN floats, so that a fast warp cannot overwrite what a slow one still reads. A rehearsal may
// store: what a warp writes nobody reads before that warp has arrived.
// `meanwhile` runs once this warp's part is on its way: loads before it would hold up the shuffles.
template <class Group, u32 kN, class Ctx, class Meanwhile>
MEGAGEN_DEVICE bool group_sum(Ctx& ctx, u32 scratch, u32 warp, u32 round, float (&x)[kN], Meanwhile meanwhile) {
    const u32 mine = scratch + (round % 2 * kN + ctx.lane / (32 / kN)) * (kSlices * 4);
    const float sum = warp_sums(x, ctx.lane);
    if (ctx.lane % (32 / kN) == 0) ptx::st_shared_f32(mine + warp * 4, sum);
    Barrier<Group>::arrive(ctx, 0);
    meanwhile();
    if (!Barrier<Group>::wait(ctx, 0, round & 1)) return false;
    const float4 low = ptx::ld_shared_f4(mine, ctx.dry), high = ptx::ld_shared_f4(mine + 16, ctx.dry);
    x[0] = ((((((low.x + low.y) + low.z) + low.w) + high.x) + high.y) + high.z) + high.w;
    return true;
}
template <class Group, u32 kN, class Ctx>
MEGAGEN_DEVICE bool group_sum(Ctx& ctx, u32 scratch, u32 warp, u32 round, float (&x)[kN]) {
    return group_sum<Group>(ctx, scratch, warp, round, x, [] {});
}

} // namespace megagen
