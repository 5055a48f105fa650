// Attention over a growing cache, up to 16 tokens at once: spans of keys and values pass through the block's ring, each
// once, and a warp a query head reads them there. See megagen/ops/global_attention.py.
//
// Bytes: 256 a number and kv head, from HBM once. An H200's SM gets a stage of 128 numbers in 0.94 us, 1,900 clk. The
// attend warps are slower: each reads the stage from shared memory, 2,048 clk for eight, in which a scheduler's two
// warps issue 1,300 instructions, 272 HMMA of 6.5 to 9.3 clk among them. So a warp never waits where it could work on
// the next chunk.
//
// Hopper's warpgroups multiply from shared memory: eight heads of 16 tokens are the 128 rows of two, a stage's products
// take 1,024 clk of the tensor cores, and nothing passes through registers but scores and weights.
#pragma once

#include <megagen/ops/attention_tile.cuh>
#include <megagen/ops/stream.cuh>

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MEGAGEN_WARPGROUPS
#include <megagen/ptx/wgmma.cuh>
#endif

namespace megagen::ops {

template <class Op>
concept GlobalAttentionPolicy = requires {
    Op::kHeads;
    Op::kKvHeads;
    Op::kCapacity;
    Op::kSpans;
    Op::kScale;
    Op::kEps;
    Op::kStageBytes;
    Op::kHint;
    Op::kWarpgroups;
    Op::kScratch;
    typename Op::Q;
    typename Op::Gate;
    typename Op::Keys;
    typename Op::Values;
    typename Op::Partials;
    typename Op::Out;
};

// Stretches of a cache whose keys are summed on their own, counted in chunks: 64 of four, then 32 for each doubling.
// Mirrored by megagen/ops/global_attention.py.
struct Spans {
    static constexpr u32 kFirst = 64;  // spans of
    static constexpr u32 kChunks = 4;  // chunks
    static constexpr u32 kOctave = 32; // spans of a doubling
    static constexpr u32 kBase = kFirst * kChunks;

    MEGAGEN_DEVICE u32 size(u32 i) { return i < kFirst ? kChunks : kBase / kOctave << (i - kFirst) / kOctave; }
    MEGAGEN_DEVICE u32 start(u32 i) {
        if (i < kFirst) return i * kChunks;
        return (kBase + (i - kFirst) % kOctave * (kBase / kOctave)) << (i - kFirst) / kOctave;
    }
    MEGAGEN_DEVICE u32 of(u32 chunk) {
        if (chunk < kBase) return chunk / kChunks;
        const u32 octave = 31 - __clz(static_cast<int>(chunk / kBase));
        return kFirst + octave * kOctave + ((chunk >> octave) - kBase) / (kBase / kOctave);
    }
};

// A block's share of units, which are a kv head and a span each. All live ones stand in one row, measured in chunks:
// spans descending, of each its kv heads. So their sizes descend too, and as these are powers of two, a unit stands at
// a multiple of its size. The last span, which is as long as the sequence has it, stands first and takes as much room
// as the largest of all. The row is cut into one bin a block, of a multiple of the largest size: no unit lies across a
// cut.
template <u32 kKvHeads, u32 kBlocks>
struct SpanUnits {
    u32 span;   // this unit's
    u32 head;   // and its kv head
    u32 chunks; // of the last span, rounded up to whole stages
    u32 last;   // the last span
    u32 room;   // of the last span
    u32 at;     // this unit's place in the row
    u32 end;    // of this block's bin
    bool any;

    template <class Ctx>
    __device__ __forceinline__ explicit SpanUnits(const Ctx& ctx) {
        const u32 all = (ctx.context + ctx.tokens - 1) / kKeyChunk + 1;
        last = Spans::of(all - 1);
        const u32 before = Spans::start(last);
        chunks = (all - before + 1) & ~1u;
        u32 shift = chunks > 2 ? 32 - __clz(static_cast<int>(chunks - 1)) : 1;
        const u32 larger = last == 0 ? 0 : 31 - __clz(static_cast<int>(Spans::size(last - 1)));
        shift = shift > larger ? shift : larger;
        room = 1u << shift;
        const u32 row = kKvHeads * (room + before);
        const u32 bin = (((row + kBlocks - 1) / kBlocks + room - 1) >> shift) << shift;
        at = ctx.block * bin;
        end = at + bin < row ? at + bin : row;
        any = at < end;
        span = last, head = at >> shift;
        if (any && head >= kKvHeads) {
            const u32 back = at - kKvHeads * room; // units of whole spans before this one, from the last to the first
            span = Spans::of(before - 1 - back / kKvHeads);
            head = (back - kKvHeads * (before - Spans::start(span + 1))) / Spans::size(span);
        }
    }

