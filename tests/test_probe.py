"""``megagen probe``: kernels that compile and run (emulated), statistics, descriptions, the command without a GPU."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import probe_bounds
import pytest
from typer.testing import CliRunner

from megagen import files, machines, resources
from megagen.bench import measure
from megagen.cli import probing
from megagen.cli.main import app
from megagen.cli.pipeline import ARCHS
from megagen.compile import compile_source
from megagen.emulate.build import compile_library
from megagen.emulate.engine import Engine, Expire, Kind
from megagen.emulate.engine import Geometry as Emulated
from megagen.errors import DeviceError, MachineError, MegagenError
from megagen.machines import Figure
from megagen.probe import code, describe, memory, waits
from megagen.probe import run as running
from megagen.probe.case import Case, Sample, figure, noise
from megagen.probe.cases import CASES, chosen
from megagen.probe.code import knees
from megagen.probe.gpu import Gpu, families, kernels, source
from megagen.probe.known import GB300, H200, number
from megagen.probe.run import Device, Outcome, Report
from megagen.runtime.driver import Geometry
from megagen.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "probe.md"

# -- kernels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families())
def test_kernels_compile(family: str) -> None:
    text = source(family)
    names = kernels(text)
    assert len(names) == text.count("__global__") > 0  # none is missed
    for arch, made in compile_source(text, kernels=names, archs=ARCHS, settings=Settings.from_env()).items():
        for name, report in made.kernels.items():
            assert report.spill_store_bytes == 0 and report.warnings == (), (arch, name)


def test_every_kernel_is_used() -> None:
    used = "".join(p.read_text() for p in (ROOT / "megagen" / "probe").glob("*.py"))
    for name in (name for family in families() for name in kernels(source(family))):
        stem = name.rpartition("_")[0]
        assert f'"{name}"' in used or re.search(rf'f"{stem}_\{{|f"{stem.rpartition("_")[0]}_\{{', used), name


def test_what_kernels_and_host_both_know() -> None:
    assert f"constexpr u32 kApart = {waits.APART};" in source("hop")
    assert f"constexpr u32 kChunks = {code.CHUNKS};" in source("icache")
    found = re.search(r"enum State : u64 \{ (.*) \};", source("fence"))
    assert found
    assert [re.sub(r"(?<!^)([A-Z])", r"_\1", n[1:]).lower() for n in found[1].split(", ")] == list(waits.STATES)


def test_straight_line_code_is_as_long_as_it_says() -> None:
    """248 FFMA a chunk: the compiler has left them all in place."""
    from megagen.compile.report import count_opcodes, disassemble, find_disassembler

    text, tool = source("icache"), find_disassembler()
    assert tool is not None
    for made in compile_source(text, kernels=["probe_code"], archs=ARCHS, settings=Settings.from_env()).values():
        found = count_opcodes(disassemble(made.path.read_bytes(), tool))["probe_code"]
        fmas = sum(n for opcode, n in found.items() if opcode.startswith("FFMA"))
        assert code.CHUNKS * 248 <= fmas < code.CHUNKS * 248 + 8
        size = made.kernels["probe_code"].code_bytes / code.CHUNKS
        assert 16 * code.INSTRUCTIONS <= size < 1.05 * 16 * code.INSTRUCTIONS  # so a chunk is what is said of it
        assert max(code.SIZES) * 1024 <= size * code.CHUNKS


# -- the cases, on the emulator ------------------------------------------------------------------------------------

# What the emulator has no words for: clocks (two a nanosecond here), static shared memory (one thread's own here, as
# the kernels use it), a vote of a block (here without failures), straight-line code.
EPOCH = 1_790_000_000 * 10**9  # ns: the GPU's timer began in 1970
SHIM = """
#define __shared__
#define __syncthreads_and(vote) (__syncthreads(), (vote))
"""
ASM = {
    'asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");': "t = 2 * globaltimer_lo();",
    'asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");': "t = 2 * globaltimer();",
    'asm volatile("add.u64 %0, %0, %1;" : "+l"(sum) : "l"(t) : "memory");': "sum += t;",
}


def emulable(family: str) -> str:
    text = source(family)
    for asm, plain in ASM.items():
        text = text.replace(asm, plain)
    text = re.sub(r'asm volatile\("// chunk.*', r"a = a * x + y; \\", text)
    text = re.sub(r"\bglobaltimer\(\)", f"({EPOCH}ull + ptx::globaltimer())", text)
    head, begin, body = text.partition("namespace megagen::probe {")
    return f"{head}{SHIM}{begin}{body}\nusing namespace megagen::probe;\n"


class EmulatedKernel:
    def __init__(self, name: str, geometry: Geometry) -> None:
        self.name, self.geometry = name, geometry

    def blocks_fit(self, sms: int) -> int:
        return sms // self.geometry.cluster * self.geometry.cluster


class EmulatedGpu(Gpu):
    """Four SMs of the emulator. Times mean nothing; addresses, waits and results do."""

    def __init__(self, family: str, seed: int, expire: Expire = Expire.NEVER) -> None:
        import torch

        library = compile_library(emulable(family), kernels=kernels(source(family)), settings=Settings.from_env())
        self.engine = Engine(library, arena_bytes=1 << 28, seed=seed, expire=expire)
        self.torch, self.index, self.quick, self.peer, self.library = torch, 0, True, None, None
        self.sms, self.l2, self.shared = 4, 96 * 1024, 227 * 1024
        self.buffers: list[tuple[int, int]] = []
        self.recorded: list[tuple[Any, Any]] | None = None
        self.launched: set[str] = set()
        self._next = 0
        self.head = self.zeros(32)
        self.__dict__["data"] = self._tensor(16 << 20, torch.int64, Kind.CONSTANT)
        self.engine.wrote(*self.buffers.pop())

    def _tensor(self, size: int, dtype: Any, kind: Kind) -> Any:
        address = self.engine.allocate(size, kind=kind, name=f"buffer {len(self.buffers)}")
        self.buffers.append((address, size))
        return self.torch.frombuffer(self.engine.view(address, size), dtype=dtype)

    def zeros(self, *shape: int, words: int = 8) -> Any:
        dtype = self.torch.int64 if words == 8 else self.torch.int32
        return self._tensor(math.prod(shape) * words, dtype, Kind.EXCHANGE).view(*shape).zero_()

    def runs(self, usual: int) -> int:
        return 1

    def enter(self) -> None:
        pass

    def code_bytes(self, family: str, name: str) -> int:
        return 52 * 4096

    def shaped(self, family: str, name: str, geometry: Geometry) -> Any:
        return EmulatedKernel(name, geometry)

    def launch(self, kernel: Any, *args: Any) -> None:
        if self.recorded is not None:
            self.recorded.append((kernel, args))
            return
        for buffer in self.buffers:
            self.engine.wrote(*buffer)  # the host has set it, or an earlier launch
        words = [a if isinstance(a, int) else a.data_ptr() for a in args]
        g = kernel.geometry
        shape = Emulated(g.blocks, g.threads, g.cluster, g.shared, g.pdl)
        self.engine.launch(kernel.name, struct.pack(f"{len(words)}Q", *words), shape)
        self.engine.run()
        self.launched.add(kernel.name)

    def finish(self, what: str) -> float:
        failed, clk, ns = self.head[:3].tolist()
        assert failed & 0xFFFFFFFF == 0, what
        return ns / clk if clk else 0.0

    def time(self, work: Mapping[str, Callable[[], object]], runs: int, *, warm: int = 2) -> dict[str, list[float]]:
        for do in work.values():
            do()
            self.finish("work")
        return {name: [1.0 + i] for i, name in enumerate(work)}

    def row(self, launch: Callable[[], object], times: int) -> Callable[[], object]:
        self.recorded = calls = []
        for _ in range(times):
            launch()
        self.recorded = None
        assert len(calls) == times
        return lambda: [self.launch(kernel, *args) for kernel, args in calls]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short stretches: the emulator runs thousands of times slower."""
    monkeypatch.setattr(memory, "LAUNCHES", (1, 2))
    monkeypatch.setattr(memory, "CUT", 1)
    monkeypatch.setattr(waits, "CAPS", (0, 16, 48))
    monkeypatch.setattr(waits, "PLAY", 30_000)
    monkeypatch.setattr(waits, "SKIP", 0)
    monkeypatch.setattr(waits, "PLAYS", 2)
    monkeypatch.setattr(waits, "PLACES", 3)
    monkeypatch.setattr(waits, "AHEAD", 64 * 1024)
    monkeypatch.setattr(waits, "ROUNDS", 3)


