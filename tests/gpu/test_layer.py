"""The sliding-window layer at full size, TP8 with seven stand-ins: right, the same bits anyhow, and for long."""

from __future__ import annotations

from typing import Any

import pytest

from megagen.bench.routes import routes

pytestmark = pytest.mark.gpu

CONTEXTS = (1, 15, 16, 2047, 2048, 2049, 5000)
PLACEMENTS: tuple[dict[str, str], ...] = (
    {},
    {"roles": "moved", "ring_stages": "5"},
    {"o_proj": "quarter", "next_qkvg": "3/8", "early_trigger": "True"},
    {"summed": "0", "in_flight": "none"},
    {"sync": "counter"},
    {"sync": "flag"},
    {"cluster": "2"},
    {"sync": "cluster", "cluster": "2", "ring_stages": "3"},
)
COMPARED = {"attended", "projected", "normed", "unpooled", "stream_out", "next_q", "next_gate", "next_k_cache"}


def shown(choices: dict[str, str]) -> str:
    return ",".join(f"{k}={v}" for k, v in choices.items()) or "default"


def step_of(tokens: int, context: int, tree: bool, seed: int = 0) -> Any:
    from megagen.runtime.step import Step

    return Step.random_tree(tokens, context, seed) if tree else Step.chain(tokens, context)


@pytest.fixture(scope="session")
def layer(layers: Any) -> Any:
    """The default placement, fused, with random weights bound."""
    return layers.verifier(layers.session())


def judge(verifier: Any, tokens: int, context: int, tree: bool, **more: Any) -> None:
    checks = verifier.check(tokens, step=step_of(tokens, context, tree, seed=context + tokens), **more)
    assert not [str(c) for c in checks if not c]
    assert {c.name for c in checks if c.verdict is not None} >= COMPARED | {"next_v_cache"}


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts(layer: Any, context: int, tree: bool) -> None:
    judge(layer, 16, context, tree, seeds=range(4))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 12, 15])
def test_token_counts(layer: Any, tokens: int) -> None:
    judge(layer, tokens, 2048, tree=tokens % 2 == 1, seeds=range(4))


@pytest.mark.parametrize("experts", [8, 49, 113])
def test_routes(layer: Any, experts: int) -> None:
    judge(layer, 16, 300, tree=False, route_override=routes(experts, 16), seeds=range(2))


