"""A trace as a Run: op by op, the critical path, what waiting costs, and some blocks warp by warp.

Who has a share of an op. Every block runs every step, also where none of the op's work falls to it, and such a job can
take long (code that is fetched, a counter that is waited for before the warp finds that it has nothing to do). So:

- a role that fills or drains the ring or the accumulators has a share in blocks that load some of the op's weights;
- a role that runs in every block has one everywhere;
- any other has one where a warp waits for data that is its own flag, or for its group: only those with work do. Where
  the role reads no such data, 0.3 µs outside of waits are a share too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megagen.ir.plan import OpPlan, Plan, SyncKind
from megagen.ir.touches import ACCUM_FULL
from megagen.trace import hbm, model, path
from megagen.trace.cover import Cover
from megagen.trace.spans import Facts, Trace
from megagen.trace.table import (
    INTO_L2,
    LOADS,
    Bools,
    Floats,
    Ints,
    Launch,
    Names,
    check,
    launches,
    nearest,
    place,
    totals,
    usual,
)

QUICK = 300  # ns of work that are nobody's share of an op
WAITS = 3  # that cost most
LATENCY = 640  # ns that a load takes at least: the shortest that warps of an H200 saw
LATE = 5000  # ns: more than a load takes beyond HBM's own time
AWAITED = 0.5  # µs: who spends less of the critical path on an op's loads would not have them sooner


def run(trace: Trace, blocks: int = 10) -> model.Run:
    """The view of a trace, with ``blocks`` blocks of its most usual launch. Launches without spans do not count, nor,
    of a GPU, those that begin a graph.

    Raises MegagenError for a trace that has none or is not of its plan.
    """
    names, long = check(trace), usual(trace)
    shown = nearest(long)
    error = (*trace.facts.offset_error_ns, *[0.0] * trace.ranks)[: trace.ranks]
    sums, kept = _Sums(names), None
    for i, launch in zip(np.flatnonzero(long), launches(trace, names, np.flatnonzero(long).tolist()), strict=True):
        found = sums.add(launch, path.walk(launch, error))
        if i == shown:
            kept = launch, found
    assert kept is not None
    launch, (way, flows) = kept
    seen = trace.spans[trace.spans["launch"] == shown]
    ways = tuple(sums.shares())
    awaited = frozenset(s.op for s in ways if s.what == "load" and s.us[1] >= AWAITED)
    cover = None if trace.facts.origin == "emulated" else Cover(launch, flows, awaited or None)
    return model.Run(
        name=trace.facts.name, facts=_facts(trace), total=_stat(long[long > 0]), floor=floor(trace.plan, trace.facts),
        launches=len(long[long > 0]), blocks_of=trace.plan.launch.blocks, rows=tuple(sums.rows()),
        shares=ways, path=path.legs(launch, way),
        waits=tuple(sums.costliest(cover)), hbm_idle=_stat(np.array(sums.idle_hbm)),
        hbm_busy=tuple((b / 1000, e / 1000) for b, e in zip(*under_way(launch, flows)[0], strict=True)),
        idle=_stat(np.concatenate(sums.idle)), dropped=int(trace.launches["dropped"].sum()),
        blocks=tuple(_blocks(trace, launch, seen, blocks)),
        steps=tuple(
            model.Step(index=s.index, op=s.op or "", call=s.call, source=place(s.source)) for s in names.steps
        ),
        edges=tuple(model.Edge(index=i, name=n, kind=k) for i, (n, k) in enumerate(names.edges)),
        plain=trace.facts.plain_us, stamped=trace.facts.stamped_us,
    )  # fmt: skip


def floor(plan: Plan, facts: Facts) -> float | None:
    """µs in which the machine streams a launch's weights once, of the experts as many as the facts name. None where the
    trace's time is not the machine's."""
    if facts.origin == "emulated":
        return None
    routed = {w.parameter for w in plan.weights if w.experts}
    scale = facts.experts / plan.nominal_experts if facts.experts and plan.nominal_experts else 1.0
    nbytes = sum(op.weight_bytes * (1.0 if routed.isdisjoint(op.weights.values()) else scale) for op in plan.ops)
    return round(nbytes / plan.machine.hbm_bytes_per_s * 1e6, 3) if nbytes else None


@dataclass
class _Sums:
    """What is pooled over launches: an entry a launch, arrays [.., places], NaN where a place has nothing."""

    names: Names
    begin: list[Floats] = field(default_factory=list)  # [roles, places], as the next two
    ready: list[Floats] = field(default_factory=list)
    end: list[Floats] = field(default_factory=list)
    waiting: list[Floats] = field(default_factory=list)  # [roles, threads]
    asked: list[Floats] = field(default_factory=list)  # [steps, first and last and bytes, places]
    waits: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)  # role and edge, first begin, ns: of a warp
    critical: dict[int, int] = field(default_factory=dict)
    legs: list[dict[tuple[int, path.What], int]] = field(default_factory=list)
    idle_hbm: list[float] = field(default_factory=list)
    idle: list[Floats] = field(default_factory=list)

    def add(self, launch: Launch, way: path.Path) -> tuple[path.Path, list[hbm.Flow]]:
        flows = hbm.flows(launch)
        self._parts(launch)
        self._asked(launch)
        self._waits(launch)
        for (role, edge), ns in way.waits.items():
            key = role * EDGES + edge
            self.critical[key] = self.critical.get(key, 0) + ns
        self.legs.append(dict(path.sums(way)))
        for begin, end in under_way(launch, flows):
            self.idle_hbm.append(launch.total - float((end - begin).sum()))
        self.idle.append(idle(launch, flows))
        return way, flows

    def _parts(self, launch: Launch) -> None:
        roles, n = self.names.role, len(self.names.roles)
        jobs = np.flatnonzero(~launch.waits & self.names.own[launch.step])
        at = roles[launch.step[jobs]], launch.place[jobs]
        begin, ready, end = np.full((n, launch.places), np.inf), *np.full((2, n, launch.places), -np.inf)
        np.minimum.at(begin, at, launch.begin[jobs])
        np.maximum.at(ready, at, launch.ready()[jobs])
        np.maximum.at(end, at, launch.end[jobs])
        share = shares(launch)
        for kept, values in ((self.begin, begin), (self.ready, ready), (self.end, end)):
            kept.append(np.where(share, values, np.nan))
        rows = np.flatnonzero(launch.waits & self.names.own[launch.step])
        waited = np.zeros((n, launch.threads))
        np.add.at(waited, (roles[launch.step[rows]], launch.thread[rows]), launch.end[rows] - launch.begin[rows])
        has = np.zeros((n, launch.threads), np.bool_)
        has[roles[launch.step[jobs]], launch.thread[jobs]] = True
        self.waiting.append(np.where(has & np.repeat(share, launch.per_place, axis=1), waited, np.nan))

    def _asked(self, launch: Launch) -> None:
        n = len(self.names.roles)
        made = np.stack([np.full((n, launch.places), v) for v in (np.inf, -np.inf, 0.0)])
        own = self.names.own[launch.ask_step] & (launch.ask_bytes > 0)
        at = self.names.role[launch.ask_step[own]], launch.ask_place[own]
        np.minimum.at(made[0], at, launch.ask_time[own])
        np.maximum.at(made[1], at, launch.ask_time[own])
        np.add.at(made[2], at, launch.ask_bytes[own])
        self.asked.append(np.where(made[2] > 0, made, np.nan))

    def _waits(self, launch: Launch) -> None:
        rows = np.flatnonzero(launch.waits)
        group = self.names.role[launch.step[rows]] * EDGES + launch.edge[rows]
        key = group * launch.threads + launch.thread[rows]
        order = np.argsort(key, kind="stable")
        first = np.flatnonzero(np.concatenate([[True], np.diff(key[order]) > 0])) if len(rows) else rows
        rows = rows[order]
        ns = np.add.reduceat(launch.end[rows] - launch.begin[rows], first) if len(rows) else rows
        self.waits.append((group[order][first], launch.begin[rows[first]], ns))

    # what comes of it -------------------------------------------------------------------------------------------

    def rows(self) -> Iterable[model.Row]:
        """A row an op that any block has work of, in the plan's order."""
        begin, ready, end = (np.stack(x) for x in (self.begin, self.ready, self.end))
        waiting, asked = np.stack(self.waiting), np.stack(self.asked)
        for op in self.names.plan.ops:
            roles = [i for i, (name, _) in enumerate(self.names.roles) if name == op.name]
            roles.sort(key=lambda i: list(op.roles).index(c) if (c := self.names.roles[i][1]) in op.roles else -1)
            work = [i for i in roles if self.names.roles[i][1] not in LOADS]
            since, until = _least(ready[:, work]), -_least(-end[:, work])
            first = _least(ready[:, [i for i in work if not self._sums_up(i)]])
            since = np.where(np.isnan(first), since, first)
            if not np.isfinite(since).any():
                continue
            parts = [
                model.Part(
                    role=self.names.roles[i][1], warps=op.roles[self.names.roles[i][1]], begin=_stat(begin[:, i]),
                    ready=_stat(ready[:, i]), end=_stat(end[:, i]), waits=_stat(waiting[:, i]),
                )
                for i in roles
                if self.names.roles[i][1] in op.roles and np.isfinite(end[:, i]).any()
            ]  # fmt: skip
            yield model.Row(
                op=op.name, kind=op.kind, blocks=self._count(since), begin=_stat(since), end=_stat(until),
                loads=tuple(self._loads(roles, asked)), parts=tuple(parts), source=place(op.source),
                length=_stat(until - since),
            )  # fmt: skip

    def _sums_up(self, role: int) -> bool:
        """Whether a role waits for accumulators: what it works on, its op has been at work on before."""
        steps = [s for s, i in zip(self.names.steps, self.names.role, strict=True) if i == role]
        return any(u.barrier == ACCUM_FULL and u.action == "wait" for s in steps for u in s.barriers)

    def _loads(self, roles: Sequence[int], asked: Floats) -> Iterable[model.Loads]:
        for i in roles:
            first, last, nbytes = asked[:, :, i].transpose(1, 0, 2)
            if np.isfinite(first).any():
                yield model.Loads(
                    into="l2" if self.names.roles[i][1] in INTO_L2 else "ring", begin=_stat(first),
                    end=_stat(last), bytes=int(np.median(np.nansum(self._ranks(nbytes), axis=-1))),
                    blocks=self._count(first),
                )  # fmt: skip

    def _count(self, values: Floats) -> int:
        """Blocks of a rank and launch that have a value, usually."""
        return int(np.median(np.isfinite(self._ranks(values)).sum(axis=-1)))

    def _ranks(self, values: Floats) -> Floats:
        return values.reshape(-1, self.names.plan.launch.blocks)

    def shares(self) -> Iterable[model.Share]:
        """Of the critical path, the largest first."""
        found: dict[tuple[str, path.What], Floats] = {}
        for i, legs in enumerate(self.legs):
            for (role, what), ns in legs.items():
                op = self.names.roles[role][0] if role >= 0 else ""
                found.setdefault((op, what), np.zeros(len(self.legs)))[i] += ns
        made = [model.Share(op=op, what=what, us=_stat(ns)) for (op, what), ns in found.items()]
        return sorted(made, key=lambda share: (-share.us[1], -share.us[2], share.op, share.what))

    def costliest(self, cover: Cover | None) -> Iterable[model.Wait]:
        """Those that cost most: of the critical path, then of a warp's time."""
        group, begin, ns = (np.concatenate([w[i] for w in self.waits]) for i in range(3))
        middle = {int(g): float(np.median(ns[group == g])) for g in np.unique(group)}
        worst = sorted(middle, key=lambda g: (-self.critical.get(g, 0), -middle[g], g))[:WAITS]
        for g in worst:
            role, edge = divmod(g, EDGES)
            op, call = self.names.roles[role]
            yield model.Wait(
                op=op, role=call, edge=self.names.edge(edge), begin=_stat(begin[group == g]), us=_stat(ns[group == g]),
                critical_us=round(self.critical.get(g, 0) / len(self.legs) / 1000, 3),
                cover="" if cover is None else cover.sentence(role, edge),
            )  # fmt: skip