@pytest.mark.parametrize("case", [c for c in CASES if c.gpus == 1], ids=lambda c: c.name)
@pytest.mark.usefixtures("small")
def test_a_case_runs(case: Case) -> None:
    """To its end, within its memory, and each figure that it yields is one."""
    (family,) = case.families
    gpu = EmulatedGpu(family, seed=1)
    samples = case.measure(gpu)
    names = [s.name for s in samples]
    assert len(set(names)) == len(names) > 0
    for sample in samples:
        found = figure(sample)
        assert found.runs == len(sample.values) and math.isfinite(found.value), sample.name
    assert gpu.launched <= set(kernels(source(family))) and gpu.launched


PEER_HOP = Geometry(blocks=1, threads=32, cluster=1, shared=0, pdl=False)


@pytest.mark.parametrize("seed", range(3))
def test_a_message_to_and_fro_between_gpus(seed: int) -> None:
    """Two ranks of the emulator, a launch on each: all trips are made."""
    gpu = EmulatedGpu("hop", seed)
    ours, theirs, trips, head = gpu.zeros(16), gpu.zeros(16), gpu.zeros(32, words=4), gpu.zeros(32)
    for buffer in gpu.buffers:
        gpu.engine.wrote(*buffer)
    shape = Emulated(1, 32)
    for rank, args in enumerate(((gpu.head, theirs, ours, trips, 32, 10**9, 1), (head, ours, theirs, 0, 0, 0, 0))):
        words = [a if isinstance(a, int) else a.data_ptr() for a in args]
        gpu.engine.launch("probe_peer_hop", struct.pack("7Q", *words), shape, rank=rank)
    gpu.engine.run()
    assert gpu.finish("a hop") > 0 and int(head[0]) == 0
    assert (trips > 0).all()


