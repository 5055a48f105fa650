// Warp-level matrices: multiply-accumulate, D = A B + D with fp32 accumulators, and 8 x 8 pieces of 16-bit operands,
// out of shared memory or between registers.
#pragma once

#include <megagen/types.cuh>

namespace megagen::ptx {

MEGAGEN_DEVICE void mma_m16n8k16_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

MEGAGEN_DEVICE void mma_m16n8k8_tf32(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Lanes 8 i .. 8 i + 7 give the addresses of piece i's rows, 16 bytes each; lane (g, t) gets elements 2 t and 2 t + 1
// of its row g.
MEGAGEN_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// The same of the transposed pieces: elements (2 t, g) and (2 t + 1, g).
MEGAGEN_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Two pieces; the addresses of lanes 16 .. 31 are not used.
MEGAGEN_DEVICE void ldmatrix_x2(u32 (&r)[2], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(row)
                 : "memory");
}

// A piece in registers, elements 2 t and 2 t + 1 of row g in lane (g, t), becomes the transposed one.
MEGAGEN_DEVICE u32 movmatrix_trans(u32 piece) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(piece));
    return r;
}

} // namespace megagen::ptx
