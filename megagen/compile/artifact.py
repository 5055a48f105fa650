"""What a compilation yields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class KernelReport(BaseModel):
    """Figures of one kernel on one architecture: from ptxas, the cubin's ELF sections and the SASS.

    ``mma`` (opcode like ``HMMA.16816.F32.BF16`` -> instructions) and ``traps`` (instructions that end the
    kernel: ``BPT.TRAP`` and its kin) are None where no disassembler could tell.
    Spills include those of functions that were not inlined, ``warnings`` the complaints that name no kernel:
    ptxas does not say whose they are, so they are charged to every kernel of the unit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    registers: int  # 32-bit, a thread
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int  # a thread, with callees
    shared_bytes: int  # static only
    code_bytes: int  # .text.<kernel>, padding included
    mma: Mapping[str, int] | None
    traps: int | None
    warnings: tuple[str, ...] = ()


class Artifact(BaseModel):
    """A cubin on disk. ``log`` is all the compiler said; ``cached``: it came from the cache."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arch: str
    path: Path
    compiler: str
    cached: bool
    log: str
    kernels: Mapping[str, KernelReport]
