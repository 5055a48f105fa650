// The real ABI, as far as the stand-in needs it.
#pragma once
#include <cstdint>
struct megagen_emulator_config {
    uint64_t seed, arena_bytes;
    uint32_t race, expire;
};
