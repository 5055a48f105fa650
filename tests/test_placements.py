"""Placements at random, of all graphs: legal by how they are made, so the checker may refuse none of them.

``PLACEMENTS_SEED`` repeats a run. How they are emulated: test_emulate_placements.py.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from placements import SEED, SHIPPED, draw, small, told

from megagen.check import RULES, check
from megagen.check.races import races
from megagen.compile.compiler import without_comments
from megagen.dsl import Schedule, load
from megagen.emit import emit
from megagen.errors import MegagenError
from megagen.lower import lower

COUNT = 120


@pytest.mark.slow
@pytest.mark.parametrize("first", range(len(SHIPPED)), ids=SHIPPED)
def test_no_two_are_alike_and_none_is_refused(first: int, tmp_path: Path, capsys: Any) -> None:
    """At full size, and every fifth as it is emulated, where only sizes differ."""
    if first == 0:
        with capsys.disabled():
            sys.stderr.write(f"\n{COUNT} placements of seed {SEED}\n")
    texts: dict[str, int] = {}
    for n in range(first, COUNT, len(SHIPPED)):
        p = draw(SEED, n)
        path = tmp_path / f"drawn_{n}.py"
        path.write_text(p.text)
        try:
            plan = lower(load(path), fused=p.fused)
            check(plan)
            if n // len(SHIPPED) % 5 == 0:
                _, tiny = small(p, path)
                for rule in RULES:
                    if rule is not races:  # what is read and written when is the same
                        list(rule(tiny))
        except MegagenError as error:
            pytest.fail(f"{error.render()}\n{told(p, SEED, n)}", pytrace=False)
        same = texts.setdefault(without_comments(emit(plan)), n)
        assert same == n, f"placement {same} emits the same\n{told(p, SEED, n)}"


def test_they_say_all_that_a_schedule_can_say() -> None:
    text = "".join(draw(0, n).text for n in range(100))
    directives = {name for name, f in vars(Schedule).items() if inspect.isfunction(f) and name[0] != "_"}
    for name in directives - {"fault"}:
        assert f"s.{name}(" in text, name
    kinds = ("lamport(copies=2)", "lamport(ALL_ONES, copies=3)", "lamport(reset=by_reader)", "counter()", "flag()")
    for said in (
        *kinds, "lamport(POSITIVE_ZERO)", "cluster()", "mbarrier()", "evict_last", "into=ring,", "into=L2,",
        "into=ring | L2", "during=", "before=", "in_flight=", "during=g.down)", "registers=(", "cluster=8", "pdl=False",
        "early_trigger=True", "stages=1,", "stages=5,", "warps=10,", "warps=32", "blocks=max(", "sum=s.warp(",
        "reduce=s.warp(", "reduce=s.warps(",
    ):  # fmt: skip
        assert said in text, said
