"""Route tables, timings, measurement rows, and the judge of launches, all without a GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagen.bench import measure
from megagen.bench.routes import Draws, distinct, most_used, routes, shared_one
from megagen.bench.timing import Timing, Variant, interleave
from megagen.bench.verify import Verifier, random_stream
from megagen.errors import DeviceError, MegagenError
from megagen.ir.graph import Scope, TensorKind
from megagen.models.muse_spark import MuseSparkConfig, expert_block
from megagen.ops.reference import evaluate
from megagen.runtime.step import Step
from megagen.weights.random import random_layer, world_env

# -- routes ----------------------------------------------------------------------------------------------------


@st.composite
def wanted(draw: st.DrawFn) -> tuple[int, int, int]:
    tokens = draw(st.integers(1, 16))
    return draw(st.integers(8, min(256, 8 * tokens))), tokens, draw(st.integers(0, 2**32))


@given(wanted())
@settings(deadline=None)
def test_routes_have_exactly_the_experts_asked_for(want: tuple[int, int, int]) -> None:
    experts, tokens, seed = want
    table = routes(experts, tokens, seed=seed)
    assert (table.dtype, tuple(table.shape)) == (torch.int32, (tokens, 8))
    rows = table.tolist()
    assert all(len(set(r)) == 8 for r in rows)
    load = Counter(e for r in rows for e in r)
    assert len(load) == experts
    assert 0 <= min(load) <= max(load) < 256
    if experts * 8 >= tokens * 8:  # eight tokens an expert suffice
        assert max(load.values()) <= 8
    else:
        assert max(load.values()) <= -(-tokens * 8 // experts)
    assert torch.equal(table, routes(experts, tokens, seed=seed))


@given(st.integers(8, 100), st.floats(0, 1), st.integers(0, 1000))
@settings(deadline=None)
def test_overlap_is_what_was_asked_for(experts: int, overlap: float, seed: int) -> None:
    before = set(distinct(routes(100, 16, seed=seed)))
    table = set(distinct(routes(experts, 16, seed=seed + 1, previous=sorted(before), overlap=overlap)))
    assert len(table) == experts
    assert len(table & before) == round(overlap * experts)


@given(st.integers(8, 60), st.integers(0, 32), st.floats(0, 1))
@settings(deadline=None, max_examples=30)
def test_so_much_of_a_guess_is_right(experts: int, top: int, guessed: float) -> None:
    drawn = Draws(experts, 16, 8, pool=256, top=top, guessed=guessed)
    for sample in (2, 0, 1):  # in whatever order they are asked for
        table = set(distinct(drawn[sample]))
        assert len(table) == experts
        if sample and top:
            guess = most_used(drawn[sample - 1], top)
            assert len(guess) == min(top, experts) and len(table & {*guess}) == round(guessed * len(guess))
    if top == 0:
        assert torch.equal(drawn[1], routes(experts, 16, seed=1))


def test_the_most_used_come_first_and_of_two_alike_the_lower() -> None:
    assert most_used(torch.tensor([[9, 3, 5], [5, 9, 4], [9, 7, 8]]), 4) == [9, 5, 3, 4]


def test_patterns() -> None:
    same = routes(8, 16)
    assert all(set(r) == set(same[0].tolist()) for r in same.tolist())
    load = Counter(shared_one(16).flatten().tolist())
    assert sorted(load.values()) == [1] * 112 + [16]
    assert all(len(set(r)) == 8 for r in shared_one(16).tolist())


@pytest.mark.parametrize(
    "ask",
    [
        lambda: routes(7, 16), lambda: routes(129, 16), lambda: routes(9, 1), lambda: routes(300, 64),
        lambda: routes(49, 16, previous=range(20), overlap=0.5), lambda: routes(49, 16, previous=range(250), overlap=0),
        lambda: routes(49, 16, previous=range(49), overlap=1.5), lambda: shared_one(40),
    ],
)  # fmt: skip
def test_impossible_routes_are_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(MegagenError):
        ask()


# -- timing ----------------------------------------------------------------------------------------------------


def test_timing_of_known_samples() -> None:
    t = Timing.of("x", [float(i) for i in range(101)])
    assert (t.median, t.p10, t.p90, t.samples) == (50, 10, 90, 101)


def test_fewer_than_eight_layers_are_refused() -> None:
    with pytest.raises(DeviceError, match=r"quick replays 7 layers"):
        interleave([Variant("quick", lambda: None, layers=7)])


def test_variants_take_turns_and_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock: every replay takes as long as its variant says, the first three far longer."""
    clock, calls = SimpleNamespace(ms=0.0), list[str]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.ms

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    fake = SimpleNamespace(
        Event=Event, synchronize=lambda: None, _sleep=lambda cycles: setattr(clock, "ms", clock.ms + 0.2)
    )
    monkeypatch.setattr(torch, "cuda", fake)

    def variant(name: str, ms: float) -> Variant:
        def replay() -> None:
            calls.append(name)
            clock.ms += ms if calls.count(name) > 3 else 1000

        return Variant(name, replay, layers=8, before=lambda i: setattr(clock, "ms", clock.ms + 5))

    found = interleave([variant("a", 0.8), variant("b", 1.6)], rounds=10, warmup=3)
    assert found["a"].median == pytest.approx(100)  # µs a layer
    assert found["b"].p90 == pytest.approx(200)
    assert found["a"].samples == 10
    pairs = [tuple(calls[i : i + 2]) for i in range(0, 26, 2)]
    assert {frozenset(p) for p in pairs} == {frozenset("ab")}  # each once a round
    assert len(set(pairs)) == 2  # in either order