    // Of this unit, in chunks of its kv head's cache.
    __device__ __forceinline__ u32 begin() const { return Spans::start(span); }
    __device__ __forceinline__ u32 count() const { return span == last ? chunks : Spans::size(span); }

    __device__ __forceinline__ void next() {
        at += span == last ? room : Spans::size(span);
        any = at < end;
        if (++head == kKvHeads) head = 0, --span;
    }
};

// Partials: rows (span, head, token) of 64 weighted sums of V, then the largest score and the sum of weights.
template <GlobalAttentionPolicy Op>
struct GlobalAttention : AttentionTile {
    static constexpr u32 kWarps = 8;
    static constexpr u32 kGroup = Op::kHeads / Op::kKvHeads;
    static constexpr u32 kWidth = Op::kHeads * kHeadDim;
    static constexpr u32 kStageChunks = 2;
    static constexpr u32 kChunkBytes = kKeyChunk * kHeadDim * 2;   // of keys, and of values
    static constexpr u32 kSideBytes = kStageChunks * kChunkBytes;  // in a stage
    static constexpr u32 kTogether = Op::kWarpgroups != 0 ? 4 : 1; // warps that multiply as one
    static constexpr u32 kHeadChunks = Op::kCapacity / kKeyChunk;  // of a kv head's cache
    static_assert(Op::kHeads % Op::kKvHeads == 0 && kGroup <= kWarps, "a warp a query head");
    static_assert(Op::kCapacity % (kStageChunks * kKeyChunk) == 0, "whole stages");
    static_assert(Op::kStageBytes == 2 * kSideBytes, "a stage is keys and values of two chunks");
    static_assert(!Op::Partials::kClustered, "partial results are read by other blocks");

    template <class Ctx>
    using Units = SpanUnits<Op::kKvHeads, Ctx::Kernel::kBlocks>;

    // The producer: for each of the block's units its stages, ascending.
    template <u32 kFirst, u32 kLast, u32 kInFlight, class Ctx>
    MEGAGEN_DEVICE void load(Ctx& ctx) {
        static_assert(kFirst == 0 && kLast == kWhole, "a stream of tensors comes in one piece");
        constexpr Hint kHint = static_cast<Hint>(Op::kHint);
        ctx.look();
        bool attached = false;
        const u64 policy = cache_policy<kHint>();
#pragma unroll 1
        for (Units<Ctx> unit(ctx); unit.any; unit.next()) {
            const u32 first = unit.head * kHeadChunks + unit.begin();
            if (!await_keys<Op>(ctx, (unit.begin() + unit.count()) * kKeyChunk, attached)) return;
#pragma unroll 1
            for (u32 c = 0; c < unit.count(); c += kStageChunks) {
                const u64 element = static_cast<u64>(first + c) * (kKeyChunk * kHeadDim);
                const Piece pieces[2] = {{Op::Keys::address(ctx, element), kSideBytes},
                                         {Op::Values::address(ctx, element), kSideBytes}};
                if (!Ctx::Ring::template load<kInFlight, kHint>(ctx, pieces, policy)) return;
            }
        }
    }

    // Which of the launch's tokens this lane's rows see, g and g + 8.
    struct Rows {
        u32 ancestors[2];

        template <class Ctx>
        __device__ __forceinline__ explicit Rows(const Ctx& ctx)
            : ancestors{ctx.ancestors(ctx.lane / 4), ctx.ancestors(ctx.lane / 4 + 8)} {}
    };

    // Of a head, for rows g and g + 8.
    struct Sums {
        float most[2] = {__uint_as_float(kNone), __uint_as_float(kNone)}; // largest score
        float o[kTiles][4] = {};                                          // weighted values
        float weights[4] = {};                                            // their weights: a tile of equal columns
    };

