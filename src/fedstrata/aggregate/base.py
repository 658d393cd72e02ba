"""How updates become one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import numpy as np

from fedstrata.core.lora import init_lora
from fedstrata.core.tensors import Layout, NamedTensors, Stratum, TensorSpec
from fedstrata.errors import AggregationError
from fedstrata.registry import Registry

Send: TypeAlias = Literal["delta", "weights"]


@dataclass(frozen=True)
class ClientUpdate:
    """One good reply, as decoded from its bytes.

    Attributes:
        client: Who sent it.
        num_examples: n_k, the client's distinct training examples.
        layout: What it trained; a LoRA rank may be smaller than planned.
        start: The decoded downlink that it started from, cut to `layout`; float32. It may hold more: where only one
            factor of a pair was trained, the other one as the client had it.
        values: What arrived: local − start (`delta`) or the local values (`weights`); float32.
        send: Which of the two.
        header: Further numbers of the reply (loss, steps, method's own).
        scaling: s_k per target, as the client used it; a target that is not here has the server's.
        slices: Per stratum, which rank slices of the server's factors the client had; a stratum that is not here has
            the leading ones.
    """

    client: str
    num_examples: int
    layout: Layout
    start: NamedTensors
    values: NamedTensors
    send: Send = "delta"
    header: Mapping[str, Any] = field(default_factory=dict)
    scaling: Mapping[str, float] = field(default_factory=dict)
    slices: Mapping[Stratum, tuple[int, ...]] = field(default_factory=dict)

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
class MergeContext:
    """What an aggregator may know about the run beside the tensors.

    Attributes:
        scaling: s per target, as the server uses it.
        seed: The run's seed.
        server_round: From 1.
        initial: First values of lora_A by name; one that is not here is drawn from its named stream.
    """

    scaling: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    server_round: int = 0
    initial: Mapping[str, np.ndarray] = field(default_factory=dict)

    def fresh_A(self, spec: TensorSpec) -> np.ndarray:
        """The initial rows of a lora_A, from which spare directions start again."""
        known = self.initial.get(spec.name)
        return init_lora(self.seed, Layout((spec,)))[spec.name] if known is None else known


@dataclass(frozen=True)
class Proposal:
    """What the aggregator would make of the server's tensors.

    A selector takes a part of it with `restrict`, which cuts everything alike.

    Attributes:
        tensors: New values of every tensor that had a holder, whole tensors of the server's layout, float32.
        holders: How many clients trained each stratum; strata without holders are absent.
        statistics: JSON-ready numbers for the record.
        base_update: Per target, float32 factors (B [out, R], A [R, in]) with base weight += B·A; weights and scalings
            are folded in.
        weights: Per target, the q_k that the method used (client → q_k); a target that is not here has
            `Aggregator.weights`.
        moments: Per tensor, Σ_k Δ_k and Σ_k Δ_k² over its holders, unweighted, float64; only where asked for.
        layout: The server's; it knows which tensor and which target belong to which stratum.
    """

    tensors: NamedTensors
    holders: Mapping[Stratum, int]
    statistics: Mapping[str, Any] = field(default_factory=dict)
    base_update: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    moments: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    layout: Layout = field(default_factory=lambda: Layout(()), repr=False)

    def restrict(self, strata: Iterable[Stratum]) -> Proposal:
        """The same proposal with these strata only; the statistics stay.

        Raises:
            AggregationError: If a tensor or a target is not in `layout`.
        """
        keep = set(strata)
        stratum_of = {s.name: s.stratum for s in self.layout} | {s.target: s.stratum for s in self.layout}
        strangers = sorted({*self.tensors, *self.base_update, *self.weights, *self.moments} - set(stratum_of))
        if strangers:
            raise AggregationError(
                "A proposal can only be cut where its layout says which block each tensor belongs to",
                expected="a layout with all tensors of the proposal",
                got=f"{len(strangers)} unknown, e.g. {strangers[0]}",
            )
        return replace(
            self,
            tensors={n: t for n, t in self.tensors.items() if stratum_of[n] in keep},
            holders={s: n for s, n in self.holders.items() if s in keep},
            base_update={t: f for t, f in self.base_update.items() if stratum_of[t] in keep},
            weights={t: q for t, q in self.weights.items() if stratum_of[t] in keep},
            moments={n: m for n, m in self.moments.items() if stratum_of[n] in keep},
        )


Acc = TypeVar("Acc")


class Aggregator(ABC, Generic[Acc]):
    """Merges replies: `zero`, then `add` in ascending client id, then `finish` once.

    Attributes:
        needs: `sum`: memory O(model), updates are dropped after `add`. `all updates`: keeps the cohort's factors.
        unequal_ranks: Whether clients may hold different ranks of one stratum.
        exact: Whether the server's product always equals the q_k-weighted mean of the clients' products.
        personal: Whether every client ends with a model of its own, so that there is no server's product to compare.
        robust: Whether it is meant to differ from the mean (`distance_to_mean` instead of an exactness error).
        fixed_coordinates: Whether an entry of a tensor keeps its meaning over rounds, as server optimizers need.
        folds_scaling: Whether clients may scale their pairs differently from the server.
        moves_base: Whether it may propose a `base_update`.
    """

    id: ClassVar[str]
    needs: ClassVar[Literal["sum", "all updates"]]
    unequal_ranks: ClassVar[bool]
    exact: ClassVar[bool] = False
    personal: ClassVar[bool] = False
    robust: ClassVar[bool] = False
    fixed_coordinates: ClassVar[bool] = False
    folds_scaling: ClassVar[bool] = False
    moves_base: ClassVar[bool] = False

    @property
    def uniform_rank_only(self) -> bool:
        """Whether all holders of a stratum need the server's rank."""
        return not self.unequal_ranks

    @abstractmethod
    def zero(self, layout: Layout, context: MergeContext | None = None) -> Acc:
        """An empty accumulator.

        Args:
            layout: The server's.
            context: Scaling, seed and round. Aggregators that form products need the scaling of every target.

        Raises:
            AggregationError: If the layout or the context is not enough for this aggregator.
        """

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
