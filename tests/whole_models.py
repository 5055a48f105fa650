"""Whole Muse Spark checkpoints of small size as transformers writes them, some layers' experts in NVFP4 as ModelOpt
does, and the same model in transformers to be asked what follows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megagen.models.muse_spark import MuseSparkConfig

PREFIX = "model.language_model.layers."
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def whole_model(config: MuseSparkConfig, seed: int = 0, device: str = "cpu") -> Any:
    """A model with random weights, bf16, its router and gates fp32; attention kinds as transformers fills them in.
    The same seed gives other numbers on another kind of device."""
    from transformers import MuseSparkConfig as HFConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkForConditionalGeneration

    c = config
    torch.manual_seed(seed)
    made = HFConfig(
        text_config={
            "hidden_size": c.hidden, "moe_hidden_size": c.moe_hidden, "moe_intermediate_size": c.intermediate,
            "num_local_experts": c.experts, "num_hidden_layers": c.layers, "intermediate_size": 64,
            "vocab_size": c.vocab, "bos_token_id": 0, "eos_token_id": 1, "num_attention_heads": c.heads,
            "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "sliding_window": c.window,
            "qk_scale_factor": c.qk_scale,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
            "tie_word_embeddings": False,
        },
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        audio_config={
            "hidden_sizes": (16,), "patch_sizes": (4,), "depths": (1,), "num_hidden_layers": 1,
            "out_hidden_size": c.hidden,
        },
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device(device):
        model = MuseSparkForConditionalGeneration._from_config(made, dtype=torch.bfloat16).requires_grad_(False)
    for name, p in model.model.language_model.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(p)
        else:
            std = 0.1 if p.ndim == 1 else p.shape[-1] ** -0.5 * (8 if "mlp.gate." in name else 1)
            # A layer adds little to the stream, as in a trained model: else small errors grow from layer to layer.
            mean = -0.45 if "residual_gate" in name else 1.0 if name == "norm.weight" else 0.0
            torch.nn.init.normal_(p, mean=mean, std=std)
    for layer in model.model.language_model.layers:
        # Which experts a token has does not hang on a rounding: eight stand out, others in each layer.
        chosen = torch.randperm(c.experts, device=device)[: c.top_k]
        layer.mlp.gate.e_score_correction_bias.zero_()[chosen] = 2.0
    # Logits of a few, so that what follows is seldom a matter of rounding.
    torch.nn.init.normal_(model.lm_head.weight, std=16 * c.hidden**-0.5)
    return model


def write(config: MuseSparkConfig, folder: Path, *, quantised: bool = True, seed: int = 0, device: str = "cpu") -> None:
    """A checkpoint in several shards. ``quantised``: the experts of all layers but the first and the last in NVFP4."""
    whole_model(config, seed, device).save_pretrained(folder, max_shard_size="64MB")
    if not quantised:
        return
    g = torch.Generator().manual_seed(seed)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    experts = {
        f"{PREFIX}{i}.mlp.experts.{name}": shape
        for i in range(1, config.layers - 1)
        for name, shape in (
            ("gate_up_proj", (config.experts, 2 * config.intermediate, config.moe_hidden)),
            ("down_proj", (config.experts, config.moe_hidden, config.intermediate)),
        )
    }
    for file in sorted(set(index["weight_map"].values())):
        tensors = load_file(folder / file)
        for name in [n for n in tensors if n in experts]:
            made = _quantised(name, experts[name], g)
            del tensors[name], index["weight_map"][name]
            tensors |= made
            index["weight_map"] |= dict.fromkeys(made, file)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    quantisation = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quantisation))


def _quantised(name: str, shape: tuple[int, int, int], g: torch.Generator) -> dict[str, torch.Tensor]:
    """Random codes and scales, with which activations stay of order one."""
    experts, rows, k = shape
    second = (experts, 2) if name.endswith("gate_up_proj") else (experts,)
    scales = torch.randint(0x30, 0x40, (experts, rows, k // 16), generator=g, dtype=torch.uint8)
    deviation = float(E2M1.square().mean().sqrt()) * 1.2
    return {
        name: torch.randint(256, (experts, rows, k // 2), generator=g, dtype=torch.uint8),
        f"{name}_weight_scale": scales.view(torch.float8_e4m3fn),
        f"{name}_weight_scale_2": (torch.rand(second, generator=g) + 0.5) * k**-0.5 / deviation,
        f"{name}_input_scale": torch.ones(second),
    }


def dequantised(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """fp32 [experts, rows, k]: ModelOpt's format written out, low nibble first, one scale for 16 along K."""
    codes, scales, second = tensors[name], tensors[f"{name}_weight_scale"], tensors[f"{name}_weight_scale_2"]
    rows = codes.shape[1]
    factor = second.repeat_interleave(rows // 2, 1)[..., None] if second.ndim == 2 else second[:, None, None]
    out = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1])
    for made, code, scale, by in zip(out, codes, scales, factor, strict=True):  # an expert: an index takes 8 bytes
        made[..., 0::2], made[..., 1::2] = E2M1[(code & 15).long()], E2M1[(code >> 4).long()]
        made *= scale.float().repeat_interleave(16, -1) * by
    return out


@dataclass
class Reference:
    """transformers' model of a checkpoint, its NVFP4 experts dequantised, in one dtype."""

    model: Any

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: str = "cpu") -> Reference:
        from transformers import AutoConfig
        from transformers.models.muse_spark.modeling_muse_spark import MuseSparkForConditionalGeneration

        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        for name in [n for n in tensors if f"{n}_weight_scale" in tensors]:
            tensors[name] = dequantised(tensors, name).to(dtype)
            for suffix in ("_weight_scale", "_weight_scale_2", "_input_scale"):
                del tensors[name + suffix]
        made = MuseSparkForConditionalGeneration._from_config(
            AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation="eager"
        )
        assert made.state_dict().keys() == tensors.keys()
        exact = ("mlp.gate.", "residual_gate.gate")  # as from_pretrained keeps them
        for name in tensors:
            keep = any(x in name for x in exact)
            module, _, leaf = name.rpartition(".")
            owner = made.get_submodule(module)
            value = tensors[name].float() if keep else tensors[name].to(dtype)
            if leaf in dict(owner.named_buffers(recurse=False)):
                owner.register_buffer(leaf, value)
            else:
                setattr(owner, leaf, torch.nn.Parameter(value, requires_grad=False))
        return cls(made.to(device).eval())

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """fp32 [len(ids), vocab] after each of them."""
        device = self.model.lm_head.weight.device
        out = self.model(input_ids=torch.tensor([ids], device=device), use_cache=False)
        found: torch.Tensor = out.logits[0].float()
        return found
