"""Machine code that a launch asks L2 for: where the steps stand, what is asked for, and that no bit depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_emulate_swa import few, small, words

from megagen.check import check
from megagen.cli import pipeline
from megagen.cli.pipeline import Request
from megagen.errors import CheckError
from megagen.ir.plan import Plan, StepPlan
from megagen.runtime.decoder import Decoder

WARMED = {"warm_code": "4", "warm_next": "combine"}
COLD = {"warm_code": "off"}
LINE, TP = 128, 4


def plan(**choices: str) -> Plan:
    return pipeline.check(Request(Path("muse_swa.py"), choices=choices, tiny=True, tp=2)).plan


def steps(plan: Plan, call: str) -> list[tuple[int, int, StepPlan]]:
    """(first warp, place, step) of a call."""
    programs = [p for k in plan.kernels for p in k.programs]
    return [(p.first, i, s) for p in programs for i, s in enumerate(p.steps) if s.call == call]


def test_own_code_comes_first_and_the_next_ones_late() -> None:
    made = plan(**WARMED)
    ((warp, place, own),) = steps(made, "warm_code")
    assert (warp, place, own.args) == (1, 0, (made.launch.blocks,))  # four blocks, or as many as there are
    ((warp, place, other),) = steps(made, "warm_next")
    program = next(p for p in made.kernels[0].programs if p.first == warp)
    assert program.steps[place - 1].call == "wait_point"
    assert program.steps[place - 1].barriers[0].barrier == "begin_combine"
    assert other.source.line and own.source.line and other.source.line != own.source.line


def test_without_the_choices_nothing_is_there() -> None:
    made = plan(**COLD)
    assert not made.tells_code and not steps(made, "warm_code") and not steps(made, "warm_next")


@pytest.mark.parametrize("args", [(), (0,), (133,), (1, 2)], ids=str)
def test_a_plan_that_asks_in_other_blocks_is_refused(args: tuple[int, ...]) -> None:
    made = plan(**WARMED)

    def edit(step: StepPlan) -> StepPlan:
        return step.model_copy(update={"args": args}) if step.call == "warm_code" else step

    (kernel,) = made.kernels
    programs = tuple(p.model_copy(update={"steps": tuple(map(edit, p.steps))}) for p in kernel.programs)
    wrong = made.model_copy(update={"kernels": (kernel.model_copy(update={"programs": programs}),)})
    with pytest.raises(CheckError, match="warm_code in"):
        check(wrong)


def test_every_line_is_asked_for_and_no_bit_changes(emulate: Any) -> None:
    """A tensor plays the code: the emulator has none."""
    usual = emulate("muse_swa.py", tp=TP, seed=1, options=small(TP), choices=COLD)
    inputs = usual.verifier.inputs(3, 5)
    wanted = usual.verifier.launch(inputs, few(3))

    kernel = emulate("muse_swa.py", tp=TP, seed=2, race=True, footprints=True, options=small(TP), choices=WARMED)
    (rank,) = kernel.world.ranks
    lines = 38
    tensors = {name: rank._empty(name, "input", "uint8", (lines * LINE + 16,)) for name in ("mine", "others")}
    codes = [(x.data_ptr(), lines * LINE + 16) for x in tensors.values()]  # what is less than a line counts for nothing
    rank._system = replace(rank._system, code=codes[0])

    follower: Any = SimpleNamespace(code=codes[1])
    kernel.verifier.layers[0] = rank.bind(kernel.verifier.layers[0].tensors, then=follower)
    found = kernel.verifier.launch(inputs, few(3))
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        assert words({name: x})[name].equal(words(wanted)[name]), name

    seen: dict[str, set[int]] = {name: set() for name in tensors}
    for f in kernel.world.engine.footprints().touched:
        if f.name in seen and f.verb == "prefetch":
            seen[f.name] |= {b // LINE for first, last in f.ranges for b in range(first, last)}
    assert seen == {name: set(range(lines)) for name in tensors}


def test_a_launch_of_a_step_knows_which_kernel_follows() -> None:
    """The last one is followed by the next step's first."""
    names = ("first", "swa", "swa", "global", "last")
    followed: list[tuple[str, str]] = []

    class Rank:
        def __init__(self, name: str) -> None:
            self.name, self.plan = name, SimpleNamespace(params=[])

        def allocate(self, name: str) -> object:
            return SimpleNamespace()

        def bind(self, given: dict[str, Any], *, then: Any) -> Any:
            followed.append((self.name, then.name))
            return SimpleNamespace(tensors=given)

    class Fake(Decoder):
        def _table(self, rank: Any) -> Any:
            return None

        def _ids(self, index: int, rank: Any) -> Any:
            return None

        def _run(self, step: Any, ids: Any) -> list[int]:
            return []

        def close(self) -> None: ...

    config, first = SimpleNamespace(vocab=8), SimpleNamespace(tokens=4)
    model: Any = SimpleNamespace(config=config, positions=8, names=names, plan=lambda index: first)
    ranks: Any = [{name: Rank(name) for name in names}]
    Fake(model, ranks, lambda launch, rank: {})
    assert followed == [*zip(names, (*names[1:], names[0]), strict=True)]
