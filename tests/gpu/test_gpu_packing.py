"""Weights packed by a GPU and loaded to one: the bytes that a CPU makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("experts", ["nvfp4", "bf16"])
def test_a_gpu_packs_as_a_cpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: str) -> None:
    import torch
    from safetensors.torch import save_file

    from megagen.ir.graph import DType
    from megagen.models.muse_spark import MuseSparkConfig, expert_block
    from megagen.weights import checkpoint, packed

    config = MuseSparkConfig(hidden=2048, moe_hidden=2048, intermediate=1024, experts=16)
    graph, tensors = expert_block(2, experts=experts, config=config), {}
    for w in graph.weights().values():
        for name, shape, types in checkpoint._expected(w, 2):
            drawn = torch.randint(0x7F, shape, dtype=torch.uint8) if w.dtype is DType.NVFP4 else torch.randn(shape)
            value = drawn.view(torch.float8_e4m3fn) if types == ("F8_E4M3",) else drawn
            plain = {"BF16": torch.bfloat16, "F32": torch.float32}.get(types[0])
            tensors[f"model.layers.0.{name}"] = value if plain is None else value.to(plain)
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    monkeypatch.setattr(packed, "STAGING", 1 << 20)  # several turns of both buffers
    part = packed.Part(0, graph)
    cpu = packed.pack(tmp_path, [part], rank=1, folder=tmp_path / "cpu")
    gpu = packed.pack(tmp_path, [part], rank=1, folder=tmp_path / "gpu", device="cuda")
    assert gpu.files[0].path.read_bytes() == cpu.files[0].path.read_bytes()
    want = cpu.load(0)
    for name, value in gpu.load(0, "cuda").items():
        assert value.is_cuda
        assert torch.equal(value.cpu(), want[name])
