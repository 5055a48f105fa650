"""Many launches: no hang, no wrong bit, no slot left over."""

from __future__ import annotations

from typing import Any

import pytest

from megagen.bench.routes import routes

pytestmark = pytest.mark.gpu

COUNTS = (16, 1, 7, 8, 2, 15)


def bits(x: Any) -> Any:
    import torch

    return x.view(torch.int32)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_a_thousand_launches(rig: Any, fused: bool) -> None:
    """Token counts and routes change from launch to launch; each output is compared on the device, without a pause."""
    import torch

    verifier = rig.verifier(rig.session(fused=fused))
    session, layer = verifier.session, verifier.layer
    cases = [(n, routes(min(49, 8 * n), n, seed=n)) for n in COUNTS]
    rows = torch.randn(16, verifier.stream.shape[1], device=session.device)
    want = [verifier.launch(rows[:n], table)["stream_out"] for n, table in cases]
    verifier.stream.copy_(rows)
    tables = [table.to(session.device) for _, table in cases]
    session.recover()
    wrong = torch.zeros((), dtype=torch.int64, device=session.device)
    out = session.outputs["stream_out"]
    for i in range(1000):
        case = i % len(cases)
        session.poison()
        session.set_tokens(COUNTS[case])
        session.set_route_override(tables[case])
        session.launch(layer)
        wrong += (bits(out[: COUNTS[case]]) != bits(want[case])).sum()
    session.synchronize()
    assert int(wrong) == 0
    assert session.epoch() == 1000
    assert not [str(x) for x in session.leftovers()]


def test_62_blocks_in_a_graph(rig: Any, usual: Any) -> None:
    """A model's depth of blocks, each reading what the one before wrote, equal to the same blocks one by one."""
    import torch

    session = usual.session
    weights = [rig.usual[0], *(rig.weights(seed)[0] for seed in (1, 2, 3))]
    shape = usual.stream.shape
    first = torch.randn(shape, device=session.device)
    buffers = [torch.empty(shape, device=session.device) for _ in range(2)]

    def bind(i: int) -> Any:
        return session.bind({**weights[i % 4], "stream": buffers[i % 2], "stream_out": buffers[(i + 1) % 2]})

    layers = [bind(i) for i in range(62)]
    session.set_tokens(16)
    session.set_route_override(None)
    session.recover()
    buffers[0].copy_(first)
    for layer in layers:
        session.launch(layer)
        session.synchronize()
    want = buffers[0].clone()
    assert want.isfinite().all()
    assert not torch.equal(want, first)
    graph = session.capture(layers)
    session.recover()
    for _ in range(20):
        buffers[0].copy_(first)
        graph.replay()
        session.synchronize()
        assert torch.equal(bits(buffers[0]), bits(want))
    assert session.epoch() == 20 * 62
    assert not [str(x) for x in session.leftovers()]
