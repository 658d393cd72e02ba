"""Factor means whose error is put right: in the base weights (FedEx-LoRA) or in B (LoRA-FAIR)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.admit import check_weighting, normalized_weights
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.collect import CollectedPairs, Merged, TargetReplies, collect, finish_pairs, no_pairs
from fedstrata.core.linalg import LowRank, recompress, single_thread
from fedstrata.core.lora import LoraTerm
from fedstrata.core.tensors import Layout
from fedstrata.errors import ConfigError


@AGGREGATORS.register
@dataclass(frozen=True)
class Fedex(Aggregator[CollectedPairs]):
    """Factors are averaged one by one, and what that misses of the mean product moves the base weight.

        Ā = Σ q_k·A_k,    B̄ = Σ q_k·B_k,    base += s·Σ q_k·(B_k − B̄)(A_k − Ā)
        q_k = w_k / Σ_holders w

    with s the common scaling. Because Σ q_k·(B_k − B̄) = 0, the sum is also Σ_{k<K} q_k·(B_k − B̄)(A_k − A_K): factors
    of rank (K − 1)·r, which are recompressed without loss. Together s·B̄·Ā and the residual are the mean product.
    Plain weights (the head) are averaged over their holders.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.

    References:
        Singhal et al., FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language
        Models, ACL 2025. Differs in: the residual travels as factors, never as [out, in].
    """

    id: ClassVar[str] = "fedex"
    needs: ClassVar[Literal["sum", "all updates"]] = "all updates"
    unequal_ranks: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    moves_base: ClassVar[bool] = True
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
        """Means and residual, target by target."""
        return finish_pairs(acc, current, self.weight_by, _fedex)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share q_k of each holder."""
        return normalized_weights(updates, self.weight_by)


@AGGREGATORS.register
@dataclass(frozen=True)
class LoraFair(Aggregator[CollectedPairs]):
    """Factors are averaged one by one, and B is refined towards the mean product; Ā stays.

        M = Σ q_k·B_k·A_k,    B = B̄ + ΔB,    ΔB = (M − B̄·Ā)·Āᵀ·(Ā·Āᵀ + λ·tr(Ā·Āᵀ)/r·I)⁻¹

    with Ā, B̄ the factor means, q_k = w_k / Σ_holders w, r the rank and λ the argument `ridge`. ΔB minimizes
    ‖M − (B̄ + ΔB)·Ā‖_F² + λ·tr(Ā·Āᵀ)/r·‖ΔB‖_F², so that the product is never further from the mean product than that of
    the plain factor means. With λ = 0 directions that Ā does not have are left out (pseudo-inverse).
    Plain weights (the head) are averaged over their holders.

    Args:
        weight_by: `num_examples`: w_k = n_k. `uniform`: w_k = 1.
        ridge: λ ≥ 0, relative to the mean eigenvalue of Ā·Āᵀ.

    References:
        Bian et al., LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement, ICCV 2025.
        Differs in: solved in closed form by least squares with a relative ridge (ours) instead of by gradient steps
        on a cosine similarity.
    """

    id: ClassVar[str] = "lora_fair"
    needs: ClassVar[Literal["sum", "all updates"]] = "all updates"
    unequal_ranks: ClassVar[bool] = False
    weight_by: str = "num_examples"
    ridge: float = 0.01

    def __post_init__(self) -> None:
        check_weighting(self.weight_by, self.id)
        if not (math.isfinite(self.ridge) and self.ridge >= 0):
            raise ConfigError(
                "The ridge of lora_fair", where=f"{self.id}.ridge", expected="a number ≥ 0", got=f"{self.ridge}"
            )

    def zero(self, layout: Layout, context: MergeContext | None = None) -> CollectedPairs:
        """Nothing collected; the context must know the scaling of every target."""
        return no_pairs(layout, context, self)

    def add(self, acc: CollectedPairs, update: ClientUpdate) -> CollectedPairs:
        """Keeps the pairs."""
        return collect(acc, update, self, self.weight_by)

    def finish(self, acc: CollectedPairs, current: Mapping[str, np.ndarray]) -> Proposal:
        """Means and refinement, target by target."""
        return finish_pairs(acc, current, self.weight_by, self._merge)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """The share q_k of each holder."""
        return normalized_weights(updates, self.weight_by)

    def _merge(self, replies: TargetReplies) -> Merged:
        lora_A, lora_B = mean_factors(replies.terms)
        return Merged(lora_A, lora_B + refinement(replies.terms, self.ridge))


def mean_factors(terms: Sequence[LoraTerm]) -> tuple[np.ndarray, np.ndarray]:
    """Ā = Σ q_k·A_k and B̄ = Σ q_k·B_k, in float64; Σ q_k = 1."""
    lora_A, lora_B = np.zeros(terms[0].lora_A.shape), np.zeros(terms[0].lora_B.shape)
    for term in terms:
        lora_A += term.weight * term.lora_A
        lora_B += term.weight * term.lora_B
    return lora_A, lora_B


def factor_residual(terms: Sequence[LoraTerm]) -> LowRank | None:
    """s·Σ q_k·(B_k − B̄)(A_k − Ā) with at most (K − 1)·r directions; None for one client, and where it is 0.

    Args:
        terms: Pairs of one rank and one scaling s, Σ q_k = 1.
    """
    if len(terms) == 1:
        return None
    _, mean_B = mean_factors(terms)
    last = terms[-1].lora_A
    left = np.concatenate([t.lora_B - mean_B for t in terms[:-1]], axis=1)
    right = np.concatenate([t.coefficient * (t.lora_A - last) for t in terms[:-1]])
    if not (left.any() and right.any()):
        return None
    short = recompress(LowRank(left, right))
    return short if short.left.any() else None


def refinement(terms: Sequence[LoraTerm], ridge: float) -> np.ndarray:
    """ΔB of `lora_fair`, shape [out, r]; [out, in] is never formed.

    (M − B̄·Ā)·Āᵀ is Σ q_k·(B_k − B̄)·((A_k − Ā)·Āᵀ), and Ā·Āᵀ = V·diag(e)·Vᵀ is r × r.

    Args:
        terms: Pairs of one rank, Σ q_k = 1.
        ridge: λ.
    """
    lora_A, lora_B = mean_factors(terms)
    with single_thread():
        eigenvalues, vectors = np.linalg.eigh(lora_A @ lora_A.T)
        moved = sum(t.weight * ((t.lora_B - lora_B) @ ((t.lora_A - lora_A) @ lora_A.T)) for t in terms)
        damped = eigenvalues + ridge * float(eigenvalues.mean())
        floor = len(damped) * float(np.finfo(np.float64).eps) * float(damped.max())
        inverse = np.where(damped > floor, 1 / np.where(damped > floor, damped, 1.0), 0.0)
        delta: np.ndarray = (moved @ vectors * inverse) @ vectors.T
    return delta


def _fedex(replies: TargetReplies) -> Merged:
    lora_A, lora_B = mean_factors(replies.terms)
    base = factor_residual(replies.terms)
    return Merged(lora_A, lora_B, base, {"base_update_rank": float(base.rank if base else 0)})