EDGES = 1 << 16  # more than a plan has


def shares(launch: Launch) -> Bools:
    """Which places have a share of which roles: bool [roles, places]. See the module's docstring."""
    names, plan = launch.names, launch.names.plan
    flagged, general = _unit_waits(launch), _working(launch)
    found = np.zeros((len(names.roles), launch.places), np.bool_)
    for i, (name, call) in enumerate(names.roles):
        if not name:
            continue
        op = plan.op(name)
        spec = next((s for s in op.specs if s.name == call), None)
        loads = _loading(launch, op)
        if call in LOADS or (spec is not None and (spec.ring or spec.accum is not None) and loads.any()):
            found[i] = loads
        elif spec is not None and spec.every_block:
            found[i] = True
        elif _reads_flags(plan, op, call) and flagged[i].any():
            found[i] = flagged[i]
        else:
            found[i] = flagged[i] | general[i]
    return found & _present(launch)


def _loading(launch: Launch, op: OpPlan) -> Bools:
    steps = launch.names.having(op=op.name)[launch.ask_step]
    found = np.zeros(launch.places, np.bool_)
    found[launch.ask_place[steps & (launch.ask_bytes > 0)]] = True
    return found


def _reads_flags(plan: Plan, op: OpPlan, call: str) -> bool:
    """Whether a role reads data that is its own flag: those without a share of it wait for none."""
    reads = {n for k in plan.kernels for p in k.programs for s in p.steps if (s.op, s.call) == (op.name, call)
             for n in s.reads}  # fmt: skip
    return any(c.kind is SyncKind.LAMPORT for c in plan.channels if c.name in reads)


