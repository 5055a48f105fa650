"""The checker: what ships passes, Plans broken in one place do not, and a simulated block agrees about deadlocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagen.check import check
from megagen.check.races import races
from megagen.check.resources import resources
from megagen.dsl import L2, KiB, Schedule, cluster, counter, flag, lamport, load
from megagen.errors import CheckError
from megagen.ir.plan import BarrierUse, KernelPlan, OpPlan, Plan, Reset, RoleRef, StepPlan, SyncKind
from megagen.lower import lower
from megagen.machines import load as load_machine
from megagen.models import muse_spark

SHIPPED = Path(__file__).resolve().parent.parent / "schedules" / "muse_moe.py"
RULES = {"references", "roles", "resources", "channels", "mbarriers", "ring", "order", "races"}
GEMMS = ("router", "pooler", "gate_up", "down", "unpooler")


@lru_cache
def shipped(fused: bool = True, choices: tuple[tuple[str, str], ...] = ()) -> Plan:
    return lower(load(SHIPPED, choices=dict(choices)), fused=fused)


def refused(plan: Plan, rule: str, *words: str) -> CheckError:
    with pytest.raises(CheckError) as caught:
        check(plan)
    text = caught.value.render()
    assert caught.value.message.endswith(f"[{rule}]"), text
    for word in words:
        assert word in text, text
    return caught.value


# -- what ships ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_every_choice_that_ships_passes(fused: bool) -> None:
    """Each option of each choice on its own; clusters' hand-off needs clusters."""
    offered = load(SHIPPED).offered
    assert len(offered) >= 5
    for name, (_, options) in offered.items():
        for option in options:
            choices = {name: option} | ({"cluster": "2"} if option == "cluster" else {})
            found = check(shipped(fused, tuple(choices.items())))
            assert {f.rule for f in found} == RULES
            assert any(f.level == "warning" for f in found) == (option in ("counter", "flag"))


def test_checking_takes_no_time() -> None:
    for fused in (True, False):
        for plan in (shipped(fused), lower(load(LAYER), fused=fused)):
            start = time.process_time()
            check(plan)
            assert time.process_time() - start < 2


def test_a_fence_behind_bulk_loads_is_priced_at_its_line() -> None:
    """Fused, all eight RANK hand-offs of the option; unfused, only those whose own kernel streams weights."""
    for fused, expected in ((True, 8), (False, 3)):
        warnings = [f for f in check(shipped(fused, (("sync", "counter"),))) if f.level == "warning"]
        assert len(warnings) == expected
        for f in warnings:
            line = f.render()
            assert "\n" not in line
            assert line.startswith("warning: counter of ")
            assert "7 to 8 µs" in line
            assert f.source is not None
            assert f"muse_moe.py:{f.source.line}" in line
            assert "s.sync(" in f.source.text


# -- broken in one place ---------------------------------------------------------------------------------------

Edit = Callable[[Plan], Plan]


def part(field: str, name: str | None = None, **changes: Any) -> Edit:
    """Change ``plan.<field>``, or in it the element of that name. A callable maps the old value."""

    def changed(item: Any) -> Any:
        new = {k: v(getattr(item, k)) if callable(v) else v for k, v in changes.items()}
        return item.model_copy(update=new)

    def edit(plan: Plan) -> Plan:
        old = getattr(plan, field)
        if name is None:
            return plan.model_copy(update={field: changed(old)})
        assert any(x.name == name for x in old), name
        return plan.model_copy(update={field: tuple(changed(x) if x.name == name else x for x in old)})

    return edit


def step(op: str | None, call: str, change: Callable[[StepPlan], list[StepPlan]], every: bool = True) -> Edit:
    """Replace each such step of the first kernel that has one."""

    def edit(plan: Plan) -> Plan:
        kernels, hits = [], 0
        for kernel in plan.kernels:
            programs = []
            for program in kernel.programs:
                steps: list[StepPlan] = []
                for s in program.steps:
                    hit = (s.op, s.call) == (op, call) and (every or not hits)
                    hits += hit
                    steps += change(s) if hit else [s]
                programs.append(program.model_copy(update={"steps": tuple(steps)}))
            kernels.append(kernel.model_copy(update={"programs": tuple(programs)}))
        assert hits, (op, call)
        return plan.model_copy(update={"kernels": tuple(kernels)})

    return edit


def with_(s: StepPlan, **changes: Any) -> StepPlan:
    return s.model_copy(update=changes)


def gone(s: StepPlan) -> list[StepPlan]:
    return []


def uses(**changes: Any) -> Callable[[StepPlan], list[StepPlan]]:
    """Change the barrier uses for which ``only(use)`` holds."""
    only = changes.pop("only", lambda u: True)
    return lambda s: [with_(s, barriers=tuple(u.model_copy(update=changes) if only(u) else u for u in s.barriers))]


def roles(op: str, **changes: tuple[int, ...]) -> Edit:
    return part("ops", op, roles=lambda old: dict(old) | changes)


