"""A checkpoint as something that answers: tokenizer, decoder, and, for several GPUs, the processes of its ranks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from megagen.errors import DeviceError, HangError, MegagenError, WeightError
from megagen.serve.decoding import Decoding
from megagen.serve.generate import Meter, Stop, Token, generate
from megagen.serve.sampling import GREEDY, Sampling
from megagen.serve.supervisor import Supervisor
from megagen.serve.text import Text, stop_ids

POSITIONS = 4096  # numbers that the caches hold by default
OPEN = "megagen.serve.engine:open_rank"
CHUNK = 128  # positions
FOLDER = "give the folder of a checkpoint in the Hugging Face layout"
Needs = Sequence[tuple[str, int]]  # (what, bytes) of each GPU
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class _Source(Protocol):
    """Tokens of a decoder here, or of ranks elsewhere."""

    @property
    def vocab(self) -> int: ...
    @property
    def positions(self) -> int: ...
    @property
    def statistics(self) -> Mapping[str, float]: ...
    def generate(
        self, ids: Sequence[int], *, max_new_tokens: int | None, sampling: Sampling, stop: Collection[int]
    ) -> Iterator[Token]: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class Here:
    """A decoder in this process."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self.vocab, self.positions = decoding.vocab, decoding.positions
        self._meter = Meter()

    @property
    def statistics(self) -> Mapping[str, float]:
        return self._meter.statistics(self._decoding.statistics())

    def generate(
        self, ids: Sequence[int], *, max_new_tokens: int | None, sampling: Sampling, stop: Collection[int]
    ) -> Iterator[Token]:
        self._meter = meter = Meter()
        return generate(self._decoding, ids, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, meter=meter)

    def close(self) -> None:
        self._decoding.close()

    def abort(self) -> None:
        """Nothing: a device that hangs would hang this too. What it has is freed with the process."""


class Generation(Iterator[Token]):
    """A run: its tokens, with their text where there is a tokenizer. After the last one, why it was the last.

    ``text`` is the answer as far as it is complete, None without a tokenizer. A stop token is among ``ids`` and not in
    the text.
    """

    def __init__(self, source: _Source, tokens: Iterator[Token], text: Text | None, prompt: Sequence[int]) -> None:
        self._source, self._tokens = source, tokens
        self._stream = None if text is None else text.stream(prompt)
        self.prompt = list(prompt)
        self.ids: list[int] = []
        self.text = None if text is None else ""
        self.stop: Stop | None = None
        self.statistics: Mapping[str, float] = {}

    def __next__(self) -> Token:
        token = next(self._tokens)
        self.ids.append(token.id)
        text = ""
        if self._stream is not None and self.text is not None:
            text = "" if token.stop is Stop.TOKEN else self._stream.add(token.id)
            text += self._stream.end() if token.stop else ""
            self.text += text
        if token.stop is not None:
            self.stop, self.statistics = token.stop, self._source.statistics
        return Token(token.id, token.stop, text)

    def close(self) -> None:
        """Ask for no more: what is under way stops soon."""
        close = getattr(self._tokens, "close", None)
        if close is not None:
            close()


