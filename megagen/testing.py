"""A pytest plugin: ``emulate``, with which a kernel's test is three lines.

    pytest_plugins = ("megagen.testing",)  # in conftest.py

    def test_my_schedule(emulate):
        kernel = emulate("my_schedule.py", ranks=2, seed=3)
        kernel.check(tokens=16)

Needs torch and a C++20 compiler, and no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from megagen.bench.emulation import Emulation, Weights
    from megagen.bench.verify import Check, Verifier
    from megagen.cli.pipeline import Checked
    from megagen.emulate.engine import Expire
    from megagen.ir.plan import Plan
    from megagen.runtime.emulated import World


@dataclass(frozen=True)
class Kernel:
    """A schedule's kernel in a world of its own. ``verifier`` launches it and judges what it left."""

    plan: Plan
    world: World
    verifier: Verifier

    def check(self, tokens: int, *, context: int = 0, tree: bool = False, **more: Any) -> list[Check]:
        """Launch on random input and judge it: :meth:`megagen.bench.verify.Verifier.check`. Fails the test for a
        result outside its bound; faults of the kernel are EmulationErrors.

        ``context``: tokens in the caches before; ``tree``: the launch's are a random tree (of the world's seed) instead
        of a chain.
        """
        from megagen.runtime.step import Step

        step = Step.random_tree(tokens, context, self.world.seed) if tree else Step.chain(tokens, context)
        found = self.verifier.check(tokens, step=step, **more)
        wrong = [str(c) for c in found if not c]
        assert not wrong, f"seed {self.world.seed}: " + "\n".join(wrong)
        return found


class Kernels:
    """What the tests of one run share: libraries and weights, each made once."""

    def __init__(self) -> None:
        self._built: dict[Any, tuple[Checked, Path]] = {}
        self._weights: dict[Any, Weights] = {}

    def emulation(self, request: Any, ranks: int, edit: Callable[[Plan], Plan] | None) -> Emulation:
        from megagen.bench.emulation import Emulation, Weights
        from megagen.cli import pipeline
        from megagen.settings import Settings

        key = repr(request)
        if edit is not None or key not in self._built:
            checked = pipeline.check(request)
            if edit is not None:
                checked = replace(checked, plan=edit(checked.plan))
            built = checked, pipeline.emulated(checked, Settings.from_env())
            if edit is None:
                self._built[key] = built
        else:
            built = self._built[key]
        checked, library = built
        graph = checked.graph
        same = (graph.model_dump_json(), ranks)
        if same not in self._weights:
            self._weights[same] = Weights.random(graph, ranks)
        return Emulation(checked.plan, graph, library, self._weights[same])


@pytest.fixture(scope="session")
def emulated_kernels() -> Kernels:
    return Kernels()


@pytest.fixture
def emulate(emulated_kernels: Kernels) -> Iterator[Callable[..., Kernel]]:
    """``emulate(schedule, ranks=1, seed=0, ...)``: the schedule's :class:`Kernel`, built and bound to random weights.

    ``schedule``: a path, or the name of a shipped one. ``ranks`` of ``tp`` (default: all) live. ``size``: "tiny" or
    "full". ``race``, ``expire``, ``footprints``: see :class:`megagen.runtime.emulated.World`. ``machine``, ``tokens``,
    ``choices``, ``options`` and ``fused`` are those of the command line; ``edit`` changes the Plan before it is
    emitted.
    """
    worlds: list[World] = []

    def make(
        schedule: str | Path,
        *,
        ranks: int = 1,
        tp: int | None = None,
        seed: int = 0,
        size: str = "tiny",
        race: bool = False,
        expire: Expire | bool = False,
        footprints: bool = False,
        machine: str | None = None,
        tokens: int = 16,
        choices: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
        fused: bool = True,
        edit: Callable[[Plan], Plan] | None = None,
    ) -> Kernel:
        from megagen.cli.pipeline import MACHINE, Request

        request = Request(
            Path(schedule),
            machine or MACHINE,
            tp=ranks if tp is None else tp,
            tokens=tokens,
            choices=dict(choices or {}),
            fused=fused,
            options=dict(options or {}),
            tiny=size == "tiny",
        )
        emulation = emulated_kernels.emulation(request, ranks, edit)
        world = emulation.world(seed, race=race, expire=expire, footprints=footprints)
        worlds.append(world)
        return Kernel(emulation.plan, world, emulation.verifier(world))

    yield make
    for world in worlds:
        world.close()
