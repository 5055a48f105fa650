"""nvcc, for those who have a CUDA toolkit and want its ptxas or a host preprocessor's view."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from megagen.compile.compiler import UNIT, Output, Refused
from megagen.errors import CompileError


@dataclass(frozen=True)
class Nvcc:
    path: str
    name: str
    identity: str

    @classmethod
    def find(cls, path: Path) -> Nvcc:
        """Look nvcc up and ask for its version. Raises :class:`CompileError` if there is none or it will not say."""
        hint = "put nvcc on PATH, set MEGAGEN_NVCC=/path/to/nvcc, or use MEGAGEN_COMPILER=nvrtc, which needs no toolkit"
        if (found := shutil.which(path)) is None:
            raise CompileError(f"no compiler: there is no nvcc at {str(path)!r}", hint=hint)
        said = subprocess.run([found, "--version"], capture_output=True, text=True)
        if (version := re.search(r"release ([\d.]+)", said.stdout)) is None:
            detail = (said.stderr or said.stdout).strip().splitlines()[:1]
            raise CompileError(f"no compiler: {found} --version does not answer like nvcc: {detail}", hint=hint)
        return cls(str(Path(found).absolute()), f"nvcc {version[1]}", f"nvcc {said.stdout}")

    def run(self, source: str, headers: Mapping[str, str], options: Sequence[str], *, ptx: bool) -> Output:
        with TemporaryDirectory(prefix="megagen-nvcc-") as folder:
            root = Path(folder)
            for name, text in {UNIT: source, **{f"include/{n}": t for n, t in headers.items()}}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, "utf-8")
            keep = ["--keep"] if ptx else []
            command = [self.path, "--cubin", "-I", "include", *options, *keep, "-o", "out.cubin", UNIT]
            # with --keep and an error nvcc forgets a file in the temporary folder: let that be ours
            env = os.environ | {"TMPDIR": folder}
            said = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, errors="replace")
            log = (said.stdout + said.stderr).strip()
            if said.returncode != 0:
                raise Refused(log or f"nvcc exited with {said.returncode}")
            kept = (root / UNIT).with_suffix(".ptx").read_bytes() if ptx else None
            return Output((root / "out.cubin").read_bytes(), log, kept)
