// All blocks: a step that they take together, and one block's data read by all.
#include "common.cuh"

namespace megagen::probe {

struct StepArgs {
    Head* head;
    u32* clks; // [blocks], of all rounds
    u64 rounds;
};

extern "C" __global__ void __launch_bounds__(32) probe_grid_step(const __grid_constant__ StepArgs args) {
    if (threadIdx.x != 0) return;
    const Watch watch;
    bool ok = meet(args.head, 1);
    const u32 began = clock32();
#pragma unroll 1
    for (u32 r = 0; ok && r < args.rounds; ++r) ok = meet(args.head, r + 2);
    args.clks[blockIdx.x] = clock32() - began;
    watch.stop(args.head);
}

constexpr u32 kThreads = 384;
constexpr u32 kMostRounds = 32;
constexpr u32 kAtOnce = 8; // loads of a thread

struct BroadcastArgs {
    Head* head;
    u8* data;
    u64 words; // of 16 bytes
    u64 rounds;
    u64* begins; // [rounds]
    u64* ends;   // [rounds][blocks]
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) probe_broadcast(const __grid_constant__ BroadcastArgs args) {
    __shared__ u64 begins[kMostRounds];
    __shared__ u64 ends[kMostRounds];
    const u32 words = static_cast<u32>(args.words);
    const u32 rounds = args.rounds < kMostRounds ? static_cast<u32>(args.rounds) : kMostRounds;
    bool ok = true;
#pragma unroll 1
    for (u32 r = 0; ok && r < rounds; ++r) {
        ok = meet_all(args.head, r + 1);
        if (!ok) break;
        const u32 want = r + 1;
        if (blockIdx.x == 0) {
            if (threadIdx.x == 0) begins[r] = globaltimer();
            for (u32 w = threadIdx.x; w < words; w += kThreads)
                st_relaxed_gpu(args.data + 16 * w, uint4{want, want, want, want});
        }
#pragma unroll 1
        for (u32 first = threadIdx.x; ok && first < words; first += kAtOnce * kThreads) {
            ok = until(args.head, [&] {
                uint4 got[kAtOnce];
#pragma unroll
                for (u32 i = 0; i < kAtOnce; ++i) {
                    const u32 w = first + i * kThreads;
                    got[i] = uint4{want, want, want, want};
                    if (w < words) got[i] = ld_relaxed_gpu_b128(args.data + 16 * w);
                }
                bool all = true;
#pragma unroll
                for (u32 i = 0; i < kAtOnce; ++i)
                    all &= got[i].x == want && got[i].y == want && got[i].z == want && got[i].w == want;
                return all;
            });
        }
        ok = __syncthreads_and(ok) != 0;
        if (threadIdx.x == 0) ends[r] = globaltimer();
    }
    if (threadIdx.x == 0) {
        for (u32 r = 0; r < rounds; ++r) {
            if (blockIdx.x == 0) args.begins[r] = begins[r];
            args.ends[r * gridDim.x + blockIdx.x] = ends[r];
        }
    }
}

} // namespace megagen::probe
