"""What HBM has to do: the weights that blocks ask for, as a queue that one server empties.

The server always works at the machine's rate. It is idle when nothing asked for is left to deliver. A real memory
delivers the same bytes more slowly, and other traffic besides: of what it could deliver in a launch, at least the idle
time's worth is lost. (Weights that L2 still holds, of an expert with two entries of the table, are counted as if they
came from HBM: that makes the idle time smaller, not larger.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megagen.ir.plan import WARMS
from megagen.trace.table import Bools, Floats, Ints, Launch

WHOLE = 1024  # the unit of shares (ops/stream.cuh)


@dataclass(frozen=True)
class Flow:
    """Of one rank and launch, all in ns. Between stretches, ``begin`` to ``end``, there is nothing to deliver; none is
    longer than the launch. ``done``: when each ask has been delivered, which may be after the launch."""

    total: float
    begin: Floats
    end: Floats
    done: Floats

    @property
    def busy(self) -> float:
        return float((self.end - self.begin).sum())

    @property
    def idle(self) -> float:
        return self.total - self.busy

    def spare(self, begin: Ints | Floats, end: Ints | Floats) -> Floats:
        """Of each stretch of time, how much HBM has nothing to do."""
        edges = np.concatenate([[0.0], np.stack([self.begin, self.end], 1).reshape(-1)])
        done = np.cumsum(np.concatenate([[0.0], np.diff(edges) * (np.arange(len(edges) - 1) % 2)]))
        used: Floats = np.interp(end, edges, done) - np.interp(begin, edges, done)
        return (end - begin) - used


def flow(times: Ints, nbytes: Ints, bytes_per_ns: float, total: int) -> Flow:
    """Asks at ``times`` (ascending, ns) for ``nbytes`` each, served one after the other; for none, at once."""
    some = np.flatnonzero(nbytes > 0)
    done = times.astype("f8")
    if not len(some):
        return Flow(float(total), np.zeros(0), np.zeros(0), done)
    asked, work = times[some], nbytes[some] / bytes_per_ns
    queued = np.cumsum(work)
    done[some] = queued + np.maximum.accumulate(asked - (queued - work))
    starts = np.flatnonzero(np.concatenate([[True], asked[1:] > done[some][:-1]]))
    ends = done[some][np.concatenate([starts[1:] - 1, [len(some) - 1]])]
    return Flow(float(total), np.minimum(asked[starts], total).astype("f8"), np.minimum(ends, total), done)


def flows(launch: Launch) -> list[Flow]:
    """Of each rank. ``done`` follows the asks of :func:`asks`."""
    nbytes, rate = fresh(launch), launch.names.plan.machine.hbm_bytes_per_s / 1e9
    return [flow(launch.ask_time[a], nbytes[a], rate, launch.total) for a in asks(launch)]


def asks(launch: Launch) -> list[Ints]:
    """Each rank's asks, by time."""
    rank = launch.ask_place // launch.blocks
    order = np.lexsort((launch.ask_time, rank))
    return [order[rank[order] == r] for r in range(launch.ranks)]


def fresh(launch: Launch) -> Ints:
    """Bytes that HBM delivers for each ask: none for a load of what its block has asked L2 for before.

    What a prefetch asked for are the block's stages of the op in the share that its step names.
    """
    names = launch.names
    shares = {s.op: (s.index, *s.args) for s in names.steps if s.call == "prefetch_l2"}
    nbytes = launch.ask_bytes.copy()
    warm = np.array([s.call in WARMS for s in names.steps])
    nbytes[warm[launch.ask_step]] = 0  # in L2 already, or one of several blocks' asks
    for op, (_, first, last) in shares.items():
        steps = names.having(op=op)[launch.ask_step]
        loads, early = np.flatnonzero(steps & launch.ask_ring), np.flatnonzero(steps & ~launch.ask_ring)
        if not len(loads) or not len(early):
            continue
        place = launch.ask_place[loads]
        count = np.bincount(place, minlength=launch.places)
        ordinal = np.arange(len(loads)) - (np.cumsum(count) - count)[place]  # asks are by place and time
        asked = np.full(launch.places, np.inf)
        np.minimum.at(asked, launch.ask_place[early], launch.ask_time[early])
        n = count[place]
        within: Bools = (ordinal >= n * first // WHOLE) & (ordinal < n * last // WHOLE)
        nbytes[loads[within & (launch.ask_time[loads] >= asked[place])]] = 0
    return nbytes
