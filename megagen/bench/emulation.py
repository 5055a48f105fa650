"""A Plan in the emulator with weights for every live rank: launched, judged and repeated by seed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Self

from megagen.bench.routes import routes
from megagen.bench.verify import Check, Env, Values, Verifier, worst
from megagen.emulate.engine import Expire
from megagen.errors import DeviceError, MegagenError
from megagen.ir.graph import Graph
from megagen.ir.plan import Plan
from megagen.runtime import params
from megagen.runtime.emulated import LAYERS, World
from megagen.runtime.step import Step

COPIES = 4  # of each rank's weights: as packed, in the emulator, what it notes of them, the reference's


class Weights:
    """Every live rank's packed weights, and their world-wide form for the reference."""

    def __init__(self, packed: Sequence[Values], env: Env) -> None:
        self.packed = packed
        self.env: Env = {name: cache(w) if callable(w) else w for name, w in env.items()}

    @classmethod
    def random(cls, graph: Graph, live: int, seed: int = 0) -> Self:
        """Rank r of ``live`` holds shard r; see :func:`megagen.weights.random.world_env` for those stood in for."""
        from megagen.weights.random import random_layer, world_env

        shards = [random_layer(graph, seed, rank=rank) for rank in range(live)]
        return cls([s.packed() for s in shards], world_env(shards))

    @classmethod
    def load(cls, checkpoint: Path, layer: int, graph: Graph, live: int) -> Self:
        """Every rank's shard of a checkpoint's layer. Raises WeightError, and MegagenError unless all ranks live."""
        from megagen.weights.checkpoint import load_layer, load_reference

        if live != graph.tp:
            raise MegagenError(
                f"a checkpoint on {live} live ranks of tp={graph.tp}: stand-ins would repeat the shards of the others",
                hint=f"emulate all {graph.tp} ranks, or use another --tp",
            )
        packed = [load_layer(checkpoint, layer, graph, rank) for rank in range(live)]
        return cls(packed, load_reference(checkpoint, layer, graph))


class Emulation:
    """A Plan's ``library`` with weights, to be launched in as many worlds as wanted."""

    def __init__(self, plan: Plan, graph: Graph, library: Path, weights: Weights) -> None:
        self.plan, self.graph, self.library, self.weights = plan, graph, library, weights

    def world(
        self,
        seed: int = 0,
        *,
        race: bool = False,
        expire: Expire | bool = False,
        footprints: bool = False,
        layers: int = LAYERS,
        progress: Callable[[], None] = lambda: None,
    ) -> World:
        """A fresh one, in which nothing is bound; it has room for so many layers' tensors."""
        return World(
            self.plan,
            self.library,
            live=len(self.weights.packed),
            seed=seed,
            race=race,
            expire=expire,
            footprints=footprints,
            layers=layers,
            progress=progress,
        )

    def verifier(self, world: World) -> Verifier:
        return Verifier(world, self.graph, self.weights.packed, self.weights.env)

    def check(
        self,
        tokens: int,
        *,
        seeds: Sequence[int] = (0,),
        race: bool = False,
        launches: int = 1,
        experts: int | None = None,
        step: Step | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Check]:
        """For each seed a fresh world, an input and ``launches`` launches of it, judged by :meth:`Verifier.check`.

        ``experts`` forces that many distinct ones, ``step`` says where the tokens stand. Raises EmulationError, whose
        ``seed`` repeats the fault alone.
        """
        found: dict[str, dict[str, Check]] = {}
        for seed in seeds:
            with self.world(seed, race=race, progress=progress) as world:
                override = None
                if experts is not None:
                    rank = world.ranks[0]
                    override = routes(experts, tokens, rank.top_k, seed, pool=rank.experts)
                verifier = self.verifier(world)
                for c in verifier.check(tokens, seeds=(seed,), launches=launches, route_override=override, step=step):
                    found.setdefault(c.name, {})[f"seed {seed}" if len(seeds) > 1 else ""] = c
        return [worst(name, checks) for name, checks in found.items()]


def refuse_too_large(plan: Plan, live: int) -> None:
    """Raises DeviceError if the weights of ``live`` ranks cannot all be held here at once."""
    need = COPIES * live * sum(e.bytes for e in params.expected(plan).values())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > there:
        raise DeviceError(
            f"emulating {live} ranks of {plan.name} takes {need >> 30} GiB of memory, and there are {there >> 30}",
            hint="emulate a tiny layer, or fewer ranks",
        )
