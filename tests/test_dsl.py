"""The schedule language: who is told what, and at which line and column."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from megagen import resources
from megagen.dsl import load
from megagen.errors import MachineError, MegagenError, ScheduleError, UnknownName
from megagen.ir.plan import Plan, Source
from megagen.lower import lower

EVERY = Path(__file__).parent / "golden" / "every_directive.py"
HEAD = """\
from megagen.dsl import *
from megagen.models import muse_spark


def schedule(machine, tp=8, tokens=16, choices=None):
    g = muse_spark.expert_block(tp=tp, tokens=tokens)
    s = Schedule("test", g, machine, choices=choices)
    ring = s.ring(4, 36 * KiB)
"""
HERE = "‸"  # stands before the character that the caret must point at; not part of the file


def write(folder: Path, text: str) -> tuple[Path, int, int]:
    """The text as a schedule file, with line and column of the mark (0, 0 without one)."""
    before, found, after = text.partition(HERE)
    file = folder / "user.py"
    file.write_text(before + after)
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    return file, *((line, column) if found else (0, 0))


def body(code: str) -> str:
    return f"{HEAD}    {code}\n    return s\n"


def refused(file: Path, **more: object) -> MegagenError:
    with pytest.raises(MegagenError) as caught:
        lower(load(file, **more))  # type: ignore[arg-type]
    return caught.value


def points_at(error: MegagenError, file: Path, line: int, column: int) -> None:
    """The error's place, and what the terminal shows: the user's line with a caret under that column."""
    assert error.loc is not None
    assert (error.loc.file, error.loc.line, error.loc.column) == (str(file), line, column)
    place, shown, caret = error.render().splitlines()[1:4]
    text = file.read_text().splitlines()[line - 1]
    assert place == f"  --> {file}:{line}:{column}"
    assert shown.endswith(f"| {text}") and f" {line} |" in shown
    gutter = len(shown) - len(text)
    assert caret.strip(" |") == "^" and caret.index("^") == gutter + column - 1


# -- places --------------------------------------------------------------------------------------------------------


def sources(value: object) -> Iterator[Source]:
    if isinstance(value, Source):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from sources(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from sources(item)


def marked() -> dict[str, int]:
    """``# @name`` -> line, read from the text of the file."""
    lines = EVERY.read_text().splitlines()
    return {text.rpartition("# @")[2]: i for i, text in enumerate(lines, 1) if "# @" in text and "``" not in text}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return lower(load(EVERY))


def test_every_directive_remembers_its_line(plan: Plan) -> None:
    at = marked()
    seen: dict[str, set[int]] = {"ring": {plan.ring.source.line}, "launch": {plan.launch.source.line}}
    for name, channel in {
        "counter": "normed", "by_reader": "logits", "mbarrier": "table", "cluster": "pooled_partials", "flag": "pooled",
        "zero": "expert_mid",
    }.items():  # fmt: skip
        seen[name] = {plan.channel(channel).source.line}
    stream = plan.op("pooler").stream
    assert stream is not None
    seen["hint"] = {stream.source.line}
    for program in plan.kernels[0].programs:
        for step in program.steps:
            name = {
                "load_weights": "loads", "math": "math", "reduce": "math", "finish": "finish", "select": "top_k",
                "tables": "top_k", "compute": "norms", "reset": "reset", "trigger": "launch", "wait_point": "both",
                "signal_point": "both",
            }.get(step.call)  # fmt: skip
            if step.call == "prefetch_l2":
                name = "both" if step.op == "unpooler" else "l2"
            if name:
                seen.setdefault(name, set()).add(step.source.line)
            else:
                assert step.call in {"attach", "drain"}
    assert seen == {name: {line} for name, line in at.items()}


def test_every_source_quotes_its_line(plan: Plan) -> None:
    lines = EVERY.read_text().splitlines()
    found = [s for s in sources(plan) if s.line]
    assert len(found) > 50
    assert {(s.file, s.text.rstrip("\n")) for s in found} == {(str(EVERY), lines[s.line - 1]) for s in found}
    assert all(s.text[s.column - 1 :].startswith("s.") for s in found)


