"""LoRA factors averaged one by one, as FedIT does."""

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
from fedstrata.core.tensors import HEAD, Layout
from fedstrata.errors import AggregationError


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
    weight_by: str = "num_examples"

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout) -> Sums:
        """No sums yet.

        Raises:
            AggregationError: If the layout holds plain weights outside the head.
        """
        plain = [s.name for s in layout if s.kind == "weight" and s.stratum != HEAD]
        if plain:
            raise AggregationError(
                "factor_mean averages LoRA factors and the head only",
                got=f"{len(plain)} plain weights, e.g. {plain[0]}",
                do='use holders_mean, or adapter.kind = "lora"',
            )
        return Sums(layout)

    def add(self, acc: Sums, update: ClientUpdate) -> Sums:
        """Adds w_k·A_k and w_k·B_k in place."""
        return add_local_values(acc, update, client_weight(update.num_examples, self.weight_by))

    def finish(self, acc: Sums, current: Mapping[str, np.ndarray]) -> Proposal:
        """Divides by the holders' weight."""
        return finish_mean(acc, "holders", current)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share p_k of each holder."""
        return normalized_weights(updates, self.weight_by)
