"""One set of weights and one session a plan, shared by all GPU tests: building and packing take most of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from megagen.cli import pipeline
from megagen.errors import DeviceError
from megagen.settings import Settings

SCHEDULE, MACHINE, ARCH = Path("muse_moe.py"), "h200", "sm_90a"


@dataclass
class Rig:
    """Builds plans of a schedule at full size, opens their sessions and binds the same weights to each."""

    settings: Settings
    schedule: Path = SCHEDULE
    options: dict[str, Any] = field(default_factory=dict)
    _built: dict[Any, pipeline.Built] = field(default_factory=dict)
    _sessions: dict[Any, Any] = field(default_factory=dict)

    def checked(self, choices: Mapping[str, str] | None = None, *, fused: bool = True) -> pipeline.Checked:
        return pipeline.check(
            pipeline.Request(self.schedule, MACHINE, choices=dict(choices or {}), fused=fused, options=self.options)
        )

    def built(self, choices: Mapping[str, str] | None = None, *, fused: bool = True, fault: str = "") -> pipeline.Built:
        """``fault``: the channel whose first tile is never sent."""
        key = (*sorted((choices or {}).items()), fused, fault)
        if key not in self._built:
            checked = self.checked(choices, fused=fused)
            if fault:
                broken = [c.model_copy(update={"fault": c.name == fault}) for c in checked.plan.channels]
                assert sum(c.fault for c in broken) == 1
                checked = replace(checked, plan=checked.plan.model_copy(update={"channels": tuple(broken)}))
            self._built[key] = pipeline.build(checked, [ARCH], self.settings)
        return self._built[key]

    def build(self, *choices: Mapping[str, str]) -> None:
        """All of these side by side, and the unfused one."""
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(self.built, c) for c in choices] + [pool.submit(self.built, fused=False)]
            for job in jobs:
                job.result()

    def session(self, choices: Mapping[str, str] | None = None, *, fused: bool = True, fault: str = "") -> Any:
        from megagen.runtime.session import Session

        key = (*sorted((choices or {}).items()), fused, fault)
        if key not in self._sessions:
            built = self.built(choices, fused=fused, fault=fault)
            self._sessions[key] = Session(built.plan, built.artifacts[ARCH].path)
        return self._sessions[key]

    def verifier(self, session: Any, *, extremes: bool = False) -> Any:
        from megagen.bench.verify import Verifier

        return Verifier(session, self.graph, *(self.extremes if extremes else self.usual))

    @cached_property
    def graph(self) -> Any:
        return self.built().graph

    @cached_property
    def usual(self) -> tuple[Any, Any]:
        """(packed, env) of random weights."""
        return self.weights(0)

    @cached_property
    def extremes(self) -> tuple[Any, Any]:
        """The same with block scales at the ends of e4m3."""
        return self.weights(0, scale_extremes=True)

    def weights(self, seed: int, **more: Any) -> tuple[Any, Any]:
        from megagen.weights.random import random_layer

        made = random_layer(self.graph, seed, "cuda", **more)
        return made.packed(), made.env(self.graph.tp)

    def close(self) -> None:
        for session in self._sessions.values():
            try:
                session.close()
            except (DeviceError, RuntimeError):
                continue  # the test that broke the device has failed already


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    made = Rig(Settings.from_env())
    yield made
    made.close()


@pytest.fixture(scope="session")
def layers() -> Iterator[Rig]:
    """The whole sliding-window layer."""
    made = Rig(Settings.from_env(), Path("muse_swa.py"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def new_rig() -> Iterator[Callable[..., Rig]]:
    """``new_rig(schedule, {option: value})``, for as long as the module's tests run."""
    made: list[Rig] = []

    def make(schedule: str, options: dict[str, Any]) -> Rig:
        made.append(Rig(Settings.from_env(), Path(schedule), options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture(scope="session")
def usual(rig: Rig) -> Any:
    """The default placement, fused, with random weights bound."""
    return rig.verifier(rig.session())
