"""The sliding-window layer's graph: shapes and bytes by hand, variants, and what the kernels cannot hold."""

from __future__ import annotations

from typing import Any

import pytest

from megagen.errors import ScheduleError
from megagen.ir.graph import Graph, Routing, TensorKind
from megagen.models.muse_spark import MuseSparkConfig, cache_chunks, expert_block, sliding_layer, tiny

TPS = (1, 2, 4, 8)


def layer(tp: int = 8, tokens: int = 16, **more: Any) -> Graph:
    return sliding_layer(tp, tokens, **more)


@pytest.mark.parametrize("tp", TPS)
def test_tensors_of_attention_and_projection(tp: int) -> None:
    heads, kv = 128 // tp, 16 // tp
    found = {n: (t.shape, t.dtype.value, t.kind.value, t.shard_axis) for n, t in layer(tp, 5).tensors.items()}
    block = {n for n in expert_block(tp).tensors if n not in ("stream", "stream_out", "normed")}
    want: dict[str, tuple[object, ...]] = {
        "stream": ((5, 8192), "fp32", "input", None),
        "q": ((5, heads * 64), "bf16", "input", 1),
        "gate": ((5, heads * 64), "bf16", "input", 1),
        "k_cache": ((kv, 34 * 64, 64), "bf16", "input", 0),
        "v_cache": ((kv, 34, 64, 64), "bf16", "input", 0),
        "rotary": ((16384, 64), "fp32", "input", None),
        "attention_partials": ((34, heads, 5, 68), "fp32", "internal", None),
        "attended": ((5, heads * 64), "bf16", "internal", None),
        "projected": ((tp, 5, 8192), "bf16", "internal", None),
        "middle_moments": ((5, 32, 4), "fp32", "internal", None),  # of 256 columns
        "middle": ((5, 8192), "fp32", "internal", None),
        "normed": ((5, 8192), "bf16", "internal", None),
        "stream_out": ((5, 8192), "fp32", "output", None),
        "next_normed": ((5, 8192), "bf16", "internal", None),
        "next_partials": ((8, 18432 // tp // 16, 5, 16), "fp32", "internal", None),
        "next_q": ((5, heads * 64), "bf16", "output", 1),
        "next_gate": ((5, heads * 64), "bf16", "output", 1),
        "next_k_cache": ((kv, 34 * 64, 64), "bf16", "state", 0),
        "next_v_cache": ((kv, 34, 64, 64), "bf16", "state", 0),
    }
    if tp < 8:  # more than one unit of K
        want["o_partials"] = ((8 // tp, 512, 5, 16), "fp32", "internal", None)
    assert {n: x for n, x in found.items() if n not in block} == want
    assert block <= found.keys()


@pytest.mark.parametrize("tp", TPS)
def test_bytes(tp: int) -> None:
    costs = {op.name: op.cost(Routing(tokens=16, experts=49)) for op in layer(tp).ops}
    assert costs["o_proj"].weight_bytes == 8192 * 8192 * 2 // tp
    assert costs["next_qkvg"].weight_bytes == 18432 * 8192 * 2 // tp
    assert costs["post_attention"].weight_bytes == 3 * 32_768  # both factors of the gate, and the gain
    assert costs["residual"].weight_bytes == 4 * 32_768
    assert costs["next_qkvg"].operations == 2 * 16 * 18432 * 8192 // tp
    # a rank reads the window's keys and values once
    kv = 2 * 16 // tp * 64 * 2
    assert kv * 2063 <= costs["attention"].activation_bytes <= kv * 2064 + (1 << 20)


def test_the_issue_of_one_rank_of_eight() -> None:
    """What the hardware must stream: about 250 MB, as the arithmetic of the checkpoint's shapes has it."""
    weights = sum(op.cost(Routing(tokens=16, experts=49)).weight_bytes for op in layer().ops)
    assert 252e6 < weights < 254e6


def test_ops_come_after_what_they_read() -> None:
    for more in ({}, {"all_reduce": "two_shot"}, {"following": "global"}, {"following": "end"}, {"split": "nk"}):
        g = layer(**more)
        made = {n for n, t in g.tensors.items() if t.kind is TensorKind.INPUT}
        for op in g.ops:
            assert set(op.inputs.values()) <= made
            made |= set(op.outputs.values())
        assert made == set(g.tensors)
        assert len({n for w in g.weights().values() for n in w.names}) == sum(
            len(w.names) for w in g.weights().values()
        )


def test_what_is_the_next_layers() -> None:
    weights = layer().weights()
    assert {n for n, w in weights.items() if w.next_layer} == {"next_qkvg_weight", "next_gain"}
    assert weights["next_qkvg_weight"].parts == (1024, 128, 128, 1024)
    assert {n for n, w in weights.items() if w.local} == {"next_qkvg_weight", "o_proj_weight"}


def test_two_shot() -> None:
    g = layer(all_reduce="two_shot")
    assert g.tensors["projected"].shape == (8, 16, 1024) and g.tensors["projected"].scatter
    assert g.tensors["summed"].shape == (16, 8192)
    assert [op.name for op in g.ops][1:4] == ["o_proj", "all_reduce", "post_attention"]


def test_without_rotation() -> None:
    g = layer(following="global")
    assert "rotary" not in g.tensors and g.op("next_heads").constants()["kRotate"] == 0


@pytest.mark.parametrize(("window", "chunks"), [(2048, 34), (128, 4), (64, 3), (16, 2), (114, 4), (115, 4)])
def test_a_cache_holds_what_a_launch_sees(window: int, chunks: int) -> None:
    """Whatever the context: no two numbers that a launch's tokens see, or write, share a slot."""
    assert cache_chunks(window) == chunks
    for context in range(window - 1, window + 3 * 64):
        first, last = context + 1 - window, context + 15
        assert last // 64 - first // 64 < chunks


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "wide heads": ({"head_dim": 128}, {}, "head_dim=128"),
    "heads for three": ({"heads": 12, "kv_heads": 4}, {}, "heads=12 cannot be dealt to 8"),
    "a KV head for two ranks": ({"kv_heads": 4}, {}, "kv_heads=4 cannot be dealt to 8"),
    "uneven groups": ({"heads": 128, "kv_heads": 24}, {}, "do not share kv_heads=24"),
    "part of a slice": ({"heads": 32, "kv_heads": 16}, {}, "give a rank 256 elements"),
    "part of a unit": ({"heads": 192, "kv_heads": 16}, {}, "give a rank 1536 elements"),
    "a window below a launch": ({"window": 15}, {}, "window=15"),
    "a wide window": ({"window": 4096}, {}, "window=4096: at most 4017"),
    "no positions": ({}, {"positions": 0}, "positions=0"),
    "a crooked growing cache": ({}, {"positions": 300, "following": "global"}, "positions=300: a growing cache holds"),
    "a long one": ({}, {"positions": 1 << 21, "following": "global"}, "at most 1,048,576"),
    "a wide one": (
        {"heads": 512, "kv_heads": 64}, {"tp": 1, "positions": 1 << 20, "following": "global"},
        "keys of 64 heads take 8,589,934,592 bytes",
    ),
    "a way to sum": ({}, {"all_reduce": "ring"}, "all_reduce='ring'"),
    "one rank in two shots": ({}, {"tp": 1, "all_reduce": "two_shot"}, "two-shot all-reduce of one rank"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_layout_cannot_hold_is_refused(case: str) -> None:
    changes, args, message = REFUSED[case]
    with pytest.raises(ScheduleError) as caught:
        layer(**args, config=MuseSparkConfig(**changes))
    assert message in caught.value.message
    assert caught.value.loc is not None and caught.value.loc.file == __file__


def test_the_largest_cache_whose_bytes_are_counted() -> None:
    wide = MuseSparkConfig(heads=256, kv_heads=32)
    g = layer(tp=1, positions=1 << 20, following="global", config=wide)
    assert g.tensors["next_k_cache"].shape == (32, 1 << 20, 64)  # of two bytes each: the last one is number 2^32 - 1


@pytest.mark.parametrize("tp", TPS)
def test_tiny(tp: int) -> None:
    g = layer(tp, config=tiny(tp))
    assert g.tensors["q"].shape == (16, 1024) and g.tensors["k_cache"].shape == (2, 4 * 64, 64)
