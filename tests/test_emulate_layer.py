"""The shipped schedule, tiny, in the emulator: right on every rank, and a broken wait is found by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megagen.emulate.engine import Expire
from megagen.errors import EmulationError, HangError
from megagen.ir.plan import Plan


def dropped(channel: str) -> Callable[[Plan], Plan]:
    """Of this channel, the first tile is never sent."""

    def edit(plan: Plan) -> Plan:
        channels = tuple(c.model_copy(update={"fault": c.name == channel}) for c in plan.channels)
        return plan.model_copy(update={"channels": channels})

    return edit


def test_two_ranks_agree_with_the_reference(emulate: Any) -> None:
    kernel = emulate("muse_moe.py", ranks=2, seed=3)
    found = {c.name: c for c in kernel.check(tokens=5, launches=2)}
    assert {"pooled", "expert_mid", "expert_out", "unpooled", "stream_out"} <= {
        n for n, c in found.items() if c.verdict
    }
    assert found["ranks agree"]


def test_a_deadlock_names_the_channel_that_is_never_written(emulate: Any) -> None:
    kernel = emulate("muse_moe.py", ranks=2, edit=dropped("expert_mid"))
    with pytest.raises(EmulationError, match=r"down\.math waits for channel 'expert_mid' \(lamport\)") as e:
        kernel.check(tokens=2)
    assert e.value.loc is not None
    assert e.value.loc.file.endswith("muse_moe.py")


def test_expired_waits_are_reported_as_on_a_gpu_and_the_world_recovers(emulate: Any) -> None:
    kernel = emulate("muse_moe.py", ranks=2, edit=dropped("expert_mid"), expire=True)
    for _ in range(2):
        with pytest.raises(HangError, match=r"down\.math waited for channel 'expert_mid' \(lamport\)"):
            kernel.check(tokens=2)
        with pytest.raises(HangError):  # sticky
            kernel.world.synchronize()
        kernel.world.recover()
        kernel.world.synchronize()
        assert not any(rank.leftovers() for rank in kernel.world.ranks)


@pytest.mark.parametrize("sync", [{}, {"sync": "counter"}, {"sync": "cluster", "cluster": "2"}], ids=str)
def test_a_launch_that_is_given_up_at_any_moment_ends(emulate: Any, sync: dict[str, str]) -> None:
    """Nothing hangs, races or leaves early on that way; the hang is reported, unless the launch was faster."""
    given_up = 0
    for seed in range(8):
        kernel = emulate("muse_moe.py", ranks=2, seed=seed, choices=sync, race=True, expire=Expire.ANY)
        try:
            kernel.check(tokens=2)
        except HangError:
            given_up += 1
            kernel.world.recover()
            kernel.world.synchronize()
            assert not any(rank.leftovers() for rank in kernel.world.ranks)
    assert given_up >= 4