# -- measurement rows ------------------------------------------------------------------------------------------


def plan_of(*ops: tuple[str, int]) -> Any:
    """As much of a Plan as floors need: (weight parameter, bytes) an op; 'e...' are expert weights."""
    return SimpleNamespace(
        weights=[SimpleNamespace(parameter=p, experts=256 if p.startswith("e") else 0) for p, _ in ops],
        ops=[SimpleNamespace(weights={"weight": p}, weight_bytes=n) for p, n in ops],
        nominal_experts=49,
        machine=SimpleNamespace(hbm_bytes_per_s=4.8e12),
    )


def test_floor_scales_expert_weights_only() -> None:
    plan = plan_of(("e_up", 49 * 2_359_296), ("e_down", 49 * 1_179_648), ("dense", 8_388_608))
    assert measure.floor_us(plan) == pytest.approx((49 * 3_538_944 + 8_388_608) / 4.8e6)
    assert measure.weight_bytes(plan, 113) == 113 * 3_538_944 + 8_388_608


def test_a_step_is_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """62 layers of 100 µs, at least 50 each, in ms."""
    from megagen.runtime import driver

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(driver, "version", lambda: "580")
    timing = Timing("layers62", 100.0, 90.0, 110.0, 50)
    row = measure.figure(timing, floor=50.0, unit="ms", what="step.layers62", command="", per=1e3 / 62)
    assert (row.value, row.floor, row.ratio, row.spread) == (6.2, 3.1, 2.0, (5.58, 6.82))
    row = measure.row(timing, plan=plan_of(("dense", 240_000_000)), what="layer", command="")
    assert (row.value, row.unit, row.floor, row.ratio) == (100.0, "µs per layer", 50.0, 2.0)


def test_the_hosts_time_is_that_of_the_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from megagen.bench import timing

    clock, calls = SimpleNamespace(s=0.0), list[str]()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.s)

    def pass_(what: str, s: float) -> None:
        calls.append(what)
        clock.s += s

    found = timing.host(
        "host",
        lambda: pass_("work", 30e-6 if len(calls) >= 4 else 1.0),
        lambda: pass_("settle", 0.5),
        rounds=10,
        warmup=2,
    )
    assert (found.median, found.p90) == pytest.approx((30, 30))
    assert (found.name, found.samples, calls) == ("host", 10, ["work", "settle"] * 12)


