"""The processes of a group's ranks, one a GPU: started, given runs, watched, and ended together.

The processes run alone, in lockstep through their GPUs; this side takes their tokens, compares them, and looks for what
no GPU sees: a process that ended, that is stopped, or that does not go on. Whatever happens to one ends them all, and
the error names it. Its clock runs only while somebody waits for a token, so a slow taker, or a stopped parent, is no
rank's fault.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from megagen.errors import DeviceError, HangError, MegagenError, RankError
from megagen.serve.board import Board
from megagen.serve.generate import Token, budget
from megagen.serve.messages import Done, Failed, Ids, Load, Progress, Ready, Request
from megagen.serve.sampling import GREEDY, Sampling

AHEAD = 16  # tokens that ranks make before somebody takes them
TICK_S = 0.05  # between looks at the processes
STALE_S = 1.0  # without a beat: worth a mention
QUIET_S = 4.0  # without a beat, and without a moment of CPU time: given up
STALL_S = 4.0  # without a step
SETTLE_S = 0.2  # in which others may report what they know of a failure
HANG_S = 1.0  # in which all ranks report that the device gave up waiting, but for one that is its cause
CLOSE_S = 20.0  # to free what a rank has
GRACE_S = 1.0  # from SIGTERM to SIGKILL


@dataclass(eq=False)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    link: connection.Connection
    life: int  # the writing end of the pipe that it ends with
    busy: bool = True  # loading, or in a run
    ended: bool = False
    failed: Failed | None = None
    failed_at: float = 0.0
    ready: Ready | None = None
    done: Done | None = None
    ids: list[int] = field(default_factory=list)
    compared: int = 0  # of them, with rank 0's
    beat: int = -1
    cpu: int = -1
    steps: int = -1
    quiet: float = 0.0  # seconds without a sign of life
    stalled: float = 0.0  # seconds without a step

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid})"

    def state(self) -> tuple[str, int]:
        """The process's state as Linux calls it ("T": stopped), and its CPU time."""
        with suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return words[0], int(words[11]) + int(words[12])
        return "?", self.cpu

    def failure(self, kind: type[BaseException]) -> bool:
        """Whether it raised one of this kind."""
        return self.failed is not None and issubclass(self.failed.kind, kind)

    def ending(self) -> str:
        code = self.process.poll()
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        name = {s.value: f" ({s.name})" for s in signal.Signals}.get(-code, "")
        return f"was killed by signal {-code}{name}"


