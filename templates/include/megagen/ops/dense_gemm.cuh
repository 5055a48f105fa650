// y = x W^T for up to 16 tokens. See megagen/ops/dense_gemm.py for the reduction tree.
#pragma once

#include <megagen/mem/operand.cuh>
#include <megagen/mem/partials.cuh>
#include <megagen/ops/stream.cuh>

namespace megagen::ops {

template <class Op>
concept DenseGemmPolicy = requires {
    Op::kRows;
    Op::kK;
    Op::kUnitK;
    Op::kStageK;
    Op::kFormat;
    Op::kStageBytes;
    Op::kHint;
    Op::kL2Hint;
    typename Op::In;
    &Op::weight;
};

// Besides: Partials, unless one unit spans K; Out and kOutbox then, or Out where there is a finish role. weight(params)
// points to the packed stages.
template <DenseGemmPolicy Op>
struct DenseGemm {
    static constexpr bool kDirect = !requires { typename Op::Partials; };
    static constexpr u32 kRowBlocks = Op::kRows / kRowBlock;
    static constexpr u32 kChunks = Op::kK / Op::kUnitK;
    static constexpr u32 kStages = Op::kUnitK / Op::kStageK;       // of a unit
    static constexpr u32 kGroups = Op::kStageK / kSlices / kGroup; // of a slice of a stage
    using Weights = Format<static_cast<WeightFormat>(Op::kFormat)>;
    static_assert(kRowBlock * Op::kStageK * (Op::kFormat == 1 ? 4 : 2) == Op::kStageBytes, "packing and policy agree");

    template <bool kPartial>
    static __device__ __forceinline__ constexpr bool clustered() {
        if constexpr (kPartial) return Op::Partials::kClustered;
        return false;
    }
    static constexpr bool kClustered = clustered<!kDirect>();

    struct Unit {
        u32 chunk;
        u32 row_block;
    };

    // Units K chunk by K chunk, so that a block's run shares its activations; when partial sums travel within a
    // cluster, the row blocks are dealt to clusters first. Where it costs no block a unit more, a block keeps to one
    // chunk, and some blocks have nothing: activations are read once, not in the middle of a run. In memory stages lie
    // by their K, then by row block: those of a unit are far apart, and those of a run of units of one stage in a row.
    struct Tiles {
        // Blocks that share a chunk, 0 where runs go on from one to the next.
        template <u32 kBlocks>
        MEGAGEN_DEVICE constexpr u32 team() {
            constexpr u32 kTeam = kBlocks / kChunks;
            if constexpr (kTeam == 0) return 0;
            constexpr u32 kAlone = kTeam == 0 ? 0 : (kRowBlocks + kTeam - 1) / (kTeam == 0 ? 1 : kTeam);
            return kAlone <= (kRowBlocks * kChunks + kBlocks - 1) / kBlocks ? kTeam : 0;
        }

        template <class Ctx>
        MEGAGEN_DEVICE Range row_blocks(const Ctx& ctx) {
            if constexpr (kClustered) return Op::Partials::cluster_share(ctx);
            return {0, kRowBlocks};
        }

        template <class Ctx>
        MEGAGEN_DEVICE Range run(const Ctx& ctx) {
            using K = typename Ctx::Kernel;
            if constexpr (kClustered) {
                const Range r = row_blocks(ctx);
                return share_of((r.last - r.first) * kChunks, ctx.block % K::kCluster, K::kCluster);
            }
            constexpr u32 kTeam = team<K::kBlocks>();
            if constexpr (kTeam > 0 && kChunks > 1) {
                const u32 chunk = ctx.block / kTeam;
                if (chunk >= kChunks) return {0, 0};
                const Range r = share_of(kRowBlocks, ctx.block % kTeam, kTeam);
                return {chunk * kRowBlocks + r.first, chunk * kRowBlocks + r.last};
            }
            return share_of(kRowBlocks * kChunks, ctx.block, K::kBlocks);
        }

