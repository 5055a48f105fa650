"""What one launch works on: its tokens, where they stand in their sequence, and which of each other they see."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from megagen.errors import DeviceError
from megagen.runtime import params

if TYPE_CHECKING:
    import torch

MOST_NUMBERS = 1 << 31  # tokens in a cache: the kernels count in 32 bits


@dataclass(frozen=True)
class Step:
    """``tokens`` that come after the ``context`` tokens in the caches; they take the numbers context, context + 1, ...

    ``positions``: where each stands in its sequence; ``ancestors``: a bit for every token of the launch that it sees,
    its own included. Both follow from a tree: a token sees its parent and what that sees, and stands one further.
    Raises DeviceError for what is no such tree.
    """

    tokens: int
    context: int
    positions: tuple[int, ...]
    ancestors: tuple[int, ...]

    def __post_init__(self) -> None:
        _refuse_unfit(self.tokens, self.context)
        if not len(self.positions) == len(self.ancestors) == self.tokens:
            raise DeviceError(
                f"{self.tokens} tokens with {len(self.positions)} positions and {len(self.ancestors)} ancestor masks"
            )
        right = tuple([self.context + depth for depth in _depths(self.ancestors)])
        if self.positions != right:
            raise DeviceError(
                f"tokens at positions {self.positions}: by their ancestors, after {self.context}, they stand at {right}"
            )

    @classmethod
    def chain(cls, tokens: int, context: int = 0) -> Step:
        """Each token follows the one before."""
        _refuse_unfit(tokens, context)
        return cls(tokens, context, tuple(range(context, context + tokens)), _CHAIN[:tokens])

    @classmethod
    def tree(cls, parents: Sequence[int], context: int = 0) -> Step:
        """``parents``: each token's, which comes before it; -1 for what follows the context directly."""
        _refuse_unfit(len(parents), context)
        positions, ancestors = list[int](), list[int]()
        for i, parent in enumerate(parents):
            if not -1 <= parent < i:
                raise DeviceError(f"token {i} has parent {parent}: -1 or a token before it is possible")
            positions.append(context if parent < 0 else positions[parent] + 1)
            ancestors.append(1 << i | (0 if parent < 0 else ancestors[parent]))
        return cls(len(parents), context, tuple(positions), tuple(ancestors))

    @classmethod
    def random_tree(cls, tokens: int, context: int = 0, seed: int = 0) -> Step:
        """Every token but the first follows one that is drawn from those before it."""
        rng = random.Random(seed)
        return cls.tree([-1, *(rng.randrange(i) for i in range(1, tokens))], context)

    @property
    def is_chain(self) -> bool:
        return self.ancestors == _CHAIN[: self.tokens]

    @property
    def numbers(self) -> range:
        """Of its tokens in the caches."""
        return range(self.context, self.context + self.tokens)

    def words(self) -> tuple[int, ...]:
        """The control words; see :data:`megagen.runtime.params.CONTROL_WORDS`."""
        rest = (0,) * (params.STEP_TOKENS - self.tokens)
        head = (self.tokens, self.context, *(0,) * (params.CONTROL_POSITIONS - params.CONTROL_CONTEXT - 1))
        tail = (0,) * (params.CONTROL_WORDS - params.CONTROL_ANCESTORS - params.STEP_TOKENS)
        return (*head, *self.positions, *rest, *self.ancestors, *rest, *tail)

    def visible(self) -> torch.Tensor:
        """bool [tokens, tokens]: whether the row's token sees the column's."""
        import torch

        return torch.tensor([[bool(mask >> j & 1) for j in range(self.tokens)] for mask in self.ancestors])


_CHAIN = tuple((2 << i) - 1 for i in range(params.STEP_TOKENS))


@lru_cache(maxsize=1024)  # a step is made for every launch, and most have few shapes
def _depths(ancestors: tuple[int, ...]) -> tuple[int, ...]:
    """How many tokens of the launch each one sees besides itself. Raises DeviceError for what is no tree."""
    for i, mask in enumerate(ancestors):
        if mask < 0 or mask.bit_length() != i + 1:
            raise DeviceError(f"token {i} has ancestor mask {mask:#b}: itself and tokens before it are possible")
        others = mask ^ 1 << i
        if others and ancestors[others.bit_length() - 1] != others:
            raise DeviceError(
                f"token {i} has ancestor mask {mask:#b}: the others are not what token {others.bit_length() - 1} sees"
            )
    return tuple(mask.bit_count() - 1 for mask in ancestors)


def _refuse_unfit(tokens: int, context: int) -> None:
    if not 1 <= tokens <= params.STEP_TOKENS:
        raise DeviceError(f"{tokens} tokens: a launch takes 1 to {params.STEP_TOKENS}")
    if not 0 <= context <= MOST_NUMBERS - params.STEP_TOKENS:
        raise DeviceError(f"a context of {context} tokens", hint="it is counted in 31 bits")
