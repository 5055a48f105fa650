// Norm and residual gate, then the norm of the result, 256 columns of a token a warp. See megagen/ops/residual.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>

namespace megagen::ops {

template <class Op>
concept ResidualPolicy = requires {
    Op::kWidth;
    Op::kEps;
    Op::kParts;
    typename Op::In;
    typename Op::Stream;
    typename Op::Moments;
    typename Op::Out;
    &Op::gate;
};

// gate(params) points to all alphas, then all betas. Besides: gain(params), where the first norm is input-scaled; and
// for the second norm Normed, kNextEps and next_gain(params).
template <ResidualPolicy Op>
struct Residual {
    static constexpr u32 kWarps = 8;
    static constexpr u32 kColumns = 32 * 8; // of a unit: a vector of bf16 a lane
    static constexpr u32 kPieces = Op::kWidth / kColumns;
    static constexpr u32 kVectors = (kPieces + 31) / 32; // of a token's moments, a lane
    static constexpr bool kScaled = requires { &Op::gain; };
    static constexpr bool kNorms = requires { typename Op::Normed; };
    static constexpr u32 kMoments = kNorms ? 4 : 1;
    static_assert(Op::kWidth % kColumns == 0, "a row is whole pieces");

    // A lane's columns: n is what the branch made, times the norm's gain; s' = kept + r * added, where r is the norm's
    // factor.
    struct Columns {
        float n[8];
        float kept[8];
        float added[8];
    };

    // Sends a piece's part of what a row's two norms follow from: the sums of n^2, of kept^2, of kept * added, of
    // added^2.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void measure(Ctx& ctx) {
        const Range mine = share(ctx);
        const u32 begin = mine.first + ctx.warp - kFirstWarp;
        if (begin >= mine.last || !Op::In::wait(ctx) || !Op::Stream::wait(ctx)) return;
#pragma unroll 1
        for (u32 unit = begin; unit < mine.last; unit += kWarps) {
            Columns x;
            fetch(ctx, unit);
            if (!columns<false>(ctx, unit, x)) return;
            float m[kMoments] = {};
#pragma unroll
            for (u32 e = 0; e < 8; ++e) {
                m[0] = fmaf(x.n[e], x.n[e], m[0]);
                if constexpr (kNorms) {
                    m[1] = fmaf(x.kept[e], x.kept[e], m[1]);
                    m[2] = fmaf(x.kept[e], x.added[e], m[2]);
                    m[3] = fmaf(x.added[e], x.added[e], m[3]);
                }
            }
            sum(ctx, m);
            uint4 v = {__float_as_uint(m[0]), 0, 0, 0};
            if constexpr (kNorms) v.y = __float_as_uint(m[1]), v.z = __float_as_uint(m[2]), v.w = __float_as_uint(m[3]);
            if (ctx.lane == 0) Op::Moments::send(ctx, unit, 0u, v);
            Op::Moments::publish(ctx);
        }
    }