def a_row(**more: Any) -> measure.Row:
    given_: dict[str, Any] = {
        "what": "fused", "value": 90.0, "unit": "µs per layer", "floor": 42.0, "ratio": 2.14, "spread": (89.0, 92.0),
        "machine": "H200", "driver": "580", "versions": {"torch": "2.11"}, "commit": "abc", "command": "megagen bench",
        "date": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return measure.Row(**(given_ | more))


def test_rows_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "h200.jsonl"
    first, second = a_row(), a_row(what="unfused", floor=None, ratio=None, spread=None)
    measure.append(path, [first])
    measure.append(path, [second])
    assert measure.read(path) == [first, second]
    assert [json.loads(line)["what"] for line in path.read_text().splitlines()] == ["fused", "unfused"]
    assert [p.name for p in path.parent.iterdir()] == ["h200.jsonl"]


def test_a_failed_append_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "h200.jsonl"
    measure.append(path, [a_row()])
    old = path.read_text()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(MegagenError, match="No space left"):
        measure.append(path, [a_row()])
    assert path.read_text() == old
    assert [p.name for p in tmp_path.iterdir()] == ["h200.jsonl"]


# -- verify ----------------------------------------------------------------------------------------------------

TP, TOKENS, EXPERTS = 2, 4, 16


@pytest.fixture(scope="module")
def block() -> Any:
    config = MuseSparkConfig(hidden=2048, moe_hidden=2048, intermediate=1024, experts=EXPERTS)
    graph = expert_block(TP, TOKENS, config=config)
    env = random_layer(graph, 7).env(TP)
    return SimpleNamespace(graph=graph, env={n: cache(w) if callable(w) else w for n, w in env.items()})


class FakeSession:
    """Stands for a launch: the reference in float32, rounded to the channels' types, with ``spoil`` applied to it."""

    live, rank, device = 1, 0, torch.device("cpu")
    ranks: tuple[FakeSession, ...]

    def __init__(self, block: Any, spoil: Callable[[dict[str, torch.Tensor]], None] = lambda made: None) -> None:
        self.block, self.graph, self.spoil = block, block.graph, spoil
        self.ranks = (self,)
        heap = [t for t in self.graph.tensors.values() if t.kind is TensorKind.INTERNAL and t.name != "table"]
        self.plan = SimpleNamespace(channels=[SimpleNamespace(name=t.name) for t in heap])
        self.outputs = {"stream_out": torch.zeros(TOKENS, 2048)}
        self.made: dict[str, torch.Tensor] = {}
        self.poisoned = False
        self.left: list[str] = []

    def bind(self, tensors: dict[str, torch.Tensor]) -> Any:
        return SimpleNamespace(tensors=tensors)

    def writing(self, tensor: torch.Tensor) -> Any:
        return nullcontext()

    def poison(self) -> None:
        self.outputs["stream_out"].fill_(float("nan"))

    def set_step(self, step: Step) -> None:
        self.step, self.tokens = step, step.tokens

    def set_route_override(self, table: torch.Tensor | None) -> None:
        self.override = table

    def launch(self, layer: Any) -> None:
        assert layer.tensors["stream"][self.tokens :].isnan().all()  # unused rows hold nothing usable
        env = {**self.block.env, "stream": layer.tensors["stream"][: self.tokens]}
        if self.override is not None:
            env["route_override"] = self.override
        self.made = made = dict(evaluate(self.graph, env, torch.float32))
        self.spoil(made)
        self.outputs["stream_out"][: self.tokens] = made.pop("stream_out")

    def synchronize(self) -> None:
        pass

    def unreadable(self, channel: Any) -> str | None:
        return "is reset by its reader" if channel.name == "expert_in" else None

    def leftovers(self) -> list[str]:
        return self.left

    def read(self, name: str) -> torch.Tensor:
        tensor, made = self.graph.tensors[name], self.made
        if name == "routes":
            x = torch.cat([made["routes.ids"].int(), made["routes.weights"].view(torch.int32)], dim=1)
        elif len(tensor.shape) == 4 and tensor.scope is Scope.RANK:  # partial sums: a third in the first chunk
            chunks, blocks = tensor.shape[:2]
            whole = made[{"logits": "logits", "pooled_partials": "pooled", "unpooled_partials": "unpooled"}[name]]
            first = 0 if name == "logits" else 16 * blocks * self.rank
            whole = whole[:, first : first + 16 * blocks].float().view(-1, blocks, 16).transpose(0, 1)
            rest = [whole * (2 / 3) / (chunks - 1)] * (chunks - 1) if chunks > 1 else []
            x = torch.stack([whole - sum(rest), *rest])
            return torch.nn.functional.pad(x, (0, 0, 0, TOKENS - x.shape[2]), value=float("nan"))
        else:
            x = made[name].bfloat16()
        return torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 1), 0, TOKENS - len(x)))


