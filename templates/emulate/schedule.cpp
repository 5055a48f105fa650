// Who runs next: launches, blocks, warps and lanes, and the adversary that chooses among them.

#include <sys/mman.h>

#include <exception>
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
constexpr u64 kStuck = 4096;        // slices in which nothing changes, until a late effect is let through
constexpr u64 kPatience = 16 << 20; // accesses in which nothing changes
constexpr u32 kReserve = 8 << 10;   // bytes of a stack that only the engine may use
constexpr u64 kReading = 64;        // ns that a look at the clock takes: who waits for time to pass sees it pass
constexpr u32 kExpiries = 4096;
constexpr u64 kExpiry = 150'000'000; // ns

void main_of_thread() {
    Thread* t = self();
    Engine& e = engine_of(t);
    try {
        const Launch& launch = *block_of(t).launch;
        launch.kernel->call(launch.parameters.data());
    } catch (const std::exception& error) { // nothing may unwind past a thread's first function
        e.fail("internal", error.what(), t, Site::current());
    }
    e.leave(*t);
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
    // One set of manners a seed: which effects are late, how often warps are interrupted, whether some are favoured.
    static constexpr u32 kManners[6][4] = {{1, 0, 0, 0}, {8, 4, 1, 0}, {1, 4, 4, 1},
                                           {0, 1, 0, 2}, {0, 0, 0, 1}, {4, 1, 1, 4}};
    const u32* manners = kManners[random.below(6)];
    std::copy(manners, manners + 4, weights);
    static constexpr u32 kFuel[5] = {1, 8, 64, 1024, 1u << 20};
    fuel = kFuel[random.below(5)];
    static constexpr u32 kTournaments[4] = {1, 1, 3, 8};
    tournament = kTournaments[random.below(4)];
    if (random.below(4) == 0) {
        slow_rank = random.below(8);
        tournament = 8;
    }
    if (random.below(3) == 0) spare_sms = 64; // room for the next launch before the first block of this one has ended
    pieces = 1 + random.below(8);
    if (config.expire == 2) give_up_at = 1 + random.below(1u << random.below(21));
}

Engine::~Engine() {
    for (Rank& r : ranks)
        for (Launch& l : r.launches)
            for (Block& b : l.running) {
                for (Shadow& s : b.shadow) s.clear();
                for (Warp& w : b.warps)
                    for (Thread* t : w.threads)
                        if (t) t->~Thread();
            }
    for (Allocation& a : allocations)
        for (Shadow& s : a.shadow) s.clear();
    for (u8* s : stacks) munmap(s, (kStacksAtOnce + 1) * kStack);
    if (arena) munmap(arena, config.arena_bytes);
}

u32 Engine::agent(u64 key) {
    const auto [at, added] = agents.try_emplace(key, static_cast<u32>(agents.size()));
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
    t.wait.what = nullptr;
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
    Engine& e = engine_of(t);
    ++e.spent;
    if ((reinterpret_cast<u64>(__builtin_frame_address(0)) & (kStack - 1)) < kReserve)
        e.fail("stack", "the kernel's local arrays and calls take more than a thread's stack", t, Site::current());
    if (--w.fuel > 0) return;
    yield();
}

void Engine::run_warp(Warp& w) {
    w.fuel = 1 + random.below(2 * fuel);
    const u32 from = random.below(32);
    const u32 above = w.ready >> from << from;
    Thread* t = w.threads[__builtin_ctz(above ? above : w.ready)];
    ++count.switches;
    megagen_switch(&host_sp, t->sp);
    if (!w.ready) remove_runnable(w);
}

