"""The op-by-op baseline on the CPU: its weights in torch, its kernels in Triton's interpreter where there is Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from baseline_layers import built, op_by_op, refused

from megagen.bench.baseline import tiles
from megagen.bench.baseline.exchange import Place, Ranks, StandIns
from megagen.bench.baseline.prepare import SCALE_EXPONENT, words
from megagen.bench.routes import routes
from megagen.errors import MegagenError
from megagen.models.muse_spark import sliding_layer
from megagen.ops.attention import Attention
from megagen.ops.dense_gemm import DenseGemm
from megagen.ops.expert_gemm import ExpertGemm
from megagen.ops.packing import Nvfp4
from megagen.runtime.stack import handed_on
from megagen.runtime.step import Step
from megagen.weights.random import random_layer

# Where there is a GPU, its tests run the kernels, and an interpreter would take their place. Asked for before Triton is
# imported.
INTERPRETED = find_spec("triton") is not None and not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parent.parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="triton is not installed, or has a GPU")
EXTREMES = (0x00, 0x01, 0x02, 0x07, 0x08, 0x30, 0x7D, 0x7E)


# -- weights ---------------------------------------------------------------------------------------------------


def as_bf16(bits: torch.Tensor) -> torch.Tensor:
    return (bits.int() << 16).view(torch.float32)


@pytest.fixture(scope="module")
def nvfp4() -> Nvfp4:
    """All codes in blocks of all scales that matter."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (2, 16, 64), generator=g, dtype=torch.uint8)
    scales = torch.tensor(EXTREMES, dtype=torch.uint8)[torch.randint(len(EXTREMES), (2, 16, 8), generator=g)]
    return Nvfp4(codes, scales.view(torch.float8_e4m3fn), torch.tensor([[1.5, 0.75], [0.3, 2.0]]))


def test_words_hold_the_very_weights(nvfp4: Nvfp4) -> None:
    """Decoded as the kernel does it, by bits, in the order that the kernel's planes have."""
    found = words(nvfp4)
    u = found.words.int() & 0xFFFF
    pairs = (u & 0x81C0, u >> 6 & 0x01C0 | u << 10 & 0x8000, u << 4 & 0x81C0, u << 6 & 0x80C0 | u >> 2 & 0x0100)
    values = torch.stack([as_bf16(x & 0xFFFF).unflatten(-1, (-1, 4)) for x in pairs], dim=-2).flatten(-3)
    scale = as_bf16((found.scales.int() << 4) + (229 << 7)).repeat_interleave(16, dim=-1)
    product = (values.double() * scale.double()).to(torch.bfloat16)
    assert torch.equal(product.double(), values.double() * scale.double()), "a bf16 product must be exact"
    for expert in range(2):
        one = Nvfp4(*(x[expert] for x in nvfp4))
        factor = found.scale_2[expert].double().repeat_interleave(8)[:, None]
        assert torch.equal((product[expert].double() * factor).float(), one.dequantise())
    assert torch.equal(found.scale_2, nvfp4.scale_2 * 2.0**SCALE_EXPONENT)


def test_a_scale_of_zero_leaves_nothing(nvfp4: Nvfp4) -> None:
    found = words(nvfp4)
    zero = (nvfp4.scales.view(torch.uint8) == 0).repeat_interleave(4, dim=-1)
    assert zero.any()
    assert not found.words[zero].any()
    assert found.words[~zero].any()


# -- kernels ---------------------------------------------------------------------------------------------------


CASES = {
    "layer": ("muse_swa.py", 3, routes(9, 3, pool=16)),
    "all to the same experts": ("muse_moe.py", 9, routes(8, 9, pool=16)),
    "its own routing": ("muse_moe.py", 2, None),
}


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_right(case: str) -> None:
    schedule, tokens, table = CASES[case]
    of = built(schedule, tokens=tokens)
    layer = op_by_op(of, table=table)
    layer.launch(1)
    assert not refused(of, layer.values(), table)


@interpreted
def test_products_of_torch_are_right() -> None:
    of, table = built("muse_swa.py", tokens=2), routes(8, 2, pool=16)
    dense = [op.name for op in of.graph.ops if isinstance(op, DenseGemm)]
    layer = op_by_op(of, table=table, tiles=dict.fromkeys(dense, tiles.CUBLAS))
    layer.launch(1)
    assert not refused(of, layer.values(), table)


class Copied:
    """One rank, whose messages come to their reader by a launch of their own."""

    def gathered(self, rows: int, columns: int) -> Place:
        write, read = (torch.full((1, rows, columns), torch.nan, dtype=torch.bfloat16) for _ in range(2))
        return Place(write, read, lambda: read.copy_(write))

    reduced = gathered


@interpreted
def test_messages_are_sent_before_they_are_read() -> None:
    of, table = built("muse_swa.py", tokens=2, tp=1), routes(8, 2, pool=16)
    layer = op_by_op(of, table=table, exchange=Copied())
    layer.launch(1)
    assert not refused(of, layer.values(), table)
    assert sum(x.meta is None for x in layer.layers[0]) == 5, "a layer has five exchanges"


