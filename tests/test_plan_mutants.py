"""Plans broken in one place: each is refused, by the rule on record, and three are seen to be broken."""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import cache

import plan_mutants
import pytest
from plan_mutants import PlanMutant
from plan_mutations import FAMILIES

QUICK = 1.5  # CPU seconds in which a mutant shows itself here
ENOUGH = 40  # mutants of today's code to draw from


@cache
def mutants() -> list[PlanMutant]:
    return plan_mutants.every()


def test_every_kind_is_there_and_no_name_twice() -> None:
    names = [m.name for m in mutants()]
    assert not [name for name, n in Counter(names).items() if n > 1]
    assert len(names) >= 200
    assert {m.kind for m in mutants()} == set(FAMILIES)
    assert {m.base.name for m in mutants()} == {b.name for b in plan_mutants.BASES}


def test_all_are_refused_by_the_rule_on_record() -> None:
    """But for edits that are no faults, which pass."""
    known = plan_mutants.results()
    assert known.keys() == {m.name for m in mutants()}, "run python tests/plan_mutants.py"
    wrong = []
    for m in mutants():
        rule, words = plan_mutants.refusal(m.plan)  # any other error than a CheckError ends the test
        legal = plan_mutants.reason(plan_mutants.LEGAL, m.name) is not None
        if bool(rule) is legal or rule != known[m.name].rule:
            wrong.append(f"{m.name}: {words or 'passes'} [{rule}], on record: {known[m.name].rule or 'passes'}")
    assert not wrong, "\n".join(wrong)


def test_what_is_on_record_is_as_it_should_be() -> None:
    """Each has been emulated, and shows something unless a reason is written down."""
    found = plan_mutants.results().values()
    assert not [r.name for r in found if not r.seen]
    assert not [f"{r.name}: {finding}" for r in found if (finding := plan_mutants.judge(r))]


def test_every_reason_has_a_mutant() -> None:
    found = plan_mutants.results().values()
    for table, of in ((plan_mutants.LEGAL, ""), (plan_mutants.HARMLESS, plan_mutants.NOTHING)):
        used = {plan_mutants.reason(table, r.name) for r in found if not of or r.seen == of}
        assert set(table.values()) <= used


def test_faults_with_a_usual_name_are_there() -> None:
    known = FAMILIES.keys() | plan_mutants.header_mutants().keys()
    for fault, names in plan_mutants.FAULTS.items():
        assert set(names) <= known, fault


def test_the_page_is_up_to_date() -> None:
    assert plan_mutants.PAGE.read_text() == plan_mutants.page(), "run python tests/plan_mutants.py --write"


def test_three_of_them_show_what_is_on_record(capsys: pytest.CaptureFixture[str]) -> None:
    """Without check, in the emulator. ``MUTANTS_SEED`` repeats a draw."""
    seed = os.environ.get("MUTANTS_SEED") or str(random.SystemRandom().randrange(1 << 32))
    with capsys.disabled():
        print(f"\nMUTANTS_SEED={seed}")  # noqa: T201
    known = plan_mutants.results()
    quick = [m for m in mutants() if known[m.name].seed > 0 and known[m.name].seconds <= QUICK]
    same = [m for m in quick if known[m.name].digest == m.digest]
    bench = plan_mutants.Bench()
    draw = random.Random(seed)
    if len(same) >= ENOUGH:
        for m in draw.sample(same, 3):
            want, found = known[m.name], plan_mutants.observe(bench, m, [known[m.name].seed])
            assert found.seen == want.seen, f"{m.name}: {found}, on record: {want.seen}"
        return
    # Other code may show it under another seed, or have made something else of it: but of three not of two.
    few = {
        m.name: plan_mutants.observe(bench, m, [known[m.name].seed, *plan_mutants.SEEDS[:3]])
        for m in draw.sample(quick, 3)
    }
    assert sum(found.seen == plan_mutants.NOTHING for found in few.values()) < 2, few
