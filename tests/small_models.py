"""Small Muse Spark models as transformers makes them, their layers, and the part that the expert block computes."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from megagen.models.muse_spark import MuseSparkConfig


def small_model(config: MuseSparkConfig, *, sliding: bool = False) -> Any:
    """A model with these dimensions; bf16, its router and gates fp32. ``sliding``: every layer has the config's
    sliding-window attention, else there is hardly any."""
    from transformers import MuseSparkConfig as HFConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkForConditionalGeneration

    c = config
    attention: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if sliding:
        attention = {
            "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
            "sliding_window": c.window, "qk_scale_factor": c.qk_scale,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
            "layer_types": ["sliding_attention"] * c.layers, "layer_rope_theta": [c.rope_theta] * c.layers,
        }  # fmt: skip
    made = HFConfig(
        text_config={
            "hidden_size": c.hidden, "moe_hidden_size": c.moe_hidden, "moe_intermediate_size": c.intermediate,
            "num_local_experts": c.experts, "num_hidden_layers": c.layers, "intermediate_size": 64, "vocab_size": 64,
            "bos_token_id": 0, "eos_token_id": 1, **attention,
        },
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        audio_config={
            "hidden_sizes": (16,), "patch_sizes": (4,), "depths": (1,), "num_hidden_layers": 1,
            "out_hidden_size": c.hidden,
        },
    )  # fmt: skip
    return MuseSparkForConditionalGeneration._from_config(made, dtype=torch.bfloat16).requires_grad_(False)


def draw(model: Any) -> None:
    """Random weights that leave activations of order one and the router's scores apart."""
    for name, p in model.model.language_model.named_parameters():
        torch.nn.init.normal_(p, std=0.1 if p.ndim == 1 else p.shape[-1] ** -0.5 * (8 if "mlp.gate." in name else 1))


def cast(layer: Any, dtype: torch.dtype) -> None:
    """As from_pretrained(dtype=...) leaves a layer: its router and residual gates keep their fp32 values."""
    exact = (layer.post_attention_residual_gate, layer.post_feedforward_residual_gate, layer.mlp.gate)
    kept = [{n: t.float() for n, t in module.state_dict().items()} for module in exact]
    layer.to(dtype)
    for module, values in zip(exact, kept, strict=True):
        module.float().load_state_dict(values)


def block_output(layer: Any, stream: torch.Tensor) -> torch.Tensor:
    """The lines of MuseSparkTextDecoderLayer.forward after attention."""
    hidden = layer.mlp(layer.pre_feedforward_layernorm(stream))
    return layer.post_feedforward_residual_gate(stream, layer.post_feedforward_layernorm(hidden))


def block_in(layer: Any, dtype: torch.dtype, rows: torch.Tensor) -> torch.Tensor:
    """The block's output [tokens, hidden] in fp32, computed by the layer's own modules in ``dtype``."""
    cast(layer.to(rows.device), dtype)
    return block_output(layer, rows.to(dtype)[None])[0].float()


class Pass(NamedTuple):
    """What a layer made of a sequence of n tokens, in the dtype that it ran in."""

    stream: torch.Tensor  # [n, hidden]
    q: torch.Tensor  # [n, heads * head_dim]: normed, scaled, rotated
    gate: torch.Tensor  # [n, heads * head_dim]: raw
    k: torch.Tensor  # [n, kv_heads, head_dim]: normed, rotated
    v: torch.Tensor  # [n, kv_heads, head_dim]
    attended: torch.Tensor  # [n, heads * head_dim]: normed and gated, what o_proj gets
    ids: torch.Tensor  # [n, top_k]: the experts, in transformers' order


def layer_in(
    layer: Any, dtype: torch.dtype, rows: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
) -> Pass:
    """The whole decoder layer, with eager attention, in ``dtype`` on a sequence: ``rows`` [n, hidden], ``positions``
    int64 [n], ``visible`` bool [n, n] (token i sees token j; the window too is the caller's)."""
    from transformers.models.muse_spark import modeling_muse_spark as modeling

    cast(layer.to(rows.device), dtype)
    attention, config = layer.self_attn, layer.self_attn.config
    config._attn_implementation = "eager"
    stream = rows.to(dtype)[None]
    rotary = modeling.MuseSparkTextRotaryEmbedding(config).to(rows.device)
    mask = torch.zeros(visible.shape, dtype=dtype, device=rows.device)
    mask.masked_fill_(~visible.to(rows.device), torch.finfo(dtype).min)
    seen: dict[str, torch.Tensor] = {}
    eager = modeling.eager_attention_forward

    def watched(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> Any:
        seen.update(q=q[0].transpose(0, 1).flatten(1), k=k[0].transpose(0, 1), v=v[0].transpose(0, 1))
        return eager(module, q, k, v, *rest, **more)

    hooks = [
        attention.gate_proj.register_forward_hook(lambda m, args, out: seen.update(gate=out[0])),
        attention.o_proj.register_forward_hook(lambda m, args, out: seen.update(attended=args[0][0])),
        layer.mlp.gate.register_forward_hook(lambda m, args, out: seen.update(ids=out[2])),
    ]
    try:
        with patch.object(modeling, "eager_attention_forward", watched):
            out = layer(
                stream,
                position_embeddings=(
                    rotary(stream, positions[None].to(rows.device))
                    if config.layer_rope_theta[attention.layer_idx]
                    else None
                ),
                attention_mask=mask[None, None],
            )
    finally:
        for hook in hooks:
            hook.remove()
    return Pass(out[0], **seen)
