"""What the two compilers have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megagen.settings import Settings

UNIT = "megagen.cu"
"""The name that compilers give the emitted text in messages; failed sources are saved under it."""

KNOWN = ("sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
"""Architectures that the code can be compiled for: it needs architecture-specific features (``setmaxnreg``)."""

TOKEN = re.compile(
    r"""[ \t]*(//[^\n\\]*$)             # the comment to drop; one with a backslash may go on in the next line
    | //[^\n]* | /\*.*?\*/
    | R"([^\s(]*)\(.*?\)\2" | "(?:\\.|[^"\\\n])*"
    | \b\d(?:'?[\w.])* | '(?:\\.|[^'\\\n])*'  # numbers, lest 1'000 open a character""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)


def without_comments(source: str) -> str:
    """C++ text less its ``//`` comments. Lines stay, and with them every number that a message may cite."""
    return TOKEN.sub(lambda m: m[0] if m[1] is None else "", source)


@dataclass(frozen=True)
class Output:
    """``ptx`` is there only if it was asked for."""

    cubin: bytes
    log: str
    ptx: bytes | None = None


class Refused(Exception):
    """The compiler ran and said no; the argument is its log."""


class Compiler(Protocol):
    """``name``: what people read ("nvrtc 13.5"). ``identity``: what the cache trusts; equal only for equal code."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    def run(self, source: str, headers: Mapping[str, str], options: Sequence[str], *, ptx: bool) -> Output:
        """Compile to a cubin. Thread-safe. Raises :class:`Refused`."""
        ...


def options(arch: str, defines: Mapping[str, str]) -> tuple[str, ...]:
    """The options, in the long form that NVRTC and nvcc share.

    Contraction is the author's choice (explicit ``fmaf``), hence ``--fmad=false``.
    """
    macros = (f"--define-macro={k}={v}" for k, v in sorted(defines.items()))
    return ("--std=c++20", f"--gpu-architecture={arch}", "--fmad=false", "--ptxas-options=-v", *macros)


def pick(settings: Settings) -> Compiler:
    """The compiler that the settings name. Raises :class:`~megagen.errors.CompileError` if it is not there."""
    if settings.compiler == "nvcc":
        from megagen.compile.nvcc import Nvcc

        return Nvcc.find(settings.nvcc)
    from megagen.compile.nvrtc import Nvrtc

    return Nvrtc.load()
