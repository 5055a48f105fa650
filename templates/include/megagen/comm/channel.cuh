// A tensor on its way from its writers to its readers, in global memory, with the primitive that orders them.
//
// D describes it: kKind, kOffset, kBytes, kCopies (heap), kEmpty, kElementBytes, kRowStride, kRankStride, kShard,
// kWorld, kScatter, kCounterOffset, kArrivals, kArrivalsPer, kReaderResets, kIndex, kFault.
// Ops call send / publish on one side and wait / read on the other and do not know which primitive it is.
#pragma once

#include <megagen/ptx/control.cuh>
#include <megagen/ptx/convert.cuh>
#include <megagen/sync/barrier.cuh>

namespace megagen {

enum class Sync : u32 { kLamport, kCounter, kFlag, kCluster };
enum class Per : u32 { kLaunch, kToken, kExpert };

MEGAGEN_DEVICE u32 nonempty(u32 word, u32 empty, u32 element_bytes) {
    if (empty == 0) { // +0 means empty: a real +0 travels as -0
        if (element_bytes == 4) return word == 0 ? 0x80000000u : word;
        if ((word & 0x0000ffffu) == 0) word |= 0x00008000u;
        if ((word & 0xffff0000u) == 0) word |= 0x80000000u;
    }
    return word; // all ones is a NaN that no conversion produces
}

MEGAGEN_DEVICE u32 nonempty_v(u32 v, u32 empty, u32 size) { return nonempty(v, empty, size); }
MEGAGEN_DEVICE uint2 nonempty_v(uint2 v, u32 empty, u32 size) {
    return {nonempty(v.x, empty, size), nonempty(v.y, empty, size)};
}
MEGAGEN_DEVICE uint4 nonempty_v(uint4 v, u32 empty, u32 size) {
    return {nonempty(v.x, empty, size), nonempty(v.y, empty, size), nonempty(v.z, empty, size),
            nonempty(v.w, empty, size)};
}

// A counter orders the data that comes before it, so plain stores do.
MEGAGEN_DEVICE void store_plain(u8* p, u32 v) { ptx::st_global_u32(p, v); }
MEGAGEN_DEVICE void store_plain(u8* p, uint2 v) { ptx::st_global_v2(p, v); }
MEGAGEN_DEVICE void store_plain(u8* p, uint4 v) { ptx::st_global_v4(p, v); }

// Partial sums [chunk][row block][token][16] within a cluster: row blocks are dealt to clusters, and in a cluster each
// to one block, which keeps its chunks in shared memory at kSharedOffset. Done, a barrier with one arrival, counts
// bytes.
template <class D>
struct ClusterMap {
    template <class Ctx>
    MEGAGEN_DEVICE Range share(const Ctx& ctx) {
        using K = typename Ctx::Kernel;
        return share_of(D::kRowBlocks, ctx.block / K::kCluster, K::kBlocks / K::kCluster);
    }

    template <class Ctx>
    MEGAGEN_DEVICE u32 offset(u32 place, u32 chunk, u32 token, u32 e) {
        return D::kSharedOffset +
               ((place / Ctx::Kernel::kCluster * D::kChunks + chunk) * Ctx::Kernel::kTokens + token) * 64 + e * 4;
    }

    template <class Ctx>
    MEGAGEN_DEVICE void send(const Ctx& ctx, u32 row, u32 e, u32 v) {
        const u32 token = row % Ctx::Kernel::kTokens, unit = row / Ctx::Kernel::kTokens;
        const u32 place = unit % D::kRowBlocks - share(ctx).first, owner = place % Ctx::Kernel::kCluster;
        const u32 local = ctx.shared + offset<Ctx>(place, unit / D::kRowBlocks, token, e);
        const u32 done = Barrier<typename D::Done>::address(ctx, 0);
        if (!ctx.dry) ptx::st_async(ptx::mapa(local, owner), v, ptx::mapa(done, owner));
    }

