"""Placements at random in the emulator, with race checks: the bits of the shipped one, and nothing left behind.

``PLACEMENTS_SEED`` repeats a run; ``python tests/placements.py`` runs more of them.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from placements import SEED, emulate

COUNT = 6


@pytest.mark.parametrize("n", range(COUNT))
def test_a_placement_changes_no_bit(n: int, capsys: Any) -> None:
    """All graphs in turn, fused and unfused, one- and two-shot; a chain, and a tree at the end of the caches."""
    if n == 0:
        with capsys.disabled():
            sys.stderr.write(f"\nplacements 0 to {COUNT - 1} of seed {SEED}\n")
    problem = emulate(SEED, n)
    if problem is not None:
        pytest.fail(problem, pytrace=False)
