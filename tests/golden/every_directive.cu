// every: muse_spark.expert_block.nn, tp 8, up to 16 tokens, for h200 (120 blocks
// of 12 warps, clusters of 2). Written by megagen; edit the schedule instead.
#include <megagen/ops/combine.cuh>
#include <megagen/ops/dense_gemm.cuh>
#include <megagen/ops/expert_gemm.cuh>
#include <megagen/ops/residual.cuh>
#include <megagen/ops/rms_norm.cuh>
#include <megagen/ops/top_k.cuh>
#include <megagen/kernel.cuh>

namespace {

using namespace megagen;

struct Params {
  System sys;
  const u8* stream;
  u8* stream_out;
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
  u8* history;
};

namespace barrier {
struct RingFull {
  static constexpr u32 kOffset = 186496, kSlots = 4, kCount = 1, kIndex = 0;
};
struct RingEmpty {
  static constexpr u32 kOffset = 186528, kSlots = 4, kCount = 8, kIndex = 1;
};
struct AccumFull {
  static constexpr u32 kOffset = 186560, kSlots = 3, kCount = 8, kIndex = 2;
};
struct AccumEmpty {
  static constexpr u32 kOffset = 186584, kSlots = 3, kCount = 1, kIndex = 3;
};
struct TableReady {
  static constexpr u32 kOffset = 186608, kSlots = 1, kCount = 1, kIndex = 4;
};
struct GroupPreFfnNorm {
  static constexpr u32 kOffset = 186616, kSlots = 1, kCount = 8, kIndex = 5;
};
struct GroupPreExpertNorm {
  static constexpr u32 kOffset = 186624, kSlots = 1, kCount = 8, kIndex = 6;
};
struct PointDown {
  static constexpr u32 kOffset = 186632, kSlots = 1, kCount = 9, kIndex = 7;
};
struct BeginCombine {
  static constexpr u32 kOffset = 186640, kSlots = 1, kCount = 8, kIndex = 8;
};
struct BeginDown {
  static constexpr u32 kOffset = 186648, kSlots = 1, kCount = 9, kIndex = 9;
};
struct BeginGateUp {
  static constexpr u32 kOffset = 186656, kSlots = 1, kCount = 9, kIndex = 10;
};
struct BeginRouter {
  static constexpr u32 kOffset = 186664, kSlots = 1, kCount = 9, kIndex = 11;
};
struct DonePooledPartials {
  static constexpr u32 kOffset = 186672, kSlots = 1, kCount = 1, kIndex = 12;
};
}  // namespace barrier

namespace channel {
struct Normed {  // counter, every_directive.py:54
  static constexpr Sync kKind = Sync::kCounter;
  static constexpr u32 kOffset = 92928, kBytes = 262144, kCopies = 2, kEmpty = 0x00000000u;
  static constexpr u32 kElementBytes = 2, kRowStride = 8192, kRankStride = 0, kShard = 8192;
  static constexpr u32 kCounterOffset = 617216, kArrivals = 8, kIndex = 13;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Logits {  // lamport, every_directive.py:55
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 617472, kBytes = 131072, kCopies = 1, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 128, kIndex = 14;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = true, kFault = false;
};
struct Routes {  // lamport
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 748544, kBytes = 1024, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 1, kIndex = 15;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct PooledPartials {  // cluster, every_directive.py:57
  static constexpr Sync kKind = Sync::kCluster;
  static constexpr u32 kOffset = 0, kBytes = 0, kCopies = 1, kEmpty = 0x00000000u;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 256, kIndex = 17;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
  using Done = barrier::DonePooledPartials;
  static constexpr u32 kSharedOffset = 178304, kChunks = 8, kRowBlocks = 32;
};
struct Pooled {  // flag, every_directive.py:58
  static constexpr Sync kKind = Sync::kFlag;
  static constexpr u32 kOffset = 750592, kBytes = 131072, kCopies = 3, kEmpty = 0x00000000u;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 512, kShard = 512;
  static constexpr u32 kCounterOffset = 1143808, kArrivals = 32, kIndex = 18;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct ExpertIn {  // lamport
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 1144064, kBytes = 131072, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 0, kShard = 4096;
  static constexpr u32 kCounterOffset = 0, kArrivals = 8, kIndex = 19;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct ExpertMid {  // lamport, every_directive.py:59
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 1406208, kBytes = 1048576, kCopies = 3, kEmpty = 0x00000000u;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 512, kShard = 512;
  static constexpr u32 kCounterOffset = 0, kArrivals = 64, kIndex = 20;
  static constexpr Per kArrivalsPer = Per::kExpert;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct ExpertOut {  // lamport
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 4551936, kBytes = 1048576, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 512, kShard = 512;
  static constexpr u32 kCounterOffset = 0, kArrivals = 32, kIndex = 21;
  static constexpr Per kArrivalsPer = Per::kExpert;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = true;
};
struct SlotMoments {  // lamport
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 7697664, kBytes = 8192, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 8, kRankStride = 0, kShard = 8;
  static constexpr u32 kCounterOffset = 0, kArrivals = 16, kIndex = 22;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Combined {  // lamport
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 7714048, kBytes = 131072, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 0, kShard = 4096;
  static constexpr u32 kCounterOffset = 0, kArrivals = 16, kIndex = 23;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct UnpooledPartials {  // lamport
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 7976192, kBytes = 262144, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 256, kIndex = 24;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Unpooled {  // lamport
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 8500480, kBytes = 262144, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 8192, kRankStride = 1024, kShard = 1024;
  static constexpr u32 kCounterOffset = 0, kArrivals = 64, kIndex = 25;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct Moments {  // lamport
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 9286912, kBytes = 8192, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 4, kRankStride = 0, kShard = 4;
  static constexpr u32 kCounterOffset = 0, kArrivals = 32, kIndex = 26;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
}  // namespace channel

namespace tensor {
struct Stream {
  static constexpr u32 kElementBytes = 4, kRowStride = 8192;
  static __device__ __forceinline__ const u8* pointer(const Params& p) { return p.stream; }
};
struct StreamOut {
  static constexpr u32 kElementBytes = 4, kRowStride = 8192;
  static __device__ __forceinline__ u8* pointer(const Params& p) { return p.stream_out; }
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
  static constexpr u32 kSlots = 3, kSlotBytes = 8192, kOffset = 147456;
};

struct GuessPolicy {  // every_directive.py:50
  static constexpr u32 kTop = 4, kHint = 0;
  static constexpr bool kFirst = true;
  static __device__ __forceinline__ u8* history(const Params& p) { return p.history; }
};

struct TablePolicy {
  using Guess = GuessPolicy;
  using Ready = barrier::TableReady;
  static constexpr u32 kOffset = 172032;
};

struct KernelPolicy {
  using Params = ::Params;
  using Ring = RingPolicy;
  using Accum = AccumPolicy;
  using Table = TablePolicy;
  static constexpr u32 kWarps = 12, kBlocks = 120, kCluster = 2, kTokens = 16;
  static constexpr u32 kRecordOffset = 768, kEpochOffset = 0;
  static constexpr u32 kNotes = 175760;
  static constexpr bool kPdl = true;
  using Stamps = debug::Stamps<300, false>;  // every_directive.py:62
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
    Barrier<barrier::GroupPreFfnNorm>::init(ctx);
    Barrier<barrier::GroupPreExpertNorm>::init(ctx);
    Barrier<barrier::PointDown>::init(ctx);
    Barrier<barrier::BeginCombine>::init(ctx);
    Barrier<barrier::BeginDown>::init(ctx);
    Barrier<barrier::BeginGateUp>::init(ctx);
    Barrier<barrier::BeginRouter>::init(ctx);
    Barrier<barrier::DonePooledPartials>::init(ctx);
  }
};

using Ctx = Context<KernelPolicy>;

namespace policy {
struct PreFfnNorm {  // every_directive.py:40
  using In = Input<tensor::Stream>;
  using Out = Channel<channel::Normed>;
  static constexpr u32 kWidth = 8192;
  static constexpr float kEps = 1e-05f;
  static constexpr u32 kCentred = 1;
  static constexpr u32 kRoundInput = 0;
  static constexpr u32 kScratch = 175968;
  using Group = barrier::GroupPreFfnNorm;
  static __device__ __forceinline__ const u8* gain(const Params& p) { return p.pre_ffn_gain; }
};
struct Router {  // every_directive.py:33
  using In = Channel<channel::Normed>;
  using Partials = Channel<channel::Logits>;
  static constexpr u32 kRows = 256;
  static constexpr u32 kK = 8192;
  static constexpr u32 kUnitK = 1024;
  static constexpr u32 kStageK = 512;
  static constexpr u32 kFormat = 1;
  static constexpr u32 kStageBytes = 32768, kHint = 0, kL2Hint = 0;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.router_weight; }
};
struct Pooler {  // every_directive.py:33
  using In = Channel<channel::Normed>;
  using Partials = Channel<channel::PooledPartials>;
  using Out = Channel<channel::Pooled>;
  static constexpr u32 kRows = 512;
  static constexpr u32 kK = 8192;
  static constexpr u32 kUnitK = 1024;
  static constexpr u32 kStageK = 1024;
  static constexpr u32 kFormat = 0;
  static constexpr u32 kStageBytes = 32768, kHint = 2, kL2Hint = 0;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.pooler_weight; }
};
struct TopK {  // every_directive.py:39
  using Logits = Channel<channel::Logits>;
  using Routes = Channel<channel::Routes>;
  using Table = TableChannel<TablePolicy>;
  static constexpr u32 kExperts = 256;
  static constexpr u32 kTopK = 8;
  static constexpr u32 kChunks = 8;
  static constexpr float kMultiplier = 0.1767766952966369f;
  static constexpr float kSumEps = 1e-15f;
  static constexpr float kScale = 1.0f;
  static constexpr u32 kScratch = 176032;
  static __device__ __forceinline__ const u8* bias(const Params& p) { return p.router_bias; }
};
struct PreExpertNorm {  // every_directive.py:40
  using In = Channel<channel::Pooled>;
  using Out = Channel<channel::ExpertIn>;
  static constexpr u32 kWidth = 4096;
  static constexpr float kEps = 1e-05f;
  static constexpr u32 kCentred = 1;
  static constexpr u32 kRoundInput = 0;
  static constexpr u32 kScratch = 177152;
  using Group = barrier::GroupPreExpertNorm;
  static __device__ __forceinline__ const u8* gain(const Params& p) { return p.pre_expert_gain; }
};
struct GateUp {  // every_directive.py:33
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
  static constexpr u32 kOutbox = 177216;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.gate_up_weight; }
  static __device__ __forceinline__ const u8* scale(const Params& p) { return p.gate_up_weight_scale; }
};
struct Down {  // every_directive.py:33
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
  static constexpr u32 kOutbox = 177728;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.down_weight; }
  static __device__ __forceinline__ const u8* scale(const Params& p) { return p.down_weight_scale; }
};
struct Combine {  // every_directive.py:41
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
struct Unpooler {  // every_directive.py:33
  using In = Channel<channel::Combined>;
  using Partials = Channel<channel::UnpooledPartials>;
  using Out = Channel<channel::Unpooled>;
  static constexpr u32 kRows = 1024;
  static constexpr u32 kK = 4096;
  static constexpr u32 kUnitK = 1024;
  static constexpr u32 kStageK = 1024;
  static constexpr u32 kFormat = 0;
  static constexpr u32 kStageBytes = 32768, kHint = 0, kL2Hint = 0;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.unpooler_weight; }
};
struct Residual {  // every_directive.py:41
  using Stream = Input<tensor::Stream>;
  using Out = Output<tensor::StreamOut>;
  using In = Channel<channel::Unpooled>;
  using Moments = Channel<channel::Moments>;
  static constexpr u32 kWidth = 8192;
  static constexpr float kEps = 1e-08f;
  static constexpr u32 kParts = 1;
  static __device__ __forceinline__ const u8* gain(const Params& p) { return p.post_ffn_gain; }
  static __device__ __forceinline__ const u8* gate(const Params& p) { return p.residual_gate; }
};
}  // namespace policy

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1) every(const __grid_constant__ Params p) {
  Ctx ctx(p);
  ctx.stamps.open(ctx, 0);
  ctx.begin();
  if (ctx.warp >= 4) {
    ptx::setmaxnreg_inc<200>();
    if (ctx.warp >= 4) {  // warps 4 to 11
      ctx.enter(36);
      ctx.attach();
      ctx.enter(37);
      ops::RmsNorm<policy::PreFfnNorm>::compute<4>(ctx);  // every_directive.py:40
      ctx.enter(38);
      Event<barrier::BeginRouter>::arrive(ctx);  // every_directive.py:50
      ops::dense_math<39, 4,
        policy::Router,  // every_directive.py:34
        policy::Pooler>(ctx);  // every_directive.py:34
      ctx.enter(41);
      ops::RmsNorm<policy::PreExpertNorm>::compute<4>(ctx);  // every_directive.py:40
      ctx.enter(42);
      Event<barrier::BeginGateUp>::arrive(ctx);  // every_directive.py:48
      ops::expert_math<43, 4,
        policy::GateUp>(ctx);  // every_directive.py:34
      ctx.enter(44);
      Event<barrier::BeginDown>::arrive(ctx);  // every_directive.py:47
      ops::expert_math<45, 4,
        policy::Down>(ctx);  // every_directive.py:34
      ctx.enter(46);
      Event<barrier::PointDown>::arrive(ctx);  // every_directive.py:47
      ctx.enter(47);
      Event<barrier::BeginCombine>::arrive(ctx);  // every_directive.py:53
      ctx.enter(48);
      ctx.dry_run([&] { ops::Combine<policy::Combine>::measure<4>(ctx); });  // every_directive.py:41, dry run every_directive.py:60
      ctx.enter(49);
      ctx.dry_run([&] { ops::Combine<policy::Combine>::compute<4>(ctx); });  // every_directive.py:41, dry run every_directive.py:60
      ctx.enter(50);
      ops::DenseGemm<policy::Unpooler>::math<4>(ctx);  // every_directive.py:34
      ctx.enter(51);
      ops::Residual<policy::Residual>::measure<4>(ctx);  // every_directive.py:41
      ctx.enter(52);
      ops::Residual<policy::Residual>::compute<4>(ctx);  // every_directive.py:41
    }
  }
  else {
    ptx::setmaxnreg_dec<104>();
    if (ctx.warp == 3) {  // warp 3
      ctx.enter(27);
      ctx.attach();
      ctx.enter(28);
      Event<barrier::BeginRouter>::wait(ctx);  // every_directive.py:50
      ctx.enter(29);
      ops::ExpertGemm<policy::GateUp>::prefetch_guess(ctx);  // every_directive.py:50
      ctx.enter(30);
      ops::DenseGemm<policy::Pooler>::finish(ctx);  // every_directive.py:35
      ctx.enter(31);
      Event<barrier::BeginGateUp>::wait(ctx);  // every_directive.py:48
      ctx.enter(32);
      ops::ExpertGemm<policy::Down>::prefetch_l2<0, 512>(ctx);  // every_directive.py:48
      ctx.enter(33);
      Event<barrier::BeginCombine>::wait(ctx);  // every_directive.py:53
      ctx.enter(34);
      ctx.warm_next<8>();  // every_directive.py:53
      ctx.enter(35);
      ops::DenseGemm<policy::Unpooler>::finish(ctx);  // every_directive.py:35
    }
    else if (ctx.warp == 2) {  // warp 2
      ctx.enter(17);
      ctx.attach();
      ctx.enter(18);
      Event<barrier::BeginRouter>::arrive(ctx);  // every_directive.py:50
      ctx.enter(19);
      ops::DenseGemm<policy::Router>::reduce<2>(ctx);  // every_directive.py:34
      ctx.enter(20);
      ops::DenseGemm<policy::Pooler>::reduce<2>(ctx);  // every_directive.py:34
      ctx.enter(21);
      Event<barrier::BeginGateUp>::arrive(ctx);  // every_directive.py:48
      ctx.enter(22);
      ops::ExpertGemm<policy::GateUp>::reduce<2>(ctx);  // every_directive.py:34
      ctx.enter(23);
      Event<barrier::BeginDown>::arrive(ctx);  // every_directive.py:47
      ctx.enter(24);
      ops::ExpertGemm<policy::Down>::reduce<2>(ctx);  // every_directive.py:34
      ctx.enter(25);
      Event<barrier::PointDown>::arrive(ctx);  // every_directive.py:47
      ctx.enter(26);
      ops::DenseGemm<policy::Unpooler>::reduce<2>(ctx);  // every_directive.py:34
    }
    else if (ctx.warp == 1) {  // warp 1
      ctx.enter(9);
      ctx.warm_code<6>();  // every_directive.py:52
      ctx.enter(10);
      ctx.attach();
      ctx.enter(11);
      ctx.trigger();  // every_directive.py:63
      ctx.enter(12);
      ctx.dry_run([&] { ops::TopK<policy::TopK>::select(ctx); });  // every_directive.py:39, dry run every_directive.py:60
      ctx.enter(13);
      ops::TopK<policy::TopK>::tables(ctx);  // every_directive.py:39
      ctx.enter(14);
      Event<barrier::BeginDown>::wait(ctx);  // every_directive.py:47
      ctx.enter(15);
      ops::DenseGemm<policy::Unpooler>::prefetch_l2<256, 1024>(ctx);  // every_directive.py:47
      ctx.enter(16);
      reset_channels<channel::Normed, channel::Routes, channel::Pooled, channel::ExpertIn, channel::ExpertMid, channel::ExpertOut, channel::SlotMoments, channel::Combined, channel::UnpooledPartials, channel::Unpooled, channel::Moments>(ctx);  // every_directive.py:42
    }
    else if (ctx.warp == 0) {  // warp 0
      ops::load_streams<0, 8>(ctx, [&](ops::StreamState& s) {
        switch (ctx.step) {
          case 0:
            ops::DenseGemm<policy::Router>::load_weights<0, 1024, 2>(ctx, s);  // every_directive.py:33
            break;
          case 1:
            ops::DenseGemm<policy::Pooler>::load_weights<0, 1024, 2>(ctx, s);  // every_directive.py:33
            break;
          case 2:
            ctx.attach();
            break;
          case 3:
            ops::ExpertGemm<policy::GateUp>::load_weights<0, 1024, 1>(ctx, s);  // every_directive.py:33
            break;
          case 4:
            ops::ExpertGemm<policy::Down>::load_weights<0, 1024, 1>(ctx, s);  // every_directive.py:33
            break;
          case 5:
            ops::DenseGemm<policy::Unpooler>::load_weights<0, 256, 2>(ctx, s);  // every_directive.py:33
            break;
          case 6:
            Event<barrier::PointDown>::wait(ctx);  // every_directive.py:47
            break;
          case 7:
            ops::DenseGemm<policy::Unpooler>::load_weights<256, 1024, 2>(ctx, s);  // every_directive.py:33
            break;
        }
      });
      ctx.enter(8);
      ctx.drain();
    }
  }
  ctx.end(true);
}
// For the host: where the machine code lies.
extern "C" {
__device__ void (*every_code)(const Params) = every;
}
