// Hopper's warpgroup products, D = A B + D by four warps at once, while these do something else. sm_90a alone.
//
// The products are asynchronous. From a product's issue until wgmma_wait says that it is complete
// - nobody touches the registers of its D and A, but for further products that add to the same D: they follow in order.
//   Where products are under way from one round of a loop to the next, the A of two neighbouring rounds needs registers
//   of its own: unroll by two;
// - its B lies in shared memory unchanged. It is read through the async proxy: what threads wrote there needs
//   fence_proxy_async, what a bulk copy brought only the wait for its mbarrier.
// wgmma_fence stands before the first product, and again before the next one whenever registers of D or A were written
// since. All of this is .sync.aligned: whole warpgroups, that is four warps from a multiple of four, do it together,
// with the same descriptors.
#pragma once

#include <megagen/types.cuh>

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "megagen/ptx/wgmma.cuh is for sm_90a alone: no other architecture has wgmma"
#endif

namespace megagen::ptx {

// Of a B in shared memory without swizzle, K-major: made of core matrices, 8 rows (of n) of 16 bytes (8 bf16 of k), 128
// bytes in a row. leading_bytes: from a core matrix to the next one in k; stride_bytes: to that of the next 8 n. All
// three are multiples of 16. (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout": matrix descriptor,
// strides; in CUTLASS's terms ((8,n),2):((1,SBO),LBO) in units of 16 bytes.) Within a block's window an address has 18
// bits, so what is added to one is added to the descriptor divided by 16.
MEGAGEN_DEVICE u64 wgmma_descriptor(u32 shared, u32 leading_bytes, u32 stride_bytes) {
    const u32 low = (shared & 0x3ffff) >> 4 | (leading_bytes & 0x3ffff) >> 4 << 16;
    return static_cast<u64>((stride_bytes & 0x3ffff) >> 4) << 32 | low;
}

MEGAGEN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes a group of the products since the last one.
MEGAGEN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the last kGroups groups are complete.
template <u32 kGroups>
MEGAGEN_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// No instruction. To the compiler a product's sums are there once it is issued; this keeps what is done with d before
// it or after it on that side: after the wait for d's products, and after d was written, before the fence.
MEGAGEN_DEVICE void wgmma_pin(float (&d)[8][4]) {
    asm volatile(""
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
                   "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
                   "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
                   "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
                   "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
                   "+f"(d[7][2]), "+f"(d[7][3])
                 :
                 : "memory");
}

// No instruction either: nothing else comes into A's registers before this, which stands behind the wait. The compiler
// takes them for free once the product is issued.
MEGAGEN_DEVICE void wgmma_hold(const u32 (&a)[8][2]) {
    asm volatile("" ::"r"(a[0][0]), "r"(a[0][1]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[2][0]), "r"(a[2][1]), "r"(a[3][0]),
                 "r"(a[3][1]), "r"(a[4][0]), "r"(a[4][1]), "r"(a[5][0]), "r"(a[5][1]), "r"(a[6][0]), "r"(a[6][1]),
                 "r"(a[7][0]), "r"(a[7][1])
                 : "memory");
}

// D = A B + (accumulate ? D : 0). Warp w of the warpgroup has rows 16 w .. 16 w + 15 of A and D, as mma_m16n8k16_bf16
// has them; d[n] are columns 8 n .. 8 n + 7. Where `accumulate` is a constant its predicate is one too.
MEGAGEN_DEVICE void wgmma_m64n64k16_bf16(float (&d)[8][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate) {
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                 "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "{%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
                   "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
                   "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
                   "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
                   "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
                   "+f"(d[7][2]), "+f"(d[7][3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<u32>(accumulate))
                 : "memory");
}

} // namespace megagen::ptx
