// Products of a warpgroup: A from registers, B in shared memory. sm_90a only. Geometry and values: cases.py.
#include <megagen/ptx/bulk.cuh>
#include <megagen/ptx/control.cuh>
#include <megagen/ptx/mbarrier.cuh>
#include <megagen/ptx/memory.cuh>
#include <megagen/ptx/wgmma.cuh>

namespace {

using namespace megagen;

struct Params {
    u32* in[3]; // A and C by warp, as they lie in registers; B [n][k], or [tile] as its core matrices lie
    u32* out;
};

constexpr u32 kRows = 64, kDepth = 64, kSteps = kDepth / 16; // rows: of B, which are columns of D
constexpr u32 kSums = 32;                                    // of a lane

using Sums = float[8][4];

// Where B's core matrices lie.
template <u32 kLeading, u32 kStride>
struct Layout {
    MEGAGEN_DEVICE u32 offset(u32 n, u32 k) { return k / 8 * kLeading + n / 8 * kStride + n % 8 * 16 + k % 8 * 2; }

    MEGAGEN_DEVICE u64 descriptor(u32 base, u32 step) {
        return ptx::wgmma_descriptor(base + offset(0, 16 * step), kLeading, kStride);
    }
};

MEGAGEN_DEVICE u32 lane_of_grid() { return blockIdx.x * blockDim.x + threadIdx.x; }

MEGAGEN_DEVICE uint4 operand(const Params& p, u32 step) {
    const u32 warp = lane_of_grid() / 32;
    return ptx::ld_global_v4(p.in[0] + 4 * ((warp * kSteps + step) * 32 + threadIdx.x % 32));
}

MEGAGEN_DEVICE void load(Sums& d, const u32* from) {
    for (u32 n = 0; n < 8; ++n)
        for (u32 i = 0; i < 4; ++i)
            d[n][i] = __uint_as_float(ptx::ld_relaxed_gpu(from + lane_of_grid() * kSums + 4 * n + i));
}

MEGAGEN_DEVICE void store(u32* to, const Sums& d) {
    for (u32 n = 0; n < 8; ++n)
        for (u32 i = 0; i < 4; ++i)
            ptx::st_global_u32(to + lane_of_grid() * kSums + 4 * n + i, __float_as_uint(d[n][i]));
}

template <class L>
MEGAGEN_DEVICE void spread(const Params& p, u32 base) {
    for (u32 i = threadIdx.x; i < kRows * kDepth / 2; i += blockDim.x)
        ptx::st_shared_u32(base + L::offset(i / (kDepth / 2), i % (kDepth / 2) * 2), ptx::ld_relaxed_gpu(p.in[1] + i));
    ptx::fence_proxy_async();
    __syncthreads();
}

MEGAGEN_DEVICE void multiply(Sums& d, uint4 a, u64 b, bool accumulate) {
    ptx::wgmma_m64n64k16_bf16(d, a.x, a.y, a.z, a.w, b, accumulate);
}

MEGAGEN_DEVICE void hold(const uint4 (&a)[kSteps]) {
    u32 words[8][2];
    for (u32 step = 0; step < kSteps; ++step) {
        words[2 * step][0] = a[step].x, words[2 * step][1] = a[step].y;
        words[2 * step + 1][0] = a[step].z, words[2 * step + 1][1] = a[step].w;
    }
    ptx::wgmma_hold(words);
}

// Out: A B, and A B + C, in four steps each.
template <class L>
MEGAGEN_DEVICE void chain(const Params& p) {
    const u32 base = ptx::dynamic_shared();
    spread<L>(p, base);
    uint4 a[kSteps];
    for (u32 step = 0; step < kSteps; ++step) a[step] = operand(p, step);
    Sums d;
    load(d, p.in[2]);
#pragma unroll 1
    for (u32 round = 0; round < 2; ++round) {
        ptx::wgmma_pin(d);
        ptx::wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < kSteps; ++step) multiply(d, a[step], L::descriptor(base, step), round || step);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(d);
        hold(a);
        store(p.out + round * gridDim.x * blockDim.x * kSums, d);
        if (!round) load(d, p.in[2]);
    }
}

constexpr u32 kPolls = 1u << 16; // a wait that needs more has failed

MEGAGEN_DEVICE bool await(u32 bar, u32 parity) {
#pragma unroll 1
    for (u32 poll = 0; poll < kPolls; ++poll) {
        if (ptx::mbarrier_try_wait_parity(bar, parity)) return true;
        ptx::still_waiting(false, 0, 0, parity);
    }
    return false;
}

} // namespace

