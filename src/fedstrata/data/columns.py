"""Which column is the text, the label, the client: as the user says, otherwise guessed from names and content."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedstrata.data.table import RawTable, cell_text, is_missing, name_some
from fedstrata.errors import DataError, did_you_mean

ROLES = ("text", "text_pair", "label", "client", "group")
MAX_GUESSED_CLASSES = 100

_NAMES: dict[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "content", "body", "review", "document", "article", "message", "comment", "tweet",
             "utterance", "question", "query", "description", "abstract", "input", "news", "title",
             "headline"),
    "label": ("label", "labels", "class", "category", "target", "sentiment", "topic", "intent", "genre", "rating",
              "stars", "emotion", "language", "gold", "y"),
    "client": ("client", "client_id", "clientid", "user", "user_id", "userid", "author", "author_id", "hospital",
               "site", "site_id", "institution", "device", "device_id", "writer", "speaker", "sender", "customer",
               "customer_id"),
    "group": ("group", "group_id"),
}  # fmt: skip
_PAIRS = (
    ("text", "text_pair"), ("sentence1", "sentence2"), ("text1", "text2"), ("question1", "question2"),
    ("premise", "hypothesis"), ("question", "sentence"), ("question", "context"), ("question", "passage"),
)  # fmt: skip


@dataclass(frozen=True)
class ColumnChoice:
    """A column and why it was taken."""

    role: str
    column: str
    reason: str


def choose_columns(table: RawTable, wanted: Mapping[str, str]) -> dict[str, ColumnChoice]:
    """Finds the column of every role that the table has; text and label are always among them.

    Args:
        table: What was read.
        wanted: Columns by role, as the user wrote them.

    Raises:
        DataError: If a role or a column does not exist, or if text or label cannot be told apart.
    """
    chosen: dict[str, ColumnChoice] = {}
    for role, column in wanted.items():
        if role not in ROLES:
            raise DataError(f'Unknown column role "{role}"', where="data.columns", do=did_you_mean(role, ROLES))
        chosen[role] = ColumnChoice(role, require_column(table, column, f"data.columns.{role}"), "named by you")
    repeated = sorted({c.column for c in chosen.values() if [d.column for d in chosen.values()].count(c.column) > 1})
    if repeated:
        raise DataError("One column has two roles", where="data.columns", got=name_some(repeated))
    lower = {name.lower(): name for name in reversed(list(table.columns))}
    if "text" not in wanted and "text_pair" not in wanted:
        for first, second in _PAIRS:
            pair = lower.get(first), lower.get(second)
            if pair[0] and pair[1] and not {*pair} & {c.column for c in chosen.values()}:
                reason = f'"{pair[0]}" and "{pair[1]}" are usual names of a pair of texts'
                chosen["text"] = ColumnChoice("text", pair[0], reason)
                chosen["text_pair"] = ColumnChoice("text_pair", pair[1], reason)
                break
    for role in ("client", "group", "text", "label"):
        free = [name for name in table.columns if name not in {c.column for c in chosen.values()}]
        guess = None if role in chosen else _guess(role, table, free)
        if guess is not None:
            chosen[role] = guess
    return {role: chosen[role] for role in ROLES if role in chosen}


def require_column(table: RawTable, column: str, where: str) -> str:
    """The column's name.

    Raises:
        DataError: If the table has no such column.
    """
    if column not in table.columns:
        raise DataError(f'{table.source} has no column "{column}"', where=where, do=did_you_mean(column, table.columns))
    return column


def looks_like_id(column: str) -> bool:
    """Whether a column's name says that it holds identifiers.

    Example:
        >>> [looks_like_id(name) for name in ("ward_id", "wardId", "ID", "covid")]
        [True, True, True, False]
    """
    return re.search(r"(^|[_\-. ])id$", column.lower()) is not None or re.search(r"[a-z]I[dD]$", column) is not None


def _guess(role: str, table: RawTable, free: list[str]) -> ColumnChoice | None:
    usual = {name: i for i, name in enumerate(_NAMES[role])}
    named = sorted((usual[c.lower()], c) for c in free if c.lower() in usual)
    if role in ("client", "group"):
        return ColumnChoice(role, named[0][1], f"its name is usual for a {role}") if named else None
    if named and (named[0][0] == 0 or len(named) == 1):
        return ColumnChoice(role, named[0][1], f"its name is usual for a {role}")
    among = [c for _, c in named] or free
    fitting = _text_like(table, among) if role == "text" else _label_like(table, among)
    if len(fitting) == 1:
        column, reason = next(iter(fitting.items()))
        return ColumnChoice(role, column, reason)
    problem = "Several columns could be" if fitting else "No column looks like"
    raise DataError(
        f"{problem} the {role}", where=table.source,
        got=name_some(list(fitting)) if fitting else f"the columns {name_some(list(table.columns), 20)}",
        expected="exactly one" if fitting else _EXPECTED[role],
        do=f'say which one: columns = {{ {role} = "…" }} under [data], or `--column {role}=…` with `fedstrata init`; '
        f"the columns are {name_some(list(table.columns), 20)}",
    )  # fmt: skip


_EXPECTED = {
    "text": "a column of texts, best called text",
    "label": f"a column with 2 to {MAX_GUESSED_CLASSES} different values that repeat, best called label",
}


def _text_like(table: RawTable, among: list[str]) -> dict[str, str]:
    """The column of clearly longest texts, or all that are about as long as the longest."""
    lengths: dict[str, float] = {}
    for column in among:
        values = [v for v in table.columns[column] if not is_missing(v)]
        if values and all(isinstance(v, str) for v in values) and len(set(values)) > 1:
            lengths[column] = statistics.fmean(len(v) for v in values)
    if not lengths:
        return {}
    longest = max(lengths.values())
    fitting = {c: f"its texts are the longest, {n:.0f} characters on average" for c, n in lengths.items()}
    # Words rather than codes: a text is longer than its label.
    return {c: reason for c, reason in fitting.items() if lengths[c] > longest / 2 and longest >= 8}


def _label_like(table: RawTable, among: list[str]) -> dict[str, str]:
    """Columns with few values that repeat and that are no identifiers."""
    fitting: dict[str, str] = {}
    for column in among:
        if looks_like_id(column):
            continue
        values: list[Any] = [v for v in table.columns[column] if not is_missing(v)]
        if any(isinstance(v, dict | list) or (isinstance(v, float) and not v.is_integer()) for v in values):
            continue
        distinct = len({cell_text(v) for v in values})
        if 2 <= distinct <= min(MAX_GUESSED_CLASSES, len(values) // 2):
            fitting[column] = f"it has {distinct} different values that repeat"
    return fitting
