"""Examples: rows whose text and label are there, from the training source and, if given, the test source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedstrata.data.columns import ColumnChoice
from fedstrata.data.table import RawTable, cell_text, count, is_missing, name_some
from fedstrata.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Examples:
    """Rows that can be learnt from.

    Attributes:
        texts: First texts.
        pairs: Second texts, None where the task has one text.
        labels: Label names, one per row.
        groups: Per row who owns it, for a natural partition; None without one.
        places: Per row where it was read, for messages.
        notes: What a user should be told.
    """

    texts: list[str]
    pairs: list[str] | None
    labels: list[str]
    groups: list[str] | None
    places: list[str]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def keys(self) -> list[tuple[str, str]]:
        """What makes two rows the same example: their texts, without white space around them."""
        pairs = self.pairs if self.pairs is not None else [""] * len(self)
        return [(a.strip(), b.strip()) for a, b in zip(self.texts, pairs, strict=True)]

    def take(self, rows: np.ndarray) -> Examples:
        """Some of the rows."""
        kept = rows.tolist()

        def of(values: list[str]) -> list[str]:
            return [values[i] for i in kept]

        return Examples(
            texts=of(self.texts),
            pairs=None if self.pairs is None else of(self.pairs),
            labels=of(self.labels),
            groups=None if self.groups is None else of(self.groups),
            places=of(self.places),
            notes=self.notes,
        )

    def __add__(self, other: Examples) -> Examples:
        pairs = None if self.pairs is None or other.pairs is None else self.pairs + other.pairs
        groups = None if self.groups is None else self.groups + (other.groups or [""] * len(other))
        return Examples(
            self.texts + other.texts, pairs, self.labels + other.labels, groups, self.places + other.places,
            self.notes + other.notes,
        )  # fmt: skip


def make_examples(
    table: RawTable, columns: Mapping[str, str], *, empty: Literal["error", "drop"], group_column: str | None = None
) -> Examples:
    """Takes texts and labels out of a table.

    Args:
        table: What was read.
        columns: Column by role; `text` and `label` are needed.
        empty: What happens to rows without a text or label.
        group_column: Column that says who owns a row.

    Raises:
        DataError: If texts, labels or owners are missing, or if the columns hold something else.
    """
    for role, column in columns.items():
        if column not in table.columns:
            raise DataError(
                f'{table.source} has no column "{column}"', where=f"columns.{role}",
                do=did_you_mean(column, table.columns),
            )  # fmt: skip
    text_roles = [role for role in ("text", "text_pair") if role in columns]
    for role in text_roles:
        _require_texts(table, columns[role])
    _require_labels(table, columns["label"])
    notes = list(table.notes)
    dropped: set[int] = set()
    for role in (*text_roles, "label"):
        rows = [i for i, value in enumerate(table.columns[columns[role]]) if is_missing(value)]
        what = "label" if role == "label" else "text"
        if rows and empty == "error":
            raise DataError(
                f"Rows without a {what}: {len(rows):,} of {table.num_rows:,}",
                where=name_some([table.where(i) for i in rows]), got=f'empty cells in the column "{columns[role]}"',
                do='mend them, or drop such rows with empty = "drop" under [data]',
            )  # fmt: skip
        if rows:
            notes.append(f"{table.source}: dropped {count(len(rows), 'row')} of {table.num_rows:,} without a {what}")
        dropped.update(rows)
    kept = [i for i in range(table.num_rows) if i not in dropped]
    if not kept:
        raise DataError("No row has both a text and a label", where=table.source, got=f"{table.num_rows} rows")
    groups = None if group_column is None else _groups(table, group_column, kept)

    def cells(role: str) -> list[Any]:
        values = table.columns[columns[role]]
        return [values[i] for i in kept]

    return Examples(
        texts=[str(v) for v in cells("text")],
        pairs=[str(v) for v in cells("text_pair")] if "text_pair" in columns else None,
        labels=[cell_text(v) for v in cells("label")],
        groups=groups,
        places=[table.where(i) for i in kept],
        notes=tuple(notes),
    )


def column_names(choices: Mapping[str, ColumnChoice]) -> dict[str, str]:
    """Columns by role, without the reasons."""
    return {role: choice.column for role, choice in choices.items()}


def label_names(labels: list[str], *, where: str) -> tuple[str, ...]:
    """The classes in order: numbers by value, everything else by character.

    Raises:
        DataError: If there is a single class, or nearly one per example.

    Example:
        >>> label_names(["10", "9", "10", "9"], where="")
        ('9', '10')
    """
    distinct = set(labels)
    if len(distinct) < 2:
        raise DataError(
            "There is a single class, so nothing could be learnt", where=where, got=", ".join(sorted(distinct)),
            expected="at least two different labels",
        )  # fmt: skip
    if len(labels) >= 20 and len(distinct) > len(labels) // 2:
        raise DataError(
            "The label column does not hold classes", where=where,
            got=f"{len(distinct)} different values in {len(labels)} rows",
            do='name another column: columns = { label = "…" } under [data]',
        )  # fmt: skip
    if all(name.removeprefix("-").isdecimal() and name.isascii() and len(name) < 1000 for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def label_ids(examples: Examples, names: tuple[str, ...], *, num_train: int, source: str) -> np.ndarray:
    """Class numbers of all rows, shape [num_examples], int64.

    Args:
        examples: Training rows, then rows of the test source.
        names: The classes of the training rows.
        num_train: How many rows are training rows.
        source: The test source, for the message.

    Raises:
        DataError: If a label stands only in the test source.
    """
    number = {name: i for i, name in enumerate(names)}
    only_test = sorted(set(examples.labels[num_train:]) - number.keys())
    if only_test:
        first = next(i for i in range(num_train, len(examples)) if examples.labels[i] == only_test[0])
        raise DataError(
            f"Labels that are seen only in the test set: {name_some(only_test)}",
            where=f"{source}; first at {examples.places[first]}",
            expected=f"the labels of the training data: {name_some(list(names), 10)}",
            do="correct the labels, or take these rows out of the test set",
        )
    return np.array([number[label] for label in examples.labels], np.int64)


def _require_texts(table: RawTable, column: str) -> None:
    for i, value in enumerate(table.columns[column]):
        if isinstance(value, dict | list | bytes):
            raise DataError(
                f'The column "{column}" does not hold texts', where=table.where(i), expected="a text per example",
                got=repr(value)[:60], do='name another column: columns = { text = "…" } under [data]',
            )  # fmt: skip


def _require_labels(table: RawTable, column: str) -> None:
    for i, value in enumerate(table.columns[column]):
        if isinstance(value, dict | list | bytes) or (
            isinstance(value, float) and not is_missing(value) and not value.is_integer()
        ):
            raise DataError(
                f'The column "{column}" does not hold classes', where=table.where(i),
                expected="a text or a whole number per example", got=repr(value)[:60],
                do='name another column: columns = { label = "…" } under [data]',
            )  # fmt: skip


def _groups(table: RawTable, column: str, kept: list[int]) -> list[str]:
    values = table.columns[column]
    missing = [i for i in kept if is_missing(values[i])]
    if missing:
        raise DataError(
            f"Rows that do not say which client owns them: {len(missing):,}",
            where=name_some([table.where(i) for i in missing]),
            got=f'empty cells in the column "{column}"', do="fill them in, or use another kind of partition",
        )  # fmt: skip
    return [cell_text(values[i]) for i in kept]
