"""Roles that are rehearsed: the same bits, nothing of a dry run is left, and each guard of it is needed.

A mutant takes one guard out of the headers, and the expert block, in which all that can is rehearsed, is launched.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_emulate_mutants as block
import test_swa_mutants as layer
import torch
from test_emulate_mutants import (
    BARRIER,
    CHANNEL,
    CLUSTER,
    COUNTER,
    EXPERT,
    FLAG,
    FORMAT,
    ROW,
    TOP_K,
    WAIT,
    Bench,
    Mutant,
    Variant,
    one,
)
from test_emulate_swa import differing, few, small

from megagen import resources
from megagen.check import check
from megagen.cli import pipeline
from megagen.compile import compile_source
from megagen.compile.report import sections
from megagen.dsl import load
from megagen.emit import emit
from megagen.errors import CheckError
from megagen.ir.plan import Plan
from megagen.lower import lower
from megagen.runtime.step import Step
from megagen.settings import Settings

LAUNCH = "    s.launch("
ALL = "s.dry_run(*(op for op in (getattr(g, o.name) for o in g.ops)))"


def rehearsed(folder: Path, shipped: str) -> Path:
    """A shipped schedule in which all that can is rehearsed."""
    text = (resources.schedules() / shipped).read_text("utf-8")
    assert text.count(LAUNCH) == 1
    path = folder / shipped
    path.write_text(text.replace(LAUNCH, f"    {ALL}\n{LAUNCH}"))
    return path


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rehearsed(tmp_path_factory.mktemp("schedules"), "muse_moe.py")


# -- Plan and text ---------------------------------------------------------------------------------------------------


def test_a_plan_says_what_is_rehearsed_and_by_which_line(everything: Path) -> None:
    line = 1 + everything.read_text().splitlines().index(f"    {ALL}")
    for fused in (True, False):
        plan = lower(load(everything), fused=fused)
        assert Plan.from_json(plan.to_json()) == plan
        check(plan)
        steps = [s for k in plan.kernels for p in k.programs for s in p.steps]
        assert {s.rehearsal.line for s in steps if s.rehearsal} == {line}
        specs = {(op.name, s.name): s for op in plan.ops for s in op.specs}
        for s in steps:
            spec = specs.get((s.op or "", s.call))
            assert (s.rehearsal is not None) == (spec is not None and not spec.stream and not spec.ring), s


def test_only_its_calls_change_in_the_text(everything: Path) -> None:
    def text(path: Path | str) -> str:
        return re.sub(r"  // .*", "", emit(lower(load(path))))

    dry = text(everything)
    assert "ctx.dry_run([&] { ops::Combine<policy::Combine>::compute<4>(ctx); });\n" in dry
    undone, n = re.subn(r"ctx\.dry_run\(\[&\] \{ (.*) \}\);", r"\1", dry)
    assert n == 15
    assert undone == text(resources.schedules() / "muse_moe.py")


@pytest.mark.parametrize("call", ["math", "load_weights", "attach", "reset"])
def test_what_has_an_effect_is_not_rehearsed(call: str) -> None:
    plan = lower(load(resources.schedules() / "muse_moe.py"))
    kernel = plan.kernels[0]
    programs = []
    for p in kernel.programs:
        steps = tuple(s.model_copy(update={"rehearsal": s.source} if s.call == call else {}) for s in p.steps)
        programs.append(p.model_copy(update={"steps": steps}))
    broken = plan.model_copy(update={"kernels": (kernel.model_copy(update={"programs": tuple(programs)}),)})
    with pytest.raises(CheckError, match=rf"rehearses (\w+\.)?{call}, which would have an effect \[roles\]"):
        check(broken)


# -- machine code ----------------------------------------------------------------------------------------------------


def code(path: Path | str, headers: dict[str, str]) -> bytes:
    plan, settings = lower(load(path)), Settings.from_env()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "headers", lambda: headers)
        found = compile_source(emit(plan), kernels=[plan.name], archs=["sm_90a"], settings=settings)["sm_90a"]
    return sections(found.path.read_bytes())[f".text.{plan.name}"]


def opcodes(text: bytes) -> list[int]:
    """Of machine code: the low 12 of an instruction's 128 bits."""
    return [int.from_bytes(text[i : i + 2], "little") & 0xFFF for i in range(0, len(text), 16)]


