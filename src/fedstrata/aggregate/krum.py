"""Robust means that judge a whole reply of a stratum: Krum by its neighbors, clipping by its length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedstrata.aggregate.admit import Roll
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.robust import (
    CollectedUpdates,
    Fallback,
    Rule,
    StratumReplies,
    check_fallback,
    collect_update,
    finish_robust,
    uniform_weights,
)
from fedstrata.core.tensors import Layout
from fedstrata.errors import ConfigError


@AGGREGATORS.register
@dataclass(frozen=True)
class Krum(Aggregator[CollectedUpdates]):
    """The reply of each stratum that lies closest to its neighbors; with `multi` the mean of several such replies.

        score_k = Σ_{j ∈ N_k} ‖Δ_k − Δ_j‖²,    N_k the m − f − 2 nearest others
        W̄ = s + 1/c·Σ_{k ∈ C} Δ_k,    C the c replies with the smallest scores

    with s the holders' start, m their number, Δ_k the differences of all tensors of the stratum, f the argument `f`,
    and c the argument `multi`. Of equal scores the lower client id wins. It needs m ≥ 2f + 3 and m ≥ c + f, so that
    the mean can do without f replies. The record names the chosen clients.

    Args:
        f: How many wrong replies are expected at most.
        multi: How many replies are averaged; 1 is Krum.
        fallback: For a stratum with fewer holders. `mean`: their plain mean. `keep`: it stays as it is.

    References:
        Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.
        Differs in: taken per stratum over its holders.
    """

    id: ClassVar[str] = "krum"
    needs: ClassVar[Literal["sum", "all updates"]] = "all updates"
    unequal_ranks: ClassVar[bool] = False
    robust: ClassVar[bool] = True
    f: int = 1
    multi: int = 1
    fallback: Fallback = "mean"

    def __post_init__(self) -> None:
        check_fallback(self.fallback, self.id)
        for name, value, least in (("f", self.f, 0), ("multi", self.multi, 1)):
            if value < least:
                raise ConfigError(
                    "Krum counts replies", where=f"{self.id}.{name}", expected=f"at least {least}", got=str(value)
                )

    def zero(self, layout: Layout, context: MergeContext | None = None) -> CollectedUpdates:
        """Nothing collected."""
        return CollectedUpdates(Roll(layout, context))

    def add(self, acc: CollectedUpdates, update: ClientUpdate) -> CollectedUpdates:
        """Keeps the update."""
        return collect_update(acc, update, self)

    def finish(self, acc: CollectedUpdates, current: Mapping[str, np.ndarray]) -> Proposal:
        """Chooses for each held stratum."""
        return finish_robust(acc, self.fallback, max(2 * self.f + 3, self.multi + self.f), self._rule)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """1/m: the mean that the distance is measured to."""
        return uniform_weights(updates)

    def _rule(self, replies: StratumReplies) -> Rule:
        distances = squared_distances(replies)
        m = len(distances)
        others = distances[~np.eye(m, dtype=bool)].reshape(m, m - 1)
        scores = np.sort(others, axis=1)[:, : m - self.f - 2].sum(axis=1)
        chosen = np.sort(np.argsort(scores, kind="stable")[: self.multi])
        clients = [replies.holders[k].client for k in chosen]
        return Rule(lambda deltas: np.asarray(deltas[chosen].mean(axis=0)), {"chosen": clients})


@AGGREGATORS.register
@dataclass(frozen=True)
class ClippedMean(Aggregator[CollectedUpdates]):
    """The mean of differences that are cut to the holders' median length; m ≥ 3 holders.

        W̄ = s + (1/m)·Σ_k min(1, c/‖Δ_k‖)·Δ_k,    c = median_k ‖Δ_k‖

    with s the holders' start, m their number, and ‖Δ_k‖ the norm over all tensors of the stratum: its direction does
    not change. It bounds what one reply can do, and is no defense against many.

    Args:
        fallback: For a stratum with fewer holders. `mean`: their plain mean. `keep`: it stays as it is.

    References:
        Norm clipping as in Sun et al., Can You Really Backdoor Federated Learning?, 2019. Differs in: the bound is the
        holders' median norm, per stratum; the smallest number of holders (a median of two norms bounds nothing) is
        ours.
    """

    id: ClassVar[str] = "clipped_mean"
    needs: ClassVar[Literal["sum", "all updates"]] = "all updates"
    unequal_ranks: ClassVar[bool] = False
    robust: ClassVar[bool] = True
    fallback: Fallback = "mean"

    def __post_init__(self) -> None:
        check_fallback(self.fallback, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> CollectedUpdates:
        """Nothing collected."""
        return CollectedUpdates(Roll(layout, context))

    def add(self, acc: CollectedUpdates, update: ClientUpdate) -> CollectedUpdates:
        """Keeps the update."""
        return collect_update(acc, update, self)

    def finish(self, acc: CollectedUpdates, current: Mapping[str, np.ndarray]) -> Proposal:
        """Clips and averages each held stratum."""
        return finish_robust(acc, self.fallback, 3, _clip)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """1/m: the mean that the distance is measured to."""
        return uniform_weights(updates)


def squared_distances(replies: StratumReplies) -> np.ndarray:
    """‖Δ_j − Δ_k‖² over all tensors of a stratum, shape [m, m], from the differences themselves."""
    m = len(replies.holders)
    distances = np.zeros((m, m))
    for spec in replies.specs:
        for _, deltas in replies.chunks(spec.name):
            for j in range(m - 1):
                gaps = deltas[j + 1 :] - deltas[j]
                distances[j, j + 1 :] += (gaps * gaps).sum(axis=1)
    return distances + distances.T


def _clip(replies: StratumReplies) -> Rule:
    squares = np.zeros(len(replies.holders))
    for spec in replies.specs:
        for _, deltas in replies.chunks(spec.name):
            squares += (deltas * deltas).sum(axis=1)
    norms = np.sqrt(squares)
    bound = float(np.median(norms))
    factors = np.where(norms > bound, bound / np.where(norms > 0, norms, 1.0), 1.0)
    clipped = [u.client for u, f in zip(replies.holders, factors, strict=True) if f < 1]
    why = {"bound": bound if math.isfinite(bound) else None, "clipped": clipped}
    return Rule(lambda deltas: np.asarray((factors[:, None] * deltas).mean(axis=0)), why)
