"""What changes the arithmetic, on the GPU: splits, expert formats, tensor-parallel sizes, a transformers checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megagen.bench.routes import routes
from megagen.cli import pipeline

pytestmark = pytest.mark.gpu

VARIANTS: dict[str, dict[str, Any]] = {
    "split=nk": {"options": {"split": "nk"}},
    "experts=bf16": {"options": {"experts": "bf16"}},
    "split=nk, experts=bf16, tp=4": {"options": {"split": "nk", "experts": "bf16"}, "tp": 4},
    "tp=1": {"tp": 1},
    "tp=2": {"tp": 2},
    "tp=4": {"tp": 4},
    "tokens=8": {"tokens": 8},
    "tokens=1": {"tokens": 1},
}


def verifier(rig: Any, request: pipeline.Request, weights: Any) -> Any:
    """``weights(graph)`` gives (packed, env)."""
    from megagen.bench.verify import Verifier
    from megagen.runtime.session import Session

    arch = "sm_90a"
    built = pipeline.build(pipeline.check(request), [arch], rig.settings)
    return Verifier(Session(built.plan, built.artifacts[arch].path), built.graph, *weights(built.graph))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_within_the_promise(rig: Any, name: str) -> None:
    from megagen.weights.random import random_layer

    def weights(graph: Any) -> Any:
        made = random_layer(graph, 1, "cuda")
        return made.packed(), made.env(graph.tp)

    made = verifier(rig, pipeline.Request(Path("muse_moe.py"), "h200", **VARIANTS[name]), weights)
    try:
        top = made.session.plan.tokens
        for tokens in {1, top}:
            for table in (None, routes(min(49, 8 * tokens), tokens)):
                checks = made.check(tokens, route_override=table, seeds=range(2))
                assert not [str(c) for c in checks if not c]
    finally:
        made.session.close()


def test_a_checkpoint_of_transformers_gives_the_same_block(rig: Any, tmp_path: Path) -> None:
    """The stream after the block of a small model that transformers wrote, against its own modules in fp32 and bf16."""
    import torch

    from megagen.bench.verify import random_stream
    from megagen.models.muse_spark import MuseSparkConfig
    from megagen.ops.compare import judge
    from megagen.ops.reference import evaluate
    from megagen.weights.checkpoint import load_layer, load_reference

    hf = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    from transformers import MuseSparkConfig as HFConfig

    c = MuseSparkConfig(hidden=2048, moe_hidden=2048, intermediate=1024, experts=16, layers=2)
    torch.manual_seed(0)
    text = {
        "hidden_size": c.hidden, "moe_hidden_size": c.moe_hidden, "moe_intermediate_size": c.intermediate,
        "num_local_experts": c.experts, "num_hidden_layers": c.layers, "intermediate_size": 64, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    audio = {
        "hidden_sizes": (16,), "patch_sizes": (4,), "depths": (1,), "num_hidden_layers": 1, "out_hidden_size": c.hidden,
    }  # fmt: skip
    config = HFConfig(text_config=text, vision_config=vision, audio_config=audio)
    model = hf.MuseSparkForConditionalGeneration._from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    for name, p in model.model.language_model.named_parameters():  # activations of order one, scores apart
        torch.nn.init.normal_(p, std=0.1 if p.ndim == 1 else p.shape[-1] ** -0.5 * (8 if "mlp.gate." in name else 1))
    model.save_pretrained(tmp_path)

    def weights(graph: Any) -> Any:
        return load_layer(tmp_path, 1, graph, 0, device="cuda"), load_reference(tmp_path, 1, graph, device="cuda")

    request = pipeline.Request(Path("muse_moe.py"), "h200", tp=1, checkpoint=tmp_path)
    made = verifier(rig, request, weights)
    try:
        rows = random_stream(16, made.graph, 0, torch.device("cuda"))
        checks = made.check(16, seeds=range(4))
        assert not [str(x) for x in checks if not x]
        found = made.launch(rows)
        layers = [m for m in model.modules() if isinstance(m, hf.MuseSparkTextDecoderLayer)]

        def block(dtype: torch.dtype) -> torch.Tensor:
            layer = layers[1].to("cuda").to(dtype)
            for gate in (layer.post_feedforward_residual_gate, layer.mlp.gate):
                gate.float()
            stream = rows.to(dtype)[None]
            update = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(stream)))
            return layer.post_feedforward_residual_gate(stream, update)[0].float()

        model16 = block(torch.bfloat16)
        reference = block(torch.float32)
        # where a score's rounding changes an expert, the block computes something else: those tokens say nothing here
        env = {**made.env, made.input_name: rows}
        ids = [evaluate(made.graph, env, d)["routes.ids"].sort(1).values for d in (torch.float32, torch.bfloat16)]
        ids.append(found["routes"][:, :8].long().sort(1).values)
        same = (ids[0] == ids[1]).all(1) & (ids[0] == ids[2]).all(1)
        assert same.sum() >= 12
        assert judge(found["stream_out"][same], reference[same], model16[same])
    finally:
        made.session.close()
