"""What ``decode`` asks and says beside the answer itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megagen.cli.sheets import Column, Sheet, show
from megagen.errors import MegagenError

if TYPE_CHECKING:
    from megagen.serve.engine import Generation, Needs
    from megagen.serve.text import Text

NEW_TOKENS = 256
STATISTICS = (
    "prompt_tokens", "new_tokens", "prefill_s", "prefill_tokens_per_s", "decode_s", "decode_tokens_per_s", "step_ms",
    "step_ms_p99", "host_us", "kernels", "bytes", "floor_s", "floor_ratio",
)  # fmt: skip


@dataclass(frozen=True)
class Given:
    ids: Sequence[int]
    text: Text | None  # the tokenizer


def given(model: Path, prompt: str | None, ids: str | None, file: Path | None, *, chat: bool) -> Given:
    """The prompt, from one of the three. Raises MegagenError where it has to be text, and there is no tokenizer."""
    from megagen.serve.engine import require
    from megagen.serve.text import Text

    if sum(x is not None for x in (prompt, ids, file)) != 1:
        raise typer.BadParameter("one of --prompt, --prompt-ids and --prompt-file is needed")
    if chat and ids is not None:
        raise typer.BadParameter("--chat makes a turn of text: leave out --prompt-ids")
    listed = [] if ids is None else _listed(ids)
    require(model)
    tokenizer = Text.load(model)
    if ids is not None:
        return Given(listed, tokenizer)
    if tokenizer is None:
        raise MegagenError(f"{model} has no tokenizer: the prompt cannot be text", hint="give --prompt-ids")
    words = _read(file) if file is not None else prompt
    assert words is not None
    return Given(tokenizer.encode(words, chat=chat), tokenizer)


def _listed(ids: str) -> list[int]:
    try:
        return [int(i) for i in ids.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--prompt-ids takes numbers, separated by commas, not {ids!r}") from None


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise MegagenError(f"--prompt-file {file}: {getattr(e, 'strerror', None) or e}") from None


def sizes(prompt: int, new: int | None, context: int | None) -> tuple[int, int | None]:
    """The caches' positions, and how many new tokens at most: None for what the caches have room for.

    Raises MegagenError, before anything is loaded, when these do not go together.
    """
    from megagen.serve.engine import rounded
    from megagen.serve.generate import budget

    if context is None:
        new = new or NEW_TOKENS
        context = prompt + new - 1
    context = rounded(context)
    budget([0] * prompt, new, 1, context)
    return context, new


def say_memory(needs: Needs) -> None:
    """On standard error, what each GPU will hold."""
    rows = [{"what": what, "bytes": size} for what, size in needs]
    columns = (Column("what", "what"), Column("GB", lambda r: f"{r['bytes'] / 1e9:.2f}", right=True))
    total = {"what": "together", "bytes": sum(size for _, size in needs)}
    show([Sheet("memory", "memory of each GPU", columns, rows, total)], err=True)


def record(run: Generation) -> dict[str, Any]:
    """The same keys for every run: null is what a run of one token has no step for."""
    return {
        "prompt_ids": run.prompt,
        "ids": run.ids,
        "text": run.text,
        "stop": run.stop,
        "statistics": {**dict.fromkeys(STATISTICS), **run.statistics},
    }


def say_times(run: Generation) -> None:
    """On standard error, what the run took."""
    rows = [{"what": name.replace("_", " "), "value": value} for name, value in run.statistics.items()]
    columns = (Column("of the run", "what"), Column("", lambda r: f"{r['value']:,.6g}", right=True))
    show([Sheet("statistics", f"ended by: {run.stop}", columns, rows)], err=True)
