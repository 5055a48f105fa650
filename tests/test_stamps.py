"""Stamps: what warps write down is what they did, on one clock; and a kernel that writes it does nothing else."""

from __future__ import annotations

import re
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_emulate_swa import few, small

from megagen import resources
from megagen.cli import pipeline
from megagen.compile import compile_source
from megagen.dsl import load
from megagen.emulate.build import compile_library
from megagen.emulate.engine import Engine, Geometry, Kind
from megagen.errors import DeviceError, EmulationError, ScheduleError
from megagen.ir.plan import Plan, StampPlan
from megagen.lower import lower
from megagen.settings import Settings
from megagen.trace import offset
from megagen.trace.record import HEADER, NOTICED, OPENING, RECORD, Clocks, Recorder, Slots
from megagen.trace.spans import Facts, Trace
from megagen.trace.spans import Kind as Span

FACTS = Facts(origin="emulated", name="test", machine="test", tokens=3, ranks=2)
TOKENS = 3


def request(schedule: str, **more: Any) -> pipeline.Request:
    options = small(2) if schedule == "muse_swa.py" else {}
    return pipeline.Request(Path(schedule), tp=2, tiny=True, options=options, stamps=True, **more)


CASES = {
    "block": request("muse_moe.py"),
    "block-unfused": request("muse_moe.py", fused=False),
    "layer-cluster": request(
        "muse_swa.py", choices={"sync": "cluster", "cluster": "2", "next_qkvg": "3/8", "ring_stages": "3"}
    ),
}


@cache
def checked(case: str, cycles: bool = False) -> pipeline.Checked:
    found = pipeline.check(CASES[case])
    assert found.plan.stamps is not None
    stamps = found.plan.stamps.model_copy(update={"cycles": cycles})
    return pipeline.Checked(found.graph, found.plan.model_copy(update={"stamps": stamps}), found.findings)


@cache
def weights(case: str) -> Any:
    from megagen.bench.emulation import Weights

    return Weights.random(checked(case).graph, 2)


def launched(case: str, library: Path, seed: int, layers: int = 2) -> tuple[Any, dict[str, Any], Any, Any]:
    """Two ranks' launches in a fresh world: outputs, the emulator's counters, footprints and the stack."""
    import torch

    from megagen.bench.emulation import Emulation
    from megagen.bench.inputs import Inputs
    from megagen.runtime.stack import Stack
    from megagen.runtime.step import Step

    found = checked(case)
    emulation = Emulation(found.plan, found.graph, library, weights(case))
    with emulation.world(seed, race=True, footprints=True) as world:
        step = Step.chain(TOKENS, 100 if "layer" in case else 0)
        given = Inputs.random(found.graph, 2, TOKENS, 0, torch.device("cpu"), step)
        for rank in world.ranks:
            rank.set_step(step)
            rank.set_route_override(few(TOKENS))
        stack = Stack(world, [emulation.weights.packed], given.ranks, layers=layers)
        stack.launch()
        world.synchronize()
        outputs = [{n: x[:TOKENS].clone() for n, x in rank.items()} for rank in stack.outputs]
        return outputs, world.engine.statistics(), world.engine.footprints(), stack


def library(case: str, *, stamped: bool = True, cycles: bool = False) -> Path:
    plan = checked(case, cycles).plan
    text = pipeline.emit(plan if stamped else plan.model_copy(update={"stamps": None}))
    return compile_library(text, kernels=[k.name for k in plan.kernels], settings=Settings.from_env())


def recorded(case: str, stack: Any, cycles: bool = False) -> Trace:
    recorder = Recorder(checked(case, cycles).plan)
    for index, bound in enumerate(stack.bound):
        recorder.add(index, 0, [layer.stamps for layer in bound])
    return recorder.trace(FACTS)


@pytest.fixture(scope="module", params=CASES)
def traced(request: pytest.FixtureRequest) -> tuple[str, Any, Trace]:
    case: str = request.param
    result = launched(case, library(case), seed=7)
    return case, result, recorded(case, result[3])


