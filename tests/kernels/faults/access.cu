// Where, how aligned, and whether anyone has ever written there.

extern "C" __global__ void global_bounds(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    const u32 bar = ptx::dynamic_shared();
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    if (p.way == 0) put(p.out + 1023, ptx::ld_relaxed_gpu(p.constant + 1001) + ptx::ld_relaxed_gpu(p.heap));
    if (p.way == 1) put(p.out, ptx::ld_relaxed_gpu(p.constant + 1002)); // FAULT 1: past the end
    if (p.way == 2) put(p.out, ptx::ld_global_v4(p.constant + 1000).x); // FAULT 2: over the end
    if (p.way == 3) put(p.out, ptx::ld_relaxed_gpu(p.constant - 1));    // FAULT 3: before everything
    if (p.way == 4) put(p.out, ptx::ld_relaxed_gpu(p.heap - 1));        // FAULT 4: between two allocations
    if (p.way == 5) ptx::st_global_u32(p.out + 1024, 1);                // FAULT 5
    if (p.way == 6) ptx::st_relaxed_sys(p.heap + 1024, 1u);             // FAULT 6
    if (p.way == 7) ptx::red_add_release_gpu(p.heap + 1024, 1);         // FAULT 7
    if (p.way == 8) put(p.out, __float_as_uint(ptx::ld_constant_f32(p.constant + 1002))); // FAULT 8
    if (p.way == 9) put(p.out, ptx::ld_relaxed_gpu(nullptr));                             // FAULT 9
    if (p.way == 10) ptx::mbarrier_arrive_expect_tx(bar, 32);
    if (p.way == 10) ptx::bulk_load(bar + 16, p.constant + 996, 32, bar); // FAULT 10
    if (p.way == 11) ptx::bulk_prefetch_l2(p.constant + 1000, 16);        // FAULT 11
}

extern "C" __global__ void shared_bounds(const __grid_constant__ Params p) { // of 248 bytes
    const u32 base = ptx::dynamic_shared(), word = base + 4 * threadIdx.x;
    ptx::st_shared_u32(word, 1);
    __syncwarp();
    if (threadIdx.x) return;
    if (p.way == 0) ptx::st_shared_u32(base + 244, ptx::ld_shared_u32(base));
    if (p.way == 1) put(p.out, ptx::ld_shared_u32(base + 248));      // FAULT 1
    if (p.way == 2) ptx::st_shared_f4(base + 240, {1, 2, 3, 4});     // FAULT 2: over the end
    if (p.way == 3) put(p.out, ptx::ld_shared_u32(base - 4));        // FAULT 3
    if (p.way == 4) put(p.out, ptx::ld_shared_u32(64));              // FAULT 4: an offset, where an address is due
    if (p.way == 5) ptx::mbarrier_init(base + 248, 1);               // FAULT 5
    if (p.way == 6) ptx::red_or_shared(base + 256, 1);               // FAULT 6
    if (p.way == 7) ptx::bulk_store(p.out, base + 128, 128);         // FAULT 7: over the end
    if (p.way == 8) put(p.out, ptx::ld_shared_u32(base + 0xff0000)); // FAULT 8
}

