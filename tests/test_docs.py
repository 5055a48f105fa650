"""The documentation is true: examples load and pass or are refused as shown, commands parse, links lead somewhere.

A fence's info string says what its text is, after the language:

- ``python NAME.py``: a whole schedule, kept under that name; the examples that follow are edits of it.
- ``python fragment``: lines that stand before its ``return s``. ``diff NAME.py``: the same as a diff.
- ``python from FILE``: lines of a file of the repository, in order. ``python run``: runs as it is.
- ``text refusal``: what the edit above is refused with; an edit that none follows must pass.
- ``cuda``: lines that the edit above emits, in order; ``cuda NAME.py``: lines that the unedited schedule emits.
- ``text explain``: lines of ``megagen explain`` for the unedited schedule, but for spaces.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer
from trace_made import layer, tiny
from typer.testing import CliRunner

from megagen import dsl
from megagen.cli import device, main, pipeline
from megagen.dsl import Schedule, load
from megagen.emit import UNBOUNDED_WAITS, emit
from megagen.emulate import build
from megagen.errors import MegagenError
from megagen.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCHEDULES = ROOT / "docs" / "schedules.md"
CLI = ROOT / "docs" / "cli.md"
SHIPPED = ROOT / "schedules" / "muse_moe.py"
LAYER = ROOT / "schedules" / "muse_swa.py"
EXPORTS = ", ".join(n for n in dsl.__all__)


@dataclass(frozen=True)
class Fence:
    page: str
    line: int
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]


@cache
def split(page: Path) -> tuple[str, tuple[Fence, ...]]:
    """A page's text without its fences, and the fences."""
    prose: list[str] = []
    fences: list[Fence] = []
    inside: list[str] | None = None
    info, start = "", 0
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            if inside is None:
                info, start, inside = line.strip()[3:], number, []
            else:
                fences.append(Fence(page.name, start, info, textwrap.dedent("\n".join(inside))))
                inside = None
        elif inside is None:
            prose.append(line)
        else:
            inside.append(line)
    assert inside is None, f"{page.name}:{start}: a fence without an end"
    return "\n".join(prose), tuple(fences)


def fences(language: str) -> list[Fence]:
    return [f for page in PAGES for f in split(page)[1] if f.info.split(" ")[0] == language]


# -- examples ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A schedule with what the page says comes of it: ``refusal``, or it passes and emits ``code``."""

    fence: Fence
    name: str
    source: str
    refusal: str | None
    code: tuple[Fence, ...]


def edited(base: str, fence: Fence) -> str:
    if fence.info == "python fragment":
        head, found, tail = base.rpartition("    return s\n")
        assert found, fence
        # one line for one line, so that the numbers are those of the reader's file
        head, n = re.subn(r"^from megagen\.dsl import .*$", f"from megagen.dsl import {EXPORTS}", head, flags=re.M)
        assert n == 1, fence
        return head + textwrap.indent(fence.text, "    ") + "\n" + found + tail
    old = "".join(f"{line[1:]}\n" for line in fence.lines() if line[0] in " -")
    new = "".join(f"{line[1:]}\n" for line in fence.lines() if line[0] in " +")
    assert base.count(old) == 1, f"{fence}: not in the schedule that it edits"
    return base.replace(old, new)


def examples(page: Path) -> Iterator[Example]:
    bases: dict[str, str] = {}
    found, name = split(page)[1], ""
    for i, fence in enumerate(found):
        language, _, rest = fence.info.partition(" ")
        if language == "python" and rest.endswith(".py") and not rest.startswith("from "):
            name, source = rest, fence.text + "\n"
            bases[name] = source
        elif fence.info in ("python fragment", f"diff {name}"):
            source = edited(bases[name], fence)
        else:
            continue
        after = [f for f in found[i + 1 : i + 2] if f.info in ("text refusal", "cuda")]
        refusal = next((f.text for f in after if f.info == "text refusal"), None)
        own = [f for f in found if f.info == f"cuda {name}"] if source == bases[name] else []
        yield Example(fence, name, source, refusal, (*own, *(f for f in after if f.info == "cuda")))


