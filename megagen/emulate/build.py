"""From emitted text to a shared library for the CPU."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from megagen import resources
from megagen.compile.build import open_cache, refusal
from megagen.compile.cache import Cache, key
from megagen.compile.compiler import UNIT, Refused, without_comments
from megagen.errors import CompileError
from megagen.settings import Settings

# Contraction would change bits. An alias through another type is common in device code, and so are pragmas that
# only CUDA knows. Two libraries of one process must not share their statics (-fno-gnu-unique, -Bsymbolic).
FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas",
    "-ffile-prefix-map=include/=",
)  # fmt: skip
GCC_FLAGS = ("-fno-gnu-unique",)
LINK_FLAGS = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,noexecstack")
LIBRARY, LOG, INCLUDE = "emulated.so", "log.txt", "include"
PTX, TWINS = "megagen/ptx/", f"{resources.EMULATE}ptx/"
BUILTINS = f"{resources.EMULATE}builtins.cuh"
REGISTER = "MEGAGEN_EMULATED"  # a macro of the built-ins, which makes a kernel known to the engine
HINT = "install g++ 12 or clang++ 16, or name one: MEGAGEN_CXX=/path/to/c++"


def compile_library(
    source: str,
    *,
    kernels: Sequence[str],
    settings: Settings,
    defines: Mapping[str, str] | None = None,
    beside: Sequence[tuple[str, Sequence[str]]] = (),
) -> Path:
    """The library in which ``kernels`` of a CUDA text run on the CPU, for :class:`megagen.emulate.engine.Engine`.

    ``beside``: further texts, each with its kernels, whose names are all different: one engine then launches any.
    ``source`` may include whatever :func:`megagen.resources.headers` has. The engine's own code is compiled once for
    all texts. Raises :class:`CompileError` (not x86-64 Linux, no compiler, or it refused: first error lines, path of
    source and full log) and :class:`~megagen.errors.CacheError`.
    """
    refuse_machine()
    compiler, cache = Compiler.find(settings.cxx), open_cache(settings)
    texts = ((source, tuple(kernels)), *((text, tuple(names)) for text, names in beside))
    return _Unit(texts, dict(defines or {}), compiler, cache, settings).library()


def refuse_machine() -> None:
    """Raises CompileError on anything but x86-64 Linux: the engine switches stacks and reserves memory its way."""
    system, machine = sys.platform, platform.machine()
    if system != "linux" or machine.lower() not in ("x86_64", "amd64"):
        raise CompileError(f"the emulator runs on x86-64 Linux only, and this is {system} on {machine}")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler. ``identity``: all that it says of its version."""

    path: str
    name: str
    identity: str

    @classmethod
    def find(cls, path: Path) -> Compiler:
        """Look it up and ask for its version. Raises :class:`CompileError` if there is none or it will not say."""
        if (found := shutil.which(path)) is None:
            raise CompileError(f"no compiler: there is no C++ compiler at {str(path)!r}", hint=HINT)
        said = subprocess.run([found, "--version"], capture_output=True, text=True, errors="replace")
        if said.returncode != 0 or not said.stdout.strip():
            detail = (said.stderr or said.stdout).strip().splitlines()[:1]
            raise CompileError(f"no compiler: {found} --version fails: {detail}", hint=HINT)
        return cls(str(Path(found).absolute()), said.stdout.splitlines()[0].strip(), said.stdout)

    @property
    def flags(self) -> tuple[str, ...]:
        return FLAGS if "clang" in self.identity.lower() else FLAGS + GCC_FLAGS

    def run(self, files: Mapping[str, str | bytes], arguments: Sequence[str], out: str) -> tuple[bytes, str]:
        """What it makes of ``files`` (name -> content, in a folder of their own), and its log. Raises Refused."""
        with TemporaryDirectory(prefix="megagen-cxx-") as folder:
            root = Path(folder)
            for name, content in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
            env = os.environ | {"TMPDIR": folder, "LC_ALL": "C"}
            command = [self.path, *arguments, "-o", out]
            said = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, errors="replace")
            log = (said.stdout + said.stderr).strip()
            if said.returncode != 0:
                raise Refused(log or f"{self.name} exited with {said.returncode}")
            return (root / out).read_bytes(), log


def composed(headers: Mapping[str, str], emulator: Mapping[str, str]) -> dict[str, str]:
    """The header tree that the CPU compiles: every ``megagen/ptx/`` wrapper is replaced by its twin."""
    tree = {name: text for name, text in headers.items() if not name.startswith(PTX)} | dict(emulator)
    for name in headers:
        if name.startswith(PTX):
            twin = TWINS + name.removeprefix(PTX)
            tree[name] = emulator.get(twin, f'#error "{name} cannot be emulated: there is no {twin}"\n')
    return tree


