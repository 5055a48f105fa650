"""Plans broken in one place: made from what ships, refused by ``check``, and shown for what they are by the emulator.

    python tests/plan_mutants.py --jobs 16      # emulates what plan_mutants.json does not know yet, with check off
    python tests/plan_mutants.py --write        # docs/mutants.md from it

How they are broken: plan_mutations.py. A mutant is launched four times in a row, each launch on what the one before it
left, under one seed after the other until something shows: a fault that the emulator reports, bits that differ from the
unbroken schedule's, slots that should be empty again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from plan_mutations import FAMILIES

from megagen import files, resources
from megagen.check import check
from megagen.cli import pipeline
from megagen.compile.compiler import without_comments
from megagen.emit import emit
from megagen.errors import CheckError, CompileError, DeviceError, EmulationError
from megagen.ir.graph import Graph
from megagen.ir.plan import Plan
from megagen.runtime import heap

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "plan_mutants.json"
PAGE = ROOT / "docs" / "mutants.md"
RANKS, TOKENS = 2, 4  # of the tiny layers
LAUNCHES = 4  # in a row: every copy is used again
SEEDS = range(1, 13)
CPU_SECONDS = 120  # for one seed
WORDS = 100  # letters of a message that are kept

# -- mutants -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """A shipped schedule as it is placed. ``kinds``: of mutants that it is there for (default: all), ``only`` a pattern
    of their places: of the rest another base has the like."""

    name: str
    schedule: str
    choices: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    fused: bool = True
    kinds: Sequence[str] = ()
    only: str = ""

    @property
    def checked(self) -> pipeline.Checked:
        return _checked(self.name)


CLUSTER = {"sync": "cluster", "cluster": "2"}
COUNTERS = ("arrivals", "arrivals of another unit", "counter over another", "copies", "reset", "kind")
POINTS = (
    "step left out", "step twice or elsewhere", "neighbours exchanged", "count", "slots", "use of a barrier not said",
    "first phase", "use of a barrier", "share", "prefetch",
)  # fmt: skip
CLUSTERED = (
    "count", "slots", "cluster memory", "kind", "copies", "use of a barrier not said", "use of a barrier",
    "region over another", "region too small",
)  # fmt: skip
SHARED = r"partials|cluster"
EXCHANGED = "projected|pooled|expert_mid|expert_out|unpooled"
BASES = (
    Base("muse_moe", "muse_moe.py"),
    Base("muse_moe counter", "muse_moe.py", {"sync": "counter"}, kinds=COUNTERS),
    Base("muse_moe flag", "muse_moe.py", {"sync": "flag"}, kinds=COUNTERS, only=rf"^({EXCHANGED})\b"),
    Base("muse_moe cluster", "muse_moe.py", CLUSTER, kinds=CLUSTERED, only=SHARED),
    Base("muse_moe half", "muse_moe.py", {"unpooler": "half"}, kinds=POINTS, only=r"point_|unpooler\.load"),
    Base("muse_moe both", "muse_moe.py", {"unpooler": "both"}, kinds=POINTS, only="prefetch_l2|begin_"),
    Base("muse_moe unfused", "muse_moe.py", fused=False, kinds=("kernels",)),
    Base("muse_swa", "muse_swa.py"),
    Base("muse_swa counter", "muse_swa.py", {"sync": "counter"}, kinds=COUNTERS),
    Base("muse_swa flag", "muse_swa.py", {"sync": "flag"}, kinds=COUNTERS, only=rf"^({EXCHANGED})\b"),
    Base("muse_swa cluster", "muse_swa.py", CLUSTER, kinds=("cluster memory",)),
    Base("muse_swa prefetch", "muse_swa.py", {"o_proj": "quarter", "next_qkvg": "3/8"},
         kinds=POINTS[:4], only=r"point_|prefetch_l2|o_proj\.load|next_qkvg\.load|begin_"),
    Base("muse_swa unfused", "muse_swa.py", fused=False, kinds=("kernels",), only="^(attention|o_proj|next|post|no)"),
    Base("muse_swa one_shot", "muse_swa.py", options={"all_reduce": "one_shot"}, only=r"projected|post_attention\.c"),
)  # fmt: skip
# Placements and kinds that each layer has for itself; of others, a place of the block is not broken in the layer again.
EVERYWHERE = {("", "copies"), ("", "count"), ("", "empty"), ("", "reset"), ("cluster", "cluster memory")}
SPECIAL = {"kernels", "cluster memory"}  # of bases made for them
ALL_WAYS = {"count", "copies"}  # of the others, each place is broken in one of their ways, in turn


@dataclass(frozen=True)
class PlanMutant:
    """``where``: the place, ``how`` it is broken there, if its kind has several ways."""

    base: Base
    kind: str
    where: str
    how: str
    plan: Plan

    @property
    def name(self) -> str:
        return f"{self.base.name}: {self.kind}: {self.where}" + (f": {self.how}" if self.how else "")

    @cached_property
    def text(self) -> str | None:
        """What is compiled, or None where no text can be emitted: emit relies on check."""
        try:
            return without_comments(emit(self.plan))
        except Exception:
            return None

    @property
    def changes_code(self) -> bool:
        return self.text != without_comments(emit(self.base.checked.plan))

    @property
    def changes_host(self) -> bool:
        """Whether memory, its image, launches or bindings are others."""
        return _host(self.plan) != _host(self.base.checked.plan)

    @property
    def digest(self) -> str:
        """Of all that decides what shows under a seed."""
        return hashlib.sha256(repr((self.text, _host(self.plan), _library())).encode()).hexdigest()[:16]


@cache
def _checked(name: str) -> pipeline.Checked:
    from megagen.models.muse_spark import tiny

    base = next(b for b in BASES if b.name == name)
    heads = {"heads": 8 * RANKS, "kv_heads": RANKS}  # half as many a rank as a tiny layer has, which share their keys
    small: dict[str, Any] = {"config": tiny(RANKS).model_copy(update=heads)}
    request = pipeline.Request(
        Path(base.schedule), tp=RANKS, tokens=TOKENS, choices=base.choices, fused=base.fused, tiny=True,
        options={**(small if base.schedule == "muse_swa.py" else {}), **base.options},
    )  # fmt: skip
    return pipeline.check(request)


@cache
def _library() -> str:
    texts = (resources.headers(), resources.emulator_headers(), resources.emulator_sources())
    return hashlib.sha256(repr([sorted(t.items()) for t in texts]).encode()).hexdigest()


def _host(plan: Plan) -> object:
    a = plan.launch
    geometry = (a.blocks, a.warps, a.cluster, a.shared_bytes, a.pdl)
    return geometry, plan.heap, heap.fills(plan), plan.params, plan.weights, [k.name for k in plan.kernels]


def mutants(base: Base) -> Iterator[PlanMutant]:
    """Every family's mutants of a base, each place in each way."""
    for kind, family in FAMILIES.items():
        if kind in base.kinds or not (base.kinds or kind in SPECIAL):
            for where, how, plan in family(base.checked.plan):
                if re.search(base.only, where):
                    yield PlanMutant(base, kind, where, how, plan)


