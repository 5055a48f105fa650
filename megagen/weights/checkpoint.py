"""Muse Spark checkpoints in the Hugging Face layout: safetensors, bf16 or with ModelOpt NVFP4 experts.

Everything a launch needs is checked, by name, shape and type, before anything is read; only a rank's slices are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from rich.progress import Progress

from megagen.errors import WeightError
from megagen.ir.graph import DType, Graph, Shard, Weight
from megagen.models.muse_spark import layer_kinds
from megagen.ops.attention import Attention
from megagen.ops.global_attention import GlobalAttention
from megagen.ops.packing import BLOCK, Nvfp4, pack_weight, stages, vectors
from megagen.ops.qkv_heads import QkvHeads
from megagen.weights import shards
from megagen.weights.shards import TYPES, Buffer, Stored, fresh

BASES = ("model.language_model.", "model.", "")  # of the text model's names: in the whole one, with a head, alone
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
SUFFIXES = ("", "_weight_scale", "_weight_scale_2")  # an NVFP4 weight's tensors: codes, block scales, second level
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CONFIGS = ("config.json", "hf_quant_config.json")


class Checkpoint:
    """A checkpoint directory, opened. Tensors are read when asked for.

    ``prefix`` stands before the layer's number; by default the one of :data:`BASES` that fits, with "layers.". Raises
    WeightError if the directory, its index or a shard is missing or unreadable, or if the index leads out of it.
    """

    def __init__(self, directory: str | Path, *, prefix: str | None = None) -> None:
        self.directory = Path(directory)
        self._open: dict[str, shards.Shard] = {}
        index = self.directory / INDEX
        if index.is_file():
            self._files: dict[str, str] = _json(index, "weight_map")
            for name, file in self._files.items():
                if not _within(file):
                    raise WeightError(
                        f"{index} has {name} in {file!r}, which is no file of the directory",
                        hint="do not use this checkpoint unless you know who made it",
                    )
        elif (self.directory / SINGLE).is_file():
            self._files = dict.fromkeys(self._shard(SINGLE).tensors, SINGLE)
        else:
            pickles = sorted(p.name for ending in ("bin", "pt", "pth") for p in self.directory.glob(f"*.{ending}"))
            raise WeightError(
                f"{self.directory} has neither {SINGLE} nor {INDEX}",
                hint=f"{pickles[0]} is a pickle, which can run code and is not read: save the model as safetensors"
                if pickles
                else "give the directory of a Hugging Face checkpoint",
            )
        bases = [b for b in BASES if any(name.startswith(f"{b}layers.") for name in self._files)] or BASES
        self.prefix = f"{bases[0]}layers." if prefix is None else prefix
        self.base = self.prefix.removesuffix("layers.")

    def _shard(self, file: str) -> shards.Shard:
        if file not in self._open:
            self._open[file] = shards.Shard(self.directory / file)
        return self._open[file]

    def find(self, name: str) -> Stored | None:
        """A tensor, not read yet; None if there is none of that name."""
        file = self._files.get(name)
        if file is None:
            return None
        found = self._shard(file).tensors.get(name)
        if found is None:
            raise WeightError(f"{self.directory / file} lacks {name}, which the index says it holds")
        return found

    def layers(self) -> list[int]:
        """Numbers of the layers that the checkpoint has tensors of."""
        found = {re.match(re.escape(self.prefix) + r"(\d{1,6})\.", name) for name in self._files}
        return sorted({int(m[1]) for m in found if m})

    def experts(self, layer: int) -> DType:
        """What a layer's experts are stored as, by the tensors that it has. Raises WeightError if it has none."""
        names = [n for n in self._files if n.startswith(f"{self.prefix}{layer}.") and ".experts." in n]
        if not names:
            raise WeightError(f"{self.directory} has no experts of layer {layer}")
        return DType.NVFP4 if any(n.endswith(SUFFIXES[1]) for n in names) else DType.BF16

    def identity(self) -> dict[str, Any]:
        """What tells this checkpoint from another: size, time of change and hash of the header of each shard; hashes of
        the index and the configurations. No tensor is read."""
        found: dict[str, Any] = {
            "shards": {file: shards.identity(self.directory / file) for file in sorted({*self._files.values()})}
        }
        for name in (INDEX, *CONFIGS):
            path = self.directory / name
            try:
                found[name] = sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            except OSError as error:
                raise WeightError(f"cannot read {path}: {error.strerror or error}") from None
        return found

    def _name(self, weight: Weight, layer: int, name: str) -> str:
        """The whole name of a tensor in this checkpoint; a head that is tied to the embedding is the embedding."""
        if not weight.top:
            return f"{self.prefix}{layer + weight.next_layer}.{name}"
        if name == HEAD and name not in self._files and self._tied():
            name = BASES[0] + EMBEDDING
        return self.base + name.removeprefix(BASES[0]) if name.startswith(BASES[0]) else name

    def _tied(self) -> bool:
        path = self.directory / CONFIGS[0]
        if not path.is_file():
            return False
        try:
            data = json.loads(path.read_text("utf-8"))
            return any(d.get("tie_word_embeddings") is True for d in (data, data.get("text_config", {})))
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise WeightError(f"{path}: {error}") from None

    def open(self, layer: int, graph: Graph) -> dict[str, Source]:
        """The launch's weights by name, checked against what ``graph`` expects but not read; weights of the graph that
        are the next layer's come from ``layer`` + 1.

        Raises WeightError listing every tensor that is missing, misshapen or wrongly typed.
        """
        weights = graph.weights().values()
        quantised = any(w.dtype is DType.NVFP4 for w in weights)
        problems = self._config_problems() if quantised else []
        problems += self._kind_problems(layer, graph)
        sources = {}
        for weight in weights:
            tensors = []
            for below, shape, types in _expected(weight, graph.tp):
                name = self._name(weight, layer, below)
                found = self.find(name)
                if found is None:
                    actual = "it is missing" + (f" in {SINGLE}" if SINGLE in self._open else "")
                elif found.shape != shape or found.dtype not in types:
                    actual = f"found {found.dtype} {list(found.shape)} in {found.shard.path.name}"
                else:
                    tensors.append(found)
                    continue
                problems.append(f"{name}: expected {' or '.join(types)} {list(shape)}, {actual}")
            sources[weight.name] = Source(weight, graph.tp, tuple(tensors))
        if problems:
            own = any(not (w.top or w.next_layer) for w in weights)
            layers, hint = self.layers(), None
            if own and layer not in layers:
                hint = (
                    f"it has layers {layers[0]} to {layers[-1]}"
                    if layers
                    else f"nothing in it begins with {self.prefix}"
                )
            elif layer + 1 not in layers and any(w.next_layer for w in weights):
                hint = (
                    f"it has no layer {layer + 1}, and {graph.name} ends with the next layer's projections: "
                    "the last layer needs a schedule of its own"
                )
            elif any(".experts." in p and "_proj" in p for p in problems):
                hint = (
                    'experts are bf16 in some layers and NVFP4 in others: build with experts="bf16" or "nvfp4" to match'
                )
            raise WeightError(
                f"{self.directory}{f', layer {layer}' if own else ''}: {len(problems)} things do not fit {graph.name}",
                hint=hint,
                notes=tuple((p, None) for p in problems),
            )
        return sources

    def _kind_problems(self, layer: int, graph: Graph) -> list[str]:
        """A layer of another kind has tensors of the same shapes, and would compute something else."""
        if not (self.directory / CONFIGS[0]).is_file():
            return []
        kinds, problems = layer_kinds(self.directory), []
        for op in graph.ops:
            if isinstance(op, Attention) and 0 <= layer < len(kinds) and not kinds[layer].sliding:
                problems.append(f"config.json: layer {layer} attends to its whole context, {op.name} to a window")
            if isinstance(op, GlobalAttention) and 0 <= layer < len(kinds) and kinds[layer].sliding:
                problems.append(f"config.json: layer {layer} attends to a window, {op.name} to its whole context")
            if isinstance(op, QkvHeads) and layer + 1 < len(kinds) and kinds[layer + 1].rotates is not op.rotate:
                does, here = ("rotates", "does not") if kinds[layer + 1].rotates else ("does not rotate", "does")
                problems.append(f"config.json: layer {layer + 1} {does} q and k, {op.name} {here}")
        return problems

    def _config_problems(self) -> list[str]:
        path = self.directory / CONFIGS[1]
        expected = f'hf_quant_config.json: expected quant_algo "NVFP4" and group_size {BLOCK}'
        if not path.is_file():
            return [f"{expected}, it is missing"]
        found = _json(path, "quantization")
        algorithm, group = found.get("quant_algo"), found.get("group_size", BLOCK)
        return [] if (algorithm, group) == ("NVFP4", BLOCK) else [f"{expected}, found {algorithm!r} and {group!r}"]


