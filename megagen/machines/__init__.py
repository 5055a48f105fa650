"""Machine descriptions: one TOML file a GPU, every figure with its source."""

from __future__ import annotations

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

    Raises MachineError for an unknown name, an unreadable file or one that lacks a field.
    """
    path = Path(name) if name.endswith(".toml") else resources.machines() / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise MachineError(f"unknown machine {name!r}", hint=did_you_mean(name, names())) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MachineError(f"machine {path}: {error}") from error
    try:
        return Machine.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise MachineError(f"machine {path}: {field}: {first['msg']}") from error
