"""The mean over those who trained a stratum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, Proposal
from fedstrata.aggregate.sums import (
    Sums,
    add_local_values,
    check_weighting,
    client_weight,
    finish_mean,
    normalized_weights,
)
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

    Example:
        >>> HoldersMean().weights({"a": 10, "b": 30})
        {'a': 0.25, 'b': 0.75}
    """

    id: ClassVar[str] = "holders_mean"
    needs: ClassVar[Literal["sum", "all updates"]] = "sum"
    unequal_ranks: ClassVar[bool] = False
    weight_by: str = "num_examples"

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout) -> Sums:
        """No sums yet: a tensor's is allocated with its first holder."""
        return Sums(layout)

    def add(self, acc: Sums, update: ClientUpdate) -> Sums:
        """Adds w_k·local_k in place."""
        return add_local_values(acc, update, client_weight(update.num_examples, self.weight_by))

    def finish(self, acc: Sums, current: Mapping[str, np.ndarray]) -> Proposal:
        """Divides by the holders' weight."""
        return finish_mean(acc, "holders", current)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share w_k / Σ w of each holder."""
        return normalized_weights(updates, self.weight_by)