@needs_triton
def test_layers_hand_on() -> None:
    """The second layer reads what the first made, and the first what the last one made."""
    of = built("muse_swa.py", tokens=1)
    layer = op_by_op(of)
    pairs = handed_on(of.plan)
    for read, made in pairs.items():
        for index in range(2):
            assert layer._tensor(made, index).data_ptr() == layer._tensor(read, 1 - index).data_ptr(), (read, made)
            assert layer._tensor(made, index).data_ptr() != layer._tensor(read, index).data_ptr(), (read, made)
    of.layers.append(random_layer(of.graph, 2))
    three = op_by_op(of)
    assert three._tensor("next_k_cache", 2).data_ptr() == three._tensor("k_cache", 0).data_ptr()
    assert three._tensor("next_q", 2).data_ptr() == three._tensor("q", 1).data_ptr()


@needs_triton
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("muse_swa.py", {"experts": "bf16"}),
        ("muse_moe.py", {"split": "nk"}),
        ("muse_swa.py", {"all_reduce": "two_shot"}),
    ],
)
def test_what_has_no_kernel_is_refused(schedule: str, options: dict[str, str]) -> None:
    of = built(schedule, tokens=1, options=options)
    with pytest.raises(MegagenError, match="baseline"):
        op_by_op(of)


@needs_triton
def test_a_step_of_other_tokens_is_refused() -> None:
    of = built("muse_moe.py", tokens=2)
    of = replace(of, step=Step.chain(1))
    with pytest.raises(MegagenError, match="2 tokens was given a step of 1"):
        op_by_op(of)


KERNELS = {"dense", "expert_gemm", "top_k", "rms_norm", "residual", "combine", "attend", "merge", "heads"}


@needs_triton
def test_the_full_layer_compiles(tmp_path: Path) -> None:
    """Every kernel as it is launched at full size, for the H200, without one."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    script = [sys.executable, str(ROOT / "tests" / "baseline_compiled.py"), "1"]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} == KERNELS
    assert all(int(shared) <= 227 * 1024 for _, _, shared in rows)


# -- cuts and exchanges ----------------------------------------------------------------------------------------


def test_candidates_fit_the_full_layer() -> None:
    graph = sliding_layer()
    tried = {op.name: tiles.candidates(op, graph.tp, True) for op in graph.ops}
    for op in graph.ops:
        found = [t for t in tried[op.name] if not t.cublas]
        if isinstance(op, DenseGemm):
            assert tried[op.name][-1] is tiles.CUBLAS
            assert len(found) == len(set(found)) >= 3
            for t in found:
                assert op.rows % t.rows == 0
                assert op.k % (t.split * t.k) == 0
                assert t.split <= tiles.MOST_SPLITS
        elif isinstance(op, ExpertGemm):
            assert len(found) == len(tiles.EXPERTS)
        elif isinstance(op, Attention):
            assert len(found) == len(tiles.ATTENTION)
        else:
            assert not found


def test_a_size_without_a_kernel_is_refused() -> None:
    op = next(op for op in sliding_layer().ops if isinstance(op, ExpertGemm))
    with pytest.raises(MegagenError, match="no kernel for the size of gate_up"):
        tiles.candidates(op.model_copy(update={"columns": 8 * 24}), 8, True)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An op and tries of three tiles, whose times are what they are called with."""
    monkeypatch.setattr(tiles, "_time", lambda work: work())
    op = SimpleNamespace(name="pooler")

    def tries(*times: float | Exception) -> Any:
        def work(time: float | Exception) -> Any:
            def run() -> float:
                if isinstance(time, Exception):
                    raise time
                return time

            return run

        return op, {tiles.Tile(16 << i): work(time) for i, time in enumerate(times)}

    return tries


def test_the_fastest_tile_is_taken(three: Any) -> None:
    assert tiles.Tuned().fastest(*three(8.0, 4.0, 6.0), 2).rows == 32
    assert tiles.Tuned().fastest(*three(8.0, 7.95, 9.0), 2).rows == 16, "not by less than runs differ"


def test_what_does_not_run_is_left_out_and_told(three: Any) -> None:
    tuned = tiles.Tuned()
    assert tuned.fastest(*three(RuntimeError("out of\nshared memory"), 9.0, 8.0), 2).rows == 64
    told = tuned.log["pooler"]
    assert list(told.values()) == ["RuntimeError: out of shared memory", "4.50 µs", "4.00 µs"]
    with pytest.raises(MegagenError, match="no kernel of the baseline runs pooler"):
        tuned.fastest(*three(*[RuntimeError("no")] * 3), 2)


def test_a_lost_device_is_no_failed_try(three: Any) -> None:
    with pytest.raises(torch.AcceleratorError):
        tiles.Tuned().fastest(*three(torch.AcceleratorError("illegal address"), 9.0, 8.0), 2)


def test_stand_ins_write_what_is_read() -> None:
    place = StandIns(4, torch.device("cpu")).gathered(3, 32)
    assert place.send is None
    assert place.write.data_ptr() == place.read.data_ptr()
    assert place.read.shape == (4, 3, 32)


def test_a_rank_sends_its_own_slot(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        place = Ranks(dist.group.WORLD, torch.device("cpu")).gathered(3, 32)
        assert place.write.shape == (1, 3, 32)
        place.write.fill_(7)
        assert place.send is not None
        place.send()
        assert bool((place.read == 7).all())
    finally:
        dist.destroy_process_group()


def test_without_triton_the_baseline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megagen.bench import baseline

    monkeypatch.setattr(baseline, "find_spec", lambda name: None)
    with pytest.raises(MegagenError, match="needs Triton") as caught:
        baseline.refuse_unfit(sliding_layer())
    assert "megagen[baseline]" in caught.value.render()