class Supervisor:
    """``ranks`` processes, each with the decoder that ``factory`` ("package.module:function") makes there, called with
    ``rank``, ``progress`` and ``arguments``.

    The processes have the environment that torchrun would give them (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT). ``stall_s`` is how long a step may take at most (None: any time). After an error there is nothing left
    to use: all processes have ended when it is raised. One thread at a time, one run at a time.
    """

    def __init__(
        self,
        ranks: int,
        factory: str,
        arguments: Mapping[str, Any],
        *,
        stall_s: float | None = STALL_S,
        progress: Callable[..., None] = lambda *told: None,
    ) -> None:
        self._stall_s, self._progress = stall_s, progress
        self._board = Board.make(ranks)
        self._ranks: list[_Rank] = []
        self._ticked, self._running = time.monotonic(), False
        self._finalizer = weakref.finalize(self, _end, self._ranks)
        self.statistics: Mapping[str, float] = {}  # of the last run
        try:
            environment = _environment(ranks)
            for rank in range(ranks):
                with _uninterrupted():
                    self._ranks.append(_start(rank, ranks, self._board, environment))
            for one in self._ranks:
                self._tell(one, Load(factory, arguments))
            os.close(self._board.fd)
            while any(r.ready is None for r in self._ranks):
                self._watch()
        except BaseException:
            self.abort()
            raise
        first = self._ranks[0].ready
        assert first is not None
        self.vocab, self.positions, self.most = first.vocab, first.positions, first.most

    @property
    def pids(self) -> list[int]:
        return [r.process.pid for r in self._ranks]

    # -- runs ------------------------------------------------------------------------------------------------

    def generate(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        stop: Collection[int] = (),
    ) -> Iterator[Token]:
        """As :func:`megagen.serve.generate.generate`, on all ranks. A run that is not taken to its end stops soon."""
        budget(ids, max_new_tokens, self.vocab, self.positions)
        return self._run(Request(tuple(ids), max_new_tokens, sampling, frozenset(stop)))

    def _run(self, request: Request) -> Iterator[Token]:
        if not self._ranks:
            raise MegagenError("the engine is closed: its ranks have ended", hint="make another one")
        if self._running:
            raise MegagenError("a run is under way", hint="take it to its end, or close() it")
        self._running = True
        try:
            yield from self._tokens(request)
        finally:
            self._running = False
            self._board.finish()

    def _tokens(self, request: Request) -> Iterator[Token]:
        while any(r.busy for r in self._ranks):  # with a run that was abandoned
            self._watch()
        self._board.allow(AHEAD)
        for one in self._ranks:
            one.busy, one.done, one.ids, one.compared = True, None, [], 0
            one.quiet = one.stalled = 0.0
            # A long prompt fills what a rank does not read, and one that is stopped reads nothing.
            threading.Thread(target=self._tell, args=(one, request), daemon=True).start()
        first, given = self._ranks[0], 0
        while first.done is None or any(r.busy for r in self._ranks):
            self._watch()
            while given < len(first.ids) - (first.done is not None):  # the last one waits for all ranks
                given += 1
                self._board.allow(given + AHEAD)
                yield Token(first.ids[given - 1])
        self.statistics = first.done.statistics
        yield Token(first.ids[-1], first.done.stop)

    # -- watching --------------------------------------------------------------------------------------------

    def _tell(self, one: _Rank, message: object) -> None:
        with suppress(OSError):  # it has ended, which is seen next
            one.link.send(message)

    def _watch(self) -> None:
        """Wait a moment for messages, and raise the error, with all processes ended, when there is reason to."""
        try:
            self._listen(TICK_S)
            self._time()
            if self._troubled():
                raise self._error()
            self._compare()
        except MegagenError:
            self.abort()
            raise

    def _listen(self, seconds: float) -> None:
        links = {r.link: r for r in self._ranks if not r.ended}
        for link in connection.wait(list(links), seconds):
            one = links[link]  # type: ignore[index]
            try:
                while one.link.poll():
                    self._heard(one, one.link.recv())
            except (EOFError, OSError):
                one.ended = True
                with suppress(subprocess.TimeoutExpired):
                    one.process.wait(SETTLE_S)

    def _heard(self, one: _Rank, message: object) -> None:
        match message:
            case Ids(ids):
                one.ids += ids
            case Done(ids):
                one.ids += ids
                one.done, one.busy = message, False
            case Ready():
                one.ready, one.busy = message, False
            case Progress(told):
                if one.rank == 0:
                    self._progress(*told)
            case Failed():
                one.failed, one.failed_at = message, time.monotonic()

    def _time(self) -> None:
        """Count the time, as far as somebody watched, in which ranks gave no sign of life or made no step."""
        now = time.monotonic()
        passed, self._ticked = min(now - self._ticked, 2 * TICK_S), now
        for one in self._ranks:
            beat, steps = self._board.beat(one.rank), self._board.steps(one.rank)
            one.quiet = 0.0 if beat != one.beat else one.quiet + passed
            one.stalled = 0.0 if steps != one.steps or one.ready is None or not one.busy else one.stalled + passed
            if one.quiet > STALE_S:
                cpu = one.state()[1]
                if cpu != one.cpu:  # it works, and does not get to beat
                    one.cpu, one.quiet = cpu, STALE_S
            one.beat, one.steps = beat, steps

    def _silent(self, one: _Rank) -> bool:
        return one.quiet > QUIET_S

    def _stalled(self, one: _Rank) -> bool:
        return self._stall_s is not None and one.stalled > self._stall_s

    def _troubled(self) -> bool:
        return any(r.ended or r.failed or self._silent(r) or self._stalled(r) for r in self._ranks)

    def _error(self) -> MegagenError:
        """What went wrong. What befalls one rank, the others feel as devices that fail or give up waiting, maybe
        sooner than it shows here. So in this order: a rank that ended, one that is stopped, what a rank raised that is
        no device's, then a device's failure, then different tokens, and of waits that expired the one for whom.
        """
        self._settle()
        failed = sorted((r for r in self._ranks if r.failed), key=lambda r: r.failed_at)
        silent = sorted((r for r in self._ranks if not r.failed), key=lambda r: (-r.quiet, not r.busy, r.steps))
        for one in self._ranks:
            if one.ended and one.failed is None:
                return self._fault(one, one.ending(), killed=True)
        felt = all(r.failure(DeviceError) for r in failed)
        for one in silent:
            if felt and one.quiet > STALE_S and one.state()[0] in ("T", "t"):
                return self._fault(one, f"is stopped (SIGSTOP): no sign of life for {one.quiet:.1f} s")
        for one in sorted(failed, key=lambda r: r.failure(DeviceError)):
            if not one.failure(HangError):
                return self._raised(one)
        self._compare()
        if not silent:
            return self._raised(failed[0])
        one = silent[0]
        if one.quiet > STALE_S:
            return self._fault(one, f"does not answer: no sign of life for {one.quiet:.1f} s")
        one = min(silent, key=lambda r: (not r.busy, r.steps, -r.stalled))
        return self._fault(one, f"does not go on: in step {one.steps:,} for {one.stalled:.1f} s")

    def _settle(self) -> None:
        """Hear what others have to say, for a moment; longer if all that is known is that waits expired."""
        began = time.monotonic()
        while True:
            hangs = [r.failure(HangError) for r in self._ranks]
            only = any(hangs) and not any(
                r.ended or self._silent(r) or (r.failed and not r.failure(HangError)) for r in self._ranks
            )
            if all(hangs) or time.monotonic() - began > (HANG_S if only else SETTLE_S):
                return
            self._listen(TICK_S)
            self._time()

    def _notes(self, cause: _Rank) -> tuple[tuple[str, None], ...]:
        """What there is to say of the other ranks."""
        found = []
        for one in self._ranks:
            if one is not cause and one.failed is not None:
                found.append((f"{one}: {one.failed.text}", None))
            elif one is not cause and one.ended:
                found.append((f"{one} {one.ending()}", None))
        return tuple(found)

    def _fault(self, one: _Rank, what: str, *, killed: bool = False) -> RankError:
        hint = None
        if killed and one.process.poll() == -signal.SIGKILL:
            hint = "if nobody killed it, the system may have been out of memory: `dmesg` says so"
        return RankError(f"{one} {what}", rank=one.rank, pid=one.process.pid, hint=hint, notes=self._notes(one))

    def _raised(self, one: _Rank) -> MegagenError:
        assert one.failed is not None
        error = one.failed.error()
        if error is None:
            return RankError(
                f"{one} raised {one.failed.text}", rank=one.rank, pid=one.process.pid, notes=self._notes(one),
                hint="MEGAGEN_TRACEBACK=1 shows where",
            )  # fmt: skip
        error.message = f"{one}: {error.message}"
        error.args = (error.message,)
        error.notes = (*error.notes, *self._notes(one))
        return error

    def _compare(self) -> None:
        """Raises RankError when the ranks chose different tokens."""
        first = self._ranks[0]
        for other in self._ranks[1:]:
            n = min(len(first.ids), len(other.ids))
            if first.ids[other.compared : n] == other.ids[other.compared : n]:
                other.compared = n
                continue
            self._disagree(next(i for i in range(n) if first.ids[i] != other.ids[i]))

    def _disagree(self, at: int) -> NoReturn:
        """Name the ranks whose token ``at`` is not that of most, or not rank 0's."""
        until = time.monotonic() + SETTLE_S
        while any(len(r.ids) <= at and not r.ended for r in self._ranks) and time.monotonic() < until:
            self._listen(TICK_S)
        chosen = {r: r.ids[at] for r in self._ranks if len(r.ids) > at}
        usual = Counter(chosen.values()).most_common(1)[0][0]
        most = next(r for r, token in chosen.items() if token == usual)
        odd, *more = (r for r, token in chosen.items() if token != usual)
        raise RankError(
            f"{odd} chose {chosen[odd]} as new token {at}, and {most} {usual}: the ranks disagree",
            rank=odd.rank,
            pid=odd.process.pid,
            notes=tuple((f"{r} chose {chosen[r]}", None) for r in more),
        )

    # -- ends ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let the ranks free what they have, and end. Those that are in the middle of something are just ended."""
        if self._ranks and not any(r.busy or r.failed or r.ended for r in self._ranks):
            for one in self._ranks:
                self._tell(one, None)
                one.link.close()
            deadline = time.monotonic() + CLOSE_S
            for one in self._ranks:
                with suppress(subprocess.TimeoutExpired):
                    one.process.wait(max(0.0, deadline - time.monotonic()))
        self.abort()

    def abort(self) -> None:
        """End all processes now."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if kind is None else self.abort()


def _environment(ranks: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
    more = {"PYTHONPATH": path, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**os.environ, **more}


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A Ctrl-C waits for the end of this: it must not come between a process's start and its place in a list."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield  # Python raises KeyboardInterrupt in the main thread only
        return
    came = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def _start(rank: int, ranks: int, board: Board, environment: Mapping[str, str]) -> _Rank:
    """A process in a group of its own: a terminal's Ctrl-C is the parent's. What it prints goes to standard error."""
    ours, theirs = connection.Pipe()
    life, end = os.pipe()
    fds = (theirs.fileno(), board.fd, life)
    words = [sys.executable, "-P", "-m", "megagen.serve.worker", *map(str, (rank, ranks, os.getpid(), *fds))]
    try:
        process = subprocess.Popen(
            words,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=fds,
            process_group=0,
        )
    finally:
        theirs.close()
        os.close(life)
    return _Rank(rank, process, ours, end)


def _end(ranks: list[_Rank]) -> None:
    """End the processes: those that can act on it with SIGTERM, whoever is left after GRACE_S with SIGKILL."""
    for one in ranks:
        with suppress(ProcessLookupError):
            one.process.send_signal(signal.SIGKILL if one.quiet > STALE_S else signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for one in ranks:
        try:
            one.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            with suppress(subprocess.TimeoutExpired):  # the driver may hold it for longer
                one.process.wait(GRACE_S)
        one.link.close()
        with suppress(OSError):
            os.close(one.life)
    ranks.clear()
