// What orders accesses of threads, blocks, ranks and launches, and what does not.

// Block 0 sends a word in heap[0] with a flag in heap[64] to block 1.
extern "C" __global__ void message(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    u32 *data = p.heap, *flag = p.heap + 64;
    const u32 way = p.way;
    if (blockIdx.x == 0) {
        if (way != 7) ptx::st_global_u32(data, 5); // OTHER 2 3 4 5 6 8
        if (way == 11 || way == 12 || way == 3) ptx::fence_acq_rel_gpu();
        if (way == 1) ptx::st_global_u32(flag, 1); // OTHER 1
        if (way == 0 || way == 13 || way == 6 || way == 7) ptx::st_release_gpu(flag, 1);
        if (way == 14) ptx::red_add_release_gpu(flag, 1);
        if (way == 15) ptx::st_release_sys(flag, 1);
        if (way == 2 || way == 3 || way == 4 || way == 5 || way == 11 || way == 12) ptx::st_relaxed_gpu(flag, 1u);
        if (way == 5) ptx::fence_acq_rel_gpu();             // too late
        if (way == 7) ptx::st_global_u32(data, 5);          // OTHER 7
        if (way == 8) ptx::st_release_gpu(p.heap + 128, 1); // of another flag
        if (way == 8) ptx::st_relaxed_gpu(flag, 1u);
    } else {
        if (way == 6) ptx::fence_acq_rel_gpu();         // too early
        if (way == 1) AWAIT(ptx::ld_global_v4(flag).x); // FAULT 1
        if (way == 0 || way == 4 || way == 5 || way == 7 || way == 8 || way == 12 || way == 14)
            AWAIT(ptx::ld_acquire_gpu(flag));
        if (way == 15) AWAIT(ptx::ld_acquire_sys(flag));
        if (way == 2 || way == 3 || way == 6 || way == 11 || way == 13) AWAIT(ptx::ld_relaxed_gpu(flag));
        if (way == 11 || way == 13) ptx::fence_acq_rel_gpu();
        if (way != 1) put(p.out, ptx::ld_global_v4(data).x); // FAULT 2 3 4 5 6 7 8
    }
}

// Three blocks write a word each and count themselves; the last block reads all once the count is complete.
extern "C" __global__ void counter(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    u32 *words = p.heap, *count = p.heap + 256;
    const u32 block = blockIdx.x, way = p.way;
    if (block < 3) {
        ptx::st_global_u32(words + 32 * block, 1); // OTHER 1 2
        if (way == 11 || way == 13) ptx::fence_acq_rel_sys();
        if (way == 0 || (way == 2 && block < 2) || way == 12 || (way == 14 && block == 0))
            ptx::red_add_release_gpu(count, 1);
        if (way == 1 || way == 11 || way == 13) ptx::red_add_relaxed_sys(count, 1);
        if (way == 15 && block == 0) ptx::fence_acq_rel_gpu();
        if (way == 15) ptx::red_add_relaxed_sys(count, 1);
        if (way == 14 && block == 1) { // additions to a released word hand its release on
            AWAIT(ptx::ld_relaxed_gpu(count));
            ptx::red_add_relaxed_sys(count, 1);
        }
        if (way == 14 && block == 2) {
            AWAIT(ptx::ld_relaxed_gpu(count) == 2);
            ptx::red_add_relaxed_sys(count, 1);
        }
    } else {
        if (way == 2) AWAIT(ptx::ld_acquire_gpu(count) == 2); // of three
        if (way == 0 || way == 1 || way == 14) AWAIT(ptx::ld_acquire_gpu(count) == 3);
        if (way == 11 || way == 15) AWAIT(ptx::ld_relaxed_gpu(count) == 3);
        if (way == 11 || way == 15) ptx::fence_acq_rel_gpu();
        if (way == 12 || way == 13) AWAIT(ptx::atom_add_acq_rel_gpu(count, 0) == 3);
        for (u32 i = 0; i < (way >= 14 ? 1 : 3); ++i) put(p.out + i, ptx::ld_global_v4(words + 32 * i).x); // FAULT 1 2
    }
}

