"""Ablations and sweeps: which variants, what is compared with what, the line, and what users get to see. No GPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megagen.bench import ablate, measure
from megagen.bench.ablate import Variant
from megagen.bench.sweep import LEAST, Fit, Sweep, fit
from megagen.bench.timing import Timing, paired
from megagen.cli import ablating, device, main, pipeline, sweeping
from megagen.errors import DeviceError, HangError, Loc, MegagenError, ScheduleError
from megagen.models import muse_spark
from megagen.runtime import driver
from megagen.settings import Settings

LAYER = Path(__file__).resolve().parent.parent / "schedules" / "muse_swa.py"
OFFERED = {"stages": ("3", "4", "5"), "trick": ("on", "off"), "cap": ("36", "72", "none"), "early": ("False", "True")}
AT = {name: values[0] for name, values in OFFERED.items()}

# -- variants ----------------------------------------------------------------------------------------------------

names = st.text("abcdef", min_size=1, max_size=3)
values = st.lists(st.sampled_from(["1", "2", "3", "on", "off", "none"]), min_size=1, max_size=4, unique=True)
offers = st.dictionaries(names, values.map(tuple), min_size=1, max_size=5)


@given(offers, st.data())
def test_each_other_value_of_each_choice_once(offered: dict[str, tuple[str, ...]], data: st.DataObject) -> None:
    at = {name: data.draw(st.sampled_from(values)) for name, values in offered.items()}
    base, *others = ablate.changes({}, offered, at, ablate.varied("s.py", offered, {}, []))
    assert base.is_base and base.choices == {}
    assert [(v.choice, v.value) for v in others] == [
        (name, value) for name in sorted(offered) for value in offered[name] if value != at[name]
    ]
    for v in others:
        assert v.choices == {v.choice: v.value}
    assert len({v.name for v in (base, *others)}) == 1 + len(others)


@given(offers)
def test_alone_on_starts_from_all_off(offered: dict[str, tuple[str, ...]]) -> None:
    off = {name: value for name, values in offered.items() if (value := ablate.off_value(values))}
    names = ablate.varied("s.py", offered, {}, [])
    if not off:
        with pytest.raises(MegagenError, match=r"none of s.py's choices can be off") as refused:
            ablate.alone("s.py", {}, lambda chosen: offered, names)
        assert "called off" in str(refused.value.hint)
        return
    base, *others = ablate.alone("s.py", {}, lambda chosen: offered, names)
    assert (base.name, base.choices) == ("off", off)
    assert [(v.choice, v.value) for v in others] == [
        (n, value) for n in sorted(off) for value in offered[n] if value != off[n]
    ]
    for v in others:
        assert {n for n in off if v.choices[n] != off[n]} == {v.choice}


def test_what_counts_as_off() -> None:
    assert [ablate.off_value(values) for values in OFFERED.values()] == [None, "off", "none", "False"]
    assert ablate.off_value(("4294967295", "0")) is None  # a word of memory, not a switch


def test_a_choice_that_another_takes_away() -> None:
    """Only where the trick is on does the schedule ask how; what is not asked may not be settled."""

    def look(chosen: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        inner = {"how": ("fast", "off")} if chosen.get("trick", "on") == "on" else {}
        assert set(chosen) <= {"trick", "cap", *inner}
        return {"trick": ("on", "off"), **inner, "cap": ("1", "none")}

    base, *others = ablate.alone("s.py", {}, look, ["cap", "how", "trick"])
    assert base.choices == {"trick": "off", "cap": "none"}
    assert [v.name for v in others] == ["off with cap=1", "off with trick=on"]


def test_settled_choices_stay() -> None:
    settled = {"trick": "on"}
    assert ablate.varied("s.py", OFFERED, settled, []) == ["cap", "early", "stages"]
    found = ablate.changes(settled, OFFERED, AT, ["cap"]) + ablate.alone("s.py", settled, lambda c: OFFERED, ["cap"])
    assert {v.choices["trick"] for v in found} == {"on"}
    with pytest.raises(MegagenError, match="--only trick varies what --choose settles"):
        ablate.varied("s.py", OFFERED, settled, ["trick"])


def test_nothing_to_vary() -> None:
    with pytest.raises(MegagenError, match="offers no choice to vary"):
        ablate.varied("s.py", {}, {}, [])
    with pytest.raises(MegagenError) as refused:
        ablate.varied("s.py", {}, {}, ["cap"])
    assert refused.value.hint == "it offers none"


# -- what is compared ----------------------------------------------------------------------------------------------


def test_differences_are_taken_round_by_round() -> None:
    """Clocks that drift by 50 µs hide no effect of 2."""
    base = [100.0 + i for i in range(51)]
    effect = paired("x", [b + 2 + (0.1 if i % 2 else -0.1) for i, b in enumerate(base)], base)
    assert effect.median == pytest.approx(1.9)
    assert (effect.p10, effect.p90, effect.samples) == (pytest.approx(1.9), pytest.approx(2.1), 51)
    with pytest.raises(ValueError):
        paired("x", base[1:], base)


def test_results_are_held_against_their_base() -> None:
    found = ablate.results(
        [
            Variant("default", {}), Variant("default", {}, "a", "2"), Variant("default", {}, "b", "2"),
            Variant("default", {}, "c", "2"), Variant("off", {}), Variant("off", {}, "a", "1"),
        ],
        {"default": [10.0, 20, 30], "default with a=2": [11.0, 22, 33], "off": [15.0, 25, 35]},
        {"default": "default", "default with b=2": "default", "off": "off", "off with a=1": "default with a=2"},
        {"default with c=2": "no room (s.py:3)"},
    )  # fmt: skip
    assert [None if r.effect is None else r.effect.median for r in found] == [None, 2, 0, None, None, -3]
    assert [r.same for r in found] == ["", "", "default", "", "", "default with a=2"]
    assert [r.refused for r in found if r.timing is None] == ["no room (s.py:3)"]
    assert found[4].timing == Timing("off", 25, 17, 33, 3)


def test_one_that_does_not_fit_takes_those_of_the_same_code_along() -> None:
    wanted = [Variant("default", {}), Variant("default", {}, "a", "2"), Variant("default", {}, "b", "2")]
    same = {v.name: v.name for v in wanted} | {wanted[2].name: wanted[1].name}
    found = ablate.results(wanted, {"default": [1.0, 1.0]}, same, {wanted[1].name: "too large"})
    assert [r.refused for r in found] == ["", "too large", "too large"]


def outputs(*values: float) -> list[dict[str, torch.Tensor]]:
    return [{"stream": torch.tensor(values, dtype=torch.float32), "cache": torch.zeros(2, dtype=torch.bfloat16)}]


def test_bits_are_compared_not_values() -> None:
    nan = float("nan")
    assert ablate.differing(outputs(1, nan), outputs(1, nan)) == []
    assert ablate.differing(outputs(0.0), outputs(-0.0)) == ["stream"]
    assert ablate.differing([{}], outputs(1)) == ["cache", "stream"]
    second = [*outputs(1), *outputs(2)]
    assert ablate.differing(second, [*outputs(1), *outputs(3)]) == ["stream"]  # of another rank


def test_who_computes_something_else_is_named() -> None:
    """The first one's outputs are kept: all may be views of the same memory."""
    shared = outputs(0.0)

    def replay(value: float) -> Callable[[], list[dict[str, torch.Tensor]]]:
        def run() -> list[dict[str, torch.Tensor]]:
            shared[0]["stream"].fill_(value)
            return shared

        return run

    ablate.same_results({"default": replay(1), "a": replay(1)})
    with pytest.raises(DeviceError, match="other bits than default: b, c") as refused:
        ablate.same_results({"default": replay(1), "a": replay(1), "b": replay(1 + 2**-23), "c": replay(2)})
    assert [text for text, _ in refused.value.notes] == ["b: stream differ", "c: stream differ"]
    assert refused.value.exit_code != 0