def test_a_wait_that_nobody_ends_runs_out() -> None:
    """The one who should answer is not there."""
    gpu = EmulatedGpu("hop", 0, Expire.STUCK)
    ours, theirs, trips = gpu.zeros(16), gpu.zeros(16), gpu.zeros(32, words=4)
    lead: Any = EmulatedKernel("probe_peer_hop", PEER_HOP)
    gpu.begin(lead, theirs, ours, trips, 32, 10**9, 1)
    assert int(gpu.head[0]) & 0xFFFFFFFF == 1
    assert (trips == 0).all()


@pytest.mark.parametrize(
    ("clks", "held"),
    [
        # One H200: 16 to 32 KB, up to 128 KB, and what is in neither.
        ({16: 1.21, 32: 1.45, 64: 2.46, 96: 2.45, 112: 2.44, 128: 2.48, 144: 5.95, 160: 5.95, 192: 5.94}, [32, 128]),
        ({16: 3.2, 64: 3.2, 112: 3.3, 128: 6.1, 144: 14.0, 160: 17.5, 192: 18.0}, [112]),  # on the way at 128 KB
        ({16: 1.0, 32: 1.9, 64: 2.6, 96: 2.6, 128: 4.0, 144: 6.0, 192: 6.0}, [16, 96]),  # at 32 and at 128 KB
        ({16: 1.0, 32: 1.0, 64: 2.5, 96: 2.5}, [32]),  # whether all of 96 KB is in a cache cannot be known
        ({16: 2.0, 32: 2.1, 64: 2.0}, [64]),  # nothing is slower
        ({16: 2.0, 32: 2.7, 64: 2.7}, [16]),
    ],
)
def test_knees(clks: dict[float, float], held: list[float]) -> None:
    assert knees(clks) == held
    assert knees({size: 7 * clk for size, clk in reversed(clks.items())}) == held  # of any clock, in any order


NOWHERE: Any = None  # a GPU is not asked for


def test_stamps_are_subtracted_before_they_are_rounded() -> None:
    """float64 keeps 53 bits; a time of the GPU's timer has 61."""
    import torch

    begin, end = torch.tensor([EPOCH + 32, EPOCH + 96]), torch.tensor([EPOCH + 160, EPOCH])
    assert [t.tolist() for t in Gpu.times(EmulatedGpu.__new__(EmulatedGpu), begin, end)] == [[32, 96], [160, 0]]
    with pytest.raises(ValueError, match="round"):
        Gpu.read(NOWHERE, begin)


