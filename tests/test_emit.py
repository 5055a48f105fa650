"""The emitted text, and that the compilers take it.

Golden files in ``tests/golden`` hold the text of the shipped schedule unfused and of one that uses every directive (the
shipped one's fused text is in ``generated``, which test_cli.py checks). After a wanted change:
``MEGAGEN_UPDATE_GOLDEN=1 pytest tests/test_emit.py -k golden``, then read the diff.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagen import emit as emit_room
from megagen import resources
from megagen.cli.pipeline import archs_of
from megagen.compile import Artifact, compile_source
from megagen.dsl import load
from megagen.emit import camel, emit
from megagen.errors import CompileError
from megagen.ir.plan import Plan, Source
from megagen.lower import lower
from megagen.settings import Settings

GOLDEN = Path(__file__).parent / "golden"
EVERY = GOLDEN / "every_directive.py"
SHIPPED = Path("muse_moe.py")
UPDATE = "MEGAGEN_UPDATE_GOLDEN"
GEMMS = {"router", "pooler", "gate_up", "down", "unpooler", "attention", "o_proj", "next_qkvg", "lm_head"}
NUMBERED = r"ctx\.(?:step = |enter\()(?:ctx\.warp == \d+ \? (\d+) : )?(\d+)\)?;"
ARCHS = ("sm_90a", "sm_100a", "sm_103a")


@cache
def plan(file: Path = SHIPPED, fused: bool = True) -> Plan:
    return lower(load(file), fused=fused)


TEXTS = {"muse_moe": (SHIPPED, True), "muse_moe_unfused": (SHIPPED, False), "every_directive": (EVERY, True)}


@pytest.mark.parametrize("name", [n for n in TEXTS if n != "muse_moe"])
def test_golden(name: str) -> None:
    text, file = emit(plan(*TEXTS[name])), GOLDEN / f"{name}.cu"
    if os.environ.get(UPDATE) == "1":
        file.write_text(text)
    diff = list(
        difflib.unified_diff(file.read_text().splitlines(), text.splitlines(), str(file), "emitted", n=0, lineterm="")
    )
    assert not diff, f"{len(diff)} lines of difference; {UPDATE}=1 takes them over\n" + "\n".join(diff[:40])


@pytest.fixture(params=TEXTS)
def each(request: pytest.FixtureRequest) -> tuple[str, Plan, str]:
    p = plan(*TEXTS[request.param])
    return request.param, p, emit(p)


# -- text ----------------------------------------------------------------------------------------------------------


def test_text_is_clean(each: tuple[str, Plan, str]) -> None:
    _, p, text = each
    assert text.isascii() and text.endswith("}\n") and not text.endswith("\n\n")
    assert not re.search(r"[ \t]$|\t|\n\n\n", text, re.MULTILINE)
    assert not re.search(r"\$\{|/\*[%#]|[%#]\*/|^\s*//%|None|True|False|Undefined", text, re.MULTILINE)
    assert text.count("{") == text.count("}") and text.count("(") == text.count(")")
    assert re.findall(r'extern "C" __global__ void .*? (\w+)\(', text) == [k.name for k in p.kernels]


LOOP = r"ops::load_streams<.*|ops::(?:dense|expert)_math<.*|switch \(ctx\.step\) \{|case \d+:|break;|\}(?:\);)?"


def programs(text: str) -> list[list[str]]:
    """The lines of each warp program, first warps first; those of loops that several steps share are left out, and what
    two warps share is there twice."""
    found: list[list[list[str]]] = []
    for line in text.splitlines():
        if 'extern "C" __global__' in line:
            kernel = len(found)
        if re.search(r"\{  // warps? \d+", line):
            found.insert(kernel, [[]])
        elif only := re.fullmatch(r"      if \(ctx\.warp == (\d+)\) \{", line):
            warp = int(only[1])
        elif found and re.match(r"      +\S", line) and not re.fullmatch(LOOP, line.strip()):
            both = re.match(rf" +{NUMBERED}", line)
            if both and both[1]:
                first = int(re.search(r"warp == (\d+)", line)[1])  # type: ignore[index]
                found[kernel] = [found[kernel][0], list(found[kernel][-1])]
            alone = line.startswith("        ") and len(found[kernel]) == 2
            for i, lines in enumerate(found[kernel]):
                if not alone or warp == first + i:
                    lines.append(line.strip())
    return [lines for some in found for lines in some]


def at(source: Source) -> str:
    return f"{Path(source.file).name}:{source.line}"


def test_every_step_ends_in_its_line_of_the_schedule(each: tuple[str, Plan, str]) -> None:
    _, p, text = each
    bare = Counter[str]()
    for program, lines in zip((x for k in p.kernels for x in k.programs), programs(text), strict=True):
        steps = [line for line in lines if not re.match(NUMBERED, line)]
        for step in program.steps:
            line = steps.pop(0)
            if step.source.line:
                end = f"  // {at(step.source)}"
                if step.rehearsal is not None:
                    assert line.startswith("ctx.dry_run([&] { "), line
                    end = f"); }});{end}, dry run {at(step.rehearsal)}"
                assert line.endswith(end), line
            else:
                bare[line] += 1
        assert not steps
    assert set(bare) <= {"ctx.attach();", "ctx.drain();"}, "services that no line asked for"


def test_hang_records_number_the_steps(each: tuple[str, Plan, str]) -> None:
    """``ctx.step`` is set right before each step that may wait, in a stamped kernel with the time, or is a case of a
    producer's loop, or that of the first of several whose numbers follow."""
    _, p, text = each
    waits = {"signal_point", "wait_point"}
    want = {s.index for k in p.kernels for x in k.programs for s in x.steps if s.op is not None or s.call in waits}
    set_here = re.findall(rf"{NUMBERED}\n +(?:ctx\.dry_run\(\[&\] {{ )?(?:ops|Event)", text)
    found = [int(n) for numbers in set_here for n in numbers if n]
    found += [int(n) for n in re.findall(r" case (\d+):\n +(?:ops|Event)", text)]
    for first, ops in re.findall(r"ops::(?:dense|expert)_math<(\d+),.*\n((?: +policy::.*\n)+)", text):
        found += range(int(first), int(first) + ops.count("policy::"))
    assert sorted(found) == sorted(want)
    assert bool(p.stamps) == ("ctx.enter(" in text) != ("ctx.step = " in text)