    template <class Ctx>
    MEGAGEN_DEVICE u32 address(const Ctx& ctx, u32 index) {
        const u32 row = index / 16, unit = row / Ctx::Kernel::kTokens;
        const u32 place = unit % D::kRowBlocks - share(ctx).first;
        return ctx.shared + offset<Ctx>(place, unit / D::kRowBlocks, row % Ctx::Kernel::kTokens, index % 16);
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool wait(Ctx& ctx) {
        if (ctx.dead || ctx.dry) return !ctx.dead;
        constexpr u32 kCluster = Ctx::Kernel::kCluster;
        const Range r = share(ctx);
        const u32 n = r.last - r.first, rank = ctx.block % kCluster;
        const u32 mine = (n + kCluster - 1 - rank) / kCluster;
        const u32 bar = Barrier<typename D::Done>::address(ctx, 0);
        if (ctx.lane == 0) ptx::mbarrier_arrive_expect_tx(bar, mine * D::kChunks * ctx.tokens * 64);
        return wait_until<true>(ctx, D::kIndex, 0, mine, [&] { return ptx::mbarrier_try_wait_parity_cluster(bar, 0); });
    }
};

template <class D>
struct Channel {
    static constexpr bool kLamport = D::kKind == Sync::kLamport;
    static constexpr bool kClustered = D::kKind == Sync::kCluster;
    static constexpr u32 kElementBytes = D::kElementBytes;

    template <class Ctx>
    MEGAGEN_DEVICE Range cluster_share(const Ctx& ctx) {
        return ClusterMap<D>::share(ctx);
    }

    // The copy that the launch `ahead` of this one uses.
    template <class Ctx>
    MEGAGEN_DEVICE u32 which(const Ctx& ctx, u32 ahead) {
        static_assert(D::kCopies >= 1 && D::kCopies <= 3, "copies");
        const u32 now = D::kCopies == 1 ? 0 : D::kCopies == 2 ? ctx.odd : ctx.third;
        return now + ahead >= D::kCopies ? now + ahead - D::kCopies : now + ahead;
    }

    template <class Ctx>
    MEGAGEN_DEVICE u8* copy(const Ctx& ctx, u8* heap, u32 ahead = 0) {
        return heap + D::kOffset + which(ctx, ahead) * D::kBytes;
    }

    template <class Ctx>
    MEGAGEN_DEVICE u8* counter(const Ctx& ctx, u8* heap, u32 ahead = 0) {
        return heap + D::kCounterOffset + which(ctx, ahead) * 4;
    }

    // Ranks that a live one plays, itself included: two to this power. Both numbers are powers of two.
    MEGAGEN_DEVICE u32 stand_ins(const System& sys) { return __popc(sys.world - 1) - __popc(sys.live - 1); }

    // One lane's piece of a message, elements e, e + 1, ... of `row` (e within the shard), to all its destinations: 16
    // bytes where data is its own flag, as a reader looks at the last word only. One copy goes to each rank of the
    // world, live rank by live rank, in each the slots of the ranks that this one stands in for, rotated by 16 elements
    // a stand-in. When scattered, e counts over all ranks' shards, and a piece goes to its owner, or nowhere if that is
    // a stand-in. A 64-bit `e` shows that places are a known distance apart, as indices do when it comes to reading.
    template <class V, class E, class Ctx>
    MEGAGEN_DEVICE void send(const Ctx& ctx, u32 row, E e, V v) {
        if constexpr (D::kKind == Sync::kCluster) {
            if (!loses(row, e)) ClusterMap<D>::send(ctx, row, e, v);
        } else if constexpr (D::kWorld) {
            const V piece[1] = {v};
            send_around<1>(ctx, 0, row, static_cast<u32>(e), piece);
        } else {
            store(ctx, spot(ctx, row, e), v);
        }
    }

