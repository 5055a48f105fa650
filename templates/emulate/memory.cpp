// Global and shared memory: bounds, what was ever written, who accessed it, and effects that take their time.

#include <sys/mman.h>

#include <cstdio>

#include "engine.hpp"

namespace megagen::emulate {

namespace {

constexpr u32 kProxyFences = 1u << 16; // as many are remembered

std::string text(const char* format, auto... args) {
    char buffer[400];
    std::snprintf(buffer, sizeof buffer, format, args...);
    return buffer;
}

Place place_of(const Allocation& a, const void* p, u32 bytes) {
    return {false, a.rank, 0, a.name, static_cast<u64>(static_cast<const u8*>(p) - a.base), bytes};
}

Place place_of(const Block& b, u64 offset, u32 bytes) { return {true, b.launch->rank, b.index, "", offset, bytes}; }

// Whether the two need no order: they touch different bytes, or both are strong with scopes that include the other.
bool at_peace(const Access& a, const Access& b) {
    if (!(a.bytes & b.bytes)) return true;
    const Scope scope = std::min(a.scope, b.scope);
    if (a.rank != b.rank) return scope == Scope::kSys;
    return a.block == b.block ? scope >= Scope::kCta : scope >= Scope::kGpu;
}

// Footprints, if they were asked for.

void note(const Thread* t, Verb verb, const Allocation& a, const void* p, u32 bytes) {
    Engine& e = *t->warp->block->engine;
    if (!e.config.footprints) return;
    const Launch& launch = *t->warp->block->launch;
    const u64 granule = a.granule(), offset = static_cast<u64>(static_cast<const u8*>(p) - a.base);
    e.footprints.add({launch.rank, launch.number, t->step}, a.place, verb, offset / granule,
                     (offset + bytes + granule - 1) / granule);
}

void note(const Thread* t, Verb verb, const Block& b, u32 offset, u32 bytes) {
    const Block& own = *t->warp->block;
    if (!own.engine->config.footprints) return;
    own.engine->footprints.add({own.launch->rank, own.launch->number, t->step}, &b == &own ? kOwnShared : kOtherShared,
                               verb, offset / 4, (offset + bytes + 3) / 4);
}

void tally(const Engine& e, Barrier& b, u32 step, Verb verb, u32 n) {
    if (e.config.footprints) b.counted[{step, verb}] += n;
}

Verb stored(u32 word) { return word == 0 ? Verb::kZeros : word == ~0u ? Verb::kOnes : Verb::kWrite; }

// An access to global memory whose allocation, bounds and alignment are right.
Allocation& checked(Thread* t, const void* p, u32 bytes, bool writes, Site at) {
    Engine& e = engine_of(t);
    Allocation* a = e.find(p, bytes);
    const char* verb = writes ? "writes" : "reads";
    if (!a) {
        const Allocation* near = nullptr;
        for (const Allocation& x : e.allocations)
            if (x.base <= p && (!near || x.base > near->base)) near = &x;
        if (!near || static_cast<const u8*>(p) > near->base + near->bytes + kPage)
            e.fail("out_of_bounds", text("%s %u bytes at %p, where nothing was allocated", verb, bytes, p), t, at);
        const Place place = place_of(*near, p, bytes);
        e.fail("out_of_bounds",
               text("%s %u bytes at byte %lld of the %llu bytes of '%s'", verb, bytes, place.offset, near->bytes,
                    near->name.c_str()),
               t, at, &place);
    }
    if (reinterpret_cast<u64>(p) % std::min(bytes, 16u)) {
        const Place place = place_of(*a, p, bytes);
        e.fail("misaligned",
               text("%s %u bytes at an address that is no multiple of %u", verb, bytes, std::min(bytes, 16u)), t, at,
               &place);
    }
    if (writes && a->kind == MEGAGEN_CONSTANT) {
        const Place place = place_of(*a, p, bytes);
        e.fail("read_only", text("writes to '%s', which kernels only read", a->name.c_str()), t, at, &place);
    }
    return *a;
}

// Whether the thread comes after a write to this word: by what orders threads, or because a read that came before the
// thread has seen it. (PTX, causality order: observation, then base causality.)
bool after_write(Thread* t, const Shadow& s) {
    if (ordered(t, s.write)) return true;
    if (s.read.observes && ordered(t, s.read)) return true;
    if (s.more_reads)
        for (const Access& r : *s.more_reads)
            if (r.observes && ordered(t, r)) return true;
    return false;
}

bool consumed(const Thread* t, const Access& r) {
    const Warp& w = *t->warp;
    if (r.is_async || (r.agent == w.agent ? r.time < w.consumed : w.clock.consumed(r))) return true;
    for (const Acquired& x : w.acquired)
        if (x.lanes >> t->lane & 1 && x.from->clock.consumed(r)) return true;
    return false;
}

// Whether whoever conflicts with the old access, made before the new one, conflicts with the new one too.
bool replaces(Thread* t, const Access& now, const Access& old) {
    if (now.scope > old.scope || old.bytes & ~now.bytes || (now.is_read && !old.is_read) || !ordered(t, old))
        return false;
    // What a copy may overwrite later must have been consumed by everyone who read it.
    return !old.is_shared || !old.is_read || now.agent == old.agent || consumed(t, old);
}

bool same_but_lanes(const Access& a, const Access& b) {
    return a.agent == b.agent && a.time == b.time && a.scope == b.scope && a.bytes == b.bytes &&
           a.is_async == b.is_async && a.observes == b.observes;
}

// Into a list by agent: in the place of one that it replaces, or that is the same by other lanes. Others' are looked at
// only as the list doubles: there may be a thousand, for every word.
void keep(Thread* t, std::vector<Access>*& list, Access a) {
    if (!list) list = new std::vector<Access>;
    auto at = std::lower_bound(list->begin(), list->end(), a.agent,
                               [](const Access& x, u32 agent) { return x.agent < agent; });
    for (auto mine = at; mine != list->end() && mine->agent == a.agent; ++mine) {
        if (same_but_lanes(*mine, a)) {
            mine->lanes |= a.lanes;
            return;
        }
        if (replaces(t, a, *mine)) {
            a.observes |= mine->observes;
            *mine = a;
            return;
        }
    }
    list->insert(at, a);
    const u64 n = list->size();
    if (n < 16 || n & (n - 1)) return;
    bool observes = false;
    std::erase_if(*list, [&](const Access& x) {
        if (x.agent == a.agent || !replaces(t, a, x)) return false;
        observes |= x.observes;
        return true;
    });
    if (observes)
        for (Access& x : *list)
            if (x.agent == a.agent && x.time == a.time) x.observes = 1;
}

void remember_read(Thread* t, Shadow& s, Access a) {
    if (!s.read.known()) {
        s.read = a;
    } else if (same_but_lanes(s.read, a)) {
        s.read.lanes |= a.lanes;
    } else if (replaces(t, a, s.read)) {
        a.observes |= s.read.observes;
        s.read = a;
    } else {
        keep(t, s.more_reads, a);
    }
}

// `chained`: an atomic read-modify-write, which has seen the write before it if the two are strong together.
void remember_write(Thread* t, Shadow& s, const Access& a, bool chained) {
    const bool seen = chained && s.write.scope != Scope::kNone && at_peace(s.write, a) && !(s.write.bytes & ~a.bytes);
    if (s.write.known() && !seen && !replaces(t, a, s.write)) keep(t, s.more_writes, s.write);
    s.write = a;
    if (s.read.known() && replaces(t, a, s.read)) s.read = Access();
    s.read.observes = 0;
    const auto clean = [&](std::vector<Access>*& list) {
        if (!list) return;
        for (Access& x : *list) x.observes = 0;
        if (a.scope == Scope::kNone) std::erase_if(*list, [&](const Access& x) { return replaces(t, a, x); });
        if (!list->empty()) return;
        delete list;
        list = nullptr;
    };
    clean(s.more_reads);
    clean(s.more_writes);
}

void race(Thread* t, const char* verb, const Access& other, const Place& place, Site at) {
    Engine& e = engine_of(t);
    const char* did = other.is_async  ? "a copy under way writes"
                      : other.is_read ? "another thread reads"
                                      : "another thread writes";
    if (other.is_async && other.is_read)
        did = other.is_shared ? "a product under way reads" : "a bulk store under way reads";
    const bool strong = other.scope != Scope::kNone;
    e.fail("race",
           text("%s what %s%s, and nothing orders the two", verb, did,
                strong ? " (with too small a scope, or against a plain access)" : ""),
           t, at, &place, &other);
}

// `place` makes the Place, for a report. `sees_write`: the last write has arrived. `as`: who will have read it, if not
// this thread now.
void check_read(Thread* t, Shadow& s, Access a, auto place, Site at, bool sees_write = false,
                const Access* as = nullptr) {
    if (sees_write && s.write.known() && !s.write.is_async && a.scope != Scope::kNone)
        a.observes = at_peace(s.write, a);
    if (s.write.known() && !at_peace(s.write, a) && !after_write(t, s)) race(t, "reads", s.write, place(), at);
    if (s.more_writes)
        for (const Access& w : *s.more_writes)
            if (!at_peace(w, a) && !ordered(t, w)) race(t, "reads", w, place(), at);
    remember_read(t, s, as ? *as : a);
}

void check_write(Thread* t, Shadow& s, const Access& a, auto place, Site at, bool races, bool chained = false,
                 const Access* as = nullptr) {
    const char* verb = a.is_async ? "copies over" : "writes";
    // What a copy overwrites must be in registers that were used: a load that is still on its way would see the new
    // data.
    const auto check = [&](const Access& r) {
        if (a.is_async && r.is_read && !consumed(t, r)) {
            const Place where = place();
            engine_of(t).fail("overwritten",
                              "copies over what a thread has read, before that thread's warp handed it back with the "
                              "values consumed (a vote on ptx::never_true of something computed from them)",
                              t, at, &where, &r);
        }
        if (races && !at_peace(r, a) && !ordered(t, r)) race(t, verb, r, place(), at);
    };
    if (s.read.known()) check(s.read);
    if (s.more_reads)
        for (const Access& r : *s.more_reads) check(r);
    if (races && s.write.known() && !at_peace(s.write, a) && !after_write(t, s)) race(t, verb, s.write, place(), at);
    if (races && s.more_writes)
        for (const Access& w : *s.more_writes)
            if (!at_peace(w, a) && !ordered(t, w)) race(t, verb, w, place(), at);
    remember_write(t, s, as ? *as : a, chained);
}

// Whether a generic write has passed a proxy fence on its way to this thread.
bool proxied(Thread* t, const Access& write, bool global) {
    Engine& e = engine_of(t);
    if (t->launched && t->launched->clock.covers(write)) return true; // the end of a launch does as well
    for (auto f = e.proxy_fences.rbegin(); f != e.proxy_fences.rend(); ++f)
        if (f->global == global && ordered(t, f->access) && f->before.covers(write)) return true;
    return false;
}

void require_proxied(Thread* t, const Shadow& s, bool global, auto make_place, Site at,
                     const char* does = "a bulk copy read") {
    if (!s.write.known() || s.write.is_async || proxied(t, s.write, global)) return;
    const Place place = make_place();
    engine_of(t).fail(
        "no_proxy_fence",
        text("lets %s what was written through the generic proxy, with no fence.proxy.async in between", does), t, at,
        &place, &s.write);
}

void polled(Thread* t, Watch& watch) {
    if (t->polled_much || (!t->polled.empty() && t->polled.back() == std::pair(&watch, watch.version))) return;
    if (t->polled.size() >= 64)
        t->polled_much = true;
    else
        t->polled.emplace_back(&watch, watch.version);
}

// The store under way to a word arrives now if the thread must see it.
void settle(Thread* t, u64 word, bool always) {
    Engine& e = engine_of(t);
    const auto at = e.pending.find(word);
    if (at == e.pending.end()) return;
    if (always || ordered(t, e.events[at->second].access)) e.deliver(at->second);
    if (e.failed) yield();
}

// What a strong read of a word learns from its writer: at once by an acquire, else by the thread's next fence.
void observe(Thread* t, const Allocation& a, u64 word, u64 address, Scope scope, Order order) {
    Engine& e = engine_of(t);
    const bool acquires = order == Order::kAcquire || order == Order::kAcqRel;
    const auto learn = [&](const ReleaseRef& from) {
        if (acquires)
            acquire(t, from, scope);
        else if (from != t->launched && std::find(t->observed.begin(), t->observed.end(), from) == t->observed.end())
            t->observed.push_back(from);
    };
    if (!a.tags.empty() && a.tags[word]) learn(a.tags[word]);
    if (e.sync_words.empty()) return;
    const auto found = e.sync_words.find(address);
    if (found == e.sync_words.end()) return;
    for (const ReleaseRef& r : found->second) learn(r);
}

} // namespace

u64 Engine::allocate(u64 bytes, u32 rank, u32 kind, const char* name) {
    if (!arena) {
        void* m = mmap(nullptr, config.arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                       -1, 0);
        if (m == MAP_FAILED) return 0;
        arena = static_cast<u8*>(m);
        arena_used = kPage; // nothing begins at the very start
    }
    const u64 room = (bytes + kPage - 1) / kPage * kPage + kPage; // and a page that belongs to nobody
    if (arena_used + room > config.arena_bytes) return 0;
    Allocation& a = allocations.emplace_back();
    a.name = name;
    a.base = arena + arena_used;
    a.bytes = bytes;
    a.rank = rank;
    a.kind = kind;
    a.place = kFirstAllocation + static_cast<u32>(allocations.size()) - 1;
    pages.resize((arena_used + room) / kPage);
    for (u64 page = arena_used / kPage; page < (arena_used + room) / kPage - 1; ++page)
        pages[page] = static_cast<u32>(allocations.size());
    arena_used += room;
    if (kind != MEGAGEN_CONSTANT) {
        for (u64 i = 0; i + 4 <= bytes; i += 4) std::memcpy(a.base + i, &kPoison, 4);
        a.valid.resize((bytes + 3) / 4);
        if (config.race) a.shadow.resize((bytes + 3) / 4);
    }
    return reinterpret_cast<u64>(a.base);
}

Allocation* Engine::find(const void* p, u64 bytes) {
    const u64 offset = static_cast<u64>(static_cast<const u8*>(p) - arena);
    const u64 page = offset / kPage;
    if (static_cast<const u8*>(p) < arena || page >= pages.size() || !pages[page]) return nullptr;
    Allocation& a = allocations[pages[page] - 1];
    return static_cast<const u8*>(p) + bytes <= a.base + a.bytes ? &a : nullptr;
}

void Engine::host_wrote(u64 address, u64 bytes) {
    Allocation* a = find(reinterpret_cast<const void*>(address), bytes);
    if (!a || a->kind == MEGAGEN_CONSTANT) return;
    const u64 first = (address - reinterpret_cast<u64>(a->base)) / 4, last = first + (bytes + 3) / 4;
    std::fill(a->valid.begin() + first, a->valid.begin() + last, u8(kBytes));
    for (u64 i = first; i < last && !a->shadow.empty(); ++i) {
        a->shadow[i].clear();
    }
    for (u64 i = first; i < last && !a->tags.empty(); ++i) a->tags[i].reset();
    for (u64 i = 0; i < bytes && !sync_words.empty(); i += 4) sync_words.erase(address + i);
}

void Engine::touch(u64 address) { wake(watch(address)); }

// -- effects that take their time -------------------------------------------------------------------------------------

u32 Engine::schedule(Event&& event) {
    u32 index;
    if (free_events.empty()) {
        index = static_cast<u32>(events.size());
        events.push_back(std::move(event));
    } else {
        index = free_events.back();
        free_events.pop_back();
        event.number = events[index].number;
        events[index] = std::move(event);
    }
    ++events[index].number;
    ++count.events;
    ++outstanding;
    u32 draw = random.below(weights[0] + weights[1] + weights[2] + weights[3]), how = 0;
    while (draw >= weights[how]) draw -= weights[how++];
    if (how == 3)
        late.push_back(index);
    else {
        const u64 ahead = how == 0 ? 1 : how == 1 ? 1 + random.below(32) : 1 + random.below(kHorizon - 1);
        const u32 bucket = (now + ahead) % kHorizon;
        buckets[bucket].push_back(index);
        occupied[bucket / 64] |= 1ull << bucket % 64;
    }
    return index;
}

bool Engine::deliver_due() {
    std::vector<u32>& due = buckets[now % kHorizon];
    if (!due.empty()) {
        std::vector<u32> mine;
        mine.swap(due);
        occupied[now % kHorizon / 64] &= ~(1ull << now % 64);
        for (u32 i = 0; i < mine.size() && !failed; ++i) {
            std::swap(mine[i], mine[i + random.below(static_cast<u32>(mine.size()) - i)]);
            deliver(mine[i]);
            free_events.push_back(mine[i]);
        }
    }
    return true;
}

void Engine::jump(u64 nanoseconds) {
    skipped += nanoseconds;
    while (outstanding && !failed) {
        if (!late.empty()) {
            const u32 index = late.back();
            late.pop_back();
            deliver(index);
            free_events.push_back(index);
        } else {
            pass_time(kHorizon);
        }
    }
}

void Engine::pass_time(u64 ticks) {
    for (const u64 end = now + ticks; now < end && !failed;) {
        const u64 next = now + 1, word = occupied[next % kHorizon / 64] >> next % 64;
        now = std::min(end, word ? next + __builtin_ctzll(word) : (next / 64 + 1) * 64 - 1);
        deliver_due();
    }
    if (!late.empty() && random.below(weights[0] ? 512 : 8192) == 0) deliver_any(); // none is kept back for ever
}

// Nothing goes on by itself: the next effect must come. False: there is none.
bool Engine::deliver_any() {
    if (!outstanding && late.empty()) return false;
    if (runnable.empty() || late.empty()) {
        for (u64 next = now + 1; next <= now + kHorizon;) {
            const u64 word = occupied[next % kHorizon / 64] >> next % 64;
            if (!word) {
                next = (next / 64 + 1) * 64;
                continue;
            }
            now = next + __builtin_ctzll(word);
            deliver_due();
            return true;
        }
    }
    while (!late.empty()) {
        std::swap(late[random.below(static_cast<u32>(late.size()))], late.back());
        const u32 index = late.back();
        late.pop_back();
        const bool live = events[index].what != Event::kNothing;
        deliver(index);
        free_events.push_back(index);
        if (live) return true;
    }
    return outstanding != 0;
}

// The event happens, unless it has. Its slot is free once the queue that holds it lets go.
void Engine::deliver(u32 index) {
    if (events[index].what == Event::kNothing) return;
    Event ev = std::move(events[index]);
    events[index] = Event();
    events[index].number = ev.number;
    --outstanding;
    // What releases of one block and scope have in common is one entry.
    const auto add_release = [](std::vector<ReleaseRef>& known, const ReleaseRef& r) {
        for (ReleaseRef& k : known) {
            if (k == r) return;
            if (k->scope != r->scope || k->rank != r->rank || k->block != r->block) continue;
            auto both = std::make_shared<Release>(*k);
            both->clock.join(r->clock);
            k = std::move(both);
            return;
        }
        known.push_back(r);
    };
    const auto gone = [&](const char* what) {
        if (!ev.block->ended) return false;
        const Place place = place_of(*ev.block, ev.address & (kWindow - 1), ev.bytes);
        record("left", text("%s reaches a block that has ended", what), nullptr, ev.at, &place, &ev.access);
        return true;
    };
    switch (ev.what) {
    case Event::kNothing:
        return;
    case Event::kStore:
    case Event::kRmw: {
        Allocation& a = *ev.allocation;
        const u64 word = (ev.address - reinterpret_cast<u64>(a.base)) / 4;
        u32 now_there;
        std::memcpy(&now_there, reinterpret_cast<const void*>(ev.address), 4);
        u32 value = ev.value;
        if (ev.what == Event::kRmw) {
            switch (ev.op) {
            case Rmw::kAdd:
                value = now_there + ev.value;
                break;
            case Rmw::kInc:
                value = now_there >= ev.value ? 0 : now_there + 1;
                break;
            case Rmw::kOr:
                value = now_there | ev.value;
                break;
            case Rmw::kMax:
                value = std::max(now_there, ev.value);
                break;
            case Rmw::kCas:
                value = now_there == ev.compare ? ev.value : now_there;
                break;
            }
        }
        for (u32 i = 0; i < 4; ++i)
            if (ev.access.bytes >> i & 1) std::memcpy(a.base + 4 * word + i, reinterpret_cast<u8*>(&value) + i, 1);
        if (a.valid[word] & kPending) pending.erase(ev.address);
        a.valid[word] = (a.valid[word] & kBytes) | ev.access.bytes;
        if (ev.what == Event::kStore) {
            if (!sync_words.empty()) sync_words.erase(ev.address);
            if (ev.launched && a.tags.empty()) a.tags.resize(a.valid.size());
            if (!a.tags.empty()) a.tags[word] = ev.launched;
        } else if (ev.launched) { // whoever acquires later learns what all additions released, and the store before
            add_release(sync_words[ev.address], ev.launched);
        }
        if (ev.released) add_release(sync_words[ev.address], ev.released);
        for (const ReleaseRef& r : ev.fenced) add_release(sync_words[ev.address], r);
        touch(ev.address);
        if (ev.together != 0) {
            for (u64 other = ev.address & ~15ull; other < (ev.address | 15); other += 4) {
                const auto at = pending.find(other);
                if (at != pending.end() && events[at->second].together == ev.together) deliver(at->second);
            }
        }
        return;
    }
    case Event::kPiece: {
        if (gone("a bulk copy")) return;
        const u64 offset = ev.address;
        std::memcpy(&ev.block->shared[offset], reinterpret_cast<const void*>(ev.source), ev.bytes);
        std::fill_n(ev.block->valid.begin() + offset / 4, ev.bytes / 4, u8(kBytes));
        --ev.block->copies;
        complete_tx(*ev.block, ev.bar, ev.phase, ev.bytes, ev);
        return;
    }
    case Event::kStoreAsync: {
        if (gone("a st.async")) return;
        std::memcpy(&ev.block->shared[ev.address], &ev.value, 4);
        ev.block->valid[ev.address / 4] = kBytes;
        complete_tx(*ev.block, ev.bar, ev.phase, 4, ev);
        return;
    }
    case Event::kArrive: {
        if (gone("a remote arrival")) return;
        Barrier& b = ev.block->barriers.at(ev.bar);
        if (b.pending < ev.value) {
            const Place place = place_of(*ev.block, ev.bar, 8);
            record("too_many_arrivals",
                   text("arrives at an mbarrier that expects %u arrivals and has had them all", b.count), nullptr,
                   ev.at, &place, &ev.access);
            return;
        }
        b.pending -= ev.value;
        b.remote.join(ev.released->clock);
        tally(*this, b, ev.access.step, Verb::kArrive, ev.value);
        advance(b, *ev.block, ev.bar);
        return;
    }
    case Event::kBulkStore: {
        Allocation& a = *ev.allocation;
        const u8* source = ev.data ? ev.data.get() : &ev.block->shared[ev.source];
        for (u32 i = 0; i < ev.bytes; i += 4) {
            const u64 address = ev.address + i, word = (address - reinterpret_cast<u64>(a.base)) / 4;
            if (a.valid[word] & kPending) deliver(pending.at(address));
            std::memcpy(a.base + 4 * word, source + i, 4);
            a.valid[word] = kBytes;
            if (!sync_words.empty()) sync_words.erase(address);
            if (!a.tags.empty()) a.tags[word].reset();
            touch(address);
        }
        return;
    }
    case Event::kBegin:
        for (Warp& w : ev.block->warps) make_ready(w, w.live);
        ++changes;
        return;
    }
}

// -- global memory ----------------------------------------------------------------------------------------------------

void global_load(void* to, const void* from, u32 bytes, Scope scope, Order order, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    ++e.count.loads;
    Allocation& a = checked(t, from, bytes, false, at);
    note(t, Verb::kRead, a, from, bytes);
    if (a.kind != MEGAGEN_CONSTANT) {
        const Access mine = access_of(t, scope, true, at);
        const u64 first = (static_cast<const u8*>(from) - a.base) / 4;
        const u64 address = reinterpret_cast<u64>(from);
        for (u32 i = 0; i < bytes / 4; ++i) {
            if (a.valid[first + i] & kPending) settle(t, address + 4 * i, false);
            if ((a.valid[first + i] & kBytes) != kBytes) {
                const Place place = place_of(a, static_cast<const u8*>(from) + 4 * i, 4);
                e.fail("unwritten", "reads a word that nobody has written", t, at, &place);
            }
            if (e.config.race) {
                check_read(
                    t, a.shadow[first + i], mine, [&] { return place_of(a, static_cast<const u8*>(from) + 4 * i, 4); },
                    at, !(a.valid[first + i] & kPending));
            }
            if (scope != Scope::kNone) observe(t, a, first + i, address + 4 * i, scope, order);
        }
        if (scope != Scope::kNone) polled(t, e.watch(address));
    }
    std::memcpy(to, from, bytes);
}

void constant_load(void* to, const void* from, u32 bytes, Site at) {
    Thread* t = self();
    spend_fuel(t);
    const Allocation& a = checked(t, from, bytes, false, at);
    note(t, Verb::kRead, a, from, bytes);
    if (a.kind != MEGAGEN_CONSTANT) {
        const Place place = place_of(a, from, bytes);
        engine_of(t).fail("bad_instruction", text("ld.global.nc of '%s', which kernels write to", a.name.c_str()), t,
                          at, &place);
    }
    std::memcpy(to, from, bytes);
}

void stamp_store(void* to, const void* from, u32 bytes, Site at) {
    checked(self(), to, bytes, true, at);
    std::memcpy(to, from, bytes);
}

void global_store(void* to, const void* from, u32 bytes, Scope scope, Order order, Site at, bool whole) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    ++e.count.stores;
    Allocation& a = checked(t, to, bytes, true, at);
    const u64 offset = static_cast<u8*>(to) - a.base, first = offset / 4;
    const u32 part = bytes < 4 ? offset % 4 : 0; // where in its word something shorter begins
    const bool releases = order == Order::kRelease || order == Order::kAcqRel;
    ReleaseRef released;
    if (releases) released = release(t, scope);
    Access mine = access_of(t, scope, false, at);
    mine.bytes = bytes < 4 ? ((1u << bytes) - 1) << part : kBytes;
    const u64 together = whole ? ++e.stores_together : 0;
    for (u32 i = 0; i < (bytes + 3) / 4; ++i) {
        const u64 address = reinterpret_cast<u64>(to) - part + 4 * i;
        if (e.config.race)
            check_write(
                t, a.shadow[first + i], mine,
                [&] { return place_of(a, static_cast<u8*>(to) + 4 * i, std::min(bytes, 4u)); }, at, true);
        if (a.valid[first + i] & kPending) settle(t, address, true);
        Event ev;
        ev.what = Event::kStore;
        ev.address = address;
        ev.together = together;
        ev.allocation = &a;
        std::memcpy(reinterpret_cast<u8*>(&ev.value) + part, static_cast<const u8*>(from) + 4 * i, std::min(bytes, 4u));
        note(t, bytes < 4 ? Verb::kWrite : stored(ev.value), a, reinterpret_cast<const u8*>(address), 4);
        ev.access = mine;
        ev.released = released;
        if (scope != Scope::kNone) {
            ev.fenced = t->fenced;
            ev.launched = t->launched;
        }
        ev.at = at;
        const u32 index = e.schedule(std::move(ev));
        a.valid[first + i] |= kPending;
        e.pending[address] = index;
    }
}

