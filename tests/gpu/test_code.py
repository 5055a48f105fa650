"""Where a module says that its kernel's machine code lies, it lies; and who asks L2 for it changes no bit."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from megagen.compile import compile_source
from megagen.compile.report import sections
from megagen.runtime import driver
from megagen.settings import Settings

pytestmark = pytest.mark.gpu

WARMED = {"warm_code": "16", "warm_next": "combine"}
PEEK = """
#include <megagen/types.cuh>
struct Params { const megagen::u32* from; megagen::u32* to; megagen::u64 words; };
extern "C" __global__ void peek(const __grid_constant__ Params p) {
  for (megagen::u64 i = threadIdx.x; i < p.words; i += 32) p.to[i] = p.from[i];
}
"""


def test_a_kernels_code_is_where_the_module_says(layers: Any) -> None:
    import torch

    session = layers.session(WARMED)
    address, size = session.code
    path = layers.built(WARMED).artifacts["sm_90a"].path
    text = sections(path.read_bytes())[f".text.{session.kernels[0].name}"]
    assert size == len(text)

    made = compile_source(PEEK, kernels=["peek"], archs=["sm_90a"], settings=Settings.from_env())["sm_90a"]
    module = driver.Module(made.path)
    seen = torch.zeros(size // 4, dtype=torch.int32, device=session.device)
    kernel = module.kernel("peek", driver.Geometry(blocks=1, threads=32, cluster=1, shared=0, pdl=False))
    kernel.launch(driver.ParameterBlock(struct.pack("<3Q", address, seen.data_ptr(), size // 4)), 0)
    torch.cuda.synchronize()
    wanted = torch.frombuffer(bytearray(text), dtype=torch.int32)
    alike = (seen.cpu() == wanted).float().mean().item()
    assert alike > 0.95, alike  # but for what the loader fills in
    module.unload()


def test_warm_code_changes_no_bit(layers: Any) -> None:
    import torch

    usual, warmed = (layers.verifier(layers.session(choices)) for choices in ({}, WARMED))
    inputs = usual.inputs(16, 3)
    # its own code stands in for the next kernel's
    layer = warmed.layers[0].tensors
    warmed.layers[0] = warmed.session.bind(layer, then=layers.session({**WARMED, "warm_code": "4"}))
    wanted, found = usual.launch(inputs), warmed.launch(inputs)
    for name, x in found.items():
        assert torch.equal(x.view(torch.uint8), wanted[name].view(torch.uint8)), name