def without_role(op: str, role: str) -> Edit:
    return part("ops", op, roles=lambda old: {k: v for k, v in old.items() if k != role})


def first_before(call: str, other: str) -> Edit:
    """In every program that has both, move the first such step to the front of the other."""

    def edit(plan: Plan) -> Plan:
        def moved(steps: tuple[StepPlan, ...]) -> tuple[StepPlan, ...]:
            calls = [s.call for s in steps]
            if call not in calls or other not in calls:
                return steps
            found = steps[calls.index(call)]
            rest = [s for s in steps if s is not found]
            rest.insert([s.call for s in rest].index(other), found)
            return tuple(rest)

        kernels = tuple(
            k.model_copy(update={"programs": tuple(p.model_copy(update={"steps": moved(p.steps)}) for p in k.programs)})
            for k in plan.kernels
        )
        return plan.model_copy(update={"kernels": kernels})

    return edit


def swapped(first: str, second: str, call: str) -> Edit:
    """Exchange two ops' steps of a kind in all programs."""

    def edit(plan: Plan) -> Plan:
        a = {s.op: s for k in plan.kernels for p in k.programs for s in p.steps if s.call == call}
        once = step(first, call, lambda s: [with_(a[second], index=-1)])(plan)
        return step(second, call, lambda s: [a[first]] if s.index != -1 else [a[second]])(once)

    return edit


def both(*edits: Edit) -> Edit:
    def edit(plan: Plan) -> Plan:
        for e in edits:
            plan = e(plan)
        return plan

    return edit


def pair(first: int, other: int) -> Edit:
    return part("launch", registers=(first, other))


