"""What the emulator promises to find, one small kernel each, and the same kernels done right.

The kernels are in tests/kernels/faults. A kernel's ``way`` says what it does: some are right and must run under many
seeds, the others are faults. A line of the kernel that is marked ``FAULT 1`` is where way 1 must be reported,
``OTHER 1`` where the second access is. What is marked xfail, PTX and the emulator see differently: the reason says how.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagen.emulate.build import compile_library
from megagen.emulate.engine import Engine, Geometry, Kind
from megagen.emulate.report import Report
from megagen.errors import EmulationError
from megagen.settings import Settings

HERE = Path(__file__).parent / "kernels" / "faults"
SEEDS = 20  # under which a fault must be found
RIGHT = 40  # under which what is right must run
LUCKY = 60  # under which a fault that hangs on the interleaving must be found at least once
PATIENCE = 6.0  # seconds for a run
CONSTANT, WORDS = 1002, 1024

STRAY = ("out_of_bounds",)
RACE = ("race",)
BAD = ("bad_instruction",)


@dataclass(frozen=True)
class Fault:
    """``kinds`` that a report may have, and what its message says. ``who``: whether it names a thread itself.

    ``both``: either of the two accesses may be the one that is reported. ``lucky``: found under some seeds only; under
    others there may be a fault of ``instead``, or none. ``unraced``: unless it is a race, found without race checks
    too. ``xfail``: why the emulator does not find it yet.
    """

    kinds: Collection[str]
    says: str = ""
    both: bool = False
    who: bool = True
    other: bool | None = None
    lucky: bool = False
    unraced: bool = True
    instead: Collection[str] = ()
    seeds: Collection[int] = range(SEEDS)
    xfail: str = ""


@dataclass(frozen=True)
class Kernel:
    """A kernel's geometry and what becomes of it by ``way``. ``right``: ways that are, or (way, why it xfails)."""

    file: str
    name: str
    faults: dict[int, Fault]
    right: tuple[int | tuple[int, str], ...] = (0,)
    blocks: int = 1
    threads: int = 32
    cluster: int = 1
    shared: int = 2048
    ranks: int = 1
    launches: int = 1
    pdl: bool = False

    def lines(self, mark: str, way: int) -> set[int]:
        """Where the kernel's text has this mark for this way."""
        found, inside = set(), False
        for number, line in enumerate(text(self.file).splitlines(), 1):
            if "__global__" in line:
                inside = f" {self.name}(" in line
            for ways in re.findall(rf"//.*{mark} ([\d ]+)", line) if inside else ():
                if str(way) in ways.split():
                    found.add(number)
        return found


def races(*ways: int, **more: Any) -> dict[int, Fault]:
    return dict.fromkeys(ways, Fault(RACE, "nothing orders the two", both=True, other=True, **more))


def each(*ways: int, kinds: Collection[str], says: str = "", **more: Any) -> dict[int, Fault]:
    return dict.fromkeys(ways, Fault(kinds, says, **more))


TWO: dict[str, Any] = {"blocks": 2, "cluster": 2}
LATE = "lands after its mbarrier's phase|it was not told to expect them"
CONSUMED = "before that thread's warp handed it back"

