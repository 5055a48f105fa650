"""Sessions over the emulator, over a stand-in of its engine: memory, launches, reading back, and who may write when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megagen import resources
from megagen.bench.emulation import Emulation, Weights, refuse_too_large
from megagen.bench.inputs import Inputs
from megagen.cli import device, emulator, main, pipeline
from megagen.emulate import compile_library
from megagen.errors import DeviceError, HangError, MegagenError
from megagen.ir.plan import Plan
from megagen.runtime import heap, params
from megagen.runtime.emulated import World
from megagen.runtime.stack import Stack, handed_on
from megagen.runtime.step import Step
from megagen.settings import Settings

STAND_IN = Path(__file__).parent / "emulator"
TP = 2

# What a launch of the stand-in does: counts the epoch up, doubles the stream, tells every peer its rank.
KERNEL = """
struct Params {{
  unsigned char* heap[8];
  unsigned* abort[8];
  const unsigned* control;
  const int* routes;
  unsigned rank, live, world, timeout, rest[8];
  {members}
}};
extern "C" const char* {name}(const void* p) {{
  const Params& a = *(const Params*)p;
  unsigned* epoch = (unsigned*)(a.heap[a.rank] + {epoch});
  for (int i = 0; i < {blocks}; ++i) ++epoch[i];
  for (unsigned i = 0; i < {width} * a.control[0]; ++i) ((float*)a.stream_out)[i] = 2 * ((const float*)a.stream)[i];
  {keep}
  for (unsigned peer = 0; peer < a.live; ++peer) *((int*)(a.heap[peer] + {channel}) + a.rank) = 100 + a.rank;
  if (a.routes && a.routes[0] == 5) {{
    *a.abort[0] = 1;
    unsigned* record = (unsigned*)(a.heap[a.rank] + {record});
    const unsigned fields[11] = {{1, {step}, {edge}, 4, 0, 0, 0, 0, 0, a.rank, 1}};
    for (int i = 0; i < 11; ++i) record[i] = fields[i];
  }}
  return nullptr;
}}
"""


@pytest.fixture(scope="module")
def checked() -> pipeline.Checked:
    return pipeline.check(pipeline.Request(Path("muse_moe.py"), tp=TP, tiny=True))


@pytest.fixture(scope="module")
def library(checked: pipeline.Checked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in(checked.plan, tmp_path_factory.mktemp("cache"))


def stand_in(plan: Plan, cache: Path, keep: str = "") -> Path:
    """``keep``: what the kernel does besides."""
    steps = [s for k in plan.kernels for p in k.programs for s in p.steps]
    text = KERNEL.format(
        members=" ".join(f"unsigned char* {p.name};" for p in params.pointers(plan)),
        name=plan.kernels[0].name,
        keep=keep,
        epoch=plan.heap.epoch_offset,
        blocks=plan.launch.blocks,
        width=2048,
        channel=plan.channel("pooled").offset,
        record=plan.heap.record_offset,
        step=next(s.index for s in steps if (s.op, s.call) == ("down", "math")),
        edge=plan.channel("expert_mid").index,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "headers", dict)
        emulate = {f"megagen/emulate/{n}": (STAND_IN / n).read_text() for n in ("abi.hpp", "builtins.cuh")}
        patch.setattr(resources, "emulator_headers", lambda: emulate)
        patch.setattr(resources, "emulator_sources", lambda: {"engine.cpp": (STAND_IN / "engine.cpp").read_text()})
        settings = Settings(cache_dir=cache)
        return compile_library(text, kernels=[plan.kernels[0].name], settings=settings)


@pytest.fixture
def world(checked: pipeline.Checked, library: Path) -> World:
    return World(checked.plan, library, seed=9)


def tensors(plan: Plan, rank: int = 0) -> dict[str, torch.Tensor]:
    """Zeros for every parameter but the stream, which tells rows and ranks apart."""
    found = {}
    for name, want in params.expected(plan).items():
        if want.what != "output":
            dtype = getattr(torch, want.dtype)
            found[name] = torch.zeros(want.bytes // dtype.itemsize, dtype=dtype)
    rows = torch.arange(plan.tokens, dtype=torch.float32) + 100 * rank
    found["stream"] = rows.unsqueeze(1).expand(-1, 2048).contiguous()
    return found


# Every token adds one to its own number's first key, and leaves what it read in the next layer's.
KEEP = """
  for (unsigned i = 0; i < a.control[0]; ++i) {
    unsigned long at = 64 * ((a.control[1] + i) % 256) / 2;
    ((unsigned*)a.next_k_cache)[at] = ((const unsigned*)a.k_cache)[at] + a.control[16 + i];
  }
  ((unsigned*)a.next_q)[0] = ((const unsigned*)a.q)[0] + a.control[32 + a.control[0] - 1];
