"""A machine description from what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from megagen.ir.plan import Machine
from megagen.machines import Figure
from megagen.probe.run import Device, Report

BARRIERS = 16  # of a block, on every GPU so far
ICACHE, TIMER_STEP_NS = 128 * 1024, 32  # assumed where they were not measured
STREAM = re.compile(r"hbm_ring_\w+_tb_s")


def machine(report: Report) -> Machine:
    """The machine that the probe ran on; what was not measured is the driver's word, or an assumption that says so."""
    device, figures = report.device, report.figures
    measured = f"measured by megagen probe: {device.name}, driver {device.driver}"
    asked = "device query"
    sources = dict.fromkeys(("sms", "shared_bytes", "registers", "l2_bytes"), asked)
    sources["barriers"] = "CUDA C++ Programming Guide"
    fit = {int(m[1]): int(f.value) for n, f in figures.items() if (m := re.fullmatch(r"blocks_fit_(\d+)", n))}
    fit = {size: blocks for size, blocks in fit.items() if blocks}
    sources["blocks_fit"] = f"{measured}; blocks of 384 threads and 200 KB"
    if not fit:
        fit, sources["blocks_fit"] = {1: device.sms}, "device query: a block a SM; clusters were not probed"
    rates = [f for name, f in figures.items() if STREAM.fullmatch(name)]
    if rates:
        best = max(rates, key=lambda f: f.value)
        rate, sources["hbm_bytes_per_s"] = best.value * 1e12, f"{measured}; {best.what}{_but(best)}"
    else:
        rate, sources["hbm_bytes_per_s"] = device.rated_bytes_per_s, "device query: clock and bus width; not measured"
    if (held := figures.get("icache_kb")) is not None:
        icache, sources["icache_bytes"] = int(held.value * 1024), f"{measured}; {held.what}{_but(held)}"
    else:
        icache, sources["icache_bytes"] = ICACHE, "assumed: not measured"
    if (step := figures.get("timer_step_ns")) is not None:
        step_ns, sources["timer_step_ns"] = step.value, f"{measured}; {step.what}{_but(step)}"
    else:
        step_ns, sources["timer_step_ns"] = TIMER_STEP_NS, "assumed: not measured"
    return Machine(
        name=slug(device.name),
        arch=device.arch,
        sms=device.sms,
        blocks_fit=fit,
        shared_bytes=device.shared_bytes,
        registers=device.registers,
        barriers=BARRIERS,
        icache_bytes=icache,
        l2_bytes=device.l2_bytes,
        hbm_bytes_per_s=rate,
        timer_step_ns=step_ns,
        sources=sources,
    )


def _but(figure: Figure) -> str:
    return f"; noisy: {figure.noisy}" if figure.noisy else ""


def slug(name: str) -> str:
    """``NVIDIA H200`` as a name: ``nvidia_h200``."""
    return re.sub(r"\W+", "_", name.lower()).strip("_") or "gpu"


def heading(device: Device, date: str) -> str:
    return f"# {device.name}, measured by megagen probe on {date}, driver {device.driver}."


def toml(machine: Machine, figures: Mapping[str, Figure], heading: str) -> str:
    """The text of a machine description: what :func:`megagen.machines.load` and ``figures`` read."""
    fields = machine.model_dump(exclude={"sources", "blocks_fit"})
    fit = ", ".join(f"{size} = {blocks}" for size, blocks in sorted(machine.blocks_fit.items()))
    lines = [heading, *(f"{name} = {_value(value)}" for name, value in fields.items()), f"blocks_fit = {{ {fit} }}"]
    lines += ["", "[sources]", *(f"{name} = {_value(text)}" for name, text in machine.sources.items())]
    lines += ["", "[figures]"]
    for name, figure in figures.items():
        shown = figure.model_dump(exclude_defaults=True)
        lines.append(f"{name} = {{ {', '.join(f'{k} = {_value(v)}' for k, v in shown.items())} }}")
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """A TOML value. JSON's strings are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
