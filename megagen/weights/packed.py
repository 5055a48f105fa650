"""Packed weights on disk: one safetensors file a launch and rank, made from a checkpoint once, read at every start.

What a file holds and where is known from the graph, so its header is written first and matrices follow, a few at a
time, each from a rank's slices of the checkpoint to its place. Files appear in one step when they are complete; what is
there is not made again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from rich.progress import Progress

from megagen import files
from megagen.errors import MegagenError, WeightError
from megagen.ir.graph import DType, Graph, Op, Weight
from megagen.ops import packing
from megagen.ops.packing import Tiles, device_scale
from megagen.settings import Settings
from megagen.weights import fast, shards
from megagen.weights.checkpoint import Checkpoint, Source
from megagen.weights.shards import Buffers

VERSION = 2  # of the layouts that ops/packing.py describes, of what ops make of vectors, and of the files
BATCH = 4 << 20  # bytes that a job reads at once, if a row of ring stages is not more
JOBS = 8  # at a time, at most, each reading, packing or writing; else one more than there are cores
ALIGN = 4096  # of the first tensor in a file
STAGING = 64 << 20  # bytes of pinned memory, twice, between file and GPU
SPACE = "free some, or give another folder (MEGAGEN_CACHE_DIR says where packed weights are kept by default)"


@dataclass(frozen=True)
class Part:
    """One launch's weights: ``layer`` is the launch's number, -1 for the one before layer 0; ``next_layer`` weights
    come from the layer after it."""

    layer: int
    graph: Graph


@dataclass(frozen=True)
class Place:
    """A tensor in a packed file: safetensors type, shape, first byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * shards.SIZES[self.dtype]


@dataclass(frozen=True)
class _File:
    """A packed file as it must be: its path, what it begins with, and where its tensors are."""

    path: Path
    header: bytes
    places: Mapping[str, Place]

    @cached_property
    def bytes(self) -> int:
        return max(p.offset + p.bytes for p in self.places.values())

    def sound(self) -> bool:
        """Whether it is there, whole, and begins as it must. What its tensors hold is not read."""
        try:
            with self.path.open("rb") as f:
                return self.path.stat().st_size == self.bytes and f.read(len(self.header)) == self.header
        except OSError:
            return False


