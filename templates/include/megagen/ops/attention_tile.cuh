// What attentions are made of: up to 16 tokens of a head against 64 keys, by MMA. Shared by the attention op kinds.
//
// Caches keep chunks of 64 keys, and of values the transposed, in pieces of 8 rows of 16 bytes: what MMAs read from
// shared memory at once lies together. Piece (r, c) of a chunk has rows 8 r .. and columns 8 c ..; see
// megagen/ops/attention.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>

namespace megagen {

constexpr u32 kHeadDim = 64;  // of queries, keys and values
constexpr u32 kKeyChunk = 64; // keys that the caches keep together; V is transposed within them

namespace ops {

struct AttentionTile {
    static constexpr u32 kTiles = kKeyChunk / 8; // n8 tiles of keys, and of dims
    static constexpr u32 kSteps = kHeadDim / 16; // k16 steps of an MMA over dims, and over keys
    static constexpr u32 kWords = 8;             // 32-bit registers of a lane's 16 consecutive elements
    static constexpr u32 kPiece = 64;            // elements
    static constexpr u32 kPartialRow = kHeadDim + 4;
    static constexpr u32 kNone = 0xff800000u;    // minus infinity
    static constexpr u32 kOnes = 0x3f803f80u;    // of bf16
    static constexpr float kLog2E = 1.44269504f; // of e
    static_assert(kHeadDim == 64 && kKeyChunk == 64, "fragments of four steps and eight tiles");

    // Four warps that work together leave together too: where one gives up, all do, at the next place where they meet,
    // and each comes there in bounded time. How often they meet follows from the step, which all read from the same
    // words: these stay as they are during a launch.
    struct Meeting {
        bool open = true;

        template <class Ctx>
        __device__ __forceinline__ bool agree(Ctx& ctx, bool ok) {
            if (!open) return false;
            __syncwarp(); // who gives up comes from code of one lane
            open = ptx::bar_and(kReady + 1 + ctx.warp / 4, 128, ok);
            ctx.dead |= !open;
            return open;
        }
    };

    // Of a number and a NaN the number: weights tell of the NaN.
    MEGAGEN_DEVICE float larger(float a, float b) { return fmaxf(a, b); }

    // Lanes 4 g .. 4 g + 3 have the parts of row g.
    MEGAGEN_DEVICE float quad_max(float x) {
        x = larger(x, __shfl_xor_sync(kFullMask, x, 1));
        return larger(x, __shfl_xor_sync(kFullMask, x, 2));
    }
    template <u32 kN>
    MEGAGEN_DEVICE void words_of(const uint4 (&v)[kN], u32 first, u32 (&word)[kWords]) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const uint4 x = v[first + i];
            word[4 * i] = x.x, word[4 * i + 1] = x.y, word[4 * i + 2] = x.z, word[4 * i + 3] = x.w;
        }
    }

    // Ones in the places of those of 32 numbers from `first` that come before `end`.
    MEGAGEN_DEVICE u32 before(u32 first, u32 end) {
        const u32 n = end > first ? end - first : 0;
        return n < 32 ? (1u << n) - 1 : ~0u;
    }

    // Which of 32 numbers from `first` a token sees, a bit each, if of those in the caches it sees `oldest` and later.
    template <class Ctx>
    MEGAGEN_DEVICE u32 seen(const Ctx& ctx, u32 oldest, u32 ancestors, u32 first) {
        const u32 old = before(first, ctx.context) & ~before(first, oldest);
        const u32 own = first - ctx.context, ahead = ctx.context - first; // one of them is small, or both are far off
        return old | (own < 32 ? ancestors >> own : ahead < 32 ? ancestors << ahead : 0);
    }

    // The larger of `most` and this lane's scores of row h.
    MEGAGEN_DEVICE float most_of(const float (&s)[kTiles][4], u32 h, float most) {
        float x[kTiles];
#pragma unroll
        for (u32 n = 0; n < kTiles; ++n) x[n] = larger(s[n][2 * h], s[n][2 * h + 1]);
#pragma unroll
        for (u32 d = kTiles / 2; d > 0; d /= 2) {
#pragma unroll
            for (u32 n = 0; n < d; ++n) x[n] = larger(x[n], x[n + d]);
        }
        return larger(most, x[0]);
    }

