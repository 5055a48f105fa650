"""transformers' own decoder layer with the weights of a whole tensor-parallel group, beside a launch of ours."""

from __future__ import annotations

from typing import Any

import torch
from small_models import layer_in

from megagen.bench.inputs import Inputs, put
from megagen.ops.compare import judge
from megagen.ops.qkv_heads import rotary
from megagen.runtime.step import Step


def whole_layer(graph: Any, env: Any, own: Any, device: torch.device | str) -> tuple[Any, Any]:
    """transformers' layer with the world-wide weights of a ``sliding_layer`` graph, and the one that comes after it;
    fp32. The latter has only what the launch does of it: its input norm and projections. ``own``: the env of which the
    next layer's weights are this layer's."""
    from transformers import MuseSparkTextConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextDecoderLayer

    c = graph.attributes["config"]
    config = MuseSparkTextConfig(
        hidden_size=c.hidden, moe_hidden_size=c.moe_hidden, moe_intermediate_size=c.intermediate,
        num_local_experts=c.experts, num_hidden_layers=2, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, sliding_window=c.window, qk_scale_factor=c.qk_scale,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, layer_types=["sliding_attention"] * 2,
        layer_rope_theta=[c.rope_theta] * 2, bos_token_id=0, eos_token_id=1, pad_token_id=0, vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        first, second = (MuseSparkTextDecoderLayer(config, i).requires_grad_(False) for i in range(2))
    first.to_empty(device=device)
    second.mlp = None
    second.to_empty(device=device)
    for name, w in graph.weights().items():
        if w.next_layer:
            _fill(second, w, env[name], graph.tp)
            _fill(first, w, own[name], graph.tp)
        else:
            _fill(first, w, env[name], graph.tp)
    return first, second


def _fill(layer: Any, weight: Any, value: Any, tp: int) -> None:
    held = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    if weight.experts:
        for expert, matrix in enumerate(held[weight.names[0]]):
            matrix.copy_(value(expert))
        return
    sizes = [p * tp for p in weight.parts] or [len(value)]
    for name, part in zip(weight.names, value.split(sizes), strict=True):
        held[name].copy_(part)


def projected(layer: Any, dtype: torch.dtype, stream: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """What :func:`whole_layer`'s second layer makes of a stream [n, hidden] before it attends: ``next_q`` and
    ``next_gate`` [n, heads * head_dim], ``next_k_cache`` and ``next_v_cache`` [n, kv_heads * head_dim]."""
    from transformers.models.muse_spark import modeling_muse_spark as modeling

    layer.input_layernorm.to(dtype)
    attention = layer.self_attn.to(dtype)
    a = layer.input_layernorm(stream.to(dtype)[None])
    shape = (*a.shape[:2], -1, attention.head_dim)
    q, k = (p(a).view(shape).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
    q, k = attention.qk_norm(q) * attention.qk_scale_factor, attention.qk_norm(k)
    rotary = modeling.MuseSparkTextRotaryEmbedding(attention.config).to(stream.device)
    q, k = modeling.apply_rotary_pos_emb(q, k, *rotary(a, positions[None].to(stream.device)))
    return {
        "next_q": q[0].transpose(0, 1).flatten(1), "next_gate": attention.gate_proj(a)[0],
        "next_k_cache": k[0].transpose(0, 1).flatten(1), "next_v_cache": attention.v_proj(a)[0],
    }  # fmt: skip


def compare(verifier: Any, first: Any, second: Any, cases: list[tuple[int, bool]]) -> None:
    """A launch of 16 tokens for each case (context, tree), after a prefix of as many random rows; what it makes against
    transformers' layer. All cases in fp32 first, then in bf16: a layer that was rounded stays so."""
    graph, device = verifier.graph, verifier.session.device
    c, tensors = graph.attributes["config"], graph.tensors
    width = tensors["q"].shape[1]
    made, passes = [], []
    for dtype in (torch.float32, torch.bfloat16):
        first.self_attn.config._experts_implementation = "eager" if dtype is torch.float32 else "grouped_mm"
        for i, (context, tree) in enumerate(cases):
            step = Step.random_tree(16, context, seed=i) if tree else Step.chain(16, context)
            g = torch.Generator(device).manual_seed(i)
            rows = torch.randn(context + 16, c.hidden, generator=g, device=device)
            positions = torch.tensor([*range(context), *step.positions], device=device)
            visible = torch.ones(context + 16, context + 16, dtype=torch.bool, device=device).tril()
            visible[context:, context:] = step.visible().to(device)
            visible &= positions[:, None] - positions[None] < c.window
            whole = layer_in(first, dtype, rows, positions, visible)
            end = slice(context, context + 16)
            out = projected(second, dtype, whole.stream[end], positions[end])
            passes.append((whole.ids[end], {"attended": whole.attended[end], "stream_out": whole.stream[end], **out}))
            if dtype is torch.bfloat16:
                continue
            stream = rows[end].clone()
            given = {
                "stream": stream, "q": whole.q[end, :width].bfloat16(), "gate": whole.gate[end, :width].bfloat16(),
                "rotary": rotary(tensors["rotary"].shape[0]).to(device),
            }  # fmt: skip
            numbers = range(max(0, context + 1 - c.window), context + 16)
            for name, x in (("k_cache", whole.k), ("v_cache", whole.v)):
                given[name] = torch.full(tensors[name].shape, float("nan"), dtype=torch.bfloat16, device=device)
                put(given[name], numbers, x[numbers.start :, : tensors[name].shape[0]].bfloat16())
            inputs = Inputs(step=step, stream=stream, ranks=(given,), env={"stream": stream})
            made.append(verifier.launch(inputs, whole.ids[end].int().cpu()))
    for i, case in enumerate(cases):
        (ids, want), (twin_ids, twin), ours = passes[i], passes[len(cases) + i], made[i]
        same = (ids.sort(1).values == twin_ids.sort(1).values).all(1)  # where bf16 takes another expert it says nothing
        assert same.sum() >= 8, case
        for name, x in want.items():
            mine = ours[name].flatten(1)[same]
            n = mine.shape[1]  # this rank's heads come first
            verdict = judge(mine, x.flatten(1)[same, :n].float(), twin[name].flatten(1)[same, :n].float())
            assert verdict, f"{case}, {name}: {verdict}"