class Source:
    """One weight of one launch, whose tensors were checked: reads matrices of a rank, or whole ones, or stretches."""

    def __init__(self, weight: Weight, tp: int, tensors: tuple[Stored, ...]) -> None:
        self.weight, self.tp, self.tensors = weight, tp, tensors

    def read(self, expert: int = 0, rank: int | None = None) -> torch.Tensor | Nvfp4:
        """``rank``'s share of a matrix, or all of it: [rows, k] (or a vector [rows]) of the checkpoint's type, except
        that weights which the graph has in fp32 are widened."""
        w = self.weight
        rows = self._segments(None)[-1][1] if rank is None else w.rows
        matrix, *scales = (t[0] for t in self.band(rank, range(expert, expert + 1), [range(rows)]))
        if scales:
            return Nvfp4(matrix, scales[0], self.scale_2()[expert])
        if w.k == 1:
            matrix = matrix[:, 0]
        return matrix.float() if w.dtype is DType.FP32 else matrix

    def scale_2(self) -> torch.Tensor:
        """Second-level scales of an NVFP4 weight: fp32 [experts, 2] (gate, up) or [experts]."""
        return self.tensors[2].whole()

    def band(
        self, rank: int | None, experts: range, rows: Sequence[range], buffer: Buffer = fresh
    ) -> list[torch.Tensor]:
        """Some rows of some matrices as stored: [experts, rows, columns], for NVFP4 codes and block scales, else one
        tensor. ``rows`` are counted in what the rank holds, parts and padding included, and stacked. They lie in what
        ``buffer`` gives."""
        cut = rank is not None and self.weight.shard is Shard.K
        planes = self.tensors[:2] if self.weight.dtype is DType.NVFP4 else self.tensors[:1]
        found: list[torch.Tensor] = []
        for plane in planes:
            width = plane.row_bytes // (self.tp if cut else 1)
            shape = len(experts), sum(map(len, rows)), width
            out = buffer(f"plane {len(found)}", prod(shape)).reshape(shape)
            if self.weight.padding:
                out[:] = 0
            at = 0
            for wanted in rows:
                for begin, end, part, first in self._segments(rank):
                    some = range(max(begin, wanted.start), min(end, wanted.stop))
                    if some:
                        tensor = self.tensors[part] if len(planes) == 1 else plane
                        into = out[:, at + some.start - wanted.start :][:, : len(some)]
                        tensor.fill(
                            into, experts.start, first + some.start - begin, (rank or 0) * width if cut else 0, buffer
                        )
                at += len(wanted)
            found.append(torch.from_numpy(out).view(TYPES[plane.dtype]))
        return found

    def _segments(self, rank: int | None) -> list[tuple[int, int, int, int]]:
        """(first row, row behind the last, tensor, the tensor's row that the first is) of what ``rank`` holds."""
        w = self.weight
        tp = self.tp if rank is not None and w.shard is Shard.ROWS else 1
        halves = 2 if w.gate_up and tp > 1 else 1
        found, at = [], 0
        for i, tensor in enumerate(self.tensors[:1] if w.dtype is DType.NVFP4 else self.tensors):
            half = tensor.rows // halves
            n = half // tp
            for h in range(halves):
                found.append((at, at + n, i, h * half + (rank * n if rank and tp > 1 else 0)))
                at += n
        return found


