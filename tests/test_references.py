"""Op references against the transformers implementation of Muse Spark, and the rule that judges results."""

from __future__ import annotations

import pytest
import torch

from megagen.errors import MegagenError
from megagen.models.muse_spark import MuseSparkConfig, expert_block
from megagen.ops.compare import judge, measure
from megagen.ops.reference import evaluate

modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")

TOKENS = 16
CONFIG = MuseSparkConfig(hidden=2048, moe_hidden=2048, intermediate=1024, experts=32, layers=1)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Two workers with a thread a core each would spend their time waiting for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def layer():
    """A decoder layer of the small config, fp32 parameters with bf16 values (the router's and gates' fp32 values)."""
    from transformers import MuseSparkTextConfig

    c = CONFIG
    config = MuseSparkTextConfig(
        hidden_size=c.hidden, moe_hidden_size=c.moe_hidden, moe_intermediate_size=c.intermediate, intermediate_size=64,
        num_local_experts=c.experts, num_experts_per_tok=c.top_k, num_hidden_layers=1, vocab_size=8,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"  # what from_pretrained chooses
    layer = modeling.MuseSparkTextDecoderLayer(config, 0).requires_grad_(False)
    torch.manual_seed(0)
    for name, p in layer.named_parameters():
        torch.nn.init.normal_(p, std=0.1 if p.ndim == 1 else p.shape[-1] ** -0.5)
        if "mlp.gate." not in name and "residual_gate" not in name:
            p.copy_(p.bfloat16())
    layer.mlp.gate.weight.mul_(8)
    torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.05)
    return layer


def cast(layer, dtype):
    """The layer as from_pretrained(dtype=...) leaves it: router and residual gates stay fp32."""
    import copy

    cast = copy.deepcopy(layer).to(dtype)
    for module in (cast.post_feedforward_residual_gate, cast.post_attention_residual_gate, cast.mlp.gate):
        module.float()
    cast.mlp.gate.load_state_dict(layer.mlp.gate.state_dict())
    cast.mlp.gate.e_score_correction_bias.copy_(layer.mlp.gate.e_score_correction_bias)
    for gate in ("post_feedforward_residual_gate", "post_attention_residual_gate"):
        getattr(cast, gate).load_state_dict(getattr(layer, gate).state_dict())
    return cast


def transformers_values(layer, stream):
    """The block's intermediate results by the graph's names, caught by hooks; the lines of the layer's forward."""
    seen = {}
    hooks = [
        module.register_forward_hook(lambda m, args, out, name=name: seen.__setitem__(name, out))
        for name, module in {
            "normed": layer.pre_feedforward_layernorm, "gate": layer.mlp.gate, "pooled": layer.mlp.pre_expert_proj,
            "expert_in": layer.mlp.pre_expert_norm, "combined": layer.mlp.experts,
            "unpooled": layer.mlp.post_expert_proj,
        }.items()
    ]  # fmt: skip
    hidden = layer.pre_feedforward_layernorm(stream)
    hidden = layer.mlp(hidden)
    hidden = layer.post_feedforward_layernorm(hidden)
    seen["stream_out"] = layer.post_feedforward_residual_gate(stream, hidden)
    for hook in hooks:
        hook.remove()
    logits, weights, ids = seen.pop("gate")
    return seen | {"scaled_logits": logits, "routes.weights": weights, "routes.ids": ids}


def environment(graph, layer, stream):
    state = layer.state_dict()
    return {"stream": stream} | {w.name: state[w.names[0]] for w in graph.weights().values()}


def row_error(got, want):
    return measure(got, want).worst_row


@pytest.mark.parametrize("split", ["nn", "nk"])
@pytest.mark.parametrize("tokens", [1, 7, TOKENS])
def test_fp32_equals_transformers(layer, tokens, split):
    graph = expert_block(tp=1, tokens=tokens, split=split, experts="bf16", config=CONFIG)
    stream = torch.randn(tokens, CONFIG.hidden)
    want = transformers_values(layer, stream)
    got = evaluate(graph, environment(graph, layer, stream), torch.float32)
    weights = []
    for values in (got, want):  # the order of slots is open in transformers
        values["routes.ids"], order = values["routes.ids"].sort(1)
        weights.append(values.pop("routes.weights").gather(1, order))
    assert torch.equal(got["routes.ids"], want.pop("routes.ids"))
    assert row_error(*weights) < 1e-5
    assert row_error(got["logits"] * CONFIG.output_multiplier, want.pop("scaled_logits")) < 1e-5
    for name, value in want.items():
        assert got[name].dtype is torch.float32
        assert row_error(got[name], value) < 1e-5, name


