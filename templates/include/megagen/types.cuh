// Fixed-width types and the function attribute that every device function here carries.
// No standard header: NVRTC compiles this without a toolkit.
#pragma once

namespace megagen {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define MEGAGEN_DEVICE static __device__ __forceinline__

constexpr u32 kFullMask = 0xffffffffu;
constexpr u32 kMaxRanks = 8;

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// What every kernel gets beside its tensors. Mirrored by megagen/runtime.
struct System {
    u8* heap[kMaxRanks];       // each live rank's exchange memory
    u8* abort[kMaxRanks];      // each live rank's word that is not 0 once a wait has expired
    const u32* control;        // what this launch works on, see below
    const int* route_override; // [tokens][top_k] expert ids, -1 = keep; null = none
    u32 rank;                  // live rank
    u32 live;                  // live ranks
    u32 world;                 // ranks including stand-ins
    u32 timeout_ns;            // bound of every wait; 0 = only an abort ends it
    u8* stamps;                // this launch's, where the kernel makes some
    const u8* code;            // this kernel's machine code, and that of the kernel whose launch follows if it is
    const u8* next_code;       // another one; null where nobody wants to know
    u32 code_bytes;
    u32 next_bytes;
};
static_assert(sizeof(System) == 192, "runtime packs 192 bytes");

// Control words: [0] = tokens of this launch; then by name. Mirrored by megagen/runtime.
constexpr u32 kControlContext = 1;    // tokens in the caches before
constexpr u32 kControlPositions = 16; // of each token
constexpr u32 kControlAncestors = 32; // of each token, itself included: a bit a token
constexpr u32 kMostTokens = kControlAncestors - kControlPositions;

// A contiguous share of n tiles: the same rule on every block, so any block count works.
struct Range {
    u32 first;
    u32 last;
};

MEGAGEN_DEVICE Range share_of(u32 n, u32 part, u32 parts) { return {n * part / parts, n * (part + 1) / parts}; }

} // namespace megagen