"""


@pytest.fixture(scope="module")
def layer() -> pipeline.Checked:
    return pipeline.check(pipeline.Request(Path("muse_swa.py"), tp=TP, tiny=True))


@pytest.fixture(scope="module")
def layer_library(layer: pipeline.Checked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in(layer.plan, tmp_path_factory.mktemp("cache"), KEEP)


def bound(world: World) -> list[Any]:
    return [rank.bind(tensors(world.plan, rank.rank)) for rank in world.ranks]


def test_a_launch_reads_what_was_bound_and_reaches_all_heaps(world: World) -> None:
    layers = bound(world)
    for rank in world.ranks:
        rank.set_tokens(3)
    world.launch(layers)
    assert all(r.outputs["stream_out"].isnan().all() for r in world.ranks)  # poisoned, and nothing has run
    world.synchronize()
    for rank in world.ranks:
        out = rank.outputs["stream_out"]
        assert out[:3, 0].tolist() == [200 * rank.rank + 2 * i for i in range(3)]
        assert out[3:].isnan().all()
        assert rank.epoch() == 1
        assert rank.read("pooled").dtype is torch.bfloat16
        start = world.plan.channel("pooled").offset
        assert rank.heap[start : start + 8].view(torch.int32).tolist() == [100, 101]


def test_a_fresh_heap_is_the_plans_image(world: World) -> None:
    world.ranks[1].heap.fill_(3)
    world.recover()
    for rank in world.ranks:
        assert rank.heap.numpy().tobytes() == bytes(heap.image(world.plan))
        assert rank.leftovers() == []


def test_launches_queue_up_and_the_host_may_not_write_meanwhile(world: World) -> None:
    layers = bound(world)
    for _ in range(3):
        world.launch(layers)
    writes: list[Callable[[], object]] = [
        lambda: world.ranks[0].set_tokens(2),
        lambda: world.ranks[1].set_route_override(None),
        world.ranks[0].poison,
        world.recover,
        lambda: world.ranks[0].bind(tensors(world.plan)),
    ]
    for write in writes:
        with pytest.raises(DeviceError, match="while launches are queued"):
            write()
    world.ranks[1].synchronize()
    assert [r.epoch() for r in world.ranks] == [3, 3]
    world.ranks[0].set_tokens(2)


def test_every_host_write_is_told(world: World) -> None:
    def wrote() -> int:
        return int(world.engine.statistics()["wrote"])

    before = wrote()
    world.ranks[0].set_tokens(3)
    assert wrote() - before == 4 * params.CONTROL_WORDS
    before = wrote()
    world.ranks[0].poison()
    assert wrote() - before == 16 * 2048 * 4
    before = wrote()
    world.ranks[0].set_route_override(torch.arange(8, dtype=torch.int32).view(1, 8))
    assert wrote() - before == 16 * 8 * 4
    before = wrote()
    world.recover()
    assert wrote() - before == TP * world.plan.heap.bytes
    before = wrote()
    world.ranks[0].bind(tensors(world.plan))
    assert wrote() - before == sum(e.bytes for e in params.expected(world.plan).values() if e.what != "output")


def test_what_is_already_there_is_not_copied(world: World) -> None:
    rank = world.ranks[0]
    layer = rank.bind(tensors(world.plan))
    again = rank.bind(layer.tensors)
    assert {n: t.data_ptr() for n, t in again.tensors.items()} == {n: t.data_ptr() for n, t in layer.tensors.items()}
    assert layer.tensors["stream_out"] is rank.outputs["stream_out"]
    assert all(t.data_ptr() % 256 == 0 for t in layer.tensors.values())


def test_what_is_allocated_is_bound_where_it_is(layer: pipeline.Checked, layer_library: Path) -> None:
    """One layer's state is the next one's input: the same memory, which launches write."""
    world = World(layer.plan, layer_library)
    rank = world.ranks[0]
    mine = rank.allocate("next_k_cache")
    assert (mine.shape, mine.dtype) == ((2, 256, 64), torch.bfloat16)
    assert not mine.any()
    writer = rank.bind({**tensors(layer.plan), "next_k_cache": mine})
    reader = rank.bind({**writer.tensors, "k_cache": mine, "next_k_cache": rank.allocate("k_cache")})
    assert writer.tensors["next_k_cache"] is reader.tensors["k_cache"] is mine
    assert "next_k_cache" not in rank.outputs
    rank.poison()
    assert not mine.any()
    given = tensors(layer.plan)
    del given["next_v_cache"]
    with pytest.raises(DeviceError, match="cannot be bound") as e:
        rank.bind(given)
    assert "next_v_cache: missing state" in e.value.render()
    for name in ("o_proj_weight", "nobody"):
        with pytest.raises(DeviceError, match=f"no input, output or state {name}"):
            rank.allocate(name)


def test_layers_in_a_row(layer: pipeline.Checked, layer_library: Path) -> None:
    """Five launches: the stream doubles, the query sums masks, and each layer's caches come from the one before."""
    world = World(layer.plan, layer_library, layers=8)
    weights = {name for name, want in params.expected(layer.plan).items() if want.what == "weight"}
    packed = [[{n: t for n, t in tensors(layer.plan).items() if n in weights} for _ in range(TP)]]
    inputs = Inputs.random(layer.graph, TP, 3, 0, torch.device("cpu"), Step.chain(3, 255))
    for values in inputs.ranks:
        values["q"].zero_()
        values["k_cache"].zero_()
    stack = Stack(world, packed, inputs.ranks, layers=5)
    for rank in world.ranks:
        rank.set_step(inputs.step)
    for _ in range(2):
        stack.launch()
        with pytest.raises(DeviceError, match="while launches are queued"):
            stack.restore()
        world.synchronize()
        for rank, out in enumerate(stack.outputs):
            assert torch.equal(out["stream_out"][:3], 32 * inputs.stream)
            assert out["next_q"].view(torch.int32)[0, 0] == 5 * 7
            for index, bound in enumerate(stack.bound):
                keys = bound[rank].tensors["k_cache"].view(torch.int32)[0, :, 0]
                times = index or 5  # the last layer writes the first one's
                assert {i: int(x) for i, x in enumerate(keys) if x} == {
                    255: times * 255,
                    0: times * 256,
                    1: times * 257,
                }
    assert len({b[0].tensors["k_cache"].data_ptr() for b in stack.bound}) == 5
    assert len({b[0].tensors["stream"].data_ptr() for b in stack.bound}) == 2
    assert len({b[0].tensors["o_proj_weight"].data_ptr() for b in stack.bound}) == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("muse_global.py", {}, "next_k_cache is not like k_cache, next_v_cache is not like v_cache"),
        ("muse_swa.py", {"following": "global"}, "next_k_cache is not like k_cache"),
        ("muse_swa.py", {"following": "end"}, "stream_out made"),
        ("muse_first.py", {}, "ids is left to read"),
        ("muse_last.py", {}, "stream is left to read"),
    ],
)
def test_launches_that_no_other_of_their_kind_follows(name: str, options: dict[str, str], message: str) -> None:
    plan = pipeline.check(pipeline.Request(Path(name), tp=TP, tiny=True, options=options)).plan
    with pytest.raises(DeviceError, match=message) as e:
        handed_on(plan)
    assert "megagen step" in str(e.value.hint)


