// Happens-before as vector clocks, and what one access leaves behind.
//
// An agent is a warp or an mbarrier (for the copies that complete it). A warp's time goes on at each of its meetings
// and releases. What a clock knows of an agent: accesses of any lane before `all` came earlier; so did reads before
// `read`, whose values took part in a later exchange among the lanes; and of single lanes that released by themselves,
// accesses before `own`.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include <megagen/emulate/machine.hpp>

namespace megagen::emulate {

constexpr u8 kSeveral = 0xff; // lanes of an access
constexpr u16 kNobody = 0xffff;

// One access, as the word it went to remembers it.
struct Access {
    u32 time = 0;
    u32 site = 0;
    u16 agent = kNobody;
    u16 step = 0xffff;
    u8 lane = 0;
    Scope scope : 4 = Scope::kNone;
    u8 bytes : 4 = 15; // of the word
    u8 is_read : 1 = 0;
    u8 is_async : 1 = 0;
    u8 observes : 1 = 0; // this read, or one that came before it, is strong and saw the word's last write
    u8 rank : 5 = 0;
    u8 block = 0; // modulo 256: tells blocks of a rank apart for scopes

    bool known() const { return agent != kNobody; }
};
static_assert(sizeof(Access) == 16);

class Clock {
public:
    struct Own {
        u32 key; // agent * 32 + lane
        u32 time;
    };

    u32 all(u32 agent) const { return agent < all_.size() ? all_[agent] : 0; }
    u32 read(u32 agent) const { return agent < read_.size() ? read_[agent] : 0; }

    u32 own(u32 agent, u32 lane) const {
        const u32 key = agent * 32 + lane;
        const auto at = std::lower_bound(own_.begin(), own_.end(), key, [](const Own& o, u32 k) { return o.key < k; });
        return at != own_.end() && at->key == key ? at->time : 0;
    }

    void raise(u32 agent, u32 all, u32 read) {
        if (agent >= all_.size()) all_.resize(agent + 1), read_.resize(agent + 1);
        all_[agent] = std::max(all_[agent], all);
        read_[agent] = std::max(read_[agent], read);
    }

    void raise_own(u32 agent, u32 lane, u32 time) {
        if (time <= all(agent)) return;
        const u32 key = agent * 32 + lane;
        const auto at = std::lower_bound(own_.begin(), own_.end(), key, [](const Own& o, u32 k) { return o.key < k; });
        if (at != own_.end() && at->key == key)
            at->time = std::max(at->time, time);
        else
            own_.insert(at, {key, time});
    }

    void join(const Clock& other) {
        if (other.all_.size() > all_.size()) all_.resize(other.all_.size()), read_.resize(other.all_.size());
        for (u32 i = 0; i < other.all_.size(); ++i) all_[i] = std::max(all_[i], other.all_[i]);
        for (u32 i = 0; i < other.read_.size(); ++i) read_[i] = std::max(read_[i], other.read_[i]);
        if (other.own_.empty() && own_.empty()) return;
        std::vector<Own> merged;
        auto a = own_.begin();
        auto b = other.own_.begin();
        while (a != own_.end() || b != other.own_.end()) {
            Own next;
            if (b == other.own_.end() || (a != own_.end() && a->key < b->key))
                next = *a++;
            else if (a == own_.end() || b->key < a->key)
                next = *b++;
            else
                next = {a->key, std::max(a->time, b->time)}, ++a, ++b;
            if (next.time > all(next.key / 32)) merged.push_back(next);
        }
        own_.swap(merged);
    }

    // Whether the access came before what this clock stands for.
    bool covers(const Access& e) const {
        if (e.time < all(e.agent) || (e.is_read && e.time < read(e.agent))) return true;
        if (own_.empty()) return false;
        if (e.lane != kSeveral) return e.time < own(e.agent, e.lane);
        for (u32 lane = 0; lane < 32; ++lane)
            if (e.time >= own(e.agent, lane)) return false;
        return true;
    }

    // Whether the values that it read have been used: an exchange among its warp's lanes came after it.
    bool consumed(const Access& e) const { return e.time < read(e.agent); }

private:
    std::vector<u32> all_, read_;
    std::vector<Own> own_; // sorted by key
};

using ClockRef = std::shared_ptr<const Clock>;

} // namespace megagen::emulate