def test_a_reason_is_one_line_with_the_schedules() -> None:
    assert ablate.reason(MegagenError("no\n  room")) == "no room"
    assert ablate.reason(ScheduleError("no room", loc=Loc("/long/way/s.py", 3))) == "no room (s.py:3)"


# -- the shipped layer, built but not compiled ---------------------------------------------------------------------

REQUEST = pipeline.Request(LAYER)


def not_compiled(checked: Any, archs: Any, settings: Any, *, bounded: bool = True) -> pipeline.Built:
    artifacts: Any = {checked.plan.machine.arch: SimpleNamespace(path=Path("none"), kernels={})}
    return pipeline.Built(checked.graph, checked.plan, (), "", artifacts, offered=checked.offered)


@pytest.fixture(scope="module")
def layer() -> Any:
    """Every variant of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "build", not_compiled)
        base = pipeline.check(REQUEST)
        wanted = ablating.variants(REQUEST, base, [], from_off=True)
        told: list[int] = []
        builds, refused = ablating.build(
            REQUEST, wanted, Settings(), progress=lambda: told.append(threading.get_ident())
        )
    assert len(told) == len(wanted)
    return SimpleNamespace(base=base, wanted=wanted, builds=builds, refused=refused)


def test_every_value_of_the_layers_choices_is_tried(layer: Any) -> None:
    tried = {(v.choice, v.value) for v in layer.wanted if v.base == "default" and v.choice}
    assert tried == {
        (name, value)
        for name, values in layer.base.offered.items()
        for value in values
        if value != layer.base.plan.choices[name]
    }
    assert {v.name for v in layer.wanted} == {*layer.builds, *layer.refused}


def test_a_variant_that_the_checker_refuses_is_told(layer: Any) -> None:
    """Blocks of a cluster exchange partial sums only where there are clusters."""
    why = layer.refused["default with sync=cluster"]
    assert "travels within a cluster" in why and "(_layer.py:" in why


def test_a_choice_that_does_nothing_is_the_same_code(layer: Any) -> None:
    same = ablate.same_code({name: b.plan for name, b in layer.builds.items()})
    assert same["default with next_qkvg_before=combine"] == "default"  # nothing is asked of L2
    for name in ("default with cluster=2", "default with early_trigger=True", "default with summed=0"):
        assert same[name] == name


def test_variants_of_two_bases_are_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "build", not_compiled)
    request = replace(REQUEST, choices={"warm_code": "off", "next_keys": "off"})
    wanted = ablating.variants(request, pipeline.check(request), ["in_flight"], from_off=True)
    builds, _ = ablating.build(request, wanted, Settings())
    same = ablate.same_code({name: b.plan for name, b in builds.items()})
    assert same["off"] == "default with in_flight=none"
    assert same["off with in_flight=36"] == "default"


def test_a_base_that_is_refused_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "build", not_compiled)
    base = Variant("off", {"sync": "cluster"})
    with pytest.raises(MegagenError, match="travels within a cluster"):
        ablating.build(REQUEST, [Variant("default", {}), base], Settings())


def test_a_choice_that_changes_the_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(request: pipeline.Request) -> pipeline.Checked:
        tokens = 8 if request.choices else 16
        return pipeline.check_as_it_is(replace(request, choices={}, tokens=tokens))  # type: ignore[attr-defined]

    monkeypatch.setattr(pipeline, "check_as_it_is", pipeline.check, raising=False)
    monkeypatch.setattr(pipeline, "check", check)
    monkeypatch.setattr(pipeline, "build", not_compiled)
    wanted = [Variant("default", {}), Variant("default", {"a": "2"}, "a", "2")]
    builds, refused = ablating.build(REQUEST, wanted, Settings())
    assert list(builds) == ["default"]
    assert "computes something else" in refused["default with a=2"]


# -- the command ----------------------------------------------------------------------------------------------------


def command(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main.app, ["bench", *args], prog_name="megagen")
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU of which only the times are made up; measurements go to ``desk``."""
    monkeypatch.setattr(device, "require", lambda gpus=1: None)
    monkeypatch.setattr(pipeline, "build", not_compiled)
    monkeypatch.setattr(device, "measurements", lambda name: tmp_path / f"{name}.jsonl")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "toy")
    monkeypatch.setattr(driver, "version", lambda: "1")
    return tmp_path


