"""Parts by name: each choice keeps one registry; a part is a frozen dataclass whose fields are its options."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedstrata.errors import ConfigError, did_you_mean


class Part(Protocol):
    """A frozen dataclass with an id: it prints, compares and serialises."""

    id: ClassVar[str]


T = TypeVar("T", bound=Part)
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """The parts of one choice, by id.

    Args:
        choice: What the parts are, as errors name it: "codec", "planner".
    """

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self._parts: dict[str, type[T]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._parts))

    def __getitem__(self, part_id: str) -> type[T]:
        if part_id not in self._parts:
            raise ConfigError(f'Unknown {self.choice} "{part_id}"', do=did_you_mean(part_id, self._parts))
        return self._parts[part_id]

    def register(self, part: C) -> C:
        """Class decorator. A name that is taken is an error that names both."""
        part_id: str = part.id  # type: ignore[attr-defined]
        known = self._parts.get(part_id)
        if known is not None:
            both = f"{known.__module__}.{known.__qualname__} and {part.__module__}.{part.__qualname__}"
            raise ConfigError(f'Two parts are called {self.choice} "{part_id}"', got=both)
        self._parts[part_id] = typing.cast("type[T]", part)
        return part

    def build(self, config: Mapping[str, Any] | str, *, where: str | None = None) -> T:
        """The part that `{"id": …, option: value}` describes; a bare name means its defaults.

        Raises:
            ConfigError: With every unknown option and every value of a wrong type at once.
        """
        where = where or self.choice
        options = {"id": config} if isinstance(config, str) else dict(config)
        part_id = options.pop("id", None)
        if not isinstance(part_id, str):
            raise ConfigError(f"A {self.choice} needs an id", where=where, do=did_you_mean("", self._parts))
        part = self[part_id]
        parts = {f.name for f in dataclasses.fields(part) if f.metadata.get("part")}  # type: ignore[arg-type]
        nested = {name: self.build(options.pop(name), where=f"{where}.{name}") for name in parts & options.keys()}
        values, problems = check_options(part, options, given=nested)
        if problems:
            raise ConfigError(f'{self.choice} "{part_id}" has wrong options', problems=problems, where=where)
        return part(**values, **nested)


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
            problems.append(f"{name} = {value!r}: {error.errors()[0]['msg']}")
    for name, argument in known.items():
        if argument.needed and name not in options and name not in given:
            problems.append(f'option "{name}" is needed')
    return values, problems


@dataclasses.dataclass(frozen=True)
class _Argument:
    adapter: TypeAdapter[Any]
    needed: bool


@cache
def _arguments(make: Callable[..., Any]) -> dict[str, _Argument]:
    """The arguments of a dataclass or function; nested parts take anything, they are built on their own."""
    hints = typing.get_type_hints(make)
    nested = {f.name for f in dataclasses.fields(make) if f.metadata.get("part")} if isinstance(make, type) else set()
    return {
        name: _Argument(
            TypeAdapter(Any if name in nested else hints.get(name, Any)), parameter.default is inspect.Parameter.empty
        )
        for name, parameter in inspect.signature(make).parameters.items()
    }


def to_config(part: Any) -> dict[str, Any]:
    """The config that builds an equal part: `build(to_config(part)) == part`."""
    config: dict[str, Any] = {"id": part.id}
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        config[f.name] = to_config(value) if f.metadata.get("part") else _plain(value)
    return config


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value
