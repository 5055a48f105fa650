"""The schedule language: how a graph is placed on warps, memory and sync primitives."""

from megagen.dsl.load import load
from megagen.dsl.schedule import (
    ALL_ONES,
    L2,
    POSITIVE_ZERO,
    KiB,
    Ring,
    Schedule,
    Warps,
    by_launch,
    by_reader,
    cluster,
    counter,
    evict_first,
    evict_last,
    evict_normal,
    flag,
    in_l2,
    lamport,
    mbarrier,
    no_allocate,
    previous_step,
)
from megagen.ir.graph import Graph
from megagen.ir.plan import Machine

__all__ = [
    "ALL_ONES", "L2", "POSITIVE_ZERO", "Graph", "KiB", "Machine", "Ring", "Schedule", "Warps", "by_launch", "by_reader",
    "cluster", "counter", "evict_first", "evict_last", "evict_normal", "flag", "in_l2", "lamport", "load",
    "mbarrier", "no_allocate", "previous_step",
]  # fmt: skip
