"""The mean over the whole cohort: who did not train a stratum counts as having changed nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.admit import admit, check_weighting, client_weight, normalized_weights
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.sums import Sums, add_deltas, finish_mean, no_sums
from fedstrata.core.tensors import Layout


@AGGREGATORS.register
@dataclass(frozen=True)
class CohortMean(Aggregator[Sums]):
    """Per tensor, the server's value plus the zero-filled mean of the differences.

        W̄ = W + Σ_{k ∈ holders} w_k·Δ_k / Σ_{k ∈ cohort} w_k

    The cohort is all good replies of the round, so that a stratum with few holders moves little.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.
    """

    id: ClassVar[str] = "cohort_mean"
    needs: ClassVar[Literal["sum", "all updates"]] = "sum"
    unequal_ranks: ClassVar[bool] = False
    fixed_coordinates: ClassVar[bool] = True
    weight_by: str = "num_examples"

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> Sums:
        """No sums yet: a tensor's is allocated with its first holder."""
        return no_sums(layout, context)

    def add(self, acc: Sums, update: ClientUpdate) -> Sums:
        """Adds w_k·Δ_k in place."""
        weight = client_weight(update.num_examples, self.weight_by)
        admit(acc.roll, update, weight, self)
        return add_deltas(acc, update, weight, update.layout.names)

    def finish(self, acc: Sums, current: Mapping[str, np.ndarray]) -> Proposal:
        """Divides by the weight of all replies and adds to the server's values."""
        return finish_mean(acc, "cohort", current)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share w_k / Σ w of each holder, zero-filled replies left out."""
        return normalized_weights(updates, self.weight_by)