@pytest.mark.parametrize("flight", [0, 1, 10])
def test_all_stream_or_none(flight: int) -> None:
    """Whatever the cap, and whoever plays: the pair's SMs and the others."""
    gpu = EmulatedGpu("hop", seed=2)
    pairs = waits.Pairs(gpu)
    assert pairs.stages == 10
    pairs.play(flight, place=2, first=1, pairs=1)
    moved = pairs.moved[:, 0]
    assert bool((moved > 0).all()) if flight else bool((moved == 0).all())
    assert (pairs.trips[1] > 0).any() and not pairs.trips[0].any()


# -- statistics ----------------------------------------------------------------------------------------------------

STEADY = [100.0, 101, 99, 100, 102, 98, 100, 101, 99, 100, 100]  # sorted: 98 99 99 100 100 100 100 100 101 101 102


def sample(values: list[float], grain: float = 0.0) -> Sample:
    return Sample("x_ns", "ns", values, "an x", grain)


def test_a_figure_is_the_median_between_deciles() -> None:
    found = figure(sample(STEADY))
    assert (found.value, found.p10, found.p90, found.runs, found.unit) == (100, 99, 101, 11, "ns")
    assert found.noisy == "" and found.what == "an x"


def test_one_reading_is_exact() -> None:
    assert figure(sample([132])) == Figure(value=132, p10=132, p90=132, unit="ns", runs=1, what="an x")


@pytest.mark.parametrize("values", [[], [math.nan, 1.0], [math.inf], [-1.0]])
def test_no_figure_of_impossible_readings(values: list[float]) -> None:
    with pytest.raises(ValueError):
        figure(sample(values))


def test_no_figure_of_nothing_unless_there_may_be_none() -> None:
    with pytest.raises(ValueError, match="x_ns: 0 ns cannot be"):
        figure(sample([0.0, 0.0, 1.0]))
    assert figure(Sample("gap_ns", "ns", [0.0], "a gap", zero=True)).value == 0


@pytest.mark.parametrize(
    ("values", "grain", "verdict"),
    [
        (STEADY, 0, ""),  # a spread of 2 %
        ([90, 110] * 10, 0, "spread of 20% of the median"),
        ([90, 110] * 10, 4, "spread of 20% of the median"),  # 20 > 10 + 8
        ([90, 110] * 10, 5, ""),  # 20 = 10 + 10: two steps of the clock
        ([28, 30, 32, 30, 28, 32, 30, 30, 30, 32], 2, ""),  # 4 clocks of 30: two readings of a clock of two
        ([100] * 10 + [107] * 10, 0, "drift of 7% of the median"),  # within the spread's limit, and yet not steady
        ([100] * 10 + [104] * 10, 0, ""),  # too little to matter
        ([100 + i % 2 * 7 for i in range(20)], 0, ""),  # the same readings, mixed
        ([100] * 4 + [107] * 4, 0, ""),  # too few for thirds
        ([0.0] * 12, 0, ""),
        ([0.0] * 6 + [1.0] * 5, 0, "spread of more than the median"),
    ],
)
def test_verdicts(values: list[float], grain: float, verdict: str) -> None:
    assert noise(values, grain) == verdict


# -- running -------------------------------------------------------------------------------------------------------


def good(gpu: Gpu) -> list[Sample]:
    """A case that works.

    More.
    """
    return [sample(STEADY)]


def bad(gpu: Gpu) -> list[Sample]:
    """A case that does not."""
    raise DeviceError("no luck")


def worse(gpu: Gpu) -> list[Sample]:
    """A case with a bug."""
    raise ZeroDivisionError("of something")


def naught(gpu: Gpu) -> list[Sample]:
    """A case whose clock stood still."""
    return [sample(STEADY), Sample("timer_step_ns", "ns", [0.0] * 3, "a step")]


class Idle:
    """As much of a GPU as these cases need."""

    peer = None

    def enter(self) -> None:
        pass


