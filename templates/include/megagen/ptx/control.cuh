// Launch control, registers, clusters, timers.
#pragma once

#include <megagen/types.cuh>

namespace megagen::ptx {

MEGAGEN_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

MEGAGEN_DEVICE void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <u32 kRegisters>
MEGAGEN_DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <u32 kRegisters>
MEGAGEN_DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Orders no memory: that of the barriers' initialisation has its own fence.
MEGAGEN_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

MEGAGEN_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The shared-window address of the same variable in block `rank` of the cluster.
MEGAGEN_DEVICE u32 mapa(u32 address, u32 rank) {
    u32 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(address), "r"(rank));
    return v;
}

MEGAGEN_DEVICE void st_async(u32 address, u32 value, u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(value),
                 "r"(bar)
                 : "memory");
}

MEGAGEN_DEVICE u64 globaltimer() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}

// Its low word: enough for differences of up to four seconds.
MEGAGEN_DEVICE u32 globaltimer_lo() {
    u32 t;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t)::"memory");
    return t;
}

MEGAGEN_DEVICE u32 smid() {
    u32 v;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(v));
    return v;
}

} // namespace megagen::ptx
