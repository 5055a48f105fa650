"""From emitted text to cubins on disk."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from itertools import dropwhile
from pathlib import Path

from megagen import resources
from megagen.compile.artifact import Artifact
from megagen.compile.cache import Cache, key
from megagen.compile.compiler import KNOWN, UNIT, Compiler, Refused, options, pick, without_comments
from megagen.compile.report import disassemble, find_disassembler, report
from megagen.errors import CompileError, did_you_mean
from megagen.settings import Settings

CUBIN, REPORT = "kernel.cubin", "report.json"
ERROR = re.compile(r"\b(?:error|fatal)\b\s*(?:#\S+)?\s*:")
NOTE = re.compile(r"\bnote #\S+:")  # says which concept an error is about
SHOWN = 5


def compile_source(
    source: str,
    *,
    kernels: Sequence[str],
    archs: Sequence[str],
    settings: Settings,
    defines: Mapping[str, str] | None = None,
) -> dict[str, Artifact]:
    """Compile one translation unit for each of ``archs`` ("sm_90a") and report on its ``kernels``.

    ``source`` may include whatever :func:`megagen.resources.headers` has. Architectures compile side by side.
    An interrupt leaves at once; what compiles then runs on in its thread, since no compiler can be stopped, and is
    dropped.

    Raises :class:`CompileError` (an architecture not in ``KNOWN``, no compiler, or it refused: first error lines,
    path of source and full log) and :class:`~megagen.errors.CacheError`.
    """
    for arch in archs:
        if arch not in KNOWN:
            message = f"cannot compile for {arch!r}: the code needs architecture-specific features (setmaxnreg)"
            raise CompileError(message, hint=did_you_mean(arch, list(KNOWN)))
    unit = _Unit(source, kernels, defines or {}, settings)
    archs = list(dict.fromkeys(archs))
    pool = ThreadPoolExecutor(max(1, len(archs)))
    try:
        return dict(zip(archs, pool.map(unit.artifact, archs), strict=True))
    except KeyboardInterrupt:
        unit.abandon()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        pool.shutdown(wait=not unit.abandoned)


class _Unit:
    """One source, ready to be compiled for any architecture."""

    def __init__(self, source: str, kernels: Sequence[str], defines: Mapping[str, str], settings: Settings) -> None:
        self.source, self.kernels, self.defines, self.settings = source, list(kernels), dict(defines), settings
        self.abandoned = False
        self.headers = resources.headers()
        self.compiler: Compiler = pick(settings)
        self.nvdisasm = find_disassembler()
        if "sass" in settings.keep and self.nvdisasm is None:
            raise CompileError("MEGAGEN_KEEP=sass needs nvdisasm", hint="pip install nvidia-cuda-nvdisasm")
        self.cache = open_cache(settings)

    def abandon(self) -> None:
        """Nobody waits any more: store nothing of what is still compiling."""
        self.abandoned = True
        if not self.settings.cache:
            shutil.rmtree(self.cache.root, ignore_errors=True)

    def artifact(self, arch: str) -> Artifact:
        flags = options(arch, self.defines)
        keep = self.settings.keep
        # whatever decides about a byte of the entry; nvdisasm because the report of a machine without it lacks figures
        name = key(
            self.source if "cu" in keep else without_comments(self.source),
            self.headers,
            flags,
            self.compiler.identity,
            self.kernels,
            keep,
            self.nvdisasm is not None,
        )
        files = (CUBIN, REPORT, *(f"kernel.{k}" for k in keep))
        folder, cached = self.cache.fetch(name, partial(self._build, arch, flags, name), files)
        stored = Artifact.model_validate_json((folder / REPORT).read_text("utf-8"))
        return stored.model_copy(update={"path": folder / CUBIN, "cached": cached})

    def _build(self, arch: str, flags: Sequence[str], name: str) -> dict[str, bytes]:
        """The files of the cache entry."""
        keep = self.settings.keep
        try:
            out = self.compiler.run(self.source, self.headers, flags, ptx="ptx" in keep)
        except Refused as e:
            if self.abandoned:
                raise CancelledError from None
            who = f"{self.compiler.name} refused the code for {arch}"
            raise refusal(who, str(e), self.source, name, self.cache, self.settings) from None
        if self.abandoned:
            raise CancelledError
        sass = None if self.nvdisasm is None else disassemble(out.cubin, self.nvdisasm)
        artifact = Artifact(
            arch=arch,
            path=Path(CUBIN),
            compiler=self.compiler.name,
            cached=False,
            log=out.log,
            kernels=report(out.cubin, out.log, sass, self.kernels),
        )
        files = {CUBIN: out.cubin, REPORT: artifact.model_dump_json(indent=1).encode()}
        extra = {"cu": self.source.encode(), "ptx": out.ptx or b"", "sass": (sass or "").encode()}
        return files | {f"kernel.{k}": extra[k] for k in keep}


def open_cache(settings: Settings) -> Cache:
    """The cache that the settings ask for; one that is off lives in a folder that ends with the process."""
    root = settings.cache_dir
    if not settings.cache:
        root = Path(tempfile.mkdtemp(prefix="megagen-"))
        atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Cache(root)


def refusal(who: str, log: str, source: str, name: str, cache: Cache, settings: Settings) -> CompileError:
    """The error of a compiler's ``log``: its first errors, and where ``source`` and full log are kept under ``name``.

    A full disk does not hide the errors.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    marked = [line for line in lines if ERROR.search(line) or NOTE.search(line)]
    errors = list(dropwhile(NOTE.search, marked)) or lines or ["no message"]
    # a cache that is off lives in a folder that ends with the process
    folder = cache.root / "failed" / name[:16] if settings.cache else None
    try:
        folder = folder or Path(tempfile.mkdtemp(prefix="megagen-failed-"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNIT).write_text(source, "utf-8")
        (folder / "log.txt").write_text(log + "\n", "utf-8")
        os.utime(folder)  # else an old one that fails again is the first to be trimmed
        cache.trim()
        where = f"source and full log: {folder}"
    except OSError as e:
        where = f"source and full log could not be written to {folder}: {e.strerror or e}"
    more = [f"{len(errors) - SHOWN} more"] if len(errors) > SHOWN else []
    notes = [*errors[1:SHOWN], *more, where]
    return CompileError(f"{who}: {errors[0]}", notes=tuple((n, None) for n in notes))
