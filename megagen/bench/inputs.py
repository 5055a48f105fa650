"""What launches read besides weights, drawn at random: of each live rank, and world-wide for the reference."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megagen.errors import MegagenError
from megagen.ir.graph import DType, Graph, Tensor, TensorKind
from megagen.ops.attention import Attention, slots
from megagen.ops.embed import Embed
from megagen.ops.global_attention import GlobalAttention
from megagen.ops.qkv_heads import QkvHeads, rotary
from megagen.runtime.params import TORCH_NAMES
from megagen.runtime.step import Step
from megagen.weights.random import world_tensor

Values = Mapping[str, torch.Tensor]
THETA = 500_000.0  # of Muse Spark's sliding layers, where the graph does not say
LOUDEST = 5.4730064863875  # root mean square of a query, as large as the model scales them
QUIETEST = 0.4


def random_stream(tokens: int, graph: Graph, seed: int, device: torch.device) -> torch.Tensor:
    """fp32 [tokens, hidden] of order one, the rows of different size; int32 [tokens] where a launch begins with ids."""
    generator = torch.Generator(device).manual_seed(seed)
    embed = next((op for op in graph.ops if isinstance(op, Embed)), None)
    if embed is not None:
        return torch.randint(embed.vocab, (tokens,), generator=generator, device=device, dtype=torch.int32)
    rows = torch.randn(tokens, stream_of(graph).shape[1], generator=generator, device=device)
    return rows * torch.logspace(-1, 1, tokens, device=device).unsqueeze(1)


def stream_of(graph: Graph) -> Tensor:
    """The graph's residual stream, or the ids of which it makes one: the input that is neither attention's nor the
    table of rotations."""
    given = [t for t in graph.tensors.values() if t.kind is TensorKind.INPUT]
    known = _known(graph)
    left = [t for t in given if t.name not in known]
    if len(left) != 1:
        raise MegagenError(f"{graph.name} has {len(left)} inputs that may be the stream: {[t.name for t in left]}")
    return left[0]


def _known(graph: Graph) -> dict[str, str]:
    """What the inputs but the stream are: tensor name -> port of the op that reads it."""
    found: dict[str, str] = {}
    for op in graph.ops:
        if isinstance(op, Attention | GlobalAttention):
            found |= {op.inputs[port]: port for port in ("q", "gate", "keys", "values")}
        if isinstance(op, QkvHeads) and "rotary" in op.inputs:
            found[op.inputs["rotary"]] = "rotary"
    return {name: port for name, port in found.items() if graph.tensors[name].kind is TensorKind.INPUT}


@dataclass(frozen=True)
class Inputs:
    """What a launch of ``step`` reads. ``ranks``: parameters of each live rank by name, activations cut to the step's
    tokens; ``env``: the same world-wide, with the step, for :func:`megagen.ops.reference.evaluate`. All ranks and
    ``env`` have one and the same ``stream`` (ids, see :func:`stream_of`), which may be changed in place."""

    step: Step
    stream: torch.Tensor
    ranks: tuple[Values, ...]
    env: Mapping[str, Any]

    @classmethod
    def random(
        cls, graph: Graph, live: int, tokens: int, seed: int, device: torch.device, step: Step | None = None
    ) -> Inputs:
        """For ``live`` ranks and those that they stand in for. ``step``: a chain after nothing by default.

        What a launch may not look at is NaN in the caches. Queries differ in size, so that some attention is sharp and
        some flat. The same seed gives other numbers on another kind of device.
        """
        step = Step.chain(tokens) if step is None else step
        if step.tokens != tokens:
            raise MegagenError(f"input for {tokens} tokens and a step of {step.tokens}")
        rows = random_stream(tokens, graph, seed, device)
        name = stream_of(graph).name
        ranks: list[dict[str, torch.Tensor]] = [{name: rows} for _ in range(live)]
        env: dict[str, Any] = {name: rows}
        for known, port in _known(graph).items():
            tensor = graph.tensors[known]
            if port == "rotary":
                table = rotary(tensor.shape[0], tensor.shape[1], _theta(graph)).to(device)
                env[known] = table
                for values in ranks:
                    values[known] = table
                continue
            for rank, values in enumerate(ranks):
                g = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{known}/{rank}".encode()))
                values[known] = _draw(graph, tensor, port, step, g)
            if tensor.shard_axis is None:
                raise MegagenError(f"{known} of {graph.name} stays on its rank and has no shard_axis")
            env[known] = world_tensor([v[known] for v in ranks], graph.tp // live, tensor.shard_axis)
        env["context"] = step.context
        env["positions"] = torch.tensor(step.positions, dtype=torch.int64, device=device)
        env["ancestors"] = step.visible().to(device)
        return cls(step, rows, tuple(ranks), env)

    def with_stream(self, rows: torch.Tensor) -> Inputs:
        """The same with another stream, fp32 [tokens, hidden], or other ids."""
        (name,) = (n for n, x in self.env.items() if x is self.stream)
        return Inputs(self.step, rows, tuple({**values, name: rows} for values in self.ranks), {**self.env, name: rows})


def _draw(graph: Graph, tensor: Tensor, port: str, step: Step, g: torch.Generator) -> torch.Tensor:
    """One rank's queries, gate or cache."""
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[DType(tensor.dtype)])
    op = next(op for op in graph.ops if isinstance(op, Attention | GlobalAttention))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=g.device)

    if port in ("q", "gate"):
        x = normal(step.tokens, tensor.shape[1] // op.head_dim, op.head_dim)
        if port == "q":  # normed, then each head of each token made louder or quieter
            x *= x.square().mean(-1, keepdim=True).rsqrt()
            share = torch.rand(*x.shape[:2], 1, generator=g, device=g.device)
            x *= QUIETEST * (LOUDEST / QUIETEST) ** share
        return x.flatten(1).to(dtype)
    cache = torch.full(tensor.shape, math.nan, dtype=dtype, device=g.device)
    oldest = max(0, step.context + 1 - op.window) if isinstance(op, Attention) else 0
    seen = range(oldest, step.context + step.tokens)
    put(cache, seen, normal(len(seen), tensor.shape[0], op.head_dim).to(dtype))
    return cache


def _theta(graph: Graph) -> float:
    return float(getattr(graph.attributes.get("config"), "rope_theta", THETA))


# -- caches ------------------------------------------------------------------------------------------------------


def _slots(cache: torch.Tensor, numbers: Iterable[int]) -> tuple[torch.Tensor, Any]:
    return slots(cache, torch.tensor(list(numbers), dtype=torch.int64, device=cache.device))


def put(cache: torch.Tensor, numbers: Iterable[int], values: torch.Tensor) -> None:
    """Write ``values`` [numbers, heads, dim] into the slots of these tokens."""
    view, index = _slots(cache, numbers)
    view[index] = values.unflatten(2, (-1, view.shape[-1]))


def get(cache: torch.Tensor, numbers: Iterable[int]) -> torch.Tensor:
    """[numbers, heads * dim]: what these tokens' slots hold."""
    view, index = _slots(cache, numbers)
    return view[index].flatten(1)


def without(cache: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """A copy in which these tokens' slots are zero."""
    rest = cache.clone()
    view, index = _slots(rest, numbers)
    view[index] = 0
    return rest


def has_caches(graph: Graph) -> bool:
    """Whether launches keep state."""
    return any(t.kind is TensorKind.STATE for t in graph.tensors.values())
