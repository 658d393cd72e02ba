"""LoRA factors averaged one by one, as FedIT does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.admit import admit, check_adapters_only, check_weighting, client_weight, normalized_weights
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.sums import Sums, add_local_values, finish_mean, no_sums
from fedstrata.core.tensors import Layout


@AGGREGATORS.register
@dataclass(frozen=True)
class FactorMean(Aggregator[Sums]):
    """A and B are averaged separately, over those who hold them, at one rank.

        Ā = Σ p_k·A_k,    B̄ = Σ p_k·B_k,    p_k = w_k / Σ w

    With a common scaling the server's product is off by ‖s·Σ p_k·(B_k − B̄)(A_k − Ā)‖_F. It takes adapters and the
    head only; for full parameters there is `holders_mean`.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.

    References:
        Zhang et al., Towards Building the Federated GPT: Federated Instruction Tuning, ICASSP 2024.
    """

    id: ClassVar[str] = "factor_mean"
    needs: ClassVar[Literal["sum", "all updates"]] = "sum"
    unequal_ranks: ClassVar[bool] = False
    fixed_coordinates: ClassVar[bool] = True
    weight_by: str = "num_examples"

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> Sums:
        """No sums yet.

        Raises:
            AggregationError: If the layout holds plain weights outside the head.
        """
        check_adapters_only(layout, self.id)
        return no_sums(layout, context)

    def add(self, acc: Sums, update: ClientUpdate) -> Sums:
        """Adds w_k·A_k and w_k·B_k in place."""
        weight = client_weight(update.num_examples, self.weight_by)
        admit(acc.roll, update, weight, self)
        return add_local_values(acc, update, weight, update.layout.names)

    def finish(self, acc: Sums, current: Mapping[str, np.ndarray]) -> Proposal:
        """Divides by the holders' weight."""
        return finish_mean(acc, "holders", current)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share p_k of each holder."""
        return normalized_weights(updates, self.weight_by)
