"""Small Muse Spark models as transformers makes them, and the part of a layer that the expert block computes."""

from __future__ import annotations

from typing import Any

import torch

from megagen.models.muse_spark import MuseSparkConfig


def small_model(config: MuseSparkConfig) -> Any:
    """A model with these dimensions and hardly any attention; bf16, its router and gates fp32."""
    from transformers import MuseSparkConfig as HFConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkForConditionalGeneration

    c = config
    made = HFConfig(
        text_config={
            "hidden_size": c.hidden, "moe_hidden_size": c.moe_hidden, "moe_intermediate_size": c.intermediate,
            "num_local_experts": c.experts, "num_hidden_layers": c.layers, "intermediate_size": 64, "vocab_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1,
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


def block_output(layer: Any, stream: torch.Tensor) -> torch.Tensor:
    """The lines of MuseSparkTextDecoderLayer.forward after attention."""
    hidden = layer.mlp(layer.pre_feedforward_layernorm(stream))
    return layer.post_feedforward_residual_gate(stream, layer.post_feedforward_layernorm(hidden))


def block_in(layer: Any, dtype: torch.dtype, rows: torch.Tensor) -> torch.Tensor:
    """The block's output [tokens, hidden] in fp32, computed by the layer's own modules in ``dtype``."""
    layer.to(rows.device).to(dtype)
    for gate in (layer.post_feedforward_residual_gate, layer.mlp.gate):
        gate.float()
    return block_output(layer, rows.to(dtype)[None])[0].float()