MUTANTS: dict[str, tuple[Edit, str, tuple[str, ...]]] = {
    # roles
    "unassigned": (without_role("pooler", "reduce"), "roles", ("pooler.reduce", "no warp", "s.assign(g.pooler")),
    "three warps": (roles("down", math=(4, 5, 6)), "roles", ("down.math", "3 warps", "takes 8")),
    "gaps": (roles("down", math=(4, 5, 6, 7, 8, 9, 10, 12)), "roles", ("not consecutive",)),
    "unaligned": (roles("down", math=tuple(range(2, 10))), "roles", ("multiple of 4", "begin at warp 4")),
    "outside": (roles("down", math=tuple(range(8, 16))), "roles", ("warps 8 to 15", "has 12")),
    "two math groups": (roles("down", math=tuple(range(8))), "roles", ("router.math", "down.math", "same warps")),
    "two producers": (roles("down", load_weights=(1,)), "roles", ("load_weights", "one producer")),
    "two reducers": (roles("down", reduce=(3, 4)), "roles", ("router.reduce", "down.reduce", "in order")),
    "a reducer alone": (roles("down", reduce=(2,)), "roles", ("router.reduce is on warps 2 to 3", "all accumulators")),
    "three reducers": (roles("down", reduce=(1, 2, 3)), "roles", ("down.reduce", "takes 1 or 2")),
    "shared group": (
        part("ops", "pre_expert_norm", barriers={"group": "group_pre_ffn_norm"}),
        "roles", ("pre_expert_norm", "pre_ffn_norm", "group barrier"),
    ),
    "shared scratch": (
        part("ops", "pre_expert_norm", regions={"scratch": "scratch_pre_ffn_norm"}),
        "roles", ("pre_expert_norm", "pre_ffn_norm", "scratch"),
    ),
    "placed but not run": (step("pooler", "finish", gone), "roles", ("pooler.finish", "runs it on none")),
    "wrong first warp": (step("down", "math", lambda s: [with_(s, args=(0,))]), "roles", ("down.math", "not 4")),
    "no attach": (step(None, "attach", gone, every=False), "roles", ("exactly once", "0 times")),
    "attached twice": (step(None, "attach", lambda s: [s, s], every=False), "roles", ("exactly once", "2 times")),
    "trigger before attach": (first_before("trigger", "attach"), "roles", ("dependents", "previous launch")),
    "read before attach": (first_before("select", "attach"), "roles", ("top_k", "before it attaches")),
    "no drain": (step(None, "drain", gone), "roles", ("bulk loads", "drain")),
    "no housekeeper": (step(None, "reset", gone), "roles", ("one warp has to empty", "s.reset(by=")),
    "two housekeepers": (step(None, "reset", lambda s: [s, s]), "roles", ("one warp has to empty",)),
    "forgotten copy": (
        step(None, "reset", lambda s: [with_(s, writes=s.writes[1:])]), "roles", ("does not empty", "normed")
    ),
    "frozen epoch": (
        lambda p: p.model_copy(update={"kernels": (p.kernels[0].model_copy(update={"advances_epoch": False}),)}),
        "roles", ("epoch",),
    ),
    "missing program": (
        lambda p: p.model_copy(
            update={"kernels": tuple(k.model_copy(update={"programs": k.programs[1:]}) for k in p.kernels)}
        ),
        "roles", ("programs for warps 1 to 11",),
    ),
    # resources
    "too much shared memory": (part("launch", shared_bytes=232449), "resources", ("shared memory", "would fit")),
    "regions overlap": (part("regions", "accum", offset=128), "resources", ("accum overlaps ring", "shared memory")),
    "region too long": (part("regions", "table", bytes=1 << 20), "resources", ("table", "shared memory")),
    "barrier in a region": (part("barriers", "table_ready", offset=64), "resources", ("overlaps",)),
    "crooked barrier": (part("barriers", "table_ready", offset=lambda o: o + 4), "resources", ("multiple of 8",)),
    "small ring region": (part("regions", "ring", bytes=1024), "resources", ("region ring", "1024")),
    "small accumulators": (part("regions", "accum", bytes=8192), "resources", ("region accum", "16384")),
    "ring too small": (part("ring", stage_bytes=32 * KiB), "resources", ("ring too small", "36 * KiB")),
    "odd registers": (pair(100, 160), "resources", ("multiples of 8",)),
    "few registers": (pair(16, 160), "resources", ("24 to 256",)),
    "many registers": (pair(168, 176), "resources", ("add up to", "64512")),
    "no cluster of 3": (part("launch", cluster=3), "resources", ("clusters of 3",)),
    "half a cluster": (part("launch", cluster=8), "resources", ("132 blocks", "clusters of 8")),
    "too many blocks": (part("machine", blocks_fit={1: 131}), "resources", ("132 blocks", "131 at once")),
    "no block": (part("launch", blocks=0), "resources", ("0 blocks",)),
    "channels overlap": (part("channels", "logits", offset=102_400), "resources", ("overlaps", "heap")),
    "copies overlap": (part("channels", "normed", copies=3), "resources", ("overlaps", "heap")),
    "channel over control words": (part("channels", "normed", offset=0), "resources", ("overlaps", "epoch")),
    "short copy": (part("channels", "normed", bytes=1024), "resources", ("normed", "262144")),
    "short heap": (part("heap", bytes=1 << 20), "resources", ("heap",)),
    "few hang records": (part("heap", record_bytes=64), "resources", ("hang records",)),
    # channels
    "mbarrier between blocks": (
        part("channels", "normed", kind=SyncKind.MBARRIER), "channels", ("normed", "mbarrier", "one block", "lamport()")
    ),
    "table by lamport": (
        part("channels", "table", kind=SyncKind.LAMPORT, empty=0xFFFFFFFF), "channels", ("table", "use mbarrier()")
    ),
    "counter between ranks": (
        part("channels", "pooled", kind=SyncKind.COUNTER), "channels", ("pooled", "between ranks", "flag()")
    ),
    "cluster between ranks": (part("channels", "pooled", kind=SyncKind.CLUSTER), "channels", ("between ranks",)),
    "flag within a block": (part("channels", "table", kind=SyncKind.FLAG), "channels", ("table", "use mbarrier()")),
    "cluster of one block": (
        part("channels", "pooled_partials", kind=SyncKind.CLUSTER, barrier="table_ready", shared_offset=0),
        "channels", ("pooled_partials", "one block", "cluster=2"),
    ),
    "empty zero": (part("channels", "normed", empty=0), "channels", ("normed", "0x00000000", "ALL_ONES")),
    "empty zero gathered": (part("channels", "pooled", empty=0), "channels", ("pooled", "0x00000000")),
    "empty zero of ids": (part("channels", "routes", empty=0), "channels", ("routes", "u32")),
    "empty one": (part("channels", "normed", empty=0x3F803F80), "channels", ("0x3f803f80",)),
    "no empty value": (part("channels", "normed", empty=None), "channels", ("normed", "nothing")),
    "one copy": (
        part("channels", "normed", copies=1),
        "races", ("reset empties it", "router.math", "lamport(copies=2)"),
    ),
    "two copies between ranks": (
        part("channels", "pooled", copies=2),
        "races", ("uses of pooled", "on another rank, 1 launch later", "help: lamport(copies=3)"),
    ),
    "never emptied": (
        part("channels", "unpooled_partials", reset=Reset.NONE),
        "races", ("nothing empties unpooled_partials", "help: lamport(copies=2)"),
    ),
    "four copies": (part("channels", "normed", copies=4), "channels", ("copies=4", "1 to 3")),
    "two readers": (
        part("channels", "pooled_partials", readers=lambda r: (*r, RoleRef(op="combine", role="compute"))),
        "channels", ("combine.compute does not empty pooled_partials",),
    ),
    "wrong writer": (
        part("channels", "unpooled", writers=(RoleRef(op="pooler", role="finish"),)), "channels", ("writers of",)
    ),
    "never published": (part("channels", "unpooled", arrivals=0), "channels", ("unpooled wait for 0", "publishes 64")),
    # mbarriers
    "count": (part("barriers", "accum_full", count=7), "mbarriers", ("accum_full expects 7", "makes 8")),
    "ring consumers": (part("barriers", "ring_empty", count=7), "mbarriers", ("ring_empty", "8 consumers")),
    "group": (
        part("barriers", "group_pre_ffn_norm", count=9), "mbarriers",
        ("group_pre_ffn_norm", "pre_ffn_norm.compute", "8"),
    ),
    "table": (part("barriers", "table_ready", count=2), "mbarriers", ("table_ready expects 2", "top_k.tables makes 1")),
    "twice": (
        step("router", "math", uses(count=2, only=lambda u: u.barrier == "ring_empty" and u.action == "arrive")),
        "mbarriers", ("router.math does not arrive at ring_empty",),
    ),
    "nobody arrives": (
        step("top_k", "tables", lambda s: [with_(s, barriers=())]),
        "mbarriers", ("top_k.tables does not arrive at table_ready",),
    ),
    "one of two reducers is not counted": (
        part("barriers", "accum_empty", count=1),
        "mbarriers", ("accum_empty expects 1 arrivals a phase", "router.reduce makes 2"),
    ),
    "more reducers than there are": (
        part("barriers", "accum_empty", count=3),
        "mbarriers", ("accum_empty expects 3 arrivals a phase", "router.reduce makes 2"),
    ),
    "reducer hands nothing back": (
        step("down", "reduce", lambda s: [with_(s, barriers=tuple(u for u in s.barriers if u.action == "wait"))]),
        "mbarriers", ("down.reduce does not arrive at accum_empty",),
    ),
    "parity of empty": (
        step("down", "load_weights", uses(start=0, only=lambda u: u.barrier == "ring_empty")), "mbarriers", ("free",)
    ),
    "parity of full": (
        step("down", "math", uses(start=1, only=lambda u: u.barrier == "ring_full")), "mbarriers", ("missing",)
    ),
    "nobody announces bytes": (
        step("down", "load_weights", uses(action="arrive", only=lambda u: u.action == "expect_tx")),
        "mbarriers", ("down.load_weights does not announce bytes to ring_full",),
    ),
    "bytes uncounted": (part("barriers", "ring_full", tx=False), "mbarriers", ("ring_full", "does not count")),
    "slots": (part("barriers", "ring_full", slots=2), "mbarriers", ("ring_full has 2 slots", "3")),
    "unknown barrier": (
        step("down", "math", uses(barrier="nobody", only=lambda u: u.per == "launch")),
        "references", ("no barrier 'nobody'",),
    ),
    # ring
    "swapped streams": (swapped("gate_up", "down", "load_weights"), "ring", ("pooler, down, gate_up", "drains")),
    "hole": (
        step("down", "load_weights", lambda s: [with_(s, args=(0, 500, 4)), with_(s, args=(512, 1024, 4))]),
        "ring", ("500 to 512 of 1024", "down", "left out"),
    ),
    "overlap": (
        step("down", "load_weights", lambda s: [with_(s, args=(0, 512, 4)), with_(s, args=(500, 1024, 4))]),
        "ring", ("500 to 512 of 1024", "down", "loaded twice"),
    ),
    "not all": (step("down", "load_weights", lambda s: [with_(s, args=(0, 1000, 4))]), "ring", ("1000 to 1024",)),
    "share out of range": (step("down", "load_weights", lambda s: [with_(s, args=(0, 1025, 4))]), "ring", ("1025",)),
    "L2 share out of range": (
        step("top_k", "tables", lambda s: [s, _prefetch("down", 512, 2048)]),
        "ring", ("down.prefetch_l2", "2048"),
    ),
    "nothing in flight": (step("down", "load_weights", lambda s: [with_(s, args=(0, 1024, 0))]), "ring", ("nothing",)),
    # order
    "finish before reduce": (
        first_before("finish", "reduce"),
        "order", ("deadlock", "pooler.finish", "pooler.reduce", "for pooled_partials"),
    ),
}  # fmt: skip


