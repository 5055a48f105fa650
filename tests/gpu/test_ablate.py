"""``bench --ablate`` and ``--sweep`` on a GPU, with few rounds: they run, agree to the bit, and are plausible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megagen.cli import main

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
BLOCK, LAYER = ROOT / "schedules" / "muse_moe.py", ROOT / "schedules" / "muse_swa.py"


def bench(*args: object) -> dict[str, Any]:
    result = CliRunner().invoke(main.app, ["bench", *map(str, args), "--rounds", "5", "--json"])
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_two_choices_of_the_block() -> None:
    """The second one's baseline is the default without its trick, and what the checker refuses is told."""
    found = bench(BLOCK, "--ablate", "--from-off", "--only", "early_trigger", "--only", "sync")
    changes = {(r["choice"], r["value"]): r for r in found["changes"]}
    assert list(changes) == [
        (None, None), ("early_trigger", "True"), ("sync", "counter"), ("sync", "cluster"), ("sync", "flag")
    ]  # fmt: skip
    assert changes["sync", "cluster"]["refused"]
    timed = [r for r in (*found["changes"], *found["alone_on"]) if r["refused"] is None]
    assert len(timed) == 4 + 2
    assert all(20 < r["us"] < 1000 for r in timed)
    for r in timed:
        assert (r["effect_us"] is None) == (r["choice"] is None)
        if r["effect_us"] is not None:
            assert r["p10_us"] <= r["effect_us"] <= r["p90_us"]
    assert changes["sync", "flag"]["effect_us"] > 0, "fences cost time"


def test_a_choice_of_the_layer() -> None:
    """With caches, from which other bits would come if replays did not begin alike."""
    found = bench(LAYER, "--ablate", "--only", "early_trigger", "--context", "1000")
    assert [r["refused"] for r in found["changes"]] == [None, None]


@pytest.mark.parametrize("sweep", ["experts=8,49,113", "tokens=1,4,16"])
def test_a_sweep_of_the_layer(sweep: str) -> None:
    found = bench(LAYER, "--sweep", sweep)
    times = [f["value"] for f in found["figures"]]
    assert times == sorted(times), "more bytes take longer"
    assert all(f["floor"] < f["value"] for f in found["figures"]), "faster than HBM"
    line = found["fit"]
    assert 0 < line["a_us"] < times[0]
    assert 0.2 < line["hbm_share"] < 1.1
    assert line["worst_percent"] < 20
