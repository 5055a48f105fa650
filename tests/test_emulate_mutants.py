"""Faults put into the header library by hand: the emulator finds each under every seed, and its message leads there.

A mutant is an edit of a header's text. The tiny expert block is compiled with it and launched. Then the emulator
refuses it, naming a step and a place in the code; or, where the fault is one of numbers only (``wrong``), the
comparison with the reference does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megagen import resources
from megagen.bench.emulation import Weights
from megagen.bench.verify import Check, Verifier
from megagen.cli import pipeline
from megagen.emulate.engine import Expire
from megagen.emulate.report import Report
from megagen.errors import DeviceError, EmulationError
from megagen.runtime.emulated import World
from megagen.settings import Settings

pytestmark = pytest.mark.slow

SEEDS = (1, 2, 3)
TP = 2

BARRIER, RING, WAIT = "sync/barrier.cuh", "sync/ring.cuh", "sync/wait.cuh"
CHANNEL, OPERAND, ROW, FORMAT = "comm/channel.cuh", "mem/operand.cuh", "mem/row.cuh", "mma/format.cuh"
KERNEL, TYPES, RESET = "kernel.cuh", "types.cuh", "comm/reset.cuh"
DENSE, EXPERT, TOP_K, STREAM = "ops/dense_gemm.cuh", "ops/expert_gemm.cuh", "ops/top_k.cuh", "ops/stream.cuh"

COUNTER, FLAG = {"sync": "counter"}, {"sync": "flag"}
CLUSTER = {"sync": "cluster", "cluster": "2"}
EARLY = {"reducers": "1"}  # the finisher has nothing to do before, and is there before its sums


@dataclass(frozen=True)
class Variant:
    """How the block is placed and launched."""

    choices: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    tokens: int = 2
    launches: int = 1
    inputs: tuple[int, ...] = (0,)  # seeds, each launched that often
    zero: bool = False  # the last row of the input is
    positive_zero: bool = False  # marks what is empty in down's output
    expire: Expire = Expire.NEVER


@dataclass(frozen=True)
class Mutant:
    """``edits``: header, its text, the mutated one. ``kinds``: of error, any of these. ``at``: header and text of the
    lines of which the report names one. ``says``: what it must contain besides."""

    name: str
    edits: Sequence[tuple[str, str, str]]
    kinds: str = ""
    at: Sequence[tuple[str, str]] = ()
    says: str = ""
    wrong: str = ""
    on: Variant = Variant()
    missed: str = ""  # why the emulator cannot find it
    seeds: Sequence[int] = SEEDS  # other ones where it takes an unlucky moment
    once: bool = False  # a moment so unlucky that one of the seeds is enough


# Lines that reports lead to.
MULTIPLY = (FORMAT, "const float4 a = ptx::ld_shared_f4(slice + ((q * 8 + j) * 32 + lane) * 16);")
MULTIPLY_BF16 = (FORMAT, "const uint4 a = ptx::ld_shared_v4(slice + ((q * 4 + j) * 32 + lane) * 16);")
EXPECT = (STREAM, "ptx::mbarrier_arrive_expect_tx(bar, s.bytes);")
COPY = (STREAM, "bar, ptx::policy_evict_first());")
PUT = (FORMAT, "ptx::st_shared_f4(address(ctx, slice, n)")
TAKE = (FORMAT, "part[n][s] = ptx::ld_shared_f4(from + (s * 2 + n) * 512, ctx.dry);")
FULL = (RING, "return Full::wait(ctx, ctx.ring.slot, ctx.ring.phase);")
SUM_STORE = (ROW, "ptx::st_shared_f32(mine + warp * 4, sum);")
SUM_LOAD = (ROW, "const float4 low = ptx::ld_shared_f4(mine, ctx.dry)")
CLEAR = (TOP_K, "ptx::st_shared_u32(base + ExpertTable::kMasks + 4 * (i * 32 + ctx.lane), 0);")
MARK = (TOP_K, "ptx::red_or_shared(base + ExpertTable::kMasks + 4 * ids[i], 1u << token);")
COUNT = (TOP_K, "const u32 mask = ptx::ld_shared_u32(base + ExpertTable::kMasks + 4 * ids[i]);")
BITS = (TOP_K, "word = ptx::ld_shared_u32(bits + 4 * own)")
USED = (TOP_K, "u32 used() const")
FOUND = (TOP_K, "u32 id = ptx::ld_shared_u32(own + kFound);")
CHOSEN = (TOP_K, "const float chosen = ptx::ld_shared_f32(")
POLL = (WAIT, "ptx::still_waiting(ok, edge, slot, phase);")
VOTE = (WAIT, "__all_sync(kFullMask, ok)")
LOAD = (CHANNEL, "return ptx::ld_relaxed_gpu_b128(address);")
LOAD_SYS = (CHANNEL, "return ptx::ld_relaxed_sys_b128(address);")
PLAIN_LOAD = (CHANNEL, "return ptx::ld_global_v4(address);")
SEND = (CHANNEL, "ptx::st_relaxed_gpu(to, v);")
SEND_PEER = (CHANNEL, "ptx::st_relaxed_sys(to, v);")
PLAIN_SENDS = tuple((CHANNEL, f"ptx::st_global_{width}(p, v);") for width in ("u32", "v2", "v4"))
TAKEN = (CHANNEL, "ptx::expect_none(v[i], D::kEmpty);")
EMPTIED = (RESET, "ptx::st_global_v4(base + 16 * at,")
NOTES = ("debug/hang.cuh", "ptx::st_shared_v4(ctx.shared + Ctx::Kernel::kNotes + ctx.lane * kNoteBytes,")
TRY = (BARRIER, "return ptx::mbarrier_try_wait_parity(bar, parity);")
ARRIVED = (BARRIER, "ptx::mbarrier_arrive(address(ctx, slot));\n    }\n\n    // Hands")

ONE = "if (ctx.lane == 0 && !ctx.dry) "
ARRIVE = f"{ONE}ptx::mbarrier_arrive(address(ctx, slot));"
ARRIVE_EXPECT = EXPECT[1]
BULK = "ptx::bulk_load_hint(to, s.next.at, s.bytes, bar, ptx::policy_evict_first());"
ADDRESS = "copy(ctx, ctx.heap()) + (static_cast<E>(row) * D::kRowStride + e"
ADD = "ptx::red_add_release_gpu(counter(ctx, ctx.heap()), tiles);"
MEET = "ptx::bar_sync(kReady, 32 * K::kWarps);"
CLUSTER_MEETS = (
    "            ptx::cluster_arrive_relaxed();\n            ptx::cluster_wait();\n        } else if (warp == 0)"
)
READ_PARTIALS = "if (!Op::Partials::read(ctx, v, valid, from(c), c == 0)) return;"
RELEASE_PARTIALS = "Op::Partials::template release<2 * kBatch>(ctx, valid, from(c));"
RELEASED = "Ctx::Ring::release(ctx, acc.sum(0, 0));"
MULTIPLIED = "Weights::template multiply<kGroups, kTiles<Ctx>>("
NONEMPTY = "if constexpr (kLamport) return nonempty_v(v, D::kEmpty, D::kElementBytes);"
ACQUIRE = "if (!Ctx::Accum::acquire(ctx)) return;"
ACQUIRE_MINE = "if (takes && !Ctx::Accum::acquire(ctx)) return;"
PASS = "        Empty::arrive(ctx, ctx.accum.slot);\n"
AHEAD = "too_many_arrivals race unwritten overwritten deadlock"


def one(header: str, old: str, new: str) -> list[tuple[str, str, str]]:
    return [(header, old, new)]


MUTANTS = (
    # -- the ring of weights
    Mutant(
        "stage: next slot",
        one(RING, "+ ctx.ring.slot * R", "+ (ctx.ring.slot + 1) * R"),
        "out_of_bounds race overwritten unwritten",
        (COPY, PUT, TAKE),
    ),
    Mutant(
        "load: fills the next slot",
        one(
            STREAM,
            BULK,
            BULK.replace("to,", "ctx.shared + Policy::kOffset + (slot + 1) % kStages * Policy::kStageBytes,"),
        ),
        "race unwritten overwritten",
        (COPY, MULTIPLY),
    ),
    Mutant(
        "cursor: phase never flips",
        one(BARRIER, "phase ^= 1;", ""),
        "too_many_arrivals overwritten race",
        (EXPECT, COPY),
    ),
    Mutant(
        "load: ignores Empty",
        one(
            STREAM,
            "if (!Ring::Empty::wait(ctx, slot, phase ^ 1)) return false;",
            "",
        ),
        "too_many_arrivals overwritten race",
        (EXPECT, COPY),
    ),
    Mutant("acquire: ignores Full", one(*FULL, "return !ctx.dead;"), "unwritten race", (MULTIPLY, MULTIPLY_BF16)),
    Mutant(
        "math: releases before it multiplies",
        [
            (
                DENSE,
                MULTIPLIED,
                f"Ctx::Ring::Empty::arrive_consumed(ctx, ctx.ring.slot, 0.0f);\n{MULTIPLIED}",
            ),
            (DENSE, RELEASED, "ctx.ring.advance();"),
        ],
        "race overwritten",
        (COPY, MULTIPLY),
    ),
    Mutant(
        "release: arrives without a vote",
        one(RING, "Empty::arrive_consumed(ctx, ctx.ring.slot, consumed);", "Empty::arrive(ctx, ctx.ring.slot);"),
        "overwritten",
        (MULTIPLY, MULTIPLY_BF16),
    ),
    Mutant(
        "math: a vote over nothing",
        one(DENSE, RELEASED, RELEASED.replace("acc.sum(0, 0)", "0.0f")),
        "overwritten",
        ((BARRIER, "ptx::never_true(consumed)"),),
        says="pooler.math hands memory back",
        on=Variant(tokens=16),  # with fewer there are MMAs whose results stay zero
    ),
    Mutant(
        "load: in_flight waits for the wrong phase",
        one(STREAM, "phase ^ (wrapped ? 1 : 0)))", "phase))"),
        "deadlock",
        says="pooler.load_weights waiting for barrier 'ring_full'",
        on=Variant({"in_flight": "36"}, launches=2),
        seeds=(1, 2, 3, 4, 5, 6),  # it hangs where the phase that it should wait for has passed
        once=True,
    ),
    Mutant("load: tells no bytes", one(STREAM, ARRIVE_EXPECT, "ptx::mbarrier_arrive(bar);"), "no_expect_tx", (COPY,)),
    Mutant(
        "load: tells too few bytes",
        one(STREAM, ARRIVE_EXPECT, ARRIVE_EXPECT.replace("bytes)", "bytes - 16)")),
        "no_expect_tx",
        (COPY,),
    ),
    Mutant(
        "load: tells too many bytes",
        one(STREAM, ARRIVE_EXPECT, ARRIVE_EXPECT.replace("bytes)", "bytes + 16)")),
        "deadlock",
        says="router.math waiting for barrier 'ring_full'",
    ),
    Mutant(
        "load: copies too little",
        one(STREAM, BULK, BULK.replace("bytes", "bytes - 16")),
        "deadlock",
        says="router.math waiting for barrier 'ring_full'",
    ),
    Mutant(
        "load: copies too much",
        one(STREAM, BULK, BULK.replace("bytes", "bytes + 16")),
        "no_expect_tx out_of_bounds",
        (COPY,),
    ),
    Mutant("load: copies half a unit", one(STREAM, BULK, BULK.replace("bytes", "bytes - 8")), "misaligned", (COPY,)),
    Mutant(
        "load: copies from a crooked address",
        one(STREAM, BULK, BULK.replace("s.next.at", "s.next.at + 8")),
        "misaligned",
        (COPY,),
    ),
    Mutant(
        "drain: nothing",
        one(RING, "const u32 n = ctx.ring_loads < R::kStages ? ctx.ring_loads : R::kStages;", "const u32 n = 0;"),
        "left",
        (COPY,),
        on=Variant({"ring_stages": "5"}, expire=Expire.ANY),  # more than are waited for ahead of their use
        seeds=(0, 1, 2),  # given up while copies are under way
    ),
    # -- mbarriers
    Mutant("init: one arrival more", one(BARRIER, "B::kCount)", "B::kCount + 1)"), "deadlock", says="waits for"),
    Mutant(
        "init: one arrival less",
        one(BARRIER, "B::kCount)", "B::kCount > 1 ? B::kCount - 1 : 1)"),
        "too_many_arrivals race unwritten",
        (SUM_LOAD,),
    ),
    Mutant(
        "begin: nobody waits",
        one(KERNEL, MEET, ""),
        "uninitialised_barrier race",
        (TRY, ARRIVED, EXPECT, NOTES),
    ),
    Mutant(
        "begin: no fence after init",
        one(KERNEL, "ptx::fence_mbarrier_init();", ""),
        "uninitialised_barrier",
        (COPY,),
    ),
    Mutant(
        "arrive: all lanes",
        one(BARRIER, ARRIVE, ARRIVE.removeprefix(ONE)),
        "race unwritten deadlock",  # phases end with a quarter of a warp
        (SUM_LOAD, POLL),
        says="pre_ffn_norm.compute",
    ),
    Mutant(
        "arrive: no __syncwarp",
        one(BARRIER, "__syncwarp();\n        " + ARRIVE, ARRIVE),
        "race",
        (SUM_STORE, SUM_LOAD, PUT, TAKE),
    ),
    Mutant(
        "wait: the other parity",
        one(
            BARRIER,
            "return ptx::mbarrier_try_wait_parity(bar, parity);",
            "return ptx::mbarrier_try_wait_parity(bar, parity ^ 1);",
        ),
        "race unwritten deadlock overwritten too_many_arrivals",
    ),
    # -- accumulators
    Mutant(
        "put: ignores Empty",
        one(FORMAT, "if (!Empty::wait(ctx, ctx.accum.slot, ctx.accum.phase ^ 1)) return false;", ""),
        "unwritten race too_many_arrivals",
        (PUT, TAKE),
    ),
    Mutant(
        "take: ignores Full",
        one(FORMAT, "return Full::wait(ctx, ctx.accum.slot, ctx.accum.phase);", "return !ctx.dead;"),
        "race unwritten",
        (PUT, TAKE),
    ),
    Mutant(
        "take: after the slot is handed back",
        [
            (
                FORMAT,
                "float4 part[kTiles][kSlices];",
                "Empty::arrive(ctx, ctx.accum.slot);\n float4 part[kTiles][kSlices];",
            ),
            (FORMAT, "Empty::arrive_consumed(ctx, ctx.accum.slot, consumed);", ""),
        ],
        "race",
        (PUT, TAKE),
    ),
    Mutant("accumulators: one slot's memory", one(FORMAT, "ctx.accum.slot * A::kSlotBytes", "0"), "race", (PUT, TAKE)),
    Mutant(
        "take: columns swapped",
        one(FORMAT, "c[n][0] = sum.x, c[n][1] = sum.y", "c[n][0] = sum.y, c[n][1] = sum.x"),
        wrong="pooled",
    ),
    Mutant(
        "pass: what is not full yet, of a dense GEMM",
        one(DENSE, ACQUIRE, f"const bool takes = !turns || Ctx::Accum::turn(ctx, taker);\n{ACQUIRE_MINE}"),
        AHEAD,
    ),
    Mutant("pass: what is not full yet, of experts", one(EXPERT, ACQUIRE, ACQUIRE_MINE), AHEAD),
    Mutant(
        "reduce: both warps take the first tokens",
        one(DENSE, "tile = turns ? 0 : taker;", "tile = 0;"),
        "deadlock race",
        on=Variant(tokens=16),
    ),
    Mutant("pass: nothing is handed back", one(FORMAT, PASS, ""), "deadlock", says="accum_empty"),
    Mutant(
        "epilogue: one outbox for two warps",
        one(EXPERT, "Op::kOutbox + taker * (8 * kTokenBytes);", "Op::kOutbox;"),
        "race",
        ((EXPERT, "ptx::ld_shared_v4(outbox"), (EXPERT, "ptx::st_shared_u16(at, ptx::cvt_bf16x2(__fdividef")),
        seeds=(1, 2, 3, 4, 5, 6, 7, 8),
        once=True,
    ),
    # -- norms
    Mutant(
        "group_sum: one round's scratch",
        one(ROW, "round % 2 * kN + ", ""),
        "race",
        (SUM_STORE,),
        on=Variant(tokens=8),
    ),
    Mutant("group_sum: wrong parity", one(ROW, "round & 1", "~round & 1"), "unwritten race", (SUM_LOAD,)),
    Mutant(
        "group_sum: no arrival",
        one(ROW, "Barrier<Group>::arrive(ctx, 0);", ""),
        "deadlock",
        says="pre_ffn_norm.compute waiting for barrier 'group_pre_ffn_norm'",
    ),
    # -- numbers
    Mutant(
        "load_operand: lanes swapped",
        one(OPERAND, "ctx.lane % 4 * 16", "(3 - ctx.lane % 4) * 16"),
        wrong="pooled",
        on=Variant(tokens=1),
    ),
    Mutant(
        "multiply: fragments swapped",
        one(FORMAT, "slice + ((q * 4 + j) * 32 + lane) * 16", "slice + ((q * 4 + (3 - j)) * 32 + lane) * 16"),
        wrong="pooled",
        on=Variant(tokens=1),
    ),
    Mutant(
        "math: a unit's second stage skipped",
        one(DENSE, MULTIPLIED, f"if (s == 0) {MULTIPLIED}"),
        wrong="logits",
        on=Variant(tokens=1),
    ),
    Mutant(
        "math: both multiply the first chunk",
        one(DENSE, "Gemm::load(ctx, slice, Gemm::chunk_of(ctx), b)", "Gemm::load(ctx, slice, 0, b)"),
        wrong="pooled",
        on=Variant(tokens=1),
    ),
    Mutant(
        "transpose: lanes swapped",
        one(ROW, "odd = (lane & 4) != 0, upper = (lane & 8) != 0", "odd = (lane & 8) != 0, upper = (lane & 4) != 0"),
        wrong="pooled",
        on=Variant(tokens=1),
    ),
    Mutant(
        "epilogue: rows swapped",
        one(EXPERT, "kTokenBytes + ctx.lane / 4 * 2;", "kTokenBytes + (7 - ctx.lane / 4) * 2;"),
        wrong="expert_mid",
        on=Variant(tokens=1),
    ),
    Mutant(
        "nvfp4: scales swapped",
        one(FORMAT, "byte * 0x1111u", "(byte ^ 1) * 0x1111u"),
        wrong="expert_mid",
        on=Variant(tokens=1),
    ),
    Mutant(
        "epilogue: no __syncwarp after the stores",
        one(EXPERT, "        __syncwarp();\n        if (entry.valid) {", "        if (entry.valid) {"),
        "race unwritten",
        ((EXPERT, "v[i] = ptx::ld_shared_v4(outbox"),),
    ),
    Mutant(
        "epilogue: no __syncwarp before the stores",
        one(
            EXPERT,
            "        __syncwarp();\n#pragma unroll\n        for (u32 i = 0; i < 2; ++i) {",
            "        for (u32 i = 0; i < 2; ++i) {",
        ),
        "race",
        ((EXPERT, "ptx::st_shared_u16(at, ptx::cvt_bf16x2(__fdividef"),),
        missed="the vote that hands an accumulator back counts for all that the warp has read before it",
    ),
    # -- tables
    Mutant(
        "tables: no __syncwarp after clearing",
        one(
            TOP_K,
            "        __syncwarp();\n        if (valid) {\n#pragma unroll\n            for (u32 i = 0; i < 4; ++i) {\n"
            "                ptx::red_or_shared(base + ExpertTable::kMasks",
            "        if (valid) {\n            for (u32 i = 0; i < 4; ++i) {\n"
            "                ptx::red_or_shared(base + ExpertTable::kMasks",
        ),
        "race unwritten",
        (MARK, CLEAR, (TOP_K, "ptx::st_shared_u32(base + ExpertTable::kSome + 4 * ctx.lane, 0);")),
    ),
    Mutant(
        "tables: no __syncwarp after marking",
        one(TOP_K, "        __syncwarp();\n        u32 n[4],", "        u32 n[4],"),
        "race",
        (MARK, COUNT, BITS),
    ),
    Mutant(
        "tables: no __syncwarp after marking experts of two entries",
        one(
            TOP_K, "            __syncwarp();\n            entries += place_after", "            entries += place_after"
        ),
        "race",
        (BITS, (TOP_K, "ptx::red_or_shared(base + ExpertTable::kMany")),
        on=Variant(tokens=16),
    ),
    Mutant(
        "table: read before it is ready",
        one(TOP_K, "return Event<typename T::Ready>::wait(ctx);", "return !ctx.dead;"),
        "unwritten race",
        (USED,),
    ),
    Mutant(
        "select: a lane skips the vote",
        one(
            TOP_K,
            "const u32 top = __reduce_max_sync(kFullMask, best);",
            "if (!valid) continue;\n const u32 top = __reduce_max_sync(kFullMask, best);",
        ),
        "diverged deadlock",
        ((TOP_K, "const u32 top = __reduce_max_sync"),),
    ),
    Mutant(
        "select: no __syncwarp after the search",
        one(TOP_K, "            __syncwarp();\n            u32 id =", "            u32 id ="),
        "race unwritten",
        (FOUND, CHOSEN, (TOP_K, "if (winner) ptx::st_shared_u32"), (TOP_K, "ptx::st_shared_f4(ctx.shared + kAll")),
    ),
    Mutant(
        "select: no __syncwarp before the message",
        one(
            TOP_K,
            "            __syncwarp();\n            if (ctx.lane < Op::kTopK / 2)",
            "            if (ctx.lane < Op::kTopK / 2)",
        ),
        "race unwritten",
        (
            (TOP_K, "ptx::ld_shared_v4(ctx.shared + kMessage"),
            (TOP_K, "ptx::st_shared_u32(own + kMessage, id);"),
            (TOP_K, "ptx::st_shared_f32(own + kMessage"),
        ),
    ),
    # -- lamport
    Mutant(
        "reset: the copy in use",
        one(RESET, "which(ctx, D::kCopies - 1)", "which(ctx, 0)"),
        "race",
        (EMPTIED, SEND, SEND_PEER),
    ),
    Mutant(
        "reset: the copy that peers fill next",
        one(
            RESET,
            "which(ctx, D::kCopies - 1)",
            "which(ctx, D::kCopies == 3 ? 1 : D::kCopies - 1)",
        ),
        "race",
        (EMPTIED, SEND_PEER),
        on=Variant(tokens=1, ranks=2, launches=2),
    ),
    Mutant(
        "reset: never",
        one(RESET, "if constexpr (kEmptied<D>) {", "if constexpr (false) {"),
        wrong="empty slots",
        on=Variant(tokens=1, launches=2),
    ),
    Mutant(
        "release: never",
        one(CHANNEL, "if constexpr (kLamport && D::kReaderResets) {", "if constexpr (false) {"),
        wrong="empty slots",
        on=Variant(tokens=1),
    ),
    Mutant(
        "finish: releases before it reads",
        one(
            DENSE,
            READ_PARTIALS,
            f"{RELEASE_PARTIALS}\n                {READ_PARTIALS}",
        ),
        "deadlock",
        says="pooler.finish waits for channel 'pooled_partials'",
    ),
    Mutant(
        "which: no wrap",
        one(
            CHANNEL, "return now + ahead >= D::kCopies ? now + ahead - D::kCopies : now + ahead;", "return now + ahead;"
        ),
        "race out_of_bounds",
        (EMPTIED,),
        on=Variant(tokens=1, launches=2),
    ),
    Mutant(
        "send: +0 goes as it is",
        one(CHANNEL, NONEMPTY, ""),
        "deadlock",
        says="combine.measure waits for channel 'expert_out'",
        on=Variant(options={"split": "nk"}, zero=True, positive_zero=True),
        seeds=(1,),  # a long wait, and the same under each
    ),
    Mutant(
        "read: polls nothing first",
        one(CHANNEL, "if (kLamport && due) await<kN>(ctx, wanted, index);", ""),
        wrong="pooled",
        on=Variant(tokens=1),
        missed="it looks at all that it reads: what it polls first only saves loads",
    ),
    Mutant(
        "read: looks at nothing",
        one(CHANNEL, "return v.w == D::kEmpty;", "return false;"),
        "unwritten",
        (TAKEN,),
    ),
    Mutant(
        "send: 16 bytes as two vectors",
        one(*SEND, "ptx::st_relaxed_gpu(to + 8, uint2{v.z, v.w}), ptx::st_relaxed_gpu(to, uint2{v.x, v.y});"),
        "unwritten",
        (TAKEN,),
    ),
    Mutant(
        "send: 16 bytes to peers as two vectors",
        one(*SEND_PEER, "ptx::st_relaxed_sys(to + 8, uint2{v.z, v.w}), ptx::st_relaxed_sys(to, uint2{v.x, v.y});"),
        "unwritten",
        (TAKEN,),
        seeds=(1,),
    ),
    Mutant(
        "send: gpu scope to peers",
        one(*SEND_PEER, "ptx::st_relaxed_gpu( to, v);"),
        "race",
        ((CHANNEL, "ptx::st_relaxed_gpu( to, v);"), LOAD_SYS),
        says="too small a scope",
        on=Variant(ranks=2),
        seeds=(1,),
    ),
    Mutant(
        "load: gpu scope from peers",
        one(CHANNEL, "if constexpr (D::kWorld) " + LOAD_SYS[1], ""),
        "race",
        (LOAD,),
        says="too small a scope",
        on=Variant(ranks=2),
    ),
    Mutant(
        "load: constant",
        one(
            *LOAD,
            "const u32 bits = __float_as_uint(ptx::ld_constant_f4(address).x); return {bits, bits, bits, bits};",
        ),
        "bad_instruction",
        ((CHANNEL, "ptx::ld_constant_f4(address)"),),
    ),
    Mutant("send: past the heap", one(CHANNEL, ADDRESS + ")", ADDRESS + " + 0x1000000)"), "out_of_bounds", (SEND,)),
    Mutant(
        "send: past the channel",
        one(CHANNEL, ADDRESS + ")", ADDRESS + " + D::kBytes / D::kElementBytes)"),
        "deadlock",
        says=".math waits for channel 'normed'",
    ),
    Mutant(
        "send: an odd stride",
        one(CHANNEL, ADDRESS, ADDRESS.replace("kRowStride", "kRowStride + row")),
        "misaligned",
        (SEND,),
    ),
    Mutant(
        "send: rotation without a wrap",
        one(CHANNEL, "rotated = turned(rotated, 16 * kBy % D::kShard);", "rotated += 16 * kBy % D::kShard;"),
        "race deadlock",
        says="waits for channel 'pooled'",
    ),
    Mutant(
        "send: rotation of experts' columns without a wrap",
        one(CHANNEL, "turned(e, turn[i])", "e + turn[i]"),
        "race deadlock",
        says="channel 'expert_mid'",
        seeds=(1,),
    ),
    Mutant(
        "send: experts' columns are not rotated",
        one(CHANNEL, "turn[i] = 16 * j % D::kShard;", "turn[i] = 0;"),
        wrong="expert_mid",
        seeds=(1,),
    ),
    # -- counters and flags
    Mutant(
        "publish: no release",
        one(CHANNEL, ADD, "ptx::red_add_relaxed_sys(counter(ctx, ctx.heap()), 1);"),
        "race",
        (*PLAIN_SENDS, PLAIN_LOAD),
        on=Variant(COUNTER),
    ),
    Mutant(
        "publish: no __syncwarp",
        one(CHANNEL, "__syncwarp();\n            " + ONE + ADD, ONE + ADD),
        "race",
        (*PLAIN_SENDS, PLAIN_LOAD),
        on=Variant(COUNTER),
    ),
    Mutant(
        "publish: all lanes",
        one(CHANNEL, ONE + ADD, ADD),
        "race",
        (*PLAIN_SENDS, PLAIN_LOAD),
        on=Variant(COUNTER),
    ),
    Mutant(
        "wait: one arrival more",
        one(CHANNEL, "u32 expected = D::kArrivals;", "u32 expected = D::kArrivals + 1;"),
        "deadlock",
        says="waits for channel 'normed' (counter)",
        on=Variant(COUNTER),
    ),
    Mutant(
        "wait: one arrival less",
        one(CHANNEL, "u32 expected = D::kArrivals;", "u32 expected = D::kArrivals - 1;"),
        "race unwritten",
        (*PLAIN_SENDS, PLAIN_LOAD),
        on=Variant(COUNTER),
    ),
    Mutant(
        "wait: relaxed",
        one(CHANNEL, "ptx::ld_acquire_gpu(word)", "ptx::ld_relaxed_gpu(word)"),
        "race",
        (*PLAIN_SENDS, PLAIN_LOAD),
        on=Variant(COUNTER),
    ),
    Mutant(
        "math: does not wait for its input",
        one(DENSE, "if (!Op::In::wait(ctx)) return;", ""),
        "race",
        (*PLAIN_SENDS, PLAIN_LOAD),
        on=Variant(COUNTER),
    ),
    Mutant(
        "reset of counters: never",
        one(
            CHANNEL, "if (ctx.block == 0 && ctx.lane == 0) ptx::st_global_u32(counter(ctx, ctx.heap(), kAhead), 0);", ""
        ),
        wrong="empty slots",
        on=Variant(COUNTER, tokens=1, launches=2),
    ),
    Mutant(
        "flag: no fence",
        one(CHANNEL, "ptx::fence_acq_rel_sys();", ""),
        "race",
        (*PLAIN_SENDS, PLAIN_LOAD),
        on=Variant(FLAG),
    ),
    Mutant(
        "flag: fence of gpu scope",
        one(CHANNEL, "ptx::fence_acq_rel_sys();", "ptx::fence_acq_rel_gpu();"),
        "race",
        (*PLAIN_SENDS, PLAIN_LOAD),
        on=Variant(FLAG, ranks=2),
    ),
    Mutant(
        "flag: gpu scope of the wait",
        one(CHANNEL, "ptx::ld_acquire_sys(word)", "ptx::ld_acquire_gpu(word)"),
        "race",
        ((CHANNEL, "ptx::ld_acquire_gpu(word)) >= expected"),),
        on=Variant(FLAG, ranks=2),
    ),
    # -- a cluster
    Mutant(
        "cluster: to the wrong rank",
        one(CHANNEL, "owner = place % Ctx::Kernel::kCluster;", "owner = (place + 1) % Ctx::Kernel::kCluster;"),
        "unwritten deadlock",
        wrong="pooled",
        on=Variant(CLUSTER, tokens=1),
    ),
    Mutant(
        "cluster: data to the wrong rank",
        one(CHANNEL, "ptx::st_async(ptx::mapa(local, owner),", "ptx::st_async(ptx::mapa(local, owner ^ 1),"),
        "bad_instruction",
        ((CHANNEL, "ptx::st_async("),),
        on=Variant(CLUSTER),
    ),
    Mutant(
        "cluster: bytes not told",
        one(
            CHANNEL,
            "ptx::mbarrier_arrive_expect_tx(bar, mine * D::kChunks * ctx.tokens * 64);",
            "ptx::mbarrier_arrive(bar);",
        ),
        "unwritten",
        ((CHANNEL, "ptx::ld_shared_v4(ClusterMap"),),
        on=Variant(CLUSTER | EARLY),
    ),
    Mutant(
        "cluster: not waited for",
        one(
            CHANNEL,
            "return wait_until<true>(ctx, D::kIndex, 0, mine,",
            "return true;\n        return wait_until<true>(ctx, D::kIndex, 0, mine,",
        ),
        "unwritten",
        ((CHANNEL, "ptx::ld_shared_v4(ClusterMap"),),
        on=Variant(CLUSTER | EARLY),
    ),
    Mutant(
        "cluster: wait of the block's scope",
        one(CHANNEL, "ptx::mbarrier_try_wait_parity_cluster(bar, 0)", "ptx::mbarrier_try_wait_parity(bar, 0)"),
        "race",
        ((CHANNEL, "ptx::ld_shared_v4(ClusterMap"),),
        on=Variant(CLUSTER),
    ),
    Mutant(
        "begin: no cluster barrier",
        one(
            KERNEL,
            CLUSTER_MEETS,
            "        } else if (warp == 0)",
        ),
        "uninitialised_barrier race",
        ((CHANNEL, "ptx::st_async("),),
        on=Variant(CLUSTER),
    ),
    Mutant(
        "end: no cluster barrier",
        one(
            KERNEL,
            "kLastEpoch);\n        if constexpr (K::kCluster > 1) {",
            "kLastEpoch);\n        if constexpr (false) {",
        ),
        "left",
        ((CHANNEL, "ptx::st_async("),),
        on=Variant(CLUSTER, expire=Expire.ANY),
        seeds=range(80),  # about every twelfth gives up while a store to another block is under way
        once=True,
    ),
    # -- launches
    Mutant(
        "attach: no wait for the launch before",
        one(KERNEL, "if constexpr (K::kPdl) ptx::griddepcontrol_wait();", ""),
        "race",
        on=Variant(tokens=1, launches=2),
    ),
    Mutant(
        "end: the epoch stands still",
        one(KERNEL, "if (advance_epoch && threadIdx.x == 0)", "if (false)"),
        wrong="cannot be read",
        on=Variant(inputs=(0, 1)),
    ),
    Mutant(
        "end: the epoch goes on too early",
        one(KERNEL, "        __syncthreads();\n        if (advance_epoch", "        if (advance_epoch"),
        "race",
        on=Variant(launches=2),
        missed="both accesses are strong, and every warp has long read the epoch when the producer is done",
    ),
    Mutant(
        "share_of: loses the last tile",
        one(TYPES, "n * (part + 1) / parts}", "n * (part + 1) / parts - (part + 1 == parts)}"),
        "deadlock",
        says="waits for channel",
    ),
    Mutant(
        "wait_until: lanes leave one by one",
        one(WAIT, "if (__all_sync(kFullMask, ok)) {", "if (ok || __all_sync(kFullMask, ok)) {"),
        "diverged deadlock",
        (VOTE, POLL),
    ),
)


@cache
def headers() -> dict[str, str]:
    return resources.headers()


def mutated(mutant: Mutant) -> dict[str, str]:
    """The header library with the edits, each of a text that is there once."""
    texts = dict(headers())
    types = f"megagen/{TYPES}"  # the first header: without optimisation a mutant compiles in a third of the time
    texts[types] = f'#pragma GCC optimize("O0")\n{texts[types]}'
    for header, old, new in mutant.edits:
        name = f"megagen/{header}"
        assert texts[name].count(old) == 1, f"{name} has {texts[name].count(old)} times: {old}"
        texts[name] = texts[name].replace(old, new)
    return texts


def place(header: str, text: str, texts: Mapping[str, str]) -> str:
    """``megagen/header.cuh:line`` of a text that is there once."""
    name = f"megagen/{header}"
    before, found, after = texts[name].partition(text)
    assert found and text not in after, f"{name} has not once: {text}"
    return f"{name}:{before.count(chr(10)) + 1}"


class Bench:
    """Everything that mutants share: plans, and weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checked: dict[str, pipeline.Checked] = {}
        self._weights: dict[str, Weights] = {}

    def checked(self, on: Variant) -> pipeline.Checked:
        key = repr((on.choices, on.options, on.positive_zero))
        if key not in self._checked:
            schedule = Path("muse_moe.py")
            if on.positive_zero:
                text = (resources.schedules() / schedule).read_text("utf-8")
                old = "s.sync(g.down >> g.combine, exchange)"
                assert text.count(old) == 1
                new = old.replace("exchange", "lamport(empty=POSITIVE_ZERO, copies=3)")
                schedule = self.folder / "zero.py"
                schedule.write_text(text.replace(old, new).replace("ALL_ONES,", "ALL_ONES, POSITIVE_ZERO,", 1))
            request = pipeline.Request(schedule, tp=TP, choices=dict(on.choices), options=dict(on.options), tiny=True)
            self._checked[key] = pipeline.check(request)
        return self._checked[key]

    def library(self, on: Variant, texts: Mapping[str, str]) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resources, "headers", lambda: dict(texts))
            return pipeline.emulated(self.checked(on), Settings.from_env())

    def run(self, on: Variant, library: Path, seed: int) -> list[Check]:
        """Launch in a fresh world and judge."""
        checked = self.checked(on)
        key = f"{checked.graph.model_dump_json()} {on.ranks}"
        if key not in self._weights:
            self._weights[key] = Weights.random(checked.graph, on.ranks)
        weights = self._weights[key]
        with World(checked.plan, library, live=on.ranks, seed=seed, race=True, expire=on.expire) as world:

            def edit(rows: torch.Tensor) -> None:
                if on.zero:
                    rows[-1] = 0

            verifier = Verifier(world, checked.graph, weights.packed, weights.env)
            return verifier.check(on.tokens, seeds=on.inputs, launches=on.launches, edit=edit)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("schedules"))


