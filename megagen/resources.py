"""Where the data files are: in the package of an installed wheel, or at the root of a source checkout."""

from __future__ import annotations

from pathlib import Path

from megagen.errors import MegagenError

PACKAGE = Path(__file__).resolve().parent
EMULATE = "megagen/emulate/"  # include names of what only the emulator uses


def templates() -> Path:
    """The folder with ``include/megagen/`` (header library) and ``kernel/`` (jinja2 templates)."""
    return _find("templates")


def schedules() -> Path:
    """The folder with the shipped schedules."""
    return _find("schedules")


def machines() -> Path:
    """The folder with the machine descriptions (``*.toml``)."""
    return PACKAGE / "machines"


def headers() -> dict[str, str]:
    """The header library: include name (``megagen/ptx/mma.cuh``) -> text, sorted by name."""
    found = _texts(templates() / "include", ".cuh")
    return {name: text for name, text in found.items() if not name.startswith(EMULATE)}


def emulator_headers() -> dict[str, str]:
    """The emulator's headers, which no GPU sees: include name (``megagen/emulate/ptx/mma.cuh``) -> text."""
    found = _texts(templates() / "include", ".cuh", ".hpp")
    return {name: text for name, text in found.items() if name.startswith(EMULATE)}


def emulator_sources() -> dict[str, str]:
    """The emulator's own code (``templates/emulate``): file name -> text, sorted by name."""
    return _texts(templates() / "emulate", ".cpp", ".hpp")


def _texts(root: Path, *suffixes: str) -> dict[str, str]:
    files = sorted(p for p in root.rglob("*") if p.suffix in suffixes)
    return {p.relative_to(root).as_posix(): p.read_text("utf-8") for p in files}


def _find(name: str) -> Path:
    packaged, checkout = PACKAGE / "_data" / name, PACKAGE.parent / name
    if packaged.is_dir():
        return packaged
    # site-packages may well hold somebody's folder of this name: only beside our pyproject.toml is it ours
    if (PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    raise MegagenError(
        f"megagen's {name} are missing: neither {packaged} nor {checkout} is there",
        hint="the installation is incomplete; reinstall megagen",
    )