    // To test the report of a hang.
    MEGAGEN_DEVICE bool loses(u32 row, u64 e) { return D::kFault && row == 0 && e < 16; }

    // Within a rank, for who sends to places a known distance apart: where element e of a row stands, and a piece that
    // goes to such a place.
    template <class E, class Ctx>
    MEGAGEN_DEVICE u8* spot(const Ctx& ctx, u32 row, E e) {
        static_assert(!D::kWorld && !kClustered, "one place of the rank's own");
        return copy(ctx, ctx.heap()) + (static_cast<E>(row) * D::kRowStride + e) * D::kElementBytes;
    }

    template <class V, class Ctx>
    MEGAGEN_DEVICE void store(const Ctx& ctx, u8* to, V v) {
        if (D::kFault && to < copy(ctx, ctx.heap()) + 16 * D::kElementBytes) return;
        put(ctx, to, flagged(v));
    }

    // A word that no reader takes for an empty one, where data is its own flag.
    template <class V>
    MEGAGEN_DEVICE V flagged(V v) {
        static_assert(!kLamport || sizeof(V) == 16, "data that is its own flag travels in accesses of 16 bytes");
        if constexpr (kLamport) return nonempty_v(v, D::kEmpty, D::kElementBytes);
        return v;
    }

    template <class V, class Ctx>
    MEGAGEN_DEVICE void put(const Ctx& ctx, u8* to, V v) {
        if (ctx.dry) return;
        if constexpr (!kLamport)
            store_plain(to, v);
        else if constexpr (D::kWorld)
            ptx::st_relaxed_sys(to, v);
        else
            ptx::st_relaxed_gpu(to, v);
    }

    MEGAGEN_DEVICE u32 turned(u32 e, u32 by) { return e + by >= D::kShard ? e + by - D::kShard : e + by; }

    // kN pieces in a row between ranks. Of the slots in each live rank this lane serves every kBy-th from `first` on.
    template <u32 kBy, class V, u32 kN, class Ctx>
    MEGAGEN_DEVICE void send_around(const Ctx& ctx, u32 first, u32 row, u32 e, const V (&v)[kN]) {
        if (loses(row, e)) return;
        V sent[kN];
#pragma unroll
        for (u32 k = 0; k < kN; ++k) sent[k] = flagged(v[k]);
        const System& sys = ctx.p.sys;
        const u32 shift = stand_ins(sys);
        u32 peer = 0, end = ctx.rounds(sys.live);
        if constexpr (D::kScatter) {
            const u32 owner = e / D::kShard;
            if (owner & ((1u << shift) - 1)) return;
            peer = owner >> shift, end = peer + 1, e -= owner * D::kShard;
        }
        const u32 slot = ((sys.rank << shift) + first) * D::kRankStride + row * D::kRowStride;
        const u32 begin = turned(e, 16 * first % D::kShard);
#pragma unroll 1
        for (; peer < end; ++peer) {
            u8* to = copy(ctx, sys.heap[peer]) + slot * D::kElementBytes;
            u32 rotated = begin;
#pragma unroll 1
            for (u32 j = first; j < ctx.rounds(1u << shift, kBy); j += kBy) {
#pragma unroll
                for (u32 k = 0; k < kN; ++k) put(ctx, to + rotated * D::kElementBytes + k * sizeof(V), sent[k]);
                to += kBy * D::kRankStride * D::kElementBytes;
                rotated = turned(rotated, 16 * kBy % D::kShard);
            }
        }
    }

    // For a lane that shares the destinations of its pieces with kBy - 1 others: those of a gather are found once.
    template <u32 kBy>
    struct Places {
        static constexpr bool kFound = D::kWorld && !D::kScatter;
        static constexpr u32 kMost = kFound ? (kMaxRanks + kBy - 1) / kBy : 1;
        u32 first;
        u8* slot[kMost];
        u32 turn[kMost]; // what it is rotated by

