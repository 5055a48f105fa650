// muse_last: muse_spark.last, tp 8, up to 16 tokens, for h200 (132 blocks
// of 12 warps, clusters of 1). Written by megagen; edit the schedule instead.
#include <megagen/ops/choose.cuh>
#include <megagen/ops/dense_gemm.cuh>
#include <megagen/ops/rms_norm.cuh>
#include <megagen/kernel.cuh>

namespace {

using namespace megagen;

struct Params {
  System sys;
  const u8* stream;
  u8* logits;
  u8* next_ids;
  const u8* final_gain;
  const u8* lm_head_weight;
};

namespace barrier {
struct RingFull {
  static constexpr u32 kOffset = 216992, kSlots = 6, kCount = 1, kIndex = 0;
};
struct RingEmpty {
  static constexpr u32 kOffset = 217040, kSlots = 6, kCount = 8, kIndex = 1;
};
struct AccumFull {
  static constexpr u32 kOffset = 217088, kSlots = 2, kCount = 8, kIndex = 2;
};
struct AccumEmpty {
  static constexpr u32 kOffset = 217104, kSlots = 2, kCount = 2, kIndex = 3;
};
struct TableReady {
  static constexpr u32 kOffset = 217120, kSlots = 1, kCount = 1, kIndex = 4;
};
struct GroupFinalNorm {
  static constexpr u32 kOffset = 217128, kSlots = 1, kCount = 8, kIndex = 5;
};
}  // namespace barrier

namespace channel {
struct FinalNormed {  // lamport, _ends.py:59
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 102400, kBytes = 262144, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 8192, kRankStride = 0, kShard = 8192;
  static constexpr u32 kCounterOffset = 0, kArrivals = 8, kIndex = 6;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct HeadPartials {  // lamport, muse_last.py:22
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 626688, kBytes = 12935168, kCopies = 1, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 25264, kIndex = 7;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = true, kFault = false;
};
struct Bests {  // lamport, muse_last.py:23
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 13561856, kBytes = 101120, kCopies = 1, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 1580, kRankStride = 0, kShard = 1580;
  static constexpr u32 kCounterOffset = 0, kArrivals = 395, kIndex = 8;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = true, kFault = false;
};
struct Votes {  // lamport, muse_last.py:24
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 13662976, kBytes = 65536, kCopies = 3, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 1024, kRankStride = 128, kShard = 128;
  static constexpr u32 kCounterOffset = 0, kArrivals = 1, kIndex = 9;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = true, kScatter = false, kReaderResets = false, kFault = false;
};
}  // namespace channel

namespace tensor {
struct Stream {
  static constexpr u32 kElementBytes = 4, kRowStride = 8192;
  static __device__ __forceinline__ const u8* pointer(const Params& p) { return p.stream; }
};
struct Logits {
  static constexpr u32 kElementBytes = 4, kRowStride = 25264;
  static __device__ __forceinline__ u8* pointer(const Params& p) { return p.logits; }
};
struct NextIds {
  static constexpr u32 kElementBytes = 4, kRowStride = 16;
  static __device__ __forceinline__ u8* pointer(const Params& p) { return p.next_ids; }
};
}  // namespace tensor

struct RingPolicy {
  using Full = barrier::RingFull;
  using Empty = barrier::RingEmpty;
  static constexpr u32 kStages = 6, kStageBytes = 32768, kOffset = 0;
};

struct AccumPolicy {
  using Full = barrier::AccumFull;
  using Empty = barrier::AccumEmpty;
  static constexpr u32 kSlots = 2, kSlotBytes = 8192, kOffset = 196608;
};

struct TablePolicy {
  using Ready = barrier::TableReady;
  static constexpr u32 kOffset = 212992;
};

struct KernelPolicy {
  using Params = ::Params;
  using Ring = RingPolicy;
  using Accum = AccumPolicy;
  using Table = TablePolicy;
  static constexpr u32 kWarps = 12, kBlocks = 132, kCluster = 1, kTokens = 16;
  static constexpr u32 kRecordOffset = 1024, kEpochOffset = 0;
  static constexpr u32 kNotes = 216720;
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
    Barrier<barrier::GroupFinalNorm>::init(ctx);
  }
};

using Ctx = Context<KernelPolicy>;

namespace policy {
struct FinalNorm {  // _ends.py:48
  using In = Input<tensor::Stream>;
  using Out = Channel<channel::FinalNormed>;
  static constexpr u32 kWidth = 8192;
  static constexpr float kEps = 1e-05f;
  static constexpr u32 kCentred = 0;
  static constexpr u32 kRoundInput = 1;
  static constexpr u32 kScratch = 216928;
  using Group = barrier::GroupFinalNorm;
  static __device__ __forceinline__ const u8* gain(const Params& p) { return p.final_gain; }
};
struct LmHead {  // _ends.py:49
  using In = Channel<channel::FinalNormed>;
  using Partials = Channel<channel::HeadPartials>;
  static constexpr u32 kRows = 25264;
  static constexpr u32 kK = 8192;
  static constexpr u32 kUnitK = 1024;
  static constexpr u32 kStageK = 1024;
  static constexpr u32 kFormat = 0;
  static constexpr u32 kStageBytes = 32768, kHint = 1, kL2Hint = 0;
  static __device__ __forceinline__ const u8* weight(const Params& p) { return p.lm_head_weight; }
};
struct Choose {  // muse_last.py:21
  using Logits = Output<tensor::Logits>;
  using Ids = Output<tensor::NextIds>;
  using Partials = Channel<channel::HeadPartials>;
  using Bests = Channel<channel::Bests>;
  using Votes = Channel<channel::Votes>;
  static constexpr u32 kRows = 25264;
  static constexpr u32 kPadding = 8;
  static constexpr u32 kChunks = 8;
  static constexpr u32 kParts = 8;
  static constexpr float kMultiplier = 0.008838834764831844f;
  static constexpr float kCap = 20.0f;
};
}  // namespace policy

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1) muse_last(const __grid_constant__ Params p) {
  Ctx ctx(p);
  ctx.begin();
  if (ctx.warp >= 4) {
    ptx::setmaxnreg_inc<192>();
    if (ctx.warp >= 4) {  // warps 4 to 11
      ctx.step = 12;
      ctx.attach();
      ctx.step = 13;
      ops::RmsNorm<policy::FinalNorm>::compute<4>(ctx);  // _ends.py:48
      ctx.step = 14;
      ops::DenseGemm<policy::LmHead>::math<4>(ctx);  // _ends.py:49
      ctx.step = 15;
      ops::Choose<policy::Choose>::score<4>(ctx);  // muse_last.py:21
    }
  }
  else {
    ptx::setmaxnreg_dec<120>();
    if (ctx.warp >= 2) {  // warps 2 to 3
      ctx.step = ctx.warp == 2 ? 5 : 7;
      ctx.attach();
      ctx.step = ctx.warp == 2 ? 6 : 8;
      ops::DenseGemm<policy::LmHead>::reduce<2>(ctx);  // _ends.py:49
      if (ctx.warp == 3) {
        ctx.step = 9;
        ops::Choose<policy::Choose>::pick(ctx);  // muse_last.py:21
        ctx.step = 10;
        ops::Choose<policy::Choose>::agree(ctx);  // muse_last.py:21
        ctx.step = 11;
        ctx.trigger();  // _ends.py:60
      }
    }
    else if (ctx.warp == 1) {  // warp 1
      ctx.step = 3;
      ctx.attach();
      ctx.step = 4;
      reset_channels<channel::FinalNormed, channel::Votes>(ctx);  // _ends.py:50
    }
    else if (ctx.warp == 0) {  // warp 0
      ops::load_streams<0, 1>(ctx, [&](ops::StreamState& s) {
        switch (ctx.step) {
          case 0:
            ops::DenseGemm<policy::LmHead>::load_weights<0, 1024, 6>(ctx, s);  // _ends.py:49
            break;
        }
      });
      ctx.step = 1;
      ctx.attach();
      ctx.step = 2;
      ctx.drain();
    }
  }
  ctx.end(true);
}
