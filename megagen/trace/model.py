"""What a page, a summary and a comparison show of a trace: plain data, made by ``view.py``.

Times are µs since the launch began, bytes are bytes. A ``Stat`` is (p10, median, p90) over the blocks that have the
thing and the launches of the trace.
"""

from __future__ import annotations

from typing import Literal

from megagen.ir.graph import Frozen

RING_LOADS = ("load_weights", "load")  # roles that fill the ring

Stat = tuple[float, float, float]


class Loads(Frozen):
    """When a block asks for an op's weights, first and last. ``bytes``: of a launch, all blocks of a rank together."""

    into: Literal["ring", "l2"]
    begin: Stat
    end: Stat
    bytes: int
    blocks: int


class Part(Frozen):
    """A role of an op. ``begin``: the first of its warps in a block takes it up. ``ready``: its input is there (the
    last wait for a channel before any other work). ``end``: the last of its warps is done. ``waits``: µs that a warp
    waits within it."""

    role: str
    warps: tuple[int, ...]
    begin: Stat
    ready: Stat
    end: Stat
    waits: Stat


class Row(Frozen):
    """An op, over the blocks that do any of its work. ``begin``, ``end``: of that work, without waits for input at its
    head and without loads. ``length``: of a block, from begin to end."""

    op: str
    kind: str
    blocks: int
    begin: Stat
    end: Stat
    loads: tuple[Loads, ...]
    parts: tuple[Part, ...]
    source: str  # "_layer.py:41"
    length: Stat = (0.0, 0.0, 0.0)

    @property
    def head(self) -> Part | None:
        """The role with whose input the op begins."""
        return min((p for p in self.parts if p.role not in RING_LOADS), key=lambda p: p.ready[1], default=None)


class Wait(Frozen):
    """Waits of one role for one edge. ``us``: of a warp in a launch. ``critical_us``: of it on the critical path, a
    launch. ``cover``: what could be done meanwhile, in a sentence; empty if nothing is known."""

    op: str
    role: str
    edge: str
    begin: Stat
    us: Stat
    critical_us: float
    cover: str


class Leg(Frozen):
    """A stretch of the critical path of one launch, backwards from the last block's end."""

    op: str
    role: str
    what: Literal["work", "wait", "load", "hop", "launch"]
    detail: str  # the edge waited for, or ""
    rank: int
    block: int
    warp: int
    begin: float
    end: float


class Share(Frozen):
    """What part of the critical path an op and a kind of leg have; µs of a launch."""

    op: str
    what: str
    us: Stat


class Step(Frozen):
    """A step of the Plan, for names in the warps' view: ``index`` as in spans."""

    index: int
    op: str  # "" for a service
    call: str
    source: str


class Edge(Frozen):
    index: int
    name: str
    kind: str  # "lamport", "counter", ..., "barrier"


class Warp(Frozen):
    """``spans``: [kind, step, edge, slot, bytes, begin ns, end ns], in order; kind as spans.Kind."""

    warp: int
    title: str  # "producer: loads o_proj ... "
    spans: tuple[tuple[int, int, int, int, int, int, int], ...]


class Block(Frozen):
    rank: int
    block: int
    sm: int
    end: float
    warps: tuple[Warp, ...]


class Run(Frozen):
    """One trace. ``total``: of a launch. ``hbm_idle``: µs of a launch in which no SM has weights under way;
    ``hbm_busy``: stretches (begin, end) of the median launch in which one has. ``blocks``: some of one launch, near the
    median in length."""

    name: str
    facts: tuple[tuple[str, str], ...]
    total: Stat
    floor: float | None
    launches: int
    blocks_of: int  # blocks of a rank
    rows: tuple[Row, ...]
    shares: tuple[Share, ...]
    path: tuple[Leg, ...]
    waits: tuple[Wait, ...]
    hbm_idle: Stat
    hbm_busy: tuple[tuple[float, float], ...]
    idle: Stat  # µs of a launch in which a block has no warp at work and no load under way
    dropped: int
    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    edges: tuple[Edge, ...]
    plain: float | None = None  # µs of a launch without stamps
    stamped: float | None = None  # and with them

    @property
    def over_floor(self) -> float | None:
        """Launches by the floor; back to back without stamps where that was measured."""
        return None if self.floor is None else (self.plain or self.total[1]) / self.floor


class Page(Frozen):
    title: str
    runs: tuple[Run, ...]  # one, or two overlaid
