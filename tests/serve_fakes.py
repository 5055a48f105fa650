"""Decoders for the tests of megagen.serve: a language model that is a hash, and ways for one rank to misbehave."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megagen.errors import HangError, MegagenError, WeightError

VOCAB = 1000


def following(ids: Sequence[int], vocab: int = VOCAB) -> int:
    """The toy model: the next token is a hash of all before it."""
    return int.from_bytes(hashlib.sha256(json.dumps(list(ids)).encode()).digest()[:4]) % vocab


def continued(ids: Sequence[int], tokens: int, vocab: int = VOCAB) -> list[int]:
    """The greedy answer, made without any of the code under test."""
    made = list(ids)
    for _ in range(tokens):
        made.append(following(made, vocab))
    return made[len(ids) :]


class Fake:
    """Keeps what it is given by number, as caches do, and notes its steps."""

    def __init__(self, vocab: int = VOCAB, positions: int = 4096, most: int = 16, step_s: float = 0.0) -> None:
        self.vocab, self.positions, self.most, self._step_s = vocab, positions, most, step_s
        self.cache: list[int | None] = [None] * positions
        self.steps: list[tuple[int, int]] = []
        self.closed = False
        self._last: list[list[int]] = []

    def step(self, ids: Sequence[int], context: int) -> list[int]:
        assert 1 <= len(ids) <= self.most and context + len(ids) <= self.positions
        assert None not in self.cache[:context], "a hole in the cache"
        if self._step_s:
            time.sleep(self._step_s)
        self.steps.append((context, len(ids)))
        self.cache[context : context + len(ids)] = ids
        self._last = [self.cache[: context + i + 1] for i in range(len(ids))]  # type: ignore[misc]
        return [following(seen, self.vocab) for seen in self._last]

    def logits(self) -> Any:
        import torch

        rows = []
        for seen in self._last:
            seed = following(seen, 1 << 30)
            rows.append(torch.randn(self.vocab, generator=torch.Generator().manual_seed(seed)))
        return torch.stack(rows)

    def statistics(self) -> Mapping[str, float]:
        return {"kernels": 64.0, "floor_s": 1e-3}

    def close(self) -> None:
        self.closed = True


class Misbehaving(Fake):
    """``what`` happens to rank ``who`` in step ``when``."""

    def __init__(self, rank: int, what: str, who: int, when: int, **more: Any) -> None:
        super().__init__(**more)
        self._rank, self._what, self._who, self._when = rank, what, who, when

    def step(self, ids: Sequence[int], context: int) -> list[int]:
        best = super().step(ids, context)
        if len(self.steps) == self._when:
            if self._rank == self._who:
                return self._act(best)
            if self._what == "late exit":
                raise HangError("a wait expired", record=None)
            if self._what == "hang":  # the others' GPUs give up on it
                time.sleep(0.3)
                raise HangError("a wait expired after 300 ms", record=None)
        return best

    def _act(self, best: list[int]) -> list[int]:
        match self._what:
            case "raise":
                raise WeightError("a shard is damaged", hint="copy it again", notes=(("layer 3", None),))
            case "bug":
                raise ZeroDivisionError("division by zero")
            case "exit" | "late exit":
                time.sleep(0.1 if self._what == "late exit" else 0)
                os._exit(3)
            case "hang" | "stall":
                time.sleep(1000)
            case "differ":
                return [(b + 1) % self.vocab for b in best]
            case "print":
                sys.stdout.write("from a rank\n")
                sys.stdout.flush()
        return best


def make(*, rank: int, progress: Callable[..., None], draws: bool = False, **more: Any) -> Fake:
    if draws:
        import torch  # noqa: F401 - which takes longer than a step may
    progress()
    progress("packing", 1.0, 2.0)
    return Fake(**more)


def make_misbehaving(*, rank: int, progress: Callable[[], None], **more: Any) -> Fake:
    return Misbehaving(rank, **more)


def make_noted(*, rank: int, progress: Callable[[], None], note: str, load_s: float = 0.0, **more: Any) -> Fake:
    """Leaves the process's id in a folder, for tests whose parent cannot tell."""
    (Path(note) / str(rank)).write_text(str(os.getpid()))
    time.sleep(load_s)
    return Fake(**more)


def make_never(*, rank: int, progress: Callable[[], None], who: int = 1) -> Fake:
    if rank == who:
        raise MegagenError("no such folder", hint="another one")
    time.sleep(1000)
    raise AssertionError


def make_decoder(*, rank: int, progress: Callable[..., None], directory: str, **_: Any) -> Fake:
    """In the place of the real decoder of a checkpoint whose config.json describes a Fake."""
    return make(rank=rank, progress=progress, **json.loads((Path(directory) / "config.json").read_text())["fake"])


class Decoders:
    """In the place of megagen.runtime.decoder."""

    opened: list[dict[str, Any]] = []  # noqa: RUF012 - of the process

    @staticmethod
    def foresee(directory: Path, *, tp: int, live: int, positions: int) -> list[tuple[str, int]]:
        return [("weights", 4_000_000_000 // tp), ("keys and values", positions * 1_000_000)]

    @classmethod
    def open(cls, directory: Path, **given: Any) -> Fake:
        cls.opened.append(given)
        made = make_decoder(rank=given["rank"], progress=given["progress"], directory=str(directory))
        made.positions = given["positions"]
        made.cache = [None] * made.positions
        return made


def main(what: str, *args: str) -> None:
    """``group``: a parent of so many ranks that leave notes in a folder. ``decode``: the command, with fake ranks."""
    if what == "group":
        from megagen.serve.supervisor import Supervisor

        with Supervisor(int(args[0]), "serve_fakes:make_noted", {"note": args[1], "step_s": 0.01}) as group:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            for _ in group.generate([1, 2, 3]):
                pass
    else:
        from megagen.cli.main import app
        from megagen.serve import engine

        setattr(engine, "_decoder", lambda: Decoders)  # noqa: B010
        engine.OPEN = "serve_fakes:make_decoder"
        app(["decode", *args])


if __name__ == "__main__":
    main(*sys.argv[1:])
