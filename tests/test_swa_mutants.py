"""Faults put into the sliding-window layer's headers by hand: each is found, by the emulator or by the comparison.

What the layer has in common with the expert block is mutated in test_emulate_mutants.py, whose means these are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import test_emulate_mutants as block
import torch
from test_emulate_mutants import CHANNEL, COUNTER, DENSE, KERNEL, Bench, Mutant, Variant, one

from megagen.bench.emulation import Weights
from megagen.bench.inputs import Inputs
from megagen.bench.routes import routes
from megagen.bench.verify import Check, Verifier
from megagen.cli import pipeline
from megagen.emulate.report import Report
from megagen.errors import EmulationError
from megagen.models.muse_spark import tiny
from megagen.runtime.emulated import World
from megagen.runtime.stack import Stack
from megagen.runtime.step import Step

pytestmark = pytest.mark.slow

ATTENTION, TILE, HEADS, RESIDUAL, COMBINE = (
    f"ops/{x}.cuh" for x in ("attention", "attention_tile", "qkv_heads", "residual", "combine")
)
WINDOW = 72  # no whole chunks: three of them in a cache
PARENTS = [-1, 0, 0, 1, 1]


@dataclass(frozen=True)
class On(Variant):
    """``parents``: a tree's, else ``tokens`` are a chain, after ``context`` others."""

    tokens: int = 3
    context: int = 340  # two chunks are live, in slots 1 and 2
    parents: tuple[int, ...] = ()
    tp: int = 1


CHAIN, TREE = On(), On(parents=tuple(PARENTS))
LONG = On(tokens=12)
TWO_SHOT = On(options={"all_reduce": "two_shot"}, ranks=2, tp=2)
ONE_SHOT = On(options={"all_reduce": "one_shot"}, ranks=2, tp=2)

OLDEST = "position + 1 > Op::kWindow ? position + 1 - Op::kWindow : 0;"
OWN = "(own < 32 ? ancestors >> own : ahead < 32 ? ancestors << ahead : 0);"
READ = "ok = ok && Op::Partials::read_where("
EARLY = "Op::Partials::template release_where<kSums>(ctx, wanted, sums);"
MEET = "if (!meeting.agree(ctx, ok)) return;"
RELEASE = "Op::Partials::template release_where<kSums>(\n                    ctx, [&](u32 j) { return counts(8 * j"
STATS = "Op::Partials::template release_where<kStats>(\n                        ctx, [&](u32 j) { return counts("
HANDED = (
    "Op::Partials::template release_where<kStats>(ctx, [&](u32 j) { return counts(32 * j + ctx.lane); }, stats(0));"
)
DEAD = "u32 done = idle.last - idle.first;"
KEYS = "{{Op::Keys::address(ctx, element), kSideBytes},"
AWAIT = "if (attached || ctx.aged(end)) return true;"
ATTACH = "ctx.attach();"
AGED = "return end + kMostTokens <= context;"
SLOT = "unit.kv_head * Op::kChunks + unit.slot)"
OWN_TOKEN = "token + g < ctx.tokens ? token + g : ctx.tokens - 1;"
TURNED = "ptx::movmatrix_trans(\n"
HALVES = "for (u32 d = 8; d > 0; d /= 2) square += __shfl_xor_sync(kFullMask, square, d);"
SUM_CHUNKS = "if (!sum_chunks<typename Op::Partials, kRowBlocks, Op::kChunks>("
RELEASE_CHUNKS = (
    "release_chunks<typename Op::Partials, kRowBlocks, Op::kChunks>(ctx, head * kDim + dim, token, valid);\n"
)
OUTBOX = "            __syncwarp();\n            const uint4 v[1] = {ptx::ld_shared_v4(get)};"

ROW = "mem/row.cuh"
NAN: Any = {"wrong": "attended"}  # what nobody may look at gets in

