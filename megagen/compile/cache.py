"""A content-addressed store of small folders of files, safe under concurrent processes and crashes.

An entry is complete or absent: it is written to a staging folder, synced, then renamed into place. A manifest of
hashes tells a damaged entry; such a one is moved aside and built anew. Of what is there only to be looked at
(``failed``, ``quarantine``) the newest few stay.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from megagen.errors import CacheError

VERSION = 2  # of the entries' format and of everything that code here derives from the same inputs
MANIFEST = "manifest.json"
SHELVES = ("failed", "quarantine")
KEPT = 20  # a shelf
STALE = 24 * 3600.0  # seconds; nobody writes an entry for that long


def key(*parts: str | bool | Sequence[str] | Mapping[str, str]) -> str:
    """The name of the entry that these inputs give: sha256 over an unambiguous encoding, 64 hex digits.

    Emitted source comes without its ``//`` comments: they cite lines of the schedule, which move when nothing that
    is compiled does.
    """
    return sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()


class Cache:
    """Entries below ``root``; every filesystem trouble is a :class:`CacheError` with a way out."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def fetch(
        self, key: str, build: Callable[[], Mapping[str, bytes]], files: Collection[str] = ()
    ) -> tuple[Path, bool]:
        """The folder of ``key`` and whether it was there, with all of ``files``. ``build`` (file name -> content)
        runs at most once for all processes that ask at the same time; what it raises passes through."""
        from filelock import FileLock

        if found := self.get(key, files):
            return found, True
        path = self.root / "locks" / f"{key}.lock"
        with self._trouble("lock", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path)
            lock.acquire()
        try:
            if found := self.get(key, files):
                return found, True
            return self.put(key, build()), False
        finally:
            lock.release()

    def get(self, key: str, files: Collection[str] = ()) -> Path | None:
        """The entry's folder if it is there, lists ``files``, and every file has the hash that its manifest says."""
        entry = self._entry(key)
        with self._trouble("read", entry):
            try:
                manifest = json.loads((entry / MANIFEST).read_text("utf-8"))
                sound = (
                    bool(manifest)
                    and manifest.keys() >= {*files}
                    and all(_hash((entry / f).read_bytes()) == digest for f, digest in manifest.items())
                )
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError, AttributeError):
                return None
        return entry if sound else None

    def put(self, key: str, files: Mapping[str, bytes]) -> Path:
        """Write the entry; the caller holds its lock, so what stands in its place is damaged and moves aside."""
        entry, staging = self._entry(key), self.root / "staging" / key
        with self._trouble("write", entry):
            try:
                self.trim()
                _remove(staging)  # of a process that was killed
                staging.mkdir(parents=True)
                for name, data in files.items():
                    _write(staging / name, data)
                hashes = {name: _hash(data) for name, data in files.items()}
                _write(staging / MANIFEST, json.dumps(hashes, indent=1).encode())
                _sync(staging)
                entry.parent.mkdir(parents=True, exist_ok=True)
                if os.path.lexists(entry):
                    aside = self.root / "quarantine" / f"{key}.{uuid4().hex[:8]}"
                    aside.parent.mkdir(exist_ok=True)
                    entry.rename(aside)
                    os.utime(aside, follow_symlinks=False)  # its age on the shelf
                    self.trim()
                staging.rename(entry)
                _sync(entry.parent)
            finally:
                _remove(staging)
        return entry

    def trim(self) -> None:
        """Remove all but the newest of what failed or was damaged, and staging folders of processes long dead.

        Housekeeping: what cannot be removed stays.
        """
        for shelf in SHELVES:
            for _, path in sorted(_ages(self.root / shelf))[KEPT:]:
                _remove(path)
        for age, path in _ages(self.root / "staging"):
            if age > STALE:
                _remove(path)

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


def _ages(folder: Path) -> Iterator[tuple[float, Path]]:
    """What is in the folder, with the seconds since it last changed."""
    now = time.time()
    with suppress(OSError):
        for path in list(folder.iterdir()):
            with suppress(OSError):  # others trim too
                yield now - path.lstat().st_mtime, path


def _remove(path: Path) -> None:
    """Remove a file or folder, if it can be."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


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
