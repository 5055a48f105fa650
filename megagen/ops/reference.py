"""A graph evaluated op by op in plain torch: the numbers that the kernel is judged against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megagen.errors import MegagenError
from megagen.ir.graph import Graph, TensorKind

if TYPE_CHECKING:
    import torch


def input_scaled_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """``MuseSparkTextInputScaledRMSNorm``: x * (1 + gain), rounded to x's dtype, then normalised over the last axis."""
    import torch

    y = (x.float() * (1 + gain.to(x.dtype)).float()).to(x.dtype).float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def centred_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """``MuseSparkTextCenteredRMSNorm``: normalised over the last axis, times 1 + gain in x's dtype, rounded once."""
    y = plain_norm(x.float(), eps) * (1 + gain.to(x.dtype)).float()
    return y.to(x.dtype)


def scaled_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """``MuseSparkRMSNorm`` with a weight: normalised over the last axis, times the gain, rounded once to x's dtype."""
    return (plain_norm(x.float(), eps) * gain.float()).to(x.dtype)


def plain_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``MuseSparkRMSNorm`` without a weight: normalised over the last axis, rounded to x's dtype."""
    import torch

    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def evaluate(
    graph: Graph, env: Mapping[str, torch.Tensor | Callable[[int], torch.Tensor]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Every tensor that ``graph``'s ops make, by name, from the inputs and world-wide weights in ``env``.

    ``dtype`` float32 computes without intermediate rounding; bfloat16 rounds where the transformers bf16 model
    does. Routing comes as ``routes.ids`` and ``routes.weights``; see each op's ``reference`` for the shapes.
    Splits of the experts differ in placement only, so both give the same values here. Matrix products are
    never TF32. Raises MegagenError for an input or a weight that ``env`` lacks.
    """
    import torch

    needed = [t.name for t in graph.tensors.values() if t.kind is TensorKind.INPUT] + list(graph.weights())
    if missing := [name for name in needed if name not in env]:
        raise MegagenError(f"nothing given for {', '.join(missing)} of {graph.name}")
    values: dict[str, Any] = dict(env)
    made: dict[str, torch.Tensor] = {}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for op in graph.ops:
            new = op.reference(values, dtype)
            values |= new
            made |= new
    finally:
        torch.set_float32_matmul_precision(precision)
    return made
