"""What ``probe`` does: the cases as a table, a machine description, rows of docs/measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagen import files
from megagen.cli.sheets import Column, Row, Sheet, counted
from megagen.errors import MegagenError

if TYPE_CHECKING:
    from megagen.probe.case import Case
    from megagen.probe.run import Report

SUFFIX = ".toml"
DIGITS = 4  # of a recorded figure


def listing(cases: Sequence[Case]) -> Sheet:
    """The cases, without running them."""
    columns = (
        Column("case", "case"),
        Column("GPUs", "gpus", right=True),
        Column("what", "what"),
    )
    return Sheet(
        "cases", "What can be probed", columns, [{"case": c.name, "gpus": c.gpus, "what": c.title} for c in cases]
    )


def targets(out: Path | None, record: bool) -> Path | None:
    """The file of recorded figures, if any. Raises MegagenError for what cannot be written, before anything runs."""
    if out is not None and out.suffix != SUFFIX:
        raise MegagenError(f"--out {out}: a machine description ends in {SUFFIX}", hint=f"--out {out}{SUFFIX}")
    if out is not None and not out.absolute().parent.is_dir():
        raise MegagenError(f"--out {out}: there is no folder {out.absolute().parent}")
    if not record:
        return None
    from megagen import resources

    docs = resources.schedules().parent / "docs"
    if not docs.is_dir():
        raise MegagenError("--record writes to docs/, which is not here", hint="run it in a source checkout of megagen")
    return docs / "measurements" / "probe.jsonl"


def run(cases: Sequence[Case], device: int, quick: bool, progress: Callable[[], None]) -> Report:
    """Measure. Raises DeviceError without a usable GPU."""
    from megagen.probe.run import probe
    from megagen.settings import Settings

    return probe(cases, Settings.from_env(), progress, device=device, quick=quick)


def describe(report: Report, out: Path) -> None:
    """Write the machine description."""
    from megagen.probe import describe

    date = datetime.now(UTC).date().isoformat()
    text = describe.toml(describe.machine(report), report.figures, describe.heading(report.device, date))
    files.write(out, text)


def record(report: Report, target: Path, command: str) -> None:
    """Append the figures to the measurements."""
    from megagen.bench import measure

    date = datetime.now(UTC).isoformat(timespec="seconds")
    versions, commit = measure.versions(), measure.commit()
    measure.append(
        target,
        [
            measure.Row(
                what=f"probe.{name}",
                value=_short(found.value),
                unit=found.unit,
                floor=None,
                ratio=None,
                spread=(_short(found.p10), _short(found.p90)),
                machine=report.device.name,
                driver=report.device.driver,
                versions=versions,
                commit=commit,
                command=command,
                date=date,
                notes="; ".join(filter(None, (found.what, counted(found.runs, "run"), found.noisy, report.others))),
            )
            for name, found in report.figures.items()
        ],
    )


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def sheet(report: Report, *, out: Path | None, recorded: Path | None) -> Sheet:
    """The figures, beside what is known of other GPUs; under them what failed, was skipped, is noisy."""
    from megagen.probe.known import GB300, H200

    rows: list[Row] = []
    for outcome in report.outcomes:
        for name, found in outcome.figures.items():
            beside = {k.machine.lower(): k.text(name) for k in (H200, GB300)}
            rows.append({"case": outcome.case.name, "figure": name, **found.model_dump(), **beside})
    device = report.device
    took = sum(outcome.seconds for outcome in report.outcomes)
    columns = (
        Column("case", "case"),
        Column("figure", "figure"),
        *map(_reading, ("median", "p10", "p90")),
        Column("unit", "unit"),
        Column("H200", "h200", right=True),
        Column("GB300", "gb300", right=True),
        Column("", lambda r: "noisy" if r["noisy"] else ""),
    )
    return Sheet(
        "figures",
        f"{device.name}, {device.sms} SMs, driver {device.driver}: {counted(len(rows), 'figure')} in {took:.0f} s",
        columns,
        rows,
        note="\n".join(notes(report, out, recorded)),
        extra={
            "device": _device(report),
            "others": report.others,
            "skipped": {o.case.name: o.reason for o in report.skipped},
            "failed": {o.case.name: o.reason for o in report.failed},
            "seconds": {o.case.name: round(o.seconds, 2) for o in report.outcomes},
            "known": {k.machine.lower(): k.source for k in (H200, GB300)},
            "out": None if out is None else str(out),
        },
    )


def _reading(heading: str) -> Column:
    from megagen.probe.known import number

    key = "value" if heading == "median" else heading
    return Column(heading, lambda r: number(r[key]), right=True)


def _device(report: Report) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(report.device)


def notes(report: Report, out: Path | None, recorded: Path | None) -> list[str]:
    """What to know before leaning on the figures."""
    from megagen.probe.known import GB300, H200

    lines = [f"Beside: {k.machine}: {k.source}." for k in (H200, GB300)]
    lines += [f"Skipped {o.case.name}: {o.reason}." for o in report.skipped]
    lines += [f"FAILED {o.case.name}: {o.reason}." for o in report.failed]
    if report.others:
        lines.append(f"The GPU is {report.others}. End them and probe again.")
    if report.noisy:
        lines.append(
            f"NOISY: {counted(len(report.noisy), 'figure')} of {len(report.figures)}. Do not lean on them; probe again "
            "when the GPU is idle and its clocks are steady."
        )
        lines += [f"  {name}: {report.figures[name].noisy}" for name in report.noisy]
    if out is not None:
        lines.append(f"Wrote {out}: use it with --machine {out}.")
    if recorded is not None:
        lines.append(f"Appended to {recorded}.")
    return lines
