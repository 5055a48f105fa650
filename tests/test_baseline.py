"""The op-by-op baseline on the CPU: its weights and cuts in torch, its kernels in Triton's interpreter where Triton is."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megagen.bench.baseline.prepare import SCALE_EXPONENT, prepare, words
from megagen.bench.inputs import Inputs, get
from megagen.bench.routes import routes
from megagen.cli import pipeline
from megagen.errors import MegagenError
from megagen.ops.compare import judge
from megagen.ops.packing import Nvfp4
from megagen.ops.reference import evaluate
from megagen.runtime.stack import handed_on
from megagen.runtime.step import Step
from megagen.weights.random import random_layer

if find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before it is imported

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
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


def built(schedule: str, **more: Any) -> Any:
    """A tiny layer with random weights, inputs and what the reference makes of them."""
    tokens, context = more.pop("tokens", 5), more.pop("context", 300)
    checked = pipeline.check(pipeline.Request(Path(schedule), tp=2, tokens=tokens, tiny=True, **more))
    graph = checked.graph
    layers = [random_layer(graph, seed, scale_extremes=seed == 1) for seed in range(2)]
    step = Step.random_tree(tokens, context, seed=3)
    inputs = Inputs.random(graph, 1, tokens, 0, torch.device("cpu"), step)
    return SimpleNamespace(plan=checked.plan, graph=graph, layers=layers, inputs=inputs, step=step)


def op_by_op(of: Any, **more: Any) -> Any:
    from megagen.bench.baseline.layer import OpByOp

    prepared = [prepare(x) for x in of.layers]
    return OpByOp(of.graph, prepared, of.inputs.ranks[0], of.step, handed_on(of.plan), **more)


def refused(of: Any, made: dict[str, torch.Tensor], table: torch.Tensor | None) -> list[str]:
    """What of a layer's values is not right, by the reference with the layer's own routing."""
    env: dict[str, Any] = {**of.layers[0].env(of.graph.tp), **of.inputs.env}
    ids = made["routes.ids"]
    if table is None:
        want = evaluate(of.graph, env, torch.float32)["routes.ids"]
        assert [set(x) for x in ids.tolist()] == [set(x) for x in want.tolist()]
    else:
        assert torch.equal(ids, table.long())
    env["route_override"] = ids
    reference, model = (evaluate(of.graph, env, dtype) for dtype in (torch.float32, torch.bfloat16))
    wrong, seen = [], set()
    for name, got in made.items():
        if name == "routes.ids":
            continue
        if name.endswith("cache"):
            got = get(got, of.step.numbers)
        name, axis = ("unpooled", -1) if name not in reference else (name, -1)
        want, twin = reference[name], model[name]
        if got.shape != want.shape:  # this rank's share
            want, twin = (share(of.graph, name, x, got.shape[axis]) for x in (want, twin))
        verdict = judge(got, want, twin)
        seen.add(name)
        if not verdict:
            wrong.append(f"{name}: {verdict}")
    assert seen >= {"logits", "pooled", "expert_mid", "expert_out", "combined", "unpooled", "stream_out"}
    return wrong


def share(graph: Any, name: str, whole: torch.Tensor, width: int) -> torch.Tensor:
    """The first rank's columns; of a projection's partial sums, of each of its parts."""
    parts = next(
        (w.parts for op in graph.ops if name in op.outputs.values() for w in op.weights.values() if w.parts), (width,)
    )
    starts = [sum(parts[:i]) * whole.shape[1] // width for i in range(len(parts))]
    return torch.cat([whole[:, at : at + n] for at, n in zip(starts, parts, strict=True)], dim=1)


@needs_triton
@pytest.mark.parametrize("schedule", ["muse_swa.py", "muse_moe.py"])
@pytest.mark.parametrize("routed", [False, True])
def test_a_layer_is_right(schedule: str, routed: bool) -> None:
    of = built(schedule)
    table = routes(11, 5, pool=16) if routed else None
    layer = op_by_op(of, table=table)
    layer.launch(1)
    assert not refused(of, layer.values(), table)
