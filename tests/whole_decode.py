"""What a decoder emits, judged by transformers' own model on the emitted prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from whole_models import Reference


@dataclass
class Run:
    """A greedy decode: ``ids`` with the prompt, how long that was, and the logits that each emitted token came from."""

    ids: list[int]
    prompt: int
    logits: torch.Tensor  # fp32 [emitted, vocab]

    @property
    def emitted(self) -> list[int]:
        return self.ids[self.prompt :]


def prompt(tokens: int, vocab: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(seed + tokens)
    return torch.randint(2, vocab, (tokens,), generator=g).tolist()


def greedy(decoder: Any, ids: Sequence[int], emit: int) -> Run:
    """Prefill in chunks of what a step takes, then a token a step."""
    all_ids, rows = list(ids), []
    for start in range(0, len(ids), decoder.most):
        found = decoder.step(ids[start : start + decoder.most], start)
    while True:
        rows.append(decoder.logits()[-1].float().cpu())
        all_ids.append(found[-1])
        if len(rows) == emit:
            return Run(all_ids, len(ids), torch.stack(rows))
        found = decoder.step(all_ids[-1:], len(all_ids) - 1)


@dataclass
class Judgement:
    """Of all emitted tokens: ``other`` are not the reference's argmax, ``far`` of these by more than twice the largest
    error of the bf16 model at that place. Errors: relative, the worst row's, and of any logit."""

    tokens: int
    other: int
    far: int
    ours: float
    theirs: float
    ours_most: float
    theirs_most: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {self.other} not the reference's argmax, {self.far} farther than twice the error; "
            f"worst row {self.ours:.4f} (bf16 model {self.theirs:.4f}), "
            f"worst logit {self.ours_most:.3f} ({self.theirs_most:.3f})"
        )


def asked(model: Reference, runs: Sequence[Run]) -> list[torch.Tensor]:
    """What ``model`` says where each run's tokens were emitted: fp32 [emitted, vocab]."""
    return [model.logits(run.ids)[run.prompt - 1 : len(run.ids) - 1].cpu() for run in runs]


def judge(runs: Sequence[Run], exact: Sequence[torch.Tensor], rounded: Sequence[torch.Tensor]) -> Judgement:
    """``exact`` and ``rounded``: what the reference in fp32 and in bf16 says, see :func:`asked`."""
    other = far = tokens = 0
    ours, theirs, ours_most, theirs_most = 0.0, 0.0, 0.0, 0.0
    for run, want, twin in zip(runs, exact, rounded, strict=True):
        emitted = torch.tensor(run.emitted)
        assert emitted.equal(run.logits.argmax(1)), "what is emitted is the argmax of the logits"
        gap = want.max(1).values - want.gather(1, emitted[:, None])[:, 0]
        error = (twin - want).abs().max(1).values
        tokens += len(emitted)
        other += int((gap > 0).sum())
        far += int((gap > 2 * error).sum())
        for name, x in (("ours", run.logits), ("theirs", twin)):
            relative = float(((x - want).norm(dim=1) / want.norm(dim=1)).max())
            most = float((x - want).abs().max())
            if name == "ours":
                ours, ours_most = max(ours, relative), max(ours_most, most)
            else:
                theirs, theirs_most = max(theirs, relative), max(theirs_most, most)
    return Judgement(tokens, other, far, ours, theirs, ours_most, theirs_most)
