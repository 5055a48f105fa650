// Comes before every file of this folder. tests/test_emulate_faults.py says how each kernel is launched and what it
// does for each `way`: 0 is right. A line marked "FAULT 1 2" is the one that a report must name for these ways, "OTHER
// 1" the second access.
#include <megagen/ptx/bulk.cuh>
#include <megagen/ptx/control.cuh>
#include <megagen/ptx/convert.cuh>
#include <megagen/ptx/mbarrier.cuh>
#include <megagen/ptx/memory.cuh>
#include <megagen/ptx/mma.cuh>

namespace {

using namespace megagen;

struct Params {
    const u32* constant; // 1002 words
    u32* heap;           // 1024 words, the same ones on all ranks; the host wrote zeros to the first half
    u32* out;            // 1024 words
    u32 way, rank, launch, unused;
};

// To the end: no test here expires.
#define AWAIT(has)                                                                                                     \
    while (!(has)) ptx::still_waiting(false, 0, 0, 0)

MEGAGEN_DEVICE void put(u32* out, u32 v) { ptx::st_global_u32(out, v); }

} // namespace