def every() -> list[PlanMutant]:
    """Of all bases, without those that teach nothing new."""
    found: list[PlanMutant] = []
    known: set[tuple[str, str, str]] = set()
    for base in BASES:
        ways: dict[tuple[str, str], list[PlanMutant]] = defaultdict(list)
        for m in mutants(base):
            ways[m.kind, m.where].append(m)
        place = base.name.partition(" ")[2]
        turn: Counter[str] = Counter()
        for (kind, where), several in ways.items():
            key = (place, kind, where)
            if key in known and (place, kind) not in EVERYWHERE:
                continue
            known.add(key)
            found += several if kind in ALL_WAYS else [several[turn[kind] % len(several)]]
            turn[kind] += 1
    return found


# -- what is no fault, and what shows nothing --------------------------------------------------------------------

# Edits that the families make among others and that break nothing: ``check`` passes them, the emulator sees nothing.
LEGAL: dict[str, str] = {
    r"left out: trigger|/ trigger of|no trigger in|early trigger|a trigger$": (
        "the next launch begins sooner or later, and waits for this one's end before it reads anything"
    ),
    r"reset of warp \d: on|/ reset of warp|reset in a later": (
        "idle copies may be emptied by any one warp, whenever it has attached"
    ),
    r"(pooler\.load_weights|o_proj\.load_weights 0 to 256) / attach": (
        "one load fewer begins before the launch before has ended"
    ),
    r"left out: wait_point|(wait_point \w+|signal_point begin_\w+) of warp [0-2]: on|warp 4 / combine"
    r"|exchanged: (wait_point|signal_point begin)"
    r"|exchanged: \w+\.(load_weights [\d to]+|math|reduce|finish|merge|compute) / (wait|signal)_point": (
        "points of the program pace the ring and L2 prefetches: no data depends on them"
    ),
    r"left out: .*prefetch_l2|exchanged: .*prefetch_l2"
    r"|prefetch_l2 [\d to]+: (on|of|twice|a hole|an overlap|cut|before)"
    r"|next_heads\.prefetch_l2: (on|of|twice)"
    r"|left out: warm_code|warm_code of warp \d(: (on|twice)| /)": (
        "L2 is asked for less, for something else or at another time: a matter of speed"
    ),
    r"(drain|trigger|wait_point \w+) of warp \d: twice": "what has come is waited for again, or told again",
    r"counter: kind: \w+_partials: flag": "a flag orders whatever a counter does, and other ranks' besides",
    r"empty: projected: 0": "ranks' contributions are summed: a +0 travels as -0",
}
# Refused, and yet the emulator shows nothing, each under all seeds: why.
HARMLESS: dict[str, str] = {
    r"slots: (table_ready|group_\w+|point_\w+|begin_\w+|done_\w+): \+1": "the slot more is made ready and never used",
    r"heap: records over": "records are written when a launch is given up",
    r"heap: few records": "the host reads as many as there are warps, whatever the Plan says",
    r"launch: (too many|odd|few) registers": "an emulated SM has any number; on a GPU warps wait for ever",
    r"launch: a block too many": "an emulated GPU runs any number at once; of a real one's the last would never begin",
    r"launch: too much shared memory": "an emulated block may have any amount; a GPU refuses the launch",
    r"launch: a warp more": "the last warp has nothing to do",
    r"housekeeper: .*emptied too": "for a channel that its reader empties the call is compiled to nothing",
    r"(counter|flag): reset: ": "the housekeeper zeroes a counter whatever is said of its channel",
    r"outbox_down over outbox_gate_up|gate_up: outbox is outbox_down": "the same warps use both, one after the other",
    r"attach of warp 3 / \w+\.reduce": "it takes what math warps made who have attached",
    r"scratch_\w+ over notes": "a note is written when a wait expires, and none does",
    r"trigger before attach": "whom it lets begin waits for this launch, and that for the one before",
    r"(post_attention|residual|combine)\.(measure|compute): twice": (
        "the same bits are read and sent once more, before anyone empties them"
    ),
    r"reset in two kernels": "the same copies are emptied once more, before anyone may write to them",
    r"number twice": "only a report of a hang would name the wrong one",
    r"empty: .*: a value": "these launches send no such word: who got one would wait for ever",
    r"empty: .*: (0|no word)": "+0 travels as -0, and none of these launches' sums tell the two apart",
    r"share: router\.load_weights: (a hole|an overlap)": "a block has one stage of it, which no share cuts",
    r"outbox_gate_up over scratch_pre_expert_norm": "whoever uses the one waits for sums of all who use the other",
    r"prefetch of experts: warp 3: before attach": "it waits for the table, whose maker has attached",
    r"drain of warp 0$": "copies are on their way at the end of a block only if a launch is given up",
    r"program: warp [134]: on a warp more": "no warp comes to that branch: there is none, or its warpgroup has another",
    r"ring: a stage less": "of three slots two are used; check wants as many stages",
    r"attach at the end: warp 0": "it waits for the table, whose maker has attached; check wants it of each warp",
    r"attach of warp 0 / (wait_point|gate_up\.load_weights)": "it waits for others of the block, who have attached",
    r"left out: attach of warp 0$": "it reads weights, which never change, and the table, whose maker has attached",
    r"attach of warp \d: twice": "the launch before is over when it is waited for again",
    r"top_k\.select: on warp 2": "another warp does the same; only what the Plan says of the role is untrue",
    r"slots: accum_(full|empty): -1": "one slot is used, of room for two",
    r"reset: \w+: launch → reader": "its reader can empty it; only the housekeeper's list is untrue",
    r"counter: kind: .*: lamport|flag: kind: .*: lamport": "no word said, so 0 is: +0 travels as -0, as above",
    r"cluster: copies: ": "a cluster's channel takes no room in the heap, and has no copies there",
    r"(point|begin)_\w+( of warp \d: twice|: -1)": "a point passes early: it paces the ring and L2, and no data",
    r"swa counter: copies: (attention_partials|attended): 2 → 1": (
        "when it is emptied, data has come by other counters from all who use it; check takes no such order"
    ),
    r"moe flag: copies: (expert_mid|expert_out|unpooled): 3 → 2": (
        "the flags of an earlier exchange say that all ranks are in this launch; check takes no such order from a flag"
    ),
    r"swa counter: .*: middle(:| over)": "its reader comes two exchanges later, when all have counted for long",
    r"(read or write|use of a barrier) not said: .*\.reduce": (
        "of two warps with one step that of one is said to be another: each has a branch, of the same code"
    ),
    r"no drain in ": "copies are on their way at the end of a block only if a launch is given up",
}
SAME_TEXT = "only the Plan says something untrue of code that is as it was"


