// Built-in functions of warps and words, launch control, timers. Geometry and values: cases.py.
#include <megagen/ptx/control.cuh>
#include <megagen/ptx/memory.cuh>
#include <megagen/ptx/stamp.cuh>

namespace {

using namespace megagen;

template <u32 kInputs>
struct Params {
    u32* in[kInputs];
    u32* out;
};

} // namespace

// in: two words a thread and round, a value and which lane to ask (beyond 31: modulo 32).
extern "C" __global__ void lanes(const __grid_constant__ Params<1> p) {
    constexpr u32 kThreads = 128, kRounds = 32, kResults = 17;
    const u32 tid = threadIdx.x, lane = tid % 32, base = ptx::dynamic_shared();
#pragma unroll 1
    for (u32 round = 0; round < kRounds; ++round) {
        const u32 at = round * kThreads + tid;
        const u32 x = ptx::ld_relaxed_gpu(p.in[0] + 2 * at), source = ptx::ld_relaxed_gpu(p.in[0] + 2 * at + 1);
        const float f = __uint_as_float(x);
        u32 r[kResults];
        r[0] = __shfl_sync(kFullMask, x, source);
        r[1] = __float_as_uint(__shfl_sync(kFullMask, f, source));
        r[2] = __shfl_up_sync(kFullMask, x, round);
        r[3] = __shfl_xor_sync(kFullMask, x, round);
        r[4] = __float_as_uint(__shfl_xor_sync(kFullMask, f, round));
        r[5] = __any_sync(kFullMask, x % 64 == 0) ? 1 : 0;
        r[6] = __all_sync(kFullMask, x % 64 != 1) ? 1 : 0;
        r[7] = __ballot_sync(kFullMask, x & 2);
        r[8] = __reduce_max_sync(kFullMask, x);
        r[9] = __popc(x);
        r[10] = __ffs(x);
        r[11] = __funnelshift_r(x, __float_as_uint(f) ^ source, source);
        ptx::st_shared_u32(base + 4 * tid, x);
        __syncwarp();
        r[12] = ptx::ld_shared_u32(base + 4 * (tid - lane + (lane + 1) % 32));
        __syncwarp();
        ptx::st_shared_u32(base + 4 * tid, x + 1);
        __syncthreads();
        r[13] = ptx::ld_shared_u32(base + 4 * ((tid + 32) % kThreads));
        __syncthreads();
        r[14] = __uint_as_float(x) == f ? 1 : 0; // not if a NaN
        r[15] = __reduce_min_sync(kFullMask, x);
        r[16] = __clz(static_cast<int>(x));
        for (u32 i = 0; i < kResults; ++i) ptx::st_global_u32(p.out + kResults * at + i, r[i]);
    }
}

// Three warpgroups, whose registers move; a launch without dependents waits for nothing and triggers nothing.
extern "C" __global__ void __launch_bounds__(384, 1) control(const __grid_constant__ Params<1> p) {
    const u32 tid = threadIdx.x;
    ptx::griddepcontrol_wait();
    u32 value = ptx::ld_relaxed_gpu(p.in[0] + tid);
    if (tid < 128) {
        ptx::setmaxnreg_dec<120>();
        value += 1;
    } else {
        ptx::setmaxnreg_inc<192>();
        value += 2;
    }
    ptx::griddepcontrol_launch_dependents();
    const u64 before = ptx::globaltimer();
    const u32 between = ptx::globaltimer_lo();
    const u64 after = ptx::globaltimer();
    const bool ordered = before <= after && between - static_cast<u32>(before) <= static_cast<u32>(after - before);
    ptx::st_global_u32(p.out + 4 * tid, value);
    ptx::st_global_u32(p.out + 4 * tid + 1, ordered ? 1 : 0);
    ptx::st_global_u32(p.out + 4 * tid + 2, after - before < 1000000000 ? 1 : 0);
    ptx::st_global_u32(p.out + 4 * tid + 3, ptx::smid() < 1024 ? 1 : 0);
}

// Both clocks go on, and their low words are theirs; a stamp is one store.
extern "C" __global__ void stamps(const __grid_constant__ Params<1> p) {
    const u32 tid = threadIdx.x;
    const u64 began = ptx::stamp_globaltimer(), first = ptx::stamp_clock64();
    const u32 timer = ptx::stamp_globaltimer_lo(), clock = ptx::stamp_clock();
    const u32 value = ptx::ld_relaxed_gpu(p.in[0] + tid);
    const u64 ended = ptx::stamp_globaltimer(), last = ptx::stamp_clock64();
    const auto within = [](u64 from, u32 at, u64 to) {
        return from <= to && to - from < 1000000000 && at - static_cast<u32>(from) <= static_cast<u32>(to - from);
    };
    ptx::st_stamp(p.out + 4 * tid,
                  uint4{value, within(began, timer, ended) ? 1u : 0u, within(first, clock, last) ? 1u : 0u, tid});
}
