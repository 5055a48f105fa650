"""A content-addressed store of small folders of files, safe under concurrent processes and crashes.

An entry is complete or absent: it is written to a staging folder, synced, then renamed into place. A manifest of
hashes tells a damaged entry; such a one is moved aside and built anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from megagen.errors import CacheError

VERSION = 1  # of the entries' format and of everything that code here derives from the same inputs
MANIFEST = "manifest.json"


def key(*parts: str | bool | Sequence[str] | Mapping[str, str]) -> str:
    """The name of the entry that these inputs give: sha256 over an unambiguous encoding, 64 hex digits."""
    return sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()


class Cache:
    """Entries below ``root``; every filesystem trouble is a :class:`CacheError` with a way out."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def fetch(self, key: str, build: Callable[[], Mapping[str, bytes]]) -> tuple[Path, bool]:
        """The folder of ``key`` and whether it was there. ``build`` (file name -> content) runs at most once for
        all processes that ask at the same time; what it raises passes through."""
        from filelock import FileLock

        if found := self.get(key):
            return found, True
        path = self.root / "locks" / f"{key}.lock"
        with self._trouble("lock", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path)
            lock.acquire()
        try:
            if found := self.get(key):
                return found, True
            return self.put(key, build()), False
        finally:
            lock.release()

    def get(self, key: str) -> Path | None:
        """The entry's folder if it is there and every file has the hash that the manifest says."""
        entry = self._entry(key)
        with self._trouble("read", entry):
            try:
                manifest = json.loads((entry / MANIFEST).read_text("utf-8"))
                sound = bool(manifest) and all(
                    _hash((entry / f).read_bytes()) == digest for f, digest in manifest.items()
                )
            except (FileNotFoundError, ValueError, AttributeError):
                return None
        return entry if sound else None

    def put(self, key: str, files: Mapping[str, bytes]) -> Path:
        """Write the entry; the caller holds its lock, so what stands in its place is damaged and moves aside."""
        entry, staging = self._entry(key), self.root / "staging" / key
        with self._trouble("write", entry):
            try:
                shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
                staging.mkdir(parents=True)
                for name, data in files.items():
                    _write(staging / name, data)
                hashes = {name: _hash(data) for name, data in files.items()}
                _write(staging / MANIFEST, json.dumps(hashes, indent=1).encode())
                _sync(staging)
                entry.parent.mkdir(parents=True, exist_ok=True)
                if entry.exists():
                    aside = self.root / "quarantine" / f"{key}.{uuid4().hex[:8]}"
                    aside.parent.mkdir(exist_ok=True)
                    entry.rename(aside)
                staging.rename(entry)
                _sync(entry.parent)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        return entry

    def _entry(self, key: str) -> Path:
        return self.root / "entries" / key

    @contextmanager
    def _trouble(self, verb: str, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise CacheError(
                f"cannot {verb} {path} in the cache: {e.strerror or e}",
                hint="set MEGAGEN_CACHE_DIR to a writable folder with free space, or MEGAGEN_CACHE=0 to do without",
            ) from e


def _hash(data: bytes) -> str:
    return sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync(folder: Path) -> None:
    """Make the folder's entries durable: a rename may otherwise outlive a crash that its files did not."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