# -- a kernel with stamps does what it does without ------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_else_changes(traced: tuple[str, Any, Trace]) -> None:
    """The same bits, the same footprint of every step, and the same order of everything: as many turns of each warp,
    as many polls, as many naps. Buffers lie where they lay."""
    import torch

    case, (outputs, counters, footprints, _), _ = traced
    plain, without, touched, stack = launched(case, library(case, stamped=False), seed=7)
    for mine, theirs in zip(outputs, plain, strict=True):
        for name, value in mine.items():
            assert torch.equal(value.contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8)), name
    assert counters == without
    assert footprints == touched
    assert not any(layer.stamps.any() for bound in stack.bound for layer in bound), "a kernel without wrote some"


@pytest.mark.slow
def test_nothing_of_it_is_in_a_kernel_without() -> None:
    """The machine code is that of headers that never heard of stamps."""
    plan = lower(load(Path("muse_moe.py")))
    text, settings = pipeline.emit(plan), Settings.from_env()

    def code(headers: dict[str, str]) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resources, "headers", lambda: headers)
            found = compile_source(text, kernels=[plan.name], archs=["sm_90a"], settings=settings)["sm_90a"]
        data = found.path.read_bytes()
        return section(data, f".text.{plan.name}")

    bare = dict(resources.headers())
    for name in ("sync/wait.cuh", "sync/ring.cuh", "ops/stream.cuh", "kernel.cuh"):
        lines = bare[f"megagen/{name}"].splitlines(keepends=True)
        kept = [x for x in lines if not re.search(r"\bstamps[.;]", x)]
        assert len(kept) < len(lines), name
        bare[f"megagen/{name}"] = "".join(kept)
    assert "stamps." not in "".join(bare[f"megagen/{n}"] for n in ("sync/wait.cuh", "sync/ring.cuh", "kernel.cuh"))
    ours, theirs = code(dict(resources.headers())), code(bare)
    assert len(ours) > 100_000 and ours == theirs