def test_a_global_layer_follows_its_like() -> None:
    found = pipeline.check(pipeline.Request(Path("muse_global.py"), tp=TP, tiny=True, options={"following": "global"}))
    assert handed_on(found.plan)["k_cache"] == "next_k_cache"


def test_bind_names_every_problem(world: World) -> None:
    given = tensors(world.plan)
    given["stream"] = given["stream"].double()
    del given["router_bias"]
    with pytest.raises(DeviceError) as e:
        world.ranks[0].bind(given)
    text = e.value.render()
    assert "stream: is torch.float64, must be torch.float32" in text
    assert "router_bias: missing weight" in text


def test_hang_records_of_all_ranks_make_one_error(world: World) -> None:
    layers = bound(world)
    table = torch.arange(5, 13, dtype=torch.int32).view(1, 8)
    for rank in world.ranks:
        rank.set_route_override(table)
    world.launch(layers)
    with pytest.raises(HangError, match=r"down\.math waited for channel 'expert_mid'") as e:
        world.synchronize()
    assert e.value.loc is not None
    assert [n for n, _ in e.value.notes] == [
        "1 × down.math waiting for channel 'expert_mid' (lamport) in blocks 0 of ranks 1"
    ]
    with pytest.raises(HangError):  # sticky
        world.synchronize()
    world.ranks[1].recover()
    world.synchronize()
    assert [r.epoch() for r in world.ranks] == [0, 0]


