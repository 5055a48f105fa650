// Straight-line code, any stretch of it, over and over: what the instruction cache holds runs at one speed.
#include "common.cuh"

namespace megagen::probe {

// Four chains, so that fetching is what takes time.
#define FMA4                                                                                                           \
    "fma.rn.f32 %0, %0, %4, %5;\n fma.rn.f32 %1, %1, %4, %5;\n fma.rn.f32 %2, %2, %4, %5;\n fma.rn.f32 %3, %3, %4, "   \
    "%5;\n "
#define FMA16      FMA4 FMA4 FMA4 FMA4
#define FMA64      FMA16 FMA16 FMA16 FMA16
#define CHUNK_FMAS FMA64 FMA64 FMA64 FMA16 FMA16 FMA16 FMA4 FMA4 // 248, and a few instructions to stop or go on

#define CHUNK(i)                                                                                                       \
    case i:                                                                                                            \
        asm volatile("// chunk " #i "\n " CHUNK_FMAS : "+f"(a), "+f"(b), "+f"(c), "+f"(d) : "f"(x), "f"(y));           \
        if (last == i) break;                                                                                          \
        [[fallthrough]];

#define CHUNK4(i, j, k, l) CHUNK(i) CHUNK(j) CHUNK(k) CHUNK(l)

constexpr u32 kChunks = 52; // mirrored by megagen/probe/code.py

struct CodeArgs {
    Head* head;
    u64 first[2]; // chunk, of each of the two stretches
    u64 count[2]; // chunks; 0: no second stretch
    u64 passes;
    u32* clks; // [2][passes][blocks]
    float* sink;
};

extern "C" __global__ void __launch_bounds__(128) probe_code(const __grid_constant__ CodeArgs args) {
    const Watch watch;
    float a = threadIdx.x, b = a + 1, c = a + 2, d = a + 3;
    const float x = 0.5f * args.passes, y = 0.25f * args.passes;
#pragma unroll 1
    for (u32 pass = 0; pass < args.passes; ++pass) {
#pragma unroll 1
        for (u32 part = 0; part < 2; ++part) {
            if (args.count[part] == 0) break;
            const u32 first = static_cast<u32>(args.first[part]);
            const u32 last = first + static_cast<u32>(args.count[part]) - 1;
            const u32 began = clock32();
            switch (first) {
                CHUNK4(0, 1, 2, 3)
                CHUNK4(4, 5, 6, 7)
                CHUNK4(8, 9, 10, 11)
                CHUNK4(12, 13, 14, 15)
                CHUNK4(16, 17, 18, 19)
                CHUNK4(20, 21, 22, 23)
                CHUNK4(24, 25, 26, 27)
                CHUNK4(28, 29, 30, 31)
                CHUNK4(32, 33, 34, 35)
                CHUNK4(36, 37, 38, 39)
                CHUNK4(40, 41, 42, 43)
                CHUNK4(44, 45, 46, 47)
                CHUNK4(48, 49, 50, 51)
            default:
                break;
            }
            const u32 took = clock32() - began;
            if (threadIdx.x == 0) args.clks[(part * args.passes + pass) * gridDim.x + blockIdx.x] = took;
        }
    }
    if (a + b + c + d == 0.123f) *args.sink = a;
    if (threadIdx.x == 0) watch.stop(args.head);
}

} // namespace megagen::probe