int Engine::run(u64 slices) {
    for (; slices && !failed; --slices) {
        ++count.slices;
        const u64 before = spent;
        if (give_up_at && count.slices >= give_up_at) jump(kExpiry);
        start_blocks();
        if (runnable.empty()) {
            if (deliver_any()) continue;
            bool busy = false;
            for (Rank& r : ranks) busy |= r.first < r.launches.size();
            if (!busy) {
                auto all = std::make_shared<Release>();
                all->clock = completed;
                all->scope = Scope::kSys;
                host = std::move(all);
                return 0;
            }
            if (start_blocks()) continue;
            if (config.expire && ++expiries < kExpiries) {
                jump(kExpiry);
                for (Rank& r : ranks)
                    for (u32 l = r.first; l < r.launches.size(); ++l)
                        for (Block& b : r.launches[l].running)
                            for (Warp& w : b.warps)
                                for (Thread* t : w.threads)
                                    if (t && t->ticket) rouse(*t);
                if (!runnable.empty()) continue;
            }
            deadlock();
            break;
        }
        if (changes != seen_changes) {
            seen_changes = changes;
            idle_since = spent;
            slices_idle = 0;
            expiries = 0;
        } else if (++slices_idle % kStuck == 0 || (spent - idle_since) % (1 << 20) > (1 << 20) - 64) {
            deliver_any(); // somebody polls without saying so
        }
        if (spent - idle_since > kPatience && !outstanding) {
            deadlock();
            break;
        }
        Warp* best = runnable[random.below(static_cast<u32>(runnable.size()))];
        for (u32 i = 1; i < tournament; ++i) {
            Warp* other = runnable[random.below(static_cast<u32>(runnable.size()))];
            if (other->priority > best->priority) best = other;
        }
        if (random.below(256) == 0) best->priority = random.below(1u << 20); // what wins often loses its place
        run_warp(*best);
        pass_time(1 + (spent - before) / 64);
    }
    return failed ? 2 : 1;
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
                // With programmatic dependent launch nothing of the launch before is known until it is waited for,
                // not even when it is over.
                auto before = std::make_shared<Release>(*launch.queued);
                const u32 known = std::min(r.first, launch.pdl ? l - std::min(l, 1u) : l);
                if (known) before->clock.join(r.launches[known - 1].done->clock);
                launch.before = std::move(before);
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
        w.time = w.synced = w.consumed = agent_times[w.agent] + 1;
        b.began.push_back(w.time);
        w.clock = launch.before->clock;
        w.priority = random.below(1u << 20) + (launch.rank == slow_rank ? 0 : 1u << 20);
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
            t->launched = launch.before;
            u64* top = reinterpret_cast<u64*>(t) - 3; // at a function's first instruction the stack is 8 off 16
            *--top = reinterpret_cast<u64>(&main_of_thread);
            top -= 6;
            std::fill(top, top + 6, 0);
            t->sp = top;
            w.threads[lane] = t;
            w.live |= 1u << lane;
        }
    }
    Event ev;
    ev.what = Event::kBegin;
    ev.block = &b;
    schedule(std::move(ev));
}

void Engine::leave(Thread& t) {
    Warp& w = *t.warp;
    Block& b = *w.block;
    Launch& launch = *b.launch;
    const u32 lane = t.lane, bit = 1u << lane;
    u8* stack = reinterpret_cast<u8*>(reinterpret_cast<u64>(&t) / kStack * kStack);
    for (u32 i = 0; i < w.gatherings.size(); ++i) {
        Gathering& g = w.gatherings[i];
        if (!(g.mask & bit)) continue;
        if (g.what != Collective::kBarrier)
            fail("diverged", "leaves the kernel while others wait for this lane in a warp-wide operation", &t, g.site);
        g.mask &= ~bit; // a barrier does not wait for who has left
        if (g.arrived != g.mask) continue;
        complete(w, i);
        break;
    }
    for (const BulkGroup& g : t.groups)
        if (!g.read && !g.stores.empty())
            fail("left", "leaves the kernel without waiting until its bulk stores have read shared memory", &t, g.at);
    leave_products(&t);
    w.live &= ~bit;
    w.ready &= ~bit;
    ++changes;
    for (const ReleaseRef& o : t.observed) // the end of a launch is a fence
        if (std::none_of(w.acquired.begin(), w.acquired.end(), [&](const Acquired& a) { return a.from == o; }))
            w.acquired.push_back({o, bit});
    if (t.bulk_agent != kNobody) launch.all.raise(t.bulk_agent, t.bulk_serial + 1, t.bulk_serial + 1);
    if (!w.live) {
        settle_acquired(w, true);
        w.clock.raise(w.agent, w.time + 1, w.time + 1);
        launch.all.join(w.clock);
        agent_times[w.agent] = w.time + 1;
    }
    --b.live_threads;
    Meeting& all = b.named[0];
    if (all.arrived && all.arrived == b.live_threads) finish(*this, all);
    Meeting& cluster = b.cluster->barrier;
    if (t.cluster_phase == cluster.phase + 1) --cluster.arrived; // it counts no more among those who must arrive
    finish_cluster(*this, *b.cluster);
    if (!b.live_threads) {
        end_products(*this, b);
        for (auto& [offset, barrier] : b.barriers) {
            end_phase(barrier, b, offset); // one that was begun
            if (barrier.copied > barrier.seen)
                fail("left", "a block ends without having waited for copies into its shared memory", nullptr,
                     unpack_site(barrier.copier.site), nullptr, &barrier.copier);
        }
        b.ended = true;
        if (!b.triggered) ++launch.triggered;
        b.shared = {};
        b.valid = {};
        for (Shadow& s : b.shadow) s.clear();
        b.shadow = {};
        b.barriers.clear();
        ranks[launch.rank].free_sms.push_back(b.sm);
        if (++launch.ended == launch.blocks) complete_launches(ranks[launch.rank]);
    }
    Thread* next = w.ready && w.fuel > 0 && !failed ? w.threads[__builtin_ctz(w.ready)] : nullptr;
    void* to = next ? next->sp : host_sp;
    w.threads[lane] = nullptr;
    if (!w.live) w.clock = Clock(); // the launch has it
    t.~Thread();
    free_stacks.push_back(stack); // nobody takes it before this thread is off it
    void* nowhere;
    megagen_switch(&nowhere, to);
    __builtin_unreachable();
}

// A thread that has waited for a launch comes after all of it, and so does what it stores.
void after_launch(Thread* t, const Launch& launch) {
    acquire(t, launch.done, Scope::kSys);
    t->launched = launch.done;
}

