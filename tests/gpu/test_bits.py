"""Placement never changes bits: run after run, fused and unfused, whatever the schedule's choices."""

from __future__ import annotations

from typing import Any

import pytest

from megagen.bench.routes import routes

pytestmark = pytest.mark.gpu

PLACEMENTS: tuple[dict[str, str], ...] = (
    {},
    {"roles": "moved"},
    {"unpooler": "late"},  # share 0 of the ring; by default 1
    {"unpooler": "half"},
    {"unpooler": "l2"},
    {"unpooler": "both"},
    {"in_flight": "36"},
    {"ring_stages": "5"},
    {"sync": "counter"},
    {"sync": "flag"},
    {"cluster": "2"},
    {"sync": "cluster", "cluster": "2", "ring_stages": "3"},
)
LAUNCHES = ((16, 0), (7, 1))  # tokens, seed


def shown(choices: dict[str, str]) -> str:
    return ",".join(f"{k}={v}" for k, v in choices.items()) or "default"


def launches(verifier: Any) -> list[dict[str, Any]]:
    """All readable values of a launch with the router's choice and one with 49 experts (fewer for few tokens)."""
    from megagen.bench.verify import random_stream

    found = []
    for tokens, seed in LAUNCHES:
        rows = random_stream(tokens, verifier.graph, seed, verifier.session.device)
        found += [verifier.launch(rows), verifier.launch(rows, routes(49, tokens, seed=seed))]
    return found


@pytest.fixture(scope="module")
def right(usual: Any) -> list[dict[str, Any]]:
    return launches(usual)


def same(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> None:
    import torch

    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        common = a.keys() & b.keys()  # placements differ in which channels stay readable
        assert {"pooled", "expert_mid", "expert_out", "unpooled", "stream_out", "routes"} <= common
        for name in sorted(common):
            x, y = (
                v.contiguous().view(torch.int16 if v.element_size() == 2 else torch.int32) for v in (a[name], b[name])
            )
            different = int((x != y).sum())
            assert not different, f"launch {i}: {different} of {x.numel()} words of {name} differ"


def test_run_after_run(usual: Any, right: list[dict[str, Any]]) -> None:
    for _ in range(5):
        same(right, launches(usual))


@pytest.mark.parametrize("choices", PLACEMENTS, ids=shown)
def test_placements(rig: Any, right: list[dict[str, Any]], choices: dict[str, str]) -> None:
    same(right, launches(rig.verifier(rig.session(choices))))


def test_unfused(rig: Any, right: list[dict[str, Any]]) -> None:
    session = rig.session(fused=False)
    assert len(session.kernels) == len(rig.graph.ops)
    same(right, launches(rig.verifier(session)))
