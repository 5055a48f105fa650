"""A sheet: rows of plain data that the terminal shows as a table and ``--json`` as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
WIDE = 200  # columns when standard output is not a terminal


@dataclass(frozen=True)
class Column:
    """``show`` is the row's key, or a function from the row to text."""

    heading: str
    show: str | Callable[[Row], object]
    right: bool = False

    def text(self, row: Row) -> str:
        value = self.show(row) if callable(self.show) else row[self.show]
        if isinstance(value, list | tuple):
            value = " ".join(map(str, value))
        return "" if value is None else str(value)


@dataclass(frozen=True)
class Sheet:
    """``key`` names the rows in JSON, ``title`` and ``note`` frame the table, ``total`` is a last row."""

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    total: Row | None = None
    note: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        return {self.key: [dict(r) for r in self.rows], **self.extra}


def show(sheets: Iterable[Sheet]) -> None:
    """Print sheets to standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    for sheet in sheets:
        console.print(Text(sheet.title, style="bold"), soft_wrap=True)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False)
        for column in sheet.columns:
            table.add_column(column.heading, justify="right" if column.right else "left", vertical="top")
        for row in sheet.rows:
            table.add_row(*(Text(c.text(row)) for c in sheet.columns))
        if sheet.total is not None:
            table.add_section()
            table.add_row(*(Text(c.text(sheet.total)) for c in sheet.columns), style="bold")
        if sheet.rows:
            console.print(table)
        if sheet.note:
            console.print(Text(sheet.note), soft_wrap=True)
        console.print()


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1024."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 1024:.1f} KiB" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.1f} MiB"


def megabytes(nbytes: float) -> str:
    """Bytes for people, in millions: traffic, as bandwidth is quoted."""
    return f"{nbytes / 1e6:.2f}"


def span(first: int, count: int) -> str:
    """Warps ``first`` .. ``first + count - 1`` as "4-11"."""
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
