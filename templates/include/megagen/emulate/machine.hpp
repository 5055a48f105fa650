// What the twins of ptx/ and of CUDA's built-ins ask of the emulator's engine (templates/emulate).
//
// Every function runs on the stack of the emulated thread that calls it. One that finds a fault does not return.
#pragma once

#include <cstdint>
#include <cstring>
#include <source_location>

namespace megagen::emulate {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

using Site = std::source_location; // of the call in the device code

enum class Scope : u8 { kNone, kCta, kCluster, kGpu, kSys }; // kNone: a weak access
enum class Order : u8 { kRelaxed, kAcquire, kRelease, kAcqRel };
enum class Rmw : u8 { kAdd, kInc, kOr, kMax, kCas };

// Global memory; bytes a multiple of 4. A constant load promises that no one writes there during the launch.
void global_load(void* to, const void* from, u32 bytes, Scope scope, Order order, Site at);
void constant_load(void* to, const void* from, u32 bytes, Site at);
// whole: its words arrive together.
void global_store(void* to, const void* from, u32 bytes, Scope scope, Order order, Site at, bool whole = false);
u32 global_rmw(void* to, Rmw op, u32 operand, u32 compare, bool returns, Scope scope, Order order, Site at);
void fence(Scope scope, Site at);

// Shared memory, by shared-window address. `remote`: any block of the cluster, else the thread's own.
u32 dynamic_shared();
u32 map_shared(u32 address, u32 rank, Site at);
void shared_load(void* to, u32 from, u32 bytes, bool remote, Site at);
u32 shared_poll(u32 from, Site at);
void shared_tell(u32 to, u32 v, Site at);
void shared_store(u32 to, const void* from, u32 bytes, bool remote, Site at);
u32 shared_rmw(u32 to, Rmw op, u32 operand, Site at);

// mbarriers, by shared-window address.
void mbarrier_init(u32 bar, u32 count, Site at);
void mbarrier_arrive(u32 bar, u32 count, bool remote, Site at);
void mbarrier_expect_tx(u32 bar, u32 bytes, Site at);
bool mbarrier_try_wait(u32 bar, u32 parity, Scope scope, Site at);
void fence_mbarrier_init(Site at);

// The async proxy. `blocks`: ranks in the cluster that a load is multicast to; 0: the thread's own block.
void fence_proxy_async(bool global, Site at); // of global memory, or of the block's shared memory
void bulk_load(u32 to, const void* from, u32 bytes, u32 bar, u32 blocks, u64 policy, Site at);
void bulk_prefetch(const void* from, u32 bytes, u64 policy, Site at);
void bulk_store(void* to, u32 from, u32 bytes, Site at);
void bulk_commit();
void bulk_wait(u32 pending, bool only_read, Site at);
void st_async(u32 to, u32 value, u32 bar, Site at);
constexpr u64 kNoPolicy = 0, kEvictFirst = 0x12f0000000000000, kEvictLast = 0x14f0000000000000;

// A warpgroup's products, D = A B + D of m64n64k16 in bf16: `d` has 32 numbers of this lane, which are NaN from here
// until the wait, `a` four words; `b` describes a matrix in shared memory, read through the async proxy.
u64 product_descriptor(u32 shared, u32 leading_bytes, u32 stride_bytes, Site at);
void product_fence(Site at);
void product(float* d, const u32* a, u64 b, bool accumulate, Site at);
void product_commit(Site at);
void product_wait(u32 pending, Site at);

// Meeting points.
void block_sync(Site at);
bool named_sync(u32 id, u32 threads, bool vote, Site at); // all votes
void named_arrive(u32 id, u32 threads, Site at);
void cluster_arrive(bool release, Site at);
void cluster_wait(Site at);
void grid_wait(Site at);    // griddepcontrol.wait
void grid_trigger(Site at); // griddepcontrol.launch_dependents

// Warp-wide operations, one at a time in a warp: each lane brings words and takes words away once all lanes of `mask`
// are there.
enum class Collective : u8 {
    kSync,
    kShuffle,
    kShuffleUp,
    kShuffleDown,
    kShuffleXor,
    kAny,
    kAll,
    kBallot,
    kMax,
    kMin,
    kAdd,
    kMmaBf16,
    kMmaTf32,
    kMatrix, // ldmatrix: address, count, transposed
    kRegisters,
    kProduct, // what all lanes of a warpgroup do alike: five words that are the same in all lanes
    kBarrier  // comes to one of the block's or the cluster's together
};
void collective(Collective what, u32 mask, const u32* in, u32 n_in, u32* out, u32 n_out, Site at);

// The polling loop of a wait goes round. A thread that lacks something can sleep until something that it read changes.
void look_again();
void still_waiting(bool has, u32 edge, u32 slot, u32 phase, Site at);
void set_step(u32 step);

// A vote on this value is to prove that loads were used: it must depend on what the warp has read.
void consume(u32 bits, Site at);

u64 nanoseconds();
u32 sm_number();

// Stamps: the time, on the device's clock and on this SM's, and a store that only the host sees. None of them lets time
// pass or others run.
u64 stamp_time();
u64 stamp_cycles();
void stamp_store(void* to, const void* from, u32 bytes, Site at);

struct Index {
    u32 x, y, z;
};
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();

[[noreturn]] void refuse(const char* kind, const char* message, Site at);

// A kernel that the host may launch: how to call it with its parameter block.
struct Kernel {
    const char* name;
    u32 parameter_bytes;
    void (*call)(const void* parameters);
    const Kernel* next;
};
extern const Kernel* kernels;

struct Registration : Kernel {
    Registration(const char* name, u32 bytes, void (*call)(const void*))
        : Kernel{name, bytes, call, kernels} {
        kernels = this;
    }
};

} // namespace megagen::emulate