    // Of rows g (0, 1) and g + 8 (2, 3) with keys 8 n + 2 t and the next of a chunk.
    struct Scores {
        float s[kTiles][4];
        float most[2]; // the largest so far, these included
    };

    // Warps kFirstWarp .. kFirstWarp + 7, each a query head of the unit's kv head. Where fewer share it, the other
    // warps hand the stages on.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void attend(Ctx& ctx) {
        static_assert(Op::kWarpgroups == 0 || kFirstWarp % 4 == 0, "whole warpgroups");
        Meeting meeting;
        u32 done = 0;
        bool ok = attend_all(ctx, ctx.warp - kFirstWarp, meeting, done);
        if constexpr (Op::kWarpgroups != 0) ok = meeting.agree(ctx, ok);
        if (ok) Op::Partials::publish(ctx, done);
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool attend_all(Ctx& ctx, u32 warp, Meeting& meeting, u32& done) {
        if (!Op::Q::wait(ctx)) return false;
        const Rows rows(ctx);
        Units<Ctx> unit(ctx);
        const u32 dead =
            (Op::kSpans - unit.last - 1) * Op::kHeads; // nobody works on these, and their readers count them
        const Range idle = share_of(dead, ctx.block * kWarps + warp, Ctx::Kernel::kBlocks * kWarps);
        done = idle.last - idle.first;
#pragma unroll 1
        for (; unit.any; unit.next()) {
            if (warp / kTogether < (kGroup + kTogether - 1) / kTogether) {
                if (!attend(ctx, rows, unit, warp, meeting)) return false;
                done += warp < kGroup ? 1 : 0;
            } else if (!hand_on(ctx, unit.count())) {
                return false;
            }
        }
        return true;
    }

    // So many chunks.
    template <class Ctx>
    MEGAGEN_DEVICE bool hand_on(Ctx& ctx, u32 chunks) {
#pragma unroll 1
        for (u32 c = 0; c < chunks; c += kStageChunks) {
            if (!Ctx::Ring::acquire(ctx)) return false;
            Ctx::Ring::release(ctx);
        }
        return true;
    }

    // Warp `warp` of the attending ones has that head of the unit's kv head, or only helps the others of its warpgroup.
    template <class Ctx>
    MEGAGEN_DEVICE bool attend(Ctx& ctx, const Rows& rows, const Units<Ctx>& unit, u32 warp, Meeting& meeting) {
        const u32 head = unit.head * kGroup + warp;
        const bool has = kGroup % kTogether == 0 || warp < kGroup;
        u32 a[2][kWords] = {}, start = unit.begin() * kKeyChunk, left = unit.count();
        bool ok = !has || queries(ctx, head, a);
        Sums sums;
#ifdef MEGAGEN_WARPGROUPS
        if constexpr (Op::kWarpgroups != 0) ok = together(ctx, a, start, left, sums, meeting, ok);
#else
        static_assert(Op::kWarpgroups == 0, "only sm_90a has products of a warpgroup");
#endif
        if (!ok) return false;
        if (!has) return hand_on(ctx, left);
        if (left > 0 && !alone(ctx, rows, a, start, left, sums)) return false;
        const float sum[2] = {sums.weights[0], sums.weights[2]};
        send_partials(ctx, (unit.span * Op::kHeads + head) * Ctx::Kernel::kTokens, sums.o, sums.most, sum);
        return true;
    }