@pytest.fixture
def ablated(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default takes 100 µs, each variant one more than the one before it; clusters do not fit."""

    def time(builds: Mapping[str, Any], needed: Any, *args: Any, **more: Any) -> Any:
        assert needed <= set(builds)
        times = {name: [100.0 + i, 101.0 + i, 102.0 + i] for i, name in enumerate(builds)}
        unfit = {name: "too many blocks" for name in builds if "cluster=2" in name}
        return {name: t for name, t in times.items() if name not in unfit}, unfit

    monkeypatch.setattr(ablating, "time", time)
    return desk


CHOSEN = [a for name in ("sync", "cluster", "next_qkvg_before", "early_trigger") for a in ("--only", name)]


def test_the_table(ablated: Path) -> None:
    code, out, err = command(str(LAYER), "--ablate", "--from-off", *CHOSEN)
    assert (code, err) == (0, "")
    first, second = out.split("One choice on, against all off that can be: ")
    assert "One choice changed, against the default: 16 tokens on 49 experts after 4096, 8 layers, 50 rounds" in first
    lines = [line.split() for line in first.splitlines()]
    assert ["(default)", "101.00"] in lines
    for text in (
        "early_trigger True False 103.00 +2.00 +2.00 +2.00",
        "cluster 2 1 refused: too many blocks",
        "next_qkvg_before combine residual 101.00 +0.00 +0.00 +0.00 same code as default",
    ):
        assert text.split() in lines
    assert "refused: pooled_partials travels within a cluster" in " ".join(first.split())
    choices = [row[0] for row in lines if row and row[0] in ("cluster", "early_trigger", "next_qkvg_before", "sync")]
    assert choices == sorted(choices) and len(choices) == 6
    assert "(off)" in second and "early_trigger" in second and "same bits" in second
    assert max(len(line) for line in out.splitlines() if line.startswith("─")) <= 120


def test_json_and_rows(ablated: Path) -> None:
    code, out, err = command(str(LAYER), "--ablate", "--from-off", *CHOSEN, "--json", "--record")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found)[:3] == ["plan", "machine", "tp"]
    changes = {(r["choice"], r["value"]): r for r in found["changes"]}
    assert changes[None, None]["us"] == 101
    one = changes["early_trigger", "True"]
    assert one["base_value"] == "False"
    assert (one["effect_us"], one["p10_us"], one["p90_us"], one["refused"]) == (2, 2, 2, None)
    assert changes["cluster", "2"]["refused"] == "too many blocks"
    assert [r["choice"] for r in found["alone_on"]] == [None, "early_trigger"]
    rows = {r.what: r for r in measure.read(ablated / "muse_swa.jsonl")}
    assert {"ablation.default", "ablation.off", "ablation.alone.early_trigger.True"} <= set(rows)
    row = rows["ablation.early_trigger.True"]
    assert (row.value, row.unit, row.floor, row.spread) == (2.0, "µs", None, (2.0, 2.0))
    assert row.notes.startswith(
        "µs per layer more than default, in the same round; muse_spark.sliding_layer.nn.two_shot; tp 8"
    )
    assert (rows["ablation.default"].value, rows["ablation.default"].unit) == (101.0, "µs per layer")
    assert rows["ablation.default"].ratio is not None
    assert not any("cluster" in what for what in rows)  # nothing was timed


def test_choose_moves_the_default(ablated: Path) -> None:
    args = (str(LAYER), "--ablate", "--only", "early_trigger", "--choose", "cluster=2", "--json")
    assert command(*args)[0] == 0
    found = json.loads(command(*args)[1])
    assert found["choices"]["cluster"] == "2"
    assert [r["choices"] for r in found["changes"]] == [{"cluster": "2"}, {"cluster": "2", "early_trigger": "True"}]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--ablate", "--only", "clustr"), ("muse_swa.py offers no choice 'clustr'", "did you mean 'cluster'?")),
        (("--ablate", "--only", "cluster", "--choose", "cluster=2"), ("--choose settles",)),
        (("--ablate", "--only", "sync", "--from-off"), ("can be off: sync",)),
        (("--ablate", "--experts", "200"), ("200 distinct experts", "8 to 128 are possible")),
        (("--ablate", "--choose", "clustr=2"), ("did you mean 'cluster'?",)),
        (("--sweep", "expert=8,16"), ("did you mean 'experts'?",)),
        (("--sweep", "experts=8,many"), ("'many' is no whole number", "--sweep experts=8,16,32")),
        (("--sweep", "experts=8,16.5"), ("'16.5' is no whole number",)),
        (("--sweep", "experts=8,"), ("'' is no whole number",)),
        (("--sweep", "experts=" + "9" * 5000 + ",8"), ("is no whole number",)),
        (("--sweep", "experts=8,200"), ("200 distinct experts", "8 to 128 are possible")),
        (("--sweep", "experts=8,8"), ("two values",)),
        (("--sweep", "experts"), ("NAME=VALUE",)),
        (("--sweep", "=8,16"), ("NAME=VALUE",)),
        (("--sweep", "context=-1,5"), ("-1 is less than 0",)),
        (("--sweep", "context=5,99999999999"), ("99999999999", "positions")),
        (("--sweep", "tokens=0,5"), ("0 is less than 1",)),
        (("--sweep", "tokens=1,17"), ("17 is more than the 16", "--tokens N")),
        (("--sweep", "tokens=1,16", "--experts", "49"), ("49 distinct experts for 1 tokens",)),
    ],
)
def test_bad_input_is_refused(args: tuple[str, ...], said: tuple[str, ...], desk: Path) -> None:
    code, out, err = command(str(LAYER), *args)
    assert (code, out) == (1, ""), err
    assert "Traceback" not in err
    for text in said:
        assert text in err


@pytest.mark.parametrize(
    "args",
    [
        ("--ablate", "--sweep", "experts=8,16"),
        ("--ablate", "--step"),
        ("--sweep", "experts=8,16", "--step"),
        ("--sweep", "experts=8,16", "--only", "unfused"),
        ("--sweep", "experts=8,16", "--experts", "8"),
        ("--sweep", "context=8,16", "--context", "8"),
        ("--from-off",),
        ("--only", "nonsense"),
        ("--only", "fused", "--only", "unfused"),
        ("--only", "cluster"),
    ],
)
def test_wrong_usage_exits_2(args: tuple[str, ...], desk: Path) -> None:
    code, out, err = command(str(LAYER), *args)
    assert (code, out) == (2, "")
    assert "Error" in err and "Traceback" not in err


def test_a_hang_in_a_variant_leaves_as_an_error(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def time(*args: Any, **more: Any) -> Any:
        raise HangError("default with cluster=2: rank 0 waits", record=None)

    monkeypatch.setattr(ablating, "time", time)
    code, out, err = command(str(LAYER), "--ablate", "--only", "early_trigger", "--record")
    assert (code, out) == (1, "")
    assert "default with cluster=2" in err
    assert list(desk.iterdir()) == []


# -- what is asked of a GPU ------------------------------------------------------------------------------------------


class FakeSession:
    """Notes what it is told. Those that ``fail`` do so when opened, those that ``hang`` when waited for."""

    experts, top_k, device = 256, 8, torch.device("cpu")
    fail: frozenset[str] = frozenset()
    hang: frozenset[str] = frozenset()

    def __init__(self, plan: Any, path: Path, *, timeout_ms: int) -> None:
        self.name, self.timeout_ms, self.told, self.open = path.name, timeout_ms, list[Any](), True
        if self.name in self.fail:
            raise DeviceError("too many blocks")

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *args: object) -> None:
        self.open = False

    def set_step(self, step: Any) -> None:
        self.told.append(("step", step.tokens, step.context))

    def set_route_override(self, table: torch.Tensor) -> None:
        self.table = table
        self.told.append(("routes", table.tolist()))

    def synchronize(self) -> None:
        if self.name in self.hang:
            raise HangError("rank 0 waits", record=None)


class FakeStack:
    """Its output is of its routing; of those that ``err``, another one."""

    err: frozenset[str] = frozenset()
    made: list[FakeStack]

    def __init__(self, session: FakeSession, packed: Any, inputs: Any) -> None:
        self.session, self.packed, self.inputs = session, packed, inputs
        self.outputs = [{"stream": torch.zeros(1)}]
        self.made.append(self)

    def capture(self, *, restore: bool) -> FakeStack:
        assert not restore
        return self

    def restore(self) -> None:
        self.session.told.append("restore")

    def replay(self) -> None:
        self.session.told.append("replay")
        wrong = float(self.session.name in self.err)
        self.outputs[0]["stream"].fill_(float(self.session.table.sum()) + wrong)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sessions, stacks and clocks that are none."""
    from megagen.bench import inputs
    from megagen.runtime import session, stack

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.record = lambda: None
            self.elapsed_time = lambda end: 1.0

    class Draw:
        @staticmethod
        def random(graph: Any, live: int, tokens: int, seed: int, where: Any, step: Any) -> Any:
            assert (live, step.tokens) == (1, tokens)
            return SimpleNamespace(step=step, ranks=object())

    class Kind(FakeSession):
        pass

    class Made(FakeStack):
        pass

    Made.made = []
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event, synchronize=lambda: None, _sleep=lambda n: None))
    monkeypatch.setattr(session, "Session", Kind)
    monkeypatch.setattr(stack, "Stack", Made)
    monkeypatch.setattr(inputs, "Inputs", Draw)
    monkeypatch.setattr(
        device, "random_weights", lambda built, layers, where, progress: [progress() for _ in range(layers)]
    )
    return SimpleNamespace(session=Kind, stack=Made)


