"""The rule by which a result counts as right: its error against fp32 beside that of the transformers bf16 model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagen.errors import MegagenError

if TYPE_CHECKING:
    import torch

WORST_ROW_FACTOR = 1.5
MAX_ABS_FACTOR = 2.0


@dataclass(frozen=True)
class Error:
    """``worst_row``: largest relative L2 error of a token row, met in row ``row``; ``max_abs`` over all elements.
    NaN where something is not finite."""

    worst_row: float
    max_abs: float
    row: int

    def __str__(self) -> str:
        return f"relative L2 {self.worst_row:.3g} (row {self.row}), max-abs {self.max_abs:.3g}"


@dataclass(frozen=True)
class Verdict:
    """Both errors and, if the result is refused, why. True when it passes."""

    ours: Error
    model: Error
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        head = "pass" if self else "FAIL: " + "; ".join(self.reasons)
        return f"{head} [ours: {self.ours}; bf16 model: {self.model}]"


def measure(got: torch.Tensor, reference: torch.Tensor) -> Error:
    """Error of ``got`` [tokens, ...] against ``reference`` of the same shape, in fp64."""
    ref = reference.double().flatten(1)
    diff = got.to(ref).flatten(1) - ref
    norm, size = diff.norm(dim=1), ref.norm(dim=1)
    relative = (norm / size).masked_fill(norm == 0, 0.0)  # an exact row of zeros is right
    row = int(relative.argmax())  # argmax takes a NaN for the largest
    return Error(float(relative[row]), float(diff.abs().max()), row)


def judge(
    ours: torch.Tensor | Sequence[torch.Tensor],
    reference: torch.Tensor | Sequence[torch.Tensor],
    bf16_model: torch.Tensor | Sequence[torch.Tensor],
    *,
    excluded: Collection[int] = (),
) -> Verdict:
    """``ours`` may have 1.5 times the bf16 model's worst-row error and twice its max-abs error.

    All are [tokens, ...]; sequences hold one tensor a seed and are joined along the rows. ``excluded`` lists rows
    (after joining) whose reference is not finite; an unlisted one fails, and so does anything not finite in
    ``ours``. Raises MegagenError for different shapes, nothing left to compare, or a listed row that is finite.
    """
    import torch

    got, ref, model = (x if isinstance(x, torch.Tensor) else torch.cat(list(x)) for x in (ours, reference, bf16_model))
    if not got.shape == ref.shape == model.shape:
        raise MegagenError(f"shapes differ: {tuple(got.shape)}, {tuple(ref.shape)}, {tuple(model.shape)}")
    if bad := [r for r in excluded if not 0 <= r < len(ref) or bool(ref[r].isfinite().all())]:
        raise MegagenError(f"rows {bad} are excluded although their reference is finite or they do not exist")
    kept = [r for r in range(len(ref)) if r not in excluded]
    if not kept or not ref[kept].numel():
        raise MegagenError("no row is left to compare")
    got, ref, model = got[kept], ref[kept], model[kept]
    reasons = []
    for name, x in (("the reference", ref), ("the bf16 model", model), ("the result", got)):
        finite = x.flatten(1).isfinite().all(1).tolist()
        if rows := [r for r, fine in zip(kept, finite, strict=True) if not fine]:
            reasons.append(f"{name} is not finite in rows {rows}")
    errors = []
    for e in (measure(got, ref), measure(model, ref)):
        errors.append(Error(e.worst_row, e.max_abs, kept[e.row]))  # noqa: PERF401
    mine, theirs = errors
    for what, value, limit in (
        ("worst-row relative L2", mine.worst_row, WORST_ROW_FACTOR * theirs.worst_row),
        ("max-abs", mine.max_abs, MAX_ABS_FACTOR * theirs.max_abs),
    ):
        if not value <= limit:  # NaN must fail
            reasons.append(f"{what} {value:.3g} is over {limit:.3g}")
    return Verdict(mine, theirs, tuple(reasons))
