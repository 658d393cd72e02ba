"""A published method is five choices in one short function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedstrata.aggregate.base import Aggregator
from fedstrata.codec.base import Codec
from fedstrata.errors import ConfigError, did_you_mean
from fedstrata.objective.base import Objective
from fedstrata.plan.base import Planner
from fedstrata.registry import check_options, to_config
from fedstrata.select.base import Selector

Choice = Literal["plan", "objective", "codec", "aggregate", "select"]


@dataclass(frozen=True)
class Method:
    """Five parts, and what the method says about the world around them.

    Attributes:
        planner: Who trains which strata, at which rank.
        objective: What a client minimises.
        codec: How the uplink becomes bytes.
        aggregator: How updates become one.
        selector: Which strata the server may change.
        send: What the uplink holds.
        open_choices: Choices that the experiment file may replace; the others *are* the method.
        topology: `federated`; `pooled`: one client holds everybody's data; `alone`: clients train and share nothing.
        adapters: Adapter kinds that it is defined for.
    """

    planner: Planner
    objective: Objective
    codec: Codec
    aggregator: Aggregator[Any]
    selector: Selector
    send: Literal["delta", "weights"] = "delta"
    open_choices: frozenset[Choice] = frozenset({"codec"})
    topology: Literal["federated", "pooled", "alone"] = "federated"
    adapters: frozenset[str] = frozenset({"lora", "full"})

    def to_config(self) -> dict[str, Any]:
        """The resolved parts, for the record."""
        return {
            "plan": to_config(self.planner),
            "objective": to_config(self.objective),
            "codec": to_config(self.codec),
            "aggregate": to_config(self.aggregator),
            "select": to_config(self.selector),
            "send": self.send,
            "topology": self.topology,
        }

    def with_parts(self, **parts: Any) -> Method:
        """The same method with some parts replaced."""
        return replace(self, **parts)


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
