"""What every session has: a live rank's buffers, parameters bound to them, and what launches left there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from megagen.errors import DeviceError
from megagen.ir.plan import ChannelPlan, Plan, Reset
from megagen.ir.touches import IN_SHARED
from megagen.runtime import driver, hang, heap, params
from megagen.runtime.step import Step

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Layer:
    """Parameters bound for launching. Keeps its tensors alive; ``tensors`` has them by parameter name.

    ``stamps``: uint8 [plan.stamps.bytes] that its launches write, of a stamped Plan: launched again and again, with PDL
    two may write there at once.
    """

    tensors: Mapping[str, torch.Tensor]
    block: driver.ParameterBlock
    stamps: torch.Tensor | None = None


class Live(Protocol):
    """The live ranks of one process: a session, or several whose kernels exchange messages."""

    @property
    def ranks(self) -> Sequence[Rank]: ...

    def synchronize(self) -> None: ...


class Rank(ABC):
    """One live rank's side of a Plan: heap, control words, route overrides and one set of outputs.

    A subclass says where memory is and how launches get there. ``in_place``: bound tensors stay where they are (else
    they are copied into the device's memory). ``beside``: the rank of another Plan on the same device, whose control
    words and abort word this one uses too: what one launch works on, the next does, and one that gives up ends all.
    ``control``: int32 [64] for these words.
    """

    in_place = True
    code = (0, 0)  # address and bytes of the kernel's machine code, where it is known
    _torch: Any

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        *,
        live: int,
        rank: int,
        timeout_ms: int,
        overrides: bool,
        beside: Rank | None = None,
        control: torch.Tensor | None = None,
    ) -> None:
        self.plan, self.device, self.timeout_ms = plan, device, timeout_ms
        self._other = None if beside is None else beside._first
        self.live, self.rank = live, rank
        route = next((o.constants for o in plan.ops if o.kind == "top_k"), None)
        self.top_k = int(route["kTopK"]) if route else 0
        self.experts = int(route["kExperts"]) if route else 0
        self.overrides = overrides and bool(self.top_k)
        self.heap = self._empty("heap", "exchange", "uint8", (plan.heap.bytes,))
        if beside is not None:
            control = beside._control
        if control is None:
            control = self._empty("control", "control", "int32", (params.CONTROL_WORDS,))
        self._control: torch.Tensor = control
        self._routes = self._empty("route_override", "control", "int32", (plan.tokens, max(1, self.top_k)))
        self.outputs = {
            p.name: self._empty(p.name, p.what, p.dtype, p.shape) for p in plan.params if p.what == "output"
        }
        self._expected = params.expected(plan)
        self._positions, self._numbers = params.positions(plan), params.numbers(plan)

    @property
    def _first(self) -> Rank:
        """Whose control words and abort word it uses. Not kept, as what refers to itself is not freed at once."""
        return self if self._other is None else self._other

    @property
    def abort_word(self) -> torch.Tensor:
        """int32 [1]: not 0 once a wait has expired."""
        start = self._first.plan.heap.abort_offset
        return self._first.heap[start : start + 4].view(self._torch.int32)

    @property
    def abort_address(self) -> int:
        """Of the word that is not 0 once a wait has expired."""
        return self._first.heap.data_ptr() + self._first.plan.heap.abort_offset

    def _join(self, heaps: Sequence[int], aborts: Sequence[int]) -> None:
        """Fill the buffers and meet the live ranks, whose heaps and abort words are at these addresses. Ends a
        session's making."""
        self._system = params.System(
            heaps=heaps,
            aborts=aborts,
            control=self._control.data_ptr(),
            route_override=self._routes.data_ptr() if self.overrides else 0,
            rank=self.rank,
            live=self.live,
            world=self.plan.tp,
            timeout_ms=self.timeout_ms,
            code=self.code,
        )
        self._system.pack()  # refuse an impossible world now
        with self.writing(self._routes):
            self._routes.fill_(-1)
        if self._first is self:
            with self.writing(self._control):
                self._control.zero_()
            self.set_tokens(self.plan.tokens)
        self.poison()

    @abstractmethod
    def _empty(self, name: str, what: str, dtype: Any, shape: Sequence[int]) -> torch.Tensor:
        """Device memory; ``what`` is a parameter's, "exchange" or "control"."""

    @abstractmethod
    def launch(self, layer: Layer) -> None:
        """Launch the Plan's kernels in order, in this rank's stream. Returns at once."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for what was launched. Raises HangError when a wait on the device expired."""

    @abstractmethod
    def recover(self) -> None:
        """Make the heap fresh again: after a HangError, or to start counting epochs anew."""

    @property
    def ranks(self) -> Sequence[Rank]:
        """This one."""
        return (self,)

    def writing(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        """For as long as the host writes to a tensor in device memory."""
        return nullcontext()

    # -- what the launches work on ---------------------------------------------------------------------------

    def allocate(self, name: str) -> torch.Tensor:
        """Zeroed memory for parameter ``name``, which may be bound to others of its size too and which launches write.

        For what one layer writes and another reads: a cache is one layer's state and the next one's input.
        """
        found = next((p for p in self.plan.params if p.name == name and p.what in ("input", "output", "state")), None)
        if found is None:
            raise DeviceError(f"{self.plan.name} has no input, output or state {name}")
        made = self._empty(name, "state", found.dtype, found.shape)
        with self.writing(made):
            made.zero_()
        return made

    def bind(self, tensors: Mapping[str, torch.Tensor], *, then: Rank | None = None) -> Layer:
        """Check and bind a tensor for each parameter; the session's own outputs stand in for outputs not given.

        ``then``: whose launch will follow, if that is known.

        State is read and written where it is given: a launch keeps what it does not replace. What a layer's launches
        remember for its next ones is the Layer's own.

        Weights are in the packed layout of :mod:`megagen.ops.packing`, on this session's device; what is bound is in
        the Layer's ``tensors``. Raises DeviceError that names every parameter that is missing, unknown, of wrong type
        or size, strided or misaligned, or written where another one lies: nothing orders a launch's reads of one tensor
        and its writes of another.
        """
        given = {**self.outputs, **self._histories(tensors), **tensors}
        problems = [f"{name}: no such parameter" for name in given if name not in self._expected]
        problems += [
            f"{name}: {problem}"
            for name, want in self._expected.items()
            if (problem := self._problem(want, given.get(name))) is not None
        ]
        problems += [] if problems else self._overlaps(given)
        if problems:
            raise DeviceError(
                f"{self.plan.name}: {len(problems)} of {len(self._expected)} parameters cannot be bound",
                notes=tuple((p, None) for p in problems),
                hint="parameters: " + ", ".join(self._expected),
            )
        placed = self._settled(given)
        stamps, system = None, self._system
        if then is not None and then is not self:
            system = replace(system, next_code=then.code)
        if self.plan.stamps is not None:
            stamps = self._empty("stamps", "state", "uint8", (self.plan.stamps.bytes,))
            with self.writing(stamps):
                stamps.zero_()
            system = replace(system, stamps=stamps.data_ptr())
        data = params.pack(self.plan, system, {name: t.data_ptr() for name, t in placed.items()})
        return Layer(tensors=placed, block=driver.ParameterBlock(data), stamps=stamps)

    def _histories(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of what a layer's launches remember from one to the next: nothing yet."""
        found = {}
        for p in self.plan.params:
            if p.what == "history" and p.name not in given:
                found[p.name] = made = self._empty(p.name, "state", p.dtype, p.shape)
                with self.writing(made):
                    made.zero_()
        return found

    def _settled(self, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors in device memory, ready to be read by a launch."""
        return given

    def _overlaps(self, given: Mapping[str, torch.Tensor]) -> list[str]:
        written = {p.name for p in self.plan.params if p.what in ("output", "state", "history")}
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name) for name, t in given.items())
        found, reach = [], (0, "")  # the furthest end so far, and whose
        for begin, end, name in spans:
            if begin < reach[0] and {name, reach[1]} & written:
                found.append(f"{name}: lies over {reach[1]}, and a launch writes one of them")
            reach = max(reach, (end, name))
        return found

    def _problem(self, want: params.Expected, t: torch.Tensor | None) -> str | None:
        if t is None:
            return f"missing {want.what}"
        size = t.numel() * t.element_size()
        if t.dtype is not self._dtype(want.dtype):
            return f"is {t.dtype}, must be torch.{want.dtype}"
        if size != want.bytes:
            return f"has {size:,} bytes, must have {want.bytes:,}"
        if t.device != self.device:
            return f"is on {t.device}, must be on {self.device}"
        if not t.is_contiguous():
            return "is not contiguous"
        if self.in_place and t.data_ptr() % params.ALIGNMENT:
            return f"starts at {t.data_ptr():#x}, must be aligned to {params.ALIGNMENT} bytes"
        return None

    def _dtype(self, name: Any) -> torch.dtype:
        """torch's dtype for a DType of the Plan or a torch name."""
        found: torch.dtype = getattr(self._torch, params.TORCH_NAMES.get(name, name))
        return found

    def set_tokens(self, tokens: int) -> None:
        """:meth:`set_step` with a chain of so many tokens and nothing in the caches before it."""
        self._refuse_tokens(tokens)
        self.set_step(Step.chain(tokens))

    def set_step(self, step: Step) -> None:
        """What the launches that follow in the current stream work on, captured graphs included.

        Raises DeviceError for more tokens than the Plan's, for positions that its table of rotations lacks, and for
        numbers that a growing cache has no place for: those of a tree go further than its positions.
        """
        self._refuse_tokens(step.tokens)
        if self._numbers is not None and step.numbers.stop > self._numbers:
            raise DeviceError(
                f"{step.tokens} tokens after {step.context}: growing caches of {self.plan.name} hold {self._numbers}"
            )
        last = max(step.positions)
        if self._positions is not None and last >= self._positions:
            raise DeviceError(
                f"a token at position {last}: the table of rotations of {self.plan.name} has {self._positions}"
            )
        self._send(step.words())
        self.step, self.tokens = step, step.tokens

    def _refuse_tokens(self, tokens: int) -> None:
        if not 1 <= tokens <= self.plan.tokens:
            raise DeviceError(f"{tokens} tokens: a launch of {self.plan.name} takes 1 to {self.plan.tokens}")

    def _send(self, words: Sequence[int]) -> None:
        """Write the control words, in the current stream."""
        with self.writing(self._control):
            self._control.copy_(self._torch.tensor(words, dtype=self._torch.int32))

    def set_route_override(self, table: torch.Tensor | None) -> None:
        """Expert ids that replace the router's in the launches that follow; int32 [tokens, top_k], distinct in a row.

        A row of -1 keeps the router's choice, None all of them. For benches and tests. Takes a host tensor, whose ids
        are checked, or a device tensor, whose are not (that would stall the stream): the caller vouches for them.
        """
        if table is None:
            with self.writing(self._routes):
                self._routes.fill_(-1)
            return
        if not self._system.route_override:
            raise DeviceError("this session takes no route overrides")
        rows = table.shape[0] if table.dim() == 2 else 0
        if not 1 <= rows <= self.plan.tokens or table.shape[1] != self.top_k or table.dtype is not self._torch.int32:
            raise DeviceError(
                f"a route override of {table.dtype} {list(table.shape)}",
                hint=f"it must be torch.int32 [1 to {self.plan.tokens}, {self.top_k}]",
            )
        if table.device.type == "cpu":
            self._refuse_routes(table)
        with self.writing(self._routes):
            self._routes[rows:].fill_(-1)
            self._routes[:rows].copy_(table, non_blocking=True)

    def _refuse_routes(self, table: torch.Tensor) -> None:
        """An expert twice in a row would leave one of its slots without a producer: a hang."""
        if not bool(((table >= -1) & (table < self.experts)).all()):
            raise DeviceError(f"a route override names an expert outside -1 to {self.experts - 1}")
        whole = (table >= 0).all(1)
        if bool(((table >= 0).any(1) & ~whole).any()):
            raise DeviceError(
                "a route override forces some of a token's experts", hint="force all of them, or none (-1)"
            )
        ordered = table[whole].sort(1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise DeviceError("a route override names an expert twice for one token")

    def poison(self) -> None:
        """Fill the session's outputs with NaN, so that what a launch leaves out shows."""
        for out in self.outputs.values():
            with self.writing(out):
                out.fill_(float("nan") if out.is_floating_point() else -1)

    # -- what the launches left ------------------------------------------------------------------------------

    def epoch(self) -> int:
        """Completed launches since the last reset. Raises DeviceError when the blocks disagree."""
        counts = set(heap.epochs(self.heap, self.plan))
        if len(counts) != 1:
            raise DeviceError(f"the blocks disagree on the number of launches: {sorted(counts)}")
        return counts.pop()

    def unreadable(self, channel: ChannelPlan) -> str | None:
        """Why a channel's data is not in the heap after a launch, or None when it is."""
        if channel.kind in IN_SHARED:
            return "lives in shared memory"
        if channel.reset is Reset.READER:
            return "is reset by its reader"
        return None

    def read(self, name: str) -> torch.Tensor:
        """What the last completed launch left in channel ``name``: a copy, typed and shaped as in the Plan.

        u32 comes as int32. Rows past the launch's tokens hold whatever the channel's empty word means.
        """
        channel = self.plan.channel(name)
        reason, epoch = self.unreadable(channel), self.epoch()
        if reason or epoch == 0:
            raise DeviceError(f"channel {name} cannot be read: it {reason or 'has not been written since the reset'}")
        start = channel.offset + (epoch - 1) % channel.copies * channel.bytes
        dtype = self._dtype(channel.dtype)
        copy = self.heap[start : start + channel.bytes].clone().view(dtype)
        return heap.values(copy, channel, self.plan.tp)

    def leftovers(self) -> list[heap.Leftover]:
        """Slots that should be empty for the next launch and are not."""
        return heap.leftovers(self.heap, self.plan, self.epoch())

    def aborted(self) -> int:
        """The abort word: 0, or who gave up; see :func:`megagen.runtime.hang.error`."""
        return self._first._u32(self._first.plan.heap.abort_offset)

    def hang_records(self) -> list[hang.HangRecord]:
        """What this rank's waiting warps wrote down when the launch was given up."""
        start = self.plan.heap.record_offset
        size = hang.RECORD_BYTES * self.plan.launch.blocks * self.plan.launch.warps
        return hang.decode(bytes(self.heap[start : start + size].cpu().numpy().tobytes()))

    def _u32(self, offset: int) -> int:
        return int(self.heap[offset : offset + 4].view(self._torch.int32).item()) & 0xFFFFFFFF
