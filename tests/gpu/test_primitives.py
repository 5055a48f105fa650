"""Every wrapper and built-in does on this GPU what the PTX ISA says, and what tests/kernels/cases.py expects of it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from kernels.cases import CASES, FILES, HERE, Case

from megagen.compile import compile_source
from megagen.compile.compiler import KNOWN
from megagen.runtime.driver import Geometry, Module, ParameterBlock, runs
from megagen.settings import Settings

pytestmark = pytest.mark.gpu

POISON = 0x5A5A5A5A  # of an output word that no one writes


@pytest.fixture(scope="module")
def arch() -> str:
    """The architecture to compile for, of the GPU at hand."""
    import torch

    capability = torch.cuda.get_device_capability()
    arch = next((a for a in KNOWN if runs(a, capability)), None)
    if arch is None:
        pytest.skip(f"the code is for none of this GPU's architectures {capability}")
    return arch


@pytest.fixture(scope="module")
def module(arch: str) -> Callable[[str], Module]:
    """A file's kernels, compiled and loaded."""
    import torch

    torch.cuda.synchronize()  # makes the primary context current
    loaded: dict[str, Module] = {}

    def load(file: str) -> Module:
        if file not in loaded:
            source = (HERE / file).read_text("utf-8")
            built = compile_source(source, kernels=FILES[file], archs=[arch], settings=Settings.from_env())[arch]
            loaded[file] = Module(built.path)
        return loaded[file]

    return load


def launch(module: Module, case: Case) -> Any:
    import numpy as np
    import torch

    inputs = [torch.from_numpy(words.view(np.int32).copy()).cuda() for words in case.inputs]
    out = torch.full((case.words,), POISON, dtype=torch.int32, device="cuda")
    pointers = [t.data_ptr() for t in (*inputs, out)]
    geometry = Geometry(case.blocks, case.threads, case.cluster, case.shared_bytes, pdl=False)
    kernel = module.kernel(case.kernel, geometry)
    kernel.launch(ParameterBlock(struct.pack(f"{len(pointers)}Q", *pointers)), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return out.cpu().numpy().view(np.uint32)


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_primitives(
    case: Case,
    arch: str,
    module: Callable[[str], Module],
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Twice: a launch leaves nothing behind that a second would trip over."""
    if case.only not in ("", arch):
        pytest.skip(f"{case.file} is for {case.only} only")
    for _ in range(2):
        worst, share = case.check(launch(module(case.file), case))
    if case.unit:
        record_property("worst", worst)
        with capsys.disabled():
            print(f"\n{case.name}: worst error {worst:.4g} {case.unit}, {share:.2f} of the bound")  # noqa: T201