        template <class Ctx>
        __device__ __forceinline__ Places(const Ctx& ctx, u32 first)
            : first(first) {
            if constexpr (kFound) {
                const System& sys = ctx.p.sys;
                const u32 shift = stand_ins(sys);
#pragma unroll
                for (u32 i = 0; i < kMost; ++i) {
                    const u32 d = first + i * kBy, peer = d < sys.world ? d >> shift : 0, j = d - (peer << shift);
                    slot[i] = copy(ctx, sys.heap[peer]) + ((sys.rank << shift) + j) * D::kRankStride * D::kElementBytes;
                    turn[i] = 16 * j % D::kShard;
                }
            }
        }

        // kN vectors of 16 bytes from element e of a row on.
        template <u32 kN, class Ctx>
        __device__ __forceinline__ void send(const Ctx& ctx, u32 row, u32 e, const uint4 (&v)[kN]) const {
            constexpr u32 kPer = 16 / D::kElementBytes;
            static_assert(D::kShard % (kN * kPer) == 0, "they are rotated as one");
            if constexpr (kFound) {
                if (loses(row, e)) return;
                uint4 sent[kN];
#pragma unroll
                for (u32 k = 0; k < kN; ++k) sent[k] = flagged(v[k]);
#pragma unroll
                for (u32 i = 0; i < kMost; ++i) {
                    u8* to = slot[i] + (row * D::kRowStride + turned(e, turn[i])) * D::kElementBytes;
                    if (first + i * kBy >= ctx.p.sys.world) continue;
#pragma unroll
                    for (u32 k = 0; k < kN; ++k) put(ctx, to + 16 * k, sent[k]);
                }
            } else if constexpr (D::kWorld) {
                send_around<kBy>(ctx, first, row, e, v);
            } else if (first == 0) {
#pragma unroll
                for (u32 k = 0; k < kN; ++k) Channel::send(ctx, row, e + kPer * k, v[k]);
            }
        }
    };

    // Whole warp, after its share of a tile is sent, or of `tiles`.
    template <class Ctx>
    MEGAGEN_DEVICE void publish(const Ctx& ctx, u32 tiles = 1) {
        if constexpr (D::kKind == Sync::kCounter) {
            __syncwarp();
            if (ctx.lane == 0 && !ctx.dry) ptx::red_add_release_gpu(counter(ctx, ctx.heap()), tiles);
        } else if constexpr (D::kKind == Sync::kFlag) {
            __syncwarp();
            if (ctx.lane == 0 && !ctx.dry) {
                ptx::fence_acq_rel_sys();
                if constexpr (D::kWorld) {
                    const System& sys = ctx.p.sys;
#pragma unroll 1
                    for (u32 peer = 0; peer < sys.live; ++peer)
                        ptx::red_add_relaxed_sys(counter(ctx, sys.heap[peer]), tiles * (sys.world / sys.live));
                } else {
                    ptx::red_add_relaxed_sys(counter(ctx, ctx.heap()), tiles);
                }
            }
        }
    }

    // Whole warp, before it reads. Lamport data carries its own flags: nothing to wait for yet.
    template <class Ctx>
    MEGAGEN_DEVICE bool wait(Ctx& ctx) {
        if constexpr (D::kKind == Sync::kCounter || D::kKind == Sync::kFlag) {
            if (ctx.dry) return true; // how much is expected may not be known yet
            u32 expected = D::kArrivals;
            if constexpr (D::kArrivalsPer == Per::kToken) expected *= ctx.tokens;
            if constexpr (D::kArrivalsPer == Per::kExpert) expected *= ctx.table_used();
            if constexpr (D::kWorld) expected *= ctx.p.sys.world;
            const u8* word = counter(ctx, ctx.heap());
            return wait_until<true>(ctx, D::kIndex, 0, expected, [&] {
                return (D::kKind == Sync::kFlag ? ptx::ld_acquire_sys(word) : ptx::ld_acquire_gpu(word)) >= expected;
            });
        } else if constexpr (D::kKind == Sync::kCluster) {
            return ClusterMap<D>::wait(ctx);
        }
        return true;
    }