        template <class Ctx>
        MEGAGEN_DEVICE u32 units(const Ctx& ctx) {
            const Range r = run(ctx);
            return r.last - r.first;
        }

        template <class Ctx>
        MEGAGEN_DEVICE u32 count(const Ctx& ctx) {
            return units(ctx) * kStages;
        }

        template <class Ctx>
        MEGAGEN_DEVICE Unit unit(const Ctx& ctx, u32 i) {
            const Range blocks = row_blocks(ctx);
            const u32 width = blocks.last - blocks.first;
            const u32 at = run(ctx).first + i;
            return {at / width, blocks.first + at % width};
        }

        template <class Ctx>
        MEGAGEN_DEVICE const u8* source(const Ctx& ctx, u32 i) {
            const Unit u = unit(ctx, i / kStages);
            const u32 band = u.chunk * kStages + i % kStages;
            return Op::weight(ctx.p) + static_cast<u64>(band * kRowBlocks + u.row_block) * Op::kStageBytes;
        }

        // Of a run the stages from the i-th on that lie in a row.
        template <class Ctx>
        MEGAGEN_DEVICE Stretch stretch(const Ctx& ctx, const Range& run, u32 i) {
            if constexpr (kStages > 1) return {source(ctx, i), 1};
            u32 at = run.first + i, stages = run.last - at;
            if constexpr (kClustered) { // not from one chunk to the next
                const Range blocks = row_blocks(ctx);
                const u32 width = blocks.last - blocks.first, chunk = at / width;
                stages = (chunk + 1) * width - at;
                at = chunk * kRowBlocks + blocks.first + at % width;
            }
            return {Op::weight(ctx.p) + static_cast<u64>(at) * Op::kStageBytes, stages};
        }
    };
    using Stream = WeightStream<Tiles, Op::kStageBytes, static_cast<Hint>(Op::kHint)>;

    template <u32 kFirst, u32 kLast, u32 kInFlight, class Ctx>
    MEGAGEN_DEVICE void load_weights(Ctx& ctx, StreamState& s) {
        const Range run = Tiles::run(ctx);
        Stream::template next<kFirst, kLast, kInFlight>(s, (run.last - run.first) * kStages,
                                                        [&](u32 i) { return Tiles::stretch(ctx, run, i); });
    }

    template <u32 kFirst, u32 kLast, class Ctx>
    MEGAGEN_DEVICE void prefetch_l2(Ctx& ctx) {
        Stream::template prefetch_l2<kFirst, kLast, static_cast<Hint>(Op::kL2Hint)>(ctx);
    }

    // Of a chunk of K what a math warp multiplies by: as groups are dealt in turns, a matter of the unit's K alone.
    static constexpr u32 kAllGroups = kStages * kGroups;
    template <class Ctx>
    static constexpr u32 kTiles = (Ctx::Kernel::kTokens + 7) / 8;
    template <class Ctx>
    using Operand = u32[kAllGroups][kTiles<Ctx>][kGroupWords];

