// Activations as MMA B operands, straight from row-major bf16 rows into registers.
#pragma once

#include <megagen/comm/channel.cuh>
#include <megagen/mma/format.cuh>

namespace megagen {

// Loads kGroups 64-k groups of kTiles tokens, column lane / 4 of each tile, into B registers [group][tile][word]. Group
// i covers k = start(i) .. start(i) + 63 of the rows that begin at elements `row`; start(i) is known when compiled, so
// that a row takes one address. Lane t = lane % 4 takes 16 consecutive k. All of it in one trip; `due` as in a read.
template <class Source, u32 kGroups, u32 kTiles, class Ctx, class Start>
MEGAGEN_DEVICE bool load_operand(Ctx& ctx, u32* b, const u32 (&row)[kTiles], Start start, bool due = true) {
    constexpr u32 kPer = 2 * kTiles; // vectors of a group
    uint4 v[kPer * kGroups];
    const u32 lane_k = ctx.lane % 4 * 16;
    const bool ok = Source::read(
        ctx, v, true,
        [&](u32 i) { return static_cast<u64>(row[i % kPer / 2] + lane_k) + (start(i / kPer) + i % 2 * 8); }, due);
#pragma unroll
    for (u32 i = 0; i < kPer * kGroups; ++i) {
        u32* to = b + i * 4;
        to[0] = v[i].x, to[1] = v[i].y, to[2] = v[i].z, to[3] = v[i].w;
    }
    return ok;
}

} // namespace megagen
