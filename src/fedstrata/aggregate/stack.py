"""Stacked products that move the base weights: FLoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.admit import check_weighting, normalized_weights
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.collect import CollectedPairs, Merged, TargetReplies, collect, finish_pairs, no_pairs
from fedstrata.core.linalg import recompress
from fedstrata.core.lora import stacked
from fedstrata.core.tensors import Layout


@AGGREGATORS.register
@dataclass(frozen=True)
class Stack(Aggregator[CollectedPairs]):
    """The clients' factors side by side are their mean product, which the base weight takes over.

        A = [q_1·s_1·A_1; q_2·s_2·A_2; …],    B = [B_1 B_2 …],    base += B·A = Σ q_k·s_k·B_k·A_k

    with q_k = w_k / Σ_holders w and s_k the client's scaling (`ClientUpdate.scaling`); both stand on one factor only.
    The server keeps no adapter: its B becomes 0 and its A stays, and clients start from a pair that adds nothing.
    The stack of rank Σ r_k is recompressed without loss, to at most min(out, in) directions. A target whose products
    are all 0 has no base update. Plain weights (the head) are averaged over their holders.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.
        recompress: False keeps the factors as they were stacked.

    References:
        Wang et al., FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations,
        NeurIPS 2024. Differs in: the stack is recompressed.
    """

    id: ClassVar[str] = "stack"
    needs: ClassVar[Literal["sum", "all updates"]] = "all updates"
    unequal_ranks: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    folds_scaling: ClassVar[bool] = True
    moves_base: ClassVar[bool] = True
    weight_by: str = "num_examples"
    recompress: bool = True

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> CollectedPairs:
        """Nothing collected; the context must know the scaling of every target."""
        return no_pairs(layout, context, self)

    def add(self, acc: CollectedPairs, update: ClientUpdate) -> CollectedPairs:
        """Keeps the pairs."""
        return collect(acc, update, self, self.weight_by)

    def finish(self, acc: CollectedPairs, current: Mapping[str, np.ndarray]) -> Proposal:
        """Stacks target by target."""
        return finish_pairs(acc, current, self.weight_by, self._merge)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share q_k of each holder."""
        return normalized_weights(updates, self.weight_by)

    def _merge(self, replies: TargetReplies) -> Merged:
        stack = stacked(replies.terms)
        base = recompress(stack) if self.recompress else stack
        lora_A, lora_B = replies.current
        has_product = base.left.any() and base.right.any()
        numbers = {"stacked_rank": float(stack.rank), "base_update_rank": float(base.rank if has_product else 0)}
        return Merged(lora_A, np.zeros_like(lora_B), base if has_product else None, numbers)
