"""Two runs side by side: when each op begins and ends, what it waits, what of the critical path it has."""

from __future__ import annotations

from collections.abc import Mapping

from megagen.ir.graph import Frozen
from megagen.trace.model import Row, Run, Stat

TINY = 0.001  # µs: stamps are no finer


class Change(Frozen):
    """Of one figure, the medians in both runs, µs. ``by``: the second less the first. ``spread``: how far apart two
    medians of such figures may be by chance: half of p90 - p10, of the run in which that is more."""

    first: float
    second: float
    by: float
    spread: float

    @property
    def beyond(self) -> bool:
        """Larger than the spread."""
        return abs(self.by) > max(self.spread, TINY)


class OpChange(Frozen):
    """``begin``, ``end``, ``length`` as of a Row; ``wait``: of a warp of the role that an op begins with.
    ``critical``: of the critical path."""

    op: str
    begin: Change
    end: Change
    length: Change
    wait: Change
    critical: Change


class Comparison(Frozen):
    """``ops``: what both runs have, in the first one's order; the rest is in ``only_first`` and ``only_second``."""

    first: str
    second: str
    total: Change
    hbm_idle: Change
    idle: Change
    ops: tuple[OpChange, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def moved(self) -> tuple[OpChange, ...]:
        """Ops whose part of the critical path has changed by more than its spread, the most changed first."""
        return tuple(sorted((o for o in self.ops if o.critical.beyond), key=lambda o: -abs(o.critical.by)))


def compare(first: Run, second: Run) -> Comparison:
    """``second`` against ``first``: of the same graph, or of two that share ops by name."""
    before, after = ({row.op: row for row in run.rows} for run in (first, second))
    paths = [_critical(run) for run in (first, second)]
    return Comparison(
        first=first.name, second=second.name, total=_change(first.total, second.total),
        hbm_idle=_change(first.hbm_idle, second.hbm_idle), idle=_change(first.idle, second.idle),
        ops=tuple(_op(before[op], after[op], paths[0], paths[1]) for op in before if op in after),
        only_first=tuple(op for op in before if op not in after),
        only_second=tuple(op for op in after if op not in before),
    )  # fmt: skip


def _op(first: Row, second: Row, path: Mapping[str, Stat], other: Mapping[str, Stat]) -> OpChange:
    nothing = (0.0, 0.0, 0.0)
    waits = [nothing if row.head is None else row.head.waits for row in (first, second)]
    return OpChange(
        op=first.op, begin=_change(first.begin, second.begin), end=_change(first.end, second.end),
        length=_change(first.length, second.length),
        wait=_change(waits[0], waits[1]),
        critical=_change(path.get(first.op, nothing), other.get(first.op, nothing)),
    )  # fmt: skip


def _critical(run: Run) -> dict[str, Stat]:
    """Of each op, all kinds of legs together. (Of sums of medians and of deciles; a launch's kinds go together.)"""
    found: dict[str, Stat] = {}
    for share in run.shares:
        low, middle, high = found.get(share.op, (0.0, 0.0, 0.0))
        found[share.op] = (low + share.us[0], middle + share.us[1], high + share.us[2])
    return found


def _change(first: Stat, second: Stat) -> Change:
    return Change(
        first=first[1], second=second[1], by=round(second[1] - first[1], 3),
        spread=round(max(first[2] - first[0], second[2] - second[0]) / 2, 3),
    )  # fmt: skip