u32 global_rmw(void* to, Rmw op, u32 operand, u32 compare, bool returns, Scope scope, Order order, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    Allocation& a = checked(t, to, 4, true, at);
    note(t, Verb::kAtomic, a, to, 4);
    const u64 word = (static_cast<u8*>(to) - a.base) / 4;
    const u64 address = reinterpret_cast<u64>(to);
    const Place place = place_of(a, to, 4);
    // One access: its read comes before its write wherever that is seen.
    if (e.config.race)
        check_write(t, a.shadow[word], access_of(t, scope, false, at), [&] { return place; }, at, true, true);
    if (a.valid[word] & kPending) settle(t, address, true); // so operations on a word are done in the order of issue
    if ((a.valid[word] & kBytes) != kBytes)
        e.fail("unwritten", "changes a word that nobody has written", t, at, &place);
    u32 old;
    std::memcpy(&old, to, 4);
    if (returns) observe(t, a, word, address, scope, order);
    Event ev;
    ev.what = Event::kRmw;
    ev.op = op;
    ev.value = operand;
    ev.compare = compare;
    ev.address = address;
    ev.allocation = &a;
    ev.access = access_of(t, scope, false, at);
    if (order == Order::kRelease || order == Order::kAcqRel) ev.released = release(t, scope);
    ev.fenced = t->fenced;
    ev.launched = t->launched;
    ev.at = at;
    const u32 index = e.schedule(std::move(ev));
    a.valid[word] |= kPending;
    e.pending[address] = index;
    if (returns) e.deliver(index);
    if (e.failed) yield();
    return old;
}