def checks(block: Any, *, spoil: Any = lambda made: None, left: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    session = FakeSession(block, spoil)
    session.left = list(left)
    verifier = Verifier(session, block.graph, {}, block.env)  # type: ignore[arg-type]
    return {c.name: c for c in verifier.check(**({"tokens": 3, "seeds": (0, 1)} | more))}


def test_a_right_launch_passes_at_every_op(block: Any) -> None:
    found = checks(block)
    assert list(found) == [
        "routing", "normed", "logits", "pooled_partials", "pooled", "routes.weights", "expert_mid", "expert_out",
        "combined", "unpooled_partials", "unpooled", "stream_out", "expert_in", "slot_moments", "moments",
        "empty slots",
    ]  # fmt: skip
    assert all(found.values()), [str(c) for c in found.values() if not c]
    assert found["expert_in"].skipped
    assert "reset by its reader" in found["expert_in"].detail
    assert all(found[name].skipped and "sums of squares" in found[name].detail for name in ("slot_moments", "moments"))


@pytest.mark.parametrize("name", ["pooled", "expert_mid", "unpooled", "stream_out", "routes.weights"])
def test_a_wrong_value_is_found_where_it_is(block: Any, name: str) -> None:
    def spoil(made: dict[str, torch.Tensor]) -> None:
        made[name] = made[name].clone()
        made[name][1] = made[name][1].roll(1, -1)

    bad = {k for k, c in checks(block, spoil=spoil).items() if not c}
    assert bad - {f"{name}_partials"} == {name}


def test_slots_left_over_are_reported(block: Any) -> None:
    found = checks(block, left=("mid[copy 0]: 3 words",))
    assert not found["empty slots"]
    assert "mid[copy 0]" in found["empty slots"].detail


def rank_swap(first: int, second: int) -> Callable[[dict[str, torch.Tensor]], None]:
    """Route token 0 to its second-named best expert in place of the first-named."""

    def spoil(made: dict[str, torch.Tensor]) -> None:
        best = (made["logits"][0]).argsort(descending=True)
        ids = made["routes.ids"].clone()
        ids[0][ids[0] == best[first]] = best[second]
        made["routes.ids"] = ids

    return spoil


def test_routing_far_from_the_margin_is_wrong(block: Any) -> None:
    found = checks(block, spoil=rank_swap(0, EXPERTS - 1))
    assert not found["routing"]
    assert "token 0" in found["routing"].detail


def test_routing_within_the_error_of_the_scores_is_accepted_and_told(block: Any) -> None:
    """With the 8th and 9th expert of token 0 brought together, either may win, and the rest follows the winner."""
    graph = block.graph
    rows = random_stream(1, graph, 0, torch.device("cpu"))
    score = evaluate(graph, {**block.env, "stream": rows}, torch.float32)["logits"][0] * graph.op("top_k").multiplier
    order = (score.sigmoid() + block.env["router_bias"]).argsort(descending=True).tolist()
    bias = block.env["router_bias"].clone()
    eighth, ninth = order[7], order[8]
    bias[ninth] += (score.sigmoid() + bias)[eighth] - (score.sigmoid() + bias)[ninth] - 1e-6
    near = SimpleNamespace(graph=graph, env={**block.env, "router_bias": bias})

    def launch_with_ninth(env: Any) -> Any:
        return SimpleNamespace(graph=graph, env={**env, "router_bias": bias + 1e-4 * (torch.arange(EXPERTS) == ninth)})

    session = FakeSession(launch_with_ninth(block.env))
    verifier = Verifier(session, graph, {}, near.env)  # type: ignore[arg-type]
    found = {c.name: c for c in verifier.check(1)}
    assert all(found.values()), [str(c) for c in found.values() if not c]
    assert f"[{ninth}] for [{eighth}]" in found["routing"].detail


def test_an_override_that_is_not_followed_is_wrong(block: Any) -> None:
    table = routes(12, 3, pool=EXPERTS)

    def ignore(made: dict[str, torch.Tensor]) -> None:
        made["routes.ids"] = made["routes.ids"].clone()
        made["routes.ids"][2] = torch.tensor([e for e in range(EXPERTS) if e not in table[2].tolist()])

    assert all(checks(block, route_override=table).values())
    assert not checks(block, route_override=table, spoil=ignore)["routing"]


@pytest.fixture(scope="module")
def whole() -> Any:
    """The same block with both ranks live."""
    config = MuseSparkConfig(hidden=2048, moe_hidden=2048, intermediate=1024, experts=EXPERTS)
    graph = expert_block(TP, TOKENS, config=config)
    env = world_env([random_layer(graph, 7, rank=rank) for rank in range(TP)])
    return SimpleNamespace(graph=graph, env={n: cache(w) if callable(w) else w for n, w in env.items()})


def world_checks(whole: Any, *spoil: Any, **more: Any) -> dict[str, Any]:
    """Of two live ranks, each with its own ``spoil``."""
    ranks = tuple(FakeSession(whole, s) for s in spoil)
    for i, rank in enumerate(ranks):
        rank.live, rank.rank = TP, i
    world: Any = SimpleNamespace(ranks=ranks, synchronize=lambda: None)
    verifier = Verifier(world, whole.graph, [{}, {}], whole.env)
    return {c.name: c for c in verifier.check(**({"tokens": 3, "seeds": (0, 1)} | more))}


def nothing(made: dict[str, torch.Tensor]) -> None:
    pass


def test_every_rank_is_judged_and_all_agree(whole: Any) -> None:
    found = world_checks(whole, nothing, nothing, launches=2)
    assert all(found.values()), [str(c) for c in found.values() if not c]
    assert list(found)[-1] == "ranks agree"
    assert {"pooled_partials", "expert_out", "stream_out"} <= {c.name for c in found.values() if c.verdict}


def test_a_wrong_rank_is_named(whole: Any) -> None:
    def spoil(made: dict[str, torch.Tensor]) -> None:
        made["unpooled"] = made["unpooled"].roll(1, -1)

    found = world_checks(whole, nothing, spoil)
    assert {n for n, c in found.items() if not c} == {"unpooled", "unpooled_partials", "ranks agree"}
    assert found["unpooled"].detail.startswith("rank 1: FAIL")
    assert found["ranks agree"].detail == "unpooled of rank 1, seed 0 differs; unpooled of rank 1, seed 1 differs"


def test_ranks_that_differ_within_the_bound_are_refused(whole: Any) -> None:
    def flip(made: dict[str, torch.Tensor]) -> None:
        made["stream_out"] = made["stream_out"].clone()
        made["stream_out"].view(torch.int32)[0, 0] ^= 1

    found = world_checks(whole, nothing, flip)
    assert {n for n, c in found.items() if not c} == {"ranks agree"}


def test_a_harmed_token_is_left_out_and_the_others_are_not(block: Any) -> None:
    def harm(rows: torch.Tensor) -> None:
        rows[1, 5] = float("nan")

    assert all(checks(block, edit=harm).values())

    def spread(made: dict[str, torch.Tensor]) -> None:
        made["pooled"][2, 0] = float("nan")

    assert not checks(block, edit=harm, spoil=spread)["pooled"]
