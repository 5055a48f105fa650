// What the host gets to read: faults, deadlocks, counts. And the C interface.

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <exception>
#include <map>

#include "engine.hpp"

extern "C" void megagen_switch(void** from, void* to);

namespace megagen::emulate {

namespace {

// Sites are constants of this library: 32 bits tell where.
const char kAnchor = 0;

std::string quoted(const std::string& s) {
    std::string out = "\"";
    for (const char c : s) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (static_cast<u8>(c) < 32) {
            char buffer[8];
            std::snprintf(buffer, sizeof buffer, "\\u%04x", c);
            out += buffer;
        } else {
            out += c;
        }
    }
    return out + '"';
}

std::string number(const char* name, u64 value) { return quoted(name) + ":" + std::to_string(value); }

std::string site(Site at) {
    return quoted("file") + ":" + quoted(at.file_name()) + "," + number("line", at.line()) + "," + quoted("function") +
           ":" + quoted(at.function_name());
}

std::string person(u32 rank, u32 launch, u32 block, u32 warp, u32 lane, u32 step, Site at) {
    return "{" + number("rank", rank) + "," + number("launch", launch) + "," + number("block", block) + "," +
           number("warp", warp) + "," + number("lane", lane) + "," + number("step", step) + "," + site(at) + "}";
}

std::string person(const Thread& t, Site at) {
    const Block& b = *t.warp->block;
    return person(b.launch->rank, b.launch->number, b.index, t.warp->index, t.lane, t.step, at);
}

std::string doing(const Doer& d, Verb verb) {
    return "{" + number("rank", d.rank) + "," + number("launch", d.launch) + "," + number("step", d.step) + "," +
           quoted("verb") + ":" + quoted(kVerbs[static_cast<u32>(verb)]);
}

} // namespace

u32 pack_site(Site at) {
    const char* p;
    static_assert(sizeof at == sizeof p, "a source_location is a pointer to a constant");
    std::memcpy(&p, &at, sizeof p);
    return static_cast<u32>(p - &kAnchor);
}

Site unpack_site(u32 packed) {
    const char* p = &kAnchor + static_cast<int>(packed);
    Site at;
    std::memcpy(static_cast<void*>(&at), &p, sizeof p);
    return at;
}