def _prefetch(op: str, first: int, last: int) -> StepPlan:
    wait = BarrierUse(barrier="table_ready", action="wait", per="launch")
    return StepPlan(op=op, call="prefetch_l2", args=(first, last), reads=("table",), barriers=(wait,), index=-1)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_plan_broken_in_one_place_is_refused(name: str) -> None:
    edit, rule, words = MUTANTS[name]
    refused(edit(shipped()), rule, *words)


CLUSTERED = (("sync", "cluster"), ("cluster", "2"))


@pytest.mark.parametrize(
    ("edit", "rule", "words"),
    [
        (part("launch", cluster=1), "channels", ("one block", "cluster=2")),
        (part("regions", "cluster_pooled_partials", bytes=64), "resources", ("cluster_pooled_partials", "64")),
        (part("channels", "pooled_partials", copies=2), "channels", ("one copy",)),
        (part("channels", "pooled_partials", barrier=None), "channels", ("no barrier",)),
        (
            part("channels", "pooled_partials", readers=(RoleRef(op="top_k", role="select"),)),
            "channels", ("one op's partial sums",),
        ),
        (part("barriers", "done_pooled_partials", count=2), "mbarriers", ("done_pooled_partials expects 2",)),
    ],
)  # fmt: skip
def test_a_broken_cluster_is_refused(edit: Edit, rule: str, words: tuple[str, ...]) -> None:
    refused(edit(shipped(True, CLUSTERED)), rule, *words)


