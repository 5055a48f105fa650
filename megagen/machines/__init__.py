"""Machine descriptions: one TOML file a GPU, every figure with its source."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from megagen import resources
from megagen.errors import MachineError, did_you_mean
from megagen.ir.graph import Frozen
from megagen.ir.plan import Machine


def _possible(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError("must be finite and not negative")
    return value


Reading = Annotated[float, AfterValidator(_possible)]


class Figure(Frozen):
    """What ``megagen probe`` measured: the median of ``runs`` readings in ``unit``, with deciles.

    ``noisy`` says why one should not lean on it; empty if there is no reason.
    """

    value: Reading
    p10: Reading
    p90: Reading
    unit: str
    runs: int = Field(ge=1)
    what: str
    noisy: str = ""


FIGURES = TypeAdapter(dict[str, Figure])


def names() -> list[str]:
    """The machines that ship."""
    return sorted(p.stem for p in resources.machines().glob("*.toml"))


def load(name: str) -> Machine:
    """A shipped machine by name, or the TOML file at a path that ends in ``.toml``.

    Raises MachineError for an unknown name, an unreadable file one that lacks a field or has an impossible one.
    """
    path, data = _read(name)
    _figures(path, data.pop("figures", {}))
    try:
        machine = Machine.model_validate(data)
    except ValidationError as error:
        raise _wrong(path, error) from error
    rates: dict[str, object] = {f"blocks_fit.{n}": min(n, fit) for n, fit in machine.blocks_fit.items()}
    for field, value in {**machine.model_dump(), **rates}.items():
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise MachineError(f"machine {path}: {field}: must be greater than 0 and finite")
    if not re.fullmatch(r"sm_\d+[a-z]?", machine.arch):
        raise MachineError(f"machine {path}: arch: {machine.arch!r} is not like sm_90a")
    return machine


def figures(name: str) -> Mapping[str, Figure]:
    """What was measured on the machine that :func:`load` would give, by name; nothing if it was not probed.

    Raises MachineError as :func:`load` does.
    """
    path, data = _read(name)
    return _figures(path, data.get("figures", {}))


def _read(name: str) -> tuple[Path, dict[str, Any]]:
    path = Path(name) if name.endswith(".toml") else resources.machines() / f"{name}.toml"
    try:
        return path, tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise MachineError(f"unknown machine {name!r}", hint=did_you_mean(name, names())) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MachineError(f"machine {path}: {error}") from error


def _figures(path: Path, table: object) -> dict[str, Figure]:
    try:
        return FIGURES.validate_python(table)
    except ValidationError as error:
        raise _wrong(path, error, "figures.") from error


def _wrong(path: Path, error: ValidationError, table: str = "") -> MachineError:
    first = error.errors()[0]
    return MachineError(f"machine {path}: {table}{'.'.join(map(str, first['loc']))}: {first['msg']}")


def cut(machine: Machine, sms: int) -> Machine:
    """The same GPU with ``sms`` SMs, for kernels small enough to emulate.

    Raises MachineError if it has fewer.
    """
    if not 1 <= sms <= machine.sms:
        raise MachineError(f"{machine.name} with {sms} SMs: it has {machine.sms}")
    fit = {cluster: min(blocks, sms // cluster * cluster) for cluster, blocks in machine.blocks_fit.items()}
    update = {"name": f"{machine.name} with {sms} SMs", "sms": sms, "blocks_fit": {c: n for c, n in fit.items() if n}}
    return machine.model_copy(update=update)
