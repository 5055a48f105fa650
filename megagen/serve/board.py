"""Words that a run's processes share: read and written in every step, without a system call."""

from __future__ import annotations

import mmap
import os

_LINE = 8  # words of a cache line: each process writes its own


class Board:
    """One line of the parent's, then one a rank. A word is written by one process, and as a whole.

    - The parent's word: how many tokens the ranks may make, and whether that is final. All ranks see the same final
      number, so they end an abandoned run after the same step.
    - A rank's words: ``beat``, which counts while its process runs, and ``steps``, which it has begun.
    """

    def __init__(self, ranks: int, fd: int) -> None:
        self.fd = fd
        self._words = memoryview(mmap.mmap(fd, 8 * _LINE * (ranks + 1))).cast("q")

    @classmethod
    def make(cls, ranks: int) -> Board:
        fd = os.memfd_create("megagen")
        os.ftruncate(fd, 8 * _LINE * (ranks + 1))
        return cls(ranks, fd)

    def allow(self, tokens: int) -> None:
        self._words[0] = tokens

    def finish(self) -> None:
        """What is allowed now is final."""
        self._words[0] = -1 - self.allowed()[0]

    def allowed(self) -> tuple[int, bool]:
        """How many tokens, and whether that is final."""
        word = self._words[0]
        return (word, False) if word >= 0 else (-1 - word, True)

    def beat(self, rank: int) -> int:
        return self._words[_LINE * (1 + rank)]

    def steps(self, rank: int) -> int:
        return self._words[_LINE * (1 + rank) + 1]

    def count_beat(self, rank: int) -> None:
        self._words[_LINE * (1 + rank)] += 1

    def count_step(self, rank: int) -> None:
        self._words[_LINE * (1 + rank) + 1] += 1