namespace {

void fenced(Thread* t, Scope scope) {
    std::erase_if(t->fenced, [&](const ReleaseRef& r) { return r->scope <= scope; });
    t->fenced.push_back(release(t, scope));
}

} // namespace

void fence(Scope scope, Site) {
    Thread* t = self();
    spend_fuel(t);
    for (const ReleaseRef& o : t->observed) acquire(t, o, scope);
    if (scope == Scope::kSys) t->observed.clear(); // a wider fence may still acquire more
    fenced(t, scope);
}

// -- shared memory ----------------------------------------------------------------------------------------------------

namespace {

struct Spot {
    Block& block;
    u32 offset;
};

Spot locate(Thread* t, u32 address, u32 bytes, bool remote, const char* verb, Site at) {
    Engine& e = engine_of(t);
    Block& mine = block_of(t);
    const u32 rank = address / kWindow - 1;
    const i64 offset = static_cast<i64>(address % kWindow) - kSharedBase;
    if (address < kWindow || rank >= mine.cluster->blocks.size())
        e.fail("out_of_bounds",
               text("%s shared memory at address 0x%x, which is no block's of the cluster", verb, address), t, at);
    Block& b = *mine.cluster->blocks[rank];
    const Place place = place_of(b, offset, bytes);
    if (!remote && &b != &mine)
        e.fail("out_of_bounds", text("%s another block's shared memory with an instruction for its own", verb), t, at,
               &place);
    if (b.ended) e.fail("left", text("%s shared memory of a block that has ended", verb), t, at, &place);
    if (offset < 0 || offset + bytes > b.launch->shared_bytes)
        e.fail(
            "out_of_bounds",
            text("%s %u bytes at byte %lld of %u bytes of shared memory", verb, bytes, offset, b.launch->shared_bytes),
            t, at, &place);
    if (offset % std::min(bytes, 16u))
        e.fail("misaligned",
               text("%s %u bytes at an offset that is no multiple of %u", verb, bytes, std::min(bytes, 16u)), t, at,
               &place);
    return {b, static_cast<u32>(offset)};
}

u8 bytes_of_word(u32 offset, u32 bytes, u32 word) {
    const u32 first = std::max(offset, 4 * word) - 4 * word, last = std::min(offset + bytes, 4 * word + 4) - 4 * word;
    return static_cast<u8>(((1u << last) - 1) & ~((1u << first) - 1));
}

void check_shared(Thread* t, Block& b, u32 offset, u32 bytes, bool reads, bool writes, Site at) {
    Engine& e = engine_of(t);
    Access mine = access_of(t, Scope::kNone, reads, at);
    mine.is_shared = 1;
    const auto make_place = [&] { return place_of(b, offset, bytes); };
    for (u32 word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
        const u8 part = bytes_of_word(offset, bytes, word);
        mine.bytes = part;
        Shadow& s = b.shadow[word];
        if (b.valid[word] & kBarrier) {
            const Place place = place_of(b, offset, bytes);
            e.fail("bad_instruction", text("%s an mbarrier as if it were data", writes ? "writes to" : "reads"), t, at,
                   &place);
        }
        if (reads) {
            if ((b.valid[word] & part) != part) {
                const Place place = place_of(b, offset, bytes);
                if (s.write.known() && s.write.is_async)
                    e.fail("unwritten", "reads what a copy under way will write: its mbarrier has not completed", t, at,
                           &place, &s.write);
                e.fail("unwritten", "reads shared memory that nobody has written", t, at, &place);
            }
            if (e.config.race)
                check_read(t, s, mine, make_place, at);
            else
                remember_read(t, s, mine);
        }
        if (writes) {
            check_write(t, s, mine, make_place, at, e.config.race);
            b.valid[word] |= part;
        }
    }
}

} // namespace