# -- refusals ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str, str | None]] = {  # code with the mark, words of the message, hint
    "op": ("s.assign(g.‸poolr, math=s.warps(4, 12))", "has no op 'poolr'", "did you mean 'pooler'?"),
    "op, many lines": (
        "s.sync(\n        g.router.reduce\n        >> g.‸topk.select,\n        counter(),\n    )",
        "no op 'topk'",
        "did you mean 'top_k'?",
    ),
    "op on a line of its own": (
        "s.assign(\n        (g\n         .‸poolr),\n    )",
        "no op 'poolr'",
        "did you mean 'pooler'?",
    ),
    "op far from all": ("s.assign(g.‸xyz)", "no op 'xyz'", "there are: pre_ffn_norm, router, pooler, top_k"),
    "weight": (
        "s.hint([g.router.weight, g.pooler.‸wieght], evict_first)",
        "no weight or role 'wieght'",
        "did you mean 'weight'?",
    ),
    "weight, many lines": (
        "s.prefetch(\n        g.unpooler.‸wight,\n        into=ring,\n    )",
        "no weight or role 'wight'",
        "did you mean 'weight'?",
    ),
    "role of an edge": ("s.sync(g.pooler.‸reduec >> g.pooler.finish, counter())", "'reduec'", "did you mean 'reduce'?"),
    "role": (
        "s.assign(g.pooler, load_weights=s.warp(0), ‸mth=s.warps(4, 12))",
        "'pooler' has no role 'mth'",
        "did you mean 'math'?",
    ),
    "role, many lines": (
        "s.assign(\n        [g.pooler, g.unpooler],\n        math=s.warps(4, 12),\n        ‸finsh=s.warp(3),\n    )",
        "'pooler' has no role 'finsh'",
        "did you mean 'finish'?",
    ),
    "role, further left": (
        "x = [None, s.assign(g.pooler,\n    ‸mth=s.warps(4, 12))]",
        "no role 'mth'",
        "did you mean 'math'?",
    ),
    "role of another kind": (
        "s.assign([g.router, g.pooler], ‸finish=s.warp(3))",
        "'router' has no role",
        "there are: load_weights",
    ),
    "role twice": (
        "s.assign(g.pooler, finish=s.warp(3))\n    ‸s.assign([g.unpooler, g.pooler], finish=s.warp(2))",
        "assigned twice",
        None,
    ),
    "role on a number": ("‸s.assign(g.pooler, finish=3)", "pooler.finish=3 is not a set of warps", "use s.warp(i)"),
    "assign to a weight": ("‸s.assign([g.pooler.weight], finish=s.warp(3))", "is not an op", "name one as g.<op>"),
    "warps beyond": ("math = ‸s.warps(4, 13)", "warps 4 to 12 of a block that has 12", None),
    "no warps": ("math = ‸s.warps(4, 4)", "warps 4 to 3", None),
    "negative warp": ("x = ‸s.warp(-1)", "warps -1 to -1", None),
    "share": ("‸s.prefetch(g.unpooler.weight, ring, share=1.5)", "share=1.5 of unpooler_weight", None),
    "NaN share": ("‸s.prefetch(g.unpooler.weight, ring, share=float('nan'))", "share=nan", None),
    "share of what": (
        "‸s.prefetch(g.unpooler.weight, ring, share=0.5)",
        "needs the op that the rest waits for",
        "during=g.<op>",
    ),
    "L2 by nobody": ("‸s.prefetch(g.unpooler.weight, L2, during=g.down)", "needs the one warp", "by=s.warp(i)"),
    "L2 by two": (
        "‸s.prefetch(g.unpooler.weight, L2, by=s.warps(1, 3), during=g.down)",
        "needs the one warp",
        "by=s.warp(i)",
    ),
    "L2 some time": (
        "‸s.prefetch(g.unpooler.weight, L2 | ring, by=s.warp(1))",
        "needs a point of the program",
        "during=g.<op>",
    ),
    "two points": (
        "‸s.prefetch(g.unpooler.weight, L2, by=s.warp(1), during=g.down, before=g.combine)",
        "one point",
        "either during or before",
    ),
    "prefetched twice": (
        "s.prefetch(g.down.weight, ring, share=0, during=g.gate_up)\n    ‸s.prefetch(g.down.weight, ring)",
        "down_weight is prefetched twice",
        None,
    ),
    "prefetched vector": (
        "‸s.prefetch(g.combine.gain, L2, by=s.warp(1), during=g.down)",
        "post_expert_gain is a vector",
        None,
    ),
    "prefetched op": ("‸s.prefetch(g.down, ring)", "is not a weight", "g.<op>.weight"),
    "into what": ("‸s.prefetch(g.down.weight, 'ring')", "into='ring'", "ring | L2"),
    "cluster": ("‸s.launch(cluster=3)", "cluster=3: clusters have 1, 2, 4 or 8 blocks", None),
    "in_flight 0": ("‸s.in_flight(0)", "in_flight=0", None),
    "in_flight 0 of an op": ("‸s.in_flight(0, during=g.down)", "in_flight=0", None),
    "in_flight of no stream": ("‸s.in_flight(72 * KiB, during=g.combine)", "'combine' streams no weights", None),
    "in_flight below a stage": (
        "s.assign(g.pooler, load_weights=s.warp(0))\n    ‸s.in_flight(32767, during=g.pooler)",
        "in_flight=32767 is less than one stage of pooler (32768 bytes)",
        "at least 32768 bytes",
    ),
    "ring twice": ("‸s.ring(2, 36 * KiB)", "one weight ring", None),
    "no_allocate": ("‸s.hint(g.pooler.weight, no_allocate)", "cannot bypass L2", "use evict_first"),
    "hint for an op": ("‸s.hint([g.pooler], evict_first)", "is not a weight", "g.<op>.weight"),
    "hint for a vector": ("‸s.hint(g.residual.gate, evict_first)", "residual_gate is a vector", None),
    "house of two": ("‸s.reset(by=s.warps(0, 2))", "one warp keeps house", "s.warp(i)"),
    "accumulators": ("‸s.accumulators(0)", "accumulators(0)", None),
    "copies": ("x = ‸lamport(copies=4)", "copies=4: a channel has 1 to 3", None),
    "no edge": ("‸s.sync(g.residual >> g.pooler, counter())", "nothing passes along residual >> pooler", None),
    "wrong role of an edge": (
        "‸s.sync(g.pooler.finish >> g.pooler.reduce, counter())",
        "nothing passes along pooler.finish",
        None,
    ),
    "an op with itself": ("‸s.sync(g.pooler >> g.pooler, counter())", "nothing passes along pooler >> pooler", None),
    "two primitives": (
        "s.sync(g.pre_ffn_norm >> g.router, counter())\n    ‸s.sync(g.pre_ffn_norm >> g.pooler, lamport())",
        "'normed' is handed over in two ways",
        "all readers of a tensor share one primitive",
    ),
    "edge to nowhere": ("s.sync(‸g.pooler >> 3, counter())", "3 reads nothing", "g.<op>"),
    "not an edge": ("‸s.sync(g.pooler, counter())", "an edge and a primitive", "lamport()"),
    "cluster for a row": (
        "‸s.sync(g.combine >> g.unpooler, cluster())",
        "'combined' cannot travel within a cluster",
        "partial sums",
    ),
    "blocks": ("‸Schedule('x', g, machine, blocks=0)", "blocks=0", None),
    "block of warps": ("‸Schedule('x', g, machine, warps=33)", "warps=33", None),
    "name": ("‸Schedule('my kernel', g, machine)", "must be an identifier", None),
    "graph": ("‸muse_spark.expert_block(tp=3)", "tp=3", "use 1, 2, 4 or 8"),
    "python": ("x = ‸1 / 0", "ZeroDivisionError: division by zero", None),
    "python, missing file": ("‸open('/nowhere/at/all')", "FileNotFoundError", None),
    "python, in a directive": ("‸s.in_flight('much')", "TypeError", None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_directive_is_shown_with_a_caret(case: str, tmp_path: Path) -> None:
    code, message, hint = REFUSED[case]
    file, line, column = write(tmp_path, body(code))
    error = refused(file)
    assert isinstance(error, ScheduleError) and message in error.message
    points_at(error, file, line, column)
    if hint is not None:
        assert hint in (error.hint or "") and error.render().splitlines()[-1] == f"  help: {error.hint}"


def test_a_misspelt_name_is_an_attribute_error_too(tmp_path: Path) -> None:
    error = refused(write(tmp_path, body("g.poolr"))[0])
    assert isinstance(error, UnknownName) and isinstance(error, AttributeError)


@pytest.mark.parametrize(
    ("case", "note"),
    [("role twice", "first assigned"), ("prefetched twice", "the first time"), ("two primitives", "the first way")],
)
def test_a_contradiction_names_the_earlier_line(case: str, note: str, tmp_path: Path) -> None:
    file, line, _ = write(tmp_path, body(REFUSED[case][0]))
    assert any(
        text.startswith(f"  note: {note}") and text.endswith(f"({file}:{line - 1})")
        for text in refused(file).render().splitlines()
    )


def test_the_same_primitive_may_be_said_twice(tmp_path: Path) -> None:
    twice = "s.sync(g.pre_ffn_norm >> g.router, counter())\n    s.sync(g.pre_ffn_norm >> g.pooler, counter())"
    assert lower(load(write(tmp_path, body(twice))[0])).channel("normed").kind == "counter"


def test_no_ring(tmp_path: Path) -> None:
    text = HEAD.replace("    ring = s.ring(4, 36 * KiB)\n", "").replace("s = Sch", "s = ‸Sch") + "    return s\n"
    file, line, column = write(tmp_path, text)
    error = refused(file)
    assert "no weight ring" in error.message and "s.ring(" in (error.hint or "")
    points_at(error, file, line, column)


@pytest.mark.parametrize("ring", ["0, 36 * KiB", "4, 0", "4, 36 * KiB + 64", "4, 36 * KiB, in_flight=0"])
def test_rings_that_cannot_be(ring: str, tmp_path: Path) -> None:
    file, line, column = write(tmp_path, HEAD.replace("s.ring(4, 36 * KiB)", f"‸s.ring({ring})") + "    return s\n")
    points_at(refused(file), file, line, column)


# -- choices and options -------------------------------------------------------------------------------------------


def test_choices(tmp_path: Path) -> None:
    file, line, column = write(tmp_path, body("s.launch(\n        cluster=‸s.choice('cluster', 2, 1, 4),\n    )"))
    assert lower(load(file)).launch.cluster == 2  # the first one is the default
    plan = lower(load(file, choices={"cluster": "4"}))
    assert plan.launch.cluster == 4 and plan.choices == {"cluster": "4"}
    error = refused(file, choices={"cluster": "3"})
    assert error.message == "choice cluster=3" and error.hint == "options: 2, 1, 4"
    points_at(error, file, line, column)
    error = refused(file, choices={"cluter": "2"})
    assert "user.py offers no choice 'cluter'" in error.message and error.hint == "did you mean 'cluster'?"


def test_options(tmp_path: Path) -> None:
    file, *_ = write(
        tmp_path, HEAD.replace("choices=None", "choices=None, split='nn'") + "    assert split == 'nk'\n    return s\n"
    )
    assert load(file, options={"split": "nk"}).name == "test"
    error = refused(file, options={"splt": "nk"})
    assert "takes no option 'splt'" in error.message and error.hint == "did you mean 'split'?"


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = (2 ‸= 3)\n", "syntax error"),
        ("def f():\n‸return 1\n", "syntax error: expected an indented block"),
        ("import math\n‸import mathh\n", "ModuleNotFoundError: No module named 'mathh'"),
        ("def f():\n    return ‸None.x\n\nf()\n", "AttributeError: 'NoneType'"),
        (
            "from megagen.dsl import ALL_ONES\n‸from megagen.dsl import Shedule\n",
            "ImportError: cannot import name 'Shedule'",
        ),
        (HEAD + "    def inner():\n        return ‸[][3]\n    inner()\n", "IndexError"),
    ],
)
def test_python_errors_are_at_the_users_line(text: str, message: str, tmp_path: Path) -> None:
    file, line, column = write(tmp_path, text)
    error = refused(file)
    assert message in error.message
    if "syntax" in message:
        assert error.loc is not None and error.loc.line == line and f"{line} | " in error.render()
    else:
        points_at(error, file, line, column)


