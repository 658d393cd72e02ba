"""Methods by name, and what a reader wants to compare about them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fedstrata.discovery import PlugIn, foreign_code, is_own, no_reference, place_of, plug_ins
from fedstrata.errors import ConfigError, FedstrataError, did_you_mean
from fedstrata.method.base import Method
from fedstrata.method.citation import Citation
from fedstrata.options import check_options

GROUP = "fedstrata.methods"
_SAID_OTHERWISE = {
    "fedavgm": 'method.name = "fedavg" with optimize = "momentum"',
    "fedopt": 'method.name = "fedavg" with optimize = "adam", "yogi" or "adagrad"',
    "fedadam": 'method.name = "fedavg" with optimize = "adam"',
    "fedyogi": 'method.name = "fedavg" with optimize = "yogi"',
    "fedadagrad": 'method.name = "fedavg" with optimize = "adagrad"',
    "multikrum": 'method.name = "krum" with method.multi = 2 or more',
    "gdhla": 'method.name = "fed_hello" with method.arm = "pattern"',
    "rgdhla": 'method.name = "fed_hello" with method.arm = "random_pattern"',
    "fimhla": 'method.name = "fed_hello" with method.arm = "importance"',
}
"""Names of publications that are another method's options here: an alias could not carry them."""
_SAME_ON_ALL = frozenset({"all", "last_k", "first_k", "exclusive"})
"""Planners that give every client the same blocks."""


@dataclass(frozen=True, kw_only=True)
class MethodFacts:
    """What a reader wants to compare; `fedstrata methods` prints it.

    Attributes:
        paper: Where it was published, or what it is; left out, it follows from the citation.
        citation: Where it was published.
        trains: What clients train.
        sends: What clients send.
        exact: Whether the server's product equals the weighted mean of the clients' products; None where nothing is
            merged, or where it depends on the adapter kind.
        needs_server_data: Whether the server needs examples of its own.
        client_state: Whether clients keep something between rounds.
        partial_participation: Whether a round may take a part of the fleet.
        unequal_ranks: Whether clients may have different ranks.
        unequal_depth: Whether clients may train different strata.
        personalised: Whether every client ends with a model of its own.
    """

    paper: str = ""
    citation: Citation | None = None
    trains: str
    sends: str
    exact: bool | None
    needs_server_data: bool = False
    client_state: bool = False
    partial_participation: bool = True
    unequal_ranks: bool = False
    unequal_depth: bool = False
    personalised: bool = False

    def __post_init__(self) -> None:
        if not self.paper and self.citation is not None:
            object.__setattr__(self, "paper", self.citation.text)


def facts_of(method: Method) -> MethodFacts:
    """What a method's parts say about it, for methods that state no facts of their own."""
    aggregator, pairs = method.aggregator, method.pairs
    personal = method.topology == "alone" or bool(pairs.local) or method.head == "local" or aggregator.personal
    return MethodFacts(
        paper="not stated",
        trains=f'what the plan "{method.planner.id}" says',
        sends=f"{'differences' if method.send == 'delta' else 'values'} as {method.codec.id}",
        exact=None if personal or method.topology != "federated" else aggregator.exact,
        needs_server_data=getattr(method.planner, "source", "client_heldout") != "client_heldout",
        client_state=personal or _remembers(method.codec),
        unequal_ranks=aggregator.unequal_ranks,
        unequal_depth="plan" in method.open_choices or method.planner.id not in _SAME_ON_ALL,
        personalised=personal,
    )


def _remembers(codec: Any) -> bool:
    """Whether error feedback is anywhere in a codec."""
    inner = getattr(codec, "inner", None)
    return codec.id == "error_feedback" or (inner is not None and _remembers(inner))


@dataclass(frozen=True)
class MethodEntry:
    """A method as the registry knows it.

    Attributes:
        name: Its own name.
        make: The function that composes it.
        stated: Facts that its author stated; None takes what the parts say.
        aliases: Other names that people type.
    """

    name: str
    make: Callable[..., Method]
    stated: MethodFacts | None = None
    aliases: tuple[str, ...] = ()

    @cached_property
    def facts(self) -> MethodFacts:
        """What its author stated, or what its parts say with default options."""
        if self.stated is not None:
            return self.stated
        try:
            with foreign_code("It needs options", where=self.name, do=""):
                return facts_of(self.make())
        except FedstrataError:
            return MethodFacts(paper="not stated", trains="it depends on its options", sends="it depends", exact=None)

    @property
    def summary(self) -> str:
        """First line of its docstring."""
        lines = (inspect.getdoc(self.make) or "").splitlines()
        return lines[0] if lines else "no description"


