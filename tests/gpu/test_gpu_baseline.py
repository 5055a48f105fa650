"""The op-by-op baseline at full size, TP8 on one GPU: right however it is cut, the same bits however it is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baseline_layers import Layers, built, op_by_op, refused

from megagen.bench.routes import routes

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

CUTS = range(7)  # as many as an op has candidates, cuBLAS among them


def full(schedule: str, **more: Any) -> Layers:
    return built(schedule, **({"tokens": 16, "context": 4096, "tree": False} | more), tiny=False, tp=8, device="cuda")


def tiles(of: Layers, cut: int) -> dict[str, Any]:
    """Every op's candidate of this number, or its last."""
    from megagen.bench.baseline.tiles import candidates

    found = {op.name: candidates(op, of.graph.tp, True) for op in of.graph.ops}
    return {name: some[min(cut, len(some) - 1)] for name, some in found.items() if some}


def run(of: Layers, table: torch.Tensor | None, **more: Any) -> dict[str, torch.Tensor]:
    layer = op_by_op(of, table=table, **more)
    layer.launch(1)
    torch.cuda.synchronize()
    found: dict[str, torch.Tensor] = layer.values()
    return found


@pytest.fixture(scope="module")
def usual() -> Layers:
    return full("muse_swa.py")


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_is_right(usual: Layers, cut: int) -> None:
    table = routes(49, 16)
    assert not refused(usual, run(usual, table, tiles=tiles(usual, cut)), table)


@pytest.mark.parametrize("experts", [8, 113, None])
def test_routes(usual: Layers, experts: int | None) -> None:
    table = None if experts is None else routes(experts, 16)
    assert not refused(usual, run(usual, table, tiles=tiles(usual, 0)), table)


@pytest.mark.parametrize(
    ("tokens", "context", "tree"), [(16, 1, True), (16, 2040, True), (7, 5000, True), (1, 0, False)]
)
def test_steps(tokens: int, context: int, tree: bool) -> None:
    of = full("muse_swa.py", tokens=tokens, context=context, tree=tree)
    assert not refused(of, run(of, None, tiles=tiles(of, 0)), None)


def test_the_expert_block() -> None:
    of, table = full("muse_moe.py"), routes(49, 16)
    assert not refused(of, run(of, table, tiles=tiles(of, 0)), table)


def test_plain_triton_decodes_the_same_weights(usual: Layers) -> None:
    table = routes(49, 16)
    fast, plain = (run(usual, table, tiles=tiles(usual, 0), asm=asm) for asm in (True, False))
    assert not [name for name in fast if not torch.equal(fast[name], plain[name])]


def test_launches_that_overlap_leave_the_same_bits(usual: Layers) -> None:
    """In a graph with overlap, replayed, against launches that wait for each other; each replay begins anew."""
    table = routes(49, 16)
    chosen = tiles(usual, 0)
    want = op_by_op(usual, table=table, tiles=chosen, pdl=False)
    want.launch()
    ours = op_by_op(usual, table=table, tiles=chosen)
    begin = {name: [x.clone() for x in places] for name, places in ours._state.items()}
    replay = ours.capture()
    for index in range(50):
        for name, places in ours._state.items():
            for place, value in zip(places, begin[name], strict=True):
                place.copy_(value)
        replay.replay()
        torch.cuda.synchronize()
        for layer in range(2):
            expected, found = want.values(layer), ours.values(layer)
            differ = [name for name, x in found.items() if not same(x, expected[name])]
            assert not differ, f"replay {index}, layer {layer}"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, where caches hold NaN too."""
    return torch.equal(a.nan_to_num(nan=-1.5), b.nan_to_num(nan=-1.5))


def test_tuning_finds_a_cut_for_every_op(usual: Layers) -> None:
    layer = op_by_op(usual, table=routes(49, 16))
    assert set(layer.tiles) == {op.name for op in usual.graph.ops if layer.tuned.log.get(op.name)}
    failed = [
        (op, cut, why) for op, tried in layer.tuned.log.items() for cut, why in tried.items() if not why.endswith(" µs")
    ]
    assert not failed, "these could not run"
