// Memory read by bulk loads from all SMs through a ring.
#include "common.cuh"

namespace megagen::probe {

struct StreamArgs {
    Head* head;
    Load load;
    u64 passes; // over the same bytes, each time another block's share
};

extern "C" __global__ void __launch_bounds__(32) probe_stream(const __grid_constant__ StreamArgs args) {
    if (threadIdx.x != 0) return;
    Stream stream(args.head, args.load, 0);
    stream.init();
    const u32 turn = gridDim.x / 2 + 1;
    for (u32 pass = 0; pass < args.passes; ++pass) {
        const u8* share = args.load.data + ((blockIdx.x + pass * turn) % gridDim.x) * args.load.share;
        for (u64 at = 0; at < args.load.share; at += args.load.bytes) {
            const u64 left = args.load.share - at;
            if (!stream.load(share + at, static_cast<u32>(left < args.load.bytes ? left : args.load.bytes))) break;
        }
    }
    stream.drain();
}

struct ArriveArgs {
    Head* head;
    const u8* data; // [rounds][blocks][bytes]
    u64 bytes;
    u64 rounds;
    u64 ahead; // 0: no prefetch, 1: by the SM that loads, 2: by another one
    u32* clks; // [rounds][blocks]
};

constexpr u32 kPrefetched = 20'000; // ns: a prefetch has landed by then

// All SMs load at once; each notes how long its load took to land.
extern "C" __global__ void __launch_bounds__(32) probe_arrive(const __grid_constant__ ArriveArgs args) {
    if (threadIdx.x != 0) return;
    const Watch watch;
    Stream stream(args.head, Load{args.data, 0, 1, args.bytes, 1}, 0);
    stream.init();
    const u32 other = (blockIdx.x + gridDim.x / 2) % gridDim.x;
    for (u32 r = 0; r < args.rounds; ++r) {
        const u8* data = args.data + r * gridDim.x * args.bytes;
        if (args.ahead != 0) {
            bulk_prefetch_l2(data + (args.ahead == 1 ? blockIdx.x : other) * args.bytes, static_cast<u32>(args.bytes));
            pause(kPrefetched);
        }
        if (!meet(args.head, r + 1)) break;
        const u32 began = clock32();
        stream.load(data + blockIdx.x * args.bytes, static_cast<u32>(args.bytes));
        stream.drain();
        args.clks[r * gridDim.x + blockIdx.x] = clock32() - began;
    }
    watch.stop(args.head);
}

} // namespace megagen::probe
