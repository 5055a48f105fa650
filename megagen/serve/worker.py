"""The process of one rank: ``python -m megagen.serve.worker``, started by :mod:`megagen.serve.supervisor` alone.

It makes the rank's decoder, then runs whole generations by itself, as all ranks do: they choose the same tokens, for they
have the same logits and draw the same numbers. Rank 0's go to the parent one by one, the others' a few at a time.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from megagen.errors import MegagenError
from megagen.serve.board import Board
from megagen.serve.decoding import Decoding
from megagen.serve.generate import Meter, Stop, generate
from megagen.serve.sampling import Sampling

BEAT_S = 0.2
EVERY = 8  # tokens, of ranks other than 0, that go to the parent together
GATE_S = 0.5e-3  # between looks at whether the parent allows more


@dataclass(frozen=True)
class Load:
    """The first message to a worker: ``factory``, "package.module:function", makes the rank's decoder."""

    factory: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    ids: tuple[int, ...]
    max_new_tokens: int | None
    sampling: Sampling
    stop: frozenset[int]


@dataclass(frozen=True)
class Progress:
    """A part of loading is done."""


@dataclass(frozen=True)
class Ready:
    vocab: int
    positions: int
    most: int


@dataclass(frozen=True)
class Ids:
    """The next tokens that a rank chose."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Done:
    """The last tokens of a run. ``stop`` is None for one that the parent ended."""

    ids: tuple[int, ...]
    stop: Stop | None
    statistics: Mapping[str, float]


@dataclass(frozen=True)
class Failed:
    """An exception, in parts: megagen's have required arguments, so pickle alone cannot remake them."""

    kind: type[BaseException]
    text: str
    state: Mapping[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        state = {k: v for k, v in vars(error).items() if _travels(v)}
        ours = isinstance(error, MegagenError) and _travels(type(error))
        return cls(type(error) if ours else RuntimeError, f"{type(error).__name__}: {error}", state)

    def error(self) -> MegagenError | None:
        """megagen's own, as it was; None for any other."""
        if not issubclass(self.kind, MegagenError):
            return None
        made = self.kind.__new__(self.kind)
        vars(made).update(self.state)
        return made


def _travels(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def main(arguments: list[str]) -> int:
    """``arguments``: rank, ranks, the parent's process id, and three files: the parent's messages, the board's memory,
    and the reading end of a pipe that only the parent could write to."""
    rank, ranks, parent, messages, memory, life = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    for fd in (messages, memory, life):
        os.set_inheritable(fd, False)
    _end_with(parent, life)
    board, link = Board(ranks, memory), Connection(messages)
    threading.Thread(target=_beat, args=(board, rank, parent), daemon=True).start()
    try:
        _serve(rank, board, link)
    except EOFError:
        return 1  # no parent
    except BaseException as error:
        if os.environ.get("MEGAGEN_TRACEBACK", "0") not in ("", "0"):
            import traceback

            traceback.print_exc()
        link.send(Failed.of(error))
        with suppress(EOFError):  # until the parent knows what became of the others
            link.recv()
        return 1
    return 0


def _serve(rank: int, board: Board, link: Connection) -> None:
    load: Load = link.recv()
    module, _, function = load.factory.partition(":")
    make = getattr(importlib.import_module(module), function)
    decoding: Decoding = make(rank=rank, progress=lambda: link.send(Progress()), **load.arguments)
    link.send(Ready(decoding.vocab, decoding.positions, decoding.most))
    while (request := link.recv()) is not None:
        _run(rank, board, link, decoding, request)
    decoding.close()


def _run(rank: int, board: Board, link: Connection, decoding: Decoding, request: Request) -> None:
    def proceed(made: int) -> bool:
        while True:
            tokens, final = board.allowed()
            if made < tokens:
                board.count_step(rank)
                return True
            if final:
                return False
            time.sleep(GATE_S)

    meter, waiting, stop = Meter(), list[int](), None
    every = 1 if rank == 0 else EVERY
    for token in generate(
        decoding,
        request.ids,
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        stop=request.stop,
        meter=meter,
        proceed=proceed,
    ):
        waiting.append(token.id)
        if stop := token.stop:
            break
        if len(waiting) == every:
            link.send(Ids(tuple(waiting)))
            waiting.clear()
    link.send(Done(tuple(waiting), stop, meter.statistics(decoding.statistics()) if rank == 0 else {}))


def _end_with(parent: int, life: int) -> None:
    """Have the kernel end this process when the pipe closes, so when the parent has ended: with SIGIO, whatever this
    process does just then. (A parent-death signal would come when the thread ends that started this process.)"""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    if os.getppid() != parent:
        os._exit(1)


def _beat(board: Board, rank: int, parent: int) -> None:
    while True:
        board.count_beat(rank)
        if os.getppid() != parent:
            os._exit(1)
        time.sleep(BEAT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
