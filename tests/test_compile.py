"""The compiler room: figures, errors, cache. No GPU, no toolkit; headers and sources of its own."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megagen import machines, resources
from megagen.compile import Artifact, compile_source
from megagen.compile import build as build_room
from megagen.compile import cache as cache_room
from megagen.compile.cache import Cache
from megagen.compile.compiler import KNOWN, UNIT, Refused, options, without_comments
from megagen.compile.nvrtc import Nvrtc
from megagen.compile.report import is_mma, is_trap, ptxas, sections
from megagen.errors import CacheError, CompileError
from megagen.settings import Settings

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
HEADERS = {
    "megagen/tiny.cuh": """#pragma once
#include "megagen/types.cuh"
template <class T> concept Tile = requires { T::rows; };
template <Tile T> __device__ u32 rows() { return T::rows; }
""",
    "megagen/types.cuh": "#pragma once\nusing u32 = unsigned int;\n",
}
SOURCE = r"""
#include <megagen/tiny.cuh>
struct Policy { static constexpr int rows = 16; };
extern "C" __global__ void multiply(float* out, const u32* in) {
  float d[4] = {0, 0, 0, 0};
  u32 a = in[threadIdx.x], b = in[threadIdx.x + 64];
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%4,%4,%4},{%5,%5},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b));
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i] + rows<Policy>();
}
extern "C" __global__ void fat(float* x, int n) {
  __shared__ float shared[64];
  float local[256];
  for (int i = 0; i < 256; ++i) local[i] = x[i] * n;
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += local[i * n % 256];
  shared[threadIdx.x] = sum;
  __syncthreads();
  x[threadIdx.x] = shared[threadIdx.x ^ 1];
  if (n == 77) __trap();
}
"""
KERNELS = ("multiply", "fat")
EMPTY = 'extern "C" __global__ void k() {}\n'
BROKEN = 'extern "C" __global__ void k(int* x) { x[0] = nowhere; }\n'


@pytest.fixture(autouse=True)
def headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "headers", lambda: dict(HEADERS))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


def one(settings: Settings, source: str = EMPTY, **more: Any) -> Artifact:
    return compile_source(source, kernels=["k"], archs=["sm_90a"], settings=settings, **more)["sm_90a"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    settings = Settings(cache_dir=tmp_path_factory.mktemp("cache"), keep=("cu", "ptx", "sass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "headers", lambda: dict(HEADERS))
        return compile_source(SOURCE, kernels=KERNELS, archs=ARCHS, settings=settings)


# -- figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_report(built: dict[str, Artifact], arch: str) -> None:
    a = built[arch]
    assert a.arch == arch and not a.cached and a.compiler.startswith("nvrtc 13.")
    multiply, fat = (a.kernels[k] for k in KERNELS)
    assert multiply.mma == {"HMMA.16816.F32.BF16": 1} and multiply.traps == 0
    assert (multiply.stack_bytes, multiply.spill_store_bytes, multiply.spill_load_bytes) == (0, 0, 0)
    assert fat.mma == {} and fat.traps == 1
    assert fat.stack_bytes == 256 * 4 and fat.shared_bytes == 64 * 4 and multiply.shared_bytes == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_figures_agree_with_cuobjdump(built: dict[str, Artifact], arch: str) -> None:
    from cuda.pathfinder import find_nvidia_binary_utility

    tool = find_nvidia_binary_utility("cuobjdump")
    assert tool, "nvidia-cuda-cuobjdump is a dependency"
    said = subprocess.run([tool, "-res-usage", built[arch].path], capture_output=True, text=True, check=True).stdout
    seen = {k: (int(r), int(s)) for k, r, s in re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", said)}
    assert seen == {k: (r.registers, r.stack_bytes) for k, r in built[arch].kernels.items()}


@pytest.mark.parametrize("arch", ARCHS)
def test_code_bytes_are_sixteen_an_instruction(built: dict[str, Artifact], arch: str) -> None:
    sass = built[arch].path.with_suffix(".sass").read_text()
    parts = re.split(r"\.section\s+\.text\.(\w+)", sass)[1:]
    seen = {
        k: 16 * len(re.findall(r"/\*[0-9a-f]{4,}\*/", body)) for k, body in zip(parts[::2], parts[1::2], strict=True)
    }
    assert seen == {k: r.code_bytes for k, r in built[arch].kernels.items()}


def test_kept_files(built: dict[str, Artifact]) -> None:
    for arch, a in built.items():
        assert sorted(p.suffix for p in a.path.parent.iterdir()) == [".cu", ".cubin", ".json", ".json", ".ptx", ".sass"]
        assert a.path.with_suffix(".cu").read_text() == SOURCE
        assert f".target {arch}" in a.path.with_suffix(".ptx").read_text()


def test_defines_reach_the_source(settings: Settings) -> None:
    source = 'static_assert(WIDTH == 3);\nextern "C" __global__ void k() {}'
    assert one(settings, source, defines={"WIDTH": "3"}).kernels["k"].registers > 0
    with pytest.raises(CompileError, match="static assertion"):
        one(settings, source, defines={"WIDTH": "4"})


def test_contraction_is_left_to_the_author(settings: Settings) -> None:
    source = 'extern "C" __global__ void k(float* x) { x[0] = x[1] * x[2] + x[3]; x[4] = fmaf(x[5], x[6], x[7]); }'
    sass = one(settings.model_copy(update={"keep": ("sass",)}), source).path.with_suffix(".sass").read_text()
    assert [len(re.findall(rf"\b{op}\b", sass)) for op in ("FMUL", "FADD", "FFMA")] == [1, 1, 1]


COMMENTED = """// for {0}
extern "C" __global__ void k(int* x) {{
  x[0] = 1'000;  // it's from "schedule.py:{0}"
  asm volatile("// {1}");
}}
"""


def test_comment_changes_no_machine_code_and_is_a_hit(settings: Settings, tmp_path: Path) -> None:
    a, b = one(settings, COMMENTED.format(41, "")), one(settings, COMMENTED.format(7042, ""))
    assert (a.cached, b.cached) == (False, True) and a.path == b.path
    fresh = one(Settings(cache_dir=tmp_path / "other"), COMMENTED.format(7042, ""))
    assert not fresh.cached
    assert sections(a.path.read_bytes())[".text.k"] == sections(fresh.path.read_bytes())[".text.k"]
    assert not one(settings, COMMENTED.format(41, "in a string")).cached
    assert not one(settings, COMMENTED.format(41, "").replace("1'000", "1'001")).cached


def test_kept_source_is_the_one_given_comments_included(settings: Settings) -> None:
    keep = settings.model_copy(update={"keep": ("cu",)})
    for line in (41, 42):
        text = COMMENTED.format(line, "")
        assert one(keep, text).path.with_suffix(".cu").read_text() == text


@pytest.mark.parametrize(
    "text, bare",
    [
        ("a; // b\n// c\n  // d // e\nf", "a;\n\n\nf"),
        ("a; //b", "a;"),
        ('"// a" // b', '"// a"'),
        (r'"\"// a"', None),
        ("""'"' // a\n'"' // b""", """'"'\n'"'"""),
        ("1'000 // it's", "1'000"),
        ("/* // a */ b /* // c\n// d */ e", None),
        ("// a /* b\nc // */", "\nc"),
        ("// a \\\nb", None),
        ('R"x(\n// a)"\n// b)x" // c', 'R"x(\n// a)"\n// b)x"'),
        ("a / b // c", "a / b"),
    ],
)
def test_comments_are_those_of_the_language(text: str, bare: str | None) -> None:
    assert without_comments(text) == (text if bare is None else bare)


