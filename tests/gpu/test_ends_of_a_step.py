"""What begins and ends a step at full size, TP8 with seven stand-ins: right, and the same bits anyhow."""

from __future__ import annotations

from typing import Any

import pytest
from test_layer import bits, shown, step_of

pytestmark = pytest.mark.gpu

PLACEMENTS: tuple[dict[str, str], ...] = (
    {"sync": "counter", "early_trigger": "True"},
    {"sync": "flag", "ring_stages": "4"},
    {"in_flight": "32"},
)
FIRST = {"stream_out", "next_normed", "next_q", "next_gate", "next_k_cache", "next_v_cache"}
LAST = {"final_normed", "logits"}


@pytest.fixture(scope="module")
def first(new_rig: Any) -> Any:
    made = new_rig("muse_first.py", {})
    made.build({}, *PLACEMENTS)
    return made


@pytest.fixture(scope="module")
def last(new_rig: Any) -> Any:
    made = new_rig("muse_last.py", {})
    made.build({}, *PLACEMENTS)
    return made


@pytest.fixture(scope="module")
def beginning(first: Any) -> Any:
    """The default placement, fused, with random weights bound."""
    return first.verifier(first.session())


@pytest.fixture(scope="module")
def ending(last: Any) -> Any:
    return last.verifier(last.session())


@pytest.mark.parametrize(("tokens", "context", "tree"), [(16, 0, False), (16, 2041, True), (1, 16_383, False)])
def test_first(beginning: Any, tokens: int, context: int, tree: bool) -> None:
    checks = beginning.check(tokens, step=step_of(tokens, context, tree), seeds=range(2))
    assert not [str(c) for c in checks if not c]
    assert {c.name for c in checks if c.verdict is not None} >= FIRST


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_last(ending: Any, tokens: int) -> None:
    """Its choice is judged too: it may differ from the reference's only where logits are as near as rounding is."""
    checks = ending.check(tokens, seeds=range(3))
    assert not [str(c) for c in checks if not c]
    assert {c.name for c in checks if c.verdict is not None} >= LAST
    assert not next(c for c in checks if c.name == "next ids").skipped


def test_ids_are_of_the_logits(ending: Any) -> None:
    """Stand-ins vote as the live rank does, and the first of equals is chosen: the live rank's own largest."""
    from megagen.ops.choose import choice

    made = ending.launch(ending.inputs(16, 5))
    own = made["logits"][:, : ending.choose.rows - ending.choose.padding]
    assert own.isfinite().all() and made["logits"][:, own.shape[1] :].isneginf().all()
    assert made["next_ids"].tolist() == choice(own).tolist()


def launches(verifier: Any) -> list[dict[str, Any]]:
    from megagen.bench.inputs import has_caches

    steps = [step_of(16, 2041, tree=False), step_of(7, 100, tree=True, seed=1)]
    steps = steps if has_caches(verifier.graph) else [step_of(s.tokens, 0, tree=False) for s in steps]
    return [verifier.launch(verifier.inputs(s.tokens, i, s)) for i, s in enumerate(steps)]


@pytest.mark.parametrize("choices", [*PLACEMENTS, None], ids=lambda c: "unfused" if c is None else shown(c))
@pytest.mark.parametrize("end", ["first", "last"])
def test_placements(request: pytest.FixtureRequest, end: str, choices: dict[str, str] | None) -> None:
    rig, usual = (request.getfixturevalue(x) for x in (end, {"first": "beginning", "last": "ending"}[end]))
    session = rig.session(fused=False) if choices is None else rig.session(choices)
    for _ in range(3):
        for i, (a, b) in enumerate(zip(launches(usual), launches(rig.verifier(session)), strict=True)):
            assert a.keys() & b.keys() >= (FIRST if end == "first" else LAST | {"next_ids"}) - {"next_normed"}
            for name in a.keys() & b.keys():
                assert bits(a[name]).equal(bits(b[name])), (i, name)


def test_a_broken_wait_is_reported(last: Any, ending: Any) -> None:
    from megagen.errors import HangError

    session = last.session(fault="votes")
    verifier = last.verifier(session)
    with pytest.raises(HangError, match="channel 'votes'"):
        verifier.launch(verifier.inputs(16, 0))
    ending.launch(ending.inputs(16, 0))  # the GPU works on
    session.recover()
