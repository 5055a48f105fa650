"""The layer at full size against transformers' own decoder layer, which has the weights of the whole TP8 group."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def test_transformers_own_layer(layers: Any) -> None:
    """In fp32 its experts take 51 GB."""
    pytest.importorskip("transformers.models.muse_spark")
    from transformers_layer import compare, whole_layer

    verifier = layers.verifier(layers.session())
    first, second = whole_layer(layers.graph, layers.usual[1], layers.weights(1)[1], verifier.session.device)
    compare(verifier, first, second, [(100, False), (100, True), (2047, False), (2049, True)])
