// The emulator's engine: what exists while kernels run on a CPU.
#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include <megagen/emulate/abi.hpp>
#include <megagen/emulate/machine.hpp>

#include "clock.hpp"
#include "footprints.hpp"

namespace megagen::emulate {

struct Engine;
struct Block;
struct Thread;
struct Warp;
struct Launch;

constexpr u64 kStack = 64 << 10; // bytes of an emulated thread, its Thread included
constexpr u32 kPage = 4096;
constexpr u32 kSharedBase = 1024;    // of a block's dynamic shared memory in its window, as on the hardware
constexpr u32 kWindow = 1u << 24;    // from one block's window to the next's
constexpr u32 kPoison = 0x7fbadbadu; // NaN as fp32 and, in its high half, as bf16
constexpr u32 kHorizon = 4096;       // ticks that events are sorted by
constexpr u32 kWatches = 1u << 14;
constexpr u32 kNoStep = 0xffffffffu;
constexpr u32 kAll = 0xffffffffu;

class Random { // splitmix64
public:
    explicit Random(u64 seed)
        : state_(seed * 0x9e3779b97f4a7c15ull + 0x1234567) {}
    u64 next() {
        u64 z = state_ += 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }
    u32 below(u32 n) { return static_cast<u32>((next() >> 32) * n >> 32); }

private:
    u64 state_;
};

// What polling threads sleep on: a bucket of addresses.
struct Watch {
    u32 version = 0;
    std::vector<std::pair<Thread*, u64>> sleepers; // and the ticket of their sleep
};

// Of a word that device code may write: the accesses that later ones must be compared with. Where one of each kind is
// not enough, because the last does not come after all others or is of another strength, there are more; sorted by
// agent.
struct Shadow {
    Access write, read;
    std::vector<Access>*more_writes = nullptr, *more_reads = nullptr;

    void clear() {
        delete more_writes;
        delete more_reads;
        *this = Shadow();
    }
};

enum Validity : u8 { kBytes = 15, kBarrier = 32, kPending = 64 };

struct Allocation {
    std::string name;
    u8* base;
    u64 bytes;
    u32 rank;
    u32 kind;
    u32 place;                    // as footprints number them
    std::vector<u8> valid;        // a word: which of its bytes hold something, kPending
    std::vector<Shadow> shadow;   // a word, with race checks
    std::vector<ReleaseRef> tags; // a word: what the store released that is there; empty until there is one

