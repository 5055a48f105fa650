// Input-scaled norm and residual gate, a token at a time on eight warps. See megagen/ops/residual.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>

namespace megagen::ops {

// Op: kWidth, kEps, kTemperature, kClamp, In, Stream, Out, gain(params), gate(params), Group, kScratch.
template <class Op>
struct Residual {
  using Slice = RowSlice<Op::kWidth, 8>;
  static constexpr u32 kN = Slice::kVectors;

  template <u32 kFirstWarp, class Ctx>
  MEGAGEN_DEVICE void compute(Ctx& ctx) {
    const u32 slice = ctx.warp - kFirstWarp;
    const Range mine = share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks);
    if (mine.first == mine.last) return;
    float gain[kN][8];
#pragma unroll
    for (u32 i = 0; i < kN; ++i) load_gain(Op::gain(ctx.p), Slice::element(slice, ctx.lane, i), gain[i]);
    if (!Op::In::wait(ctx) || !Op::Stream::wait(ctx)) return;
#pragma unroll 1
    for (u32 token = mine.first; token < mine.last; ++token) {
      uint4 v[kN], s[2 * kN];
      if (!Op::Stream::read(ctx, s, true, [&](u32 i) {
            return token * Op::kWidth + Slice::element(slice, ctx.lane, i / 2) + i % 2 * 4;
          }))
        return;
      if (!Op::In::read(ctx, v, true, [&](u32 i) { return token * Op::kWidth + Slice::element(slice, ctx.lane, i); })) return;
      u32 y[kN][4];
      float square[1] = {0};
#pragma unroll
      for (u32 i = 0; i < kN; ++i) {
        float x[8];
        unpack<8>(v[i], x);
#pragma unroll
        for (u32 e = 0; e < 8; e += 2) {
          const u32 pair = ptx::cvt_bf16x2(x[e] * gain[i][e], x[e + 1] * gain[i][e + 1]);
          y[i][e / 2] = pair;
          square[0] = fmaf(bf16_low(pair), bf16_low(pair), square[0]);
          square[0] = fmaf(bf16_high(pair), bf16_high(pair), square[0]);
        }
      }
      if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, token - mine.first, square)) return;
      const float r = rsqrtf(square[0] / Op::kWidth + Op::kEps);
#pragma unroll
      for (u32 i = 0; i < kN; ++i) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
          const u32 element = Slice::element(slice, ctx.lane, i) + 4 * h;
          const float4 g = ptx::ld_constant_f4(Op::gate(ctx.p) + element * 4);
          keep_packed(y[i][2 * h]);
          keep_packed(y[i][2 * h + 1]);
          const u32 n0 = ptx::cvt_bf16x2(bf16_low(y[i][2 * h]) * r, bf16_high(y[i][2 * h]) * r);
          const u32 n1 = ptx::cvt_bf16x2(bf16_low(y[i][2 * h + 1]) * r, bf16_high(y[i][2 * h + 1]) * r);
          const uint4 old = s[2 * i + h];
          Op::Out::send(ctx, token, element,
                        uint4{mix(old.x, bf16_low(n0), g.x), mix(old.y, bf16_high(n0), g.y), mix(old.z, bf16_low(n1), g.z),
                              mix(old.w, bf16_high(n1), g.w)});
        }
      }
      Op::Out::publish(ctx);
    }
  }

  MEGAGEN_DEVICE u32 mix(u32 old, float n, float gate) {
    const float w = gate * (1.0f / Op::kTemperature);
    const float beta = __fdividef(1.0f, 1.0f + __expf(-w));
    const float fade = __fdividef(1.0f, 1.0f + __expf(w)) * (1.0f + beta);
    const float alpha = sqrtf(fade > Op::kClamp ? fade : Op::kClamp);
    return __float_as_uint(fmaf(alpha, __uint_as_float(old), beta * n));
  }
};

}  // namespace megagen::ops
