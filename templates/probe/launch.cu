// Launches one after another.
#include "common.cuh"

namespace megagen::probe {

struct EmptyArgs {
    Head* head;
};

extern "C" __global__ void __launch_bounds__(384) probe_empty(const __grid_constant__ EmptyArgs args) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
}

struct MarkArgs {
    Head* head;
    u64* begins; // [blocks]
    u64* ends;   // [blocks]
    u64 ns;
};

// Works for `ns` once the launch before has ended; the next one may come meanwhile.
extern "C" __global__ void __launch_bounds__(384) probe_mark(const __grid_constant__ MarkArgs args) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (threadIdx.x != 0) return;
    args.begins[blockIdx.x] = globaltimer();
    pause(static_cast<u32>(args.ns));
    args.ends[blockIdx.x] = globaltimer();
}

} // namespace megagen::probe
