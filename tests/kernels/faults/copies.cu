// The async proxy: mbarriers that count bytes, fences, buffers that are used again.

extern "C" __global__ void bulk_loads(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    const u32 bar = ptx::dynamic_shared(), buffer = bar + 64;
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_expect_tx(bar, p.way == 1 ? 0 : p.way == 2 ? 48 : p.way == 6 ? 80 : 64);
    ptx::bulk_load(buffer, p.constant, 64, bar); // OTHER 1 2 3 4 5 7
    ptx::mbarrier_arrive(bar);
    if (p.way == 7)
        for (u32 i = 0; i < 300; ++i) put(p.out, i); // it may have landed by then
    if (p.way == 4 || p.way == 7) return;
    if (p.way == 5) ptx::mbarrier_try_wait_parity(bar, 1); // the phase before
    if (p.way == 6)
        while (!ptx::mbarrier_try_wait_parity(bar, 0)) ptx::still_waiting(false, 3, 1, 0); // FAULT 6
    if (p.way == 1 || p.way == 2) AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));            // FAULT 1 2
    if (p.way == 0) AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
    for (u32 i = 0; i < 16; ++i) put(p.out + i, ptx::ld_shared_u32(buffer + 4 * i)); // FAULT 3 5
}

// PTX lets the bytes be expected after the copy as long as the phase cannot end in between.
extern "C" __global__ void expected_late(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    const u32 bar = ptx::dynamic_shared(), buffer = bar + 64;
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::bulk_load(buffer, p.constant, 64, bar);
    ptx::mbarrier_arrive_expect_tx(bar, 64);
    AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
    put(p.out, ptx::ld_shared_u32(buffer));
}