extern "C" __global__ void product_rows(const __grid_constant__ Params p) { chain<Layout<128, 1024>>(p); }

extern "C" __global__ void product_columns(const __grid_constant__ Params p) { chain<Layout<1024, 128>>(p); }

// With 16 bytes between core matrices.
extern "C" __global__ void product_apart(const __grid_constant__ Params p) { chain<Layout<1168, 144>>(p); }

// Groups under way at once: of two sums, then two of one sum. Out: A B + C of the first two steps, and of the last two;
// A B + C; 3 A B of the first step.
extern "C" __global__ void product_groups(const __grid_constant__ Params p) {
    using L = Layout<128, 1024>;
    const u32 base = ptx::dynamic_shared(), words = gridDim.x * blockDim.x * kSums;
    spread<L>(p, base);
    Sums x, y;
    load(x, p.in[2]);
    load(y, p.in[2]);
    const uint4 a0 = operand(p, 0), a1 = operand(p, 1), a2 = operand(p, 2), a3 = operand(p, 3);
    ptx::wgmma_pin(x);
    ptx::wgmma_pin(y);
    ptx::wgmma_fence();
    multiply(x, a0, L::descriptor(base, 0), true);
    multiply(x, a1, L::descriptor(base, 1), true);
    ptx::wgmma_commit();
    multiply(y, a2, L::descriptor(base, 2), true);
    multiply(y, a3, L::descriptor(base, 3), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(x);
    store(p.out, x);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(y);
    store(p.out + words, y);

    // x has the first two steps.
    ptx::wgmma_pin(x);
    ptx::wgmma_fence();
    multiply(x, a2, L::descriptor(base, 2), true);
    ptx::wgmma_commit();
    multiply(x, a3, L::descriptor(base, 3), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::wgmma_commit(); // an empty one: then both are complete
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(x);
    store(p.out + 2 * words, x);

    ptx::wgmma_fence();
    for (u32 times = 0; times < 3; ++times) multiply(x, a0, L::descriptor(base, 0), times != 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(x);
    store(p.out + 3 * words, x);
}

// Warp 4 loads tiles of B into two stages; one tile's products are under way while the next one's begin. Out: C + their
// sum, and whether each thread has had all.
extern "C" __global__ void product_ring(const __grid_constant__ Params p) {
    using L = Layout<128, 1024>;
    constexpr u32 kStages = 2, kBytes = kRows * kDepth * 2, kTiles = 6, kWarps = 4;
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x;
    const auto full = [&](u32 s) { return base + 8 * s; };
    const auto empty = [&](u32 s) { return base + 8 * (kStages + s); };
    const auto stage = [&](u32 s) { return base + 128 + kBytes * s; };
    if (tid == 0) {
        for (u32 s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(full(s), 1);
            ptx::mbarrier_init(empty(s), kWarps);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    bool ok = true;
    if (tid == 32 * kWarps) {
#pragma unroll 1
        for (u32 tile = 0; tile < kTiles; ++tile) {
            const u32 s = tile % kStages;
            ok = ok && await(empty(s), (tile / kStages % 2) ^ 1);
            ptx::mbarrier_arrive_expect_tx(full(s), kBytes);
            ptx::bulk_load(stage(s), p.in[1] + tile * kBytes / 4, kBytes, full(s));
        }
    } else if (tid < 32 * kWarps) {
        Sums d;
        load(d, p.in[2]);
        ptx::wgmma_pin(d);
#pragma unroll 1
        for (u32 pair = 0; pair < kTiles; pair += kStages) {
#pragma unroll
            for (u32 s = 0; s < kStages; ++s) { // so A of the products under way has registers of its own
                ok = await(full(s), pair / kStages % 2) && ok;
                __syncwarp();
                uint4 a[kSteps];
#pragma unroll
                for (u32 step = 0; step < kSteps; ++step) a[step] = operand(p, step);
                ptx::wgmma_fence();
#pragma unroll
                for (u32 step = 0; step < kSteps; ++step) multiply(d, a[step], L::descriptor(stage(s), step), true);
                ptx::wgmma_commit();
                ptx::wgmma_wait<1>();
                if ((pair || s) && tid % 32 == 0) ptx::mbarrier_arrive(empty(s ^ 1));
            }
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(d);
        store(p.out, d);
    }
    ptx::st_global_u32(p.out + 32 * kWarps * kSums + tid, ok ? 1 : 0);
}