extern "C" __global__ void shared_of_others(const __grid_constant__ Params p) { // a cluster of two
    const u32 base = ptx::dynamic_shared(), peer = blockIdx.x ^ 1;
    if (threadIdx.x == 0) {
        ptx::st_shared_u32(base, 1);
        ptx::mbarrier_init(base + 8, 1);
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        const u32 there = ptx::mapa(base, peer);
        if (p.way == 0) put(p.out, ptx::ld_shared_cluster_u32(there) + ptx::ld_shared_u32(ptx::mapa(base, 0)));
        if (p.way == 1) put(p.out, ptx::ld_shared_u32(there));                           // FAULT 1
        if (p.way == 2) ptx::st_shared_u32(there, 1);                                    // FAULT 2
        if (p.way == 3) put(p.out, ptx::mapa(base, 2));                                  // FAULT 3: no such block
        if (p.way == 4) put(p.out, ptx::ld_shared_cluster_u32(there + (1u << 24)));      // FAULT 4: nor this one
        if (p.way == 5) ptx::mbarrier_arrive(there + 8);                                 // FAULT 5
        if (p.way == 6) put(p.out, ptx::mbarrier_try_wait_parity_cluster(there + 8, 1)); // FAULT 6
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

extern "C" __global__ void alignment(const __grid_constant__ Params p) {
    const u32 base = ptx::dynamic_shared(), buffer = base + 64, bar = base + 32;
    for (u32 i = threadIdx.x; i < 64; i += 32) ptx::st_shared_u32(buffer + 4 * i, i);
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x) return;
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_expect_tx(bar, 128);
    const u8* bytes = reinterpret_cast<const u8*>(p.heap);
    if (p.way == 0) put(p.out, ptx::ld_relaxed_gpu_b128(p.heap + 4).x + ptx::ld_shared_u16(buffer + 2));
    if (p.way == 1) put(p.out, ptx::ld_relaxed_gpu_b128(p.heap + 1).x); // FAULT 1
    if (p.way == 2) ptx::st_shared_f4(buffer + 8, {});                  // FAULT 2
    if (p.way == 3) ptx::bulk_load(buffer, p.constant + 1, 16, bar);    // FAULT 3
    if (p.way == 4) ptx::bulk_load(buffer, p.constant, 24, bar);        // FAULT 4
    if (p.way == 5) ptx::bulk_load(buffer + 8, p.constant, 16, bar);    // FAULT 5
    if (p.way == 6) ptx::bulk_store(p.out, buffer + 8, 16);             // FAULT 6
    if (p.way == 7) ptx::bulk_store(p.out + 2, buffer, 16);             // FAULT 7
    if (p.way == 8) put(p.out, ptx::ld_relaxed_gpu(bytes + 2));         // FAULT 8
    if (p.way == 9) ptx::st_shared_u32(buffer + 2, 1);                  // FAULT 9
    if (p.way == 10) ptx::mbarrier_init(base + 4, 1);                   // FAULT 10
    if (p.way == 11) ptx::bulk_load(buffer, p.constant, 0, bar);        // FAULT 11
    if (p.way == 12) ptx::st_relaxed_gpu(p.heap + 1, uint2{1, 2});      // FAULT 12
    if (p.way == 13) put(p.out, ptx::ld_shared_u16(buffer + 1));        // FAULT 13
    if (p.way == 14) ptx::bulk_prefetch_l2(p.constant, 8);              // FAULT 14
}

extern "C" __global__ void matrix_rows(const __grid_constant__ Params p) {
    const u32 base = ptx::dynamic_shared(), row = base + 16 * threadIdx.x;
    if (p.way != 2 || threadIdx.x != 7) ptx::st_shared_f4(row, {});
    __syncwarp();
    u32 r[4] = {};
    if (p.way == 0) ptx::ldmatrix_x4(r, row);
    if (p.way == 1) ptx::ldmatrix_x4(r, row + (threadIdx.x == 3 ? 8 : 0)); // FAULT 1
    if (p.way == 2) ptx::ldmatrix_x4(r, row);                              // FAULT 2
    if (p.way == 3) ptx::ldmatrix_x4(r, row + 16);                         // FAULT 3: the last one is outside
    put(p.out + threadIdx.x, r[0] + r[1] + r[2] + r[3]);
}

extern "C" __global__ void never_written(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    const u32 base = ptx::dynamic_shared(), bar = base, buffer = base + 64;
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(bar, p.way == 7 ? 32 : 16);
    ptx::st_shared_u16(buffer, 1);
    ptx::st_shared_u32(buffer + 16, 1);
    ptx::fence_proxy_async();
    for (u32 i = 0; i < 3; ++i) put(p.out + i, i);
    if (p.way == 0) put(p.out + 3, ptx::ld_shared_u16(buffer) + ptx::ld_shared_u32(buffer + 16));
    if (p.way == 0) put(p.out + 4, ptx::ld_global_v4(p.out).w);
    if (p.way == 1) put(p.out, ptx::ld_shared_u32(buffer + 32));        // FAULT 1
    if (p.way == 2) put(p.out, ptx::ld_relaxed_sys(p.heap + 512));      // FAULT 2
    if (p.way == 3) put(p.out, ptx::ld_shared_u32(buffer));             // FAULT 3: half of it is
    if (p.way == 4) put(p.out, ptx::ld_global_v4(p.out).w);             // FAULT 4: three of its words are
    if (p.way == 5) ptx::red_add_relaxed_sys(p.heap + 600, 1);          // FAULT 5
    if (p.way == 6) ptx::red_or_shared(buffer + 32, 1);                 // FAULT 6
    if (p.way == 7) ptx::bulk_load(buffer + 32, p.heap + 508, 32, bar); // FAULT 7: its second half is not
    if (p.way == 8) ptx::bulk_store(p.heap, buffer + 16, 16);           // FAULT 8: its first word is
    if (p.way == 9) put(p.out, ptx::ld_shared_u16(buffer + 2));         // FAULT 9: the other half
    if (p.way == 10) put(p.out, ptx::ld_shared_v4(buffer + 16).y);      // FAULT 10
    if (p.way == 0) {
        ptx::bulk_load(buffer + 32, p.heap + 508, 16, bar);
        AWAIT(ptx::mbarrier_try_wait_parity(bar, 0));
        put(p.out + 5, ptx::ld_shared_u32(buffer + 44));
    }
}

// Two launches: shared memory of one is nothing to the next.
extern "C" __global__ void left_behind(const __grid_constant__ Params p) {
    const u32 base = ptx::dynamic_shared();
    if (p.way == 0 || p.launch == 0) ptx::st_shared_u32(base + 4 * threadIdx.x, 7);
    put(p.out + threadIdx.x, ptx::ld_shared_u32(base + 4 * threadIdx.x)); // FAULT 1
}

extern "C" __global__ void read_only(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
    const u32 base = ptx::dynamic_shared();
    ptx::st_shared_f4(base, {});
    ptx::fence_proxy_async();
    u32* to = const_cast<u32*>(p.constant);
    if (p.way == 0) put(p.out, __float_as_uint(ptx::ld_constant_f4(p.constant).x));
    if (p.way == 1) ptx::st_global_u32(to, 1);                                  // FAULT 1
    if (p.way == 2) ptx::red_add_relaxed_sys(to, 1);                            // FAULT 2
    if (p.way == 3) ptx::bulk_store(to, base, 16);                              // FAULT 3
    if (p.way == 4) put(p.out, __float_as_uint(ptx::ld_constant_f32(p.heap)));  // FAULT 4
    if (p.way == 5) put(p.out, __float_as_uint(ptx::ld_constant_f4(p.heap).x)); // FAULT 5
}