def reason(table: Mapping[str, str], name: str) -> str | None:
    """The first whose pattern is found in a mutant's name."""
    return next((why for pattern, why in table.items() if re.search(pattern, name)), None)


def refusal(plan: Plan) -> tuple[str, str]:
    """Rule and first words of the CheckError, or two empty strings."""
    try:
        check(plan)
    except CheckError as error:
        words, _, rule = error.message.rpartition(" [")
        return rule.removesuffix("]"), words[:WORDS]
    return "", ""


# -- emulation ---------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """What the launches work on. ``experts``: how many all tokens share, 0 for the router's own choice."""

    tokens: int
    experts: int
    context: int  # of a layer with caches


GIVEN = (Given(4, 0, 126), Given(2, 8, 70))  # of even seeds and of odd ones
Values = dict[str, Any]  # what the launches leave, a tensor each


class Outcome(NamedTuple):
    """``seen`` in a word or two, ``detail`` the rest of it, ``seed`` 0 where none was needed."""

    seen: str
    detail: str = ""
    seed: int = 0
    seconds: float = 0.0


NOTHING = "nothing"
PENDING = "not emulated yet"


class Bench:
    """Weights and what the unbroken bases make of them, each made once."""

    def __init__(self, cache: Path | None = None) -> None:
        from megagen.settings import Settings

        settings = Settings.from_env()
        self.settings = settings if cache is None else settings.model_copy(update={"cache_dir": cache})
        self._weights: dict[str, Any] = {}
        self._wanted: dict[tuple[str, Given], Values] = {}

    def weights(self, base: Base) -> Any:
        from megagen.bench.emulation import Weights

        key = _like(base).name
        if key not in self._weights:
            self._weights[key] = Weights.random(base.checked.graph, RANKS)
        return self._weights[key]

    def library(self, base: Base, plan: Plan) -> Path:
        return pipeline.emulated(replace(base.checked, plan=plan), self.settings)

    def wanted(self, base: Base, given: Given) -> Values:
        """The right bits; where things are placed does not change them."""
        base = _like(base)
        key = (base.name, given)
        if key not in self._wanted:
            plan = base.checked.plan
            self._wanted[key], left = self.launch(base, plan, self.library(base, plan), given, 0, race=False)
            assert not left, left
        return self._wanted[key]

    def launch(
        self, base: Base, plan: Plan, library: Path, given: Given, seed: int, *, race: bool = True
    ) -> tuple[Values, str]:
        """Each launch reads what the one before it has left. All that they leave, and what is wrong besides."""
        import torch

        from megagen.bench.emulation import Emulation
        from megagen.bench.inputs import Inputs
        from megagen.bench.routes import routes
        from megagen.runtime.stack import handed_on
        from megagen.runtime.step import Step

        graph = base.checked.graph
        packed = self.weights(base).packed
        pairs = handed_on(base.checked.plan)
        step = Step.chain(given.tokens, given.context if "k_cache" in pairs else 0)
        inputs = Inputs.random(graph, RANKS, given.tokens, 7, torch.device("cpu"), step)
        emulation = Emulation(plan, graph, library, self.weights(base))
        made: Values = {}
        with emulation.world(seed, race=race, layers=LAUNCHES + 2) as world:
            layers: list[list[Any]] = []
            for rank, weights, values in zip(world.ranks, packed, inputs.ranks, strict=True):
                places = {name: [rank.allocate(name) for _ in range(LAUNCHES + 1)] for name in pairs}
                for name, several in places.items():
                    first, value = several[0], values[name]
                    with rank.writing(first):
                        first.fill_(float("nan"))
                        first[: len(value)].copy_(value)
                    for other in several[1:] if "cache" in name else ():
                        with rank.writing(other):
                            other.copy_(first)
                rest: dict[str, Any] = {**weights, **{n: x for n, x in values.items() if n not in pairs}}
                layers.append([])
                for i in range(LAUNCHES):
                    ends = {n: places[n][i] for n in pairs} | {pairs[n]: places[n][i + 1] for n in pairs}
                    layers[-1].append(rank.bind({**rest, **ends}))
                    rest = {n: layers[-1][-1].tensors[n] for n in rest}
                rank.set_step(step)
                rank.set_route_override(
                    routes(given.experts, given.tokens, pool=rank.experts) if given.experts else None
                )
                for name, several in places.items():
                    for i, x in enumerate(several[1:]):
                        rows = x if "cache" in name else x[: given.tokens]
                        made[f"{pairs[name]} of launch {i}, rank {rank.rank}"] = rows
            for i in range(LAUNCHES):
                world.launch([mine[i] for mine in layers])
            world.synchronize()
            left = [f"rank {r.rank} counts {r.epoch()} launches" for r in world.ranks if r.epoch() != LAUNCHES]
            counted = not left
            if counted:
                left += [f"rank {r.rank}: {x}" for r in world.ranks for x in r.leftovers()]
            for rank in world.ranks if counted else ():
                for c in plan.channels:
                    if rank.unreadable(c) is None:
                        made[f"{c.name}, rank {rank.rank}"] = _rows(c.name, rank.read(c.name), given.tokens, graph)
            return {name: x.clone() for name, x in made.items()}, "; ".join(left)

    def look(self, base: Base, plan: Plan, library: Path, seed: int) -> Outcome:
        """What shows under one seed."""
        from megagen.emulate.report import Report

        given = GIVEN[seed % 2]
        began = time.process_time()
        try:
            made, left = self.launch(base, plan, library, given, seed)
        except EmulationError as error:
            assert isinstance(error.report, Report)
            found = Outcome(error.report.kind, error.message.partition("; ")[0], seed)
        except DeviceError as error:
            found = Outcome("refused by the runtime", error.message, seed)
        except Exception as error:  # a broken Plan may mislead the runtime anyhow
            found = Outcome("exception of the runtime", f"{type(error).__name__}: {error}", seed)
        else:
            wanted = self.wanted(base, given)
            differ = [n for n in made.keys() & wanted.keys() if not _same(made[n], wanted[n])]
            if differ:
                found = Outcome("wrong bits", f"{len(differ)} tensors, {min(differ)}", seed)
            else:
                found = Outcome("stale slots" if left else NOTHING, left, seed)
        seconds = round(time.process_time() - began, 1)
        return found._replace(detail=found.detail[:WORDS], seconds=seconds)


