"""A sheet: rows of plain data that the terminal shows as a table and ``--json`` as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
WIDE = 120  # columns when standard output is not a terminal
GAP = 2


@dataclass(frozen=True)
class Column:
    """``show`` is the row's key, or a function from the row to text. Text on the right does not wrap."""

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


def show(sheets: Iterable[Sheet], *, err: bool = False) -> None:
    """Print sheets to standard output, or to standard error."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, stderr=err)
    room = console.width if console.is_terminal else WIDE
    for sheet in sheets:
        console.print(Text(sheet.title, style="bold"), soft_wrap=True)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False, padding=(0, GAP - 1))
        widths = _widths(sheet, room)
        console.width = max(room, sum(widths) + GAP * len(widths))  # or text would be cut off
        for column, width in zip(sheet.columns, widths, strict=True):
            justify: Any = "right" if column.right else "left"
            table.add_column(column.heading, justify=justify, vertical="top", width=width)
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


def _widths(sheet: Sheet, room: int) -> list[int]:
    """Columns as wide as their text; then the widest lose width, down to their longest words, until all have room."""
    rows = [*sheet.rows, *([] if sheet.total is None else [sheet.total])]
    natural, least = [], []
    for column in sheet.columns:
        texts = [column.text(row) for row in rows]
        lines = max((len(line) for text in [column.heading, *texts] for line in text.splitlines()), default=0)
        fixed = [line for text in texts for line in (text.splitlines() if column.right else text.split())]
        natural.append(lines)
        least.append(max(map(len, [*column.heading.split(), *fixed]), default=0))
    while sum(natural) + GAP * (len(natural) - 1) > room:
        wide = [i for i, width in enumerate(natural) if width > least[i]]
        if not wide:
            break
        natural[max(wide, key=natural.__getitem__)] -= 1
    return natural


def counted(number: int, noun: str, plural: str = "s") -> str:
    """1 token, 2 tokens."""
    return f"{number} {noun}{'' if number == 1 else plural}"


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