u32 dynamic_shared() { return (block_of(self()).rank_in_cluster + 1) * kWindow + kSharedBase; }

u32 map_shared(u32 address, u32 rank, Site at) {
    Thread* t = self();
    if (rank >= block_of(t).cluster->blocks.size())
        engine_of(t).fail("out_of_bounds",
                          text("mapa to block %u of a cluster of %zu", rank, block_of(t).cluster->blocks.size()), t,
                          at);
    return address % kWindow + (rank + 1) * kWindow;
}

void shared_load(void* to, u32 from, u32 bytes, bool remote, Site at) {
    Thread* t = self();
    spend_fuel(t);
    ++engine_of(t).count.loads;
    const auto [b, offset] = locate(t, from, bytes, remote, "reads", at);
    check_shared(t, b, offset, bytes, true, false, at);
    note(t, Verb::kRead, b, offset, bytes);
    std::memcpy(to, &b.shared[offset], bytes);
    u32 word = 0;
    std::memcpy(&word, to, std::min(bytes, 4u));
    t->warp->dull |= word == 0 || (word & 0x7fffffffu) > 0x7f800000u; // zero or NaN may stay so
    t->warp->read_values += (word + 1ull) * (2ull * from + 1) * 0x9e3779b97f4a7c15ull;
}

