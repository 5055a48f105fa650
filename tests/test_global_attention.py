"""Attention over a growing cache: how it is cut, how the pieces are dealt, and what an emulated kernel makes of it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import caches
import pytest
from test_emulate_swa import few, small

from megagen import machines, resources
from megagen.check import check
from megagen.compile import compile_source
from megagen.dsl import KiB, Schedule, by_reader, counter, evict_first, flag, lamport
from megagen.emit import emit
from megagen.emulate.build import compile_library
from megagen.emulate.engine import Engine, Expire, Geometry, Kind
from megagen.errors import CheckError, EmulationError, HangError, ScheduleError, UnknownName
from megagen.ir.graph import DType, Graph, Routing, Tensor, TensorKind
from megagen.ir.plan import Plan, StepPlan
from megagen.lower import lower
from megagen.ops.global_attention import GlobalAttention, span, span_of, spans
from megagen.runtime.emulated import World
from megagen.runtime.step import Step
from megagen.settings import Settings

D, CHUNK = 64, 64
MOST = 1 << 20


def op(heads: int = 16, kv_heads: int = 2, capacity: int = 1024, eps: float = 1e-6) -> GlobalAttention:
    return GlobalAttention(
        name="attention", inputs={n: n for n in ("q", "gate", "keys", "values")}, weights={},
        outputs={"partials": "partials", "out": "out"}, heads=heads, kv_heads=kv_heads, capacity=capacity,
        scale=0.15, eps=eps,
    )  # fmt: skip


def graph(attention: GlobalAttention, tokens: int = 16) -> Graph:
    """Nothing but attention."""
    heads, kv, capacity = attention.heads, attention.kv_heads, attention.capacity
    given = {
        "q": (tokens, heads * D), "gate": (tokens, heads * D), "keys": (kv, capacity, D),
        "values": (kv, capacity // CHUNK, D, CHUNK),
    }  # fmt: skip
    tensors = {n: Tensor(name=n, shape=shape, dtype=DType.BF16, kind=TensorKind.INPUT) for n, shape in given.items()}
    tensors["partials"] = Tensor(name="partials", shape=(spans(capacity), heads, tokens, D + 4), dtype=DType.FP32)
    tensors["out"] = Tensor(name="out", shape=(tokens, heads * D), dtype=DType.BF16, kind=TensorKind.OUTPUT)
    return Graph(name="attention", tp=1, tokens=tokens, ops=(attention,), tensors=tensors)


SYNCS = {
    "by reader": lambda: lamport(reset=by_reader), "by launch": lamport, "counter": counter, "flag": flag
}  # fmt: skip


def schedule(
    attention: GlobalAttention, blocks: int = 3, sync: str = "by reader", stages: int = 3, together: bool = False
) -> Schedule:
    g = graph(attention)
    s = Schedule("attention_alone", g, machines.load("h200"), warps=12, blocks=blocks)
    s.ring(stages=stages, stage_bytes=32 * KiB)
    s.assign(g.attention, load=s.warp(0), attend=s.warps(4, 12), merge=s.warps(4, 12))
    s.sync(g.attention.attend >> g.attention.merge, SYNCS[sync]())
    s.reset(by=s.warp(1))
    s.launch(registers=(120, 192))
    if together:
        s.warpgroups(g.attention.attend)
    return s


def plan(attention: GlobalAttention, **more: Any) -> Plan:
    made = lower(schedule(attention, **more))
    assert not [f for f in check(made) if f.level == "warning" and "fence" not in f.message]
    return made


# -- spans ---------------------------------------------------------------------------------------------------------


def test_spans_cut_the_cache_without_a_gap() -> None:
    ends = [span(i)[0] + span(i)[1] for i in range(256)]
    assert [span(i)[0] for i in range(257)] == [0, *ends]
    assert ends[-1] == MOST
    sizes = [span(i)[1] for i in range(256)]
    assert sizes == [256] * 64 + [512 << o for o in range(6) for _ in range(32)]
    for i in range(256):
        first, size = span(i)
        assert span_of(first) == span_of(first + size - 1) == i
        assert span_of(first + size) == i + 1


@pytest.mark.parametrize(
    ("capacity", "n"), [(128, 1), (256, 1), (384, 2), (16384, 64), (16512, 65), (131072, 160), (MOST, 256)]
)
def test_how_many_spans_a_cache_has(capacity: int, n: int) -> None:
    assert spans(capacity) == n
    assert op(capacity=capacity).constants()["kSpans"] == n
    assert op(capacity=capacity).publishes("attend") == (n * 16, "launch")


@pytest.mark.parametrize("wrong", [{"heads": 24}, {"heads": 6}, {"capacity": 1000}, {"capacity": 2 * MOST}], ids=str)
def test_what_the_kernel_cannot_do_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ScheduleError, match="attention: ") as e:
        op(**wrong)
    assert e.value.loc is not None
    assert e.value.loc.file == __file__


def test_cost_is_of_a_full_cache() -> None:
    cost = op(capacity=131072).cost(Routing(tokens=16))
    assert cost.weight_bytes == 0
    assert cost.activation_bytes == 131072 * 2 * 64 * 2 * 2 + 3 * 16 * 16 * 64 * 2
    assert cost.operations == 2 * 2 * 16 * 131072 * 16 * 64


# -- units ---------------------------------------------------------------------------------------------------------

UNITS = """
#include <megagen/ops/global_attention.cuh>