MUTANTS = (
    # -- what a token sees
    Mutant("window: one more", one(ATTENTION, OLDEST, "position - Op::kWindow;"), **NAN),
    Mutant("window: one less", one(ATTENTION, OLDEST, "position + 2 - Op::kWindow;"), wrong="attended"),
    Mutant(
        "window: of the first token",
        one(ATTENTION, "position[e] = ctx.position(token);", "position[e] = ctx.context;"),
        wrong="attended",
    ),
    Mutant(
        "window: a chunk counts as whole too early",
        one(ATTENTION, " && start + Op::kWindow > ctx.context + kMostTokens - 1;", ";"),
        **NAN,
    ),
    Mutant(
        "ancestors: bits the other way",
        one(TILE, OWN, OWN.replace(">>", "<>").replace("<<", ">>").replace("<>", "<<")),
        on=TREE,
        **NAN,
    ),
    Mutant(
        "ancestors: ignored",
        one(TILE, OWN, "(before(first, ctx.context + ctx.tokens) & ~before(first, ctx.context));"),
        wrong="attended",
        on=TREE,
    ),
    # -- what stands where
    Mutant(
        "chunks: a ring of one more",
        one(ATTENTION, SLOT, SLOT.replace("unit.slot", "(unit.slot + 1) % Op::kChunks")),
        **NAN,
    ),
    Mutant(
        "values: the unseen count",
        one(ATTENTION, "if (edge) drop_unseen", "if (false) drop_unseen"),
        **NAN,
    ),
    Mutant(
        "values: one too many kept",
        one(ATTENTION, ", end(ctx.context + ctx.tokens)", ", end(ctx.context + ctx.tokens + 1)"),
        **NAN,
    ),
    Mutant(
        "keys: written to the next slot",
        one(HEADS, "number % 8 * 8 + dim % 8, v", "(number + 1) % 8 * 8 + dim % 8, v"),
        wrong="rest of the cache",
    ),
    Mutant(
        "values: written to another place",
        one(HEADS, "at = dim % 8 * 8 + number % 8;", "at = dim % 8 * 8 + (number ^ 4) % 8;"),
        wrong="next_v_cache",
    ),
    # -- merging
    Mutant(
        "merge: one weight for both halves",
        one(TILE, "j % 4 * 8 + eighth);", "j % 4 * 8 + eighth / 2 * 2);"),
        wrong="attended",
    ),
    Mutant(
        "merge: one warp's sums for those of four", one(TILE, "from + w * (kHeadDim * 4)", "from"), wrong="attended"
    ),
    Mutant("merge: dims as they lie", one(TILE, "(dim + (e ^ turn)) * 4", "(dim + e) * 4"), wrong="attended"),
    Mutant(
        "merge: releases before it reads",
        one(TILE, READ, f"{EARLY}\n{READ}"),
        "deadlock race",
        says="attention.merge",
    ),
    Mutant(
        "merge: hands statistics back before the other warps have them",
        one(TILE, MEET, f"{HANDED}\n{MEET}"),
        "deadlock race unwritten",
        says="attention.merge",
    ),
    Mutant("merge: does not meet", one(TILE, MEET, "if (!ok) return;"), "race unwritten", says="attention.merge"),
    Mutant(
        "merge: never releases",
        [
            (TILE, RELEASE, RELEASE.replace("counts(", "false && counts(")),
            (TILE, STATS, STATS.replace("counts(", "false && counts(")),
        ],
        wrong="empty slots",
    ),
    Mutant(
        "attend: says nothing of what it need not do",
        one(ATTENTION, DEAD, "u32 done = 0;"),
        "deadlock",
        says="attention.merge waits for channel 'attention_partials' (counter)",
        on=On(COUNTER, context=20),
    ),
    Mutant(
        "merge: waits for slots that no token sees",
        one(ATTENTION, "{ return live.has(slot); }", "{ return slot < Op::kChunks; }"),
        "deadlock",
        says="attention.merge waits for channel 'attention_partials'",
    ),
    # -- keys and values through the ring
    Mutant(
        "attend: queries of the first tokens",
        one(ATTENTION, OWN_TOKEN, "g;"),
        wrong="attended",
        on=LONG,
    ),
    Mutant(
        "attend: what the first tokens see",
        one(ATTENTION, "columns(ctx, token);", "columns(ctx, 0);"),
        wrong="attended",
        on=LONG,
    ),
    Mutant(
        "load: another head's keys",
        one(ATTENTION, SLOT, SLOT.replace("unit.kv_head", "(unit.kv_head ^ 1)")),
        **NAN,
    ),
    Mutant(
        "load: values before keys",
        one(
            ATTENTION,
            "{{Op::Keys::address(ctx, element), kSideBytes},",
            "{{Op::Values::address(ctx, element), kSideBytes},",
        ),
        **NAN,
    ),
    Mutant("attend: weights are not turned", one(ATTENTION, TURNED, "(\n"), wrong="attended"),
    Mutant(
        "attend: values of rows that others have",
        one(ATTENTION, "(below ^ row % 4)", "row % 4"),
        wrong="attended",
    ),
    Mutant(
        "attend: hands a stage back before its values are read",
        [
            (
                ATTENTION,
                "float o[kSteps][4] = {}, sum[4] = {};",
                "float o[kSteps][4] = {}, sum[4] = {};\n        Ctx::Ring::release(ctx, s[0][0]);",
            ),
            (ATTENTION, "Ctx::Ring::release(ctx, consumed);", ""),
        ],
        "overwritten",
    ),
    # -- norms and rotations
    Mutant("attended: a norm over two halves", one(TILE, HALVES, HALVES.replace("8", "16", 1)), wrong="attended"),
    Mutant("heads: a norm over two tokens", one(HEADS, HALVES, HALVES.replace("8", "16", 1)), wrong="next_q"),
    Mutant(
        "rotation: the other way",
        one(HEADS, "dim < 32 ? -sine[e] : sine[e]", "dim < 32 ? sine[e] : -sine[e]"),
        wrong="next_k_cache",
    ),
    Mutant(
        "rotation: sines for cosines",
        one(HEADS, "i * 32 + dim % 32", "(1 - i) * 32 + dim % 32"),
        wrong="next_q",
    ),
    Mutant(
        "rotation: by number",
        one(HEADS, "valid ? ctx.position(token) : 0;", "ctx.context + token;"),
        wrong="next_q",
        on=TREE,
    ),
    # -- o_proj, its sum, and what comes after
    Mutant(
        "o_proj: no __syncwarp after the stores",
        one(DENSE, OUTBOX, OUTBOX.removeprefix("            __syncwarp();\n")),
        "race unwritten",
        ((DENSE, "ptx::ld_shared_v4(get)"),),
    ),
    Mutant(
        "o_proj: one outbox for two warps",
        one(DENSE, "Op::kOutbox + taker * (8 * kTokenBytes);", "Op::kOutbox;"),
        "race",
        (
            (DENSE, "ptx::ld_shared_v4(get)"),
            (DENSE, "kTokenBytes, pair & 0xffffu);"),
            (DENSE, "kRowBlock, pair >> 16);"),
        ),
        seeds=(1, 2, 3, 4),
        once=True,
    ),
    Mutant(
        "scatter: to the wrong owner",
        one(CHANNEL, "peer = owner >> shift,", "peer = (owner >> shift) ^ 1,"),
        wrong="projected",
        on=TWO_SHOT,
    ),
    Mutant(
        "rank sum: the first part twice",
        one(ROW, "unpack<8>(v[part], more);", "unpack<8>(v[part - 1], more);"),
        wrong="summed",
        on=TWO_SHOT,
    ),
    Mutant(
        "rank sum: in another order",
        [
            (ROW, "unpack<8>(v[0], sum);", "unpack<8>(v[kParts - 1], sum);"),
            (ROW, "unpack<8>(v[part], more);", "unpack<8>(v[kParts - 1 - part], more);"),
        ],
        wrong="summed",
        on=On(options=TWO_SHOT.options, tp=4),
        missed="a sum in another order is as near; GPUs cannot differ in it, as one adds for all",
    ),
    Mutant(
        "combine: the last columns do not count",
        one(COMBINE, "32 * i + ctx.lane < kPieces * kRow;", "32 * i + ctx.lane + kRow < kPieces * kRow;"),
        wrong="combined",
    ),
    Mutant(
        "combine: factors of other slots",
        one(COMBINE, "s % 4 * 8 + s / 4);", "s % 4 * 8 + (kTopK - 1 - s) / 4);"),
        wrong="combined",
    ),
    Mutant(
        "residual: the last columns do not count",
        one(RESIDUAL, "32 * i + ctx.lane < kPieces;", "32 * i + ctx.lane + 1 < kPieces;"),
        wrong="normed",
    ),
    Mutant(
        "heads: partial sums are emptied before they are read",
        one(HEADS, SUM_CHUNKS, RELEASE_CHUNKS + SUM_CHUNKS),
        "deadlock race",
        says="next_heads.write",
    ),
    Mutant(
        "take: looks at nothing",
        one(CHANNEL, "here &= !has_empty(v[i]);", ";"),
        "unwritten",
        ((CHANNEL, "ptx::expect_none(x, D::kEmpty);"),),
        says="post_attention.measure",
    ),
    Mutant(
        "residual: what is added counts by its factor and not by the square of that",
        one(RESIDUAL, "fmaf(r * r, m[3]", "fmaf(r, m[3]"),
        wrong="normed",
    ),
    Mutant(
        "residual: of what is added nothing counts",
        one(RESIDUAL, "fmaf(r * r, m[3], fmaf(2.0f * r, m[2], m[1]))", "m[1]"),
        wrong="normed",
    ),
)


