"""The house's rules: dependencies point one way, the lower rooms need neither torch nor GPU, importing does nothing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megagen"

# Each room may use those before it and itself. Rooms on the list that do not exist yet keep their place.
ROOMS = (
    "errors files settings resources ir machines ops models dsl lower check sim emit compile emulate "
    "weights runtime serve trace tune bench probe cli testing"
).split()
LIGHT = ROOMS[: ROOMS.index("emulate") + 1]  # import and run with neither torch nor a GPU
EASY = {None, *LIGHT, "cli", "testing"}  # import without
HEAVY = {"torch", "transformers", "safetensors", "numpy", "triton", "cutlass"}
ONLY_IN = {"jinja2": {"emit"}, "networkx": {"check"}, "typer": {"cli"}, "rich": {"cli", "weights"}}

# Run in a fresh interpreter: import every module named, with heavy packages absent, and report what that did.
PROBE = """
import importlib, json, os, sys, threading
names, heavy = json.loads(sys.stdin.read())

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
seen = []
ACTS = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.chmod", "os.chdir", "os.putenv", "os.unsetenv",
        "os.system", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "tempfile.mkstemp",
        "tempfile.mkdtemp"}

def watch(event, args):
    if event in ACTS or event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append(f"{event} {args[0]!r}")

sys.addaudithook(watch)
report = {}
for name in names:
    del seen[:]
    try:
        importlib.import_module(name)
    except Exception as error:
        seen.append(f"{type(error).__name__}: {error}")
    if threading.active_count() > 1:
        seen.append("started a thread")
    if seen:
        report[name] = list(seen)
sys.stderr.write(json.dumps(report))
"""


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def room(module: str) -> str | None:
    """The room of a dotted name within megagen, None for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "megagen" and len(parts) > 1 else None


def imports(tree: ast.AST, module: str = "megagen.x.y") -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that is imported at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


class _Eager(ast.NodeTransformer):
    """Drops what does not run at import: function bodies and TYPE_CHECKING blocks."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        return None

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_If(self, node: ast.If) -> ast.AST:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return ast.Module(body=node.orelse, type_ignores=[])
        return self.generic_visit(node)


def eager(tree: ast.AST) -> ast.AST:
    return _Eager().visit(tree)


def upward(module: str, source: str) -> list[str]:
    """Imports of ``source`` that point to a later room than the module's own."""
    own = room(module)
    if own is None:
        return [f"{module}:{line} imports {name}" for line, name in imports(ast.parse(source), module) if room(name)]
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(ast.parse(source), module)
        if (other := room(name)) is not None and ROOMS.index(other) > ROOMS.index(own)
    ]


def heavy(module: str, source: str) -> list[str]:
    """Imports of heavy packages that run when ``source`` is imported."""
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(eager(ast.parse(source)), module)
        if name.partition(".")[0] in HEAVY
    ]


def probe(names: list[str], path: Path) -> dict[str, list[str]]:
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    text = json.dumps([names, sorted(HEAVY)])
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=text, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "importing printed something"
    found: dict[str, list[str]] = json.loads(done.stderr)
    return found


def test_every_room_is_on_the_list() -> None:
    rooms = {room(name) for name, _ in modules()} - {None}
    assert rooms <= set(ROOMS), f"give these a place in ROOMS and docs/architecture.md: {rooms - set(ROOMS)}"
    assert {"ir", "ops", "cli"} <= rooms  # the walk found the package


def test_dependencies_point_one_way() -> None:
    assert not [bad for name, path in modules() for bad in upward(name, path.read_text())]


@pytest.mark.parametrize(
    "source",
    [
        "import megagen.cli.main",
        "from megagen import cli",
        "from megagen.lower import lower",
        "from ..lower import lower",
        "def f():\n    from megagen.runtime import Session",
        "if TYPE_CHECKING:\n    from megagen.bench import verify",
    ],
)
def test_an_upward_import_is_found(source: str) -> None:
    assert upward("megagen.dsl.directives", source)
    assert not upward("megagen.dsl.directives", "from megagen.ir.plan import Plan\nfrom . import schedule")


def test_light_rooms_import_no_torch() -> None:
    assert not [
        bad
        for name, path in modules()
        if room(name) in {None, *LIGHT, "cli", "testing"}
        for bad in heavy(name, path.read_text())
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from torch import nn",
        "class A:\n    import numpy as np",
        "try:\n    import torch\nexcept ImportError: ...",
    ],
)
def test_a_heavy_import_is_found(source: str) -> None:
    assert heavy("megagen.ops.x", source)
    assert not heavy("megagen.ops.x", "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch")


def test_libraries_stay_in_their_room() -> None:
    bad = [
        f"{name}:{line} imports {used}"
        for name, path in modules()
        for line, used in imports(ast.parse(path.read_text()), name)
        if room(name) not in ONLY_IN.get(used.partition(".")[0], {room(name)})
    ]
    assert not bad


def test_importing_does_nothing() -> None:
    """All light rooms, and the command line, in an interpreter without torch and without a GPU."""
    names = [name for name, _ in modules() if room(name) in EASY]
    assert probe(names, ROOT) == {}


@pytest.mark.parametrize(
    "line",
    [
        "open('left_behind', 'w')",
        "import os; os.environ['MEGAGEN_X'] = '1'",
        "import os; os.makedirs('left_behind')",
        "import subprocess; subprocess.run(['true'])",
        "import threading; threading.Thread(target=__import__('time').sleep, args=(1,), daemon=True).start()",
        "import torch",
        "raise RuntimeError('no')",
    ],
)
def test_a_side_effect_is_found(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "impure.py").write_text(line)
    (tmp_path / "pure.py").write_text("import json, pathlib\nX = pathlib.Path('a')")
    monkeypatch.chdir(tmp_path)
    assert list(probe(["pure", "impure"], tmp_path)) == ["impure"]


@pytest.mark.slow
def test_a_wheel_carries_its_data(tmp_path: Path) -> None:
    """Unpacked elsewhere, the package finds the templates and schedules that came with it."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    names = ("templates", "schedules", "machines")
    script = f"from megagen import resources\nfor n in {names}: print(getattr(resources, n)())"
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, check=True, capture_output=True, text=True, timeout=60
    )
    from megagen import resources

    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        packaged, here = Path(line), getattr(resources, name)()
        assert packaged.is_relative_to(site), f"{name} is not the wheel's"
        assert here.is_relative_to(ROOT)
        assert contents(packaged) == contents(here) != {}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.suffix in {".cuh", ".hpp", ".cpp", ".j2", ".py", ".toml"} and "__pycache__" not in p.parts
    }
