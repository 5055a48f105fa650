// How far two GPUs' timers are apart: lane 0 of a warp on each plays ping-pong with the other through peer memory and
// writes down when. See megagen/trace/offset.py.
#include <megagen/ptx/control.cuh>
#include <megagen/ptx/memory.cuh>

namespace {

using namespace megagen;

struct Params {
    u8* mine;  // u32: the number of the ball that has come
    u8* other; // the same of the other GPU
    u8* times; // u64 [rounds][2]: when the ball left and came back; of the one that returns it, when it came, twice
    u32 serves;
    u32 rounds;
    u32 timeout_ns; // of each wait; a round that is not played leaves zeros
};

__device__ bool arrived(const Params& p, u32 ball) {
    const u32 began = ptx::globaltimer_lo();
    while (ptx::ld_relaxed_sys(p.mine) != ball) {
        if (ptx::globaltimer_lo() - began > p.timeout_ns) return false;
        ptx::still_waiting(false, 0, 0, ball);
    }
    return true;
}

__device__ void note(const Params& p, u32 round, u64 first, u64 second) {
    const auto low = [](u64 v) { return static_cast<u32>(v); };
    ptx::st_global_v4(p.times + 16 * round, uint4{low(first), low(first >> 32), low(second), low(second >> 32)});
}

} // namespace

extern "C" __global__ void __launch_bounds__(32, 1) timer_offset(const __grid_constant__ Params p) {
    if (threadIdx.x != 0) return;
    for (u32 round = 0; round < p.rounds; ++round) {
        const u32 ball = round + 1;
        if (p.serves) {
            const u64 left = ptx::globaltimer();
            ptx::st_relaxed_sys(p.other, ball);
            if (!arrived(p, ball)) return;
            note(p, round, left, ptx::globaltimer());
        } else {
            if (!arrived(p, ball)) return;
            const u64 came = ptx::globaltimer();
            ptx::st_relaxed_sys(p.other, ball);
            note(p, round, came, came);
        }
    }
}
