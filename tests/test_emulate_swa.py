"""The sliding-window layer on emulated ranks: chains and trees, before, at and past the window; the same bits anyhow."""

from __future__ import annotations

from typing import Any

import pytest

WINDOW = 128  # of a tiny layer: two chunks of 64
CONTEXTS = [0, 1, 63, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 4 * 64 - 3, 777]  # the last two: a cache's end, far past

# Every way to synchronise, every home of a weight, roles on other warps: each is other code for the same bits.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "unfused": {"fused": False},
    "counter": {"choices": {"sync": "counter", "early_trigger": "True"}},
    "flag": {"choices": {"sync": "flag", "o_proj": "quarter"}},
    "cluster": {"choices": {"sync": "cluster", "cluster": "2", "next_qkvg": "3/8"}},
    "moved": {"choices": {"roles": "moved", "ring_stages": "5", "summed": "0", "in_flight": "none"}},
}


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("tokens", [1, 16])
def test_two_ranks_before_at_and_past_the_window(emulate: Any, tokens: int, tree: bool) -> None:
    for i, context in enumerate(CONTEXTS[tokens > 1 :: 2]):
        kernel = emulate("muse_swa.py", ranks=2, seed=i + tokens, race=True)
        kernel.check(tokens=tokens, context=context, tree=tree, launches=2)


@pytest.mark.parametrize(("context", "tree"), [(WINDOW - 1, False), (300, True)], ids=["chain", "tree"])
def test_eight_ranks(emulate: Any, context: int, tree: bool) -> None:
    kernel = emulate("muse_swa.py", ranks=8, seed=8, race=True)
    kernel.check(tokens=16, context=context, tree=tree)


@pytest.mark.parametrize(
    "options",
    [{"all_reduce": "two_shot"}, {"split": "nk", "experts": "bf16"}, {"next_rope": "no"}],
    ids=str,
)
def test_what_changes_the_arithmetic(emulate: Any, options: dict[str, str]) -> None:
    kernel = emulate("muse_swa.py", ranks=2, seed=5, options=options, race=True)
    kernel.check(tokens=9, context=200, launches=2)


@pytest.mark.parametrize("options", [{}, {"all_reduce": "two_shot"}], ids=str)
def test_live_ranks_stand_in_for_others(emulate: Any, options: dict[str, str]) -> None:
    kernel = emulate("muse_swa.py", ranks=2, tp=8, seed=6, race=True, options=options)
    kernel.check(tokens=16, context=70, tree=True)


def test_one_rank(emulate: Any) -> None:
    """More units of K than one in o_proj: its partial sums, added by a role of their own."""
    kernel = emulate("muse_swa.py", ranks=1, seed=2, race=True)
    kernel.check(tokens=7, context=150, launches=3)