def test_what_a_case_raises_is_its_outcome() -> None:
    gpu: Any = Idle()
    fine, stopped, bug = (running.attempt(Case(f, ("timer",)), gpu) for f in (good, bad, worse))
    assert list(fine.figures) == ["x_ns"] and fine.error is None
    assert (stopped.reason, stopped.figures) == ("no luck", {}) and isinstance(stopped.error, DeviceError)
    assert bug.reason == "ZeroDivisionError: of something" and isinstance(bug.error, ZeroDivisionError)
    still = running.attempt(Case(naught, ("timer",)), gpu)
    assert isinstance(still.error, ValueError) and "timer_step_ns: 0 ns" in still.reason and still.figures == {}
    alone = running.attempt(Case(good, ("timer",), gpus=2), gpu)
    assert alone.error is None and "two GPUs" in alone.reason
    assert [o.case.name for o in Report(DEVICE, [fine, stopped, bug, alone]).failed] == ["bad", "worse"]


def test_other_processes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho GPU-aa, 12\necho GPU-bb, 13\necho GPU-aa, {os.getpid()}\necho GPU-aa, [N/A]\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = running.processes()
    assert before == {("GPU-aa", 12), ("GPU-bb", 13), ("GPU-aa", os.getpid())}
    assert running.others(before, "aa") == "used by other processes: 12"
    assert running.others(before, "cc") == ""
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert running.processes() == set()


# -- descriptions --------------------------------------------------------------------------------------------------

DEVICE = Device(
    name='NVIDIA "H200"',
    arch="sm_90a",
    sms=132,
    shared_bytes=232448,
    registers=65536,
    l2_bytes=62914560,
    rated_bytes_per_s=4.9e12,
    driver="580.1",
)


def report(**values: float) -> Report:
    samples = [Sample(name, "x", [v], f"{name} of “it”", zero="fit" in name) for name, v in values.items()]
    return Report(DEVICE, [Outcome(CASES[0], {s.name: figure(s) for s in samples})])


MEASURED = report(
    hbm_ring_2x32kb_tb_s=4.5,
    hbm_ring_5x32kb_tb_s=4.58,
    hbm_48mb_us=18.4,
    icache_kb=112.5,
    timer_step_ns=32,
    blocks_fit_1=132,
    blocks_fit_4=120,
    blocks_fit_8=0,
)


def written(made: Report, path: Path) -> Path:
    files.write(path, describe.toml(describe.machine(made), made.figures, describe.heading(made.device, "2030-01-02")))
    return path


def test_a_description_is_a_machine(tmp_path: Path) -> None:
    path = written(MEASURED, tmp_path / "mine.toml")
    found = machines.load(str(path))
    assert found == describe.machine(MEASURED)
    assert (found.name, found.arch, found.sms, found.blocks_fit) == ("nvidia_h200", "sm_90a", 132, {1: 132, 4: 120})
    assert (found.hbm_bytes_per_s, found.icache_bytes, found.timer_step_ns) == (4.58e12, 115200, 32)
    assert found.registers == 65536 and found.shared_bytes == 232448 and found.l2_bytes == 62914560
    assert set(found.sources) == set(type(found).model_fields) - {"name", "arch", "sources"}
    assert machines.figures(str(path)) == MEASURED.figures
    assert path.read_text().startswith('# NVIDIA "H200", measured by megagen probe on 2030-01-02')


def test_what_was_not_measured_says_so(tmp_path: Path) -> None:
    found = machines.load(str(written(report(hop_sm_ns=280), tmp_path / "m.toml")))
    assert found.hbm_bytes_per_s == 4.9e12 and found.icache_bytes == 131072 and found.blocks_fit == {1: 132}
    for field in ("hbm_bytes_per_s", "icache_bytes", "timer_step_ns"):
        assert "not measured" in found.sources[field]
    assert "not probed" in found.sources["blocks_fit"]


