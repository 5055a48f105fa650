// Who runs next: launches, blocks, warps and lanes, and the adversary that chooses among them.

#include <sys/mman.h>

#include <new>

#include "engine.hpp"

#if !defined(__x86_64__) || !defined(__linux__)
#error "the emulator's context switch is written for x86-64 Linux"
#endif

// Saves what the ABI asks a callee to keep, and goes on where `to` left off.
extern "C" void megagen_switch(void** from, void* to);
asm(R"(
.text
.globl megagen_switch
.hidden megagen_switch
.type megagen_switch, @function
megagen_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size megagen_switch, .-megagen_switch
)");

namespace megagen::emulate {

const Kernel* kernels = nullptr;

namespace {

constexpr u64 kThreadSpace = (sizeof(Thread) + 63) / 64 * 64;
constexpr u32 kStacksAtOnce = 256;
constexpr u64 kPatience = 4'000'000; // slices in which nothing changes
constexpr u32 kExpiries = 4096;
constexpr u64 kExpiry = 150'000'000; // ns

void main_of_thread() {
    Thread* t = self();
    const Launch& launch = *block_of(t).launch;
    launch.kernel->call(launch.parameters.data());
    engine_of(t).leave(*t);
}

} // namespace

Thread* self() {
    const u64 here = reinterpret_cast<u64>(__builtin_frame_address(0));
    return reinterpret_cast<Thread*>((here | (kStack - 1)) + 1 - kThreadSpace);
}

Engine::Engine(const megagen_emulator_config& c)
    : config(c)
    , random(c.seed)
    , watches(kWatches)
    , buckets(kHorizon) {
    // One bucket of manners a seed: which effects are late, how often warps are interrupted, whether some are favoured.
    static constexpr u32 kManners[6][4] = {{1, 0, 0, 0}, {8, 4, 1, 0}, {1, 4, 4, 1},
                                           {0, 1, 0, 2}, {0, 0, 0, 1}, {4, 1, 1, 4}};
    const u32* manners = kManners[random.below(6)];
    std::copy(manners, manners + 4, weights);
    static constexpr u32 kFuel[4] = {8, 64, 1024, 1u << 20};
    fuel = kFuel[random.below(4)];
    static constexpr u32 kTournaments[4] = {1, 1, 3, 8};
    tournament = kTournaments[random.below(4)];
    pieces = 1 + random.below(8);
}

Engine::~Engine() {
    for (u8* s : stacks) munmap(s, (kStacksAtOnce + 1) * kStack);
    if (arena) munmap(arena, config.arena_bytes);
    for (Allocation& a : allocations)
        for (Shadow& s : a.shadow) delete s.more;
    for (Rank& r : ranks)
        for (Launch& l : r.launches)
            for (Block& b : l.running)
                for (Shadow& s : b.shadow) delete s.more;
}

u16 Engine::agent(u64 key) {
    if (agents.size() == kNobody && !agents.contains(key)) {
        record("internal", "more warps and mbarriers than the emulator can tell apart", nullptr, Site::current(),
               nullptr, nullptr);
        return 0;
    }
    const auto [at, added] = agents.try_emplace(key, static_cast<u16>(agents.size()));
    if (added) agent_times.push_back(0);
    return at->second;
}

void Engine::make_ready(Warp& w, u32 lanes) {
    w.ready |= lanes;
    if (w.ready && w.place < 0) {
        w.place = static_cast<int>(runnable.size());
        runnable.push_back(&w);
    }
}

void Engine::remove_runnable(Warp& w) {
    if (w.place < 0) return;
    Warp* last = runnable.back();
    runnable[w.place] = last;
    last->place = w.place;
    runnable.pop_back();
    w.place = -1;
}

void Engine::rouse(Thread& t) {
    const u32 bit = 1u << t.lane;
    t.ticket = 0;
    t.polled.clear();
    t.polled_much = false;
    t.warp->asleep &= ~bit;
    make_ready(*t.warp, bit);
}

void Engine::wake(Watch& watch) {
    ++watch.version;
    ++changes;
    if (watch.sleepers.empty()) return;
    for (const auto& [t, ticket] : watch.sleepers)
        if (t->ticket == ticket) rouse(*t);
    watch.sleepers.clear();
}

// To the next lane of the warp that can run, or to the scheduler.
void yield() {
    Thread* t = self();
    Warp& w = *t->warp;
    Engine& e = engine_of(t);
    if (e.failed || !w.ready || w.fuel <= 0) {
        megagen_switch(&t->sp, e.host_sp);
        return;
    }
    const u32 above = t->lane == 31 ? 0 : w.ready >> (t->lane + 1) << (t->lane + 1);
    Thread* next = w.threads[__builtin_ctz(above ? above : w.ready)];
    if (next == t) return;
    ++e.count.switches;
    megagen_switch(&t->sp, next->sp);
}

void spend_fuel(Thread* t) {
    Warp& w = *t->warp;
    if (--w.fuel > 0) return;
    yield();
}

void Engine::run_warp(Warp& w) {
    w.fuel = 1 + random.below(2 * fuel);
    const u32 from = random.below(32);
    const u32 above = w.ready >> from << from;
    Thread* t = w.threads[__builtin_ctz(above ? above : w.ready)];
    current = &w;
    ++count.switches;
    megagen_switch(&host_sp, t->sp);
    current = nullptr;
    if (!w.ready) remove_runnable(w);
}

int Engine::run(u64 slices) {
    for (; slices && !failed; --slices) {
        ++now;
        ++count.slices;
        deliver_due();
        if (failed) break;
        start_blocks();
        if (runnable.empty()) {
            if (deliver_any()) continue;
            bool busy = false;
            for (Rank& r : ranks) busy |= r.first < r.launches.size();
            if (!busy) {
                host = std::make_shared<Clock>(completed);
                return 0;
            }
            if (start_blocks()) continue;
            if (config.expire && ++expiries < kExpiries) {
                skipped += kExpiry;
                for (Rank& r : ranks)
                    for (u32 l = r.first; l < r.launches.size(); ++l)
                        for (Block& b : r.launches[l].running)
                            for (Warp& w : b.warps) {
                                for (Thread* t : w.threads)
                                    if (t && t->ticket) rouse(*t);
                            }
                if (!runnable.empty()) continue;
            }
            deadlock();
            break;
        }
        if (changes != seen_changes) seen_changes = changes, idle_since = now;
        if (now - idle_since > kPatience) {
            deadlock();
            break;
        }
        Warp* best = runnable[random.below(static_cast<u32>(runnable.size()))];
        for (u32 i = 1; i < tournament; ++i) {
            Warp* other = runnable[random.below(static_cast<u32>(runnable.size()))];
            if (other->priority > best->priority) best = other;
        }
        if (random.below(256) == 0) best->priority = random.below(1u << 20); // no warp starves for good
        run_warp(*best);
    }
    if (failed) return 2;
    return 1;
}

// Blocks whose turn it is: those of a rank's oldest unfinished launch, and with programmatic dependent launch those of
// the one after it as soon as all its blocks have triggered or ended and one has made room.
bool Engine::start_blocks() {
    bool any = false;
    for (Rank& r : ranks) {
        for (u32 l = r.first; l < r.launches.size() && l <= r.first + 1; ++l) {
            Launch& launch = r.launches[l];
            if (launch.started == launch.blocks) continue;
            if (l > r.first) {
                const Launch& before = r.launches[l - 1];
                if (!launch.pdl || before.started < before.blocks || before.triggered < before.blocks) break;
            }
            if (!launch.before) {
                Clock c = *launch.queued;
                if (r.first) c.join(*r.launches[r.first - 1].done);
                launch.before = std::make_shared<Clock>(std::move(c));
            }
            while (launch.started < launch.blocks && r.free_sms.size() >= launch.cluster) {
                Cluster& cluster = launch.clusters.emplace_back();
                for (u32 i = 0; i < launch.cluster; ++i) start_block(launch, launch.started, cluster);
                any = true;
            }
            if (launch.started < launch.blocks) break;
        }
    }
    return any;
}

void Engine::start_block(Launch& launch, u32 index, Cluster& cluster) {
    Rank& r = ranks[launch.rank];
    Block& b = launch.running.emplace_back();
    b.engine = this;
    b.launch = &launch;
    b.cluster = &cluster;
    b.index = index;
    b.serial = ++blocks;
    b.rank_in_cluster = static_cast<u32>(cluster.blocks.size());
    const u32 pick = random.below(static_cast<u32>(r.free_sms.size()));
    b.sm = r.free_sms[pick];
    r.free_sms.erase(r.free_sms.begin() + pick);
    cluster.blocks.push_back(&b);
    ++cluster.left;
    ++launch.started;
    ++changes;
    b.live_threads = launch.threads;
    b.shared.resize((launch.shared_bytes + 3) / 4 * 4);
    for (u64 i = 0; i + 4 <= b.shared.size(); i += 4) std::memcpy(&b.shared[i], &kPoison, 4);
    b.valid.resize(b.shared.size() / 4);
    b.shadow.resize(b.shared.size() / 4);
    b.warps = std::vector<Warp>((launch.threads + 31) / 32);
    for (u32 i = 0; i < b.warps.size(); ++i) {
        Warp& w = b.warps[i];
        w.block = &b;
        w.index = i;
        w.agent = agent(agent_key(b, i));
        w.began = w.time = w.synced = w.exchanged = agent_times[w.agent] + 1;
        w.clock = *launch.before;
        w.priority = random.below(1u << 20);
        const u32 lanes = std::min(32u, launch.threads - 32 * i);
        for (u32 lane = 0; lane < lanes; ++lane) {
            if (free_stacks.empty()) {
                void* m = mmap(nullptr, (kStacksAtOnce + 1) * kStack, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                if (m == MAP_FAILED) throw std::bad_alloc();
                u8* base = reinterpret_cast<u8*>((reinterpret_cast<u64>(m) + kStack - 1) / kStack * kStack);
                stacks.push_back(static_cast<u8*>(m));
                for (u32 s = 0; s < kStacksAtOnce; ++s) free_stacks.push_back(base + s * kStack);
            }
            u8* stack = free_stacks.back();
            free_stacks.pop_back();
            Thread* t = new (stack + kStack - kThreadSpace) Thread();
            t->warp = &w;
            t->lane = lane;
            t->index = 32 * i + lane;
            t->fenced = launch.before;
            u64* top = reinterpret_cast<u64*>(t) - 3; // at a function's first instruction the stack is 8 off 16
            *--top = reinterpret_cast<u64>(&main_of_thread);
            top -= 6;
            std::fill(top, top + 6, 0);
            t->sp = top;
            w.threads[lane] = t;
            w.live |= 1u << lane;
        }
        make_ready(w, w.live);
    }
}

void Engine::leave(Thread& t) {
    Warp& w = *t.warp;
    Block& b = *w.block;
    Launch& launch = *b.launch;
    const u32 bit = 1u << t.lane;
    if (w.arrived && w.mask & bit)
        fail("diverged", "a lane leaves the kernel while others wait for it in a warp-wide operation", &t, w.site);
    for (const BulkGroup& g : t.groups)
        for (const auto& [index, number] : g.stores)
            if (events[index].what != Event::kNothing && events[index].number == number)
                fail("left", "a thread leaves the kernel while its bulk stores still read shared memory", &t,
                     events[index].at);
    w.live &= ~bit;
    w.ready &= ~bit;
    ++changes;
    for (const ClockRef& o : t.observed) // the end of a launch is a fence
        if (std::none_of(w.acquired.begin(), w.acquired.end(), [&](const Acquired& a) { return a.clock == o; }))
            w.acquired.push_back({o, bit});
    if (t.bulk_agent != kNobody) launch.all.raise(t.bulk_agent, t.bulk_serial + 1, t.bulk_serial + 1);
    if (!w.live) {
        settle_acquired(w, true);
        w.clock.raise(w.agent, w.time + 1, w.time + 1);
        launch.all.join(w.clock);
        agent_times[w.agent] = w.time + 1;
    }
    t.fenced.reset();
    t.~Thread(); // its place on the stack stays readable until the stack is used again
    --b.live_threads;
    Meeting& all = b.named[0];
    if (all.arrived && all.arrived == b.live_threads) finish(*this, all);
    if (!b.live_threads) {
        if (b.copies)
            fail("left", "a block ends while bulk copies into its shared memory are under way: wait for them first",
                 nullptr, Site::current());
        b.ended = true;
        --b.cluster->left;
        if (!b.triggered) ++launch.triggered;
        b.shared = {};
        b.valid = {};
        for (Shadow& s : b.shadow) delete s.more;
        b.shadow = {};
        b.barriers.clear();
        ranks[launch.rank].free_sms.push_back(b.sm);
        if (++launch.ended == launch.blocks) complete_launches(ranks[launch.rank]);
    }
    free_stacks.push_back(reinterpret_cast<u8*>(reinterpret_cast<u64>(&t) / kStack * kStack));
    w.threads[t.lane] = nullptr;
    if (w.ready && w.fuel > 0 && !failed) {
        void* nowhere;
        megagen_switch(&nowhere, w.threads[__builtin_ctz(w.ready)]->sp);
    }
    void* nowhere;
    megagen_switch(&nowhere, host_sp);
    __builtin_unreachable();
}

void Engine::complete_launches(Rank& r) {
    while (r.first < r.launches.size()) {
        Launch& launch = r.launches[r.first];
        if (launch.ended < launch.blocks) return;
        launch.complete = true;
        ++changes;
        launch.all.join(*launch.before);
        if (r.first) launch.all.join(*r.launches[r.first - 1].done);
        launch.done = std::make_shared<Clock>(launch.all);
        completed.join(launch.all);
        ++r.first;
        for (Thread* t : launch.waiting) {
            t->wait.what = nullptr;
            t->warp->blocked &= ~(1u << t->lane);
            acquire(t, launch.done);
            t->fenced = launch.done;
            make_ready(*t->warp, 1u << t->lane);
        }
        launch.waiting.clear();
    }
}

void grid_wait(Site at) {
    Thread* t = self();
    Engine& e = engine_of(t);
    Launch& launch = *block_of(t).launch;
    if (!launch.number) return;
    Launch& before = e.ranks[launch.rank].launches[launch.number - 1];
    if (before.complete) {
        acquire(t, before.done);
        t->fenced = before.done;
        return;
    }
    t->wait = {"griddepcontrol.wait", kAll, 0, 0, at};
    before.waiting.push_back(t);
    t->warp->blocked |= 1u << t->lane;
    t->warp->ready &= ~(1u << t->lane);
    yield();
}

void grid_trigger(Site) {
    Block& b = block_of(self());
    if (b.triggered) return;
    b.triggered = true;
    ++b.launch->triggered;
    ++b.engine->changes;
}

void still_waiting(bool has, u32 edge, u32 slot, u32 phase, Site at) {
    Thread* t = self();
    if (has) return;
    Warp& w = *t->warp;
    Engine& e = engine_of(t);
    t->wait = {"poll", edge, slot, phase, at};
    bool changed = t->polled.empty() || t->polled_much;
    for (const auto& [watch, version] : t->polled) changed |= watch->version != version;
    if (changed) {
        t->polled.clear();
        t->polled_much = false;
        w.fuel = 0; // let others go on
        yield();
        return;
    }
    t->ticket = ++e.tickets;
    ++e.count.sleeps;
    for (const auto& [watch, version] : t->polled) {
        if (!watch->sleepers.empty() && watch->sleepers.back() == std::pair(t, t->ticket)) continue;
        if (watch->sleepers.size() > 4096)
            std::erase_if(watch->sleepers, [](const auto& s) { return s.first->ticket != s.second; });
        watch->sleepers.emplace_back(t, t->ticket);
    }
    w.asleep |= 1u << t->lane;
    w.ready &= ~(1u << t->lane);
    yield();
}

void set_step(u32 step) { self()->step = step; }

u64 nanoseconds() {
    Engine& e = engine_of(self());
    return e.now + e.skipped;
}

u32 sm_number() { return block_of(self()).sm; }
Index thread_index() { return {self()->index, 0, 0}; }
Index block_index() { return {block_of(self()).index, 0, 0}; }
Index block_size() { return {block_of(self()).launch->threads, 1, 1}; }
Index grid_size() { return {block_of(self()).launch->blocks, 1, 1}; }

// -- order ------------------------------------------------------------------------------------------------------------

bool ordered(const Thread* t, const Access& e) {
    const Warp& w = *t->warp;
    if (e.agent == w.agent) return e.lane == t->lane || e.time < w.synced || (e.is_read && e.time < w.exchanged);
    if (w.clock.covers(e)) return true;
    for (const Acquired& a : w.acquired)
        if (a.lanes >> t->lane & 1 && a.clock->covers(e)) return true;
    return false;
}

Access access_of(Thread* t, Scope scope, bool is_read, Site at) {
    const Block& b = block_of(t);
    Access a;
    a.time = t->warp->time;
    a.site = pack_site(at);
    a.agent = t->warp->agent;
    a.step = static_cast<u16>(t->step);
    a.lane = static_cast<u8>(t->lane);
    a.scope = scope;
    a.is_read = is_read;
    a.rank = b.launch->rank;
    a.block = static_cast<u8>(b.index);
    return a;
}

// Everything that came before this point in the thread; what it does next comes after.
Clock released_by(Thread* t) {
    Warp& w = *t->warp;
    Clock c = w.clock;
    for (const Acquired& a : w.acquired)
        if (a.lanes >> t->lane & 1) c.join(*a.clock);
    c.raise(w.agent, w.synced, w.exchanged);
    c.raise_own(w.agent, t->lane, ++w.time);
    return c;
}

void acquire(Thread* t, const ClockRef& clock) {
    if (!clock) return;
    Warp& w = *t->warp;
    const u32 bit = 1u << t->lane;
    for (u32 i = 0; i < w.acquired.size(); ++i) {
        Acquired& a = w.acquired[i];
        if (a.clock != clock) continue;
        a.lanes |= bit;
        if ((a.lanes & w.live) == w.live) {
            w.clock.join(*clock);
            w.acquired.erase(w.acquired.begin() + i);
        }
        return;
    }
    w.acquired.push_back({clock, bit});
    if (w.live == bit) settle_acquired(w, true);
}

void settle_acquired(Warp& w, bool everything) {
    if (w.acquired.empty()) return;
    std::vector<Acquired> left;
    for (Acquired& a : w.acquired) {
        if (everything || (a.lanes & w.live) == w.live)
            w.clock.join(*a.clock);
        else
            left.push_back(std::move(a));
    }
    w.acquired.swap(left);
}

} // namespace megagen::emulate
