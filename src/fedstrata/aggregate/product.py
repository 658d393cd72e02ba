"""The mean of the products, factored again at the server's rank: FlexLoRA, and RAFLoRA's weights per rank slice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.admit import check_weighting, normalized_weights
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.collect import CollectedPairs, Merged, TargetReplies, collect, finish_pairs, no_pairs
from fedstrata.core.linalg import LowRank, truncated_svd
from fedstrata.core.lora import LoraTerm, rank_slice, refactor, stacked
from fedstrata.core.tensors import Layout


@AGGREGATORS.register
@dataclass(frozen=True)
class ProductMean(Aggregator[CollectedPairs]):
    """The weighted mean of the clients' products, cut to the server's rank by a truncated SVD.

        ΔW = Σ p_k·s_k·B_k·A_k ≈ U·S·Vᵀ,    B = U·√(S/s),    A = √(S/s)·Vᵀ,    p_k = w_k / Σ_holders w

    with s_k the client's scaling (`ClientUpdate.scaling`), s the server's (`MergeContext.scaling`), r the server's
    rank, and U, S, Vᵀ the r largest singular triplets. The stacked factors are reduced by thin QRs: [out, in] is never
    formed. Directions with σ ≤ 1e-6·σ_1 get a zero column in B and the initial row of their index in A, so that they
    can learn again. The record has each target's `tail_ratio`, ‖σ_{>r}‖²/‖σ‖²: the share that the cut loses; where it
    is 0 the result is exact. Plain weights (the head) are averaged over their holders.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.

    References:
        Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources
        (FlexLoRA), NeurIPS 2024. Differs in: factors are balanced (both carry √S) and spare directions start again,
        which the paper leaves open.
    """

    id: ClassVar[str] = "product_mean"
    needs: ClassVar[Literal["sum", "all updates"]] = "all updates"
    unequal_ranks: ClassVar[bool] = True
    folds_scaling: ClassVar[bool] = True
    weight_by: str = "num_examples"

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> CollectedPairs:
        """Nothing collected; the context must know the scaling of every target."""
        return no_pairs(layout, context, self)

    def add(self, acc: CollectedPairs, update: ClientUpdate) -> CollectedPairs:
        """Keeps the pairs."""
        return collect(acc, update, self, self.weight_by)

    def finish(self, acc: CollectedPairs, current: Mapping[str, np.ndarray]) -> Proposal:
        """Merges target by target."""
        return finish_pairs(acc, current, self.weight_by, lambda r: factor_again(stacked(r.terms), r))

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share p_k of each holder."""
        return normalized_weights(updates, self.weight_by)


@AGGREGATORS.register
@dataclass(frozen=True)
class Raflora(Aggregator[CollectedPairs]):
    """Products merged rank slice by rank slice, each over the clients that have it, then cut to the server's rank.

        ΔW = Σ_h Σ_{k: r_k > h} ω_kh·s_k·B_k[:, h]·A_k[h, :],    ω_kh = w_k / Σ_{j: r_j > h} w_j

    with h the rank slice from 0, r_k the client's rank, and s_k its scaling (one common s in the formula as published;
    it is folded in per client here, as everywhere where products are formed). Higher slices are not diluted by
    clients that do not have them, so that their energy does not collapse over the rounds. ΔW is then factored as in
    `product_mean`, `tail_ratio` included. By design it is not the plain mean of the products: the exactness error
    compares it with the shares p_k = w_k / Σ_holders w.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.

    References:
        Wu et al., Preventing Rank Collapse in Federated Low-Rank Adaptation with Client Heterogeneity (raFLoRA), 2026.
        Differs in: the formula is ours, from the abstract.
    """

    id: ClassVar[str] = "raflora"
    needs: ClassVar[Literal["sum", "all updates"]] = "all updates"
    unequal_ranks: ClassVar[bool] = True
    folds_scaling: ClassVar[bool] = True
    weight_by: str = "num_examples"

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> CollectedPairs:
        """Nothing collected; the context must know the scaling of every target."""
        return no_pairs(layout, context, self)

    def add(self, acc: CollectedPairs, update: ClientUpdate) -> CollectedPairs:
        """Keeps the pairs."""
        return collect(acc, update, self, self.weight_by)

    def finish(self, acc: CollectedPairs, current: Mapping[str, np.ndarray]) -> Proposal:
        """Merges target by target."""
        return finish_pairs(acc, current, self.weight_by, lambda r: factor_again(slice_weighted(r.terms), r))

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share p_k of each holder over all its slices; within a slice they are scaled up to sum to 1."""
        return normalized_weights(updates, self.weight_by)


def slice_weighted(terms: Sequence[LoraTerm]) -> LowRank:
    """Σ_h Σ_{k: r_k > h} (p_k / Σ_{j: r_j > h} p_j)·s_k·B_k[:, h]·A_k[h, :] as one stacked product.

    A slice whose clients all have weight 0 is left out.

    Args:
        terms: Pairs with their s_k and p_k.
    """
    whole = np.zeros(max(t.rank for t in terms))
    for term in terms:
        whole[: term.rank] += term.weight
    matrix = stacked(terms)
    share = np.concatenate([1 / np.where(whole > 0, whole, 1)[: t.rank] for t in terms])
    return LowRank(matrix.left, matrix.right * share[:, None])


def factor_again(matrix: LowRank, replies: TargetReplies) -> Merged:
    """The balanced pair at the server's rank whose product s·B·A is `matrix`, as far as the rank reaches."""
    svd = truncated_svd(matrix, replies.rank)
    pair = refactor(svd, replies.fresh_A, scaling=replies.scaling)
    return Merged(pair.lora_A, pair.lora_B, numbers={"tail_ratio": svd.tail_ratio})


def hand_out(
    lora_A: np.ndarray, lora_B: np.ndarray, rank: int, *, scaling: float, client_scaling: float
) -> tuple[np.ndarray, np.ndarray]:
    """The pair of a client with another rank and scaling, from the server's balanced pair.

        A_k = √(s/s_k)·A[:r_k, :],    B_k = √(s/s_k)·B[:, :r_k],    so that s_k·B_k·A_k = s·B[:, :r_k]·A[:r_k, :]

    The server's slices are in the order of their singular values, so that this is the rank-r_k truncation of its
    product. A slice that adds nothing (its column of B is 0) keeps its row of A.

    Args:
        lora_A: A, shape [r, in].
        lora_B: B, shape [out, r].
        rank: r_k.
        scaling: s, the server's.
        client_scaling: s_k.

    Returns:
        A_k and B_k in the dtype of A and B; with equal scalings their bits.
    """
    a, b = rank_slice(lora_A, lora_B, rank)
    if client_scaling == scaling:
        return a, b
    root = np.asarray(math.sqrt(scaling / client_scaling), a.dtype)
    return np.where(b.any(axis=0).reshape(-1, 1), root * a, a), root * b