def test_a_broken_module_is_reported_where_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_helper_module.py").write_text("\n\n\nx = (\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file, line, column = write(tmp_path, "import math\n‸import broken_helper_module\n")
    points_at(refused(file), file, line, column)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "defines no function schedule"),
        ("schedule = 3", "defines no function schedule"),
        ("def schedule(*a, **k): return 3", "returned int, not a Schedule"),
        ("def schedule(machine): return 3", "TypeError: schedule() got an unexpected keyword argument"),
        ("x = '\0'", "null byte"),
    ],
)
def test_not_a_schedule_file(text: str, message: str, tmp_path: Path) -> None:
    file, *_ = write(tmp_path, text)
    error = refused(file)
    assert isinstance(error, ScheduleError) and message in error.message and str(file) in error.render()


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_bytes(b"# caf\xe9\n")
    assert "cannot read" in refused(file).message


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("muse_moe.py", "schedules/muse_moe.py"):  # shipped
        assert load(name).name == "muse_moe"
    for name in ("muse_mo.py", "elsewhere/muse_moe.py", str(tmp_path / "muse_moe.py")):
        error = refused(Path(name))
        assert f"no schedule at {name}" in error.message and error.hint == "did you mean 'muse_moe.py'?"
    assert "no schedule at" in refused(tmp_path).message


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    file, *_ = write(tmp_path, body("s.launch(cluster=3)"))
    assert "cluster=3)" in refused(file).render()
    file, *_ = write(tmp_path, body("s.launch(cluster=5)"))
    assert "cluster=5)" in refused(file).render()


