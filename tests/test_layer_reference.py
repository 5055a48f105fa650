"""The whole layer's reference against transformers' own decoder layers: attention to the next layer's heads."""

from __future__ import annotations

from typing import NamedTuple

import caches as laid
import pytest
import torch
from small_models import Pass, block_output, cast, draw, layer_in, small_model

from megagen.bench.inputs import get, put
from megagen.models.muse_spark import MuseSparkConfig, cache_chunks, sliding_layer
from megagen.ops.attention import CHUNK
from megagen.ops.compare import measure
from megagen.ops.reference import evaluate

modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")

CONFIG = MuseSparkConfig(
    hidden=2048, moe_hidden=2048, intermediate=512, experts=16, layers=2, heads=16, kv_heads=2, window=128
)
CHUNKS = cache_chunks(CONFIG.window)
POSITIONS = 512
CHAIN = [i - 1 for i in range(16)]
TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 5, 8]  # each token's parent


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Two workers with a thread a core each would spend their time waiting for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = small_model(CONFIG, sliding=True)
    draw(made)
    for layer in made.model.language_model.layers:
        torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.05)
    return made.model.language_model


class Launch(NamedTuple):
    """The tokens of a launch after ``context`` committed ones, and what sees what in the whole sequence."""

    context: int
    positions: torch.Tensor  # int64 [n]
    visible: torch.Tensor  # bool [n, n]
    ancestors: torch.Tensor  # bool [t, t]

    @property
    def tokens(self) -> int:
        return len(self.ancestors)


def launch(context: int, parents: list[int]) -> Launch:
    t = len(parents)
    ancestors, depth = torch.eye(t, dtype=torch.bool), [0] * t
    for i, parent in enumerate(parents):
        if parent >= 0:
            ancestors[i] |= ancestors[parent]
            depth[i] = depth[parent] + 1
    number = torch.arange(context + t)
    positions = torch.cat([number[:context], context + torch.tensor(depth)])
    visible = (number <= number[:, None]) & (number + CONFIG.window > positions[:, None])
    visible[context:, context:] = ancestors
    return Launch(context, positions, visible, ancestors)