@pytest.mark.parametrize("tokens", [1, 7, TOKENS])
def test_bf16_equals_transformers_bit_for_bit(layer, tokens):
    """With transformers' slot order given, since torch.topk leaves it open and the sum of weights depends on it."""
    graph = expert_block(tp=1, tokens=tokens, experts="bf16", config=CONFIG)
    stream = torch.randn(tokens, CONFIG.hidden)
    want = transformers_values(cast(layer, torch.bfloat16), stream.bfloat16())
    env = environment(graph, layer, stream) | {"route_override": want["routes.ids"]}
    got = evaluate(graph, env, torch.bfloat16)
    assert torch.equal(got["logits"] * CONFIG.output_multiplier, want.pop("scaled_logits"))
    for name, value in want.items():
        assert got[name].dtype is value.dtype
        assert torch.equal(got[name], value), name
    chosen = evaluate(graph, environment(graph, layer, stream), torch.bfloat16)["routes.ids"]
    assert torch.equal(chosen.sort(1).values, want["routes.ids"].sort(1).values)


def top_k(logits, bias=None, **more):
    graph = expert_block(tp=1, experts="bf16", config=CONFIG)
    env = {"logits": logits, "router_bias": torch.zeros(CONFIG.experts) if bias is None else bias}
    return graph.op("top_k").reference(env | more, torch.float32)


def test_top_k_ties_go_to_the_lowest_id():
    logits = torch.zeros(2, CONFIG.experts)
    logits[1, [30, 31]] = 1.0
    got = top_k(logits)
    assert got["routes.ids"].tolist() == [[*range(8)], [30, 31, *range(6)]]
    assert got["routes.weights"][0].tolist() == [0.125] * 8
    assert torch.equal(got["table"], got["routes.ids"])


def test_top_k_selects_with_the_bias_but_weighs_without():
    bias = torch.zeros(CONFIG.experts)
    bias[20:28] = 5.0
    logits = torch.linspace(-4, 4, CONFIG.experts).unsqueeze(0)
    got = top_k(logits, bias)
    assert got["routes.ids"].tolist() == [[*range(27, 19, -1)]]
    p = 1 / (1 + torch.exp(-logits[0].double() * CONFIG.output_multiplier))
    torch.testing.assert_close(got["routes.weights"][0].double(), p[got["routes.ids"][0]] / p[20:28].sum())


def test_top_k_counts_nan_as_the_smallest():
    logits = torch.arange(CONFIG.experts).float().repeat(3, 1)
    logits[0, 31] = torch.nan
    logits[1] = torch.nan
    logits[2, 3] = torch.inf
    assert top_k(logits)["routes.ids"].tolist() == [[*range(30, 22, -1)], [*range(8)], [3, *range(31, 24, -1)]]


