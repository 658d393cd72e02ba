"""The mean over those who trained a stratum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.admit import admit, check_weighting, client_weight, normalized_weights
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.sums import Sums, add_local_values, add_moments, finish_mean, no_sums
from fedstrata.core.tensors import Layout


@AGGREGATORS.register
@dataclass(frozen=True)
class HoldersMean(Aggregator[Sums]):
    """Per tensor, the weighted mean of the local values of its holders.

        W̄ = Σ_{k ∈ holders} w_k·local_k / Σ_{k ∈ holders} w_k,    local_k = start_k + Δ_k

    A tensor that nobody trained stays as it is. LoRA factors are averaged one by one: the product of the means is
    not the mean of the products.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.
        moments: Whether the proposal also carries Σ Δ_k and Σ Δ_k² over the holders of each tensor, unweighted (two
            float64 copies of the trained tensors).

    Example:
        >>> HoldersMean().weights({"a": 10, "b": 30})
        {'a': 0.25, 'b': 0.75}
    """

    id: ClassVar[str] = "holders_mean"
    needs: ClassVar[Literal["sum", "all updates"]] = "sum"
    unequal_ranks: ClassVar[bool] = False
    fixed_coordinates: ClassVar[bool] = True
    weight_by: str = "num_examples"
    moments: bool = False

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> Sums:
        """No sums yet: a tensor's is allocated with its first holder."""
        return no_sums(layout, context)

    def add(self, acc: Sums, update: ClientUpdate) -> Sums:
        """Adds w_k·local_k in place."""
        weight = client_weight(update.num_examples, self.weight_by)
        admit(acc.roll, update, weight, self)
        if self.moments:
            add_moments(acc, update)
        return add_local_values(acc, update, weight, update.layout.names)

    def finish(self, acc: Sums, current: Mapping[str, np.ndarray]) -> Proposal:
        """Divides by the holders' weight."""
        return finish_mean(acc, "holders", current)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share w_k / Σ w of each holder."""
        return normalized_weights(updates, self.weight_by)
