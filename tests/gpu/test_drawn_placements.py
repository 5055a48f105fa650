"""Placements drawn at random, at full size: what the shipped one makes, to the bit, launch after launch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from placements import SEED, Placement, draw, graph, told

from megagen.bench.routes import routes

pytestmark = pytest.mark.gpu

COUNT = 10
MADE = {"stream_out", "next_q", "next_gate", "next_k_cache", "next_v_cache", "logits", "next_ids"}


@cache
def packed(shipped: str, options: Any) -> Any:
    """Weights of one rank; placements of a graph have the same."""
    from megagen.weights.random import random_layer

    return random_layer(graph(shipped, options, tp=8, tokens=16), 1, "cuda").packed()


def launches(p: Placement, built: Any) -> list[dict[str, Any]]:
    """All readable values of three launches in a row: a chain, a tree, a chain."""
    from megagen.bench.inputs import Inputs, has_caches
    from megagen.bench.verify import Verifier
    from megagen.runtime.session import Session
    from megagen.runtime.step import Step

    steps = [Step.chain(16, 2050), Step.random_tree(7, 100, 1), Step.chain(3, 2047)]
    found = []
    with Session(built.plan, built.artifacts["sm_90a"].path) as session:
        verifier = Verifier(session, built.graph, packed(p.shipped, p.options), {})
        for i, step in enumerate(steps):
            where = step if has_caches(built.graph) else Step.chain(step.tokens)
            inputs = Inputs.random(built.graph, 1, step.tokens, i, session.device, where)
            routed = routes(min(49, 8 * step.tokens), step.tokens, seed=i) if verifier.top_k else None
            found.append(verifier.launch(inputs, routed))
    return found


def compiled(path: Path | str, p: Placement, choices: dict[str, str] | None = None) -> Any:
    from megagen.cli import pipeline
    from megagen.settings import Settings

    request = pipeline.Request(Path(path), "h200", fused=p.fused, options=dict(p.options), choices=choices or {})
    return pipeline.build(pipeline.check(request), ["sm_90a"], Settings.from_env())


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: Any) -> Iterator[list[tuple[Placement, Any, Any]]]:
    """Each with its kernels and the shipped placement's; compiled side by side."""
    folder = tmp_path_factory.mktemp("drawn")
    sys.stderr.write(f"\nplacements 0 to {COUNT - 1} of seed {SEED}\n")
    found = [draw(SEED, n) for n in range(COUNT)]
    for n, p in enumerate(found):
        (folder / f"drawn_{n}.py").write_text(p.text)
    usual = {(p.shipped, p.options): Placement(p.shipped, p.options, True, p.sms, "") for p in found}
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(compiled, folder / f"drawn_{n}.py", p) for n, p in enumerate(found)]
        # with counters, nothing is emptied by who reads it
        base = {k: pool.submit(compiled, f"{p.shipped}.py", p, {"sync": "counter"}) for k, p in usual.items()}
        yield [(p, job.result(), base[p.shipped, p.options].result()) for p, job in zip(found, jobs, strict=True)]


@pytest.mark.parametrize("n", range(COUNT))
def test_a_placement_changes_no_bit(drawn: list[tuple[Placement, Any, Any]], n: int) -> None:
    import torch

    p, built, usual = drawn[n]
    for i, (want, got) in enumerate(zip(launches(p, usual), launches(p, built), strict=True)):
        assert want.keys() >= got.keys() >= MADE & want.keys()
        for name, x in got.items():
            views = {2: torch.int16, 4: torch.int32}[x.element_size()]
            a, b = (t.contiguous().view(views) for t in (want[name], x))
            assert a.equal(b), f"launch {i}: {int((a != b).sum())} words of {name} differ\n{told(p, SEED, n)}"
