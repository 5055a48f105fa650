"""The unit kernels that tests/gpu/test_primitives.py launches: they compile, and leave no wrapper out."""

import re

import pytest
from kernels.cases import CASES, FILES, HERE, Case

from megagen import resources
from megagen.compile import compile_source
from megagen.errors import CompileError
from megagen.settings import Settings

BUILT_IN = re.compile(
    r"\b(?:__(?!nv|global|device|forceinline|launch|grid|shared|align|cvta)[a-z_]+|rsqrtf|fmaf)(?=\()"
)


@pytest.mark.parametrize("file", FILES)
def test_kernels_compile(file: str) -> None:
    source = (HERE / file).read_text("utf-8")
    assert set(FILES[file]) == set(re.findall(r'extern "C" __global__ .*?\b(\w+)\(const', source))
    built = compile_source(source, kernels=FILES[file], archs=["sm_90a"], settings=Settings.from_env())["sm_90a"]
    assert "warning" not in built.log
    assert "Performance Loss" not in built.log  # products of a warpgroup that the compiler makes wait for each other
    for report in built.kernels.values():
        assert report.spill_store_bytes == 0 and report.traps in (0, None)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_what_only_hopper_has_is_refused_for_others(arch: str) -> None:
    source = (HERE / "wgmma.cu").read_text("utf-8")
    assert {c.only for c in CASES if c.file == "wgmma.cu"} == {"sm_90a"}
    with pytest.raises(CompileError, match=r"wgmma\.cuh is for sm_90a alone"):
        compile_source(source, kernels=FILES["wgmma.cu"], archs=[arch], settings=Settings.from_env())


def test_every_wrapper_and_built_in_has_a_case() -> None:
    headers = resources.headers()
    wrappers = {
        name
        for path, text in headers.items()
        if path.startswith("megagen/ptx/")
        for name in re.findall(r"^MEGAGEN_DEVICE \w+ (\w+)\(", text, re.MULTILINE)
    }
    assert len(wrappers) > 80
    used = "\n".join((HERE / file).read_text("utf-8") for file in FILES)
    assert wrappers - set(re.findall(r"\bptx::(\w+)", used)) == set()
    built_in = {name for text in headers.values() for name in BUILT_IN.findall(text)}
    assert {"__shfl_sync", "fmaf"} <= built_in
    assert built_in - set(BUILT_IN.findall(used)) == set()


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_cases_take_their_own_expectation_and_notice_another(case: Case) -> None:
    import numpy as np

    data = case.data
    with np.errstate(over="ignore", invalid="ignore"):
        right = data.expected if data.unit is None else data.expected.astype(np.float32).view(np.uint32)
    right = np.ascontiguousarray(right).reshape(-1)
    assert case.check(right)[1] <= 1
    wrong = right.copy()
    wrong[wrong.size // 2] ^= 0x40000000
    with pytest.raises(AssertionError, match=f"{case.name}: 1 of"):
        case.check(wrong)
