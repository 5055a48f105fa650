"""A model's step as launches: which Plan each runs, what they need in memory, and their compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from megagen import resources
from megagen.check import check
from megagen.dsl import load
from megagen.emit import UNBOUNDED_WAITS, emit
from megagen.ir.graph import Graph, Routing
from megagen.ir.plan import Machine, Plan
from megagen.lower import distinct, lower
from megagen.models.muse_spark import MAX_TOKENS, POSITION_STEP, Launch, MuseSparkConfig
from megagen.runtime import params
from megagen.settings import Settings


class Kind(NamedTuple):
    """What launches of one Plan have in common."""

    graph: Graph
    plan: Plan


@dataclass(frozen=True)
class Model:
    """``launches`` of a step in order, and by the name of each one's Plan what it runs. ``positions``: numbers that
    the caches have room for."""

    config: MuseSparkConfig
    launches: tuple[Launch, ...]
    kinds: Mapping[str, Kind]
    names: tuple[str, ...]  # of each launch's Plan
    tp: int
    positions: int

    @classmethod
    def planned(
        cls,
        config: MuseSparkConfig,
        launches: Sequence[Launch],
        *,
        machine: str | Machine,
        tp: int,
        positions: int,
        tokens: int = MAX_TOKENS,
        progress: Callable[[], None] = lambda: None,
    ) -> Model:
        """Lower and prove each kind of launch once. Raises MegagenError where the model cannot be placed."""
        positions = -(-positions // POSITION_STEP) * POSITION_STEP
        kinds: dict[str, Kind] = {}
        named: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}
        for launch in launches:
            same = (launch.schedule, tuple(sorted(launch.options.items())))
            if same not in named:
                placed = {} if launch.schedule == "muse_last" else {"positions": positions}
                schedule = load(
                    resources.schedules() / f"{launch.schedule}.py",
                    machine=machine,
                    tp=tp,
                    tokens=tokens,
                    options={"config": config, **placed, **launch.options},
                )
                plan = lower(schedule)
                check(plan)
                kinds[plan.name] = Kind(schedule.graph, plan)
                named[same] = plan.name
                progress()
        names = [named[x.schedule, tuple(sorted(x.options.items()))] for x in launches]
        return cls(config, tuple(launches), kinds, tuple(names), tp, positions)

    def plan(self, index: int) -> Plan:
        """That of a launch."""
        return self.kinds[self.names[index]].plan

    def graph(self, index: int) -> Graph:
        """That of a launch."""
        return self.kinds[self.names[index]].graph

    # -- text and code ----------------------------------------------------------------------------------------

    def artifacts(
        self, settings: Settings, progress: Callable[[], None] = lambda: None, *, bounded: bool = True
    ) -> dict[str, Path]:
        """Each Plan's cubin, by name; compiled side by side, or looked up. ``bounded``: waits end, see :mod:`emit`."""
        from megagen.compile import compile_source

        defines = {} if bounded else {UNBOUNDED_WAITS: "1"}

        def compiled(kind: Kind) -> Path:
            arch, kernels = kind.plan.machine.arch, [k.name for k in kind.plan.kernels]
            made = compile_source(emit(kind.plan), kernels=kernels, archs=[arch], settings=settings, defines=defines)
            progress()
            return made[arch].path

        with ThreadPoolExecutor() as pool:
            return dict(zip(self.kinds, pool.map(compiled, self.kinds.values()), strict=True))

    def library(self, settings: Settings) -> Path:
        """All Plans' kernels for the CPU, in one library."""
        from megagen.emulate import compile_library

        (source, kernels), *others = [
            (emit(kind.plan), [k.name for k in kind.plan.kernels]) for kind in self.kinds.values()
        ]
        return compile_library(source, kernels=kernels, settings=settings, beside=others)

    # -- what it takes ----------------------------------------------------------------------------------------

    @cached_property
    def kernels(self) -> int:
        """That a step launches."""
        return sum(len(self.plan(i).kernels) for i in range(len(self.launches)))

    def weights_read(self, tokens: int) -> int:
        """HBM bytes of weights that a step of so many tokens reads on a rank, on as many experts as is usual."""
        routing = Routing(tokens=tokens, experts=distinct(tokens, self.config.top_k))
        each = {name: sum(op.cost(routing).weight_bytes for op in kind.graph.ops) for name, kind in self.kinds.items()}
        return sum(each[name] for name in self.names)

    def keys_read(self, tokens: int, context: int) -> int:
        """HBM bytes of keys and values that a step reads on a rank: of each layer what some token sees, once."""
        number = context + tokens
        window = min(number, self.config.window + tokens - 1)
        each = 2 * 2 * (self.config.kv_heads // self.tp) * self.config.head_dim
        seen = {"muse_swa": window, "muse_global": number}
        return sum(each * seen.get(launch.schedule, 0) for launch in self.launches)

    def memory(self) -> list[tuple[str, int]]:
        """What a rank needs on its GPU: (what, bytes)."""
        expected = {name: params.expected(kind.plan) for name, kind in self.kinds.items()}

        def of(name: str, what: str) -> int:
            return sum(e.bytes for e in expected[name].values() if e.what == what)

        tables = [e["rotary"].bytes for e in expected.values() if "rotary" in e]
        return [
            ("weights", sum(of(name, "weight") for name in self.names)),
            ("keys and values", sum(of(name, "state") for name in self.names)),
            ("rotations", max(tables, default=0)),
            ("exchange", sum(kind.plan.heap.bytes for kind in self.kinds.values())),
            ("activations", 2 * sum(of(name, "output") for name in self.kinds)),
        ]
