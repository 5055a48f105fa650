"""Random weights of full size, made on the device: magnitudes as in a trained layer, activations of order one."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megagen.errors import WeightError
from megagen.ir.graph import DType, Graph, Shard, Weight
from megagen.ops.packing import E2M1, Nvfp4, pack_weight, stages, vectors

ROTATION = 16  # elements that consecutive stand-ins' messages are rotated by
USUAL_SCALES = range(0x30, 0x40)  # e4m3 bits of 0.5 to 1.875
EXTREME_SCALES = (0x00, 0x01, 0x02, 0x07, 0x08, 0x7D, 0x7E, 0x00)  # zero, 2^-9, subnormals, least normal, 416, 448


@dataclass(frozen=True)
class LayerWeights:
    """One rank's shard in logical form: ``values`` by weight name, [experts, rows, k], [rows, k] or [rows]."""

    graph: Graph
    rank: int
    values: dict[str, torch.Tensor | Nvfp4]

    def matrix(self, name: str, expert: int = 0) -> torch.Tensor | Nvfp4:
        """One matrix as stored: [rows, k], or a vector [rows]."""
        value = self.values[name]
        if not self.graph.weights()[name].experts:
            return value
        return Nvfp4(*(part[expert] for part in value)) if isinstance(value, Nvfp4) else value[expert]

    def packed(self) -> dict[str, torch.Tensor]:
        """Kernel parameters by name, on the same device; see :func:`megagen.ops.packing.pack_weight`."""
        stage, vector, out = stages(self.graph), vectors(self.graph), dict[str, torch.Tensor]()
        for name, weight in self.graph.weights().items():
            device = self.values[name][0].device
            out |= pack_weight(weight, stage[name], partial(self.matrix, name), device=device, vector=vector[name])
        return out

    def env(self, stand_ins: int) -> dict[str, torch.Tensor | Callable[[int], torch.Tensor]]:
        """World-wide weights when this is the only live rank and plays ``stand_ins`` = tp ranks: :func:`world_env`."""
        if stand_ins != self.graph.tp:
            raise WeightError(f"one shard with {stand_ins} stand-ins does not make tp={self.graph.tp}")
        return world_env([self])


def random_layer(
    graph: Graph,
    seed: int,
    device: torch.device | str = "cpu",
    *,
    rank: int = 0,
    scale_extremes: bool = False,
) -> LayerWeights:
    """``rank``'s shard: replicated weights depend on ``seed`` only, sharded ones on the rank too.

    ``scale_extremes`` draws NVFP4 block scales from the ends of e4m3 instead: 0, subnormals from 2^-9, up to 448.
    The same seed gives other numbers on another kind of device.
    """
    # standard deviation of vectors, by the op's port
    gain = {"gain": 0.1, "next_gain": 0.1, "bias": 0.02, "gate": 0.3}
    values: dict[str, torch.Tensor | Nvfp4] = {}
    for op in graph.ops:
        for port, w in op.weights.items():
            where = "" if w.shard is Shard.NONE else f"/{rank}"
            g = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{w.name}{where}".encode()))
            dtype = torch.float32 if w.dtype is DType.FP32 else torch.bfloat16
            shape = (*((w.experts,) if w.experts else ()), w.rows, *((w.k,) if w.k > 1 else ()))
            if w.dtype is DType.NVFP4:
                # The second level is not sharded: all ranks draw it from the same generator.
                shared = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{w.name}/scale".encode()))
                values[w.name] = _nvfp4(w, graph.tp, g, shared, EXTREME_SCALES if scale_extremes else USUAL_SCALES)
                continue
            # Routers are sharp: logits of a few, so that top-k weights differ.
            deviation = gain[port] if w.k == 1 else (8.0 if dtype is torch.float32 else 1.0) * _fan_in(w, graph.tp)
            drawn = torch.randn(shape, generator=g, device=device, dtype=dtype).mul_(deviation)
            if w.padding:
                drawn[-w.padding :] = 0
            values[w.name] = drawn
    return LayerWeights(graph, rank, values)


