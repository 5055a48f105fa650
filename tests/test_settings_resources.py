"""The leaves: environment knobs, and data files found in a checkout and in a wheel."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megagen import resources
from megagen.errors import MegagenError
from megagen.settings import Settings


def test_defaults_without_environment() -> None:
    s = Settings.from_env({})
    assert (s.cache, s.compiler, s.nvcc, s.cxx, s.keep) == (True, "nvrtc", Path("nvcc"), Path("c++"), ())
    assert s.cache_dir.is_absolute() and s.cache_dir.name == "megagen"


def test_every_knob_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    s = Settings.from_env(
        {
            "MEGAGEN_CACHE_DIR": "~/here",
            "MEGAGEN_CACHE": "0",
            "MEGAGEN_COMPILER": "nvcc",
            "MEGAGEN_NVCC": "/opt/cuda/bin/nvcc",
            "MEGAGEN_CXX": "/opt/bin/clang++",
            "MEGAGEN_KEEP": " sass,ptx, sass",
        }
    )
    assert s.cache_dir == tmp_path / "here"
    assert s.cxx == Path("/opt/bin/clang++")
    assert (s.cache, s.compiler, s.nvcc, s.keep) == (False, "nvcc", Path("/opt/cuda/bin/nvcc"), ("ptx", "sass"))


def test_empty_means_unset() -> None:
    names = {Settings.variable(f): " " for f in Settings.model_fields}
    assert Settings.from_env(names) == Settings.from_env({})


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MEGAGEN_CACHE", "perhaps"), ("MEGAGEN_COMPILER", "gcc"), ("MEGAGEN_KEEP", "ptx,cubin")],
)
def test_bad_value_names_variable_and_value(variable: str, value: str) -> None:
    with pytest.raises(MegagenError) as e:
        Settings.from_env({variable: value})
    assert variable in e.value.message and value in e.value.message


def test_checkout_has_templates_schedules_machines() -> None:
    root = Path(resources.__file__).parents[1]
    assert resources.templates() == root / "templates"
    assert resources.schedules() == root / "schedules"
    assert resources.machines() == root / "megagen" / "machines"


def probe(site: Path, expression: str) -> str:
    """Evaluate in a fresh interpreter that has only the megagen below ``site``."""
    code = f"from megagen import resources; from megagen.errors import MegagenError\ntry: print({expression})\n"
    code += "except MegagenError as e: print('refused', e.message, e.hint)"
    run = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(site)}, cwd=site, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout.decode().strip()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages folder as a wheel leaves it, without the data."""
    package, source = tmp_path / "megagen", Path(resources.__file__).parent
    package.mkdir()
    for name in ("__init__.py", "errors.py", "resources.py"):
        shutil.copy(source / name, package / name)
    return tmp_path


def test_wheel_layout(site: Path) -> None:
    folder = site / "megagen" / "_data" / "templates" / "include" / "megagen" / "ptx"
    folder.mkdir(parents=True)
    (folder / "mma.cuh").write_text("// µ", "utf-8")
    (folder / "notes.md").write_text("no header")
    twin = folder.parent / "emulate" / "ptx"
    twin.mkdir(parents=True)
    (twin / "mma.cuh").write_text("// twin")
    (twin.parent / "abi.hpp").write_text("// C")
    assert probe(site, "resources.templates()") == str(site / "megagen" / "_data" / "templates")
    assert probe(site, "ascii(resources.headers())") == ascii({"megagen/ptx/mma.cuh": "// µ"})
    emulator = {"megagen/emulate/abi.hpp": "// C", "megagen/emulate/ptx/mma.cuh": "// twin"}
    assert probe(site, "ascii(resources.emulator_headers())") == ascii(emulator)


def test_incomplete_wheel_is_refused_even_beside_a_stranger_of_that_name(site: Path) -> None:
    (site / "templates").mkdir()
    said = probe(site, "resources.templates()")
    assert said.startswith("refused megagen's templates are missing") and "reinstall" in said