def section(elf: bytes, name: str) -> bytes:
    """A section of a 64-bit ELF file, by the format's own description."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    base = heads[names][4]
    for label, _, _, _, offset_, length in heads:
        if elf[base + label : elf.index(b"\0", base + label)].decode() == name:
            return elf[offset_ : offset_ + length]
    raise AssertionError(f"no section {name}")


# -- what is written is what was done --------------------------------------------------------------------------------


@pytest.mark.slow
def test_jobs_are_the_programs_steps(traced: tuple[str, Any, Trace]) -> None:
    """Of every warp of every block, rank and launch: all steps, in their order, one from where the other ends."""
    case, _, trace = traced
    plan = trace.plan
    jobs = trace.spans[trace.spans["kind"] == Span.JOB]
    want = [
        [s.index for k in plan.kernels for p in k.programs if p.first <= w < p.first + p.count for s in p.steps]
        for w in range(plan.launch.warps)
    ]
    seen = 0
    for launch in range(len(trace.launches)):
        for rank in range(2):
            for block in range(plan.launch.blocks):
                for warp in range(plan.launch.warps):
                    mine = jobs[
                        (jobs["launch"] == launch)
                        & (jobs["rank"] == rank)
                        & (jobs["block"] == block)
                        & (jobs["warp"] == warp)
                    ]
                    assert mine["step"].tolist() == want[warp]
                    gaps = mine["begin"][1:] - mine["end"][:-1]
                    assert "unfused" in case or not gaps.any()  # a kernel may begin before the last one ends
                    assert (mine["end"] >= mine["begin"]).all() and mine["begin"][0] >= 0
                    seen += len(mine)
    assert seen == len(jobs) and not trace.launches["dropped"].any()
    assert (trace.launches["end"] >= [jobs["end"][jobs["launch"] == i].max() for i in (0, 1)]).all()


@pytest.mark.slow
def test_waits_and_loads_lie_within_their_jobs(traced: tuple[str, Any, Trace]) -> None:
    _, _, trace = traced
    spans, plan = trace.spans, trace.plan
    channels = {c.index for c in plan.channels}
    waited = {s.index: set() for k in plan.kernels for p in k.programs for s in p.steps}  # type: ignore[var-annotated]
    job = None
    for span in spans:  # sorted by warp and time, a job before what it holds
        if span["kind"] == Span.JOB:
            job = span
            continue
        assert job is not None and (span["block"], span["warp"], span["step"]) == (
            job["block"],
            job["warp"],
            job["step"],
        )
        assert job["begin"] <= span["begin"] <= span["end"] <= job["end"]
        if span["kind"] == Span.WAIT:
            assert span["end"] - span["begin"] >= 256
            waited[int(span["step"])].add(int(span["edge"]))
    steps = {s.index: s for k in plan.kernels for p in k.programs for s in p.steps}
    assert len([s for s, edges in waited.items() if edges]) > 10
    for index, edges in waited.items():
        step = steps[index]
        may = {plan.barrier(u.barrier).index for u in step.barriers if u.action == "wait"}
        may |= {plan.channel(name).index for name in step.reads}
        if step.call == "load_weights":  # until fewer loads are under way
            may.add(plan.barrier(plan.ring.full).index)
        assert edges <= may, step
        assert edges & channels <= {plan.channel(name).index for name in step.reads}


@pytest.mark.slow
def test_loads_are_every_byte_of_the_weights(traced: tuple[str, Any, Trace]) -> None:
    """Dense weights once a launch: rows by K by the bytes of an element."""
    _, _, trace = traced
    spans, plan = trace.spans, trace.plan
    op_of = {s.index: s.op for k in plan.kernels for p in k.programs for s in p.steps}
    loads = spans[spans["kind"] == Span.LOAD]
    dense = [w for w in plan.weights if w.layout == "tiles" and not w.experts]
    assert len(dense) >= 3
    for weight in dense:
        (op,) = (o.name for o in plan.ops if o.weights.get("weight") == weight.parameter)
        mine = loads[[op_of[int(s)] == op for s in loads["step"]]]
        want = weight.rows * weight.k * int(weight.dtype.bits) // 8
        for launch in (0, 1):
            for rank in (0, 1):
                chosen = mine[(mine["launch"] == launch) & (mine["rank"] == rank)]
                assert int(chosen["bytes"].sum()) == want, op
    assert (loads["begin"] == loads["end"]).all() and (loads["edge"] == plan.barrier(plan.ring.full).index).all()
    assert set(loads["slot"].tolist()) == set(range(plan.ring.stages))


@pytest.mark.slow
def test_an_l2_prefetch_says_how_much(traced: tuple[str, Any, Trace]) -> None:
    case, _, trace = traced
    if case != "layer-cluster":
        assert not (trace.spans["kind"] == Span.PREFETCH).any()
        return
    steps = (s for k in trace.plan.kernels for p in k.programs for s in p.steps)
    (step,) = (s.index for s in steps if (s.op, s.call) == ("next_qkvg", "prefetch_l2"))
    asked = trace.spans[(trace.spans["kind"] == Span.PREFETCH) & (trace.spans["launch"] == 1)]
    asked = asked[asked["step"] == step]  # not machine code, nor caches
    (weight,) = (w for w in trace.plan.weights if w.name == trace.plan.op("next_qkvg").weights["weight"])
    stream = trace.plan.op("next_qkvg").stream
    assert stream is not None and len(asked) == 2 * trace.plan.launch.blocks
    for rank in (0, 1):
        mine = asked["bytes"][asked["rank"] == rank]
        assert (mine % stream.stage_bytes == 0).all() and 0 < mine.sum() < weight.bytes


@pytest.mark.slow
def test_sm_clocks_tell_the_same_times(traced: tuple[str, Any, Trace]) -> None:
    """Each SM's has its own beginning and all of them another rate than the timer: the emulator's do."""
    case, _, trace = traced
    if case != "block":
        return
    other = recorded(case, launched(case, library(case, cycles=True), seed=7)[3], cycles=True)
    # A wait's least length is in cycles then, so there are more of them.
    jobs, same = (t.spans[t.spans["kind"] == Span.JOB] for t in (trace, other))
    for name in ("launch", "rank", "block", "warp", "step"):
        assert (jobs[name] == same[name]).all()
    for name in ("begin", "end"):
        assert abs(jobs[name].astype(int) - same[name].astype(int)).max() <= 1
    assert (trace.sms == other.sms).all()


# -- reading them ----------------------------------------------------------------------------------------------------


@cache
def small_plan(records: int = 4, cycles: bool = False) -> Plan:
    plan = lower(load(Path("muse_moe.py")))
    launch = plan.launch.model_copy(update={"blocks": 2, "warps": 1})
    size = 2 * (HEADER.itemsize + records * RECORD.itemsize)
    stamps = StampPlan(records=records, cycles=cycles, bytes=size)
    return plan.model_copy(update={"launch": launch, "stamps": stamps})


def slot(timer: int, clock: int, records: list[tuple[int, int, int, int]], *, sm: int = 0, asked: int | None = None,
         end: tuple[int, int] | None = None, ended: int = 1, room: int = 4) -> bytes:  # fmt: skip
    """What a warp leaves: by the header's description."""
    later = end or (timer + 1000, clock + 2000)
    data = struct.pack("<4Q4I16x", timer, clock, *later, len(records) if asked is None else asked, sm, ended, 0)
    words = [struct.pack("<4I", *(x & 0xFFFFFFFF for x in r)) for r in records]
    return data + b"".join(words).ljust(16 * room, b"\xee")