void Engine::record(const std::string& kind, const std::string& message, const Thread* who, Site at, const Place* place,
                    const Access* other) {
    if (failed) return; // the first fault is the one to look at
    failed = true;
    std::string json = "{" + quoted("kind") + ":" + quoted(kind) + "," + quoted("message") + ":" + quoted(message) +
                       "," + number("seed", config.seed) + "," + quoted("who") + ":";
    json += who ? person(*who, at) : "null";
    json += "," + quoted("place") + ":";
    if (place)
        json += "{" + quoted("space") + ":" + quoted(place->shared ? "shared" : "global") + "," +
                number("rank", place->rank) + "," + number("block", place->block) + "," + quoted("name") + ":" +
                quoted(place->name) + "," + number("offset", place->offset) + "," + number("bytes", place->bytes) + "}";
    else
        json += "null";
    json += "," + quoted("other") + ":";
    if (other && other->known()) {
        // An agent's key says who it is: see agent_key.
        u64 key = 0;
        for (const auto& [k, a] : agents)
            if (a == other->agent) key = k;
        const u32 what = static_cast<u32>(key), block = static_cast<u32>(key >> 32) & 0x7fffff;
        const bool warp = what < kBarrierAgent; // else a barrier for its copies, or a thread for its bulk stores
        const u32 lane = other->lanes ? static_cast<u32>(__builtin_ctz(other->lanes)) : 0;
        const u32 thread = what & kBulkAgent ? what & ~kBulkAgent : 32 * what + lane;
        const char* did = !warp             ? (what & kBulkAgent ? "bulk store" : "bulk copy")
                          : other->is_async ? "bulk copy"
                          : other->is_read  ? "read"
                                            : "write";
        const u32 rank = static_cast<u32>(key >> 56), odd = static_cast<u32>(key >> 55) & 1;
        u32 launch = 0; // the last one, odd or even as the agent says, in which that warp began before the access
        for (const Launch& l : ranks[rank].launches)
            for (const Block& b : l.running)
                if (l.number % 2 == odd && b.index == block &&
                    (!warp || (what < b.began.size() && b.began[what] <= other->time)))
                    launch = l.number;
        json += "{" + quoted("what") + ":" + quoted(did) + "," + number("rank", rank) + "," + number("launch", launch) +
                "," + number("block", block) + "," + quoted("warp") + ":" +
                (what & (kBarrierAgent | kRemoteAgent) ? "null" : std::to_string(thread / 32)) + "," +
                number("lane", thread % 32) + "," + number("step", other->step == 0xffff ? kNoStep : other->step) +
                "," + site(unpack_site(other->site)) + "}";
    } else {
        json += "null";
    }
    json += "," + quoted("waiting") + ":[";
    if (kind == "deadlock") {
        bool first = true;
        for (const Rank& r : ranks)
            for (u32 l = r.first; l < r.launches.size(); ++l)
                for (const Block& b : r.launches[l].running)
                    for (const Warp& w : b.warps) {
                        // Lanes that wait for the same thing are one entry.
                        std::map<std::string, u32> groups;
                        for (u32 lane = 0; lane < 32; ++lane) {
                            const Thread* t = w.threads[lane];
                            if (!t) continue;
                            std::string text = quoted("what") + ":" +
                                               quoted(t->wait.what ? t->wait.what : "something of its own") + "," +
                                               number("step", t->step) + "," + quoted("edge") + ":" +
                                               (t->wait.edge == kAll ? "null" : std::to_string(t->wait.edge)) + "," +
                                               number("slot", t->wait.slot) + "," + number("phase", t->wait.phase) +
                                               "," + (t->wait.what ? site(t->wait.at) : number("line", 0));
                            groups[text] |= 1u << lane;
                        }
                        for (const auto& [text, lanes] : groups) {
                            json += first ? "{" : ",{";
                            first = false;
                            json += number("rank", r.launches[l].rank) + "," + number("launch", r.launches[l].number) +
                                    "," + number("block", b.index) + "," + number("warp", w.index) + "," +
                                    number("lanes", lanes) + "," + text + "}";
                        }
                    }
    }
    json += "]}";
    failure = {kind, message, json};
}

void Engine::fail(const std::string& kind, const std::string& message, const Thread* who, Site at, const Place* place,
                  const Access* other) {
    record(kind, message, who, at, place, other);
    void* nowhere;
    megagen_switch(&nowhere, host_sp);
    __builtin_unreachable();
}

void Engine::deadlock() {
    u32 waiting = 0;
    for (const Rank& r : ranks)
        for (u32 l = r.first; l < r.launches.size(); ++l)
            for (const Block& b : r.launches[l].running)
                for (const Warp& w : b.warps) waiting += w.live != 0;
    const char* how = runnable.empty() ? "nothing can run any more" : "warps poll for ever and nothing changes";
    record("deadlock", std::string(how) + ": " + std::to_string(waiting) + " warps wait", nullptr, Site::current(),
           nullptr, nullptr);
}

void refuse(const char* kind, const char* message, Site at) { engine_of(self()).fail(kind, message, self(), at); }

} // namespace megagen::emulate

using namespace megagen::emulate;

