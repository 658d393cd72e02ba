"""Options of methods and parts against the arguments of what takes them, with every mistake in a user's words."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from fedstrata.discovery import in_words, place_of
from fedstrata.errors import ConfigError, did_you_mean

WANTED_TYPES = {
    "model_type": "a table",
    "dict_type": "a table",
    "list_type": "a list",
    "string_type": "a text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
}
"""What pydantic's kinds of mistakes ask for, in a user's words."""


def check_options(
    make: Callable[..., Any], options: Mapping[str, Any], *, given: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Compares options with the arguments of the callable that takes them.

    Args:
        make: A dataclass or a function with annotated arguments.
        options: What the user wrote.
        given: Arguments that are already there.

    Returns:
        The converted values, and one message per mistake.
    """
    known = _arguments(make)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in options.items():
        if name not in known:
            problems.append(f'unknown option "{name}": {did_you_mean(name, known)}')
            continue
        try:
            values[name] = known[name].adapter.validate_python(value)
        except ValidationError as error:
            problems.append(_mistake(name, value, error))
        else:
            problems += _other_types(name, value, values[name])
    for name, argument in known.items():
        if argument.needed and name not in options and name not in given:
            problems.append(f'option "{name}" is needed')
    return values, problems


def _mistake(name: str, value: Any, error: ValidationError) -> str:
    """A wrong value in a user's words, with the entry of the table or list that is wrong; pydantic speaks of Python."""
    found = error.errors()
    inner = max((e["loc"] for e in found), key=len)
    if isinstance(value, Mapping | list) and inner and isinstance(inner[-1], str | int) and _has(value, inner[-1]):
        found = [e for e in found if e["loc"] == inner]
        table: Any = value
        name, value = f"{name}[{inner[-1]!r}]", table[inner[-1]]
    wanted = dict.fromkeys(WANTED_TYPES.get(str(e["type"]), "") for e in found)
    if all(wanted):
        return f"{name} = {value!r}: {' or '.join(wanted)} is needed"
    return f"{name} = {value!r}: {found[0]['msg'].replace('Input should be', 'must be')}"


def _has(table: Any, key: Any) -> bool:
    return key in table if isinstance(table, Mapping) else isinstance(key, int) and key < len(table)


def _other_types(name: str, value: Any, read: Any) -> Iterator[str]:
    """Texts and truth values that were taken for numbers, and numbers that were taken for truth values."""
    if isinstance(value, Mapping) and isinstance(read, Mapping):
        for key in value.keys() & read.keys():
            yield from _other_types(f"{name}[{key!r}]", value[key], read[key])
    elif isinstance(value, list) and isinstance(read, list | tuple):
        for index, pair in enumerate(zip(value, read, strict=False)):
            yield from _other_types(f"{name}[{index}]", *pair)
    elif isinstance(read, bool) != isinstance(value, bool) or (
        isinstance(read, int | float) and isinstance(value, str)
    ):
        wanted = (
            "true or false" if isinstance(read, bool) else "a whole number" if isinstance(read, int) else "a number"
        )
        yield f"{name} = {value!r}: {wanted} is needed"


@dataclasses.dataclass(frozen=True)
class _Argument:
    adapter: TypeAdapter[Any]
    needed: bool


@cache
def _arguments(make: Callable[..., Any]) -> dict[str, _Argument]:
    """The arguments of a dataclass or function; nested parts take anything, they are built on their own."""
    try:
        hints = typing.get_type_hints(make)
    except Exception as error:  # an annotation is code
        raise ConfigError(
            "The types of these options cannot be read",
            where=place_of(make),
            got=in_words(error),
            do="annotate every option with a type that its file imports",
        ) from error
    nested = {f.name for f in dataclasses.fields(make) if f.metadata.get("part")} if isinstance(make, type) else set()
    return {
        name: _Argument(
            _adapter(make, name, Any if name in nested else hints.get(name, Any)),
            parameter.default is inspect.Parameter.empty,
        )
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }


def _adapter(make: Callable[..., Any], name: str, hint: Any) -> TypeAdapter[Any]:
    """Converts what a file says to the type of an option."""
    try:
        return TypeAdapter(hint)
    except PydanticUserError as error:
        raise ConfigError(
            f'The option "{name}" has a type that no experiment file can hold',
            where=place_of(make),
            expected="numbers, texts, true or false, lists and tables of them",
            got=f"{hint!r}"[:200],
        ) from error
