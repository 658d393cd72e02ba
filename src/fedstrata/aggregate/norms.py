"""Zero-padded factors weighted by the norm of the local product: HetLoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.admit import (
    Roll,
    admit,
    check_adapters_only,
    check_weighting,
    client_weight,
    normalized_weights,
)
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.collect import check_whole_pairs
from fedstrata.aggregate.slices import SliceSums, check_covered
from fedstrata.aggregate.sums import mean_statistics
from fedstrata.core.linalg import LowRank
from fedstrata.core.tensors import Layout, NamedTensors


@dataclass
class NormSums:
    """The accumulator of `norm_weighted_pad`.

    Attributes:
        sums: Per tensor, Σ ω_k·local_k; Σ w_k·local_k of plain weights, and of a target while all its norms are 0.
        norms: Per target, ‖B_k·A_k‖_F by client.
        sizes: Per target, n_k by client.
    """

    sums: SliceSums
    norms: dict[str, dict[str, float]] = field(default_factory=dict)
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)


@AGGREGATORS.register
@dataclass(frozen=True)
class NormWeightedPad(Aggregator[NormSums]):
    """Factors are padded with zeros to the server's rank and averaged, target by target, by the norm of the product.

        ω_k = ‖B_k·A_k‖_F / Σ_{j ∈ holders} ‖B_j·A_j‖_F
        A[h, :] = Σ_{k: r_k > h} ω_k·A_k[h, :],    B[:, h] alike

    with B_k·A_k the local product as it was sent, after the client's pruning, h the rank slice from 0 and r_k its
    rank. A slice that few clients have shrinks, because absent clients count with zeros. The scaling is one and the
    same for all and cancels. Where all norms of a target are 0, ω_k is p_k = w_k / Σ_holders w. Slices that no client
    with ω_k > 0 has keep the server's values. Plain weights (the head) are averaged over their holders by w_k. The
    proposal carries ω_k in `weights`.

    Args:
        weight_by: Of the head and of targets without any norm: `num_examples`: w_k = n_k. `uniform`: w_k = 1.

    References:
        Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models (HetLoRA), EMNLP 2024.
        Differs in: slices that nobody covers keep the server's values instead of becoming zero, where they could never
        learn again.
    """

    id: ClassVar[str] = "norm_weighted_pad"
    needs: ClassVar[Literal["sum", "all updates"]] = "sum"
    unequal_ranks: ClassVar[bool] = True
    weight_by: str = "num_examples"

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> NormSums:
        """No sums yet: a tensor's is allocated with its first holder."""
        check_adapters_only(layout, self.id)
        return NormSums(SliceSums(Roll(layout, context)))

    def add(self, acc: NormSums, update: ClientUpdate) -> NormSums:
        """Adds the factors with the norm of their product as weight."""
        check_whole_pairs(update, self.id, f"reply of client {update.client}")
        weight = client_weight(update.num_examples, self.weight_by)
        admit(acc.sums.roll, update, weight, self)
        for spec in update.layout:
            if spec.kind == "weight":
                acc.sums.add(spec, update.local(spec.name), weight)
        for target in update.layout.targets:
            self._add_pair(acc, update, target, weight)
        return acc

    def _add_pair(self, acc: NormSums, update: ClientUpdate, target: str, weight: float) -> None:
        names = (f"{target}.lora_A", f"{target}.lora_B")
        local = {n: update.local(n) for n in names}
        norm = LowRank(local[names[1]], local[names[0]]).norm()
        norms = acc.norms.setdefault(target, {})
        if norm > 0 and not any(norms.values()):  # what came before has ω = 0 from now on
            for n in names:
                acc.sums.totals.pop(n, None)
        norms[update.client] = norm
        acc.sizes.setdefault(target, {})[update.client] = update.num_examples
        used = norm if any(norms.values()) else weight
        if used > 0:
            for n in names:
                acc.sums.add(update.layout[n], local[n], used)

    def finish(self, acc: NormSums, current: Mapping[str, np.ndarray]) -> Proposal:
        """Divides by Σ ‖B_k·A_k‖_F of each target, whoever has the slice."""
        sums, roll = acc.sums, acc.sums.roll
        roll.check_any()
        omega = {t: self._shares(acc, t) for t in roll.layout.targets if t in acc.norms}
        tensors: NamedTensors = {}
        for spec in roll.layout:
            if spec.name in sums.totals:
                whole = self._whole(acc, spec.target) if spec.kind != "weight" else None
                mean, covered = sums.mean(spec.name, whole)
                check_covered(covered, spec)
                tensors[spec.name] = np.where(covered, mean.astype(np.float32), current[spec.name])
        statistics = mean_statistics(roll, "holders") | {"weighted_by": "norm of the local product"}
        return Proposal(tensors, roll.held(), statistics, weights=omega, layout=roll.layout)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share p_k of each holder, for the head and where there is no norm; `Proposal.weights` has ω_k."""
        return normalized_weights(updates, self.weight_by)

    def _whole(self, acc: NormSums, target: str) -> float:
        """What the sums of a target are divided by."""
        total = sum(acc.norms[target].values())
        return total or sum(client_weight(n, self.weight_by) for n in acc.sizes[target].values())

    def _shares(self, acc: NormSums, target: str) -> Mapping[str, float]:
        norms = acc.norms[target]
        total = sum(norms.values())
        return {c: n / total for c, n in norms.items()} if total > 0 else self.weights(acc.sizes[target])