def _unit_waits(launch: Launch) -> Bools:
    """Where a role's warps wait for what only those with work wait for."""
    plan, names = launch.names.plan, launch.names
    edges = [c.index for c in plan.channels if c.kind is SyncKind.LAMPORT]
    edges += [b.index for b in plan.barriers if b.name in {name for op in plan.ops for name in op.barriers.values()}]
    rows = np.flatnonzero(launch.waits & np.isin(launch.edge, edges))
    found = np.zeros((len(names.roles), launch.places), np.bool_)
    found[names.role[launch.step[rows]], launch.place[rows]] = True
    return found


def _working(launch: Launch) -> Bools:
    """Where a warp spends time on a role that it does not wait."""
    own = launch.names.own[launch.step]
    busy = np.zeros((len(launch.names.roles), launch.threads))
    np.add.at(busy, (launch.names.role[launch.step[own]], launch.thread[own]), (launch.until - launch.free)[own])
    most: Floats = busy.reshape(len(busy), launch.places, launch.per_place).max(axis=2)
    return most >= QUICK


def _present(launch: Launch) -> Bools:
    """Where a role has a job at all."""
    jobs = ~launch.waits & launch.names.own[launch.step]
    found = np.zeros((len(launch.names.roles), launch.places), np.bool_)
    found[launch.names.role[launch.step[jobs]], launch.place[jobs]] = True
    return found