def test_low_words_come_round() -> None:
    """A job across the moment when 32 bits are full."""
    timer = (7 << 32) - 500
    first = slot(timer, 0, [(timer, timer + 100, OPENING << 4, 0), (timer + 100, timer + 900, 5 << 4, 0)])
    second = slot(timer + 300, 0, [(timer + 310, timer + 700, 6 << 4, 0)], sm=1)
    recorder = Recorder(small_plan())
    recorder.launches.append((0, 0, [Slots.read(small_plan(), np.frombuffer(first + second, "u1"))]))
    trace = recorder.trace(FACTS)
    assert trace.spans[["block", "step", "begin", "end"]].tolist() == [(0, 5, 100, 900), (1, 6, 310, 700)]
    assert trace.launches.tolist() == [(0, 0, 0, 900, 0)] and trace.sms.tolist() == [[[0, 1]]]


def test_what_found_no_room_is_counted() -> None:
    data = slot(1000, 0, [(1000 + i, 1001 + i, i << 4, 0) for i in range(4)], asked=7) + slot(1000, 0, [])
    recorder = Recorder(small_plan())
    recorder.launches.append((0, 0, [Slots.read(small_plan(), np.frombuffer(data, "u1"))]))
    trace = recorder.trace(FACTS)
    assert trace.launches["dropped"].tolist() == [3] and len(trace.spans) == 4


def test_a_warp_that_left_nothing_is_named() -> None:
    data = slot(1000, 0, []) + slot(1000, 0, [], ended=0)
    with pytest.raises(DeviceError, match="warp 0 of block 1 of muse_moe left no stamps"):
        Slots.read(small_plan(), np.frombuffer(data, "u1"))
    with pytest.raises(DeviceError, match="no launch"):
        Recorder(small_plan()).trace(FACTS)


