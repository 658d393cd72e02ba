"""Differences of drawn rank slices, summed over the cohort: FSLoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.admit import Roll, admit, check_weighting, client_weight, normalized_weights
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.slices import SliceSums
from fedstrata.aggregate.sums import mean_statistics
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.errors import AggregationError


def sketch_slices(seed: int, server_round: int, client: str, rank: int, count: int) -> tuple[int, ...]:
    """Which rank slices S a client has in a round: `count` of `rank`, without replacement, in ascending order.

    Every stratum of the same rank gets the same ones, and a client with a smaller count has a part of what it would
    have with a larger one.

    Args:
        seed: The run's seed.
        server_round: From 1.
        client: Its id.
        rank: r, the server's rank.
        count: k_k, the client's rank.

    Raises:
        AggregationError: If count is not between 1 and rank.

    Example:
        >>> sketch_slices(0, 1, "a", 4, 4)
        (0, 1, 2, 3)
    """
    if not 1 <= count <= rank:
        raise AggregationError("A sketch cannot have this rank", expected=f"1 to {rank}", got=str(count))
    order = generator(seed, "sketch", server_round, client).permutation(rank)
    return tuple(sorted(int(h) for h in order[:count]))


@AGGREGATORS.register
@dataclass(frozen=True)
class SketchMean(Aggregator[SliceSums]):
    """Each client sends the differences of the rank slices it had; absent slices count as no change.

        W ← W + Σ_k p_k·Δ_k,    p_k = w_k / Σ_cohort w

    with Δ_k filled with zeros outside the slices S_k that the client had (`ClientUpdate.slices`, drawn by
    `sketch_slices`; without an entry the leading ones). Differences are not scaled: the factor r/k_k of the client's
    forward pass, with its rank k_k and the server's r, is in its gradients. The cohort is all good replies. A slice
    that nobody had keeps the server's bits. With k_k = r everywhere it is the factor mean with a cohort denominator.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.

    References:
        Fang et al., Federated Sketching LoRA: On-Device Collaborative Fine-Tuning of Large Language Models, 2025.
    """

    id: ClassVar[str] = "sketch_mean"
    needs: ClassVar[Literal["sum", "all updates"]] = "sum"
    unequal_ranks: ClassVar[bool] = True
    weight_by: str = "num_examples"

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> SliceSums:
        """No sums yet: a tensor's is allocated with its first holder."""
        return SliceSums(Roll(layout, context))

    def add(self, acc: SliceSums, update: ClientUpdate) -> SliceSums:
        """Adds w_k·Δ_k of the slices that the client had."""
        weight = client_weight(update.num_examples, self.weight_by)
        admit(acc.roll, update, weight, self, any_slices=True)
        for spec in update.layout:
            acc.add(spec, update.delta(spec.name), weight, update.slices.get(spec.stratum))
        return acc

    def finish(self, acc: SliceSums, current: Mapping[str, np.ndarray]) -> Proposal:
        """Divides by the weight of all replies and adds to the server's values."""
        acc.roll.check_any()
        tensors: NamedTensors = {}
        for name in (n for n in acc.roll.layout.names if n in acc.totals):
            change, covered = acc.mean(name, acc.roll.total_weight)
            tensors[name] = np.where(covered, (current[name] + change).astype(np.float32), current[name])
        return Proposal(tensors, acc.roll.held(), mean_statistics(acc.roll, "cohort"), layout=acc.roll.layout)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share w_k / Σ w of each holder, zero-filled replies left out."""
        return normalized_weights(updates, self.weight_by)
