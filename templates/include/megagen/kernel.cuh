// A warp's state, and how a kernel begins and ends.
//
// K, the kernel's policy: Params, kWarps, kBlocks, kCluster, kTokens, kPdl, kBoundedWaits, kRecordOffset, kEpochOffset,
// Ring, Accum, Table, Stamps, and init_barriers(ctx).
#pragma once

#include <megagen/comm/reset.cuh>
#include <megagen/debug/stamp.cuh>
#include <megagen/mma/format.cuh>
#include <megagen/sync/ring.cuh>

namespace megagen {

// Launches are counted modulo a multiple of two and three, so that no copy of a channel is used twice in a row when the
// count starts again.
constexpr u32 kLastEpoch = 0xfffffffbu;

constexpr u32 kLine = 128; // bytes of a cache line
constexpr u32 kMostCode =
    (1u << 20) - kLine; // more than kernels have; an L2 prefetch of 1 MB is encoded as one of nothing

constexpr u32 kReady = 1; // the block's barrier at which warps meet who need the others made

constexpr u32 kSettled = 50'000; // ns: far more than a store to another block of the cluster takes

template <class K>
struct Context {
    using Kernel = K;
    using Ring = megagen::Ring<typename K::Ring>;
    using Accum = AccumRing<typename K::Accum>;

    const typename K::Params& p;
    u32 shared = ptx::opaque(ptx::dynamic_shared()); // or every role would find out anew
    u32 block = blockIdx.x;
    u32 warp = __shfl_sync(kFullMask, threadIdx.x / 32, 0); // so that the compiler knows that its lanes stay together
    u32 lane = threadIdx.x % 32;
    u32 tokens = 0;
    u32 context = 0; // tokens in the caches before this launch's
    u32 odd = 0;     // launches so far, mod 2 and mod 3: which copy of a channel this launch uses
    u32 third = 0;
    ptx::Step step = debug::kOpening;
    bool dead = false;
    bool dry = false; // a role is rehearsed: nothing waits, and nothing that others see changes
    Cursor<K::Ring::kStages> ring;
    Cursor<K::Accum::kSlots> accum;
    u32 ring_loads = 0;
    typename K::Stamps stamps;

    __device__ __forceinline__ explicit Context(const typename K::Params& params)
        : p(params) {}

    // Barriers are ready in the whole cluster when this returns. The warp that makes them waits for no other: it has
    // the launch's first weights to ask for.
    __device__ __forceinline__ void begin() {
        if (warp == 0) {
            debug::clear(*this);
            if (lane == 0) {
                K::init_barriers(*this);
                ptx::fence_mbarrier_init();
                ptx::fence_proxy_async();
            }
            __syncwarp();
        }
        if constexpr (K::kCluster > 1) {
            __syncthreads();
            ptx::cluster_arrive_relaxed();
            ptx::cluster_wait();
        } else if (warp == 0) {
            ptx::bar_arrive(kReady, 32 * K::kWarps);
        } else {
            ptx::bar_sync(kReady, 32 * K::kWarps);
        }
    }

    // The next step of a program.
    __device__ __forceinline__ void enter(u32 next) {
        if constexpr (requires { stamps.job(*this); }) stamps.job(*this);
        step = next;
    }

    // A role twice in the same machine code: first without effect, so that its instructions and constants are at hand
    // when its input comes. Opaque, or there would be code for each.
    template <class Role>
    __device__ __forceinline__ void dry_run(Role role) {
        dry = ptx::opaque(1) != 0;
#pragma unroll 1
        for (;;) {
            role();
            if (!dry) break;
            dry = ptx::opaque(0) != 0;
            stamps.begin();
        }
        dry = false;
    }

    // What a role's loop over `all` goes through, `step` at a time: a rehearsal is one round.
    __device__ __forceinline__ Range rounds(Range all, u32 step = 1) const {
        return dry && all.first + step < all.last ? Range{all.first, all.first + step} : all;
    }
    __device__ __forceinline__ u32 rounds(u32 n, u32 step = 1) const { return rounds(Range{0, n}, step).last; }

    // What this launch works on. Whoever writes these words does so before the launch before this one begins.
    __device__ __forceinline__ void look() {
        const u32 wanted = __shfl_sync(kFullMask, ptx::ld_relaxed_sys(p.sys.control), 0); // see warp
        tokens = wanted < K::kTokens ? wanted : K::kTokens;
        context = __shfl_sync(kFullMask, ptx::ld_relaxed_sys(p.sys.control + kControlContext), 0);
    }