def idle(launch: Launch, flows: Sequence[hbm.Flow]) -> Floats:
    """ns of the launch, from its begin to its end, in which a place has no warp at work and no load under way."""
    begin, end = launch.free, launch.until
    rows = np.flatnonzero(launch.working() & (end > begin))
    loads = np.flatnonzero(launch.ask_ring)
    until = landed(launch, flows)[loads]
    at = np.concatenate([launch.place[rows], launch.ask_place[loads]])
    since = np.concatenate([begin[rows], launch.ask_time[loads]]).astype("f8")
    order = np.lexsort((since, at))
    at, since, until = at[order], since[order], np.concatenate([end[rows], until])[order]
    apart = at * (launch.total + 1.0)  # one line for all places
    before = np.concatenate([[-1.0], np.maximum.accumulate(until + apart)[:-1]]) if len(at) else since
    covered = np.maximum(0.0, until + apart - np.maximum(since + apart, before))
    active: Floats = np.bincount(at, weights=covered, minlength=launch.places).astype("f8")
    return launch.total - active


def under_way(launch: Launch, flows: Sequence[hbm.Flow]) -> list[tuple[Floats, Floats]]:
    """Of each rank, the stretches (begins, ends, ns) in which some SM has asked for weights that have not landed."""
    until, nbytes, found = landed(launch, flows), hbm.fresh(launch), []
    for asks in hbm.asks(launch):
        some = asks[nbytes[asks] > 0]
        begin, reach = launch.ask_time[some].astype("f8"), np.maximum.accumulate(until[some])
        first = np.flatnonzero(np.concatenate([[True], begin[1:] > reach[:-1]])) if len(some) else some
        last = np.concatenate([first[1:] - 1, [len(some) - 1]]) if len(some) else some
        found.append((begin[first], reach[last]))
    return found


