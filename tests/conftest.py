"""Shared by all tests: where things are, how they spread over workers, and what needs a GPU."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import pytest

pytest_plugins = ("megagen.testing",)

ROOT = Path(__file__).resolve().parent.parent
GROWTH = 1 << 30  # bytes of memory after which what is left of tests is looked for
_memory = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the suite's compiled kernels in the checkout, out of the user's cache; workers inherit this."""
    os.environ.setdefault("MEGAGEN_CACHE_DIR", str(ROOT / ".cache" / "megagen"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Worlds and their ranks refer to each other, and so few objects do not wake the collector, however large."""
    used = _resident()
    if used > item.config.stash.get(_memory, 0) + GROWTH:
        gc.collect()
        item.config.stash[_memory] = _resident()


def _resident() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests share a worker, for its fixtures; all GPU tests share one, for the GPU's memory and clocks."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    for item in items:
        item.add_marker(pytest.mark.xdist_group("gpu" if item.get_closest_marker("gpu") else item.path.stem))
    reason = _no_gpu() if gpu else None
    if reason:
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


def _no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    from megagen.errors import DeviceError
    from megagen.runtime.driver import require_torch

    try:
        require_torch(0)
    except DeviceError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT
