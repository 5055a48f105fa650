// Per-expert norm and weighted sum, a token at a time on eight warps. See megagen/ops/combine.py.
#pragma once

#include <megagen/kernel.cuh>
#include <megagen/mem/row.cuh>
#include <megagen/ops/top_k.cuh>

namespace megagen::ops {

// Op: kWidth, kTopK, kEps, kParts, In, Routes, Out, Table, gain(params), Group, kScratch.
template <class Op>
struct Combine {
  using Slice = RowSlice<Op::kWidth, 8>;
  static constexpr u32 kN = Slice::kVectors;
  static constexpr u32 kTopK = Op::kTopK;

  template <u32 kFirstWarp, class Ctx>
  MEGAGEN_DEVICE void compute(Ctx& ctx) {
    const u32 slice = ctx.warp - kFirstWarp;
    const Range mine = share_of(ctx.tokens, ctx.block, Ctx::Kernel::kBlocks);
    if (mine.first == mine.last) return;
    float gain[kN][8];
#pragma unroll
    for (u32 i = 0; i < kN; ++i) load_gain(Op::gain(ctx.p), Slice::element(slice, ctx.lane, i), gain[i]);
    if (!Op::Table::wait(ctx) || !Op::Routes::wait(ctx) || !Op::In::wait(ctx)) return;
#pragma unroll 1
    for (u32 token = mine.first; token < mine.last; ++token) {
      uint4 weights[2];
      if (!Op::Routes::read(ctx, weights, true, [&](u32 i) { return token * 2 * kTopK + kTopK + 4 * i; })) return;
      u32 y[kTopK][kN][4];  // bf16 pairs, scaled by the gain
      float square[kTopK];
      if constexpr (Op::kParts == 1) {
        constexpr u32 kBatch = 2;  // slots on their way at once, as registers allow
#pragma unroll
        for (u32 first = 0; first < kTopK; first += kBatch) {
          uint4 v[kBatch * kN];
          if (!Op::In::read(ctx, v, true, [&](u32 i) {
                return (token * kTopK + first + i / kN) * Op::kWidth + Slice::element(slice, ctx.lane, i % kN);
              }))
            return;
#pragma unroll
          for (u32 s = 0; s < kBatch; ++s) {
            float x[kN][8];
#pragma unroll
            for (u32 i = 0; i < kN; ++i) unpack<8>(v[s * kN + i], x[i]);
            square[first + s] = scale_slot(x, gain, y[first + s]);
          }
        }
      } else {
#pragma unroll
        for (u32 s = 0; s < kTopK; ++s) {
          float x[kN][8];
          if (!sum_parts(ctx, token * kTopK + s, slice, x)) return;
          square[s] = scale_slot(x, gain, y[s]);
        }
      }
      if (!group_sum<typename Op::Group>(ctx, ctx.shared + Op::kScratch, slice, token - mine.first, square)) return;
      const u32 w[kTopK] = {weights[0].x, weights[0].y, weights[0].z, weights[0].w,
                            weights[1].x, weights[1].y, weights[1].z, weights[1].w};
      float out[kN][8] = {};
#pragma unroll
      for (u32 s = 0; s < kTopK; ++s) {
        const float r = rsqrtf(square[s] / Op::kWidth + Op::kEps);
#pragma unroll
        for (u32 i = 0; i < kN; ++i) {
#pragma unroll
          for (u32 e = 0; e < 8; e += 2) {
            keep_packed(y[s][i][e / 2]);
            const u32 n = ptx::cvt_bf16x2(bf16_low(y[s][i][e / 2]) * r, bf16_high(y[s][i][e / 2]) * r);
            out[i][e] = fmaf(__uint_as_float(w[s]), bf16_low(n), out[i][e]);
            out[i][e + 1] = fmaf(__uint_as_float(w[s]), bf16_high(n), out[i][e + 1]);
          }
        }
      }
#pragma unroll
      for (u32 i = 0; i < kN; ++i)
        Op::Out::send(ctx, token, Slice::element(slice, ctx.lane, i),
                      uint4{ptx::cvt_bf16x2(out[i][0], out[i][1]), ptx::cvt_bf16x2(out[i][2], out[i][3]),
                            ptx::cvt_bf16x2(out[i][4], out[i][5]), ptx::cvt_bf16x2(out[i][6], out[i][7])});
      Op::Out::publish(ctx);
    }
  }

  // y = bf16(x * gain) as pairs; returns the lane's sum of y^2.
  MEGAGEN_DEVICE float scale_slot(const float (&x)[kN][8], const float (&gain)[kN][8], u32 (&y)[kN][4]) {
    float square = 0;
#pragma unroll
    for (u32 i = 0; i < kN; ++i) {
#pragma unroll
      for (u32 e = 0; e < 8; e += 2) {
        const u32 pair = ptx::cvt_bf16x2(x[i][e] * gain[i][e], x[i][e + 1] * gain[i][e + 1]);
        y[i][e / 2] = pair;
        square = fmaf(bf16_low(pair), bf16_low(pair), square);
        square = fmaf(bf16_high(pair), bf16_high(pair), square);
      }
    }
    return square;
  }

  // One (token, slot) row of the slice when K was sharded: the ranks' contributions in rank order.
  template <class Ctx>
  MEGAGEN_DEVICE bool sum_parts(Ctx& ctx, u32 row, u32 slice, float (&x)[kN][8]) {
    uint4 v[Op::kParts * kN];
    constexpr u32 kPartStride = Ctx::Kernel::kTokens * kTopK * Op::kWidth;
    if (!Op::In::read(ctx, v, true, [&](u32 i) {
          return i / kN * kPartStride + row * Op::kWidth + Slice::element(slice, ctx.lane, i % kN);
        }))
      return false;
#pragma unroll
    for (u32 i = 0; i < kN; ++i) {
      unpack<8>(v[i], x[i]);
#pragma unroll
      for (u32 part = 1; part < Op::kParts; ++part) {
        float more[8];
        unpack<8>(v[part * kN + i], more);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) x[i][e] += more[e];
      }
    }
    return true;
  }
};

}  // namespace megagen::ops
