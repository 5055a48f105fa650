// What all probes share: clocks, waits with a bound, a meeting of all blocks, streams of bulk loads.
//
// Every argument of a kernel is eight bytes, in one struct by value; its first is the Head.
#include <megagen/ptx/bulk.cuh>
#include <megagen/ptx/control.cuh>
#include <megagen/ptx/mbarrier.cuh>
#include <megagen/ptx/memory.cuh>

namespace megagen::probe {

using namespace ptx;

MEGAGEN_DEVICE u32 clock32() {
    u32 t;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
    return t;
}

MEGAGEN_DEVICE u64 clock64() {
    u64 t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
    return t;
}

constexpr u32 kBound = 100'000'000; // ns: of every wait
constexpr u32 kPollsPerCheck = 64;

// Zero when a launch begins. Mirrored by megagen/probe/gpu.py.
struct alignas(128) Head {
    u32 failed; // a wait has run out
    u32 unused;
    u64 clk; // block 0, from begin to end
    u64 ns;
    alignas(128) u32 arrived; // of all meetings
};
static_assert(sizeof(Head) == 256, "the host allocates 256 bytes");

// Tells clocks from nanoseconds. One thread.
struct Watch {
    u64 clk = clock64();
    u64 ns = globaltimer();

    __device__ __forceinline__ void stop(Head* head) const {
        if (blockIdx.x != 0) return;
        head->clk = clock64() - clk;
        head->ns = globaltimer() - ns;
    }
};

MEGAGEN_DEVICE void pause(u32 ns) {
    const u32 began = globaltimer_lo();
    while (globaltimer_lo() - began < ns) {
    }
}

// Polls until `ready`. False, for every thread of the launch from then on: somebody's wait has run out.
template <class Ready>
MEGAGEN_DEVICE bool until(Head* head, Ready ready) {
    u32 began = 0;
#pragma unroll 1
    for (u32 polls = 1;; ++polls) {
        if (ready()) return true;
        still_waiting(false, 0, 0, 0);
        if (polls % kPollsPerCheck != 0) continue;
        const u32 now = globaltimer_lo();
        if (polls == kPollsPerCheck) began = now;
        if (now - began > kBound || ld_relaxed_gpu(&head->failed) != 0) {
            st_relaxed_gpu(&head->failed, 1);
            return false;
        }
    }
}

// Whatever has happened elsewhere: a block may not leave before its loads have landed.
MEGAGEN_DEVICE bool landed(Head* head, u32 bar, u32 parity) {
    const u32 began = globaltimer_lo();
#pragma unroll 1
    while (!mbarrier_try_wait_parity(bar, parity)) {
        still_waiting(false, 0, 0, 0);
        if (globaltimer_lo() - began > kBound) {
            st_relaxed_gpu(&head->failed, 1);
            return false;
        }
    }
    return true;
}

// The n-th meeting of all blocks, from 1. One thread a block.
MEGAGEN_DEVICE bool meet(Head* head, u32 n) {
    red_add_release_gpu(&head->arrived, 1);
    return until(head, [&] { return ld_acquire_gpu(&head->arrived) >= n * gridDim.x; });
}

// The same for all threads.
MEGAGEN_DEVICE bool meet_all(Head* head, u32 n) {
    __syncthreads();
    const bool ok = threadIdx.x != 0 || meet(head, n);
    return __syncthreads_and(ok) != 0;
}

// Shared memory: barriers, a word, then the ring.
constexpr u32 kStop = 512;
constexpr u32 kRing = 1024;

// Bulk loads of a block's own `share` of bytes (a multiple of 16) in pieces of up to `bytes`, over and over.
struct Load {
    const u8* data;
    u64 share;
    u64 stages; // of the ring
    u64 bytes;
    u64 flight; // stages that may be under way; 0: no loads
};

// One thread issues them through a ring. Nothing reads what lands, so only what is under way holds it up.
struct Stream {
    Head* head;
    const u8* data;
    u64 share;
    u32 stages;
    u32 bytes;
    u32 flight;
    u32 shared = dynamic_shared();
    u64 at = 0;
    u64 moved = 0;
    u32 loads = 0;
    u32 slot = 0;
    u32 phase = 0;

    __device__ __forceinline__ Stream(Head* head, const Load& load, u32 part)
        : head(head)
        , data(load.data + part * load.share)
        , share(load.share)
        , stages(static_cast<u32>(load.stages))
        , bytes(static_cast<u32>(load.bytes))
        , flight(static_cast<u32>(load.flight)) {}

    __device__ __forceinline__ void init() const {
        for (u32 s = 0; s < stages; ++s) mbarrier_init(shared + 8 * s, 1);
        fence_mbarrier_init();
    }

    // Waits for the load so many loads ago.
    __device__ __forceinline__ bool has_landed(u32 back) const {
        const bool wrapped = slot < back;
        return landed(head, shared + 8 * (slot + (wrapped ? stages : 0) - back), phase ^ (wrapped ? 1 : 0));
    }

    __device__ __forceinline__ bool load(const u8* src, u32 size) {
        const u32 bar = shared + 8 * slot;
        if (loads >= flight && !has_landed(flight)) return false;
        mbarrier_arrive_expect_tx(bar, size);
        bulk_load(shared + kRing + slot * bytes, src, size, bar);
        moved += size;
        ++loads;
        if (++slot == stages) {
            slot = 0;
            phase ^= 1;
        }
        return true;
    }

    __device__ __forceinline__ bool next() {
        const u64 left = share - at;
        const u32 size = left < bytes ? static_cast<u32>(left) : bytes;
        const bool ok = load(data + at, size);
        at = size == left ? 0 : at + size;
        return ok;
    }

    // Until all have landed.
    __device__ __forceinline__ void drain() const {
        const u32 n = loads < flight ? loads : flight;
        for (u32 back = 1; back <= n; ++back) has_landed(back);
    }
};

constexpr u32 kLeadIn = 20'000; // ns: a stream is steady by then

// Two warps. Thread 0 streams while thread 32 does `work`, until the last block's is done: who streamed on beside fewer
// others would have it easier. moved: bytes and ns of each block.
template <class Work>
MEGAGEN_DEVICE void beside(Head* head, const Load& load, u64* moved, Work work) {
    Stream stream(head, load, blockIdx.x);
    const u32 stop = stream.shared + kStop;
    if (threadIdx.x == 0) {
        st_shared_u32(stop, 0);
        stream.init();
    }
    const bool ok = meet_all(head, 1);
    if (ok && threadIdx.x == 0 && stream.flight != 0) {
        const u64 began = globaltimer();
        while (ld_shared_u32(stop) == 0 && globaltimer() - began < kBound && stream.next()) {
        }
        stream.drain();
        moved[2 * blockIdx.x] = stream.moved;
        moved[2 * blockIdx.x + 1] = globaltimer() - began;
    }
    if (threadIdx.x == 32) {
        if (ok) {
            const Watch watch;
            pause(kLeadIn);
            work();
            watch.stop(head);
            meet(head, 2);
        }
        st_shared_u32(stop, 1);
    }
    __syncthreads();
}

} // namespace megagen::probe