def named(base: pipeline.Checked, *names: str) -> dict[str, pipeline.Built]:
    """As many builds, whose cubins are called so."""
    arch = base.plan.machine.arch
    return {
        name: replace(not_compiled(base, [], None), artifacts={arch: SimpleNamespace(path=Path(name))})  # type: ignore[dict-item]
        for name in names
    }


def ablation(base: pipeline.Checked, *names: str, progress: Callable[[], None] = lambda: None) -> Any:
    step = pipeline.step(base, 16, 4096)
    return ablating.time(named(base, *names), {names[0]}, 49, 8, 3, progress, bounded=True, step=step)


def test_variants_share_all_but_their_kernels(gpu: Any, layer: Any) -> None:
    told: list[int] = []
    times, refused = ablation(layer.base, "a", "b", "c", progress=lambda: told.append(1))
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert times["a"] == [125.0] * 3 and refused == {}
    assert len(told) == ablating.steps(3, 8, 3)
    made = gpu.stack.made
    assert len({id(s.packed) for s in made}) == len({id(s.inputs) for s in made}) == 1
    first, *others = [s.session for s in made]
    assert all(s.told == first.told for s in others)  # the same routing in each round
    routes = [t[1] for t in first.told if t[0] == "routes"]
    assert len(routes) == 1 + device.WARMUP + 3 + 1 and len({e for row in routes[0] for e in row}) == 49
    assert routes[0] != routes[-1]
    assert first.told[0] == ("step", 16, 4096)
    assert [t for t in first.told if isinstance(t, str)] == [
        "restore", "replay", *["replay"] * (device.WARMUP + 3), "restore", "replay"
    ]  # fmt: skip
    assert not any(s.open for s in (first, *others))


