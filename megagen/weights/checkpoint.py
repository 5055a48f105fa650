"""Muse Spark checkpoints in the Hugging Face layout: safetensors, bf16 or with ModelOpt NVFP4 experts.

Everything a layer needs is checked, by name, shape and type, before anything is read; only a rank's slices are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors import SafetensorError, safe_open

from megagen.errors import WeightError
from megagen.ir.graph import DType, Graph, Shard, Weight
from megagen.models.muse_spark import layer_kinds
from megagen.ops.attention import Attention
from megagen.ops.packing import BLOCK, Nvfp4, pack_weight, stages, vectors
from megagen.ops.qkv_heads import QkvHeads

PREFIX = "model.language_model.layers."
SUFFIXES = ("", "_weight_scale", "_weight_scale_2")  # an NVFP4 weight's tensors: codes, block scales, second level


class Checkpoint:
    """A checkpoint directory, opened. Tensors are memory-mapped and read when asked for.

    ``prefix`` stands before the layer's number. Raises WeightError if the directory, its index or a shard is
    missing or unreadable.
    """

    def __init__(self, directory: str | Path, *, prefix: str = PREFIX) -> None:
        self.directory, self.prefix = Path(directory), prefix
        self._open: dict[str, Any] = {}
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            self._files: dict[str, str] = _json(index, "weight_map")
        elif (self.directory / "model.safetensors").is_file():
            self._files = dict.fromkeys(self._shard("model.safetensors").keys(), "model.safetensors")
        else:
            raise WeightError(
                f"{self.directory} has neither model.safetensors nor model.safetensors.index.json",
                hint="give the directory of a Hugging Face checkpoint",
            )

    def _shard(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(self.directory / file), framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightError(f"cannot read {self.directory / file}: {error}") from None
        return self._open[file]

    def slice(self, name: str) -> Any:
        """A tensor, lazily: has get_shape() and get_dtype(), and reads what it is indexed with. None if missing."""
        file = self._files.get(name)
        if file is None:
            return None
        try:
            return self._shard(file).get_slice(name)
        except SafetensorError:
            raise WeightError(f"{self.directory / file} lacks {name}, which the index says it holds") from None

    def layers(self) -> list[int]:
        """Numbers of the layers that the checkpoint has tensors of."""
        found = {re.match(re.escape(self.prefix) + r"(\d+)\.", name) for name in self._files}
        return sorted({int(m[1]) for m in found if m})

    def open(self, layer: int, graph: Graph) -> dict[str, Source]:
        """The layer's weights by name, checked against what ``graph`` expects but not read; weights of the graph that
        are the next layer's come from ``layer`` + 1.

        Raises WeightError listing every tensor that is missing, misshapen or wrongly typed.
        """
        quantised = any(w.dtype is DType.NVFP4 for w in graph.weights().values())
        problems = self._config_problems() if quantised else []
        problems += self._kind_problems(layer, graph)
        sources = {}
        for weight in graph.weights().values():
            slices = []
            for below, shape, types in _expected(weight, graph.tp):
                name = f"{self.prefix}{layer + weight.next_layer}.{below}"
                found = self.slice(name)
                if found is None:
                    actual = "it is missing"
                elif (tuple(found.get_shape()), found.get_dtype()) not in [(shape, t) for t in types]:
                    actual = f"found {found.get_dtype()} {list(found.get_shape())}"
                else:
                    slices.append(found)
                    continue
                problems.append(f"{name}: expected {' or '.join(types)} {list(shape)}, {actual}")
            sources[weight.name] = Source(weight, graph.tp, tuple(slices))
        if problems:
            layers, hint = self.layers(), None
            if layer not in layers:
                hint = (
                    f"it has layers {layers[0]} to {layers[-1]}"
                    if layers
                    else f"nothing in it begins with {self.prefix}"
                )
            elif layer + 1 not in layers and any(w.next_layer for w in graph.weights().values()):
                hint = (
                    f"it has no layer {layer + 1}, and {graph.name} ends with the next layer's projections: "
                    "the last layer needs a schedule of its own"
                )
            elif any(".experts." in p and "_proj" in p for p in problems):
                hint = (
                    'experts are bf16 in some layers and NVFP4 in others: build with experts="bf16" or "nvfp4" to match'
                )
            raise WeightError(
                f"{self.directory}, layer {layer}: {len(problems)} things do not fit {graph.name}",
                hint=hint,
                notes=tuple((p, None) for p in problems),
            )
        return sources

    def _kind_problems(self, layer: int, graph: Graph) -> list[str]:
        """A layer of another kind has tensors of the same shapes, and would compute something else."""
        if not (self.directory / "config.json").is_file():
            return []
        kinds, problems = layer_kinds(self.directory), []
        for op in graph.ops:
            if isinstance(op, Attention) and layer < len(kinds) and not kinds[layer].sliding:
                problems.append(f"config.json: layer {layer} attends to its whole context, {op.name} to a window")
            if isinstance(op, QkvHeads) and layer + 1 < len(kinds) and kinds[layer + 1].rotates is not op.rotate:
                does, here = ("rotates", "does not") if kinds[layer + 1].rotates else ("does not rotate", "does")
                problems.append(f"config.json: layer {layer + 1} {does} q and k, {op.name} {here}")
        return problems

    def _config_problems(self) -> list[str]:
        path = self.directory / "hf_quant_config.json"
        expected = f'hf_quant_config.json: expected quant_algo "NVFP4" and group_size {BLOCK}'
        if not path.is_file():
            return [f"{expected}, it is missing"]
        found = _json(path, "quantization")
        algorithm, group = found.get("quant_algo"), found.get("group_size", BLOCK)
        return [] if (algorithm, group) == ("NVFP4", BLOCK) else [f"{expected}, found {algorithm!r} and {group!r}"]


class Source:
    """One weight of one layer, whose tensors were checked: reads matrices of a rank, or whole ones."""

    def __init__(self, weight: Weight, tp: int, slices: tuple[Any, ...]) -> None:
        self.weight, self.tp, self.slices = weight, tp, slices

    def read(self, expert: int = 0, rank: int | None = None) -> torch.Tensor | Nvfp4:
        """``rank``'s share of a matrix, or all of it: [rows, k] (or a vector [rows]) of the checkpoint's type, except
        that weights which the graph has in fp32 are widened."""
        if self.weight.dtype is DType.NVFP4:
            codes, scales, scale_2 = self.slices
            return Nvfp4(self._share([codes], expert, rank), self._share([scales], expert, rank), scale_2[expert])
        matrix = self._share(self.slices, expert, rank)
        return matrix.float() if self.weight.dtype is DType.FP32 else matrix

    def _share(self, tensors: Sequence[Any], expert: int, rank: int | None) -> torch.Tensor:
        """What is read of ``tensors``, stacked along rows: several are the parts of one matrix, each cut by itself."""
        return torch.cat([t[index] for t in tensors for index in self._cuts(t, expert, rank)])

    def _cuts(self, tensor: Any, expert: int, rank: int | None) -> list[tuple[Any, ...]]:
        w, shape = self.weight, tensor.get_shape()
        lead: tuple[Any, ...] = (expert,) if w.experts else ()
        if rank is None or w.shard is Shard.NONE:
            return [(*lead, slice(None))]
        if w.shard is Shard.K:
            n = shape[-1] // self.tp
            return [(*lead, slice(None), slice(rank * n, (rank + 1) * n))]
        halves = 2 if w.gate_up else 1
        half = shape[-2] // halves
        n = half // self.tp
        return [(*lead, slice(h * half + rank * n, h * half + (rank + 1) * n)) for h in range(halves)]


def load_layer(
    directory: str | Path,
    layer: int,
    graph: Graph,
    rank: int,
    *,
    device: torch.device | str = "cpu",
    prefix: str = PREFIX,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """``rank``'s weights of a layer, packed for the device, by kernel parameter name.

    Matrices are uint8 [bytes], vectors fp32 [n]; NVFP4 adds ``<name>_scale`` fp32 [experts, 2 | 1]. ``progress``
    gets one task that counts matrices. Raises WeightError as :meth:`Checkpoint.open` does, and for content that
    the device cannot represent (negative or NaN scales).
    """
    if not 0 <= rank < graph.tp:
        raise WeightError(f"rank {rank} of tp={graph.tp}")
    sources = Checkpoint(directory, prefix=prefix).open(layer, graph)
    stage, vector = stages(graph), vectors(graph)
    bar = progress or Progress(disable=True)
    task = bar.add_task(f"layer {layer}", total=sum(max(1, s.weight.experts) for s in sources.values()))
    packed: dict[str, torch.Tensor] = {}
    for name, source in sources.items():
        read = partial(source.read, rank=rank)
        advance = partial(bar.advance, task)
        packed |= pack_weight(source.weight, stage[name], read, device=device, step=advance, vector=vector[name])
    return packed


def load_reference(
    directory: str | Path,
    layer: int,
    graph: Graph,
    *,
    device: torch.device | str = "cpu",
    prefix: str = PREFIX,
) -> dict[str, torch.Tensor | Callable[[int], torch.Tensor]]:
    """A layer's world-wide weights for :func:`megagen.ops.reference.evaluate`: tensors of the checkpoint's type, and
    for experts callables that read, and dequantise to fp32, one expert's matrix. Raises WeightError likewise."""
    sources = Checkpoint(directory, prefix=prefix).open(layer, graph)

    def matrix(source: Source, expert: int = 0) -> torch.Tensor:
        found = source.read(expert)
        return (found.dequantise() if isinstance(found, Nvfp4) else found).to(device)

    return {name: partial(matrix, s) if s.weight.experts else matrix(s) for name, s in sources.items()}