// Rank 0 to rank 1, whose launches nothing orders.
extern "C" __global__ void ranks(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    u32 *data = p.heap, *flag = p.heap + 64;
    const u32 way = p.way;
    if (p.rank == 0) {
        if (way != 3) ptx::st_global_u32(data, 5); // OTHER 2
        if (way == 11) ptx::fence_acq_rel_sys();
        if (way == 2) ptx::fence_acq_rel_gpu();
        if (way == 0 || way == 13) ptx::st_release_sys(flag, 1);
        if (way == 1 || way == 4) ptx::st_release_gpu(flag, 1); // OTHER 1 4
        if (way == 2 || way == 11) ptx::st_relaxed_sys(flag, 1u);
        if (way == 12) ptx::st_relaxed_sys(flag, 1u);
        if (way == 3) ptx::st_relaxed_gpu(flag, 1u); // OTHER 3
    } else {
        if (way == 0) AWAIT(ptx::ld_acquire_sys(flag));
        if (way == 1) AWAIT(ptx::ld_acquire_gpu(flag));             // FAULT 1
        if (way == 3 || way == 4) AWAIT(ptx::ld_relaxed_sys(flag)); // FAULT 3 4
        if (way == 2 || way == 11 || way == 12 || way == 13) AWAIT(ptx::ld_relaxed_sys(flag));
        if (way == 11 || way == 13) ptx::fence_acq_rel_sys();
        if (way == 2) ptx::fence_acq_rel_gpu();
        if (way != 12) put(p.out, ptx::ld_global_v4(data).x); // FAULT 2
        if (way == 12) put(p.out, ptx::ld_global_v4(flag).x); // the flag is the data: seen by a strong load before
    }
}

// Two clusters of one block each: a fence for the cluster does not reach the other.
extern "C" __global__ void narrow_fence(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        ptx::st_global_u32(p.heap, 5); // OTHER 1
        if (p.way == 0) ptx::fence_acq_rel_gpu();
        if (p.way == 1) ptx::fence_acq_rel_cluster();
        ptx::st_relaxed_gpu(p.heap + 64, 1u);
    } else {
        AWAIT(ptx::ld_acquire_gpu(p.heap + 64));
        put(p.out, ptx::ld_global_v4(p.heap).x); // FAULT 1
    }
}

extern "C" __global__ void lanes(const __grid_constant__ Params p) { // one warp
    const u32 base = ptx::dynamic_shared(), lane = threadIdx.x, half = 16 * (lane / 16);
    u32 v = 0;
    ptx::st_shared_u32(base + 4 * lane, 0);
    __syncwarp();
    ptx::st_shared_u32(base + 4 * lane, lane); // OTHER 1 2 3
    if (p.way == 0 || p.way == 4) __syncwarp();
    if (p.way == 6 && lane < 16) __syncwarp(0xffffu);
    if (p.way == 6 && lane >= 16) return;
    if (p.way == 2) v = __any_sync(kFullMask, lane == 1);
    if (p.way == 3) v = __shfl_xor_sync(kFullMask, lane, 1);
    if (p.way == 5) __syncwarp(0xffffu << half);
    v += ptx::ld_shared_u32(base + 4 * (half + (lane + 1) % 16)); // FAULT 1 2 3, OTHER 4
    if (p.way == 0) __syncwarp();
    if (p.way == 1 || p.way == 2 || p.way == 3 || p.way == 6) {
        put(p.out + lane, v);
        return;
    }
    if (p.way == 5) __syncwarp(0xffffu << half);
    ptx::st_shared_u32(base + 4 * lane, v); // FAULT 4
}

// What one lane has acquired, a shuffle does not hand on.
extern "C" __global__ void acquired_by_one(const __grid_constant__ Params p) {
    const u32 lane = threadIdx.x;
    if (blockIdx.x == 0) {
        ptx::st_global_u32(p.heap + 4 * lane, lane); // OTHER 1 2
        if (p.way != 2) __syncwarp();
        if (lane == 0) ptx::st_release_gpu(p.heap + 256, 1);
    } else {
        if (lane == 0) AWAIT(ptx::ld_acquire_gpu(p.heap + 256));
        if (p.way == 1)
            put(p.out + 64 + lane, __shfl_sync(kFullMask, lane, 0));
        else
            __syncwarp();
        put(p.out + lane, ptx::ld_global_v4(p.heap + 4 * lane).x); // FAULT 1 2
    }
}