def landed(launch: Launch, flows: Sequence[hbm.Flow]) -> Floats:
    """When each ask's bytes were there: as a warp saw it, if it did not come to look much later than :mod:`hbm` has it,
    else as that has it (but no sooner than any load has landed), before the stage is used again."""
    seen, known = launch.loaded()
    modelled = np.zeros(len(seen))
    for flow, asks in zip(flows, hbm.asks(launch), strict=True):
        modelled[asks] = np.maximum(flow.done, launch.ask_time[asks] + LATENCY)
    found: Floats = np.where(known & (seen <= modelled + LATE), seen, np.minimum(modelled, seen))
    return np.minimum(np.maximum(found, launch.ask_time), launch.total)


def _blocks(trace: Trace, launch: Launch, spans: np.ndarray, wanted: int) -> Iterable[model.Block]:
    """Blocks from the first to end to the last, of every rank."""
    end = np.zeros(launch.places, np.int64)
    np.maximum.at(end, launch.place, launch.end)
    for at in _chosen(end, launch.blocks, wanted):
        rank, block = divmod(int(at), launch.blocks)
        mine = spans[(spans["rank"] == rank) & (spans["block"] == block)]
        yield model.Block(
            rank=rank, block=block, sm=trace.sm(int(spans["launch"][0]), rank, block), end=end[at] / 1000,
            warps=tuple(_warp(trace.plan, w, mine[mine["warp"] == w]) for w in range(trace.plan.launch.warps)),
        )  # fmt: skip