EXAMPLES = [e for page in PAGES for e in examples(page)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Path]:
    """A folder as the pages assume it: the repository's files, and the pages' whole schedules."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".git"):
            (tmp_path / entry.name).symlink_to(entry)
    for example in reversed(EXAMPLES):  # the whole schedule is the first of its name
        (tmp_path / example.name).write_text(example.source)
    with chdir(tmp_path):
        yield tmp_path


def test_every_example_is_of_a_known_sort() -> None:
    known = re.compile(
        r"python (\w+\.py|fragment|run|from \S+)|diff \w+\.py|text (refusal|explain|check)|cuda( \w+\.py)?|bash|"
    )
    for page in PAGES:
        found = split(page)[1]
        for before, fence in zip((None, *found), found, strict=False):
            assert known.fullmatch(fence.info), f"{fence}: {fence.info!r} is not tested"
            if fence.info in ("text refusal", "cuda"):
                assert before is not None and before.info.startswith(("python fragment", "diff ")), fence
    assert len(EXAMPLES) > 15
    assert sum(e.refusal is not None for e in EXAMPLES) > 8


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: str(e.fence))
def test_example(example: Example, desk: Path) -> None:
    Path(example.name).write_text(example.source)
    if example.refusal is not None:
        with pytest.raises(MegagenError) as caught:
            pipeline.check(pipeline.Request(Path(example.name)))
        assert caught.value.render() == example.refusal
        return
    plan = pipeline.check(pipeline.Request(Path(example.name))).plan
    pipeline.check(pipeline.Request(Path(example.name), fused=False))
    emitted = [(line.strip(), line.partition("//")[0].strip()) for line in emit(plan).splitlines()]
    for fence in example.code:
        rest = iter(emitted)
        for line in fence.lines():
            assert any(line.strip() in forms for forms in rest), f"{fence}: {line.strip()} is not emitted (there)"


@pytest.mark.parametrize("fence", [f for f in fences("python") if f.info.startswith("python from ")], ids=str)
def test_quotation(fence: Fence) -> None:
    """Lines next to each other in the file, whatever their indentation."""
    text = "\n".join(map(str.strip, (ROOT / fence.info.removeprefix("python from ")).read_text().splitlines()))
    assert "\n".join(map(str.strip, fence.text.splitlines())) in text


@pytest.mark.parametrize("fence", [f for f in fences("python") if f.info == "python run"], ids=str)
def test_program(fence: Fence, desk: Path) -> None:
    exec(compile(fence.text, str(fence), "exec"), {})


def test_explain_excerpts(desk: Path) -> None:
    (name,) = {e.name for e in EXAMPLES}
    shown = {" ".join(line.split()) for line in ran("explain", name).splitlines()}
    found = [f for f in fences("text") if f.info == "text explain"]
    assert found
    for fence in found:
        for line in fence.lines():
            assert " ".join(line.split()) in shown, f"{fence}: {line}"


def test_proofs_are_those_of_the_layer(desk: Path) -> None:
    proved = ran("check", "schedules/muse_swa.py").splitlines()
    (found,) = [f for f in fences("text") if f.info == "text check"]
    assert [line for line in found.lines() if line not in proved] == []
    assert len({line.rpartition("[")[2] for line in proved if line.startswith("proved")}) == 8


# -- commands ------------------------------------------------------------------------------------------------------


def ran(*args: str) -> str:
    result = CliRunner().invoke(main.app, list(args), prog_name="megagen")
    assert result.exit_code == 0, result.output
    return result.stdout


@cache
def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(main.app)
    return dict(group.commands)


def flags(command: Any) -> set[str]:
    return {o for p in command.params for o in p.opts if o.startswith("--")}


def shell(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(where, words) of every command of a page's fences, and of ``megagen ...`` in its running text."""
    prose, found = split(page)
    for fence in found:
        if fence.info == "bash":
            for line in fence.lines():
                for part in line.split("&&"):
                    yield str(fence), shlex.split(part, comments=True)
    for span in re.findall(r"`(megagen [^`]+)`", prose):
        yield page.name, shlex.split(span)


