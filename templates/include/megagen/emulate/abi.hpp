// The emulator as its host sees it. Mirrored by megagen/emulate/engine.py.
#pragma once

#include <cstdint>

extern "C" {

struct megagen_emulator_config {
    uint64_t seed;
    uint64_t arena_bytes; // address space for all allocations
    uint32_t race;        // 1: report accesses to global memory that nothing orders
    uint32_t expire;      // 1: instead of a deadlock's report, time passes until bounded waits expire; 2: at any moment
    uint32_t footprints;  // 1: remember what each step touches
};

// What the device may do with an allocation.
enum megagen_emulator_kind : uint32_t { MEGAGEN_CONSTANT = 0, MEGAGEN_EXCHANGE = 1, MEGAGEN_OUTPUT = 2 };

// All but create and destroy want an emulator that has not failed. Strings live until the next call.
void* megagen_emulator_create(const megagen_emulator_config* config);
void megagen_emulator_destroy(void* emulator);
uint64_t megagen_emulator_allocate(void* emulator, uint64_t bytes, uint32_t rank, uint32_t kind, const char* name);
void megagen_emulator_host_wrote(void* emulator, uint64_t address, uint64_t bytes);
int megagen_emulator_launch(void* emulator, uint32_t rank, const char* kernel, const void* params,
                            uint64_t params_bytes, uint32_t blocks, uint32_t threads, uint32_t cluster,
                            uint32_t shared_bytes, uint32_t pdl);
int megagen_emulator_run(void* emulator, uint64_t slices);
const char* megagen_emulator_error(void* emulator);
const char* megagen_emulator_statistics(void* emulator);
const char* megagen_emulator_footprints(void* emulator);
}
