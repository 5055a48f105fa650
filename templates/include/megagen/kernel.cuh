// A warp's state, and how a kernel begins and ends.
//
// K, the kernel's policy: Params, kWarps, kBlocks, kCluster, kTokens, kBoundedWaits, kAbortOffset, kRecordOffset,
// kEpochOffset, Ring, Accum, Table, and init_barriers(ctx).
#pragma once

#include <megagen/comm/channel.cuh>
#include <megagen/mma/format.cuh>
#include <megagen/sync/ring.cuh>

namespace megagen {

template <class K>
struct Context {
  using Kernel = K;
  using Ring = megagen::Ring<typename K::Ring>;
  using Accum = AccumRing<typename K::Accum>;

  const typename K::Params& p;
  u32 shared;
  u8* heap;
  u32 block = blockIdx.x;
  u32 warp = threadIdx.x / 32;
  u32 lane = threadIdx.x % 32;
  u32 tokens = 0;
  u32 odd = 0;  // launches so far, mod 2 and mod 3: which copy of a channel this launch uses
  u32 third = 0;
  u32 step = 0;
  bool dead = false;
  Cursor<K::Ring::kStages> ring;
  Cursor<K::Accum::kSlots> accum;
  u32 ring_loads = 0;

  __device__ __forceinline__ Context(const typename K::Params& params, const void* shared_base)
      : p(params), shared(ptx::shared_address(shared_base)), heap(params.sys.heap[params.sys.rank]) {}

  // Barriers are ready in the whole cluster when this returns.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      K::init_barriers(*this);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (K::kCluster > 1) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  }

  // What this launch works on. Every warp, before it reads anything that an earlier launch wrote.
  __device__ __forceinline__ void attach() {
    if constexpr (K::kPdl) ptx::griddepcontrol_wait();
    tokens = ptx::ld_relaxed_sys(p.sys.control);
    const u32 launches = epoch();
    odd = launches % 2;
    third = launches % 3;
    dead = ptx::ld_relaxed_sys(heap + K::kAbortOffset) != 0;
  }

  // Completed launches, as this block counts them.
  __device__ __forceinline__ u32 epoch() const { return ptx::ld_relaxed_gpu(heap + K::kEpochOffset + 4 * block); }

  __device__ __forceinline__ void trigger() {
    if constexpr (K::kPdl) ptx::griddepcontrol_launch_dependents();
  }

  __device__ __forceinline__ void drain() {
    if (dead) Ring::drain(*this);
  }

  // All warps meet: no one still reads the epoch, and no block leaves while its cluster may write to it.
  __device__ __forceinline__ void end(bool advance_epoch) {
    debug::report(*this);
    __syncthreads();
    if (advance_epoch && threadIdx.x == 0) ptx::st_global_u32(heap + K::kEpochOffset + 4 * block, epoch() + 1);
    if constexpr (K::kCluster > 1) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  }

  __device__ __forceinline__ u32 table_used() const { return ptx::ld_shared_u32(shared + K::Table::kOffset); }
};

}  // namespace megagen
