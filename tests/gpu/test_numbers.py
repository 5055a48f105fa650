"""Every op's output at full size, TP8 with seven stand-ins, within the promise on numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megagen.bench.routes import routes, shared_one

pytestmark = pytest.mark.gpu

SEEDS = range(8)


def judge(verifier: Any, tokens: int, **more: Any) -> None:
    checks = verifier.check(tokens, **{"seeds": SEEDS, **more})
    assert not [str(c) for c in checks if not c]
    compared = {c.name for c in checks if c.verdict is not None}
    assert {"pooled", "expert_mid", "expert_out", "unpooled", "stream_out"} <= compared  # every exchange, and the end


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 15, 16])
def test_token_counts(usual: Any, tokens: int) -> None:
    judge(usual, tokens)


ROUTES: dict[str, Callable[[], Any]] = {
    "all tokens on the same 8": lambda: routes(8, 16),
    "49": lambda: routes(49, 16),
    "113": lambda: routes(113, 16),
    "one shared by all, 112 distinct": lambda: shared_one(16),
}


@pytest.mark.parametrize("pattern", ROUTES)
def test_routes(usual: Any, pattern: str) -> None:
    judge(usual, 16, route_override=ROUTES[pattern](), seeds=range(2))


def test_scales_at_the_ends_of_e4m3(rig: Any) -> None:
    judge(rig.verifier(rig.session(), extremes=True), 16, route_override=routes(49, 16), seeds=range(2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_harmed_token_leaves_the_others_alone(usual: Any, value: float) -> None:
    """No hang, the others within the promise, and not a bit of them changed."""
    from megagen.bench.verify import random_stream

    def harm(rows: Any) -> None:
        rows[5, 77] = value

    table = routes(49, 16)
    judge(usual, 16, route_override=table, seeds=[3], edit=harm)
    judge(usual, 16, seeds=[3], edit=harm)
    rows = random_stream(16, usual.graph, 3, usual.session.device)
    clean = usual.launch(rows, table)
    harm(rows)
    harmed = usual.launch(rows, table)
    for name, x in clean.items():
        for t in range(16):
            if t != 5:
                axis = usual._token_axis(name)
                assert same_bits(x.select(axis, t), harmed[name].select(axis, t)), (name, t)


def test_a_tokens_bits_depend_on_neither_its_row_nor_its_company(usual: Any) -> None:
    from megagen.bench.verify import random_stream

    rows = random_stream(16, usual.graph, 11, usual.session.device)
    together = usual.launch(rows)
    for t in (0, 6, 15):
        alone = usual.launch(rows[t : t + 1])
        for name, x in alone.items():
            axis = usual._token_axis(name)
            assert same_bits(x.select(axis, 0), together[name].select(axis, t)), (name, t)


def same_bits(a: Any, b: Any) -> bool:
    import torch

    a, b = (x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32) for x in (a, b))
    return bool(torch.equal(a, b))