class Engine:
    """A model that is ready to continue prompts. One run at a time; close it, or use it in a ``with`` statement."""

    def __init__(self, source: _Source, *, text: Text | None = None, stop: Collection[int] = (), rank: int = 0) -> None:
        self._source, self.rank = source, rank
        self.text = text
        self.stop = frozenset(stop)

    @classmethod
    def from_pretrained(
        cls,
        directory: Path | str,
        *,
        tp: int = 1,
        max_positions: int = POSITIONS,
        emulate: bool = False,
        progress: Callable[..., None] = lambda *told: None,
        needs: Needs | None = None,
        text: Text | None = None,
    ) -> Self:
        """The checkpoint in ``directory`` on ``tp`` GPUs, a process each; on one, or emulated, in this process.

        Under torchrun (RANK, WORLD_SIZE and LOCAL_RANK are set) this process is one of the ranks, and torchrun looks
        after the others. ``max_positions``: numbers that the caches hold, rounded up to whole chunks. ``progress`` is
        called as parts are loaded: with what is being done, how much of it, and of how much, or with nothing.
        ``needs`` and ``text``: what :func:`foresee` says, and the tokenizer, where they are known already. Raises
        MegagenError.
        """
        checkpoint = Path(directory)
        require(checkpoint)
        text = text or Text.load(checkpoint)
        stop = stop_ids(checkpoint, text)
        positions = rounded(max_positions)
        needs = None if emulate else needs or foresee(checkpoint, tp=tp, positions=positions)
        arguments: dict[str, Any] = {"directory": str(checkpoint), "tp": tp, "positions": positions, "needs": needs}
        if place := _torchrun(tp):
            rank = place[0]
            return cls(Here(open_rank(rank=rank, progress=progress, **arguments)), text=text, stop=stop, rank=rank)
        if tp == 1 or emulate:
            return cls(Here(open_rank(rank=0, progress=progress, **arguments)), text=text, stop=stop)
        return cls(Supervisor(tp, OPEN, arguments, progress=progress), text=text, stop=stop)

    @property
    def vocab(self) -> int:
        return self._source.vocab

    @property
    def positions(self) -> int:
        return self._source.positions

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        if self.text is None:
            raise MegagenError("the checkpoint has no tokenizer: a prompt cannot be text", hint="give its token ids")
        return self.text.encode(prompt, chat=chat)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        chat: bool = False,
        stop: Collection[int] | None = None,
    ) -> Generation:
        """What follows ``prompt``: text, or ids as they are. Refuses what cannot be before anything runs.

        ``max_new_tokens`` None: as many as the caches hold. ``chat``: the prompt is a user's turn. ``stop``: tokens to
        end at, instead of the checkpoint's.
        """
        ids = self.encode(prompt, chat=chat) if isinstance(prompt, str) else list(prompt)
        stops = self.stop if stop is None else stop
        tokens = self._source.generate(ids, max_new_tokens=max_new_tokens, sampling=sampling, stop=stops)
        return Generation(self._source, tokens, self.text, ids)

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a HangError the launches have ended, after another DeviceError the device may hang.
        hangs = kind is not None and issubclass(kind, DeviceError) and not issubclass(kind, HangError)
        if hangs or (kind is not None and isinstance(self._source, Supervisor)):
            self._source.abort()
        else:
            self.close()


def require(checkpoint: Path) -> None:
    """Raises WeightError for what is no checkpoint's folder."""
    if not checkpoint.is_dir():
        raise WeightError(f"{checkpoint} is no checkpoint: it is no folder", hint=FOLDER)
    if not (checkpoint / "config.json").is_file():
        raise WeightError(f"{checkpoint} is no checkpoint: it has no config.json", hint=FOLDER)


def _torchrun(tp: int) -> tuple[int, int] | None:
    """This process's rank and GPU, if it is one of torchrun's."""
    if not all(name in os.environ for name in TORCHRUN):
        return None
    rank, world, local = (int(os.environ[name]) for name in TORCHRUN)
    if world != tp:
        raise MegagenError(f"torchrun started {world} ranks for --tp {tp}", hint=f"torchrun --nproc-per-node {tp}")
    return rank, local


# -- the decoder -------------------------------------------------------------------------------------------------------


def rounded(positions: int) -> int:
    """Up to whole chunks of a cache."""
    return -(-positions // CHUNK) * CHUNK


def foresee(checkpoint: Path, *, tp: int, positions: int) -> Needs:
    """What each GPU will hold. Loads nothing."""
    found: Needs = _decoder().foresee(checkpoint, tp=tp, live=tp, positions=positions)
    return found


def open_rank(
    *, rank: int, progress: Callable[..., None], directory: str, tp: int, positions: int, needs: Needs | None
) -> Decoding:
    """A rank's decoder, on the GPU of its number on this machine; emulated, with all ranks, if it ``needs`` none.

    Raises DeviceError when it does not fit.
    """
    if needs is not None:
        gpu = int(os.environ.get("LOCAL_RANK", "0"))
        refuse_too_large(needs, _free(gpu), gpu)
    made: Decoding = _decoder().open(
        Path(directory), tp=tp, live=tp, rank=rank, positions=positions, emulate=needs is None, progress=progress
    )
    return made


def refuse_too_large(needs: Needs, free: int, gpu: int) -> None:
    total = sum(size for _, size in needs)
    if total > free:
        raise DeviceError(
            f"{total / 1e9:.1f} GB are needed on GPU {gpu}, of which {free / 1e9:.1f} GB are free",
            hint="more GPUs (--tp), fewer positions (--context), or end what else runs there",
            notes=tuple((f"{what}: {size / 1e9:.2f} GB", None) for what, size in needs),
        )


def _free(gpu: int) -> int:
    from megagen.runtime.driver import require_torch

    free: int = require_torch(gpu).cuda.mem_get_info(gpu)[0]
    return free


def _decoder() -> Any:
    return importlib.import_module("megagen.runtime.decoder")