def test_ranks_are_brought_to_one_clock() -> None:
    """Rank 1's timer is 5,000 ns ahead, half a µs more than at one time and half less than at another, as far away:
    what it writes is that much earlier."""
    both = [
        Slots.read(small_plan(), np.frombuffer(slot(t, 0, [(t, t + 50, 1 << 4, 0)]) + slot(t, 0, []), "u1"))
        for t in (10_000, 15_020)
    ]
    none = offset.Offset(0, 0.0, 0.0, 0.0)
    drift = offset.Drift(offset.Offset(9_000, 4500.0, 700.0, 1500.0), offset.Offset(11_000, 5500.0, 800.0, 1500.0))
    assert drift.error_ns == 800.0
    recorder = Recorder(small_plan(), (offset.Drift(none, none), drift))
    recorder.launches.append((3, 2, both))
    trace = recorder.trace(FACTS)
    assert trace.spans[["rank", "begin", "end"]].tolist() == [(0, 0, 50), (1, 20, 70)]
    assert trace.launches.tolist() == [(3, 2, 0, 70, 0)]


def test_clocks_are_fitted_to_a_coarse_timer() -> None:
    """132 SMs at 1,980 MHz, each clock begun at another time, a timer that moves by 1,024 ns: times within 0.1 µs."""
    rng = np.random.default_rng(0)
    launches, starts = [], rng.integers(1 << 40, 1 << 50, 132)
    true = []
    for launch in range(8):
        header = np.zeros((1, 132, 12), HEADER)
        began = 10**18 + launch * 120_000 + rng.integers(0, 3000, (1, 132, 12))
        ended = began + 100_000 + rng.integers(0, 15_000, (1, 132, 12))
        header["sm"] = np.arange(132)[None, :, None]
        for name, at in (("", began), ("_end", ended)):
            header[f"timer{name}"] = at // 1024 * 1024
            header[f"clock{name}"] = np.rint((at - 10**18) * 1.98).astype("i8") + starts[header["sm"]]
        launches.append(header)
        true.append(began)
    clocks = Clocks.fit(launches)
    assert clocks.rate == pytest.approx(1 / 1.98, rel=1e-3)
    for header, began in zip(launches, true, strict=True):
        error = clocks.ns(header, header["clock"].astype("<u4")) - began + 512  # the timer's mean lag, on all SMs alike
        assert abs(error).max() < 100


def test_slots_hold_what_the_header_says() -> None:
    """The mirror of include/megagen/debug/stamp.cuh."""
    text = resources.headers()["megagen/debug/stamp.cuh"]
    numbers = {n: int(v, 0) for n, v in re.findall(r"constexpr u32 k(\w+) = (0x[\da-f]+|\d+)u?;", text)}
    assert numbers["StampBytes"] == RECORD.itemsize and numbers["StampHeader"] * RECORD.itemsize == HEADER.itemsize
    assert numbers["Opening"] == OPENING
    assert re.findall(r"kNoticed = kCycles \? (\d+) : (\d+);", text) == [("512", "256")]
    assert NOTICED == {True: "512 cycles", False: "256 ns"}
    assert re.findall(r"enum Mark : u32 \{ (.*) \}", text) == ["kJob, kWait, kLoad, kPrefetch"]
    assert [k.name for k in Span] == ["JOB", "WAIT", "LOAD", "PREFETCH"]


def test_a_slot_too_few_is_found(tmp_path: Path) -> None:
    """The emulator refuses a stamp beyond the launch's: kernels write into nobody else's memory unseen."""
    found = checked("block")
    assert found.plan.stamps is not None
    fewer = found.plan.stamps.model_copy(update={"bytes": found.plan.stamps.bytes - 516 * 16})
    import torch

    from megagen.bench.emulation import Emulation
    from megagen.bench.inputs import Inputs
    from megagen.runtime.stack import Stack

    plan = found.plan.model_copy(update={"stamps": fewer})
    emulation = Emulation(plan, found.graph, library("block"), weights("block"))
    with emulation.world(1) as world, pytest.raises(EmulationError, match="stamps"):
        given = Inputs.random(found.graph, 2, TOKENS, 0, torch.device("cpu"))
        Stack(world, [emulation.weights.packed], given.ranks, layers=1).launch()
        world.synchronize()