@dataclass(frozen=True)
class _Unit:
    """Texts with the names of their kernels, ready to be compiled."""

    texts: Sequence[tuple[str, tuple[str, ...]]]
    defines: dict[str, str]
    compiler: Compiler
    cache: Cache
    settings: Settings

    def library(self) -> Path:
        headers, emulator = resources.headers(), resources.emulator_headers()
        sources = resources.emulator_sources()
        # whatever decides about a byte of the library; names of kernels because they end the text
        name = key(
            "emulated",
            *(part for source, kernels in self.texts for part in (without_comments(source), kernels)),
            self.defines,
            headers,
            emulator,
            sources,
            (*self.compiler.flags, *LINK_FLAGS),
            self.compiler.identity,
            platform.machine(),
        )
        build = partial(self._build, name, composed(headers, emulator), emulator, sources)
        folder, _ = self.cache.fetch(name, build, (LIBRARY,))
        return folder / LIBRARY

    def _build(
        self, name: str, tree: Mapping[str, str], emulator: Mapping[str, str], sources: Mapping[str, str]
    ) -> dict[str, bytes]:
        with ThreadPoolExecutor() as pool:
            engine = pool.submit(self._engine, emulator, sources, pool)
            made = pool.map(lambda text: self._kernel(text[0], text[1], tree, name), self.texts)
            objects, logs = dict[str, bytes](), list[str]()
            for i, (code, log) in enumerate(made):
                objects[f"kernel{i}.o"] = code
                logs.append(log)
            objects |= engine.result()
        try:
            library, said = self.compiler.run(objects, [*LINK_FLAGS, *objects], LIBRARY)
        except Refused as e:
            raise self._refusal("could not link the emulated kernel", str(e), self.texts[0][0], name) from None
        return {LIBRARY: library, LOG: "\n".join((*logs, said)).encode()}

    def _kernel(self, source: str, kernels: Sequence[str], tree: Mapping[str, str], name: str) -> tuple[bytes, str]:
        """Of the text with the built-ins of CUDA before it and each kernel's registration after it."""
        registered = "".join(f"{REGISTER}({k})\n" for k in kernels)
        text = f'#include <{BUILTINS}>\n#line 1 "{UNIT}"\n{source}\n#line 1 "registrations"\n{registered}'
        return self._compile(UNIT, text, tree, [f"-D{k}={v}" for k, v in self.defines.items()], name, source)

    def _engine(
        self, emulator: Mapping[str, str], sources: Mapping[str, str], pool: ThreadPoolExecutor
    ) -> dict[str, bytes]:
        """The engine's objects by file name, from the cache or compiled side by side."""
        files = [n for n in sources if n.endswith(".cpp")]
        if not files:
            where = resources.templates() / "emulate"
            raise CompileError(f"the emulator's engine is missing from {where}", hint="reinstall megagen")
        name = key("engine", emulator, sources, self.compiler.flags, self.compiler.identity, platform.machine())
        objects = [f"{Path(f).stem}.engine.o" for f in files]

        def build() -> dict[str, bytes]:
            shared = {n: t for n, t in sources.items() if n not in files}
            jobs = [pool.submit(self._compile, f, sources[f], {**emulator, **shared}, [], name) for f in files]
            return {o: job.result()[0] for o, job in zip(objects, jobs, strict=True)}

        folder, _ = self.cache.fetch(name, build, objects)
        return {o: (folder / o).read_bytes() for o in objects}

    def _compile(
        self, file: str, text: str, tree: Mapping[str, str], more: Sequence[str], name: str, shown: str | None = None
    ) -> tuple[bytes, str]:
        files = {file: text, **{f"{INCLUDE}/{n}": t for n, t in tree.items()}}
        arguments = [*self.compiler.flags, *more, "-I", INCLUDE, "-x", "c++", "-c", file]
        try:
            return self.compiler.run(files, arguments, "out.o")
        except Refused as e:
            what = "the code for the CPU" if file == UNIT else f"the emulator's {file}"
            raise self._refusal(f"refused {what}", str(e), text if shown is None else shown, name) from None

    def _refusal(self, what: str, log: str, source: str, name: str) -> CompileError:
        return refusal(f"{self.compiler.name} {what}", log, source, name, self.cache, self.settings)
