// What a wait leaves behind when it takes too long: a record a warp, and the sticky abort word on every rank.
#pragma once

#include <megagen/ptx/control.cuh>
#include <megagen/ptx/memory.cuh>

namespace megagen::debug {

// 64 bytes, mirrored by megagen/runtime/hang.py. The wait itself writes the first five words, in line (a call would
// spill the caller's registers); the warp's end writes the rest.
enum Field : u32 { kState, kStep, kEdge, kSlot, kPhase, kSmid = 6, kBlock, kWarp, kRank, kEpoch, kTold, kFields = 16 };
enum State : u32 { kExpired = 1, kWoken = 2 };

template <class Ctx>
MEGAGEN_DEVICE u8* record(const Ctx& ctx) {
    return ctx.heap() + Ctx::Kernel::kRecordOffset + (ctx.block * Ctx::Kernel::kWarps + ctx.warp) * (kFields * 4);
}

// Whole warp; the lanes that lack something write, and the last of them to do so is the one reported: a vote on who
// does would cost more code, and every wait carries a copy of this. An earlier hang's record stays.
template <class Ctx>
MEGAGEN_DEVICE void give_up(Ctx& ctx, bool lacking, u32 state, u32 edge, u32 slot, u32 phase) {
    ctx.dead = true;
    u8* r = record(ctx);
    if (lacking && ptx::ld_relaxed_gpu(r + 4 * kTold) == 0) {
        ptx::st_relaxed_gpu(r + 4 * kPhase, phase);
        ptx::st_relaxed_gpu(r, uint4{state, ctx.step, edge, slot});
    }
}

// Every warp that gave up, before it meets the others: they are told, on all ranks.
template <class Ctx>
MEGAGEN_DEVICE void report(const Ctx& ctx) {
    if (!ctx.dead || ctx.lane != 0) return;
    const System& sys = ctx.p.sys;
    u8* r = record(ctx);
    if (ptx::ld_relaxed_gpu(r) == 0 || ptx::ld_relaxed_gpu(r + 4 * kTold) != 0)
        return; // nothing, or an earlier launch's
    ptx::st_relaxed_gpu(r + 4 * kTold, 1);
    const u32 fields[5] = {ptx::smid(), ctx.block, ctx.warp, sys.rank, ctx.epoch()};
#pragma unroll
    for (u32 i = 0; i < 5; ++i) ptx::st_relaxed_gpu(r + 4 * (kSmid + i), fields[i]);
#pragma unroll
    for (u32 peer = 0; peer < kMaxRanks; ++peer) {
        if (peer < sys.live)
            ptx::atom_cas_relaxed_sys(
                sys.abort[peer], 0, 1 + (sys.rank * Ctx::Kernel::kBlocks + ctx.block) * Ctx::Kernel::kWarps + ctx.warp);
    }
}

} // namespace megagen::debug
