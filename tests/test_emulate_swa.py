"""The sliding-window layer on emulated ranks: chains and trees, before and past the window. However it is placed:
placements.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_emulate_layer import dropped

from megagen import resources
from megagen.emulate.engine import Expire
from megagen.errors import EmulationError, HangError
from megagen.models.muse_spark import tiny

CLUSTERED = {"sync": "cluster", "cluster": "2", "ring_stages": "3"}  # whose sums take the fourth stage's room
WINDOW = 128  # of a tiny layer: two chunks of 64; its caches hold four
LAST = (1 << 31) - 16  # the most tokens that a cache can have had before a launch

READABLE = {"attended", "projected", "normed", "unpooled", "stream_out", "next_normed", "next_q", "next_gate"}
CACHES = {"next_k_cache", "next_v_cache"}


def small(ranks: int = 2, **more: int) -> dict[str, Any]:
    """Options of a layer of half as many heads a rank, which all share their keys, or whatever ``more`` says."""
    return {"config": tiny(ranks).model_copy(update={"heads": 8 * ranks, "kv_heads": ranks, **more})}


def few(tokens: int) -> Any:
    """Eight experts for all tokens: streaming more says nothing about attention."""
    from megagen.bench.routes import routes

    return routes(8, tokens, pool=16)


def words(values: Any) -> dict[str, Any]:
    """Tensors as integers."""
    import torch

    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return {name: x.contiguous().view(views[x.element_size()]) for name, x in values.items()}


def differing(a: Any, b: Any) -> list[str]:
    """What both have in different bits; most is in both."""
    a, b = words(a), words(b)
    assert a.keys() & b.keys() >= READABLE - {"next_normed"} | CACHES
    return [name for name in sorted(a.keys() & b.keys()) if not a[name].equal(b[name])]


@pytest.mark.parametrize(
    ("tokens", "tree", "contexts"),
    [
        (1, False, [0, WINDOW + 1]),
        (16, False, [WINDOW - 2]),
        (16, True, [777]),
    ],
    ids=["one", "chain", "tree"],
)
def test_two_ranks_before_at_and_past_the_window(emulate: Any, tokens: int, tree: bool, contexts: list[int]) -> None:
    for i, context in enumerate(contexts):
        kernel = emulate("muse_swa.py", ranks=2, seed=i + tokens, race=True)
        override = few(tokens) if i else None
        kernel.check(tokens=tokens, context=context, tree=tree, route_override=override, seeds=[i])


def test_eight_ranks(emulate: Any) -> None:
    kernel = emulate("muse_swa.py", ranks=8, seed=8, race=True, options=small(8))
    kernel.check(tokens=2, context=300, tree=True, route_override=few(2))


@pytest.mark.parametrize(
    ("options", "context"),
    [({"split": "nk", "experts": "bf16"}, 60), ({"all_reduce": "two_shot", "following": "global"}, WINDOW)],
    ids=str,
)
def test_what_changes_the_arithmetic(emulate: Any, options: dict[str, str], context: int) -> None:
    kernel = emulate("muse_swa.py", ranks=2, seed=5, options=options, race=True)
    kernel.check(tokens=9, context=context, route_override=few(9))


@pytest.mark.parametrize(
    ("tp", "options"), [(4, small(4)), (8, {"all_reduce": "two_shot"})], ids=["one-shot", "two-shot"]
)
def test_live_ranks_stand_in_for_others(emulate: Any, tp: int, options: dict[str, Any]) -> None:
    kernel = emulate("muse_swa.py", ranks=2, tp=tp, tokens=9, seed=6, race=True, options=options)
    kernel.check(tokens=9, context=70, tree=True, route_override=few(9))


@pytest.mark.parametrize(
    ("layer", "tokens", "context"),
    [
        ({"heads": 32, "kv_heads": 8, "window": 100}, 7, 150),  # more units of K than one in o_proj: a role adds them
        ({"heads": 8, "kv_heads": 8, "window": 16}, 16, 61),  # no token but its own launch's for the last
        ({"heads": 8, "kv_heads": 2, "window": 3080}, 3, 5000),  # 50 chunks: merged in two batches
    ],
    ids=["units of o_proj", "the least window", "a wide window"],
)
def test_other_sizes(emulate: Any, layer: dict[str, int], tokens: int, context: int) -> None:
    kernel = emulate("muse_swa.py", ranks=1, seed=2, race=True, options=small(1, **layer))
    assert ("o_partials" in {c.name for c in kernel.plan.channels}) == (layer["heads"] > 16)
    kernel.check(tokens=tokens, context=context, tree=True, route_override=few(tokens))


@pytest.mark.parametrize("context", [(1 << 20) - 5, LAST])
def test_late_in_a_sequence(emulate: Any, context: int) -> None:
    """Without rotations, for which the table would be too long."""
    options = {**small(1, window=100), "following": "end"}
    kernel = emulate("muse_swa.py", ranks=1, seed=3, race=True, options=options)
    kernel.check(tokens=5, context=context, tree=True, route_override=few(5))


def part(whole: Any, first: int, tokens: int, window: int) -> Any:
    """What a launch of some of a chain's tokens reads: the others' slots, and those past the window, hold NaN."""
    import torch

    from megagen.bench.inputs import put
    from megagen.runtime.step import Step

    context, end = whole.step.context + first, whole.step.context + whole.step.tokens
    unseen = [*range(max(0, whole.step.context + 1 - window), context + 1 - window), *range(context + tokens, end)]

    def cut(name: str, x: Any) -> Any:
        if not name.endswith("cache"):
            return x[first : first + tokens].clone() if len(x) == whole.step.tokens else x
        x = x.clone()
        put(x, unseen, torch.full((len(unseen), len(x), 64), torch.nan, dtype=x.dtype))
        return x

    ranks = tuple({name: cut(name, x) for name, x in values.items()} for values in whole.ranks)
    return replace(whole, step=Step.chain(tokens, context), stream=ranks[0]["stream"], ranks=ranks)


@pytest.mark.parametrize("context", [WINDOW - 8, 4 * 64 - 11])
def test_a_chains_bits_depend_on_neither_launch_nor_row(emulate: Any, context: int) -> None:
    """A token after some others of its launch, and as the first of its own: the same bits in all that it makes."""
    from megagen.runtime.step import Step

    kernel = emulate("muse_swa.py", ranks=1, seed=context, options=small(1))
    verifier = kernel.verifier
    whole = verifier.inputs(16, 11, Step.chain(16, context))
    together = verifier.launch(whole)
    for first, tokens in ((3, 6), (13, 1)):
        alone = verifier.launch(part(whole, first, tokens, WINDOW))
        rows = {n: x.narrow(verifier._token_axis(n), first, tokens) for n, x in together.items()}
        assert not differing(alone, rows), (first, tokens)


@pytest.mark.parametrize(
    ("channel", "waiting"),
    [
        ("attention_partials", "attention.merge"), ("projected", "all_reduce.sum"),
        ("summed", "post_attention.measure"), ("middle", "residual.measure"), ("moments", "residual.compute"),
        ("next_partials", "next_heads.write"),
    ],
)  # fmt: skip
def test_a_broken_wait_is_reported(emulate: Any, channel: str, waiting: str) -> None:
    kernel = emulate("muse_swa.py", ranks=2, options=small(), edit=dropped(channel))
    with pytest.raises(EmulationError, match=rf"{waiting} waits for channel '{channel}' \(lamport\)") as e:
        kernel.check(tokens=2, context=30)
    assert e.value.loc is not None
    assert e.value.loc.file.endswith("_layer.py")


@pytest.mark.parametrize("sync", [{}, {"sync": "counter"}, CLUSTERED], ids=str)
def test_a_launch_that_is_given_up_at_any_moment_ends(emulate: Any, sync: dict[str, str]) -> None:
    """Nothing hangs, races or leaves early on that way; the world is as good as new after it."""
    given_up = 0
    for seed in range(3):
        kernel = emulate("muse_swa.py", ranks=2, seed=seed, choices=sync, options=small(), race=True, expire=Expire.ANY)
        try:
            kernel.check(tokens=2, context=100)
        except HangError:
            given_up += 1
            kernel.world.recover()
            kernel.world.synchronize()
            assert not any(rank.leftovers() for rank in kernel.world.ranks)
    assert given_up


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_a_launch_after_one_that_was_given_up_ends_at_once(
    emulate: Any, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Its weights are on their way before it reads that word: whoever loads them waits for warps that do not work, and
    would wait for ever if those did not tell."""
    import torch

    if not told:
        texts, header, tells = dict(resources.headers()), "megagen/kernel.cuh", "debug::sound(*this)"
        assert texts[header].count(tells) == 1
        texts[header] = texts[header].replace(tells, "")
        monkeypatch.setattr(resources, "headers", lambda: texts)
    own = None if told else lambda plan: plan  # a library of its own
    kernel = emulate("muse_swa.py", ranks=1, seed=1, options=small(1), edit=own)
    (rank,) = kernel.world.ranks
    at = kernel.plan.heap.abort_offset
    with rank.writing(rank.heap):
        rank.heap[at : at + 4].view(torch.int32).fill_(1)
    error, says = (
        (HangError, "block 0, warp 0") if told else (EmulationError, "load_weights waits for barrier 'ring_empty'")
    )
    with pytest.raises(error, match=says):
        kernel.check(tokens=2, context=100)


def test_what_is_not_finite_hangs_nothing(emulate: Any) -> None:
    """A negative NaN, an infinity: the launch ends, what they reach is not finite, and nothing is left over."""
    import torch

    kernel = emulate("muse_swa.py", ranks=1, seed=4, race=True, options=small(1))
    places: dict[str, Any] = {
        "stream": 1,
        "q": 1,
        "v_cache": (0, 0, slice(None, None, 8), slice(1, None, 8)),
    }  # of token 1
    for name, word in (("stream", 0x7F80), ("q", -1), ("v_cache", -1)):
        inputs = kernel.verifier.inputs(2, 0)
        x = inputs.ranks[0][name]
        x[places[name]] = torch.tensor(word, dtype=torch.int16).view(torch.bfloat16).to(x.dtype)
        found = kernel.verifier.launch(inputs, few(2))
        assert not found["stream_out"][1].isfinite().any()
        assert not kernel.world.ranks[0].leftovers()
