"""Pages of traces that nobody recorded: drawn from a seed, shaped and sized like those of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megagen.trace.model import Block, Edge, Leg, Loads, Page, Part, Row, Run, Share, Stat, Step, Wait, Warp
from megagen.trace.spans import Kind

LAUNCHES, BLOCKS, KEPT = 80, 132, 10
FLOOR, US = 62.4, 1000
MATH = tuple(range(4, 12))
NOBODY = 65535
FULL, EMPTY, ACCUM = 0, 1, 2  # barriers; the channel of op i is CHANNEL + i
CHANNEL = 9
STAGE = 36864
Span = tuple[int, int, int, int, int, int, int]


class Op(NamedTuple):
    """``begin``, ``us``: of its work in a launch. ``stages``: a block loads. ``loads``: when it asks for the first."""

    name: str
    kind: str
    begin: float
    us: float
    blocks: int = BLOCKS
    stages: int = 0
    loads: float = 0
    l2: tuple[float, float] | None = None


OPS = (
    Op("input_norm", "rms_norm", 1.0, 1.4, 16),
    Op("qkvg", "dense_gemm", 3.0, 8.0, stages=36, loads=0.2),
    Op("heads", "qkv_heads", 11.4, 1.2, 84),
    Op("attention", "attention", 13.0, 4.6),
    Op("o_proj", "dense_gemm", 18.2, 3.4, stages=12, loads=10.1),
    Op("all_reduce", "all_reduce", 22.4, 1.4, 64),
    Op("post_attention", "residual", 24.6, 1.6, 16),
    Op("router", "dense_gemm", 26.6, 1.3, stages=4, loads=20.6),
    Op("pooler", "dense_gemm", 28.0, 2.1, stages=6, loads=27.0),
    Op("top_k", "top_k", 30.0, 1.2, 16),
    Op("pre_expert_norm", "rms_norm", 31.4, 1.1, 16),
    Op("shared_gate_up", "dense_gemm", 32.8, 1.3, stages=4, loads=29.2),
    Op("shared_down", "dense_gemm", 34.2, 0.9, 96, stages=3, loads=32.9),
    Op("gate_up", "expert_gemm", 35.4, 12.9, stages=64, loads=34.0, l2=(15.2, 24.0)),
    Op("down", "expert_gemm", 49.4, 8.9, stages=26, loads=46.2),
    Op("combine", "combine", 60.2, 1.4, 64),
    Op("expert_norm", "rms_norm", 62.1, 0.8, 16),
    Op("unpooler", "dense_gemm", 63.2, 2.2, stages=6, loads=56.6),
    Op("residual", "residual", 66.6, 1.5, 16),
    Op("next_norm", "rms_norm", 68.5, 0.8, 16),
    Op("next_qkvg", "dense_gemm", 69.6, 8.0, stages=36, loads=64.6, l2=(57.0, 61.5)),
    Op("next_heads", "qkv_heads", 78.0, 1.2, 84),
)
ROLES = {
    "dense_gemm": (("math", MATH), ("reduce", (2,)), ("finish", (3,))),
    "expert_gemm": (("math", MATH), ("reduce", (2,))),
    "attention": (("attend", MATH), ("merge", MATH)),
    "top_k": (("select", (1,)), ("tables", (1,))),
    "qkv_heads": (("write", MATH),),
    "all_reduce": (("sum", (3,)),),
}
COVER = {
    "combine": "weights of unpooler, of which the ring holds 3 of 6 stages; next_qkvg's could go into L2",
    "unpooler": "weights of next_qkvg, 9.4 MB of which find room in L2",
    "heads": "weights of o_proj: its first load goes out 1.3 µs after the wait begins",
    "gate_up": "shared_gate_up, which needs no routing and could run first",
}


def page(runs: int = 1, seed: int = 0) -> Page:
    """A page with one or two runs of the full size."""
    return Page(title="muse_swa on h200, 16 tokens", runs=tuple(run(i, seed) for i in range(runs)))


def rename(page: Page, name: Callable[[str], str]) -> Page:
    """The page with every text in it but the kinds renamed."""
    kept = {"kind", "into", "what"}

    def renamed(value: Any, key: str = "") -> Any:
        match value:
            case str() if key not in kept:
                return name(value)
            case dict():
                return {k: renamed(v, k) for k, v in value.items()}
            case list() | tuple():
                return [renamed(v, key) for v in value]
        return value

    return Page.model_validate(renamed(page.model_dump()))


def run(index: int = 0, seed: int = 0) -> Run:
    """The second run has a quicker expert block, and reaches what follows sooner."""
    rng = np.random.default_rng([seed, index])
    ops = [_moved(op) for op in OPS] if index else list(OPS)
    total = ops[-1].begin + ops[-1].us + 0.3
    edges = [Edge(index=i, name=n, kind="barrier") for i, n in enumerate(("ring_full", "ring_empty", "accum_full"))]
    edges += [Edge(index=CHANNEL + i, name=f"to_{op.name}", kind="lamport") for i, op in enumerate(ops)]
    steps = _steps(ops)
    path = _path(ops, total, rng)
    return Run(
        name=("in_flight=36", "in_flight=72 experts first")[index],
        facts=(
            ("origin", "measured"),
            ("machine", "h200, 4 GPUs"),
            ("driver", "580.95.05"),
            ("schedule", "muse_swa.py " + ("in_flight=36", "in_flight=72")[index]),
            ("tokens", "16"),
            ("context", "4096"),
            ("experts", "49"),
            ("ranks", "4"),
            ("launches", f"{LAUNCHES} (8 layers, 10 replays)"),
            ("clock", "globaltimer, 32 ns"),
            ("offsets", "0, −412 ± 90, 1180 ± 85, 96 ± 91 ns"),
            ("commit", ("1266fed", "62eb2bf")[index]),
            ("date", "2026-03-14"),
        ),
        total=_stat(total + rng.normal(0, 0.6, LAUNCHES)),
        floor=FLOOR,
        launches=LAUNCHES,
        blocks_of=BLOCKS,
        rows=tuple(_row(op, i, rng) for i, op in enumerate(ops)),
        shares=_shares(path, rng),
        path=path,
        waits=_waits(ops, path, rng),
        hbm_idle=_stat(total - FLOOR - 5 + rng.normal(0, 0.4, LAUNCHES)),
        hbm_busy=_busy(ops, rng),
        idle=_stat(10.5 + rng.normal(0, 0.5, LAUNCHES * BLOCKS)),
        dropped=0,
        blocks=tuple(_block(ops, steps, k, rng) for k in range(KEPT)),
        steps=steps,
        edges=tuple(edges),
        plain=round(total - 2.1, 3),
        stamped=round(total - 0.2, 3),
    )


def _moved(op: Op) -> Op:
    if op.name == "gate_up":
        return op._replace(us=op.us - 1.6)
    return op._replace(begin=op.begin - 1.6, loads=max(0.1, op.loads - 1.6)) if op.begin > 48 else op


def _stat(values: NDArray[np.float64]) -> Stat:
    low, mid, high = (round(float(v), 3) for v in np.percentile(values, (10, 50, 90)))
    return low, mid, high


def _around(at: float, spread: float, op: Op, rng: np.random.Generator) -> NDArray[np.float64]:
    """Times of an op's blocks in all launches."""
    blocks = rng.normal(0, spread, op.blocks)
    return np.maximum(0, at + blocks[None, :] + rng.normal(0, 0.1, (LAUNCHES, 1)))


