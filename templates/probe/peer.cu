// Another GPU's memory, read and written by threads.
#include "common.cuh"

namespace megagen::probe {

constexpr u32 kAtOnce = 8;

struct PeerArgs {
    Head* head;
    u8* theirs;
    u64 words; // of 16 bytes, a multiple of all threads times 8
    u32* sink;
};

extern "C" __global__ void __launch_bounds__(512) probe_peer_load(const __grid_constant__ PeerArgs args) {
    const u64 threads = u64{gridDim.x} * blockDim.x;
    u32 sum = 0;
    for (u64 first = u64{blockIdx.x} * blockDim.x + threadIdx.x; first < args.words; first += kAtOnce * threads) {
        uint4 got[kAtOnce];
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) got[i] = ld_global_v4(args.theirs + 16 * (first + i * threads));
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) sum ^= got[i].x ^ got[i].y ^ got[i].z ^ got[i].w;
    }
    if (sum == 0x9e3779b9u) *args.sink = sum;
}

extern "C" __global__ void __launch_bounds__(512) probe_peer_store(const __grid_constant__ PeerArgs args) {
    const u64 threads = u64{gridDim.x} * blockDim.x;
    const u32 v = threadIdx.x;
    for (u64 first = u64{blockIdx.x} * blockDim.x + threadIdx.x; first < args.words; first += kAtOnce * threads) {
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) st_global_v4(args.theirs + 16 * (first + i * threads), uint4{v, v, v, v});
    }
}

} // namespace megagen::probe
