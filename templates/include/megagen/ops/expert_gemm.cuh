// GEMM of the experts that this launch's tokens use, a table entry (expert, up to eight tokens) after the other. See
// megagen/ops/expert_gemm.py.
#pragma once

#include <megagen/mem/operand.cuh>
#include <megagen/mem/row.cuh>
#include <megagen/ops/stream.cuh>
#include <megagen/ops/top_k.cuh>

namespace megagen::ops {

template <class Op>
concept ExpertGemmPolicy = requires {
    Op::kRows;
    Op::kK;
    Op::kColumns;
    Op::kStageRows;
    Op::kStageK;
    Op::kFormat;
    Op::kTopK;
    Op::kSwiglu;
    Op::kPerSlot;
    Op::kOutbox;
    Op::kStageBytes;
    Op::kHint;
    Op::kL2Hint;
    typename Op::In;
    typename Op::Table;
    typename Op::Out;
    &Op::weight;
};

// Tiles of a block in the order in which it works: a share of the entries that come first, then one of the others.
template <u32 kOf>
struct TileRun {
    static constexpr u32 kParts = kOf;
    Range part[kParts];

    __device__ __forceinline__ Range of(u32 i) const { return i == 0 ? part[0] : part[kParts - 1]; }
    __device__ __forceinline__ u32 count() const {
        u32 n = part[0].last - part[0].first;
        if constexpr (kParts > 1) n += part[1].last - part[1].first;
        return n;
    }
    __device__ __forceinline__ u32 tile(u32 i) const {
        const u32 n = part[0].last - part[0].first;
        if constexpr (kParts > 1) return i < n ? part[0].first + i : part[1].first + i - n;
        return part[0].first + i;
    }
};

// Its tiles, those of one table entry at a time.
template <class Run>
struct TileWalk {
    Run run;
    u32 part = 0;
    u32 tile = 0;
    u32 used = 0; // the entry at hand and how many tiles of it
    u32 count = 0;

    __device__ __forceinline__ void begin(const Run& all) {
        run = all;
        part = 0;
        tile = all.of(0).first;
    }

    __device__ __forceinline__ bool next(u32 tiles_per_expert) {
        while (Run::kParts > 1 && part + 1 < Run::kParts && tile >= run.of(part).last) tile = run.of(++part).first;
        const u32 last = run.of(part).last;
        if (tile >= last) return false;
        used = tile / tiles_per_expert;
        const u32 end = (used + 1) * tiles_per_expert;
        count = (end < last ? end : last) - tile;
        tile += count;
        return true;
    }
};

// Besides: scale(params), where the format has second-level scales.
template <ExpertGemmPolicy Op>
struct ExpertGemm {
    static constexpr WeightFormat kFormat = static_cast<WeightFormat>(Op::kFormat);
    using Weights = Format<kFormat>;
    static constexpr u32 kBlocksPerStage = Op::kStageRows / kRowBlock;
    static constexpr u32 kStagesPerTile = Op::kK / Op::kStageK;
    static constexpr u32 kTilesPerExpert = Op::kRows / Op::kStageRows;
    static constexpr u32 kGroups = Op::kStageK / kSlices / kGroup; // of a slice of a stage
    static constexpr u32 kSliceBytes = Weights::slice_bytes(kGroups * kGroup);
    static constexpr u32 kColumnsPerBlock = Op::kSwiglu ? kRowBlock / 2 : kRowBlock;
    static_assert(kBlocksPerStage == 1 || kStagesPerTile == 1,
                  "a stage is a piece of a row block or several whole ones");
    static_assert(kBlocksPerStage * kSlices * kSliceBytes == Op::kStageBytes, "packing and policy agree");

    using Past = Guess<typename Op::Table::Description>;

    using Run = TileRun<Past::kFirst ? 2 : 1>;

    struct Tiles {
        template <class Ctx>
        MEGAGEN_DEVICE Run run(const Ctx& ctx) {
            return run(ctx, Op::Table::get(ctx));
        }

