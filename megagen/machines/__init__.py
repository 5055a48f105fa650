"""Machine descriptions: one TOML file a GPU, every figure with its source."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

from pydantic import ValidationError

from megagen import resources
from megagen.errors import MachineError, did_you_mean
from megagen.ir.plan import Machine


def names() -> list[str]:
    """The machines that ship."""
    return sorted(p.stem for p in resources.machines().glob("*.toml"))


def load(name: str) -> Machine:
    """A shipped machine by name, or the TOML file at a path that ends in ``.toml``.

    Raises MachineError for an unknown name, an unreadable file one that lacks a field or has an impossible one.
    """
    path = Path(name) if name.endswith(".toml") else resources.machines() / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise MachineError(f"unknown machine {name!r}", hint=did_you_mean(name, names())) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MachineError(f"machine {path}: {error}") from error
    try:
        machine = Machine.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise MachineError(f"machine {path}: {field}: {first['msg']}") from error
    figures: dict[str, object] = {f"blocks_fit.{n}": min(n, fit) for n, fit in machine.blocks_fit.items()}
    for field, value in {**machine.model_dump(), **figures}.items():
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise MachineError(f"machine {path}: {field}: must be greater than 0 and finite")
    if not re.fullmatch(r"sm_\d+[a-z]?", machine.arch):
        raise MachineError(f"machine {path}: arch: {machine.arch!r} is not like sm_90a")
    return machine


def cut(machine: Machine, sms: int) -> Machine:
    """The same GPU with ``sms`` SMs, for kernels small enough to emulate.

    Raises MachineError if it has fewer.
    """
    if not 1 <= sms <= machine.sms:
        raise MachineError(f"{machine.name} with {sms} SMs: it has {machine.sms}")
    fit = {cluster: min(blocks, sms // cluster * cluster) for cluster, blocks in machine.blocks_fit.items()}
    update = {"name": f"{machine.name} with {sms} SMs", "sms": sms, "blocks_fit": {c: n for c, n in fit.items() if n}}
    return machine.model_copy(update=update)
