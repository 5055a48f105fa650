// Blocks of a cluster in each other's shared memory. Geometry and values: cases.py.
#include <megagen/ptx/bulk.cuh>
#include <megagen/ptx/control.cuh>
#include <megagen/ptx/convert.cuh>
#include <megagen/ptx/mbarrier.cuh>
#include <megagen/ptx/memory.cuh>

namespace {

using namespace megagen;

template <u32 kInputs>
struct Params {
    u32* in[kInputs];
    u32* out;
};

constexpr u32 kPolls = 1u << 16; // a wait that needs more has failed

MEGAGEN_DEVICE void put(u32* out, u32 i, u32 v) { ptx::st_global_u32(out + i, v); }

MEGAGEN_DEVICE bool await(u32 bar, u32 parity) {
#pragma unroll 1
    for (u32 poll = 0; poll < kPolls; ++poll) {
        if (ptx::mbarrier_try_wait_parity_cluster(bar, parity)) return true;
        ptx::still_waiting(false, 0, 0, parity);
    }
    return false;
}

// Two barriers a buffer: full, then empty.
MEGAGEN_DEVICE void begin(u32 base, u32 full_count, u32 empty_count) {
    if (threadIdx.x == 0) {
        for (u32 b = 0; b < 2; ++b) {
            ptx::mbarrier_init(base + 8 * b, full_count);
            ptx::mbarrier_init(base + 16 + 8 * b, empty_count);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
}

// All that was sent in the last two rounds has been confirmed: no arrival is still on its way here.
template <u32 kRounds>
MEGAGEN_DEVICE bool drained(u32 base) {
    bool ok = true;
    for (u32 round = kRounds - 2; round < kRounds; ++round) ok = ok && await(base + 16 + round % 2 * 8, round / 2 % 2);
    return ok;
}

// No block leaves while another may reach into it.
MEGAGEN_DEVICE void end() {
    __syncwarp(); // lanes leave a wait one by one
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

// The lane that hands a buffer back for its warp, once the warp's loads from it are over: a vote over what they brought
// waits for them.
MEGAGEN_DEVICE bool hands_back(u32 consumed) {
    return threadIdx.x % 32 == (__any_sync(kFullMask, ptx::never_true(__uint_as_float(consumed))) ? 1 : 0);
}

} // namespace

// Clusters of two: every thread sends a word a round to the other block, in two buffers, and confirms what came.
extern "C" __global__ void exchange(const __grid_constant__ Params<1> p) {
    constexpr u32 kThreads = 128, kRounds = 12;
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x, peer = blockIdx.x % 2 ^ 1;
    begin(base, 1, kThreads / 32);
    bool ok = true;
#pragma unroll 1
    for (u32 round = 0; round < kRounds; ++round) {
        const u32 b = round % 2, parity = round / 2 % 2;
        const u32 full = base + 8 * b, empty = base + 16 + 8 * b, buffer = base + 128 + b * kThreads * 4;
        const u32 at = (blockIdx.x * kRounds + round) * kThreads + tid;
        if (tid == 0) ptx::mbarrier_arrive_expect_tx(full, kThreads * 4);
        ok = __all_sync(kFullMask, await(empty, parity ^ 1));
        if (!ok) break;
        ptx::st_async(ptx::mapa(buffer + 4 * tid, peer), ptx::ld_relaxed_gpu(p.in[0] + at), ptx::mapa(full, peer));
        ok = __all_sync(kFullMask, await(full, parity));
        if (!ok) break;
        const u32 v = ptx::ld_shared_u32(buffer + 4 * ((tid + 1) % kThreads));
        put(p.out, at, v);
        if (hands_back(v)) ptx::mbarrier_arrive_remote(ptx::mapa(empty, peer));
    }
    ok = ok && drained<kRounds>(base);
    put(p.out, 4 * kRounds * kThreads + blockIdx.x * kThreads + tid, ok ? 1 : 0);
    end();
}

// A cluster of four: stores to the next block, loads from the one after that and from the own.
extern "C" __global__ void neighbours(const __grid_constant__ Params<1> p) {
    constexpr u32 kThreads = 64, kCluster = 4;
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x, rank = blockIdx.x % kCluster;
    const u32 at = blockIdx.x * kThreads + tid, x = ptx::ld_relaxed_gpu(p.in[0] + at);
    const u32 left = base + 4 * tid, right = base + 4 * (kThreads + tid);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::st_shared_cluster_u32(ptx::mapa(left, (rank + 1) % kCluster), x);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    put(p.out, 3 * at, ptx::ld_shared_u32(left));
    ptx::st_shared_u32(right, 3 * x);
    ptx::fence_acq_rel_cluster(); // in place of the arrival's release
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
    put(p.out, 3 * at + 1, ptx::ld_shared_cluster_u32(ptx::mapa(right, (rank + 2) % kCluster)));
    put(p.out, 3 * at + 2, ptx::ld_shared_cluster_u32(ptx::mapa(left, rank)));
    end();
}

// Clusters of two: each block loads half a tile for both; every fourth round all of it, for the other only.
extern "C" __global__ void multicast(const __grid_constant__ Params<1> p) {
    constexpr u32 kThreads = 128, kRounds = 12, kWords = 256, kHalf = kWords / 2;
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x, rank = blockIdx.x % 2;
    begin(base, 1, 2 * kThreads / 32);
    const u64 policy = ptx::policy_evict_first();
    bool ok = true;
#pragma unroll 1
    for (u32 round = 0; round < kRounds; ++round) {
        const u32 b = round % 2, parity = round / 2 % 2;
        const u32 full = base + 8 * b, empty = base + 16 + 8 * b, buffer = base + 128 + b * kWords * 4;
        const u32* tile = p.in[0] + (blockIdx.x / 2 * kRounds + round) * kWords;
        if (tid == 0) {
            ok = await(empty, parity ^ 1); // both blocks are done with the buffer
            if (ok) {
                ptx::mbarrier_arrive_expect_tx(full, kWords * 4);
                const u32 mine = rank * kHalf;
                const u16 other = 2 - rank; // 1 << (rank ^ 1)
                if (round % 4 == 3) {
                    ptx::bulk_load_multicast(buffer, tile, kHalf * 4, full, other);
                    ptx::bulk_load_multicast_hint(buffer + kHalf * 4, tile + kHalf, kHalf * 4, full, other, policy);
                } else if (round % 4 == 1) {
                    ptx::bulk_load_multicast_hint(buffer + mine * 4, tile + mine, kHalf * 4, full, 3, policy);
                } else {
                    ptx::bulk_load_multicast(buffer + mine * 4, tile + mine, kHalf * 4, full, 3);
                }
            }
        }
        ok = __all_sync(kFullMask, ok && await(full, parity));
        if (!ok) break;
        const u32 at = (blockIdx.x * kRounds + round) * kWords + tid;
        const u32 v = ptx::ld_shared_u32(buffer + 4 * tid), w = ptx::ld_shared_u32(buffer + 4 * (tid + kHalf));
        put(p.out, at, v);
        put(p.out, at + kHalf, w);
        if (hands_back(v ^ w)) {
            ptx::mbarrier_arrive(empty);
            ptx::mbarrier_arrive_remote(ptx::mapa(empty, rank ^ 1));
        }
    }
    ok = ok && drained<kRounds>(base);
    put(p.out, 4 * kRounds * kWords + blockIdx.x * kThreads + tid, ok ? 1 : 0);
    end();
}
