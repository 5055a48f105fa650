"""The process of one rank: ``python -m megagen.serve.worker``, started by :mod:`megagen.serve.supervisor` alone.

It makes the rank's decoder, then runs whole generations by itself, as all ranks do: they choose the same tokens, for
they have the same logits and draw the same numbers. Rank 0's go to the parent one by one, the others' a few at a time.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from megagen.serve.board import Board
from megagen.serve.decoding import Decoding
from megagen.serve.generate import Meter, generate
from megagen.serve.messages import Done, Failed, Ids, Load, Progress, Ready, Request

BEAT_S = 0.2
EVERY = 8  # tokens, of ranks other than 0, that go to the parent together
GATE_S = 0.5e-3  # between looks at whether the parent allows more


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
        with suppress(EOFError, OSError):
            link.send(Failed.of(error))
            link.recv()  # until the parent knows what became of the others
        return 1
    return 0


def _serve(rank: int, board: Board, link: Connection) -> None:
    load: Load = link.recv()
    module, _, function = load.factory.partition(":")
    make = getattr(importlib.import_module(module), function)
    decoding: Decoding = make(rank=rank, progress=lambda *told: link.send(Progress(told)), **load.arguments)
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
    tokens = generate(
        decoding,
        request.ids,
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        stop=request.stop,
        meter=meter,
        proceed=proceed,
    )
    try:
        for token in tokens:
            waiting.append(token.id)
            if stop := token.stop:
                break
            if len(waiting) == every:
                link.send(Ids(tuple(waiting)))
                waiting.clear()
    except Exception:
        link.send(Ids(tuple(waiting)))  # which may tell why
        raise
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