// A cluster of two: block 0 loads for both.
extern "C" __global__ void multicast(const __grid_constant__ Params p) {
    const u32 bar = ptx::dynamic_shared(), buffer = bar + 64;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (threadIdx.x == 0) {
        if (p.way == 1 && blockIdx.x == 1)
            ptx::mbarrier_arrive(bar);
        else
            ptx::mbarrier_arrive_expect_tx(bar, 64);
        if (blockIdx.x == 0) ptx::bulk_load_multicast(buffer, p.constant, 64, bar, 3);     // OTHER 1
        while (!ptx::mbarrier_try_wait_parity(bar, 0)) ptx::still_waiting(false, 3, 1, 0); // FAULT 1
        if (p.way == 0) put(p.out + blockIdx.x, ptx::ld_shared_u32(buffer));
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

// A cluster of two: block 0 sends block 1 a word.
extern "C" __global__ void sent_word(const __grid_constant__ Params p) {
    const u32 bar = ptx::dynamic_shared(), word = bar + 64;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (threadIdx.x == 0 && blockIdx.x == 0)
        ptx::st_async(ptx::mapa(word, 1), 7, ptx::mapa(bar, 1)); // OTHER 1 2 3, FAULT 2
    if (threadIdx.x == 0 && blockIdx.x == 1 && p.way != 2) {
        ptx::mbarrier_arrive_expect_tx(bar, p.way == 3 ? 0 : 4);
        if (p.way == 0) AWAIT(ptx::mbarrier_try_wait_parity_cluster(bar, 0));
        if (p.way == 3)
            while (!ptx::mbarrier_try_wait_parity(bar, 0)) ptx::still_waiting(false, 3, 1, 0); // FAULT 3
        if (p.way != 3) put(p.out, ptx::ld_shared_u32(word));                                  // FAULT 1
    }
    __syncwarp();
    if (p.way == 2) return; // and block 1 with it
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

// 64 threads write, thread 0 has it copied out.
extern "C" __global__ void fences(const __grid_constant__ Params p) {
    const u32 buffer = ptx::dynamic_shared(), tid = threadIdx.x, way = p.way;
    if (way == 2) ptx::fence_proxy_async();
    ptx::st_shared_u32(buffer + 4 * tid, tid); // OTHER 1 2 3 4 5 6
    if (way == 0 || way == 4) ptx::fence_proxy_async();
    if (way == 5) ptx::fence_proxy_async_global();
    if (way == 6 && tid != 33) ptx::fence_proxy_async();
    if (way != 4) __syncthreads();
    if (way == 3 && tid == 32) ptx::fence_proxy_async();
    if (way == 11 && tid == 32) ptx::fence_proxy_async();
    if (way == 11) __syncthreads();
    if (tid != 0) return;
    if (way == 10) ptx::fence_proxy_async();
    ptx::bulk_store(p.out, buffer, 256); // FAULT 1 2 3 4 5 6
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
}

// What threads wrote to global memory, loaded by a copy.
extern "C" __global__ void fences_for_loads(const __grid_constant__ Params p) {
    const u32 bar = ptx::dynamic_shared(), tid = threadIdx.x;
    if (tid == 0) ptx::mbarrier_init(bar, 1);
    if (tid == 0) ptx::fence_mbarrier_init();
    put(p.out + tid, tid);
    ptx::st_global_u32(p.heap + tid, tid); // OTHER 1 2 3
    if (p.way == 0) ptx::fence_proxy_async_global();
    if (p.way == 3) ptx::fence_proxy_async(); // of shared memory
    if (p.way != 2) __syncthreads();
    if (tid != 0) return;
    if (p.way == 2) ptx::fence_proxy_async_global();
    ptx::mbarrier_arrive_expect_tx(bar, 256);
    ptx::bulk_load(bar + 64, p.heap, 256, bar); // FAULT 1 2 3
    AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
}

// A copy into what threads wrote.
extern "C" __global__ void copy_over_words(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    const u32 bar = ptx::dynamic_shared(), buffer = bar + 64;
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::st_shared_f4(buffer, {}); // OTHER 1
    if (p.way == 0) ptx::fence_proxy_async();
    ptx::mbarrier_arrive_expect_tx(bar, 16);
    ptx::bulk_load(buffer, p.constant, 16, bar); // FAULT 1
    AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
}

// What a copy under way reads, overwritten.
extern "C" __global__ void source_of_load(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    const u32 bar = ptx::dynamic_shared();
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(bar, 64);
    ptx::bulk_load(bar + 64, p.heap, 64, bar); // OTHER 1
    if (p.way == 0) AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
    ptx::st_global_u32(p.heap, 1); // FAULT 1
    AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
}

extern "C" __global__ void source_of_store(const __grid_constant__ Params p) {
    const u32 buffer = ptx::dynamic_shared(), tid = threadIdx.x, way = p.way;
    if (tid == 0) ptx::st_shared_f4(buffer, {});
    if (tid == 0) ptx::fence_proxy_async();
    __syncthreads();
    if (tid == 0) {
        ptx::bulk_store(p.out, buffer, 16); // OTHER 1 2 3 4
        if (way != 3) ptx::bulk_commit();
        if (way == 2) ptx::bulk_wait_read<1>();
        if (way == 0 || way == 3 || way == 4) ptx::bulk_wait_read<0>();
        if (way == 10) ptx::bulk_wait<0>();
    }
    if (way != 4) __syncthreads();
    if (tid == (way > 3 ? 32 : 0)) ptx::st_shared_u32(buffer + 4, 9); // FAULT 1 2 3 4
    if (tid == 0) ptx::bulk_commit();
    if (tid == 0) ptx::bulk_wait_read<0>();
}

extern "C" __global__ void target_of_store(const __grid_constant__ Params p) {
    const u32 buffer = ptx::dynamic_shared(), tid = threadIdx.x;
    if (tid == 0) {
        ptx::st_shared_f4(buffer, {});
        ptx::fence_proxy_async();
        ptx::bulk_store(p.heap, buffer, 16); // OTHER 1 2
        ptx::bulk_commit();
        if (p.way == 1)
            ptx::bulk_wait_read<0>();
        else
            ptx::bulk_wait<0>();
    }
    if (p.way != 2) __syncthreads();
    if (tid == 32) put(p.out, ptx::ld_relaxed_gpu(p.heap)); // FAULT 1 2
}

extern "C" __global__ void gone_too_soon(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    const u32 buffer = ptx::dynamic_shared();
    ptx::st_shared_f4(buffer, {});
    ptx::fence_proxy_async();
    ptx::bulk_store(p.out, buffer, 16); // FAULT 1 2
    ptx::bulk_commit();
    if (p.way == 2)
        for (u32 i = 0; i < 300; ++i) put(p.out + 16, i);
    if (p.way == 0) ptx::bulk_wait_read<0>();
}

// A cluster of two: block 1 leaves, block 0 goes on with its memory.
extern "C" __global__ void gone_block(const __grid_constant__ Params p) {
    const u32 bar = ptx::dynamic_shared(), word = bar + 64;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 2);
        ptx::st_shared_u32(word, 1);
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        const u32 there = ptx::mapa(word, 1), signal = ptx::mapa(bar, 1);
        if (p.way == 0 || p.way == 1) put(p.out, ptx::ld_shared_cluster_u32(there)); // FAULT 1
        if (p.way == 2) ptx::st_shared_cluster_u32(there, 1);                        // FAULT 2
        if (p.way == 3) ptx::mbarrier_arrive_remote(signal);                         // FAULT 3, OTHER 3
    }
    if (p.way) return;
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

// One slot, two tiles: warp 0 loads, warp 1 reads.
extern "C" __global__ void ring(const __grid_constant__ Params p) {
    const u32 full = ptx::dynamic_shared(), empty = full + 8, slot = full + 64, lane = threadIdx.x % 32, way = p.way;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(full, 1);
        ptx::mbarrier_init(empty, 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    for (u32 tile = 0; tile < 2; ++tile) {
        if (threadIdx.x == 0) {
            if (way != 3) AWAIT(ptx::mbarrier_try_wait_parity(empty, tile ^ 1));
            if (way == 3 && tile) AWAIT(ptx::mbarrier_try_wait_parity(full, 0));
            ptx::mbarrier_arrive_expect_tx(full, 256);
            ptx::bulk_load(slot, p.constant + 64 * tile, 256, full); // FAULT 1 2, OTHER 3
        }
        if (threadIdx.x >= 32) {
            AWAIT(ptx::mbarrier_try_wait_parity(full, tile));
            u32 v = ptx::ld_shared_u32(slot + 4 * lane); // OTHER 1, FAULT 3
            u32 leader = 0;
            if (way == 0 || way == 2) leader = __any_sync(kFullMask, ptx::never_true(__uint_as_float(v)));
            if (way == 2) v += ptx::ld_shared_u32(slot + 128 + 4 * lane); // OTHER 2
            __syncwarp();
            if (lane == leader) ptx::mbarrier_arrive(empty);
            put(p.out + 32 * tile + lane, v);
        }
    }
}

// One slot, two tiles, two consumer warps; the second reads after it has met the first.
extern "C" __global__ void two_consumers(const __grid_constant__ Params p) {
    const u32 full = ptx::dynamic_shared(), empty = full + 8, slot = full + 64, warp = threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(full, 1);
        ptx::mbarrier_init(empty, 2);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    for (u32 tile = 0; tile < 2; ++tile) {
        if (threadIdx.x == 0) {
            AWAIT(ptx::mbarrier_try_wait_parity(empty, tile ^ 1));
            ptx::mbarrier_arrive_expect_tx(full, 128);
            ptx::bulk_load(slot, p.constant + 32 * tile, 128, full); // FAULT 1
        }
        if (warp == 0) continue;
        AWAIT(ptx::mbarrier_try_wait_parity(full, tile));
        u32 v = 0, leader = 0;
        if (warp == 1) v = ptx::ld_shared_u32(slot + 4 * lane); // OTHER 1
        if (warp == 1 && p.way == 0) leader = __any_sync(kFullMask, ptx::never_true(__uint_as_float(v)));
        if (warp == 1) ptx::bar_arrive(1, 64);
        if (warp == 2) ptx::bar_sync(1, 64);
        if (warp == 2) v = ptx::ld_shared_u32(slot + 4 * lane);
        if (warp == 2) leader = __any_sync(kFullMask, ptx::never_true(__uint_as_float(v)));
        __syncwarp();
        if (lane == leader) ptx::mbarrier_arrive(empty);
        put(p.out + 96 * tile + threadIdx.x, v);
    }
}

// What the launch before wrote, as threads do, is there for copies too.
extern "C" __global__ void loads_of_the_launch_before(const __grid_constant__ Params p) {
    const u32 bar = ptx::dynamic_shared();
    ptx::griddepcontrol_wait();
    if (p.launch == 0) ptx::st_global_u32(p.heap + threadIdx.x, 1);
    if (p.launch == 0 || threadIdx.x) return;
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(bar, 128);
    ptx::bulk_load(bar + 64, p.heap, 128, bar);
    AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
    put(p.out, ptx::ld_shared_u32(bar + 64));
}

// More fences than the emulator may care to remember: other blocks fence while a thread waits for its block.
extern "C" __global__ void many_fences(const __grid_constant__ Params p) { // 48 blocks of 128
    const u32 buffer = ptx::dynamic_shared(), tid = threadIdx.x;
    ptx::st_shared_u32(buffer + 4 * tid, tid);
    ptx::fence_proxy_async();
    __syncthreads();
    if (tid == 0) {
        ptx::red_add_release_gpu(p.heap, 1);
        AWAIT(ptx::ld_relaxed_gpu(p.heap) == gridDim.x);
        ptx::bulk_store(p.out + 16 * blockIdx.x, buffer, 64);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
    }
}