KERNELS = (
    # -- bounds, alignment, what was never written --
    Kernel("access.cu", "global_bounds", {
        1: Fault(STRAY, "reads 4 bytes .*byte 4008 .*of the 4008 bytes of 'constant'"),
        2: Fault(STRAY, "reads 16 bytes .*byte 4000 .*of the 4008"),
        3: Fault(STRAY, "where nothing was allocated"),
        4: Fault(STRAY, "reads 4 bytes"),
        5: Fault(STRAY, "writes 4 bytes .*byte 4096 .*of the 4096 bytes of 'out'"),
        6: Fault(STRAY, "writes 4 bytes .*byte 4096 .*of the 4096 bytes of 'heap'"),
        7: Fault(STRAY, "writes 4 bytes .*byte 4096 .*of the 4096 bytes of 'heap'"),
        8: Fault(STRAY, "reads 4 bytes .*byte 4008 "),
        9: Fault(STRAY, "where nothing was allocated"),
        10: Fault(STRAY, "reads 32 bytes .*byte 3984 "),
        11: Fault(STRAY, "reads 16 bytes .*byte 4000 "),
    }),
    Kernel("access.cu", "shared_bounds", {
        1: Fault(STRAY, "reads 4 bytes .*byte 248 .*of 248 bytes of shared memory"),
        2: Fault(STRAY, "writes 16 bytes .*byte 240 "),
        3: Fault(STRAY, "reads 4 bytes .*byte -4 "),
        4: Fault(STRAY, "no block's of the cluster"),
        5: Fault(STRAY, "initialises 8 bytes .*byte 248 "),
        6: Fault(STRAY, "changes 4 bytes .*byte 256 "),
        7: Fault(STRAY, "from 128 bytes .*byte 128 "),
        8: Fault(STRAY, "reads 4 bytes .*byte 16711680 "),
    }, shared=248),
    Kernel("access.cu", "shared_of_others", {
        **each(1, 2, 5, 6, kinds=STRAY, says="another block's shared memory with an instruction for its own"),
        3: Fault(STRAY, "mapa to block 2 of a cluster of 2"),
        4: Fault(STRAY, "no block's of the cluster"),
    }, **TWO),
    Kernel("access.cu", "alignment", each(*range(1, 15), kinds=("misaligned",), says="multiple")),
    Kernel("access.cu", "matrix_rows", {
        1: Fault(("misaligned",)),
        2: Fault(("unwritten",), "reads shared memory that nobody has written"),
        3: Fault(STRAY, "reads 16 bytes .*byte 512 "),
    }, shared=512),
    Kernel("access.cu", "never_written", {
        **each(*range(1, 11), kinds=("unwritten",), says="nobody has written"),
    }),
    Kernel("access.cu", "left_behind", {1: Fault(("unwritten",))}, launches=2),
    Kernel("access.cu", "read_only", {
        **each(1, 2, 3, kinds=("read_only",), says="writes to 'constant', which kernels only read"),
        **each(4, 5, kinds=BAD, says="ld.global.nc of 'heap', which kernels write to"),
    }),
    # -- barriers --
    Kernel("barriers.cu", "mbarriers", {
        **each(1, 2, 3, 4, 5, kinds=("uninitialised_barrier",), says="an mbarrier that nobody has initialised"),
        6: Fault(("too_many_arrivals",), "expects 2 arrivals and has had 0"),
        7: Fault(("too_many_arrivals",), "expects 2 arrivals and has had 2"),
        8: Fault(BAD, "cannot expect 0 arrivals"),
        9: Fault(BAD, "cannot expect 1048576 arrivals"),
        **each(10, 11, kinds=BAD, says="cannot count 1048576 outstanding bytes"),
        **each(12, 13, 14, kinds=BAD, says="an mbarrier as if it were data"),
        **each(15, 16, kinds=BAD, says="over(writes)? an mbarrier"),
        17: Fault(("unwritten", "bad_instruction"), "shared memory that nobody has written"),
        18: Fault(BAD),
        19: Fault(BAD),
    }),
    Kernel("barriers.cu", "arrivals_of_others", {
        1: Fault(("too_many_arrivals",), "expects 1 arrivals and has had them all", who=False, other=True),
    }, **TWO),
    Kernel("barriers.cu", "used_early", {
        1: Fault(("uninitialised_barrier", "race")),
    }, threads=64),
    Kernel("barriers.cu", "used_early_elsewhere", {
        1: Fault(("uninitialised_barrier", "race")),
    }, **TWO),
    Kernel("barriers.cu", "warp_wide", {
        1: Fault(("diverged",), "while lanes"),
        2: Fault(("diverged",), "comes to a shuffle while lanes"),
        3: Fault(("diverged",), "leaves the kernel while others wait|lanes that have left"),
        4: Fault(("deadlock",), "4[0-9]* ?|warps wait"),
        5: Fault(("diverged",), "shuffles with a lane that takes no part"),
        6: Fault(("diverged",), "lacks the lane itself"),
        7: Fault(("diverged",), "while lanes|lacks the lane itself|leaves the kernel while others wait"),
        8: Fault(("diverged",), "leaves the kernel while others wait|lanes that have left"),
    }, right=(0, 10)),
    Kernel("barriers.cu", "named_barriers", {
        1: Fault(BAD, "threads disagree on how many meet"),
        **each(2, 3, 4, kinds=BAD, says="0 to 15, for whole warps of the block"),
        5: Fault(("deadlock",), "3 warps wait"),
        6: Fault(("diverged", "bad_instruction"), xfail="the other halves have left; no barrier misses who has left"),
        7: Fault(("diverged", "bad_instruction")),
    }, right=(0, 10), threads=128),
    Kernel("barriers.cu", "cluster_barrier", {
        1: Fault((*BAD, "diverged"), "without having arrived|comes to a barrier"),
        2: Fault(BAD),
        3: Fault((*BAD, "diverged"), "arrives at the cluster's barrier twice|comes to a barrier", who=False),
        4: Fault(BAD),
        5: Fault(("deadlock",)),
    }, right=(0, 9), **TWO),
    Kernel("barriers.cu", "endless", {
        1: Fault(("deadlock",), "nothing can run any more: 1 warps wait"),
        2: Fault(("deadlock",), "nothing can run any more: 2 warps wait"),
        3: Fault(("deadlock",), "warps poll for ever and nothing changes", who=False, seeds=(5,)),
        4: Fault(("deadlock",), "2 warps wait"),
    }, threads=64),
    Kernel("barriers.cu", "endless", {5: Fault(("deadlock",))}, blocks=2, threads=64, launches=3, pdl=True),
    # -- the async proxy --
    Kernel("copies.cu", "bulk_loads", {
        1: Fault(("no_expect_tx", "deadlock"), "expect|nothing can run", who=False),
        2: Fault(("no_expect_tx", "deadlock"), "expect|nothing can run", who=False),
        3: Fault(("unwritten", "race"), "a copy under way", other=True),
        4: Fault(("left",), "a block ends .*copies into its shared memory", who=False),
        7: Fault(("left",), "a block ends .*copies into its shared memory", who=False, lucky=True),
        5: Fault(("unwritten", "race"), "a copy under way", other=True),
        6: Fault(("deadlock",)),
    }),
    Kernel("copies.cu", "expected_late", {}, right=((0, "bytes must be expected before their copy is issued"),)),
    Kernel("copies.cu", "multicast", {
        1: Fault(("no_expect_tx",), LATE, who=False, other=True, lucky=True, instead=("deadlock", "left")),
    }, **TWO),
    Kernel("copies.cu", "sent_word", {
        1: Fault(("unwritten", "race"), lucky=True, instead=("left",)),
        2: Fault(("left",), "a block (that )?(has )?end", who=False, lucky=True),
        3: Fault(("no_expect_tx",), LATE, who=False, other=True, lucky=True, instead=("deadlock", "left")),
    }, **TWO),
    Kernel("copies.cu", "fences", {
        **each(1, 2, 3, 6, kinds=("no_proxy_fence",), says="no fence.proxy.async in between", other=True),
        4: Fault(("no_proxy_fence", "unwritten", "race")),
        5: Fault(("no_proxy_fence",), other=True),
    }, right=(0, 10, 11), threads=64),
    Kernel("copies.cu", "fences_for_loads", {
        **each(1, 3, kinds=("no_proxy_fence",), says="no fence.proxy.async in between", other=True, unraced=False),
        2: Fault(("no_proxy_fence", "race"), other=True),
    }, threads=64),
    Kernel("copies.cu", "copy_over_words", {
        1: Fault(("no_proxy_fence",)),
    }),
    Kernel("copies.cu", "source_of_load", {
        1: Fault(RACE, other=True),
    }),
    Kernel("copies.cu", "source_of_store", {
        **each(1, 2, 3, kinds=RACE, says="a bulk store under way reads", other=True),
        4: Fault(("race", "no_proxy_fence"), both=True, other=True),
    }, right=(0, 10), threads=64),
    Kernel("copies.cu", "target_of_store", {
        **races(1),
        2: Fault(("race", "overwritten"), both=True, other=True),
    }, threads=64),
    Kernel("copies.cu", "gone_too_soon", {
        1: Fault(("left",), "its bulk stores (have|still) read shared memory"),
        2: Fault(("left",), "its bulk stores (have|still) read shared memory"),
    }),
    Kernel("copies.cu", "gone_block", {
        1: Fault(("left",), "reads shared memory of a block that has ended", lucky=True),
        2: Fault(("left",), "writes shared memory of a block that has ended", lucky=True),
        3: Fault(("left",), "ended", lucky=True, who=False),
    }, **TWO),
    Kernel("copies.cu", "ring", {
        1: Fault(("overwritten",), CONSUMED, other=True),
        2: Fault(("overwritten",), CONSUMED, other=True),
        3: Fault(("overwritten", "race", "unwritten"), both=True, other=True, lucky=True, instead=("deadlock",)),
    }, threads=64),
    Kernel("copies.cu", "two_consumers", {
        1: Fault(("overwritten",)),
    }, threads=96),
    Kernel("copies.cu", "loads_of_the_launch_before", {}, right=(0,), launches=2),
    Kernel("copies.cu", "loads_of_the_launch_before", {}, right=(0,), launches=2, pdl=True),
    Kernel("copies.cu", "many_fences", {}, blocks=48, threads=128),
    # -- products of a warpgroup --
    Kernel("wgmma.cu", "products", {
        **each(1, 6, kinds=BAD, says="no wgmma.fence since the last wait"),
        2: Fault(("no_proxy_fence",), "lets a product read what .* no fence.proxy.async in between", other=True),
        **each(3, 4, 5, kinds=("left",), says="without waiting for its products"),
        7: Fault(BAD, "a swizzle"),
        **each(8, 18, kinds=("misaligned",), says="no multiples of 16"),
        9: Fault(STRAY, "multiplies by 4 bytes at byte 20[4-6][0-9] of 2048 bytes"),
        10: Fault(("unwritten",), "multiplies by shared memory that nobody has written"),
        11: Fault(BAD, "unlike the one of another warp .*: another descriptor"),
        12: Fault(("diverged",), "not all four warps", who=False),
        13: Fault(BAD, "another descriptor, or another accumulate, than the first lane"),
        **each(14, 21, kinds=BAD, says="finds accumulators written"),
        15: Fault(("no_proxy_fence", "race", "unwritten")),
        16: Fault(("no_proxy_fence", "race"), both=True, other=True),
        17: Fault(("diverged",), "leaves the kernel while others wait|lanes that have left"),
        20: Fault(BAD, "unlike the one of another warp .*: another accumulate"),
    }, right=(0, 22), threads=128),
    Kernel("wgmma.cu", "products_of_few", each(1, kinds=BAD, says="no part of a whole warpgroup"), threads=96),
    Kernel("wgmma.cu", "products_of_a_ring", {
        **each(1, 4, 5, kinds=RACE, says="copies over what a product under way reads", other=True),
        2: Fault(("unwritten", "race"), "a copy under way|nobody has written", unraced=False),
        3: Fault(("unwritten", "race"), "a copy under way", other=True, unraced=False),
    }, threads=160, shared=64 + 2048),
    # -- order --
    Kernel("races.cu", "message", races(*range(1, 9)), right=(0, 11, 12, 13, 14, 15), blocks=2),
    Kernel("races.cu", "counter", races(1, 2), right=(
        0, 11, 14, 15,
        12,
        13,
    ), blocks=4),
    Kernel("races.cu", "ranks", {
        **races(1, 3, 4),
        2: Fault(RACE, both=True),
    }, right=(0, 11, 12, 13), ranks=2),
    Kernel("races.cu", "narrow_fence", {1: Fault(RACE, both=True)}, blocks=2),
    Kernel("races.cu", "lanes", {
        **races(1, 2, 3, 4),
    }, right=(
        0,
        5,
        6,
    )),
    Kernel("races.cu", "acquired_by_one", races(1, 2), blocks=2),
    Kernel("races.cu", "warps", races(1, 2, 3, 4, 6, 7, 8), right=(0, 11, 12, 13), threads=128),
    Kernel("races.cu", "halves", races(1), right=(0, 2), threads=64),
    Kernel("races.cu", "global_halves", {**races(1), 2: Fault(("unwritten",))}, right=(0, 3), threads=64),
    Kernel("races.cu", "data_as_flag", {
        **races(1, 3),
        2: Fault(("race", "unwritten")),
    }, right=(0, 11, 12), blocks=2, threads=64),
    Kernel("races.cu", "write_after_read", races(1, 2), blocks=2),
    Kernel("races.cu", "handed_on", races(1), blocks=3),
    Kernel("races.cu", "dependent", {
        **races(2, 3),
        1: Fault(RACE, both=True, other=True, lucky=True),
    }, blocks=2, launches=2, pdl=True),
    Kernel("races.cu", "untriggered", {
        1: Fault(RACE, both=True),
    }, launches=2, pdl=True),
    Kernel("races.cu", "chain", {}, blocks=2, launches=5, pdl=True),
    Kernel("races.cu", "chain", {}, right=(1,), blocks=2, launches=5),
    Kernel("races.cu", "clusters", races(1, 2, 3), right=(0, 11), **TWO),
    Kernel("races.cu", "arrivals", races(1), **TWO),
    Kernel("races.cu", "lanes_apart", races(1), threads=64),
    Kernel("races.cu", "lanes_released", races(1), blocks=2),
)  # fmt: skip