@dataclass(frozen=True)
class Packed:
    """Packed weights of a rank on disk, complete. ``folder`` holds nothing else but what other launches of the same
    checkpoint and rank need."""

    parts: tuple[Part, ...]
    folder: Path
    files: tuple[_File, ...]

    @property
    def bytes(self) -> int:
        """Of all launches together, as on disk and on the device."""
        return sum(f.bytes for f in self.files)

    def load(self, index: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Weights of ``parts[index]`` by kernel parameter, as :func:`megagen.ops.packing.pack_weight` makes them, one
        tensor after the other to ``device``. Raises WeightError if the file is not there any more or damaged."""
        file, out, device = self.files[index], {}, torch.device(device)
        if not file.sound():
            raise WeightError(f"{file.path} is gone or damaged", hint="pack again: what is whole is kept")
        try:
            with file.path.open("rb", buffering=0) as f:
                for name, place in file.places.items():
                    flat = torch.empty(place.bytes, dtype=torch.uint8, device=device)
                    _read(f, place.offset, flat)
                    out[name] = flat.view(shards.TYPES[place.dtype]).view(place.shape)
        except OSError as error:
            raise WeightError(f"cannot read {file.path}: {error.strerror or error}") from None
        return out


class Bar(Protocol):
    """What is needed of rich's Progress."""

    def add_task(self, description: str, *, total: float | None) -> Any: ...
    def advance(self, task: Any, advance: float, /) -> object: ...


def pack(
    directory: str | Path,
    parts: Sequence[Part],
    *,
    rank: int,
    folder: Path | None = None,
    device: torch.device | str = "cpu",
    progress: Bar | None = None,
) -> Packed:
    """``rank``'s weights of all ``parts``, packed below ``folder``; what is there already is kept.

    The whole checkpoint is checked before anything is packed. ``device`` packs. ``progress`` gets one task that counts
    bytes. Callers may run at the same time, for the same rank too: a file is made by one of them. ``folder``: by
    default "weights" in the cache. Raises WeightError as :meth:`Checkpoint.open` does, for content that the device
    cannot represent, for a file that is damaged or changes meanwhile, and where there is no space.
    """
    tps = {part.graph.tp for part in parts}
    if len(tps) != 1 or not 0 <= rank < min(tps):
        raise WeightError(f"rank {rank} of tp={', '.join(map(str, sorted(tps)))}")
    if folder is None:
        settings = Settings.from_env()
        if not settings.cache:
            raise WeightError(
                "packed weights are kept in the cache, and MEGAGEN_CACHE=0", hint="set it to 1, or give a folder"
            )
        folder = settings.cache_dir / "weights"
    checkpoint = Checkpoint(directory)
    opened = [checkpoint.open(part.layer, part.graph) for part in parts]
    made_from = {"version": VERSION, "checkpoint": checkpoint.identity()}
    key = _digest(made_from)
    own = folder / key / f"rank{rank}of{min(tps)}"
    packed = Packed(tuple(parts), own, tuple(_file(own, key, part, rank) for part in parts))
    bar: Bar = progress or Progress(disable=True)
    task = bar.add_task(f"weights of rank {rank}", total=packed.bytes)
    try:
        (own / "locks").mkdir(parents=True, exist_ok=True)
        manifest = {"directory": str(checkpoint.directory.absolute()), **made_from}
        if not (folder / key / "manifest.json").is_file():
            files.write(folder / key / "manifest.json", json.dumps(manifest, indent=1))
        _foresee(list({f.path: f for f in packed.files if not f.sound()}.values()))
        device, advance = _own(device), partial(bar.advance, task)
        buffers = Buffers(device.type == "cuda")
        with ThreadPoolExecutor(min(JOBS, len(os.sched_getaffinity(0)) + 1), "pack") as pool:
            for part, sources, file in zip(parts, opened, packed.files, strict=True):
                with _lock(file):
                    if file.sound():
                        advance(file.bytes)
                        continue
                    _clean(file)
                    write = _Writer(part.graph, sources, file, rank, device, advance, pool, buffers)
                    files.write(file.path, write.run)
    except WeightError:
        raise
    except (MegagenError, OSError) as error:
        raise WeightError(f"cannot pack weights: {error}", hint=SPACE) from error
    return packed


class _Writer:
    """Writes one file: jobs of a few matrices or rows each, several at a time."""

    def __init__(
        self,
        graph: Graph,
        sources: Mapping[str, Source],
        file: _File,
        rank: int,
        device: torch.device,
        advance: Callable[[int], object],
        pool: ThreadPoolExecutor,
        buffers: Buffers,
    ) -> None:
        self.graph, self.sources, self.file, self.rank, self.device = graph, sources, file, rank, device
        self.advance = advance  # is told of bytes that are done
        self.pinned = device.type == "cuda"
        self.pool, self.buffers = pool, buffers

    def run(self, out: IO[bytes]) -> None:
        """Fill the file."""
        self.fd = out.fileno()
        os.ftruncate(self.fd, self.file.bytes)
        self._write(0, self.file.header)
        self.advance(self.file.bytes - sum(p.bytes for p in self.file.places.values()))
        jobs = [self.pool.submit(self._job, job) for job in self._jobs()]
        try:
            for job in jobs:
                self.advance(job.result())
        finally:
            for job in jobs:
                job.cancel()
            wait(jobs)
        for shard in {t.shard for s in self.sources.values() for t in s.tensors}:
            shard.unchanged()

    def _job(self, job: Callable[[], int]) -> int:
        with torch.cuda.stream(torch.cuda.Stream(self.device)) if self.pinned else nullcontext():
            return job()

    def _jobs(self) -> Iterator[Callable[[], int]]:
        for op, port, w in _weights(self.graph):
            source = self.sources[w.name]
            if stage := _stage(op, w):
                if w.dtype is DType.NVFP4:
                    yield partial(self._scale, source)
                tiles = Tiles.of(w, *stage)
                groups = w.rows // tiles.stage_rows
                band = max(1, BATCH * groups // tiles.bytes)  # row groups at a time
                many = max(1, BATCH // tiles.bytes)
                for first in range(0, max(1, w.experts), many):
                    experts = range(first, min(first + many, max(1, w.experts)))
                    for group in range(0, groups, band):
                        some = range(group, min(group + band, groups))
                        yield partial(self._tiles, source, tiles, experts, some)
            elif w.k > 1:
                band = max(1, BATCH * w.rows // w.bytes)
                for row in range(0, w.rows, band):
                    rows = range(row, min(row + band, w.rows))
                    yield partial(self._rows, source, rows)
            else:
                yield partial(self._vector, source, op, port)

    def _vector(self, source: Source, op: Op, port: str) -> int:
        value = source.read(rank=self.rank)
        assert isinstance(value, torch.Tensor)
        return self._tensor(source.weight.name, op.pack_vector(port, value))

    def _scale(self, source: Source) -> int:
        return self._tensor(f"{source.weight.name}_scale", device_scale(source.scale_2()))

    def _tensor(self, name: str, value: torch.Tensor) -> int:
        place = self.file.places[name]
        data = value.contiguous().view(torch.uint8).numpy()
        if data.nbytes != place.bytes:
            raise WeightError(f"{name} is {data.nbytes} bytes, expected {place.bytes}")
        return self._write(place.offset, data)

    def _rows(self, source: Source, rows: range) -> int:
        w, place = source.weight, self.file.places[source.weight.name]
        (some,) = source.band(self.rank, range(1), [rows], self.buffers)
        matrix = some[0].float() if w.dtype is DType.FP32 else some[0]
        try:
            fast.finite(matrix)
        except WeightError as error:
            raise WeightError(f"{w.name}: {error.message}") from None
        return self._write(place.offset + rows.start * place.bytes // w.rows, matrix.view(torch.uint8).numpy())

    def _tiles(self, source: Source, whole: Tiles, experts: range, groups: range) -> int:
        """Row groups of some matrices: of an expert they lie together, of a dense matrix in each chunk of K."""
        w, place = source.weight, self.file.places[source.weight.name]
        halves = 2 if w.gate_up else 1
        n = whole.stage_rows // halves
        rows = [
            range(h * w.rows // halves + groups.start * n, h * w.rows // halves + groups.stop * n)
            for h in range(halves)
        ]
        tiles = Tiles(
            len(groups) * whole.stage_rows, w.k, whole.stage_rows, whole.stage_k, w.dtype, w.gate_up, whole.chunk_major
        )
        planes = source.band(self.rank, experts, rows, self.buffers)
        stretch = whole.bytes // (w.k // whole.stage_k) if whole.chunk_major else whole.bytes
        group = stretch // (w.rows // whole.stage_rows)
        done = 0
        for expert, *matrix in zip(experts, *planes, strict=True):
            try:
                data = self._pack(tiles, matrix)
            except WeightError as error:
                raise WeightError(f"{w.name}, matrix {expert}: {error.message}", hint=error.hint) from None
            at = place.offset + expert * whole.bytes + groups.start * group
            step = len(groups) * group
            for i in range(0, tiles.bytes, step):
                done += self._write(at + i // step * stretch, data[i : i + step])
        return done

    def _pack(self, tiles: Tiles, matrix: Sequence[torch.Tensor]) -> Any:
        if tiles.dtype is DType.FP32:
            matrix = [matrix[0].float()]
        if not self.pinned:
            if tiles.dtype is DType.NVFP4:
                return fast.pack_nvfp4(tiles, matrix[0], matrix[1], self.buffers)
            return fast.pack_dense(tiles, matrix[0], self.buffers)
        moved = [m.to(self.device, non_blocking=True) for m in matrix]
        made = (packing.pack_nvfp4 if tiles.dtype is DType.NVFP4 else packing.pack_dense)(tiles, *moved)
        data = self.buffers("packed", tiles.bytes)
        torch.from_numpy(data).copy_(made, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return data

    def _write(self, at: int, data: Any) -> int:
        view = memoryview(data).cast("B")
        n = len(view)
        while view:
            done = os.pwrite(self.fd, view, at)
            view, at = view[done:], at + done
        return n


def _own(device: torch.device | str) -> torch.device:
    """The device with its number: "cuda" is the caller's current GPU, but another one in another thread."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


def _weights(graph: Graph) -> list[tuple[Op, str, Weight]]:
    """Each weight once, with an op that has it and its port."""
    return list({w.name: (op, port, w) for op in graph.ops for port, w in op.weights.items()}.values())


def _stage(op: Op, weight: Weight) -> tuple[int, int] | None:
    stage = op.stage()
    return (stage["rows"], stage["k"]) if stage is not None and weight.k > 1 else None


def _file(folder: Path, key: str, part: Part, rank: int) -> _File:
    """The largest tensors come first, so that all begin at multiples of what a bulk copy needs."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    made_from: list[object] = [part.layer]
    for op, port, w in _weights(part.graph):
        stage = _stage(op, w)
        made_from += [w.model_dump(mode="json"), stage]
        if stage is not None:
            tensors[w.name] = "U8", (w.bytes,)
            if w.dtype is DType.NVFP4:
                tensors[f"{w.name}_scale"] = "F32", (w.experts, 2 if w.gate_up else 1)
        elif w.k > 1:
            tensors[w.name] = ("BF16" if w.dtype is DType.BF16 else "F32"), (w.rows, w.k)
        else:
            tensors[w.name] = "F32", (w.planes * w.rows,)
            made_from += [op.kind, port, op.model_dump(mode="json", exclude={"name", "inputs", "outputs", "weights"})]
    digest = _digest(made_from)
    sizes = {name: prod(shape) * shards.SIZES[dtype] for name, (dtype, shape) in tensors.items()}
    tensors = {name: tensors[name] for name in sorted(tensors, key=lambda name: (-sizes[name], name))}
    metadata = {
        "format": "pt", "megagen": str(VERSION), "checkpoint": key, "weights": digest, "layer": str(part.layer),
        "rank": f"{rank} of {part.graph.tp}",
    }  # fmt: skip
    header = shards.header(tensors, metadata, ALIGN)
    places, at = {}, len(header)
    for name, (dtype, shape) in tensors.items():
        places[name] = Place(dtype, shape, at)
        at += sizes[name]
    return _File(folder / f"launch{part.layer + 1:03}-{digest[:16]}.safetensors", header, places)


def _digest(made_from: object) -> str:
    return sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]


def _lock(file: _File, timeout: float = -1) -> Any:
    from filelock import FileLock

    return FileLock(file.path.parent / "locks" / f"{file.path.stem}.lock", timeout=timeout)


def _clean(file: _File) -> None:
    """Remove what is damaged and what a process that was killed left; the caller holds the lock."""
    for path in (file.path, *file.path.parent.glob(f".{file.path.name}.*")):
        path.unlink(missing_ok=True)


def _foresee(missing: Sequence[_File]) -> None:
    """Raises WeightError if there is no space for what is missing."""
    from filelock import Timeout

    for file in missing:
        with suppress(Timeout), _lock(file, timeout=0):
            if not file.sound():
                _clean(file)
    need = sum(f.bytes for f in missing)
    if missing and need > (free := shutil.disk_usage(missing[0].path.parent).free):
        raise WeightError(
            f"{missing[0].path.parent} has {free / 1e9:.1f} GB of space, packed weights need {need / 1e9:.1f} GB more",
            hint=SPACE,
        )


def _read(f: IO[bytes], offset: int, flat: torch.Tensor) -> None:
    """Fill uint8 ``flat`` from the file; on a GPU by two pinned buffers: one is read into while the other is sent."""
    if flat.device.type != "cuda":
        return _exactly(f, offset, flat)
    buffers = [torch.empty(min(STAGING, len(flat)), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    sent: list[torch.cuda.Event | None] = [None, None]
    stream = torch.cuda.current_stream(flat.device)
    for i, begin in enumerate(range(0, len(flat), STAGING)):
        if event := sent[i % 2]:
            event.synchronize()
        some = flat[begin : begin + STAGING]
        host = buffers[i % 2][: len(some)]
        _exactly(f, offset + begin, host)
        some.copy_(host, non_blocking=True)
        sent[i % 2] = stream.record_event()
    return stream.synchronize()


def _exactly(f: IO[bytes], offset: int, host: torch.Tensor) -> None:
    view = memoryview(host.numpy().data) if len(host) else memoryview(b"")
    while view:
        n = os.preadv(f.fileno(), [view], offset)
        if not n:
            raise OSError("it ends early")
        view, offset = view[n:], offset + n
