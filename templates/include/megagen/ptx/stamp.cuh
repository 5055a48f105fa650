// What stamps read and write. The emulator's twins disturb nothing: no time passes, nothing is scheduled or recorded.
#pragma once

#include <megagen/types.cuh>

namespace megagen::ptx {

MEGAGEN_DEVICE u64 stamp_globaltimer() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}

// The low word.
MEGAGEN_DEVICE u32 stamp_globaltimer_lo() {
    u32 t;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t)::"memory");
    return t;
}

MEGAGEN_DEVICE u64 stamp_clock64() {
    u64 t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
    return t;
}

// The low word.
MEGAGEN_DEVICE u32 stamp_clock() {
    u32 t;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
    return t;
}

MEGAGEN_DEVICE void st_stamp(void* p, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

} // namespace megagen::ptx
