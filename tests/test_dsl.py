"""The schedule language: who is told what, and at which line and column."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from megagen import machines, resources
from megagen.dsl import Schedule, load
from megagen.errors import MachineError, MegagenError, ScheduleError, UnknownName
from megagen.ir.plan import Plan, Source
from megagen.lower import lower
from megagen.models.muse_spark import expert_block

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
    assert stream is not None and plan.stamps is not None and plan.guess is not None
    seen["guess"] = {plan.guess.source.line}
    seen["stamps"] = {plan.stamps.source.line}
    seen["hint"] = {stream.source.line}
    for program in plan.kernels[0].programs:
        for step in program.steps:
            name = {
                "load_weights": "loads", "math": "math", "reduce": "math", "finish": "finish", "select": "top_k",
                "tables": "top_k", "measure": "pieces", "reset": "reset", "trigger": "launch", "warm_code": "warm",
                "warm_next": "warm_next", "prefetch_guess": "guess",
                "compute": "pieces" if step.op in ("combine", "residual") else "norms",
            }.get(step.call)  # fmt: skip
            if step.rehearsal is not None:
                seen.setdefault("dry_run", set()).add(step.rehearsal.line)
            if step.call in ("wait_point", "signal_point"):
                name = {"begin_gate_up": "l2", "begin_combine": "warm_next", "begin_router": "guess"}.get(
                    step.barriers[0].barrier, "both"
                )
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
    "code by two": ("‸s.warm_code(by=s.warps(1, 3))", "one warp of a block asks for code", "by=s.warp(i)"),
    "code by a number": ("‸s.warm_code(by=1)", "by is of type int", "by=s.warp(i)"),
    "code in no block": ("‸s.warm_code(by=s.warp(1), blocks=0)", "blocks=0", "at least one"),
    "code at a point": (
        "‸s.warm_code(by=s.warp(1), before=g.combine)",
        "own code is asked for when its launch begins",
        "next=True",
    ),
    "next code some time": ("‸s.warm_code(by=s.warp(1), next=True)", "needs a point of the program", "before=g.<op>"),
    "next code at two points": (
        "‸s.warm_code(by=s.warp(1), next=True, before=g.combine, during=g.down)",
        "at one point",
        "during or before",
    ),
    "code twice": (
        "s.warm_code(by=s.warp(1))\n    ‸s.warm_code(by=s.warp(2))",
        "the kernel's own code is said twice",
        None,
    ),
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
    "python, in a directive": ("‸s.warp()", "TypeError", None),
    "sys.exit": ("import sys\n    ‸sys.exit()", "calls sys.exit()", "return a Schedule"),
    # types
    "half a stage": ("‸Schedule('x', g, machine).ring(3.5, 128)", "stages=3.5 is not a whole number", None),
    "half a byte": ("‸Schedule('x', g, machine).ring(3, 128.0)", "stage_bytes=128.0 is not a whole number", None),
    "half a block": ("‸Schedule('x', g, machine, blocks=1.5)", "blocks=1.5 is not a whole number", None),
    "warps of a float": ("‸Schedule('x', g, machine, warps=12.0)", "warps=12.0 is not a whole number", None),
    "machine's name": (
        "‸Schedule('x', g, machine='h200')",
        "machine is of type str, not Machine",
        "pass on the machine",
    ),
    "swapped": ("‸Schedule('x', machine, g)", "graph is of type Machine, not Graph", "Schedule(name, graph, machine"),
    "name's type": ("‸Schedule(3, g, machine)", "name is of type int, not str", None),
    "choices' type": ("‸Schedule('x', g, machine, choices='a')", "choices is of type str, not Mapping", None),
    "float warp": ("‸s.warps(4, 12.0)", "end=12.0 is not a whole number", None),
    "warp of text": ("‸s.warp('1')", "warp='1' is not a whole number", None),
    "in_flight of text": ("‸s.in_flight('much')", "in_flight='much' is not a whole number", None),
    "share of text": ("‸s.prefetch(g.down.weight, ring, share='1')", "share='1' is not a number", None),
    "by a number": ("‸s.prefetch(g.down.weight, L2, by=3, during=g.router)", "by is of type int", "by=s.warp(i)"),
    "float slots": ("‸s.accumulators(2.5)", "accumulators=2.5 is not a whole number", None),
    "true slots": ("‸s.accumulators(True)", "accumulators=True is not a whole number", None),
    "cluster of text": ("‸s.launch(cluster='2')", "cluster='2' is not a whole number", None),
    "pdl of text": ("‸s.launch(pdl='no')", "pdl is of type str, not bool", None),
    "early of text": ("‸s.launch(early_trigger=1)", "early_trigger is of type int, not bool", None),
    "one number of registers": ("‸s.launch(registers=128)", "registers=128 is not a pair", "(120, 192)"),
    "three of registers": ("‸s.launch(registers=(1, 2, 3))", "registers=(1, 2, 3) is not a pair", "(120, 192)"),
    "registers of text": ("‸s.launch(registers=(1, '2'))", "registers='2' is not a whole number", None),
    "empty of text": ("‸lamport(empty='x')", "empty='x' is not a whole number", None),
    "long empty": ("‸lamport(empty=1 << 32)", "empty=4294967296 is no 32-bit word", None),
    "copies of text": ("‸lamport(copies='2')", "copies='2' is not a whole number", None),
    "reset of text": ("‸lamport(reset='me')", "reset='me'", "by_launch or by_reader"),
    "dry run of nothing": ("‸s.dry_run()", "dry_run of nothing", "s.dry_run(g.<op>"),
    "dry run of text": ("‸s.dry_run('combine')", "'combine' is neither an op nor a role", "g.<op>.<role>"),
    "dry run of math": (
        "‸s.dry_run(g.combine, g.pooler.math)",
        "g.pooler.math cannot be rehearsed: it fills or drains the ring",
        "of this op: g.pooler.reduce, g.pooler.finish",
    ),
    "dry run of a stream": ("‸s.dry_run(g.down.load_weights)", "g.down.load_weights cannot be", "g.down.reduce"),
    "dry run twice": (
        "s.dry_run(g.pooler.finish)\n    ‸s.dry_run(g.top_k, g.pooler)",
        "pooler.finish is rehearsed twice",
        None,
    ),
    "dry run of another graph": (
        "‸s.dry_run(muse_spark.last(tp=tp, tokens=tokens).choose)",
        "is of another graph than the schedule's",
        None,
    ),
    "fault of an op": ("‸s.fault(g.down)", "edge is of type OpHandle", "g.a >> g.b"),
    "choice of a number": ("‸s.choice(3, 1)", "name is of type int, not str", None),
    "choice of nothing": ("‸s.choice('foo')", "choice 'foo' has no options", None),
    # names
    "directive": ("s.‸acumulators(4)", "no directive 'acumulators'", "did you mean 'accumulators'?"),
    "directive, many lines": ("(s\n     .‸lunch())", "no directive 'lunch'", "did you mean 'launch'?"),
    "keyword": (
        "s.prefetch(g.down.weight, ring, ‸shares=1)",
        "prefetch() takes no 'shares'",
        "did you mean 'share'?",
    ),
    "keyword, many lines": ("s.launch(\n        ‸pld=True)", "launch() takes no 'pld'", "did you mean 'pdl'?"),
    "keyword of a primitive": ("lamport(‸emty=3)", "lamport() takes no 'emty'", "did you mean 'empty'?"),
    "keyword of the schedule": ("Schedule('x', g, machine, ‸warp=3)", "Schedule() takes no 'warp'", "'warps'?"),
    "keyword of the graph": ("muse_spark.expert_block(‸splt='nk')", "expert_block() takes no 'splt'", "'split'?"),
    "keyword of one's own": ("f = lambda: 1\n    ‸f(a=1)", "TypeError: schedule.<locals>.<lambda>() got", None),
    "hint for one op": ("‸s.hint(g.unpooler, evict_first)", "g.unpooler is not a weight", "g.<op>.weight"),
    "hint for a role": ("‸s.hint(g.unpooler.math, evict_first)", "g.unpooler.math is not a weight", "g.<op>.weight"),
    "hint of text": (
        "‸s.hint(g.pooler.weight, 'evict')",
        "'evict' is not a cache hint",
        "evict_normal, evict_first, evict_last",
    ),
    "assign to one weight": ("‸s.assign(g.pooler.weight, math=s.warp(1))", "g.pooler.weight is not an op", "g.<op>"),
    "chain": ("s.sync(‸g.down >> g.combine >> g.unpooler, counter())", "an edge has two ends", "as two edges"),
    "0 stages": ("‸Schedule('x', g, machine).ring(0, 128)", "a ring of 0 stages: at least one", None),
    "keyword of C++": ("‸Schedule('for', g, machine)", "must be an identifier", "'for' is a keyword of C++"),
    "two underscores": ("‸Schedule('__x', g, machine)", "must be an identifier", "two underscores"),
    "accent": ("‸Schedule('é', g, machine)", "must be an identifier", "ASCII"),
    # twice, for nothing, elsewhere
    "nothing waits": ("‸s.prefetch(g.down.weight, ring, during=g.router)", "nothing waits for a point", "below 1"),
    "early without pdl": ("‸s.launch(pdl=False, early_trigger=True)", "triggers nothing", "pdl=True"),
    "launch twice": ("s.launch(cluster=2)\n    ‸s.launch()", "launch is said twice", None),
    "reset twice": ("s.reset(s.warp(1))\n    ‸s.reset(s.warp(1))", "reset is said twice", None),
    "accumulators twice": ("s.accumulators(2)\n    ‸s.accumulators(4)", "accumulators is said twice", None),
    "hint twice": (
        "s.hint(g.down.weight, evict_last)\n    ‸s.hint([g.pooler.weight, g.down.weight], evict_last)",
        "the hint of down_weight is said twice",
        None,
    ),
    "choice twice": ("s.choice('a', 1, 2)\n    ‸s.choice('a', 1, 3)", "'a' is offered with other options", None),
    "nothing of L2": (
        "‸s.prefetch(g.down.weight, L2, share=0, by=s.warp(1), during=g.router)",
        "asks L2 for nothing",
        "leave",
    ),
    "op of elsewhere": (
        "other = muse_spark.expert_block()\n    ‸s.assign(other.pooler, finish=s.warp(3))",
        "g.pooler is of another graph",
        "graph of Schedule()",
    ),
    "weight of elsewhere": (
        "other = muse_spark.expert_block()\n    ‸s.hint(other.pooler.weight, evict_first)",
        "g.pooler.weight is of another graph",
        "graph of Schedule()",
    ),
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
    [
        ("role twice", "first assigned"),
        ("two primitives", "the first way"),
        *(
            (f"{what}", "the first time")
            for what in REFUSED
            if what.endswith(" twice") and what[:4] not in ("role", "ring")
        ),
    ],
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


@pytest.mark.parametrize(
    ("old", "new", "request_", "message", "hint"),
    [
        ("choices=choices", "", {"choices": {"x": "2"}}, "ignores choice x=2", "Schedule(..., choices=choices)"),
        ("tp=tp, ", "tp=4, ", {}, "ignores tp=8: its graph has tp=4", "tp=tp"),
        ("tp=tp, ", "", {"tp": 2}, "ignores tp=2: its graph has tp=8", "tp=tp"),
        ("tokens=tokens", "", {"tokens": 3}, "ignores tokens=3: its graph has tokens=16", "tokens=tokens"),
        ("g, machine", "g, machines.load('b200')", {}, "ignores machine h200: it schedules for b200", "the machine"),
        (
            "g, machine", "g, machine.model_copy(update={'sms': 1})", {},
            "ignores machine h200: it schedules for h200 with other figures", "the machine",
        ),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_not_ignored(
    old: str, new: str, request_: dict[str, Any], message: str, hint: str, tmp_path: Path
) -> None:
    head = HEAD.replace(old, new, 1) if old != "choices=choices" else HEAD.replace(", choices=choices)", ")")
    assert head != HEAD
    text = f"from megagen import machines\n{head}    s.choice('x', 1, 2)\n    return s\n".replace("= Sch", "= ‸Sch")
    file, line, column = write(tmp_path, text)
    error = refused(file, **request_)
    assert message in error.message and hint in (error.hint or "")
    points_at(error, file, line, column)


def test_a_choice_of_a_schedule_that_offers_none(tmp_path: Path) -> None:
    error = refused(write(tmp_path, body("pass"))[0], choices={"foo": "1"})
    assert "offers no choice 'foo'" in error.message and error.hint == "it offers none"


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("x: int = 3", "4", 4), ("x=3", "4", 4), ("x: int | None = None", "4", 4), ("x: 'int' = 3", "-4", -4),
        ("x: float = 1", "4", 4.0), ("x=0.5", "1e-3", 0.001), ("x: bool = True", "false", False),
        ("x=False", "1", True), ("x=False", "0", False), ("x: bool = False", "True", True),
        ("x='3'", "4", "4"), ("x: str | None = None", "4", "4"), ("x=None", "4", "4"), ("x: 'int | str' = 3", "4", "4"),
        ("x: __import__('typing').Optional[int] = 3", "4", 4), ("x: __import__('typing').Literal['4'] = 3", "4", "4"),
        ("x: 'Strange' = 3", [], []), ("x: list[int] = 3", [1], [1]), ("x: int = 3", 2.5, 2.5),
        ("**x", "4", {"x": "4"}),
    ],
)  # fmt: skip
def test_options_are_what_the_parameter_is(parameter: str, text: object, value: object, tmp_path: Path) -> None:
    head = HEAD.replace("choices=None", f"choices=None, {parameter}")
    file, *_ = write(
        tmp_path, head + f"    assert x == {value!r} and type(x) is {type(value).__name__}\n    return s\n"
    )
    load(file, options={"x": text})


@pytest.mark.parametrize(
    ("parameter", "text", "message"),
    [
        ("x: int = 3", "four", "option x=four: user.py takes a whole number"),
        ("x: int = 3", "4.5", "takes a whole number"),
        ("x: float = 3", "much", "takes a number"),
        ("x: bool = True", "maybe", "takes true or false"),
        ("x: muse_spark.MuseSparkConfig | None = None", "a", "'x' of user.py cannot be given as text"),
        ("x: dict[str, str] | None = None", "a", "cannot be given as text"),
        ("x=()", "a", "cannot be given as text: it is tuple"),
        ("x: 'Strange' = 3", "a", "cannot be given as text: it is Strange"),
    ],
)
def test_options_that_are_not(parameter: str, text: str, message: str, tmp_path: Path) -> None:
    head = HEAD.replace("choices=None", f"choices=None, {parameter}")
    assert message in refused(write(tmp_path, head + "    return s\n")[0], options={"x": text}).message


def test_names_print_as_they_are_written() -> None:
    g = expert_block()
    for op in g.ops:
        handles = [getattr(g, op.name), *(getattr(getattr(g, op.name), n) for n in op.weights)]
        roles = [getattr(getattr(g, op.name), r.name) for r in op.roles()]
        for handle in [*handles[1:], *roles, *(r >> g.combine for r in roles), handles[0] >> g.combine]:
            assert eval(repr(handle), {"g": g}) == handle
        assert repr(handles[0]) == f"g.{op.name}"


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
        ("import sys\n‸sys.exit(3)\n", "the schedule calls sys.exit(3)"),
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


def test_a_misspelt_import_is_suggested(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "from megagen.dsl import countr\n")[0])
    assert error.hint == "did you mean 'counter'?"


def test_prints_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(write(tmp_path, "print('module')\n" + body("print('function')"))[0])
    assert capsys.readouterr() == ("", "module\nfunction\n")


def test_neighbours_are_imported_and_forgotten(tmp_path: Path) -> None:
    """Two schedules, each with a ``base`` of its own."""
    path, modules = list(sys.path), set(sys.modules)
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "base.py").write_text(f"NAME = {name!r}\n")
        text = "import base\n" + HEAD.replace('"test"', "base.NAME") + "    from base import NAME\n    return s\n"
        assert load(write(folder, text)[0]).name == name
        assert sys.path == path and "base" not in set(sys.modules) - modules
    refused(write(tmp_path, "import base\n")[0])
    assert sys.path == path


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
        ("schedule = dict", "ValueError: no signature"),
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


def test_many_threads_may_load() -> None:
    """Modules and prints are the process's, so files run one after the other."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: load("muse_moe.py"), range(32)))
    assert len({s.graph.model_dump_json() for s in found}) == 1
    assert not [name for name in sys.modules if name.startswith("megagen_schedule")]


@pytest.mark.parametrize("name", ["barrier", "channel", "policy", "tensor", "Params", "Ctx", "main"])
def test_a_kernel_may_not_be_called_what_stands_beside_it(name: str) -> None:
    """The compiler would find either."""
    with pytest.raises(ScheduleError, match="must be an identifier") as e:
        Schedule(name, expert_block(tp=8, tokens=16), machines.load("h200"))
    assert f"the emitted code has a {name!r} of its own" in e.value.render()