class Layers(Bench):
    """The sliding-window layer of least heads."""

    def checked(self, on: Variant) -> pipeline.Checked:
        assert isinstance(on, On)
        tokens = max(5, on.tokens)
        key = repr((on.tp, on.choices, on.options, tokens))
        if key not in self._checked:
            few = {"heads": 8 * on.tp, "kv_heads": 2 * on.tp, "window": WINDOW}
            options: Any = {"config": tiny(on.tp).model_copy(update=few), **on.options}
            request = pipeline.Request(
                Path("muse_swa.py"), tp=on.tp, tokens=tokens, choices=dict(on.choices), options=options, tiny=True
            )
            self._checked[key] = pipeline.check(request)
        return self._checked[key]

    def run(self, on: Variant, library: Path, seed: int) -> list[Check]:
        assert isinstance(on, On)
        checked = self.checked(on)
        step = Step.tree(on.parents, on.context) if on.parents else Step.chain(on.tokens, on.context)
        key = f"{checked.graph.model_dump_json()} {on.ranks}"
        if key not in self._weights:
            self._weights[key] = Weights.random(checked.graph, on.ranks)
        weights = self._weights[key]
        with World(checked.plan, library, live=on.ranks, seed=seed, race=True, expire=on.expire) as world:
            verifier = Verifier(world, checked.graph, weights.packed, weights.env)
            override = routes(8, step.tokens, pool=16)
            return verifier.check(step.tokens, seeds=on.inputs, step=step, route_override=override)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Layers(tmp_path_factory.mktemp("schedules"))
    torch.set_num_threads(threads)


