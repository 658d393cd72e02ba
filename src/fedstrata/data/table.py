"""A table as it was read, before anybody knows which column is what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RawTable:
    """Columns of equal length.

    Attributes:
        columns: Values by column name, in the source's order.
        source: What was read, as messages name it.
        format: "CSV", "JSONL", "folder of texts" and so on.
        sha256: Of the content.
        places: Per row its line number, or the file that it came from; empty: the row number.
        notes: What a user should be told about the reading.
    """

    columns: dict[str, list[Any]]
    source: str
    format: str
    sha256: str
    places: Sequence[int | str] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(next(iter(self.columns.values()), []))

    def where(self, row: int) -> str:
        """Where a row stands: "reviews.csv line 17"."""
        if not self.places:
            return f"{self.source} row {row + 1}"
        place = self.places[row]
        return f"{self.source} line {place}" if isinstance(place, int) else place


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: None, NaN, or a text without a visible character."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    return isinstance(value, str) and not value.strip()


def cell_text(value: Any) -> str:
    """A cell as text; whole numbers without a decimal point, so that 1, 1.0 and "1" are one label.

    Example:
        >>> cell_text(1.0), cell_text(True), cell_text(" tech ")
        ('1', 'true', 'tech')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def count(number: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> count(1, "row"), count(2225, "row")
        ('1 row', '2,225 rows')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def name_some(items: Sequence[str], limit: int = 5) -> str:
    """The first items and how many more there are.

    Example:
        >>> name_some(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    shown = ", ".join(items[:limit])
    return f"{shown} and {len(items) - limit} more" if len(items) > limit else shown
