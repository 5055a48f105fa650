"""The command line: what it prints, what it refuses, how it exits, and that a refusal leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trace_made
from typer.testing import CliRunner

from megagen import files as megagen_files
from megagen import machines
from megagen.cli import device, explain, main, pipeline, sheets
from megagen.compile.artifact import Artifact, KernelReport
from megagen.errors import Loc, MegagenError, ScheduleError
from megagen.ir.graph import DType, Graph, RoleSpec, Scope
from megagen.ir.plan import (
    BarrierPlan,
    BarrierUse,
    ChannelPlan,
    GuessPlan,
    HeapPlan,
    Hint,
    KernelPlan,
    LaunchPlan,
    Machine,
    OpPlan,
    Plan,
    ProgramPlan,
    RegionPlan,
    Reset,
    RingPlan,
    RoleRef,
    Source,
    StepPlan,
    StreamPlan,
    SyncKind,
)
from megagen.runtime.step import Step

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "schedules" / "muse_moe.py"
NO_GRAPH = Graph(name="none", tp=8, tokens=16, ops=(), tensors={})
GEMMS = ("router", "pooler", "gate_up", "down", "unpooler")


def environment(**more: str) -> dict[str, str]:
    """This process's, with the checkout in front of whatever else Python is to find."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


def megagen(*args: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """The real command in its own process."""
    code = "from megagen.cli.main import app; app(prog_name='megagen')"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )


