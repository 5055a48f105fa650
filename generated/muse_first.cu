// muse_first: muse_spark.first, tp 8, up to 16 tokens, for h200 (132 blocks
// of 12 warps, clusters of 1). Written by megagen; edit the schedule instead.
#include <megagen/ops/dense_gemm.cuh>
#include <megagen/ops/embed.cuh>
#include <megagen/ops/qkv_heads.cuh>
#include <megagen/kernel.cuh>

namespace {

using namespace megagen;

struct Params {
  System sys;
  const u8* ids;
  u8* stream_out;
  const u8* rotary;
  u8* next_q;
  u8* next_gate;
  u8* next_k_cache;
  u8* next_v_cache;
  const u8* embed_table;
  const u8* next_gain;
  const u8* next_qkvg_weight;
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
struct GroupEmbed {
  static constexpr u32 kOffset = 217128, kSlots = 1, kCount = 8, kIndex = 5;
};
}  // namespace barrier

namespace channel {
struct NextNormed {  // lamport, _ends.py:59
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 102400, kBytes = 262144, kCopies = 2, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 2, kRowStride = 8192, kRankStride = 0, kShard = 8192;
  static constexpr u32 kCounterOffset = 0, kArrivals = 8, kIndex = 6;
  static constexpr Per kArrivalsPer = Per::kToken;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = false, kFault = false;
};
struct NextPartials {  // lamport, muse_first.py:25
  static constexpr Sync kKind = Sync::kLamport;
  static constexpr u32 kOffset = 626688, kBytes = 1179648, kCopies = 1, kEmpty = 0xffffffffu;
  static constexpr u32 kElementBytes = 4, kRowStride = 16, kRankStride = 0, kShard = 16;
  static constexpr u32 kCounterOffset = 0, kArrivals = 2304, kIndex = 7;
  static constexpr Per kArrivalsPer = Per::kLaunch;
  static constexpr bool kWorld = false, kScatter = false, kReaderResets = true, kFault = false;
};
}  // namespace channel

namespace tensor {
struct Ids {
  static constexpr u32 kElementBytes = 4, kRowStride = 16;
  static __device__ __forceinline__ const u8* pointer(const Params& p) { return p.ids; }
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
    Barrier<barrier::GroupEmbed>::init(ctx);
  }
};

using Ctx = Context<KernelPolicy>;

namespace policy {
struct Embed {  // _ends.py:48
  using Ids = Input<tensor::Ids>;
  using Out = Output<tensor::StreamOut>;
  using Normed = Channel<channel::NextNormed>;
  static constexpr u32 kVocab = 202048;
  static constexpr u32 kWidth = 8192;
  static constexpr float kEps = 1e-05f;
  static constexpr u32 kScratch = 216928;
  using Group = barrier::GroupEmbed;
  static __device__ __forceinline__ const u8* table(const Params& p) { return p.embed_table; }
  static __device__ __forceinline__ const u8* next_gain(const Params& p) { return p.next_gain; }
};
struct NextQkvg {  // _ends.py:49
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
struct NextHeads {  // muse_first.py:24
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

extern "C" __global__ void __launch_bounds__(384, 1) muse_first(const __grid_constant__ Params p) {
  Ctx ctx(p);
  ctx.begin();
  if (ctx.warp >= 4) {
    ptx::setmaxnreg_inc<192>();
    if (ctx.warp >= 4) {  // warps 4 to 11
      ctx.step = 7;
      ctx.attach();
      ctx.step = 8;
      ops::Embed<policy::Embed>::compute<4>(ctx);  // _ends.py:48
      ctx.step = 9;
      ops::DenseGemm<policy::NextQkvg>::math<4>(ctx);  // _ends.py:49
      ctx.step = 10;
      ops::QkvHeads<policy::NextHeads>::write<4>(ctx);  // muse_first.py:24
      ctx.step = 11;
      ctx.trigger();  // _ends.py:60
    }
  }
  else {
    ptx::setmaxnreg_dec<120>();
    if (ctx.warp >= 2) {  // warps 2 to 3
      ctx.step = 5;
      ctx.attach();
      ctx.step = 6;
      ops::DenseGemm<policy::NextQkvg>::reduce<2>(ctx);  // _ends.py:49
    }
    else if (ctx.warp == 1) {  // warp 1
      ctx.step = 3;
      ctx.attach();
      ctx.step = 4;
      reset_channels<channel::NextNormed>(ctx);  // _ends.py:50
    }
    else if (ctx.warp == 0) {  // warp 0
      ops::load_streams<0, 1>(ctx, [&](ops::StreamState& s) {
        switch (ctx.step) {
          case 0:
            ops::DenseGemm<policy::NextQkvg>::load_weights<0, 1024, 6>(ctx, s);  // _ends.py:49
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