        template <class Ctx>
        MEGAGEN_DEVICE Run run(const Ctx& ctx, const ExpertTable& table) {
            const u32 all = table.used() * kTilesPerExpert;
            const Range mine = share_of(all, ctx.block, Ctx::Kernel::kBlocks);
            if constexpr (!Past::kFirst) {
                return {{mine}};
            } else {
                const u32 some = table.ahead() * kTilesPerExpert;
                const Range ahead = share_of(some, ctx.block, Ctx::Kernel::kBlocks);
                // In all as many as without them, where each block has one of the others; else these are dealt alike.
                if (all - some < Ctx::Kernel::kBlocks) {
                    const Range rest = share_of(all - some, ctx.block, Ctx::Kernel::kBlocks);
                    return {{ahead, {some + rest.first, some + rest.last}}};
                }
                return {{ahead, {some + mine.first - ahead.first, some + mine.last - ahead.last}}};
            }
        }

        template <class Ctx>
        MEGAGEN_DEVICE u32 count(const Ctx& ctx) {
            return run(ctx).count() * kStagesPerTile;
        }

        template <class Ctx>
        MEGAGEN_DEVICE const u8* source(const Ctx& ctx, u32 i) {
            const u32 tile = run(ctx).tile(i / kStagesPerTile);
            const u32 expert = Op::Table::get(ctx).expert(tile / kTilesPerExpert);
            const u64 stage = static_cast<u64>(expert * kTilesPerExpert + tile % kTilesPerExpert) * kStagesPerTile +
                              i % kStagesPerTile;
            return Op::weight(ctx.p) + stage * Op::kStageBytes;
        }

        // Of a run the stages from the i-th on that lie in a row: an entry's tiles do.
        template <class Ctx>
        MEGAGEN_DEVICE Stretch stretch(const Ctx& ctx, const ExpertTable& table, const Run& run, u32 i) {
            const u32 tile = run.tile(i / kStagesPerTile), of = tile % kTilesPerExpert;
            u32 tiles = kTilesPerExpert - of;
            if constexpr (Run::kParts > 1) {
                if (tile < run.part[0].last && tiles > run.part[0].last - tile) tiles = run.part[0].last - tile;
            }
            const u32 expert = table.expert(tile / kTilesPerExpert);
            const u64 stage = static_cast<u64>(expert * kTilesPerExpert + of) * kStagesPerTile + i % kStagesPerTile;
            return {Op::weight(ctx.p) + stage * Op::kStageBytes, tiles * kStagesPerTile - i % kStagesPerTile};
        }
    };
    using Stream = WeightStream<Tiles, Op::kStageBytes, static_cast<Hint>(Op::kHint)>;

    // All wait for the first stage: where it lies is looked up once before there is a table, so that the code is at
    // hand.
    template <u32 kFirst, u32 kLast, u32 kInFlight, class Ctx>
    MEGAGEN_DEVICE void load_weights(Ctx& ctx, StreamState& s) {
        ExpertTable table = Op::Table::get(ctx);
        table.any = ptx::opaque(s.done == 0) != 0;
#pragma unroll 1
        for (;;) {
            const Run run = Tiles::run(ctx, table);
            Stream::template next<kFirst, kLast, kInFlight>(s, run.count() * kStagesPerTile,
                                                            [&](u32 i) { return Tiles::stretch(ctx, table, run, i); });
            if (!table.any) return;
            table.any = ptx::opaque(0) != 0;
            s.next.stages = 0;
            if (!Op::Table::wait(ctx)) return;
        }
    }

    template <u32 kFirst, u32 kLast, class Ctx>
    MEGAGEN_DEVICE void prefetch_l2(Ctx& ctx) {
        if (!Op::Table::wait(ctx)) return;
        Stream::template prefetch_l2<kFirst, kLast, static_cast<Hint>(Op::kL2Hint)>(ctx);
    }

