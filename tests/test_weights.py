"""Checkpoints that transformers wrote, ModelOpt NVFP4 ones, and random layers with stand-ins."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from small_models import block_output, draw, small_model

from megagen.errors import MegagenError, WeightError
from megagen.ir.graph import Shard
from megagen.models.muse_spark import MuseSparkConfig, expert_block, read_config, sliding_layer
from megagen.ops.compare import measure
from megagen.ops.packing import Nvfp4, Tiles, dequantise, stages, unpack
from megagen.ops.reference import evaluate
from megagen.weights.checkpoint import Checkpoint, load_layer, load_reference
from megagen.weights.random import random_layer, world_env, world_tensor

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

CONFIG = MuseSparkConfig(
    hidden=2048, moe_hidden=2048, intermediate=1024, experts=16, layers=2, heads=16, kv_heads=2, window=128, vocab=64
)
PREFIX = "model.language_model.layers."
SPLITS = [(1, "nn"), (2, "nn"), (4, "nn"), (8, "nn"), (1, "nk"), (2, "nk")]  # K of an NK shard is at least 512


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Two workers with a thread a core each would spend their time waiting for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def block(tp=1, split="nn", experts="bf16", tokens=16, config=CONFIG):
    return expert_block(tp=tp, tokens=tokens, split=split, experts=experts, config=config)


def whole(tp=1, experts="bf16", tokens=16, config=CONFIG):
    return sliding_layer(tp=tp, tokens=tokens, experts=experts, config=config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory, model): bf16 with fp32 router and gates, in several shards, written by save_pretrained."""
    model = small_model(CONFIG, sliding=True)
    torch.manual_seed(1)
    draw(model)
    for layer in model.model.language_model.layers:
        torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.05)
    directory = tmp_path_factory.mktemp("bf16")
    model.save_pretrained(directory, max_shard_size="30MB")
    assert (directory / "model.safetensors.index.json").exists()
    return directory, model.model.language_model


@pytest.fixture(scope="module")
def single(saved, tmp_path_factory):
    """One file with layer 1 only, small enough to be edited by tests: (directory, its tensors)."""
    tensors = {}
    for file in saved[0].glob("*.safetensors"):
        tensors |= {n: t for n, t in load_file(file).items() if n.startswith(f"{PREFIX}1.")}
    directory = tmp_path_factory.mktemp("single")
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors


@pytest.mark.parametrize(("tp", "split"), SPLITS)
def test_a_transformers_checkpoint_evaluates_like_the_model(saved, tp, split):
    directory, model = saved
    stream = torch.randn(5, CONFIG.hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
    env = {**load_reference(directory, 1, block(tp, split)), "stream": stream}
    got = evaluate(block(tp, split), env, torch.bfloat16)["stream_out"]
    assert measure(got, block_output(model.layers[1], stream)).worst_row < 1e-3  # the order of slots is open
    other = block_output(model.layers[0], stream)
    assert measure(got, other).worst_row > 0.01


@pytest.mark.parametrize(("tp", "split"), SPLITS)
def test_ranks_hold_their_slices_of_a_checkpoint(saved, tp, split):
    directory, model = saved
    graph, state = block(tp, split), model.layers[1].state_dict()
    stage = stages(graph)
    for rank in {0, tp - 1}:
        packed = load_layer(directory, 1, graph, rank)
        assert set(packed) == set(graph.weights())
        for name, w in graph.weights().items():
            want = state[w.names[0]].float()
            if w.planes == 2:  # what transformers' gate makes of a stream alone, then of an update alone
                gate = model.layers[1].get_submodule(w.names[0].removesuffix(".gate"))
                one, none = torch.ones_like(want), torch.zeros_like(want)
                want = torch.stack([gate(one, none), gate(none, one)])
            if w.gate_up:
                want = torch.cat([half.chunk(tp, 1)[rank] for half in want.chunk(2, 1)], 1)
            elif w.shard is not Shard.NONE:
                want = want.chunk(tp, -1 if w.shard is Shard.K else -2)[rank]
            if stage[name] is None:
                assert packed[name].dtype is torch.float32
                got = packed[name]
            else:
                tiles = Tiles.of(w, *stage[name])
                got = torch.stack([unpack(tiles, x) for x in packed[name].view(max(1, w.experts), -1)])
            if w.planes == 2:
                torch.testing.assert_close(got.view(want.shape), want, rtol=1e-6, atol=0)
            else:
                assert torch.equal(got.view(want.shape), want), name


def test_the_config_is_read_as_it_was_made(saved):
    assert read_config(saved[0]) == CONFIG


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_takes_its_attention_and_the_next_layers_projections(saved, tp):
    """Of the stacked projections a rank has its share of each; the whole is one matrix after the other."""
    directory, model = saved
    graph, own, following = whole(tp), model.layers[0].state_dict(), model.layers[1].state_dict()
    env, sources = load_reference(directory, 0, graph), Checkpoint(directory).open(0, graph)
    matrices = [following[f"self_attn.{name}.weight"] for name in PROJECTIONS]
    assert torch.equal(env["next_qkvg_weight"], torch.cat(matrices))
    assert torch.equal(env["next_gain"], following["input_layernorm.weight"])
    assert torch.equal(env["o_proj_weight"], own["self_attn.o_proj.weight"])
    assert torch.equal(env["attention_gate"], own["post_attention_residual_gate.gate"])
    for rank in range(tp):
        got = sources["next_qkvg_weight"].read(rank=rank)
        assert torch.equal(got, torch.cat([m.chunk(tp)[rank] for m in matrices]))
        assert got.shape == (graph.weights()["next_qkvg_weight"].rows, CONFIG.hidden)
        assert torch.equal(sources["o_proj_weight"].read(rank=rank), env["o_proj_weight"].chunk(tp, 1)[rank])


def test_progress_counts_matrices(saved):
    from rich.progress import Progress

    with Progress(disable=True) as progress:
        load_layer(saved[0], 0, block(), 0, progress=progress)
    (task,) = progress.tasks
    assert task.finished
    assert task.total == 2 * 16 + 3 + 6  # experts of two ops, dense matrices, vectors


# --- NVFP4 as ModelOpt writes it ---


@pytest.fixture(scope="module")
def nvfp4(single, tmp_path_factory):
    """(directory, tensors): layer 1 with random packed experts in the ModelOpt layout."""
    g = torch.Generator().manual_seed(3)
    tensors = {n: t for n, t in single[1].items() if "_proj" not in n or ".experts." not in n}
    c, base = CONFIG, f"{PREFIX}1.mlp.experts."
    for name, rows, k, second in (
        ("gate_up_proj", 2 * c.intermediate, c.moe_hidden, (c.experts, 2)),
        ("down_proj", c.moe_hidden, c.intermediate, (c.experts,)),
    ):
        tensors[base + name] = torch.randint(256, (c.experts, rows, k // 2), generator=g, dtype=torch.uint8)
        scales = torch.randint(0x30, 0x48, (c.experts, rows, k // 16), generator=g, dtype=torch.uint8)
        tensors[f"{base}{name}_weight_scale"] = scales.view(torch.float8_e4m3fn)
        tensors[f"{base}{name}_weight_scale_2"] = torch.rand(second, generator=g) * 0.01 + 0.005
        tensors[f"{base}{name}_input_scale"] = torch.ones(second)
    directory = tmp_path_factory.mktemp("nvfp4")
    save_file(tensors, directory / "model.safetensors")
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (directory / "hf_quant_config.json").write_text(json.dumps(config))
    return directory, tensors


def by_hand(codes, scales, factor_rows):
    """ModelOpt's format written out: low nibble first, sign in bit 3, one scale for 16 along K."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] * 2)
    out[..., 0::2], out[..., 1::2] = values[(codes % 16).long()], values[(codes // 16).long()]
    return out * scales.float().repeat_interleave(16, -1) * factor_rows


def test_nvfp4_reference_is_dequantised(nvfp4, saved):
    directory, t = nvfp4
    env = load_reference(directory, 1, block(experts="nvfp4"))
    base, half = f"{PREFIX}1.mlp.experts.", CONFIG.intermediate
    module = saved[1].layers[1].mlp.experts
    dense = {}
    for name, weight in (("gate_up_proj", "gate_up_weight"), ("down_proj", "down_weight")):
        second = t[f"{base}{name}_weight_scale_2"]
        rows = second.repeat_interleave(half, 1).unsqueeze(-1) if second.ndim == 2 else second.view(-1, 1, 1)
        dense[name] = by_hand(t[base + name], t[f"{base}{name}_weight_scale"], rows)
        for expert in (0, 7, 15):
            torch.testing.assert_close(env[weight](expert), dense[name][expert], rtol=1e-6, atol=0)
    # and the block computes what transformers computes with these weights
    layer = saved[1].layers[1].float()
    kept = {n: getattr(module, n).data for n in dense}
    try:
        for n, value in dense.items():
            getattr(module, n).data = value
        stream = torch.randn(4, CONFIG.hidden, generator=torch.Generator().manual_seed(4))
        got = evaluate(block(experts="nvfp4"), env | {"stream": stream}, torch.float32)["stream_out"]
        assert measure(got, block_output(layer, stream)).worst_row < 1e-5
    finally:
        for n, value in kept.items():
            getattr(module, n).data = value
        layer.bfloat16()
        for part in (layer.mlp.gate, layer.post_feedforward_residual_gate):
            part.float()


@pytest.mark.parametrize(("tp", "split"), SPLITS)
def test_nvfp4_ranks_hold_their_slices(nvfp4, tp, split):
    directory, t = nvfp4
    graph, rank, base = block(tp, split, "nvfp4"), tp - 1, f"{PREFIX}1.mlp.experts."
    packed = load_layer(directory, 1, graph, rank)
    gate, up = t[base + "gate_up_proj_weight_scale_2"].unbind(1)
    assert torch.equal(packed["gate_up_weight_scale"], torch.stack([gate, up], 1) * 128)
    assert torch.equal(packed["down_weight_scale"], t[base + "down_proj_weight_scale_2"].unsqueeze(1) * 128)
    for name, key in (("gate_up_weight", "gate_up_proj"), ("down_weight", "down_proj")):
        w = graph.weights()[name]
        tiles = Tiles.of(w, *stages(graph)[name])
        for expert in (0, 9, 15):
            whole = by_hand(t[base + key][expert], t[f"{base}{key}_weight_scale"][expert], 1.0)
            if w.gate_up:
                want = torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
            else:
                want = whole.chunk(tp, 1 if w.shard is Shard.K else 0)[rank]
            assert torch.equal(unpack(tiles, packed[name].view(w.experts, -1)[expert]), want)


# --- bad input ---


def edited(directory, target, **changes):
    """A copy of a single-file checkpoint with tensors replaced (None: removed); keys are below the layer."""
    tensors = load_file(directory / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(PREFIX + "1." + name)
        if value is not None:
            tensors[PREFIX + "1." + name] = value
    save_file(tensors, target / "model.safetensors")
    if (directory / "hf_quant_config.json").exists():
        shutil.copy(directory / "hf_quant_config.json", target)
    return target


def refused(directory, graph=None, layer=1, rank=0):
    with pytest.raises(WeightError) as caught:
        load_layer(directory, layer, graph or block(), rank)
    return caught.value.render()


def test_missing_misshapen_and_wrongly_typed_tensors_are_listed_together(single, tmp_path):
    text = refused(edited(single[0], tmp_path, **{
        "mlp.pre_expert_proj.weight": None,
        "mlp.experts.down_proj": torch.zeros(16, 512, 2048).bfloat16(),
        "mlp.post_expert_proj.weight": torch.zeros(2048, 2048),
        "mlp.gate.weight": torch.zeros(16, 2048, dtype=torch.float16),
    }))  # fmt: skip
    assert "layer 1: 4 things do not fit" in text
    for line in (
        "1.mlp.pre_expert_proj.weight: expected BF16 [2048, 2048], it is missing",
        "1.mlp.experts.down_proj: expected BF16 [16, 2048, 1024], found BF16 [16, 512, 2048]",
        "1.mlp.post_expert_proj.weight: expected BF16 [2048, 2048], found F32 [2048, 2048]",
        "1.mlp.gate.weight: expected F32 or BF16 [16, 2048], found F16 [16, 2048]",
    ):
        assert line in text


def test_each_part_of_the_next_layers_projections_is_named(saved, tmp_path):
    index = json.loads((saved[0] / "model.safetensors.index.json").read_text())
    base, files = f"{PREFIX}1.self_attn.", index["weight_map"]
    for file in set(files.values()):
        (tmp_path / file).symlink_to(saved[0] / file)
    del files[f"{base}k_proj.weight"], files[f"{PREFIX}1.input_layernorm.weight"]
    files[f"{base}gate_proj.weight"] = files[f"{PREFIX}0.self_attn.o_proj.weight"] = "other.safetensors"
    other = {f"{base}gate_proj.weight": (128, 2048), f"{PREFIX}0.self_attn.o_proj.weight": (1024, 2048)}
    save_file({n: torch.zeros(shape).bfloat16() for n, shape in other.items()}, tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    text = refused(tmp_path, whole(2), layer=0)
    assert "layer 0: 4 things do not fit" in text
    for line in (
        "layers.0.self_attn.o_proj.weight: expected BF16 [2048, 1024], found BF16 [1024, 2048]",
        "layers.1.input_layernorm.weight: expected BF16 or F32 [2048], it is missing",
        "layers.1.self_attn.k_proj.weight: expected BF16 [128, 2048], it is missing",
        "layers.1.self_attn.gate_proj.weight: expected BF16 [1024, 2048], found BF16 [128, 2048]",
    ):
        assert line in text


def test_the_last_layer_has_no_next_one(single):
    text = refused(single[0], whole())
    assert "layer 1: 5 things do not fit" in text
    assert "layers.2.self_attn.q_proj.weight: expected BF16 [1024, 2048], it is missing" in text
    assert "it has no layer 2, and muse_spark.sliding_layer.nn ends with the next layer's projections" in text
    assert "the last layer needs a schedule of its own" in text


def test_fp32_vectors_are_taken_as_they_are(single, tmp_path):
    gain = torch.randn(2048)
    directory = edited(single[0], tmp_path, **{"pre_feedforward_layernorm.weight": gain})
    assert torch.equal(load_layer(directory, 1, block(), 0)["pre_ffn_gain"], gain)


def test_a_layer_that_is_not_there(single):
    text = refused(single[0], layer=7)
    assert "layer 7: 11 things do not fit" in text
    assert "it has layers 1 to 1" in text


def test_bf16_experts_where_nvfp4_is_wanted_and_the_reverse(single, nvfp4):
    text = refused(single[0], block(experts="nvfp4"))
    assert "expected U8 [16, 2048, 1024], found BF16 [16, 2048, 2048]" in text
    assert "down_proj_weight_scale_2: expected F32 [16], it is missing" in text
    assert 'hf_quant_config.json: expected quant_algo "NVFP4"' in text
    assert "experts are bf16 in some layers" in text
    assert "expected BF16 [16, 2048, 2048], found U8 [16, 2048, 1024]" in refused(nvfp4[0])


@pytest.mark.parametrize("config", ['{"quantization": {"quant_algo": "FP8"}}', '{"quantization": []}', "{", "{}"])
def test_a_wrong_quantisation_config(nvfp4, tmp_path, config):
    shutil.copy(nvfp4[0] / "model.safetensors", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(config)
    assert "hf_quant_config.json" in refused(tmp_path, block(experts="nvfp4"))


@pytest.mark.parametrize("bits", [0x7F, 0xB8])
def test_scales_that_the_device_cannot_hold(nvfp4, tmp_path, bits):
    scales = nvfp4[1][f"{PREFIX}1.mlp.experts.down_proj_weight_scale"].view(torch.uint8).clone()
    scales[4, 5, 6] = bits
    name = "mlp.experts.down_proj_weight_scale"
    text = refused(edited(nvfp4[0], tmp_path, **{name: scales.view(torch.float8_e4m3fn)}), block(experts="nvfp4"))
    assert "down_weight, matrix 4: 1 block scales are negative or NaN" in text


def test_directories_that_are_no_checkpoint(tmp_path):
    assert "has neither model.safetensors nor" in refused(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0")
    assert "cannot read" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "'weight_map'" in refused(tmp_path)


def test_an_index_that_names_what_is_not_there(single, tmp_path):
    names = list(single[1])
    shutil.copy(single[0] / "model.safetensors", tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Checkpoint(tmp_path).layers() == [1]
    assert load_layer(tmp_path, 1, block(), 0)
    index["weight_map"][f"{PREFIX}1.mlp.gate.weight"] = "gone.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "gone.safetensors" in refused(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "gone.safetensors")
    assert "lacks" in refused(tmp_path)


def test_a_rank_outside_the_group(single):
    assert "rank 2 of tp=2" in refused(single[0], block(2), rank=2)


# --- random layers and stand-ins ---


def all_experts(layer, name):
    """fp32 [experts, rows, k] of one shard."""
    found = [layer.matrix(name, e) for e in range(layer.graph.weights()[name].experts)]
    return torch.stack([x.dequantise() if isinstance(x, Nvfp4) else x.float() for x in found])


@pytest.mark.parametrize("live", [1, 2])
@pytest.mark.parametrize(("split", "experts"), [("nn", "nvfp4"), ("nn", "bf16"), ("nk", "nvfp4")])
def test_the_world_is_what_live_ranks_and_their_rotated_messages_make(split, experts, live):
    """Plays the ranks message by message and compares each exchange with the reference of world_env."""
    config = CONFIG.model_copy(update={"intermediate": 2048})
    tp = 4
    graph = block(tp, split, experts, tokens=3, config=config)
    shards = [random_layer(graph, 5, rank=live_rank * tp // live) for live_rank in range(live)]
    env = world_env(shards) if live > 1 else shards[0].env(tp)
    stream = torch.randn(3, config.hidden, generator=torch.Generator().manual_seed(6))
    want = evaluate(graph, env | {"stream": stream}, torch.float32)

    def messages(own):
        """Gathered messages of all ranks; ``own(shard)`` is what a live rank computes."""
        sent = [own(s) for s in shards]
        return [out.roll(16 * j, -1) for out in sent for j in range(tp // live)]

    def linear(x, shard, name):
        return x @ shard.values[name].float().T

    pooled = torch.cat(messages(lambda s: linear(want["normed"], s, "pooler_weight")), -1)
    torch.testing.assert_close(pooled, want["pooled"], rtol=1e-4, atol=1e-5)
    unpooled = torch.cat(messages(lambda s: linear(want["combined"], s, "unpooler_weight")), -1)
    torch.testing.assert_close(unpooled, want["unpooled"], rtol=1e-4, atol=1e-5)

    ids = want["routes.ids"]
    gate_up = {id(s): all_experts(s, "gate_up_weight") for s in shards}
    down = {id(s): all_experts(s, "down_weight") for s in shards}

    def mid(s):
        y = torch.einsum("tk,tsnk->tsn", want["expert_in"], gate_up[id(s)][ids])
        gate, up = y.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    if split == "nn":
        gathered = torch.cat(messages(mid), -1)
        torch.testing.assert_close(gathered, want["expert_mid"], rtol=1e-4, atol=1e-5)
        out = torch.cat(messages(lambda s: torch.einsum("tsk,tsnk->tsn", gathered, down[id(s)][ids])), -1)
    else:
        out = sum(messages(lambda s: torch.einsum("tsk,tsnk->tsn", mid(s), down[id(s)][ids])))
    torch.testing.assert_close(out, want["expert_out"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("live", [1, 2])
def test_what_stays_on_a_rank_is_the_same_on_its_stand_ins(live):
    """Plays each rank's own projections and what it makes of its own heads; only the sum's messages are rotated."""
    tp = 4
    config = CONFIG.model_copy(update={"intermediate": 2048, "heads": 32, "kv_heads": 4})
    graph = whole(tp, "nvfp4", tokens=3, config=config)
    shards = [random_layer(graph, 5, rank=rank) for rank in range(live)]
    env, g = world_env(shards), torch.Generator().manual_seed(6)
    parts = graph.weights()["next_qkvg_weight"].parts
    stream = torch.randn(3, config.hidden, generator=g)
    made = (stream @ env["next_qkvg_weight"].float().T).split([tp * n for n in parts], 1)
    own = [(stream @ s.values["next_qkvg_weight"].float().T).split(parts, 1) for s in shards]
    for i, got in enumerate(made):  # q, k, v, gate
        torch.testing.assert_close(got, world_tensor([parts[i] for parts in own], tp // live, 1))
    heads = [torch.randn(3, parts[0], generator=g) for _ in shards]
    got = world_tensor(heads, tp // live, 1) @ env["o_proj_weight"].float().T
    sent = [x @ s.values["o_proj_weight"].float().T for x, s in zip(heads, shards, strict=True)]
    want = sum(message.roll(16 * j, -1) for message in sent for j in range(tp // live))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_world_tensors_are_in_rank_order():
    a, b = torch.arange(2.0)[None], torch.arange(2.0, 4.0)[None]
    assert world_tensor([a, b], 2, 1).tolist() == [[0, 1, 0, 1, 2, 3, 2, 3]]
    assert world_tensor([a, b], 1, 0).tolist() == [[0, 1], [2, 3]]


def test_a_layer_draws_the_weights_of_its_block():
    alone, layer = random_layer(block(8, experts="nvfp4"), 3), random_layer(whole(2, "nvfp4"), 3)
    for name in ("pre_ffn_gain", "residual_gate", "post_ffn_gain", "router_weight", "router_bias"):
        assert torch.equal(alone.values[name], layer.values[name])
    assert 0.09 < layer.values["next_gain"].float().std() < 0.11


@pytest.mark.parametrize("extremes", [False, True])
@pytest.mark.parametrize("experts", ["nvfp4", "bf16"])
def test_random_activations_are_of_order_one_and_packing_keeps_the_values(experts, extremes):
    graph = block(8, "nn", experts, tokens=4)
    layer = random_layer(graph, 7, scale_extremes=extremes)
    values = evaluate(graph, layer.env(8) | {"stream": torch.randn(4, CONFIG.hidden)}, torch.float32)
    for name in ("normed", "pooled", "expert_in", "expert_mid", "expert_out", "combined", "unpooled", "stream_out"):
        assert 0.05 < values[name].square().mean().sqrt() < 20, name
    packed, stage = layer.packed(), stages(graph)
    for name, w in graph.weights().items():
        if stage[name] is None:
            if w.planes == 1:  # the others: test_ranks_hold_their_slices_of_a_checkpoint
                assert torch.equal(packed[name], layer.values[name].float())
            assert len(packed[name]) == w.planes * w.rows
            continue
        for e, data in enumerate(packed[name].view(max(1, w.experts), -1)):
            m = layer.matrix(name, e)
            want = dequantise(m.codes, m.scales, 1.0) if isinstance(m, Nvfp4) else m.float()
            assert torch.equal(unpack(Tiles.of(w, *stage[name]), data), want)
    scales = {f"{n}_scale" for n in ("gate_up_weight", "down_weight")} if experts == "nvfp4" else set()
    assert set(packed) == set(graph.weights()) | scales
    if scales:
        bits = set(layer.values["down_weight"].scales.view(torch.uint8).unique().tolist())
        assert bits == ({0, 1, 2, 7, 8, 0x7D, 0x7E} if extremes else set(range(0x30, 0x40)))


def test_seeds_and_ranks():
    graph = block(2, experts="nvfp4")
    a, same, seed, rank = (random_layer(graph, s, rank=r) for s, r in ((1, 0), (1, 0), (2, 0), (1, 1)))

    def equal(x, y):
        return all(map(torch.equal, x, y)) if isinstance(x, Nvfp4) else torch.equal(x, y)

    for name, w in graph.weights().items():
        assert equal(a.values[name], same.values[name])
        assert not equal(a.values[name], seed.values[name])
        assert equal(a.values[name], rank.values[name]) == (w.shard is Shard.NONE)
    assert torch.equal(a.values["gate_up_weight"].scale_2, rank.values["gate_up_weight"].scale_2)
    with pytest.raises(MegagenError, match="does not make tp=2"):
        a.env(1)
    with pytest.raises(MegagenError, match="do not divide"):
        world_env([a, a, a])