extern "C" {

void* megagen_emulator_create(const megagen_emulator_config* config) {
    try {
        return new Engine(*config);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void megagen_emulator_destroy(void* emulator) { delete static_cast<Engine*>(emulator); }

uint64_t megagen_emulator_allocate(void* emulator, uint64_t bytes, uint32_t rank, uint32_t kind, const char* name) {
    try {
        return static_cast<Engine*>(emulator)->allocate(bytes, rank, kind, name);
    } catch (const std::exception&) {
        return 0;
    }
}

void megagen_emulator_host_wrote(void* emulator, uint64_t address, uint64_t bytes) {
    static_cast<Engine*>(emulator)->host_wrote(address, bytes);
}

int megagen_emulator_launch(void* emulator, uint32_t rank, const char* kernel, const void* params,
                            uint64_t params_bytes, uint32_t blocks, uint32_t threads, uint32_t cluster,
                            uint32_t shared_bytes, uint32_t pdl) {
    Engine& e = *static_cast<Engine*>(emulator);
    const Kernel* found = kernels;
    while (found && std::strcmp(found->name, kernel) != 0) found = found->next;
    if (!found) return 1;
    if (!blocks || !threads || threads > 1024 || !cluster || blocks % cluster ||
        params_bytes != found->parameter_bytes || rank >= 32)
        return 2;
    while (e.ranks.size() <= rank) e.ranks.emplace_back();
    Rank& r = e.ranks[rank];
    for (; r.sms < blocks; ++r.sms) r.free_sms.push_back(r.sms);
    Launch& l = r.launches.emplace_back();
    l.rank = rank;
    l.number = static_cast<u32>(r.launches.size()) - 1;
    l.kernel = found;
    l.parameters.assign(static_cast<const u8*>(params), static_cast<const u8*>(params) + params_bytes);
    l.blocks = blocks;
    l.threads = threads;
    l.cluster = cluster;
    l.shared_bytes = shared_bytes;
    l.pdl = pdl;
    l.queued = e.host;
    ++e.count.launches;
    return 0;
}

int megagen_emulator_run(void* emulator, uint64_t slices) {
    Engine& e = *static_cast<Engine*>(emulator);
    if (e.failed) return 2;
    try {
        return e.run(slices);
    } catch (const std::exception& error) {
        e.record("internal", error.what(), nullptr, Site::current(), nullptr, nullptr);
        return 2;
    }
}

const char* megagen_emulator_error(void* emulator) { return static_cast<Engine*>(emulator)->failure.json.c_str(); }

const char* megagen_emulator_statistics(void* emulator) {
    Engine& e = *static_cast<Engine*>(emulator);
    const auto& c = e.count;
    char text[600];
    std::snprintf(text, sizeof text,
                  "{\"slices\":%llu,\"switches\":%llu,\"events\":%llu,\"mma\":%llu,\"loads\":%llu,\"stores\":%llu,"
                  "\"bulk_bytes\":%llu,\"meetings\":%llu,\"sleeps\":%llu,\"launches\":%llu}",
                  c.slices, c.switches, c.events, c.mma, c.loads, c.stores, c.bulk_bytes, c.meetings, c.sleeps,
                  c.launches);
    e.answer = text;
    return e.answer.c_str();
}

const char* megagen_emulator_footprints(void* emulator) {
    Engine& e = *static_cast<Engine*>(emulator);
    std::string& json = e.answer;
    json = "{\"touched\":[";
    const char* before = "";
    for (const auto& [key, granules] : e.footprints.touched) {
        const auto& [doer, place, verb] = key;
        const Allocation* a = place < kFirstAllocation ? nullptr : &e.allocations[place - kFirstAllocation];
        const u64 granule = a ? a->granule() : 4;
        const char* shared = place == kOwnShared ? "shared" : "cluster";
        json += before + doing(doer, verb) + "," + quoted("space") + ":" + quoted(a ? "global" : shared) + "," +
                quoted("name") + ":" + quoted(a ? a->name : "") + "," + quoted("ranges") + ":[";
        const char* between = "[";
        for (u64 at = 0, n = granules.size(); at < n;) {
            const u64 first = std::find(granules.begin() + at, granules.end(), true) - granules.begin();
            if (first == n) break;
            at = std::find(granules.begin() + first, granules.end(), false) - granules.begin();
            json += between + std::to_string(first * granule) + "," + std::to_string(at * granule) + "]";
            between = ",[";
        }
        json += "]}";
        before = ",";
    }
    json += "],\"phases\":[";
    before = "";
    for (const auto& [key, phases] : e.footprints.phases) {
        const auto& [doer, offset, verb, times] = key;
        json += before + doing(doer, verb) + "," + number("offset", offset) + "," + number("times", times) + "," +
                number("phases", phases) + "}";
        before = ",";
    }
    json += "]}";
    return json.c_str();
}
}