    // Half of the tiles: four at once hide the MMA's latency, and then their fragments are gone. Registers a(j, 0..3)
    // are of the left side's step j, b[i] and b[i + 1] of tile `half` kTiles / 2 + i / 2.
    template <u32 kN, class Left>
    MEGAGEN_DEVICE void multiply(float (&c)[kTiles][4], u32 half, Left a, const uint4 (&b)[kN], u32 first) {
#pragma unroll
        for (u32 j = 0; j < kSteps; ++j) {
#pragma unroll
            for (u32 i = 0; i < kTiles / 2; ++i) {
                u32 word[kWords];
                words_of(b, first + 2 * i, word);
                ptx::mma_m16n8k16_bf16(c[half * kTiles / 2 + i], a(j, 0), a(j, 1), a(j, 2), a(j, 3), word[2 * j],
                                       word[2 * j + 1]);
            }
        }
    }

    // Left sides: queries, by dims; weights, by keys.
    MEGAGEN_DEVICE auto left_of(const u32 (&q)[2][kWords]) {
        return [&q](u32 j, u32 i) { return q[i % 2][2 * j + i / 2]; };
    }
    MEGAGEN_DEVICE auto left_of(const u32 (&p)[kTiles][2]) {
        return [&p](u32 j, u32 i) { return p[2 * j + i / 2][i % 2]; };
    }

    // Of a row of 64 numbers of 16 bits, what this lane has in a product's operand: word i is elements 8 i + 2 t and
    // the next.
    template <class Ctx>
    MEGAGEN_DEVICE void own_words(const Ctx& ctx, const uint4 (&row)[kWords], u32 (&word)[kWords]) {
        const u32 t = ctx.lane % 4;
#pragma unroll
        for (u32 i = 0; i < kWords; ++i) {
            const u32 low = t % 2 == 0 ? row[i].x : row[i].y, high = t % 2 == 0 ? row[i].z : row[i].w;
            word[i] = t < 2 ? low : high;
        }
    }

    // The producer, before it asks for keys and values whose numbers come before `end`: those that the launch before
    // may have written are there only when that has ended.
    template <class Op, class Ctx>
    MEGAGEN_DEVICE bool await_keys(Ctx& ctx, u32 end, bool& attached) {
        if (attached || ctx.aged(end)) return true;
        attached = true;
        ctx.attach();
        if (ctx.dead || !Op::Keys::wait(ctx) || !Op::Values::wait(ctx)) return false;
        ptx::fence_proxy_async_global(); // threads wrote them, bulk copies read them
        return true;
    }

    // How far four dims' gates are open, those from `dim` of a vector.
    MEGAGEN_DEVICE void opened(uint4 gate, u32 dim, float (&open)[4]) {
        const u32 pair[2] = {dim % 8 ? gate.z : gate.x, dim % 8 ? gate.w : gate.y};
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            open[2 * e] = __fdividef(1.0f, 1.0f + __expf(-bf16_low(pair[e])));
            open[2 * e + 1] = __fdividef(1.0f, 1.0f + __expf(-bf16_high(pair[e])));
        }
    }

    // Four dims of a token's head, which both halves of the warp have: x weighted sums of values, `scale` one over the
    // sum of weights. Normed, gated and sent.
    template <class Op, u32 kWidth, class Ctx>
    MEGAGEN_DEVICE void finish(Ctx& ctx, u32 token, u32 head, float (&x)[4], float scale, const float (&open)[4]) {
        const u32 half = ctx.lane / 16, dim = ctx.lane % 16 * 4;
        float square = 0;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            x[e] *= scale;
            square = fmaf(x[e], x[e], square);
        }