def _expected(weight: Weight, tp: int) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """(name below the layer, shape, acceptable types) of a weight's checkpoint tensors.

    Types other than the graph's own are accepted where conversion to what the device holds is exact.
    """
    ranks = tp if weight.shard is Shard.ROWS else 1
    rows = weight.rows * ranks
    k = weight.k * (tp if weight.shard is Shard.K else 1)
    lead = (weight.experts,) if weight.experts else ()
    name = weight.names[0]
    if weight.dtype is DType.NVFP4:
        second = (*lead, 2) if weight.gate_up else lead
        shapes = (*lead, rows, k // 2), (*lead, rows, k // BLOCK), second
        names = [name + suffix for suffix in SUFFIXES]
        return list(zip(names, shapes, (("U8",), ("F8_E4M3",), ("F32",)), strict=True))
    if weight.k == 1:
        return [(name, (rows,), ("BF16", "F32"))]
    types = ("F32", "BF16") if weight.dtype is DType.FP32 else ("BF16",)
    parts = zip(weight.names, weight.parts or (weight.rows,), strict=True)
    return [(part, (*lead, n * ranks, k), types) for part, n in parts]


def _json(path: Path, key: str) -> Any:
    """A mapping under ``key`` of a JSON file; WeightError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"cannot read {key!r} from {path}: {error!r}") from None
    if not isinstance(value, Mapping):
        raise WeightError(f"{key!r} in {path} is not an object")
    return dict(value)
