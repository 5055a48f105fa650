// Launch control, registers, named barriers, clusters, timers.
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

// One of the block's barriers, 1 .. 15 (0 is __syncthreads'): until `threads`, whole warps, have come to it. Orders
// memory among them.
MEGAGEN_DEVICE void bar_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether `vote` holds for all who came.
MEGAGEN_DEVICE bool bar_and(u32 id, u32 threads, bool vote) {
    u32 all;
    asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n bar.red.and.pred q, %1, %2, p;\n "
                 "selp.u32 %0, 1, 0, q;\n}"
                 : "=r"(all)
                 : "r"(id), "r"(threads), "r"(static_cast<u32>(vote))
                 : "memory");
    return all != 0;
}

// Comes to it and goes on.
MEGAGEN_DEVICE void bar_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// What this thread did is visible to the cluster when it has waited.
MEGAGEN_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

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

// The step of its program that a warp is at: the emulator's twin notes it.
using Step = u32;

// No instruction. A poll that found something new and has not judged it yet: not one to sleep on. The emulator's.
MEGAGEN_DEVICE void look_again() {}

// No instruction: a reader says that none of these words is the one that means "not yet written".
MEGAGEN_DEVICE void expect_none(uint4 v, u32 empty) {}

// No instruction: a polling loop says so on each round, for the emulator. `has`: this lane has what it waits for, and
// goes round for the sake of others.
MEGAGEN_DEVICE void still_waiting(bool has, u32 edge, u32 slot, u32 phase) {}

} // namespace megagen::ptx