    // `left` chunks from number `start`. While a chunk's scores become weights, those of the next one are multiplied;
    // while its values are, the largest of the next scores is found: a scheduler has two of these warps, too few to
    // hide what each waits for. Behind the last chunk come scores of its stage once more, which nobody uses.
    template <class Ctx>
    MEGAGEN_DEVICE bool alone(Ctx& ctx, const Rows& rows, const u32 (&a)[2][kWords], u32 start, u32 left, Sums& sums) {
        if (!Ctx::Ring::acquire(ctx)) return false;
        Scores even = {}, odd;
        score(ctx, a, Ctx::Ring::stage(ctx), 0, even);
        score(ctx, a, Ctx::Ring::stage(ctx), 1, even);
        if (start + kKeyChunk > ctx.context) hide(ctx, rows, start, even);
#pragma unroll
        for (u32 h = 0; h < 2; ++h) even.most[h] = quad_max(most_of(even.s, h, sums.most[h]));
#pragma unroll 1
        for (; left > 0; left -= kStageChunks) {
            const u32 stage = Ctx::Ring::stage(ctx), values = stage + kSideBytes;
            fold(ctx, rows, a, start, values, even, stage + kChunkBytes, odd, sums);
            u32 next = stage;
            if (left > kStageChunks && !Ctx::Ring::acquire_next(ctx, next)) return false;
            fold(ctx, rows, a, start + kKeyChunk, values + kChunkBytes, odd, next, even, sums);
            float consumed = 0; // every product of values is in it, and theirs are weights of all keys
#pragma unroll
            for (u32 d = 0; d < kTiles; ++d) consumed += sums.o[d][0];
            Ctx::Ring::release(ctx, consumed);
            start += kStageChunks * kKeyChunk;
        }
        return true;
    }

#ifdef MEGAGEN_WARPGROUPS
    // The stages that every token sees whole, by four warps' products. While these do arithmetic, the other four's
    // products have the tensor cores; and while a chunk's values are multiplied, its neighbour's scores become weights,
    // as far as ptxas lets them: a branch between a product and its wait makes it serialize all products. The sums have
    // the terms of those of `alone`, instruction by instruction.
    template <class Ctx>
    MEGAGEN_DEVICE bool together(Ctx& ctx, const u32 (&a)[2][kWords], u32& start, u32& left, Sums& sums,
                                 Meeting& meeting, bool ok) {
        constexpr u32 kNumbers = kStageChunks * kKeyChunk;
        const u32 seen = start < ctx.context ? (ctx.context - start) / kNumbers : 0;
        const u32 chunks = kStageChunks * (seen < left / kStageChunks ? seen : left / kStageChunks);
        if (chunks == 0) return ok;
        if (!meeting.agree(ctx, ok && Ctx::Ring::acquire(ctx))) return false;
        Scores now;
        u32 p[kTiles][2];
        u32 stage = Ctx::Ring::stage(ctx);
        ptx::wgmma_fence();
        product(now.s, left_of(a), stage, false);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(now.s);
        weigh(now, sums);
        take(now, sums, p);
#pragma unroll 1
        for (u32 c = 1; c < chunks; ++c) {
            u32 keys = stage + kChunkBytes, values = stage + kSideBytes;
            const bool crosses = c % kStageChunks == 0; // into the next stage
            if (crosses) {
                values += kChunkBytes;
                if (!meeting.agree(ctx, Ctx::Ring::acquire_next(ctx, keys))) return false;
            }
            ptx::wgmma_pin(sums.o);
            ptx::wgmma_hold(p);
            ptx::wgmma_fence();
            product(now.s, left_of(a), keys, false);
            ptx::wgmma_commit();
            product(sums.o, left_of(p), values, true);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            ptx::wgmma_pin(now.s);
            weigh(now, sums);
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(sums.o);
            ptx::wgmma_hold(p);
            if (crosses) {
                Ctx::Ring::release(ctx);
                stage = keys;
            }
            take(now, sums, p);
        }
        ptx::wgmma_pin(sums.o);
        ptx::wgmma_hold(p);
        ptx::wgmma_fence();
        product(sums.o, left_of(p), stage + kSideBytes + kChunkBytes, true);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(sums.o);
        ptx::wgmma_hold(p);
        Ctx::Ring::release(ctx);
        start += chunks * kKeyChunk;
        left -= chunks;
        return true;
    }

    // By a chunk of keys or of transposed values: pieces of 128 bytes are core matrices, eight of them in a row.
    template <class Left>
    MEGAGEN_DEVICE void product(float (&d)[kTiles][4], Left a, u32 chunk, bool accumulate) {
        constexpr u32 kBytes = kPiece * 2;
        const u64 b = ptx::wgmma_descriptor(chunk, kBytes, kTiles * kBytes);
#pragma unroll
        for (u32 j = 0; j < kSteps; ++j)
            ptx::wgmma_m64n64k16_bf16(d, a(j, 0), a(j, 1), a(j, 2), a(j, 3), b + j * 2 * kBytes / 16,
                                      accumulate || j > 0);
    }

