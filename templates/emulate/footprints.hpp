// What each step of a launch touched: what models of the steps are compared with.
#pragma once

#include <algorithm>
#include <compare>
#include <iterator>
#include <map>
#include <tuple>
#include <vector>

#include <megagen/emulate/machine.hpp>

namespace megagen::emulate {

// kZeros, kOnes: a word is stored whose bits are all the same, as words that mean "not yet written" are. kComplete: of
// a copy or a st.async, the mbarrier that counts its bytes.
enum class Verb : u8 {
    kRead,
    kWrite,
    kZeros,
    kOnes,
    kAtomic,
    kBulkRead,
    kBulkWrite,
    kPrefetch,
    kInit,
    kWait,
    kArrive,
    kExpect,
    kComplete
};
constexpr const char* kVerbs[] = {"read",     "write", "zeros", "ones",   "atomic",    "bulk_read",  "bulk_write",
                                  "prefetch", "init",  "wait",  "arrive", "expect_tx", "complete_tx"};
static_assert(std::size(kVerbs) == static_cast<u32>(Verb::kComplete) + 1);

struct Doer {
    u32 rank, launch, step;
    auto operator<=>(const Doer&) const = default;
};

constexpr u32 kOwnShared = 0, kOtherShared = 1, kFirstAllocation = 2; // places: of the cluster's blocks, and others

struct Footprints {
    using Key = std::tuple<Doer, u32, Verb>;  // who, the place, what
    std::map<Key, std::vector<bool>> touched; // which of the place's granules
    // Who, the offset of an mbarrier, what, and how often within a phase: in how many phases.
    std::map<std::tuple<Doer, u32, Verb, u32>, u64> phases;

    void add(const Doer& doer, u32 place, Verb verb, u64 first, u64 last) {
        const Key key{doer, place, verb};
        Entry*& recent = recent_[static_cast<u32>(verb)];
        if (!recent || recent->first != key) recent = &*touched.try_emplace(key).first;
        std::vector<bool>& granules = recent->second;
        if (granules.size() < last) granules.resize(last);
        std::fill(granules.begin() + first, granules.begin() + last, true);
    }

private:
    using Entry = std::pair<const Key, std::vector<bool>>;
    Entry* recent_[std::size(kVerbs)] = {};
};

} // namespace megagen::emulate
