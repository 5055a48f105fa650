// Activations as MMA B operands, straight from row-major bf16 rows into registers.
#pragma once

#include <megagen/comm/channel.cuh>
#include <megagen/mma/format.cuh>

namespace megagen {

// Loads kGroups 64-k groups of one token (column lane / 4 of the tile) to consecutive groups of B registers at `b`:
// group i covers k = start(i) .. start(i) + 63 of the row that begins at element `row`. Lane t = lane % 4 takes 16
// consecutive k. kStride: registers from one group to the next.
template <class Source, u32 kGroups, u32 kStride = kGroupWords, class Ctx, class Start>
MEGAGEN_DEVICE bool load_operand(Ctx& ctx, u32* b, bool valid, u32 row, Start start) {
    uint4 v[2 * kGroups];
    const u32 lane_k = ctx.lane % 4 * 16;
    const bool ok = Source::read(ctx, v, valid, [&](u32 i) { return row + start(i / 2) + lane_k + i % 2 * 8; });
#pragma unroll
    for (u32 i = 0; i < 2 * kGroups; ++i) {
        u32* to = b + i / 2 * kStride + i % 2 * 4;
        to[0] = v[i].x, to[1] = v[i].y, to[2] = v[i].z, to[3] = v[i].w;
    }
    return ok;
}

} // namespace megagen
