"""The emulated layer against transformers' own decoder layer: what the reference says is not taken on trust."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("tp", [1, 8])
def test_transformers_own_layer(emulate: Any, tp: int) -> None:
    pytest.importorskip("transformers.models.muse_spark")
    from transformers_layer import compare, whole_layer

    from megagen.weights.random import random_layer, world_env

    kernel = emulate("muse_swa.py", ranks=1, tp=tp, seed=tp)
    graph = kernel.verifier.graph
    first, second = whole_layer(graph, kernel.verifier.env, world_env([random_layer(graph, 1)]), "cpu")
    compare(kernel.verifier, first, second, [(20, False), (140, True)])
