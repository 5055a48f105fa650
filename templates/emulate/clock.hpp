// Happens-before as vector clocks, and what one access leaves behind.
//
// An agent is a warp, or an mbarrier (for the copies that complete it), or a thread's bulk stores. A warp's time goes
// on at each of its meetings and releases. What a clock knows of an agent: accesses of any lane before `all` came
// earlier; so did reads before `read`, which were consumed; and of a lane that released by itself, accesses before
// `own`. Every release by a lane makes such an entry; it goes when `all` overtakes it.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include <megagen/emulate/machine.hpp>

namespace megagen::emulate {

constexpr u32 kNobody = 0xffffffffu;

// One access of one lane, or the same one by several, as the word it went to remembers it.
struct Access {
    u32 time = 0;
    u32 site = 0;
    u32 agent = kNobody;
    u32 lanes = 0; // a mask
    u16 step = 0xffff;
    u16 block = 0; // of the rank: for scopes
    u8 rank = 0;
    Scope scope : 4 = Scope::kNone;
    u8 bytes : 4 = 15; // of the word
    u8 is_read : 1 = 0;
    u8 is_async : 1 = 0;
    u8 is_shared : 1 = 0; // memory of a block
    u8 observes : 1 = 0;  // this read, or one that came before it, is strong and saw the word's last write

    bool known() const { return agent != kNobody; }
};
static_assert(sizeof(Access) == 24);

class Clock {
public:
    struct Own {
        u32 key; // agent * 32 + lane
        u32 time;
    };

    u32 all(u32 agent) const { return agent < all_.size() ? all_[agent] : 0; }
    u32 read(u32 agent) const { return agent < read_.size() ? read_[agent] : 0; }

    u32 own(u32 agent, u32 lane) const {
        const auto at = find(agent * 32 + lane);
        return at != own_.end() && at->key == agent * 32 + lane ? at->time : 0;
    }

    void raise(u32 agent, u32 all, u32 read) {
        if (agent >= all_.size()) all_.resize(agent + 1), read_.resize(agent + 1);
        all_[agent] = std::max(all_[agent], all);
        read_[agent] = std::max(read_[agent], read);
    }

    void raise_own(u32 agent, u32 lane, u32 time) {
        if (time <= all(agent)) return;
        const auto at = own_.begin() + (find(agent * 32 + lane) - own_.cbegin());
        if (at != own_.end() && at->key == agent * 32 + lane)
            at->time = std::max(at->time, time);
        else
            own_.insert(at, {agent * 32 + lane, time});
    }

    void join(const Clock& other) {
        if (other.all_.size() > all_.size()) all_.resize(other.all_.size()), read_.resize(other.all_.size());
        for (u32 i = 0; i < other.all_.size(); ++i) all_[i] = std::max(all_[i], other.all_[i]);
        for (u32 i = 0; i < other.read_.size(); ++i) read_[i] = std::max(read_[i], other.read_[i]);
        if (other.own_.empty() && own_.empty()) return;
        std::vector<Own> merged;
        auto a = own_.cbegin(), b = other.own_.cbegin();
        while (a != own_.cend() || b != other.own_.cend()) {
            Own next;
            if (b == other.own_.cend() || (a != own_.cend() && a->key < b->key))
                next = *a++;
            else if (a == own_.cend() || b->key < a->key)
                next = *b++;
            else
                next = {a->key, std::max(a->time, b->time)}, ++a, ++b;
            if (next.time > all(next.key / 32)) merged.push_back(next);
        }
        own_.swap(merged);
    }

    // Whether the access, of every lane that made it, came before what this clock stands for.
    bool covers(const Access& e) const {
        if (e.time < all(e.agent) || (e.is_read && e.time < read(e.agent))) return true;
        if (own_.empty()) return false;
        for (u32 lanes = e.lanes; lanes; lanes &= lanes - 1)
            if (e.time >= own(e.agent, static_cast<u32>(__builtin_ctz(lanes)))) return false;
        return true;
    }

    // Whether the values that it read have been consumed: its warp voted on something computed from them.
    bool consumed(const Access& e) const { return e.time < read(e.agent); }

private:
    std::vector<Own>::const_iterator find(u32 key) const {
        return std::lower_bound(own_.begin(), own_.end(), key, [](const Own& o, u32 k) { return o.key < k; });
    }

    std::vector<u32> all_, read_;
    std::vector<Own> own_; // sorted by key
};

// What someone who synchronises with a release learns, if their scopes reach each other.
struct Release {
    Clock clock;
    Scope scope;
    u32 rank, block, cluster;
};
using ReleaseRef = std::shared_ptr<const Release>;

} // namespace megagen::emulate