def test_unknown_machine() -> None:
    with pytest.raises(MachineError, match="unknown machine 'h20'") as caught:
        load(EVERY, machine="h20")
    assert caught.value.hint == "did you mean 'h200'?"


def test_carets_stand_right_after_accents_and_tabs(tmp_path: Path) -> None:
    """Python counts columns in bytes of UTF-8; a terminal shows characters, and tabs as spaces."""
    for prefix in ("é = 'ü'; ", "x = 'ß€'; "):
        file = tmp_path / "accents.py"
        file.write_text(
            "from megagen.models import muse_spark\n"
            "def schedule(machine, tp, tokens, choices):\n"
            "    g = muse_spark.expert_block()\n"
            f"    {prefix}g.poler\n",
            "utf-8",
        )
        with pytest.raises(ScheduleError) as caught:
            load(file)
        shown, caret = caught.value.render().splitlines()[2:4]
        assert shown[caret.index("^") :] == "poler"
    file.write_text(
        "from megagen.models import muse_spark\ndef schedule(machine, tp, tokens, choices):\n"
        "\tg = muse_spark.expert_block()\n\tg.poler\n"
    )
    with pytest.raises(ScheduleError) as caught:
        load(file)
    shown, caret = caught.value.render().splitlines()[2:4]
    assert shown[caret.index("^") :] == "poler"


def test_a_schedule_may_define_a_dataclass(tmp_path: Path) -> None:
    file = tmp_path / "with_dataclass.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Knob:\n    size: int\n" + (resources.schedules() / "muse_moe.py").read_text("utf-8")
    )
    assert load(file).name == "muse_moe"