    // The same units: what they read has come, so that asking again takes no longer than the others' moments do.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void compute(Ctx& ctx) {
        const Range mine = share(ctx);
        const u32 begin = mine.first + ctx.warp - kFirstWarp;
        if (begin >= mine.last || !Op::In::wait(ctx) || !Op::Stream::wait(ctx)) return;
#pragma unroll 1
        for (u32 unit = begin; unit < mine.last; unit += kWarps) {
            const u32 token = unit / kPieces, first = first_of(ctx, unit);
            float gain[8];
            if constexpr (kNorms) load_gain(Op::next_gain(ctx.p), first, gain);
            Columns x;
            if (!columns<true>(ctx, unit, x)) return;
            float kept[8], added[8];
            if constexpr (kNorms) {
#pragma unroll
                for (u32 e = 0; e < 8; ++e) kept[e] = x.kept[e] * gain[e], added[e] = x.added[e] * gain[e];
            }
            float m[kMoments];
            if (!Op::Moments::wait(ctx) || !moments(ctx, token, m)) return;
            const float r = rsqrtf(m[0] * (1.0f / Op::kWidth) + Op::kEps);
            // What others wait for comes first.
            if constexpr (kNorms) {
                const float square = fmaf(r * r, m[3], fmaf(2.0f * r, m[2], m[1]));
                const float again = rsqrtf((square < 0.0f ? 0.0f : square) * (1.0f / Op::kWidth) + Op::kNextEps);
                const auto pair = [&](u32 e) {
                    return ptx::cvt_bf16x2(fmaf(added[e], r, kept[e]) * again,
                                           fmaf(added[e + 1], r, kept[e + 1]) * again);
                };
                Op::Normed::send(ctx, token, first, uint4{pair(0), pair(2), pair(4), pair(6)});
                Op::Normed::publish(ctx);
            }
            const auto out = [&](u32 e) { return __float_as_uint(fmaf(x.added[e], r, x.kept[e])); };
#pragma unroll
            for (u32 e = 0; e < 8; e += 4)
                Op::Out::send(ctx, token, static_cast<u64>(first) + e,
                              uint4{out(e), out(e + 1), out(e + 2), out(e + 3)});
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

    // What is wanted after the moments has come from HBM by then.
    template <class Ctx>
    MEGAGEN_DEVICE void fetch(const Ctx& ctx, u32 unit) {
        if constexpr (kNorms) {
            constexpr u32 kBytes = kColumns * 4;
            if (ctx.lane == 0 && !ctx.dry)
                ptx::bulk_prefetch_l2(Op::next_gain(ctx.p) + unit % kPieces * kBytes, kBytes);
        }
    }

    // kCome: what the branch made is known to be there. The rest has been there for long, and is on its way before that
    // is waited for.
    template <bool kCome, class Ctx>
    MEGAGEN_DEVICE bool columns(Ctx& ctx, u32 unit, Columns& x) {
        constexpr u64 kPartStride = static_cast<u64>(Ctx::Kernel::kTokens) * Op::kWidth;
        constexpr bool kAsks = kCome || Op::kParts == 1;
        const u32 first = first_of(ctx, unit), row = unit / kPieces * Op::kWidth + first;
        const auto part = [=](u32 i) { return row + i * kPartStride; };
        const auto half = [=](u32 i) { return static_cast<u64>(row) + 4 * i; };
        const u8* gate = Op::gate(ctx.p) + first * 4;
        uint4 v[Op::kParts], s[2];
        if constexpr (kAsks) Op::In::template ask<Op::kParts>(ctx, v, part);
        Op::Stream::template ask<2>(ctx, s, half);
        float alpha[8], beta[8], gain[kScaled ? 8 : 1];
        load(gate, alpha);
        load(gate + Op::kWidth * 4, beta);
        if constexpr (kScaled) load_gain(Op::gain(ctx.p), first, gain);
        if (!Op::Stream::take(ctx, s, half)) return false;
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            float old[4];
            unpack<4>(s[h], old);
#pragma unroll
            for (u32 e = 0; e < 4; ++e) x.kept[4 * h + e] = old[e] * alpha[4 * h + e];
        }
        if constexpr (kAsks) {
            if (!Op::In::take(ctx, v, part)) return false;
        } else {
            if (!Op::In::read(ctx, v, true, part)) return false;
        }
        if constexpr (Op::kParts == 1)
            unpack<8>(v[0], x.n);
        else
            sum_parts<Op::kParts>(v, x.n);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) {
            if constexpr (kScaled) x.n[e] *= gain[e];
            x.added[e] = x.n[e] * beta[e];
        }
        return true;
    }

    // Eight consecutive fp32 weights.
    MEGAGEN_DEVICE void load(const u8* from, float (&to)[8]) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const float4 w = load_here(from + 16 * h);
            to[4 * h] = w.x, to[4 * h + 1] = w.y, to[4 * h + 2] = w.z, to[4 * h + 3] = w.w;
        }
    }

    // A token's moments: lane i adds those of pieces i, i + 32 and so on.
    template <class Ctx>
    MEGAGEN_DEVICE bool moments(Ctx& ctx, u32 token, float (&m)[kMoments]) {
        uint4 v[kVectors];
        const u32 at = (token * kPieces + ctx.lane) * 4;
        const auto wanted = [&](u32 i) { return 32 * i + ctx.lane < kPieces; };
        if (!Op::Moments::read_where(ctx, v, wanted, [=](u32 i) { return static_cast<u64>(at) + i * 128; }))
            return false;
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            float x[4];
            unpack<4>(v[i], x);
#pragma unroll
            for (u32 j = 0; j < kMoments; ++j) m[j] = i == 0 ? x[j] : m[j] + x[j];
        }
        sum(ctx, m);
        return true;
    }

    // Over lanes, in all of them.
    template <class Ctx>
    MEGAGEN_DEVICE void sum(const Ctx& ctx, float (&m)[kMoments]) {
        const float own = warp_sums(m, ctx.lane);
#pragma unroll
        for (u32 j = 0; j < kMoments; ++j)
            m[j] = kMoments == 1 ? own : __shfl_sync(kFullMask, own, j * (32 / kMoments));
    }
};

} // namespace megagen::ops
