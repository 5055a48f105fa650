"""A model that decodes: all launches of a step on this process's ranks, with the caches that they share."""

from __future__ import annotations

import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megagen import machines
from megagen.errors import DeviceError, HangError
from megagen.ir.plan import Machine
from megagen.models.muse_spark import MAX_TOKENS, launches, layer_kinds, read_config
from megagen.ops.qkv_heads import rotary
from megagen.runtime import driver, hang, params
from megagen.runtime.group import Peer, connect
from megagen.runtime.meeting import Meeting
from megagen.runtime.model import Model
from megagen.runtime.rank import Layer, Rank
from megagen.runtime.session import GRACE_S, UNBOUNDED_S, Replayable
from megagen.runtime.step import Step
from megagen.settings import Settings
from megagen.weights.checkpoint import Checkpoint
from megagen.weights.packed import Part, pack

if TYPE_CHECKING:
    import torch

    from megagen.runtime.emulated import World

SETS = 2  # of activations: one is read while the other is written
TIMEOUT_MS = 2000
MACHINE = "h200"
EMULATED_SMS, EMULATED_TOKENS = 2, 8  # as few as make one MMA tile: the emulator multiplies unused rows too
SPIN_S = 0.02  # how long the host looks for the end of a step without a pause: several times what one takes
PAUSE_S = 100e-6
_STEPS = [struct.Struct(f"<{params.CONTROL_WORDS + n}i") for n in range(params.STEP_TOKENS + 1)]  # with n tokens
Values = Mapping[str, "torch.Tensor"]
Weights = Callable[[int, int], Values]  # of a launch and a rank of this process, by parameter