#pragma unroll
        for (u32 d = 8; d > 0; d /= 2) square += __shfl_xor_sync(kFullMask, square, d);
        const float r = rsqrtf(fmaf(square, 1.0f / kHeadDim, Op::kEps));
        u32 word[2];
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            word[e] = ptx::cvt_bf16x2(x[2 * e] * r * open[2 * e], x[2 * e + 1] * r * open[2 * e + 1]);
        }
        const u32 above[2] = {__shfl_xor_sync(kFullMask, word[0], 1), __shfl_xor_sync(kFullMask, word[1], 1)};
        if (half == 0 && ctx.lane % 2 == 0)
            Op::Out::send(ctx, token, head * kHeadDim + dim, uint4{word[0], word[1], above[0], above[1]});
        Op::Out::publish(ctx);
    }

    // The weight of a score, `by` being what is added to it once it is scaled: weights are powers of two.
    template <class Op>
    MEGAGEN_DEVICE float power(float score, float by) {
        return ptx::exp2(fmaf(score, kLog2E * Op::kScale, by));
    }

    // From scores less `most` to scores less `now`, which is not smaller: what sums so far are to be multiplied by, and
    // what is to be added to a scaled score. What stays is multiplied by exactly one.
    struct Shift {
        float keep;
        float by;
    };
    template <class Op>
    MEGAGEN_DEVICE Shift bring(float& most, float now) {
        constexpr float kBinary = kLog2E * Op::kScale;
        const Shift shift = {now == most ? 1.0f : ptx::exp2((most - now) * kBinary),
                             now == __uint_as_float(kNone) ? 0.0f : -(now * kBinary)};
        most = now;
        return shift;
    }

    // The partial results of up to kMost parts of the keys, those that `has` of `parts`, added: what merge roles do.
    //
    // Four warps have a token of a head. Of 64 parts at a time each half of a warp has every eighth, of it four sums a
    // lane, and of the statistics each warp all, lane i those of i and i + 32. All of it is asked for at once. The
    // first of the four adds what the others have; only then nobody reads statistics any more.
    template <class Op, u32 kFirstWarp, u32 kMost, bool kTurned, class Ctx, class Has>
    MEGAGEN_DEVICE void merge_rows(Ctx& ctx, u32 parts, Has has) {
        constexpr u32 kWarps = 8, kTogether = 4, kRows = kWarps / kTogether, kWidth = Op::kHeads * kHeadDim;
        constexpr u32 kAtOnce = kMost < 64 ? kMost : 64, kStats = (kAtOnce + 31) / 32, kSums = (kAtOnce + 7) / 8;
        constexpr u32 kLast = kSums + kStats - 1; // vector, which is polled: the statistics of the first parts
        constexpr bool kOnce = kMost <= 64;
        constexpr u64 kStride = static_cast<u64>(Op::kHeads) * Ctx::Kernel::kTokens * kPartialRow; // from part to part
        const Range mine = ctx.rounds(share_of(ctx.tokens * Op::kHeads, ctx.block, Ctx::Kernel::kBlocks), kRows);
        if (mine.first == mine.last) return;
        Meeting meeting;
        bool ok = Op::Partials::wait(ctx) && Op::Gate::wait(ctx);
        const u32 warp = ctx.warp - kFirstWarp, eighth = 2 * (warp % kTogether) + ctx.lane / 16;
        const u32 dim = ctx.lane % 16 * 4;
#pragma unroll 1
        for (u32 at = mine.first, round = 0; at < mine.last; at += kRows, ++round) {
            const u32 i = at + warp / kTogether, token = i / Op::kHeads, head = i % Op::kHeads;
            const bool valid = i < mine.last;
            uint4 gate[1];
            const u32 gates = token * kWidth + head * kHeadDim + dim / 8 * 8;
            ok = ok && Op::Gate::read(ctx, gate, valid, [=](u32) { return gates; });
            const u64 row = static_cast<u64>(head * Ctx::Kernel::kTokens + token) * kPartialRow;
            const auto stats = [&](u32 first) {
                const u64 own = row + (first + ctx.lane) * kStride + kHeadDim;
                return [=](u32 j) { return own + j * 32 * kStride; };
            };
            const auto counts = [&](u32 part) { return valid && (kOnce || part < parts) && has(part); };
            float most = __uint_as_float(kNone), sum = 0, x[4] = {};
#pragma unroll 1
            for (u32 first = 0; first < (kOnce ? 1 : ctx.rounds(parts, kAtOnce)); first += kAtOnce) {
                const auto stat = stats(first);
                const auto known = [&](u32 j) { return counts(first + 32 * j + ctx.lane); };
                const u64 own = row + (first + eighth) * kStride + dim;
                const auto sums = [=](u32 j) { return own + j * 8 * kStride; };
                const auto wanted = [&](u32 j) { return counts(first + 8 * j + eighth); };
                uint4 v[kSums + kStats];
                ok = ok && Op::Partials::read_where(
                               ctx, v, [&](u32 j) { return j < kSums ? wanted(j) : known(kLast - j); },
                               [&](u32 j) { return j < kSums ? sums(j) : stat(kLast - j); });
                if (!ok) break;
                float now = most, weight[kStats];
#pragma unroll
                for (u32 j = 0; j < kStats; ++j)
                    now = larger(now, known(j) ? __uint_as_float(v[kLast - j].x) : __uint_as_float(kNone));
#pragma unroll
                for (u32 d = 16; d > 0; d /= 2) now = larger(now, __shfl_xor_sync(kFullMask, now, d));
                const Shift shift = bring<Op>(most, now);
                if constexpr (!kOnce) {
                    sum *= shift.keep;
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) x[e] *= shift.keep;
                }
#pragma unroll
                for (u32 j = 0; j < kStats; ++j) {
                    weight[j] = known(j) ? power<Op>(__uint_as_float(v[kLast - j].x), shift.by) : 0.0f;
                    sum = fmaf(weight[j], __uint_as_float(v[kLast - j].y), sum);
                }
#pragma unroll
                for (u32 j = 0; j < kSums; ++j) {
                    const float w = __shfl_sync(kFullMask, weight[j / 4], j % 4 * 8 + eighth);
                    float o[4];
                    unpack<4>(v[j], o);
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) x[e] = fmaf(w, o[e], x[e]);
                }
                if constexpr (!kOnce) Op::Partials::template release_where<kSums>(ctx, wanted, sums);
            }
            const u32 scratch = ctx.shared + Op::kScratch + (round % 2 * kWarps + warp) * (kHeadDim * 4);
            const u32 turn = kTurned ? dim / 8 % 4 : 0; // as attend has them
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                x[e] += __shfl_xor_sync(kFullMask, x[e], 16);
                if (ctx.lane < 16) ptx::st_shared_f32(scratch + (dim + (e ^ turn)) * 4, x[e]);
            }
            if (!meeting.agree(ctx, ok)) return;
            if (warp % kTogether == 0 && valid) {
                add_parts<kTogether>(ctx, scratch + dim * 4, x);
                float open[4];
                opened(gate[0], dim, open);
                finish<Op, kWidth>(ctx, token, head, x, __fdividef(1.0f, warp_sum(sum)), open);
                // Nobody waits for the rest.
#pragma unroll 1
                for (u32 first = 0; first < (kOnce ? 1 : ctx.rounds(parts, kAtOnce)); first += kAtOnce) {
                    Op::Partials::template release_where<kStats>(
                        ctx, [&](u32 j) { return counts(first + 32 * j + ctx.lane); }, stats(first));
                }
            }
            if constexpr (kOnce) {
                const u64 own = row + eighth * kStride + dim;
                Op::Partials::template release_where<kSums>(
                    ctx, [&](u32 j) { return counts(8 * j + eighth); }, [=](u32 j) { return own + j * 8 * kStride; });
            }
        }
    }

    // Four sums of each of kN warps, added in ascending order.
    template <u32 kN, class Ctx>
    MEGAGEN_DEVICE void add_parts(const Ctx& ctx, u32 from, float (&x)[4]) {
#pragma unroll
        for (u32 w = 0; w < kN; ++w) {
            const float4 more = ptx::ld_shared_f4(from + w * (kHeadDim * 4), ctx.dry);
            const float of[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
            for (u32 e = 0; e < 4; ++e) x[e] = w == 0 ? of[e] : x[e] + of[e];
        }
    }
};

} // namespace ops
} // namespace megagen