def _same(a: Any, b: Any) -> bool:
    from megagen.bench.verify import same_bits

    return (a.shape, a.dtype) == (b.shape, b.dtype) and same_bits(a, b)


def _like(base: Base) -> Base:
    """The first base of the same graph."""
    return next(b for b in BASES if (b.schedule, b.options) == (base.schedule, base.options))


def _rows(name: str, x: Any, tokens: int, graph: Graph) -> Any:
    """Of a channel, what belongs to the launch's tokens: what is in the other rows depends on the primitive."""
    partial = any(op.outputs.get("partials") == name for op in graph.ops)
    return x.narrow(2 if partial else 1 if graph.tensors[name].reduce else 0, 0, tokens)


def observe(bench: Bench, m: PlanMutant, seeds: Sequence[int], say: Any = lambda seed: None) -> Outcome:
    """The first thing that shows under some seed."""
    if m.text is None:
        return Outcome("no text", "emit fails")
    try:
        library = bench.library(m.base, m.plan)
    except CompileError as error:
        return Outcome("compile error", error.message.partition("error: ")[2][:WORDS])
    for seed in seeds:
        say(seed)
        found = bench.look(m.base, m.plan, library, seed)
        if found.seen != NOTHING:
            return found
    return Outcome(NOTHING, f"under {len(seeds)} seeds")


