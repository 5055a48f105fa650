"""The live ranks of a Plan in the emulator: torch tensors over its memory, launches that run when asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megagen.emulate.engine import ALIGNMENT, Engine, Expire, Geometry, Kind
from megagen.emulate.report import HEAP
from megagen.errors import DeviceError, EmulationError
from megagen.ir.plan import Plan
from megagen.runtime import driver, hang, heap, params
from megagen.runtime.rank import Layer, Rank

if TYPE_CHECKING:
    import torch

KINDS = {"exchange": Kind.EXCHANGE, "output": Kind.OUTPUT, "state": Kind.OUTPUT}  # all else is read only
SLACK = 64 << 20  # of address space, beyond twice what the tensors take
LAYERS = 4


class EmulatedRank(Rank):
    """One live rank of a :class:`World`. Tensors that are bound are copied into the emulator's memory, unless they are
    there (:meth:`allocate`, or a Layer's).

    The host may not write while launches are queued: they would see it, as they have not run.
    """

    in_place = False

    def __init__(
        self, world: World, torch: Any, plan: Plan, rank: int, *, overrides: bool, beside: Rank | None = None
    ) -> None:
        self.world, self.engine, self._torch = world, world.engine, torch
        super().__init__(
            plan,
            torch.device("cpu"),
            live=world.live,
            rank=rank,
            timeout_ms=world.timeout_ms,
            overrides=overrides,
            beside=beside,
        )
        launch = plan.launch
        self.geometry = Geometry(
            blocks=launch.blocks,
            threads=32 * launch.warps,
            cluster=launch.cluster,
            shared=launch.shared_bytes,
            pdl=launch.pdl,
        )

    def _empty(self, name: str, what: str, dtype: Any, shape: Sequence[int]) -> torch.Tensor:
        type_ = self._dtype(dtype)
        nbytes = prod(shape) * type_.itemsize
        name = HEAP if what == "exchange" else name
        address = self.engine.allocate(nbytes, rank=self.rank, kind=KINDS.get(what, Kind.CONSTANT), name=name)
        raw = self._torch.frombuffer(self.engine.view(address, nbytes), dtype=self._torch.uint8)
        made: torch.Tensor = raw.view(type_).view(tuple(shape))
        self.world.addresses.add(address)
        return made

    def _settled(self, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {name: self._copied(name, t) for name, t in given.items()}

    def _copied(self, name: str, t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() in self.world.addresses:
            return t
        made = self._empty(name, self._expected[name].what, str(t.dtype).removeprefix("torch."), t.shape)
        with self.writing(made):
            made.copy_(t)
        return made

    @contextmanager
    def writing(self, tensor: torch.Tensor) -> Iterator[None]:
        """Raises DeviceError while launches are queued."""
        if self.world.queued:
            raise DeviceError(
                "the host writes to the emulator's memory while launches are queued",
                hint="synchronize first: they have not run yet, and would see it",
            )
        yield
        self.engine.wrote(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def launch(self, layer: Layer) -> None:
        """Queue the Plan's kernels in order, in this rank's stream; they run in :meth:`synchronize`."""
        for kernel in self.plan.kernels:
            self.engine.launch(kernel.name, layer.block.bytes, self.geometry, rank=self.rank)
            self.world.queued += 1

    def synchronize(self) -> None:
        """Run what all ranks have queued; see :meth:`World.synchronize`."""
        self.world.synchronize()

    def recover(self) -> None:
        """Make all ranks' heaps fresh again: one with another count of launches than its peers would hang."""
        self.world.recover()

    def reset(self) -> None:
        """Make this rank's heap fresh."""
        with self.writing(self.heap):
            heap.reset(self.heap, self.plan)


class World:
    """``live`` of a Plan's ``tp`` ranks (default: all of them) in one emulator, the others stood in for.

    ``library`` is what :func:`megagen.emulate.build.compile_library` made of the Plan's text. ``seed`` picks the
    interleaving of warps, blocks, ranks and messages. ``race``: report accesses that nothing orders. ``expire``: a
    deadlock becomes a HangError from the ranks' hang records, as on a GPU, instead of an EmulationError that lists
    all waiting warps; with Expire.ANY waits expire in a healthy launch too. ``footprints``: remember what each step
    touches (``engine.footprints()``). ``layers``: how many layers' tensors there must be room for.

    ``others``: Plans of the same group whose kernels are in the library too; :meth:`of` has their ranks, which share
    control words and abort word with the first Plan's. Raises DeviceError.
    """

    def __init__(
        self,
        plan: Plan,
        library: Path | str,
        *,
        live: int | None = None,
        seed: int = 0,
        race: bool = False,
        expire: Expire | bool = False,
        footprints: bool = False,
        overrides: bool = True,
        timeout_ms: int = 2000,
        layers: int = LAYERS,
        others: Sequence[Plan] = (),
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        try:
            import torch
        except ImportError as e:
            raise DeviceError("torch is not installed", hint=driver.INSTALL) from e
        self.plan, self.live, self.seed = plan, plan.tp if live is None else live, seed
        if self.live not in range(1, min(params.MAX_LIVE, plan.tp) + 1) or plan.tp % self.live:
            raise DeviceError(f"{self.live} live ranks in a group of {plan.tp}", hint="a divisor of it, at most 8")
        self.timeout_ms, self.progress = timeout_ms, progress
        self.queued = 0  # launches that have not run
        self.addresses: set[int] = set()  # of tensors in the emulator's memory
        plans = (plan, *others)
        self.engine = Engine(
            library,
            arena_bytes=sum(self._bytes(p, layers) for p in plans) + SLACK,
            seed=seed,
            race=race,
            expire=expire,
            footprints=footprints,
            plans=plans,
        )
        self._ranks: dict[str, tuple[EmulatedRank, ...]] = {}
        for p in plans:
            firsts = self._ranks.get(plan.name, (None,) * self.live)
            made = tuple(
                EmulatedRank(self, torch, p, rank, overrides=overrides, beside=first)
                for rank, first in enumerate(firsts)
            )
            for rank in made:
                rank._join([r.heap.data_ptr() for r in made], [r.abort_address for r in made])
            self._ranks[p.name] = made
        if len(self._ranks) < len(plans):
            raise DeviceError(f"two of the plans {', '.join(p.name for p in plans)} have one name")
        self.ranks = self._ranks[plan.name]
        self.recover()

    def of(self, plan: Plan) -> tuple[EmulatedRank, ...]:
        """The live ranks of one of the world's Plans."""
        return self._ranks[plan.name]

    def _bytes(self, plan: Plan, layers: int) -> int:
        """Address space for everything: more costs nothing as long as it is not touched."""
        tensors = sum(e.bytes + ALIGNMENT for e in params.expected(plan).values())
        tensors += plan.stamps.bytes if plan.stamps else 0
        return 2 * self.live * (plan.heap.bytes + layers * tensors)

    def launch(self, layers: Sequence[Layer]) -> None:
        """Queue a launch on every rank; ``layers`` has each rank's. Several may be queued before they run."""
        for rank, layer in zip(self.ranks, layers, strict=True):
            rank.launch(layer)

    def synchronize(self) -> None:
        """Run all that is queued, until it is complete.

        Raises EmulationError for a fault, after which nothing can be launched here any more, and HangError when
        bounded waits expired: call :meth:`recover` before the next launch.
        """
        if self.queued:
            try:
                self.engine.run(self.progress)
            except EmulationError:
                self.queued = 0
                raise
            self.queued = 0
        abort = next((a for rank in self.ranks if (a := rank.aborted())), 0)
        if abort:
            raise hang.told(self._ranks.values(), abort, timeout_ms=self.timeout_ms)

    def recover(self) -> None:
        """Make every rank's heap fresh again."""
        for ranks in self._ranks.values():
            for rank in ranks:
                rank.reset()

    def close(self) -> None:
        """Let go of the emulator. Tensors over its memory stay valid, launches are over."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
