// Experts of the step before, by which L2 is asked for weights before the routing is known.
//
// A layer's history is two copies of {launch, ids by falling number of tokens, each plus one, 0 for none}. A launch
// reads the one that the layer's last launch wrote and writes the other, with its own number: whoever of the launch
// looks before or after that finds the same one to read.
#pragma once

#include <megagen/kernel.cuh>

namespace megagen {

// A schedule that guesses nothing.
struct NoGuess {
    static constexpr u32 kTop = 0, kHint = 0;
    static constexpr bool kFirst = false;
};

template <class T>
struct GuessFor {
    using Type = NoGuess;
};
template <class T>
    requires requires { typename T::Guess; }
struct GuessFor<T> {
    using Type = typename T::Guess;
};

// T: the table's policy. Its Guess has kTop, experts of a guess; kHint, of L2 prefetches; kFirst, whether those that
// are used come first in the table; history(params).
template <class T>
struct Guess {
    using Policy = typename GuessFor<T>::Type;
    static constexpr u32 kTop = Policy::kTop;
    static constexpr bool kFirst = Policy::kFirst;
    static constexpr u32 kCopyBytes = 256, kIds = 4; // behind the launch
    static_assert(kTop <= 32, "a lane an expert");

    // The copy that this launch reads: the one whose launch is the last before this one.
    template <class Ctx>
    MEGAGEN_DEVICE u32 last(const Ctx& ctx) {
        const u8* history = Policy::history(ctx.p);
        const u32 now = ctx.epoch();
        const u32 age = now - ptx::ld_relaxed_gpu(history), other = now - ptx::ld_relaxed_gpu(history + kCopyBytes);
        return age == 0 || (other != 0 && other < age) ? 1 : 0;
    }

    // Lane i: the i-th most used expert of the layer's last launch, plus one; 0: there was none.
    template <class Ctx>
    MEGAGEN_DEVICE u32 recall(const Ctx& ctx) {
        const u8* ids = Policy::history(ctx.p) + last(ctx) * kCopyBytes + kIds;
        return ctx.lane < kTop ? ptx::ld_relaxed_gpu(ids + 4 * ctx.lane) : 0;
    }

    // Bit i: the guess has this lane's expert lane * kPer + i.
    template <u32 kPer, class Ctx>
    MEGAGEN_DEVICE u32 marks(const Ctx& ctx) {
        if constexpr (!kFirst) {
            return 0;
        } else {
            const u32 mine = recall(ctx);
            u32 found = 0;
#pragma unroll 1
            for (u32 i = 0; i < kTop; ++i) {
                const u32 expert = __shfl_sync(kFullMask, mine, i) - 1; // none is far from any lane's
                if (expert / kPer == ctx.lane) found |= 1u << expert % kPer;
            }
            return found;
        }
    }

    // Writes down whom this launch uses: tokens(expert) of this lane's experts lane * kPer + i. One warp of a rank.
    template <u32 kPer, class Ctx, class Tokens>
    MEGAGEN_DEVICE void remember(const Ctx& ctx, const Tokens& tokens) {
        constexpr u32 kLowest = 0xffff; // of two with as many tokens the lower id
        u32 keys[kPer], id = 0;
#pragma unroll
        for (u32 i = 0; i < kPer; ++i) {
            const u32 expert = ctx.lane * kPer + i, n = tokens(expert);
            keys[i] = n == 0 ? 0 : n << 16 | (kLowest - expert);
        }
#pragma unroll 1
        for (u32 place = 0; place < kTop; ++place) {
            u32 best = 0;
#pragma unroll
            for (u32 i = 0; i < kPer; ++i) best = keys[i] > best ? keys[i] : best;
            const u32 top = __reduce_max_sync(kFullMask, best);
#pragma unroll
            for (u32 i = 0; i < kPer; ++i) {
                if (keys[i] == top) keys[i] = 0;
            }
            if (ctx.lane == place && top != 0) id = kLowest - (top & 0xffff) + 1;
        }
        u8* copy = Policy::history(ctx.p) + (last(ctx) ^ 1) * kCopyBytes;
        __syncwarp();
        if (ctx.dry) return;
        if (ctx.lane < kTop) ptx::st_relaxed_gpu(copy + kIds + 4 * ctx.lane, id);
        if (ctx.lane == 0) ptx::st_relaxed_gpu(copy, ctx.epoch());
    }
};

} // namespace megagen