def _chosen(end: Ints, blocks: int, wanted: int) -> Ints:
    """Places: of each rank the first to end, the last and evenly between; at least ``wanted`` if there are so many."""
    ranks = len(end) // blocks
    each = min(blocks, max(1, -(-wanted // ranks)))
    found = []
    for rank in range(ranks):
        order = rank * blocks + np.argsort(end[rank * blocks : (rank + 1) * blocks], kind="stable")
        among = [blocks // 2] if each == 1 else np.rint(np.linspace(0, blocks - 1, each)).astype(int)
        found.append(order[among])
    return np.concatenate(found)


def _warp(plan: Plan, warp: int, spans: np.ndarray) -> model.Warp:
    columns = [spans[name].tolist() for name in ("kind", "step", "edge", "slot", "bytes", "begin", "end")]
    return model.Warp(warp=warp, title=title(plan, warp), spans=tuple(zip(*columns, strict=True)))


def title(plan: Plan, warp: int) -> str:
    """What a warp is for: "loads weights", "reduce of 7 ops", "finish of pooler and unpooler"."""
    calls: dict[str, list[str]] = {}
    for kernel in plan.kernels:
        for program in kernel.programs:
            if program.first <= warp < program.first + program.count:
                for s in program.steps:
                    if s.op in kernel.ops and s.op not in calls.setdefault(s.call, []):
                        calls[s.call].append(s.op)
                    elif s.call == "reset":
                        calls[s.call] = []
    return ", ".join(_called(call, ops) for call, ops in calls.items()) or "nothing"


def _called(call: str, ops: list[str]) -> str:
    match call, ops:
        case "load_weights", _:
            return "loads weights"
        case "load", _:
            return f"loads for {' and '.join(ops)}"
        case "prefetch_l2", _:
            return f"asks L2 for {' and '.join(ops)}"
        case "prefetch_guess", _:
            return f"asks L2 for guesses of {' and '.join(ops)}"
        case "reset", _:
            return "reset"
        case _, [_, _, _, *_]:
            return f"{call} of {len(ops)} ops"
    return f"{call} of {' and '.join(ops)}"


def _facts(trace: Trace) -> tuple[tuple[str, str], ...]:
    """What is known of a trace, for people."""
    of = trace.facts
    layers, replays = (len(np.unique(trace.launches[name])) for name in ("layer", "replay"))
    left = ", less the first of each" if not np.array_equal(usual(trace), totals(trace)) else ""
    shown = {
        "origin": of.origin, "machine": of.machine, "driver": of.driver,
        "versions": ", ".join(f"{name} {version}" for name, version in of.versions.items()),
        "schedule": trace.plan.name, "choices": ", ".join(f"{k}={v}" for k, v in trace.plan.choices.items()),
        "tokens": str(of.tokens), "context": "" if of.context is None else str(of.context),
        "experts": "" if of.experts is None else str(of.experts), "ranks": str(of.ranks),
        "launches": f"{len(trace.launches)} ({layers} layers, {replays} replays{left})",
        "clock": f"{of.clock}, {of.clock_ns:g} ns",
        "waits": of.least_wait and f"from {of.least_wait} on", "offsets": _offsets(of), "stamps": _cost(of),
        "commit": of.commit, "command": of.command, "date": of.date, "notes": of.notes,
    }  # fmt: skip
    return tuple((name, text) for name, text in shown.items() if text)


def _offsets(facts: Facts) -> str:
    if facts.ranks < 2:
        return ""
    return ", ".join(
        f"{offset or 0:.0f} ± {error:.0f}"
        for offset, error in zip(facts.offsets_ns, facts.offset_error_ns, strict=False)
    ) + f" ns, drifting by {max(map(abs, facts.drift_ns), default=0):.0f}"  # fmt: skip


def _cost(facts: Facts) -> str:
    if not facts.plain_us or facts.stamped_us is None:
        return ""
    more = facts.stamped_us - facts.plain_us
    return f"{more:+.2f} µs ({more / facts.plain_us:+.1%})"


def _least(values: Floats) -> Floats:
    """Over axis 1; NaN where there are none."""
    found: Floats = np.where(np.isnan(values), np.inf, values).min(axis=1, initial=np.inf)
    return np.where(np.isinf(found), np.nan, found)


def _stat(ns: Floats | Ints) -> model.Stat:
    """Of all that is no NaN: p10, median, p90 in µs."""
    values = np.asarray(ns, np.float64).reshape(-1)
    low, middle, high = np.percentile(values[~np.isnan(values)], (10, 50, 90)) / 1000
    return round(float(low), 3), round(float(middle), 3), round(float(high), 3)