def test_it_costs_nothing_where_nothing_is_rehearsed_and_little_where_it_is(everything: Path) -> None:
    """Without: the code of headers in which the flag is a constant. With: both passes are the same code."""
    bare, kernel = dict(resources.headers()), "megagen/kernel.cuh"
    bare[kernel], n = re.subn(r"bool dry = false;", "static constexpr bool dry = false;", bare[kernel])
    bare[kernel], m = re.subn(r"^ +dry = .*;\n", "", bare[kernel], flags=re.M)
    assert (n, m) == (1, 3)
    without = code(resources.schedules() / "muse_moe.py", dict(resources.headers()))
    assert len(without) > 100_000
    # registers may be others, and so may the order of a few
    assert Counter(opcodes(without)) == Counter(opcodes(code(resources.schedules() / "muse_moe.py", bare)))
    assert len(without) < len(code(everything, dict(resources.headers()))) < 1.1 * len(without)


# -- bits ------------------------------------------------------------------------------------------------------------


def test_a_layers_bits_are_the_same(emulate: Any) -> None:
    made = []
    for dry in ("off", "on"):
        kernel = emulate(
            "muse_swa.py", tp=4, seed=3, race=True, options=small(4), choices={"dry_run": dry, "warm_code": "off"}
        )
        inputs = kernel.verifier.inputs(3, 0, Step.chain(3, 300))
        made.append(kernel.verifier.launch(inputs, few(3)))
    assert not differing(*made)


# -- guards ----------------------------------------------------------------------------------------------------------

SEND = "if (ctx.dry) return;\n        if constexpr (!kLamport)"
EARLY = "        if (ctx.dry) return !ctx.dead;\n"
ONE_LANE = "if (ctx.lane == 0 && !ctx.dry)"


UNGUARDED = "if (ctx.lane == 0) "
UNLUCKY: Any = {"once": True, "seeds": range(1, 13)}  # a reader has to come between the rehearsal and the real thing


def without(header: str, old: str, new: str, **more: Any) -> Mutant:
    return Mutant("", one(header, old, new), **more)