    // Asks L2 for the weights of the experts that the layer's last launch used most: a block for its share of stages.
    template <class Ctx>
    MEGAGEN_DEVICE void prefetch_guess(Ctx& ctx) {
        constexpr u32 kStages = kTilesPerExpert * kStagesPerTile; // of an expert
        if (ctx.dead) return;
        const u32 guessed = Past::recall(ctx);
        const u32 experts = __popc(__ballot_sync(kFullMask, guessed != 0));
        const Range mine = share_of(experts * kStages, ctx.block, Ctx::Kernel::kBlocks);
        const u64 policy = cache_policy<static_cast<Hint>(Past::Policy::kHint)>();
#pragma unroll 1
        for (u32 at = mine.first; at < mine.last; at += 32) {
            const u32 i = at + ctx.lane;
            const u32 expert = __shfl_sync(kFullMask, guessed, i / kStages % 32) - 1;
            if (i >= mine.last) continue;
            const u8* stage = Op::weight(ctx.p) + (static_cast<u64>(expert) * kStages + i % kStages) * Op::kStageBytes;
            if constexpr (static_cast<Hint>(Past::Policy::kHint) == Hint::kEvictNormal)
                ptx::bulk_prefetch_l2(stage, Op::kStageBytes);
            else
                ptx::bulk_prefetch_l2_hint(stage, Op::kStageBytes, policy);
        }
        __syncwarp();
        ctx.stamps.prefetches(ctx, (mine.last - mine.first) * Op::kStageBytes);
    }

    using Walk = TileWalk<Run>;
    using Operand = u32[kStagesPerTile][kGroups][1][kGroupWords];

