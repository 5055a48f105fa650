"""Schedules at random that are legal because of how they are made: every directive, over all that it may say.

Each warp runs what it has in graph order, and in an op in the order of its roles; what a role waits for comes earlier
in that order, so the earliest that has not ended can always go on, whoever runs it. That is why placements may be as
odd as they like. The exceptions are rules R1 to R9, each beside the code that obeys it; ``check`` has no part in it.
``fault`` is the one directive left out: it breaks a kernel on purpose.

    python tests/placements.py --jobs 16 [--seed S] [--count 300] [--only N ...] [--launches 4]

draws placements 0, 1, ... of a seed, all graphs in turn, and emulates every one of them, in as many launches as it
takes to use each copy of a channel again.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as seeded
from hypothesis import settings as drawing
from hypothesis import strategies as st

from megagen import machines
from megagen.check import check
from megagen.cli import pipeline
from megagen.dsl import KiB, load
from megagen.errors import MegagenError
from megagen.ir.graph import Graph, RoleSpec, Scope, Tensor, TensorKind
from megagen.ir.plan import Plan
from megagen.lower import lower
from megagen.models import muse_spark
from megagen.ops.global_attention import GlobalAttention

if TYPE_CHECKING:
    from megagen.bench.emulation import Emulation, Weights

Options = tuple[tuple[str, str], ...]  # of what is computed

SEED = int(os.environ.get("PLACEMENTS_SEED") or secrets.randbelow(1 << 32))  # of a run
MACHINE = machines.load("h200")
RANKS, TOKENS = 2, 4  # as emulated: all ranks, and the most tokens of a launch
WINDOW = 128  # of the emulated layer: two chunks of 64; its caches hold four
POSITIONS = 384  # of the emulated graphs: their sequences end in the second span of a growing cache
GRAPHS: dict[str, Callable[..., Graph]] = {
    "muse_moe": muse_spark.expert_block,
    "muse_swa": muse_spark.sliding_layer,
    "muse_last": muse_spark.last,
    "muse_global": muse_spark.global_layer,
    "muse_first": muse_spark.first,
}
SHIPPED = tuple(GRAPHS)
FOLLOWED: dict[str, Any] = {"following": "sliding", "positions": muse_spark.POSITIONS}
LAYER = {"split": "nn", "experts": "nvfp4", "all_reduce": "one_shot", **FOLLOWED}
PARAMETERS: dict[str, dict[str, Any]] = {
    "muse_moe": {"split": "nn", "experts": "nvfp4"},
    "muse_swa": LAYER,
    "muse_last": {},
    "muse_global": LAYER,
    "muse_first": FOLLOWED,
}
VARIANTS: dict[str, tuple[Options, ...]] = {
    "muse_moe": ((),),
    "muse_swa": ((("all_reduce", "one_shot"),), (("all_reduce", "two_shot"),)),  # which has a role of its own
    "muse_last": ((),),
    "muse_global": ((("all_reduce", "two_shot"),),),
    "muse_first": ((), (("following", "global"),)),
}
ACCUMULATOR = 8 * KiB  # mma/format.cuh: eight slices of two n8 tiles
TABLE = 16 + 4 * 256 + 2 * 256 + (2 + 2 + 16) * 128  # ops/top_k.cuh
ALIGNED = 128  # bytes, as regions of shared memory are
BARRIERS = 1 * KiB  # at most: two a stage and an accumulator, a few an op


def graph(shipped: str, options: Options, **more: Any) -> Graph:
    return GRAPHS[shipped](**dict(options), **more)


def tiny(shipped: str) -> dict[str, Any]:
    """Options of what is emulated: half as many heads, which all share their keys, and short sequences."""
    config = muse_spark.tiny(RANKS).model_copy(update={"heads": 8 * RANKS, "kv_heads": RANKS})
    return {"config": config} | ({"positions": POSITIONS} if "positions" in PARAMETERS[shipped] else {})


class _Passing(NamedTuple):
    """A tensor between roles. ``shapes``: at full size and as emulated, if a cluster can carry it."""

    tensor: Tensor
    edges: tuple[str, ...]  # all ways to say which it is
    one_reader: bool  # who takes each element in one block and can empty it
    shapes: tuple[tuple[int, ...], ...]


class _Facts:
    """What the strategy needs to know of a graph."""

    def __init__(self, full: Graph, small: Graph) -> None:
        self.ops = [op.name for op in full.ops]
        self.roles: dict[str, tuple[RoleSpec, ...]] = {op.name: op.roles() for op in full.ops}
        stages = [(op.name, stage["bytes"]) for g in (full, small) for op in g.ops if (stage := op.stage()) is not None]
        self.streams = dict(sorted(stages, key=lambda s: s[1]))  # the larger one counts
        self.streams = {op: self.streams[op] for op in self.ops if op in self.streams}
        self.gemms = [op.name for op in full.ops if op.stage() is not None and "weight" in op.weights]
        self.held = [op.name for op in full.ops if op.held]
        self.ahead = any(isinstance(op, GlobalAttention) for op in full.ops)
        self.own = sum(-(-size // ALIGNED) * ALIGNED for op in full.ops for size in op.shared().values())
        local = {t.name for t in full.tensors.values() if t.scope is Scope.BLOCK}
        makers = [i for i, op in enumerate(full.ops) if local & {*op.outputs.values()}]
        self.table = makers[0] if makers else None
        self.needed = {full.ops[i].name for i in makers}  # ops that the table waits for
        for op in reversed(full.ops):
            made = {*op.outputs.values()}
            self.needed |= {op.name} if any(made & {*full.op(o).inputs.values()} for o in self.needed) else set()
        ports = {op.name: {**op.inputs, **op.outputs} for op in full.ops}
        self.late = {op for op in self.streams for port in self._stream(op).reads if ports[op][port] in local}

        uses = [(op, role) for op in self.ops for role in self.roles[op]]
        writers, readers = (
            {t: [(op, r) for op, r in uses if t in (ports[op][p] for p in getattr(r, way))] for t in full.tensors}
            for way in ("writes", "reads")
        )
        internal = [t for t in full.tensors.values() if t.kind is TensorKind.INTERNAL]
        between: dict[tuple[str, str], set[str]] = {}
        for t in internal:
            for writer, _ in writers[t.name]:
                for reader, _ in readers[t.name]:
                    between.setdefault((writer, reader), set()).add(t.name)
        self.passing = []
        for t in internal:
            edges = []
            for writer, made in writers[t.name]:
                for reader, taken in readers[t.name]:
                    alone = writer != reader and len(between[writer, reader]) == 1
                    for left in [f"g.{writer}.{made.name}", *[f"g.{writer}"] * alone]:
                        edges += [f"{left} >> g.{reader}.{taken.name}", *[f"{left} >> g.{reader}"] * alone]
            takers = [t.name in (ports[op][p] for p in role.hands_back) for op, role in readers[t.name]]
            ops = [{op for op, _ in some[t.name]} for some in (writers, readers)]
            sums = len(t.shape) == 4 and ops[0] == ops[1] <= {*self.gemms}
            shapes = (t.shape, small.tensors[t.name].shape) if sums else ()
            self.passing.append(_Passing(t, tuple(edges), takers == [True], shapes))

    def _stream(self, op: str) -> RoleSpec:
        return next(role for role in self.roles[op] if role.stream)


@cache
def facts(shipped: str, options: Options) -> _Facts:
    full, small = graph(shipped, options), graph(shipped, options, tp=RANKS, tokens=TOKENS, **tiny(shipped))
    return _Facts(full, small)


@dataclass(frozen=True)
class Placement:
    """A schedule file's ``text`` for what ``shipped`` computes with ``options``, to be lowered ``fused`` or not.

    ``sms``: of the GPU on which it is emulated, which has to hold a cluster.
    """

    shipped: str
    options: Options
    fused: bool
    sms: int
    text: str


class _Draft:
    """A schedule while it is drawn, directive by directive."""

    def __init__(self, draw: st.DrawFn, known: _Facts) -> None:
        self.draw, self.known = draw, known
        self.lines: list[str] = []
        self.warps = self.number(10, 32)  # R1 takes ten
        self.cluster = self.one(1, 1, 2, 4, 8)
        self.sms = max(pipeline.TINY_SMS, self.cluster)
        self.homes: dict[str, set[int]] = {op: set() for op in known.ops}  # warps of an op

    def one(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def maybe(self) -> bool:
        return self.draw(st.booleans())

    def say(self, line: str) -> None:
        self.lines.append(f"    {line}\n")

    def write(self) -> str:
        self.schedule()
        self.assign()
        self.syncs()
        self.memory()
        self.prefetches()
        self.rest()
        return "".join(self.lines)

    def schedule(self) -> None:
        """R2: blocks wait for each other, so the machine holds all of them, and they make whole clusters."""
        c, share = self.cluster, self.number(1, 63) if self.maybe() else 64
        fit = (MACHINE.blocks_fit[c], machines.cut(MACHINE, self.sms).blocks_fit[c])
        self.clusters = [max(1, blocks * share // 64 // c) for blocks in fit]
        fewer = f", blocks=max({c}, machine.blocks_fit[{c}] * {share} // 64 // {c} * {c})" if share < 64 else ""
        self.say(f's = Schedule("drawn", g, machine, warps={self.warps}{fewer}, choices=choices)')

    def assign(self) -> None:
        """R1: one producer, eight math warps and one reducer or two for all GEMMs, which share a ring and accumulators
        in order; all different, for they hand weights and sums to each other while all of them run. What an attention
        streams passes the same ring. Any other role begins when what it reads is written, so it may be anywhere."""
        first = 4 * self.number(0, (self.warps - 8) // 4)
        others = [w for w in range(self.warps) if w not in range(first, first + 8)]
        pairs = [w for w in others if w + 1 in others]
        reducers = self.one(1, 2) if len(others) > 2 and pairs else 1
        reducer = self.one(*(others if reducers == 1 else pairs))
        producer = self.one(*(w for w in others if w not in range(reducer, reducer + reducers)))
        for op, roles in self.known.roles.items():
            said = []
            for role in roles:
                n = reducers if role.accum == "in" else self.one(*role.warps)
                if role.stream or role.ring or role.accum == "in":
                    at = producer if role.stream else first if role.ring else reducer
                    shared = op in self.known.gemms
                else:
                    at = role.align * self.number(0, (self.warps - n) // role.align)
                    shared = False
                if not shared:
                    said.append(f"{role.name}=" + (f"s.warp({at})" if n == 1 else f"s.warps({at}, {at + n})"))
                self.homes[op] |= {*range(at, at + n)}
            if said:
                self.say(f"s.assign(g.{op}, {', '.join(said)})")
        gemms = ", ".join(f"g.{op}" for op in self.known.gemms)
        math = f"s.warps({first}, {first + 8})"
        reduce = f"s.warp({reducer})" if reducers == 1 else f"s.warps({reducer}, {reducer + 2})"
        self.say(f"s.assign([{gemms}], load_weights=s.warp({producer}), math={math}, reduce={reduce})")

    def syncs(self) -> None:
        # R4: shared memory holds what is the block's own, what clusters hand over, a stage and an accumulator; more of
        # these two if it can.
        self.free = MACHINE.shared_bytes - TABLE - ALIGNED - BARRIERS - self.known.own
        least = max(self.known.streams.values()) + ACCUMULATOR
        for passing in self.known.passing:
            kinds, takes = self.kinds(passing), self.clustered(passing)
            if self.cluster > 1 and passing.shapes and takes <= self.free - least:
                kinds += ["cluster()"] * 3
            how = self.one(*kinds)
            self.free -= takes if how == "cluster()" else 0
            if how:
                self.say(f"s.sync({self.one(*passing.edges)}, {how})")

    @staticmethod
    def kinds(passing: _Passing) -> list[str]:
        """R3: a primitive reaches as far as the tensor travels, no writer can produce its empty word, and its memory is
        empty before it is used again."""
        t = passing.tensor
        if t.scope is Scope.BLOCK:
            return ["", "mbarrier()"]
        if t.scope is Scope.WORLD:
            # Three copies, for a faster rank may be a launch ahead. Only where contributions are summed does it not
            # matter that a +0 travels as -0.
            zero = ["lamport(POSITIVE_ZERO)", "lamport(empty=POSITIVE_ZERO, copies=3)"] if t.reduce else []
            return ["", "lamport(copies=3, reset=by_launch)", "flag()", "flag()", *zero]
        # Who empties a slot must know that nobody else still reads it.
        mine = [f"lamport({n}reset=by_reader)" for n in ("", "copies=1, ", "copies=2, ", "copies=3, ")]
        return [
            "",
            "lamport(copies=2)",
            "lamport(ALL_ONES, copies=3)",
            "counter()",
            "flag()",
            *(mine if passing.one_reader else []),
        ]

    def clustered(self, passing: _Passing) -> int:
        """Bytes of a block: row blocks are dealt to clusters, in a cluster to blocks, which keep all their chunks."""
        found = 0
        for clusters, (chunks, row_blocks, tokens, width) in zip(self.clusters, passing.shapes, strict=False):
            found = max(found, ceil(ceil(row_blocks / clusters) / self.cluster) * chunks * tokens * width * 4)
        return -(-found // ALIGNED) * ALIGNED

    def memory(self) -> None:
        sizes = self.known.streams.values()
        fewest = 2 if self.known.ahead else 1  # R9: whose reader holds two stages at once
        self.stages = stages = self.number(fewest, (self.free - ACCUMULATOR) // max(sizes))
        most = (self.free - ACCUMULATOR) // stages // ALIGNED
        size = ALIGNED * self.number(max(sizes) // ALIGNED, most) if self.maybe() else max(sizes)
        # R5: at least a stage may be in flight. As many as the ring holds are no cap, but may lift one.
        cap = self.cap(stages - 1) if stages > 1 and self.maybe() else 0
        early = cap and self.maybe()
        self.say(f"ring = s.ring(stages={stages}, stage_bytes={size}{f', in_flight={cap}' if early else ''})")
        if cap and not early:
            self.say(f"s.in_flight({cap})")
        for op in self.known.streams:
            if stages > 1 and self.number(0, 3) == 3:
                self.say(f"s.in_flight({self.cap(stages if cap else stages - 1)}, during=g.{op})")
        slots = self.number(1, (self.free - stages * size) // ACCUMULATOR)
        offered = f's.choice("accumulators", {slots}, 1)' if self.maybe() else slots
        if slots != 2 or self.maybe():
            self.say(f"s.accumulators({offered})")

    def cap(self, most: int) -> int:
        """Bytes of 1 to ``most`` stages, of whichever op."""
        n, sizes = self.number(1, most), self.known.streams.values()
        return self.number(n * max(sizes), max(n * max(sizes), (n + 1) * min(sizes) - 1))

    def prefetches(self) -> None:
        for op in self.known.gemms:
            i, weight = self.known.ops.index(op), f"g.{op}.weight"
            where = self.one("", "", "ring", "ring", "L2", "L2", "both", "ring | L2")
            if where in ("ring", "both"):
                # R6: what the rest waits for is the end of an op before its own: from its own on, none ends without it.
                share = self.one(0, self.number(0, 1023), 1024)
                point = f", {self.point(self.number(0, i - 1))}" if share < 1024 else ""
                self.say(f"s.prefetch({weight}, into=ring, share={share} / 1024{point})")
            if where in ("L2", "both"):
                share = f", share={self.number(1, 1024)} / 1024" if self.maybe() else ""
                self.say(f"s.prefetch({weight}, into=L2{share}, {self.asked(op, len(self.known.ops))})")
            if where == "ring | L2":
                share = self.number(0, 1024)
                self.say(f"s.prefetch({weight}, into=ring | L2, share={share} / 1024, {self.asked(op, i)})")

        for op in self.known.held:
            if self.maybe():
                self.say(f"s.prefetch(g.{op}, into=L2, {self.asked('', len(self.known.ops))})")
        if self.known.late and self.maybe():
            guess = f"previous_step(top={self.number(1, 7)}, hint={self.one('evict_normal', 'evict_last')})"
            ops = [op for op in sorted(self.known.late) if self.number(0, 2)]
            for op in ops:
                asked = self.asked("", len(self.known.ops))
                self.say(f"s.prefetch(g.{op}.weight, into=L2, experts={guess}, {asked})")
            if ops and self.maybe():
                self.say("s.experts_first(g.top_k, in_l2)")
        if self.maybe():
            self.say(f"s.warm_code(by=s.warp({self.number(0, self.warps - 1)}), blocks={self.number(1, 200)})")
        if self.number(0, 3) == 3:
            self.say(f"s.warm_code(next=True, {self.asked('', len(self.known.ops))})")

    def point(self, op: int) -> str:
        """During or before an op, or one of its roles: all the same."""
        name = self.known.ops[op]
        role = self.one("", *(f".{role.name}" for role in self.known.roles[name]))
        return f"{self.one('during', 'before')}=g.{name}{role}"

    def asked(self, op: str, end: int) -> str:
        """When, before op ``end``, L2 is asked for a weight, and by whom. R7: for an expert's, who asks waits for the
        table that says which are used, so from there to the table he has no role that it waits for. It does not wait
        for an op that makes nothing for it, unless whoever makes the table runs that too. For any other weight he
        waits until the block's other warps have come there too, which they do without him."""
        at = self.number(0, end - 1)
        name, table = self.known.ops[at], self.known.table
        free = {*range(self.warps)}
        if table is not None and op in self.known.late:
            spared = name not in self.known.needed and not self.homes[name] & self.homes[self.known.ops[table]]
            free = free.difference(*(self.homes[o] for o in self.known.ops[at + spared : table + 1]))
        if table is not None and not free:
            at, free = self.number(table + 1, end - 1), {*range(self.warps)}
        return f"by=s.warp({self.one(*sorted(free))}), {self.point(at)}"

    def rest(self) -> None:
        for op in self.known.streams:
            hint = self.one("", "evict_first", "evict_last", "evict_normal")
            if hint:
                self.say(f"s.hint(g.{op}{'.weight' * (op in self.known.gemms)}, {hint})")
        self.say(f"s.reset(by=s.warp({self.number(0, self.warps - 1)}))")  # of copies that this launch leaves alone
        able = [f"g.{op}.{r.name}" for op, roles in self.known.roles.items() for r in roles if r.rehearsable]
        dry = [role for role in able if self.maybe()] if self.maybe() else []
        if dry:
            self.say(f"s.dry_run({', '.join(dry)})")
        for role in (f"g.{op}.{r.name}" for op, roles in self.known.roles.items() for r in roles if r.warpgroups):
            if self.maybe():
                self.say(f"s.warpgroups({role})")
        said = [f"cluster={self.cluster}"] if self.cluster > 1 else []
        said += [self.one("pdl=True", "pdl=False", "early_trigger=True")]
        if self.warps % 4 == 0 and self.maybe():
            said.append(f"registers={self.registers()}")
        self.say(f"s.launch({', '.join(said)})")
        if self.maybe():
            self.say(f"s.stamps(records={self.number(1, 200)})")  # more or fewer than there are

    def registers(self) -> tuple[int, int]:
        """R8: multiples of eight from 24 to 256 for whole warpgroups, in sum no more than a launch starts with."""
        pool, others = MACHINE.registers // (32 * self.warps) // 8 * 8 * self.warps, self.warps - 4
        first = 8 * self.number(3, min(256, (pool - 24 * others) // 4) // 8)
        return first, 8 * self.number(3, min(256, (pool - 4 * first) // others) // 8)


@st.composite
def placements(draw: st.DrawFn, shipped: str, options: Options = (), fused: bool = True) -> Placement:
    """Legal schedules of what ``shipped`` computes with ``options``."""
    draft = _Draft(draw, facts(shipped, options))
    given = PARAMETERS[shipped] | dict(options)
    parameters = "".join(f", {name}={value!r}" for name, value in given.items())
    passed = "".join(f", {name}={name}" for name in given)
    head = (
        "from megagen.dsl import *\nfrom megagen.models import muse_spark\n\n\n"
        f"def schedule(machine, tp=8, tokens=16, choices=None, config=None{parameters}):\n"
        f"    g = muse_spark.{GRAPHS[shipped].__name__}(tp=tp, tokens=tokens, config=config{passed})\n"
    )
    text = head + draft.write() + "    return s\n"
    return Placement(shipped, options, fused, draft.sms, text)


def draw(seed: int, n: int) -> Placement:
    """The ``n``-th of a seed: all graphs in turn, each variant of one, every third of these unfused."""
    shipped, k = SHIPPED[n % len(SHIPPED)], n // len(SHIPPED)
    options = VARIANTS[shipped][k % len(VARIANTS[shipped])]
    found: list[Placement] = []

    # In one run of many, hypothesis varies what it has drawn before. What it draws first is always the simplest, and
    # the second differs from that in its first number.
    @seeded(f"{seed} {n}")
    @drawing(
        max_examples=2, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(st.integers(0, 1 << 32), placements(shipped, options, fused=k % 3 != 2))
    def collect(_: int, p: Placement) -> None:
        found.append(p)

    collect()
    return found[-1]


# -- in the emulator -------------------------------------------------------------------------------------------------


def small(p: Placement, schedule: Path | str, choices: Mapping[str, str] | None = None) -> tuple[Graph, Plan]:
    """A schedule file where ``p`` is emulated."""
    schedule = load(
        schedule, machine=machines.cut(MACHINE, p.sms), tp=RANKS, tokens=TOKENS, choices=choices,
        options={**dict(p.options), **tiny(p.shipped)},
    )  # fmt: skip
    return schedule.graph, lower(schedule, fused=p.fused)


@cache
def weights(shipped: str, options: Options) -> Weights:
    from megagen.bench.emulation import Weights

    return Weights.random(graph(shipped, options, tp=RANKS, tokens=TOKENS, **tiny(shipped)), RANKS)


def emulation(p: Placement, schedule: Path | str, choices: Mapping[str, str] | None = None) -> Emulation:
    from megagen.bench.emulation import Emulation
    from megagen.settings import Settings

    made, plan = small(p, schedule, choices)
    library = pipeline.emulated(pipeline.Checked(made, plan, check(plan)), Settings.from_env())
    return Emulation(plan, made, library, weights(p.shipped, p.options))


def launched(made: Emulation, which: int, seed: int, launches: int = 1) -> tuple[list[dict[str, Any]], list[str]]:
    """What launches on one input leave on every rank, as integers; and what should not be there."""
    import torch

    from megagen.bench.routes import routes
    from megagen.runtime.step import Step

    # A window fills; a ring ends, and a span.
    step = (Step.chain(1, WINDOW - 1), Step.tree([-1, 0, 0], 4 * 64 - 2))[which]
    few = routes(8, step.tokens, pool=16)
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    with made.world(seed, race=True) as world:
        verifier = made.verifier(world)
        routed = few if verifier.top_k else None
        verifier.launch(verifier.inputs(step.tokens, 3, step), routed, launches=launches)
        values = [verifier.values(step.tokens, rank) for rank in world.ranks]
        words = [{name: x.contiguous().view(views[x.element_size()]) for name, x in v.items()} for v in values]
        left = [f"rank {rank.rank}: {x}" for rank in world.ranks for x in rank.leftovers()]
        return words, [*left, *(f"{x} changed where no token stands" for x in verifier.strays())]


@cache
def usual(shipped: str, options: Options, which: int) -> list[dict[str, Any]]:
    """What the shipped placement leaves; with counters, so that nothing is emptied by who reads it."""
    p = Placement(shipped, options, fused=True, sms=pipeline.TINY_SMS, text="")
    words, wrong = launched(emulation(p, f"{shipped}.py", {"sync": "counter"}), which, seed=0)
    assert not wrong, wrong
    return words


def emulate(seed: int, n: int, launches: int = 1) -> str | None:
    """What is wrong with the ``n``-th placement of a seed where it is emulated; the text with it."""
    p, k = draw(seed, n), n // len(SHIPPED)
    variants = len(VARIANTS[p.shipped])
    which = (n % len(SHIPPED) + k % variants + k // 4) % 2  # at first always the same one, which spares references
    try:
        want = usual(p.shipped, p.options, which)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "drawn.py")
            path.write_text(p.text)
            made = emulation(p, path)
            got, wrong = launched(made, which, seed + n, launches)
        kept = {x.name for x in made.plan.params if x.what in ("output", "state")}
        kept |= {c.name for c in made.plan.channels if c.scope is Scope.WORLD}
        for rank, (a, b) in enumerate(zip(want, got, strict=True)):
            wrong += [f"rank {rank}: no {name}" for name in sorted(kept - b.keys())]
            wrong += [f"rank {rank}: other bits in {name}" for name in b if not a[name].equal(b[name])]
    except MegagenError as error:
        wrong = [error.render()]
    return "\n".join([*wrong, told(p, seed, n)]) if wrong else None


def told(p: Placement, seed: int, n: int) -> str:
    """Everything that repeats it."""
    how = f"{dict(p.options)}, {'fused' if p.fused else 'unfused'}, on {p.sms} SMs"
    return f"placement {n} of seed {seed} (python tests/placements.py --seed {seed} --only {n}): {how}\n{p.text}"


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Emulate placements that are drawn at random.")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--seed", type=int, default=SEED, metavar="S", help="default: any")
    parser.add_argument("--count", type=int, default=300, metavar="N")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these of the seed")
    parser.add_argument("--launches", type=int, default=4, metavar="N", help="one after the other (default: 4)")
    asked = parser.parse_args(arguments)
    numbers = asked.only or range(asked.count)
    write = sys.stdout.write
    write(f"{len(numbers)} placements of seed {asked.seed}\n")
    failed: list[int] = []
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        running = {pool.submit(emulate, asked.seed, n, asked.launches): n for n in numbers}
        for done, job in enumerate(as_completed(running), 1):
            n = running[job]
            problem = f"placement {n}: {error!r}" if (error := job.exception()) else job.result()
            if problem:
                failed.append(n)
                write(f"\n{problem}\n")
            write(f"\r{done} of {len(numbers)}, {len(failed)} failed")
            sys.stdout.flush()
    again = f": python tests/placements.py --seed {asked.seed} --only {' '.join(map(str, sorted(failed)))}"
    write(
        f"\n{len(numbers)} drawn of seed {asked.seed}, {len(numbers) - len(failed)} passed, {len(failed)} failed"
        f"{again if failed else ''}\n"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