    MEGAGEN_DEVICE uint4 load(const u8* address) {
        if constexpr (!kLamport) return ptx::ld_global_v4(address);
        if constexpr (D::kWorld) return ptx::ld_relaxed_sys_b128(address);
        return ptx::ld_relaxed_gpu_b128(address);
    }

    // Vector i of a read. Where vectors are a known distance apart, one address and constant offsets are all it takes:
    // 64-bit indices show it, 32-bit ones by their differences.
    template <class Index>
    MEGAGEN_DEVICE u8* place(u8* base, u32 i, Index index) {
        if constexpr (sizeof(index(0)) == 8) return base + index(i) * D::kElementBytes;
        return base + static_cast<u64>(index(0)) * D::kElementBytes +
               static_cast<i64>(static_cast<int>(index(i) - index(0))) * D::kElementBytes;
    }

    MEGAGEN_DEVICE bool has_empty(uint4 v) { return v.w == D::kEmpty; }

    // Polls take L2 bandwidth from the weight streams, and what else this block's warps do waits behind loads: so one
    // lane of the warp polls the last of the vectors that it wants, until that has come. The others may still be
    // missing.
    template <u32 kN, class Ctx, class Wanted, class Index>
    MEGAGEN_DEVICE bool await(Ctx& ctx, Wanted wanted, Index index) {
        if constexpr (!kLamport) return true;
        constexpr u32 kLast = kN - 1;
        u8* base = copy(ctx, ctx.heap());
        const u32 wanting = __ballot_sync(kFullMask, wanted(kLast));
        const bool polls = (wanting & ((2u << ctx.lane) - 1)) == 1u << ctx.lane; // the first of them
        return wait_until<true>(ctx, D::kIndex, static_cast<u32>(index(0)), which(ctx, 0),
                                [&] { return !polls || !has_empty(load(place(base, kLast, index))); });
    }

    // Each valid lane reads kN vectors of 16 bytes, vector i at element index(i) of the tensor; other lanes get zeros.
    // Not `due`: it has been there for long, as far as one knows.
    template <u32 kN, class Ctx, class Index>
    MEGAGEN_DEVICE bool read(Ctx& ctx, uint4 (&v)[kN], bool valid, Index index, bool due = kN > 2) {
        return read_where(ctx, v, [=](u32) { return valid; }, index, due);
    }

    // As above, of each lane the vectors that it wants.
    template <u32 kN, class Ctx, class Wanted, class Index>
    MEGAGEN_DEVICE bool read_where(Ctx& ctx, uint4 (&v)[kN], Wanted wanted, Index index, bool due = kN > 2) {
        constexpr uint4 kNothing = {0, 0, 0, 0};
        const auto skipped = [&](u32 i) { return !wanted(i) || (!kLamport && (ctx.dry || ctx.dead)); };
        if constexpr (D::kKind == Sync::kCluster) {
#pragma unroll
            for (u32 i = 0; i < kN; ++i)
                v[i] = skipped(i) ? kNothing : ptx::ld_shared_v4(ClusterMap<D>::address(ctx, index(i)));
            return !ctx.dead;
        } else {
            if (kLamport && due) await<kN>(ctx, wanted, index);
            u8* base = copy(ctx, ctx.heap());
#pragma unroll
            for (u32 i = 0; i < kN; ++i) v[i] = skipped(i) ? kNothing : load(place(base, i, index));
            if constexpr (!kLamport) return !ctx.dead;
            const auto here = [&](u32 i) { return !wanted(i) || !has_empty(v[i]); };
            bool all = true;
#pragma unroll
            for (u32 i = 0; i < kN; ++i) all = all && here(i);
            bool ok = !ctx.dead;
            if (!__all_sync(kFullMask, all)) {
                ok = wait_until<true>(ctx, D::kIndex, static_cast<u32>(index(0)), which(ctx, 0), [&] {
                    bool come = true;
#pragma unroll
                    for (u32 i = 0; i < kN; ++i) {
                        if (!here(i)) v[i] = load(place(base, i, index));
                    }
#pragma unroll
                    for (u32 i = 0; i < kN; ++i) come = come && here(i);
                    return come;
                });
            }
            if (ok && !ctx.dry) {
#pragma unroll
                for (u32 i = 0; i < kN; ++i) {
                    if (wanted(i)) ptx::expect_none(v[i], D::kEmpty);
                }
            }
            // A vote, so that the compiler knows that the warp is still together: else whatever shuffles later on has
            // code for lanes that are not.
            return __all_sync(kFullMask, ok);
        }
    }