    // An op's part of expert_math: before its first entry, and from one entry to the next, whose inputs it loads.
    template <class Ctx>
    MEGAGEN_DEVICE bool begin_math(Ctx& ctx, Walk& walk) {
        if (!Op::Table::wait(ctx) || !Op::In::wait(ctx)) return false;
        walk.begin(Tiles::run(ctx));
        return true;
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool next_entry(Ctx& ctx, Walk& walk, u32 slice, Operand& b) {
        const bool due = walk.tile == walk.run.of(0).first; // then all of it
        if (!walk.next(kTilesPerExpert)) return false;
        const u32 row[1] = {input_of(ctx, Op::Table::get(ctx), walk.used, slice)};
        return load_operand<typename Op::In, kStagesPerTile * kGroups, 1>(
            ctx, b[0][0][0], row, [](u32 i) { return i / kGroups * Op::kStageK + i % kGroups * kGroup; }, due);
    }

    // Where this lane's part of an entry's inputs begins. A column without a token multiplies the first one's: nobody
    // takes what it makes.
    template <class Ctx>
    MEGAGEN_DEVICE u32 input_of(const Ctx& ctx, const ExpertTable& table, u32 used, u32 slice) {
        const u32 column = ctx.lane / 4;
        const u32 entry = table.entry(used, column < table.count(used) ? column : 0);
        return (Op::kPerSlot ? (entry >> 8) * Op::kTopK + (entry & 255) : entry >> 8) * Op::kK +
               slice * kGroups * kGroup;
    }

    // The tiles of one table entry: its tokens stay in registers.
    template <class Ctx>
    MEGAGEN_DEVICE bool multiply_entry(Ctx& ctx, u32 n, u32 slice, const Operand& b) {
#pragma unroll 1
        for (u32 i = 0; i < n; ++i) {
            if constexpr (kBlocksPerStage == 1) {
                Accumulators<1> acc;
#pragma unroll
                for (u32 s = 0; s < kStagesPerTile; ++s) {
                    if (!Ctx::Ring::acquire(ctx)) return false;
                    Weights::template multiply<kGroups, 1>(acc, Ctx::Ring::stage(ctx) + slice * kSliceBytes, ctx.lane,
                                                           b[s]);
                    Ctx::Ring::release(ctx, acc.sum(0, 0));
                }
                if (!Ctx::Accum::put(ctx, slice, acc)) return false;
            } else {
                if (!Ctx::Ring::acquire(ctx)) return false;
                const u32 stage = Ctx::Ring::stage(ctx) + slice * kSliceBytes;
                float consumed = 0;
#pragma unroll 1
                for (u32 r = 0; r < kBlocksPerStage; ++r) {
                    Accumulators<1> acc;
                    Weights::template multiply<kGroups, 1>(acc, stage + r * kSlices * kSliceBytes, ctx.lane, b[0]);
                    consumed += acc.sum(0, 0);
                    if (!Ctx::Accum::put(ctx, slice, acc)) return false;
                }
                Ctx::Ring::release(ctx, consumed);
            }
        }
        return true;
    }

    // What stays the same for all tiles of a table entry: this lane's token of it, and the second-level scales.
    struct Entry {
        u32 used = ~0u;
        bool valid = false;
        u32 row = 0; // (token, slot) of the output
        float gate = 1.0f;
        float up = 1.0f;
    };

    template <class Ctx>
    MEGAGEN_DEVICE void look_up(const Ctx& ctx, const ExpertTable& table, u32 used, Entry& entry) {
        const u32 token = ctx.lane / 4;
        entry.used = used;
        entry.valid = ctx.dry || token < table.count(used);
        if (entry.valid && !ctx.dry) {
            const u32 place = table.entry(used, token);
            entry.row = (place >> 8) * Op::kTopK + (place & 255);
        }
        if constexpr (kFormat == WeightFormat::kNvfp4) {
            constexpr u32 kHalves = Op::kSwiglu ? 2 : 1;
            const u32 expert = ctx.dry ? 0 : table.expert(used);
            const u8* scale = Op::scale(ctx.p) + expert * kHalves * 4;
            entry.gate = ptx::ld_constant_f32(scale);
            entry.up = ptx::ld_constant_f32(scale + (kHalves - 1) * 4);
        }
    }

    using Places = typename Op::Out::template Places<4>;

    // One warp or two from kFirstWarp on, which take turns.
    template <u32 kFirstWarp, class Ctx>
    MEGAGEN_DEVICE void reduce(Ctx& ctx) {
        if (!Op::Table::wait(ctx)) return;
        const ExpertTable table = Op::Table::get(ctx);
        const Run run = ctx.dry ? Run{{{0, 1}}} : Tiles::run(ctx); // the table may not be there yet
        const u32 taker = Ctx::Accum::kTakers == 1 ? 0 : ctx.warp - kFirstWarp;
        const Places to(ctx, ctx.lane % 4);
        Entry entry;
#pragma unroll 1
        for (u32 part = 0; part < Run::kParts; ++part) {
            const Range mine = run.of(part);
#pragma unroll 1
            for (u32 tile = mine.first; tile < mine.last; ++tile) {
#pragma unroll 1
                for (u32 r = 0; r < kBlocksPerStage; ++r) {
                    const bool takes = Ctx::Accum::turn(ctx, taker);
                    if (takes && tile / kTilesPerExpert != entry.used)
                        look_up(ctx, table, tile / kTilesPerExpert, entry);
                    if (!Ctx::Accum::acquire(ctx)) return;
                    if (takes)
                        epilogue(ctx, to, taker, entry,
                                 ((tile % kTilesPerExpert) * kBlocksPerStage + r) * kColumnsPerBlock);
                    else
                        Ctx::Accum::pass(ctx);
                }
                Op::Out::publish(ctx);
            }
        }
    }

    // A row block's columns, token by token in 16 bytes or 32, leave through shared memory, a part of it for each warp
    // of the role: lane (token, quarter) then serves every fourth destination with whole vectors.
    template <class Ctx>
    MEGAGEN_DEVICE void epilogue(Ctx& ctx, const Places& to, u32 taker, const Entry& entry, u32 column) {
        constexpr u32 kTokenBytes = kColumnsPerBlock * 2;
        const u32 outbox = ctx.shared + Op::kOutbox + taker * (8 * kTokenBytes);
        float c[1][4];
        Ctx::Accum::take(ctx, 0, c);
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < 2; ++i) { // column of the MMA tile: token lane % 4 * 2 + i of the entry
            const u32 at = outbox + (ctx.lane % 4 * 2 + i) * kTokenBytes + ctx.lane / 4 * 2;
            if constexpr (Op::kSwiglu) {
                const float gate = c[0][i] * entry.gate, up = c[0][2 + i] * entry.up;
                ptx::st_shared_u16(at, ptx::cvt_bf16x2(__fdividef(gate, 1.0f + __expf(-gate)) * up, 0.0f));
            } else {
                const u32 pair = ptx::cvt_bf16x2(c[0][i] * entry.gate, c[0][2 + i] * entry.gate);
                ptx::st_shared_u16(at, pair & 0xffffu);
                ptx::st_shared_u16(at + kRowBlock, pair >> 16);
            }
        }
        __syncwarp();
        if (entry.valid) {
            uint4 v[kTokenBytes / 16];
#pragma unroll
            for (u32 i = 0; i < kTokenBytes / 16; ++i)
                v[i] = ptx::ld_shared_v4(outbox + ctx.lane / 4 * kTokenBytes + 16 * i);
            to.send(ctx, entry.row, column, v);
        }
    }
};

// Of several ops the n-th one's part of expert_math.
template <class First, class... Rest>
struct ExpertMath {
    using Gemm = ExpertGemm<First>;

