"""Every wrapper and built-in does in the emulator what tests/kernels/cases.py expects of it on a GPU."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.cases import CASES, FILES, Case

from megagen.emulate.build import compile_library
from megagen.emulate.engine import Engine, Geometry, Kind
from megagen.settings import Settings

SEEDS = range(12)


@pytest.fixture(scope="module")
def library() -> Callable[[Case], Path]:
    """A case's kernels, compiled for the CPU."""

    def compiled(case: Case) -> Path:
        return compile_library(case.source, kernels=FILES[case.file], settings=Settings.from_env())

    return compiled


def queue(engine: Engine, case: Case) -> Any:
    """One launch, with inputs and output of its own; the output, to look at once it has run."""
    pointers = []
    for i, words in enumerate(case.inputs):
        kind = Kind.EXCHANGE if i in case.written else Kind.CONSTANT
        address = engine.allocate(words.nbytes, kind=kind, name=f"in[{i}]")
        np.frombuffer(engine.view(address, words.nbytes), np.uint32)[:] = words
        engine.wrote(address, words.nbytes)
        pointers.append(address)
    pointers.append(engine.allocate(4 * case.words, kind=Kind.OUTPUT, name="out"))
    geometry = Geometry(case.blocks, case.threads, case.cluster, case.shared_bytes)
    engine.launch(case.kernel, struct.pack(f"{len(pointers)}Q", *pointers), geometry)
    return np.frombuffer(engine.view(pointers[-1], 4 * case.words), np.uint32)


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_primitives(case: Case, library: Callable[[Case], Path]) -> None:
    """Launches one after the other too: one leaves nothing behind that the next would trip over."""
    path = library(case)
    for seed in SEEDS:
        with Engine(path, arena_bytes=1 << 27, seed=seed, race=True) as engine:
            outputs = [queue(engine, case)]
            engine.run()
            outputs += [queue(engine, case), queue(engine, case)] if seed % 4 == 1 else []  # one waits for the other
            engine.run()
            for out in outputs:
                case.check(out)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("atomics", "flags", "ring", "exchange", "multicast")], ids=lambda c: c.name
)
def test_a_seed_repeats_an_interleaving(case: Case, library: Callable[[Case], Path]) -> None:
    def counts(seed: int) -> dict[str, int | float]:
        with Engine(library(case), arena_bytes=1 << 27, seed=seed, race=True) as engine:
            queue(engine, case)
            engine.run()
            return engine.statistics()

    assert counts(5) == counts(5)
