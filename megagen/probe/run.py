"""Runs cases one by one: what one of them trips over does not stop the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from megagen.errors import MegagenError
from megagen.machines import Figure
from megagen.probe.case import Case, figure
from megagen.probe.gpu import Gpu, Library
from megagen.runtime import driver
from megagen.settings import Settings


@dataclass(frozen=True)
class Outcome:
    """Of a case: its figures, or why there are none. ``error``: what stopped it; None if this GPU cannot run it."""

    case: Case
    figures: Mapping[str, Figure]
    seconds: float = 0.0
    reason: str = ""
    error: Exception | None = None


@dataclass(frozen=True)
class Device:
    """The GPU, as the driver describes it. Rates in bytes/s."""

    name: str
    arch: str
    sms: int
    shared_bytes: int
    registers: int
    l2_bytes: int
    rated_bytes_per_s: float
    driver: str


@dataclass(frozen=True)
class Report:
    """``others``: what else may use the GPU, in words."""

    device: Device
    outcomes: Sequence[Outcome]
    others: str = ""

    @property
    def figures(self) -> dict[str, Figure]:
        return {name: found for outcome in self.outcomes for name, found in outcome.figures.items()}

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    @property
    def skipped(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.reason and outcome.error is None]

    @property
    def noisy(self) -> list[str]:
        return [name for name, found in self.figures.items() if found.noisy]


def steps(cases: Sequence[Case]) -> int:
    """How often :func:`probe` reports progress."""
    return len(cases) + len(_families(cases))


def probe(
    cases: Sequence[Case], settings: Settings, progress: Callable[[], None], *, device: int = 0, quick: bool = False
) -> Report:
    """Compile what the cases need, then run them in order. Raises DeviceError without a usable GPU."""
    before = processes()
    with ExitStack() as stack:
        gpu = stack.enter_context(Gpu(device, quick=quick))
        gpu.library = Library(_families(cases), gpu.arch, settings, progress)
        if any(case.gpus > 1 for case in cases):
            _pair(gpu, stack)
        gpu.warm()
        outcomes: list[Outcome] = []
        dead = ""
        for case in cases:
            outcomes.append(Outcome(case, {}, reason=dead, error=MegagenError(dead)) if dead else attempt(case, gpu))
            if outcomes[-1].error is not None and not dead and not _alive(gpu):
                dead = f"not run: the GPU stopped in {case.name}"
            progress()
        facts = Device(
            name=gpu.name,
            arch=gpu.arch,
            sms=gpu.sms,
            shared_bytes=gpu.shared,
            registers=gpu.registers,
            l2_bytes=gpu.l2,
            rated_bytes_per_s=gpu.rated_bytes_per_s,
            driver=driver.version(),
        )
        return Report(facts, outcomes, others(before, gpu.uuid))


def attempt(case: Case, gpu: Gpu) -> Outcome:
    """Run one case. Whatever it raises is its outcome."""
    if case.gpus > 1 and gpu.peer is None:
        return Outcome(case, {}, reason="needs two GPUs that can use each other's memory")
    began = time.perf_counter()
    try:
        gpu.enter()
        figures = {sample.name: figure(sample) for sample in case.measure(gpu)}
    except Exception as error:
        text = (
            error.message if isinstance(error, MegagenError) else f"{type(error).__name__}: {driver.first_line(error)}"
        )
        return Outcome(case, {}, time.perf_counter() - began, text, error)
    return Outcome(case, figures, time.perf_counter() - began)


def _families(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(family for case in cases for family in case.families))


def _pair(gpu: Gpu, stack: ExitStack) -> None:
    """Find a second GPU whose memory the first can use, and the other way round."""
    for other in range(gpu.torch.cuda.device_count()):
        if other == gpu.index or not gpu.reaches(other):
            continue
        peer = stack.enter_context(Gpu(other, quick=gpu.quick))
        peer.library = gpu.library
        gpu.befriend(peer)
        break
    gpu.enter()


def _alive(gpu: Gpu) -> bool:
    try:
        gpu.finish("the GPU")
    except MegagenError:
        return False
    return True


def processes() -> set[tuple[str, int]]:
    """(GPU's id, process) of all processes that compute on a GPU, as nvidia-smi sees them; none where it does not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return set()
    command = [tool, "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return set()
    rows = (line.split(",") for line in said.splitlines())
    return {(r[0].strip(), int(r[1])) for r in rows if len(r) == 2 and r[1].strip().isdigit()}


def others(before: set[tuple[str, int]], uuid: str) -> str:
    """What else was on the GPU before this process used it, in words."""
    found = {pid for gpu, pid in before if pid != os.getpid() and uuid and uuid in gpu}
    return f"used by other processes: {', '.join(map(str, sorted(found)))}" if found else ""
