"""The comparison of methods in the terminal: every column, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedstrata.method.columns import COLUMNS, yes_no

_SIDE_BY_SIDE = 4
"""Up to so many methods stand in columns, with one property per line; more stand in lines."""
_WIDE, _NARROW = 150, 80


def print_comparison(rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints methods with every column of the comparison, and what a yes means.

    Args:
        rows: As `fedstrata.method.columns.method_row` makes them.
    """
    console = Console(highlight=False)
    rows = list(rows)
    if len(rows) <= _SIDE_BY_SIDE:
        console.print(_in_columns(rows))
    else:
        console.print(_in_lines(rows, console.width))
        if console.width < _WIDE:
            console.print()
            console.print(_texts(rows))
    console.print()
    meanings = Table.grid(padding=(0, 2, 0, 0))
    for column in COLUMNS:
        if column.kind != "text":
            meanings.add_row(Text(column.title, style="dim"), Text(column.meaning, style="dim"))
    meanings.add_row(
        Text("n/a", style="dim"), Text("nothing is merged, or it depends on the adapter kind", style="dim")
    )
    console.print(meanings)


def _in_columns(rows: list[Mapping[str, Any]]) -> Table:
    """One column per method."""
    table = _table("", *(row["name"] for row in rows))
    for column in COLUMNS:
        table.add_row(Text(column.title, style="dim"), *(_cell(row, column.key) for row in rows))
    return table


def _in_lines(rows: list[Mapping[str, Any]], width: int) -> Table:
    """One line per method."""
    columns = [c for c in COLUMNS if width >= _WIDE or c.kind != "text"]
    table = _table("method", *(c.title for c in columns), whole_words=width >= _NARROW)
    for row in rows:
        table.add_row(Text(row["name"], style="bold"), *(_cell(row, c.key) for c in columns))
    return table


def _texts(rows: list[Mapping[str, Any]]) -> Table:
    """What methods train and send, where the table has no room for it."""
    table = _table("method", "trains", "sends")
    for row in rows:
        table.add_row(Text(row["name"], style="bold"), _cell(row, "trains"), _cell(row, "sends"))
    return table


def _table(first: str, *others: str, whole_words: bool = False) -> Table:
    """A table without lines whose cells never lose a character; with `whole_words` no word is cut in two."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(first, overflow="fold", no_wrap=whole_words)
    for name in others:
        longest = max(map(len, name.split()))
        table.add_column(name, overflow="fold", width=longest if whole_words and len(others) > 4 else None)
    return table


def _cell(row: Mapping[str, Any], key: str) -> Text:
    value = row[key]
    if isinstance(value, str):
        return Text(value)
    return Text(yes_no(value), style="green" if value else "dim")