struct Params {{
    const unsigned* words;
    unsigned* out;
}};

struct Words {{
    unsigned context, tokens, block;
}};

// Of case blockIdx.x (context, tokens) every block's units: how many, then (block, head, span, first chunk, chunks).
extern "C" __global__ void units(const __grid_constant__ Params p) {{
    using namespace megagen;
    if (threadIdx.x != 0) return;
    const u8* words = reinterpret_cast<const u8*>(p.words + 2 * blockIdx.x);
    u8* out = reinterpret_cast<u8*>(p.out + blockIdx.x * {room});
    u32 n = 0;
    for (u32 block = 0; block < {blocks}; ++block) {{
        const Words of = {{ptx::ld_relaxed_gpu(words), ptx::ld_relaxed_gpu(words + 4), block}};
        for (ops::SpanUnits<{kv}, {blocks}> unit(of); unit.any; unit.next()) {{
            const u32 all[5] = {{block, unit.head, unit.span, unit.begin(), unit.count()}};
            for (u32 i = 0; i < 5; ++i) ptx::st_global_u32(out + 4 * (1 + 5 * n + i), all[i]);
            ++n;
        }}
    }}
    ptx::st_global_u32(out, n);
}}
"""
STEPS = [
    (0, 1), (0, 16), (63, 1), (127, 2), (255, 1), (250, 16), (300, 3), (1000, 16), (4090, 6), (4096, 1), (16383, 1),
    (16384, 1), (16380, 16), (20000, 16), (32768, 1), (65535, 16), (100_000, 1), (131_071, 1), (131_072, 16),
    (140_000, 16), (262_143, 1), (700_000, 16), (MOST - 16, 16), (MOST - 1, 1),
]  # fmt: skip


class Unit(NamedTuple):
    block: int
    head: int
    span: int
    first: int  # chunk
    chunks: int


def device_units(kv: int, blocks: int) -> dict[tuple[int, int], list[Unit]]:
    """By (context, tokens), as the header deals them."""
    room = 1 + 5 * 256 * kv
    text = UNITS.format(kv=kv, blocks=blocks, room=room)
    library = compile_library(text, kernels=["units"], settings=Settings.from_env())
    words = struct.pack(f"{2 * len(STEPS)}I", *(n for step in STEPS for n in step))
    with Engine(library, arena_bytes=1 << 26) as engine:
        given = engine.allocate(len(words), kind=Kind.CONSTANT, name="words")
        out = engine.allocate(4 * room * len(STEPS), kind=Kind.OUTPUT, name="out")
        engine.view(given, len(words))[:] = list(words)
        engine.wrote(given, len(words))
        engine.launch("units", struct.pack("2Q", given, out), Geometry(len(STEPS), 32))
        engine.run()
        raw = bytes(engine.view(out, 4 * room * len(STEPS)))
    found = {}
    for i, step in enumerate(STEPS):
        n, *rest = struct.unpack_from(f"{room}I", raw, 4 * room * i)
        found[step] = [Unit(*rest[5 * j : 5 * j + 5]) for j in range(n)]
    return found


def dealt(context: int, tokens: int, kv: int, blocks: int) -> list[Unit]:
    """The same by walking along the row of units."""
    end = context + tokens
    live = [i for i in range(256) if span(i)[0] < end]
    chunks = {i: span(i)[1] // CHUNK for i in live}
    last = live[-1]
    chunks[last] = -(-(end - span(last)[0]) // 128) * 2
    room = {i: 1 << (n - 1).bit_length() for i, n in chunks.items()}
    largest = room[last] = max(room.values())
    row = kv * sum(room.values())
    width = math.ceil(math.ceil(row / blocks) / largest) * largest
    at, found = 0, []
    for i, head in product(reversed(live), range(kv)):
        found.append(Unit(at // width, head, i, span(i)[0] // CHUNK, chunks[i]))
        assert at // width == (at + room[i] - 1) // width, "no unit lies across a cut"
        at += room[i]
    return found


@pytest.mark.parametrize(("kv", "blocks"), [(2, 132), (1, 3)])
def test_units_are_dealt_once_and_evenly(kv: int, blocks: int) -> None:
    for (context, tokens), found in device_units(kv, blocks).items():
        assert found == dealt(context, tokens, kv, blocks), context
        covered = sorted((u.head, n) for u in found for n in range(u.first, u.first + u.chunks))
        chunks = -(-(context + tokens) // 128) * 2
        assert covered == list(product(range(kv), range(chunks))), context
        work = [sum(u.chunks for u in found if u.block == b) for b in range(blocks)]
        # the least that the largest unit allows, and what is rounded up to its size
        assert max(work) <= max(u.chunks for u in found) + 2 * 64 + sum(work) / blocks
        if (context + tokens, blocks) in ((131_072, 132), (MOST, 132)):
            assert sum(work) >= 0.95 * max(work) * blocks
        if (context + tokens, blocks) == (4096, 132):
            assert max(work) == 4, "a span each"


# -- kernels -------------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """What a launch reads, and what of the caches it may."""

    q: Any
    gate: Any
    keys: Any  # fp32 [n, kv, D], by number
    values: Any


def given(attention: GlobalAttention, step: Step, seed: int) -> Given:
    import torch

    g = torch.Generator().manual_seed(seed)
    heads, kv = attention.heads, attention.kv_heads
    n = step.context + step.tokens

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=g).bfloat16()

    loud = torch.logspace(-1, 0.7, step.tokens * heads)[torch.randperm(step.tokens * heads, generator=g)]
    q = (draw(step.tokens, heads, D) * loud.view(step.tokens, heads, 1)).bfloat16()
    return Given(q.flatten(1), draw(step.tokens, heads * D), draw(n, kv, D), draw(n, kv, D))


def expected(attention: GlobalAttention, x: Given, step: Step) -> Any:
    """In fp64, a token and a head at a time. [tokens, heads * D]"""
    import torch

    group = attention.heads // attention.kv_heads
    rows = []
    for i in range(step.tokens):
        own = [step.context + j for j in range(step.tokens) if step.ancestors[i] >> j & 1]
        seen = [*range(step.context), *own]
        for h in range(attention.heads):
            q = x.q[i, h * D : h * D + D].double()
            w = torch.softmax(x.keys[seen, h // group].double() @ q * attention.scale, 0)
            y = w @ x.values[seen, h // group].double()
            y = y / torch.sqrt(y.square().mean() + attention.eps)
            rows.append(y * torch.sigmoid(x.gate[i, h * D : h * D + D].double()))
    return torch.stack(rows).view(step.tokens, -1)


class Bench:
    """A kernel of attention alone in a world, with room for what it reads."""

    def __init__(self, made: Plan, attention: GlobalAttention, **world: Any) -> None:
        import torch

        library = compile_library(emit(made), kernels=[made.name], settings=Settings.from_env())
        self.world = World(made, library, live=1, layers=2, **world)
        (self.rank,) = self.world.ranks
        shapes = {p.name: p.shape for p in made.params if p.what == "input"}
        zeros = {n: torch.zeros(shape, dtype=torch.bfloat16) for n, shape in shapes.items()}
        self.layer = self.rank.bind(zeros)
        self.attention = attention

    def launch(self, x: Given, step: Step) -> Any:
        """``out``. What is not seen is NaN."""
        import torch

        to = self.layer.tensors
        capacity = self.attention.capacity
        keys, values = (
            torch.cat([c, torch.full((capacity - len(c), *c.shape[1:]), torch.nan, dtype=c.dtype)]).transpose(0, 1)
            for c in (x.keys, x.values)
        )
        for name, value in (
            ("q", x.q), ("gate", x.gate), ("keys", caches.keys(keys)), ("values", caches.values(values)),
        ):  # fmt: skip
            with self.rank.writing(to[name]):
                (to[name][: step.tokens] if name in ("q", "gate") else to[name]).copy_(value)
        self.rank.set_step(step)
        self.world.launch([self.layer])
        self.world.synchronize()
        assert not self.rank.leftovers()
        return to["out"][: step.tokens].clone()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(attention: GlobalAttention | None = None, *, seed: int = 0, race: bool = True, **more: Any) -> Bench:
        attention = attention or op()
        expire = more.pop("expire", False)
        made.append(Bench(plan(attention, **more), attention, seed=seed, race=race, expire=expire))
        return made[-1]

    yield make
    for b in made:
        b.world.close()


def close(found: Any, want: Any) -> None:
    error = (found.double() - want).abs()
    assert found.isfinite().all()
    assert error.max() < 0.04, error.max()
    assert error.square().mean().sqrt() < 0.004, error.square().mean().sqrt()


STEPS_RUN = [
    Step.chain(1), Step.chain(16), Step.random_tree(9, 1, 1), Step.chain(2, 63), Step.chain(16, 255),
    Step.chain(1, 256), Step.random_tree(16, 300, 2), Step.chain(5, 707), Step.chain(16, 1024 - 16),
]  # fmt: skip


@pytest.mark.parametrize("together", [False, True], ids=["warps", "warpgroups"])
@pytest.mark.parametrize("sync", SYNCS)
def test_attention(bench: Callable[..., Bench], sync: str, together: bool) -> None:
    """Across the borders of chunks and spans; launch after launch, so that whatever is emptied is used again."""
    b = bench(sync=sync, seed=3, together=together)
    for i, step in enumerate(STEPS_RUN if sync == "by reader" else STEPS_RUN[2:8:2]):
        x = given(b.attention, step, i)
        close(b.launch(x, step), expected(b.attention, x, step))


@pytest.mark.parametrize(("heads", "kv_heads", "blocks"), [(2, 2, 1), (4, 2, 7), (4, 1, 2), (24, 3, 12)], ids=str)
def test_other_groups(bench: Callable[..., Bench], heads: int, kv_heads: int, blocks: int) -> None:
    """By warps and by warpgroups, of which some have no head: the same bits, as far as the emulator has them."""
    import torch

    found = []
    for together in (False, True):
        b = bench(op(heads, kv_heads, 640), blocks=blocks, sync="counter", stages=2, together=together)
        step = Step.random_tree(7, 500, heads)
        x = given(b.attention, step, heads)
        found.append(b.launch(x, step))
        close(found[-1], expected(b.attention, x, step))
    assert torch.equal(*(x.view(torch.int16) for x in found))


def test_longer_spans(bench: Callable[..., Bench]) -> None:
    """Past the 64 short ones; units of two sizes and a cut one."""
    b = bench(op(2, 1, 17 * 1024), blocks=40)
    step = Step.chain(2, 16384 + 512 + 70)
    x = given(b.attention, step, 5)
    close(b.launch(x, step), expected(b.attention, x, step))


@pytest.mark.parametrize("context", [248, 115])
def test_a_chains_bits_depend_on_neither_launch_nor_row(bench: Callable[..., Bench], context: int) -> None:
    """Sixteen tokens together, or one a launch, or some of them: the same bits."""
    import torch

    b = bench(seed=context, race=False)
    step = Step.chain(16, context)
    x = given(b.attention, step, 7)
    together = b.launch(x, step)
    for first, tokens in [(3, 9), *((i, 1) for i in range(16))]:
        end = first + tokens
        part = Given(x.q[first:end], x.gate[first:end], x.keys[: context + end], x.values[: context + end])
        alone = b.launch(part, Step.chain(tokens, context + first))
        assert torch.equal(alone.view(torch.int16), together[first:end].view(torch.int16)), (first, tokens)


def test_bits_depend_on_no_placement(bench: Callable[..., Bench]) -> None:
    import torch

    step = Step.random_tree(11, 420, 4)
    x = given(op(), step, 8)
    first, *others = (
        bench(blocks=blocks, stages=stages, race=False).launch(x, step) for blocks, stages in ((1, 6), (3, 2), (32, 3))
    )
    for other in others:
        assert torch.equal(first.view(torch.int16), other.view(torch.int16))


def test_what_is_not_finite_hangs_nothing(bench: Callable[..., Bench]) -> None:
    import torch

    b = bench()
    step = Step.chain(2, 130)
    word = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)
    for name in ("q", "values", "keys"):
        x = given(b.attention, step, 9)
        getattr(x, name)[1] = word
        assert b.launch(x, step)[1].isnan().any(), name


@pytest.mark.parametrize("together", [False, True], ids=["warps", "warpgroups"])
def test_a_launch_that_is_given_up_at_any_moment_ends(bench: Callable[..., Bench], together: bool) -> None:
    """Of a warpgroup all four warps leave, and with no product under way: the emulator would say so."""
    given_up = 0
    step = Step.chain(3, 600)
    for seed in range(12 if together else 4):
        b = bench(seed=seed, expire=Expire.ANY, together=together)
        x = given(b.attention, step, seed)
        try:
            b.launch(x, step)
        except HangError:
            given_up += 1
            b.world.recover()
            b.world.synchronize()
    assert given_up


@pytest.mark.parametrize(("following", "context"), [("sliding", 250), ("global", 63)])
def test_in_a_layer(emulate: Any, following: str, context: int) -> None:
    """Before the weights in the ring; the launch's end writes a cache of either kind."""
    options = {"positions": 384, "following": following, **small(2)}
    kernel = emulate("muse_global.py", ranks=2, seed=context, race=True, options=options)
    kernel.check(tokens=3, context=context, tree=True, route_override=few(3))