def _row(op: Op, index: int, rng: np.random.Generator) -> Row:
    begin = _stat(_around(op.begin, 0.12, op, rng))
    end = _stat(_around(op.begin + op.us, 0.05 + op.us / 12, op, rng))
    loads, parts = list[Loads](), list[Part]()
    if op.stages:
        last = op.begin + op.us * 0.86
        loads.append(_loads("ring", op.loads, last, op, rng))
        idle, (first,) = _stat(_around(op.us / 4, 0.05, op, rng)), loads
        parts.append(
            Part(role="load_weights", warps=(0,), begin=first.begin, ready=first.begin, end=first.end, waits=idle)
        )
    if op.l2:
        loads.append(_loads("l2", *op.l2, op, rng))
    head = OPS[index - 1].begin + OPS[index - 1].us if index else 0.4
    for i, (role, warps) in enumerate(ROLES.get(op.kind, (("compute", MATH),))):
        late = i * 0.35 * op.us
        ready = _stat(_around(op.begin + late, 0.12, op, rng))
        parts.append(
            Part(
                role=role,
                warps=warps,
                begin=_stat(_around(min(head, op.begin - 0.1) + late / 2, 0.15, op, rng)),
                ready=ready,
                end=_stat(_around(op.begin + op.us * (0.8 if role == "math" else 1), 0.1, op, rng)),
                waits=_stat(np.abs(_around(op.us * 0.3 + 0.4, 0.2, op, rng))),
            )
        )
    return Row(
        op=op.name,
        kind=op.kind,
        blocks=op.blocks,
        begin=begin,
        end=end,
        loads=tuple(loads),
        parts=tuple(parts),
        source=f"_layer.py:{51 + index}",
        length=_stat(_around(op.us * 0.97, 0.05 + op.us / 14, op, rng)),
    )