    // Scores become weights, in place.
    MEGAGEN_DEVICE void weigh(Scores& now, const Sums& sums) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            now.most[h] = quad_max(most_of(now.s, h, sums.most[h]));
            float most = sums.most[h];
            const Shift shift = bring<Op>(most, now.most[h]);
#pragma unroll
            for (u32 n = 0; n < kTiles; ++n) {
                now.s[n][2 * h] = power<Op>(now.s[n][2 * h], shift.by);
                now.s[n][2 * h + 1] = power<Op>(now.s[n][2 * h + 1], shift.by);
            }
        }
    }

    // And join the sums so far, in which all values before them are.
    MEGAGEN_DEVICE void take(const Scores& now, Sums& sums, u32 (&p)[kTiles][2]) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            fade(sums, h, bring<Op>(sums.most[h], now.most[h]).keep);
#pragma unroll
            for (u32 n = 0; n < kTiles; ++n) p[n][h] = ptx::cvt_bf16x2(now.s[n][2 * h], now.s[n][2 * h + 1]);
        }
        add_weights(p, sums);
    }
#endif

    MEGAGEN_DEVICE void fade(Sums& sums, u32 h, float keep) {
#pragma unroll
        for (u32 e = 2 * h; e < 2 * h + 2; ++e) {
            sums.weights[e] *= keep;
#pragma unroll
            for (u32 n = 0; n < kTiles; ++n) sums.o[n][e] *= keep;
        }
    }

    MEGAGEN_DEVICE void add_weights(const u32 (&p)[kTiles][2], Sums& sums) {
        const auto weights = left_of(p);
#pragma unroll
        for (u32 j = 0; j < kSteps; ++j)
            ptx::mma_m16n8k16_bf16(sums.weights, weights(j, 0), weights(j, 1), weights(j, 2), weights(j, 3), kOnes,
                                   kOnes);
    }

    // Both of this lane's tokens' queries of a head, dims 8 i + 2 t and the next in word i. Zeros past the launch's
    // tokens.
    template <class Ctx>
    MEGAGEN_DEVICE bool queries(Ctx& ctx, u32 head, u32 (&a)[2][kWords]) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const u32 token = ctx.lane / 4 + 8 * h, first = token * kWidth + head * kHeadDim;
            uint4 q[kWords];
            if (!Op::Q::read(ctx, q, token < ctx.tokens, [=](u32 i) { return first + i * 8; })) return false;
            own_words(ctx, q, a[h]);
        }
        return true;
    }

    // A head's sums, as rows first + token of the partial results. Of each two tiles n and n + 1 a lane has dims 2 t
    // and the next. Two lanes swap, so that the even one has four in a row of tile n, and the odd one of tile n + 1.
    template <class Ctx>
    MEGAGEN_DEVICE void send_partials(Ctx& ctx, u32 first, float (&o)[kTiles][4], const float (&most)[2],
                                      const float (&sum)[2]) {
        const u32 g = ctx.lane / 4, t = ctx.lane % 4;
        const bool odd = t % 2 != 0;
#pragma unroll
        for (u32 n = 0; n < kTiles; n += 2) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const float got = __shfl_xor_sync(kFullMask, odd ? o[n][i] : o[n + 1][i], 1);
                o[n][i] = odd ? got : o[n][i];
                o[n + 1][i] = odd ? o[n + 1][i] : got;
            }
        }
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const u32 token = g + 8 * h, row = first + token;
            if (token >= ctx.tokens) break;
            const auto word = [&](u32 n, u32 i) { return __float_as_uint(o[n][2 * h + i]); };
#pragma unroll
            for (u32 n = 0; n < kTiles; n += 2)
                Op::Partials::send(ctx, row, 8 * (n + t % 2) + t / 2 * 4,
                                   uint4{word(n, 0), word(n, 1), word(n + 1, 0), word(n + 1, 1)});
            if (t == 0)
                Op::Partials::send(ctx, row, kHeadDim, uint4{__float_as_uint(most[h]), __float_as_uint(sum[h]), 0, 0});
        }
    }

    template <class Ctx>
    MEGAGEN_DEVICE void score(const Ctx& ctx, const u32 (&a)[2][kWords], u32 keys, u32 half, Scores& to) {
        uint4 k[kTiles];
        fragments(ctx, keys, half, k);
        multiply(to.s, half, left_of(a), k, 0);
    }

    // Of a chunk from number `start` what a token does not see.
    template <class Ctx>
    MEGAGEN_DEVICE void hide(const Ctx& ctx, const Rows& rows, u32 start, Scores& of) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 own = seen(ctx, 0, rows.ancestors[h], start + half * 32) >> 2 * (ctx.lane % 4);
