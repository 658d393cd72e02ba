"""The mean of B, after which the pair is turned so that A is orthonormal: FedSVD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.admit import (
    admit,
    check_adapters_only,
    check_scalings_known,
    check_weighting,
    client_weight,
    normalized_weights,
)
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.sums import Sums, add_local_values, mean_statistics, mean_tensors, no_sums
from fedstrata.core.linalg import LowRank, truncated_svd
from fedstrata.core.lora import refactor
from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.errors import AggregationError


@dataclass
class TurnedSums:
    """The accumulator of `svd_mean`: sums of B, and the A that all clients had.

    Attributes:
        sums: Of B and of plain weights.
        frozen: A by name, where the updates' starts hold it.
    """

    sums: Sums
    frozen: dict[str, np.ndarray] = field(default_factory=dict)


@AGGREGATORS.register
@dataclass(frozen=True)
class SvdMean(Aggregator[TurnedSums]):
    """Clients train B with one frozen A; the mean product is exact and is factored with orthonormal rows in A.

        B̄ = Σ q_k·B_k,    s·B̄·A = U·S·Vᵀ,    A ← Vᵀ,    B ← U·S/s,    q_k = w_k / Σ_holders w

    with s the server's scaling. The product does not change, its basis does: A follows what was learned and stays well
    conditioned. Missing directions are completed orthonormally, from the initial rows of A, with a zero column in B.
    A is what the clients had in their forward pass (`ClientUpdate.start`, where it is given), else the server's.
    Plain weights (the head) are averaged over their holders.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.

    References:
        Lee et al., FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA, NeurIPS 2025.
        Differs in: spare directions are completed from the run's initial A.
    """

    id: ClassVar[str] = "svd_mean"
    needs: ClassVar[Literal["sum", "all updates"]] = "sum"
    unequal_ranks: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    weight_by: str = "num_examples"

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> TurnedSums:
        """No sums yet; the context must know the scaling of every target."""
        check_adapters_only(layout, self.id)
        check_scalings_known(layout, context, self.id)
        return TurnedSums(no_sums(layout, context))

    def add(self, acc: TurnedSums, update: ClientUpdate) -> TurnedSums:
        """Adds w_k·B_k in place.

        Raises:
            AggregationError: If the update holds an A, or the client's frozen A is not that of the others.
        """
        where, layout = f"reply of client {update.client}", acc.sums.roll.layout
        trained = [s.name for s in update.layout if s.kind == "lora_A"]
        if trained:
            raise AggregationError(
                f"{self.id} needs clients that train B only", where=where, got=trained[0], do="freeze A on the clients"
            )
        names = [f"{t}.lora_A" for t in update.layout.targets]
        frozen = {n: update.start[n] for n in names if n in update.start}
        for name, mine in frozen.items():
            known = acc.frozen.get(name)
            if (
                name not in layout
                or mine.shape != layout[name].shape
                or not (known is None or np.array_equal(known, mine))
            ):
                raise AggregationError(
                    f"{self.id} needs one frozen A on all clients", where=where, got=f"another {name}"
                )
        weight = client_weight(update.num_examples, self.weight_by)
        admit(acc.sums.roll, update, weight, self)
        acc.frozen.update(frozen)
        add_local_values(acc.sums, update, weight, update.layout.names)
        return acc

    def finish(self, acc: TurnedSums, current: Mapping[str, np.ndarray]) -> Proposal:
        """Divides, and turns every held pair."""
        roll = acc.sums.roll
        roll.check_any()
        means = mean_tensors(acc.sums, "holders", current, np.float64)
        turned: NamedTensors = {}
        context = roll.context or MergeContext()
        for target in roll.layout.targets:
            a, b = f"{target}.lora_A", f"{target}.lora_B"
            if b in means:
                scaling = context.scaling[target]
                frozen = acc.frozen.get(a, current[a]).astype(np.float64)
                matrix = LowRank(means[b], scaling * frozen)
                svd = truncated_svd(matrix, matrix.rank)
                pair = refactor(svd, context.fresh_A(roll.layout[a]), scaling=scaling, form="orthonormal_a")
                turned |= {a: pair.lora_A, b: pair.lora_B}
        merged = means | turned
        return Proposal(
            {name: merged[name].astype(np.float32) for name in roll.layout.names if name in merged},
            roll.held(),
            mean_statistics(roll, "holders"),
            layout=roll.layout,
        )

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share q_k of each holder."""
        return normalized_weights(updates, self.weight_by)
