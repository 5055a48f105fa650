"""Layers one after the other, each working on what the one before left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megagen.errors import DeviceError
from megagen.ir.plan import ParamPlan, Plan
from megagen.runtime.group import Group
from megagen.runtime.rank import Layer, Live, Rank
from megagen.runtime.session import Replayable, Session

if TYPE_CHECKING:
    import torch

Values = Mapping[str, "torch.Tensor"]
SETS = 2  # of activations: one is read while the other is written
STEP = "megagen step times all launches of a step in a row"


def handed_on(plan: Plan) -> dict[str, str]:
    """Which of a layer's outputs and states is which of the next one's inputs: input name -> the other's name.

    The attention's inputs are what the op that ends the launch made for it; one input and one output are left, the
    stream. Raises DeviceError where the parameters do not pair like that.
    """
    attention = next((o for o in plan.ops if o.kind in ("attention", "global_attention")), None)
    heads = next((o for o in plan.ops if o.kind == "qkv_heads"), None)
    pairs: dict[str, str] = {}
    if attention is not None and heads is not None:
        pairs = {attention.tensors[port]: heads.tensors[port] for port in ("q", "gate", "keys", "values")}
    table = None if heads is None else heads.tensors.get("rotary")
    given = [p for p in plan.params if p.what == "input" and p.name not in pairs and p.name != table]
    made = [p for p in plan.params if p.what in ("output", "state") and p.name not in pairs.values()]
    if not (len(given) == len(made) == 1 and _same(given[0], made[0])):
        names = [", ".join(p.name for p in ps) or "nothing" for ps in (given, made)]
        raise DeviceError(
            f"layers of {plan.name} cannot feed each other: {names[0]} is left to read, {names[1]} made", hint=STEP
        )
    of = {p.name: p for p in plan.params}
    if unlike := [f"{name} is not like {other}" for other, name in pairs.items() if not _same(of[other], of[name])]:
        kind = "global" if attention is not None and attention.kind == "global_attention" else "sliding"
        raise DeviceError(
            f"layers of {plan.name} cannot feed each other: {', '.join(unlike)}",
            hint=f"--option following={kind} makes a layer that its like can follow; {STEP}",
        )
    return {given[0].name: made[0].name, **pairs}


def _same(a: ParamPlan, b: ParamPlan) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape)


class Stack:
    """``layers`` launches in a row on a session, or on a world of several ranks.

    ``packed``: weights by parameter name, of each layer (for several ranks, of each rank of each layer); with fewer
    than ``layers`` (default: as many) they come again in turn. ``inputs``: what the first layer reads, of each rank;
    rows of its tokens, caches and tables whole. All caches begin as the first layer's: layer l reads the l-th and
    writes its tokens into the next one, the last layer into the first one's. Say what to work on with the ranks'
    ``set_step``.
    """

    def __init__(
        self,
        on: Live,
        packed: Sequence[Values | Sequence[Values]],
        inputs: Sequence[Values],
        *,
        layers: int | None = None,
    ) -> None:
        self.on, self.ranks = on, on.ranks
        self.layers = len(packed) if layers is None else layers
        if not packed or self.layers < 1 or len(inputs) != len(self.ranks):
            raise DeviceError(f"{self.layers} layers of {len(packed)} weights with input for {len(inputs)} ranks")
        self._first: list[tuple[Rank, torch.Tensor, torch.Tensor]] = []  # what the first layer reads, and its origin
        each = [[p] if isinstance(p, Mapping) else p for p in packed]
        mine = [self._bind(rank, [weights[i] for weights in each], inputs[i]) for i, rank in enumerate(self.ranks)]
        self.bound: list[tuple[Layer, ...]] = list(zip(*mine, strict=True))  # of each layer, each rank's
        self.restore()

    def _bind(self, rank: Rank, packed: Sequence[Values], inputs: Values) -> list[Layer]:
        pairs = handed_on(rank.plan)
        kept = {p.name for p in rank.plan.params if p.what == "state"}
        others = {name: x for name, x in inputs.items() if name not in pairs}
        buffers: dict[str, list[torch.Tensor]] = {}
        for name, made in pairs.items():
            if name not in inputs:
                raise DeviceError(f"nothing given for {name} of {rank.plan.name}")
            buffers[name] = [rank.allocate(name) for _ in range(self.layers if made in kept else SETS)]
            value = inputs[name].clone()
            for x in buffers[name][1:] if made in kept else ():
                with rank.writing(x):
                    x.copy_(value)
            self._first.append((rank, buffers[name][0], value))
        weights: dict[int, Values] = {}
        bound = []
        for index in range(self.layers):
            chosen = index % len(packed)
            given = {**others, **weights.get(chosen, packed[chosen])}
            for name, made in pairs.items():
                places = buffers[name]
                given[name], given[made] = places[index % len(places)], places[(index + 1) % len(places)]
            layer = rank.bind(given)
            bound.append(layer)
            # Where tensors are copied, once is enough.
            weights[chosen] = {name: layer.tensors[name] for name in packed[chosen]}
            others = {name: layer.tensors[name] for name in others}
        return bound

    def restore(self) -> None:
        """Give the first layer its inputs back, in the current stream. Rows past its tokens become NaN."""
        for rank, place, value in self._first:
            with rank.writing(place):
                if len(value) < len(place):
                    place[len(value) :].fill_(float("nan"))
                place[: len(value)].copy_(value)

    def launch(self, *, restore: bool = True) -> None:
        """Queue all layers' launches on every rank, in the current stream."""
        if restore:
            self.restore()
        for layers in self.bound:
            for rank, layer in zip(self.ranks, layers, strict=True):
                rank.launch(layer)

    def capture(self, *, restore: bool = True) -> Replayable:
        """:meth:`launch` as a CUDA graph; with ``restore`` every replay is the same. Keep the stack as long as it."""
        if isinstance(self.on, Group):
            if restore:
                raise DeviceError("the graphs of several GPUs restore nothing", hint="capture(restore=False)")
            return self.on.capture(self.bound)
        if not isinstance(self.on, Session):
            raise DeviceError("only launches on a GPU make a CUDA graph", hint="launch() queues them")
        layers = [layer for (layer,) in self.bound]
        return self.on.capture(layers, before=self.restore if restore else lambda: None)

    @property
    def outputs(self) -> list[dict[str, torch.Tensor]]:
        """What the last layer writes, of each rank."""
        names = [p.name for p in self.ranks[0].plan.params if p.what in ("output", "state")]
        return [{name: layer.tensors[name] for name in names} for layer in self.bound[-1]]