def slot(number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(chunk, place) of cache numbers in the ring."""
    return number // CHUNK % CHUNKS, number % CHUNK


def caches(run: Launch, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With every key that a token of the launch can see, NaN elsewhere."""
    keys = k.new_full((CONFIG.kv_heads, CHUNKS, CHUNK, CONFIG.head_dim), torch.nan)
    values = keys.clone()
    first = max(0, run.context + 1 - CONFIG.window)
    chunk, place = slot(torch.arange(first, run.context + run.tokens))
    keys[:, chunk, place], values[:, chunk, place] = k[first:].transpose(0, 1), v[first:].transpose(0, 1)
    return laid.keys(keys.flatten(1, 2)), laid.values(values.flatten(1, 2))


def rotary_table() -> torch.Tensor:
    angle = torch.arange(POSITIONS)[:, None].float() * (1 / CONFIG.rope_theta ** (torch.arange(0, 64, 2) / 64))
    return torch.cat([angle.cos(), angle.sin()], 1)


def passes(model, dtype: torch.dtype, run: Launch, stream: torch.Tensor) -> tuple[Pass, Pass]:
    """What both layers make of the sequence; the second of the launch's own tokens only, which is all that its queries,
    gates, keys and values depend on."""
    first = layer_in(model.layers[0], dtype, stream, run.positions, run.visible)
    own = slice(run.context, None)
    return first, layer_in(model.layers[1], dtype, first.stream[own], run.positions[own], run.ancestors)


def environment(graph, model, run: Launch, stream: torch.Tensor, first: Pass):
    states = [layer.state_dict() for layer in model.layers]
    own = slice(run.context, None)
    keys, values = caches(run, first.k, first.v)
    return {
        "stream": stream[own], "q": first.q[own], "gate": first.gate[own], "k_cache": keys, "v_cache": values,
        "rotary": rotary_table(), "context": run.context, "positions": run.positions[own], "ancestors": run.ancestors,
        "route_override": first.ids[own],  # transformers leaves the order of slots open
    } | {
        w.name: torch.cat([states[w.next_layer][name] for name in w.names]) for w in graph.weights().values()
    }  # fmt: skip


def layer_graph(tp: int = 1, **more):
    return sliding_layer(tp, experts="bf16", positions=POSITIONS, config=CONFIG, **more)


def sequence(run: Launch) -> torch.Tensor:
    g = torch.Generator().manual_seed(run.context)
    return torch.randn(run.context + run.tokens, CONFIG.hidden, generator=g).bfloat16().float()


def wanted(run: Launch, first: Pass, second: Pass) -> dict[str, torch.Tensor]:
    """By the names that :func:`evaluate` gives; of the next layer's caches the rows written."""
    own = slice(run.context, None)
    return {
        "attended": first.attended[own], "stream_out": first.stream[own], "next_q": second.q,
        "next_gate": second.gate, "next_k_cache": second.k.flatten(1), "next_v_cache": second.v.flatten(1),
    }  # fmt: skip


def row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return measure(got, want).worst_row


# before, at and past the window; chunks half full, just full, just begun; the ring gone round
CONTEXTS = [0, 1, 63, 64, 112, 127, 128, 129, 250, 300]
LAUNCHES = [(c, CHAIN[:t]) for c, t in zip(CONTEXTS, [16, 1, 2, 16, 16, 3, 1, 16, 16, 16], strict=True)]
LAUNCHES += [(c, TREE) for c in (0, 60, 125, 300)]
IDS = [f"{c}-{'tree' if p is TREE else f'chain{len(p)}'}" for c, p in LAUNCHES]


def same_in_fp32(model, run: Launch, graph) -> None:
    stream = sequence(run)
    first, second = passes(model, torch.float32, run, stream)
    got = evaluate(graph, environment(graph, model, run, stream, first), torch.float32)
    for name, value in wanted(run, first, second).items():
        assert got[name].dtype is torch.float32
        assert row_error(got[name], value) < 1e-5, name


@pytest.mark.parametrize(("context", "parents"), LAUNCHES, ids=IDS)
def test_fp32_equals_transformers(model, context, parents):
    same_in_fp32(model, launch(context, parents), layer_graph())


def test_the_result_is_the_whole_world_s_however_many_ranks_there_are(model):
    same_in_fp32(model, launch(300, TREE), layer_graph(2))


def test_a_next_layer_without_rotations(model, monkeypatch):
    monkeypatch.setattr(model.config, "layer_rope_theta", [CONFIG.rope_theta, 0])
    same_in_fp32(model, launch(300, TREE), layer_graph(following="global"))


def after_attention(layer, attended: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(stream out, experts): the rest of MuseSparkTextDecoderLayer.forward on the launch's rows alone."""
    ids = []
    hook = layer.mlp.gate.register_forward_hook(lambda m, args, out: ids.append(out[2]))
    hidden = layer.post_attention_layernorm(layer.self_attn.o_proj(attended[None]))
    out = block_output(layer, layer.post_attention_residual_gate(rows[None], hidden))[0]
    hook.remove()
    return out, ids[0]


@pytest.mark.parametrize(("context", "parents"), LAUNCHES, ids=IDS)
def test_bf16_equals_transformers_bit_for_bit(model, context, parents):
    """Attention within a rounding here and there, since its sums may run over other keys that count for nothing; from
    what it gave to the end, all bits, on as many rows as the launch has: torch sums more rows in another order."""
    run, graph = launch(context, parents), layer_graph()
    own, stream = slice(run.context, None), sequence(run)
    first, second = passes(model, torch.bfloat16, run, stream)
    env = environment(graph, model, run, stream, first)
    whole = wanted(run, first, second)
    attended = graph.op("attention").reference(env, torch.bfloat16)["attended"]
    assert (attended == whole["attended"]).float().mean() > 0.99
    assert row_error(attended, whole["attended"]) < 2e-3
    out, ids = after_attention(model.layers[0], attended, stream[own].bfloat16())
    second = layer_in(model.layers[1], torch.bfloat16, out, run.positions[own], run.ancestors)
    got = evaluate(graph, env | {"route_override": ids}, torch.bfloat16)
    for name, value in (wanted(run, first, second) | {"attended": attended, "stream_out": out}).items():
        assert got[name].dtype is torch.bfloat16
        assert torch.equal(got[name], value), name
    if torch.equal(ids, first.ids[own]):  # else a score's rounding chose another expert
        for name, value in whole.items():
            assert row_error(got[name], value) < 1e-2, name


def test_what_no_token_sees_does_not_matter(model):
    """Unseen slots hold NaN in every test here; this one shows that seen ones matter: the first in the window."""
    run = launch(200, CHAIN)
    graph, stream = layer_graph(), sequence(run)
    first, _ = passes(model, torch.float32, run, stream)
    env = environment(graph, model, run, stream, first)
    clean = evaluate(graph, env, torch.float32)["attended"]
    first_seen = [200 + 1 - CONFIG.window]
    put(env["v_cache"], first_seen, get(env["v_cache"], first_seen).unflatten(1, (CONFIG.kv_heads, -1)) + 1)
    moved = evaluate(graph, env, torch.float32)["attended"]
    assert not torch.equal(moved[0], clean[0])
    assert torch.equal(moved[1:], clean[1:])


def test_layers_in_a_row_are_the_model(model):
    """The masks, rotations and layers that the tests here put together are those of transformers' text model."""
    run = launch(180, CHAIN)
    rows = stream = sequence(run)
    for layer in model.layers:
        rows = layer_in(layer, torch.float32, rows, run.positions, run.visible).stream
    for layer in model.layers:
        cast(layer, torch.float32)
    want = model(inputs_embeds=stream[None]).last_hidden_state[0]
    assert row_error(model.norm(rows), want) < 1e-5
    assert not torch.equal(run.visible, torch.ones_like(run.visible).tril())  # the window hides some
