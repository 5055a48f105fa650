"""What a launch works on beside weights: steps, random inputs, caches judged slot by slot, and layers in a row."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagen.bench.inputs import Inputs, get, put, random_stream
from megagen.bench.routes import routes
from megagen.bench.verify import Verifier, same_bits
from megagen.errors import DeviceError, MegagenError
from megagen.ir.graph import DType, Graph, Scope, Shard, Tensor, TensorKind, Weight
from megagen.models.muse_spark import MuseSparkConfig, expert_block
from megagen.ops.attention import Attention, held
from megagen.ops.dense_gemm import DenseGemm
from megagen.ops.qkv_heads import QkvHeads, rotary
from megagen.ops.reference import evaluate
from megagen.ops.residual import Residual
from megagen.runtime import params
from megagen.runtime.step import Step
from megagen.weights.random import random_layer, world_env

CPU = torch.device("cpu")

# -- steps -----------------------------------------------------------------------------------------------------


def test_words_of_a_chain() -> None:
    words = Step.chain(3, 100).words()
    assert len(words) == params.CONTROL_WORDS == 64
    assert {i: w for i, w in enumerate(words) if w} == {
        0: 3, 1: 100, 16: 100, 17: 101, 18: 102, 32: 0b001, 33: 0b011, 34: 0b111,
    }  # fmt: skip
    assert Step.chain(16).words()[16:48] == (*range(16), *((2 << i) - 1 for i in range(16)))


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, 16)))]


@given(parents(), st.integers(0, 5000))
@settings(deadline=None)
def test_a_token_sees_its_ancestors(parents: list[int], context: int) -> None:
    step = Step.tree(parents, context)
    for i in range(len(parents)):
        path = [i]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        assert step.visible()[i].nonzero().flatten().tolist() == sorted(path)
        assert step.positions[i] == context + len(path) - 1
    assert step == Step(step.tokens, context, step.positions, step.ancestors)
    assert step.words()[32 : 32 + step.tokens] == step.ancestors
    assert step.is_chain == all(p == i - 1 for i, p in enumerate(parents))


def test_random_trees_differ_by_seed() -> None:
    trees = {Step.random_tree(16, 7, seed) for seed in range(5)}
    assert len(trees) == 5
    assert Step.random_tree(16, 7, 3) == Step.random_tree(16, 7, 3)
    assert Step.random_tree(1, 7) == Step.chain(1, 7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Step.chain(0), lambda: Step.chain(17), lambda: Step.chain(1, -1), lambda: Step.chain(1, 1 << 31),
        lambda: Step.tree([0]), lambda: Step.tree([-1, 1]), lambda: Step.tree([-1, -2]), lambda: Step.tree([]),
        lambda: Step(2, 0, (0,), (1, 3)), lambda: Step(2, 0, (0, 1), (1,)),
        lambda: Step(2, 0, (0, 1), (1, 1)),  # does not see itself
        lambda: Step(2, 0, (0, 1), (3, 3)),  # sees a later one
        lambda: Step(3, 0, (0, 0, 2), (1, 2, 7)),  # sees two of which neither sees the other
        lambda: Step(3, 0, (0, 1, 1), (1, 3, 6)),  # sees its parent and not what that sees
        lambda: Step(2, 5, (5, 5), (1, 3)), lambda: Step(1, 5, (0,), (1,)),  # stands elsewhere
    ],
)  # fmt: skip
def test_impossible_steps(make: Callable[[], object]) -> None:
    with pytest.raises(DeviceError):
        make()


# -- a layer made by hand: attention, a projection of it, and the next layer's heads ---------------------------------

WINDOW, HIDDEN, TP, TOKENS = 40, 2048, 2, 6
HEADS, KV, DIM, CHUNKS = 8, 1, 64, 3


class NaiveAttention(Attention):
    """Plain softmax over the numbers that a token sees, times the gate; no norm."""

    def reference(self, env: Any, dtype: Any) -> dict[str, torch.Tensor]:
        context, positions, ancestors = env["context"], env["positions"], env["ancestors"]
        t = len(positions)
        numbers = range(max(0, context + 1 - self.window), context + t)
        q = env[self.inputs["q"]].to(dtype).view(t, -1, self.head_dim)
        k, v = (
            get(env[self.inputs[p]], numbers).to(dtype).view(len(numbers), -1, self.head_dim)
            for p in ("keys", "values")
        )
        share = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,nhd->thn", q, k.repeat_interleave(share, 1)).float() * self.scale
        seen = torch.tensor(
            [
                [
                    n + self.window > int(positions[i]) if n < context else bool(ancestors[i, n - context])
                    for n in numbers
                ]
                for i in range(t)
            ]
        )
        weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1).to(dtype)
        out = torch.einsum("thn,nhd->thd", weights, v.repeat_interleave(share, 1)).flatten(1)
        return {self.outputs["out"]: (out * env[self.inputs["gate"]].to(dtype).sigmoid()).to(dtype)}


class NaiveHeads(QkvHeads):
    """Parts the projection; q and k turned by the angle of their position's first pair only."""

    def reference(self, env: Any, dtype: Any) -> dict[str, torch.Tensor]:
        y = env[self.inputs["partials"]].to(dtype)
        ranks = y.shape[1] // ((2 * self.heads + 2 * self.kv_heads) * DIM)
        sizes = [ranks * n * DIM for n in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
        q, k, v, gate = y.split(sizes, 1)
        cos = env[self.inputs["rotary"]][env["positions"], :1]
        made = {"q": q * cos, "keys": k * cos, "values": v, "gate": gate}
        return {self.outputs[port]: x.to(dtype) for port, x in made.items()}


def layer(tp: int = TP) -> Graph:
    t, width = TOKENS, HEADS * DIM
    given, kept, made = TensorKind.INPUT, TensorKind.STATE, TensorKind.OUTPUT
    fp32 = DType.FP32
    rows = (width, KV * DIM, KV * DIM, width)
    k_shape, v_shape = (KV, CHUNKS * 64, DIM), (KV, CHUNKS, DIM, 64)

    def tensor(name: str, *shape: int, dtype: DType = DType.BF16, **more: Any) -> Tensor:
        return Tensor(name=name, shape=shape, dtype=dtype, **more)

    tensors = (
        tensor("stream", t, HIDDEN, dtype=fp32, kind=given),
        tensor("q", t, width, kind=given, shard_axis=1), tensor("gate", t, width, kind=given, shard_axis=1),
        tensor("k_cache", *k_shape, kind=given, shard_axis=0), tensor("v_cache", *v_shape, kind=given, shard_axis=0),
        tensor("rotary", 512, DIM, dtype=fp32, kind=given),
        tensor("attention_partials", CHUNKS, HEADS, t, 68, dtype=fp32), tensor("attended", t, width),
        tensor("projected", tp, t, HIDDEN, scope=Scope.WORLD, reduce=True),
        tensor("stream_out", t, HIDDEN, dtype=fp32, kind=made), tensor("normed", t, HIDDEN),
        tensor("next_partials", 2, sum(rows) // 16, t, 16, dtype=fp32),
        tensor("next_q", t, width, kind=made, shard_axis=1), tensor("next_gate", t, width, kind=made, shard_axis=1),
        tensor("next_k_cache", *k_shape, kind=kept, shard_axis=0),
        tensor("next_v_cache", *v_shape, kind=kept, shard_axis=0),
    )  # fmt: skip
    o_proj = Weight(
        name="o_proj_weight", rows=HIDDEN, k=width, dtype=DType.BF16, names=("o",), shard=Shard.K, local=True
    )
    qkvg = Weight(
        name="qkvg_weight", rows=sum(rows), k=HIDDEN, dtype=DType.BF16, names=("q", "k", "v", "g"), shard=Shard.ROWS,
        parts=rows, local=True,
    )  # fmt: skip

    def vector(name: str, **more: Any) -> Weight:
        return Weight(name=name, rows=HIDDEN, k=1, dtype=DType.BF16, names=(name,), **more)

    ops = (
        NaiveAttention(
            name="attention", inputs={"q": "q", "gate": "gate", "keys": "k_cache", "values": "v_cache"},
            outputs={"partials": "attention_partials", "out": "attended"}, weights={},
            heads=HEADS, kv_heads=KV, chunks=CHUNKS, window=WINDOW, scale=1 / 8, eps=1e-5,
        ),
        DenseGemm(
            name="o_proj", inputs={"in": "attended"}, outputs={"out": "projected"}, weights={"weight": o_proj},
            rows=HIDDEN, world_rows=HIDDEN, k=width, unit_k=width,
        ),
        Residual(
            name="residual", inputs={"in": "projected", "stream": "stream"},
            outputs={"out": "stream_out", "normed": "normed"},
            weights={"gate": vector("residual_gate", planes=2), "next_gain": vector("gain")},
            width=HIDDEN, eps=1e-8, temperature=0.3, clamp=1e-3, parts=tp, next_eps=1e-5,
        ),
        DenseGemm(
            name="qkvg", inputs={"in": "normed"}, outputs={"partials": "next_partials"}, weights={"weight": qkvg},
            rows=sum(rows), world_rows=tp * sum(rows), k=HIDDEN, unit_k=1024, partials_only=True,
        ),
        NaiveHeads(
            name="heads", inputs={"partials": "next_partials", "rotary": "rotary"},
            outputs={"q": "next_q", "gate": "next_gate", "keys": "next_k_cache", "values": "next_v_cache"}, weights={},
            heads=HEADS, kv_heads=KV, chunks=2, ring=CHUNKS * 64, eps=1e-5, scale=1.0, rotate=True,
        ),
    )  # fmt: skip
    return Graph(name="by hand", tp=tp, tokens=t, ops=ops, tensors={x.name: x for x in tensors})


# -- inputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [0, 3, WINDOW - 1, WINDOW, CHUNKS * 64 - 2, 1000])
def test_caches_hold_what_may_be_seen_and_nothing_else(context: int) -> None:
    inputs = Inputs.random(layer(), 2, 5, 1, CPU, Step.chain(5, context))
    seen = {n % (CHUNKS * 64) for n in range(max(0, context + 1 - WINDOW), context + 5)}
    for values in inputs.ranks:
        for slot in range(CHUNKS * 64):
            k, v = (held(values[name], torch.tensor([slot])) for name in ("k_cache", "v_cache"))
            assert bool(k.isfinite().all()) == bool(v.isfinite().all()) == (slot in seen)
            assert bool(k.isnan().all()) == (slot not in seen)
    assert not same_bits(inputs.ranks[0]["k_cache"], inputs.ranks[1]["k_cache"])


def test_the_world_is_made_of_the_ranks_and_their_stand_ins() -> None:
    step = Step.random_tree(5, 9, 2)
    inputs = Inputs.random(layer(8), 2, 5, 1, CPU, step)
    for name, axis in (("q", 1), ("gate", 1), ("k_cache", 0), ("v_cache", 0)):
        whole, width = inputs.env[name], inputs.ranks[0][name].shape[axis]
        for rank in range(8):
            assert same_bits(whole.narrow(axis, rank * width, width), inputs.ranks[rank // 4][name])
    assert inputs.env["stream"] is inputs.stream is inputs.ranks[1]["stream"]
    assert inputs.env["context"] == 9
    assert inputs.env["positions"].tolist() == list(step.positions)
    assert torch.equal(inputs.env["ancestors"], step.visible())
    other = inputs.with_stream(torch.ones(5, HIDDEN))
    assert other.env["stream"] is other.ranks[0]["stream"] is other.stream
    assert other.ranks[0]["q"] is inputs.ranks[0]["q"]


def test_a_graph_with_a_stream_only_gets_the_same_bits_as_ever() -> None:
    graph = expert_block(8, 16, config=MuseSparkConfig(hidden=2048, moe_hidden=2048, intermediate=1024, experts=16))
    inputs = Inputs.random(graph, 2, 7, 5, CPU)
    rows = torch.randn(7, 2048, generator=torch.Generator().manual_seed(5)) * torch.logspace(-1, 1, 7).unsqueeze(1)
    assert same_bits(inputs.stream, rows)
    assert same_bits(random_stream(7, graph, 5, CPU), rows)
    assert [set(r) for r in inputs.ranks] == [{"stream"}] * 2
    assert inputs.step == Step.chain(7)
    with pytest.raises(MegagenError, match="7 tokens and a step of 3"):
        Inputs.random(graph, 1, 7, 5, CPU, Step.chain(3))


def test_some_attention_is_sharp_and_some_flat() -> None:
    inputs = Inputs.random(layer(), 1, 6, 0, CPU, Step.chain(6, 100))
    q = inputs.ranks[0]["q"].float().view(6, HEADS, DIM)
    k = get(inputs.ranks[0]["k_cache"], range(100 + 1 - WINDOW, 106)).float()
    scores = torch.einsum("thd,nd->thn", q, k) / 8
    assert 1 < scores.std() < 4
    most = scores.softmax(-1).amax(-1)
    assert most.max() > 0.8
    assert most.min() < 0.15


def test_rotations_are_those_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig

    config = MuseSparkTextConfig(rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    cos, sin = modeling.MuseSparkTextRotaryEmbedding(config)(
        torch.zeros(1, dtype=torch.float32), torch.arange(5000)[None]
    )
    assert same_bits(rotary(5000), torch.cat([cos[0, :, :32], sin[0, :, :32]], 1))


@given(st.integers(0, 10_000), st.integers(1, 16))
@settings(deadline=None, max_examples=20)
def test_what_is_put_into_a_cache_is_got_from_it(first: int, tokens: int) -> None:
    numbers = range(first, first + tokens)
    for shape in ((2, CHUNKS * 64, DIM), (2, CHUNKS, DIM, 64)):
        x, rows = torch.zeros(shape), torch.randn(tokens, 2, DIM)
        put(x, numbers, rows)
        assert torch.equal(get(x, numbers), rows.flatten(1))
        assert int((x != 0).sum()) == rows.numel()
    place = first % 64  # of values, 64 dims
    assert torch.equal(x[1, first // 64 % CHUNKS, place // 8 :: 8, place % 8 :: 8].flatten(), rows[0, 1])


# -- judging ---------------------------------------------------------------------------------------------------


class FakeRank:
    """Stands for a launch of the layer by hand: the reference in float32, rounded; this rank's part of all."""

    device = CPU

    def __init__(self, graph: Graph, env: Any, spoil: Any, rank: int = 0, live: int = 1) -> None:
        self.graph, self.env, self.spoil, self.rank, self.live = graph, env, spoil, rank, live
        self.ranks: Any = (self,)
        heap = [t for t in graph.tensors.values() if t.kind is TensorKind.INTERNAL]
        self.plan = SimpleNamespace(channels=[SimpleNamespace(name=t.name) for t in heap])
        self.outputs = {
            t.name: torch.zeros(t.shape, dtype=torch.float32 if t.dtype is DType.FP32 else torch.bfloat16)
            for t in graph.tensors.values()
            if t.kind is TensorKind.OUTPUT
        }
        self.bound: dict[str, torch.Tensor] = {}
        self.peers: list[FakeRank] = [self]

    def bind(self, tensors: Any, **more: Any) -> Any:
        self.bound = tensors
        return SimpleNamespace(tensors=tensors)

    def writing(self, tensor: torch.Tensor) -> Any:
        return nullcontext()

    def poison(self) -> None:
        for out in self.outputs.values():
            out.fill_(math.nan)

    def set_step(self, step: Step) -> None:
        self.step = step

    def set_route_override(self, table: Any) -> None:
        pass

    def launch(self, layer: Any) -> None:
        """Each rank computes the whole world, from what is bound to all."""
        step, stand_ins = self.step, self.graph.tp // self.live
        inputs = {**self.env, "context": step.context, "positions": torch.tensor(step.positions)}
        inputs["ancestors"] = step.visible()
        for name in ("stream", "rotary"):
            inputs[name] = self.bound[name][: step.tokens] if name == "stream" else self.bound[name]
        for name, axis in (("q", 1), ("gate", 1), ("k_cache", 0), ("v_cache", 0)):
            each = [p.bound[name] for p in self.peers for _ in range(stand_ins)]
            assert name.endswith("cache") or each[0][step.tokens :].isnan().all()
            inputs[name] = torch.cat([x[: step.tokens] if axis else x for x in each], axis)
        self.made = {n: x.clone() for n, x in evaluate(self.graph, inputs, torch.float32).items()}
        for port in ("q", "gate"):
            self.outputs[f"next_{port}"][: step.tokens] = self.mine(self.made[f"next_{port}"])
        self.outputs["stream_out"][: step.tokens] = self.made["stream_out"]
        for name in ("next_k_cache", "next_v_cache"):
            put(self.bound[name], step.numbers, self.mine(self.made[name]).view(step.tokens, KV, DIM).bfloat16())
        self.spoil(self)

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        width = whole.shape[1] // self.graph.tp
        at = self.rank * (self.graph.tp // self.live) * width
        return whole[:, at : at + width]

    def synchronize(self) -> None:
        pass

    def unreadable(self, channel: Any) -> str | None:
        return None

    def leftovers(self) -> list[str]:
        return []

    def read(self, name: str) -> torch.Tensor:
        t, made = self.step.tokens, self.made
        if name == "attention_partials":
            return torch.full((CHUNKS, HEADS, TOKENS, 68), math.nan)
        if name == "projected":  # most from the first rank
            x = torch.zeros(self.graph.tp, t, HIDDEN)
            x[1:] = made["projected"] * 0.1
            x[0] = made["projected"] - x[1:].bfloat16().float().sum(0)
            return torch.nn.functional.pad(x.bfloat16(), (0, 0, 0, TOKENS - t))
        if name == "next_partials":
            sizes = [n * DIM for n in (HEADS, KV, KV, HEADS)]
            parts = made[name].split([self.graph.tp * n for n in sizes], 1)
            own = torch.cat([self.mine(p) for p in parts], 1).view(t, -1, 16).transpose(0, 1)
            return torch.nn.functional.pad(torch.stack([own / 3, own * 2 / 3]), (0, 0, 0, TOKENS - t))
        x = self.mine(made[name]) if name == "attended" else made[name]
        return torch.nn.functional.pad(x.bfloat16(), (0, 0, 0, TOKENS - t))


@pytest.fixture(scope="module")
def world() -> Callable[..., Any]:
    @cache
    def weights(tp: int, live: int) -> Any:
        graph = layer(tp)
        return graph, world_env([random_layer(graph, 3, rank=r) for r in range(live)])

    def make(*spoil: Any, tp: int = TP) -> Any:
        graph, env = weights(tp, len(spoil))
        ranks = [FakeRank(graph, env, s, i, len(spoil)) for i, s in enumerate(spoil)]
        for rank in ranks:
            rank.peers = ranks
        on: Any = SimpleNamespace(ranks=ranks, synchronize=lambda: None)
        return Verifier(on, graph, [{} for _ in ranks], env)

    return make


def nothing(rank: FakeRank) -> None:
    pass


STEPS = [Step.chain(5), Step.chain(1, 77), Step.random_tree(6, 150, 1), Step.random_tree(4, 190, 2)]


@pytest.mark.parametrize("step", STEPS, ids=["at first", "one", "tree", "over the end"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_right_layer_passes_everywhere(world: Any, step: Step, tp: int) -> None:
    found = {c.name: c for c in world(nothing, nothing, tp=tp).check(step.tokens, seeds=(0, 1), step=step, launches=2)}
    assert all(found.values()), [str(c) for c in found.values() if not c]
    assert list(found) == [
        "attended", "projected", "stream_out", "normed", "next_partials", "next_q", "next_gate", "next_k_cache",
        "next_v_cache", "attention_partials", "rest of the cache", "empty slots", "ranks agree",
    ]  # fmt: skip
    assert {n for n, c in found.items() if c.skipped} == {"attention_partials"}
    assert found["next_k_cache"].verdict is not None


def test_a_lone_rank_with_stand_ins(world: Any) -> None:
    checks = world(nothing, tp=8).check(5, step=Step.chain(5, 60))
    assert all(checks), [str(c) for c in checks if not c]


@pytest.mark.parametrize("name", ["next_k_cache", "next_v_cache"])
def test_a_wrong_row_of_a_cache_is_found(world: Any, name: str) -> None:
    def spoil(rank: FakeRank) -> None:
        numbers = rank.step.numbers
        put(rank.bound[name], numbers, get(rank.bound[name], numbers).view(-1, KV, DIM).roll(1, 0))

    found = {c.name: c for c in world(nothing, spoil).check(5, step=Step.chain(5, 62))}
    assert {n for n, c in found.items() if not c} == {name}
    assert found[name].detail.startswith("rank 1: FAIL")


@pytest.mark.parametrize("slot", [65 + 64, 59])
def test_a_write_past_the_tokens_own_slots_is_found(world: Any, slot: int) -> None:
    def spoil(rank: FakeRank) -> None:
        rank.bound["next_v_cache"].view(torch.int16)[0, slot // 64, 7, slot % 64] ^= 1

    found = {c.name: c for c in world(spoil, nothing).check(4, step=Step.chain(4, 60))}
    assert {n for n, c in found.items() if not c} == {"rest of the cache"}
    assert found["rest of the cache"].detail == "next_v_cache of rank 0, seed 0 differs"


def test_slots_that_are_not_written_are_found(world: Any) -> None:
    def spoil(rank: FakeRank) -> None:
        place = rank.bound["next_k_cache"]
        put(place, [61], get(torch.randn(place.shape).bfloat16(), [61]).view(1, KV, DIM))

    assert {c.name for c in world(spoil, spoil).check(4, step=Step.chain(4, 60)) if not c} == {"next_k_cache"}


@pytest.mark.parametrize("name", ["next_q", "next_gate", "stream_out"])
def test_a_wrong_output_is_found(world: Any, name: str) -> None:
    def spoil(rank: FakeRank) -> None:
        rank.outputs[name].copy_(rank.outputs[name].roll(1, 1))

    found = {c.name for c in world(nothing, spoil).check(5, step=Step.chain(5, 62)) if not c}
    assert found == {name} | ({"ranks agree"} if name == "stream_out" else set())


def test_rows_are_the_stream_of_otherwise_random_inputs(world: Any) -> None:
    verifier = world(nothing, nothing)
    step = Step.random_tree(5, 62)
    rows = torch.randn(5, HIDDEN)
    first = verifier.launch(rows, step=step)
    assert verifier.step == step
    assert torch.equal(verifier.stream[:5], rows)
    assert first.keys() >= {"attended", "next_k_cache", "stream_out"}
    assert first["next_k_cache"].shape == (5, KV * DIM)
    again = verifier.launch(verifier.inputs(5, 0, step).with_stream(rows))
    assert all(same_bits(first[name], again[name]) for name in first)


# -- layers in a row -------------------------------------------------------------------------------------------


def test_a_stack_is_its_layers_one_by_one(emulated_kernels: Any) -> None:
    """Two launches, queued at once, and again: the bits of two that wait for each other."""
    from megagen.bench.emulation import Weights
    from megagen.cli.pipeline import Request
    from megagen.runtime.stack import Stack, handed_on

    ranks, step = 2, Step.random_tree(5, 150, 2)
    emulation = emulated_kernels.emulation(Request(Path("muse_swa.py"), tp=ranks, tiny=True), ranks, None)
    graph, pairs = emulation.graph, handed_on(emulation.plan)
    sets = [Weights.random(graph, ranks, seed).packed for seed in range(2)]
    inputs = Inputs.random(graph, ranks, 5, 0, CPU, step)
    now, few = inputs.ranks, routes(8, 5, pool=16)  # more experts would only take longer
    for index in range(2):
        with emulation.world() as world:
            verifier = Verifier(world, graph, sets[index], {})
            verifier.launch(Inputs(step, now[0]["stream"], now, inputs.env), few)
            made = [verifier.values(5, rank) for rank in world.ranks]
        now = tuple(
            {name: made[r][pairs[name]] if name in pairs else x for name, x in values.items()}
            for r, values in enumerate(inputs.ranks)
        )
        for values, first in zip(now, inputs.ranks, strict=True):
            for name in pairs.keys() & {"k_cache", "v_cache"}:
                rows, values[name] = values[name], first[name].clone()  # type: ignore[index]
                put(values[name], step.numbers, rows.view(5, -1, DIM))
    with emulation.world(seed=1, race=True, layers=8) as world:
        stack = Stack(world, sets, inputs.ranks, layers=2)
        for rank in world.ranks:
            rank.set_step(step)
            rank.set_route_override(few)
        for _ in range(2):
            stack.launch()
            world.synchronize()
            for out, want in zip(stack.outputs, now, strict=True):
                for name, made_name in pairs.items():
                    x = out[made_name]
                    cache = name.endswith("_cache")
                    got, right = (get(y, step.numbers) for y in (x, want[name])) if cache else (x[:5], want[name])
                    assert same_bits(got, right), name
        with pytest.raises(DeviceError, match="only launches on a GPU"):
            stack.capture()
        with pytest.raises(DeviceError, match="cannot be bound") as e:  # a layer does not write what it reads
            Stack(world, sets, inputs.ranks, layers=1)
        assert "lies over" in e.value.render()
