"""The emulator's build and its engine's Python side, over a stand-in of the engine with the same C interface."""

from __future__ import annotations

import ctypes
import gc
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megagen import resources
from megagen.emulate import Engine, Kind, build, compile_library
from megagen.emulate.engine import Geometry
from megagen.errors import CompileError, DeviceError, EmulationError
from megagen.settings import Settings

STAND_IN = Path(__file__).parent / "emulator"
HEADERS = {
    "megagen/ptx/add.cuh": "#error the GPU's\n",
    "megagen/ptx/lonely.cuh": "#error the GPU's\n",
    "megagen/sum.cuh": "#pragma once\n#include <megagen/ptx/add.cuh>\ninline int sum(int a) { return add(a, STEP); }\n",
}
EMULATOR = {
    "megagen/emulate/abi.hpp": (STAND_IN / "abi.hpp").read_text(),
    "megagen/emulate/builtins.cuh": (STAND_IN / "builtins.cuh").read_text(),
    "megagen/emulate/ptx/add.cuh": "#pragma once\ninline int add(int a, int b) { return a + b; }\n",
}
ENGINE = {"engine.cpp": (STAND_IN / "engine.cpp").read_text()}
SOURCE = """#include <megagen/sum.cuh>
struct Params { int* out; const char* fail; };
extern "C" const char* bump(const void* p) {  // a comment
  const Params& params = *(const Params*)p;
  *params.out = sum(*params.out);
  return params.fail;
}
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(resources, "headers", lambda: HEADERS)
    monkeypatch.setattr(resources, "emulator_headers", lambda: EMULATOR)
    monkeypatch.setattr(resources, "emulator_sources", lambda: ENGINE)
    return Settings(cache_dir=tmp_path / "cache")


def made(settings: Settings, source: str = SOURCE, kernels: tuple[str, ...] = ("bump",), step: str = "3") -> Path:
    return compile_library(source, kernels=kernels, settings=settings, defines={"STEP": step})


def entries(settings: Settings) -> set[str]:
    return {p.name for p in (settings.cache_dir / "entries").iterdir()}


# -- build -----------------------------------------------------------------------------------------------------


def test_a_kernel_runs_with_the_twins_in_place(settings: Settings) -> None:
    with Engine(made(settings), arena_bytes=4096) as engine:
        at = engine.allocate(4, kind=Kind.OUTPUT, name="out")
        memory = memoryview(engine.view(at, 4)).cast("B").cast("i")
        memory[0] = 39
        engine.wrote(at, 4)
        engine.launch("bump", parameters(at), Geometry(blocks=1, threads=32))
        assert memory[0] == 39  # nothing runs yet
        engine.run()
        assert memory[0] == 42


def parameters(out: int, fail: int = 0) -> bytes:
    return out.to_bytes(8, "little") + fail.to_bytes(8, "little")


def test_equal_inputs_are_compiled_once_and_comments_are_none(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(settings)
    assert len(entries(settings)) == 2  # engine and kernel
    monkeypatch.setattr(build.Compiler, "run", lambda *_: pytest.fail("compiled again"))
    assert made(settings) == first
    assert made(settings, SOURCE.replace("a comment", "another")) == first


def test_another_text_compiles_against_the_same_engine(settings: Settings) -> None:
    first, before = made(settings), entries(settings)
    assert made(settings, SOURCE + "\n") != first
    assert len(entries(settings) - before) == 1


@pytest.mark.parametrize("change", ["define", "header", "twin", "engine", "flags", "compiler", "machine", "kernels"])
def test_every_input_is_in_the_key(change: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCE + 'extern "C" const char* rest(const void*) { return nullptr; }\n'
    first = made(settings, source)
    more: dict[str, Any] = {}
    new: Callable[[str, Any], None] = lambda name, value: monkeypatch.setattr(resources, name, lambda: value)  # noqa: E731
    match change:
        case "define":
            more = {"step": "4"}
        case "header":
            new("headers", HEADERS | {"megagen/new.cuh": ""})
        case "twin":
            new("emulator_headers", EMULATOR | {"megagen/emulate/new.hpp": ""})
        case "engine":
            new("emulator_sources", {"engine.cpp": ENGINE["engine.cpp"] + "\n"})
        case "flags":
            monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DX"))
        case "compiler":
            found = build.Compiler.find(settings.cxx)
            other = build.Compiler(found.path, found.name, found.identity + " patch")
            monkeypatch.setattr(build.Compiler, "find", lambda _: other)
        case "machine":
            monkeypatch.setattr(platform, "machine", lambda: "AMD64")
        case "kernels":
            more = {"kernels": ("bump", "rest")}
    assert made(settings, source, **more) != first


def test_an_error_cites_the_text_and_keeps_it(settings: Settings) -> None:
    source = SOURCE.replace("*params.out = sum", "*params.out = summ")
    with pytest.raises(CompileError, match=r"refused the code for the CPU: megagen\.cu:5:\d+: error: .*summ") as e:
        made(settings, source)
    (where,) = (note for note, _ in e.value.notes if note.startswith("source and full log: "))
    folder = Path(where.partition(": ")[2])
    assert folder.is_relative_to(settings.cache_dir)
    assert (folder / "megagen.cu").read_text() == source
    assert "summ" in (folder / "log.txt").read_text()


def test_a_wrapper_without_a_twin_is_named(settings: Settings) -> None:
    with pytest.raises(CompileError, match=r"megagen/ptx/lonely\.cuh cannot be emulated"):
        made(settings, "#include <megagen/ptx/lonely.cuh>\n" + SOURCE)


def test_a_kernel_that_is_not_there_is_refused(settings: Settings) -> None:
    with pytest.raises(CompileError, match=r"registrations:1.*nothing"):
        made(settings, kernels=("nothing",))


@pytest.mark.parametrize("path", ["no-such-compiler", "/bin/false"])
def test_no_compiler(path: str, settings: Settings) -> None:
    with pytest.raises(CompileError, match=f"no compiler: .*{path}") as e:
        made(settings.model_copy(update={"cxx": Path(path)}))
    assert e.value.hint is not None
    assert "MEGAGEN_CXX" in e.value.hint


@pytest.mark.parametrize(("system", "machine"), [("darwin", "x86_64"), ("linux", "aarch64")])
def test_other_machines_are_refused(
    system: str, machine: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(CompileError, match=f"x86-64 Linux only, and this is {system} on {machine}"):
        made(settings)


def test_every_wrapper_has_its_twin() -> None:
    twins = resources.emulator_headers()
    tree = build.composed(resources.headers(), twins)
    wrappers = [n for n in tree if n.startswith(build.PTX)]
    assert wrappers
    assert [n for n in wrappers if tree[n].startswith("#error")] == []
    assert not [n for n in resources.headers() if n.startswith(resources.EMULATE)]


# -- engine ----------------------------------------------------------------------------------------------------


def test_launches_run_in_order_and_report_progress(settings: Settings) -> None:
    calls: list[int] = []
    with Engine(made(settings), arena_bytes=4096, seed=7, race=True) as engine:
        at = engine.allocate(4, kind=Kind.OUTPUT, name="out")
        ctypes.memset(at, 0, 4)
        for _ in range(5):
            engine.launch("bump", parameters(at), Geometry(blocks=1, threads=32))
        engine.run(lambda: calls.append(1))
        assert int.from_bytes(engine.view(at, 4), "little") == 15
        assert len(calls) == 4
        said = engine.statistics()
        assert (said["runs"], said["seed"], said["race"], said["expire"]) == (5, 7, 1, 0)


def test_impossible_launches_and_full_memory(settings: Settings) -> None:
    with Engine(made(settings), arena_bytes=4096) as engine:
        with pytest.raises(DeviceError, match="cannot launch nothing in the emulator: the library has no such kernel"):
            engine.launch("nothing", b"", Geometry(blocks=1, threads=32))
        with pytest.raises(DeviceError, match="no grid can be"):
            engine.launch("bump", b"", Geometry(blocks=3, threads=32, cluster=2))
        with pytest.raises(DeviceError, match=r"memory is full: no 5,000 bytes for w of rank 1"):
            engine.allocate(5000, rank=1, kind=Kind.CONSTANT, name="w")
    with pytest.raises(DeviceError, match="closed"):
        engine.run()
    with pytest.raises(DeviceError, match="address space"):
        Engine(made(settings), arena_bytes=2 << 40)


def test_a_fault_ends_the_engine(settings: Settings) -> None:
    report = {"kind": "stack", "message": "overflows its stack", "seed": 3, "who": None, "place": None, "new": 1}
    text = ctypes.create_string_buffer(json.dumps(report).encode())
    with Engine(made(settings), arena_bytes=4096, seed=3) as engine:
        at = engine.allocate(4, kind=Kind.OUTPUT, name="out")
        engine.launch("bump", parameters(at, ctypes.addressof(text)), Geometry(blocks=1, threads=32))
        with pytest.raises(EmulationError, match="overflows its stack; seed 3 repeats it"):
            engine.run()
        with pytest.raises(DeviceError, match="cannot go on"):
            engine.run()


def test_what_is_no_report_is_the_emulators_fault(settings: Settings) -> None:
    text = ctypes.create_string_buffer(b"{oops")
    with Engine(made(settings), arena_bytes=4096, seed=3) as engine:
        at = engine.allocate(4, kind=Kind.OUTPUT, name="out")
        engine.launch("bump", parameters(at, ctypes.addressof(text)), Geometry(blocks=1, threads=32))
        with pytest.raises(EmulationError, match=r"cannot be read: '\{oops'") as e:
            engine.run()
    assert e.value.hint is not None


def test_buffers_outlive_the_engine(settings: Settings) -> None:
    library = made(settings)
    alive = ctypes.CDLL(str(library)).stand_in_alive
    with Engine(library, arena_bytes=4096) as engine:
        buffer = engine.view(engine.allocate(4, kind=Kind.OUTPUT, name="out"), 4)
    gc.collect()
    assert alive() == 1
    buffer[0] = 1
    del buffer
    gc.collect()
    assert alive() == 0


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot load the emulated kernel"):
        Engine(tmp_path / "none.so", arena_bytes=1)


def test_two_libraries_share_nothing(settings: Settings) -> None:
    """Statics of inline functions would else be one for the whole process, and a kernel found in the wrong library."""
    first = Engine(made(settings), arena_bytes=4096)
    second = Engine(made(settings, SOURCE.replace("bump", "other"), kernels=("other",)), arena_bytes=4096)
    with pytest.raises(DeviceError, match="no such kernel"):
        second.launch("bump", b"", Geometry(blocks=1, threads=32))
    with pytest.raises(DeviceError, match="no such kernel"):
        first.launch("other", b"", Geometry(blocks=1, threads=32))
