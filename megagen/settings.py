"""Every environment variable that megagen reads, but MEGAGEN_TRACEBACK, which is the command line's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megagen.errors import MegagenError

Keep = Literal["cu", "ptx", "sass"]


def _default_cache_dir() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("megagen")


def _split(value: object) -> object:
    """``"sass, ptx"`` -> ``["ptx", "sass"]``: sorted and without doubles, so that equal wishes compare equal."""
    return sorted({w.strip() for w in value.split(",")} - {""}) if isinstance(value, str) else value


def _expand(value: object) -> object:
    return Path(value).expanduser() if isinstance(value, str) else value


def _absolute(value: Path) -> Path:
    return value.absolute()


class Settings(BaseModel):
    """What the user set, with defaults. Field ``x`` comes from the variable ``MEGAGEN_X``; empty means unset.

    Build one with :meth:`from_env` at the edge (command line, test) and pass it down.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache_dir: Annotated[Path, BeforeValidator(_expand), AfterValidator(_absolute)] = Field(
        default_factory=_default_cache_dir
    )
    """Where cubins, reports, failed sources and packed weights are kept."""
    cache: bool = True
    """0: read and write no cache; cubins live in a temporary folder until the process ends."""
    compiler: Literal["nvrtc", "nvcc"] = "nvrtc"
    nvcc: Annotated[Path, BeforeValidator(_expand)] = Path("nvcc")
    """Path or name of nvcc."""
    cxx: Annotated[Path, BeforeValidator(_expand)] = Path("c++")
    """Path or name of the C++20 compiler that the emulator's code is compiled with."""
    keep: Annotated[tuple[Keep, ...], BeforeValidator(_split)] = ()
    """``MEGAGEN_KEEP=ptx,sass,cu``: intermediate files to keep next to the cubin."""

    @staticmethod
    def variable(field: str) -> str:
        """The environment variable of a field."""
        return f"MEGAGEN_{field.upper()}"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables. Raises :class:`MegagenError` that names the first bad one."""
        given = {f: v for f in cls.model_fields if (v := environ.get(cls.variable(f), "").strip())}
        try:
            return cls.model_validate(given)
        except ValidationError as e:
            first = e.errors(include_url=False)[0]
            field = str(first["loc"][0])
            raise MegagenError(f"{cls.variable(field)}={given[field]!r}: {first['msg']}") from None