extern "C" __global__ void warps(const __grid_constant__ Params p) { // of 128 threads
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x, warp = tid / 32, way = p.way;
    const u32 bar = base + 512 + 8;
    if (tid == 0) ptx::mbarrier_init(bar, 2);
    if (tid == 0) ptx::fence_mbarrier_init();
    ptx::st_shared_u32(base + 4 * tid, 0);
    __syncthreads();
    if (way == 6 && tid == 0) ptx::mbarrier_arrive(bar); // before what it should cover
    ptx::st_shared_u32(base + 4 * tid, tid);             // OTHER 1 2 3 4 6 7 8
    if (way == 0) __syncthreads();
    if (way == 1) __syncwarp();
    if (way == 2 && warp < 2) ptx::bar_sync(1, 64); // the reader is no participant
    if (way == 3) {
        if (warp == 0) ptx::bar_sync(1, 64);
        if (warp == 1) ptx::bar_arrive(1, 64); // and does not wait
    }
    if (way == 12) {
        if (warp == 0) ptx::bar_arrive(1, 64);
        if (warp == 1) ptx::bar_sync(1, 64);
    }
    if (way == 11 || way == 4) { // an mbarrier that warps 0 and 2 arrive at
        if (way == 11) __syncwarp();
        if (tid == 0 || tid == 64) ptx::mbarrier_arrive(bar);
        if (warp == 1) AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
    }
    if (way == 6) {
        __syncwarp();
        if (tid == 64) ptx::mbarrier_arrive(bar);
        if (warp == 1) AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
    }
    if (way == 7) {
        __syncwarp();
        if (tid == 0 || tid == 64) ptx::mbarrier_arrive(bar);
        if (warp == 1 && tid % 32 == 0) AWAIT(ptx::mbarrier_try_wait_parity(bar, 0)); // the other lanes go on
    }
    if (way == 13) {
        __syncwarp();
        if (tid == 0 || tid == 64) ptx::mbarrier_arrive(bar);
        if (warp == 1 && tid % 32 == 0) AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
        __syncwarp();
    }
    if (way == 8 && tid == 0) ptx::mbarrier_arrive_count(bar, 2); // lane 0 for itself only
    if (way == 8 && warp == 1) AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
    u32 v = 0;
    if (way == 3 && warp == 1) v = ptx::ld_shared_u32(base + 4 * (tid - 32));             // FAULT 3
    if (way == 2 && warp == 2) v = ptx::ld_shared_u32(base + 4 * (tid - 64));             // FAULT 2
    if (way != 2 && way != 3 && warp == 1) v = ptx::ld_shared_u32(base + 4 * (tid - 32)); // FAULT 1 4 6 7 8
    put(p.out + tid, v);
}

// Threads of two warps write the halves of a word.
extern "C" __global__ void halves(const __grid_constant__ Params p) {
    const u32 base = ptx::dynamic_shared(), tid = threadIdx.x;
    const u32 half = base + 4 * (tid % 32) + 2 * (tid / 32);
    ptx::st_shared_u16(half, 0);
    __syncthreads();
    ptx::st_shared_u16(half, tid); // OTHER 1
    u32 v = ptx::ld_shared_u16(half);
    if (p.way == 0) __syncthreads();
    if (p.way == 1 && tid >= 32) __syncwarp();
    if (p.way == 2) v = ptx::ld_shared_u16(half);
    if (p.way != 2) v = ptx::ld_shared_u32(base + 4 * (tid % 32)); // FAULT 1
    put(p.out + tid, v);
}

// The same in global memory. Ways 2 and 3: of words that nobody has written.
extern "C" __global__ void global_halves(const __grid_constant__ Params p) {
    const u32 tid = threadIdx.x, way = p.way;
    u32* word = p.heap + tid % 32 + (way == 2 || way == 3 ? 512 : 0);
    u8* half = reinterpret_cast<u8*>(word) + 2 * (tid / 32);
    if (way != 2 || tid < 32) ptx::st_global_u16(half, tid + 1); // OTHER 1
    if (way == 1 && tid >= 32) __syncwarp();
    if (way != 1) __syncthreads();
    const u32 v = ptx::ld_global_v4(p.heap + (word - p.heap) / 4 * 4).x; // FAULT 1 2
    put(p.out + tid, way == 1 || v >> 16 == (v & 0xffff) + 32);
}