    // A read in two parts, for a reader that has other things to do in between: `ask` puts loads on their way, `take`
    // waits until all of them have brought something. Only of data that is its own flag: other data `take` reads.
    template <u32 kN, class Ctx, class Index>
    MEGAGEN_DEVICE void ask(const Ctx& ctx, uint4* v, Index index) {
        u8* base = copy(ctx, ctx.heap());
#pragma unroll
        for (u32 i = 0; i < kN; ++i) v[i] = kLamport ? load(place(base, i, index)) : uint4{0, 0, 0, 0};
    }

    template <u32 kN, class Ctx, class Index>
    MEGAGEN_DEVICE bool take(Ctx& ctx, uint4 (&v)[kN], Index index) {
        if constexpr (!kLamport) return read(ctx, v, true, index);
        bool here = !ctx.dead;
#pragma unroll
        for (u32 i = 0; i < kN; ++i) here &= !has_empty(v[i]);
        if (!__all_sync(kFullMask, here)) return read(ctx, v, true, index);
#pragma unroll
        for (const uint4& x : v) ptx::expect_none(x, D::kEmpty);
        return true;
    }

    // The reader hands a slot back, if that is its duty: the same indices that it read.
    template <u32 kN, class Ctx, class Index>
    MEGAGEN_DEVICE void release(const Ctx& ctx, bool valid, Index index) {
        release_where<kN>(ctx, [=](u32) { return valid; }, index);
    }

    template <u32 kN, class Ctx, class Wanted, class Index>
    MEGAGEN_DEVICE void release_where(const Ctx& ctx, Wanted wanted, Index index) {
        if constexpr (kLamport && D::kReaderResets) {
            if (ctx.dead || ctx.dry) return;
            u8* base = copy(ctx, ctx.heap());
#pragma unroll
            for (u32 i = 0; i < kN; ++i) {
                if (wanted(i))
                    ptx::st_relaxed_gpu(place(base, i, index), uint4{D::kEmpty, D::kEmpty, D::kEmpty, D::kEmpty});
            }
        }
    }

    // One warp of each block: makes the copy that the next launch but (copies - 2) uses empty again. Its last
    // readers were in an earlier launch, its next writers come after this one has ended.
    template <class Ctx>
    MEGAGEN_DEVICE void reset(const Ctx& ctx) {
        constexpr u32 kAhead = D::kCopies - 1;
        if constexpr (kLamport && !D::kReaderResets) {
            const Range r = share_of(D::kBytes / 16, ctx.block, Ctx::Kernel::kBlocks);
            u8* base = copy(ctx, ctx.heap(), kAhead);
#pragma unroll 1
            for (u32 i = r.first + ctx.lane; i < r.last; i += 32)
                ptx::st_global_v4(base + 16 * i, uint4{D::kEmpty, D::kEmpty, D::kEmpty, D::kEmpty});
        }
        if constexpr (D::kKind == Sync::kCounter || D::kKind == Sync::kFlag) {
            if (ctx.block == 0 && ctx.lane == 0) ptx::st_global_u32(counter(ctx, ctx.heap(), kAhead), 0);
        }
    }
};

// A launch input: complete before the launch began.
template <class D>
struct Input {
    static constexpr u32 kElementBytes = D::kElementBytes;