def test_names_are_unique() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


def parameters() -> list[Any]:
    marks = {m.name: [pytest.mark.xfail(strict=True, reason=m.missed)] if m.missed else [] for m in MUTANTS}
    return [pytest.param(m, id=m.name, marks=marks[m.name]) for m in MUTANTS]


@pytest.mark.parametrize(
    "on", [Variant(), Variant(COUNTER), Variant(FLAG), Variant(CLUSTER)], ids=lambda on: str(dict(on.choices))
)
def test_nothing_is_wrong_with_the_headers_as_they_are(bench: Bench, on: Variant) -> None:
    library = bench.library(on, headers())
    for seed in SEEDS:
        wrong = [str(c) for c in bench.run(on, library, seed) if not c]
        assert not wrong, f"seed {seed}: {wrong}"


@pytest.mark.parametrize("mutant", parameters())
def test_every_seed_finds_the_fault(bench: Bench, mutant: Mutant) -> None:
    texts = mutated(mutant)
    lines = [place(header, text, texts) for header, text in mutant.at]
    library = bench.library(mutant.on, texts)
    same = not (mutant.kinds or mutant.once)  # numbers, under every seed
    for seed in mutant.seeds[:1] if same else mutant.seeds:
        try:
            checks = bench.run(mutant.on, library, seed)
        except EmulationError as error:
            found = error.render()
            assert isinstance(error.report, Report)
            assert error.report.kind in mutant.kinds.split(), found
            assert not lines or re.search("|".join(rf"{re.escape(line)}\b" for line in lines), found), (lines, found)
            assert mutant.says in found
            assert re.search(r"\b(\w+\.\w+|reset|drain)\b", error.message), f"no step: {found}"
            if mutant.once:
                return
        except DeviceError as error:
            assert mutant.once or mutant.wrong
            assert mutant.wrong in str(error)
        else:
            wrong = [c.name for c in checks if not c]
            if mutant.once and mutant.wrong in wrong:
                return
            assert mutant.once or mutant.wrong in wrong, f"seed {seed} finds nothing wrong but {wrong}"
    assert not mutant.once, f"none of {len(mutant.seeds)} seeds finds it"
