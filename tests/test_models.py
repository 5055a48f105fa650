"""Muse Spark graphs: shapes and bytes by hand, and configurations that the kernels cannot hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagen.errors import ScheduleError, WeightError
from megagen.ir.graph import Graph, Op, Routing
from megagen.models.muse_spark import (
    CONFIG_FIELDS,
    FIXED,
    MuseSparkConfig,
    expert_block,
    layer_kinds,
    read_config,
    tiny,
)
from megagen.ops.packing import Tiles

TPS = (1, 2, 4, 8)
SPLITS = ("nn", "nk")
NVFP4 = 9 / 16  # bytes of a weight: half a byte, and a byte of scale for sixteen


def block(tp: int = 8, tokens: int = 16, **more: Any) -> Graph:
    return expert_block(tp, tokens, **more)


# -- the real dimensions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tp", TPS)
def test_tensors(tp: int, split: str) -> None:
    found = {n: (t.shape, t.dtype, t.kind, t.scope, t.shard_axis) for n, t in block(tp, 5, split=split).tensors.items()}
    within = ("internal", "rank", None)
    want: dict[str, tuple[object, ...]] = {
        "stream": ((5, 8192), "fp32", "input", "rank", None),
        "normed": ((5, 8192), "bf16", *within),
        "logits": ((8, 16, 5, 16), "fp32", *within),  # two stages of 512 a chunk, row blocks of 16 experts
        "routes": ((5, 16), "u32", *within),
        "table": ((1,), "u32", "internal", "block", None),
        "pooled_partials": ((8, 256 // tp, 5, 16), "fp32", *within),
        "pooled": ((5, 4096), "bf16", "internal", "world", 1),
        "expert_in": ((5, 4096), "bf16", *within),
        "expert_mid": ((5, 8, 4096), "bf16", "internal", "world", 2),
        "expert_out": ((5, 8, 4096), "bf16", "internal", "world", 2),
        "slot_moments": ((5, 16, 8), "fp32", *within),  # of 256 columns, a slot each
        "combined": ((5, 4096), "bf16", *within),
        "unpooled_partials": ((4, 512 // tp, 5, 16), "fp32", *within),
        "unpooled": ((5, 8192), "bf16", "internal", "world", 1),
        "moments": ((5, 32, 4), "fp32", *within),  # of 256 columns
        "stream_out": ((5, 8192), "fp32", "output", "rank", None),
    }
    if split == "nk":  # the middle stays on its rank; the ranks' contributions to the end are summed
        want["expert_mid"] = ((5, 8, 4096 // tp), "bf16", *within)
        want["expert_out"] = ((tp, 5, 8, 4096), "bf16", "internal", "world", None)
    assert found == want
    assert {n for n, t in block(tp, split=split).tensors.items() if t.reduce} == (
        {"expert_out"} if split == "nk" else set()
    )


@pytest.mark.parametrize("experts", ["nvfp4", "bf16"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tp", TPS)
def test_weights(tp: int, split: str, experts: str) -> None:
    size = NVFP4 if experts == "nvfp4" else 2
    down = (4096 // tp, 4096, "rows") if split == "nn" else (4096, 4096 // tp, "k")
    want = {  # rows, k, axis cut, bytes on the device
        "router_weight": (256, 8192, "none", 8_388_608),
        "pooler_weight": (4096 // tp, 8192, "rows", 67_108_864 // tp),
        "unpooler_weight": (8192 // tp, 4096, "rows", 67_108_864 // tp),
        "gate_up_weight": (8192 // tp, 4096, "rows", 8_589_934_592 // tp * size),
        "down_weight": (*down, 4_294_967_296 // tp * size),
        "pre_ffn_gain": (8192, 1, "none", 32_768), "router_bias": (256, 1, "none", 1024),
        "pre_expert_gain": (4096, 1, "none", 16_384), "post_expert_gain": (4096, 1, "none", 16_384),
        "post_ffn_gain": (8192, 1, "none", 32_768),
        "residual_gate": (8192, 1, "none", 65_536),  # the stream's factor and the update's
    }  # fmt: skip
    weights = block(tp, split=split, experts=experts).weights()
    assert {n: (w.rows, w.k, w.shard, w.device_bytes) for n, w in weights.items()} == want
    assert {n for n, w in weights.items() if w.experts} == {
        n for n, w in weights.items() if w.dtype == experts and n in ("gate_up_weight", "down_weight")
    }
    assert all(w.experts in (0, 256) and w.bytes == w.bytes_one * max(1, w.experts) for w in weights.values())
    assert [n for n, w in weights.items() if w.gate_up] == ["gate_up_weight"]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tp", TPS)
def test_cost(tp: int, split: str) -> None:
    """Of 7 tokens on 20 experts: weights once, activations once, two operations a weight and token."""
    t, slots, used = 7, 56, 20
    costs = {op.name: op.cost(Routing(tokens=t, experts=used)) for op in block(tp, split=split).ops}
    mid = 4096 if split == "nn" else 4096 // tp
    parts = tp if split == "nk" else 1
    assert {n: c.weight_bytes for n, c in costs.items()} == {
        "pre_ffn_norm": 32_768, "router": 8_388_608, "pooler": 67_108_864 // tp, "top_k": 1024,
        "pre_expert_norm": 16_384, "gate_up": used * 8192 * 4096 // tp * NVFP4,
        "down": used * 4096 * 4096 // tp * NVFP4, "combine": 16_384, "unpooler": 67_108_864 // tp, "residual": 98_304,
    }  # fmt: skip
    operations = {n: c.operations for n, c in costs.items()}
    assert operations["router"] == 2 * t * 256 * 8192
    assert operations["pooler"] == operations["unpooler"] == 2 * t * 8192 * 4096 // tp
    assert (
        operations["gate_up"] == 2 * slots * 8192 * 4096 // tp and operations["down"] == 2 * slots * 4096 * 4096 // tp
    )
    moved = {n: c.activation_bytes for n, c in costs.items()}
    assert moved["pre_ffn_norm"] == t * 8192 * (4 + 2) and moved["pre_expert_norm"] == t * 4096 * (2 + 2)
    assert moved["pooler"] == moved["unpooler"] == t * (8192 + 4096) * 2
    assert moved["router"] == t * (8192 * 2 + 256 * 4) and moved["top_k"] == t * (256 + 16) * 4
    assert moved["gate_up"] == t * 4096 * 2 + slots * mid * 2 and moved["down"] == slots * (mid + 4096) * 2
    assert moved["combine"] == t * 4096 * (8 * parts + 1) * 2 and moved["residual"] == t * 8192 * (2 + 4 + 4)


@pytest.mark.parametrize("split", SPLITS)
def test_ops_come_after_what_they_read(split: str) -> None:
    g, made = block(split=split), {"stream"}
    for op in g.ops:
        assert set(op.inputs.values()) <= made
        made |= set(op.outputs.values())
    assert made == set(g.tensors)
    assert len({n for w in g.weights().values() for n in w.names}) == len(g.weights()) == 11


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.MuseSparkTextConfig(), MuseSparkConfig()
    assert {f: getattr(ours, f) for f in CONFIG_FIELDS} == {
        f: getattr(theirs, name) for f, name in CONFIG_FIELDS.items()
    }


# -- configurations ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "three ranks": ({}, {"tp": 3}, "tp=3"),
    "sixteen ranks": ({}, {"tp": 16}, "tp=16"),
    "no rank": ({}, {"tp": 0}, "tp=0"),
    "no token": ({}, {"tokens": 0}, "tokens=0: a launch takes 1 to 16"),
    "17 tokens": ({}, {"tokens": 17}, "tokens=17"),
    "a split": ({}, {"split": "kn"}, "split='kn'"),
    "a format": ({}, {"experts": "fp8"}, "experts='fp8'"),
    "part of a row block": ({"hidden": 8256}, {}, "hidden=8256 does not divide into 8 shards"),
    "no hidden": ({"hidden": 0}, {}, "hidden=0"),
    "a norm's row": ({"hidden": 9216}, {}, "hidden=9216 is no multiple of 2048"),
    "an expert norm's row": ({"moe_hidden": 1024}, {}, "moe_hidden=1024 is no multiple of 2048"),
    "an unaligned middle": ({"intermediate": 4104}, {"tp": 1}, "intermediate=4104 does not divide"),
    "short shards": ({"intermediate": 512}, {}, "intermediate=512 makes shards of less than 112"),
    "experts of part of a block": ({"experts": 24}, {}, "experts=24"),
    "too many experts": ({"experts": 272}, {}, "experts=272"),
    "no experts": ({"experts": 0}, {}, "experts=0"),
    "top 4": ({"top_k": 4}, {}, "top_k=4"),
    "an odd number of NVFP4 groups": ({"intermediate": 1536}, {"tp": 1}, "down_weight: 4096 x 1536 nvfp4"),
    "part of a bf16 stage": ({"intermediate": 1536}, {"tp": 1, "experts": "bf16"}, "down_weight: 4096 x 1536 bf16"),
    "a slice of less than a group": ({"intermediate": 2048}, {"split": "nk"}, "down_weight: 4096 x 256 nvfp4"),
    "part of an NVFP4 stage": ({"intermediate": 5120}, {"tp": 4}, "down_weight: 1024 x 5120 nvfp4"),
    "part of a gate/up stage": ({"moe_hidden": 6144}, {}, "gate_up_weight: 1024 x 6144 nvfp4"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_layout_cannot_hold_is_refused(case: str) -> None:
    changes, args, message = REFUSED[case]
    with pytest.raises(ScheduleError) as caught:
        block(**args, config=MuseSparkConfig(**changes))  # type: ignore[arg-type]
    assert message in caught.value.message
    assert caught.value.loc is not None and caught.value.loc.file == __file__


def test_neighbours_of_refusals_are_accepted() -> None:
    for changes, args in (
        ({"hidden": 2048, "moe_hidden": 2048, "intermediate": 1024, "experts": 16}, {}),
        ({"intermediate": 512}, {"tp": 4}),
        ({"intermediate": 512}, {"tp": 1, "split": "nk"}),
        ({"intermediate": 3072}, {}),
        ({"intermediate": 8192, "moe_hidden": 8192}, {}),
        ({"moe_hidden": 6144, "intermediate": 1024}, {"experts": "bf16"}),
    ):
        block(**args, config=MuseSparkConfig(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tp", TPS)
def test_a_tiny_block_is_the_least_that_is_accepted(tp: int, split: str) -> None:
    least = tiny(tp, split)
    for experts in ("nvfp4", "bf16"):
        block(tp, split=split, experts=experts, config=least)
        for smaller in range(16, least.intermediate, 16):
            config = least.model_copy(update={"intermediate": smaller})
            with pytest.raises(ScheduleError):
                block(tp, split=split, experts=experts, config=config)


def fits(op: Op) -> bool:
    """The device's own terms: static assertions and loads of templates/include/megagen."""
    stage = op.stage()
    c = op.constants()
    if stage is None:
        return int(c.get("kWidth", 2048)) % 2048 == 0 and c.get("kTopK", 8) == 8 and int(c.get("kExperts", 0)) <= 256
    w = op.weights["weight"]
    tiles = Tiles.of(w, stage["rows"], stage["k"])  # raises if it does not divide
    assert tiles.bytes == w.bytes_one
    # a lane's scales of a slice are loaded as 2 bytes, or as whole words
    return w.dtype != "nvfp4" or tiles.groups == 1 or tiles.groups % 2 == 0


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 8).map(lambda n: 1024 * n), st.integers(1, 8).map(lambda n: 1024 * n),
    st.integers(1, 24).map(lambda n: 256 * n), st.integers(1, 34).map(lambda n: 8 * n),
    st.sampled_from(TPS), st.sampled_from(SPLITS), st.sampled_from(("nvfp4", "bf16")),
)  # fmt: skip
def test_what_is_accepted_can_be_packed_and_run(
    h: int, m: int, i: int, e: int, tp: int, split: str, experts: str
) -> None:
    config = MuseSparkConfig(hidden=h, moe_hidden=m, intermediate=i, experts=e)
    try:
        g = block(tp, split=split, experts=experts, config=config)
    except ScheduleError:
        return
    assert all(fits(op) for op in g.ops)
    for t in g.tensors.values():
        if t.shard_axis is not None:  # a stand-in's message turns once around its slot at most
            assert t.shape[t.shard_axis] % tp == 0 and t.shape[t.shard_axis] // tp >= 16 * (tp - 1)