#pragma unroll
                for (u32 i = 0; i < kTiles; ++i) { // keys 8 (i / 2) + i % 2
                    if ((own >> (i / 2 * 8 + i % 2) & 1) == 0)
                        of.s[half * kTiles / 2 + i / 2][2 * h + i % 2] = __uint_as_float(kNone);
                }
            }
        }
    }

    // Values whose numbers nobody sees may be anything, and a weight of zero does not help against a NaN. Those before
    // `end` are seen; word i of a tile has numbers start + 8 i + 2 t and the next.
    template <class Ctx>
    MEGAGEN_DEVICE void drop_unseen(const Ctx& ctx, u32 start, u32 end, uint4 (&v)[kTiles]) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 kept = before(start + half * 32, end) >> 2 * (ctx.lane % 4);
            const auto keep = [=](u32 i) { return (kept >> 8 * i & 1) * 0xffffu | (kept >> 8 * i & 2) * 0x7fff8000u; };
            const u32 mask[4] = {keep(0), keep(1), keep(2), keep(3)};
#pragma unroll
            for (u32 i = half; i < kTiles; i += 2)
                v[i].x &= mask[0], v[i].y &= mask[1], v[i].z &= mask[2], v[i].w &= mask[3];
        }
    }

    // One more chunk, of numbers from `start`, into a head's running sums: its values are at `values` in shared memory.
    // And the next chunk's scores, whose keys are at `keys`. A row that sees none of a chunk keeps its sums to the last
    // bit. Masks branch, and over these nothing is moved: what is between two of them is meant to overlap.
    template <class Ctx>
    MEGAGEN_DEVICE void fold(const Ctx& ctx, const Rows& rows, const u32 (&a)[2][kWords], u32 start, u32 values,
                             const Scores& now, u32 keys, Scores& next, Sums& sums) {
        const u32 after = start + kKeyChunk, end = ctx.context + ctx.tokens;
        const bool edge = after + kKeyChunk > ctx.context; // somebody does not see all of the two
        next = {};
        score(ctx, a, keys, 0, next);
        u32 p[kTiles][2];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const Shift shift = bring<Op>(sums.most[h], now.most[h]);
#pragma unroll
            for (u32 n = 0; n < kTiles; ++n)
                p[n][h] =
                    ptx::cvt_bf16x2(power<Op>(now.s[n][2 * h], shift.by), power<Op>(now.s[n][2 * h + 1], shift.by));
            fade(sums, h, shift.keep);
        }
        score(ctx, a, keys, 1, next);
        const auto weights = left_of(p);
        add_weights(p, sums);
        if (edge) hide(ctx, rows, after, next);

        uint4 v[kTiles];
        fragments(ctx, values, 0, v);
#pragma unroll
        for (u32 h = 0; h < 2; ++h) next.most[h] = most_of(next.s, h, sums.most[h]);
        if (edge) drop_unseen(ctx, start, end, v);
        multiply(sums.o, 0, weights, v, 0);
#pragma unroll
        for (u32 h = 0; h < 2; ++h) next.most[h] = quad_max(next.most[h]);
        fragments(ctx, values, 1, v);
        if (edge) drop_unseen(ctx, start, end, v);
        multiply(sums.o, 1, weights, v, 0);
    }

    // Four tiles of a chunk, of each eight pieces in a row.
    template <class Ctx>
    MEGAGEN_DEVICE void fragments(const Ctx& ctx, u32 chunk, u32 half, uint4 (&v)[kTiles]) {
        constexpr u32 kBytes = 4 * kPiece * 2;
        const u32 own = chunk + half * kTiles * kBytes + ctx.lane * 16;
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
            u32 r[4];
            ptx::ldmatrix_x4(r, own + i * kBytes);
            v[i] = {r[0], r[1], r[2], r[3]};
        }
    }

    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void merge(Ctx& ctx) {
        const u32 live = Spans::of((ctx.context + ctx.tokens - 1) / kKeyChunk) + 1;
        merge_rows<Op, kFirstWarp, Op::kSpans, false>(ctx, live, [=](u32 span) { return span < live; });
    }
};

} // namespace megagen::ops
