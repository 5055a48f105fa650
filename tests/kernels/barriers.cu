// mbarriers, named barriers, and sync/ on top of them. Geometry and values: cases.py.
#include <megagen/debug/stamp.cuh>
#include <megagen/ptx/bulk.cuh>
#include <megagen/ptx/control.cuh>
#include <megagen/ptx/mbarrier.cuh>
#include <megagen/ptx/memory.cuh>
#include <megagen/sync/barrier.cuh>
#include <megagen/sync/ring.cuh>

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
        if (ptx::mbarrier_try_wait_parity(bar, parity)) return true;
        ptx::still_waiting(false, 0, 0, parity);
    }
    return false;
}

// As much of a kernel's context as sync/ asks for.
namespace barrier {
struct Full {
    static constexpr u32 kOffset = 0, kSlots = 3, kCount = 1, kIndex = 0;
};
struct Empty {
    static constexpr u32 kOffset = 24, kSlots = 3, kCount = 4, kIndex = 1;
};
struct Done {
    static constexpr u32 kOffset = 48, kSlots = 1, kCount = 4, kIndex = 2;
};
} // namespace barrier

struct RingPolicy {
    using Full = barrier::Full;
    using Empty = barrier::Empty;
    static constexpr u32 kStages = 3, kStageBytes = 512, kOffset = 128;
};

struct KernelPolicy {
    static constexpr u32 kWarps = 5, kNotes = 128 + 3 * 512; // after the stages
    static constexpr bool kBoundedWaits = true;
};

struct Host {
    System sys;
};

struct Context {
    using Kernel = KernelPolicy;
    const Host& p;
    u32 shared = ptx::dynamic_shared();
    u32 block = blockIdx.x;
    u32 warp = threadIdx.x / 32;
    u32 lane = threadIdx.x % 32;
    ptx::Step step = 0;
    bool dead = false;
    bool dry = false;
    Cursor<RingPolicy::kStages> ring;
    u32 ring_loads = 0;
    debug::NoStamps stamps;

    __device__ __forceinline__ explicit Context(const Host& host)
        : p(host) {}
};

} // namespace

// One thread takes a barrier through its phases; polls that must fail are made once.
extern "C" __global__ void phases(const __grid_constant__ Params<1> p) {
    if (threadIdx.x != 0) return;
    const u32 bar = ptx::dynamic_shared(), buffer = bar + 128;
    u32 n = 0;
    const auto say = [&](u32 v) { put(p.out, n++, v); };
    const auto poll = [&](u32 parity) { say(ptx::mbarrier_try_wait_parity(bar, parity)); };
    const auto poll_cluster = [&](u32 parity) { say(ptx::mbarrier_try_wait_parity_cluster(bar, parity)); };

    ptx::mbarrier_init(bar, 3);
    ptx::fence_mbarrier_init();
    poll(1); // the phase before the first counts as complete
    poll(0);
    ptx::mbarrier_arrive(bar);
    poll(0);
    ptx::mbarrier_arrive_count(bar, 2);
    poll(0);
    poll(1);
    poll_cluster(0);
    poll_cluster(1);

    ptx::mbarrier_expect_tx(bar, 64); // holds up a phase in which all have arrived
    ptx::mbarrier_arrive_count(bar, 3);
    poll(1);
    ptx::bulk_load(buffer, p.in[0], 64, bar);
    say(await(bar, 1));
    for (u32 i = 0; i < 16; ++i) say(ptx::ld_shared_u32(buffer + 4 * i));

    ptx::mbarrier_arrive_count(bar, 2);
    ptx::mbarrier_arrive_expect_tx(bar, 48);
    poll(0);
    ptx::bulk_load(buffer + 64, p.in[0] + 16, 32, bar);
    ptx::bulk_load(buffer + 96, p.in[0] + 24, 16, bar);
    say(await(bar, 0));
    for (u32 i = 0; i < 12; ++i) say(ptx::ld_shared_u32(buffer + 64 + 4 * i));
    poll(1);
    poll_cluster(0);
}

