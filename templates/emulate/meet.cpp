// Where threads meet: warp-wide operations, barriers of a block and of a cluster.

#include <cmath>
#include <cstdio>

#include "engine.hpp"

namespace megagen::emulate {

namespace {

float as_float(u32 word) {
    float f;
    std::memcpy(&f, &word, 4);
    return f;
}

// D = A B + D as an H200's tensor core computes it, to the bit: exact products; all of an instruction's products of an
// element, and its accumulator, are cut toward zero below 2^-25 of the largest one's power of two (a product's power is
// that of its factors' exponents); their sum is cut toward zero to fp32. So their order does not matter.
// (Found by fitting published models to measurements; tests/gpu/test_emulator.py compares.)
constexpr int kKept = 25;      // bits below the largest term
constexpr int kZero = -100000; // exponent of zero: below all

struct Operands { // [row or column][k], split
    u32 mantissa[16][16];
    int exponent[16][16];
    u32 sign[16][16]; // all ones or none
};

// kFraction: bits after the leading one of an operand.
void split(u32 bits, u32 fraction, u32& mantissa, int& exponent, u32& sign) {
    const u32 e = bits >> 23 & 255, m = (bits & 0x7fffff) >> (23 - fraction);
    mantissa = e ? m | 1u << fraction : m;
    exponent = mantissa ? static_cast<int>(e ? e : 1) - 127 : kZero;
    sign = bits >> 31 ? ~0u : 0;
}

u32 to_fp32(i64 sum, int exponent) { // sum * 2^(exponent - kKept), toward zero
    if (!sum) return 0;
    const u32 sign = sum < 0 ? 0x80000000u : 0;
    u64 size = sum < 0 ? -static_cast<u64>(sum) : static_cast<u64>(sum);
    const int high = 63 - __builtin_clzll(size);
    int power = high + exponent - kKept;
    if (power > 127) return sign | 0x7f800000u;
    size = high > 23 ? size >> (high - 23) : size << (23 - high);
    if (power < -126) {
        size = power < -126 - 24 ? 0 : size >> (-126 - power);
        return sign | static_cast<u32>(size);
    }
    return sign | (static_cast<u32>(power + 127) << 23) | (static_cast<u32>(size) & 0x7fffff);
}

[[gnu::target_clones("arch=x86-64-v3", "default"), gnu::optimize("O3")]] void
multiply_add(const Operands& a, const Operands& b, u32 (*d)[8], int depth, int fraction) {
    const int left = kKept - 2 * fraction;
    for (int row = 0; row < 16; ++row) {
        int top[8], half[2][8] = {}, c_exponent[8];
        u32 c_mantissa[8], c_sign[8];
        for (int n = 0; n < 8; ++n) {
            split(d[row][n], 23, c_mantissa[n], c_exponent[n], c_sign[n]);
            top[n] = c_exponent[n];
        }
        for (int k = 0; k < depth; ++k)
            for (int n = 0; n < 8; ++n) {
                const int e = a.exponent[row][k] + b.exponent[k][n];
                top[n] = e > top[n] ? e : top[n];
            }
        for (int k = 0; k < depth; ++k) // eight terms of 27 bits fit in an int
            for (int n = 0; n < 8; ++n) {
                const int below = top[n] - (a.exponent[row][k] + b.exponent[k][n]);
                const u32 cut = (a.mantissa[row][k] * b.mantissa[k][n] << left) >> (below > 31 ? 31 : below);
                const u32 sign = a.sign[row][k] ^ b.sign[k][n];
                half[k / 8][n] += static_cast<int>((cut ^ sign) - sign);
            }
        for (int n = 0; n < 8; ++n) {
            const int below = top[n] - c_exponent[n];
            const u32 cut = (c_mantissa[n] << (kKept - 23)) >> (below > 31 ? 31 : below);
            d[row][n] =
                to_fp32(static_cast<i64>(half[0][n]) + half[1][n] + (c_sign[n] ? -static_cast<i64>(cut) : cut), top[n]);
        }
    }
}

bool special(u32 bits) { return (bits & 0x7f800000u) == 0x7f800000u; }

// With infinities or NaNs among the terms: by the rules of IEEE 754, whatever the order.
u32 with_specials(const float* a, u32 a_stride, const float* b, u32 b_stride, u32 c, u32 depth, u32 otherwise) {
    float sum = as_float(c);
    bool found = special(c);
    for (u32 k = 0; k < depth; ++k) {
        const float x = a[k * a_stride], y = b[k * b_stride];
        if (std::isfinite(x) && std::isfinite(y)) continue;
        found = true;
        sum += x * y;
    }
    if (!found) return otherwise;
    u32 bits;
    std::memcpy(&bits, &sum, 4);
    return sum != sum ? 0x7fffffffu : special(c) || std::isinf(sum) ? bits : otherwise;
}

// Fragments as PTX lays them out: lane = 4 g + t holds rows g and g + 8 of A and D, columns 2 t and 2 t + 1 of D.
void mma(Warp& w, Collective what) {
    const bool bf16 = what == Collective::kMmaBf16;
    const int depth = bf16 ? 16 : 8, fraction = bf16 ? 7 : 10;
    Operands a, b; // b: [k][column]
    u32 d[16][8], before[16][8];
    float wide_a[16][16], wide_b[16][8];
    bool any_special = false;
    const auto put = [&](Operands& to, float* wide, u32 row, u32 column, u32 bits) {
        split(bits, fraction, to.mantissa[row][column], to.exponent[row][column], to.sign[row][column]);
        *wide = as_float(bits);
        any_special |= special(bits);
    };
    for (u32 lane = 0; lane < 32; ++lane) {
        const u32 g = lane / 4, t = lane % 4;
        const u32* in = w.in[lane];
        for (u32 i = 0; i < 4; ++i) {
            d[g + i / 2 * 8][2 * t + i % 2] = in[6 + i];
            any_special |= special(in[6 + i]);
        }
        if (bf16) {
            for (u32 i = 0; i < 4; ++i)
                for (u32 h = 0; h < 2; ++h) {
                    const u32 row = g + i % 2 * 8, k = 2 * t + i / 2 * 8 + h;
                    put(a, &wide_a[row][k], row, k, h ? in[i] & 0xffff0000u : in[i] << 16);
                }
            for (u32 i = 0; i < 2; ++i)
                for (u32 h = 0; h < 2; ++h) {
                    const u32 k = 2 * t + 8 * i + h;
                    put(b, &wide_b[k][g], k, g, h ? in[4 + i] & 0xffff0000u : in[4 + i] << 16);
                }
        } else { // tf32: the low 13 bits of an operand are not there
            for (u32 i = 0; i < 4; ++i) {
                const u32 row = g + i % 2 * 8, k = t + i / 2 * 4;
                put(a, &wide_a[row][k], row, k, in[i] & 0xffffe000u);
            }
            for (u32 i = 0; i < 2; ++i) put(b, &wide_b[t + 4 * i][g], t + 4 * i, g, in[4 + i] & 0xffffe000u);
        }
    }
    if (any_special) std::memcpy(before, d, sizeof d);
    multiply_add(a, b, d, depth, fraction);
    w.multiplied = true;
    if (any_special)
        for (u32 row = 0; row < 16; ++row)
            for (u32 n = 0; n < 8; ++n)
                d[row][n] = with_specials(wide_a[row], 1, &wide_b[0][n], 8, before[row][n], depth, d[row][n]);
    u32 differ = 0;
    for (u32 lane = 0; lane < 32; ++lane) {
        const u32 g = lane / 4, t = lane % 4;
        for (u32 i = 0; i < 4; ++i) {
            w.out[lane][i] = d[g + i / 2 * 8][2 * t + i % 2];
            w.mma_values = (w.mma_values + w.out[lane][i]) * 0x9e3779b97f4a7c15ull;
            differ |= (w.out[lane][i] != w.out[0][i]) << i;
        }
    }
    w.dull |= differ != 15; // a column of zeros: its sums stay the same whatever the weights
}

// ldmatrix: lane 8 m + r brought row r of matrix m, 16 bytes, and the number of matrices and whether to transpose.
void matrices(Warp& w) {
    for (u32 lane = 0; lane < 32; ++lane) {
        const u32 n = w.in[lane][4];
        const bool transposed = w.in[lane][5];
        const u32 g = lane / 4, t = lane % 4;
        for (u32 m = 0; m < n; ++m) {
            const auto half = [&](u32 row, u32 column) {
                return w.in[8 * m + row][column / 2] >> column % 2 * 16 & 0xffffu;
            };
            w.out[lane][m] = transposed ? half(2 * t, g) | half(2 * t + 1, g) << 16 : w.in[8 * m + g][t];
        }
    }
}

void compute(Warp& w, const Gathering& g) {
    u32 any = 0, all = 1, ballot = 0, most = 0, least = ~0u, sum = 0;
    switch (g.what) {
    case Collective::kSync:
    case Collective::kRegisters:
    case Collective::kBarrier:
        return;
    case Collective::kMmaBf16:
    case Collective::kMmaTf32:
        mma(w, g.what);
        return;
    case Collective::kMatrix:
        matrices(w);
        return;
    case Collective::kProduct:
        for (u32 lane = 1; lane < 32; ++lane)
            if (std::memcmp(w.in[lane], w.in[0], 5 * sizeof(u32)) != 0)
                w.block->engine->fail("bad_instruction",
                                      "comes to a warpgroup's operation with another descriptor, or another "
                                      "accumulate, than the first lane of its warp",
                                      w.threads[lane], g.site);
        return;
    default:
        break;
    }
    for (u32 lane = 0; lane < 32; ++lane) {
        if (!(g.mask >> lane & 1)) continue;
        const u32 v = w.in[lane][0];
        any |= v != 0, all &= v != 0, ballot |= (v != 0) << lane;
        most = std::max(most, v), least = std::min(least, v), sum += v;
    }
    for (u32 lane = 0; lane < 32; ++lane) {
        if (!(g.mask >> lane & 1)) continue;
        const u32 by = w.in[lane][1] % 32;
        u32 from = lane, v = 0;
        switch (g.what) {
        case Collective::kShuffle:
            from = by;
            break;
        case Collective::kShuffleUp:
            from = lane >= by ? lane - by : lane;
            break;
        case Collective::kShuffleDown:
            from = lane + by < 32 ? lane + by : lane;
            break;
        case Collective::kShuffleXor:
            from = lane ^ by;
            break;
        case Collective::kAny:
            v = any;
            break;
        case Collective::kAll:
            v = all;
            break;
        case Collective::kBallot:
            v = ballot;
            break;
        case Collective::kMax:
            v = most;
            break;
        case Collective::kMin:
            v = least;
            break;
        case Collective::kAdd:
            v = sum;
            break;
        default:
            break;
        }
        const bool shuffle = g.what <= Collective::kShuffleXor && g.what >= Collective::kShuffle;
        if (shuffle && !(g.mask >> from & 1))
            w.block->engine->fail("diverged", "shuffles with a lane that takes no part", w.threads[lane], g.site);
        w.out[lane][0] = shuffle ? w.in[from][0] : v;
    }
}

const char* name_of(Collective what) {
    switch (what) {
    case Collective::kSync:
        return "__syncwarp";
    case Collective::kMmaBf16:
    case Collective::kMmaTf32:
        return "mma";
    case Collective::kMatrix:
        return "ldmatrix";
    case Collective::kRegisters:
        return "setmaxnreg";
    case Collective::kProduct:
        return "wgmma";
    case Collective::kBarrier:
        return "a barrier";
    case Collective::kAny:
    case Collective::kAll:
    case Collective::kBallot:
        return "a vote";
    case Collective::kMax:
    case Collective::kMin:
    case Collective::kAdd:
        return "a reduction";
    default:
        return "a shuffle";
    }
}

} // namespace

// All lanes are there.
void complete(Warp& w, u32 index) {
    Gathering g = std::move(w.gatherings[index]);
    w.gatherings.erase(w.gatherings.begin() + index);
    Engine& e = *w.block->engine;
    compute(w, g);
    ++e.count.meetings;
    if (g.what == Collective::kSync && (g.mask & w.live) != w.live) {
        auto all = std::make_shared<Release>(Release{std::move(g.released), Scope::kSys, 0, 0, 0});
        for (u32 lanes = g.mask; lanes; lanes &= lanes - 1) acquire(w.threads[__builtin_ctz(lanes)], all, Scope::kSys);
    } else if (g.what == Collective::kSync) {
        w.synced = ++w.time;
        settle_acquired(w, true);
    } else if (g.what <= Collective::kBallot && g.what >= Collective::kAny) {
        // A vote on values that depend on loads waits for the loads; other exchanges order no memory.
        if ((w.consuming & w.live) == w.live) w.consumed = ++w.time;
        w.consuming = 0;
    } else {
        e.count.mma += g.what == Collective::kMmaBf16 || g.what == Collective::kMmaTf32;
    }
    for (u32 lanes = g.mask; lanes; lanes &= lanes - 1) w.threads[__builtin_ctz(lanes)]->wait.what = nullptr;
    e.make_ready(w, g.mask);
}

void collective(Collective what, u32 mask, const u32* in, u32 n_in, u32* out, u32 n_out, Site at) {
    Thread* t = self();
    Warp& w = *t->warp;
    Engine& e = engine_of(t);
    const u32 bit = 1u << t->lane;
    if (!(mask & bit) || mask & ~w.live)
        e.fail("diverged",
               "brings a mask to a warp-wide operation that lacks the lane itself, or has lanes that have left", t, at);
    Gathering* mine = nullptr;
    for (Gathering& g : w.gatherings) {
        if (g.mask != mask) continue; // some lanes may be at an operation of their own first
        if (g.what != what || g.site.line() != at.line() || g.site.file_name() != at.file_name()) {
            char text[300];
            std::snprintf(text, sizeof text, "comes to %s while lanes 0x%x of its warp wait for it at %s (%s:%u)",
                          name_of(what), g.arrived, name_of(g.what), g.site.file_name(), g.site.line());
            e.fail("diverged", text, t, at);
        }
        mine = &g;
    }
    if (!mine) mine = &w.gatherings.emplace_back(Gathering{what, mask, 0, at, {}});
    const bool some = what == Collective::kSync && (mask & w.live) != w.live;
    if (some) mine->released.join(released_by(t));
    std::memcpy(w.in[t->lane], in, 4 * n_in);
    mine->arrived |= bit;
    if (mine->arrived != mask) {
        t->wait = what == Collective::kBarrier ? t->barrier : Wait{name_of(what), kAll, 0, 0, at};
        w.ready &= ~bit;
        yield();
    } else {
        complete(w, static_cast<u32>(mine - w.gatherings.data()));
        spend_fuel(t);
    }
    std::memcpy(out, w.out[t->lane], 4 * n_out);
}

// A constant proves nothing: if what was read (or, where there were MMAs, their results) differs from one hand-over to
// the next and the value does not, in any lane, it does not depend on it.
void consume(u32 bits, Site at) {
    Thread* t = self();
    Warp& w = *t->warp;
    w.voted_values += (bits + 1ull) * (t->lane * 2 + 1) * 0x9e3779b97f4a7c15ull;
    w.consuming |= 1u << t->lane;
    w.voters |= 1u << t->lane;
    if (w.voters != w.live) return;
    const u64 read = w.multiplied ? w.mma_values : w.read_values;
    const bool same = !w.dull && w.voted_step == t->step && w.voted_values == w.last_voted && read != w.last_read;
    w.same_votes = same ? w.same_votes + 1 : 0;
    w.last_voted = w.voted_values;
    w.last_read = read;
    w.voted_step = t->step;
    w.voted_values = w.read_values = w.mma_values = 0;
    w.voters = 0;
    w.multiplied = w.dull = false;
    if (w.same_votes == 3)
        engine_of(t).fail(
            "overwritten",
            "hands memory back by a vote on a value that does not depend on what was read from it: it stayed the "
            "same while that changed",
            t, at);
}

// -- barriers of a block ----------------------------------------------------------------------------------------------

// All are there: those who wait go on, after everything that anyone released here.
void finish(Engine& e, Meeting& m) {
    m.done = std::make_shared<Release>(Release{std::move(m.released), Scope::kSys, 0, 0, 0});
    m.released = Clock();
    m.arrived = 0;
    ++m.phase;
    ++e.changes;
    std::vector<Thread*> waiting;
    waiting.swap(m.waiting);
    for (Thread* t : waiting) {
        t->wait.what = nullptr;
        t->warp->blocked &= ~(1u << t->lane);
        acquire(t, m.done, Scope::kSys);
        e.make_ready(*t->warp, 1u << t->lane);
    }
}

void finish_cluster(Engine& e, Cluster& c) {
    u32 live = 0;
    for (const Block* b : c.blocks) live += b->live_threads;
    if (live && c.barrier.arrived == live && c.blocks.size() == c.blocks[0]->launch->cluster) finish(e, c.barrier);
}

namespace {

void block_thread(Thread* t, Meeting& m, const char* what, u32 slot, Site at) {
    t->wait = {what, kAll, slot, static_cast<u32>(m.phase), at};
    m.waiting.push_back(t);
    t->warp->blocked |= 1u << t->lane;
    t->warp->ready &= ~(1u << t->lane);
}

// Warps come to a barrier as a whole: bar and barrier.cluster are "aligned".
void come_together(Thread* t, const char* what, u32 slot, u64 phase, Site at) {
    t->barrier = {what, kAll, slot, static_cast<u32>(phase), at};
    collective(Collective::kBarrier, t->warp->live, nullptr, 0, nullptr, 0, at);
}

bool meet(u32 id, u32 threads, bool waits, bool vote, const char* what, Site at) {
    Thread* t = self();
    come_together(t, what, id, id < 16 ? block_of(t).named[id].phase : 0, at);
    Engine& e = engine_of(t);
    Block& b = block_of(t);
    if (id >= 16 || threads % 32 || threads == 0 || threads > (b.launch->threads + 31) / 32 * 32)
        e.fail("bad_instruction", "a named barrier is one of 0 to 15, for whole warps of the block", t, at);
    Meeting& m = b.named[id];
    bool& all = m.all[m.phase % 2];
    if (!m.arrived) m.expected = threads, all = true;
    all = all && vote;
    if (m.expected != threads) e.fail("bad_instruction", "threads disagree on how many meet at a named barrier", t, at);
    m.released.join(released_by(t));
    ++m.arrived;
    if (waits) block_thread(t, m, what, id, at);
    if (m.arrived == m.expected || (id == 0 && m.arrived == b.live_threads)) finish(e, m);
    if (waits) yield();
    return all;
}

} // namespace

void block_sync(Site at) {
    meet(0, (block_of(self()).launch->threads + 31) / 32 * 32, true, true, "__syncthreads", at);
}

bool named_sync(u32 id, u32 threads, bool vote, Site at) { return meet(id, threads, true, vote, "a named barrier", at); }

void named_arrive(u32 id, u32 threads, Site at) { meet(id, threads, false, true, "a named barrier", at); }

// -- the cluster's barrier --------------------------------------------------------------------------------------------

void cluster_arrive(bool release, Site at) {
    Thread* t = self();
    if (t->cluster_arrived)
        engine_of(t).fail("bad_instruction", "arrives at the cluster's barrier twice without waiting", t, at);
    come_together(t, "the cluster's barrier", 0, block_of(t).cluster->barrier.phase, at);
    Engine& e = engine_of(t);
    Cluster& c = *block_of(t).cluster;
    Meeting& m = c.barrier;
    t->cluster_phase = m.phase + 1;
    t->cluster_arrived = true;
    if (release)
        m.released.join(released_by(t));
    else
        for (const ReleaseRef& f : t->fenced) m.released.join(f->clock); // a fence before it does what release would
    ++m.arrived;
    finish_cluster(e, c);
}

void cluster_wait(Site at) {
    Thread* t = self();
    if (!t->cluster_arrived)
        engine_of(t).fail("bad_instruction", "waits for the cluster's barrier without having arrived", t, at);
    come_together(t, "the cluster's barrier", 0, block_of(t).cluster->barrier.phase, at);
    Engine& e = engine_of(t);
    Meeting& m = block_of(t).cluster->barrier;
    t->cluster_arrived = false;
    if (m.phase >= t->cluster_phase) {
        acquire(t, m.done, Scope::kSys);
        return;
    }
    block_thread(t, m, "the cluster's barrier", 0, at);
    yield();
}

} // namespace megagen::emulate