def test_one_that_does_not_fit_is_left_out(gpu: Any, layer: Any) -> None:
    gpu.session.fail = frozenset({"b"})
    times, refused = ablation(layer.base, "a", "b", "c")
    assert (list(times), refused) == (["a", "c"], {"b": "too many blocks"})
    gpu.session.fail = frozenset({"a"})
    with pytest.raises(DeviceError, match="too many blocks"):
        ablation(layer.base, "a", "b")


def test_other_bits_and_hangs_name_the_variant(gpu: Any, layer: Any) -> None:
    gpu.stack.err = frozenset({"b"})
    with pytest.raises(DeviceError, match="other bits than a: b"):
        ablation(layer.base, "a", "b", "c")
    gpu.session.hang = frozenset({"c"})
    gpu.stack.err = frozenset()
    with pytest.raises(HangError, match=r"^c: rank 0 waits"):
        ablation(layer.base, "a", "b", "c")


def test_each_point_says_what_it_is_before_it_is_timed(gpu: Any, layer: Any) -> None:
    wanted = sweeping.points(layer.base, Sweep.parse("tokens=1,16"), None, 1024, tree=False)
    (built,) = named(layer.base, "a").values()
    told: list[int] = []
    times = sweeping.time(built, wanted, 8, 3, lambda: told.append(1), bounded=False)
    assert {name: t.samples for name, t in times.items()} == {"tokens=1": 3, "tokens=16": 3}
    assert len(told) == sweeping.steps(2, 8, 3)
    one, other = gpu.stack.made
    assert one.session is other.session and one.session.timeout_ms == 0
    assert one.packed is other.packed and one.inputs is not other.inputs
    found = one.session.told[2:]  # less those before the graphs' capture
    assert len(found) == 3 * 2 * (device.WARMUP + 3)
    for step, routes, replay in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert step in (("step", 1, 1024), ("step", 16, 1024)) and replay == "replay"
        assert len(routes[1]) == step[1]
        assert len({e for row in routes[1] for e in row}) == {1: 8, 16: 49}[step[1]]