def test_noise_is_marked(tmp_path: Path) -> None:
    loud = Sample("hbm_ring_2x32kb_tb_s", "TB/s", [3.0, 5.0] * 8, "a stream")
    made = Report(DEVICE, [Outcome(CASES[1], {loud.name: figure(loud)})])
    path = written(made, tmp_path / "m.toml")
    assert machines.figures(str(path))[loud.name].noisy == "spread of 50% of the median"
    assert "noisy: spread of 50%" in machines.load(str(path)).sources["hbm_bytes_per_s"]
    shown = probing.sheet(made, out=path, recorded=None)
    assert "NOISY: 1 figure of 1" in shown.note and f"--machine {path}" in shown.note
    assert [c.text(shown.rows[0]) for c in shown.columns][-1] == "noisy"


def test_shipped_machines_have_figures_where_they_were_measured() -> None:
    found = {name: machines.figures(name) for name in machines.names()}
    assert {name for name, figures in found.items() if figures} == {"h200"}
    recorded = {row.what.removeprefix("probe.") for row in measure.read(RECORDED)}
    assert set(found["h200"]) == recorded


@pytest.mark.parametrize(
    ("old", "new", "at"),
    [
        ("value = 18.4", "value = nan", "figures.hbm_48mb_us.value"),
        ("value = 18.4", "value = -1.0", "figures.hbm_48mb_us.value"),
        ("p10 = 18.4, ", "", "figures.hbm_48mb_us.p10"),
        ("runs = 1", "runs = 0", "figures.hbm_ring_2x32kb_tb_s.runs"),
        ("runs = 1", "runs = 1, weight = 2", "figures.hbm_ring_2x32kb_tb_s.weight"),
        ("[figures]", "[figure]", "figure"),
    ],
)
def test_impossible_figures_are_refused(old: str, new: str, at: str, tmp_path: Path) -> None:
    path = written(MEASURED, tmp_path / "m.toml")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(MachineError) as caught:
        machines.load(str(path))
    assert f": {at}" in caught.value.message
    if "figures" in new or at != "figure":
        with pytest.raises(MachineError):
            machines.figures(str(path))


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.toml"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MegagenError, match="No space left"):
        written(MEASURED, path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["m.toml"]


def test_rows_are_recorded(tmp_path: Path) -> None:

    target = tmp_path / "probe.jsonl"
    probing.record(MEASURED, target, "megagen probe --record")
    rows = {row.what: row for row in measure.read(target)}
    assert set(rows) == {f"probe.{name}" for name in MEASURED.figures}
    one = rows["probe.hbm_48mb_us"]
    assert (one.value, one.spread, one.floor, one.ratio) == (18.4, (18.4, 18.4), None, None)
    assert (one.machine, one.driver, one.command) == (DEVICE.name, "580.1", "megagen probe --record")
    assert "1 run" in one.notes


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_page_has_every_case() -> None:
    """A section a case, in the order in which they run."""
    assert re.findall(r"^### `(\w+)`", PAGE.read_text(), re.MULTILINE) == [case.name for case in CASES]


def test_every_case_says_what_it_decides() -> None:
    for case in CASES:
        assert case.title and "\n\nDecides " in case.about, case.name


def test_chosen() -> None:
    assert chosen(None) == list(CASES)
    assert [c.name for c in chosen("fence, hbm,fence")] == ["hbm", "fence"]  # in the order in which they run
    with pytest.raises(MegagenError) as caught:
        chosen("hbm,fense")
    assert "'fense'" in caught.value.message and caught.value.hint == "did you mean 'fence'?"
    with pytest.raises(MegagenError):
        chosen(" , ")


RECORDED = ROOT / "docs" / "measurements" / "probe.jsonl"
NAMED = re.compile(r"`([a-z]\w+)`")


def table() -> list[tuple[list[str], list[str], list[str]]]:
    """Rows of the page's last table: names of figures, what it says of them on an H200, and on a GB300."""
    lines = PAGE.read_text().partition("\n## Figures\n")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")][2:]
    return [(NAMED.findall(effect), h200.rstrip(" †").split(", "), gb300.split(", ")) for effect, h200, gb300 in rows]


def test_the_table_says_what_was_published() -> None:
    rows = table()
    assert len(rows) > 15
    for names, here, there in rows:
        assert len(names) == len(here) > 0, names
        units = [cell.partition(" ")[2] for cell in here]
        published = [f"{GB300.text(n)} {u}" for n, u in zip(names, units, strict=True) if GB300.text(n)]
        assert there == (published or ["–"]), names


@pytest.mark.skipif(not RECORDED.is_file(), reason="nothing is recorded: megagen probe --record")
def test_the_table_says_what_is_recorded() -> None:
    """Any recorded run will do. The message has what the newest says."""

    said: dict[str, list[str]] = {}
    for row in measure.read(RECORDED):
        if "H200" in row.machine:
            said.setdefault(row.what.removeprefix("probe."), []).append(f"{number(row.value)} {row.unit}")
    wrong = {
        n: said.get(n, ["not recorded"])[-1]
        for names, here, _ in table()
        for n, cell in zip(names, here, strict=True)
        if cell not in said.get(n, ())
    }
    assert wrong == {}


@pytest.mark.skipif(not RECORDED.is_file(), reason="nothing is recorded: megagen probe --record")
def test_what_is_recorded_is_possible() -> None:

    rows = [row for row in measure.read(RECORDED) if "H200" in row.machine]
    low_high = {row.what: row.spread or (row.value, row.value) for row in rows}
    figures = {
        row.what.removeprefix("probe."): Figure(
            value=row.value, p10=low_high[row.what][0], p90=low_high[row.what][1], unit=row.unit, runs=1, what=row.notes
        )
        for row in rows
    }
    probe_bounds.possible(figures)
    probe_bounds.consistent(figures, rated_bytes_per_s=4.8143e12, sms=132)


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["probe", *args])


