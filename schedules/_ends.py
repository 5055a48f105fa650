"""How the launches before the first layer and after the last one are placed: a norm, a GEMM and what its sums become.

Warp 0 streams the GEMM's weights through the ring. They depend on nothing, so they land while the launch before
ends and the norm is at work. Warps 4 to 11 normalise, multiply and finish; warps 2 and 3 sum the partial results and
send them; warp 1 keeps house, and warp 3 does what else one warp can. Nothing waits for a fence.
"""

from typing import NamedTuple

from _layer import WARPS

from megagen.dsl import (
    ALL_ONES,
    Graph,
    KiB,
    Machine,
    Schedule,
    Warps,
    by_reader,
    counter,
    evict_first,
    flag,
    lamport,
)
from megagen.dsl.schedule import Sync


class Ends(NamedTuple):
    """What such a launch is to be completed with: who may do the rest, and how it is handed over."""

    schedule: Schedule
    math: Warps
    single: Warps
    handed: Sync  # to one reader, who empties the place
    exchange: Sync  # between ranks


def ends(name: str, g: Graph, machine: Machine, choices: dict[str, str] | None, norm: str, gemm: str) -> Ends:
    """The schedule of ``g`` up to the partial sums of ``gemm``, which works on what ``norm`` makes."""
    s = Schedule(name, g, machine, warps=WARPS, choices=choices)
    first, multiply = getattr(g, norm), getattr(g, gemm)

    s.ring(stages=s.choice("ring_stages", 6, 5, 4), stage_bytes=32 * KiB)
    producer, keeper, reducer, single = (s.warp(i) for i in range(4))
    if s.choice("reducers", 2, 1) == 2:
        reducer = s.warps(2, 4)
    math = s.warps(4, 12)
    s.assign(first, compute=math)
    s.assign(multiply, load_weights=producer, math=math, reduce=reducer)
    s.reset(by=keeper)

    s.hint(multiply.weight, evict_first)
    cap = s.choice("in_flight", "none", "64", "32")
    if cap != "none":
        s.in_flight(int(cap) * KiB)

    kind = s.choice("sync", "lamport", "counter", "flag")
    others = {"counter": counter(), "flag": flag()}
    s.sync(first >> multiply, others.get(kind, lamport(ALL_ONES)))
    s.launch(pdl=True, early_trigger=s.choice("early_trigger", False, True), registers=(120, 192))
    handed = others.get(kind, lamport(ALL_ONES, reset=by_reader))
    exchange = flag() if kind == "flag" else lamport(ALL_ONES, copies=3)
    return Ends(s, math, single, handed, exchange)
