"""Stamps on a GPU: the same bits, all that warps did, and several GPUs on one clock."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

REPLAYS = 5


def say(what: object) -> None:
    """For whoever runs with -s: figures, not verdicts."""
    sys.stdout.write(f"{what}\n")


def request(**more: Any) -> Any:
    from megagen.cli import pipeline

    return pipeline.Request(Path("muse_swa.py"), **more)


@pytest.fixture(scope="module")
def stamped(layers: Any) -> Any:
    """The default placement with stamps, by a clock."""
    from megagen.cli import pipeline

    def build(cycles: bool = False) -> Any:
        found = pipeline.check(request(stamps=True))
        plan = found.plan.model_copy(update={"stamps": found.plan.stamps.model_copy(update={"cycles": cycles})})
        checked = pipeline.Checked(found.graph, plan, found.findings)
        return pipeline.build(checked, ["sm_90a"], layers.settings)

    return build


@pytest.mark.parametrize("cycles", [False, True], ids=["globaltimer", "clock64"])
def test_stamps_change_no_bit(layers: Any, stamped: Any, cycles: bool) -> None:
    from test_layer import launches, same

    from megagen.runtime.session import Session

    right = launches(layers.verifier(layers.session()))
    built = stamped(cycles)
    with Session(built.plan, built.artifacts["sm_90a"].path) as session:
        verifier = layers.verifier(session)
        for _ in range(3):
            same(right, launches(verifier))


def recorded(built: Any, live: Any, replays: int = REPLAYS, layers: int = 8) -> tuple[Any, Any]:
    """A trace of a graph over distinct layers, and the stack."""
    import torch

    from megagen.bench.inputs import Inputs
    from megagen.bench.routes import routes
    from megagen.runtime.stack import Stack
    from megagen.runtime.step import Step
    from megagen.trace import offset
    from megagen.trace.record import Recorder
    from megagen.trace.spans import Facts
    from megagen.weights.random import random_layer

    count, step = len(live.ranks), Step.chain(16, 4096)
    inputs = Inputs.random(built.graph, count, 16, 0, torch.device("cuda", 0), step)
    packed = [
        [random_layer(built.graph, seed, f"cuda:{r}", rank=r).packed() for r in range(count)] for seed in range(layers)
    ]
    given = [{n: x.to(f"cuda:{r}") for n, x in inputs.ranks[r].items()} for r in range(count)]
    stack = Stack(live, packed, given)
    for rank in live.ranks:
        rank.set_step(step)
    graph = stack.capture(restore=False)
    from megagen.settings import Settings

    offsets = offset.measure(range(count), "sm_90a", Settings.from_env())
    recorder = Recorder(built.plan)
    for replay in range(replays + 1):
        for rank in live.ranks:
            rank.set_route_override(routes(49, 16, seed=replay))
        for device in reversed(range(count)):  # none begins long before the others
            with torch.cuda.device(device):
                torch.cuda._sleep(400_000)
        graph.replay()
        live.synchronize()
        for layer, bound in enumerate(stack.bound if replay else ()):
            recorder.add(layer, replay, [b.stamps for b in bound])
    again = offset.measure(range(count), "sm_90a", Settings.from_env())
    recorder.drifts = [offset.Drift(*pair) for pair in zip(offsets, again, strict=True)]
    facts = Facts(origin="measured", name="test", machine="test", tokens=16, ranks=count)
    say(recorder.drifts)
    return recorder.trace(facts), stack


def test_all_that_warps_did(stamped: Any) -> None:
    """Every step of every warp, every byte of the dense weights, launches as long by either clock."""
    from megagen.runtime.session import Session
    from megagen.trace.spans import Kind

    took = []
    for cycles in (False, True):
        built = stamped(cycles)
        plan = built.plan
        with Session(plan, built.artifacts["sm_90a"].path) as session:
            trace, _ = recorded(built, session)
        spans = trace.spans
        assert not trace.launches["dropped"].any()
        jobs = spans[spans["kind"] == Kind.JOB]
        steps = sum(p.count * len(p.steps) for k in plan.kernels for p in k.programs)
        assert len(jobs) == steps * plan.launch.blocks * len(trace.launches)
        assert (jobs["end"] >= jobs["begin"]).all() and jobs["begin"].min() >= 0
        op_of = {s.index: s.op for k in plan.kernels for p in k.programs for s in p.steps}
        loads = spans[spans["kind"] == Kind.LOAD]
        for weight in plan.weights:
            if weight.layout == "tiles" and not weight.experts:
                (op,) = (o.name for o in plan.ops if o.weights.get("weight") == weight.parameter)
                mine = np.isin(loads["step"], [i for i, o in op_of.items() if o == op])
                want = weight.rows * weight.k * int(weight.dtype.bits) // 8
                assert int(loads["bytes"][mine].sum()) == want * len(trace.launches)
        took.append(median(trace.launches["end"].tolist()))
    assert took[0] == pytest.approx(took[1], rel=0.05)


def test_two_gpus_on_one_clock(stamped: Any) -> None:
    """Both ranks make the same stream, again and again, and what one sends is seen by the other as soon as the
    other way round: half the difference is how far their clocks are apart."""
    import torch

    from megagen.runtime.group import Group
    from megagen.trace.spans import Kind

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    built = stamped()
    with Group(built.plan, built.artifacts["sm_90a"].path, (0, 1)) as group:
        trace, stack = recorded(built, group, replays=20)
        outs = [rank["stream_out"].view(torch.int32).cpu() for rank in stack.outputs]
        assert torch.equal(*outs) and len(outs[0].unique()) > 1000
    skew = misalignment(trace, Kind)
    say(f"misalignment by messages {skew:.0f} ns")
    assert abs(skew) < 500


def misalignment(trace: Any, kind: Any) -> float:
    """ns, by the exchanges between all ranks: how long after its writers' last job on one rank the other stops waiting
    for it, one way less the other, halved; the median of the exchanges', which take not all as long."""
    plan, spans = trace.plan, trace.spans
    steps = {s.index: s for k in plan.kernels for p in k.programs for s in p.steps}
    skews = []
    for channel in plan.channels:
        if channel.scope != "world":
            continue
        ways: dict[int, list[int]] = {0: [], 1: []}
        writes = [i for i, s in steps.items() if s.op and channel.name in s.writes]  # not who empties it
        written = spans[(spans["kind"] == kind.JOB) & np.isin(spans["step"], writes)]
        waited = spans[(spans["kind"] == kind.WAIT) & (spans["edge"] == channel.index)]
        for launch in range(len(trace.launches)):
            sent = [written["end"][(written["launch"] == launch) & (written["rank"] == r)] for r in (0, 1)]
            got = [waited["end"][(waited["launch"] == launch) & (waited["rank"] == r)] for r in (0, 1)]
            if all(len(x) for x in (*sent, *got)):
                slower = int(sent[1].max() > sent[0].max())
                if abs(int(sent[1].max()) - int(sent[0].max())) > 500:  # or the reader waited for its own rank
                    ways[slower].append(int(got[1 - slower].max()) - int(sent[slower].max()))
        say((channel.name, {way: (len(x), median(x) if x else None) for way, x in ways.items()}))
        if all(len(x) >= 10 for x in ways.values()):
            skews.append((median(ways[0]) - median(ways[1])) / 2)
    assert len(skews) >= 3
    return median(skews)