def test_the_command_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "m.toml"
    done = invoke("--out", str(out))
    assert done.exit_code == 1 and "error: no usable GPU" in done.output
    assert not out.exists()


def test_wrong_arguments_are_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "run", lambda *a: pytest.fail("it ran"))
    for args, said in (
        (("--only", "hbn"), "did you mean 'hbm'?"),
        (("--out", str(tmp_path / "m.json")), "ends in .toml"),
        (("--out", str(tmp_path / "no" / "m.toml")), "there is no folder"),
    ):
        done = invoke(*args)
        assert done.exit_code == 1 and said in done.output, args


def test_the_list_needs_no_gpu() -> None:
    done = invoke("--list", "--only", "peer")
    assert done.exit_code == 0 and "peer" in done.output and "hbm" not in done.output


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a report as from a GPU: table, file, exit code."""
    outcomes = [*MEASURED.outcomes, Outcome(CASES[-1], {}, reason="needs two GPUs")]
    monkeypatch.setattr(probing, "run", lambda *a: Report(DEVICE, outcomes, "used by other processes: 7"))
    out = tmp_path / "m.toml"
    done = invoke("--out", str(out))
    assert done.exit_code == 0, done.output
    line = next(line for line in done.output.splitlines() if "hbm_48mb_us" in line)
    assert line.split() == [
        "timer",
        "hbm_48mb_us",
        "18.4",
        "18.4",
        "18.4",
        "x",
        "18.4",
    ]  # measured, and known of a H200
    assert "Skipped peer: needs two GPUs" in done.output and "other processes: 7" in done.output
    assert machines.load(str(out)).sms == 132

    outcomes.append(Outcome(CASES[2], {}, reason="no luck", error=DeviceError("no luck")))
    done = invoke("--out", str(out))
    assert done.exit_code == 1 and "FAILED l2: no luck" in done.output and "error: failed: l2" in done.output


def test_known_figures_are_named_as_measured() -> None:
    """Their units are those that names end in; ranges ascend."""
    units = ("_tb_s", "_gb_s", "_us", "_ns", "_clk", "_mhz", "_kb", "_share")
    for known in (H200, GB300):
        for name, value in known.figures.items():
            assert name.endswith(units) or re.fullmatch(r"blocks_fit_\d", name), name
            low, high = value if isinstance(value, tuple) else (value, value)
            assert 0 < low <= high, name
    assert H200.text("fence_gpu_streaming_ns") == "7,000–8,000" and GB300.text("hop_sm_ns") == ""


@pytest.mark.parametrize(
    ("value", "text"), [(132, "132"), (4432.4, "4,432"), (18.44, "18.4"), (4.581, "4.58"), (0.0182, "0.018"), (0, "0")]
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_templates_are_where_the_wheel_puts_them() -> None:
    assert {"common.cuh", "stream.cu"} <= {p.name for p in (resources.templates() / "probe").iterdir()}
