"""Mistakes in an experiment's values, in a user's words and with their place in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from fedstrata.errors import did_you_mean
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.options import WANTED_TYPES

_PART = "a name, or a table with an id,"
_UNIONS = dict.fromkeys(("plan", "objective", "aggregate", "select", "uplink", "downlink"), _PART) | {
    "targets": '"attention", "all-linear", or a list of names'
}


def describe_mistake(error: Any) -> str:
    """One mistake in a user's words: pydantic speaks of Python."""
    table, place = _place(error["loc"])
    kind, got = str(error["type"]), error["input"]
    if kind == "extra_forbidden":
        key = place.rsplit(".", 1)[-1]
        return f"{place}: unknown key; {did_you_mean(key, table.model_fields if table else [])}"
    if kind == "string_pattern_mismatch":
        return f"{place}: letters a to z, digits, dots, dashes and underscores are allowed (got {got!r})"
    union = _UNIONS.get(place.rsplit(".", 1)[-1]) if len(error["loc"]) > place.count(".") + 1 else None
    wanted = union or WANTED_TYPES.get(kind)
    if wanted is not None:
        return f"{place}: {wanted} is needed (got {shown(got)})"
    message = str(error["msg"]).replace("Input should be", "must be")
    return f"{place}: {message[0].lower()}{message[1:]} (got {shown(got)})"


def _place(loc: tuple[int | str, ...]) -> tuple[type[BaseModel] | None, str]:
    """The table that holds the key, and the key's dotted place without what pydantic adds for unions."""
    table: type[BaseModel] | None = ExperimentSpec
    parts: list[str] = []
    for i, part in enumerate(map(str, loc)):
        parts.append(part)
        field = table.model_fields.get(part) if table else None
        inner = field.annotation if field else None
        is_table = isinstance(inner, type) and issubclass(inner, BaseModel)
        if not is_table:
            # An entry of a table or list stays; the name of a union's member does not.
            is_union = field is not None and part in _UNIONS
            parts += [] if is_union else map(str, loc[i + 1 :])
            break
        if i < len(loc) - 1:
            table = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return table, ".".join(parts)


def shown(value: Any) -> str:
    """A value as the file would have it, cut where it is long."""
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def not_finite(values: Any, place: str = "") -> Iterator[str]:
    """Numbers that nothing can be computed with, wherever they stand."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from not_finite(value, f"{place}.{key}" if place else str(key))
    elif isinstance(values, list):
        for i, value in enumerate(values):
            yield from not_finite(value, f"{place}[{i}]")
    elif has_no_size(values):
        yield f"{place}: a finite number is needed (got {values})"


def has_no_size(value: Any) -> bool:
    """Whether a value is infinite or not a number."""
    return isinstance(value, float) and not math.isfinite(value)


def other_types(values: Mapping[str, Any], spec: BaseModel, place: str = "") -> Iterator[str]:
    """Texts and truth values that were taken for numbers: `count = "5"`, `count = true`."""
    for key, value in values.items():
        read = getattr(spec, str(key), None)
        if isinstance(read, BaseModel) and isinstance(value, Mapping):
            yield from other_types(value, read, f"{place}{key}.")
        elif isinstance(read, int | float) and not isinstance(read, bool) and isinstance(value, bool | str):
            kind = "a whole number" if isinstance(read, int) else "a number"
            yield f"{place}{key}: {kind} is needed (got {shown(value)})"