# -- sweeps ----------------------------------------------------------------------------------------------------------

lines = st.tuples(st.floats(1, 500), st.floats(0.1, 20))  # µs, TB/s
sizes = st.lists(st.integers(1, 4000), min_size=2, max_size=9, unique=True).map(lambda n: [x * 1_000_000 for x in n])


@given(lines, sizes)
def test_a_line_is_found_again(line: tuple[float, float], nbytes: list[int]) -> None:
    a, b = line
    us = [a + n / (b * 1e6) for n in nbytes]
    found = fit(nbytes, us)
    assert found.rate is not None
    # how well both are determined is a matter of how far the points lie apart
    spread = (max(us) - min(us)) / max(us)
    assume(spread > 1e-6)
    assert found.rate == pytest.approx(b * 1e12, rel=1e-8 / spread)
    assert found.a == pytest.approx(a, rel=1e-8 / spread, abs=1e-8 * max(us) / spread)
    assert max(map(abs, found.deviations)) < 1e-9


@given(sizes, st.data())
@settings(max_examples=50)
def test_no_other_line_has_less_relative_deviation(nbytes: list[int], data: st.DataObject) -> None:
    us = data.draw(st.lists(st.floats(10, 1000), min_size=len(nbytes), max_size=len(nbytes)))
    found = fit(nbytes, us)

    def cost(a: float, slope: float) -> float:
        return sum(((y - a - slope * n) / y) ** 2 for n, y in zip(nbytes, us, strict=True))

    least = cost(found.a, found.slope)
    assert least == pytest.approx(sum(d * d for d in found.deviations), abs=1e-9)
    for da in (-1e-2, 0, 1e-2):
        for db in (-1e-2, 0, 1e-2):
            assert cost(found.a + da * max(us), found.slope + db * max(us) / max(nbytes)) >= least - 1e-9


