// What may be seen, and what may not. Two blocks (or three) of one thread; heap[0], heap[32], heap[64]: x, y, z.

MEGAGEN_DEVICE void fence_if(bool fenced) {
    if (fenced) ptx::fence_acq_rel_gpu();
}

// way 1: with fence.acq_rel, which does not forbid it
extern "C" __global__ void store_buffering(const __grid_constant__ Params p) {
    u32 *mine = p.heap + 32 * blockIdx.x, *theirs = p.heap + 32 * (blockIdx.x ^ 1);
    ptx::st_relaxed_gpu(mine, 1u);
    fence_if(p.way == 1);
    put(p.out + blockIdx.x, ptx::ld_relaxed_gpu(theirs));
}

// way: bit 0: the writer's fence, bit 1: the reader's fence, bit 2: release and acquire in place of them
extern "C" __global__ void message_passing(const __grid_constant__ Params p) {
    u32 *x = p.heap, *y = p.heap + 32;
    if (blockIdx.x == 0) {
        ptx::st_relaxed_gpu(x, 1u);
        fence_if(p.way & 1);
        if (p.way & 4)
            ptx::st_release_gpu(y, 1);
        else
            ptx::st_relaxed_gpu(y, 1u);
    } else {
        if (p.way & 4)
            AWAIT(ptx::ld_acquire_gpu(y));
        else
            AWAIT(ptx::ld_relaxed_gpu(y));
        fence_if(p.way & 2);
        put(p.out, ptx::ld_relaxed_gpu(x));
        put(p.out + 1, ptx::ld_relaxed_gpu(y));
    }
}

// way: the word that is polled; bit 2: two vectors of two words instead of one access of 16 bytes
extern "C" __global__ void torn(const __grid_constant__ Params p) {
    if (blockIdx.x == 0) {
        if (p.way & 4) {
            ptx::st_relaxed_gpu(p.heap, uint2{1, 1});
            ptx::st_relaxed_gpu(p.heap + 2, uint2{1, 1});
        } else {
            ptx::st_relaxed_gpu(p.heap, uint4{1, 1, 1, 1});
        }
    } else {
        AWAIT(ptx::ld_relaxed_gpu(p.heap + (p.way & 3)));
        ptx::st_global_v4(p.out, ptx::ld_relaxed_gpu_b128(p.heap));
    }
}

// A reader that has seen a word's later value never sees the earlier one.
extern "C" __global__ void coherence(const __grid_constant__ Params p) {
    if (blockIdx.x == 0) {
        ptx::st_relaxed_gpu(p.heap, 1u);
        ptx::st_relaxed_gpu(p.heap, 2u);
    } else {
        put(p.out, ptx::ld_relaxed_gpu(p.heap));
        put(p.out + 1, ptx::ld_relaxed_gpu(p.heap));
    }
}

// What the block in the middle has seen, all see who acquire what it then released.
extern "C" __global__ void causality(const __grid_constant__ Params p) {
    u32 *x = p.heap, *y = p.heap + 32;
    if (blockIdx.x == 0) ptx::st_relaxed_gpu(x, 1u);
    if (blockIdx.x == 1) {
        AWAIT(ptx::ld_relaxed_gpu(x));
        ptx::st_release_gpu(y, 1);
    }
    if (blockIdx.x == 2) {
        AWAIT(ptx::ld_acquire_gpu(y));
        put(p.out, ptx::ld_relaxed_gpu(x));
    }
}

// 64 additions are 64 additions, and every ticket is drawn once.
extern "C" __global__ void additions(const __grid_constant__ Params p) {
    ptx::red_add_relaxed_sys(p.heap, 1);
    put(p.out + 2 + ptx::atom_add_acq_rel_gpu(p.heap + 32, 1), 1);
    AWAIT(ptx::ld_relaxed_gpu(p.heap) == 64);
    if (threadIdx.x == 0) put(p.out + blockIdx.x, ptx::ld_relaxed_gpu(p.heap));
}

// What a bulk store copies while its source is overwritten: the old or the new.
extern "C" __global__ void early_reuse(const __grid_constant__ Params p) {
    const u32 buffer = ptx::dynamic_shared();
    ptx::st_shared_f4(buffer, {1, 1, 1, 1});
    ptx::fence_proxy_async();
    ptx::bulk_store(p.out, buffer, 16);
    ptx::bulk_commit();
    if (p.way == 0) ptx::bulk_wait_read<0>();
    ptx::st_shared_f4(buffer, {2, 2, 2, 2});
    ptx::bulk_wait_read<0>();
}