def test_an_unfused_plan_reads_what_an_earlier_kernel_wrote() -> None:
    plan = shipped(False)
    late = plan.model_copy(update={"kernels": (*plan.kernels[1:-1], plan.kernels[0], plan.kernels[-1])})
    refused(late, "order", "router", "reads normed before anything writes it")
    tables = next(k for k in plan.kernels if k.ops == ("gate_up",))
    programs = tuple(
        p.model_copy(update={"steps": tuple(s for s in p.steps if s.call != "tables")}) for p in tables.programs
    )
    bare = tables.model_copy(update={"programs": programs})
    refused(
        plan.model_copy(update={"kernels": tuple(bare if k is tables else k for k in plan.kernels)}),
        "mbarriers",
        "table",
    )


LAYER = SHIPPED.with_name("muse_swa.py")


def test_summed_contributions_may_use_plus_zero() -> None:
    """[tp, ...] of a K-sharded GEMM: adding -0 for +0 changes no sum."""
    plan = lower(load(LAYER, choices={"summed": "0"}))
    assert plan.channel("projected").empty == 0
    check(plan)
    gathered = part("channels", "unpooled", empty=0)(plan)
    refused(gathered, "channels", "unpooled", "0x00000000")


def reader_resets(plan: Plan, channel: str) -> Plan:
    """Its readers empty the channel, and the housekeeper does not."""
    edited = part("channels", channel, reset=Reset.READER, copies=1)(plan)
    return step(None, "reset", lambda s: [with_(s, writes=tuple(w for w in s.writes if w != channel))])(edited)


@pytest.mark.parametrize(
    ("channel", "words"),
    [
        ("unpooled", ("residual.measure does not empty unpooled", "reset=by_launch")),
        ("next_normed", ("next_qkvg.math does not empty next_normed",)),
        ("normed", ("router.math does not empty normed",)),
    ],
)  # fmt: skip
def test_a_reader_that_does_not_reset_is_refused(channel: str, words: tuple[str, ...]) -> None:
    refused(reader_resets(lower(load(LAYER)), channel), "channels", *words)


def test_a_reader_that_may_not_reset_is_refused() -> None:
    """Were it to: what other ranks send needs a second copy, for a faster one may be a launch ahead."""
    plan = reader_resets(lower(load(LAYER)), "pooled")
    specs = tuple(with_(s, hands_back=("in",)) for s in plan.op("pre_expert_norm").specs)
    plan = part("ops", "pre_expert_norm", specs=specs)(plan)
    words = ("pooler.finish, on another rank, 1 launch later, writes it", "lamport(copies=2, reset=by_reader)")
    refused(plan, "races", "uses of pooled", *words)
    check(part("channels", "pooled", copies=2)(plan))


def test_one_of_two_readers_may_not_reset() -> None:
    """Though each takes every element in one block only."""
    plan = shipped()
    name, channel = "pre_expert_norm", "pooled_partials"
    specs = tuple(with_(s, reads=("in", "twice"), hands_back=("twice",)) for s in plan.op(name).specs)
    plan = part("ops", name, specs=specs, channels=lambda old: {**old, "twice": channel})(plan)
    plan = part("channels", channel, readers=lambda r: (*r, RoleRef(op=name, role="compute")))(plan)
    plan = step(name, "compute", lambda s: [with_(s, reads=(*s.reads, channel))])(plan)
    words = ("pooler.finish", f"{name}.compute", "empties it", "lamport(copies=2)")
    refused(plan, "races", f"uses of {channel}", *words)


def test_a_reader_may_empty_each_of_two_copies() -> None:
    """It wastes memory and no more."""
    plan = shipped()
    end = plan.heap.bytes
    roomy = part("heap", bytes=end + 2 * plan.channel("unpooled_partials").bytes)(plan)
    check(part("channels", "unpooled_partials", copies=2, offset=end)(roomy))


# -- another Plan's launch before ------------------------------------------------------------------------------------


