// muse_global: muse_spark.global_layer.nn.two_shot, tp 8, up to 16 tokens, for h200 (132 blocks
// of 12 warps, clusters of 1). Written by megagen; edit the schedule instead.
#include <megagen/ops/combine.cuh>
#include <megagen/ops/dense_gemm.cuh>
#include <megagen/ops/expert_gemm.cuh>
#include <megagen/ops/global_attention.cuh>
#include <megagen/ops/qkv_heads.cuh>
#include <megagen/ops/rank_sum.cuh>
#include <megagen/ops/residual.cuh>
#include <megagen/ops/rms_norm.cuh>
#include <megagen/ops/top_k.cuh>
#include <megagen/kernel.cuh>

namespace {

using namespace megagen;

struct Params {
  System sys;
  const u8* stream;
  const u8* q;
  const u8* gate;
  const u8* k_cache;
  const u8* v_cache;
  u8* stream_out;
  const u8* rotary;
  u8* next_q;
  u8* next_gate;
  u8* next_k_cache;
  u8* next_v_cache;
  const u8* o_proj_weight;
  const u8* attention_gate;
  const u8* pre_ffn_gain;
  const u8* router_weight;
  const u8* pooler_weight;
  const u8* router_bias;
  const u8* pre_expert_gain;
  const u8* gate_up_weight;
  const u8* gate_up_weight_scale;
  const u8* down_weight;
  const u8* down_weight_scale;
  const u8* post_expert_gain;
  const u8* unpooler_weight;
  const u8* post_ffn_gain;
  const u8* residual_gate;
  const u8* next_gain;
  const u8* next_qkvg_weight;
};

namespace barrier {
struct RingFull {
  static constexpr u32 kOffset = 174592, kSlots = 4, kCount = 1, kIndex = 0;
};
struct RingEmpty {
  static constexpr u32 kOffset = 174624, kSlots = 4, kCount = 8, kIndex = 1;
};
struct AccumFull {
  static constexpr u32 kOffset = 174656, kSlots = 2, kCount = 8, kIndex = 2;
};
struct AccumEmpty {
  static constexpr u32 kOffset = 174672, kSlots = 2, kCount = 2, kIndex = 3;
};
struct TableReady {
  static constexpr u32 kOffset = 174688, kSlots = 1, kCount = 1, kIndex = 4;
};
struct GroupPreExpertNorm {
  static constexpr u32 kOffset = 174696, kSlots = 1, kCount = 8, kIndex = 5;
};
struct BeginCombine {
  static constexpr u32 kOffset = 174704, kSlots = 1, kCount = 8, kIndex = 6;
};
}  // namespace barrier

namespace channel {
struct AttentionPartials {  // lamport, _layer.py:104
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 102400, kBytes = 4456448, kCopies = 1, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 68, kRankStride = 0, kShard = 68;
  static constexpr u32 kCounterOffset = 0, kArrivals = 1024, kIndex = 7;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = true, kFault = false;
};
struct Attended {  // lamport, _layer.py:105
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 4558848, kBytes = 32768, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 1024, kRankStride = 0, kShard = 1024;
  static constexpr u32 kCounterOffset = 0, kArrivals = 16, kIndex = 8;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Projected {  // lamport, _layer.py:108
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 4624384, kBytes = 262144, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 1024, kRankStride = 16384, kShard = 1024;
  static constexpr u32 kCounterOffset = 0, kArrivals = 1024, kIndex = 9;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = true, kScatter = true, kReaderResets = false, kFault = false;
};
struct Summed {  // lamport, _layer.py:109
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 5410816, kBytes = 262144, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 8192, kRankStride = 1024, kShard = 1024;
  static constexpr u32 kCounterOffset = 0, kArrivals = 4, kIndex = 10;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct Middle {  // lamport, _layer.py:113
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 6197248, kBytes = 524288, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 8192, kRankStride = 0, kShard = 8192;
  static constexpr u32 kCounterOffset = 0, kArrivals = 32, kIndex = 11;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Normed {  // lamport, _layer.py:114
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 7245824, kBytes = 262144, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 8192, kRankStride = 0, kShard = 8192;
  static constexpr u32 kCounterOffset = 0, kArrivals = 32, kIndex = 12;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct MiddleMoments {  // lamport, _layer.py:112
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 7770112, kBytes = 8192, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 4, kRankStride = 0, kShard = 4;
  static constexpr u32 kCounterOffset = 0, kArrivals = 32, kIndex = 13;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Logits {  // lamport, _layer.py:115
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 7786496, kBytes = 131072, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 256, kIndex = 14;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Routes {  // lamport
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 8048640, kBytes = 1024, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 1, kIndex = 15;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct PooledPartials {  // lamport, _layer.py:103
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 8050688, kBytes = 262144, kCopies = 1, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 512, kIndex = 17;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = true, kFault = false;
};
struct Pooled {  // lamport, _layer.py:116
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 8312832, kBytes = 131072, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 512, kShard = 512;
  static constexpr u32 kCounterOffset = 0, kArrivals = 32, kIndex = 18;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct ExpertIn {  // lamport, _layer.py:117
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 8706048, kBytes = 131072, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 0, kShard = 4096;
  static constexpr u32 kCounterOffset = 0, kArrivals = 8, kIndex = 19;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct ExpertMid {  // lamport, _layer.py:118
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 8968192, kBytes = 1048576, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 512, kShard = 512;
  static constexpr u32 kCounterOffset = 0, kArrivals = 128, kIndex = 20;
  static constexpr Per kArrivalsPer = Per::kExpert;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct ExpertOut {  // lamport, _layer.py:119
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 12113920, kBytes = 1048576, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 512, kShard = 512;
  static constexpr u32 kCounterOffset = 0, kArrivals = 64, kIndex = 21;
  static constexpr Per kArrivalsPer = Per::kExpert;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct SlotMoments {  // lamport, _layer.py:120
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 15259648, kBytes = 8192, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 8, kRankStride = 0, kShard = 8;
  static constexpr u32 kCounterOffset = 0, kArrivals = 16, kIndex = 22;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Combined {  // lamport, _layer.py:121
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 15276032, kBytes = 131072, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 0, kShard = 4096;
  static constexpr u32 kCounterOffset = 0, kArrivals = 16, kIndex = 23;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct UnpooledPartials {  // lamport, _layer.py:103
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 15538176, kBytes = 262144, kCopies = 1, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 512, kIndex = 24;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = true, kFault = false;
};
struct Unpooled {  // lamport, _layer.py:122
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 15800320, kBytes = 262144, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 8192, kRankStride = 1024, kShard = 1024;
  static constexpr u32 kCounterOffset = 0, kArrivals = 64, kIndex = 25;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct NextNormed {  // lamport, _layer.py:141
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 16586752, kBytes = 262144, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 8192, kRankStride = 0, kShard = 8192;
  static constexpr u32 kCounterOffset = 0, kArrivals = 32, kIndex = 26;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Moments {  // lamport, _layer.py:123
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 17111040, kBytes = 8192, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 4, kRankStride = 0, kShard = 4;
  static constexpr u32 kCounterOffset = 0, kArrivals = 32, kIndex = 27;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct NextPartials {  // lamport, _layer.py:142
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 17127424, kBytes = 1179648, kCopies = 1, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 2304, kIndex = 28;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = true, kFault = false;
};
}  // namespace channel

namespace tensor {
struct Stream {
  static constexpr u32 kElementBytes = 4, kRowStride = 8192;
  static __device__ __forceinline__ const u8* pointer(const Params& p) { return p.stream; }
};
struct Q {
  static constexpr u32 kElementBytes = 2, kRowStride = 1024;
  static __device__ __forceinline__ const u8* pointer(const Params& p) { return p.q; }
};
struct Gate {
  static constexpr u32 kElementBytes = 2, kRowStride = 1024;
  static __device__ __forceinline__ const u8* pointer(const Params& p) { return p.gate; }
};
struct KCache {
  static constexpr u32 kElementBytes = 2, kRowStride = 64;
  static __device__ __forceinline__ const u8* pointer(const Params& p) { return p.k_cache; }
};
struct VCache {
  static constexpr u32 kElementBytes = 2, kRowStride = 64;
  static __device__ __forceinline__ const u8* pointer(const Params& p) { return p.v_cache; }
};
struct StreamOut {
  static constexpr u32 kElementBytes = 4, kRowStride = 8192;
  static __device__ __forceinline__ u8* pointer(const Params& p) { return p.stream_out; }
};
struct Rotary {
  static constexpr u32 kElementBytes = 4, kRowStride = 64;
  static __device__ __forceinline__ const u8* pointer(const Params& p) { return p.rotary; }
};
struct NextQ {
  static constexpr u32 kElementBytes = 2, kRowStride = 1024;
  static __device__ __forceinline__ u8* pointer(const Params& p) { return p.next_q; }
};
struct NextGate {
  static constexpr u32 kElementBytes = 2, kRowStride = 1024;
  static __device__ __forceinline__ u8* pointer(const Params& p) { return p.next_gate; }
};
struct NextKCache {
  static constexpr u32 kElementBytes = 2, kRowStride = 64;
  static __device__ __forceinline__ u8* pointer(const Params& p) { return p.next_k_cache; }
};
struct NextVCache {
  static constexpr u32 kElementBytes = 2, kRowStride = 64;
  static __device__ __forceinline__ u8* pointer(const Params& p) { return p.next_v_cache; }
};
}  // namespace tensor

struct RingPolicy {
  using Full = barrier::RingFull;
  using Empty = barrier::RingEmpty;
  static constexpr u32 kStages = 4, kStageBytes = 36864, kOffset = 0;
};

struct AccumPolicy {
  using Full = barrier::AccumFull;
  using Empty = barrier::AccumEmpty;
  static constexpr u32 kSlots = 2, kSlotBytes = 8192, kOffset = 147456;
};

struct TablePolicy {
  using Ready = barrier::TableReady;
  static constexpr u32 kOffset = 163840;
};

struct KernelPolicy {
  using Params = ::Params;
  using Ring = RingPolicy;
  using Accum = AccumPolicy;
  using Table = TablePolicy;
  static constexpr u32 kWarps = 12, kBlocks = 132, kCluster = 1, kTokens = 16;
  static constexpr u32 kRecordOffset = 1024, kEpochOffset = 0;
  static constexpr u32 kNotes = 167568;
  static constexpr bool kPdl = true;
  using Stamps = debug::NoStamps;
#ifdef MEGAGEN_UNBOUNDED_WAITS
  static constexpr bool kBoundedWaits = false;
#else
  static constexpr bool kBoundedWaits = true;
#endif

  template <class Ctx>
  static __device__ __forceinline__ void init_barriers(const Ctx& ctx) {
    Barrier<barrier::RingFull>::init(ctx);
    Barrier<barrier::RingEmpty>::init(ctx);
    Barrier<barrier::AccumFull>::init(ctx);
    Barrier<barrier::AccumEmpty>::init(ctx);
    Barrier<barrier::TableReady>::init(ctx);
    Barrier<barrier::GroupPreExpertNorm>::init(ctx);
    Barrier<barrier::BeginCombine>::init(ctx);
  }
};

using Ctx = Context<KernelPolicy>;

namespace policy {
struct Attention {  // _layer.py:52
  using Q = Input<tensor::Q>;
  using Gate = Input<tensor::Gate>;
  using Keys = Input<tensor::KCache>;
  using Values = Input<tensor::VCache>;
  using Partials = Channel<channel::AttentionPartials>;
  using Out = Channel<channel::Attended>;
  static constexpr u32 kHeads = 16;
  static constexpr u32 kKvHeads = 2;
  static constexpr u32 kCapacity = 16384;
  static constexpr u32 kSpans = 64;
  static constexpr float kScale = 0.125f;
  static constexpr float kEps = 1e-05f;
  static constexpr u32 kWarpgroups = 1;
  static constexpr u32 kStageBytes = 32768, kHint = 0, kL2Hint = 0;
  static constexpr u32 kScratch = 167776;
};
struct OProj {  // _layer.py:49
  using In = Channel<channel::Attended>;
  using Out = Channel<channel::Projected>;
  static constexpr u32 kRows = 8192;
  static constexpr u32 kK = 1024;
  static constexpr u32 kUnitK = 1024;
  static constexpr u32 kStageK = 1024;
  static constexpr u32 kFormat = 0;
  static constexpr u32 kStageBytes = 32768, kHint = 1, kL2Hint = 0;
  static constexpr u32 kOutbox = 171872;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.o_proj_weight; }
};
struct AllReduce {  // _layer.py:107
  using In = Channel<channel::Projected>;
  using Out = Channel<channel::Summed>;
  static constexpr u32 kWidth = 1024;
  static constexpr u32 kParts = 8;
};
struct PostAttention {  // _layer.py:53
  using Stream = Input<tensor::Stream>;
  using In = Channel<channel::Summed>;
  using Moments = Channel<channel::MiddleMoments>;
  using Out = Channel<channel::Middle>;
  using Normed = Channel<channel::Normed>;
  static constexpr u32 kWidth = 8192;
  static constexpr float kEps = 1e-08f;
  static constexpr u32 kParts = 1;
  static constexpr float kNextEps = 1e-05f;
  static __device__ __forceinline__ const u8* gate(const Params& p) { return p.attention_gate; }
  static __device__ __forceinline__ const u8* next_gain(const Params& p) { return p.pre_ffn_gain; }
};
struct Router {  // _layer.py:49
  using In = Channel<channel::Normed>;
  using Partials = Channel<channel::Logits>;
  static constexpr u32 kRows = 256;
  static constexpr u32 kK = 8192;
  static constexpr u32 kUnitK = 1024;
  static constexpr u32 kStageK = 512;
  static constexpr u32 kFormat = 1;
  static constexpr u32 kStageBytes = 32768, kHint = 1, kL2Hint = 0;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.router_weight; }
};
struct Pooler {  // _layer.py:49
  using In = Channel<channel::Normed>;
  using Partials = Channel<channel::PooledPartials>;
  using Out = Channel<channel::Pooled>;
  static constexpr u32 kRows = 512;
  static constexpr u32 kK = 8192;
  static constexpr u32 kUnitK = 1024;
  static constexpr u32 kStageK = 1024;
  static constexpr u32 kFormat = 0;
  static constexpr u32 kStageBytes = 32768, kHint = 1, kL2Hint = 0;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.pooler_weight; }
};
struct TopK {  // _layer.py:55
  using Logits = Channel<channel::Logits>;
  using Routes = Channel<channel::Routes>;
  using Table = TableChannel<TablePolicy>;
  static constexpr u32 kExperts = 256;
  static constexpr u32 kTopK = 8;
  static constexpr u32 kChunks = 8;
  static constexpr float kMultiplier = 0.1767766952966369f;
  static constexpr float kSumEps = 1e-15f;
  static constexpr float kScale = 1.0f;
  static constexpr u32 kScratch = 172384;
  static __device__ __forceinline__ const u8* bias(const Params& p) { return p.router_bias; }
};
struct PreExpertNorm {  // _layer.py:53
  using In = Channel<channel::Pooled>;
  using Out = Channel<channel::ExpertIn>;
  static constexpr u32 kWidth = 4096;
  static constexpr float kEps = 1e-05f;
  static constexpr u32 kCentred = 1;
  static constexpr u32 kRoundInput = 0;
  static constexpr u32 kScratch = 173504;
  using Group = barrier::GroupPreExpertNorm;
  static __device__ __forceinline__ const u8* gain(const Params& p) { return p.pre_expert_gain; }
};
struct GateUp {  // _layer.py:49
  using In = Channel<channel::ExpertIn>;
  using Table = TableChannel<TablePolicy>;
  using Out = Channel<channel::ExpertMid>;
  static constexpr u32 kRows = 1024;
  static constexpr u32 kK = 4096;
  static constexpr u32 kColumns = 4096;
  static constexpr u32 kStageRows = 16;
  static constexpr u32 kStageK = 4096;
  static constexpr u32 kFormat = 2;
  static constexpr u32 kTopK = 8;
  static constexpr u32 kSwiglu = 1;
  static constexpr u32 kPerSlot = 0;
  static constexpr u32 kStageBytes = 36864, kHint = 1, kL2Hint = 0;
  static constexpr u32 kOutbox = 173568;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.gate_up_weight; }
  static __device__ __forceinline__ const u8* scale(const Params& p) { return p.gate_up_weight_scale; }
};
struct Down {  // _layer.py:49
  using In = Channel<channel::ExpertMid>;
  using Table = TableChannel<TablePolicy>;
  using Out = Channel<channel::ExpertOut>;
  static constexpr u32 kRows = 512;
  static constexpr u32 kK = 4096;
  static constexpr u32 kColumns = 4096;
  static constexpr u32 kStageRows = 16;
  static constexpr u32 kStageK = 4096;
  static constexpr u32 kFormat = 2;
  static constexpr u32 kTopK = 8;
  static constexpr u32 kSwiglu = 0;
  static constexpr u32 kPerSlot = 1;
  static constexpr u32 kStageBytes = 36864, kHint = 1, kL2Hint = 0;
  static constexpr u32 kOutbox = 174080;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.down_weight; }
  static __device__ __forceinline__ const u8* scale(const Params& p) { return p.down_weight_scale; }
};
struct Combine {  // _layer.py:53
  using In = Channel<channel::ExpertOut>;
  using Routes = Channel<channel::Routes>;
  using Table = TableChannel<TablePolicy>;
  using Moments = Channel<channel::SlotMoments>;
  using Out = Channel<channel::Combined>;
  static constexpr u32 kWidth = 4096;
  static constexpr u32 kTopK = 8;
  static constexpr float kEps = 1e-08f;
  static constexpr u32 kParts = 1;
  static __device__ __forceinline__ const u8* gain(const Params& p) { return p.post_expert_gain; }
};
struct Unpooler {  // _layer.py:49
  using In = Channel<channel::Combined>;
  using Partials = Channel<channel::UnpooledPartials>;
  using Out = Channel<channel::Unpooled>;
  static constexpr u32 kRows = 1024;
  static constexpr u32 kK = 4096;
  static constexpr u32 kUnitK = 1024;
  static constexpr u32 kStageK = 1024;
  static constexpr u32 kFormat = 0;
  static constexpr u32 kStageBytes = 32768, kHint = 1, kL2Hint = 0;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.unpooler_weight; }
};
struct Residual {  // _layer.py:53
  using Out = Output<tensor::StreamOut>;
  using In = Channel<channel::Unpooled>;
  using Stream = Channel<channel::Middle>;
  using Moments = Channel<channel::Moments>;
  using Normed = Channel<channel::NextNormed>;
  static constexpr u32 kWidth = 8192;
  static constexpr float kEps = 1e-08f;
  static constexpr u32 kParts = 1;
  static constexpr float kNextEps = 1e-05f;
  static __device__ __forceinline__ const u8* gain(const Params& p) { return p.post_ffn_gain; }
  static __device__ __forceinline__ const u8* gate(const Params& p) { return p.residual_gate; }
  static __device__ __forceinline__ const u8* next_gain(const Params& p) { return p.next_gain; }
};
struct NextQkvg {  // _layer.py:49
  using In = Channel<channel::NextNormed>;
  using Partials = Channel<channel::NextPartials>;
  static constexpr u32 kRows = 2304;
  static constexpr u32 kK = 8192;
  static constexpr u32 kUnitK = 1024;
  static constexpr u32 kStageK = 1024;
  static constexpr u32 kFormat = 0;
  static constexpr u32 kStageBytes = 32768, kHint = 1, kL2Hint = 0;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.next_qkvg_weight; }
};
struct NextHeads {  // _layer.py:134
  using Rotary = Input<tensor::Rotary>;
  using Q = Output<tensor::NextQ>;
  using Gate = Output<tensor::NextGate>;
  using Keys = Output<tensor::NextKCache>;
  using Values = Output<tensor::NextVCache>;
  using Partials = Channel<channel::NextPartials>;
  static constexpr u32 kHeads = 16;
  static constexpr u32 kKvHeads = 2;
  static constexpr u32 kChunks = 8;
  static constexpr u32 kRing = 2176;
  static constexpr float kEps = 1e-05f;
  static constexpr float kScale = 5.4730064863875f;
  static constexpr u32 kRotate = 1;
};
}  // namespace policy

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1) muse_global(const __grid_constant__ Params p) {
  Ctx ctx(p);
  ctx.begin();
  if (ctx.warp >= 4) {
    ptx::setmaxnreg_inc<184>();
    if (ctx.warp >= 4) {  // warps 4 to 11
      ctx.step = 36;
      ctx.attach();
      ctx.step = 37;
      ops::GlobalAttention<policy::Attention>::attend<4>(ctx);  // _layer.py:52
      ctx.step = 38;
      ops::GlobalAttention<policy::Attention>::merge<4>(ctx);  // _layer.py:52
      ctx.step = 39;
      ops::DenseGemm<policy::OProj>::math<4>(ctx);  // _layer.py:49
      ctx.step = 40;
      ops::Residual<policy::PostAttention>::measure<4>(ctx);  // _layer.py:54
      ctx.step = 41;
      ops::Residual<policy::PostAttention>::compute<4>(ctx);  // _layer.py:53
      ops::dense_math<42, 4,
        policy::Router,  // _layer.py:49
        policy::Pooler>(ctx);  // _layer.py:49
      ctx.step = 44;
      ops::RmsNorm<policy::PreExpertNorm>::compute<4>(ctx);  // _layer.py:53
      ops::expert_math<45, 4,
        policy::GateUp,  // _layer.py:49
        policy::Down>(ctx);  // _layer.py:49
      ctx.step = 47;
      Event<barrier::BeginCombine>::arrive(ctx);  // _layer.py:140
      ctx.step = 48;
      ops::Combine<policy::Combine>::measure<4>(ctx);  // _layer.py:54
      ctx.step = 49;
      ops::Combine<policy::Combine>::compute<4>(ctx);  // _layer.py:53
      ctx.step = 50;
      ops::DenseGemm<policy::Unpooler>::math<4>(ctx);  // _layer.py:49
      ctx.step = 51;
      ops::Residual<policy::Residual>::measure<4>(ctx);  // _layer.py:54
      ctx.step = 52;
      ops::Residual<policy::Residual>::compute<4>(ctx);  // _layer.py:53
      ctx.step = 53;
      ops::DenseGemm<policy::NextQkvg>::math<4>(ctx);  // _layer.py:49
      ctx.step = 54;
      ops::QkvHeads<policy::NextHeads>::write<4>(ctx);  // _layer.py:134
      ctx.step = 55;
      ctx.trigger();  // _layer.py:151
    }
  }
  else {
    ptx::setmaxnreg_dec<128>();
    if (ctx.warp >= 2) {  // warps 2 to 3
      ctx.step = ctx.warp == 2 ? 17 : 25;
      ctx.attach();
      ctx.step = ctx.warp == 2 ? 18 : 26;
      ops::DenseGemm<policy::OProj>::reduce<2>(ctx);  // _layer.py:49
      if (ctx.warp == 3) {
        ctx.step = 27;
        ops::RankSum<policy::AllReduce>::sum(ctx);  // _layer.py:107
      }
      ctx.step = ctx.warp == 2 ? 19 : 28;
      ops::DenseGemm<policy::Router>::reduce<2>(ctx);  // _layer.py:49
      ctx.step = ctx.warp == 2 ? 20 : 29;
      ops::DenseGemm<policy::Pooler>::reduce<2>(ctx);  // _layer.py:49
      if (ctx.warp == 3) {
        ctx.step = 30;
        ops::DenseGemm<policy::Pooler>::finish(ctx);  // _layer.py:51
      }
      ctx.step = ctx.warp == 2 ? 21 : 31;
      ops::ExpertGemm<policy::GateUp>::reduce<2>(ctx);  // _layer.py:49
      ctx.step = ctx.warp == 2 ? 22 : 32;
      ops::ExpertGemm<policy::Down>::reduce<2>(ctx);  // _layer.py:49
      ctx.step = ctx.warp == 2 ? 23 : 33;
      ops::DenseGemm<policy::Unpooler>::reduce<2>(ctx);  // _layer.py:49
      if (ctx.warp == 3) {
        ctx.step = 34;
        ops::DenseGemm<policy::Unpooler>::finish(ctx);  // _layer.py:51
      }
      ctx.step = ctx.warp == 2 ? 24 : 35;
      ops::DenseGemm<policy::NextQkvg>::reduce<2>(ctx);  // _layer.py:49
    }
    else if (ctx.warp == 1) {  // warp 1
      ctx.step = 10;
      ctx.warm_code<16>();  // _layer.py:88
      ctx.step = 11;
      ctx.attach();
      ctx.step = 12;
      ops::TopK<policy::TopK>::select(ctx);  // _layer.py:55
      ctx.step = 13;
      ops::TopK<policy::TopK>::tables(ctx);  // _layer.py:55
      ctx.step = 14;
      Event<barrier::BeginCombine>::wait(ctx);  // _layer.py:140
      ctx.step = 15;
      ops::QkvHeads<policy::NextHeads>::prefetch_l2<0, 1024>(ctx);  // _layer.py:140
      ctx.step = 16;
      reset_channels<channel::Attended, channel::Projected, channel::Summed, channel::Middle, channel::Normed, channel::MiddleMoments, channel::Logits, channel::Routes, channel::Pooled, channel::ExpertIn, channel::ExpertMid, channel::ExpertOut, channel::SlotMoments, channel::Combined, channel::Unpooled, channel::NextNormed, channel::Moments>(ctx);  // _layer.py:56
    }
    else if (ctx.warp == 0) {  // warp 0
      ctx.step = 0;
      ops::GlobalAttention<policy::Attention>::load<0, 1024, 2>(ctx);  // _layer.py:67
      ops::load_streams<1, 9>(ctx, [&](ops::StreamState& s) {
        switch (ctx.step) {
          case 1:
            ops::DenseGemm<policy::OProj>::load_weights<0, 1024, 1>(ctx, s);  // _layer.py:49
            break;
          case 2:
            ops::DenseGemm<policy::Router>::load_weights<0, 1024, 1>(ctx, s);  // _layer.py:49
            break;
          case 3:
            ops::DenseGemm<policy::Pooler>::load_weights<0, 1024, 1>(ctx, s);  // _layer.py:49
            break;
          case 4:
            ctx.attach();
            break;
          case 5:
            ops::ExpertGemm<policy::GateUp>::load_weights<0, 1024, 1>(ctx, s);  // _layer.py:49
            break;
          case 6:
            ops::ExpertGemm<policy::Down>::load_weights<0, 1024, 1>(ctx, s);  // _layer.py:49
            break;
          case 7:
            ops::DenseGemm<policy::Unpooler>::load_weights<0, 1024, 1>(ctx, s);  // _layer.py:49
            break;
          case 8:
            ops::DenseGemm<policy::NextQkvg>::load_weights<0, 1024, 2>(ctx, s);  // _layer.py:49
            break;
        }
      });
      ctx.step = 9;
      ctx.drain();
    }
  }
  ctx.end(true);
}
// For the host: where the machine code lies.
extern "C" {
__device__ void (*muse_global_code)(const Params) = muse_global;
}