def moved(file: Path, old: str, new: str, folder: Path) -> tuple[list[str], list[str]]:
    """Lines of the emitted text that vanish and appear when ``old`` becomes ``new``; step numbers aside."""
    source = file.read_text()
    assert source.count(old) == 1
    copy = folder / file.name
    copy.write_text(source.replace(old, new))
    a, b = ([x for x in emit(lower(load(f))).splitlines() if not re.match(f" *{NUMBERED}", x)] for f in (file, copy))
    diff = list(difflib.unified_diff(a, b, n=0, lineterm=""))[2:]
    return [x[1:] for x in diff if x[0] == "-"], [x[1:] for x in diff if x[0] == "+"]


def test_moving_a_role_moves_its_call(tmp_path: Path) -> None:
    gone, come = moved(EVERY, "select=s.warp(1)", "select=s.warp(3)", tmp_path)
    assert gone == come and len(gone) == 1 and "::TopK<policy::TopK>::select(ctx);" in gone[0].replace("ops", "")


def test_a_hint_changes_one_constant(tmp_path: Path) -> None:
    gone, come = moved(EVERY, "weight, evict_last)", "weight, evict_first)", tmp_path)
    assert len(gone) == len(come) == 1 and come[0] == gone[0].replace("kHint = 2", "kHint = 1")


def test_moving_all_roles_keeps_everything_but_the_order() -> None:
    a, b = (emit(lower(load(SHIPPED, choices={"roles": r}))) for r in ("usual", "moved"))
    head = a.index('extern "C"')
    assert a[:head] == b[:head]
    lines = [[line for p in programs(x) for line in p if not re.match(NUMBERED, line)] for x in (a, b)]
    calls = [Counter(re.sub(r"reduce<\d+>", "reduce", line) for line in x) for x in lines]  # from which warp on
    assert calls[0] == calls[1] and a != b


def test_placement_leaves_the_ops_constants_alone() -> None:
    def constants(text: str) -> list[str]:
        part = text[text.index("namespace policy {") : text.index("}  // namespace policy")]
        lines = [re.sub(r"  // .*", "", line) for line in part.splitlines()]
        return [x for x in lines if not re.search(r"kHint|kScratch|kOutbox", x)]

    usual = constants(emit(plan()))
    assert len(usual) > 100
    for choices in ({"roles": "moved"}, {"sync": "counter"}, {"sync": "cluster", "cluster": "2"}, {"unpooler": "half"}):
        assert constants(emit(lower(load(SHIPPED, choices=choices)))) == usual


# -- pieces --------------------------------------------------------------------------------------------------------


def test_floats_are_exact() -> None:
    p = plan()
    text = emit(p)
    for op in p.ops:
        part = text[text.index(f"struct {camel(op.name)} {{  //") :]
        part = part[: part.index("};")]
        found = dict(re.findall(r"static constexpr float (\w+) = (\S+)f;", part))
        assert {k: float(v) for k, v in found.items()} == {
            k: v for k, v in op.constants.items() if isinstance(v, float)
        }
        whole = {k: int(v) for k, v in re.findall(r"static constexpr u32 (\w+) = (\d+);", part)}
        assert whole.items() >= {k: v for k, v in op.constants.items() if isinstance(v, int)}.items()