def parameters() -> list[Any]:
    marks = {m.name: [pytest.mark.xfail(strict=True, reason=m.missed)] if m.missed else [] for m in MUTANTS}
    return [pytest.param(m, id=m.name, marks=marks[m.name]) for m in MUTANTS]


@pytest.mark.parametrize("on", [CHAIN, TREE, TWO_SHOT], ids=["chain", "tree", "two-shot"])
def test_nothing_is_wrong_with_the_headers_as_they_are(bench: Bench, on: On) -> None:
    wrong = [str(c) for c in bench.run(on, bench.library(on, block.headers()), 1) if not c]
    assert not wrong, wrong


@pytest.mark.parametrize("mutant", parameters())
def test_the_fault_is_found(bench: Bench, mutant: Mutant) -> None:
    # where numbers tell, every seed sees the same ones
    on = mutant.on if isinstance(mutant.on, On) else CHAIN
    block.test_every_seed_finds_the_fault(bench, replace(mutant, seeds=(1,), on=on))


@pytest.mark.parametrize(
    "edits",
    [[], one(TILE, AWAIT, "return true;"), one(KERNEL, AGED, "return true;"), one(TILE, ATTACH, "ctx.look();")],
    ids=["as it is", "nobody waits", "what the launch before wrote is old", "a fence alone"],
)
def test_keys_of_the_launch_before_are_waited_for(bench: Bench, edits: Any) -> None:
    """Layers in a row, where the launch before writes the newest keys that the next one reads."""
    graph = bench.checked(CHAIN).graph
    step = Step.chain(CHAIN.tokens, CHAIN.context)
    texts = block.mutated(Mutant("", edits)) if edits else block.headers()
    given = Inputs.random(graph, 1, CHAIN.tokens, 0, torch.device("cpu"), step)
    library = bench.library(CHAIN, texts)
    with World(bench.checked(CHAIN).plan, library, live=1, seed=1, race=True, layers=8) as world:
        stack = Stack(world, [Weights.random(graph, 1, seed).packed for seed in range(2)], given.ranks, layers=2)
        for rank in world.ranks:
            rank.set_step(step)
            rank.set_route_override(routes(8, CHAIN.tokens, pool=16))
        stack.launch()
        if not edits:
            world.synchronize()
            return
        with pytest.raises(EmulationError) as caught:
            world.synchronize()
    assert isinstance(caught.value.report, Report)
    assert caught.value.report.kind == "no_proxy_fence"
    assert "attention.load" in caught.value.render()