# -- the runner --------------------------------------------------------------------------------------------------


def _child(bench: Bench, m: PlanMutant, seeds: Sequence[int], limit: float, pipe: Connection) -> None:
    """One mutant in a process of its own: it may hang the emulator, or worse."""

    def say(seed: int) -> None:
        pipe.send(seed)
        signal.setitimer(signal.ITIMER_PROF, limit)  # its default action ends the process

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    pipe.send(observe(bench, m, seeds, say))


def emulate(
    todo: Sequence[PlanMutant], *, cache: Path | None, jobs: int, seeds: Sequence[int], limit: float
) -> Iterator[tuple[PlanMutant, Outcome]]:
    """What each shows, as they finish."""
    import torch

    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    bench = Bench(cache)
    waiting, running = list(todo)[::-1], dict[Connection, tuple[PlanMutant, Any, list[int]]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            m = waiting.pop()
            if m.text is not None:
                for given in GIVEN:  # here, so that children inherit it
                    bench.wanted(m.base, given)
            mine, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(bench, m, seeds, limit, theirs))
            process.start()
            theirs.close()
            running[mine] = (m, process, [0])
        for pipe in set(running) & set(wait(list(running))):
            m, process, seed = running[pipe]
            said: Any
            try:
                said = pipe.recv()
            except EOFError:
                process.join()
                code = -(process.exitcode or 0)
                what = signal.Signals(code).name if code > 0 else f"exit code {process.exitcode}"
                seen = "hang of the emulator" if code == signal.SIGPROF else "crash of the emulator"
                said = Outcome(seen, what, seed[0])
            if isinstance(said, Outcome):
                process.join()
                del running[pipe]
                yield m, said
            else:
                seed[0] = said


