"""What a layer asks L2 for ahead of time, guesses among it, changes no bit, whatever was guessed."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu

AHEAD = (
    {"next_keys": "combine"},
    {"experts_guess": "4"},
    {"experts_guess": "8", "next_keys": "residual", "warm_code": "16"},
)


@pytest.mark.parametrize("choices", AHEAD, ids=str)
def test_no_bit_changes(layers: Any, choices: dict[str, str]) -> None:
    import torch

    from megagen.bench.routes import Draws
    from megagen.runtime.step import Step

    usual, ahead = (layers.verifier(layers.session(c)) for c in ({}, choices))
    drawn = Draws(49, 16, 8, pool=256, top=8, guessed=0.5)
    for sample in range(6):
        inputs = usual.inputs(16, sample, Step.chain(16, 700 * sample))
        table = None if sample == 4 else drawn[sample]
        wanted, found = (v.launch(inputs, table, launches=1 + sample % 3) for v in (usual, ahead))
        for name, x in found.items():
            assert torch.equal(*(y.contiguous().view(torch.uint8) for y in (x, wanted[name]))), (sample, name)