@cache
def text(file: str) -> str:
    return (HERE / "common.cuh").read_text("utf-8") + (HERE / file).read_text("utf-8")


@cache
def library(file: str) -> Path:
    kernels = re.findall(r"__global__ void (\w+)\(", text(file))
    return compile_library(text(file), kernels=kernels, settings=Settings.from_env())


def run(kernel: Kernel, way: int, seed: int, race: bool = True) -> Any:
    """What the first rank's launches put out. Raises EmulationError."""
    with Engine(library(kernel.file), arena_bytes=1 << 22, seed=seed, race=race) as engine:

        def words(name: str, n: int, given: int, kind: Kind, rank: int = 0) -> int:
            address = engine.allocate(4 * n, rank=rank, kind=kind, name=name)
            values = np.frombuffer(engine.view(address, 4 * n), np.uint32)
            values[:given] = 0 if name == "heap" else 1
            if given:
                engine.wrote(address, 4 * given)
            return address

        constant = words("constant", CONSTANT, CONSTANT, Kind.CONSTANT)
        heap = words("heap", WORDS, WORDS // 2, Kind.EXCHANGE)
        outputs = [words("out", WORDS, 0, Kind.OUTPUT, rank) for rank in range(kernel.ranks)]
        geometry = Geometry(kernel.blocks, kernel.threads, kernel.cluster, kernel.shared, kernel.pdl)
        for rank, out in enumerate(outputs):
            for launch in range(kernel.launches):
                parameters = struct.pack("3Q4I", constant, heap, out, way, rank, launch, 0)
                engine.launch(kernel.name, parameters, geometry, rank=rank)
        until = time.monotonic() + PATIENCE

        def progress() -> None:
            assert time.monotonic() < until, f"seed {seed}: it does not end"

        engine.run(progress)
        return np.frombuffer(engine.view(outputs[0], 4 * WORDS), np.uint32).copy()


def fault(kernel: Kernel, way: int, seed: int, race: bool = True) -> Report | None:
    try:
        run(kernel, way, seed, race)
    except EmulationError as e:
        assert isinstance(e.report, Report)
        assert e.report.seed == seed
        return e.report
    return None


def parameters(ways: Callable[[Kernel], Iterator[tuple[int, Any, str]]]) -> list[Any]:
    return [
        pytest.param(
            kernel,
            way,
            *more,
            id=f"{kernel.name}-{way}" + ("-pdl" if kernel.pdl else ""),
            marks=[pytest.mark.xfail(reason=why, strict=True)] if why else [],
        )
        for kernel in KERNELS
        for way, more, why in ways(kernel)
    ]


def faults(kernel: Kernel) -> Iterator[tuple[int, Any, str]]:
    for way, expected in kernel.faults.items():
        yield way, (expected,), expected.xfail


def rights(kernel: Kernel) -> Iterator[tuple[int, Any, str]]:
    for entry in kernel.right:
        way, why = (entry, "") if isinstance(entry, int) else entry
        yield way, (), why


@pytest.mark.parametrize(("kernel", "way"), parameters(rights))
def test_what_is_right_runs_under_every_seed(kernel: Kernel, way: int) -> None:
    for seed in range(RIGHT):
        run(kernel, way, seed)
        run(kernel, way, seed, race=False)


@pytest.mark.parametrize(("kernel", "way", "expected"), parameters(faults))
def test_a_fault_is_found_and_its_line_named(kernel: Kernel, way: int, expected: Fault) -> None:
    found = []
    for seed in range(LUCKY) if expected.lucky else expected.seeds:
        report = fault(kernel, way, seed)
        if expected.lucky and (report is None or report.kind in expected.instead):
            continue
        assert report is not None, f"seed {seed}: nothing found"
        assert report.kind in expected.kinds, f"seed {seed}: {report}"
        assert re.search(expected.says, report.message), report.message
        check_lines(kernel, way, expected, report)
        found.append(report)
        if len(found) == 1:
            assert fault(kernel, way, seed) == report  # a seed repeats it
        if not (expected.lucky or "race" in expected.kinds) and expected.unraced:
            report = fault(kernel, way, seed, race=False)
            assert report is not None, f"seed {seed}: nothing found without race checks"
            assert report.kind in expected.kinds, f"seed {seed}, without race checks: {report}"
            check_lines(kernel, way, expected, report)
    assert found


def check_lines(kernel: Kernel, way: int, expected: Fault, report: Report) -> None:
    here, there = kernel.lines("FAULT", way), kernel.lines("OTHER", way)
    assert here or not expected.who, "no line is marked"
    if report.kind == "deadlock":
        assert {w.line for w in report.waiting if w.file} == here, report
        return
    if not expected.who:
        assert report.other is None or report.other.line in (there or here), report
        return
    assert report.who is not None and report.who.file == "megagen.cu", report
    who, other = report.who.line, report.other.line if report.other else None
    either = expected.both and who in there
    assert who in (there if either else here), report
    assert other in (here if either else there) or (not expected.other and other is None), report


def test_sums_are_no_numbers_until_their_product_is_waited_for() -> None:
    kernel = next(k for k in KERNELS if k.name == "products")
    for seed in range(SEEDS):
        out = run(kernel, 22, seed).view(np.float32)
        assert (out[:128] == 33).all()
        assert np.isnan(out[128:256]).all()


# -- what a deadlock's report lists ----------------------------------------------------------------------------------

ALL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("name", "way", "listed"),
    [
        # (launch, block, warp), lanes, what, edge, slot, phase, step
        ("endless", 1, {((0, 0, 1), ALL, "poll", 9, 3, 1, 41)}),
        ("endless", 2, {((0, 0, w), 0xFF, "poll", 4, 2, 7, 40 + w) for w in (0, 1)}),
        (
            "endless",
            4,
            {
                ((0, 0, 0), 1, "poll", 1, 0, 0, 40),
                ((0, 0, 0), ALL - 1, "__syncthreads", None, 0, 1, 40),
                ((0, 0, 1), ALL, "__syncthreads", None, 0, 1, 41),
            },
        ),
        (
            "endless",
            5,
            {((0, 0, w), ALL, "poll", 2, 0, 0, 40 + w) for w in (0, 1)}
            | {((1, 0, w), ALL, "griddepcontrol.wait", None, 0, 0, 40 + w) for w in (0, 1)},
        ),
        ("named_barriers", 5, {((0, 0, w), ALL, "a named barrier", None, 7, 0, ALL) for w in range(3)}),
        (
            "cluster_barrier",
            5,
            {((0, 0, 0), ALL, "the cluster's barrier", None, 0, 0, ALL), ((0, 1, 0), ALL, "poll", 6, 1, 0, ALL)},
        ),
        (
            "warp_wide",
            4,
            {((0, 0, 0), ALL >> 1, "__syncwarp", None, 0, 0, ALL), ((0, 0, 0), 1 << 31, "poll", 5, 0, 1, ALL)},
        ),
        ("bulk_loads", 6, {((0, 0, 0), 1, "poll", 3, 1, 0, ALL)}),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_a_deadlock_lists_who_waits_for_what(name: str, way: int, listed: set[Any]) -> None:
    kernel = next(k for k in KERNELS if k.name == name and way in k.faults)
    for seed in range(SEEDS):
        report = fault(kernel, way, seed)
        assert report is not None
        found = [
            ((w.launch, w.block, w.warp), w.lanes, w.what, w.edge, w.slot, w.phase, w.step) for w in report.waiting
        ]
        assert set(found) == listed
        assert len(found) == len(listed)
        assert {w.line for w in report.waiting} == kernel.lines("FAULT", way)
        assert {w.file for w in report.waiting} == {"megagen.cu"}


# -- what weak memory may do, and must not ---------------------------------------------------------------------------


def outcomes(
    name: str, way: int = 0, words: int = 1, blocks: int = 2, threads: int = 1, race: bool = True
) -> set[tuple[int, ...]]:
    """What is seen over many seeds; all accesses are strong, so race checks change nothing."""
    kernel = Kernel("litmus.cu", name, {}, blocks=blocks, threads=threads)
    runs = (run(kernel, way, seed, race=race and seed % 2 == 1) for seed in range(2 * LUCKY))
    return {tuple(int(w) for w in out[:words]) for out in runs}


@pytest.mark.parametrize("way", [0, 1], ids=["bare", "fence.acq_rel"])
def test_store_buffering_is_seen(way: int) -> None:
    seen = outcomes("store_buffering", way, words=2)
    assert {(0, 0), (0, 1), (1, 0)} <= seen <= {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize(
    ("way", "late"),
    [
        pytest.param(0, True, id="bare"),
        pytest.param(1, True, id="only the writer's fence"),
        pytest.param(2, True, id="only the reader's fence"),
        pytest.param(3, False, id="fences"),
        pytest.param(4, False, id="release and acquire"),
        pytest.param(6, False, id="release and acquire and a fence"),
    ],
)
def test_a_message_overtakes_its_data_unless_both_sides_order_them(way: int, late: bool) -> None:
    assert outcomes("message_passing", way, words=2) == ({(0, 1), (1, 1)} if late else {(1, 1)})


@pytest.mark.parametrize("word", range(4))
def test_the_words_of_a_vector_arrive_one_by_one(word: int) -> None:
    seen = outcomes("torn", word | 4, words=4)
    assert (1, 1, 1, 1) in seen
    assert all(s[word] == 1 for s in seen)
    assert any(s[word ^ 1] == 0 for s in seen)


@pytest.mark.parametrize("word", range(4))
def test_sixteen_bytes_of_one_access_arrive_at_once(word: int) -> None:
    assert outcomes("torn", word, words=4) == {(1, 1, 1, 1)}


def test_a_word_never_goes_back() -> None:
    seen = outcomes("coherence", words=2)
    assert all(first <= second for first, second in seen)
    assert {(0, 0), (2, 2)} < seen


def test_what_was_seen_is_handed_on() -> None:
    assert outcomes("causality", blocks=3) == {(1,)}


def test_additions_add_up_and_tickets_are_drawn_once() -> None:
    assert outcomes("additions", words=66, threads=32) == {(64, 64, *[1] * 64)}


def test_a_bulk_store_reads_its_source_late() -> None:
    ones, twos = (0x3F800000,) * 4, (0x40000000,) * 4
    assert outcomes("early_reuse", 0, words=4, blocks=1) == {ones}
    assert twos in outcomes("early_reuse", 1, words=4, blocks=1, race=False) <= {ones, twos}