def test_without_disassembler_figures_are_absent_and_not_taken_from_a_richer_entry(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one(settings).kernels["k"].mma == {}
    monkeypatch.setattr(build_room, "find_disassembler", lambda: None)
    poor = one(settings)
    assert (poor.cached, poor.kernels["k"].mma, poor.kernels["k"].traps) == (False, None, None)
    with pytest.raises(CompileError, match="MEGAGEN_KEEP=sass needs nvdisasm"):
        one(settings.model_copy(update={"keep": ("sass",)}))


def test_ptxas_log_with_spills() -> None:
    """Lines as ptxas 13.0 (nvcc) and 13.5 (NVRTC) print them; ``helper`` was not inlined."""
    usage = ptxas(
        textwrap.dedent("""\
        ptxas info    : 0 bytes gmem
        ptxas info    : Compiling entry function 'a' for 'sm_90a'
        ptxas info    : Function properties for a
            680 bytes stack frame, 708 bytes spill stores, 704 bytes spill loads
        ptxas info    : Used 32 registers, used 1 barriers, 680 bytes cumulative stack size
        ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'b'
        ptxas info    : Compiling entry function 'b' for 'sm_90a'
        ptxas info    : Function properties for b
        ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ptxas info    : Used 24 registers, used 0 barriers, 96 bytes cumulative stack size, 80000 bytes smem
        ptxas info    : Function properties for helper
        ptxas         .     96 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
        """)
    )
    a, b = usage["a"], usage["b"]
    assert (a.registers, a.stack, a.spill_store, a.spill_load, a.shared) == (32, 680, 716, 716, 0)
    assert (b.registers, b.stack, b.spill_store, b.spill_load, b.shared) == (24, 96, 8, 12, 80000)
    assert a.warnings == () and len(b.warnings) == 1 and "serialized" in b.warnings[0]


def test_complaint_that_names_no_kernel_is_of_every_kernel(settings: Settings) -> None:
    """ptxas does not know the registers at entry and says so without a name (C7508)."""
    asm = 'asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");'
    source = f'extern "C" __global__ void first() {{ {asm} }}\nextern "C" __global__ void second() {{}}\n'
    made = compile_source(source, kernels=["first", "second"], archs=["sm_90a"], settings=settings)["sm_90a"]
    assert "'setmaxnreg' ignored" in made.log
    for name in ("first", "second"):
        (warning,) = made.kernels[name].warnings
        assert "'setmaxnreg' ignored" in warning


@pytest.mark.parametrize(
    "opcode", ["HMMA.16816.F32.BF16", "HGMMA.64x8x16.F32", "IMMA.16832.S8", "UTCQMMA.2CTA", "OMMA.SF"]
)
def test_mma_opcodes(opcode: str) -> None:
    assert is_mma(opcode) and not is_trap(opcode)


@pytest.mark.parametrize("opcode", ["FFMA", "DFMA.RN", "HFMA2.MMA", "LDSM.16.M88.4", "BRA", "BAR.SYNC"])
def test_other_opcodes(opcode: str) -> None:
    assert not is_mma(opcode) and not is_trap(opcode)


# -- errors --------------------------------------------------------------------------------------------------------


def test_syntax_error_shows_first_lines_and_where_the_rest_is(settings: Settings) -> None:
    source = "// first\n" + BROKEN + "".join(f"static_assert({i} < 0);\n" for i in range(9))
    with pytest.raises(CompileError) as e:
        one(settings, source)
    text = e.value.render()
    assert (
        f"{UNIT}(2)" in e.value.message
        and "nowhere" in text
        and "sm_90a" in text
        and re.search(r"note: \d+ more\n", text)
    )
    assert "x[0]" not in text, "the source is not printed"
    folder = Path(text.rsplit("full log: ")[-1].strip())
    assert folder.parent == settings.cache_dir / "failed"
    assert (folder / UNIT).read_text() == source and "nowhere" in (folder / "log.txt").read_text()
    assert not (settings.cache_dir / "entries").exists()


def test_unmet_concept_is_traced_to_its_header(settings: Settings) -> None:
    source = '#include <megagen/tiny.cuh>\nstruct Bare {};\nextern "C" __global__ void k(int* x) { *x = rows<Bare>(); }'
    with pytest.raises(CompileError) as e:
        one(settings, source)
    assert f"{UNIT}(3): error" in e.value.message
    # NVRTC 13.5 names the concept, 13.0 only the template that has it
    assert any(re.search(r'megagen/tiny.cuh\(4\): note.*(concept "Tile"|"rows" failed)', n) for n, _ in e.value.notes)


def test_ptxas_error(settings: Settings) -> None:
    with pytest.raises(CompileError, match="Not a name of any known instruction: 'foo'"):
        one(settings, 'extern "C" __global__ void k() { asm volatile("foo;"); }')


def test_error_is_not_hidden_by_a_full_disk(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CompileError, match="nowhere") as e:
        one(settings, BROKEN)
    assert "No space left" in e.value.render()


def test_missing_kernel_names_those_there(settings: Settings) -> None:
    with pytest.raises(CompileError, match="no kernel 'other'; it has: k"):
        compile_source(EMPTY, kernels=["k", "other"], archs=["sm_90a"], settings=settings)


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_100", "sm_999a", "compute_90", "h200", ""])
def test_unknown_architecture_is_refused_before_compiling(
    settings: Settings, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_room, "pick", None)
    with pytest.raises(CompileError, match=f"cannot compile for '{arch}'") as e:
        compile_source(EMPTY, kernels=["k"], archs=["sm_90a", arch], settings=settings)
    if arch == "sm_90":
        assert e.value.hint == "did you mean 'sm_90a'?"


def test_known_architectures_are_those_that_have_what_the_code_needs() -> None:
    source = 'extern "C" __global__ void __launch_bounds__(128) k() { asm("setmaxnreg.dec.sync.aligned.u32 24;"); }'
    nvrtc = Nvrtc.load()
    for arch in KNOWN:
        assert nvrtc.run(source, {}, options(arch, {}), ptx=False).cubin
        with pytest.raises(Refused, match="setmaxnreg"):
            nvrtc.run(source, {}, options(arch.removesuffix("a"), {}), ptx=False)
    assert {machines.load(m).arch for m in machines.names()} <= {*KNOWN}


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
from megagen.compile import compile_source
from megagen.compile.compiler import Refused
from megagen.compile.nvrtc import Nvrtc
from megagen.settings import Settings
root, cache, refuse = Path(sys.argv[1]), sys.argv[2] == "cache", sys.argv[3] == "refused"
release, real = threading.Event(), Nvrtc.run
def slow(*args, **more):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    release.wait()
    if refuse: raise Refused("no")
    return real(*args, **more)
Nvrtc.run = slow
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    source = 'extern "C" __global__ void k() {}'
    compile_source(source, kernels=["k"], archs=["sm_90a"], settings=Settings(cache_dir=root / "cache", cache=cache))
except KeyboardInterrupt:
    print("interrupted", not release.is_set())
release.set()
"""


@pytest.mark.parametrize("end", ["done", "refused"])
@pytest.mark.parametrize("cache", ["cache", "none"])
def test_interrupt_does_not_wait_for_the_compiler_and_leaves_nothing(cache: str, end: str, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(resources.__file__).parents[1]), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), cache, end]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.split() == ["interrupted", "True"] and said.stderr == ""
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"] == []
    assert list(tmp_path.glob("megagen-*")) == list(tmp_path.glob("cache/staging/*")) == []


@pytest.mark.parametrize("nvcc", ["/nowhere/nvcc", "/bin/true"])
def test_no_nvcc(settings: Settings, nvcc: str) -> None:
    with pytest.raises(CompileError, match=f"no compiler: .*{nvcc}") as e:
        one(settings.model_copy(update={"compiler": "nvcc", "nvcc": Path(nvcc)}))
    assert "MEGAGEN_NVCC" in (e.value.hint or "")


def test_no_nvrtc(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match="no compiler: NVRTC") as e:
        one(settings)
    assert "nvidia-cuda-nvrtc" in (e.value.hint or "")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_nvcc_takes_the_same_code(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    nvcc = settings.model_copy(update={"compiler": "nvcc", "keep": ("ptx",)})
    a = compile_source(SOURCE, kernels=KERNELS, archs=["sm_90a"], settings=nvcc)["sm_90a"]
    assert a.compiler.startswith("nvcc ")
    assert a.kernels["multiply"].mma == {"HMMA.16816.F32.BF16": 1} and a.kernels["fat"].stack_bytes == 1024
    assert ".target sm_90a" in a.path.with_suffix(".ptx").read_text()
    with pytest.raises(CompileError, match=rf"{re.escape(UNIT)}\(1\).*nowhere"):
        one(nvcc, BROKEN)
    assert list(temporary.iterdir()) == [], "nothing is left behind"


# -- cache ---------------------------------------------------------------------------------------------------------


def test_hit_needs_neither_compiler_nor_subprocess(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = one(settings)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a hit must not do this")

    monkeypatch.setattr(Nvrtc, "run", never)
    monkeypatch.setattr(subprocess, "run", never)
    assert one(settings) == cold.model_copy(update={"cached": True})


@pytest.mark.parametrize(
    "change",
    [
        "source",
        "header",
        "unused header",
        "header name",
        "arch",
        "defines",
        "options",
        "compiler",
        "keep",
        "kernels",
        "format",
    ],
)
def test_every_input_is_in_the_key(change: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    both = EMPTY + 'extern "C" __global__ void k2() {}\n'

    def path(source: str = both, kernels: tuple[str, ...] = ("k",), arch: str = "sm_90a", **more: Any) -> Path:
        given: dict[str, Any] = {"settings": settings, "defines": {"A": "1"}} | more
        return compile_source(source, kernels=kernels, archs=[arch], **given)[arch].path

    monkeypatch.setattr(build_room, "find_disassembler", lambda: None)  # quicker
    before = path()
    assert path() == before
    replace: Callable[[dict[str, str]], None] = lambda h: monkeypatch.setattr(resources, "headers", lambda: h)  # noqa: E731
    match change:
        case "source":
            after = path(both + " ")
        case "header":
            replace(HEADERS | {"megagen/types.cuh": HEADERS["megagen/types.cuh"] + "//"})
            after = path()
        case "unused header":
            replace(HEADERS | {"megagen/new.cuh": ""})
            after = path()
        case "header name":
            replace({k.replace("tiny", "small"): v for k, v in HEADERS.items()})
            after = path()
        case "arch":
            after = path(arch="sm_100a")
        case "defines":
            after = path(defines={"A": "2"})
        case "options":
            monkeypatch.setattr(build_room, "options", lambda *a: (*options(*a), "--ftz=true"))
            after = path()
        case "compiler":
            loaded = Nvrtc.load()
            monkeypatch.setattr(Nvrtc, "load", lambda: Nvrtc(loaded.name, loaded.identity + " patch"))
            after = path()
        case "keep":
            after = path(settings=settings.model_copy(update={"keep": ("cu",)}))
        case "kernels":
            after = path(kernels=("k", "k2"))
        case "format":
            monkeypatch.setattr(cache_room, "VERSION", cache_room.VERSION + 1)
            after = path()
    assert after != before


def test_key_is_unambiguous() -> None:
    assert cache_room.key("ab", "c") != cache_room.key("a", "bc")
    assert cache_room.key({"a": "1", "b": "2"}) == cache_room.key({"b": "2", "a": "1"})


def damage_flip(entry: Path) -> None:
    data = bytearray((entry / "kernel.cubin").read_bytes())
    data[len(data) // 2] ^= 1
    (entry / "kernel.cubin").write_bytes(data)


def damage_truncate(entry: Path) -> None:
    (entry / "manifest.json").write_text("{")


def damage_empty(entry: Path) -> None:
    (entry / "manifest.json").write_text("{}")


def damage_remove(entry: Path) -> None:
    (entry / "report.json").unlink()


def damage_report(entry: Path) -> None:
    report = json.loads((entry / "report.json").read_text())
    report["kernels"]["k"]["spill_store_bytes"] = 1
    (entry / "report.json").write_text(json.dumps(report))


def damage_manifest_folder(entry: Path) -> None:
    (entry / "manifest.json").unlink()
    (entry / "manifest.json").mkdir()


def damage_file_folder(entry: Path) -> None:
    (entry / "kernel.cubin").unlink()
    (entry / "kernel.cubin").mkdir()


def damage_entry_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("")


def damage_entry_link(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.symlink_to("nowhere")


def damage_unlisted(name: str) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        manifest = json.loads((entry / "manifest.json").read_text())
        del manifest[name]
        (entry / "manifest.json").write_text(json.dumps(manifest))
        (entry / name).unlink()

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        damage_flip,
        damage_truncate,
        damage_empty,
        damage_remove,
        damage_report,
        damage_manifest_folder,
        damage_file_folder,
        damage_entry_file,
        damage_entry_link,
        damage_unlisted("report.json"),
        damage_unlisted("kernel.cubin"),
    ],
)
def test_damaged_entry_is_set_aside_and_rebuilt(damage: Callable[[Path], None], settings: Settings) -> None:
    cold = one(settings)
    cubin = cold.path.read_bytes()
    damage(cold.path.parent)
    again = one(settings)
    assert not again.cached and again.path == cold.path and again.path.read_bytes() == cubin
    assert again.kernels == cold.kernels
    assert len(list((settings.cache_dir / "quarantine").iterdir())) == 1
    assert one(settings).cached


BUILDER = """
import sys, time
from pathlib import Path
from megagen.compile.cache import Cache
root = Path(sys.argv[1])
def build():
    with (root / "builds").open("a") as f: f.write("x")
    time.sleep(0.3)
    return {"a": b"1" * 100_000}
entry, cached = Cache(root).fetch("k" * 64, build)
assert (entry / "a").read_bytes() == b"1" * 100_000
print(cached)
"""


def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(resources.__file__).parents[1])}
    command = [sys.executable, "-c", BUILDER, str(tmp_path)]
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = sorted(r.communicate(timeout=60)[0].strip() for r in runs)
    assert said == ["False", "True", "True", "True"] and (tmp_path / "builds").read_text() == "x"


def test_concurrent_threads_build_once(tmp_path: Path) -> None:
    builds: list[int] = []

    def build() -> dict[str, bytes]:
        builds.append(1)
        return {"a": b"1"}

    with ThreadPoolExecutor(8) as pool:
        fetched = list(pool.map(lambda _: Cache(tmp_path).fetch("k", build), range(8)))
    assert len(builds) == 1 and sum(cached for _, cached in fetched) == 7


def test_killed_writer_leaves_no_entry_and_its_staging_is_reused(tmp_path: Path) -> None:
    staging = tmp_path / "staging" / "k"
    staging.mkdir(parents=True)
    (staging / "a").write_bytes(b"half")
    entry, cached = Cache(tmp_path).fetch("k", lambda: {"a": b"whole"})
    assert not cached and (entry / "a").read_bytes() == b"whole" and not staging.exists()


def test_shelves_keep_the_newest(settings: Settings) -> None:
    root = settings.cache_dir
    for age in range(1, 31):
        for shelf in ("failed", "quarantine"):
            old = root / shelf / f"{age:02}"
            old.mkdir(parents=True)
            (old / "log.txt").write_text("")
            os.utime(old, times=(time.time() - 60 * age,) * 2)
    with pytest.raises(CompileError) as e:
        one(settings, BROKEN)
    failed = Path(e.value.render().rsplit("full log: ")[-1].strip())
    os.utime(failed, times=(0, 0))
    (root / "failed" / "30").mkdir()
    os.utime(root / "failed" / "30", times=(1, 1))
    with pytest.raises(CompileError):
        one(settings, BROKEN)
    assert {p.name for p in (root / "failed").iterdir()} == {failed.name, *(f"{a:02}" for a in range(1, 20))}

    entry = one(settings).path.parent
    damage_truncate(entry)
    os.utime(entry, times=(0, 0))
    assert not one(settings).cached
    left = {p.name for p in (root / "quarantine").iterdir()}
    aside = {n for n in left if n.startswith(entry.name)}
    assert len(aside) == 1 and left - aside == {f"{a:02}" for a in range(1, 20)}


def test_staging_of_the_long_dead_goes_and_that_of_the_living_stays(tmp_path: Path) -> None:
    for name, hours in {"dead": 25, "alive": 23}.items():
        (tmp_path / "staging" / name).mkdir(parents=True)
        os.utime(tmp_path / "staging" / name, times=(time.time() - 3600 * hours,) * 2)
    (tmp_path / "staging" / "k").write_text("a file in the way")
    assert (Cache(tmp_path).fetch("k", lambda: {"a": b"1"})[0] / "a").read_bytes() == b"1"
    assert [p.name for p in (tmp_path / "staging").iterdir()] == ["alive"]


def test_builder_may_fail_without_a_trace(tmp_path: Path) -> None:
    def fail() -> dict[str, bytes]:
        raise OSError(errno.ENOSPC, "not the cache's trouble")

    with pytest.raises(OSError, match="not the cache's"):
        Cache(tmp_path).fetch("k", fail)
    assert Cache(tmp_path).fetch("k", lambda: {"a": b"1"})[1] is False


@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_full_or_read_only_disk(call: str, code: int, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else Path, call, fail)
        with pytest.raises(CacheError) as e:
            one(settings)
    assert os.strerror(code) in e.value.message and "MEGAGEN_CACHE_DIR" in (e.value.hint or "")
    left = [p for p in settings.cache_dir.rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert left == [] and list(settings.cache_dir.glob("staging/*")) == []
    assert not one(settings).cached, "and the next run with room works"


def test_cache_dir_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot"):
        one(Settings(cache_dir=tmp_path / "file"))


def test_cache_off_touches_no_cache(settings: Settings) -> None:
    off = settings.model_copy(update={"cache": False})
    a, b = one(off), one(off)
    assert not a.cached and not b.cached and a.path != b.path and a.path.read_bytes() == b.path.read_bytes()
    with pytest.raises(CompileError, match="nowhere") as e:
        one(off, BROKEN)
    folder = Path(e.value.render().rsplit("full log: ")[-1].strip())
    assert (folder / UNIT).read_text() == BROKEN
    shutil.rmtree(folder)
    assert not settings.cache_dir.exists()


def test_import_is_light() -> None:
    """The command line must start fast, and compile must run without torch."""
    code = (
        "import sys, megagen.compile; print([m for m in ('torch', 'cuda', 'jinja2', 'filelock') if m in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": str(Path(resources.__file__).parents[1])}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