# -- faults --------------------------------------------------------------------------------------------------------

OWN, TILE = "megagen/ops/global_attention.cuh", "megagen/ops/attention_tile.cuh"
RING = "megagen/sync/ring.cuh"
NUMBERS, FAULT = AssertionError, EmulationError
FAULTS: dict[str, tuple[str, str, str, type[Exception]]] = {
    "sums are not brought to the new largest score": (OWN, "sums.o[n][e] *= keep;", ";", NUMBERS),
    "their weights are not": (OWN, "sums.weights[e] *= keep;", ";", NUMBERS),
    "no guard where nothing is seen yet": (TILE, "now == most ? 1.0f : ptx::exp2", "ptx::exp2", NUMBERS),
    "launch tokens all see each other": (OWN, "if (edge) hide(ctx, rows, after, next);", ";", NUMBERS),
    "those of a span's first chunk do": (
        OWN, "if (start + kKeyChunk > ctx.context) hide(ctx, rows, start, even);", ";", NUMBERS,
    ),
    "values past the end": (OWN, "end = ctx.context + ctx.tokens;", "end = ~0u;", NUMBERS),
    "values past the end of half a chunk": (OWN, "before(start + half * 32, end)", "before(start, end)", NUMBERS),
    "a mask's second half": (OWN, "rows.ancestors[h], start + half * 32)", "rows.ancestors[h], start)", NUMBERS),
    "another word of the queries": (TILE, "word[i] = t < 2 ? low : high;", "word[i] = low;", NUMBERS),
    "two lanes do not swap their dims": (OWN, "o[n][i] = odd ? got : o[n][i];", ";", NUMBERS),
    "keys for values": (OWN, "(ctx), values = stage + kSideBytes;", "(ctx), values = stage;", NUMBERS),
    "keys of the chunk before": (OWN, "stage + kChunkBytes, odd, sums", "stage, odd, sums", NUMBERS),
    "scores of a stage that has not come": (
        RING, "return Full::wait(ctx, next.slot, next.phase);", "return true;", FAULT,
    ),
    "one half of the spans": (TILE, "x[e] += __shfl_xor_sync(kFullMask, x[e], 16);", ";", NUMBERS),
    "one warp's sums for those of four": (TILE, "from + w * (kHeadDim * 4)", "from", NUMBERS),
    "warps that merge do not meet": (TILE, "if (!meeting.agree(ctx, ok)) return;", "if (!ok) return;", FAULT),
    "units step over a head": (OWN, "if (++head == kKvHeads) head = 0, --span;", "--span;", FAULT),
    "a stage is handed back before it is read": (
        OWN, "const u32 stage = Ctx::Ring::stage(ctx),",
        "Ctx::Ring::Empty::arrive(ctx, ctx.ring.slot);\n            const u32 stage = Ctx::Ring::stage(ctx),", FAULT,
    ),
    "dead spans are not counted": (OWN, "done = idle.last - idle.first;", "done = 0;", FAULT),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    header, old, new, kind = FAULTS[name]
    texts = dict(resources.headers())
    assert texts[header].count(old) == 1, name
    texts[header] = texts[header].replace(old, new)
    types = "megagen/types.cuh"  # the first one: without optimisation it compiles in a third of the time
    texts[types] = f'#pragma GCC optimize("O0")\n{texts[types]}'
    monkeypatch.setattr(resources, "headers", lambda: texts)
    # two stages, so that each is filled again; eps: next to nothing, the norm would hide the sum of weights
    b = bench(op(2, 2, 640, eps=0.1), sync="counter", stages=2)
    with pytest.raises(kind):
        for step in (Step.random_tree(3, 62, 3), Step.chain(2, 255), Step.chain(2, 300)):
            x = given(b.attention, step, 11)
            close(b.launch(x, step), expected(b.attention, x, step))


TOGETHER = {
    "scores of the chunk before": (OWN, "u32 keys = stage + kChunkBytes, values", "u32 keys = stage, values", NUMBERS),
    "values of the chunk before": (OWN, "values += kChunkBytes;", ";", NUMBERS),
    "the last values are left out": (
        OWN, "left_of(p), stage + kSideBytes + kChunkBytes, true", "left_of(p), stage, true", NUMBERS,
    ),
    "sums do not fade": (OWN, "fade(sums, h, bring<Op>(", "fade(sums, h, 0 * bring<Op>(", NUMBERS),
    "core matrices in another order": (OWN, "kBytes, kTiles * kBytes);", "kTiles * kBytes, kBytes);", NUMBERS),
    "values are not waited for": (
        OWN, "ptx::wgmma_wait<0>();\n            ptx::wgmma_pin(sums.o);", "ptx::wgmma_pin(sums.o);", FAULT,
    ),
    "scores are not waited for": (OWN, "ptx::wgmma_wait<1>();", "ptx::wgmma_wait<2>();", FAULT),
    "no fence before the products": (OWN, "            ptx::wgmma_fence();\n", "", FAULT),
    "a stage is handed back before its values are read": (
        OWN, "            ptx::wgmma_wait<1>();",
        "            if (crosses) Ctx::Ring::Empty::arrive(ctx, ctx.ring.slot);\n"
        "            ptx::wgmma_wait<1>();", FAULT,
    ),
    "one stage too many by warpgroups": (OWN, "(ctx.context - start) / kNumbers", "1 + left / kStageChunks", NUMBERS),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_faults_of_warpgroups_are_found(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    header, old, new, kind = TOGETHER[name]
    texts = dict(resources.headers())
    assert texts[header].count(old) == 1, name
    texts[header] = texts[header].replace(old, new)
    types = "megagen/types.cuh"
    texts[types] = f'#pragma GCC optimize("O0")\n{texts[types]}'
    monkeypatch.setattr(resources, "headers", lambda: texts)
    b = bench(op(2, 2, 640, eps=0.1), sync="counter", stages=2, together=True)
    with pytest.raises(kind):
        for step in (Step.chain(2, 255), Step.chain(2, 300), Step.chain(3, 520)):
            x = given(b.attention, step, 11)
            close(b.launch(x, step), expected(b.attention, x, step))


def test_warps_of_a_group_leave_together(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the vote some of four warps would make a product alone, and the GPU would hang."""
    texts = dict(resources.headers())
    for old in ("ok && Ctx::Ring::acquire(ctx)", "Ctx::Ring::acquire_next(ctx, keys)"):
        assert texts[OWN].count(f"meeting.agree(ctx, {old})") == 1
        texts[OWN] = texts[OWN].replace(f"meeting.agree(ctx, {old})", f"({old})")
    monkeypatch.setattr(resources, "headers", lambda: texts)
    found = ""
    for seed in range(24):
        b = bench(seed=seed, expire=Expire.ANY, together=True)
        try:
            b.launch(given(b.attention, Step.chain(3, 600), seed), Step.chain(3, 600))
        except HangError:
            continue
        except EmulationError as e:
            found += e.render()
    assert "product" in found


# -- schedules and plans ---------------------------------------------------------------------------------------------


def test_what_a_schedule_may_say_of_its_stream() -> None:
    s = schedule(op())
    s.in_flight(64 * KiB, during=s.graph.attention)
    s.hint(s.graph.attention, evict_first)
    made = lower(s)
    check(made)
    stream = made.op("attention").stream
    assert stream is not None
    assert (stream.weight, stream.tensors, stream.stage_bytes) == ("", ("keys", "values"), 32 * KiB)
    steps = next(p.steps for p in made.kernels[0].programs if p.first == 0)
    assert [s.call for s in steps] == ["load", "attach", "drain"]  # it waits by itself
    assert steps[0].args == (0, 1024, 2)
    assert made.ring.consumers == 8
    assert "GlobalAttention<policy::Attention>::load<0, 1024, 2>(ctx)" in emit(made)
    assert "kStageBytes = 32768, kHint = 1" in emit(made)


def test_two_stages_are_held_at_once() -> None:
    with pytest.raises(CheckError, match="attention holds two stages at once, and the ring has 1") as e:
        check(lower(schedule(op(), stages=1)))
    assert e.value.loc is not None
    assert e.value.loc.file == __file__


def test_warpgroups_are_for_who_has_them() -> None:
    s = schedule(op(), together=True)
    assert lower(s).op("attention").constants["kWarpgroups"] == 1
    assert lower(schedule(op())).op("attention").constants["kWarpgroups"] == 0
    with pytest.raises(ScheduleError, match=r"warpgroups of attention\.attend is said twice"):
        s.warpgroups(s.graph.attention.attend)
    for other in (s.graph.attention.merge, s.graph.attention):
        with pytest.raises(ScheduleError, match="has no products of a warpgroup") as e:
            s.warpgroups(other)
        assert e.value.hint == "of this graph: g.attention.attend"
    g = graph(op())
    blackwell = Schedule("attention_alone", g, machines.load("b200"), warps=12, blocks=3)
    with pytest.raises(ScheduleError, match="b200 is sm_100a, and only sm_90a has wgmma") as e:
        blackwell.warpgroups(blackwell.graph.attention.attend)
    assert e.value.loc is not None


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1), (16, 2)])
def test_the_compiler_lets_products_overlap(heads: int, kv_heads: int) -> None:
    """It says so where it does not; and warps without a head come to the same machine instructions as the others."""
    text = emit(plan(op(heads, kv_heads), together=True))
    made = compile_source(text, kernels=["attention_alone"], archs=["sm_90a"], settings=Settings.from_env())
    kernel = made["sm_90a"].kernels["attention_alone"]
    assert kernel.mma is not None and kernel.mma["HGMMA.64x64x16.F32.BF16"] == 16
    assert (kernel.warnings, kernel.spill_store_bytes) == ((), 0)


def test_nothing_of_it_is_prefetched() -> None:
    s = schedule(op())
    with pytest.raises(ScheduleError, match="earlier launches have written") as e:
        s.prefetch(s.graph.attention, s.rings[0])
    assert e.value.hint == "only weights are prefetched"
    with pytest.raises(UnknownName, match="no weight or role 'weight'"):
        s.prefetch(s.graph.attention.weight, s.rings[0])


def changed(made: Plan, change: Callable[[list[StepPlan]], list[StepPlan]]) -> Plan:
    """The plan with another program for its producer."""
    (kernel,) = made.kernels
    programs = tuple(
        p.model_copy(update={"steps": tuple(change(list(p.steps)))}) if any(s.call == "load" for s in p.steps) else p
        for p in kernel.programs
    )
    return made.model_copy(update={"kernels": (kernel.model_copy(update={"programs": programs}),)})


def arguments(*args: int) -> Callable[[list[StepPlan]], list[StepPlan]]:
    return lambda steps: [s.model_copy(update={"args": args}) if s.call == "load" else s for s in steps]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s[:-1], "no drain after them"),
        (lambda s: s[1:], "attention.load is on warp 0"),
        (arguments(0, 512, 3), "a share of tensors"),
        (arguments(0, 1024, 0), "loads nothing"),
        (arguments(0, 1024), "needs 3 arguments"),
    ],
)  # fmt: skip
def test_programs_that_are_refused(change: Any, says: str) -> None:
    with pytest.raises(CheckError, match=says):
        check(changed(plan(op()), change))


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ({"tensors": ("keys",)}, "not the inputs that its producer reads"),
        ({"stage_bytes": 24 * KiB}, "no equal parts of whole stages"),
        ({"weight": "keys", "tensors": ()}, "no matrix of the plan"),
    ],
)  # fmt: skip
def test_streams_that_are_refused(update: dict[str, Any], says: str) -> None:
    made = plan(op())
    attention = made.op("attention")
    assert attention.stream is not None
    other = attention.model_copy(update={"stream": attention.stream.model_copy(update=update)})
    with pytest.raises(CheckError, match=says):
        check(made.model_copy(update={"ops": (other,)}))