@dataclass(frozen=True)
class Result:
    """A line of plan_mutants.json."""

    name: str
    base: str
    kind: str
    rule: str
    words: str
    seen: str
    detail: str
    seed: int
    seconds: float
    digest: str


def results() -> dict[str, Result]:
    lines = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return {line["name"]: Result(**line) for line in lines}


def save(found: Iterable[Result]) -> None:
    lines = ",\n".join(json.dumps(asdict(r), ensure_ascii=False) for r in found)
    files.write(RESULTS, f"[\n{lines}\n]\n".encode())


def judge(r: Result) -> str:
    """What is wrong with a mutant, in a word; nothing if it is as it should be."""
    shown = r.seen not in (NOTHING, "same", PENDING)
    legal = reason(LEGAL, r.name)
    if legal is not None:
        return "legal, and yet refused" if r.rule else "legal, and yet harmful" if shown else ""
    if not r.rule:
        return "harmful, and check passes it" if shown else "check passes it, and nothing shows"
    if "emulator" in r.seen:
        return r.seen
    if r.seen == PENDING:
        return ""
    if r.seen == NOTHING and reason(HARMLESS, r.name) is None:
        return "refused, and nothing shows"
    return ""


def update(jobs: int, only: str, seeds: Sequence[int], limit: float, fresh: bool, new: bool) -> int:
    """Check all, emulate what is not known; gives how many are not as they should be.

    ``new``: what other code showed of the same fault in the same place counts as known, and keeps that code's digest.
    """
    everything = every()
    known = results()
    began, done, todo = time.monotonic(), dict[str, Result](), list[PlanMutant]()
    for m in everything:
        rule, words = refusal(m.plan)
        r = Result(m.name, m.base.name, m.kind, rule, words, "", "", 0, 0.0, m.digest)
        old = known.get(m.name)
        if not (m.changes_code or m.changes_host):
            r = replace(r, seen="same", detail="")
        elif (
            old is not None
            and old.seen not in ("", "same", PENDING)
            and (new or old.digest == r.digest)
            and not (fresh and only in m.name)
        ):
            r = replace(old, rule=rule, words=words)
        elif only in m.name:
            todo.append(m)
        done[m.name] = r
    say(f"{len(everything)} mutants checked in {time.monotonic() - began:.0f} s, {len(todo)} to emulate")
    saved = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megagen-mutants-") as folder:
        shown = emulate(todo, cache=Path(folder), jobs=jobs, seeds=seeds, limit=limit)
        for i, (m, o) in enumerate(shown, 1):
            done[m.name] = replace(done[m.name], seen=o.seen, detail=o.detail, seed=o.seed, seconds=o.seconds)
            say(f"[{i}/{len(todo)}] {m.name}: {o.seen}" + (f" (seed {o.seed}, {o.seconds} s)" if o.seed else ""))
            if time.monotonic() - saved > 5:
                save(done.values())
                saved = time.monotonic()
    save(done.values())
    say(f"\n{time.monotonic() - began:.0f} s; seen: {dict(Counter(r.seen or 'not emulated' for r in done.values()))}")
    findings: dict[str, list[Result]] = defaultdict(list)
    for r in done.values():
        if r.seen and (finding := judge(r)):
            findings[finding].append(r)
    for finding, several in sorted(findings.items()):
        say(f"\n{finding}: {len(several)}")
        for r in several:
            say(f"  {r.name}: {r.seen} {r.detail} [{r.rule or 'passed'}]")
    return sum(map(len, findings.values()))


