"""What the parent and the processes of its ranks tell each other."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megagen.errors import MegagenError
from megagen.serve.generate import Stop
from megagen.serve.sampling import Sampling


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
    """A part of loading is done. ``told``: nothing, or what is being done, how much of it, and of how much."""

    told: tuple[Any, ...] = ()


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
        made = self.kind.__new__(self.kind, self.state["message"])
        vars(made).update(self.state)
        return made


def _travels(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True