def _loads(into: Any, first: float, last: float, op: Op, rng: np.random.Generator) -> Loads:
    begin, end = _stat(_around(first, 0.15, op, rng)), _stat(_around(last, 0.3, op, rng))
    return Loads(into=into, begin=begin, end=end, bytes=op.blocks * (op.stages // 2 or 1) * STAGE, blocks=op.blocks)


def _path(ops: Sequence[Op], total: float, rng: np.random.Generator) -> tuple[Leg, ...]:
    legs = [Leg(op="", role="attach", what="launch", detail="", rank=0, block=0, warp=4, begin=0, end=ops[0].begin)]
    for i, op in enumerate(ops):
        role, warps = ROLES.get(op.kind, (("compute", MATH),))[0]
        at = {"op": op.name, "role": role, "rank": 0, "block": int(rng.integers(BLOCKS)), "warp": warps[-1]}
        if i and op.begin > legs[-1].end:
            legs.append(Leg(what="hop", detail=f"to_{op.name}", begin=legs[-1].end, end=op.begin, **at))
        begin = legs[-1].end
        end = max(begin, ops[i + 1].begin - 0.5 if i + 1 < len(ops) else total)
        if op.stages:
            middle = round(begin + (end - begin) * 0.4, 3)
            legs.append(Leg(what="load", detail="ring_full", begin=begin, end=middle, **at))
            begin = middle
        legs.append(Leg(what="work", detail="", begin=begin, end=round(end, 3), **at))
    return tuple(legs)


def _shares(path: Sequence[Leg], rng: np.random.Generator) -> tuple[Share, ...]:
    sums: dict[tuple[str, str], float] = {}
    for leg in path:
        sums[leg.op, leg.what] = sums.get((leg.op, leg.what), 0) + leg.end - leg.begin
    shares = [Share(op=op, what=what, us=_stat(us + rng.normal(0, 0.03, LAUNCHES))) for (op, what), us in sums.items()]
    return tuple(sorted(shares, key=lambda share: -share.us[1]))


def _waits(ops: Sequence[Op], path: Sequence[Leg], rng: np.random.Generator) -> tuple[Wait, ...]:
    waits = []

    def add(op: Op, edge: str, begin: float, us: float, critical: float) -> None:
        role = ROLES.get(op.kind, (("compute", MATH),))[0][0]
        begins, lengths = _stat(_around(begin, 0.2, op, rng)), _stat(_around(us, 0.1, op, rng))
        cover = COVER.get(op.name, "")
        waits.append(
            Wait(op=op.name, role=role, edge=edge, begin=begins, us=lengths, critical_us=critical, cover=cover)
        )

    for i, op in enumerate(ops):
        us = max(0.2, op.begin - (ops[i - 1].begin + ops[i - 1].us if i else 0))
        critical = sum(leg.end - leg.begin for leg in path if leg.op == op.name and leg.what == "hop")
        add(op, f"to_{op.name}", op.begin - us, us, round(critical, 3))
        if op.stages:
            add(op, "ring_full", op.begin, op.us * 0.3, round(op.us * 0.075, 3))
    return tuple(sorted(waits, key=lambda wait: -wait.critical_us))


def _busy(ops: Sequence[Op], rng: np.random.Generator) -> tuple[tuple[float, float], ...]:
    stretches: list[tuple[float, float]] = []
    for op in sorted((op for op in ops if op.stages), key=lambda op: op.loads):
        # a ring that is full asks for nothing until the math begins
        early = (op.loads, min(op.loads + 1.9, op.begin))
        for begin, end in (early, (op.begin, op.begin + op.us * 0.95)):
            if stretches and begin <= stretches[-1][1]:
                begin, end = stretches[-1][0], max(end, stretches.pop()[1])
            stretches.append((round(begin, 3), round(end + float(rng.uniform(0, 0.1)), 3)))
    return tuple(stretches)


def _steps(ops: Sequence[Op]) -> tuple[Step, ...]:
    """The producer's, then warp by warp's; services have no op."""
    calls = [(op.name, "load_weights", i) for i, op in enumerate(ops) if op.stages]
    calls += [(op.name, "prefetch_l2", i) for i, op in enumerate(ops) if op.l2]
    calls += [(op.name, role, i) for i, op in enumerate(ops) for role, _ in ROLES.get(op.kind, (("compute", MATH),))]
    calls += [("", name, -1) for name in ("attach", "trigger", "reset", "drain")]
    return tuple(
        Step(index=k, op=op, call=call, source=f"_layer.py:{51 + i}" if op else "_layer.py:48")
        for k, (op, call, i) in enumerate(calls)
    )


class _Warp:
    """Jobs one after another, and what happens in them."""

    def __init__(self, index: dict[tuple[str, str], int]) -> None:
        self.index, self.spans, self.now = index, list[Span](), 120

    def job(self, op: str, call: str, end: float, events: Sequence[tuple[Kind, int, int, int, float, float]]) -> None:
        """``events``: kind, edge, slot, bytes and µs; those before the job or after it are left out."""
        step, begin, self.now = self.index[op, call], self.now, max(self.now, round(end * US))
        self.spans.append((int(Kind.JOB), step, NOBODY, 0, 0, begin, self.now))
        last = begin
        for kind, edge, slot, size, since, until in events:
            a, b = max(last, round(since * US)), min(self.now, round(until * US))
            if a > self.now or b < a or (kind == Kind.WAIT and b - a < 64):
                continue
            last = b
            self.spans.append((int(kind), step, edge, slot, size, a, b))


def _block(ops: Sequence[Op], steps: Sequence[Step], k: int, rng: np.random.Generator) -> Block:
    jitter = rng.normal(0, 0.15, len(ops))
    begins = [op.begin + float(j) for op, j in zip(ops, jitter, strict=True)]
    ends = [b + op.us * float(rng.uniform(0.92, 1.04)) for op, b in zip(ops, begins, strict=True)]
    mine = [op.blocks == BLOCKS or bool(rng.random() < op.blocks / BLOCKS) for op in ops]
    index = {(step.op, step.call): step.index for step in steps}
    warps = {w: _Warp(index) for w in range(12)}
    for warp in warps.values():
        warp.job("", "attach", 0.9 + float(rng.uniform(0, 0.1)), [])
    for i, op in enumerate(ops):
        for later in ops:
            if later.l2 and (ops[i - 1].begin if i else 0) <= later.l2[0] < op.begin:
                asked = np.linspace(*later.l2, 12)
                events = [(Kind.PREFETCH, NOBODY, 0, STAGE, float(t), float(t)) for t in asked]
                warps[1].job(later.name, "prefetch_l2", float(asked[-1]) + 0.05, events)
        if not mine[i]:
            continue
        arrival = (Kind.WAIT, CHANNEL + i, 0, 0, begins[i] - 30, begins[i])
        stages = np.linspace(begins[i], ends[i], op.stages + 1)
        for number, (role, who) in enumerate(ROLES.get(op.kind, (("compute", MATH),))):
            last = number + 1 == len(ROLES.get(op.kind, (0,)))
            for w in who:
                events = [
                    arrival if not number or role == "finish" else (Kind.WAIT, ACCUM, 0, 0, begins[i] - 30, begins[i])
                ]
                if role == "math":
                    for s, (a, b) in enumerate(pairwise(stages)):
                        events.append((Kind.WAIT, FULL, s % 3, 0, a, a + (b - a) * float(rng.uniform(0.1, 0.8))))
                elif op.stages:
                    for a, b in zip(stages[::2], stages[1::2], strict=False):
                        events.append((Kind.WAIT, ACCUM, 0, 0, a, a + (b - a) * 0.9))
                warps[w].job(op.name, role, ends[i] + (0.1 * number if last else 0), events)
        if op.stages:
            asked = np.linspace(op.loads, begins[i] + op.us * 0.86, op.stages) + float(rng.uniform(0, 0.1))
            warps[0].job(op.name, "load_weights", float(asked[-1]) + 0.02, [
                event for s, t in enumerate(asked) for event in (
                    (Kind.WAIT, EMPTY, s % 3, 0, float(t) - 0.3, float(t)),
                    (Kind.LOAD, FULL, s % 3, STAGE, float(t), float(t)),
                )
            ])  # fmt: skip
    end = ends[-1] + 0.25
    for w, warp in warps.items():
        warp.job("", {0: "drain", 1: "reset"}.get(w, "trigger"), end - 0.01 * w, [])
    titles = {0: "producer", 1: "routes, prefetches, resets", 2: "reduces", 3: "finishes"}
    return Block(
        rank=k % 2,
        block=11 * k + 3,
        sm=(11 * k + 3) * 7 % BLOCKS,
        end=round(end, 3),
        warps=tuple(Warp(warp=w, title=titles.get(w, "math"), spans=tuple(v.spans)) for w, v in warps.items()),
    )
