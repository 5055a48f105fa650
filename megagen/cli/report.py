"""What a check or a build came to, for the terminal and for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from megagen.cli.explain import nominal, stream_us
from megagen.cli.pipeline import Built, Checked
from megagen.cli.sheets import Column, Row, Sheet, megabytes, size

if TYPE_CHECKING:
    from megagen.bench.verify import Check


def findings(checked: Checked) -> list[dict[str, Any]]:
    """What the checker proved, and its warnings."""
    return [f.model_dump(mode="json") for f in checked.findings]


def warnings(built: Built) -> list[str]:
    """What the compiler warned of on any architecture, and spills on the plan's own."""
    found = []
    for arch, artifact in built.artifacts.items():
        for name, made in artifact.kernels.items():
            found += [f"{name} on {arch}: {text}" for text in made.warnings]
            spilt = made.spill_store_bytes + made.spill_load_bytes
            if spilt and arch == built.plan.machine.arch:
                found.append(f"{name} on {arch} spills {spilt} bytes of registers a thread to memory")
    return found


def kernels(built: Built) -> Sheet:
    """A row for each kernel and architecture. ``shared_bytes`` is a block's, static and dynamic."""
    plan = built.plan
    rows: list[dict[str, Any]] = []
    for arch, artifact in built.artifacts.items():
        for kernel in plan.kernels:
            made = artifact.kernels[kernel.name]
            nbytes = sum(plan.op(name).weight_bytes for name in kernel.ops)
            rows.append(
                {
                    "kernel": kernel.name,
                    "arch": arch,
                    "registers": made.registers,
                    "spill_bytes": made.spill_store_bytes + made.spill_load_bytes,
                    "stack_bytes": made.stack_bytes,
                    "shared_bytes": made.shared_bytes + plan.launch.shared_bytes,
                    "code_bytes": made.code_bytes,
                    "icache_bytes": plan.machine.icache_bytes,
                    "mma": None if made.mma is None else dict(made.mma),
                    "traps": made.traps,
                    "hbm_bytes": nbytes,
                    "floor_us": stream_us(plan, nbytes),
                    "warnings": list(made.warnings),
                }
            )
    used = {f"{a.compiler}{', from the cache' if a.cached else ''}" for a in built.artifacts.values()}
    rate = plan.machine.hbm_bytes_per_s
    return Sheet(
        "kernels",
        "Kernels",
        (
            Column("kernel", "kernel"),
            Column("arch", "arch"),
            Column("registers", "registers", right=True),
            Column("spills B", "spill_bytes", right=True),
            Column("shared", lambda r: size(r["shared_bytes"]), right=True),
            Column(f"code of {size(plan.machine.icache_bytes)}", _code, right=True),
            Column("MMA instructions", _mma),
            Column("traps", lambda r: "unknown" if r["traps"] is None else r["traps"], right=True),
            Column("HBM MB", lambda r: megabytes(r["hbm_bytes"]), right=True),
            Column("floor µs", lambda r: f"{r['floor_us']:.1f}", right=True),
        ),
        rows,
        note=f"Compiled by {'; '.join(sorted(used))}. HBM: the weights once, {nominal(plan)}. "
        f"Floor: at {rate / 1e12:.2f} TB/s ({plan.machine.name}).",
    )


def record(built: Built) -> dict[str, Any]:
    """The JSON of a build, after the header's keys."""
    plan = built.plan
    nbytes = sum(op.weight_bytes for op in plan.ops)
    return {
        "nominal_tokens": plan.nominal_tokens,
        "nominal_experts": plan.nominal_experts,
        "hbm_bytes": nbytes,
        "floor_us": stream_us(plan, nbytes),
        "findings": findings(built),
        "artifacts": [
            {"arch": arch, "path": str(a.path), "compiler": a.compiler, "cached": a.cached}
            for arch, a in built.artifacts.items()
        ],
        **kernels(built).json(),
    }


def _code(row: Row) -> str:
    return f"{size(row['code_bytes'])} ({row['code_bytes'] / row['icache_bytes']:.0%})"


def _mma(row: Row) -> str:
    if row["mma"] is None:
        return "unknown"
    return "\n".join(f"{count} {opcode}" for opcode, count in row["mma"].items()) or "none"


def checks(found: Sequence[Check], title: str) -> Sheet:
    """What launches left, judged."""

    def finite(value: float) -> float | None:  # JSON has no NaN; the detail says what is not finite
        return value if isfinite(value) else None

    def row(check: Check) -> dict[str, Any]:
        verdict = check.verdict
        return {
            "check": check.name,
            "ok": check.ok,
            "skipped": check.skipped,
            "error": None if verdict is None else finite(verdict.ours.worst_row),
            "model_error": None if verdict is None else finite(verdict.model.worst_row),
            "max_abs": None if verdict is None else finite(verdict.ours.max_abs),
            "model_max_abs": None if verdict is None else finite(verdict.model.max_abs),
            "detail": check.detail,
        }

    def number(key: str) -> Callable[[Row], str]:
        return lambda r: "" if r[key] is None else f"{r[key]:.3g}"

    return Sheet(
        "checks",
        f"{title}, against the reference in fp32",
        (
            Column("", lambda r: "skip" if r["skipped"] else "ok" if r["ok"] else "FAIL"),
            Column("what", "check"),
            Column("error", number("error"), right=True),
            Column("bf16 model's", number("model_error"), right=True),
            Column("max-abs", number("max_abs"), right=True),
            Column("bf16 model's", number("model_max_abs"), right=True),
            Column("remark", lambda r: r["detail"] if r["error"] is None or not r["ok"] else ""),
        ),
        [row(c) for c in found],
        note="Error: relative L2 of the worst token row; it may be 1.5 times the bf16 model's, max-abs twice.",
    )