def world_env(shards: list[LayerWeights]) -> dict[str, torch.Tensor | Callable[[int], torch.Tensor]]:
    """The whole model that live ranks with these shards compute, for :func:`megagen.ops.reference.evaluate`.

    Live rank L of n plays ranks L * S + j, j < S = tp / n, with its own shard and messages rotated by 16 j
    elements. So rank L * S + j holds the shard with its output rows (of both halves of [gate; up]) rolled by 16 j.
    A K-sharded matrix's whole output is rolled, and its columns too, as its input comes from rolled rows. Of what is
    ``local``, rows are not rolled and neither are columns: no message carries them. A matrix of parts becomes each
    part's rows of all ranks in turn; of ``padding`` there is nothing in the whole. Where the sum is ``scattered``, rank
    L sums the contributions to its slice of the rows, rolled by 16 j each, and stand-ins send that on, rolled again.
    Experts are callables that dequantise to fp32 and assemble one expert's matrix. Raises WeightError if n does not
    divide tp.
    """
    graph = shards[0].graph
    if graph.tp % len(shards):
        raise WeightError(f"{len(shards)} live ranks do not divide tp={graph.tp}")
    stand_ins = graph.tp // len(shards)

    def build(w: Weight, expert: int = 0) -> torch.Tensor:
        found = [s.matrix(w.name, expert) for s in (shards[:1] if w.shard is Shard.NONE else shards)]
        plain = [(x.dequantise() if isinstance(x, Nvfp4) else x)[: w.rows - w.padding] for x in found]
        if w.shard is Shard.NONE:
            return plain[0]
        turns = [(x, ROTATION * j) for x in plain for j in range(stand_ins)]
        if w.scattered:
            n, columns = w.rows // graph.tp, 0 if w.local else 1
            own = [slice(live * stand_ins * n, (live * stand_ins + 1) * n) for live in range(len(shards))]
            sums = [torch.cat([x[o].roll((by, by * columns), (0, 1)) for x, by in turns], dim=1) for o in own]
            return torch.cat([x.roll(ROTATION * j, 0) for x in sums for j in range(stand_ins)])
        if w.shard is Shard.K:
            return torch.cat([x.roll((by, 0 if w.local else by), (0, 1)) for x, by in turns], dim=1)
        parts = w.parts or ((w.rows // 2,) * 2 if w.gate_up else (w.rows - w.padding,))
        ranks = [[part.roll(0 if w.local else by, 0) for part in x.split(parts)] for x, by in turns]
        return torch.cat([part for same in zip(*ranks, strict=True) for part in same])

    return {name: partial(build, w) if w.experts else build(w) for name, w in graph.weights().items()}


def world_tensor(tensors: Sequence[torch.Tensor], stand_ins: int, axis: int) -> torch.Tensor:
    """The whole of an activation that stays on its rank (queries, a cache), of the live ranks' in rank order: those
    for which a live rank stands in have the very same as it. ``axis`` is the tensor's ``shard_axis``."""
    return torch.cat([x for x in tensors for _ in range(stand_ins)], dim=axis)


def _fan_in(w: Weight, tp: int) -> float:
    """Standard deviation that keeps outputs at the inputs' magnitude."""
    return float((w.k * (tp if w.shard is Shard.K else 1)) ** -0.5)


def _nvfp4(w: Weight, tp: int, g: torch.Generator, shared: torch.Generator, scales: range | tuple[int, ...]) -> Nvfp4:
    device = g.device
    table = torch.tensor(list(scales), dtype=torch.uint8, device=device)
    codes = torch.randint(256, (w.experts, w.rows, w.k // 2), generator=g, device=device, dtype=torch.uint8)
    drawn = torch.randint(len(scales), (w.experts, w.rows, w.k // 16), generator=g, device=device, dtype=torch.uint8)
    for expert in drawn:  # by expert: an index takes eight bytes an element
        expert.copy_(table[expert.long()])
    mean_squares = (x.float().square().mean() for x in (torch.tensor(E2M1), table.view(torch.float8_e4m3fn)))
    deviation = math.sqrt(math.prod(map(float, mean_squares)))
    factor = torch.rand(w.experts, 2 if w.gate_up else 1, generator=shared, device=device) + 0.5  # no two alike
    scale_2 = factor * (_fan_in(w, tp) / deviation)
    return Nvfp4(codes, drawn.view(torch.float8_e4m3fn), scale_2 if w.gate_up else scale_2[:, 0])
