// Twin of ptx/stamp.cuh.
#pragma once

#include <megagen/emulate/builtins.cuh>
#include <megagen/types.cuh>

namespace megagen::ptx {

MEGAGEN_DEVICE u64 stamp_globaltimer() { return emulate::stamp_time(); }

MEGAGEN_DEVICE u32 stamp_globaltimer_lo() { return static_cast<u32>(emulate::stamp_time()); }

MEGAGEN_DEVICE u64 stamp_clock64() { return emulate::stamp_cycles(); }

MEGAGEN_DEVICE u32 stamp_clock() { return static_cast<u32>(stamp_clock64()); }

MEGAGEN_DEVICE void st_stamp(void* p, uint4 v, emulate::Site at = emulate::Site::current()) {
    emulate::stamp_store(p, &v, sizeof v, at);
}

} // namespace megagen::ptx
