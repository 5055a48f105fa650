// Twin of ptx/control.cuh.
#pragma once

#include <megagen/emulate/builtins.cuh>
#include <megagen/types.cuh>

namespace megagen::ptx {

using emulate::Site;

// Reports name the step that a thread is in.
class Step {
public:
    Step(u32 step)
        : step_(step) {}
    Step& operator=(u32 step) {
        emulate::set_step(step_ = step);
        return *this;
    }
    operator u32() const { return step_; }

private:
    u32 step_;
};

MEGAGEN_DEVICE void expect_none(uint4 v, u32 empty, Site at = Site::current()) {
    if (v.x == empty || v.y == empty || v.z == empty || v.w == empty)
        emulate::refuse("unwritten", "takes a word that still means \"not yet written\" for data", at);
}

MEGAGEN_DEVICE void look_again() { emulate::look_again(); }

MEGAGEN_DEVICE void still_waiting(bool has, u32 edge, u32 slot, u32 phase, Site at = Site::current()) {
    emulate::still_waiting(has, edge, slot, phase, at);
}

MEGAGEN_DEVICE void griddepcontrol_wait(Site at = Site::current()) { emulate::grid_wait(at); }

MEGAGEN_DEVICE void griddepcontrol_launch_dependents(Site at = Site::current()) { emulate::grid_trigger(at); }

template <u32 kRegisters>
MEGAGEN_DEVICE void setmaxnreg_dec(Site at = Site::current()) {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "as PTX demands");
    const u32 in[1] = {kRegisters};
    emulate::collective(emulate::Collective::kRegisters, kFullMask, in, 1, nullptr, 0, at);
}

template <u32 kRegisters>
MEGAGEN_DEVICE void setmaxnreg_inc(Site at = Site::current()) {
    setmaxnreg_dec<kRegisters>(at);
}

MEGAGEN_DEVICE void bar_sync(u32 id, u32 threads, Site at = Site::current()) {
    emulate::named_sync(id, threads, true, at);
}

MEGAGEN_DEVICE bool bar_and(u32 id, u32 threads, bool vote, Site at = Site::current()) {
    return emulate::named_sync(id, threads, vote, at);
}

MEGAGEN_DEVICE void bar_arrive(u32 id, u32 threads, Site at = Site::current()) {
    emulate::named_arrive(id, threads, at);
}

MEGAGEN_DEVICE void cluster_arrive(Site at = Site::current()) { emulate::cluster_arrive(true, at); }

MEGAGEN_DEVICE void cluster_arrive_relaxed(Site at = Site::current()) { emulate::cluster_arrive(false, at); }

MEGAGEN_DEVICE void cluster_wait(Site at = Site::current()) { emulate::cluster_wait(at); }

MEGAGEN_DEVICE u32 mapa(u32 address, u32 rank, Site at = Site::current()) {
    return emulate::map_shared(address, rank, at);
}

MEGAGEN_DEVICE void st_async(u32 address, u32 value, u32 bar, Site at = Site::current()) {
    emulate::st_async(address, value, bar, at);
}

MEGAGEN_DEVICE u64 globaltimer() { return emulate::nanoseconds(); }

MEGAGEN_DEVICE u32 globaltimer_lo() { return static_cast<u32>(emulate::nanoseconds()); }

MEGAGEN_DEVICE u32 smid() { return emulate::sm_number(); }

} // namespace megagen::ptx