@given(st.floats(1e-30, 1e30) | st.integers(0, 2**20).map(float))
def test_a_float_stays_a_float(value: float) -> None:
    text = emit_room._number(value)
    assert re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?f", text) and re.search(r"[.e]", text)
    assert float(text[:-1]) == value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("${ plan.name }", "${ plan.nmae }"),
        ("//% for p in plan.params\n", "//% for p in paln.params\n"),
        ("| camel", "| camle"),
    ],
)
def test_a_misspelt_name_in_a_template_is_an_error(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(resources.templates() / "kernel", tmp_path / "kernel")
    file = tmp_path / "kernel" / "kernel.cu.j2"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    monkeypatch.setattr(resources, "templates", lambda: tmp_path)
    emit_room._environment.cache_clear()
    try:
        with pytest.raises(jinja2.TemplateError):
            emit(plan())
    finally:
        emit_room._environment.cache_clear()


def test_cuda_passes_through_the_template_engine() -> None:
    text = 'asm("{%0, %1};" :: "r"(x)); int v[] = {{1, 2}}; #pragma once\n'
    assert emit_room._environment().from_string(text).render() == text


# -- compilation ---------------------------------------------------------------------------------------------------

COMPILED: dict[str, tuple[Path, bool, dict[str, Any]]] = {
    **{f"muse_{x}": (Path(f"muse_{x}.py"), True, {}) for x in ("moe", "swa", "global", "first", "last")},
    "muse_global for others": (Path("muse_global.py"), True, {"machine": "b200"}),  # which have no wgmma
    "unfused": (SHIPPED, False, {}),
    "tp 1": (SHIPPED, True, {"tp": 1}),
    "tp 2": (SHIPPED, True, {"tp": 2}),
    "split nk": (SHIPPED, True, {"options": {"split": "nk"}}),
    "bf16 experts": (SHIPPED, True, {"options": {"experts": "bf16"}}),
    "8 tokens": (SHIPPED, True, {"tokens": 8}),
    "counters": (SHIPPED, True, {"choices": {"sync": "counter"}}),
    "clusters": (SHIPPED, True, {"choices": {"sync": "cluster", "cluster": "2"}}),
    "every directive": (EVERY, True, {}),
}  # fmt: skip


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(cache_dir=tmp_path_factory.mktemp("cubins"))


# Bytes stored and loaded, where any are.
SPILLED: dict[str, tuple[int, int]] = {}


@pytest.mark.parametrize("case", COMPILED)
def test_it_compiles(case: str, compiler: Settings) -> None:
    file, fused, how = COMPILED[case]
    p = lower(load(file, **how), fused=fused)
    names = [k.name for k in p.kernels]
    # what ships, for all; its variants differ on none
    archs = archs_of(p) if fused and not how.keys() - {"machine"} else ARCHS[:1]
    built: dict[str, Artifact] = compile_source(emit(p), kernels=names, archs=archs, settings=compiler)
    assert set(built) == set(archs)
    for arch, artifact in built.items():
        assert not [w for k in artifact.kernels.values() for w in k.warnings]
        for kernel in p.kernels:
            report = artifact.kernels[kernel.name]
            assert report.mma is not None and report.traps == 0
            # the router's fp32 weights in two tf32 parts, everything else as bf16
            kinds = {"TF32" if op == "router" else "BF16" for op in kernel.ops if op in GEMMS}
            assert {kind.rpartition(".")[2] for kind, n in report.mma.items() if n} == kinds
            assert report.registers * 32 * p.launch.warps <= 65536
            if arch == "sm_90a" and not p.stamps:  # which take registers
                spilled = (report.spill_store_bytes, report.spill_load_bytes)
                assert spilled == SPILLED.get(kernel.name, (0, 0)), kernel.name


def test_a_policy_that_lacks_a_member_is_refused_by_its_concept(compiler: Settings) -> None:
    p = plan()
    text = emit(p)
    line = next(x for x in text.splitlines() if "kUnitK = " in x)
    broken = text.replace(line + "\n", "", 1)
    with pytest.raises(CompileError) as caught:
        compile_source(broken, kernels=[p.kernels[0].name], archs=["sm_90a"], settings=compiler)
    assert "constraint" in caught.value.message
    folder = re.search(r"full log: (\S+)", caught.value.render())
    assert folder is not None
    assert "DenseGemm<policy::Router>" in (Path(folder[1]) / "log.txt").read_text()
