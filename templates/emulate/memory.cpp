// Global and shared memory: bounds, what was ever written, who accessed it, and effects that take their time.

#include <sys/mman.h>

#include <cstdio>

#include "engine.hpp"

namespace megagen::emulate {

namespace {

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

// An access to global memory whose allocation, bounds and alignment are right.
Allocation& checked(Thread* t, const void* p, u32 bytes, bool writes, Site at) {
    Engine& e = engine_of(t);
    Allocation* a = e.find(p, bytes);
    const char* verb = writes ? "writes" : "reads";
    if (!a) {
        const Allocation* near = nullptr;
        for (const Allocation& x : e.allocations)
            if (x.base <= p && (!near || x.base > near->base)) near = &x;
        if (!near)
            e.fail("out_of_bounds", text("%s %u bytes at %p, where nothing was allocated", verb, bytes, p), t, at);
        const Place place = place_of(*near, p, bytes);
        e.fail("out_of_bounds",
               text("%s %u bytes from byte %llu on of the %llu bytes of '%s'", verb, bytes, place.offset, near->bytes,
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
bool after_write(Thread* t, const Shadow& s, const Access& write) {
    if (ordered(t, write)) return true;
    if (s.read.observes && ordered(t, s.read)) return true;
    if (s.more)
        for (const Access& r : *s.more)
            if (r.observes && ordered(t, r)) return true;
    return false;
}

void remember_read(Thread* t, Shadow& s, Access a) {
    if (!s.read.known() || ordered(t, s.read)) {
        a.observes |= s.read.observes;
        s.read = a;
        return;
    }
    const auto joins = [&](Access& r) {
        if (r.agent != a.agent || r.time != a.time || r.observes != a.observes) return false;
        if (r.lane != a.lane) r.lane = kSeveral;
        r.bytes |= a.bytes;
        return true;
    };
    if (joins(s.read)) return;
    if (!s.more) s.more = new std::vector<Access>;
    for (Access& r : *s.more) {
        if (!r.is_read) continue;
        if (joins(r)) return;
        if (ordered(t, r)) {
            a.observes |= r.observes;
            r = a;
            return;
        }
    }
    s.more->push_back(a);
}

// What a write does not come after, or does not touch, stays for the writes to come.
void remember_write(Thread* t, Shadow& s, const Access& a) {
    if (s.write.known() && (s.write.bytes & ~a.bytes) && !ordered(t, s.write)) {
        if (!s.more) s.more = new std::vector<Access>;
        s.more->push_back(s.write);
    }
    s.write = a;
    s.read.observes = 0;
    if (s.more) {
        for (Access& r : *s.more) r.observes = 0;
        std::erase_if(*s.more, [&](const Access& r) { return ordered(t, r) || (!r.is_read && !(r.bytes & ~a.bytes)); });
        if (s.more->empty()) {
            delete s.more;
            s.more = nullptr;
        }
    }
    if (s.read.known() && ordered(t, s.read)) s.read = Access();
}

void race(Thread* t, const char* verb, const Access& other, const Place& place, Site at) {
    Engine& e = engine_of(t);
    const char* did = other.is_async  ? "a copy under way writes"
                      : other.is_read ? "another thread reads"
                                      : "another thread writes";
    if (other.is_async && other.is_read) did = "a bulk store under way reads";
    const bool strong = other.scope != Scope::kNone;
    e.fail("race",
           text("%s what %s%s, and nothing orders the two", verb, did,
                strong ? " (with too small a scope, or against a plain access)" : ""),
           t, at, &place, &other);
}

// `place` makes the Place, for a report.
void check_read(Thread* t, Shadow& s, Access a, auto place, Site at, bool sees_write = false) {
    if (sees_write && s.write.known() && !s.write.is_async) a.observes = at_peace(s.write, a);
    if (s.write.known() && !at_peace(s.write, a) && !after_write(t, s, s.write)) race(t, "reads", s.write, place(), at);
    if (s.more)
        for (const Access& w : *s.more)
            if (!w.is_read && !at_peace(w, a) && !ordered(t, w)) race(t, "reads", w, place(), at);
    remember_read(t, s, a);
}

void check_write(Thread* t, Shadow& s, const Access& a, auto place, Site at, bool races) {
    // What a copy overwrites must be in registers that were used: a load that is still on its way would see the new
    // data.
    const auto refuse = [&](const Access& r) {
        if (a.is_async && r.is_read && !r.is_async && r.agent != kNobody) {
            const Warp& w = *t->warp;
            bool consumed = r.agent == w.agent ? r.time < w.exchanged : w.clock.consumed(r);
            for (const Acquired& x : w.acquired) consumed |= x.lanes >> t->lane & 1 && x.clock->consumed(r);
            const Place where = place();
            if (!consumed)
                engine_of(t).fail(
                    "overwritten",
                    "a copy overwrites what a thread has read, before that thread's warp handed it back with the "
                    "values consumed (a vote or shuffle over something computed from them)",
                    t, at, &where, &r);
        }
        if (races && !at_peace(r, a) && !ordered(t, r))
            race(t, a.is_async ? "a copy overwrites" : "writes", r, place(), at);
    };
    if (s.read.known()) refuse(s.read);
    if (s.more)
        for (const Access& r : *s.more) refuse(r);
    if (races && s.write.known() && !at_peace(s.write, a) && !after_write(t, s, s.write))
        race(t, a.is_async ? "a copy overwrites" : "writes", s.write, place(), at);
    remember_write(t, s, a);
}

// Whether a generic write has passed a proxy fence on its way to this thread.
bool proxied(Thread* t, const Access& write) {
    Engine& e = engine_of(t);
    for (auto f = e.proxy_fences.rbegin(); f != e.proxy_fences.rend(); ++f)
        if (ordered(t, f->access) && f->before->covers(write)) return true;
    return false;
}

void require_proxied(Thread* t, const Shadow& s, auto make_place, Site at) {
    if (!s.write.known() || s.write.is_async || proxied(t, s.write)) return;
    const Place place = make_place();
    engine_of(t).fail(
        "no_proxy_fence",
        "a bulk copy reads what was written through the generic proxy, with no fence.proxy.async in between", t, at,
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
        delete a->shadow[i].more;
        a->shadow[i] = Shadow();
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
    if (!late.empty() && weights[0] && random.below(512) == 0) return deliver_any();
    return true;
}

// Nothing can run: the next effect must come. False: there is none.
bool Engine::deliver_any() {
    if (!outstanding && late.empty()) return false;
    if (runnable.empty()) {
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
        std::memcpy(reinterpret_cast<void*>(ev.address), &value, 4);
        if (a.valid[word] & kPending) pending.erase(ev.address);
        a.valid[word] = kBytes;
        if (ev.released) { // later additions to a released counter still carry what was released before
            const auto at = sync_words.find(ev.address);
            if (ev.what == Event::kRmw && at != sync_words.end()) {
                auto both = std::make_shared<Clock>(*at->second);
                both->join(*ev.released);
                at->second = both;
            } else {
                sync_words[ev.address] = ev.released;
            }
        } else if (ev.what == Event::kStore && !sync_words.empty()) {
            sync_words.erase(ev.address);
        }
        if (ev.fenced) {
            if (a.tags.empty()) a.tags.resize(a.valid.size());
            if (ev.what == Event::kRmw && a.tags[word] && a.tags[word] != ev.fenced) {
                auto both = std::make_shared<Clock>(*a.tags[word]);
                both->join(*ev.fenced);
                a.tags[word] = both;
            } else {
                a.tags[word] = ev.fenced;
            }
        } else if (ev.what == Event::kStore && !a.tags.empty()) {
            a.tags[word].reset();
        }
        touch(ev.address);
        return;
    }
    case Event::kPiece: {
        if (gone("a bulk copy")) return;
        const u64 offset = ev.address;
        std::memcpy(&ev.block->shared[offset], reinterpret_cast<const void*>(ev.source), ev.bytes);
        std::fill_n(ev.block->valid.begin() + offset / 4, ev.bytes / 4, u8(kBytes));
        --ev.block->copies;
        complete_tx(*ev.block, ev.bar, ev.phase, ev.bytes, ev.op == Rmw::kMax, ev);
        return;
    }
    case Event::kStoreAsync: {
        if (gone("a st.async")) return;
        std::memcpy(&ev.block->shared[ev.address], &ev.value, 4);
        ev.block->valid[ev.address / 4] = kBytes;
        complete_tx(*ev.block, ev.bar, ev.phase, 4, true, ev);
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
        b.remote.join(*ev.released);
        advance(b, *ev.block, ev.bar);
        return;
    }
    case Event::kBulkStore: {
        Allocation& a = *ev.allocation;
        for (u32 i = 0; i < ev.bytes; i += 4) {
            const u64 word = (ev.address + i - reinterpret_cast<u64>(a.base)) / 4;
            if (a.valid[word] & kPending) deliver(pending.at(ev.address + i));
            std::memcpy(a.base + 4 * word, &ev.block->shared[ev.source + i], 4);
            a.valid[word] = kBytes;
            touch(ev.address + i);
        }
        return;
    }
    }
}

// -- global memory ----------------------------------------------------------------------------------------------------

void global_load(void* to, const void* from, u32 bytes, Scope scope, Order order, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    ++e.count.loads;
    Allocation& a = checked(t, from, bytes, false, at);
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
            if (scope != Scope::kNone && !a.tags.empty() && a.tags[first + i]) {
                const ClockRef& tag = a.tags[first + i];
                if (order == Order::kAcquire || order == Order::kAcqRel)
                    acquire(t, tag);
                else if (tag != t->fenced &&
                         std::find(t->observed.begin(), t->observed.end(), tag) == t->observed.end())
                    t->observed.push_back(tag);
            }
        }
        if (scope != Scope::kNone) {
            polled(t, e.watch(address));
            if (!e.sync_words.empty()) {
                const auto found = e.sync_words.find(address);
                if (found != e.sync_words.end()) {
                    if (order == Order::kAcquire || order == Order::kAcqRel)
                        acquire(t, found->second);
                    else if (std::find(t->observed.begin(), t->observed.end(), found->second) == t->observed.end())
                        t->observed.push_back(found->second);
                }
            }
        }
    }
    std::memcpy(to, from, bytes);
}

void constant_load(void* to, const void* from, u32 bytes, Site at) {
    Thread* t = self();
    spend_fuel(t);
    const Allocation& a = checked(t, from, bytes, false, at);
    if (a.kind != MEGAGEN_CONSTANT) {
        const Place place = place_of(a, from, bytes);
        engine_of(t).fail("bad_instruction", text("ld.global.nc of '%s', which kernels write to", a.name.c_str()), t,
                          at, &place);
    }
    std::memcpy(to, from, bytes);
}

void global_store(void* to, const void* from, u32 bytes, Scope scope, Order order, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    ++e.count.stores;
    Allocation& a = checked(t, to, bytes, true, at);
    const u64 first = (static_cast<u8*>(to) - a.base) / 4;
    const bool releases = order == Order::kRelease || order == Order::kAcqRel;
    ClockRef released;
    if (releases) released = std::make_shared<Clock>(released_by(t));
    const Access mine = access_of(t, scope, false, at);
    for (u32 i = 0; i < bytes / 4; ++i) {
        const u64 address = reinterpret_cast<u64>(to) + 4 * i;
        if (e.config.race)
            check_write(
                t, a.shadow[first + i], mine, [&] { return place_of(a, static_cast<u8*>(to) + 4 * i, 4); }, at, true);
        if (a.valid[first + i] & kPending) settle(t, address, true);
        Event ev;
        ev.what = Event::kStore;
        ev.address = address;
        ev.allocation = &a;
        std::memcpy(&ev.value, static_cast<const u8*>(from) + 4 * i, 4);
        ev.access = mine;
        ev.released = released;
        if (scope != Scope::kNone) ev.fenced = t->fenced;
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
    const u64 word = (static_cast<u8*>(to) - a.base) / 4;
    const u64 address = reinterpret_cast<u64>(to);
    const Place place = place_of(a, to, 4);
    if (e.config.race) {
        check_read(t, a.shadow[word], access_of(t, scope, true, at), [&] { return place; }, at);
        check_write(t, a.shadow[word], access_of(t, scope, false, at), [&] { return place; }, at, true);
    }
    if (a.valid[word] & kPending) settle(t, address, true);
    if ((a.valid[word] & kBytes) != kBytes)
        e.fail("unwritten", "changes a word that nobody has written", t, at, &place);
    const bool acquires = order == Order::kAcquire || order == Order::kAcqRel;
    u32 old;
    std::memcpy(&old, to, 4);
    if (returns && !e.sync_words.empty()) {
        const auto found = e.sync_words.find(address);
        if (found != e.sync_words.end()) {
            const ClockRef clock = found->second;
            if (acquires)
                acquire(t, clock);
            else
                t->observed.push_back(clock);
        }
    }
    Event ev;
    ev.what = Event::kRmw;
    ev.op = op;
    ev.value = operand;
    ev.compare = compare;
    ev.address = address;
    ev.allocation = &a;
    ev.access = access_of(t, scope, false, at);
    if (order == Order::kRelease || order == Order::kAcqRel) ev.released = std::make_shared<Clock>(released_by(t));
    ev.fenced = t->fenced;
    ev.at = at;
    const u32 index = e.schedule(std::move(ev));
    a.valid[word] |= kPending;
    e.pending[address] = index;
    if (returns) e.deliver(index);
    if (e.failed) yield();
    return old;
}

void fence(Scope, Site) {
    Thread* t = self();
    spend_fuel(t);
    for (const ClockRef& o : t->observed) acquire(t, o);
    t->observed.clear();
    t->fenced = std::make_shared<Clock>(released_by(t));
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
        e.fail("out_of_bounds",
               text("%s %u bytes from byte %lld on of %u bytes of shared memory", verb, bytes, offset,
                    b.launch->shared_bytes),
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
    std::memcpy(to, &b.shared[offset], bytes);
    u32 word = 0;
    std::memcpy(&word, to, std::min(bytes, 4u));
    t->warp->read_values += (word + 1ull) * (2ull * from + 1) * 0x9e3779b97f4a7c15ull;
}

void shared_store(u32 to, const void* from, u32 bytes, bool remote, Site at) {
    Thread* t = self();
    spend_fuel(t);
    ++engine_of(t).count.stores;
    const auto [b, offset] = locate(t, to, bytes, remote, "writes", at);
    check_shared(t, b, offset, bytes, false, true, at);
    std::memcpy(&b.shared[offset], from, bytes);
}

// Atomic among the threads of the block: such accesses do not race with each other.
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
    check_write(t, s, access_of(t, Scope::kCta, false, at), [&] { return place; }, at, e.config.race);
    u32 old, value;
    std::memcpy(&old, &b.shared[offset], 4);
    value = op == Rmw::kOr ? old | operand : op == Rmw::kAdd ? old + operand : std::max(old, operand);
    std::memcpy(&b.shared[offset], &value, 4);
    return old;
}

// -- mbarriers --------------------------------------------------------------------------------------------------------

namespace {

Barrier& barrier_at(Thread* t, Block& b, u32 offset, const char* verb, Site at) {
    const auto found = b.barriers.find(offset);
    if (found == b.barriers.end()) {
        const Place place = place_of(b, offset, 8);
        engine_of(t).fail("uninitialised_barrier", text("%s an mbarrier that nobody has initialised", verb), t, at,
                          &place);
    }
    return found->second;
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
    Barrier& made = b.barriers[offset];
    made = Barrier();
    made.count = made.pending = count;
    made.agent = e.agent(agent_key(b, kBarrierAgent | offset));
    made.base = e.agent_times[made.agent] + 1;
    made.at = at;
    ++e.changes;
}

void fence_mbarrier_init(Site) { spend_fuel(self()); }

void mbarrier_arrive(u32 bar, u32 count, bool remote, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const auto [b, offset] = locate(t, bar, 8, remote, "arrives at", at);
    Barrier& barrier = barrier_at(t, b, offset, "arrives at", at);
    if (&b != &block_of(t)) {
        Event ev;
        ev.what = Event::kArrive;
        ev.block = &b;
        ev.bar = offset;
        ev.address = offset;
        ev.bytes = 8;
        ev.value = count;
        ev.access = access_of(t, Scope::kCluster, false, at);
        ev.released = std::make_shared<Clock>(released_by(t));
        ev.at = at;
        e.schedule(std::move(ev));
        return;
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
    e.advance(barrier, b, offset);
}

void mbarrier_expect_tx(u32 bar, u32 bytes, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const auto [b, offset] = locate(t, bar, 8, false, "expects bytes at", at);
    Barrier& barrier = barrier_at(t, b, offset, "expects bytes at", at);
    barrier.tx += bytes;
    barrier.expected += bytes;
    if (barrier.tx >= 1 << 20) {
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
    const u32 time = b.base + static_cast<u32>(b.phase);
    auto done = std::make_shared<Clock>(std::move(b.arrived));
    auto remote = std::make_shared<Clock>(std::move(b.remote));
    done->raise(b.agent, time + 1, time + 1);
    remote->raise(b.agent, time + 1, time + 1);
    b.done = std::move(done);
    b.done_remote = std::move(remote);
    b.arrived = Clock();
    b.remote = Clock();
    agent_times[b.agent] = time;
    ++b.phase;
    b.pending = b.count;
    b.expected = b.issued = 0;
    wake(watch(block, offset));
}

void Engine::complete_tx(Block& block, u32 bar, u64 phase, u32 bytes, bool, const Event& event) {
    Barrier& b = block.barriers.at(bar);
    if (b.phase != phase) {
        const Place place = place_of(block, bar, 8);
        record("no_expect_tx",
               "a copy lands after its mbarrier's phase has completed: nothing told the mbarrier to expect its bytes",
               nullptr, event.at, &place, &event.access);
        return;
    }
    b.tx -= bytes;
    advance(b, block, bar);
}

bool mbarrier_try_wait(u32 bar, u32 parity, Scope scope, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const auto [b, offset] = locate(t, bar, 8, false, "waits for", at);
    Barrier& barrier = barrier_at(t, b, offset, "waits for", at);
    if ((barrier.phase & 1) == (parity & 1)) {
        polled(t, e.watch(b, offset));
        return false;
    }
    acquire(t, barrier.done);
    if (scope >= Scope::kCluster) acquire(t, barrier.done_remote);
    return true;
}

// -- the async proxy --------------------------------------------------------------------------------------------------

void fence_proxy_async(Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    auto before = std::make_shared<Clock>(released_by(t));
    e.proxy_fences.push_back({access_of(t, Scope::kNone, false, at), std::move(before)});
    if (e.proxy_fences.size() > 4096) e.proxy_fences.pop_front();
}

namespace {

void check_bulk(Thread* t, const void* global, u32 bytes, u64 policy, Site at) {
    Engine& e = engine_of(t);
    if (bytes == 0 || bytes % 16 || reinterpret_cast<u64>(global) % 16)
        e.fail("misaligned", text("a bulk copy of %u bytes at %p: both must be multiples of 16", bytes, global), t, at);
    if (policy != kNoPolicy && policy != kEvictFirst && policy != kEvictLast)
        e.fail("bad_instruction", text("0x%llx is no cache policy that createpolicy made", policy), t, at);
}

} // namespace

void bulk_prefetch(const void* from, u32 bytes, u64 policy, Site at) {
    Thread* t = self();
    spend_fuel(t);
    check_bulk(t, from, bytes, policy, at);
    checked(t, from, bytes, false, at);
}

void bulk_load(u32 to, const void* from, u32 bytes, u32 bar, u32 blocks, u64 policy, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    check_bulk(t, from, bytes, policy, at);
    Allocation& a = checked(t, from, bytes, false, at);
    if (a.kind != MEGAGEN_CONSTANT) {
        const u64 first = (static_cast<const u8*>(from) - a.base) / 4;
        for (u32 i = 0; i < bytes / 4; ++i) {
            const auto make_place = [&] { return place_of(a, static_cast<const u8*>(from) + 4 * i, 4); };
            if (a.valid[first + i] & kPending) settle(t, reinterpret_cast<u64>(from) + 4 * i, false);
            if ((a.valid[first + i] & kBytes) != kBytes) {
                const Place place = make_place();
                e.fail("unwritten", "a bulk copy reads a word that nobody has written", t, at, &place);
            }
            if (!e.config.race) continue;
            require_proxied(t, a.shadow[first + i], make_place, at);
            Access mine = access_of(t, Scope::kNone, true, at);
            mine.is_async = 1;
            check_read(t, a.shadow[first + i], mine, make_place, at);
        }
    }
    const Block& mine = block_of(t);
    const u32 own = 1u << mine.rank_in_cluster;
    const bool multicast = blocks != 0;
    if (!multicast) blocks = own;
    e.count.bulk_bytes += bytes;
    for (u32 rank = 0; blocks >> rank; ++rank) {
        if (!(blocks >> rank & 1)) continue;
        const u32 address = multicast ? to % kWindow + (rank + 1) * kWindow : to;
        const u32 bar_address = multicast ? bar % kWindow + (rank + 1) * kWindow : bar;
        const auto [b, offset] = locate(t, address, bytes, true, "copies to", at);
        const auto [bar_block, bar_offset] = locate(t, bar_address, 8, true, "signals", at);
        Barrier& barrier = barrier_at(t, bar_block, bar_offset, "signals", at);
        if (&b != &bar_block)
            e.fail("bad_instruction", "a bulk copy's mbarrier is in another block than its destination", t, at);
        const bool local = &b == &mine;
        barrier.issued += bytes;
        if (local && !multicast && barrier.issued > barrier.expected) {
            const Place place = place_of(b, bar_offset, 8);
            e.fail("no_expect_tx",
                   text("copies %llu bytes in a phase in which the mbarrier was told to expect %llu", barrier.issued,
                        barrier.expected),
                   t, at, &place);
        }
        Access access = access_of(t, Scope::kNone, false, at);
        access.is_async = 1;
        Access written = access; // by the barrier: who waits for its phase may read
        written.agent = barrier.agent;
        written.time = barrier.base + static_cast<u32>(barrier.phase);
        for (u32 word = offset / 4; word < (offset + bytes) / 4; ++word) {
            const auto make_place = [&] { return place_of(b, 4 * word, 4); };
            if (b.valid[word] & kBarrier) {
                const Place place = make_place();
                e.fail("bad_instruction", "a bulk copy overwrites an mbarrier", t, at, &place);
            }
            check_write(t, b.shadow[word], access, make_place, at, e.config.race);
            b.shadow[word].write = written;
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
    const auto [b, offset] = locate(t, from, bytes, false, "copies from", at);
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
    for (u32 i = 0; i < bytes / 4; ++i) {
        const u32 word = offset / 4 + i;
        const Place from_place = place_of(b, 4 * word, 4);
        if ((b.valid[word] & kBytes) != kBytes || b.valid[word] & kBarrier)
            e.fail("unwritten", "a bulk store reads shared memory that nobody has written", t, at, &from_place);
        const auto make_place = [&] { return from_place; };
        require_proxied(t, b.shadow[word], make_place, at);
        if (e.config.race) check_read(t, b.shadow[word], read, make_place, at);
        remember_read(t, b.shadow[word], read_later);
        const u64 target = (static_cast<u8*>(to) - a.base) / 4 + i;
        if (e.config.race) {
            check_write(
                t, a.shadow[target], write, [&] { return place_of(a, static_cast<u8*>(to) + 4 * i, 4); }, at, true);
            a.shadow[target].write = written;
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
    if (t->groups.empty()) return;
    const u32 committed = static_cast<u32>(t->groups.size()) - 1;
    u32 serial = 0;
    for (u32 i = 0; i + left < committed; ++i) {
        for (const auto& [index, number] : t->groups[i].stores)
            if (e.events[index].what != Event::kNothing && e.events[index].number == number) e.deliver(index);
        t->groups[i].stores.clear();
        serial = std::max(serial, t->groups[i].serial);
    }
    if (e.failed) yield();
    if (!serial) return;
    auto clock = std::make_shared<Clock>();
    clock->raise(t->bulk_agent, only_read ? 0 : serial + 1, serial + 1);
    acquire(t, clock);
}

void st_async(u32 to, u32 value, u32 bar, Site at) {
    Thread* t = self();
    spend_fuel(t);
    Engine& e = engine_of(t);
    const auto [b, offset] = locate(t, to, 4, true, "st.async to", at);
    const auto [bar_block, bar_offset] = locate(t, bar, 8, true, "signals", at);
    Barrier& barrier = barrier_at(t, bar_block, bar_offset, "signals", at);
    if (&b != &bar_block)
        e.fail("bad_instruction", "a st.async's mbarrier is in another block than its destination", t, at);
    const Place place = place_of(b, offset, 4);
    if (b.valid[offset / 4] & kBarrier) e.fail("bad_instruction", "a st.async overwrites an mbarrier", t, at, &place);
    Access access = access_of(t, Scope::kNone, false, at);
    access.is_async = 1;
    check_write(t, b.shadow[offset / 4], access, [&] { return place; }, at, e.config.race);
    b.shadow[offset / 4].write.agent = barrier.agent;
    b.shadow[offset / 4].write.time = barrier.base + static_cast<u32>(barrier.phase);
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
