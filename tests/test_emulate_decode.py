"""A small checkpoint decoded by two emulated ranks: every launch of a step, several Plans in turn, step after step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megagen.models.muse_spark import tiny
from megagen.runtime import decoder

TP, LAYERS, WINDOW, PROMPT, EMIT = 2, 5, 16, 12, 5
# Full attention and bf16 experts first and last, NVFP4 between, of which two layers in a row run the same Plan.
CONFIG = tiny(TP).model_copy(
    update={"layers": LAYERS, "heads": 8 * TP, "kv_heads": TP, "window": WINDOW, "vocab": 1000}
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers.models.muse_spark")
    from whole_models import write

    folder = tmp_path_factory.mktemp("checkpoint")
    write(CONFIG, folder)
    return folder


@pytest.mark.slow
def test_a_decode_is_transformers(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two chunks and tokens one by one, past the window; no race; the ranks agree on every token."""
    from whole_decode import asked, greedy, judge, prompt
    from whole_models import Reference

    # The libraries come from the cache that all tests share, packed weights are this test's own.
    pack = decoder.pack
    monkeypatch.setattr(decoder, "pack", lambda *given, **more: pack(*given, **{**more, "folder": tmp_path}))
    with decoder.open(checkpoint, tp=TP, live=TP, positions=128, emulate=True, seed=7, race=True) as found:
        assert found.model.names.count("muse_swa") == 2 and len(set(found.model.names)) == LAYERS + 1
        run = greedy(found, prompt(PROMPT, CONFIG.vocab), EMIT)
        assert not [x for plans in found.ranks for rank in plans.values() for x in rank.leftovers()]
        assert found.statistics()["kernels"] == LAYERS + 2
    said = [asked(Reference.load(checkpoint, dtype), [run]) for dtype in (torch.float32, torch.bfloat16)]
    verdict: Any = judge([run], *said)
    assert verdict.far == 0, verdict
    assert verdict.ours <= 1.5 * verdict.theirs and verdict.ours_most <= 2 * verdict.theirs_most, verdict
