"""Sums per rank slice: row h of A and column h of B over the clients that have slice h."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fedstrata.aggregate.admit import Roll, admit, check_weighting, client_weight, normalized_weights
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.sums import mean_statistics
from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec, stratum_name
from fedstrata.errors import AggregationError

Index: TypeAlias = Any
"""What numpy takes between brackets."""


@dataclass
class SliceSums:
    """The accumulator of means per rank slice, float64.

    Attributes:
        roll: Who has answered.
        totals: Per tensor, Σ w_k·x_k in the server's shape, 0 where a client has nothing.
        weights: Per tensor, Σ w_k per rank slice [rank]; of a plain weight one number.
    """

    roll: Roll
    totals: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, spec: TensorSpec, values: np.ndarray, weight: float, slices: tuple[int, ...] | None = None) -> None:
        """Adds w·x of one tensor.

        Args:
            spec: As the client has it.
            values: float64; overwritten.
            weight: w_k.
            slices: Which rank slices of the server's these are; None: the leading ones.
        """
        whole = self.roll.layout[spec.name]
        if spec.name not in self.totals:
            self.totals[spec.name] = np.zeros(whole.shape)
            self.weights[spec.name] = np.zeros(whole.rank) if whole.kind != "weight" else np.zeros(())
        values *= weight
        which: Index = slice(spec.rank) if slices is None else list(slices)
        self.totals[spec.name][slice_index(spec, which)] += values
        self.weights[spec.name][which if spec.kind != "weight" else ...] += weight

    def mean(self, name: str, denominator: np.ndarray | float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The quotient of one tensor, and where it is defined: where a client with a weight above 0 has the slice.

        Args:
            name: The tensor.
            denominator: What to divide by; None: the weight of each slice.

        Returns:
            float64 in the server's shape, and a mask that broadcasts to it.
        """
        spec = self.roll.layout[name]
        weights = per_slice(spec, self.weights[name])
        covered = weights > 0
        whole = weights if denominator is None else denominator
        return self.totals[name] / np.where(covered, whole, 1.0), covered


def slice_index(spec: TensorSpec, which: Index) -> Index:
    """The index of some rank slices in a tensor: rows of A, columns of B, all of a plain weight."""
    if spec.kind == "weight":
        return ...
    return which if spec.has_rank_rows else (slice(None), which)


def per_slice(spec: TensorSpec, numbers: np.ndarray) -> np.ndarray:
    """One number per rank slice, shaped to broadcast over the tensor: [r, 1] for A, [r] for a bias, [1, r] for B."""
    if spec.kind == "weight":
        return numbers
    return numbers.reshape(-1, *(1,) * (len(spec.shape) - 1)) if spec.has_rank_rows else numbers[None, :]


def finish_slices(acc: SliceSums, current: Mapping[str, np.ndarray]) -> NamedTensors:
    """Holders' mean per slice; slices that nobody has keep the server's bits.

    Raises:
        AggregationError: If no holder of a tensor has a weight.
    """
    tensors: NamedTensors = {}
    for spec in acc.roll.layout:
        if spec.name in acc.totals:
            mean, covered = acc.mean(spec.name)
            check_covered(covered, spec)
            tensors[spec.name] = np.where(covered, mean.astype(np.float32), current[spec.name])
    return tensors


def check_covered(covered: np.ndarray, spec: TensorSpec) -> None:
    """Raises `AggregationError` if nobody with a weight has any slice of a tensor that was trained."""
    if not covered.any():
        raise AggregationError(
            f"The replies that trained {stratum_name(spec.stratum)} have no weight",
            where=f"tensor {spec.name}",
            expected="at least one of them with examples",
        )


@AGGREGATORS.register
@dataclass(frozen=True)
class RankSliceMean(Aggregator[SliceSums]):
    """Row h of A and column h of B are averaged over the clients whose rank covers h.

        A[h, :] = Σ_{k: r_k > h} w_k·A_k[h, :] / Σ_{k: r_k > h} w_k,    B[:, h] alike

    with h the rank slice from 0 and r_k the client's rank. Slices that nobody covers keep the server's values. The
    factors of all clients have one scaling, the server's; nothing is folded in. Plain weights (the head) are averaged
    over their holders. At equal ranks it is the mean of the factors, one by one.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.

    References:
        The holders' mean, taken per rank slice (ours). Differs in: HetLoRA pads with zeros and weighs by norms
        (`norm_weighted_pad`).
    """

    id: ClassVar[str] = "rank_slice_mean"
    needs: ClassVar[Literal["sum", "all updates"]] = "sum"
    unequal_ranks: ClassVar[bool] = True
    weight_by: str = "num_examples"

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> SliceSums:
        """No sums yet: a tensor's is allocated with its first holder."""
        return SliceSums(Roll(layout, context))

    def add(self, acc: SliceSums, update: ClientUpdate) -> SliceSums:
        """Adds w_k·local_k of the slices that the client has."""
        weight = client_weight(update.num_examples, self.weight_by)
        admit(acc.roll, update, weight, self)
        for spec in update.layout:
            acc.add(spec, update.local(spec.name), weight)
        return acc

    def finish(self, acc: SliceSums, current: Mapping[str, np.ndarray]) -> Proposal:
        """Divides slice by slice."""
        acc.roll.check_any()
        tensors = finish_slices(acc, current)
        return Proposal(tensors, acc.roll.held(), mean_statistics(acc.roll, "holders"), layout=acc.roll.layout)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share of each holder over all its slices; within a slice they are scaled up to sum to 1."""
        return normalized_weights(updates, self.weight_by)
