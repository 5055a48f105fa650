"""Figures of compiled kernels, from three witnesses: ptxas's log, the cubin's ELF sections, the disassembly."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from megagen.compile.artifact import KernelReport
from megagen.errors import CompileError


def report(cubin: bytes, log: str, sass: str | None, kernels: Sequence[str]) -> dict[str, KernelReport]:
    """A report a kernel. ``sass`` is :func:`disassemble`'s text. Raises :class:`CompileError` if a kernel is absent."""
    text, usage = sections(cubin), ptxas(log)
    opcodes = None if sass is None else count_opcodes(sass)
    reports = {}
    for name in kernels:
        if f".text.{name}" not in text or name not in usage:
            there = ", ".join(sorted(s.removeprefix(".text.") for s in text if s.startswith(".text.")))
            raise CompileError(f"the emitted code has no kernel {name!r}; it has: {there or 'none'}")
        counts = None if opcodes is None else opcodes.get(name, Counter())
        reports[name] = KernelReport(
            registers=usage[name].registers,
            spill_store_bytes=usage[name].spill_store,
            spill_load_bytes=usage[name].spill_load,
            stack_bytes=usage[name].stack,
            shared_bytes=usage[name].shared,
            code_bytes=len(text[f".text.{name}"]),
            mma=None if counts is None else {op: n for op, n in sorted(counts.items()) if is_mma(op)},
            traps=None if counts is None else sum(n for op, n in counts.items() if is_trap(op)),
            warnings=tuple(usage[name].warnings),
        )
    return reports


# -- ptxas ---------------------------------------------------------------------------------------------------------


@dataclass
class Usage:
    registers: int = 0
    stack: int = 0
    spill_store: int = 0
    spill_load: int = 0
    shared: int = 0
    warnings: tuple[str, ...] = ()


ENTRY = re.compile(r"Compiling entry function '([^']+)'")
FUNCTION = re.compile(r"Function properties for (\S+)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
STACK = re.compile(r"(\d+) bytes cumulative stack size")
SHARED = re.compile(r"(\d+) bytes smem")
WARNING = re.compile(r"^ptxas .*(?:\bwarning\b|Performance Loss)")


def ptxas(log: str) -> dict[str, Usage]:
    """What ``ptxas -v`` says of each kernel.

    What it does not tie to a kernel (spills of functions that were not inlined, complaints that name none)
    counts for every kernel.
    """
    kernels: dict[str, Usage] = {}
    shared = Usage()  # of functions that are not kernels
    kernel = current = shared
    for line in log.splitlines():
        if m := ENTRY.search(line):
            kernel = current = kernels.setdefault(m[1], Usage())
        elif m := FUNCTION.search(line):
            current = kernels.get(m[1], shared)
        elif m := FRAME.search(line):
            frame, stores, loads = map(int, m.groups())
            current.stack = max(current.stack, frame)
            current.spill_store += stores
            current.spill_load += loads
        elif m := USED.search(line):
            kernel.registers = int(m[1])
            kernel.stack = max(kernel.stack, _int(STACK, line))
            kernel.shared = _int(SHARED, line)
    complaints = [line.strip() for line in log.splitlines() if WARNING.search(line)]
    about = {c: {k for k in kernels if re.search(rf"\b{re.escape(k)}\b", c)} for c in complaints}
    for name, usage in kernels.items():
        usage.spill_store += shared.spill_store
        usage.spill_load += shared.spill_load
        usage.warnings = tuple(c for c, named in about.items() if name in named or not named)
    return kernels


def _int(pattern: re.Pattern[str], line: str) -> int:
    return int(m[1]) if (m := pattern.search(line)) else 0


# -- ELF -----------------------------------------------------------------------------------------------------------

NOBITS = 8  # a section that takes no room in the file


def sections(cubin: bytes) -> dict[str, bytes]:
    """Sections of an ELF64 file by name. ``.text.<kernel>`` is a kernel's machine code."""
    return {name: cubin[offset : offset + size] for name, (offset, size) in spans(cubin).items()}


def spans(cubin: bytes) -> dict[str, tuple[int, int]]:
    """Offset and bytes of each section; none of those that only reserve memory."""
    if cubin[:5] != b"\x7fELF\x02":
        raise CompileError("the compiler's output is not a cubin (ELF64)")
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    table = [struct.unpack_from("<IIQQQQ", cubin, start + size * i) for i in range(count)]
    _, _, _, _, strings, length = table[names]
    pool = cubin[strings : strings + length]
    return {
        pool[name : pool.index(b"\0", name)].decode(): (offset, 0 if kind == NOBITS else length)
        for name, kind, _, _, offset, length in table
    }


# -- SASS ----------------------------------------------------------------------------------------------------------

SECTION = re.compile(r"^\s*\.section\s+([^,\s]+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


def find_disassembler() -> str | None:
    """nvdisasm: from PyPI (nvidia-cuda-nvdisasm), conda or a toolkit, else on PATH; None if there is none."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility as find
    except ImportError:
        return shutil.which("nvdisasm")
    found: str | None = find("nvdisasm")
    return found or shutil.which("nvdisasm")


def disassemble(cubin: bytes, nvdisasm: str) -> str:
    """SASS of all kernels. Raises :class:`CompileError` if nvdisasm does not know the cubin (it is too old)."""
    with NamedTemporaryFile(prefix="megagen-", suffix=".cubin") as f:
        Path(f.name).write_bytes(cubin)
        said = subprocess.run([nvdisasm, "-c", f.name], capture_output=True, text=True, errors="replace")
    if said.returncode != 0:
        raise CompileError(
            f"{nvdisasm} cannot read the cubin: {(said.stderr or said.stdout).strip()[:200]}",
            hint="install nvidia-cuda-nvdisasm as new as the compiler, or remove it to do without SASS figures",
        )
    return said.stdout


def count_opcodes(sass: str) -> dict[str, Counter[str]]:
    """Kernel -> opcode with modifiers -> instructions."""
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in sass.splitlines():
        if m := INSTRUCTION.match(line):
            current[m[1]] += 1
        elif m := SECTION.match(line):
            current = counts.setdefault(m[1].removeprefix(".text."), Counter())
    return counts


def is_mma(opcode: str) -> bool:
    """HMMA, HGMMA, IMMA, QMMA, OMMA, UTCHMMA, UTCOMMA, …: all tensor-core instructions, and only they, end so."""
    return opcode.split(".")[0].endswith("MMA")


def is_trap(opcode: str) -> bool:
    """BPT.TRAP (``__trap``, or what a compiler puts where a feature is missing), BPT.INT (``__brkpt``)."""
    return opcode.split(".")[0] == "BPT"
