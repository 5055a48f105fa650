// When a warp did what: lane 0 writes records of 16 bytes into a slot of its own. No atomics, nothing is waited for.
//
// A warp's slot: a header of four records, mirrored by megagen/trace/record.py
//   [0] globaltimer, clock64 when the warp began   [1] the same when it ended
//   [2] records asked for, SM, 1, 0   [3] unused
// then up to kRecords of {begin, end, what, slot}, times by the chosen clock's low word; of a load or a prefetch the
// second word is bytes. what: a Mark, the step from bit 4, the edge from bit 16.
#pragma once

#include <megagen/ptx/control.cuh>
#include <megagen/ptx/stamp.cuh>

namespace megagen::debug {

enum Mark : u32 { kJob, kWait, kLoad, kPrefetch };

constexpr u32 kStampBytes = 16;
constexpr u32 kStampHeader = 4;  // records
constexpr u32 kOpening = 0xfffu; // the step of what comes before a program: barriers are made

// A kernel without stamps: nothing of this is in its code.
struct NoStamps {
    __device__ __forceinline__ u32 now() const { return 0; }
    __device__ __forceinline__ void begin() {}
    template <class Ctx>
    __device__ __forceinline__ void waited(const Ctx& ctx, u32 from, u32 edge, u32 slot) {}
    template <class Ctx>
    __device__ __forceinline__ void loads(const Ctx& ctx, u32 edge, u32 slot, u32 bytes) {}
    template <class Ctx>
    __device__ __forceinline__ void prefetches(const Ctx& ctx, u32 bytes) {}
    template <class Ctx>
    __device__ __forceinline__ void close(const Ctx& ctx) {}
};

template <u32 kRecords, bool kCycles>
struct Stamps {
    u32 next = 0;  // record of the launch's
    u32 last = 0;  // the one after this warp's slot; lanes that write none have no room
    u32 began = 0; // the job

    __device__ __forceinline__ u32 now() const { return kCycles ? ptx::stamp_clock() : ptx::stamp_globaltimer_lo(); }

    // `kernel`: which of the plan's.
    template <class Ctx>
    __device__ __forceinline__ void open(const Ctx& ctx, u32 kernel) {
        const u32 place = (kernel * Ctx::Kernel::kBlocks + ctx.block) * Ctx::Kernel::kWarps + ctx.warp;
        next = place * kSlot + kStampHeader;
        last = ctx.lane == 0 ? next + kRecords : 0;
        if (ctx.lane == 0) anchor(ctx, 0);
        began = now();
    }

    // The job at hand begins only now.
    __device__ __forceinline__ void begin() { began = now(); }

    // The job at hand ends, the next one begins.
    template <class Ctx>
    __device__ __forceinline__ void job(const Ctx& ctx) {
        const u32 to = now();
        write(ctx, began, to, kJob | ctx.step << 4, 0);
        began = to;
    }

    template <class Ctx>
    __device__ __forceinline__ void waited(const Ctx& ctx, u32 from, u32 edge, u32 place) {
        const u32 to = now();
        if (to - from >= kNoticed) write(ctx, from, to, kWait | ctx.step << 4 | edge << 16, place);
    }

    template <class Ctx>
    __device__ __forceinline__ void loads(const Ctx& ctx, u32 edge, u32 stage, u32 bytes) {
        write(ctx, now(), bytes, kLoad | ctx.step << 4 | edge << 16, stage);
    }

    template <class Ctx>
    __device__ __forceinline__ void prefetches(const Ctx& ctx, u32 bytes) {
        write(ctx, now(), bytes, kPrefetch | ctx.step << 4, 0);
    }

    template <class Ctx>
    __device__ __forceinline__ void close(const Ctx& ctx) {
        job(ctx);
        if (ctx.lane != 0) return;
        anchor(ctx, 1);
        put(ctx, last - kSlot + 2, uint4{next - (last - kRecords), ptx::smid(), 1, 0});
    }

private:
    static constexpr u32 kNoticed = kCycles ? 512 : 256; // what is over sooner may have been there
    static constexpr u32 kSlot = kStampHeader + kRecords;

    template <class Ctx>
    MEGAGEN_DEVICE void put(const Ctx& ctx, u32 record, uint4 v) {
        ptx::st_stamp(ctx.p.sys.stamps + static_cast<u64>(record) * kStampBytes, v);
    }

    template <class Ctx>
    __device__ __forceinline__ void anchor(const Ctx& ctx, u32 record) const {
        const u64 t = ptx::stamp_globaltimer(), c = ptx::stamp_clock64();
        const auto low = [](u64 v) { return static_cast<u32>(v); };
        put(ctx, last - kSlot + record, uint4{low(t), low(t >> 32), low(c), low(c >> 32)});
    }

    template <class Ctx>
    __device__ __forceinline__ void write(const Ctx& ctx, u32 begin, u32 end, u32 what, u32 place) {
        if (ctx.dry) return;
        if (next < last) put(ctx, next, uint4{begin, end, what, place});
        ++next;
    }
};

} // namespace megagen::debug