# -- asking for them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [0, -1, 65537, 1.5, True, "many"])
def test_impossible_numbers_of_records(records: Any, tmp_path: Path) -> None:
    schedule = tmp_path / "s.py"
    text = (resources.schedules() / "muse_moe.py").read_text()
    schedule.write_text(text.replace("    return s\n", f"    s.stamps(records={records!r})\n    return s\n"))
    with pytest.raises(ScheduleError, match="records") as caught:
        load(schedule)
    assert caught.value.loc is not None and "s.stamps" in caught.value.loc.text


def test_a_coarse_timer_means_cycles() -> None:
    schedule = load(Path("muse_moe.py"))
    schedule.stamps(records=10)
    assert lower(schedule).stamps == StampPlan(
        records=10, cycles=False, bytes=132 * 12 * (4 + 10) * 16, source=lower(schedule).stamps.source  # type: ignore[union-attr]
    )  # fmt: skip
    schedule.machine = schedule.machine.model_copy(update={"timer_step_ns": 1024})
    coarse = lower(schedule).stamps
    assert coarse is not None and coarse.cycles


# -- timers of several GPUs ------------------------------------------------------------------------------------------


def played(seed: int, rounds: int = 40, deaf: bool = False) -> list[np.ndarray[Any, Any]]:
    """Both sides' times in the emulator, whose ranks share a clock. ``deaf``: the other side is not there."""
    path = compile_library(offset.source(), kernels=[offset.KERNEL], settings=Settings.from_env())
    with Engine(path, arena_bytes=1 << 26, seed=seed, race=True, expire=deaf) as engine:
        balls = [engine.allocate(64, rank=r, kind=Kind.EXCHANGE, name="ball") for r in (0, 1)]
        times = [engine.allocate(16 * rounds, rank=r, kind=Kind.OUTPUT, name="times") for r in (0, 1)]
        views = [np.frombuffer(engine.view(t, 16 * rounds), "i8").reshape(rounds, 2) for t in times]
        for ball, view, at in zip(balls, views, times, strict=True):
            np.frombuffer(engine.view(ball, 64), "u4")[:] = 0
            view[:] = 0
            engine.wrote(ball, 64)
            engine.wrote(at, 16 * rounds)
        for side in (0,) if deaf else (0, 1):
            given = offset.parameters(
                balls[side], balls[1 - side], times[side], serves=side == 0, rounds=rounds, timeout_ns=10_000_000
            )
            engine.launch(offset.KERNEL, given, Geometry(1, 32), rank=side)
        engine.run()
        return [v.copy() for v in views]


def test_timers_that_agree_are_found_to_agree() -> None:
    for seed in range(4):
        served, returned = played(seed)
        found = offset.Offset.of(served, returned)
        assert abs(found.ns) <= found.error_ns and 0 < found.error_ns <= found.round_trip_ns / 2
        ahead = offset.Offset.of(served, returned + 123_456_789)
        assert abs(ahead.ns - 123_456_789) <= ahead.error_ns


def test_an_offset_by_hand() -> None:
    """To in 300 ns, back in 500; the other's timer is 10,000 ns ahead. The slow rounds, late one way, do not count."""
    left = np.arange(8, dtype="i8") * 10_000
    slow = np.array([0, 900, 0, 5000, 800, 0, 700, 900])
    came = left + 300 + slow + 10_000
    served = np.stack([left + 1, left + 801 + slow], axis=1)
    found = offset.Offset.of(served, np.stack([came, came], axis=1) + 1)
    assert found == offset.Offset(40_001, 9900.0, 400.0, 400.0 * 2 + 750)


def test_a_peer_that_does_not_answer() -> None:
    served, returned = played(0, rounds=3, deaf=True)
    with pytest.raises(DeviceError, match="did not hear"):
        offset.Offset.of(served, returned)
