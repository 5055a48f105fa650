// Bulk copies into a ring of stages, and out of shared memory. Geometry and values: cases.py.
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

MEGAGEN_DEVICE bool await(u32 bar, u32 parity) {
#pragma unroll 1
    for (u32 poll = 0; poll < kPolls; ++poll) {
        if (ptx::mbarrier_try_wait_parity(bar, parity)) return true;
        ptx::still_waiting(false, 0, 0, parity);
    }
    return false;
}

// The lane that hands a buffer back for its warp, once the warp's loads from it are over: a vote over what they brought
// waits for them.
MEGAGEN_DEVICE bool hands_back(u32 consumed) {
    return threadIdx.x % 32 == (__any_sync(kFullMask, ptx::never_true(__uint_as_float(consumed))) ? 1 : 0);
}

} // namespace

// Warp 0 loads tiles of 2048 bytes into three stages, warps 1 .. 4 take 16 bytes a thread.
extern "C" __global__ void stages(const __grid_constant__ Params<1> p) {
    constexpr u32 kStages = 3, kBytes = 2048, kWords = kBytes / 4, kTiles = 24, kConsumerWarps = 4;
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x;
    const auto full = [&](u32 s) { return base + 8 * s; };
    const auto empty = [&](u32 s) { return base + 8 * (kStages + s); };
    const auto stage = [&](u32 s) { return base + 128 + kBytes * s; };
    if (tid == 0) {
        for (u32 s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(full(s), 1);
            ptx::mbarrier_init(empty(s), kConsumerWarps);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    bool ok = true;
    if (tid == 0) {
        const u64 first = ptx::policy_evict_first(), last = ptx::policy_evict_last();
        ptx::bulk_prefetch_l2(p.in[0], kBytes);
        ptx::bulk_prefetch_l2_hint(p.in[0] + kWords, kBytes, last);
#pragma unroll 1
        for (u32 tile = 0; tile < kTiles; ++tile) {
            const u32 s = tile % kStages, bar = full(s);
            ok = await(empty(s), (tile / kStages % 2) ^ 1);
            if (!ok) break;
            const u32* source = p.in[0] + tile * kWords;
            if (tile % 2 == 0) {
                ptx::mbarrier_arrive_expect_tx(bar, kBytes);
                ptx::bulk_load(stage(s), source, kBytes, bar);
            } else { // two copies and an arrival after them
                ptx::mbarrier_expect_tx(bar, kBytes);
                ptx::bulk_load_hint(stage(s), source, 16, bar, first);
                ptx::bulk_load_hint(stage(s) + 16, source + 4, kBytes - 16, bar, last);
                ptx::mbarrier_arrive(bar);
            }
        }
    } else if (tid >= 32) {
        const u32 i = tid - 32;
#pragma unroll 1
        for (u32 tile = 0; tile < kTiles; ++tile) {
            const u32 s = tile % kStages;
            ok = __all_sync(kFullMask, await(full(s), tile / kStages % 2));
            if (!ok) break;
            const uint4 v = ptx::ld_shared_v4(stage(s) + 16 * i);
            ptx::st_global_v4(p.out + tile * kWords + 4 * i, {v.x + tile, v.y, v.z, v.w ^ tile});
            if (hands_back(v.x ^ v.y ^ v.z ^ v.w)) ptx::mbarrier_arrive(empty(s));
        }
    }
    ptx::st_global_u32(p.out + kTiles * kWords + tid, ok ? 1 : 0);
}

// Two buffers go out in turn; the last is also read back by threads, and what threads wrote by a copy. in[1]: where.
extern "C" __global__ void round_trip(const __grid_constant__ Params<2> p) {
    constexpr u32 kBytes = 2048, kWords = kBytes / 4, kRounds = 8;
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x;
    const u32 bar = base, landing = base + 128 + 2 * kBytes;
    u32 *stored = p.in[1], *written = p.in[1] + kWords;
    if (tid == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const uint4 v = ptx::ld_global_v4(p.in[0] + 4 * tid);
    const auto word = [](u32 w) { return __uint_as_float(w); };
#pragma unroll 1
    for (u32 round = 0; round < kRounds; ++round) {
        const u32 buffer = base + 128 + round % 2 * kBytes;
        if (tid == 0) ptx::bulk_wait_read<1>();
        __syncthreads();
        ptx::st_shared_f4(buffer + 16 * tid, {word(v.x + round), word(v.y), word(v.z - round), word(v.w ^ round)});
        ptx::fence_proxy_async();
        __syncthreads();
        if (tid == 0) {
            ptx::bulk_store(p.out + round * kWords, buffer, kBytes);
            if (round == kRounds - 1) ptx::bulk_store(stored, buffer, kBytes);
            ptx::bulk_commit();
        }
    }
    if (tid == 0) {
        ptx::bulk_wait_read<0>();
        ptx::bulk_wait<0>();
    }
    __syncthreads();
    ptx::st_global_v4(p.out + kRounds * kWords + 4 * tid, ptx::ld_global_v4(stored + 4 * tid));

    ptx::st_global_v4(written + 4 * tid, {v.w, v.z, v.y, v.x});
    ptx::fence_proxy_async_global();
    __syncthreads();
    if (tid == 0) {
        ptx::mbarrier_arrive_expect_tx(bar, kBytes);
        ptx::bulk_load(landing, written, kBytes, bar);
    }
    const bool ok = await(bar, 0);
    const uint4 back = ok ? ptx::ld_shared_v4(landing + 16 * tid) : uint4{0, 0, 0, 0};
    ptx::st_global_v4(p.out + (kRounds + 1) * kWords + 4 * tid, back);
}