void shared_store(u32 to, const void* from, u32 bytes, bool remote, Site at) {
    Thread* t = self();
    spend_fuel(t);
    ++engine_of(t).count.stores;
    const auto [b, offset] = locate(t, to, bytes, remote, "writes", at);
    check_shared(t, b, offset, bytes, false, true, at);
    note(t, Verb::kWrite, b, offset, bytes);
    std::memcpy(&b.shared[offset], from, bytes);
}

// Atomic among the threads of the block.
u32 shared_rmw(u32 to, Rmw op, u32 operand, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const auto [b, offset] = locate(t, to, 4, false, "changes", at);
    const Place place = place_of(b, offset, 4);
    Shadow& s = b.shadow[offset / 4];
    if (b.valid[offset / 4] & kBarrier)
        e.fail("bad_instruction", "changes an mbarrier as if it were data", t, at, &place);
    if ((b.valid[offset / 4] & kBytes) != kBytes)
        e.fail("unwritten", "changes shared memory that nobody has written", t, at, &place);
    if (op != Rmw::kOr && op != Rmw::kAdd && op != Rmw::kMax)
        e.fail("internal", "this atomic operation on shared memory has no twin yet", t, at, &place);
    const auto make_place = [&] { return place; };
    note(t, Verb::kAtomic, b, offset, 4);
    check_write(t, s, access_of(t, Scope::kCta, false, at), make_place, at, e.config.race, true);
    u32 old, value;
    std::memcpy(&old, &b.shared[offset], 4);
    value = op == Rmw::kOr ? old | operand : op == Rmw::kAdd ? old + operand : std::max(old, operand);
    std::memcpy(&b.shared[offset], &value, 4);
    if (value != old) e.wake(e.watch(b, offset));
    return old;
}

