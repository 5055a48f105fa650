// Per-expert norm and weighted sum, 256 columns of a token a warp. See megagen/ops/combine.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>
#include <megagen/ops/top_k.cuh>

namespace megagen::ops {

template <class Op>
concept CombinePolicy = requires {
    Op::kWidth;
    Op::kTopK;
    Op::kEps;
    Op::kParts;
    typename Op::In;
    typename Op::Routes;
    typename Op::Table;
    typename Op::Moments;
    typename Op::Out;
    &Op::gain;
};

template <CombinePolicy Op>
struct Combine {
    static constexpr u32 kWarps = 8;
    static constexpr u32 kColumns = 32 * 8; // of a unit: of each slot a vector of bf16 a lane
    static constexpr u32 kPieces = Op::kWidth / kColumns;
    static constexpr u32 kTopK = Op::kTopK;
    static constexpr u32 kRow = kTopK / 4;                      // vectors of a piece's sums
    static constexpr u32 kVectors = (kPieces * kRow + 31) / 32; // of a token's sums, a lane
    static_assert(Op::kWidth % kColumns == 0, "a row is whole pieces");
    static_assert(kTopK == 4 || kTopK == 8 || kTopK == 16, "four sums are a vector, and lanes share them evenly");

    // Sends a piece's sum of squares of each slot.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void measure(Ctx& ctx) {
        const Range mine = share(ctx);
        const u32 begin = mine.first + ctx.warp - kFirstWarp;
        if (begin >= mine.last || !Op::Table::wait(ctx) || !Op::In::wait(ctx)) return;
#pragma unroll 1
        for (u32 unit = begin; unit < mine.last; unit += kWarps) {
            float gain[8];
            load_gain(Op::gain(ctx.p), first_of(ctx, unit), gain);
            uint4 x[kTopK]; // bf16 pairs
            if (!read_slots<false>(ctx, unit, x)) return;
            float square[kTopK];
#pragma unroll
            for (u32 s = 0; s < kTopK; ++s) square[s] = scaled_square(x[s], gain);
            // The first lanes of runs of 32 / kRow get four slots each.
            constexpr u32 kRun = 32 / kRow;
            const float own = warp_sums(square, ctx.lane);
            u32 word[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                word[i] = __float_as_uint(__shfl_sync(kFullMask, own, ctx.lane / kRun * kRun + i * (32 / kTopK)));
            if (ctx.lane % kRun == 0)
                Op::Moments::send(ctx, unit, ctx.lane / kRun * 4, uint4{word[0], word[1], word[2], word[3]});
            Op::Moments::publish(ctx);
        }
    }

    // The same units: what they read has come, so that asking again takes no longer than the others' sums do.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void compute(Ctx& ctx) {
        const Range mine = share(ctx);
        const u32 begin = mine.first + ctx.warp - kFirstWarp;
        if (begin >= mine.last || !Op::Table::wait(ctx) || !Op::Routes::wait(ctx) || !Op::In::wait(ctx)) return;
#pragma unroll 1
        for (u32 unit = begin; unit < mine.last; unit += kWarps) {
            const u32 token = unit / kPieces, first = first_of(ctx, unit);
            // Of the slot whose sum this lane gets.
            const u32 own = ctx.lane % kRow * 4 + ctx.lane / 8;
            uint4 weights[1], x[kTopK];
            const auto route = [&](u32) { return token * 2 * kTopK + kTopK + own / 4 * 4; };
            Op::Routes::template ask<1>(ctx, weights, route);
            float gain[8];
            load_gain(Op::gain(ctx.p), first, gain);
            if (!read_slots<true>(ctx, unit, x) || !Op::Routes::take(ctx, weights, route)) return;
            float square = 0;
            if (!Op::Moments::wait(ctx) || !moments(ctx, token, square)) return;
            const u32 low = own % 2 == 0 ? weights[0].x : weights[0].y,
                      high = own % 2 == 0 ? weights[0].z : weights[0].w;
            const float factor =
                __uint_as_float(own % 4 < 2 ? low : high) * rsqrtf(square * (1.0f / Op::kWidth) + Op::kEps);
            float out[8] = {};
#pragma unroll
            for (u32 s = 0; s < kTopK; ++s) {
                float each[8];
                unpack<8>(x[s], each);
                const float by = __shfl_sync(kFullMask, factor, s % 4 * 8 + s / 4);
#pragma unroll
                for (u32 e = 0; e < 8; ++e) out[e] = fmaf(by, each[e], out[e]);
            }
            const auto pair = [&](u32 e) { return ptx::cvt_bf16x2(out[e] * gain[e], out[e + 1] * gain[e + 1]); };
            Op::Out::send(ctx, token, first, uint4{pair(0), pair(2), pair(4), pair(6)});
            Op::Out::publish(ctx);
        }
    }

