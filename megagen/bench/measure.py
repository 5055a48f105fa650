"""Rows of docs/measurements: a figure with all that is needed to judge and to repeat it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from megagen import files
from megagen.bench.timing import Timing
from megagen.errors import MegagenError
from megagen.ir.graph import Frozen, Graph, Routing
from megagen.ir.plan import Plan
from megagen.ops.attention import Attention
from megagen.ops.global_attention import GlobalAttention

PACKAGES = ("megagen", "torch", "cuda-bindings", "nvidia-cuda-nvrtc", "triton")


class Row(Frozen):
    """One figure. ``floor`` and ``spread`` (p10, p90) are in ``unit``; ``ratio`` is value / floor."""

    what: str
    value: float
    unit: str
    floor: float | None
    ratio: float | None
    spread: tuple[float, float] | None
    machine: str
    driver: str
    versions: Mapping[str, str]
    commit: str
    command: str
    date: str
    notes: str = ""


def weight_bytes(plan: Plan, experts: int | None = None) -> int:
    """HBM bytes of one launch: each weight once, of the experts only ``experts`` distinct ones (None: nominal)."""
    routed = {w.parameter for w in plan.weights if w.experts}
    total = 0
    for op in plan.ops:
        scaled = experts is not None and not routed.isdisjoint(op.weights.values())
        total += op.weight_bytes * (experts or 0) // plan.nominal_experts if scaled else op.weight_bytes
    return total


def keys_read(graph: Graph, tokens: int, context: int) -> int:
    """HBM bytes of keys and values that a launch reads: what some of its tokens sees, once."""
    total, numbers = 0, context + tokens
    for op in graph.ops:
        if isinstance(op, Attention | GlobalAttention):
            seen = min(numbers, op.window + tokens - 1) if isinstance(op, Attention) else numbers
            total += 2 * seen * op.kv_heads * op.head_dim * 2
    return total


def bytes_read(graph: Graph, tokens: int, experts: int, context: int) -> int:
    """HBM bytes of a launch of so many tokens on so many distinct experts: weights once, and :func:`keys_read`."""
    routing = Routing(tokens=tokens, experts=experts)
    return sum(op.cost(routing).weight_bytes for op in graph.ops) + keys_read(graph, tokens, context)


def floor_us(plan: Plan, experts: int | None = None) -> float:
    """The least time in µs in which the plan's machine streams a launch's weights. Activations stay in L2."""
    return weight_bytes(plan, experts) / plan.machine.hbm_bytes_per_s * 1e6


def row(
    timing: Timing, *, plan: Plan | None, experts: int | None = None, what: str, command: str, notes: str = ""
) -> Row:
    """The row of a timing on this machine; ``plan`` None has no floor (a baseline that moves other bytes)."""
    floor = None if plan is None else floor_us(plan, experts)
    return figure(timing, floor=floor, unit="µs per layer", what=what, command=command, notes=notes)


def figure(
    timing: Timing, *, floor: float | None, unit: str, what: str, command: str, notes: str = "", per: float = 1.0
) -> Row:
    """The row of a timing on this machine; ``floor`` and the timing are in ``unit`` when divided by ``per``."""
    import torch

    from megagen.runtime import driver

    return Row(
        what=what,
        value=round(timing.median / per, 2),
        unit=unit,
        floor=None if floor is None else round(floor / per, 2),
        ratio=None if floor is None else round(timing.median / round(floor, 2), 3),
        spread=(round(timing.p10 / per, 2), round(timing.p90 / per, 2)),
        machine=torch.cuda.get_device_name(),
        driver=driver.version(),
        versions=versions(),
        commit=commit(),
        command=command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=notes,
    )


def count(value: float, *, unit: str, what: str, command: str, notes: str = "") -> Row:
    """The row of a number that is no time."""
    timing = Timing(what, value, value, value, 1)
    return figure(timing, floor=None, unit=unit, what=what, command=command, notes=notes)


def versions() -> dict[str, str]:
    """Installed versions of the packages that shape a figure, and torch's CUDA."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit, '-dirty' with uncommitted changes, or 'unknown' outside one."""
    try:
        tried = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return tried.stdout.strip()


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a JSON-lines file in one step: readers and a failure see the old file or the whole new one."""
    try:
        old = path.read_text() if path.exists() else ""
    except OSError as e:
        raise MegagenError(f"cannot read {path}: {e.strerror or e}") from e
    files.write(path, old + "".join(r.model_dump_json() + "\n" for r in rows), folders=True)


def read(path: Path) -> list[Row]:
    """The rows of a file. Raises pydantic's ValidationError for a line that is not a row."""
    return [Row.model_validate_json(line) for line in path.read_text().splitlines()]