    template <class Ctx>
    MEGAGEN_DEVICE bool load(Ctx& ctx, u32 slice, u32 chunk, Operand<Ctx>& b) {
        u32 row[kTiles<Ctx>]; // a column without a token multiplies the first one's: nobody takes what it makes
#pragma unroll
        for (u32 t = 0; t < kTiles<Ctx>; ++t) {
            const u32 token = t * 8 + ctx.lane / 4;
            row[t] = (token < ctx.tokens ? token : 0) * Op::kK + chunk * Op::kUnitK + slice * kGroup;
        }
        return load_operand<typename Op::In, kAllGroups, kTiles<Ctx>>(ctx, b[0][0], row,
                                                                      [](u32 i) { return i * (kSlices * kGroup); });
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool multiply_unit(Ctx& ctx, u32 slice, const Operand<Ctx>& b) {
        Accumulators<kTiles<Ctx>> acc;
#pragma unroll
        for (u32 s = 0; s < kStages; ++s) {
            if (!Ctx::Ring::acquire(ctx)) return false;
            Weights::template multiply<kGroups, kTiles<Ctx>>(
                acc, Ctx::Ring::stage(ctx) + slice * Weights::slice_bytes(kGroups * kGroup), ctx.lane, b + s * kGroups);
            Ctx::Ring::release(ctx, acc.sum(0, 0));
        }
        return Ctx::Accum::put(ctx, slice, acc);
    }

    // Warps kFirstWarp .. kFirstWarp + 7, a slice of K each.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void math(Ctx& ctx) {
        if (!Op::In::wait(ctx)) return;
        const u32 slice = ctx.warp - kFirstWarp;
        const u32 n = Tiles::units(ctx);
#pragma unroll 1
        for (u32 i = 0; i < n;) { // a chunk at a time
            const u32 chunk = Tiles::unit(ctx, i).chunk;
            Operand<Ctx> b; // declared here, or it would take registers before
            if (!load(ctx, slice, chunk, b)) return;
#pragma unroll 1
            do {
                if (!multiply_unit(ctx, slice, b)) return;
            } while (++i < n && Tiles::unit(ctx, i).chunk == chunk);
        }
    }

    // The chunk that all of a block's units are of, if it has any; where kOneChunk.
    template <class Ctx>
    static constexpr bool kOneChunk = !kClustered && (kChunks == 1 || Tiles::template team<Ctx::Kernel::kBlocks>() > 0);

    template <class Ctx>
    MEGAGEN_DEVICE u32 chunk_of(const Ctx& ctx) {
        if constexpr (kChunks == 1) return 0;
        return ctx.block / Tiles::template team<Ctx::Kernel::kBlocks>();
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool multiply_all(Ctx& ctx, u32 slice, const Operand<Ctx>& b) {
#pragma unroll 1
        for (u32 n = Tiles::units(ctx); n > 0; --n) {
            if (!multiply_unit(ctx, slice, b)) return false;
        }
        return true;
    }

    // How a reduce warp sends kMine n8 tiles of tokens of each of its units, partial sums of fp32: what is the same for
    // all units is found once.
    template <u32 kMine>
    struct Sums {
        u32 token; // the first tile's
        u32 row;   // of the row block
        u8* to;

        // Four lanes with four rows' sums of two tokens and two halves: each takes one of these four, all rows.
        template <class Ctx>
        __device__ __forceinline__ Sums(const Ctx& ctx, u32 unit, u32 tile) {
            if constexpr (kClustered) {
                token = tile * 8 + ctx.lane % 4 * 2, row = ctx.lane / 4, to = nullptr;
            } else {
                const u32 j = ctx.lane / 4 % 4;
                token = tile * 8 + ctx.lane % 4 * 2 + j % 2, row = ctx.lane / 16 * 4 + j / 2 * 8;
                to = Op::Partials::spot(ctx, unit * Ctx::Kernel::kTokens + token, row);
            }
        }

        template <class Ctx>
        __device__ __forceinline__ void send(const Ctx& ctx, u32 at, const float (&c)[kMine][4]) const {
#pragma unroll
            for (u32 t = 0; t < kMine; ++t) {
                if constexpr (kClustered) {
                    const Unit unit = Tiles::unit(ctx, at - Tiles::run(ctx).first);
                    const u32 first = (unit.chunk * kRowBlocks + unit.row_block) * Ctx::Kernel::kTokens;
#pragma unroll
                    for (u32 h = 0; h < 4; ++h) {
                        const u32 mine = token + t * 8 + h % 2;
                        if (mine < ctx.tokens)
                            Op::Partials::send(ctx, first + mine, row + h / 2 * 8, __float_as_uint(c[t][h]));
                    }
                } else {
                    const uint4 v = transpose(c[t], ctx.lane);
                    if (token + t * 8 < ctx.tokens) Op::Partials::store(ctx, to + t * (8 * kRowBlock * 4), v);
                }
            }
        }

        template <class Ctx>
        __device__ __forceinline__ void next(const Ctx&) {
            to += Ctx::Kernel::kTokens * kRowBlock * 4;
        }
    };

    // The same where a row block is done: it leaves through shared memory, so that a lane has half of a token's 16
    // rows, and where that are fewer than lanes, every second destination.
    template <u32 kMine>
    struct Rows {
        static constexpr u32 kTokenBytes = kRowBlock * 2;
        static constexpr u32 kPieces = 16 * kMine;
        u32 token;
        u32 put; // in the warp's own part of the outbox
        u32 get;
        typename Op::Out::template Places<32 / kPieces> places;

        template <class Ctx>
        __device__ __forceinline__ Rows(const Ctx& ctx, u32 tile, u32 taker)
            : places(ctx, ctx.lane / kPieces) {
            const u32 outbox = ctx.shared + Op::kOutbox + taker * (8 * kTokenBytes);
            token = tile * 8 + ctx.lane % kPieces / 2;
            put = outbox + ctx.lane % 4 * 2 * kTokenBytes + ctx.lane / 4 * 2;
            get = outbox + ctx.lane % kPieces * 16;
        }

        template <class Ctx>
        __device__ __forceinline__ void send(const Ctx& ctx, u32 row_block, const float (&c)[kMine][4]) const {
            __syncwarp();
#pragma unroll
            for (u32 t = 0; t < kMine; ++t) {
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    const u32 pair = ptx::cvt_bf16x2(c[t][i], c[t][2 + i]);
                    ptx::st_shared_u16(put + (t * 8 + i) * kTokenBytes, pair & 0xffffu);
                    ptx::st_shared_u16(put + (t * 8 + i) * kTokenBytes + kRowBlock, pair >> 16);
                }
            }
            __syncwarp();
            const uint4 v[1] = {ptx::ld_shared_v4(get)};
            if (token < ctx.tokens) places.send(ctx, token, row_block * kRowBlock + ctx.lane % 2 * 8, v);
        }

        template <class Ctx>
        __device__ __forceinline__ void next(const Ctx&) {}
    };