    template <class Ctx, class Walk>
    MEGAGEN_DEVICE bool begin(Ctx& ctx, u32 n, Walk& walk) {
        if constexpr (sizeof...(Rest) > 0) {
            if (n > 0) return ExpertMath<Rest...>::begin(ctx, n - 1, walk);
        }
        return Gemm::begin_math(ctx, walk);
    }

    template <class Ctx, class Walk>
    MEGAGEN_DEVICE bool next(Ctx& ctx, u32 n, Walk& walk, u32 slice, typename Gemm::Operand& b) {
        if constexpr (sizeof...(Rest) > 0) {
            if (n > 0) return ExpertMath<Rest...>::next(ctx, n - 1, walk, slice, b);
        }
        return Gemm::next_entry(ctx, walk, slice, b);
    }
};

// Tiles of one go through the same code as those of the other.
template <class A, class B>
constexpr bool kAlike =
    ExpertGemm<A>::kFormat == ExpertGemm<B>::kFormat && ExpertGemm<A>::kGroups == ExpertGemm<B>::kGroups &&
    ExpertGemm<A>::kBlocksPerStage == ExpertGemm<B>::kBlocksPerStage &&
    ExpertGemm<A>::kStagesPerTile == ExpertGemm<B>::kStagesPerTile &&
    ExpertGemm<A>::Run::kParts == ExpertGemm<B>::Run::kParts;

// Role math of one op after the other, which are steps kStep, kStep + 1, ... Their tiles pass through the same machine
// code where they are alike: there is half as much of it to fetch.
template <u32 kStep, u32 kFirstWarp, ExpertGemmPolicy First, ExpertGemmPolicy... Rest, class Ctx>
MEGAGEN_DEVICE void expert_math(Ctx& ctx) {
    if constexpr (!(kAlike<First, Rest> && ...)) {
        expert_math<kStep, kFirstWarp, First>(ctx);
        expert_math<kStep + 1, kFirstWarp, Rest...>(ctx);
    } else {
        using Gemm = ExpertGemm<First>;
        using Each = ExpertMath<First, Rest...>;
        const u32 slice = ctx.warp - kFirstWarp;
#pragma unroll 1
        for (u32 n = 0; n < 1 + sizeof...(Rest); ++n) {
            ctx.enter(kStep + n);
            typename Gemm::Walk walk;
            bool more = Each::begin(ctx, n, walk);
#pragma unroll 1
            while (more) {
                typename Gemm::Operand b;
                more = Each::next(ctx, n, walk, slice, b) && Gemm::multiply_entry(ctx, walk.count, slice, b);
            }
        }
    }
}

} // namespace megagen::ops
