"""Experts guessed from the step before: what is written down and asked for, and that no bit depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_emulate_swa import words

from megagen import resources
from megagen.bench.routes import most_used, routes
from megagen.check import check
from megagen.check.finding import Finding
from megagen.cli import pipeline
from megagen.cli.pipeline import Request
from megagen.dsl import load
from megagen.errors import CheckError, ScheduleError
from megagen.ir.plan import Plan, StepPlan
from megagen.lower import lower
from megagen.runtime.stack import Stack

GUESS = """
    for op in (g.gate_up, g.down):
        s.prefetch(op.weight, into=L2, experts=previous_step(top=4), by=finisher, during=g.router)
    s.experts_first(g.top_k, in_l2)
    return s
"""
TOP, POOL = 4, 16
SCHEDULE = """
from megagen.dsl import *
from megagen.models import muse_spark

def schedule(machine, tp=8, tokens=16, choices=None):
    g = muse_spark.expert_block(tp=tp, tokens=tokens)
    s = Schedule("test", g, machine, choices=choices)
    ring = s.ring(3, 36 * KiB)
    w = s.warp(3)
    {body}
    return s
"""
AT = "by=w, during=g.router"
REFUSED = {
    "none": ("previous_step(top=0)", "top=0: 1 to 32 experts"),
    "too many for a warp": ("previous_step(top=33)", "top=33: 1 to 32 experts"),
    "half": ("previous_step(top=1.5)", "top=1.5 is not a whole number"),
    "no hint": ("previous_step(top=4, hint=no_allocate)", "of what L2 is asked for"),
    "no guess": (f"s.prefetch(g.down.weight, into=L2, experts=8, {AT})", "experts is of type int"),
    "of no expert": (f"s.prefetch(g.pooler.weight, into=L2, experts=previous_step(4), {AT})", "is of no expert"),
    "into the ring": (
        f"s.prefetch(g.down.weight, into=ring | L2, share=0.5, experts=previous_step(4), {AT})", "as a whole, into L2",
    ),
    "a share": (f"s.prefetch(g.down.weight, into=L2, share=0.5, experts=previous_step(4), {AT})", "as a whole"),
    "by nobody": ("s.prefetch(g.down.weight, L2, experts=previous_step(4), during=g.router)", "needs the one warp"),
    "some time": ("s.prefetch(g.down.weight, L2, experts=previous_step(4), by=w)", "needs a point"),
    "twice": (
        f"for _ in range(2): s.prefetch(g.down.weight, into=L2, experts=previous_step(4), {AT})", "prefetched twice",
    ),
    "two guesses": (
        f"for n, op in (4, g.down), (5, g.gate_up): s.prefetch(op.weight, into=L2, experts=previous_step(n), {AT})",
        "one guess",
    ),
    "first without a guess": ("s.experts_first(g.top_k, in_l2)", "no experts are asked for"),
    "first of what": ("s.experts_first(g.router, in_l2)", "makes no table of experts"),
    "first by what": ("s.experts_first(g.top_k, L2)", "which is of type Into, not InL2"),
    "first twice": ("s.experts_first(g.top_k, in_l2); s.experts_first(g.top_k, in_l2)", "said twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_guess_is_refused_at_its_line(case: str, tmp_path: Path) -> None:
    body, message = REFUSED[case]
    file = tmp_path / "user.py"
    file.write_text(SCHEDULE.format(body=body))
    with pytest.raises(ScheduleError) as e:
        lower(load(file))
    assert message in e.value.message
    assert e.value.loc is not None and e.value.loc.text.strip() == body


def plan(guess: str = "4", **more: Any) -> Plan:
    return pipeline.check(Request(Path("muse_swa.py"), choices={"experts_guess": guess}, **more)).plan


def test_l2_holds_only_so_much() -> None:
    """Of an H200's 60 MB, less the exchanges, two thirds: nine experts are warned of, fourteen do not fit at all."""
    eight = plan("8")
    assert eight.guess is not None and not [f for f in check(eight) if "experts of" in f.message]
    found = check(eight.model_copy(update={"guess": eight.guess.model_copy(update={"top": 9})}))
    (warned,) = [f for f in found if f.level == "warning" and "experts of 3.54 MB" in f.message]
    assert isinstance(warned, Finding) and "previous_step(top=8)" in warned.message and warned.source.line
    with pytest.raises(CheckError, match=r"14 experts of 3.54 MB are 49.5 MB") as e:
        plan("14")
    assert e.value.hint == "previous_step(top=8)"
    plan("14", machine="b200")


def test_unfused_nothing_is_guessed() -> None:
    made = plan(fused=False)
    assert made.guess is None and "history" not in {p.name for p in made.params}
    assert not [s for k in made.kernels for p in k.programs for s in p.steps if s.call == "prefetch_guess"]