    template <class Ctx>
    MEGAGEN_DEVICE const u8* address(const Ctx& ctx, u64 element) {
        return D::pointer(ctx.p) + element * D::kElementBytes;
    }

    template <class Ctx>
    MEGAGEN_DEVICE bool wait(Ctx& ctx) {
        return !ctx.dead;
    }

    template <u32 kN, class Ctx, class Index>
    MEGAGEN_DEVICE bool read(Ctx& ctx, uint4 (&v)[kN], bool valid, Index index, bool due = false) {
        const u8* base = D::pointer(ctx.p) + static_cast<u64>(index(0)) * D::kElementBytes;
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
            const i64 offset = static_cast<i64>(static_cast<int>(index(i) - index(0))) * D::kElementBytes;
            v[i] = valid ? ptx::ld_global_v4(base + offset) : uint4{0, 0, 0, 0};
        }
        return !ctx.dead;
    }

    template <u32 kN, class Ctx, class Index>
    MEGAGEN_DEVICE void ask(Ctx& ctx, uint4 (&v)[kN], Index index) {
        read(ctx, v, true, index);
    }

    template <u32 kN, class Ctx, class Index>
    MEGAGEN_DEVICE bool take(const Ctx& ctx, uint4 (&)[kN], Index) {
        return !ctx.dead;
    }

    // One element of four bytes.
    template <class Ctx>
    MEGAGEN_DEVICE u32 word(const Ctx& ctx, u32 index) {
        static_assert(D::kElementBytes == 4, "an element is a word");
        return ptx::ld_relaxed_gpu(D::pointer(ctx.p) + static_cast<u64>(index) * 4);
    }

    template <u32 kN, class Ctx, class Index>
    MEGAGEN_DEVICE void release(const Ctx&, bool, Index) {}
};

// A launch output: read after the launch has ended.
template <class D>
struct Output {
    template <class V, class E, class Ctx>
    MEGAGEN_DEVICE void send(const Ctx& ctx, u32 row, E e, V v) {
        if (!ctx.dead && !ctx.dry)
            ptx::st_relaxed_gpu(D::pointer(ctx.p) + (static_cast<E>(row) * D::kRowStride + e) * D::kElementBytes, v);
    }

    // There is one destination, the first lane's.
    template <u32 kBy>
    struct Places {
        u32 first;

        template <class Ctx>
        __device__ __forceinline__ Places(const Ctx&, u32 first)
            : first(first) {}

        template <u32 kN, class Ctx>
        __device__ __forceinline__ void send(const Ctx& ctx, u32 row, u32 e, const uint4 (&v)[kN]) const {
#pragma unroll
            for (u32 k = 0; first == 0 && k < kN; ++k) Output::send(ctx, row, e + 16 / D::kElementBytes * k, v[k]);
        }
    };

    // One element of two bytes; others may write its neighbours.
    template <class Ctx>
    MEGAGEN_DEVICE void send_half(const Ctx& ctx, u32 row, u32 e, u32 v) {
        static_assert(D::kElementBytes == 2, "an element is two bytes");
        if (!ctx.dead && !ctx.dry)
            ptx::st_global_u16(D::pointer(ctx.p) + (row * D::kRowStride + e) * D::kElementBytes, v);
    }

    template <class Ctx>
    MEGAGEN_DEVICE void publish(const Ctx&) {}

    template <class Ctx>
    MEGAGEN_DEVICE const u8* place(const Ctx& ctx, u64 byte) {
        return D::pointer(ctx.p) + byte;
    }
};

} // namespace megagen