    // Whether all numbers of a cache before `end` have been there for two launches. The launch before this one may have
    // written those of its own tokens, which are no farther behind the context than its tokens are many.
    __device__ __forceinline__ bool aged(u32 end) const { return end + kMostTokens <= context; }

    // Every warp, before it reads anything that the launch before this one wrote.
    __device__ __forceinline__ void attach() {
        if constexpr (K::kPdl) ptx::griddepcontrol_wait();
        look();
        const u32 launches = epoch();
        odd = launches % 2;
        third = launches % 3;
        // Another rank may set the word just now: the lanes must agree.
        dead = __any_sync(kFullMask, dead || ptx::ld_relaxed_sys(aborted()) != 0);
        if (dead && lane == 0) debug::sound(*this);
    }

    // Of a token of this launch: where it stands in its sequence, and which of the launch's tokens it sees (a bit each,
    // its own included). Token i is kept in the caches as number context + i, whatever its position.
    __device__ __forceinline__ u32 position(u32 token) const {
        return ptx::ld_relaxed_sys(p.sys.control + kControlPositions + token);
    }
    __device__ __forceinline__ u32 ancestors(u32 token) const {
        return ptx::ld_relaxed_sys(p.sys.control + kControlAncestors + token);
    }

    // This rank's exchange memory.
    __device__ __forceinline__ u8* heap() const { return p.sys.heap[p.sys.rank]; }

    // Not 0: a wait has expired, here or on another rank.
    __device__ __forceinline__ const u8* aborted() const { return p.sys.abort[p.sys.rank]; }

    // Completed launches, as this block counts them.
    __device__ __forceinline__ u32 epoch() const { return ptx::ld_relaxed_gpu(heap() + K::kEpochOffset + 4 * block); }

    // Asks L2 for machine code, which it would lose to weights, and to keep it. Each piece is asked for in kEach
    // blocks, far apart, as the halves of an L2 may each want a copy. Nothing depends on it.
    template <u32 kEach>
    __device__ __forceinline__ void warm(const u8* code, u32 bytes) {
        static_assert(kEach <= K::kBlocks, "a piece a block");
        const u32 lines = (bytes < kMostCode ? bytes : kMostCode) / kLine;
        const u64 policy = ptx::policy_evict_last();
#pragma unroll 1
        for (u32 i = lane; i < kEach; i += 32) {
            const Range r = share_of(lines, (block * kEach + i) % K::kBlocks, K::kBlocks);
            if (r.first < r.last)
                ptx::bulk_prefetch_l2_hint(code + r.first * kLine, (r.last - r.first) * kLine, policy);
        }
        __syncwarp();
        stamps.prefetches(*this, lines * kEach / K::kBlocks * kLine);
    }
    template <u32 kEach>
    __device__ __forceinline__ void warm_code() {
        warm<kEach>(p.sys.code, p.sys.code_bytes);
    }
    template <u32 kEach>
    __device__ __forceinline__ void warm_next() {
        warm<kEach>(p.sys.next_code, p.sys.next_bytes);
    }

    __device__ __forceinline__ void trigger() {
        if constexpr (K::kPdl) ptx::griddepcontrol_launch_dependents();
    }

    // The producer's last step: a block may not leave before its own copies have landed, and when the launch is given
    // up those that consume them do not say so.
    __device__ __forceinline__ void drain() { Ring::drain(*this); }

    // All warps meet: no one still reads the epoch, and no block leaves while its cluster may write to it. When the
    // launch is given up, nobody waits for what others have sent to this block: it stays until that has arrived.
    __device__ __forceinline__ void end(bool advance_epoch) {
        stamps.close(*this);
        debug::report(*this);
        __syncthreads();
        if (advance_epoch && threadIdx.x == 0)
            ptx::red_inc_relaxed_gpu(heap() + K::kEpochOffset + 4 * block, kLastEpoch);
        if constexpr (K::kCluster > 1) {
            ptx::cluster_arrive_relaxed();
            ptx::cluster_wait();
            if (dead) {
                const u32 began = ptx::globaltimer_lo();
                while (ptx::globaltimer_lo() - began < kSettled) {
                }
            }
        }
    }

    __device__ __forceinline__ u32 table_used() const { return ptx::ld_shared_u32(shared + K::Table::kOffset); }
};

} // namespace megagen
