// Warp-level matrices: operands a lane as they lie in its registers. Geometry and values: cases.py.
#include <megagen/ptx/memory.cuh>
#include <megagen/ptx/mma.cuh>

namespace {

using namespace megagen;

template <u32 kInputs>
struct Params {
    u32* in[kInputs];
    u32* out;
};

// in: A, four words a lane and tile; B, two; C, four. A warp has kTiles tiles in a row.
template <class Multiply>
MEGAGEN_DEVICE void tiles(const Params<3>& p, Multiply multiply) {
    constexpr u32 kThreads = 128, kTiles = 32;
    const u32 warp = (blockIdx.x * kThreads + threadIdx.x) / 32;
#pragma unroll 1
    for (u32 tile = warp * kTiles; tile < (warp + 1) * kTiles; ++tile) {
        const u32 at = tile * 32 + threadIdx.x % 32;
        const uint4 a = ptx::ld_global_v4(p.in[0] + 4 * at);
        const u32 b0 = ptx::ld_relaxed_gpu(p.in[1] + 2 * at), b1 = ptx::ld_relaxed_gpu(p.in[1] + 2 * at + 1);
        float d[4];
        for (u32 i = 0; i < 4; ++i) d[i] = __uint_as_float(ptx::ld_relaxed_gpu(p.in[2] + 4 * at + i));
        multiply(d, a, b0, b1);
        for (u32 i = 0; i < 4; ++i) ptx::st_global_u32(p.out + 4 * at + i, __float_as_uint(d[i]));
    }
}

} // namespace

extern "C" __global__ void multiply_bf16(const __grid_constant__ Params<3> p) {
    tiles(p, [](float (&d)[4], uint4 a, u32 b0, u32 b1) { ptx::mma_m16n8k16_bf16(d, a.x, a.y, a.z, a.w, b0, b1); });
}

extern "C" __global__ void multiply_tf32(const __grid_constant__ Params<3> p) {
    tiles(p, [](float (&d)[4], uint4 a, u32 b0, u32 b1) { ptx::mma_m16n8k8_tf32(d, a.x, a.y, a.z, a.w, b0, b1); });
}

// in[0]: 128 rows of 16 bytes; in[1]: the row that each lane names, round by round.
extern "C" __global__ void matrix_loads(const __grid_constant__ Params<2> p) {
    constexpr u32 kThreads = 64, kRounds = 16, kRows = 128;
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x;
    for (u32 i = tid; i < 4 * kRows; i += kThreads) ptx::st_shared_u32(base + 4 * i, ptx::ld_relaxed_gpu(p.in[0] + i));
    __syncthreads();
#pragma unroll 1
    for (u32 round = 0; round < kRounds; ++round) {
        const u32 at = round * kThreads + tid;
        const u32 row = base + 16 * ptx::ld_relaxed_gpu(p.in[1] + at);
        u32 four[4], turned[4], two[2];
        ptx::ldmatrix_x4(four, row);
        ptx::ldmatrix_x4_trans(turned, row);
        ptx::ldmatrix_x2(two, row);
        for (u32 i = 0; i < 4; ++i) {
            ptx::st_global_u32(p.out + 11 * at + i, four[i]);
            ptx::st_global_u32(p.out + 11 * at + 4 + i, turned[i]);
        }
        ptx::st_global_u32(p.out + 11 * at + 8, two[0]);
        ptx::st_global_u32(p.out + 11 * at + 9, two[1]);
        ptx::st_global_u32(p.out + 11 * at + 10, ptx::movmatrix_trans(four[0]));
    }
}