def waiting_for_nothing(plan: Plan) -> Plan:
    """What streams the caches no longer waits by itself for what the launch before may have written of them."""

    def change(op: OpPlan) -> OpPlan:
        specs = tuple(with_(spec, ahead=False) for spec in op.specs)
        return with_(op, specs=specs)

    return with_(plan, ops=tuple(change(op) for op in plan.ops))


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("name", ["muse_swa.py", "muse_global.py"])
def test_a_tensor_is_read_after_all_launches_before(name: str, writes: bool) -> None:
    """Even by a launch that writes none: the one before may be another Plan's."""
    plan = lower(load(name))
    (program,) = (p for p in plan.kernels[0].programs if any(s.call == "load" for s in p.steps))
    calls = [s.call for s in program.steps]
    assert calls.index("load") < calls.index("attach")
    if not writes:
        made = {p.name for p in plan.params if p.what in ("output", "state")}
        kept = [{port: t for port, t in op.tensors.items() if t not in made} for op in plan.ops]
        plan = with_(plan, ops=tuple(with_(op, tensors=t) for op, t in zip(plan.ops, kept, strict=True)))
    assert list(races(plan))
    with pytest.raises(CheckError, match=r"two uses of a tensor: .*; attention\.load, .*1 launch later, reads it"):
        list(races(waiting_for_nothing(plan)))


@pytest.mark.parametrize("name", ["muse_swa.py", "muse_global.py"])
def test_only_a_role_that_waits_by_itself_reads_before_the_launch_before_has_ended(name: str) -> None:
    plan = lower(load(name))
    check(plan)
    refused(waiting_for_nothing(plan), "roles", "runs attention before it attaches")


# -- a block with no share of the work ----------------------------------------------------------------------------