def test_points_weigh_alike_in_relative_terms() -> None:
    """Off by 10 µs, a launch of 20 µs bends the line more than one of 1000 does."""
    found = fit([0, 500_000_000, 1_000_000_000], [20, 510, 1000])
    bent = fit([0, 500_000_000, 1_000_000_000], [30, 510, 1000])
    assert found.a == pytest.approx(20) and found.deviations[0] == pytest.approx(0)
    assert abs(bent.deviations[0]) < 1e-3  # the plain fit would leave 5 %
    assert bent.worst == 1
    assert np.polyfit([0, 0.5, 1], [30, 510, 1000], 1)[1] < 29  # as it does


@pytest.mark.parametrize("nbytes", [[], [5], [7, 7, 7]])
def test_a_line_needs_two_points(nbytes: list[int]) -> None:
    with pytest.raises(MegagenError, match="no line through points of one number of bytes"):
        fit(nbytes, [1.0] * len(nbytes))


def test_a_time_that_does_not_grow_has_no_rate() -> None:
    points = [sweeping.Point(f"experts={n}", 16, n, None, n) for n in (8, 16)]
    for us in ([10.0, 10.0], [10.0, 9.0]):
        found = Fit(us[0], min(0.0, us[1] - us[0]), (0.0, 0.0))
        assert found.rate is None
        assert sweeping.words(found, points, 4.8e12).startswith("No rate:")
        told = sweeping.told(found, points, 4.8e12)
        assert told is not None and told["b_tb_per_s"] is None and told["hbm_share"] is None


@given(st.sampled_from(sorted(LEAST)), st.lists(st.integers(1, 200), min_size=2, unique=True))
def test_a_sweep_is_read(name: str, values: list[int]) -> None:
    assert Sweep.parse(f"{name}={','.join(map(str, values))}") == Sweep(name, tuple(sorted(values)))
    assert Sweep.parse(f" {name} = {', '.join(map(str, [*values, values[0]]))} ").values == tuple(sorted(values))


def points(sweep: str, schedule: Path = LAYER, **more: Any) -> list[sweeping.Point]:
    checked = pipeline.check(pipeline.Request(schedule, options=more.pop("options", {})))
    return sweeping.points(checked, Sweep.parse(sweep), more.get("experts"), more.get("context"), tree=False)