// A store of 16 bytes whose first word says that it is there.
extern "C" __global__ void data_as_flag(const __grid_constant__ Params p) { // two blocks of two warps
    u32* words = p.way == 2 ? p.heap + 512 : p.heap;
    if (p.way == 2 && blockIdx.x == 1) words = p.heap;
    const u32 tid = threadIdx.x, way = p.way;
    if (blockIdx.x == 0) {
        if (tid != 0) return;
        if (way == 2) ptx::st_global_u32(p.heap + 512, 2); // OTHER 2
        if (way == 2) ptx::st_relaxed_gpu(p.heap, 1u);
        if (way != 2) ptx::st_relaxed_gpu(words, uint4{1, 2, 3, 4}); // OTHER 1 3
    } else {
        if (tid == 0) AWAIT(ptx::ld_relaxed_gpu(words));                         // OTHER 3
        if (way == 0 && tid == 0) put(p.out, ptx::ld_relaxed_gpu_b128(words).w); // strong, though maybe still zero
        if (way == 11 && tid == 0) ptx::st_global_u32(words, 5);          // nothing but the word that it has seen
        if (way == 1 && tid == 0) put(p.out, ptx::ld_global_v4(words).x); // FAULT 1: 16 bytes of it, in truth
        if (way == 2 && tid == 0) put(p.out, ptx::ld_relaxed_gpu(p.heap + 512)); // FAULT 2
        if (way == 12) __syncthreads();
        if (way == 12 && tid == 32) ptx::st_global_u32(words, 5); // warp 0 has seen it, then met warp 1
        if (way == 3 && tid == 32) ptx::st_global_u32(words, 5);  // FAULT 3: warp 0 may not have
    }
}

// Block 0 reads, block 1 writes.
extern "C" __global__ void write_after_read(const __grid_constant__ Params p) {
    const u32 lane = threadIdx.x;
    if (blockIdx.x == 0) {
        put(p.out + lane, ptx::ld_global_v4(p.heap + 4 * lane).x); // OTHER 1 2
        if (p.way == 0) __syncwarp();
        if (p.way != 1 && lane == 0) ptx::red_add_release_gpu(p.heap + 256, 1);
    } else {
        if (p.way != 1) AWAIT(ptx::ld_acquire_gpu(p.heap + 256));
        ptx::st_global_u32(p.heap + 4 * lane, lane); // FAULT 1 2
    }
}

// Three blocks in a row: what the first released reaches the third.
extern "C" __global__ void handed_on(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    u32* flags = p.heap + 64;
    if (blockIdx.x == 0) {
        ptx::st_global_u32(p.heap, 5); // OTHER 1
        ptx::st_release_gpu(flags, 1);
    } else if (blockIdx.x == 1) {
        if (p.way == 1)
            AWAIT(ptx::ld_relaxed_gpu(flags));
        else
            AWAIT(ptx::ld_acquire_gpu(flags));
        ptx::st_release_gpu(flags + 32, 1);
    } else {
        AWAIT(ptx::ld_acquire_gpu(flags + 32));
        put(p.out, ptx::ld_global_v4(p.heap).x); // FAULT 1
    }
}

// Two launches, the second of which may begin before the first has ended.
extern "C" __global__ void dependent(const __grid_constant__ Params p) {
    const u32 tid = threadIdx.x, way = p.way;
    if (blockIdx.x == 1) return; // makes room
    if (p.launch == 0) {
        ptx::griddepcontrol_launch_dependents();
        if (way == 2 || way == 3) AWAIT(ptx::ld_relaxed_gpu(p.heap + 256));    // the second has begun
        if (way == 3) put(p.out + tid, ptx::ld_global_v4(p.heap + 4 * tid).x); // OTHER 3
        if (way != 3) ptx::st_global_u32(p.heap + 4 * tid, tid);               // OTHER 1 2
    } else {
        if (tid == 0) ptx::st_relaxed_gpu(p.heap + 256, 1u);
        if (way == 0) ptx::griddepcontrol_wait();
        if (way == 3) ptx::st_global_u32(p.heap + 4 * tid, tid);                     // FAULT 3
        if (way != 3) put(p.out + 512 + tid, ptx::ld_global_v4(p.heap + 4 * tid).x); // FAULT 1 2
    }
}