# -- the page ----------------------------------------------------------------------------------------------------

HEAD = f"""\
# Mutants

What `check` is worth is measured by what it refuses. Each shipped schedule's Plan is broken in one place, wherever a
kind of fault applies, and each such mutant must be refused. Then `check` is left out: the mutant is compiled for the
CPU and launched {LAUNCHES} times in a row on two ranks with race checks on, each launch on what the one before it has
left, and begun before that one has ended. Under one seed after the other (two at least, and up to {len(SEEDS)}, before
nothing is said to show) something shows: a
fault of the [emulator](emulator.md#what-it-finds), bits that differ from the unbroken schedule's, slots that are not
empty again. Where nothing does, the table says why it cannot.

This page is written by `tests/plan_mutants.py` from `tests/plan_mutants.json`; how Plans are broken is in
`tests/plan_mutations.py`. To make both anew:

```
python tests/plan_mutants.py --jobs 16
python tests/plan_mutants.py --write
```

A finding is on record with a digest of the code that showed it. When two shots became the layer's default, 96 mutants
were emulated anew: all that were new, and most of what that changed; when residual ops were spread over blocks, 33 of
200 new ones, and the others are counted below as "{PENDING}": that they are refused is tested, not what they would do.
The others' findings were kept: the same fault in the same place, refused by the same rule, seen in code that has since
changed in what all schedules share. The first command emulates all of those; its help has a way for what never was.

A place is broken in one of several ways in turn (in brackets). Of what both layers have, the whole layer's Plan repeats
copies, counts, resets and empty values only. "Text the same": {SAME_TEXT}.
"""
# What a person would do wrong, and where the tables have it: kinds of Plan mutants, names of header mutants.
FAULTS: dict[str, Sequence[str]] = {
    "drop a sync edge": ("step left out", "read or write not said", "math: does not wait for its input"),
    "lower an arrival count": ("count", "arrivals", "init: one arrival less"),
    "swap ring order": ("ring order", "neighbours exchanged"),
    "reset a slot early": ("reset", "housekeeper", "reset: the copy in use"),
    "one copy instead of two": ("copies", "copy over copy"),
    "reuse a buffer one op early": ("region over another", "accumulators: one slot's memory"),
    "wrong phase": ("first phase", "cursor: phase never flips", "wait: the other parity"),
    "forget expect-tx": ("bytes counted", "use of a barrier not said", "load: tells no bytes"),
    "an empty value that a producer can write": ("empty", "send: +0 goes as it is"),
    "peer store before the slot is empty": ("copies", "reset: the copy that peers fill next"),
    "drop the one fence a layer": ("attach at the end", "attach: no wait for the launch before", "flag: no fence"),
    "epoch not advanced between launches": ("epoch", "kernels", "end: the epoch stands still"),
}


