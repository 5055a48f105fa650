// mbarriers, named barriers, the cluster's barrier, warp-wide operations: misused, or waited at for ever.

extern "C" __global__ void mbarriers(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    const u32 bar = ptx::dynamic_shared(), none = bar + 8, buffer = bar + 64;
    if (p.way == 8) ptx::mbarrier_init(bar, 0);        // FAULT 8
    if (p.way == 9) ptx::mbarrier_init(bar, 1u << 20); // FAULT 9
    ptx::mbarrier_init(bar, 2);
    ptx::fence_mbarrier_init();
    ptx::st_shared_f4(buffer, {});
    ptx::fence_proxy_async();
    if (p.way == 1) put(p.out, ptx::mbarrier_try_wait_parity(none, 0)); // FAULT 1
    if (p.way == 2) ptx::mbarrier_arrive(none);                         // FAULT 2
    if (p.way == 3) ptx::mbarrier_expect_tx(none, 16);                  // FAULT 3
    if (p.way == 4) ptx::bulk_load(buffer, p.constant, 16, none);       // FAULT 4
    if (p.way == 5) ptx::st_async(buffer, 1, none);                     // FAULT 5
    if (p.way == 6) ptx::mbarrier_arrive_count(bar, 3);                 // FAULT 6
    if (p.way == 7) {
        ptx::mbarrier_expect_tx(bar, 16);
        ptx::mbarrier_arrive_count(bar, 2);
        ptx::mbarrier_arrive(bar); // FAULT 7: the bytes keep the phase from ending
    }
    if (p.way == 10) ptx::mbarrier_expect_tx(bar, 1u << 20); // FAULT 10
    if (p.way == 11) ptx::mbarrier_expect_tx(bar, (1u << 20) - 1);
    if (p.way == 11) ptx::mbarrier_expect_tx(bar, 1);         // FAULT 11
    if (p.way == 12) put(p.out, ptx::ld_shared_u32(bar + 4)); // FAULT 12
    if (p.way == 13) ptx::st_shared_f4(bar, {});              // FAULT 13
    if (p.way == 14) ptx::red_or_shared(bar, 1);              // FAULT 14
    if (p.way == 15) ptx::mbarrier_expect_tx(bar, 16);
    if (p.way == 15) ptx::bulk_load(bar, p.constant, 16, bar); // FAULT 15
    if (p.way == 16) ptx::st_async(bar, 1, bar);               // FAULT 16
    if (p.way == 17) ptx::bulk_store(p.out, bar, 16);          // FAULT 17
    if (p.way == 18) ptx::mbarrier_arrive_count(bar, 0);       // FAULT 18
    if (p.way == 19) ptx::mbarrier_init(bar, 2);               // FAULT 19
    if (p.way != 0) return;
    ptx::mbarrier_expect_tx(bar, 16);
    ptx::mbarrier_arrive_count(bar, 2);
    ptx::bulk_load(buffer, p.constant, 16, bar);
    AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
}