// The store that is polled for.
void shared_tell(u32 to, u32 v, Site at) { shared_rmw(to, Rmw::kMax, v, at); }

// A word that others change atomically; who finds it unchanged may sleep until it is.
u32 shared_poll(u32 from, Site at) {
    Thread* t = self();
    const auto [b, offset] = locate(t, from, 4, false, "reads", at);
    polled(t, engine_of(t).watch(b, offset));
    return shared_rmw(from, Rmw::kOr, 0, at);
}

// The reads of a product are the warp's, by an agent that whoever waits for the product knows of.
void check_operand(Thread* t, i64 offset, Site at) {
    Engine& e = engine_of(t);
    Block& b = block_of(t);
    const Place place = place_of(b, offset, 4);
    if (offset < 0 || offset + 4 > b.launch->shared_bytes)
        e.fail("out_of_bounds",
               text("multiplies by 4 bytes at byte %lld of %u bytes of shared memory", offset, b.launch->shared_bytes),
               t, at, &place);
    const u32 word = static_cast<u32>(offset) / 4;
    Shadow& s = b.shadow[word];
    if (b.valid[word] & kBarrier)
        e.fail("bad_instruction", "multiplies by an mbarrier as if it were data", t, at, &place);
    if ((b.valid[word] & kBytes) != kBytes) {
        if (s.write.known() && s.write.is_async)
            e.fail("unwritten", "multiplies by what a copy under way will write: its mbarrier has not completed", t, at,
                   &place, &s.write);
        e.fail("unwritten", "multiplies by shared memory that nobody has written", t, at, &place);
    }
    const auto make_place = [&] { return place; };
    require_proxied(t, s, false, make_place, at, "a product read");
    note(t, Verb::kRead, b, static_cast<u32>(offset), 4);
    if (!e.config.race) return;
    Access read = access_of(t, Scope::kNone, true, at);
    read.is_async = read.is_shared = 1;
    Access read_later = read;
    read_later.agent = t->warp->products_agent;
    read_later.time = t->warp->products_serial;
    read_later.lanes = 1;
    check_read(t, s, read, make_place, at, false, &read_later);
}

u32 operand(Thread* t, u32 offset, Site at, Site issued) {
    const Block& b = block_of(t);
    if ((b.valid[offset / 4] & kBytes) != kBytes) {
        const Place place = place_of(b, offset, 4);
        const Access& write = b.shadow[offset / 4].write;
        engine_of(t).fail(
            "overwritten",
            text("waits for a product whose operand a copy has begun to overwrite (issued in line %u)", issued.line()),
            t, at, &place, write.known() ? &write : nullptr);
    }
    u32 v;
    std::memcpy(&v, &b.shared[offset], 4);
    return v;
}

// -- mbarriers --------------------------------------------------------------------------------------------------------

namespace {

// `signalled`: by a copy, or by another block.
Barrier& barrier_at(Thread* t, Block& b, u32 offset, const char* verb, Site at, bool signalled = false) {
    Engine& e = engine_of(t);
    const auto found = b.barriers.find(offset);
    const auto refuse = [&](const char* kind, const char* why, const Access* other) {
        const Place place = place_of(b, offset, 8);
        e.fail(kind, text("%s an mbarrier %s", verb, why), t, at, &place, other);
    };
    if (found == b.barriers.end()) refuse("uninitialised_barrier", "that nobody has initialised", nullptr);
    Barrier& barrier = found->second;
    if (signalled && !barrier.fenced)
        refuse("uninitialised_barrier",
               "for a copy or from another block, with no fence.mbarrier_init after its initialisation", &barrier.made);
    if (e.config.race && !ordered(t, barrier.made))
        refuse("race", "whose initialisation nothing orders before this", &barrier.made);
    return barrier;
}

} // namespace

void mbarrier_init(u32 bar, u32 count, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const auto [b, offset] = locate(t, bar, 8, false, "initialises", at);
    if (count == 0 || count >= 1u << 20) {
        const Place place = place_of(b, offset, 8);
        e.fail("bad_instruction", text("an mbarrier cannot expect %u arrivals", count), t, at, &place);
    }
    for (u32 word = offset / 4; word < offset / 4 + 2; ++word) {
        const u8 had = b.valid[word];
        b.valid[word] &= ~kBarrier;
        if (!(had & kBarrier))
            check_write(
                t, b.shadow[word], access_of(t, Scope::kNone, false, at), [&] { return place_of(b, offset, 8); }, at,
                e.config.race);
        b.valid[word] = kBarrier | kBytes;
    }
    if (b.barriers.contains(offset)) {
        const Place place = place_of(b, offset, 8);
        e.fail("bad_instruction", "initialises an mbarrier that is in use", t, at, &place);
    }
    Barrier& made = b.barriers[offset];
    made = Barrier();
    made.count = made.pending = count;
    made.agent = e.agent(agent_key(b, kBarrierAgent | offset));
    made.remote_agent = e.agent(agent_key(b, kRemoteAgent | offset));
    made.base = e.agent_times[made.agent] + 1;
    made.made = access_of(t, Scope::kNone, false, at);
    made.maker = t->index;
    note(t, Verb::kInit, b, offset, 8);
    ++e.changes;
}

void fence_mbarrier_init(Site) {
    Thread* t = self();
    spend_fuel(t);
    for (auto& [offset, barrier] : block_of(t).barriers)
        if (barrier.maker == t->index) barrier.fenced = true;
    fenced(t, Scope::kCluster);
}

void mbarrier_arrive(u32 bar, u32 count, bool remote, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const auto [b, offset] = locate(t, bar, 8, remote, "arrives at", at);
    Barrier& barrier = barrier_at(t, b, offset, "arrives at", at, &b != &block_of(t));
    if (&b != &block_of(t)) {
        Event ev;
        ev.what = Event::kArrive;
        ev.block = &b;
        ev.bar = offset;
        ev.address = offset;
        ev.bytes = 8;
        ev.value = count;
        ev.access = access_of(t, Scope::kCluster, false, at);
        ev.released = release(t, Scope::kCluster);
        ev.at = at;
        e.schedule(std::move(ev));
        return;
    }
    if (!count) {
        const Place place = place_of(b, offset, 8);
        e.fail("bad_instruction", "arrives at an mbarrier with a count of 0", t, at, &place);
    }
    if (barrier.pending < count) {
        const Place place = place_of(b, offset, 8);
        e.fail("too_many_arrivals",
               text("arrives at an mbarrier that expects %u arrivals and has had %u in this phase", barrier.count,
                    barrier.count - barrier.pending),
               t, at, &place);
    }
    barrier.pending -= count;
    barrier.arrived.join(released_by(t));
    tally(e, barrier, t->step, Verb::kArrive, count);
    e.advance(barrier, b, offset);
}