def test_bytes_of_experts() -> None:
    """Of one more expert: its two matrices' shares; at the nominal number, what the plan says."""
    plan = pipeline.check(REQUEST).plan
    found = points("experts=8,49,50,113", context=0)
    keys = found[1].nbytes - measure.weight_bytes(plan)
    assert [p.nbytes - keys for p in found] == [measure.weight_bytes(plan, p.experts) for p in found]
    each = sum(w.bytes // w.experts for w in plan.weights if w.experts)
    assert found[2].nbytes - found[1].nbytes == each
    assert {p.tokens for p in found} == {16}


def test_bytes_of_keys_end_with_the_window() -> None:
    config = muse_spark.MuseSparkConfig()
    found = {p.context: p.nbytes for p in points(f"context=0,100,{config.window - 1},{config.window},10000")}
    each = 2 * 2 * (config.kv_heads // 8) * config.head_dim  # keys and values of a number, in bf16
    assert found[100] - found[0] == 100 * each
    assert found[config.window - 1] - found[0] == (config.window - 1) * each
    assert found[config.window] == found[10000] == found[config.window - 1]  # each of 16 tokens sees one less


def test_bytes_of_a_growing_cache_grow() -> None:
    options = {"following": "global", "positions": "131200"}
    found = points("context=4096,131072", LAYER.with_name("muse_global.py"), options=options)
    config = muse_spark.MuseSparkConfig()
    each = 2 * 2 * (config.kv_heads // 8) * config.head_dim
    assert found[1].nbytes - found[0].nbytes == (131072 - 4096) * each


def test_experts_follow_the_tokens() -> None:
    found = points("tokens=16,1,4")
    assert [(p.tokens, p.experts) for p in found] == [(1, 8), (4, 20), (16, 49)]
    assert [p.step.tokens for p in found if p.step is not None] == [1, 4, 16]
    assert [p.experts for p in points("tokens=4,8", experts=32)] == [32, 32]


def test_a_graph_without_caches() -> None:
    block = LAYER.with_name("muse_moe.py")
    assert [(p.step, p.context) for p in points("tokens=1,16", block)] == [(None, 0)] * 2
    with pytest.raises(MegagenError, match="keep no caches"):
        points("context=1,2", block)


@pytest.fixture
def swept(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every point takes 30 µs and its bytes at 4 TB/s."""

    def time(built: Any, wanted: Sequence[sweeping.Point], *args: Any, **more: Any) -> dict[str, Timing]:
        took = {p.name: 30 + p.nbytes / 4e6 for p in wanted}
        return {name: Timing(name, us, us - 1, us + 1, 50) for name, us in took.items()}

    monkeypatch.setattr(sweeping, "time", time)
    return desk


def test_a_sweep_is_shown(swept: Path) -> None:
    code, out, err = command(str(LAYER), "--sweep", "experts=113,8,49", "--record")
    assert (code, err) == (0, "")
    assert "µs a layer by experts: 16 tokens after 4096, 8 layers, 50 replays" in out
    assert "Line: 30.0 µs + bytes / 4.00 TB/s (" in out
    rows = [line.split()[:3] for line in out.splitlines() if line.strip().startswith("16")]
    assert rows == [["16", "8", "4,096"], ["16", "49", "4,096"], ["16", "113", "4,096"]]
    kept = {r.what: r for r in measure.read(swept / "muse_swa.jsonl")}
    assert list(kept) == [
        *(f"layer.sliding.sweep.experts.{n}" for n in (8, 49, 113)),
        *(f"layer.sliding.fit.experts.{n}" for n in ("a", "b", "worst")),
    ]
    a, b = kept["layer.sliding.fit.experts.a"], kept["layer.sliding.fit.experts.b"]
    assert (a.value, a.unit, b.value, b.unit) == (30.0, "µs", 4.0, "TB/s")
    assert a.notes.startswith("3 points of experts=8 to experts=113; muse_spark.sliding_layer.nn")
    assert "16 tokens on 8 experts after 4096" in kept["layer.sliding.sweep.experts.8"].notes


def test_a_sweep_of_tokens_in_json(swept: Path) -> None:
    code, out, err = command(str(LAYER), "--sweep", "tokens=1,16", "--json", "--record")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(f["tokens"], f["experts"], f["context"]) for f in found["figures"]] == [(1, 8, 4096), (16, 49, 4096)]
    for f in found["figures"]:
        assert f["ratio"] == pytest.approx(f["value"] / f["floor"], rel=1e-3)
        assert f["deviation_percent"] == pytest.approx(0, abs=1e-6)
    assert (found["fit"]["a_us"], found["fit"]["b_tb_per_s"]) == (30.0, 4.0)
    assert found["fit"]["hbm_share"] == pytest.approx(
        4e12 / pipeline.check(REQUEST).plan.machine.hbm_bytes_per_s, abs=1e-3
    )
    notes = measure.read(swept / "muse_swa.jsonl")[0].notes
    assert "1 token on 8 experts after 4096" in notes


def test_points_of_the_same_bytes_are_shown_without_a_line(swept: Path) -> None:
    """Beyond the window, more context is no more to read."""
    code, out, err = command(str(LAYER), "--sweep", "context=4096,8000", "--record")
    assert (code, err) == (0, "")
    assert "No line: all points read the same bytes." in out
    assert len(measure.read(swept / "muse_swa.jsonl")) == 2
    assert json.loads(command(str(LAYER), "--sweep", "context=4096,8000", "--json")[1])["fit"] is None
