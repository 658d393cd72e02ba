"""Methods by name, and what a reader wants to compare about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstrata.errors import ConfigError, did_you_mean
from fedstrata.method.base import Method
from fedstrata.registry import check_options


@dataclass(frozen=True)
class MethodFacts:
    """What a reader wants to compare; `fedstrata methods` prints it.

    Attributes:
        paper: Where it was published.
        trains: What clients train.
        sends: What clients send.
        exact: Whether the server's product equals the weighted mean of the clients' products.
        needs_server_data: Whether the server needs examples of its own.
        client_state: Whether clients keep something between rounds.
        partial_participation: Whether a round may take a part of the fleet.
        unequal_ranks: Whether clients may have different ranks.
        unequal_depth: Whether clients may train different strata.
        personalised: Whether every client ends with a model of its own.
    """

    paper: str
    trains: str
    sends: str
    exact: bool | None
    needs_server_data: bool = False
    client_state: bool = False
    partial_participation: bool = True
    unequal_ranks: bool = False
    unequal_depth: bool = False
    personalised: bool = False


@dataclass(frozen=True)
class MethodEntry:
    """A method as the registry knows it."""

    name: str
    make: Callable[..., Method]
    facts: MethodFacts
    aliases: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """First line of its docstring."""
        return (self.make.__doc__ or "").strip().splitlines()[0]


@dataclass
class MethodRegistry:
    """Methods by name and by the aliases that people type."""

    entries: dict[str, MethodEntry] = field(default_factory=dict)

    def register(
        self, facts: MethodFacts, *, aliases: tuple[str, ...] = ()
    ) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
        """Function decorator; the function's name is the method's."""

        def add(make: Callable[..., Method]) -> Callable[..., Method]:
            known = self.entries.get(make.__name__)
            if known is not None:
                both = f"{known.make.__module__} and {make.__module__}"
                raise ConfigError(f'Two methods are called "{make.__name__}"', got=both)
            self.entries[make.__name__] = MethodEntry(make.__name__, make, facts, aliases)
            return make

        return add

    def find(self, name: str) -> MethodEntry:
        """The method of this name or alias; case, spaces and dashes do not matter."""
        wanted = _plain(name)
        for entry in self.entries.values():
            if wanted in {_plain(n) for n in (entry.name, *entry.aliases)}:
                return entry
        raise ConfigError(f'Unknown method "{name}"', where="method.name", do=did_you_mean(name, self.entries))

    def build(self, name: str, options: Mapping[str, Any]) -> Method:
        """The method with these options.

        Raises:
            ConfigError: With every wrong option at once.
        """
        entry = self.find(name)
        values, problems = check_options(entry.make, options)
        if problems:
            raise ConfigError(f'Method "{entry.name}" has wrong options', problems=problems, where="method")
        return entry.make(**values)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


METHODS = MethodRegistry()
