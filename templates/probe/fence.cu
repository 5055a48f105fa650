// What a fence waits for: its own thread's stores, the SM's loads, and its turn.
#include "common.cuh"

namespace megagen::probe {

struct Gpu {
    MEGAGEN_DEVICE void at(u8*) { fence_acq_rel_gpu(); }
};

struct Sys {
    MEGAGEN_DEVICE void at(u8*) { fence_acq_rel_sys(); }
};

struct Cluster {
    MEGAGEN_DEVICE void at(u8*) { fence_acq_rel_cluster(); }
};

struct Red {
    MEGAGEN_DEVICE void at(u8* word) { red_add_release_gpu(word, 1); }
};

// No fence: what a request waits for that orders nothing. The word is never all ones; the loop awaits it.
struct None {
    MEGAGEN_DEVICE void at(u8* word) {
        while (ld_relaxed_gpu(word) == 0xffffffffu) {
        }
    }
};

// Mirrored by megagen/probe/waits.py.
enum State : u64 { kIdle, kStored, kInFlight, kLanded, kPrefetched, kPrefetching };

struct FenceArgs {
    Head* head;
    Load load;
    u64* moved;
    u8* words; // [blocks][256 bytes]
    u32* clks; // [rounds][blocks]
    u64 rounds;
    u64 state;
    u64 ahead; // bytes of a prefetch, a multiple of the load's; asked for at once, or in pieces of those
};

constexpr u32 kSettle = 2'000;         // ns: between a meeting and what is timed
constexpr u32 kPrefetchTakes = 60'000; // ns, more than enough

template <class Fence>
MEGAGEN_DEVICE void after(const FenceArgs& args) {
    if (threadIdx.x != 0) return;
    const Watch watch;
    u8* word = args.words + 256 * blockIdx.x;
    Stream stream(args.head, args.load, blockIdx.x);
    stream.init();
    const u8* prefetched = stream.data;
#pragma unroll 1
    for (u32 r = 0; r < args.rounds; ++r) {
        if (!meet(args.head, r + 1)) break;
        pause(kSettle);
        if (args.state == kStored) st_relaxed_gpu(word + 128, uint4{r, r, r, r});
        if (args.state == kInFlight || args.state == kLanded)
            for (u32 s = 0; s < stream.stages; ++s) stream.next();
        if (args.state == kLanded) stream.drain();
        if (args.state >= kPrefetched) {
            const u32 piece = args.state == kPrefetched ? static_cast<u32>(args.ahead) : stream.bytes;
            for (u64 at = 0; at < args.ahead; at += piece) bulk_prefetch_l2(prefetched + at, piece);
        }
        const u32 began = clock32();
        Fence::at(word);
        const u32 took = clock32() - began;
        stream.drain();
        if (args.state >= kPrefetched) {
            prefetched += args.ahead; // the host's share has room for all rounds
            pause(kPrefetchTakes);
        }
        args.clks[r * gridDim.x + blockIdx.x] = took;
    }
    watch.stop(args.head);
}

constexpr u32 kNotes = 768; // in shared memory: the next fence would wait for a note in global memory
constexpr u32 kMostRounds = 64;

// While the SM's other warp streams.
template <class Fence>
MEGAGEN_DEVICE void amid(const FenceArgs& args) {
    beside(args.head, args.load, args.moved, [&] {
        u8* word = args.words + 256 * blockIdx.x;
        const u32 notes = dynamic_shared() + kNotes;
        const u32 rounds = args.rounds < kMostRounds ? static_cast<u32>(args.rounds) : kMostRounds;
#pragma unroll 1
        for (u32 r = 0; r < rounds; ++r) {
            pause(500 + (r * 229 + blockIdx.x * 97) % 2'000);
            const u32 began = clock32();
            Fence::at(word);
            st_shared_u32(notes + 4 * r, clock32() - began);
        }
#pragma unroll 1
        for (u32 r = 0; r < rounds; ++r) args.clks[r * gridDim.x + blockIdx.x] = ld_shared_u32(notes + 4 * r);
    });
}

extern "C" __global__ void __launch_bounds__(32) probe_fence_gpu(const __grid_constant__ FenceArgs args) {
    after<Gpu>(args);
}

extern "C" __global__ void __launch_bounds__(32) probe_fence_sys(const __grid_constant__ FenceArgs args) {
    after<Sys>(args);
}

extern "C" __global__ void __launch_bounds__(32) probe_fence_cluster(const __grid_constant__ FenceArgs args) {
    after<Cluster>(args);
}

extern "C" __global__ void __launch_bounds__(32) probe_fence_red(const __grid_constant__ FenceArgs args) {
    after<Red>(args);
}

extern "C" __global__ void __launch_bounds__(32) probe_fence_none(const __grid_constant__ FenceArgs args) {
    after<None>(args);
}

extern "C" __global__ void __launch_bounds__(64) probe_amid_gpu(const __grid_constant__ FenceArgs args) {
    amid<Gpu>(args);
}

extern "C" __global__ void __launch_bounds__(64) probe_amid_sys(const __grid_constant__ FenceArgs args) {
    amid<Sys>(args);
}

extern "C" __global__ void __launch_bounds__(64) probe_amid_cluster(const __grid_constant__ FenceArgs args) {
    amid<Cluster>(args);
}

extern "C" __global__ void __launch_bounds__(64) probe_amid_red(const __grid_constant__ FenceArgs args) {
    amid<Red>(args);
}

extern "C" __global__ void __launch_bounds__(64) probe_amid_none(const __grid_constant__ FenceArgs args) {
    amid<None>(args);
}

} // namespace megagen::probe
