// Messages that are their own flag, and polls, while the SMs stream or do not.
#include "common.cuh"

namespace megagen::probe {

constexpr u32 kNoMore = 0xffffffffu;
constexpr u32 kApart = 4352; // bytes between two pairs' mail: in other parts of L2. Mirrored by megagen/probe/waits.py

struct OnGpu {
    MEGAGEN_DEVICE void store(u8* to, uint4 v) { st_relaxed_gpu(to, v); }
    MEGAGEN_DEVICE uint4 poll(const u8* from) { return ld_relaxed_gpu_b128(from); }
};

struct Across {
    MEGAGEN_DEVICE void store(u8* to, uint4 v) { st_relaxed_sys(to, v); }
    MEGAGEN_DEVICE uint4 poll(const u8* from) { return ld_relaxed_sys_b128(from); }
};

template <class Scope>
MEGAGEN_DEVICE void say(u8* to, u32 n) {
    Scope::store(to, uint4{n, n, n, n});
}

MEGAGEN_DEVICE bool is(uint4 v, u32 n) { return v.x == n && v.y == n && v.z == n && v.w == n; }

// Clocks there and back of each trip, as many as fit into `ns`.
template <class Scope>
MEGAGEN_DEVICE void lead(Head* head, u8* to, const u8* from, u32* trips, u32 capacity, u32 ns) {
    const u32 began = globaltimer_lo();
#pragma unroll 1
    for (u32 n = 1; n <= capacity && globaltimer_lo() - began < ns; ++n) {
        const u32 sent = clock32();
        say<Scope>(to, n);
        if (!until(head, [&] { return is(Scope::poll(from), n); })) break;
        trips[n - 1] = clock32() - sent;
    }
    say<Scope>(to, kNoMore);
}

template <class Scope>
MEGAGEN_DEVICE void follow(Head* head, u8* to, const u8* from) {
#pragma unroll 1
    for (u32 n = 1;; ++n) {
        bool last = false;
        const auto heard = [&] {
            const uint4 v = Scope::poll(from);
            last = is(v, kNoMore);
            return last || is(v, n);
        };
        if (!until(head, heard) || last) return;
        say<Scope>(to, n);
    }
}

struct HopArgs {
    Head* head;
    Load load;
    u64* moved;
    u8* mail;   // [half the blocks][kApart bytes: one way, and back in the next 128], zero
    u32* trips; // [half the blocks][capacity], zero
    u64 capacity;
    u64 ns;
    u64 first; // pair that plays
    u64 pairs; // that play
};

extern "C" __global__ void __launch_bounds__(64) probe_hop(const __grid_constant__ HopArgs args) {
    beside(args.head, args.load, args.moved, [&] {
        const u32 half = gridDim.x / 2;
        const u32 pair = blockIdx.x % half;
        u8* there = args.mail + kApart * pair;
        u8* back = there + 128;
        if (pair < args.first || pair >= args.first + args.pairs || blockIdx.x >= 2 * half)
            pause(static_cast<u32>(args.ns));
        else if (blockIdx.x < half)
            lead<OnGpu>(args.head, there, back, args.trips + pair * args.capacity, static_cast<u32>(args.capacity),
                        static_cast<u32>(args.ns));
        else
            follow<OnGpu>(args.head, back, there);
    });
}

struct PeerHopArgs {
    Head* head;
    u8* theirs;
    const u8* mine;
    u32* trips; // [capacity], zero
    u64 capacity;
    u64 ns;
    u64 leads;
};

extern "C" __global__ void __launch_bounds__(32) probe_peer_hop(const __grid_constant__ PeerHopArgs args) {
    if (threadIdx.x != 0) return;
    const Watch watch;
    if (args.leads)
        lead<Across>(args.head, args.theirs, args.mine, args.trips, static_cast<u32>(args.capacity),
                     static_cast<u32>(args.ns));
    else
        follow<Across>(args.head, args.theirs, args.mine);
    watch.stop(args.head);
}

struct PollArgs {
    Head* head;
    Load load;
    u64* moved;
    u8* words; // [blocks][128 bytes], zero
    u32* clks; // [blocks]
    u64 count;
};

// Each poll's address depends on the one before.
template <class Poll>
MEGAGEN_DEVICE void chain(const PollArgs& args, Poll poll) {
    beside(args.head, args.load, args.moved, [&] {
        const u8* at = args.words + 128 * blockIdx.x;
        at += poll(at);
        const u32 began = clock32();
#pragma unroll 4
        for (u32 i = 0; i < args.count; ++i) at += poll(at);
        if (at != args.words + 128 * blockIdx.x) st_relaxed_gpu(&args.head->failed, 1);
        args.clks[blockIdx.x] = clock32() - began;
    });
}

extern "C" __global__ void __launch_bounds__(64) probe_poll_acquire_gpu(const __grid_constant__ PollArgs args) {
    chain(args, [](const u8* p) { return ld_acquire_gpu(p); });
}

extern "C" __global__ void __launch_bounds__(64) probe_poll_relaxed_gpu(const __grid_constant__ PollArgs args) {
    chain(args, [](const u8* p) { return ld_relaxed_gpu(p); });
}

extern "C" __global__ void __launch_bounds__(64) probe_poll_relaxed_sys(const __grid_constant__ PollArgs args) {
    chain(args, [](const u8* p) { return ld_relaxed_sys(p); });
}

} // namespace megagen::probe