void mbarrier_expect_tx(u32 bar, u32 bytes, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const auto [b, offset] = locate(t, bar, 8, false, "expects bytes at", at);
    Barrier& barrier = barrier_at(t, b, offset, "expects bytes at", at);
    tally(e, barrier, t->step, Verb::kExpect, 1);
    barrier.tx += bytes;
    barrier.expected += bytes;
    if (barrier.tx >= 1 << 20) { // below zero it cannot get: a phase would complete first
        const Place place = place_of(b, offset, 8);
        e.fail("bad_instruction",
               text("an mbarrier cannot count %lld outstanding bytes: the limit is 2^20 - 1", barrier.tx), t, at,
               &place);
    }
    e.advance(barrier, b, offset); // with the bytes here already, and all arrivals, this is what was missing
}

// The phase is complete when all have arrived and all bytes are there.
void Engine::advance(Barrier& b, Block& block, u32 offset) {
    ++changes;
    if (b.pending || b.tx) return;
    if (b.issued != b.landed) {
        const Place place = place_of(block, offset, 8);
        record(
            "no_expect_tx",
            text(
                "an mbarrier's phase completes with %llu bytes there, and copies of %llu had begun: it was not told to "
                "expect them",
                b.landed, b.issued),
            nullptr, unpack_site(b.copier.site), &place, &b.copier);
        return;
    }
    const u32 time = b.base + static_cast<u32>(b.phase);
    const auto done = [&](Clock& clock, u32 agent) {
        clock.raise(agent, time + 1, time + 1);
        auto made =
            std::make_shared<Release>(Release{std::move(clock), Scope::kSys, block.launch->rank, block.index, 0});
        clock = Clock();
        return made;
    };
    b.done = done(b.arrived, b.agent);
    b.done_remote = done(b.remote, b.remote_agent);
    agent_times[b.agent] = time;
    end_phase(b, block, offset);
    ++b.phase;
    b.pending = b.count;
    b.expected = b.issued = b.landed = 0;
    wake(watch(block, offset));
}

void Engine::end_phase(Barrier& b, const Block& block, u32 offset) {
    for (const auto& [who, n] : b.counted) {
        const auto [step, verb] = who;
        ++footprints.phases[{{block.launch->rank, block.launch->number, step}, offset, verb, n}];
    }
    b.counted.clear();
}

void Engine::complete_tx(Block& block, u32 bar, u64 phase, u32 bytes, const Event& event) {
    Barrier& b = block.barriers.at(bar);
    if (b.phase != phase) {
        const Place place = place_of(block, bar, 8);
        record("no_expect_tx", "a copy lands after its mbarrier's phase has completed", nullptr, event.at, &place,
               &event.access);
        return;
    }
    b.tx -= bytes;
    b.landed += bytes;
    advance(b, block, bar);
}

bool mbarrier_try_wait(u32 bar, u32 parity, Scope scope, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const auto [b, offset] = locate(t, bar, 8, false, "waits for", at);
    Barrier& barrier = barrier_at(t, b, offset, "waits for", at);
    note(t, Verb::kWait, b, offset, 8);
    if ((barrier.phase & 1) == (parity & 1)) {
        polled(t, e.watch(b, offset));
        return false;
    }
    barrier.seen = barrier.phase;
    acquire(t, barrier.done, Scope::kSys);
    if (scope >= Scope::kCluster) acquire(t, barrier.done_remote, Scope::kSys);
    return true;
}

// -- the async proxy --------------------------------------------------------------------------------------------------

void fence_proxy_async(bool global, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    Clock before = released_by(t);
    e.proxy_fences.push_back({access_of(t, Scope::kNone, false, at), std::move(before), global});
    if (e.proxy_fences.size() > kProxyFences) e.proxy_fences.pop_front();
}

namespace {

void check_bulk(Thread* t, const void* global, u32 bytes, u64 policy, Site at) {
    Engine& e = engine_of(t);
    if (bytes == 0 || bytes % 16 || reinterpret_cast<u64>(global) % 16)
        e.fail("misaligned",
               text("begins a bulk copy of %u bytes whose %s is no multiple of 16", bytes,
                    bytes % 16 || !bytes ? "size" : "global address"),
               t, at);
    if (policy != kNoPolicy && policy != kEvictFirst && policy != kEvictLast)
        e.fail("bad_instruction", text("names cache policy 0x%llx, which createpolicy did not make", policy), t, at);
}

} // namespace

void bulk_prefetch(const void* from, u32 bytes, u64 policy, Site at) {
    Thread* t = self();
    spend_fuel(t);
    check_bulk(t, from, bytes, policy, at);
    note(t, Verb::kPrefetch, checked(t, from, bytes, false, at), from, bytes);
}

void bulk_load(u32 to, const void* from, u32 bytes, u32 bar, u32 blocks, u64 policy, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    check_bulk(t, from, bytes, policy, at);
    Allocation& a = checked(t, from, bytes, false, at);
    note(t, Verb::kBulkRead, a, from, bytes);
    const Block& mine = block_of(t);
    const u32 own = 1u << mine.rank_in_cluster;
    const bool multicast = blocks != 0;
    if (!multicast) blocks = own;
    e.count.bulk_bytes += bytes;
    for (u32 rank = 0; blocks >> rank; ++rank) {
        if (!(blocks >> rank & 1)) continue;
        const u32 address = multicast ? to % kWindow + (rank + 1) * kWindow : to;
        const u32 bar_address = multicast ? bar % kWindow + (rank + 1) * kWindow : bar;
        const auto [b, offset] = locate(t, address, bytes, true, "fills", at);
        const auto [bar_block, bar_offset] = locate(t, bar_address, 8, true, "signals", at);
        Barrier& barrier = barrier_at(t, bar_block, bar_offset, "signals", at, true);
        note(t, Verb::kBulkWrite, b, offset, bytes);
        note(t, Verb::kComplete, bar_block, bar_offset, 8);
        if (&b != &bar_block)
            e.fail("bad_instruction", "names an mbarrier in another block than the copy's destination", t, at);
        Access access = access_of(t, Scope::kNone, false, at);
        access.is_async = 1;
        barrier.issued += bytes;
        // PTX would let the bytes be expected later in the phase; nobody does, and this finds what was forgotten.
        if (&b == &mine && !multicast && barrier.issued > barrier.expected) {
            const Place place = place_of(b, bar_offset, 8);
            e.fail("no_expect_tx",
                   text("copies %llu bytes in a phase in which the mbarrier was told to expect %llu", barrier.issued,
                        barrier.expected),
                   t, at, &place);
        }
        barrier.copied = barrier.phase + 1;
        barrier.copier = access;
        Access written = access; // by the barrier: who waits for its phase may read
        written.agent = barrier.agent;
        written.time = barrier.base + static_cast<u32>(barrier.phase);
        written.lanes = 1;
        Access read = access, read_later = written;
        read.is_read = read_later.is_read = 1;
        for (u32 i = 0; i < bytes / 4 && a.kind != MEGAGEN_CONSTANT; ++i) {
            const u64 word = (static_cast<const u8*>(from) - a.base) / 4 + i;
            const auto make_place = [&] { return place_of(a, static_cast<const u8*>(from) + 4 * i, 4); };
            if (a.valid[word] & kPending) settle(t, reinterpret_cast<u64>(from) + 4 * i, false);
            if ((a.valid[word] & kBytes) != kBytes) {
                const Place place = make_place();
                e.fail("unwritten", "copies from a word that nobody has written", t, at, &place);
            }
            if (!e.config.race) continue;
            require_proxied(t, a.shadow[word], true, make_place, at);
            check_read(t, a.shadow[word], read, make_place, at, false, &read_later);
        }
        for (u32 word = offset / 4; word < (offset + bytes) / 4; ++word) {
            const auto make_place = [&] { return place_of(b, 4 * word, 4); };
            if (b.valid[word] & kBarrier) {
                const Place place = make_place();
                e.fail("bad_instruction", "copies over an mbarrier", t, at, &place);
            }
            require_proxied(t, b.shadow[word], false, make_place, at, "a bulk copy overwrite");
            check_write(t, b.shadow[word], access, make_place, at, e.config.race, false, &written);
            b.valid[word] = 0;
            std::memcpy(&b.shared[4 * word], &kPoison, 4);
        }
        const u32 n = std::min(1 + e.random.below(e.pieces), bytes / 16);
        u32 begun = 0;
        for (u32 i = 0; i < n; ++i) {
            const u32 end = i + 1 == n ? bytes : static_cast<u32>(static_cast<u64>(bytes / 16) * (i + 1) / n * 16);
            if (end == begun) continue;
            Event ev;
            ev.what = Event::kPiece;
            ev.address = offset + begun;
            ev.source = reinterpret_cast<u64>(from) + begun;
            ev.bytes = end - begun;
            ev.bar = bar_offset;
            ev.phase = barrier.phase;
            ev.block = &b;
            ev.access = access;
            ev.at = at;
            begun = end;
            ++b.copies;
            e.schedule(std::move(ev));
        }
    }
}

