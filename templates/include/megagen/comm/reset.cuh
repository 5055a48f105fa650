// Several channels made empty again by one loop, where each would have one of its own.
#pragma once

#include <megagen/comm/channel.cuh>

namespace megagen {

// What a lane knows of its channel: the copy to be emptied.
struct Emptied {
    u32 offset = 0; // in this rank's heap
    u32 bytes = 0;  // none: not by this loop
    u32 empty = 0;
};

// Channels that are no counters, and that their readers do not empty.
template <class D>
constexpr bool kEmptied = Channel<D>::kLamport && !D::kReaderResets;

template <class D, class Ctx>
MEGAGEN_DEVICE void describe_emptied(const Ctx& ctx, bool mine, Emptied& it) {
    if constexpr (kEmptied<D>) {
        if (mine) it = {D::kOffset + Channel<D>::which(ctx, D::kCopies - 1) * D::kBytes, D::kBytes, D::kEmpty};
    }
}

template <class D, class Ctx>
MEGAGEN_DEVICE void reset_other(const Ctx& ctx) {
    if constexpr (!kEmptied<D>) Channel<D>::reset(ctx);
}

// Channel<D>::reset of each: a lane finds out about a channel and tells the others.
template <class... Ds, class Ctx>
MEGAGEN_DEVICE void reset_channels(const Ctx& ctx) {
    static_assert(sizeof...(Ds) <= 32, "a lane a channel");
    (reset_other<Ds>(ctx), ...);
    Emptied mine;
    u32 n = 0;
    (describe_emptied<Ds>(ctx, ctx.lane == n++, mine), ...);
    u8* heap = ctx.heap();
#pragma unroll 1
    for (u32 i = 0; i < sizeof...(Ds); ++i) {
        const u32 bytes = __shfl_sync(kFullMask, mine.bytes, i), empty = __shfl_sync(kFullMask, mine.empty, i);
        u8* base = heap + __shfl_sync(kFullMask, mine.offset, i);
        const Range r = share_of(bytes / 16, ctx.block, Ctx::Kernel::kBlocks);
#pragma unroll 1
        for (u32 at = r.first + ctx.lane; at < r.last; at += 32)
            ptx::st_global_v4(base + 16 * at, uint4{empty, empty, empty, empty});
    }
}

} // namespace megagen