COMMANDS = [(where, words) for page in PAGES for where, words in shell(page)]


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_command(where: str, words: Sequence[str], desk: Path) -> None:
    shutil.copy(SHIPPED, "mine.py")  # as the page tells its reader
    if Path(words[0]).name == "megagen":
        run_megagen(words[1], [w.strip("[]") for w in words[2:]])
    elif "pip" in words[0]:
        extras = re.findall(r"\[(\w+)\]", " ".join(words))
        assert set(extras) <= set(
            tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        )
        assert words[1] == "install"
    elif words[0] in ("cp", "diff", "bash"):
        for file in words[1:]:
            assert Path(file).exists() or file.startswith("out/"), f"{where}: no {file}"
    else:
        assert words in (["python3", "-m", "venv", ".venv"], [".venv/bin/python", "-m", "pytest"]), f"{where}: {words}"


def run_megagen(name: str, args: list[str]) -> None:
    command = commands()[name]
    if not args:
        return  # a mention
    given = command.make_context(name, list(args)).params  # raises for what the command does not take
    schedule = given.get("schedule")
    if schedule is None or str(schedule) == "SCHEDULE":
        return
    assert schedule.is_file(), schedule
    if name in ("check", "explain"):
        ran(name, *args)
    else:
        pairs = {key: dict(item.split("=") for item in given[key] or ()) for key in ("choose", "option")}
        pipeline.check(
            pipeline.Request(
                schedule,
                given["machine"],
                given["tp"] or given["ranks"],
                given["tokens"],
                pairs["choose"],
                options=pairs["option"],
            )
        )


def test_flags_exist_and_are_documented() -> None:
    every = set().union(*map(flags, commands().values()))
    for page in PAGES:
        for span in re.findall(r"`([^`]*)`", split(page)[0]):
            mentioned = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", span))
            assert mentioned <= every, f"{page.name}: {span}"
    text = CLI.read_text()
    for flag in every - {"--help"}:
        assert re.search(rf"`[^`]*{flag}\b", text), f"cli.md does not mention {flag}"


def test_defaults_of_options() -> None:
    def given(text: str) -> dict[str, str]:
        return dict(re.findall(r"^\| `(--\w+)[^|]*\| (\w+) \|", text, re.M))

    rows = given(CLI.read_text().partition("\n## ")[0])
    own = {name: given(section(CLI, f"## {name}")) for name in ("trace", "step")}
    assert set(own["trace"]) == {"--ranks", "--layers", "--rounds", "--replays", "--seed"}
    assert set(own["step"]) == {"--tp", "--gpus", "--context", "--rounds", "--endure"}
    assert own["step"].pop("--context") == str(device.CONTEXT)  # it repeats: the command fills it in
    for name, defaults in own.items():
        assert defaults.items() <= {p.opts[0]: str(p.default) for p in commands()[name].params}.items()
    assert set(rows) == {"--machine", "--tp", "--tokens"}
    others = (("emulate", "--tp"), ("decode", "--tp"), ("step", "--tokens"))  # --ranks, one GPU, 1 and 16
    for name, command in commands().items():
        for p in command.params:
            if p.opts[0] in rows and (name, p.opts[0]) not in others:
                assert str(p.default) == rows[p.opts[0]], f"{name} {p.opts[0]}"


