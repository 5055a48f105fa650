// What a wait leaves behind when it takes too long: a record a warp, and the sticky abort word on every rank.
#pragma once

#include <megagen/ptx/control.cuh>
#include <megagen/ptx/memory.cuh>

namespace megagen::debug {

// 64 bytes, mirrored by megagen/runtime/hang.py, which the warp's end writes. The wait itself leaves edge and state,
// slot, phase and step in shared memory, in line: a call would spill the caller's registers, and every wait has a copy.
enum Field : u32 { kState, kStep, kEdge, kSlot, kPhase, kSmid = 6, kBlock, kWarp, kRank, kEpoch, kTold, kFields = 16 };
enum State : u32 { kExpired = 1, kWoken = 2 };

constexpr u32 kNoteBytes = 16; // of a warp; after those of all warps a word that is not 0 when one has given up
constexpr u32 kStateShift = 16;

template <class Ctx>
MEGAGEN_DEVICE u32 note(const Ctx& ctx) {
    return ctx.shared + Ctx::Kernel::kNotes + ctx.warp * kNoteBytes;
}

template <class Ctx>
MEGAGEN_DEVICE u32 alarm(const Ctx& ctx) {
    return ctx.shared + Ctx::Kernel::kNotes + Ctx::Kernel::kWarps * kNoteBytes;
}

// Those who wait for this block's warps alone look at nothing else.
template <class Ctx>
MEGAGEN_DEVICE void sound(const Ctx& ctx) {
    ptx::st_relaxed_shared_u32(alarm(ctx), 1);
}

// One warp, before the block begins.
template <class Ctx>
MEGAGEN_DEVICE void clear(const Ctx& ctx) {
    if (ctx.lane <= Ctx::Kernel::kWarps)
        ptx::st_shared_v4(ctx.shared + Ctx::Kernel::kNotes + ctx.lane * kNoteBytes, uint4{0, 0, 0, 0});
    if (Ctx::Kernel::kWarps == 32 && ctx.lane == 0) // more words than lanes
        ptx::st_shared_u32(alarm(ctx), 0);
}

// Whole warp. kFar: lanes wait for different things, and the first that lacks its own is the one reported.
template <bool kFar, class Ctx>
MEGAGEN_DEVICE void give_up(Ctx& ctx, bool lacking, u32 state, u32 edge, u32 slot, u32 phase) {
    ctx.dead = true;
    const u32 teller = kFar ? __ffs(__ballot_sync(kFullMask, lacking)) - 1 : 0;
    if (ctx.lane == teller) {
        ptx::st_shared_v4(note(ctx), uint4{state << kStateShift | edge, slot, phase, ctx.step});
        sound(ctx);
    }
}

template <class Ctx>
MEGAGEN_DEVICE u8* record(const Ctx& ctx) {
    return ctx.heap() + Ctx::Kernel::kRecordOffset + (ctx.block * Ctx::Kernel::kWarps + ctx.warp) * (kFields * 4);
}

// Every warp that gave up, before it meets the others: they are told, on all ranks. An earlier hang's record stays.
template <class Ctx>
MEGAGEN_DEVICE void report(const Ctx& ctx) {
    __syncwarp();
    if (!ctx.dead || ctx.lane != 0) return;
    const System& sys = ctx.p.sys;
    u8* r = record(ctx);
    const uint4 said = ptx::ld_shared_v4(note(ctx));
    if (said.x == 0 || ptx::ld_relaxed_gpu(r + 4 * kTold) != 0) return; // nothing, or an earlier launch's
    const u32 edge = said.x & ((1u << kStateShift) - 1);
    const u32 fields[kFields] = {said.x >> kStateShift, said.w,    edge,     said.y,   said.z,      0,
                                 ptx::smid(),           ctx.block, ctx.warp, sys.rank, ctx.epoch(), 1};
#pragma unroll
    for (u32 i = 1; i <= kTold; ++i) ptx::st_relaxed_gpu(r + 4 * i, fields[i]);
    ptx::st_relaxed_gpu(r, fields[0]);
#pragma unroll
    for (u32 peer = 0; peer < kMaxRanks; ++peer) {
        if (peer < sys.live)
            ptx::atom_cas_relaxed_sys(
                sys.abort[peer], 0, 1 + (sys.rank * Ctx::Kernel::kBlocks + ctx.block) * Ctx::Kernel::kWarps + ctx.warp);
    }
}

} // namespace megagen::debug