VARIANTS: dict[str, dict[str, Any]] = {
    "two-shot": {"options": {"all_reduce": "two_shot"}},
    "no rotation": {"options": {"following": "global"}},
    "split=nk, experts=bf16, tp=4, two-shot": {
        "options": {"split": "nk", "experts": "bf16", "all_reduce": "two_shot"}, "tp": 4,
    },
    "tp=1": {"tp": 1},
    "tokens=8": {"tokens": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_what_changes_the_arithmetic(layers: Any, name: str) -> None:
    from megagen.bench.verify import Verifier
    from megagen.cli import pipeline
    from megagen.runtime.session import Session
    from megagen.weights.random import random_layer

    request = pipeline.Request(layers.schedule, "h200", **VARIANTS[name])
    built = pipeline.build(pipeline.check(request), ["sm_90a"], layers.settings)
    made = random_layer(built.graph, 1, "cuda")
    with Session(built.plan, built.artifacts["sm_90a"].path) as session:
        verifier = Verifier(session, built.graph, made.packed(), made.env(built.graph.tp))
        for tokens, context, tree in ((built.plan.tokens, 2049, False), (3, 70, True)):
            checks = verifier.check(tokens, step=step_of(tokens, context, tree), seeds=range(2))
            assert not [str(c) for c in checks if not c]


def launches(verifier: Any, after: int = 2050) -> list[dict[str, Any]]:
    """All readable values and the caches' new rows, of a chain and of a tree."""
    from megagen.bench.inputs import Inputs

    found = []
    for tokens, context, tree in ((16, after, False), (7, 100, True)):
        step = step_of(tokens, context, tree, seed=1)
        device = verifier.session.device
        inputs = Inputs.random(verifier.graph, 1, tokens, 5, device, step)
        found.append(verifier.launch(inputs, routes(min(49, 8 * tokens), tokens, seed=2)))
    return found


def bits(x: Any) -> Any:
    import torch

    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> None:
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        common = a.keys() & b.keys()  # placements differ in which channels stay readable
        assert common >= COMPARED
        for name in sorted(common):
            different = int((bits(a[name]) != bits(b[name])).sum())
            assert not different, f"launch {i}: {different} words of {name} differ"


@pytest.fixture(scope="module")
def right(layer: Any) -> list[dict[str, Any]]:
    return launches(layer)


@pytest.mark.parametrize("choices", PLACEMENTS, ids=shown)
def test_placements(layers: Any, right: list[dict[str, Any]], choices: dict[str, str]) -> None:
    verifier = layers.verifier(layers.session(choices))
    for _ in range(3):
        same(right, launches(verifier))


def test_unfused(layers: Any, right: list[dict[str, Any]]) -> None:
    session = layers.session(fused=False)
    assert len(session.kernels) == len(layers.graph.ops)
    same(right, launches(layers.verifier(session)))


def alone_as_together(verifier: Any, *contexts: int) -> None:
    """Token t of a launch of sixteen after c others, and alone after c + t: the same bits in everything it makes."""
    from dataclasses import replace

    from megagen.bench.inputs import Inputs
    from megagen.runtime.step import Step

    device = verifier.session.device
    for context in contexts:
        inputs = Inputs.random(verifier.graph, 1, 16, 11, device, Step.chain(16, context))
        together = verifier.launch(inputs)
        for t, n in ((0, 1), (3, 5), (8, 8), (15, 1)):
            values = {
                name: x[t : t + n] if len(x) == 16 else x for name, x in inputs.ranks[0].items()
            }  # stream, q and gate; caches stay, for what comes after is masked
            part = replace(
                inputs, step=Step.chain(n, context + t), stream=inputs.stream[t : t + n].clone(),
                ranks=({**values, "stream": inputs.stream[t : t + n].clone()},),
            )  # fmt: skip
            alone = verifier.launch(part)
            for name, x in alone.items():
                axis = verifier._token_axis(name)
                assert bits(x).equal(bits(together[name].narrow(axis, t, n))), (context, t, n, name)


def test_a_chains_bits_depend_on_neither_launch_nor_row(layer: Any) -> None:
    alone_as_together(layer, 2040, 100)


@pytest.fixture(scope="module")
def stack(layers: Any) -> Any:
    """62 layers of eight sets of weights, each with caches of its own."""
    from megagen.bench.inputs import Inputs
    from megagen.runtime.stack import Stack

    session = layers.session()
    packed = [layers.usual[0], *(layers.weights(seed)[0] for seed in range(1, 8))]
    inputs = Inputs.random(layers.graph, 1, 16, 3, session.device, step_of(16, 4096, tree=False))
    return Stack(session, packed, inputs.ranks, layers=62)


def test_a_thousand_steps_of_62_layers(layers: Any, stack: Any) -> None:
    """No hang, no changed bit, no slot left over: every replay compared on the device, without a pause."""
    import torch

    session = stack.on
    session.recover()
    session.set_route_override(None)
    session.set_step(step_of(16, 4096, tree=False))
    graph = stack.capture()
    graph.replay()
    session.synchronize()
    names = ("stream_out", "next_q", "next_gate")
    want = {name: x.clone() for name, x in stack.outputs[0].items()}
    assert all(want[name].isfinite().all() for name in names)
    wrong = torch.zeros((), dtype=torch.int64, device=session.device)
    for i in range(1, 1000):
        graph.replay()
        for name in names:
            wrong += (bits(stack.outputs[0][name]) != bits(want[name])).sum()
        if i % 50 == 0:
            session.synchronize()
    session.synchronize()
    assert int(wrong) == 0
    for name, x in stack.outputs[0].items():
        assert bits(x).equal(bits(want[name])), name
    assert session.epoch() == 1000 * 62
    assert not [str(x) for x in session.leftovers()]


def test_the_graph_does_what_launches_do(layers: Any, stack: Any) -> None:
    session = stack.on
    session.set_step(step_of(16, 4096, tree=False))
    graph = stack.capture()
    graph.replay()
    session.synchronize()
    want = {name: x.clone() for name, x in stack.outputs[0].items()}
    stack.launch()
    session.synchronize()
    for name, x in stack.outputs[0].items():
        assert bits(x).equal(bits(want[name])), name


@pytest.mark.parametrize("channel", ["attention_partials", "projected", "middle", "next_partials"])
def test_a_broken_wait_is_reported(layers: Any, layer: Any, channel: str) -> None:
    from megagen.bench.inputs import Inputs
    from megagen.errors import HangError

    session = layers.session(fault=channel)
    verifier = layers.verifier(session)
    inputs = Inputs.random(verifier.graph, 1, 16, 0, session.device, step_of(16, 100, tree=False))
    with pytest.raises(HangError) as caught:
        verifier.launch(inputs)
    told = caught.value.message + "".join(note for note, _ in caught.value.notes)
    assert f"channel '{channel}'" in told
    layer.launch(inputs)  # the GPU works on
    session.recover()