// The same without the early trigger: only griddepcontrol.wait promises that the first launch's stores are visible.
extern "C" __global__ void untriggered(const __grid_constant__ Params p) {
    if (p.launch == 0) ptx::st_global_u32(p.heap + 4 * threadIdx.x, 1); // OTHER 1
    if (p.launch == 0) return;
    if (p.way == 0) ptx::griddepcontrol_wait();
    put(p.out + threadIdx.x, ptx::ld_global_v4(p.heap + 4 * threadIdx.x).x); // FAULT 1
}

// Launches in order, or all of them waiting for the one before.
extern "C" __global__ void chain(const __grid_constant__ Params p) {
    ptx::griddepcontrol_launch_dependents();
    if (p.way == 0) ptx::griddepcontrol_wait();
    const u32 at = blockIdx.x * 32 + threadIdx.x, other = (at + 32) % 64;
    if (p.launch % 2 == 0) ptx::st_global_u32(p.heap + 4 * at, p.launch);
    if (p.launch % 2 == 1) put(p.out + at, ptx::ld_global_v4(p.heap + 4 * other).x);
}

// Clusters of two, in each other's shared memory.
extern "C" __global__ void clusters(const __grid_constant__ Params p) {
    const u32 base = ptx::dynamic_shared(), peer = blockIdx.x ^ 1, way = p.way;
    const u32 mine = base + 4 * threadIdx.x;
    ptx::st_shared_u32(mine, 0);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (way == 2) ptx::cluster_arrive();
    ptx::st_shared_u32(mine, blockIdx.x); // OTHER 1 2 3
    if (way == 11) ptx::fence_acq_rel_cluster();
    if (way == 1 || way == 11) ptx::cluster_arrive_relaxed();
    if (way == 0) ptx::cluster_arrive();
    if (way != 3) ptx::cluster_wait();
    put(p.out + 32 * blockIdx.x + threadIdx.x, ptx::ld_shared_cluster_u32(ptx::mapa(mine, peer))); // FAULT 1 2 3
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

// Block 0 of a cluster of two stores into block 1's shared memory and arrives at its mbarrier.
extern "C" __global__ void arrivals(const __grid_constant__ Params p) {
    const u32 bar = ptx::dynamic_shared(), word = bar + 64;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        ptx::st_shared_cluster_u32(ptx::mapa(word, 1), 5); // OTHER 1
        ptx::mbarrier_arrive_remote(ptx::mapa(bar, 1));
    }
    if (threadIdx.x == 0 && blockIdx.x == 1) {
        if (p.way == 0) AWAIT(ptx::mbarrier_try_wait_parity_cluster(bar, 0));
        if (p.way == 1) AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
        put(p.out, ptx::ld_shared_u32(word)); // FAULT 1
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

// Two lanes of a warp read, and arrive each for itself; another warp writes once both have.
extern "C" __global__ void lanes_apart(const __grid_constant__ Params p) {
    const u32 bar = ptx::dynamic_shared(), word = bar + 64, tid = threadIdx.x;
    if (tid == 0) {
        ptx::mbarrier_init(bar, 2);
        ptx::fence_mbarrier_init();
        ptx::st_shared_u32(word, 1);
    }
    __syncthreads();
    if (tid == 3 || tid == 5) {
        put(p.out + tid, ptx::ld_shared_u32(word)); // OTHER 1
        if (p.way == 0) ptx::mbarrier_arrive(bar);
        if (p.way == 1 && tid == 3) ptx::mbarrier_arrive_count(bar, 2);
    }
    if (tid == 32) {
        AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
        ptx::st_shared_u32(word, 2); // FAULT 1
    }
}

// The same by one lane each for whole warps, of global memory.
extern "C" __global__ void lanes_released(const __grid_constant__ Params p) {
    const u32 lane = threadIdx.x;
    if (blockIdx.x == 0) {
        put(p.out + lane, ptx::ld_relaxed_gpu(p.heap + lane % 2)); // OTHER 1
        if (p.way == 0 || lane != 7) ptx::red_add_release_gpu(p.heap + 64, 1);
    } else if (lane < 2) {
        AWAIT(ptx::ld_acquire_gpu(p.heap + 64) >= (p.way == 0 ? 32 : 31));
        ptx::st_global_u32(p.heap + lane, 1); // FAULT 1
    }
}