    template <u32 kMine, class Ctx>
    MEGAGEN_DEVICE auto outgoing(const Ctx& ctx, u32 unit, u32 tile, u32 taker) {
        if constexpr (kDirect)
            return Rows<kMine>(ctx, tile, taker);
        else
            return Sums<kMine>(ctx, unit, tile);
    }

    // One warp or two from kFirstWarp on. Two share a unit, an n8 tile of tokens each; where there are tokens for one
    // tile, they take turns.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void reduce(Ctx& ctx) {
        constexpr u32 kAll = kTiles<Ctx>, kTakers = Ctx::Accum::kTakers;
        constexpr u32 kMine = kTakers < kAll ? kAll : 1;
        const bool turns = kTakers > kAll || (kTakers > 1 && ctx.tokens <= 8);
        const u32 taker = kTakers == 1 ? 0 : ctx.warp - kFirstWarp, tile = turns ? 0 : taker;
        const Range run = ctx.rounds(Tiles::run(ctx));
        auto out = outgoing<kMine>(ctx, run.first, tile, taker);
#pragma unroll 1
        for (u32 at = run.first; at < run.last; ++at) {
            if (!Ctx::Accum::acquire(ctx)) return;
            if (turns && !Ctx::Accum::turn(ctx, taker)) {
                Ctx::Accum::pass(ctx);
            } else {
                float c[kMine][4];
                Ctx::Accum::take(ctx, tile, c);
                out.send(ctx, at, c);
            }
            out.next(ctx);
            if constexpr (kDirect)
                Op::Out::publish(ctx);
            else
                Op::Partials::publish(ctx);
        }
    }

