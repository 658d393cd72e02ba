"""How updates become one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import numpy as np

from fedstrata.core.tensors import Layout, NamedTensors, Stratum
from fedstrata.registry import Registry

Send: TypeAlias = Literal["delta", "weights"]


@dataclass(frozen=True)
class ClientUpdate:
    """One good reply, as decoded from its bytes.

    Attributes:
        client: Who sent it.
        num_examples: n_k, the client's distinct training examples.
        layout: What it trained; a LoRA rank may be smaller than planned.
        start: The decoded downlink that it started from, cut to `layout`; float32.
        values: What arrived: local − start (`delta`) or the local values (`weights`); float32.
        send: Which of the two.
        header: Further numbers of the reply (loss, steps, method's own).
    """

    client: str
    num_examples: int
    layout: Layout
    start: NamedTensors
    values: NamedTensors
    send: Send = "delta"
    header: Mapping[str, Any] = field(default_factory=dict)

    def local(self, name: str) -> np.ndarray:
        """local_k = start_k + Δ_k, in float64."""
        if self.send == "weights":
            return self.values[name].astype(np.float64)
        return self.start[name].astype(np.float64) + self.values[name]

    def delta(self, name: str) -> np.ndarray:
        """Δ_k = local_k − start_k, in float64."""
        if self.send == "delta":
            return self.values[name].astype(np.float64)
        return self.values[name].astype(np.float64) - self.start[name]


@dataclass(frozen=True)
class Proposal:
    """What the aggregator would make of the server's tensors.

    Attributes:
        tensors: New values of every tensor that had a holder, whole tensors of the server's layout, float32.
        holders: How many clients trained each stratum; strata without holders are absent.
        statistics: JSON-ready numbers for the record.
    """

    tensors: NamedTensors
    holders: Mapping[Stratum, int]
    statistics: Mapping[str, Any] = field(default_factory=dict)


Acc = TypeVar("Acc")


class Aggregator(ABC, Generic[Acc]):
    """Merges replies: `zero`, then `add` in ascending client id, then `finish` once.

    Attributes:
        needs: `sum`: memory O(model), updates are dropped after `add`. `all updates`: keeps the cohort's factors.
        unequal_ranks: Whether clients may hold different ranks of one stratum.
    """

    id: ClassVar[str]
    needs: ClassVar[Literal["sum", "all updates"]]
    unequal_ranks: ClassVar[bool]

    @abstractmethod
    def zero(self, layout: Layout) -> Acc:
        """An empty accumulator for the server's layout."""

    @abstractmethod
    def add(self, acc: Acc, update: ClientUpdate) -> Acc:
        """Takes one update in. The accumulator may be changed in place; the update is not kept by `sum` aggregators."""

    @abstractmethod
    def finish(self, acc: Acc, current: Mapping[str, np.ndarray]) -> Proposal:
        """Divides once and casts once to float32. Strata that nobody held stay out of the proposal.

        Args:
            acc: The accumulator.
            current: The server's tensors before this round.

        Raises:
            AggregationError: If the total weight is zero or no reply was added.
        """

    @abstractmethod
    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """q_k, the weights the method itself uses among these holders (client → n_k); they sum to 1."""


AGGREGATORS: Registry[Aggregator[Any]] = Registry("aggregator")
