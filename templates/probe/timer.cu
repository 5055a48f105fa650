// The timers: how fine, how dear, how well those of the SMs agree.
#include "common.cuh"

namespace megagen::probe {

constexpr u32 kReads = 64;
constexpr u32 kMostRounds = 64;

// In order, each waiting for the one before.
template <class Read>
MEGAGEN_DEVICE u32 cost(Read read, u64& sum) {
    const u32 began = clock32();
#pragma unroll
    for (u32 i = 0; i < kReads; ++i) {
        u64 t = read();
        asm volatile("add.u64 %0, %0, %1;" : "+l"(sum) : "l"(t) : "memory");
    }
    return clock32() - began;
}

struct ReadArgs {
    Head* head;
    u64* seen;
    u64 count;
    u32* costs; // of 64 reads: globaltimer, its low word, clock64, clock, nothing
    u64* sink;
};

extern "C" __global__ void __launch_bounds__(32) probe_timer_read(const __grid_constant__ ReadArgs args) {
    if (threadIdx.x != 0) return;
    const Watch watch;
    u64 last = globaltimer();
    u64 n = 0;
#pragma unroll 1
    while (n < args.count && globaltimer() - watch.ns < kBound) {
        const u64 now = globaltimer();
        if (now == last) continue;
        args.seen[n++] = now;
        last = now;
    }
    u64 sum = 0;
    for (u32 warm = 0; warm < 2; ++warm) { // once for the instruction cache
        args.costs[0] = cost([] { return globaltimer(); }, sum);
        args.costs[1] = cost([] { return static_cast<u64>(globaltimer_lo()); }, sum);
        args.costs[2] = cost([] { return clock64(); }, sum);
        args.costs[3] = cost([] { return static_cast<u64>(clock32()); }, sum);
        args.costs[4] = cost([] { return u64{1}; }, sum);
    }
    *args.sink = sum;
    watch.stop(args.head);
}

struct SpreadArgs {
    Head* head;
    u64* times; // [rounds][blocks]
    u64 rounds;
};

extern "C" __global__ void __launch_bounds__(32) probe_timer_spread(const __grid_constant__ SpreadArgs args) {
    __shared__ u64 times[kMostRounds]; // a store to global memory would hold the next meeting up
    if (threadIdx.x != 0) return;
    const Watch watch;
    const u32 rounds = args.rounds < kMostRounds ? static_cast<u32>(args.rounds) : kMostRounds;
#pragma unroll 1
    for (u32 r = 0; r < rounds; ++r) {
        if (!meet(args.head, r + 1)) break;
        times[r] = globaltimer();
    }
    for (u32 r = 0; r < rounds; ++r) args.times[r * gridDim.x + blockIdx.x] = times[r];
    watch.stop(args.head);
}

} // namespace megagen::probe