MUTANTS = {
    "send: on the rank": without(
        CHANNEL, SEND, SEND.replace("ctx.dry", "D::kWorld && ctx.dry"), kinds="race overwritten unwritten deadlock"
    ),
    "send: to peers": without(
        CHANNEL, SEND, SEND.replace("ctx.dry", "!D::kWorld && ctx.dry"), wrong="expert_out", **UNLUCKY
    ),
    "send: to several peers": without(
        CHANNEL,
        SEND,
        SEND.replace("ctx.dry", "!D::kWorld && ctx.dry"),
        wrong="stream_out",
        on=Variant(ranks=2),
        **UNLUCKY,
    ),
    "publish: a counter": without(
        CHANNEL,
        f"{ONE_LANE} ptx::red_add_release",
        f"{UNGUARDED} ptx::red_add_release",
        kinds="race",
        on=Variant(COUNTER),
    ),
    "publish: a flag": without(CHANNEL, f"{ONE_LANE} {{\n", f"{UNGUARDED} {{\n", kinds="race", on=Variant(FLAG)),
    "read: plain loads": without(
        CHANNEL,
        "skipped(i) ? kNothing : load(",
        "!wanted(i) || (!kLamport && ctx.dead) ? kNothing : load(",
        kinds="race",
        on=Variant(COUNTER),
    ),
    "read: of the cluster": without(
        CHANNEL,
        "skipped(i) ? kNothing : ptx::",
        "!wanted(i) || ctx.dead ? kNothing : ptx::",
        kinds="unwritten race",
        on=Variant(CLUSTER),
    ),
    "read: takes what it finds for data": without(CHANNEL, "if (ok && !ctx.dry) {", "if (ok) {", kinds="unwritten"),
    "cluster: sends": without(
        CHANNEL, "if (!ctx.dry) ptx::st_async", "ptx::st_async", kinds="race", on=Variant(CLUSTER)
    ),
    "cluster: waits": without(
        CHANNEL,
        "if (ctx.dead || ctx.dry) return !ctx.dead;",
        "if (ctx.dead) return false;",
        kinds="too_many_arrivals",
        on=Variant(CLUSTER),
    ),
    "barrier: waits": Mutant("", [(BARRIER, EARLY, ""), (WAIT, "        if (ctx.dry) return true;\n", "")], "deadlock"),
    "barrier: arrives": without(
        BARRIER, f"{ONE_LANE} ptx::mbarrier", f"{UNGUARDED} ptx::mbarrier", kinds="unwritten race"
    ),
    "barrier: hands back": without(BARRIER, "leader && !ctx.dry", "leader", kinds="deadlock race unwritten"),
    "accumulators: takes": without(
        FORMAT, "from + (s * 2 + n) * 512, ctx.dry)", "from + (s * 2 + n) * 512)", kinds="unwritten race"
    ),
    "accumulators: the next slot": without(FORMAT, "if (!ctx.dry) ctx.accum", "ctx.accum", kinds="deadlock race"),
    "sum: loads": without(
        ROW, "low = ptx::ld_shared_f4(mine, ctx.dry)", "low = ptx::ld_shared_f4(mine)", kinds="unwritten race"
    ),
    "tables: entries": without(
        TOP_K, "if (ctx.dry) continue; // two lanes may have found the same place\n", "\n", kinds="race"
    ),
    "experts: whose tokens": without(EXPERT, "ctx.dry || token <", "token <", kinds="race unwritten"),
    "experts: which tiles": without(EXPERT, "ctx.dry ? Run{{{0, 1}}} : Tiles", "Tiles", kinds="race unwritten"),
    "experts: whose scale": without(EXPERT, "ctx.dry ? 0 : table", "table", kinds="race unwritten"),
}
RELEASE = without(
    CHANNEL,
    "if (ctx.dead || ctx.dry) return;\n            u8*",
    "if (ctx.dead) return;\n            u8*",
    kinds="deadlock race",
    on=layer.On({"dry_run": "on"}),
)


class Rehearsed(Bench):
    """The expert block with everything rehearsed."""

    def checked(self, on: Variant) -> pipeline.Checked:
        key = repr((on.choices, on.options))
        if key not in self._checked:
            path = rehearsed(self.folder, "muse_moe.py")
            request = pipeline.Request(path, tp=block.TP, choices=dict(on.choices), options=dict(on.options), tiny=True)
            self._checked[key] = pipeline.check(request)
        return self._checked[key]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Rehearsed(tmp_path_factory.mktemp("schedules"))
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "on", [Variant(), Variant(COUNTER), Variant(FLAG), Variant(CLUSTER)], ids=lambda on: str(on.choices)
)
def test_nothing_is_wrong_with_the_headers_as_they_are(bench: Bench, on: Variant) -> None:
    library = bench.library(on, block.headers())
    wrong = [str(c) for c in bench.run(on, library, 1) if not c]
    assert not wrong, wrong


@pytest.mark.parametrize("name", MUTANTS)
def test_each_guard_is_needed(bench: Bench, name: str) -> None:
    mutant = MUTANTS[name]
    block.test_every_seed_finds_the_fault(bench, mutant if mutant.once else replace(mutant, seeds=(1,)))


def test_what_is_there_for_long_is_not_emptied(tmp_path: Path) -> None:
    """The stream of the second half waits for its reader from the first one on."""
    block.test_every_seed_finds_the_fault(layer.Layers(tmp_path), replace(RELEASE, seeds=(1,)))