def test_what_an_earlier_launch_wrote_is_not_read_before_it_has_ended() -> None:
    made = plan(tiny=True, tp=2)
    (kernel,) = made.kernels

    def early(steps: tuple[StepPlan, ...]) -> tuple[StepPlan, ...]:
        return tuple(sorted(steps, key=lambda s: s.call != "prefetch_guess"))

    programs = tuple(p.model_copy(update={"steps": early(p.steps)}) for p in kernel.programs)
    wrong = made.model_copy(update={"kernels": (kernel.model_copy(update={"programs": programs}),)})
    with pytest.raises(CheckError, match="before it attaches"):
        check(wrong)


def remembered(history: torch.Tensor) -> list[tuple[int, list[int]]]:
    """Of each copy: the launch, and the experts."""
    return [(int(copy[0]), [int(x) - 1 for x in copy[1 : 1 + TOP] if x > 0]) for copy in history.view(2, -1)]


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The expert block's schedule, with a guess."""
    file = tmp_path_factory.mktemp("guess") / "guessing.py"
    text = (resources.schedules() / "muse_moe.py").read_text()
    file.write_text(text.replace("    return s\n", GUESS).replace("    L2,\n", "    L2, in_l2, previous_step,\n"))
    return file


TOKENS, TP = 3, 4
TABLES = [routes(n, TOKENS, seed=seed, pool=POOL) for seed, n in enumerate((8, 11, 9))]


def test_a_guess_is_remembered_and_asked_for_and_changes_no_bit(emulate: Any, guessing: Path) -> None:
    """Launches, each with another routing than the one before."""
    usual = emulate("muse_moe.py", tp=TP, seed=3)
    kernel = emulate(guessing, tp=TP, seed=4, race=True, footprints=True)
    inputs = usual.verifier.inputs(TOKENS, 7)
    expert = {op: kernel.plan.op(op).weights["weight"] for op in ("gate_up", "down")}
    size = {w.parameter: w.bytes // w.experts for w in kernel.plan.weights if w.parameter in expert.values()}

    last: list[int] = []
    for number, table in enumerate(TABLES):
        found = words(kernel.verifier.launch(inputs, table))
        if last:  # the first launch has nothing to guess from
            wanted = words(usual.verifier.launch(inputs, table))
            assert found.keys() == wanted.keys()
            assert [name for name, x in found.items() if not x.equal(wanted[name])] == []
        asked: dict[str, set[int]] = {name: set() for name in size}
        for f in kernel.world.engine.footprints().touched:
            if f.verb == "prefetch" and f.name in asked and (f.rank, f.launch) == (0, number):
                asked[f.name] |= {b // size[f.name] for first, end in f.ranges for b in range(first, end, 256)}
        assert asked == {name: set(last) for name in size}
        last = most_used(table, TOP)
        assert (number, last) in remembered(kernel.verifier.layers[0].tensors["history"])


def test_each_layer_has_its_own(emulate: Any, guessing: Path) -> None:
    """Two layers of one Plan, two steps: the launch in between is the other layer's."""
    kernel = emulate(guessing, tp=TP, seed=5, race=True)
    (rank,) = kernel.world.ranks
    given = kernel.verifier.layers[0].tensors
    weights = {p.name: given[p.name] for p in rank.plan.params if p.what == "weight"}
    inputs = kernel.verifier.inputs(TOKENS, 3)
    stack = Stack(kernel.world, [weights], inputs.ranks, layers=2)
    rank.set_step(inputs.step)
    for table in TABLES[:2]:
        rank.set_route_override(table)
        stack.launch()
        kernel.world.synchronize()
    histories = [layer.tensors["history"] for (layer,) in stack.bound]
    assert histories[0].data_ptr() != histories[1].data_ptr() != given["history"].data_ptr()
    for at, history in enumerate(histories):
        assert sorted(remembered(history)) == [(2 * step + at, most_used(TABLES[step], TOP)) for step in (0, 1)]


def test_after_a_recovery_launches_are_counted_anew(emulate: Any, guessing: Path) -> None:
    """A history that says it is of this very launch, or of later ones: all blocks still agree."""
    kernel = emulate(guessing, tp=TP, seed=6, race=True)
    inputs = kernel.verifier.inputs(TOKENS, 7)
    first = [words(kernel.verifier.launch(inputs, table)) for table in TABLES[1:]]
    kernel.world.recover()
    again = [words(kernel.verifier.launch(inputs, table)) for table in TABLES[1:]]
    for a, b in zip(first, again, strict=True):
        assert all(x.equal(b[name]) for name, x in a.items())
