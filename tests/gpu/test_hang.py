"""A wait that nothing ends is reported in time, by name, and the GPU stays usable."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megagen.errors import HangError
from megagen.runtime.hang import HangRecord, State

pytestmark = pytest.mark.gpu

BROKEN = ("pooled", "expert_mid", "combined")  # channels whose first tile is dropped: two exchanges, one local


@pytest.mark.parametrize("channel", BROKEN)
def test_a_broken_wait_names_its_edge_and_the_next_launch_works(rig: Any, usual: Any, channel: str) -> None:
    import torch

    session = rig.session(fault=channel)
    plan, verifier = session.plan, rig.verifier(session)
    rows = torch.randn(16, verifier.stream.shape[1], device=session.device)
    want = usual.launch(rows)["stream_out"]

    start = time.monotonic()
    with pytest.raises(HangError) as caught:
        verifier.launch(rows)
    assert time.monotonic() - start < 3

    error, record = caught.value, caught.value.record
    assert isinstance(record, HangRecord)
    assert record.state in (State.EXPIRED, State.WOKEN)  # whichever wait began first ran out
    edge = plan.channel(channel)
    # The first to give up may wait further down the chain, but who waits for the broken edge is reported too.
    told = error.message + "".join(note for note, _ in error.notes)
    assert f"channel '{channel}'" in told
    assert any(f"{r.op}." in told for r in edge.readers)
    assert 0 <= record.block < plan.launch.blocks
    assert 0 <= record.warp < plan.launch.warps
    for part in (f"warp {record.warp}", f"SM {record.sm}", f"slot {record.slot}", f"phase {record.phase}", "rank 0"):
        assert part in error.message
    assert error.loc is not None
    assert error.loc.file.endswith("muse_moe.py")
    assert error.loc.line > 0

    start = time.monotonic()
    session.launch(verifier.layer)
    with pytest.raises(HangError):  # the abort is sticky: no second time-out
        session.synchronize()
    assert time.monotonic() - start < 0.5

    got = usual.launch(rows)["stream_out"]
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    session.recover()
    session.synchronize()  # nothing pending, nothing aborted


def test_recover_makes_the_same_session_work_again(usual: Any) -> None:
    """An abort word set from outside, as a dying peer would, then a fresh heap."""
    import torch

    session = usual.session
    rows = torch.randn(16, usual.stream.shape[1], device=session.device)
    want = usual.launch(rows)["stream_out"]
    at = session.plan.heap.abort_offset
    session.heap[at : at + 4].view(torch.int32).fill_(1)
    session.poison()
    session.launch(usual.layer)
    with pytest.raises(HangError, match="block 0, warp 0"):
        session.synchronize()
    session.recover()
    got = usual.launch(rows)["stream_out"]
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    assert not session.leftovers()