# With fewer tokens than blocks most blocks wait for no counter, count for none and read no table: nothing may rest on
# the steps of theirs that come before or after. Found by launching these: the first two hang or leave slots full, the
# third races across ranks.
IDLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "partial sums emptied in the launch that makes them": (
        "pooled_partials",
        {
            "finish": 2, "select": 2, "tables": 3, "reset": 3, "routes": counter(),
            "pooled_partials": lamport(copies=1),
        },
        "lamport(copies=2)",
    ),
    "emptied after a norm": (
        "pooled_partials",
        {"finish": 2, "compute": 12, "reset": 12, "pooled": flag(), "pooled_partials": lamport(copies=1)},
        "lamport(copies=2)",
    ),
    "two copies between ranks behind a flag": (
        "expert_mid", {"reduce": 12, "compute": 12, "pooled": flag(), "expert_mid": lamport(copies=2)},
        "lamport(copies=3)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IDLE)
def test_what_only_a_busy_block_waits_for_orders_nothing(name: str) -> None:
    channel, changes, fix = IDLE[name]
    g = muse_spark.expert_block(tp=8, tokens=16)
    s = Schedule("idle", g, load_machine("h200"), warps=20)
    at = {"reduce": 2, "finish": 3, "select": 1, "tables": 1, "reset": 1, "compute": 4} | changes
    s.ring(stages=3, stage_bytes=36 * KiB)
    s.assign(
        [getattr(g, name) for name in GEMMS], load_weights=s.warp(0), math=s.warps(4, 12), reduce=s.warp(at["reduce"])
    )
    s.assign([g.pooler, g.unpooler], finish=s.warp(at["finish"]))
    s.assign(g.top_k, select=s.warp(at["select"]), tables=s.warp(at["tables"]))
    s.assign(
        [g.pre_ffn_norm, g.pre_expert_norm, g.combine, g.residual], compute=s.warps(at["compute"], at["compute"] + 8)
    )
    s.assign([g.combine, g.residual], measure=s.warps(at["compute"], at["compute"] + 8))
    s.reset(by=s.warp(at["reset"]))
    edges = {
        "routes": g.top_k.select >> g.top_k.tables, "pooled_partials": g.pooler.reduce >> g.pooler.finish,
        "pooled": g.pooler >> g.pre_expert_norm, "expert_mid": g.gate_up >> g.down,
    }  # fmt: skip
    for tensor, edge in edges.items():
        if tensor in changes:
            s.sync(edge, changes[tensor])
    refused(lower(s), "races", f"uses of {channel}", "reset empties it", fix)


# -- deadlocks, at the user's line -----------------------------------------------------------------------------

LAUNCH = "    s.launch("
DEADLOCKS = {
    "the rest of a weight waits for what needs it": (
        LAUNCH, "    s.prefetch(g.pooler.weight, into=ring, share=0.5, during=g.residual)\n" + LAUNCH,
        ("pooler.load_weights", "residual", "s.prefetch(g.pooler", "share=1"),
    ),
    "a weight waits for its own op": (
        LAUNCH, "    s.prefetch(g.unpooler.weight, into=ring, share=0, during=g.unpooler)\n" + LAUNCH,
        ("unpooler.math", "the end of unpooler", "s.prefetch(g.unpooler"),
    ),
    "reduce on a math warp": ("math=math, reduce=reducer", "math=math, reduce=s.warp(4)", ("math", "reduce", "warps")),
    "producer on a math warp": ("load_weights=producer, math", "load_weights=s.warp(5), math", ("drain",)),
    "reduce on the producer": ("math=math, reduce=reducer", "math=math, reduce=producer", ("reduce", "load_weights")),
    "L2 prefetch needs the table too early": (
        LAUNCH, "    s.prefetch(g.down.weight, into=L2, during=g.pre_ffn_norm, by=finisher)\n" + LAUNCH,
        ("down.prefetch_l2", "table", "s.prefetch(g.down"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_shows_its_steps(name: str, tmp_path: Path) -> None:
    old, new, words = DEADLOCKS[name]
    text = SHIPPED.read_text()
    assert text.count(old) == 1
    path = tmp_path / "stuck.py"
    path.write_text(text.replace(old, new))
    plan = lower(load(path))
    error = refused(plan, "order", "deadlock", "stuck.py:", *words)
    assert len(error.notes) >= 2
    assert error.hint
    assert stuck(plan, plan.kernels[0], dict.fromkeys(GEMMS, 40))


# -- placements at random, against a simulated block -----------------------------------------------------------


def stuck(plan: Plan, kernel: KernelPlan, stages: dict[str, int]) -> set[str]:
    """Runs a block's programs by the header library's rules, one tile a stage; gives the steps that never end."""
    slots, accum = plan.ring.stages, plan.barrier("accum_full").slots
    maths = [p.first for p in kernel.programs if any(s.call == "math" for s in p.steps)]
    loaded = [0]
    used, put = dict.fromkeys(maths, 0), dict.fromkeys(maths, 0)
    taken = {p.first: 0 for p in kernel.programs if any(s.call == "reduce" for s in p.steps)}
    pending = {(p.first, i): s for p in kernel.programs for i, s in enumerate(p.steps)}
    at: dict[int, str] = {}

    def run(warp: int, steps: tuple[StepPlan, ...]) -> Iterator[bool]:
        for i, s in enumerate(steps):
            at[warp] = f"{s.op}.{s.call}"
            while any(n in x.writes for x in pending.values() if x.call != "reset" for n in s.reads):
                yield False
            if s.call == "wait_point":
                while any(x.call == "signal_point" and x.barriers == (_arrival(s),) for x in pending.values()):
                    yield False
            n = stages.get(s.op or "", 0)
            if s.call == "load_weights":
                for _ in range(n * s.args[0] // 1024, n * s.args[1] // 1024):
                    while loaded[0] - min(used.values()) >= slots:
                        yield False
                    loaded[0] += 1
                    yield True
            elif s.call == "math":
                for _ in range(n):
                    while loaded[0] <= used[warp]:
                        yield False
                    used[warp] += 1
                    while put[warp] - min(taken.values()) >= accum:
                        yield False
                    put[warp] += 1
                    yield True
            elif s.call == "reduce":
                for _ in range(n):
                    while min(put.values()) <= taken[warp]:
                        yield False
                    taken[warp] += 1
                    yield True
            del pending[warp, i]
            yield True
        del at[warp]

    running = [run(p.first, p.steps) for p in kernel.programs]
    while sum(next(r, False) for r in running):
        pass
    return set(at.values())


def _arrival(wait: StepPlan) -> Any:
    return wait.barriers[0].model_copy(update={"action": "arrive"})


@st.composite
def placements(draw: st.DrawFn, *, legal: bool) -> Schedule:
    """A schedule of the block as a person might write it; unless ``legal``, one that may well deadlock."""
    g = muse_spark.expert_block(tp=8, tokens=draw(st.sampled_from([1, 5, 16])))
    clusters = draw(st.sampled_from([1, 2]))
    warps = draw(st.sampled_from([12, 16]))
    s = Schedule("random", g, load_machine("h200"), warps=warps, blocks=clusters * draw(st.integers(40, 60)))
    first = draw(st.sampled_from(range(0, warps - 7, 4)))
    math = s.warps(first, first + 8)
    others = [w for w in range(warps) if w not in math.indices()]
    reducers = draw(st.sampled_from([1, 2]))
    takers = [w for w in others if {*range(w, w + reducers)} <= {*others}] if legal else range(warps + 1 - reducers)
    begin = draw(st.sampled_from(takers))
    reducer = s.warps(begin, begin + reducers)
    free = [w for w in others if w not in reducer.indices()] if legal else range(warps)
    producer = s.warp(draw(st.sampled_from(free)))
    anywhere = st.integers(0, warps - 1).map(s.warp)
    ring = s.ring(
        stages=draw(st.integers(2, 5)), stage_bytes=36 * KiB, in_flight=draw(st.sampled_from([None, 36 * KiB]))
    )
    gemms = [getattr(g, name) for name in GEMMS]
    s.assign(gemms, load_weights=producer, math=math, reduce=reducer)
    s.assign(g.pooler, finish=draw(anywhere))
    s.assign(g.unpooler, finish=draw(anywhere))
    s.assign(g.top_k, select=draw(anywhere), tables=draw(anywhere))
    s.assign([g.pre_ffn_norm, g.pre_expert_norm, g.combine, g.residual], compute=math)
    s.assign([g.combine, g.residual], measure=math)
    s.reset(by=draw(anywhere))
    s.accumulators(draw(st.integers(1, 3)))
    names = [op.name for op in g.ops]
    if draw(st.booleans()):
        op = draw(st.sampled_from(GEMMS))
        points = names[: names.index(op)] if legal else names
        share = draw(st.sampled_from([0, 0.25, 0.5]))
        s.prefetch(getattr(g, op).weight, into=ring, share=share, during=getattr(g, draw(st.sampled_from(points))))
    if draw(st.booleans()):
        op = draw(st.sampled_from(GEMMS))
        points = names[names.index("pre_expert_norm") :] if legal else names
        s.prefetch(getattr(g, op).weight, into=L2, during=getattr(g, draw(st.sampled_from(points))), by=draw(anywhere))
    local = draw(st.sampled_from([counter(), lamport(), lamport(copies=3)]))
    sums = draw(st.sampled_from([counter(), lamport(reset=Reset.READER)] + [cluster()] * (clusters > 1)))
    s.sync(g.pre_ffn_norm >> g.router, local)
    s.sync(g.gate_up >> g.down, lamport(copies=3))
    s.sync(g.pooler.reduce >> g.pooler.finish, sums)
    s.sync(g.unpooler.reduce >> g.unpooler.finish, sums)
    pdl = draw(st.booleans())
    s.launch(cluster=clusters, pdl=pdl, early_trigger=pdl and draw(st.booleans()))
    return s


COUNTS = st.fixed_dictionaries({op: st.integers(0, 12) for op in GEMMS})


@settings(max_examples=60, deadline=None)
@given(schedule=placements(legal=True), fused=st.booleans(), stages=COUNTS)
def test_legal_placements_pass_and_end(schedule: Schedule, fused: bool, stages: dict[str, int]) -> None:
    plan = lower(schedule, fused=fused)
    check(plan)
    for kernel in plan.kernels:
        assert stuck(plan, kernel, stages) == set()


@settings(max_examples=150, deadline=None)
@given(schedule=placements(legal=False), stages=COUNTS)
def test_the_checker_and_the_block_agree_about_deadlocks(schedule: Schedule, stages: dict[str, int]) -> None:
    """What passes ends whatever the routing; what is refused does hang once every op has more tiles than slots."""
    plan = lower(schedule)
    try:
        check(plan)
    except CheckError as error:
        assert "deadlock" in error.message
        assert stuck(plan, plan.kernels[0], dict.fromkeys(GEMMS, 40))
    else:
        assert stuck(plan, plan.kernels[0], stages) == set()
        assert stuck(plan, plan.kernels[0], dict.fromkeys(GEMMS, 40)) == set()


def test_a_role_short_of_registers_is_warned_about() -> None:
    plan = lower(load("muse_moe.py"))
    assert not [f for f in check(plan) if f.level == "warning"]
    launch = plan.launch.model_copy(update={"registers": (136, 120)})
    (short,) = [f for f in check(plan.model_copy(update={"launch": launch})) if "down" in f.message]
    assert short.level == "warning"
    assert "120" in short.message


def test_a_fault_and_math_with_two_programs_are_warned_about() -> None:
    plan = lower(load("muse_moe.py"))
    broken = [with_(c, fault=c.name == "pooled") for c in plan.channels]
    (found,) = [f for f in check(with_(plan, channels=tuple(broken))) if f.level == "warning"]
    assert "pooled" in found.message
    schedule = load("muse_moe.py")
    schedule.housekeeper = (schedule.warp(5), None)
    copies = [f.message for f in check(lower(schedule)) if f.level == "warning"]
    assert len(copies) == 5
    assert any("down.math is emitted 3 times, for warp 4 and warp 5 and warps 6 to 11" in m for m in copies)


def test_a_role_is_refused_at_the_line_that_placed_it() -> None:
    schedule = load("muse_moe.py")
    places = {role: loc for (op, role), (_, loc) in schedule.roles.items() if op == "pooler"}
    assert places["finish"] != places["math"]
    schedule.roles["pooler", "finish"] = (schedule.warps(2, 4), places["finish"])
    with pytest.raises(CheckError) as caught:
        check(lower(schedule))
    assert caught.value.loc == places["finish"]


def test_a_program_over_both_warpgroups_cannot_have_two_register_counts() -> None:
    schedule = load("muse_moe.py")
    schedule.warps_per_block, schedule.launch_ = 8, replace(schedule.launch_, registers=None)
    schedule.roles = {}  # eight idle warps: one program
    plan = lower(schedule)
    assert [(p.first, p.count) for p in plan.kernels[0].programs] == [(0, 1), (1, 1), (2, 6)]  # 1 is the housekeeper
    launch = plan.launch.model_copy(update={"registers": (120, 128)})
    with pytest.raises(CheckError, match="a branch a warpgroup"):
        list(resources(plan.model_copy(update={"launch": launch})))