def header_mutants() -> dict[str, str]:
    """Of the header library: name -> what finds it, or why nothing does."""
    import test_emulate_mutants
    import test_swa_mutants

    found: dict[str, str] = {}
    for m in (*test_emulate_mutants.MUTANTS, *test_swa_mutants.MUTANTS):
        numbers = f"comparison: {m.wrong}" if m.wrong else ""
        caught = ", ".join(filter(None, [*m.kinds.split(), numbers]))
        found[m.name] = f"nothing: {m.missed}" if m.missed else caught
    return found


def page() -> str:
    """docs/mutants.md."""
    found = results()
    lines = [HEAD]
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    wheres: dict[str, str] = {}
    legal: list[Result] = []
    for m in every():
        r = found[m.name]
        wheres[m.name] = m.where + (f" ({m.how})" if m.how else "")
        if reason(LEGAL, m.name) is not None:
            legal.append(r)
        else:
            groups[m.kind, m.base.name].append(r)
    lines += ["## Faults by their usual names\n", "| fault | mutants |", "| --- | --- |"]
    lines += [f"| {fault} | {'; '.join(names)} |" for fault, names in FAULTS.items()]
    for schedule in dict.fromkeys(b.name.partition(" ")[0] for b in BASES):
        mine = {key: rs for key, rs in groups.items() if key[1].partition(" ")[0] == schedule}
        lines += [f"\n## {schedule}\n", f"{sum(map(len, mine.values()))} mutants.\n"]
        lines += ["| kind | placed | where | refused by | with check off |", "| --- | --- | --- | --- | --- |"]
        for (kind, base), several in mine.items():
            placed = base.partition(" ")[2] or "as shipped"
            places = "; ".join(wheres[r.name] for r in several)
            lines.append(f"| {kind} | {placed} | {places} | {_rules(several)} | {_shown(several)} |")
    lines += [
        "\n## Edits that are no faults\n",
        "They come up among the others; `check` passes them and nothing shows.\n",
    ]
    lines += ["| kind | placed | where | why |", "| --- | --- | --- | --- |"]
    for r in legal:
        placed = r.base.partition(" ")[2] or "as shipped"
        schedule = r.base.partition(" ")[0]
        lines.append(f"| {r.kind} | {schedule}, {placed} | {wheres[r.name]} | {reason(LEGAL, r.name)} |")
    lines += ["\n## Below the Plan\n", "Faults put into the header library by hand, of which no Plan says anything:"]
    lines += ["`tests/test_emulate_mutants.py` and `tests/test_swa_mutants.py`, run in CI.\n"]
    lines += ["| mutant | found by |", "| --- | --- |"]
    lines += [f"| {name} | {how} |" for name, how in header_mutants().items()]
    return "\n".join(lines) + "\n"


def _rules(several: Sequence[Result]) -> str:
    return ", ".join(f"{rule} {n}" for rule, n in Counter(r.rule for r in several).most_common())


def _shown(several: Sequence[Result]) -> str:
    """How many show what, under which seeds; and why some show nothing."""
    seeds: dict[str, list[int]] = defaultdict(list)
    for r in several:
        why = reason(HARMLESS, r.name) if r.seen == NOTHING else None
        seeds["text the same" if r.seen == "same" else f"nothing: {why}" if why else r.seen].append(r.seed)
    texts = []
    for seen, found in sorted(seeds.items(), key=lambda x: (x[0].startswith("nothing"), -len(x[1]))):
        under = sorted(set(found) - {0})
        texts.append(f"{len(found)} {seen}" + (f" (seed {', '.join(map(str, under))})" if under else ""))
    return "; ".join(texts)


# -- the command -------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--only", default="", help="of the mutants whose names contain this")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many to try at most")
    parser.add_argument("--limit", type=float, default=CPU_SECONDS, help="CPU seconds of one seed")
    parser.add_argument("--fresh", action="store_true", help="emulate what is known too")
    parser.add_argument(
        "--new", action="store_true", help="emulate only what has never been, whatever has changed since"
    )
    parser.add_argument("--write", action="store_true", help="write docs/mutants.md")
    given = parser.parse_args()
    if given.write:
        PAGE.write_text(page())
        return
    sys.exit(bool(update(given.jobs, given.only, SEEDS[: given.seeds], given.limit, given.fresh, given.new)))


if __name__ == "__main__":
    main()