def test_route_override_replaces_ids_and_recomputes_weights():
    logits = torch.arange(CONFIG.experts).float().unsqueeze(0)
    override = torch.full((16, 8), -1, dtype=torch.int32)  # the device's buffer may have more rows than tokens
    override[0, :2] = torch.tensor([5, 9])
    got = top_k(logits, route_override=override)
    ids = [5, 9, *range(29, 23, -1)]
    p = 1 / (1 + torch.exp(-torch.tensor(ids).double() * CONFIG.output_multiplier))
    assert got["routes.ids"].tolist() == [ids]
    torch.testing.assert_close(got["routes.weights"][0].double(), p / p.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_token_harms_no_other(layer, dtype, poison):
    graph = expert_block(tp=1, experts="bf16", config=CONFIG)
    stream = torch.randn(TOKENS, CONFIG.hidden)
    clean = evaluate(graph, environment(graph, layer, stream), dtype)
    stream[3, 100] = poison
    got = evaluate(graph, environment(graph, layer, stream), dtype)
    others = [r for r in range(TOKENS) if r != 3]
    assert torch.equal(got["routes.ids"][others], clean["routes.ids"][others])
    assert not got["stream_out"][3].isfinite().all()
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2  # row 3 changes the batches of experts, so sums' order
    assert row_error(got["stream_out"][others], clean["stream_out"][others]) < tolerance


def test_experts_may_be_a_callable_and_only_used_ones_are_touched(layer):
    graph = expert_block(tp=1, tokens=2, experts="bf16", config=CONFIG)
    env = environment(graph, layer, torch.randn(2, CONFIG.hidden))
    env["route_override"] = torch.tensor([[3, 1, 4, 7, 5, 9, 2, 6]] * 2)
    whole, touched = evaluate(graph, env, torch.float32), []

    def lazily(name):
        tensor = env[name]
        return lambda expert: (touched.append((name, expert)), tensor[expert])[1]

    lazy = {name: lazily(name) for name in ("gate_up_weight", "down_weight")}
    got = evaluate(graph, env | lazy, torch.float32)
    assert torch.equal(got["stream_out"], whole["stream_out"])
    assert touched == [(name, e) for name in lazy for e in (1, 2, 3, 4, 5, 6, 7, 9)]


def test_evaluate_names_what_is_missing():
    graph = expert_block(tp=1, experts="bf16", config=CONFIG)
    with pytest.raises(MegagenError, match="stream, pre_ffn_gain, router_weight"):
        evaluate(graph, {}, torch.float32)


# --- the rule ---

REFERENCE = torch.tensor([[3.0, 4.0], [6.0, 8.0]])  # rows of length 5 and 10


def off(row, amount):
    value = REFERENCE.clone()
    value[row, 0] += amount
    return value


def test_measure_takes_the_worst_row_relative_to_its_own_length():
    error = measure(REFERENCE + torch.tensor([[0.5, 0.0], [0.0, 0.8]]), REFERENCE)
    assert (error.row, error.max_abs) == (0, pytest.approx(0.8))
    assert error.worst_row == pytest.approx(0.1)


def test_judge_allows_one_and_a_half_times_and_twice():
    assert judge(off(0, 0.149), REFERENCE, off(0, 0.1))
    assert any("relative" in r for r in judge(off(0, 0.151), REFERENCE, off(0, 0.1)).reasons)
    assert judge(off(1, 0.199), REFERENCE, off(0, 0.1))  # a longer row: relative error is half
    (reason,) = judge(off(1, 0.201), REFERENCE, off(0, 0.1)).reasons
    assert "max-abs" in reason


def test_judge_joins_seeds():
    assert judge([REFERENCE, off(0, 0.14)], [REFERENCE] * 2, [off(0, 0.1), REFERENCE])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_judge_never_passes_poison(poison):
    bad = REFERENCE.clone()
    bad[1, 1] = poison
    model = off(0, 1.0)
    assert any("the result is not finite in rows [1]" in r for r in judge(bad, REFERENCE, model).reasons)
    assert any("the bf16 model is not finite" in r for r in judge(REFERENCE, REFERENCE, bad).reasons)
    assert not judge(bad, bad, bad)  # a reference that is not finite must be listed
    assert judge(bad, bad, bad, excluded=[1])
    assert not judge(off(0, 1e-3), bad, bad, excluded=[1])  # the others are still compared
    assert not judge(torch.zeros_like(REFERENCE), REFERENCE, off(0, 0.1))  # nothing written


def test_judge_refuses_to_hide_a_finite_row():
    with pytest.raises(MegagenError, match=r"rows \[0\]"):
        judge(REFERENCE, REFERENCE, REFERENCE, excluded=[0])
    with pytest.raises(MegagenError, match="shapes differ"):
        judge(REFERENCE[:1], REFERENCE, REFERENCE)
    with pytest.raises(MegagenError, match="no row"):
        judge(REFERENCE[:0], REFERENCE[:0], REFERENCE[:0])