    // Adds the K chunks in ascending order: lane = (token, half of the row block).
    template <class Ctx>
    MEGAGEN_DEVICE void finish(Ctx& ctx) {
        if (!Op::Partials::wait(ctx)) return;
        Range mine = share_of(kRowBlocks, ctx.block, Ctx::Kernel::kBlocks);
        u32 stride = 1;
        if constexpr (kClustered) {
            mine = Op::Partials::cluster_share(ctx);
            stride = Ctx::Kernel::kCluster;
            mine.first += ctx.block % stride;
        }
        mine = ctx.rounds(mine, stride);
        constexpr u32 kBatch = chunk_batch<kChunks>(); // sums on their way at once
        const u32 token = ctx.lane / 2, half = ctx.lane % 2 * 8;
        const bool valid = token < ctx.tokens;
#pragma unroll 1
        for (u32 rb = mine.first; rb < mine.last; rb += stride) {
            float y[8] = {};
            const auto from = [&](u32 c) {
                const u32 first = ((c * kRowBlocks + rb) * Ctx::Kernel::kTokens + token) * kRowBlock + half;
                return [=](u32 i) {
                    return static_cast<u64>(first) +
                           (i / 2 * (kRowBlocks * Ctx::Kernel::kTokens * kRowBlock) + i % 2 * 4);
                };
            };
#pragma unroll 1
            for (u32 c = 0; c < ctx.rounds(kChunks, kBatch); c += kBatch) {
                uint4 v[2 * kBatch];
                if (!Op::Partials::read(ctx, v, valid, from(c), c == 0)) return;
#pragma unroll
                for (u32 i = 0; i < kBatch; ++i) add_row(y, v[2 * i], v[2 * i + 1]);
            }
            if (valid)
                Op::Out::send(ctx, token, rb * kRowBlock + half,
                              uint4{ptx::cvt_bf16x2(y[0], y[1]), ptx::cvt_bf16x2(y[2], y[3]),
                                    ptx::cvt_bf16x2(y[4], y[5]), ptx::cvt_bf16x2(y[6], y[7])});
            Op::Out::publish(ctx);
#pragma unroll 1
            for (u32 c = 0; c < kChunks; ++c) Op::Partials::template release<2>(ctx, valid, from(c)); // nobody waits
        }
    }
};

// What a block's warps multiply by in one they multiply by in the other.
template <class Ctx, class A, class B>
constexpr bool kSameOperand = kSame<typename A::In, typename B::In> && A::kK == B::kK && A::kUnitK == B::kUnitK &&
                              DenseGemm<A>::template kOneChunk<Ctx> && DenseGemm<B>::template kOneChunk<Ctx> &&
                              DenseGemm<A>::Tiles::template team<Ctx::Kernel::kBlocks>() ==
                                  DenseGemm<B>::Tiles::template team<Ctx::Kernel::kBlocks>();

// Role math of one op after the other, which are steps kStep, kStep + 1, ... and read the same. Where they take the
// same of it, it is read once.
template <u32 kStep, u32 kFirstWarp, class First, class... Rest, class Ctx>
MEGAGEN_DEVICE void dense_math(Ctx& ctx) {
    using Gemm = DenseGemm<First>;
    ctx.enter(kStep);
    if constexpr (sizeof...(Rest) == 0) {
        Gemm::template math<kFirstWarp>(ctx);
    } else if constexpr (!(kSameOperand<Ctx, First, Rest> && ...)) {
        Gemm::template math<kFirstWarp>(ctx);
        dense_math<kStep + 1, kFirstWarp, Rest...>(ctx);
    } else {
        if (!First::In::wait(ctx)) return;
        const u32 slice = ctx.warp - kFirstWarp;
        if (Gemm::Tiles::units(ctx) + (0 + ... + DenseGemm<Rest>::Tiles::units(ctx)) == 0) return;
        typename Gemm::template Operand<Ctx> b;
        if (!Gemm::load(ctx, slice, Gemm::chunk_of(ctx), b) || !Gemm::multiply_all(ctx, slice, b)) return;
        u32 step = kStep;
        (void)((ctx.enter(++step), DenseGemm<Rest>::multiply_all(ctx, slice, b)) && ...);
    }
}

} // namespace megagen::ops
