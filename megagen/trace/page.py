"""A trace as one HTML file that needs nothing else: no network, no other file. Made of ``templates/trace``."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megagen import files, resources
from megagen.trace.model import Page

DIGITS = 3  # of a µs: what is shown is nanoseconds


def write(page: Page, path: Path) -> None:
    """Write the page in one step: a failure leaves no half of it. Raises MegagenError when it cannot."""
    text = render(page).encode()
    files.write(path, text)


def render(page: Page) -> str:
    """The page's text. Whatever a name holds, it stays text."""
    folder = resources.templates() / "trace"
    parts = {kind: (folder / f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")}
    parts |= {"title": html.escape(page.title), "data": embedded(page)}
    # in one pass, so that a marker within a part is text too
    return re.sub(r"@@(title|css|js|data)@@", lambda found: parts[found[1]], parts["html"])


def embedded(page: Page) -> str:
    """The page as JSON for a ``<script>``: the model's fields, µs to the nanosecond; a warp's spans as :func:`flat`."""
    text = json.dumps(_compact(page.model_dump(mode="json")), ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def flat(spans: Iterable[tuple[int, int, int, int, int, int, int]]) -> list[int]:
    """A warp's spans in a row, seven numbers each: begin counts from the span before, end from begin."""
    numbers: list[int] = []
    before = 0
    for *names, begin, end in spans:
        numbers += [*names, begin - before, end - begin]
        before = begin
    return numbers


def _compact(value: Any) -> Any:
    match value:
        case float():
            short = round(value, DIGITS)
            return int(short) if short.is_integer() else short
        case {"spans": spans, **others}:
            return {**others, "spans": flat(spans)}
        case dict():
            return {key: _compact(v) for key, v in value.items()}
        case list() | tuple():
            return [_compact(v) for v in value]
    return value