void Engine::complete_launches(Rank& r) {
    while (r.first < r.launches.size()) {
        Launch& launch = r.launches[r.first];
        if (launch.ended < launch.blocks) return;
        launch.complete = true;
        ++changes;
        launch.all.join(launch.before->clock);
        if (r.first) launch.all.join(r.launches[r.first - 1].done->clock);
        launch.done = std::make_shared<Release>(Release{std::move(launch.all), Scope::kSys, launch.rank, 0, 0});
        completed.join(launch.done->clock);
        ++r.first;
        for (Thread* t : launch.waiting) {
            t->wait.what = nullptr;
            t->warp->blocked &= ~(1u << t->lane);
            after_launch(t, launch);
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
        after_launch(t, before);
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

void look_again() {
    Thread* t = self();
    t->polled.clear();
    t->polled_much = true;
}

void still_waiting(bool has, u32 edge, u32 slot, u32 phase, Site at) {
    Thread* t = self();
    Engine& e = engine_of(t);
    if (e.give_up_at && e.count.slices >= e.give_up_at) { // nobody may sleep through it
        t->warp->fuel = 0;
        yield();
        return;
    }
    if (has) return;
    Warp& w = *t->warp;
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
    spend_fuel(self());
    Engine& e = engine_of(self());
    e.skipped += kReading;
    return e.now + e.skipped;
}

u64 stamp_time() {
    const Engine& e = engine_of(self());
    return e.now + e.skipped;
}

u64 stamp_cycles() { return (stamp_time() + 1000 * sm_number()) * 2; } // each SM's has its own beginning

u32 sm_number() { return block_of(self()).sm; }
Index thread_index() { return {self()->index, 0, 0}; }
Index block_index() { return {block_of(self()).index, 0, 0}; }
Index block_size() { return {block_of(self()).launch->threads, 1, 1}; }
Index grid_size() { return {block_of(self()).launch->blocks, 1, 1}; }

// -- order ------------------------------------------------------------------------------------------------------------

bool ordered(const Thread* t, const Access& e) {
    const Warp& w = *t->warp;
    if (e.agent == w.agent &&
        (!(e.lanes & ~(1u << t->lane)) || e.time < w.synced || (e.is_read && e.time < w.consumed)))
        return true;
    if (w.clock.covers(e)) return true;
    for (const Acquired& a : w.acquired)
        if (a.lanes >> t->lane & 1 && a.from->clock.covers(e)) return true;
    return false;
}

Access access_of(Thread* t, Scope scope, bool is_read, Site at) {
    const Block& b = block_of(t);
    Access a;
    a.time = t->warp->time;
    a.site = pack_site(at);
    a.agent = t->warp->agent;
    a.step = static_cast<u16>(t->step);
    a.lanes = 1u << t->lane;
    a.scope = scope;
    a.is_read = is_read;
    a.rank = static_cast<u8>(b.launch->rank);
    a.block = static_cast<u16>(b.index);
    return a;
}

// Everything that came before this point in the thread; what it does next comes after.
Clock released_by(Thread* t) {
    Warp& w = *t->warp;
    Clock c = w.clock;
    for (const Acquired& a : w.acquired)
        if (a.lanes >> t->lane & 1) c.join(a.from->clock);
    c.raise(w.agent, w.synced, w.consumed);
    c.raise_own(w.agent, t->lane, ++w.time);
    return c;
}

ReleaseRef release(Thread* t, Scope scope) {
    const Block& b = block_of(t);
    return std::make_shared<Release>(
        Release{released_by(t), scope, b.launch->rank, b.index, b.index / b.launch->cluster});
}

void acquire(Thread* t, const ReleaseRef& from, Scope scope) {
    if (!from) return;
    const Block& b = block_of(t);
    scope = std::min(scope, from->scope);
    const bool near = from->rank == b.launch->rank;
    const Scope needed = !near                                          ? Scope::kSys
                         : from->block == b.index                       ? Scope::kCta
                         : from->cluster == b.index / b.launch->cluster ? Scope::kCluster
                                                                        : Scope::kGpu;
    if (scope < needed) return;
    Warp& w = *t->warp;
    const u32 bit = 1u << t->lane;
    for (u32 i = 0; i < w.acquired.size(); ++i) {
        Acquired& a = w.acquired[i];
        if (a.from != from) continue;
        a.lanes |= bit;
        if ((a.lanes & w.live) == w.live) {
            w.clock.join(from->clock);
            w.acquired.erase(w.acquired.begin() + i);
        }
        return;
    }
    if (w.live == bit)
        w.clock.join(from->clock);
    else
        w.acquired.push_back({from, bit});
}

void settle_acquired(Warp& w, bool everything) {
    if (w.acquired.empty()) return;
    std::vector<Acquired> left;
    for (Acquired& a : w.acquired) {
        if (everything || (a.lanes & w.live) == w.live)
            w.clock.join(a.from->clock);
        else
            left.push_back(std::move(a));
    }
    w.acquired.swap(left);
}

} // namespace megagen::emulate