void bulk_store(void* to, u32 from, u32 bytes, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    check_bulk(t, to, bytes, kNoPolicy, at);
    Allocation& a = checked(t, to, bytes, true, at);
    const auto [b, offset] = locate(t, from, bytes, false, "stores from", at);
    note(t, Verb::kBulkRead, b, offset, bytes);
    note(t, Verb::kBulkWrite, a, to, bytes);
    if (t->bulk_agent == kNobody) {
        t->bulk_agent = e.agent(agent_key(b, kBulkAgent | t->index));
        t->bulk_serial = e.agent_times[t->bulk_agent];
    }
    e.agent_times[t->bulk_agent] = ++t->bulk_serial;
    Access read = access_of(t, Scope::kNone, true, at), write = access_of(t, Scope::kNone, false, at);
    read.is_async = write.is_async = 1;
    Access read_later = read, written = write; // by the copy: who waits for its group knows of it
    read_later.agent = written.agent = t->bulk_agent;
    read_later.time = written.time = t->bulk_serial;
    read_later.lanes = written.lanes = 1;
    for (u32 i = 0; i < bytes / 4; ++i) {
        const u32 word = offset / 4 + i;
        const Place from_place = place_of(b, 4 * word, 4);
        if ((b.valid[word] & kBytes) != kBytes || b.valid[word] & kBarrier)
            e.fail("unwritten", "stores from shared memory that nobody has written", t, at, &from_place);
        const auto make_place = [&] { return from_place; };
        require_proxied(t, b.shadow[word], false, make_place, at);
        if (e.config.race) check_read(t, b.shadow[word], read, make_place, at, false, &read_later);
        const u64 target = (static_cast<u8*>(to) - a.base) / 4 + i;
        if (e.config.race) {
            check_write(
                t, a.shadow[target], write, [&] { return place_of(a, static_cast<u8*>(to) + 4 * i, 4); }, at, true,
                false, &written);
        }
    }
    Event ev;
    ev.what = Event::kBulkStore;
    ev.address = reinterpret_cast<u64>(to);
    ev.source = offset;
    ev.bytes = bytes;
    ev.block = &b;
    ev.allocation = &a;
    ev.access = write;
    ev.at = at;
    const u32 index = e.schedule(std::move(ev));
    if (t->groups.empty()) t->groups.emplace_back();
    t->groups.back().stores.emplace_back(index, e.events[index].number);
    t->groups.back().serial = t->bulk_serial;
    t->groups.back().at = at;
}

void bulk_commit() {
    Thread* t = self();
    if (t->groups.empty()) t->groups.emplace_back();
    t->groups.emplace_back();
}

void bulk_wait(u32 left, bool only_read, Site) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const u32 committed = t->groups.empty() ? 0 : static_cast<u32>(t->groups.size()) - 1;
    if (committed <= left) return;
    u32 serial = 0;
    for (u32 i = 0; i + left < committed; ++i) {
        BulkGroup& group = t->groups[i];
        serial = std::max(serial, group.serial);
        group.read = true;
        for (const auto& [index, number] : group.stores) {
            Event& ev = e.events[index];
            if (ev.what == Event::kNothing || ev.number != number) continue;
            if (!only_read) {
                e.deliver(index);
            } else if (!ev.data) { // read now, written later
                ev.data = std::make_unique<u8[]>(ev.bytes);
                std::memcpy(ev.data.get(), &ev.block->shared[ev.source], ev.bytes);
            }
        }
    }
    if (!only_read) t->groups.erase(t->groups.begin(), t->groups.begin() + (committed - left));
    if (e.failed) yield();
    if (!serial) return;
    auto done = std::make_shared<Release>();
    done->scope = Scope::kSys;
    done->clock.raise(t->bulk_agent, only_read ? 0 : serial + 1, serial + 1);
    acquire(t, done, Scope::kSys);
}

void st_async(u32 to, u32 value, u32 bar, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const auto [b, offset] = locate(t, to, 4, true, "st.async to", at);
    const auto [bar_block, bar_offset] = locate(t, bar, 8, true, "signals", at);
    Barrier& barrier = barrier_at(t, bar_block, bar_offset, "signals", at, true);
    note(t, Verb::kWrite, b, offset, 4);
    note(t, Verb::kComplete, bar_block, bar_offset, 8);
    if (&b != &bar_block)
        e.fail("bad_instruction", "names an mbarrier in another block than the st.async's destination", t, at);
    const Place place = place_of(b, offset, 4);
    if (b.valid[offset / 4] & kBarrier) e.fail("bad_instruction", "stores over an mbarrier", t, at, &place);
    Access access = access_of(t, Scope::kNone, false, at);
    access.is_async = 1;
    Access written = access; // by the barrier: who waits for its phase may read, from another block with that scope
    written.agent = &b == &block_of(t) ? barrier.agent : barrier.remote_agent;
    written.time = barrier.base + static_cast<u32>(barrier.phase);
    written.lanes = 1;
    check_write(t, b.shadow[offset / 4], access, [&] { return place; }, at, e.config.race, false, &written);
    barrier.issued += 4;
    barrier.copier = access;
    b.valid[offset / 4] = 0;
    Event ev;
    ev.what = Event::kStoreAsync;
    ev.address = offset;
    ev.bytes = 4;
    ev.value = value;
    ev.bar = bar_offset;
    ev.phase = barrier.phase;
    ev.block = &b;
    ev.access = access;
    ev.at = at;
    e.schedule(std::move(ev));
}

} // namespace megagen::emulate