    u64 granule() const { return kind == MEGAGEN_EXCHANGE ? 4 : 256; } // of its footprints
};

struct Event {
    enum What : u8 { kNothing, kStore, kRmw, kPiece, kStoreAsync, kArrive, kBulkStore, kBegin } what = kNothing;
    Rmw op = Rmw::kAdd;
    u32 value = 0, compare = 0;
    u64 address = 0; // global: host address; else shared-window address
    u64 source = 0;
    u64 together = 0; // not 0: the words of one store that arrive with this one have the same
    u32 bytes = 0;
    u32 bar = 0;
    u64 phase = 0; // of the barrier, when it was issued
    Block* block = nullptr;
    Allocation* allocation = nullptr;
    Access access;
    ReleaseRef released, launched;
    std::vector<ReleaseRef> fenced;
    std::unique_ptr<u8[]> data; // of a bulk store whose source has been read
    bool remote = false;        // signals from another block
    u64 number = 0;             // tells the events of one slot apart
    Site at;
};

struct BulkGroup {
    std::vector<std::pair<u32, u64>> stores; // event and its number
    u32 serial = 0;                          // of its last store
    bool read = false;                       // someone waited until its sources were read
    Site at;                                 // of its last store
};

struct Product { // of a warpgroup, issued and not complete
    float* d;
    u32 a[4];
    u32 first, leading, stride; // of its B: offset of the first core matrix, bytes to the next ones
    bool accumulate;
    u32 group;
    Site at;
};

// What D holds meanwhile, while the registers do not.
struct Sums {
    float* d;
    u32 bits[32];
    u32 products; // to come
};

struct Wait { // of a thread, for reports
    const char* what = nullptr;
    u32 edge = kAll, slot = 0, phase = 0;
    Site at;
};

struct Thread {
    void* sp;
    Warp* warp;
    u32 lane, index;
    u32 step = kNoStep;
    u64 cluster_phase = 0;        // the one that this thread's last arrival belongs to
    bool cluster_arrived = false; // and has not waited since
    Wait wait;
    Wait barrier; // that it comes to together with its warp
    // What its relaxed stores release: all before the launch it has waited for, and before its last fences by scope.
    ReleaseRef launched;
    std::vector<ReleaseRef> fenced;
    std::vector<ReleaseRef> observed; // by its relaxed loads; its next fence acquires them
    std::vector<BulkGroup> groups;    // of bulk stores, oldest first; the last one is open
    u32 bulk_serial = 0;
    u32 bulk_agent = kNobody;
    std::vector<Product> products;              // oldest first
    std::vector<Sums> sums;                     // of their accumulators
    u32 committed = 0;                          // groups of products so far
    bool product_fenced = false;                // since the last wait for products
    std::vector<std::pair<Watch*, u32>> polled; // since it last went round a polling loop, and the version it saw
    bool polled_much = false;
    u64 ticket = 0; // of its sleep, 0 when it is awake
};

struct Acquired {
    ReleaseRef from;
    u32 lanes;
};

struct Gathering {
    Collective what;
    u32 mask, arrived;
    Site site;
    Clock released; // of a __syncwarp of some lanes
};

struct Warp {
    Block* block;
    u32 index; // in its block
    u32 agent;
    Thread* threads[32] = {};
    u32 live = 0;                      // lanes that have not left the kernel
    u32 ready = 0;                     // lanes that can run
    u32 asleep = 0;                    // lanes in a polling loop, until something that was read changes
    u32 blocked = 0;                   // lanes at a barrier of the block, the cluster or the grid
    std::vector<Gathering> gatherings; // of lanes at warp-wide operations; their masks have no lane in common
    u32 in[32][10], out[32][4];
    u32 priority = 0;
    i64 fuel = 0;
    int place = -1; // in the engine's list of warps that can run
    // Since the last hand-over of something read: the values it was to depend on, and those that were voted on.
    u64 read_values = 0, mma_values = 0, voted_values = 0, last_read = 0, last_voted = 0;
    bool multiplied = false;
    bool dull = false; // something read, or an MMA's results, was the same in all lanes: no evidence
    u32 consuming = 0; // lanes that have named the value that the next vote is on
    u32 products = 0, products_agent = kNobody, products_serial = 0; // issued; who reads their B; its time
    u32 voters = 0, same_votes = 0, voted_step = kNoStep;
    u32 time = 1, synced = 1, consumed = 1;
    Clock clock;
    std::vector<Acquired> acquired;
};

struct Barrier { // an mbarrier
    u32 count = 0;
    u32 pending = 0;
    i64 tx = 0;
    u64 phase = 0;
    u64 expected = 0, issued = 0; // bytes in this phase
    u64 landed = 0;               // of them
    u64 copied = 0, seen = 0;     // phases, from one: the last with copies, the last that a wait saw complete
    u32 agent = kNobody, remote_agent = kNobody; // of bulk copies; of what other blocks store
    u32 base = 0;                                // the agents' time at phase 0
    Clock arrived, remote;
    ReleaseRef done, done_remote; // of the phase before; null: nothing to learn
    Access copier;                // the last to issue a copy, for reports
    Access made;                  // its initialisation
    u32 maker = 0;                // the thread
    bool fenced = false;          // by fence.mbarrier_init