# -- config.json ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [True, False])
def test_a_checkpoints_config(nested: bool, tmp_path: Path) -> None:
    text = {"hidden_size": 2048, "num_local_experts": 32, "output_multiplier": 0.5, "vocab_size": 7}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if nested else text))
    assert read_config(tmp_path) == MuseSparkConfig(hidden=2048, experts=32, output_multiplier=0.5, vocab=7)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        "[]",
        "3",
        '{"text_config": 3}',
        '{"text_config": null}',
        '{"hidden_size": "wide"}',
        '{"hidden_size": null}',
    ],
)
def test_a_wrong_config(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightError) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.message and "Hugging Face" in (caught.value.hint or "")


def test_every_field_of_a_config_is_read_or_refused(tmp_path: Path) -> None:
    """All fields of transformers' configuration that its model computes with. A new one must find its place here."""
    configuration = pytest.importorskip("transformers.models.muse_spark.configuration_muse_spark")
    inherited = set(vars(configuration.PreTrainedConfig())) | {"transformers_version", "output_attentions"}
    here = set(configuration.MuseSparkTextConfig().to_dict()) - inherited
    elsewhere = {  # read there, or without effect on what is decoded
        "pad_token_id", "eos_token_id", "bos_token_id", "tie_word_embeddings", "use_cache", "initializer_range",
        "attention_dropout", "output_router_logits", "max_position_embeddings", "intermediate_size",
    }  # fmt: skip
    refused = {*FIXED, "model_type", "mlp_layer_types", "layer_types", "layer_rope_theta", "rope_parameters"}
    assert here <= {*CONFIG_FIELDS.values(), *elsewhere, *refused}
    (tmp_path / "config.json").write_text(json.dumps(configuration.MuseSparkConfig().to_dict()))
    assert read_config(tmp_path) == MuseSparkConfig()
    kinds = layer_kinds(tmp_path)
    assert len(kinds) == 62 and [i for i, k in enumerate(kinds) if not k.sliding] == list(range(1, 62, 4))
    assert all(k.sliding is k.rotates for k in kinds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "muse_glimmer"}, "muse_glimmer"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "layer 1 has no experts"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"], "num_hidden_layers": 2}, "2 layers, but 1 of layer_types"),
        ({"num_hidden_layers": 0}, "0 layers"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}, "plain rotation"),
        ({"rope_parameters": {"type": "linear", "factor": 4.0, "rope_theta": 5e5}}, "plain rotation"),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "plain rotation"),
        ({"rope_parameters": {"rope_type": "default"}}, "bases None"),  # transformers' default is another one
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_scaling"),
        ({"rope_theta": 1e4}, "not one for all"),
        ({"layer_rope_theta": [0, 1e4], "num_hidden_layers": 2}, "not one for all"),
    ],
)
def test_a_config_of_another_model(text: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Its weights may well have the shapes of ours, and would be computed as what they are not."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "muse_spark", "text_config": text}))
    with pytest.raises(WeightError) as caught:
        layer_kinds(tmp_path)
    assert message in caught.value.message and str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tp": 8.0}, "tp=8.0, tokens=16: not whole numbers"),
        ({"tp": True}, "tp=True"),
        ({"tokens": "4"}, "tokens='4': not whole numbers"),
        ({"config": {"hidden": 8192}}, "config is of type dict"),
        ({"config": {}}, "config is of type dict"),
    ],
)
def test_arguments_of_the_wrong_type(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        block(**more)
    assert message in caught.value.message
