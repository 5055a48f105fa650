// Global and shared memory: every load, store, atomic and fence of ptx/memory.cuh. Geometry and values: cases.py.
#include <megagen/ptx/control.cuh>
#include <megagen/ptx/memory.cuh>

namespace {

using namespace megagen;

template <u32 kInputs>
struct Params {
    u32* in[kInputs];
    u32* out;
};

constexpr u32 kPolls = 1u << 18; // a wait that needs more has failed

MEGAGEN_DEVICE void put(u32* out, u32 i, u32 v) { ptx::st_global_u32(out + i, v); }

MEGAGEN_DEVICE void put4(u32* out, u32 i, uint4 v) {
    put(out, i, v.x), put(out, i + 1, v.y), put(out, i + 2, v.z), put(out, i + 3, v.w);
}

MEGAGEN_DEVICE uint4 bits(float4 v) {
    return {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
}

MEGAGEN_DEVICE float4 floats(uint4 v) {
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// Whole block: what thread 0 holds.
MEGAGEN_DEVICE u32 from_first(u32 word, u32 v) {
    if (threadIdx.x == 0) ptx::st_shared_u32(word, v);
    __syncthreads();
    v = ptx::ld_shared_u32(word);
    __syncthreads();
    return v;
}

// Two ways to hand over what the block did (by a store, by adding one), at both scopes, with and without a fence.
MEGAGEN_DEVICE void publish(u32 way, u32* flag, u32 value) {
    if (way == 0) ptx::st_release_gpu(flag, value);
    if (way == 1) ptx::st_release_sys(flag, value);
    if (way == 2) {
        ptx::fence_acq_rel_gpu();
        ptx::st_relaxed_gpu(flag, value);
    }
    if (way == 3) {
        ptx::fence_acq_rel_sys();
        ptx::st_relaxed_sys(flag, value);
    }
    if (way == 4) ptx::red_add_release_gpu(flag, 1);
    if (way == 5) ptx::atom_add_acq_rel_gpu(flag, 1);
}

MEGAGEN_DEVICE bool await(u32 way, const u32* flag, u32 value) {
#pragma unroll 1
    for (u32 poll = 0; poll < kPolls; ++poll) {
        if (way == 2) {
            if (ptx::ld_relaxed_gpu(flag) >= value) {
                ptx::fence_acq_rel_gpu();
                return true;
            }
        } else if (way == 3) {
            if (ptx::ld_relaxed_sys(flag) >= value) {
                ptx::fence_acq_rel_sys();
                return true;
            }
        } else if ((way % 2 ? ptx::ld_acquire_sys(flag) : ptx::ld_acquire_gpu(flag)) >= value) {
            return true;
        }
        ptx::still_waiting(false, 0, way, value);
    }
    return false;
}

} // namespace

extern "C" __global__ void loads(const __grid_constant__ Params<1> p) {
    const u32* in = p.in[0] + 4 * threadIdx.x;
    const u32 at = 21 * threadIdx.x;
    put4(p.out, at, ptx::ld_relaxed_gpu_b128(in));
    put4(p.out, at + 4, ptx::ld_relaxed_sys_b128(in));
    put(p.out, at + 8, ptx::ld_relaxed_gpu(in));
    put(p.out, at + 9, ptx::ld_relaxed_sys(in + 1));
    put(p.out, at + 10, ptx::ld_acquire_gpu(in + 2));
    put(p.out, at + 11, ptx::ld_acquire_sys(in + 3));
    put4(p.out, at + 12, bits(ptx::ld_constant_f4(in)));
    put(p.out, at + 16, __float_as_uint(ptx::ld_constant_f32(in + 1)));
    put4(p.out, at + 17, ptx::ld_global_v4(in));
}

extern "C" __global__ void stores(const __grid_constant__ Params<1> p) {
    const u32* in = p.in[0] + 24 * threadIdx.x;
    u32* out = p.out + 24 * threadIdx.x;
    const auto get = [&](u32 i) { return ptx::ld_relaxed_gpu(in + i); };
    const auto get2 = [&](u32 i) { return uint2{get(i), get(i + 1)}; };
    ptx::st_global_v4(out, ptx::ld_global_v4(in));
    ptx::st_relaxed_gpu(out + 4, ptx::ld_global_v4(in + 4));
    ptx::st_relaxed_sys(out + 8, ptx::ld_global_v4(in + 8));
    ptx::st_relaxed_gpu(out + 12, get2(12));
    ptx::st_relaxed_sys(out + 14, get2(14));
    ptx::st_relaxed_gpu(out + 16, get(16));
    ptx::st_relaxed_sys(out + 17, get(17));
    ptx::st_release_gpu(out + 18, get(18));
    ptx::st_release_sys(out + 19, get(19));
    ptx::st_global_v2(out + 20, get2(20));
    ptx::st_global_u32(out + 22, get(22));
    u8* halves = reinterpret_cast<u8*>(out + 23);
    const bool last = threadIdx.x % 2 != 0; // which of the halves comes last
    ptx::st_global_u16(halves + 2 * !last, last ? get(23) : get(23) >> 16);
    ptx::st_global_u16(halves + 2 * last, last ? get(23) >> 16 : get(23));
    ptx::expect_none(ptx::ld_global_v4(in), 0xffffffffu);
}

// A thread has 48 bytes of its own, which its neighbour reads; two words belong to a warp each.
extern "C" __global__ void shared_memory(const __grid_constant__ Params<1> p) {
    constexpr u32 kThreads = 64;
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x;
    const u32 mine = base + 48 * tid, theirs = base + 48 * ((tid + 1) % kThreads), votes = base + 48 * kThreads;
    const u32* in = p.in[0] + 8 * tid;
    const uint4 low = ptx::ld_global_v4(in), high = ptx::ld_global_v4(in + 4);
    ptx::st_shared_f4(mine, floats(low));
    ptx::st_shared_u32(mine + 16, high.x);
    ptx::st_shared_f32(mine + 20, __uint_as_float(high.y));
    ptx::st_shared_u16(mine + 24, high.z); // its low half
    ptx::st_shared_u16(mine + 26, high.w >> 16);
    ptx::st_shared_u32(mine + 28, high.z);
    ptx::red_or_shared(mine + 28, high.w);
    ptx::st_shared_v4(mine + 32, {high.w, low.x, high.z, low.y});
    if (tid < 2) ptx::st_shared_u32(votes + 4 * tid, 0);
    __syncthreads();
    if (high.x % 2 != 0) ptx::red_or_shared(votes + tid / 32 * 4, 1u << tid % 32);
    __syncthreads();
    const u32 at = 17 * tid;
    put4(p.out, at, ptx::ld_shared_v4(theirs));
    put4(p.out, at + 4, bits(ptx::ld_shared_f4(theirs, false)));
    put(p.out, at + 8, ptx::ld_shared_u32(theirs + 16));
    put(p.out, at + 9, __float_as_uint(ptx::ld_shared_f32(theirs + 20)));
    put(p.out, at + 10, ptx::ld_shared_u16(theirs + 24));
    put(p.out, at + 11, ptx::ld_shared_u16(theirs + 26));
    put(p.out, at + 12, ptx::ld_shared_u32(theirs + 28));
    put4(p.out, at + 13, ptx::ld_shared_v4(theirs + 32));
    if (tid < 2) put(p.out, 17 * kThreads + tid, ptx::ld_shared_u32(votes + 4 * tid));
    if (tid == 2) put(p.out, 17 * kThreads + 2, base % 128);
}

// Warp by warp, round and round: each has a word, in which the one before it says a number that it has not said yet,
// with nothing else in order. Who finds a new one looks once more before taking it. in: by how much a warp raises it.
extern "C" __global__ void word_of_mouth(const __grid_constant__ Params<1> p) {
    constexpr u32 kRounds = 16, kWarps = 4;
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    if (tid < kWarps) ptx::st_shared_u32(base + 4 * tid, tid == 0 ? 1 : 0);
    __syncthreads();
    u32 heard = 0;
    bool ok = true;
#pragma unroll 1
    for (u32 round = 0; ok && round < kRounds; ++round) {
        const u32 before = heard;
        bool news = false;
        ok = false;
#pragma unroll 1
        for (u32 poll = 0; poll < kPolls; ++poll) {
            heard = ptx::ld_relaxed_shared_u32(base + 4 * warp);
            ok = news;
            if (ok) break;
            news = heard != before;
            if (news) ptx::look_again();
            ptx::still_waiting(false, 0, warp, round);
        }
        put(p.out, (round * kWarps + warp) * 32 + lane, heard);
        const u32 more = ptx::ld_relaxed_gpu(p.in[0] + round * kWarps + warp);
        __syncwarp();
        if (lane == 0) ptx::st_relaxed_shared_u32(base + (warp + 1) % kWarps * 4, heard + more);
    }
    put(p.out, kRounds * kWarps * 32 + tid, ok ? 1 : 0);
}

// in[0]: words that all blocks change, then one a thread to exchange; in[1]: a thread's addend, expected and desired
// values. The block that comes last writes what became of the words.
extern "C" __global__ void atomics(const __grid_constant__ Params<2> p) {
    constexpr u32 kThreads = 64, kBlocks = 4, kAll = kThreads * kBlocks;
    enum Word : u32 { kAdded, kAddedSys, kCounted, kTicket, kOwner, kOwners, kDone, kOwn = 8 };
    u32* words = p.in[0];
    const u32 tid = threadIdx.x, at = blockIdx.x * kThreads + tid;
    const u32* in = p.in[1] + 3 * at;
    const u32 addend = ptx::ld_relaxed_gpu(in), expected = ptx::ld_relaxed_gpu(in + 1);
    ptx::red_add_release_gpu(words + kAdded, addend);
    ptx::red_add_relaxed_sys(words + kAddedSys, addend);
    ptx::red_inc_relaxed_gpu(words + kCounted, 9);
    put(p.out, 8 + ptx::atom_add_acq_rel_gpu(words + kTicket, 1), 1); // every ticket once
    if (ptx::atom_cas_relaxed_sys(words + kOwner, 0, at + 1) == 0) ptx::red_add_relaxed_sys(words + kOwners, 1);
    put(p.out, 8 + kAll + at, ptx::atom_cas_relaxed_sys(words + kOwn + at, expected, ptx::ld_relaxed_gpu(in + 2)));

    __syncthreads();
    u32 before = 0;
    if (tid == 0) {
        ptx::fence_acq_rel_gpu();
        before = ptx::atom_add_acq_rel_gpu(words + kDone, 1);
    }
    if (from_first(ptx::dynamic_shared(), before) != kBlocks - 1) return;
    const auto word = [&](u32 i) { return ptx::ld_relaxed_gpu(words + i); };
    if (tid < 7) put(p.out, tid, tid == kOwner ? word(tid) - 1 < kAll : word(tid));
    if (tid == 7) put(p.out, tid, 0);
    for (u32 i = tid; i < kAll; i += kThreads) put(p.out, 8 + 2 * kAll + i, word(kOwn + i));
}

// Block 0 sends a message a round in the same words, block 1 confirms each. in[0]: what it says first; in[1]: the
// flags, 128 bytes apart; in[2]: the words.
extern "C" __global__ void flags(const __grid_constant__ Params<3> p) {
    constexpr u32 kThreads = 64, kRounds = 36, kWays = 6;
    const u32 tid = threadIdx.x, shared = ptx::dynamic_shared();
    u32 *sent = p.in[1], *confirmed = p.in[1] + 32, *words = p.in[2] + 4 * tid;
    const uint4 first = ptx::ld_global_v4(p.in[0] + 4 * tid);
    u32 ok = 1;
#pragma unroll 1
    for (u32 round = 0; round < kRounds; ++round) {
        const u32 way = round % kWays, way_back = round / kWays;
        if (blockIdx.x == 0) {
            if (round != 0) {
                if (tid == 0) ok = await((round - 1) / kWays, confirmed, round);
                ok = from_first(shared, ok);
                if (!ok) break;
            }
            ptx::st_global_v4(words, {first.x + round, first.y ^ round, first.z - round, first.w + 2 * round});
            __syncthreads();
            if (tid == 0) publish(way, sent, round + 1);
        } else {
            if (tid == 0) ok = await(way, sent, round + 1);
            ok = from_first(shared, ok);
            if (!ok) break;
            put4(p.out, (round * kThreads + tid) * 4, ptx::ld_global_v4(words));
            __syncthreads();
            if (tid == 0) publish(way_back, confirmed, round + 1);
        }
    }
    if (tid == 0) put(p.out, kRounds * kThreads * 4 + blockIdx.x, ok);
}