def in_process(*args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command run here, where its parts can be replaced."""
    result = CliRunner().invoke(main.app, list(args), prog_name="megagen")
    return result.exit_code, result.stdout, result.stderr


def files(*folders: Path) -> set[Path]:
    return {p for folder in folders for p in folder.rglob("*")}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a command runs: two traces, ``before.trace`` and ``after.trace``, of one name."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("before", 0), ("after", 7)):
        trace_made.layer(trace_made.tiny(), 3, seed=seed).save(tmp_path / f"{name}.trace")
    return tmp_path


# -- a Plan small enough to know by heart ----------------------------------------------------------------------


def step(index: int, op: str | None, call: str, *barriers: BarrierUse, line: int = 0, **more: Any) -> StepPlan:
    source = Source(file="s.py", line=line) if line else Source()
    return StepPlan(op=op, call=call, index=index, barriers=barriers, source=source, **more)


@pytest.fixture
def plan() -> Plan:
    """Two GEMMs placed alike and a norm, on six warps: 1 loads, 2-5 do the mathematics, 0 the norm."""
    full = BarrierUse(barrier="full", action="expect_tx", per="stage")
    loads = tuple(
        step(i, op, "load_weights", full, line=line, args=(0, 1024, 3)) for i, op, line in ((0, "a", 7), (1, "b", 8))
    )
    maths = tuple(
        step(i, op, "math", BarrierUse(barrier="full", action="wait", per="stage")) for i, op in ((2, "a"), (3, "b"))
    )
    norm = (step(4, "n", "math"), step(5, None, "reset"))

    def op(name: str, kind: str, weight_bytes: int, stream: StreamPlan | None, **roles: tuple[int, ...]) -> OpPlan:
        specs = tuple(RoleSpec(name=r, warps=(len(w),), stream=r == "load_weights") for r, w in roles.items())
        return OpPlan(
            name=name, kind=kind, header="", struct="", constants={}, channels={}, tensors={}, weights={}, barriers={},
            regions={}, roles=roles, specs=specs, stream=stream, weight_bytes=weight_bytes, activation_bytes=1000,
            operations=2_000_000,
        )  # fmt: skip

    stream = StreamPlan(weight="w", stage_bytes=2048, per_tile=2, stage_rows=16, stage_k=64)
    return Plan(
        name="small", graph="g", tp=8, tokens=16, fused=True, choices={"depth": "2"},
        nominal_experts=49, nominal_tokens=16,
        machine=Machine(
            name="toy", arch="sm_90a", sms=4, blocks_fit={1: 4}, shared_bytes=8192, registers=65536, barriers=16,
            icache_bytes=131072, l2_bytes=1 << 20, hbm_bytes_per_s=2e12, timer_step_ns=32,
        ),
        launch=LaunchPlan(
            blocks=4, cluster=1, warps=6, shared_bytes=4352, pdl=True, early_trigger=False, registers=None,
        ),
        ring=RingPlan(stages=2, stage_bytes=2048, region="ring", full="full", empty="empty", consumers=4),
        heap=HeapPlan(bytes=4096, epoch_offset=0, abort_offset=64, record_offset=128, record_bytes=64),
        params=(), weights=(),
        regions=(RegionPlan(name="ring", offset=0, bytes=4096, align=128),),
        barriers=(BarrierPlan(name="full", offset=4096, slots=2, count=1, tx=True, index=1),),
        channels=(
            ChannelPlan(
                name="x", dtype=DType.BF16, shape=(16, 64), scope=Scope.RANK, kind=SyncKind.LAMPORT, empty=0xFFFFFFFF,
                copies=2, reset=Reset.LAUNCH, offset=256, bytes=2048, counter_offset=None, row_stride=64, rank_stride=0,
                shard=64, arrivals=1, arrivals_per="launch", index=0, source=Source(file="s.py", line=12),
                writers=(RoleRef(op="n", role="math"),), readers=(RoleRef(op="a", role="math"),),
            ),
        ),
        ops=(
            op("n", "rms_norm", 0, None, math=(0,)),
            op("a", "dense_gemm", 3_000_000, stream, load_weights=(1,), math=(2, 3, 4, 5)),
            op("b", "dense_gemm", 5_000_000, stream, load_weights=(1,), math=(2, 3, 4, 5)),
        ),
        kernels=(
            KernelPlan(
                name="small_kernel", ops=("n", "a", "b"), advances_epoch=True,
                programs=(
                    ProgramPlan(first=0, count=1, steps=norm),
                    ProgramPlan(first=1, count=1, steps=loads),
                    ProgramPlan(first=2, count=4, steps=maths),
                ),
            ),
        ),
    )  # fmt: skip


@pytest.fixture
def given(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Every schedule gives this Plan."""
    monkeypatch.setattr(pipeline, "check", lambda request: pipeline.Checked(NO_GRAPH, plan, ()))
    return plan


def test_roles_share_rows_and_columns(plan: Plan) -> None:
    sheet = explain.roles(plan)
    assert [c.heading for c in sheet.columns] == ["warps", "n", "a\nb", "launch"]
    shown = [[c.text(row) for c in sheet.columns] for row in sheet.rows]
    assert shown == [["0", "math", "", "reset"], ["1", "", "load weights", ""], ["2-5", "", "math", ""]]


def test_explain_json_is_the_plan(given: Plan) -> None:
    code, out, err = in_process("explain", "s.py", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    own = "graph options launch roles shared shared_bytes shared_limit syncs barriers streams ring loads costs total"
    assert list(found) == ["plan", "machine", "tp", "tokens", "fused", "choices", *own.split()]
    assert found["roles"][1] == {"first": 1, "count": 1, "jobs": {"a": ["load_weights"], "b": ["load_weights"]}}
    assert [(r["offset"], r["bytes"], r["name"]) for r in found["shared"]] == [
        (0, 4096, "ring"),
        (4096, 16, "mbarrier full"),
    ]
    (edge,) = found["syncs"]
    assert (edge["edge"], edge["kind"], edge["empty"], edge["copies"]) == ("x", "lamport", "0xffffffff", 2)
    assert (edge["writers"], edge["readers"], edge["source"]) == (["n.math"], ["a.math"], "s.py:12")
    assert [(b["wait"], b["arrive"]) for b in found["barriers"]] == [([2, 3, 4, 5], [1])]
    assert [(r["op"], r["first"], r["args"], r["source"]) for r in found["loads"]] == [
        ("a", 1, [0, 1024, 3], "s.py:7"),
        ("b", 1, [0, 1024, 3], "s.py:8"),
    ]
    # 3 MB at 2 TB/s take 1.5 µs, 5 MB 2.5 µs
    assert [r["floor_us"] for r in found["costs"]] == [0, 1.5, 2.5]
    assert found["total"] == {
        "weight_bytes": 8_000_000,
        "activation_bytes": 3000,
        "operations": 6_000_000,
        "floor_us": 4.0,
    }


def test_explain_shows_every_sheet(given: Plan) -> None:
    code, out, _ = in_process("explain", "s.py")
    assert code == 0
    head = "small: one fused kernel, for g on toy"
    for text in (head, "depth=2", "4.2 KiB of 8.0 KiB", "line 12", "0xffffffff", "lamport"):
        assert text in out
    assert re.search(r"^b +dense_gemm +5\.00 .* 2\.50 *$", out, re.M)
    assert re.search(r"^total +8\.00 .* 4\.00 *$", out, re.M)


@pytest.mark.parametrize(("warps", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2 5 7-8")])
def test_runs(warps: list[int], text: str) -> None:
    assert explain.runs(warps) == text


KERNEL = """
extern "C" __global__ void small_kernel(float* out) {
    float d[4] = {};
    unsigned a = threadIdx.x;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a));
    out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


def test_build_says_what_came_out(given: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One MMA in the source is one in the table; the folder gets text, Plan and cubin."""
    monkeypatch.setattr(pipeline, "emit", lambda plan: KERNEL)
    monkeypatch.setenv("MEGAGEN_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / "out"
    args = ("build", "s.py", "--arch", "sm_90a,sm_90a", "--out", str(out))
    code, text, err = in_process(*args, "--json")
    assert (code, err) == (0, "")
    found = json.loads(text)
    own = "graph options nominal_tokens nominal_experts hbm_bytes floor_us findings artifacts kernels"
    assert list(found) == ["plan", "machine", "tp", "tokens", "fused", "choices", *own.split()]
    (kernel,) = found["kernels"]
    assert (kernel["kernel"], kernel["arch"]) == ("small_kernel", "sm_90a")
    assert (kernel["mma"], kernel["traps"]) == ({"HMMA.16816.F32.BF16": 1}, 0)
    assert (kernel["spill_bytes"], kernel["shared_bytes"]) == (0, 4352)
    assert (kernel["hbm_bytes"], kernel["floor_us"]) == (8_000_000, 4.0)
    (artifact,) = found["artifacts"]
    assert artifact["cached"] is False
    assert {p.name for p in out.iterdir()} == {"small.cu", "small.plan.json", "small.sm_90a.cubin"}
    assert (out / "small.cu").read_text() == KERNEL
    assert Plan.from_json((out / "small.plan.json").read_text()) == given
    assert (out / "small.sm_90a.cubin").read_bytes() == Path(artifact["path"]).read_bytes()

    code, text, _ = in_process(*args)
    assert code == 0
    assert "from the cache" in text
    assert re.search(
        r"small_kernel +sm_90a +\d+ +0 +4\.2 KiB .* 1 HMMA\.16816\.F32\.BF16 +0 +8\.00 +4\.0 *$", text, re.M
    )


def test_unfused_files_have_their_own_names(plan: Plan, tmp_path: Path) -> None:
    """And what an earlier build of the same name left for other architectures goes."""

    def built(fused: bool, *archs: str) -> pipeline.Built:
        made = {}
        for arch in archs:
            path = tmp_path / f"{arch}.{fused}"
            path.write_text(f"{arch} {fused}")
            made[arch] = Artifact(arch=arch, path=path, compiler="c", cached=False, log="", kernels={})
        return pipeline.Built(NO_GRAPH, plan.model_copy(update={"fused": fused}), (), "text", made)

    out = tmp_path / "out"
    pipeline.export(built(True, "sm_90a", "sm_100a"), out)
    pipeline.export(built(False, "sm_90a", "sm_103a"), out)
    (out / "smaller.sm_100a.cubin").write_text("of another plan")
    unfused = {"small.unfused.cu", "small.unfused.plan.json", "small.unfused.sm_90a.cubin"}
    others = {"small.cu", "small.plan.json", "small.sm_90a.cubin", "smaller.sm_100a.cubin"}
    assert {p.name for p in out.iterdir()} == {
        *unfused, *others, "small.sm_100a.cubin", "small.unfused.sm_103a.cubin",
    }  # fmt: skip
    pipeline.export(built(True, "sm_90a"), out)
    assert {p.name for p in out.iterdir()} == {*unfused, *others, "small.unfused.sm_103a.cubin"}
    assert (out / "small.sm_90a.cubin").read_text() == "sm_90a True"
    assert (out / "small.unfused.sm_90a.cubin").read_text() == "sm_90a False"


def test_warnings_and_spills_are_shown(given: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spills where the plan runs; what the compiler warned of everywhere."""

    def compiled(spills: int, *texts: str) -> dict[str, KernelReport]:
        made = KernelReport(
            registers=32, spill_store_bytes=spills, spill_load_bytes=2 * spills, stack_bytes=0, shared_bytes=0,
            code_bytes=128, mma=None, traps=None, warnings=texts,
        )  # fmt: skip
        return {"small_kernel": made}

    def build(checked: pipeline.Checked, archs: object, settings: object, **_: object) -> pipeline.Built:
        made = {
            arch: Artifact(arch=arch, path=Path(arch), compiler="c", cached=False, log="", kernels=kernels)
            for arch, kernels in (("sm_90a", compiled(8)), ("sm_100a", compiled(4, "unused variable x")))
        }
        return pipeline.Built(NO_GRAPH, given, (), "", made)

    monkeypatch.setattr(pipeline, "build", build)
    code, out, err = in_process("build", "s.py", "--json")
    assert code == 0
    assert err.splitlines() == [
        "warning: small_kernel on sm_90a spills 24 bytes of registers a thread to memory",
        "warning: small_kernel on sm_100a: unused variable x",
    ]
    rows = json.loads(out)["kernels"]
    assert [(r["spill_bytes"], r["warnings"]) for r in rows] == [(24, []), (12, ["unused variable x"])]


@pytest.mark.parametrize("split", ["nn", "nk"])
def test_what_is_computed_is_named(split: str) -> None:
    graph = f"muse_spark.expert_block.{split}"
    args = ("check", str(SHIPPED), "--option", f"split={split}", "--option", "experts=bf16", "--tokens", "1")
    code, out, _ = in_process(*args)
    assert code == 0
    assert f"for {graph} with split={split}, experts=bf16 on h200" in out
    assert "up to 1 token," in out
    found = json.loads(in_process(*args, "--json")[1])
    assert (found["graph"], found["options"]) == (graph, {"split": split, "experts": "bf16"})


def test_a_recorded_figure_says_what_was_built(plan: Plan) -> None:
    built = pipeline.Built(NO_GRAPH, plan, (), "", {}, options={"experts": "bf16", "split": "nk"})
    text = device.notes(built, 30, 8, 50, bounded=True)
    assert text.startswith("g with experts=bf16, split=nk; tp 8 ")
    assert "16 tokens on 30 experts, new routing" in text
    step = Step.tree([-1, 0, 0], 4096)
    text = device.notes(built, 30, 8, 50, bounded=True, step=step, launches=62)
    assert "16 tokens on 30 experts in a tree after 4096, new routing" in text
    assert "62 layers with the weights of 8 distinct layers in a CUDA graph" in text
    guess = GuessPlan(top=4, hint=Hint.EVICT_NORMAL, first=True, ops=("down",), parameter="history")
    guessing = dataclasses.replace(built, plan=built.plan.model_copy(update={"guess": guess}))
    text = device.notes(guessing, 30, 8, 50, bounded=True, guessed=0.75)
    assert "new routing each replay, with 3 of 4 guessed experts;" in text
    none = pipeline.Built(NO_GRAPH, plan.model_copy(update={"nominal_experts": 0}), (), "", {})
    text = device.notes(none, 0, 8, 50, bounded=False)
    assert text.startswith("g; ")
    assert "expert" not in text
    assert "routing" not in text


def test_where_a_steps_tokens_stand() -> None:
    """By default the usual context, or as much of it as the table of rotations allows."""
    checked = pipeline.check(pipeline.Request(ROOT / "schedules" / "muse_swa.py", tiny=True))
    assert pipeline.step(checked, 5, None, usual=300) == Step.chain(5, 300)
    assert pipeline.step(checked, 5, None, usual=20_000) == Step.chain(5, 16_384 - 5)
    assert pipeline.step(checked, 5, 16_379, tree=True, seed=3) == Step.random_tree(5, 16_379, 3)
    with pytest.raises(MegagenError, match="--context 16380 with 5 tokens"):
        pipeline.step(checked, 5, 16_380)
    assert [pipeline.placed(s) for s in (None, Step.chain(2, 7), Step.tree([-1, -1]))] == [
        "", " after 7", " in a tree after 0",
    ]  # fmt: skip
    assert device.whole(pipeline.Built(checked.graph, checked.plan, (), "", {})) == 62


def test_a_checkpoint_is_among_the_options(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_described", lambda checkpoint: {})
    checked = pipeline.check(pipeline.Request(SHIPPED, checkpoint=tmp_path))
    assert checked.options == {"checkpoint": str(tmp_path)}
    assert f"with checkpoint={tmp_path} on" in explain.headline(checked.plan, checked.options)


def test_nominal_routing_in_words(plan: Plan) -> None:
    assert explain.nominal(plan) == "16 tokens on 49 experts"
    one = plan.model_copy(update={"nominal_tokens": 1, "nominal_experts": 8})
    assert explain.nominal(one) == "1 token on 8 experts"
    assert explain.nominal(one, 1) == "1 token on 1 expert"
    assert explain.nominal(plan.model_copy(update={"nominal_experts": 0})) == "16 tokens"


@pytest.mark.parametrize(
    ("call", "args", "text"),
    [
        ("load_weights", (0, 1024, 3), "all of a block's stages, at most 3 stages in flight"),
        ("load_weights", (0, 512, 1), "first 50 % of a block's stages, at most 1 stage in flight"),
        ("load_weights", (768, 1024, 2), "last 25 % of a block's stages, at most 2 stages in flight"),
        ("load_weights", (256, 512, 2), "25 % to 50 % of a block's stages, at most 2 stages in flight"),
        ("prefetch_l2", (0, 256), "first 25 % of a block's stages into L2"),
        ("prefetch_guess", (), "asks L2 for experts that the layer's last launch used most"),
        ("warm_code", (8,), "asks L2 for its own code, each piece in 8 blocks"),
        ("warm_next", (1,), "asks L2 for the code of the kernel that follows, each piece in 1 block"),
    ],
)
def test_shares_in_words(call: str, args: tuple[int, ...], text: str) -> None:
    assert explain.words(step(0, "a", call, args=args)) == text


def test_explain_shows_what_a_share_waits_for() -> None:
    code, out, _ = in_process("explain", str(SHIPPED), "--choose", "unpooler=both", "--json")
    assert code == 0
    rows = [(r["op"], r["call"], r["words"].partition(",")[0]) for r in json.loads(out)["loads"]]
    at = rows.index((None, "wait_point", "waits until down is done in the block"))
    assert rows[at - 1] == ("unpooler", "load_weights", "first 50 % of a block's stages")
    assert rows[at + 1] == ("unpooler", "load_weights", "last 50 % of a block's stages")
    assert (None, "signal_point", "says that down is done in the block") in rows


def test_tables_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = in_process("explain", str(SHIPPED), "--choose", "unpooler=both", "--option", "split=nk")
    assert code == 0
    _, *lines = out.splitlines()  # the headline is prose
    assert max(map(len, lines)) <= 120
    assert re.search(r"^\d+ +expert_mid +lamport, .*0xffffffff", out, re.M)

    long = "x" * 150  # cannot wrap: shown whole
    columns = (sheets.Column("a", "a"), sheets.Column("b", "b"))
    sheets.show([sheets.Sheet("rows", "", columns, [{"a": long, "b": "c d"}])])
    assert long in capsys.readouterr().out


def test_version() -> None:
    with (ROOT / "pyproject.toml").open("rb") as f:
        version = tomllib.load(f)["project"]["version"]
    assert in_process("--version") == (0, f"megagen {version}\n", "")


def test_help_names_what_is_legal() -> None:
    code, out, _ = in_process("build", "--help")
    assert code == 0
    text = " ".join(out.split())
    assert "1, 2, 4 or 8" in text
    assert all(name in text for name in machines.names())


def test_a_checkpoint_needs_tp_1_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "check", failing(AssertionError("too late")))
    code, _, err = in_process("run", "s.py", "--checkpoint", "folder")
    assert code == 1
    assert "--checkpoint with --tp 8" in err
    assert "--tp 1" in err


# -- errors become messages and exit codes ---------------------------------------------------------------------


def failing(error: BaseException) -> Callable[[object], Any]:
    def fail(_: object) -> Any:
        raise error

    return fail


def test_a_refusal_shows_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    loc = Loc("s.py", 3, 10, "s.assign(g.gate_upp)")
    monkeypatch.setattr(pipeline, "check", failing(ScheduleError("no op 'gate_upp'", loc=loc, hint="gate_up?")))
    code, out, err = in_process("build", "s.py")
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == "error: no op 'gate_upp'"
    text, caret = (line for line in err.splitlines() if " | " in line)
    assert text[caret.index("^") :].startswith("g.gate_upp")


def test_a_bug_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "check", failing(ZeroDivisionError("oh\nno")))
    monkeypatch.delenv("MEGAGEN_TRACEBACK", raising=False)
    code, out, err = in_process("check", "s.py")
    assert (code, out) == (70, "")
    assert err.splitlines()[0] == "internal error: ZeroDivisionError: oh no"
    assert "MEGAGEN_TRACEBACK=1" in err
    assert "Traceback" not in err
    monkeypatch.setenv("MEGAGEN_TRACEBACK", "1")
    code, _, err = in_process("check", "s.py")
    assert code == 70
    assert "Traceback" in err


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "check", failing(KeyboardInterrupt()))
    monkeypatch.setattr(main, "_leave_threads", lambda: None)  # the test runner's are none of ours
    assert in_process("check", "s.py") == (130, "", "stopping…\n")


def test_an_interrupt_does_not_wait_for_threads() -> None:
    """A compiler's thread can be neither stopped nor waited for."""
    code = """
import signal, threading, time
from megagen.cli import main, pipeline

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it

def check(request):
    threading.Thread(target=time.sleep, args=(100,)).start()
    print("ready", flush=True)
    time.sleep(100)

pipeline.check = check
main.app(["check", "s.py"], prog_name="megagen")
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "stopping…\n")


@pytest.mark.parametrize("args", [("explain",), ("explain", "--json"), ("check",)])
def test_a_full_disk_is_no_bug(args: tuple[str, ...]) -> None:
    code = "from megagen.cli.main import app; app(prog_name='megagen')"
    command = [sys.executable, "-c", code, *args, str(SHIPPED)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (
        1,
        "error: cannot write to standard output: No space left on device\n",
    )


@pytest.mark.parametrize(
    "args",
    [
        ["build"],
        ["build", "s.py", "--chose", "a=b"],
        ["build", "s.py", "--choose", "depth"],
        ["build", "s.py", "--choose", "depth=2", "--choose", "depth=3"],
        ["build", "s.py", "--arch", ","],
        ["build", "--check", "--update"],
        ["build", "--check", "--tp", "8"],
        ["build", "--update", "--choose", "a=b"],
        ["build", "--check", "--out", "x"],
        ["build", "--check", "s.py"],
        ["build", "--update", "s.py"],
        ["run", "s.py", "--launch", "0"],
        ["run", "s.py", "--context", "-1"],
        ["bench", "s.py", "--step", "--only", "unfused"],
        ["bench", "s.py", "--step", "--baseline", "torch"],
        ["bench", "s.py", "--baseline", "jax"],
        ["explain"],
        ["run", "s.py", "--tp", "many"],
        ["trace"],
        ["trace", "s.py", "--ranks", "9"],
        ["trace", "s.py", "--rounds", "1"],
        ["trace", "s.py", "--emulate", "--record"],
        ["show"],
        ["compare", "a.trace"],
        ["nonsense"],
    ],
)
def test_wrong_usage_exits_2(args: list[str], given: Plan) -> None:
    code, out, err = in_process(*args)
    assert (code, out) == (2, "")
    assert "Error" in err
    assert "Traceback" not in err


# -- traces ----------------------------------------------------------------------------------------------------


def test_a_trace_is_shown(desk: Path) -> None:
    """Terse enough for a terminal of 80 columns; lines of prose may wrap."""
    code, out, err = in_process("show", "before.trace")
    assert (code, err) == (0, "")
    assert re.search(r"^A launch takes [\d.]+ µs \(p10 to p90: ", out, re.M)
    for title in ("made: 3 launches", "Where the critical path goes", "Waits that cost most"):
        assert title in out
    assert not re.search(r"^wrote ", out, re.M) and out.endswith("\n\n")
    rules = [line for line in out.splitlines() if line.startswith("─")]
    assert len(rules) == 3 and max(map(len, rules)) <= 80
    assert files(desk) == {desk / "before.trace", desk / "after.trace"}


def test_two_traces_are_compared(desk: Path) -> None:
    """They have one name, as before and after an edit of a schedule: then their files' names tell them apart."""
    code, out, err = in_process("compare", "before.trace", "after.trace", "--out", "both")
    assert (code, err) == (0, "")
    assert out.startswith("after against before, µs\n") and out.endswith("wrote both.html\n")
    assert "Not alike" not in out
    assert max(len(line) for line in out.splitlines() if line.startswith("─")) <= 80
    assert "<h1>before and after</h1>" in (desk / "both.html").read_text()


def test_traces_that_are_not_alike(desk: Path) -> None:
    trace_made.made(
        trace_made.tiny("muse_moe"), trace_made.layer(trace_made.tiny("muse_moe")).spans, name="other",
        origin="emulated", tokens=1,
    ).save(desk / "other.trace")  # fmt: skip
    code, out, _ = in_process("compare", "before.trace", "other.trace")
    assert code == 0
    assert "Only in other: pre_ffn_norm." in out
    assert "Not alike: origin simulated and emulated; schedule muse_swa and muse_moe; tokens 4 and 1." in out
    assert "Emulated: times count what the emulator did." in out


@pytest.mark.parametrize(
    ("out", "name"),
    [
        ("a", "a"),
        ("a.b", "a.b"),
        ("a.html", "a"),
        ("a.trace", "a"),
        ("folder", "folder/before"),
        ("folder/", "folder/before"),
        ("folder/a", "folder/a"),
        (".", "before"),
        ("", "before"),
    ],
)
def test_where_a_trace_is_shown(out: str, name: str, desk: Path) -> None:
    (desk / "folder").mkdir()
    known = files(desk)
    code, text, err = in_process("show", "before.trace", "--out", out, "--json")
    assert (code, err) == (0, "")
    assert json.loads(text)["files"] == [f"{name}.html", f"{name}.pftrace"]
    assert files(desk) - known == {desk / f"{name}.html", desk / f"{name}.pftrace"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["show", "none.trace"], "cannot read none.trace: No such file or directory"),
        (["show", "."], "cannot read .: Is a directory"),
        (["show", "page.html"], "page.html is no trace of megagen"),
        (["show", "half.trace"], "half.trace is no trace of megagen"),
        (["compare", "before.trace", "none.trace"], "cannot read none.trace"),
        (["compare", "page.html", "before.trace"], "page.html is no trace"),
        (["show", "before.trace", "--out", "none/a"], "there is no folder none"),
        (["compare", "before.trace", "after.trace", "--out", "none/a"], "there is no folder none"),
        (["trace", str(SHIPPED), "--emulate", "--tp", "2", "--out", "none/a"], "there is no folder none"),
        (["trace", str(SHIPPED), "--emulate", "--ranks", "3"], "3 live ranks in a group of 8"),
        (["trace", "none.py", "--emulate"], "no schedule at none.py"),
        (["trace", str(SHIPPED), "--emulate", "--tree"], "--tree: launches of"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(args: list[str], expected: str, desk: Path) -> None:
    """Before anything is compiled or recorded, and leaving nothing behind."""
    (desk / "page.html").write_text("<!doctype html>")
    (desk / "half.trace").write_bytes((desk / "before.trace").read_bytes()[:9000])
    known = files(desk)
    code, out, err = in_process(*args)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and expected in err
    assert files(desk) == known


def test_an_unwritable_folder_is_refused(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # whoever runs the tests may write everywhere
    code, _, err = in_process("show", "before.trace", "--out", "a")
    assert code == 1 and "is not writable" in err


def test_an_interrupt_leaves_no_half_of_a_file(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = files(desk)
    fail = failing(KeyboardInterrupt())
    monkeypatch.setattr(Path, "replace", lambda path, to: fail(to))
    monkeypatch.setattr(main, "_leave_threads", lambda: None)
    assert in_process("show", "before.trace", "--out", "a") == (130, "", "stopping…\n")
    assert files(desk) == known


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_launch_is_traced_without_a_gpu(desk: Path) -> None:
    pytest.importorskip("torch")
    command = ["trace", str(SHIPPED), "--emulate", "--tp", "2", "--replays", "1", "--name", "mine"]
    known = files(desk)
    code, out, err = in_process(*command, "--out", "tiny")
    assert (code, err) == (0, "")
    written = [f"tiny{ending}" for ending in (".trace", ".html", ".pftrace")]
    assert re.findall(r"^wrote (.*)$", out, re.M) == written
    assert files(desk) - known == {desk / name for name in written}
    assert out.startswith("mine: 2 launches")
    assert "Emulated: times count what the emulator did. They show order, not length." in out
    again = in_process("show", "tiny.trace")[1]
    assert again == out.partition("wrote ")[0]


def test_writing_aside_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "a.cu"
    megagen_files.write(path, b"old", folders=True)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(MegagenError, match=r"a\.cu: No space left"):
        megagen_files.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


# -- the shipped schedule --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """`megagen build` of the shipped schedule: its JSON, and the folder of its --out."""
    out = tmp_path_factory.mktemp("out")
    done = megagen("build", SHIPPED, "--json", "--out", out)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), out


@pytest.mark.slow
def test_build_reports_every_architecture(built: tuple[dict[str, Any], Path]) -> None:
    found, out = built
    assert [k["arch"] for k in found["kernels"]] == ["sm_90a", "sm_100a", "sm_103a"]
    for kernel in found["kernels"]:
        assert sum(kernel["mma"].values()) > 0
        assert kernel["traps"] == 0
        assert kernel["code_bytes"] > 0
        assert kernel["shared_bytes"] <= 227 * 1024  # the most a block of any of them may use
    assert found["kernels"][0]["spill_bytes"] == 0
    # 49 experts of 1024x4096 and 512x4096 at 4.5 bits; router 256x8192 in fp32; pooler and unpooler in bf16
    weights = 49 * (1024 + 512) * 4096 * 4.5 / 8 + 256 * 8192 * 4 + (512 * 8192 + 1024 * 4096) * 2
    assert weights <= found["hbm_bytes"] < weights * 1.001
    plan = Plan.from_json((out / f"{found['plan']}.plan.json").read_text())
    assert plan.to_json() == (out / f"{found['plan']}.plan.json").read_text()
    for artifact in found["artifacts"]:
        cubin = out / f"{found['plan']}.{artifact['arch']}.cubin"
        assert cubin.read_bytes() == Path(artifact["path"]).read_bytes()
        assert cubin.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.slow
def test_every_gemm_uses_the_tensor_cores(built: tuple[dict[str, Any], Path]) -> None:
    """One kernel an op shows which op an MMA belongs to."""
    done = megagen("build", SHIPPED, "--unfused", "--json")
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)["kernels"]
    fused = {op for k in Plan.from_json(next(built[1].glob("*.plan.json")).read_text()).kernels for op in k.ops}
    assert set(GEMMS) <= fused
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        for op in GEMMS:
            (kernel,) = (k for k in kernels if k["arch"] == arch and re.search(rf"(^|_){op}$", k["kernel"]))
            assert sum(kernel["mma"].values()) > 0, f"{op} on {arch}"
            assert kernel["traps"] == 0


@pytest.mark.slow
def test_a_second_build_is_quick(built: tuple[dict[str, Any], Path]) -> None:
    times = []
    for _ in range(3):
        start = time.monotonic()
        done = megagen("build", SHIPPED)
        times.append(time.monotonic() - start)
        assert done.returncode == 0, done.stderr
        assert "from the cache" in done.stdout
    assert min(times) < 2.0


def test_generated_is_up_to_date() -> None:
    done = megagen("build", "--check")
    assert done.returncode == 0, done.stderr


def test_a_stale_generated_file_is_found(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "// first\n// second\n"
    monkeypatch.setattr(pipeline, "generated", lambda: tmp_path)
    monkeypatch.setattr(pipeline, "check", lambda request: pipeline.Checked(NO_GRAPH, plan, ()))
    monkeypatch.setattr(pipeline, "emit", lambda plan: text)
    stale = tmp_path / SHIPPED.with_suffix(".cu").name
    stale.write_text(text.replace("second", "2nd"))
    orphan = tmp_path / "nobody.cu"
    orphan.write_text("")
    code, out, err = in_process("build", "--check")
    assert (code, out) == (1, "")
    assert "muse_moe.cu: 1 line added, 1 removed" in err
    assert "+// second" in err
    assert "nobody.cu: no schedule makes it" in err
    assert in_process("build", "--update")[0] == 0
    assert stale.read_text() == text
    assert not orphan.exists()
    assert in_process("build", "--check") == (0, "generated/ is up to date\n", "")


# -- bad input, in the real command ----------------------------------------------------------------------------

# What is wrong -> (text of the shipped schedule, what stands there instead, what the message must contain).
LAST = "    s.launch("
MISTAKES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "misspelt op": ("[g.gate_up, g.down]", "[g.gate_upp, g.down]", ("gate_upp", "'gate_up'", "^")),
    "role unassigned": (", reduce=reducer)", ")", ("reduce",)),
    "role on three warps": ("math=math, reduce", "math=s.warps(4, 7), reduce", ("math", "3")),
    "role that is none": ("finish=finisher)", "finnish=finisher)", ("finnish", "'finish'", "^")),
    "ring too large": ('s.choice("ring_stages", 3, 4, 5)', "99", ("shared memory",)),
    "share over one": (
        LAST,
        "    s.prefetch(g.unpooler.weight, into=ring, share=1.5, during=g.down)\n" + LAST,
        ("share=1.5", "^"),
    ),
    "deadlocking prefetch": (  # the pooler's weights wait for an op that needs the pooler's output
        LAST,
        "    s.prefetch(g.pooler.weight, into=ring, share=0, during=g.residual)\n" + LAST,
        ("pooler", "residual"),
    ),
}


def mistaken(what: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    right, wrong, expected = MISTAKES[what]
    text = SHIPPED.read_text()
    assert text.count(right) == 1, f"{SHIPPED.name} has not one {right!r}"
    path = folder / "mistaken.py"
    path.write_text(text.replace(right, wrong))
    return path, expected


def refused(done: subprocess.CompletedProcess[str], *expected: str) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    for text in expected:
        assert text in done.stderr


@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.parametrize("command", ["build", "check"])
def test_a_mistake_is_refused_at_its_line(what: str, command: str, tmp_path: Path) -> None:
    schedule, expected = mistaken(what, tmp_path)
    cache = tmp_path / "cache"
    done = megagen(command, schedule, cwd=tmp_path, MEGAGEN_CACHE_DIR=str(cache))
    refused(done, "mistaken.py:", *expected)
    assert files(tmp_path) == {schedule}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tp", "3"], "tp=3"),
        (["--tokens", "17"], "17"),
        (["--tokens", "0"], "0"),
        (["--machine", "h2000"], "h200"),
        (["--choose", "nosuch=1"], "nosuch"),
        (["--choose", "ring_stages=7"], "options: 3, 4, 5"),
    ],
)
def test_an_impossible_option_is_refused(options: list[str], expected: str, tmp_path: Path) -> None:
    done = megagen("build", SHIPPED, *options, "--out", "out", cwd=tmp_path, MEGAGEN_CACHE_DIR=str(tmp_path / "cache"))
    refused(done, expected)
    assert files(tmp_path) == set()


def test_no_such_schedule(tmp_path: Path) -> None:
    refused(megagen("build", "nosuch.py", cwd=tmp_path), "nosuch.py")


def test_a_schedule_with_a_syntax_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def schedule(machine:\n")
    refused(megagen("build", path, cwd=tmp_path), "broken.py:1")


def test_no_such_architecture(tmp_path: Path) -> None:
    env = {"MEGAGEN_CACHE_DIR": str(tmp_path / "cache")}
    refused(megagen("build", SHIPPED, "--arch", "sm_9000x", cwd=tmp_path, **env), "sm_9000x")


def test_no_compiler(tmp_path: Path) -> None:
    env = {
        "MEGAGEN_COMPILER": "nvcc",
        "MEGAGEN_NVCC": "/nonexistent/nvcc",
        "MEGAGEN_CACHE_DIR": str(tmp_path / "cache"),
    }
    refused(megagen("build", SHIPPED, cwd=tmp_path, **env), "/nonexistent/nvcc", "help:")
    assert files(tmp_path) == set()


@pytest.mark.parametrize("variable", ["MEGAGEN_COMPILER", "MEGAGEN_KEEP"])
def test_a_bad_setting_is_named(variable: str, tmp_path: Path) -> None:
    refused(megagen("build", SHIPPED, cwd=tmp_path, **{variable: "nonsense"}), variable)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where the folder should be: refuses root too, which a read-only mode would not."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused(megagen("build", SHIPPED, cwd=tmp_path, MEGAGEN_CACHE_DIR=str(blocked / "cache")), str(blocked))
    assert files(tmp_path) == {blocked}


def test_no_gpu(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = megagen("bench", SHIPPED, cwd=tmp_path, CUDA_VISIBLE_DEVICES="", MEGAGEN_CACHE_DIR=str(cache))
    refused(done, "GPU")
    assert files(tmp_path) == set()


# -- on the GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--unfused",), ("--launch", "1", "--experts", "8")])
def test_run_holds_the_promise(options: tuple[str, ...]) -> None:
    done = megagen("run", SHIPPED, "--json", *options)
    assert done.returncode == 0, done.stderr
    checks = {c["check"]: c for c in json.loads(done.stdout)["checks"]}
    assert all(c["ok"] for c in checks.values())
    for name in ("stream_out", "unpooled", "expert_mid"):
        assert checks[name]["error"] > 0, "computed in bf16: an error of zero means that nothing was compared"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("baseline", [(), ("torch",)])
def test_bench_states_times_against_the_floor(baseline: tuple[str, ...]) -> None:
    if baseline:
        pytest.importorskip("triton")
    done = megagen("bench", SHIPPED, "--json", "--rounds", "10", *(x for b in baseline for x in ("--baseline", b)))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert [f["variant"] for f in figures] == ["fused", "unfused", *baseline]
    for f in figures:
        assert f["floor"] < f["value"], "faster than HBM"
        assert f["ratio"] == pytest.approx(f["value"] / f["floor"], rel=0.01)
