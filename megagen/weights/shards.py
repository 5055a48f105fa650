"""safetensors files, read a stretch at a time: eight bytes that give the header's length, a JSON header, raw tensors.

Nothing is mapped into memory, so a file that shrinks while it is read is an error and no fault, and nothing stays
resident that was read once.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagen.errors import WeightError

MOST_HEADER = 100_000_000  # bytes; more than that no writer makes
SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
NARROW = 1024  # bytes of a row: of less than that, whole rows are read and cut
SCRATCH = 1 << 22
HINT = "the file is damaged or its download was cut short: fetch it again"

Array = np.ndarray[Any, Any]
Buffer = Callable[[str, int], Array]  # uint8 of a size, for a purpose: fresh or Buffers


def fresh(name: str, size: int) -> Array:
    """uint8 [size] that nobody else has."""
    return np.empty(size, np.uint8)


class Buffers(threading.local):
    """uint8 arrays that a thread uses again: what it got under a name is what it gets under it next. Fresh memory costs
    as much as packing does, by its page faults, and each thread's heap keeps some. ``pinned``: for a GPU to copy."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.held: dict[str, Array] = {}

    def __call__(self, name: str, size: int) -> Array:
        if name not in self.held or len(self.held[name]) < size:
            self.held[name] = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned).numpy()
        return self.held[name][:size]


@dataclass(frozen=True)
class Stored:
    """A tensor of a shard, not read yet: ``dtype`` by its safetensors name, ``offset`` bytes from the file's begin."""

    shard: Shard
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def rows(self) -> int:
        return self.shape[-1] if len(self.shape) == 1 else self.shape[-2]

    @property
    def row_bytes(self) -> int:
        return SIZES[self.dtype] * (1 if len(self.shape) == 1 else self.shape[-1])

    def fill(self, out: Array, matrix: int, row: int, column: int = 0, buffer: Buffer = fresh) -> None:
        """Read into ``out`` uint8 [matrices, rows, bytes]: from ``matrix``, ``row`` and byte ``column`` of the row on.
        Raises WeightError if the file cannot be read or ends early."""
        width = self.row_bytes
        for i, rows in enumerate(out):
            at = self.offset + ((matrix + i) * self.rows + row) * width + column
            if rows.shape[1] == width:
                self.shard.read(at, rows)
            elif rows.shape[1] >= NARROW:
                for j, one in enumerate(rows):
                    self.shard.read(at + j * width, one)
            else:
                step = max(1, SCRATCH // width)
                scratch = buffer("rows", min(step, len(rows)) * width).reshape(-1, width)
                for j in range(0, len(rows), step):
                    some = scratch[: len(rows) - j]
                    self.shard.read(at - column + j * width, some)
                    rows[j : j + step] = some[:, column : column + rows.shape[1]]

    def whole(self) -> torch.Tensor:
        """All of it."""
        out = torch.empty(prod(self.shape) * SIZES[self.dtype], dtype=torch.uint8)
        self.shard.read(self.offset, out.numpy())
        return out.view(TYPES[self.dtype]).view(self.shape)


class Shard:
    """A file whose header was read and found to describe it. Raises WeightError that names the file if it does not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise WeightError(f"cannot read {path}: it is no file")
            self._fd = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._fd)
            self._stat = self._state()
        except (OSError, ValueError) as error:
            raise WeightError(f"cannot read {path}: {error}", hint="is the checkpoint complete?") from None
        self.tensors = self._tensors()

    def _state(self) -> tuple[int, int, int]:
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns, found.st_ino

    def _tensors(self) -> dict[str, Stored]:
        size = self._stat[0]
        if size < 8:
            raise self._damaged(f"it has {size} bytes")
        length = int.from_bytes(self._bytes(0, 8), "little")
        if length > min(size - 8, MOST_HEADER):
            raise self._damaged(f"its header would be {length} bytes, the file has {size}")
        try:
            header = json.loads(self._bytes(8, length), object_pairs_hook=_no_doubles)
            header.pop("__metadata__", None)
            found = [self._stored(name, entry) for name, entry in header.items()]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._damaged(f"its header cannot be understood ({type(error).__name__}: {error})") from None
        end = 0
        for begin, stop, stored in sorted(found, key=lambda f: f[:2]):
            if begin != end:
                raise self._damaged(f"{stored.name} begins at byte {begin} of the data, what is before ends at {end}")
            end = stop
        if 8 + length + end != size:
            raise self._damaged(f"by its header it has {8 + length + end} bytes, the file has {size}")
        base = 8 + length
        return {s.name: Stored(self, s.name, s.dtype, s.shape, base + begin) for begin, _, s in found}

    def _stored(self, name: str, entry: Mapping[str, Any]) -> tuple[int, int, Stored]:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if type(dtype) is not str or any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
            raise ValueError(f"{name} is no tensor")
        if end < begin or (dtype in SIZES and prod(shape) * SIZES[dtype] != end - begin):
            raise ValueError(f"{name}: {end - begin} bytes are not {dtype} {list(shape)}")
        return begin, end, Stored(self, name, dtype, shape, begin)

    def _damaged(self, what: str) -> WeightError:
        return WeightError(f"cannot read {self.path}: {what}", hint=HINT)

    def _bytes(self, at: int, length: int) -> bytes:
        out = np.empty(length, np.uint8)
        self.read(at, out)
        return out.tobytes()

    def read(self, at: int, out: Array) -> None:
        """Fill ``out``, contiguous uint8, with the bytes from ``at`` on."""
        view = memoryview(out.data).cast("B") if out.size else memoryview(b"")
        while view:
            try:
                n = os.preadv(self._fd, [view], at)
            except OSError as error:
                raise WeightError(f"cannot read {self.path} at byte {at}: {error.strerror or error}") from None
            if not n:
                raise self._damaged(f"it ends at byte {at}")
            view, at = view[n:], at + n

    def unchanged(self) -> None:
        """Raises WeightError if the file is another than when it was opened."""
        try:
            same = self._state() == self._stat
        except OSError:
            same = False
        if not same:
            raise WeightError(f"{self.path} changed while it was read", hint="start again when it is complete")


def identity(path: Path) -> list[Any]:
    """What tells a file from another without reading it all: size, time of change, a hash of its header; [] if there is
    none. What a damaged file has of a header counts."""
    try:
        found = path.stat()
        with path.open("rb") as f:
            first = f.read(8)
            length = int.from_bytes(first, "little")
            header = f.read(length) if length <= min(found.st_size, MOST_HEADER) else b""
    except (OSError, ValueError):
        return []
    return [found.st_size, found.st_mtime_ns, sha256(first + header).hexdigest()]


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], align: int) -> bytes:
    """What a file with these tensors (name -> safetensors type, shape), in this order, begins with; the data behind it
    begins at a multiple of ``align``."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found