extern "C" __global__ void arrivals_of_others(const __grid_constant__ Params p) { // a cluster of two
    const u32 bar = ptx::dynamic_shared();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_expect_tx(bar, 16);
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        ptx::mbarrier_arrive_remote(ptx::mapa(bar, 1));                 // OTHER 1
        if (p.way == 1) ptx::mbarrier_arrive_remote(ptx::mapa(bar, 1)); // OTHER 1
    }
    if (threadIdx.x == 0 && blockIdx.x == 1) {
        if (p.way == 0) ptx::bulk_load(bar + 16, p.constant, 16, bar);
        AWAIT(ptx::mbarrier_try_wait_parity_cluster(bar, 0));
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

// Warp 1 uses what warp 0 initialises.
extern "C" __global__ void used_early(const __grid_constant__ Params p) {
    const u32 bar = ptx::dynamic_shared();
    if (threadIdx.x == 0) ptx::mbarrier_init(bar, 1); // OTHER 1
    if (p.way == 0) __syncthreads();
    if (threadIdx.x == 32) ptx::mbarrier_arrive(bar); // FAULT 1
}

// A cluster of two; block 0 uses block 1's.
extern "C" __global__ void used_early_elsewhere(const __grid_constant__ Params p) {
    const u32 bar = ptx::dynamic_shared();
    if (threadIdx.x == 0) ptx::mbarrier_init(bar, 1); // OTHER 1
    if (threadIdx.x == 0 && p.way == 0) ptx::fence_mbarrier_init();
    __syncwarp();
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
    if (threadIdx.x == 0 && blockIdx.x == 0) ptx::mbarrier_arrive_remote(ptx::mapa(bar, 1)); // FAULT 1
    if (threadIdx.x == 0 && blockIdx.x == 1) AWAIT(ptx::mbarrier_try_wait_parity_cluster(bar, 0));
    __syncwarp();
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
}

extern "C" __global__ void warp_wide(const __grid_constant__ Params p) {
    const u32 lane = threadIdx.x;
    u32 v = lane;
    if (p.way == 0) {
        __syncwarp();
        v += __any_sync(kFullMask, lane == 3) + __shfl_up_sync(kFullMask, v, 1);
    }
    if (p.way == 10) { // half of the lanes first
        if (lane < 16) v = __shfl_sync(0xffffu, v, 15 - lane);
        v += __shfl_up_sync(kFullMask, v, 1);
    }
    if (p.way == 1) {
        if (lane < 16)
            __syncwarp(); // FAULT 1
        else
            v = __any_sync(kFullMask, 1); // FAULT 1
    }
    if (p.way == 2) {
        if (lane < 16)
            v = __shfl_sync(kFullMask, v, 1); // FAULT 2
        else
            v = __shfl_sync(kFullMask, v, 1); // FAULT 2
    }
    if (p.way == 3 && lane != 31) __syncwarp(); // FAULT 3: and lane 31 leaves
    if (p.way == 4) {
        if (lane == 31)
            while (ptx::ld_relaxed_gpu(p.heap) == 0) ptx::still_waiting(false, 5, 0, 1); // FAULT 4
        __syncwarp();                                                                    // FAULT 4
    }
    if (p.way == 5 && lane < 16) v = __shfl_sync(0xffffu, v, 16);              // FAULT 5
    if (p.way == 6) __syncwarp(0xffffu);                                       // FAULT 6
    if (p.way == 7) v = __ballot_sync(lane < 16 ? kFullMask : 0xffff0000u, 1); // FAULT 7
    if (p.way == 8) {
        if (lane == 31) return;
        v = __reduce_add_sync(kFullMask, v); // FAULT 8
    }
    if (p.way == 9 && lane < 31) v = __shfl_down_sync(0x7fffffffu, v, 1); // FAULT 9
    put(p.out + lane, v);
}

extern "C" __global__ void named_barriers(const __grid_constant__ Params p) { // of 128 threads
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (p.way == 0) {
        if (warp < 2)
            ptx::bar_sync(15, 64);
        else
            ptx::bar_arrive(1, 128);
        if (warp < 2) ptx::bar_sync(1, 128);
    }
    if (p.way == 10) { // a warp that has left is not waited for
        if (warp == 3) return;
        __syncthreads();
    }
    if (p.way == 1) {
        if (warp == 0) ptx::bar_sync(1, 64); // FAULT 1
        if (warp == 1) ptx::bar_sync(1, 96); // FAULT 1
    }
    if (p.way == 2) ptx::bar_sync(1, 40);              // FAULT 2
    if (p.way == 3) ptx::bar_arrive(16, 128);          // FAULT 3
    if (p.way == 4) ptx::bar_sync(1, 160);             // FAULT 4
    if (p.way == 5 && warp < 3) ptx::bar_sync(7, 128); // FAULT 5: warp 3 leaves
    if (p.way == 6 && lane < 16) ptx::bar_sync(1, 64); // FAULT 6: aligned, by PTX: all lanes of a warp
    if (p.way == 7) {
        if (lane < 16)
            __syncthreads(); // FAULT 7
        else
            __syncthreads(); // FAULT 7
    }
}

extern "C" __global__ void cluster_barrier(const __grid_constant__ Params p) { // a cluster of two
    const bool first = threadIdx.x == 0 && blockIdx.x == 0;
    if (p.way == 9 && blockIdx.x == 1) return;    // threads that have left are not waited for
    if (p.way == 1 && first) ptx::cluster_wait(); // FAULT 1
    if (p.way == 3 && first) ptx::cluster_arrive();
    if (p.way == 3 && first) ptx::cluster_arrive(); // FAULT 3
    if (p.way == 5 && blockIdx.x == 1)
        while (ptx::ld_relaxed_gpu(p.heap) == 0) ptx::still_waiting(false, 6, 1, 0); // FAULT 5
    if (p.way == 3) __syncthreads();
    ptx::cluster_arrive();
    ptx::cluster_wait();                 // FAULT 5
    if (p.way == 2) ptx::cluster_wait(); // FAULT 2
    ptx::cluster_arrive_relaxed();
    if (p.way == 4) {
        ptx::red_add_release_gpu(p.heap, 1);
        AWAIT(ptx::ld_acquire_gpu(p.heap) == 2 * blockDim.x);
        ptx::cluster_arrive(); // FAULT 4: the barrier is complete by now, but this thread has not waited
    }
    ptx::cluster_wait();
}

// Waits that nothing ends, and what the report says of them.
extern "C" __global__ void endless(const __grid_constant__ Params p) {
    const u32 bar = ptx::dynamic_shared(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) ptx::mbarrier_init(bar, p.way == 1 ? 3 : 2);
    if (threadIdx.x == 0) ptx::fence_mbarrier_init();
    ptx::Step step = 0;
    step = 40 + warp;
    __syncthreads();
    if (lane == 0) ptx::mbarrier_arrive(bar);
    if (p.way == 1 && warp == 1)
        while (!ptx::mbarrier_try_wait_parity(bar, 0)) ptx::still_waiting(false, 9, 3, 1); // FAULT 1
    if (p.way == 0) AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
    if (p.way == 2 && lane < 8)
        while (ptx::ld_relaxed_sys(p.heap + lane) == 0) ptx::still_waiting(false, 4, 2, 7); // FAULT 2
    if (p.way == 3 && warp == 0)
        while (ptx::ld_global_v4(p.heap).x == 0) {
        } // and nobody is told
    if (p.way == 4 && threadIdx.x == 0)
        while (ptx::ld_acquire_sys(p.heap) == 0) ptx::still_waiting(false, 1, 0, 0); // FAULT 4
    if (p.way == 4) __syncthreads();                                                 // FAULT 4
    if (p.way == 5 && blockIdx.x == 0) { // block 1 makes room for the next launch
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait(); // FAULT 5
        if (p.launch == 0)
            while (ptx::ld_acquire_sys(p.heap) == 0) ptx::still_waiting(false, 2, 0, 0); // FAULT 5
    }
}