@dataclass
class MethodRegistry:
    """Methods by name and by the aliases that people type.

    A method of an installed package stands in the entry-point group `fedstrata.methods` under its name: a function that
    returns a `Method`, registered or plain. It is imported when it is looked up or listed.
    """

    entries: dict[str, MethodEntry] = field(default_factory=dict)
    _references: dict[str, MethodEntry] = field(default_factory=dict)

    def register(
        self, facts: MethodFacts, *, aliases: tuple[str, ...] = ()
    ) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
        """Function decorator; the function's name is the method's.

        Raises:
            ConfigError: If it is put above a function without facts in brackets.
        """
        if not isinstance(facts, MethodFacts):
            raise ConfigError(
                "METHODS.register is given no facts",
                where=place_of(facts) if inspect.isfunction(facts) else None,
                expected="@METHODS.register(MethodFacts(trains=…, sends=…, exact=…)), or no decorator at all",
                got=f"{facts!r}"[:200],
            )

        def add(make: Callable[..., Method]) -> Callable[..., Method]:
            self.add(MethodEntry(make.__name__, make, facts, aliases))
            return make

        return add

    def add(self, entry: MethodEntry) -> MethodEntry:
        """Adds a method. A name or alias that is taken is an error that names both."""
        if self.entries.get(entry.name) == entry:
            return self.entries[entry.name]
        for name in (entry.name, *entry.aliases):
            known = self._known(name)
            if known is not None:
                raise _clash(name, place_of(known.make), place_of(entry.make))
        self.entries[entry.name] = entry
        return entry

    def entry_of(self, make: Callable[..., Method], name: str | None = None) -> MethodEntry:
        """The entry of a function: the one that its decorator made, else a new one without stated facts."""
        for entry in self.entries.values():
            if entry.make is make:
                return entry
        return self.add(MethodEntry(name or make.__name__, make))

    def refer(self, reference: str, entry: MethodEntry) -> None:
        """Lets a file reference (`./my_method.py:mymethod`) stand for a method."""
        self._references[reference] = entry

    def forget(self, module: str) -> None:
        """Takes out what a module registered, before it is loaded anew."""
        for table in (self.entries, self._references):
            for name in [n for n, entry in table.items() if entry.make.__module__ == module]:
                del table[name]

    def find(self, name: str) -> MethodEntry:
        """The method of this name or alias; case, spaces and dashes do not matter.

        Raises:
            ConfigError: If there is none, two of them, or one that cannot be imported.
        """
        if name in self._references:
            return self._references[name]
        known, installed = self._known(name), [p for p in plug_ins(GROUP) if _plain(p.name) == _plain(name)]
        if len(installed) > 1:
            raise _clash(name, installed[0].place, installed[1].place)
        if installed:
            return self._load(installed[0], known)
        if known is not None:
            return known
        wrong = no_reference(name)
        if wrong is not None:
            raise wrong
        if ".py:" in name:
            raise ConfigError(
                f'The method "{name}" has not been loaded',
                where="method.name",
                do="files are named in an experiment file; its folder is where relative paths start",
            )
        names = {*self.entries, *(p.name for p in plug_ins(GROUP))}
        do = _SAID_OTHERWISE.get(_plain(name)) or did_you_mean(name, names)
        raise ConfigError(f'Unknown method "{name}"', where="method.name", do=do)

    def load_installed(self) -> tuple[str, ...]:
        """Imports every installed method; returns what is wrong with those that cannot be used, one line each."""
        problems = []
        for name in dict.fromkeys(p.name for p in plug_ins(GROUP)):
            try:
                self.find(name)
            except ConfigError as error:
                problems.append(error.one_line)
        return tuple(problems)

    def build(self, name: str, options: Mapping[str, Any]) -> Method:
        """The method with these options.

        Raises:
            ConfigError: With every wrong option at once.
        """
        entry = self.find(name)
        values, problems = check_options(entry.make, options)
        if problems:
            raise ConfigError(f'Method "{entry.name}" has wrong options', problems=problems, where="method")
        method = self._made(entry, values)
        if not isinstance(method, Method):
            raise ConfigError(
                f'The method "{entry.name}" does not make a method',
                where=place_of(entry.make),
                expected="a function that returns fedstrata.method.Method",
                got=type(method).__name__,
            )
        return method

    def _made(self, entry: MethodEntry, values: Mapping[str, Any]) -> Any:
        """What the function returns; what is wrong with a function from outside is told with its place."""
        if is_own(entry.make):
            return entry.make(**values)
        where = place_of(entry.make)
        try:
            with foreign_code(f'The method "{entry.name}" cannot be made', where=where, do="mend its function"):
                return entry.make(**values)
        except ConfigError as error:
            if error.where is not None:
                raise
            raise ConfigError(error.what, where=where, expected=error.expected, got=error.got, do=error.do) from error

    def _known(self, name: str) -> MethodEntry | None:
        wanted = _plain(name)
        for entry in self.entries.values():
            if wanted in {_plain(n) for n in (entry.name, *entry.aliases)}:
                return entry
        return None

    def _load(self, plug_in: PlugIn, known: MethodEntry | None) -> MethodEntry:
        make = plug_in.load()
        if known is not None and known.make is make:
            return known
        if known is not None:
            raise _clash(plug_in.name, place_of(known.make), plug_in.place)
        if not inspect.isfunction(make):
            raise ConfigError(
                f'The plug-in "{plug_in.name}" is no method',
                where=plug_in.place,
                expected="a function that returns fedstrata.method.Method",
                got=f"{make!r}"[:200],
            )
        entry = self.entry_of(make, plug_in.name)
        if _plain(plug_in.name) not in {_plain(n) for n in (entry.name, *entry.aliases)}:
            del self.entries[entry.name]
            entry = self.add(replace(entry, aliases=(*entry.aliases, plug_in.name)))
        return entry


def _clash(name: str, first: str, second: str) -> ConfigError:
    return ConfigError(
        f'Two methods are called "{name}"', got=f"{first} and {second}", do="give one of them another name"
    )


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


METHODS = MethodRegistry()