    // A block's pieces of tokens, a warp one at a time.
    template <class Ctx>
    MEGAGEN_DEVICE Range share(const Ctx& ctx) {
        return ctx.rounds(share_of(ctx.tokens * kPieces, ctx.block, Ctx::Kernel::kBlocks), kWarps);
    }

    template <class Ctx>
    MEGAGEN_DEVICE u32 first_of(const Ctx& ctx, u32 unit) {
        return unit % kPieces * kColumns + ctx.lane * 8;
    }

    // The lane's sum of (x * gain)^2.
    MEGAGEN_DEVICE float scaled_square(uint4 x, const float (&gain)[8]) {
        float each[8], square = 0;
        unpack<8>(x, each);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) {
            const float scaled = each[e] * gain[e];
            square = fmaf(scaled, scaled, square);
        }
        return square;
    }

    // Sums of squares over a token's row: lane l gets that of slot l % kRow * 4 + l / 8. A piece's vectors are in
    // neighbouring lanes, and those of piece i also hold piece i + 32 / kRow and so on.
    template <class Ctx>
    MEGAGEN_DEVICE bool moments(Ctx& ctx, u32 token, float& square) {
        uint4 v[kVectors];
        const u32 at = token * kPieces * kTopK + ctx.lane * 4;
        const auto wanted = [&](u32 i) { return 32 * i + ctx.lane < kPieces * kRow; };
        if (!Op::Moments::read_where(ctx, v, wanted, [=](u32 i) { return static_cast<u64>(at) + i * 128; }))
            return false;
        float m[4];
        unpack<4>(v[0], m);
#pragma unroll
        for (u32 i = 1; i < kVectors; ++i) {
            float x[4];
            unpack<4>(v[i], x);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) m[j] += x[j];
        }
        square = warp_sums<4, kRow>(m, ctx.lane);
        return true;
    }

    // A lane's columns of all slots. kCome: they are known to be there.
    template <bool kCome, class Ctx>
    MEGAGEN_DEVICE bool read_slots(Ctx& ctx, u32 unit, uint4 (&x)[kTopK]) {
        const u64 at = static_cast<u64>(unit / kPieces * kTopK * Op::kWidth + first_of(ctx, unit));
        if constexpr (Op::kParts == 1) {
            return Op::In::read(ctx, x, true, [=](u32 s) { return at + s * Op::kWidth; }, !kCome);
        } else {
#pragma unroll
            for (u32 s = 0; s < kTopK; ++s) x[s] = {0, 0, 0, 0};
#pragma unroll 1
            for (u32 s = 0; s < kTopK; ++s) {
                move_down<1>(x);
                if (!sum_parts(ctx, at + s * Op::kWidth, x[kTopK - 1])) return false;
            }
            return true;
        }
    }

    // A vector when K was sharded: the ranks' contributions added in rank order, rounded to bf16 once.
    template <class Ctx>
    MEGAGEN_DEVICE bool sum_parts(Ctx& ctx, u64 element, uint4& to) {
        constexpr u32 kPartStride = Ctx::Kernel::kTokens * kTopK * Op::kWidth;
        uint4 v[Op::kParts];
        if (!Op::In::read(ctx, v, true, [&](u32 part) { return part * kPartStride + element; })) return false;
        float sum[8];
        megagen::sum_parts<Op::kParts>(v, sum);
        to = {ptx::cvt_bf16x2(sum[0], sum[1]), ptx::cvt_bf16x2(sum[2], sum[3]), ptx::cvt_bf16x2(sum[4], sum[5]),
              ptx::cvt_bf16x2(sum[6], sum[7])};
        return true;
    }
};

} // namespace megagen::ops