@pytest.mark.parametrize("live", [0, 3])
def test_impossible_worlds(live: int, checked: pipeline.Checked, library: Path) -> None:
    with pytest.raises(DeviceError, match=f"{live} live ranks in a group of 2"):
        World(checked.plan, library, live=live)


def test_one_live_rank_of_two(checked: pipeline.Checked, library: Path) -> None:
    world = World(checked.plan, library, live=1)
    assert [r.rank for r in world.ranks] == [0]
    world.launch(bound(world))
    world.synchronize()


def test_tensors_outlive_the_world(world: World) -> None:
    out = world.ranks[0].outputs["stream_out"]
    world.close()
    assert out.isnan().all()


# -- judging, the command line, the fixture ------------------------------------------------------------------------


def test_emulation_judges_every_rank_and_seed(checked: pipeline.Checked, library: Path) -> None:
    """The stand-in computes nonsense: what counts is that it is called right and found out."""
    weights = Weights.random(checked.graph, TP)
    emulation = Emulation(checked.plan, checked.graph, library, weights)
    found = {c.name: c for c in emulation.check(2, seeds=(0, 1), launches=2)}
    assert not found["stream_out"]
    assert "seed 0: rank 0: FAIL" in found["stream_out"].detail
    assert "seed 1: rank 0: FAIL" in found["stream_out"].detail
    assert found["ranks agree"]  # both made the same


def test_a_checkpoint_needs_all_ranks(checked: pipeline.Checked) -> None:
    with pytest.raises(MegagenError, match="stand-ins would repeat"):
        Weights.load(Path("nowhere"), 1, checked.graph, 1)