class Decoder(ABC):
    """``model`` on ``ranks``: of each live rank in this process, by Plan name.

    ``weights`` gives those of a launch and a rank, packed, when they are bound. Caches are zero at first; what is in
    them past the tokens that were run is never read. Use it in one thread.
    """

    def __init__(
        self,
        model: Model,
        ranks: Sequence[Mapping[str, Rank]],
        weights: Weights,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.ranks = model, ranks
        self.vocab, self.positions = model.config.vocab, model.positions
        self.most = model.plan(0).tokens
        self.bound: list[list[Layer]] = []  # of each rank, each launch
        self.caches: list[list[torch.Tensor]] = []  # of each rank, keys and values of each layer
        for index, plans in enumerate(ranks):
            self.bound.append(self._bind(index, plans, weights, progress))
        self.last = Step.chain(1)

    def _bind(
        self, index: int, plans: Mapping[str, Rank], weights: Weights, progress: Callable[[], None]
    ) -> list[Layer]:
        ranks = [plans[name] for name in self.model.names]
        head, *layers, _ = ranks
        sets = [{name: layers[0].allocate(name) for name in ("stream", "q", "gate")} for _ in range(SETS)]
        caches = [{name: rank.allocate(name) for name in ("k_cache", "v_cache")} for rank in layers]
        self.caches.append([x for pair in caches for x in pair.values()])
        shared: dict[str, torch.Tensor] = {"ids": self._ids(index, head)}
        table = self._table(head)
        bound = []
        for i, rank in enumerate(ranks):
            needed = {p.name for p in rank.plan.params}
            given = dict(weights(i, index))
            if "rotary" in needed:
                given["rotary"] = shared.setdefault("rotary", table)
            if "ids" in needed:
                given["ids"] = shared["ids"]
            if i > 0:
                given |= {name: x for name, x in sets[(i - 1) % SETS].items() if name in needed}
            if 1 <= i <= len(layers):
                given |= caches[i - 1]
            if "stream_out" in needed:
                given["stream_out"] = sets[i % SETS]["stream"]
            if "next_q" in needed:
                given |= {f"next_{name}": sets[i % SETS][name] for name in ("q", "gate")}
                given |= {f"next_{name}": x for name, x in caches[i].items()}
            if "logits" in needed:
                given |= self._outputs(rank)
            layer = rank.bind(given, then=ranks[(i + 1) % len(ranks)])
            shared |= {name: layer.tensors[name] for name in shared if name in layer.tensors}
            bound.append(layer)
            progress()
        return bound

    def _table(self, rank: Rank) -> torch.Tensor:
        return rotary(self.positions, self.model.config.head_dim, self.model.config.rope_theta).to(rank.device)

    def _outputs(self, rank: Rank) -> Values:
        """What the last launch writes somewhere else than where its session has put it."""
        return {}

    @abstractmethod
    def _ids(self, index: int, rank: Rank) -> torch.Tensor:
        """Where the first launch of a rank reads its tokens."""

    @abstractmethod
    def _run(self, step: Step, ids: Sequence[int]) -> list[int]:
        """All launches on all ranks; what follows each token."""

    def step(self, ids: Sequence[int], context: int) -> list[int]:
        """Run ``ids`` as a chain after ``context`` numbers: the most likely token after each of them.

        Raises DeviceError for what no step can be, HangError when a wait expired: after that it can only be closed.
        """
        step = Step.chain(len(ids), context)
        if len(ids) > self.most or context + len(ids) > self.positions:
            raise DeviceError(
                f"{len(ids)} tokens after {context}: a step takes {self.most}, the caches hold {self.positions}"
            )
        if wrong := next((i for i in ids if not 0 <= i < self.vocab), None):
            raise DeviceError(f"token {wrong} is none of {self.vocab}")
        found = self._run(step, ids)
        self.last = step
        return found

    def logits(self) -> torch.Tensor:
        """Of the last step, fp32 [its tokens, vocab]: softcapped, those of all ranks."""
        import torch

        whole: torch.Tensor = torch.cat(self._shares(), dim=1)
        return whole

    def _shares(self) -> list[torch.Tensor]:
        """Each rank's logits of the last step, [tokens, its part of the vocabulary]."""
        return [self._share(layers[-1].tensors["logits"]) for layers in self.bound]

    def _share(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[: self.last.tokens, : self.vocab // self.model.tp]

    def statistics(self) -> Mapping[str, float]:
        """Of a step as the last one: kernels, HBM bytes of a rank (experts as experience has it), their time."""
        tokens, context = self.last.tokens, self.last.context
        read = self.model.weights_read(tokens) + self.model.keys_read(tokens, context)
        rate = self.model.plan(0).machine.hbm_bytes_per_s
        return {"kernels": self.model.kernels, "bytes": read, "floor_s": read / rate}

    @abstractmethod
    def close(self) -> None:
        """Let go of the device. Nothing may be run afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EmulatedDecoder(Decoder):
    """All ranks in the emulator. ``world`` has the ranks of all of the model's Plans."""

    def __init__(
        self, model: Model, world: World, weights: Weights, progress: Callable[[], None] = lambda: None
    ) -> None:
        self.world = world
        each = [{name: world.of(kind.plan)[r] for name, kind in model.kinds.items()} for r in range(world.live)]
        self._tokens: list[torch.Tensor] = []
        super().__init__(model, each, weights, progress)

    def _ids(self, index: int, rank: Rank) -> torch.Tensor:
        self._tokens.append(rank.allocate("ids"))
        return self._tokens[-1]

    def _run(self, step: Step, ids: Sequence[int]) -> list[int]:
        import torch

        for plans, tokens in zip(self.ranks, self._tokens, strict=True):
            rank = plans[self.model.names[0]]
            rank.set_step(step)
            with rank.writing(tokens):
                tokens[: len(ids)] = torch.tensor(ids, dtype=tokens.dtype)
        for i, name in enumerate(self.model.names):
            for plans, layers in zip(self.ranks, self.bound, strict=True):
                plans[name].launch(layers[i])
        self.world.synchronize()
        found = [layers[-1].tensors["next_ids"][: len(ids)].tolist() for layers in self.bound]
        if any(other != found[0] for other in found):
            raise DeviceError(f"the ranks disagree on what follows: {found}")
        return [int(i) for i in found[0]]

    def close(self) -> None:
        self.world.close()


class GpuDecoder(Decoder):
    """A live rank on each of ``devices``, or the one that ``meeting`` says, whose others are in other processes.

    A step is a CUDA graph a rank: what it works on goes in from pinned memory, the launches follow, and what came of it
    goes out to pinned memory. ``overrides``: routing can be told, see :meth:`reroute`.
    """

    def __init__(
        self,
        model: Model,
        artifacts: Mapping[str, Path],
        weights: Weights,
        *,
        devices: Sequence[int] = (0,),
        meeting: Meeting | None = None,
        timeout_ms: int = TIMEOUT_MS,
        overrides: bool = False,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._torch = torch = driver.require_torch(devices[0])
        self.timeout_ms, self._meeting = timeout_ms, meeting
        live = len(devices) if meeting is None else meeting.live
        first = 0 if meeting is None else meeting.rank
        connect(devices)
        # Control words, and the tokens behind them, to come in one copy.
        self._words = [
            torch.zeros(2 * params.CONTROL_WORDS, dtype=torch.int32, device=torch.device("cuda", d)) for d in devices
        ]
        self._close = ExitStack()
        ranks: list[dict[str, Peer]] = []
        plans = [kind.plan for kind in model.kinds.values()]
        heaps: Sequence[Any] = [None] * len(plans)
        self._shared_logits: Any = None
        if meeting is not None:
            tail = model.plan(len(model.launches) - 1)
            size = params.expected(tail)["logits"].bytes
            *heaps, self._shared_logits = meeting.memory([*(p.heap.bytes for p in plans), size])
        for i, device in enumerate(devices):
            with torch.cuda.device(device):
                made: dict[str, Peer] = {}
                for plan, heap in zip(plans, heaps, strict=True):
                    made[plan.name] = Peer(
                        plan,
                        artifacts[plan.name],
                        device=device,
                        live=live,
                        rank=first + i,
                        timeout_ms=timeout_ms,
                        overrides=overrides,
                        beside=next(iter(made.values()), None),
                        heap=heap,
                        control=self._words[i][: params.CONTROL_WORDS],
                    )
                    self._close.callback(made[plan.name].close)
                ranks.append(made)
        self._meet(plans, ranks)
        self._in = [torch.zeros(2 * params.CONTROL_WORDS, dtype=torch.int32, pin_memory=True) for _ in devices]
        self._out = [torch.zeros(params.STEP_TOKENS + 1, dtype=torch.int32, pin_memory=True) for _ in devices]
        self._peers = ranks
        self._there = [next(iter(made.values())).here() for made in ranks]  # made once: a step is short
        self._in_words = [x.numpy() for x in self._in]
        self._out_words = [x.numpy() for x in self._out]
        self._graphs: list[Replayable] = []
        self._done = [torch.cuda.Event() for _ in devices]
        super().__init__(model, ranks, weights, progress)
        self._start()

    def _start(self) -> None:
        """A first launch, then the graphs, once all ranks have loaded: a launch waits for the other ranks' on the
        device, and no longer than a wait may take."""
        if self._meeting is not None:
            self._meeting.wait()
        self._warm()
        self._graphs = [self._capture(i) for i in range(len(self._peers))]

    def _meet(self, plans: Sequence[Any], ranks: Sequence[Mapping[str, Peer]]) -> None:
        """Tell every rank where the heaps and abort words of all are; none is written before all are empty."""
        if self._meeting is not None:
            (mine,) = ranks
            places = self._meeting.places
            aborts = [p[0] + plans[0].heap.abort_offset for p in places]
            for j, plan in enumerate(plans):
                mine[plan.name].meet([p[j] for p in places], aborts)
            self._meeting.wait()
            return
        aborts = [next(iter(made.values())).abort_address for made in ranks]
        for plan in plans:
            for made in ranks:
                made[plan.name].meet([other[plan.name].heap.data_ptr() for other in ranks], aborts)

    def _outputs(self, rank: Rank) -> Values:
        if self._meeting is None:
            return {}
        shape = next(p.shape for p in rank.plan.params if p.name == "logits")
        return {"logits": self._shared_logits.view(self._torch.float32).view(shape)}

    def _ids(self, index: int, rank: Rank) -> torch.Tensor:
        ids: torch.Tensor = self._words[index][params.CONTROL_WORDS :][: params.STEP_TOKENS]
        return ids

    def _queue(self, index: int) -> None:
        """A rank's whole step, into the current stream."""
        self._words[index].copy_(self._in[index], non_blocking=True)
        for name, layer in zip(self.model.names, self.bound[index], strict=True):
            self._peers[index][name].launch(layer)
        self._out[index][: params.STEP_TOKENS].copy_(self.bound[index][-1].tensors["next_ids"], non_blocking=True)
        self._out[index][params.STEP_TOKENS :].copy_(
            self._peers[index][self.model.names[0]].abort_word, non_blocking=True
        )

    def _warm(self) -> None:
        """One token through all kernels: the first launch of a module loads it."""
        self.write(Step.chain(1), [0])
        for i, made in enumerate(self._peers):
            with next(iter(made.values())).here():
                self._queue(i)
                self._done[i].record()
        self.settle()

    def _capture(self, index: int) -> Replayable:
        torch = self._torch
        graph: Replayable = torch.cuda.CUDAGraph()
        peer = next(iter(self._peers[index].values()))
        with peer.here(), torch.cuda.graph(graph, stream=torch.cuda.Stream(peer.device)):
            self._queue(index)
        return graph

    def write(self, step: Step, ids: Sequence[int]) -> None:
        """What the replays that follow work on. No replay may be under way."""
        pack = _STEPS[len(ids)].pack_into
        for view in self._in_words:
            pack(view, 0, *step.words(), *ids)

    def _run(self, step: Step, ids: Sequence[int]) -> list[int]:
        self.write(step, ids)
        self.replay()
        self.settle()
        return [int(i) for i in self._out_words[0][: len(ids)]]

    def replay(self) -> None:
        """Queue the step that was last written, once more, on all ranks."""
        for there, graph, done in zip(self._there, self._graphs, self._done, strict=True):
            with there:
                graph.replay()
                done.record()

    def reroute(self, table: torch.Tensor | None) -> None:
        """Experts of every layer's tokens from now on: see :meth:`Rank.set_route_override`."""
        for made in self._peers:
            for peer in made.values():
                if peer.top_k:
                    with peer.here():
                        peer.set_route_override(table)

    @property
    def devices(self) -> list[torch.device]:
        """Of each rank."""
        return [words.device for words in self._words]

    @property
    def found(self) -> list[list[torch.Tensor]]:
        """Of each rank what the last launch wrote: logits fp32 [most, rows of a rank], tokens int32 [most]."""
        return [[layers[-1].tensors[name] for name in ("logits", "next_ids")] for layers in self.bound]

    def settle(self) -> None:
        """Wait for all ranks to be done. Raises HangError when a wait expired, DeviceError when the device is stuck."""
        patience = self.timeout_ms / 1000 + GRACE_S if self.timeout_ms else UNBOUNDED_S
        began = time.monotonic()
        try:
            for done in self._done:
                while not done.query():
                    passed = time.monotonic() - began
                    os.sched_yield() if passed < SPIN_S else time.sleep(PAUSE_S)  # another rank may need the core
                    if passed > patience:
                        raise DeviceError(
                            f"a step takes longer than {patience:.1f} s, and no wait has expired",
                            hint="the device hangs outside any bounded wait; this process must be ended to free it",
                        )
        except RuntimeError as e:
            raise DeviceError(
                f"a step failed on the device: {driver.first_line(e)}",
                hint="CUDA work in this process cannot go on; compute-sanitizer shows the faulty access",
            ) from e
        if abort := next((int(a) for view in self._out_words if (a := view[params.STEP_TOKENS])), 0):
            groups = [[made[name] for made in self._peers] for name in self.model.kinds]
            raise hang.told(groups, abort, timeout_ms=self.timeout_ms)

    def _shares(self) -> list[torch.Tensor]:
        if self._meeting is None:
            device = self._words[0].device
            return [share.to(device) for share in super()._shares()]
        (logits,) = (layers[-1].tensors["logits"] for layers in self.bound)
        return [self._share(x) for x in self._meeting.gather(len(self.model.kinds), logits)]

    def logits(self) -> torch.Tensor:
        try:
            found = super().logits()
            self._torch.cuda.current_stream(found.device).synchronize()
        except RuntimeError as e:  # a rank that does not come to the gathering
            raise DeviceError(f"gathering the logits failed: {driver.first_line(e)}") from e
        return found

    def close(self) -> None:
        self._graphs.clear()  # before the modules whose kernels they launch
        self._close.close()
        for held in (self.bound, self.caches, self._peers, self._words, self._in, self._out):
            held.clear()
        self.ranks, self._shared_logits = (), None
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None
        self._torch.cuda.empty_cache()  # who asks the driver what is free, as the next decoder does, must be told

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, HangError) or not issubclass(kind, DeviceError):
            self.close()  # of a device that hangs it would never return


# -- from a checkpoint -------------------------------------------------------------------------------------------------


def planned(
    directory: Path,
    *,
    tp: int,
    positions: int,
    machine: str | Machine = MACHINE,
    tokens: int = MAX_TOKENS,
    progress: Callable[[], None] = lambda: None,
) -> Model:
    """The step of the model in ``directory``. Raises MegagenError for what no schedule can do."""
    checkpoint, kinds = Checkpoint(directory), layer_kinds(directory)
    experts = [checkpoint.experts(layer).value for layer in range(len(kinds))]
    config = read_config(directory).model_copy(update={"layers": len(kinds)})
    return Model.planned(
        config,
        launches(kinds, experts),
        machine=machine,
        tp=tp,
        positions=positions,
        tokens=tokens,
        progress=progress,
    )


def foresee(directory: Path, *, tp: int, live: int, positions: int) -> list[tuple[str, int]]:
    """What each of ``live`` GPUs will hold of the model in ``directory``: (what, bytes). Needs no GPU."""
    _refuse_stand_ins(tp, live)
    return planned(directory, tp=tp, positions=positions).memory()


def open(
    directory: Path,
    *,
    tp: int,
    live: int,
    rank: int = 0,
    positions: int,
    emulate: bool = False,
    seed: int = 0,
    race: bool = False,
    settings: Settings | None = None,
    progress: Callable[..., None] = lambda *told: None,
) -> Decoder:
    """The model in ``directory`` as ``rank`` of ``tp``, on the GPU whose number LOCAL_RANK says (else the first).

    With ``emulate`` all ranks are in this process, and there is no GPU; ``seed`` picks the interleaving, ``race`` looks
    for accesses that nothing orders. Weights are packed into the cache first, where they are not yet. ``progress`` is
    called as parts are done: with what is being done, how much of it, and of how much, or with nothing. Raises
    MegagenError.
    """
    _refuse_stand_ins(tp, live)
    settings = Settings.from_env() if settings is None else settings
    folder = settings.cache_dir / "weights" if settings.cache else None  # which pack refuses
    if emulate:
        return _emulated(directory, tp, positions, seed, race, settings, folder, progress)
    device = int(os.environ.get("LOCAL_RANK", "0"))
    torch = driver.require_torch(device)
    with ExitStack() as undo:
        meeting = Meeting(rank, live, device) if live > 1 else None  # first: a rank that cannot begin is missed soon
        if meeting is not None:
            undo.callback(meeting.close)
        model = planned(directory, tp=tp, positions=positions, machine=machine_of(device), progress=progress)
        artifacts = model.artifacts(settings, progress)

        def weights(launch: int, _: int) -> Values:
            found = packed.load(launch, f"cuda:{device}")
            progress("loading weights", launch + 1, len(model.launches))
            return found

        try:
            packed = pack(
                directory, _parts(model), rank=rank, folder=folder, device=f"cuda:{device}", progress=_Packing(progress)
            )
            torch.cuda.empty_cache()  # of what it took to pack
            made = GpuDecoder(model, artifacts, weights, devices=[device], meeting=meeting)
        except torch.OutOfMemoryError as e:
            raise DeviceError(
                f"GPU {device} is out of memory: {driver.first_line(e)}",
                hint="more GPUs (--tp), fewer positions (--context), or end what else runs there",
            ) from e
        undo.pop_all()
        return made


class _Packing:
    """Where :func:`pack` tells how far it is; passed on ten times a second at most."""

    def __init__(self, progress: Callable[..., None]) -> None:
        self._progress, self._told, self._done, self._total = progress, 0.0, 0.0, 0.0

    def add_task(self, description: str, *, total: float | None) -> None:
        self._done, self._total = 0.0, total or 0.0

    def advance(self, task: None, advance: float) -> None:
        self._done += advance
        if (now := time.monotonic()) > self._told + 0.1 or self._done >= self._total:
            self._told = now
            sizes = f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB"
            self._progress(f"packing weights: {sizes}", self._done, self._total)


def _parts(model: Model) -> list[Part]:
    return [Part(launch.layer, model.graph(i)) for i, launch in enumerate(model.launches)]


def _emulated(
    directory: Path,
    tp: int,
    positions: int,
    seed: int,
    race: bool,
    settings: Settings,
    folder: Path | None,
    progress: Callable[..., None],
) -> EmulatedDecoder:
    from megagen.runtime.emulated import World

    machine = machines.cut(machines.load(MACHINE), EMULATED_SMS)
    model = planned(directory, tp=tp, positions=positions, machine=machine, tokens=EMULATED_TOKENS, progress=progress)
    parts = _parts(model)
    packed = [pack(directory, parts, rank=rank, folder=folder, progress=_Packing(progress)) for rank in range(tp)]
    first, *others = (kind.plan for kind in model.kinds.values())
    world = World(
        first,
        model.library(settings),
        seed=seed,
        race=race,
        layers=len(parts),
        others=others,
        overrides=False,
        progress=progress,
    )
    return EmulatedDecoder(model, world, lambda launch, rank: packed[rank].load(launch), progress)


def _refuse_stand_ins(tp: int, live: int) -> None:
    if live != tp:
        raise DeviceError(f"{live} live ranks of {tp}: with stand-ins for the others nothing sensible is decoded")


def machine_of(device: int) -> str:
    """The description of a GPU of this machine. Raises DeviceError where there is none."""
    capability = driver.require_torch(device).cuda.get_device_capability(device)
    found = [name for name in machines.names() if driver.runs(machines.load(name).arch, capability)]
    if not found:
        raise DeviceError(f"no machine description fits a GPU of compute capability {capability[0]}.{capability[1]}")
    return MACHINE if MACHINE in found else found[0]
