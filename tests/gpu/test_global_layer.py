"""The layer that attends to its whole context, at full size, TP8 with seven stand-ins: right, the same bits anyhow."""

from __future__ import annotations

from typing import Any

import pytest
from test_layer import alone_as_together, judge, launches, same, shown

pytestmark = pytest.mark.gpu

POSITIONS = 131_072
CONTEXTS = (0, 300, 4096, 16_400, 100_000)
PLACEMENTS: tuple[dict[str, str], ...] = (
    {"roles": "moved", "ring_stages": "5", "in_flight": "none"},
    {"sync": "counter", "early_trigger": "True", "next_qkvg": "3/8"},
    {"sync": "flag"},
    {"sync": "cluster", "cluster": "2", "ring_stages": "3", "summed": "0"},
    {"attend": "warpgroups"},
)


@pytest.fixture(scope="module")
def rig(new_rig: Any) -> Any:
    made = new_rig("muse_global.py", {"positions": POSITIONS})
    made.build({}, *PLACEMENTS)
    return made


@pytest.fixture(scope="module")
def layer(rig: Any) -> Any:
    """The default placement, fused, with random weights bound."""
    return rig.verifier(rig.session())


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts(layer: Any, context: int) -> None:
    for tree in (False, True):
        judge(layer, 16, context, tree)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15])
def test_token_counts(layer: Any, tokens: int) -> None:
    judge(layer, tokens, 16_384 - tokens, tree=tokens % 2 == 1)  # the first long span begins behind them


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_full_cache(layer: Any, tokens: int) -> None:
    judge(layer, tokens, POSITIONS - tokens, tree=False)


def test_before_another_of_its_kind(new_rig: Any) -> None:
    """The launch ends with the write of a growing cache; to its last number."""
    rig = new_rig("muse_global.py", {"positions": 4096, "following": "global"})
    verifier = rig.verifier(rig.session())
    for context, tree in ((4080, False), (4080, True), (0, True)):
        judge(verifier, 16, context, tree)


@pytest.mark.parametrize("attend", ["warps", "warpgroups"])
def test_a_chains_bits_depend_on_neither_launch_nor_row(rig: Any, attend: str) -> None:
    """What a warpgroup multiplies, and what a warp alone, depends on where the launch stands. Where the two round in
    different ways this fails, and the choice must stay off."""
    alone_as_together(rig.verifier(rig.session({"attend": attend})), 16_376, 120)


@pytest.fixture(scope="module")
def right(layer: Any) -> list[dict[str, Any]]:
    return launches(layer, 20_000)


@pytest.mark.parametrize("choices", PLACEMENTS, ids=shown)
def test_placements(rig: Any, right: list[dict[str, Any]], choices: dict[str, str]) -> None:
    verifier = rig.verifier(rig.session(choices))
    for _ in range(3):
        same(right, launches(verifier, 20_000))


def test_unfused(rig: Any, right: list[dict[str, Any]]) -> None:
    session = rig.session(fused=False)
    assert len(session.kernels) == len(rig.graph.ops)
    same(right, launches(rig.verifier(session), 20_000))