def test_what_does_not_fit_is_refused(checked: pipeline.Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_too_large(checked.plan, TP)
    monkeypatch.setattr("os.sysconf", lambda name: 1024)
    with pytest.raises(DeviceError, match="GiB of memory"):
        refuse_too_large(checked.plan, TP)


def command(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main.app, list(args), prog_name="megagen")
    return result.exit_code, result.stdout, result.stderr


def test_the_command_judges_and_exits(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "emulated", lambda checked, settings: library)
    args = ("muse_moe.py", "--ranks", "2", "--seed", "4", "--seeds", "2", "--launch", "2", "--launches", "3")
    code, out, err = command("emulate", *args)
    assert code == 1
    assert "emulated: 2 ranks, 2 tokens, 3 launches, seeds 4-5, against the reference in fp32" in out
    assert "stream_out" in err
    code, out, _ = command("emulate", *args, "--json", "--race")
    assert code == 1
    made = json.loads(out)
    assert (made["ranks"], made["seeds"], made["launches"], made["race"], made["tp"]) == (2, [4, 5], 3, True, 2)
    assert made["machine"] == "h200 with 4 SMs"
    assert {"check", "ok", "detail"} <= set(made["checks"][0])


def test_ranks_must_divide_the_group() -> None:
    code, _, err = command("emulate", "muse_moe.py", "--ranks", "3", "--tp", "8")
    assert (code, err.splitlines()[0]) == (1, "error: 3 live ranks in a group of 8")


def test_run_without_a_gpu_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def built(checked: pipeline.Checked, settings: Settings) -> Path:
        seen.append(checked.plan)
        return Path("library")

    def ran(*args: Any) -> Any:
        seen.append(args[2:10])
        raise DeviceError("far enough")

    monkeypatch.setattr(pipeline, "emulated", built)
    monkeypatch.setattr(emulator, "run", ran)
    monkeypatch.setattr(device, "absent", lambda: True)
    code, out, err = command("run", "muse_moe.py", "--seeds", "2", "--launch", "3", "--experts", "9")
    assert (code, out) == (1, "")
    assert err.splitlines() == ["no GPU here: emulating a tiny layer on the CPU", "error: far enough"]
    plan, arguments = seen
    assert (plan.tp, plan.launch.blocks) == (8, pipeline.TINY_SMS)
    assert arguments == (1, range(2), 3, 9, None, 1, False, 1)


def test_a_layer_with_caches_is_told_where_its_tokens_stand(
    layer_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []

    def ran(*args: Any) -> Any:
        steps.append(args[-1])
        raise DeviceError("far enough")

    monkeypatch.setattr(pipeline, "emulated", lambda checked, settings: layer_library)
    monkeypatch.setattr(emulator, "run", ran)
    command("emulate", "muse_swa.py", "--launch", "3", "--context", "70")
    command("emulate", "muse_swa.py", "--launch", "9", "--tree", "--seed", "4")
    command("emulate", "muse_global.py", "--option", "following=end", "--context", "5")  # reads caches, writes none
    assert steps == [Step.chain(3, 70), Step.random_tree(9, emulator.CONTEXT, 4), Step.chain(16, 5)]
    code, _, err = command("emulate", "muse_swa.py", "--context", "16384")
    assert (code, len(steps)) == (1, 3)
    assert "the launch has room for 16384 positions" in err


@pytest.mark.parametrize("options", [("--context", "0"), ("--tree",)])
@pytest.mark.parametrize("name", ["emulate", "run", "bench"])
def test_a_block_without_caches_has_no_context(
    name: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "absent", lambda: False)
    code, out, err = command(name, "muse_moe.py", *options)
    assert (code, out) == (1, "")
    assert f"{options[0]}: launches of muse_spark.expert_block.nn keep no caches" in err


def test_the_fixture_builds_once_and_checks(
    emulate: Any, emulated_kernels: Any, checked: pipeline.Checked, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Plan] = []
    monkeypatch.setattr(emulated_kernels, "_built", {})  # the stand-in is not for other tests
    monkeypatch.setattr(pipeline, "emulated", lambda checked, settings: calls.append(checked.plan) or library)
    kernel = emulate("muse_moe.py", ranks=TP, seed=3)
    assert (kernel.plan, kernel.world.seed, kernel.world.live) == (checked.plan, 3, TP)
    with pytest.raises(AssertionError, match=r"(?s)seed 3: .*stream_out"):
        kernel.check(tokens=2)
    emulate("muse_moe.py", ranks=TP, seed=4)
    assert len(calls) == 1
    broken = checked.plan.channel("pooled").model_copy(update={"fault": True})
    channels = tuple(broken if c.name == "pooled" else c for c in checked.plan.channels)
    emulate("muse_moe.py", ranks=TP, edit=lambda plan: plan.model_copy(update={"channels": channels}))
    assert calls[1].channel("pooled").fault
