"""What the next layer's caches hold already, asked for before its launch begins: exactly that, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_emulate_swa import few, small, words

from megagen.check import check
from megagen.cli import pipeline
from megagen.cli.pipeline import Request
from megagen.dsl import load
from megagen.errors import CheckError, ScheduleError
from megagen.ir.plan import StepPlan
from megagen.runtime.step import Step

ASKED = {"next_keys": "combine"}
CHUNK, RING = 64, 4  # of a tiny layer, which has two chunks of window
BYTES = CHUNK * 64 * 2
SCHEDULE = """
from megagen.dsl import L2, Machine, Schedule
from megagen.models import muse_spark

def schedule(machine, tp=8, tokens=16, choices=None):
    g = muse_spark.sliding_layer(tp=tp, tokens=tokens, following={following!r})
    s = Schedule("test", g, machine, choices=choices)
    s.prefetch(g.next_heads, {more})
    return s
"""


@pytest.mark.parametrize(
    ("following", "more", "message"),
    [
        ("global", "into=L2, by=s.warp(1), before=g.residual", "caches of g.next_heads grow"),
        ("sliding", "into=s.ring(3, 36864), by=s.warp(1), before=g.residual", "asked for as a whole, into L2"),
        ("sliding", "into=L2, share=0.5, by=s.warp(1), before=g.residual", "asked for as a whole, into L2"),
        ("sliding", "into=L2, before=g.residual", "needs the one warp that asks for it"),
        ("sliding", "into=L2, by=s.warp(1)", "needs a point of the program"),
    ],
)
def test_what_is_not_asked_for(following: str, more: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(SCHEDULE.format(following=following, more=more))
    with pytest.raises(ScheduleError, match=message) as e:
        load(file)
    assert e.value.loc is not None and "s.prefetch" in e.value.loc.text


def test_how_much_there_is_is_not_known_before_the_launch() -> None:
    """Weights may be asked for before a warp has waited for the launch before, caches may not."""
    made = pipeline.check(Request(Path("muse_swa.py"), choices=ASKED, tiny=True, tp=2)).plan
    (kernel,) = made.kernels

    def early(steps: tuple[StepPlan, ...]) -> tuple[StepPlan, ...]:
        return tuple(sorted(steps, key=lambda s: (s.op, s.call) != ("next_heads", "prefetch_l2")))

    programs = tuple(p.model_copy(update={"steps": early(p.steps)}) for p in kernel.programs)
    wrong = made.model_copy(update={"kernels": (kernel.model_copy(update={"programs": programs}),)})
    with pytest.raises(CheckError, match="runs next_heads before it attaches"):
        check(wrong)


def held(context: int, tokens: int) -> set[int]:
    """Slots of chunks that hold some of what came before, and keep it: the ring's, by the number."""
    chunks = {(context + i) // CHUNK for i in range(-RING * CHUNK, tokens) if context + i >= 0}
    kept = sorted(chunks)[-RING:]
    return {c % RING for c in kept if c * CHUNK < context}


def test_all_that_is_held_is_asked_for_and_nothing_else(emulate: Any) -> None:
    """In the order of a sequence's life: nothing is held, a chunk, all but the one written over, all of the ring."""
    tokens, tp = 3, 4
    options = small(tp, kv_heads=2 * tp)
    usual = emulate("muse_swa.py", tp=tp, seed=1, options=options, choices={"next_keys": "off"})
    kernel = emulate("muse_swa.py", tp=tp, seed=2, race=True, footprints=True, options=options, choices=ASKED)
    for number, context in enumerate((0, 1, 4 * CHUNK - 1, 777)):
        inputs = usual.verifier.inputs(tokens, context, Step.chain(tokens, context))
        found = words(kernel.verifier.launch(inputs, few(tokens)))
        if context == 777:
            wanted = words(usual.verifier.launch(inputs, few(tokens)))
            assert found.keys() == wanted.keys() and all(x.equal(wanted[name]) for name, x in found.items())

        asked: dict[str, set[int]] = {"next_k_cache": set(), "next_v_cache": set()}
        for f in kernel.world.engine.footprints().touched:
            if f.verb == "prefetch" and f.name in asked and f.launch == number:
                asked[f.name] |= {b // BYTES for first, last in f.ranges for b in range(first, last, 256)}
        slots = {head * RING + slot for head in range(2) for slot in held(context, tokens)}
        assert asked == dict.fromkeys(asked, slots), context
