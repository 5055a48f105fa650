"""Tensors that travel between roles become channels: primitive, copies, and where they stand in the heap."""

from __future__ import annotations

from megagen.dsl.schedule import Schedule, Sync, lamport, mbarrier
from megagen.errors import Loc, ScheduleError, did_you_mean
from megagen.ir.graph import EdgeHandle, Graph, Op, Scope, Tensor, TensorKind
from megagen.ir.plan import Reset, SyncKind

SAFE_COPIES = {Scope.RANK: 2, Scope.WORLD: 3}  # a rank may be a launch ahead of another


class Edges:
    """Who writes and reads each internal tensor, and which primitive the schedule chose for it."""

    def __init__(self, schedule: Schedule) -> None:
        self.graph: Graph = schedule.graph
        self.writers: dict[str, list[tuple[Op, str]]] = {}
        self.readers: dict[str, list[tuple[Op, str]]] = {}
        for op in self.graph.ops:
            ports = {**op.inputs, **op.outputs}
            for role in op.roles():
                for port in role.writes:
                    self.writers.setdefault(ports[port], []).append((op, role.name))
                for port in role.reads:
                    self.readers.setdefault(ports[port], []).append((op, role.name))
        self.syncs: dict[str, tuple[Sync, Loc | None]] = {}
        for edge, sync, loc in schedule.syncs:
            for name in self._tensors(edge, loc):
                earlier = self.syncs.get(name)
                if earlier is not None and earlier[0] != sync:
                    raise ScheduleError(
                        f"tensor {name!r} is handed over in two ways", loc=loc, notes=(("the first way", earlier[1]),),
                        hint="all readers of a tensor share one primitive",
                    )  # fmt: skip
                self.syncs[name] = (sync, loc)
        self.faults = {name for edge, loc in schedule.faults for name in self._tensors(edge, loc)}

    def internal(self) -> list[Tensor]:
        """The tensors that need a channel, in graph order."""
        return [t for t in self.graph.tensors.values() if t.kind is TensorKind.INTERNAL]

    def sync(self, tensor: Tensor) -> tuple[Sync, Loc | None]:
        """The primitive of ``tensor``'s channel with its defaults filled in."""
        sync, loc = self.syncs.get(tensor.name, (mbarrier() if tensor.scope is Scope.BLOCK else lamport(), None))
        copies = sync.copies
        if copies is None:
            copies = SAFE_COPIES.get(tensor.scope, 1)
            if sync.reset is Reset.READER:  # who empties it a launch earlier
                copies = max(1, copies - 1)
        if sync.kind in (SyncKind.MBARRIER, SyncKind.CLUSTER):
            copies = 1
        return Sync(sync.kind, sync.empty, copies, sync.reset), loc

    def _tensors(self, edge: EdgeHandle, loc: Loc | None) -> list[str]:
        found = [
            name
            for name, writers in self.writers.items()
            if any(op.name == edge.writer and edge.writer_role in (None, role) for op, role in writers)
            and any(
                op.name == edge.reader and edge.reader_role in (None, role) for op, role in self.readers.get(name, ())
            )
            # op >> op means what passes between them, not an op's own partial sums
            and (edge.writer != edge.reader or edge.writer_role is not None)
        ]
        if not found:
            known = sorted(
                {
                    f"{w.name} >> {r.name}" if w is not r else f"{w.name}.{a} >> {r.name}.{b}"
                    for n, ws in self.writers.items()
                    for w, a in ws
                    for r, b in self.readers.get(n, ())
                }
            )
            raise ScheduleError(f"nothing passes along {edge}", loc=loc, hint=did_you_mean(str(edge), known))
        return found


def layout(tensor: Tensor, tp: int) -> tuple[int, int, int]:
    """(row_stride, rank_stride, shard) in elements of a channel's messages."""
    row = tensor.shape[-1]
    if tensor.scope is not Scope.WORLD:
        return row, 0, row
    if tensor.reduce:
        return row, tensor.elements // tensor.shape[0], row
    return row, row // tp, row // tp


def counted(sync: Sync) -> bool:
    return sync.kind in (SyncKind.COUNTER, SyncKind.FLAG)
