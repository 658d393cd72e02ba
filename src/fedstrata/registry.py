"""Parts by name: each choice keeps one registry; a part is a frozen dataclass whose fields are its options."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from fedstrata.discovery import PlugIn, foreign_code, is_own, no_reference, place_of, plug_ins
from fedstrata.errors import ConfigError, did_you_mean
from fedstrata.options import check_options


class Part(Protocol):
    """A frozen dataclass with an id: it prints, compares and serialises."""

    id: ClassVar[str]


T = TypeVar("T", bound=Part)
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """The parts of one choice, by id: Fedstrata's own, those of installed packages, and those that a file brought.

    An installed part stands in the entry-point group `fedstrata.<choice>s` (`fedstrata.codecs`, …) under its id and is
    imported when it is looked up.

    Args:
        choice: What the parts are, as errors name it: "codec", "planner".
    """

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self.group = f"fedstrata.{choice.split()[-1]}s"
        self._parts: dict[str, type[T]] = {}
        self._references: dict[str, type[T]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._parts))

    def __getitem__(self, part_id: str) -> type[T]:
        if part_id in self._references:
            return self._references[part_id]
        known, installed = self._parts.get(part_id), self._installed(part_id)
        if installed is not None:
            return self._load(installed, known)
        if known is None:
            raise self._unknown(part_id)
        return known

    @property
    def names(self) -> tuple[str, ...]:
        """All ids, sorted; what is only installed is not imported for it."""
        return tuple(sorted({*self._parts, *(p.name for p in plug_ins(self.group))}))

    def load_installed(self) -> tuple[str, ...]:
        """Imports every installed part; returns what is wrong with those that cannot be used, one line each."""
        problems = []
        for name in dict.fromkeys(p.name for p in plug_ins(self.group)):
            try:
                self[name]
            except ConfigError as error:
                problems.append(error.one_line)
        return tuple(problems)

    def register(self, part: C) -> C:
        """Class decorator. A name that is taken is an error that names both."""
        part_id = getattr(part, "id", None)
        if not isinstance(part_id, str) or not re.fullmatch(r"[\x21-\x7e]+", part_id):
            raise ConfigError(
                f"This {self.choice} has no id that a file could name",
                where=place_of(part),
                expected='a class attribute `id = "…"`, of letters, digits and underscores',
                got=f"{part_id!r}"[:200],
            )
        known = self._parts.get(part_id)
        if known is not None and known is not part:
            raise _clash(f'Two parts are called {self.choice} "{part_id}"', place_of(known), place_of(part))
        self._parts[part_id] = typing.cast("type[T]", part)
        return part

    def refer(self, reference: str, part: type[T]) -> None:
        """Lets a file reference (`./my_part.py:MyCodec`) stand for a part that is registered."""
        self._references[reference] = part

    def forget(self, module: str) -> None:
        """Takes out what a module registered, before it is loaded anew."""
        for table in (self._parts, self._references):
            for name in [n for n, part in table.items() if part.__module__ == module]:
                del table[name]

    def build(self, config: Mapping[str, Any] | str, *, where: str | None = None) -> T:
        """The part that `{"id": …, option: value}` describes; a bare name means its defaults.

        Raises:
            ConfigError: With every unknown option and every value of a wrong type at once.
        """
        where = where or self.choice
        options = {"id": config} if isinstance(config, str) else dict(config) if isinstance(config, Mapping) else {}
        part_id = options.pop("id", None)
        if not isinstance(part_id, str):
            raise ConfigError(
                f"A {self.choice} needs an id", where=where, got=f"{config!r}"[:200], do=did_you_mean("", self.names)
            )
        part = self[part_id]
        parts = {f.name for f in dataclasses.fields(part) if f.metadata.get("part")}  # type: ignore[arg-type]
        nested = {name: self.build(options.pop(name), where=f"{where}.{name}") for name in parts & options.keys()}
        values, problems = check_options(part, options, given=nested)
        if problems:
            raise ConfigError(f'{self.choice} "{part_id}" has wrong options', problems=problems, where=where)
        if is_own(part):
            return part(**values, **nested)
        what = f'{self.choice} "{part_id}" cannot be made'
        with foreign_code(what, where=place_of(part), do="mend it, or give it other options"):
            return part(**values, **nested)

    def _installed(self, part_id: str) -> PlugIn | None:
        found = [p for p in plug_ins(self.group) if p.name == part_id]
        if len(found) > 1:
            what = f'Two installed packages bring a {self.choice} "{part_id}"'
            raise _clash(what, found[0].place, found[1].place)
        return found[0] if found else None

    def _load(self, plug_in: PlugIn, known: type[T] | None) -> type[T]:
        part = plug_in.load()
        if known is not None:
            if part is known:
                return known
            raise _clash(f'Two parts are called {self.choice} "{plug_in.name}"', place_of(known), plug_in.place)
        check_part_class(part, self.choice, plug_in.place)
        if part.id != plug_in.name:
            raise ConfigError(
                f'The entry point "{plug_in.name}" holds the {self.choice} "{part.id}"',
                where=plug_in.place,
                expected="the part's own id as the name of its entry point",
            )
        return typing.cast("type[T]", self.register(part))

    def _unknown(self, part_id: str) -> ConfigError:
        wrong = no_reference(part_id)
        if wrong is not None:
            return wrong
        if ".py:" in part_id:
            return ConfigError(
                f'The {self.choice} "{part_id}" has not been loaded',
                do="files are named in an experiment file; its folder is where relative paths start",
            )
        return ConfigError(f'Unknown {self.choice} "{part_id}"', do=did_you_mean(part_id, self.names))


class FunctionTable(Generic[F]):
    """Functions of one kind by name: Fedstrata's own, installed ones (`fedstrata.<kind>s`), those that a file brought.

    Args:
        kind: What they are, as errors name it: "partition".
        own: Fedstrata's own.
    """

    def __init__(self, kind: str, own: Mapping[str, F]) -> None:
        self.kind = kind
        self.group = f"fedstrata.{kind}s"
        self._own = dict(own)
        self._references: dict[str, F] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted; nothing is imported for it."""
        return tuple(sorted({*self._own, *(p.name for p in plug_ins(self.group))}))

    def __contains__(self, name: object) -> bool:
        return name in self._references or name in self.names

    def is_referred(self, name: str) -> bool:
        """Whether a name is a file reference that was loaded."""
        return name in self._references

    def __getitem__(self, name: str) -> F:
        if name in self._references:
            return self._references[name]
        places = [p.place for p in plug_ins(self.group) if p.name == name]
        places += [place_of(self._own[name])] if name in self._own else []
        if len(places) > 1:
            raise _clash(f'Two functions are called {self.kind} "{name}"', places[0], places[1])
        if name in self._own:
            return self._own[name]
        for plug_in in plug_ins(self.group):
            if plug_in.name == name:
                return typing.cast("F", _callable(plug_in.load(), self.kind, plug_in.place))
        raise ConfigError(f'Unknown {self.kind} "{name}"', do=did_you_mean(name, self.names))

    def refer(self, reference: str, function: Any) -> None:
        """Lets a file reference (`./my_file.py:function`) stand for a function."""
        self._references[reference] = typing.cast("F", _callable(function, self.kind, reference))


def _callable(thing: Any, kind: str, where: str) -> Any:
    if not callable(thing):
        raise ConfigError(f"This is no {kind}", where=where, expected="a function", got=f"{thing!r}"[:200])
    return thing


def check_part_class(part: Any, choice: str, where: str) -> None:
    """Raises `ConfigError` unless `part` is a frozen dataclass with an id."""
    frozen = getattr(getattr(part, "__dataclass_params__", None), "frozen", False)
    if not (isinstance(part, type) and frozen and isinstance(getattr(part, "id", None), str)):
        raise ConfigError(
            f"This is not a {choice}",
            where=where,
            expected='a frozen dataclass with a class attribute `id = "…"`',
            got=f"{part!r}"[:200],
        )


def _clash(what: str, first: str, second: str) -> ConfigError:
    return ConfigError(what, got=f"{first} and {second}", do="give one of them another name")


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