    // For footprints: how often a step did what in this phase.
    std::map<std::tuple<u32, Verb>, u32> counted;
};

struct Meeting { // a named barrier, or the cluster's
    u32 expected = 0;
    u32 arrived = 0;
    u64 phase = 0;
    bool all[2] = {true, true}; // votes of this phase and the other, which its threads look at once they go on
    Clock released;
    std::vector<Thread*> waiting;
    ReleaseRef done;
};

// A product's issue, which all four warps of a warpgroup must make alike.
struct Issue {
    u64 b;
    bool accumulate;
    Site at;
};

struct Warpgroup {
    std::deque<Issue> issues; // that not all of its warps have made
    u32 first = 0;            // number of the oldest of them
};

struct Cluster {
    std::vector<Block*> blocks;
    Meeting barrier;
};

struct Block {
    Engine* engine;
    Launch* launch;
    Cluster* cluster;
    u32 index, rank_in_cluster, sm;
    u64 serial; // of all blocks
    u32 live_threads = 0;
    bool triggered = false;
    bool ended = false;
    u32 copies = 0; // under way into this block
    std::vector<Warp> warps;
    std::vector<u32> began; // each warp's first time, for reports: it outlives the warps
    std::vector<u8> shared, valid;
    std::vector<Shadow> shadow;
    std::unordered_map<u32, Barrier> barriers; // by offset
    Meeting named[16];
    std::vector<Warpgroup> warpgroups;
};

struct Launch {
    u32 rank, number; // of the rank's launches
    const Kernel* kernel;
    std::vector<u8> parameters;
    u32 blocks, threads, cluster, shared_bytes;
    bool pdl;
    u32 started = 0, ended = 0, triggered = 0;
    bool complete = false;
    Clock all;                       // of its warps as they end
    ReleaseRef queued, before, done; // known to the host when it queued it; at its start; at its end
    std::vector<Thread*> waiting;    // for this launch to complete
    std::deque<Block> running;
    std::deque<Cluster> clusters;
};

struct Rank {
    std::deque<Launch> launches;
    u32 first = 0; // launches before it are complete
    u32 sms = 0;
    u32 blocks_running = 0;
    std::vector<u32> free_sms;
};

struct FenceEvent { // of the async proxy
    Access access;
    Clock before;
    bool global; // whose memory
};

struct Failure {
    std::string kind, message, json;
};

struct Engine {
    explicit Engine(const megagen_emulator_config& config);
    ~Engine();

    megagen_emulator_config config;
    Random random;
    u8* arena = nullptr;
    u64 arena_used = 0;
    std::vector<u32> pages; // allocation + 1
    std::deque<Allocation> allocations;
    std::deque<Rank> ranks;
    std::vector<Watch> watches;
    u64 now = 0; // slices; one is a nanosecond
    u64 tickets = 0, blocks = 0;
    u64 skipped = 0; // nanoseconds that passed while nothing could run
    u32 expiries = 0;
    std::vector<Event> events;
    std::vector<u32> free_events;
    std::vector<std::vector<u32>> buckets;
    u64 occupied[kHorizon / 64] = {}; // which buckets hold something
    std::vector<u32> late;            // events that wait until little else can happen
    u32 outstanding = 0;
    std::unordered_map<u64, u32> pending;                        // word -> event of the store that is under way to it
    u64 stores_together = 0;                                     // so far, of 16 bytes each
    std::unordered_map<u64, std::vector<ReleaseRef>> sync_words; // words that released something
    std::deque<FenceEvent> proxy_fences;
    std::vector<Warp*> runnable;
    std::unordered_map<u64, u32> agents;
    std::vector<u32> agent_times;
    std::vector<u8*> stacks, free_stacks;
    void* host_sp = nullptr;
    bool failed = false;
    Failure failure;
    std::string answer; // to the host
    Footprints footprints;
    Clock completed; // everything that completed launches did
    ReleaseRef host =
        std::make_shared<Release>(Release{{}, Scope::kSys, 0, 0, 0}); // as of the last time that the host waited for it
    // The adversary's manners, drawn from the seed.
    u32 tournament = 1;
    u32 fuel = 0;
    u32 weights[4] = {1, 1, 1, 1}; // of effects that come at once, soon, later, last
    u32 pieces = 4;
    u64 changes = 0, seen_changes = 0; // of anything that a thread could wait for
    u64 spent = 0, idle_since = 0;     // accesses so far; those at the last change seen
    u64 slices_idle = 0;
    u64 give_up_at = 0; // with expire 2: the slice from which on no wait has patience
    u32 slow_rank = kAll, spare_sms = 0;
    struct {
        u64 slices = 0, switches = 0, events = 0, mma = 0, loads = 0, stores = 0, bulk_bytes = 0, meetings = 0,
            sleeps = 0, launches = 0;
    } count;

