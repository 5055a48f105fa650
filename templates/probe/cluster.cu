// Blocks of a cluster: their barrier, and each other's shared memory.
#include "common.cuh"

namespace megagen::probe {

struct ClusterArgs {
    Head* head;
    u32* barrier; // [blocks] clocks of `count`
    u32* own;     // [blocks] clocks of `count` loads, each waiting for the one before
    u32* others;  // the same of the next block's shared memory
    u64 count;
    u64 size; // blocks of a cluster
};

MEGAGEN_DEVICE u32 chain(u32 address, u32 count) {
    u32 at = address;
    const u32 began = clock32();
#pragma unroll 4
    for (u32 i = 0; i < count; ++i) at += ld_shared_cluster_u32(at);
    const u32 took = clock32() - began;
    return took + at - address;
}

extern "C" __global__ void __launch_bounds__(384) probe_cluster(const __grid_constant__ ClusterArgs args) {
    const Watch watch;
    const u32 count = static_cast<u32>(args.count), size = static_cast<u32>(args.size);
    const u32 word = dynamic_shared() + kRing;
    const u32 rank = blockIdx.x % size;
    if (threadIdx.x == 0) st_shared_u32(word, 0);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    const u32 began = clock32();
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
        cluster_arrive();
        cluster_wait();
    }
    const u32 took = clock32() - began;
    if (threadIdx.x == 0) {
        args.barrier[blockIdx.x] = took;
        args.own[blockIdx.x] = chain(mapa(word, rank), count);
        args.others[blockIdx.x] = chain(mapa(word, (rank + 1) % size), count);
        watch.stop(args.head);
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
}

} // namespace megagen::probe
