// A warpgroup's products (wgmma): issued, put in groups, and made when they are waited for, as late as can be.

#include <algorithm>
#include <cstdio>

#include "engine.hpp"

namespace megagen::emulate {

namespace {

constexpr u32 kGroupWarps = 4, kTiles = 8; // n8 tiles of an m64n64k16
constexpr u32 kField = 0x3fff;             // of a descriptor
constexpr u64 kUsed = 0x00003fff'3fff3fff; // its fields: no swizzle, no base offset
constexpr u32 kOwnWindow = 0x3ffff;        // what a descriptor keeps of an address

enum class Step : u32 { kFence, kIssue, kCommit, kWait };

// All lanes of the warp, in a warpgroup that is whole.
void together(Thread* t, Step step, u64 b, u32 what, Site at) {
    spend_fuel(t);
    Warp& w = *t->warp;
    if (w.block->launch->threads / 32 / kGroupWarps <= w.index / kGroupWarps)
        engine_of(t).fail("bad_instruction", "is no part of a whole warpgroup: four warps, from a multiple of four", t,
                          at);
    const u32 in[5] = {static_cast<u32>(step), static_cast<u32>(b), static_cast<u32>(b >> 32), what,
                       static_cast<u32>(t->products.size())};
    collective(Collective::kProduct, 0xffffffffu, in, 5, nullptr, 0, at);
}

Sums* sums_of(Thread* t, const float* d) {
    for (Sums& s : t->sums)
        if (s.d == d) return &s;
    return nullptr;
}

void must_be_untouched(Thread* t, const Sums& s, Site at) {
    for (u32 i = 0; i < 32; ++i)
        if (std::memcmp(s.d + i, &kPoison, 4) != 0)
            engine_of(t).fail("bad_instruction",
                              "finds accumulators written that belonged to a product under way: its wait comes first",
                              t, at);
}

// Once a warp and product: the same as the warpgroup's other warps.
void compare(Thread* t, u64 b, bool accumulate, Site at) {
    Warp& w = *t->warp;
    Block& block = *w.block;
    Engine& e = *block.engine;
    if (block.warpgroups.empty()) block.warpgroups.resize(block.warps.size() / kGroupWarps);
    Warpgroup& group = block.warpgroups[w.index / kGroupWarps];
    const u32 number = w.products++;
    if (number - group.first == group.issues.size()) {
        group.issues.push_back({b, accumulate, at});
    } else {
        const Issue& other = group.issues[number - group.first];
        if (other.b != b || other.accumulate != accumulate || other.at.line() != at.line() ||
            other.at.file_name() != at.file_name()) {
            char text[300];
            std::snprintf(text, sizeof text,
                          "issues a product unlike the one of another warp of its warpgroup, at %s:%u%s",
                          other.at.file_name(), other.at.line(),
                          other.b != b                     ? ": another descriptor"
                          : other.accumulate != accumulate ? ": another accumulate"
                                                           : "");
            e.fail("bad_instruction", text, t, at);
        }
    }
    const Warp* first = &block.warps[w.index / kGroupWarps * kGroupWarps];
    while (!group.issues.empty() &&
           std::all_of(first, first + kGroupWarps, [&](const Warp& x) { return x.products > group.first; })) {
        group.issues.pop_front();
        ++group.first;
    }
    if (w.products_agent == kNobody) {
        w.products_agent = e.agent(agent_key(block, kProductsAgent | w.index));
        w.products_serial = e.agent_times[w.products_agent];
    }
    e.agent_times[w.products_agent] = ++w.products_serial;
}

// Of the lane's words of a B: rows g = lane / 4 of each n8 tile, k = 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 for t = lane
// % 4.
u32 own_word(const Product& p, u32 lane, u32 tile) { return p.first + tile * p.stride + lane / 4 * 16 + lane % 4 * 4; }

// D = A B + D of one product, tile by tile: as mma.sync, to the bit. Whether wgmma rounds alike was not measured.
void make(Thread* t, const Product& p, Sums& sums, Site at) {
    if (!p.accumulate) std::memset(sums.bits, 0, sizeof sums.bits);
    for (u32 tile = 0; tile < kTiles; ++tile) {
        const u32 word = own_word(p, t->lane, tile);
        u32 in[10] = {
            p.a[0], p.a[1], p.a[2], p.a[3], operand(t, word, at, p.at), operand(t, word + p.leading, at, p.at)};
        std::memcpy(in + 6, sums.bits + 4 * tile, 16);
        collective(Collective::kMmaBf16, 0xffffffffu, in, 10, sums.bits + 4 * tile, 4, at);
    }
}

} // namespace

u64 product_descriptor(u32 shared, u32 leading_bytes, u32 stride_bytes, Site at) {
    Thread* t = self();
    Engine& e = engine_of(t);
    if ((shared | leading_bytes | stride_bytes) % 16)
        e.fail("misaligned", "describes a matrix whose address or strides are no multiples of 16", t, at);
    if (shared / kWindow - 1 != block_of(t).rank_in_cluster || shared % kWindow > kOwnWindow)
        e.fail("out_of_bounds", "describes a matrix that does not begin in the block's own shared memory", t, at);
    if (leading_bytes > kOwnWindow || stride_bytes > kOwnWindow)
        e.fail("bad_instruction", "describes a matrix with a stride of more than 18 bits", t, at);
    return static_cast<u64>(stride_bytes >> 4) << 32 | leading_bytes >> 4 << 16 | (shared % kWindow) >> 4;
}

void product_fence(Site at) {
    Thread* t = self();
    together(t, Step::kFence, 0, 0, at);
    t->product_fenced = true;
}

void product(float* d, const u32* a, u64 b, bool accumulate, Site at) {
    Thread* t = self();
    Engine& e = engine_of(t);
    const u32 before = t->warp->products;
    together(t, Step::kIssue, b, accumulate, at);
    if (t->warp->products == before) compare(t, b, accumulate, at); // the first lane to go on
    if (!t->product_fenced)
        e.fail("bad_instruction",
               "issues a product with no wgmma.fence since the last wait for products, or the start of the kernel", t,
               at);
    if (b & ~kUsed)
        e.fail("bad_instruction", "issues a product by a descriptor with a swizzle, a base offset or bits of no field",
               t, at);
    Product p{};
    p.d = d;
    std::memcpy(p.a, a, sizeof p.a);
    p.leading = (b >> 16 & kField) << 4;
    p.stride = (b >> 32 & kField) << 4;
    p.accumulate = accumulate;
    p.group = t->committed;
    p.at = at;
    const i64 first = static_cast<i64>((b & kField) << 4) - kSharedBase;
    p.first = static_cast<u32>(first);
    for (u32 tile = 0; tile < kTiles; ++tile) {
        const i64 word = first + tile * p.stride + t->lane / 4 * 16 + t->lane % 4 * 4;
        check_operand(t, word, at);
        check_operand(t, word + p.leading, at);
    }
    if (Sums* s = sums_of(t, d)) { // adds to what is under way
        must_be_untouched(t, *s, at);
        ++s->products;
    } else {
        Sums& made = t->sums.emplace_back(Sums{d, {}, 1});
        std::memcpy(made.bits, d, sizeof made.bits);
        for (u32 i = 0; i < 32; ++i) std::memcpy(d + i, &kPoison, 4);
    }
    t->products.push_back(p);
}

void product_commit(Site at) {
    Thread* t = self();
    together(t, Step::kCommit, 0, 0, at);
    ++t->committed;
}

void product_wait(u32 pending, Site at) {
    Thread* t = self();
    together(t, Step::kWait, 0, pending, at);
    t->product_fenced = false;
    Warp& w = *t->warp;
    u32 done = 0;
    while (done < t->products.size() && t->products[done].group + pending < t->committed) {
        const Product p = t->products[done++];
        Sums* s = sums_of(t, p.d);
        make(t, p, *s, at);
        if (--s->products) continue;
        must_be_untouched(t, *s, at);
        std::memcpy(p.d, s->bits, sizeof s->bits);
        t->sums.erase(t->sums.begin() + (s - t->sums.data()));
    }
    if (!done) return;
    t->products.erase(t->products.begin(), t->products.begin() + done);
    // The whole warp has read: its last lane gave the last operands to the last MMA.
    const u32 read = w.products_serial + 1 - static_cast<u32>(t->products.size());
    w.clock.raise(w.products_agent, read, read);
}

void leave_products(Thread* t) {
    if (!t->products.empty())
        engine_of(t).fail("left", "leaves the kernel without waiting for its products", t, t->products.front().at);
}

void end_products(Engine& e, Block& b) {
    for (const Warpgroup& group : b.warpgroups)
        if (!group.issues.empty())
            e.fail("diverged", "a block ends in which not all four warps of a warpgroup issued this product", nullptr,
                   group.issues.front().at);
}

} // namespace megagen::emulate