# -- facts ---------------------------------------------------------------------------------------------------------


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next one of its rank or higher; fences included."""
    text, level = page.read_text("utf-8"), heading.split(" ")[0]
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"{page.name} has no {heading!r}"
    return re.split(rf"^#{{1,{len(level)}}} ", rest, flags=re.M)[0]


def table(text: str) -> list[list[str]]:
    """The cells of a markdown table, without its head."""
    rows = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_links_lead_somewhere() -> None:
    count = 0
    for page in PAGES:
        for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", split(page)[0]):
            if "://" in target:
                continue
            count += 1
            file, _, anchor = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {target}"
    assert count > 20


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, punctuation dropped, spaces to hyphens."""
    headings = re.findall(r"^#+ (.+)$", split(page)[0], re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


DIRECTIVES = [n for n, f in vars(Schedule).items() if inspect.isfunction(f) and not n.startswith("_")]


@pytest.mark.parametrize("name", DIRECTIVES)
def test_directive_is_described(name: str) -> None:
    """Under a heading of its own, with each of its parameters and what is refused."""
    heading = "### warp, warps" if name in ("warp", "warps") else f"### {name}"
    text = section(SCHEDULES, heading)
    parameters = [p for p in inspect.signature(getattr(Schedule, name)).parameters if p != "self"]
    spans = " ".join(quoted(text))
    for p in parameters:
        assert p in ("op", "roles", "index", "how", "weights", "slots") or re.search(rf"\b{p}\b", spans), p
    assert "efused" in text or name in ("choice", "fault")


def test_headings_are_directives() -> None:
    headings = re.findall(r"^### (.+)$", section(SCHEDULES, "## Directives"), re.M)
    assert sorted(n for h in headings for n in h.split(", ")) == sorted(DIRECTIVES)


def test_every_export_is_named() -> None:
    spans = [s for s in quoted(split(SCHEDULES)[0]) if re.fullmatch(r"\w+", s)]
    assert set(dsl.__all__) <= set(spans), set(dsl.__all__) - set(spans)


def test_table_of_roles_is_the_ops() -> None:
    """The union over the ops of a kind in the shipped graphs."""
    wanted: dict[tuple[str, str], list[Any]] = {}
    ends = (load("muse_first.py"), load("muse_last.py"))
    layers = (load(LAYER), load("muse_global.py"), load(LAYER, options={"all_reduce": "two_shot"}))
    shipped = (load(SHIPPED), *layers, *ends)
    for op in (op for schedule in shipped for op in schedule.graph.ops):
        for r in op.roles():
            counts = [" or ".join(map(str, r.warps)), str(r.align), str(r.registers or "")]
            *others, reads, writes = wanted.setdefault((op.kind, r.name), [*counts, [], []])
            assert others == counts, f"{op.name}.{r.name}"
            reads += [port for port in r.reads if port not in reads]
            writes += [port for port in r.writes if port not in writes]
    found: dict[tuple[str, str], list[object]] = {}
    kind = ""
    for first, role, *counts, reads, writes, _ in table(section(SCHEDULES, "## Roles of each op kind")):
        kind = quoted(first)[0] if first else kind
        found[kind, quoted(role)[0]] = [*counts, quoted(reads), quoted(writes)]
    assert found == wanted


def test_json_keys(desk: Path) -> None:
    text = section(CLI, "## JSON")
    rows = {quoted(row[0])[0]: set(quoted(row[1])) for row in table(text)}
    header = ["plan", "machine", "tp", "tokens", "fused", "choices"]
    assert set(header) <= set(quoted(text.partition("\n| ")[0]))
    for command, schedule in product(("check", "explain"), (SHIPPED, LAYER)):
        made = json.loads(ran(command, str(schedule), "--json"))
        assert list(made)[: len(header)] == header
        inner = {k for v in made.values() if isinstance(v, list) for row in v for k in row}
        assert {*made, *inner} - set(header) == rows[command] - set(header)


def test_json_keys_of_traces(tmp_path: Path) -> None:
    file = tmp_path / "a.trace"
    layer(tiny(), 3).save(file)
    rows = {quoted(row[0])[-1]: set(quoted(row[1])) for row in table(section(CLI, "## JSON"))}
    shown = json.loads(ran("show", str(file), "--json"))
    # what a part of the path has is in the row; a made trace has not all of them
    assert {*shown, *(k for key in ("ops", "path", "waits") for row in shown[key] for k in row)} | {
        "work", "load", "hop", "wait", "launch"
    } == rows["show"]  # fmt: skip
    changed = json.loads(ran("compare", str(file), str(file), "--json"))
    assert {*changed, *(k for row in changed["changes"] for k in row), *changed["total"]} == rows["compare"]


def test_environment() -> None:
    known = {Settings.variable(f) for f in Settings.model_fields} | {"MEGAGEN_TRACEBACK"}
    assert {quoted(row[0])[0] for row in table(section(CLI, "## Environment"))} == known
    mentioned = re.compile(r"MEGAGEN_\w+")
    for file in [*PAGES, *(ROOT / "megagen").rglob("*.py")]:
        names = {n for n in mentioned.findall(file.read_text("utf-8")) if n != "MEGAGEN_X"}
        names -= {UNBOUNDED_WAITS, build.REGISTER}  # macros
        assert names <= known, f"{file.name}: {names - known}"


def test_exit_codes() -> None:
    codes: Iterable[int] = (0, MegagenError.exit_code, 2, main.BUG, main.INTERRUPTED)
    assert [int(row[0]) for row in table(section(CLI, "## Exit codes"))] == list(codes)
    assert CliRunner().invoke(main.app, ["no-such-command"]).exit_code == 2
