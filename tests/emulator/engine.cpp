// A stand-in for the engine: memory without shadow, launches in order, one for each call of run().
#include <megagen/emulate/abi.hpp>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>

using Kernel = const char* (*)(const void* params);
static std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

struct Launch {
    Kernel kernel;
    std::string params;
};

struct Engine {
    megagen_emulator_config config;
    char* arena;
    uint64_t used = 0, wrote = 0, runs = 0, allocations = 0;
    std::deque<Launch> queue;
    std::string error, text;
};

static int alive = 0;

extern "C" {
void stand_in_register(const char* name, Kernel kernel) { kernels()[name] = kernel; }
int stand_in_alive() { return alive; }

void* megagen_emulator_create(const megagen_emulator_config* c) {
    if (c->arena_bytes > uint64_t(1) << 40) return nullptr;
    ++alive;
    return new Engine{*c, (char*)std::aligned_alloc(256, (c->arena_bytes + 255) / 256 * 256)};
}
void megagen_emulator_destroy(void* e) {
    --alive;
    std::free(((Engine*)e)->arena);
    delete (Engine*)e;
}
uint64_t megagen_emulator_allocate(void* p, uint64_t bytes, uint32_t, uint32_t, const char*) {
    auto* e = (Engine*)p;
    uint64_t at = e->used;
    if (at + bytes > e->config.arena_bytes) return 0;
    e->used = (at + bytes + 255) / 256 * 256;
    ++e->allocations;
    return uint64_t(e->arena) + at;
}
void megagen_emulator_host_wrote(void* p, uint64_t, uint64_t bytes) { ((Engine*)p)->wrote += bytes; }
int megagen_emulator_launch(void* p, uint32_t, const char* name, const void* params, uint64_t bytes, uint32_t blocks,
                            uint32_t, uint32_t cluster, uint32_t, uint32_t) {
    auto found = kernels().find(name);
    if (found == kernels().end()) return 1;
    if (blocks % cluster) return 2;
    ((Engine*)p)->queue.push_back({found->second, std::string((const char*)params, bytes)});
    return 0;
}
int megagen_emulator_run(void* p, uint64_t) {
    auto* e = (Engine*)p;
    ++e->runs;
    if (e->queue.empty()) return 0;
    Launch launch = e->queue.front();
    e->queue.pop_front();
    const char* wrong = launch.kernel(launch.params.data());
    if (wrong) {
        e->error = wrong;
        return 2;
    }
    return e->queue.empty() ? 0 : 1;
}
const char* megagen_emulator_error(void* p) { return ((Engine*)p)->error.c_str(); }
const char* megagen_emulator_footprints(void*) { return "{\"touched\": [], \"phases\": []}"; }
const char* megagen_emulator_statistics(void* p) {
    auto* e = (Engine*)p;
    e->text = "{\"runs\": " + std::to_string(e->runs) + ", \"wrote\": " + std::to_string(e->wrote) +
              ", \"allocations\": " + std::to_string(e->allocations) + ", \"seed\": " + std::to_string(e->config.seed) +
              ", \"race\": " + std::to_string(e->config.race) + ", \"expire\": " + std::to_string(e->config.expire) +
              "}";
    return e->text.c_str();
}
}