    // schedule.cpp
    int run(u64 slices);
    bool start_blocks();
    void start_block(Launch& launch, u32 index, Cluster& cluster);
    void complete_launches(Rank& rank);
    void run_warp(Warp& warp);
    void make_ready(Warp& warp, u32 lanes);
    void remove_runnable(Warp& warp);
    void rouse(Thread& thread);
    void wake(Watch& watch);
    u32 agent(u64 key);
    void pass_time(u64 ticks);
    [[noreturn]] void leave(Thread& thread);

    // memory.cpp
    u64 allocate(u64 bytes, u32 rank, u32 kind, const char* name);
    void host_wrote(u64 address, u64 bytes);
    Allocation* find(const void* p, u64 bytes);
    u32 schedule(Event&& event);
    void deliver(u32 index);
    bool deliver_due();
    bool deliver_any();
    void jump(u64 nanoseconds); // in which everything under way arrives
    void touch(u64 address);
    // By place, not by address: the same seed must do the same in every process.
    Watch& watch(u64 address) {
        return watches[((address - reinterpret_cast<u64>(arena)) >> 6) * 0x9e3779b97f4a7c15ull >> 50];
    }
    Watch& watch(const Block& block, u32 offset) {
        return watches[((block.serial << 18) + offset + 1) * 0x9e3779b97f4a7c15ull >> 50];
    }
    void complete_tx(Block& block, u32 bar, u64 phase, u32 bytes, const Event& event);
    void advance(Barrier& barrier, Block& block, u32 offset);
    void end_phase(Barrier& barrier, const Block& block, u32 offset); // for footprints

    // report.cpp
    [[noreturn]] void fail(const std::string& kind, const std::string& message, const Thread* who, Site at,
                           const struct Place* place = nullptr, const Access* other = nullptr);
    void record(const std::string& kind, const std::string& message, const Thread* who, Site at,
                const struct Place* place, const Access* other);
    void deadlock();
};

struct Place {
    bool shared;
    u32 rank, block;
    std::string name;
    u64 offset;
    u32 bytes;
};

Thread* self();
inline Block& block_of(Thread* t) { return *t->warp->block; }
inline Engine& engine_of(Thread* t) { return *t->warp->block->engine; }
void yield(); // back to the scheduler; whether the lane is ready is its own affair
void spend_fuel(Thread* t);
bool ordered(const Thread* t, const Access& e);
Access access_of(Thread* t, Scope scope, bool is_read, Site at);
Clock released_by(Thread* t);
ReleaseRef release(Thread* t, Scope scope);
// A word of a product's B, of the block's own shared memory: as the product is issued, and as it is made.
void check_operand(Thread* t, i64 offset, Site at);
u32 operand(Thread* t, u32 offset, Site at, Site issued);
void leave_products(Thread* t);         // nothing may be left under way
void end_products(Engine& e, Block& b); // and its warps have done the same
// What `from` released comes before what the thread does next, if scopes allow.
void acquire(Thread* t, const ReleaseRef& from, Scope scope);
void settle_acquired(Warp& warp, bool everything);
void complete(Warp& warp, u32 gathering);
void finish(Engine& e, Meeting& meeting);
void finish_cluster(Engine& e, Cluster& cluster); // if all its live threads have arrived
// Two launches of a rank can overlap, so their warps must not be one agent.
inline u64 agent_key(const Block& b, u32 what) {
    return static_cast<u64>(b.launch->rank) << 56 | static_cast<u64>(b.launch->number & 1) << 55 |
           static_cast<u64>(b.index) << 32 | what;
}
constexpr u32 kBarrierAgent = 1u << 24, kRemoteAgent = 1u << 25, kBulkAgent = 1u << 26,
              kProductsAgent = 1u << 27; // in `what`, beside an offset, a thread or a warp
u32 pack_site(Site at);
Site unpack_site(u32 packed);

} // namespace megagen::emulate
