"""The emulator's numbers and the GPU's, of the same kernel on the same tiny layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megagen.cli import pipeline

pytestmark = pytest.mark.gpu

# Of the words of a tensor, how many may differ. The emulator's MMA has the GPU's bits; its exp, division and inverse
# root are rounded correctly and the GPU's are not, so a value near the middle between two bf16 numbers can go the other
# way, and everything computed from it with it. Measured on an H200: none up to expert_out, then 2e-4, 2e-3.
SHARE = {"combined": 1e-2, "unpooled": 1e-2, "stream_out": 1.0, "routes": 1.0}
EARLY = 1e-3
DIFFERENCE = 2.0**-8  # of a row's largest number: one step of bf16. Measured: 1.8e-3 in bf16, 7.5e-4 in the stream


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("options", [{}, {"split": "nk", "experts": "bf16"}], ids=["nn-nvfp4", "nk-bf16"])
def test_a_tiny_layer_has_the_same_bits_but_for_approximations(
    rig: Any, options: dict[str, str], tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from megagen.bench.emulation import Emulation, Weights
    from megagen.bench.verify import Verifier, random_stream
    from megagen.runtime.session import Session
    from megagen.weights.random import random_layer

    request = pipeline.Request(Path("muse_moe.py"), "h200", tp=2, tiny=True, options=options)
    checked = pipeline.check(request)
    shard = random_layer(checked.graph, 0, "cpu")
    packed, env = shard.packed(), shard.env(2)
    rows = random_stream(tokens, checked.graph, 0, torch.device("cpu"))
    library = pipeline.emulated(checked, rig.settings)
    emulation = Emulation(checked.plan, checked.graph, library, Weights([packed], env))
    with emulation.world(seed=1) as world:
        emulated = emulation.verifier(world).launch(rows)
    built = pipeline.build(checked, ["sm_90a"], rig.settings)
    with Session(built.plan, built.artifacts["sm_90a"].path) as session:
        there = {name: t.cuda() for name, t in packed.items()}
        found = Verifier(session, built.graph, there, env).launch(rows.cuda())
    on_gpu = {name: t.cpu() for name, t in found.items()}

    assert torch.equal(emulated["routes"][:, :8], on_gpu["routes"][:, :8]), "the same experts"
    assert emulated.keys() == on_gpu.keys()
    for name, ours in emulated.items():
        if name == "routes":
            ours, theirs = (x[:, 8:].contiguous().view(torch.float32) for x in (ours, on_gpu[name]))
        else:
            theirs = on_gpu[name]
        share = float((ours != theirs).float().mean())
        worst = float(((ours - theirs).abs().float().amax(-1) / theirs.abs().float().amax(-1).clamp_min(1e-30)).max())
        with capsys.disabled():
            print(  # noqa: T201
                f"\n{tokens} tokens, {options or 'nn, nvfp4'}: {name}: {share:.2e} of the words differ, {worst:.2e}",
                end="",
            )
        assert share <= SHARE.get(name, EARLY), name
        assert worst <= DIFFERENCE, name


# Attention comes first in a layer and has exponentials, so everything after it may differ, by a step of bf16 or two.
STEPS = 2.0**-7


def test_a_tiny_sliding_layer_differs_by_a_step_at_most(rig: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    import torch

    from megagen.bench.emulation import Emulation, Weights
    from megagen.bench.inputs import Inputs
    from megagen.bench.routes import routes
    from megagen.bench.verify import Verifier
    from megagen.runtime.session import Session
    from megagen.runtime.step import Step
    from megagen.weights.random import random_layer

    checked = pipeline.check(pipeline.Request(Path("muse_swa.py"), "h200", tp=2, tiny=True))
    shard = random_layer(checked.graph, 0, "cpu")
    packed, env = shard.packed(), shard.env(2)
    step = Step.random_tree(16, 140, seed=1)
    inputs = Inputs.random(checked.graph, 1, 16, 0, torch.device("cpu"), step)
    table = routes(16, 16, pool=16)
    library = pipeline.emulated(checked, rig.settings)
    emulation = Emulation(checked.plan, checked.graph, library, Weights([packed], env))
    with emulation.world(seed=1) as world:
        emulated = emulation.verifier(world).launch(inputs, table)
    built = pipeline.build(checked, ["sm_90a"], rig.settings)
    moved = replace(inputs, stream=inputs.stream.cuda(), ranks=({k: x.cuda() for k, x in inputs.ranks[0].items()},))
    with Session(built.plan, built.artifacts["sm_90a"].path) as session:
        there = {name: t.cuda() for name, t in packed.items()}
        found = Verifier(session, built.graph, there, env).launch(moved, table)
    assert emulated.keys() == found.keys()
    for name, ours in emulated.items():
        theirs = found[name].cpu()
        if name == "routes":
            assert torch.equal(ours[:, :8], theirs[:, :8])
            continue
        share = float((ours != theirs).float().mean())
        largest = theirs.abs().float().amax(-1).clamp_min(1e-30)
        worst = float(((ours - theirs).abs().float().amax(-1) / largest).max())
        with capsys.disabled():
            print(f"\nlayer: {name}: {share:.2e} of the words differ, {worst:.2e}", end="")  # noqa: T201
        assert worst <= STEPS, name


def both(name: str) -> tuple[Any, Any]:
    """What a case of the unit kernels puts out in the emulator and on the GPU, as words."""
    import numpy as np
    from kernels.cases import CASES, FILES
    from test_emulate_primitives import queue
    from test_primitives import launch

    from megagen.compile import compile_source
    from megagen.emulate.build import compile_library
    from megagen.emulate.engine import Engine
    from megagen.runtime.driver import Module
    from megagen.settings import Settings

    (case,) = (c for c in CASES if c.name == name)
    settings = Settings.from_env()
    library = compile_library(case.source, kernels=FILES[case.file], settings=settings)
    with Engine(library, arena_bytes=1 << 28) as engine:
        out = queue(engine, case)
        engine.run()
        emulated = np.array(out, np.uint32).reshape(-1)
    built = compile_source(case.source, kernels=FILES[case.file], archs=["sm_90a"], settings=settings)["sm_90a"]
    return emulated, launch(Module(built.path), case).reshape(-1)


@pytest.mark.parametrize("name", ["multiply_bf16", "multiply_tf32", "multiply_tf32_low"])
def test_mma_has_the_gpus_bits(name: str) -> None:
    """Random, far-apart, cancelling and subnormal operands, infinities and NaNs."""
    emulated, real = both(name)
    assert (emulated == real).all()


@pytest.mark.parametrize("name", ["product_rows", "product_columns", "product_apart", "product_groups"])
def test_how_far_a_warpgroups_products_are_from_the_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody has measured yet whether wgmma cuts its sums as mma.sync does: the emulator's does."""
    emulated, real = both(name)
    apart = (emulated != real).mean()
    with capsys.disabled():
        print(f"\n{name}: {apart:.2e} of the words differ")  # noqa: T201
    ours, theirs = (words.view("float32").astype("float64") for words in (emulated, real))
    assert (abs(ours - theirs) <= 2.0**-16 * abs(theirs).max()).all()  # more is no matter of rounding
