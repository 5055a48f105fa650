"""NVRTC through cuda.bindings: a library from PyPI, headers from memory, no files, no GPU.

NVRTC lets go of the GIL, so threads compile architectures side by side; its front end holds a lock of its own,
but optimiser and ptxas, where the time goes, run in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from megagen.compile.compiler import UNIT, Output, Refused
from megagen.errors import CompileError

HINT = "pip install cuda-bindings nvidia-cuda-nvrtc, or set MEGAGEN_COMPILER=nvcc"


@dataclass(frozen=True)
class Nvrtc:
    name: str
    identity: str

    @classmethod
    def load(cls) -> Nvrtc:
        """Load the library. Raises :class:`CompileError` if it or its bindings are missing."""
        try:
            from cuda.bindings import nvrtc
            from cuda.pathfinder import load_nvidia_dynamic_lib

            library = load_nvidia_dynamic_lib("nvrtc").abs_path
            major, minor = _call(nvrtc.nvrtcVersion)
        except (ImportError, RuntimeError) as e:  # pathfinder's "not found" is a RuntimeError
            raise CompileError(f"no compiler: NVRTC cannot be loaded: {first_line(e)}", hint=HINT) from e
        name = f"nvrtc {major}.{minor}"
        return cls(name, f"{name} {fingerprint(Path(library))}" if library else name)

    def run(self, source: str, headers: Mapping[str, str], options: Sequence[str], *, ptx: bool) -> Output:
        from cuda.bindings import nvrtc

        names, texts = [n.encode() for n in headers], [t.encode() for t in headers.values()]
        # Beside a driver NVRTC keeps what it compiled, and then says nothing of registers and spills.
        asked = [*(o.encode() for o in options), b"--no-cache"]
        program = _call(nvrtc.nvrtcCreateProgram, source.encode(), UNIT.encode(), len(names), texts, names)
        try:
            (status,) = nvrtc.nvrtcCompileProgram(program, len(asked), asked)
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            text = log.rstrip(b"\0\n ").decode(errors="replace")
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise Refused(text or status.name)
            cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
            kept = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0") if ptx else None
            return Output(cubin, text, kept)
        finally:
            nvrtc.nvrtcDestroyProgram(program)


def fingerprint(library: Path) -> str:
    """Tells patch releases apart, which NVRTC's own version does not: size and first page, which holds the build id."""
    with library.open("rb") as f:
        head = f.read(4096)
    return sha256(head + str(library.stat().st_size).encode()).hexdigest()[:16]


def first_line(e: BaseException) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0]


def _call(function: Callable[..., Any], *args: object) -> Any:
    """Call a binding, check its status, return what follows it: nothing, one value or a list."""
    status, *values = function(*args)
    if status.value != 0:
        raise CompileError(f"{function.__name__} failed: {status.name}")
    return values[0] if len(values) == 1 else values


def _read(size: Callable[..., Any], fill: Callable[..., Any], program: object) -> bytes:
    data = bytearray(_call(size, program))
    _call(fill, program, data)
    return bytes(data)