// Warps 1 .. 3 put a word a thread, warp 0 adds three of them; one slot, so every round waits for the one before.
extern "C" __global__ void rounds(const __grid_constant__ Params<1> p) {
    constexpr u32 kRounds = 16, kProducers = 96;
    const u32 full = ptx::dynamic_shared(), empty = full + 8, slot = full + 128, tid = threadIdx.x;
    if (tid == 0) {
        ptx::mbarrier_init(full, kProducers);
        ptx::mbarrier_init(empty, 32);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    bool ok = true;
#pragma unroll 1
    for (u32 round = 0; ok && round < kRounds; ++round) {
        const u32 parity = round % 2;
        if (tid >= 32) {
            ok = await(empty, parity ^ 1);
            if (!ok) break;
            const u32 i = tid - 32;
            ptx::st_shared_u32(slot + 4 * i, ptx::ld_relaxed_gpu(p.in[0] + round * kProducers + i));
            ptx::mbarrier_arrive(full);
        } else {
            ok = await(full, parity);
            if (!ok) break;
            u32 sum = 0;
            for (u32 i = 0; i < 3; ++i) sum += ptx::ld_shared_u32(slot + 4 * (32 * i + tid)) << i;
            put(p.out, round * 32 + tid, sum);
            ptx::mbarrier_arrive(empty);
        }
    }
    put(p.out, kRounds * 32 + tid, ok ? 1 : 0);
}

// Warps 0 and 1 fill two buffers in turn, warps 2 and 3 read them; then each pair meets at a barrier of its own.
extern "C" __global__ void named(const __grid_constant__ Params<1> p) {
    constexpr u32 kRounds = 16, kHalf = 64, kAll = 128;
    constexpr u32 kFull = 1, kEmpty = 3, kPair = 5; // and one more each
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x, i = tid % kHalf;
#pragma unroll 1
    for (u32 round = 0; round < kRounds; ++round) {
        const u32 which = round % 2, buffer = base + which * kHalf * 4;
        if (tid < kHalf) {
            if (round >= 2) ptx::bar_sync(kEmpty + which, kAll);
            ptx::st_shared_u32(buffer + 4 * i, ptx::ld_relaxed_gpu(p.in[0] + round * kHalf + i));
            ptx::bar_arrive(kFull + which, kAll);
        } else {
            ptx::bar_sync(kFull + which, kAll);
            put(p.out, round * kHalf + i, ptx::ld_shared_u32(buffer + 4 * ((i + 33) % kHalf)));
            if (round + 2 < kRounds) ptx::bar_arrive(kEmpty + which, kAll);
        }
    }
    const u32 pair = tid / kHalf, own = base + 2 * kHalf * 4 + pair * kHalf * 4;
    ptx::st_shared_u32(own + 4 * i, tid * 5 + 1);
    ptx::bar_sync(kPair + pair, kHalf);
    put(p.out, kRounds * kHalf + tid, ptx::ld_shared_u32(own + 4 * ((i + 32) % kHalf)));
}

// Pairs of warps vote, round after round: everybody is for it, but in each round one lane of the block, or nobody.
extern "C" __global__ void votes(const __grid_constant__ Params<1> p) {
    constexpr u32 kRounds = 16, kHalf = 64, kThreads = 128, kPair = 5;
    const u32 tid = threadIdx.x;
    u32 seen = 0;
#pragma unroll 1
    for (u32 round = 0; round < kRounds; ++round) {
        const bool vote = tid != ptx::ld_relaxed_gpu(p.in[0] + round);
        seen |= (ptx::bar_and(kPair + tid / kHalf, kHalf, vote) ? 1 : 0) << round;
    }
    put(p.out, blockIdx.x * kThreads + tid, seen);
}

// The library's ring: warp 0 loads 20 tiles of 512 bytes, warps 1 .. 4 copy a quarter each. in[1]: the abort word.
extern "C" __global__ void ring(const __grid_constant__ Params<2> p) {
    using Ring = megagen::Ring<RingPolicy>;
    using Done = Event<barrier::Done>;
    constexpr u32 kTiles = 20, kWords = 128;
    Host host{};
    host.sys.abort[0] = reinterpret_cast<u8*>(p.in[1]);
    host.sys.live = host.sys.world = 1;
    host.sys.timeout_ns = 1000000000;
    Context ctx(host);
    if (threadIdx.x == 0) {
        Barrier<barrier::Full>::init(ctx);
        Barrier<barrier::Empty>::init(ctx);
        Barrier<barrier::Done>::init(ctx);
        ptx::fence_mbarrier_init();
    }
    if (ctx.warp == 0) debug::clear(ctx);
    __syncthreads();
    if (ctx.warp == 0) {
        const u64 first = cache_policy<Hint::kEvictFirst>(), last = cache_policy<Hint::kEvictLast>();
        bool ok = true;
#pragma unroll 1
        for (u32 tile = 0; ok && tile < kTiles; ++tile) {
            const u32* source = p.in[0] + tile * kWords;
            const Piece whole[1] = {{source, kWords * 4}};
            const Piece parts[2] = {{source, 128}, {source + 32, kWords * 4 - 128}};
            if (tile % 3 == 0) ok = Ring::load<2, Hint::kEvictNormal>(ctx, parts, 0);
            if (tile % 3 == 1) ok = Ring::load<3, Hint::kEvictFirst>(ctx, whole, first);
            if (tile % 3 == 2) ok = Ring::load<1, Hint::kEvictLast>(ctx, parts, last);
        }
        if (ok && Done::wait(ctx)) Ring::drain(ctx); // all has landed: no endless wait
    } else {
        const u32 mine = (ctx.warp - 1) * 32 + ctx.lane;
        bool ok = true;
#pragma unroll 1
        for (u32 tile = 0; tile < kTiles; ++tile) {
            ok = Ring::acquire(ctx);
            if (!ok) break;
            const u32 v = ptx::ld_shared_u32(Ring::stage(ctx) + 4 * mine);
            Ring::release(ctx, __uint_as_float(v));
            put(p.out, tile * kWords + mine, v);
        }
        if (ok) Done::arrive(ctx);
    }
    if (ctx.lane == 0) put(p.out, kTiles * kWords + ctx.warp, ctx.dead ? 0 : 1);
}
