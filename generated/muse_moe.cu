// muse_moe: muse_spark.expert_block.nn, tp 8, up to 16 tokens, for h200 (132 blocks
// of 12 warps, clusters of 1). Written by megagen; edit the schedule instead.
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
};

namespace barrier {
struct RingFull {
  static constexpr u32 kOffset = 133184, kSlots = 3, kCount = 1, kIndex = 0;
};
struct RingEmpty {
  static constexpr u32 kOffset = 133208, kSlots = 3, kCount = 8, kIndex = 1;
};
struct AccumFull {
  static constexpr u32 kOffset = 133232, kSlots = 2, kCount = 8, kIndex = 2;
};
struct AccumEmpty {
  static constexpr u32 kOffset = 133248, kSlots = 2, kCount = 2, kIndex = 3;
};
struct TableReady {
  static constexpr u32 kOffset = 133264, kSlots = 1, kCount = 1, kIndex = 4;
};
struct GroupPreFfnNorm {
  static constexpr u32 kOffset = 133272, kSlots = 1, kCount = 8, kIndex = 5;
};
struct GroupPreExpertNorm {
  static constexpr u32 kOffset = 133280, kSlots = 1, kCount = 8, kIndex = 6;
};
}  // namespace barrier

namespace channel {
struct Normed {  // lamport, muse_moe.py:75
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 102400, kBytes = 262144, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 8192, kRankStride = 0, kShard = 8192;
  static constexpr u32 kCounterOffset = 0, kArrivals = 8, kIndex = 7;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Logits {  // lamport, muse_moe.py:76
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 626688, kBytes = 131072, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 256, kIndex = 8;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Routes {  // lamport
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 888832, kBytes = 1024, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 1, kIndex = 9;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct PooledPartials {  // lamport, muse_moe.py:77
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 890880, kBytes = 262144, kCopies = 1, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 512, kIndex = 11;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = true, kFault = false;
};
struct Pooled {  // lamport, muse_moe.py:78
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 1153024, kBytes = 131072, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 512, kShard = 512;
  static constexpr u32 kCounterOffset = 0, kArrivals = 32, kIndex = 12;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct ExpertIn {  // lamport, muse_moe.py:79
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 1546240, kBytes = 131072, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 0, kShard = 4096;
  static constexpr u32 kCounterOffset = 0, kArrivals = 8, kIndex = 13;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct ExpertMid {  // lamport, muse_moe.py:80
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 1808384, kBytes = 1048576, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 512, kShard = 512;
  static constexpr u32 kCounterOffset = 0, kArrivals = 128, kIndex = 14;
  static constexpr Per kArrivalsPer = Per::kExpert;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct ExpertOut {  // lamport, muse_moe.py:81
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 4954112, kBytes = 1048576, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 512, kShard = 512;
  static constexpr u32 kCounterOffset = 0, kArrivals = 64, kIndex = 15;
  static constexpr Per kArrivalsPer = Per::kExpert;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct SlotMoments {  // lamport, muse_moe.py:82
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 8099840, kBytes = 8192, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 8, kRankStride = 0, kShard = 8;
  static constexpr u32 kCounterOffset = 0, kArrivals = 16, kIndex = 16;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct Combined {  // lamport, muse_moe.py:83
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 8116224, kBytes = 131072, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 4096, kRankStride = 0, kShard = 4096;
  static constexpr u32 kCounterOffset = 0, kArrivals = 16, kIndex = 17;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct UnpooledPartials {  // lamport, muse_moe.py:84
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 8378368, kBytes = 262144, kCopies = 1, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 512, kIndex = 18;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = true, kFault = false;
};
struct Unpooled {  // lamport, muse_moe.py:85
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 8640512, kBytes = 262144, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 8192, kRankStride = 1024, kShard = 1024;
  static constexpr u32 kCounterOffset = 0, kArrivals = 64, kIndex = 19;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
struct Moments {  // lamport, muse_moe.py:86
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 9426944, kBytes = 8192, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 4, kRankStride = 0, kShard = 4;
  static constexpr u32 kCounterOffset = 0, kArrivals = 32, kIndex = 20;
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
  static constexpr u32 kStages = 3, kStageBytes = 36864, kOffset = 0;
};

struct AccumPolicy {
  using Full = barrier::AccumFull;
  using Empty = barrier::AccumEmpty;
  static constexpr u32 kSlots = 2, kSlotBytes = 8192, kOffset = 110592;
};

struct TablePolicy {
  using Ready = barrier::TableReady;
  static constexpr u32 kOffset = 126976;
};

struct KernelPolicy {
  using Params = ::Params;
  using Ring = RingPolicy;
  using Accum = AccumPolicy;
  using Table = TablePolicy;
  static constexpr u32 kWarps = 12, kBlocks = 132, kCluster = 1, kTokens = 16;
  static constexpr u32 kRecordOffset = 1024, kEpochOffset = 0;
  static constexpr u32 kNotes = 130704;
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
    Barrier<barrier::GroupPreFfnNorm>::init(ctx);
    Barrier<barrier::GroupPreExpertNorm>::init(ctx);
  }
};

using Ctx = Context<KernelPolicy>;

namespace policy {
struct PreFfnNorm {  // muse_moe.py:47
  using In = Input<tensor::Stream>;
  using Out = Channel<channel::Normed>;
  static constexpr u32 kWidth = 8192;
  static constexpr float kEps = 1e-05f;
  static constexpr u32 kCentred = 1;
  static constexpr u32 kRoundInput = 0;
  static constexpr u32 kScratch = 130912;
  using Group = barrier::GroupPreFfnNorm;
  static __device__ __forceinline__ const u8* gain(const Params& p) { return p.pre_ffn_gain; }
};
struct Router {  // muse_moe.py:44
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
struct Pooler {  // muse_moe.py:44
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
struct TopK {  // muse_moe.py:46
  using Logits = Channel<channel::Logits>;
  using Routes = Channel<channel::Routes>;
  using Table = TableChannel<TablePolicy>;
  static constexpr u32 kExperts = 256;
  static constexpr u32 kTopK = 8;
  static constexpr u32 kChunks = 8;
  static constexpr float kMultiplier = 0.1767766952966369f;
  static constexpr float kSumEps = 1e-15f;
  static constexpr float kScale = 1.0f;
  static constexpr u32 kScratch = 130976;
  static __device__ __forceinline__ const u8* bias(const Params& p) { return p.router_bias; }
};
struct PreExpertNorm {  // muse_moe.py:47
  using In = Channel<channel::Pooled>;
  using Out = Channel<channel::ExpertIn>;
  static constexpr u32 kWidth = 4096;
  static constexpr float kEps = 1e-05f;
  static constexpr u32 kCentred = 1;
  static constexpr u32 kRoundInput = 0;
  static constexpr u32 kScratch = 132096;
  using Group = barrier::GroupPreExpertNorm;
  static __device__ __forceinline__ const u8* gain(const Params& p) { return p.pre_expert_gain; }
};
struct GateUp {  // muse_moe.py:44
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
  static constexpr u32 kOutbox = 132160;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.gate_up_weight; }
  static __device__ __forceinline__ const u8* scale(const Params& p) { return p.gate_up_weight_scale; }
};
struct Down {  // muse_moe.py:44
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
  static constexpr u32 kOutbox = 132672;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.down_weight; }
  static __device__ __forceinline__ const u8* scale(const Params& p) { return p.down_weight_scale; }
};
struct Combine {  // muse_moe.py:47
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
struct Unpooler {  // muse_moe.py:44
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
struct Residual {  // muse_moe.py:47
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

extern "C" __global__ void __launch_bounds__(384, 1) muse_moe(const __grid_constant__ Params p) {
  Ctx ctx(p);
  ctx.begin();
  if (ctx.warp >= 4) {
    ptx::setmaxnreg_inc<192>();
    if (ctx.warp >= 4) {  // warps 4 to 11
      ctx.step = 25;
      ctx.attach();
      ctx.step = 26;
      ops::RmsNorm<policy::PreFfnNorm>::compute<4>(ctx);  // muse_moe.py:47
      ops::dense_math<27, 4,
        policy::Router,  // muse_moe.py:44
        policy::Pooler>(ctx);  // muse_moe.py:44
      ctx.step = 29;
      ops::RmsNorm<policy::PreExpertNorm>::compute<4>(ctx);  // muse_moe.py:47
      ops::expert_math<30, 4,
        policy::GateUp,  // muse_moe.py:44
        policy::Down>(ctx);  // muse_moe.py:44
      ctx.step = 32;
      ops::Combine<policy::Combine>::measure<4>(ctx);  // muse_moe.py:48
      ctx.step = 33;
      ops::Combine<policy::Combine>::compute<4>(ctx);  // muse_moe.py:47
      ctx.step = 34;
      ops::DenseGemm<policy::Unpooler>::math<4>(ctx);  // muse_moe.py:44
      ctx.step = 35;
      ops::Residual<policy::Residual>::measure<4>(ctx);  // muse_moe.py:48
      ctx.step = 36;
      ops::Residual<policy::Residual>::compute<4>(ctx);  // muse_moe.py:47
      ctx.step = 37;
      ctx.trigger();  // muse_moe.py:87
    }
  }
  else {
    ptx::setmaxnreg_dec<120>();
    if (ctx.warp >= 2) {  // warps 2 to 3
      ctx.step = ctx.warp == 2 ? 11 : 17;
      ctx.attach();
      ctx.step = ctx.warp == 2 ? 12 : 18;
      ops::DenseGemm<policy::Router>::reduce<2>(ctx);  // muse_moe.py:44
      ctx.step = ctx.warp == 2 ? 13 : 19;
      ops::DenseGemm<policy::Pooler>::reduce<2>(ctx);  // muse_moe.py:44
      if (ctx.warp == 3) {
        ctx.step = 20;
        ops::DenseGemm<policy::Pooler>::finish(ctx);  // muse_moe.py:45
      }
      ctx.step = ctx.warp == 2 ? 14 : 21;
      ops::ExpertGemm<policy::GateUp>::reduce<2>(ctx);  // muse_moe.py:44
      ctx.step = ctx.warp == 2 ? 15 : 22;
      ops::ExpertGemm<policy::Down>::reduce<2>(ctx);  // muse_moe.py:44
      ctx.step = ctx.warp == 2 ? 16 : 23;
      ops::DenseGemm<policy::Unpooler>::reduce<2>(ctx);  // muse_moe.py:44
      if (ctx.warp == 3) {
        ctx.step = 24;
        ops::DenseGemm<policy::Unpooler>::finish(ctx);  // muse_moe.py:45
      }
    }
    else if (ctx.warp == 1) {  // warp 1
      ctx.step = 7;
      ctx.attach();
      ctx.step = 8;
      ops::TopK<policy::TopK>::select(ctx);  // muse_moe.py:46
      ctx.step = 9;
      ops::TopK<policy::TopK>::tables(ctx);  // muse_moe.py:46
      ctx.step = 10;
      reset_channels<channel::Normed, channel::Logits, channel::Routes, channel::Pooled, channel::ExpertIn, channel::ExpertMid, channel::ExpertOut, channel::SlotMoments, channel::Combined, channel::Unpooled, channel::Moments>(ctx);  // muse_moe.py:49
    }
    else if (ctx.warp == 0) {  // warp 0
      ops::load_streams<0, 6>(ctx, [&](ops::StreamState& s) {
        switch (ctx.step) {
          case 0:
            ops::DenseGemm<policy::Router>::load_weights<0, 1024, 3>(ctx, s);  // muse_moe.py:44
            break;
          case 1:
            ops::DenseGemm<policy::Pooler>::load_weights<0, 1024, 3>(ctx, s);  // muse_moe.py:44
            break;
          case 2:
            ctx.attach();
            break;
          case 3:
            ops::ExpertGemm<policy::GateUp>::load_weights<0, 1024, 3>(ctx, s);  // muse_moe.py:44
            break;
          case 4:
            ops::ExpertGemm<policy::Down>::load_weights<0, 1024, 3>(ctx, s);  // muse_moe.py:44
            break;
          case 5:
            ops::DenseGemm<policy::Unpooler>::load_weights<0, 1024, 3>(ctx, s);  // muse_moe.py:44
            break;
        }
      });
      ctx.step = 6;
      ctx.drain();
    }
  }
  ctx.end(true);
}