def load_layer(
    directory: str | Path,
    layer: int,
    graph: Graph,
    rank: int,
    *,
    device: torch.device | str = "cpu",
    prefix: str | None = None,
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
    prefix: str | None = None,
) -> dict[str, torch.Tensor | Callable[[int], torch.Tensor]]:
    """A layer's world-wide weights for :func:`megagen.ops.reference.evaluate`: tensors of the checkpoint's type, and
    for experts callables that read, and dequantise to fp32, one expert's matrix. Raises WeightError likewise."""
    sources = Checkpoint(directory, prefix=prefix).open(layer, graph)

    def matrix(source: Source, expert: int = 0) -> torch.Tensor:
        found = source.read(expert)
        return (found.dequantise() if isinstance(found, Nvfp4) else found).to(device)

    return {name: partial(matrix, s) if s.weight.experts else matrix(s) for name, s in sources.items()}


def _expected(weight: Weight, tp: int) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """(name below the layer or whole, shape, acceptable types) of a weight's checkpoint tensors.

    Types other than the graph's own are accepted where conversion to what the device holds is exact.
    """
    ranks = tp if weight.shard is Shard.ROWS else 1
    rows = (weight.rows - weight.padding) * ranks
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
    parts = zip(weight.names, weight.parts or (weight.rows - weight.padding,), strict=True)
    return [(part, (*lead, n * ranks, k), types) for part, n in parts]


def _json(path: Path, key: str) -> Any:
    """A mapping under ``key`` of a JSON file; WeightError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightError(f"cannot read {key!r} from {path}: {error!r}") from None
    if not isinstance(value, Mapping):
        raise WeightError(f"{key!r} in {path} is not an object")
    return dict(value)


def _within(file: object) -> bool:
    """Whether a file that an index names is in the checkpoint's directory."""
    if not isinstance(file, str) or not file or "\\" in file or "\0" in file:
        return False
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts
