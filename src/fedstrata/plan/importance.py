"""From scores of strata to the chances of being drawn: pooling, controls, clusters, probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from fedstrata.core.rng import generator
from fedstrata.core.tensors import parse_stratum

Mapped: TypeAlias = Literal["proportional", "clusters"]
Control: TypeAlias = Literal["none", "permuted", "inverted"]

_FLOOR = 0.1
"""Share of the chances that is spread evenly, so that no stratum is left out for good."""
_CLUSTERS = 3


def pool_scores(
    answers: Mapping[str, Any], blocks: Sequence[int]
) -> tuple[dict[int, float] | None, dict[str, int], dict[str, str]]:
    """The score of every block over all examples that any client used.

        F_l = Σ_k sums_k[l] / Σ_k count_k

    summed without rounding between (`math.fsum`), so that the order of clients does not matter.

    Args:
        answers: Per client `{"sums": {stratum: number}, "count": examples}`; numbers are ≥ 0.
        blocks: Which blocks must have been scored.

    Returns:
        F (None without a usable answer), the count per used client, and why other answers were not used.
    """
    used: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    refused: dict[str, str] = {}
    for client in sorted(answers):
        problem, sums, count = _read_answer(answers[client], blocks)
        if problem:
            refused[client] = problem
        else:
            used[client], counts[client] = sums, count
    total = sum(counts.values())
    if not total:
        return None, counts, refused
    pooled = {b: math.fsum(sums[i] for sums in used.values()) / total for i, b in enumerate(blocks)}
    return pooled, counts, refused


def _read_answer(answer: Any, blocks: Sequence[int]) -> tuple[str, list[float], int]:
    try:
        sums = {parse_stratum(s): float(x) for s, x in answer["sums"].items()}
        count = int(answer["count"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return "not of the form {sums, count}", [], 0
    missing = [b for b in blocks if b not in sums]
    if missing:
        return f"no sum for blocks {missing}", [], 0
    values = [sums[b] for b in blocks]
    if count < 1:
        return f"count = {count}", [], 0
    if not all(math.isfinite(x) and x >= 0 for x in values):
        return "sums are not finite numbers of 0 or more", [], 0
    return "", values, count


def control_scores(scores: Mapping[int, float], control: Control, seed: int, server_round: int) -> dict[int, float]:
    """The scores, or what a control makes of them: the same numbers on other blocks.

    Args:
        scores: F per block.
        control: `permuted`: shuffled by generator(seed, "permutation", round); `inverted`: the block with the j-th
            smallest score gets the j-th largest (equal scores: the lower block counts as smaller).
        seed: The run's seed.
        server_round: When the scores were computed: a fresh permutation each time.
    """
    blocks = sorted(scores)
    if control == "permuted":
        order = generator(seed, "permutation", server_round).permutation(len(blocks))
        return {b: scores[blocks[i]] for b, i in zip(blocks, order, strict=True)}
    if control == "inverted":
        ranked = sorted(blocks, key=lambda b: (scores[b], b))
        return dict(sorted((b, scores[other]) for b, other in zip(ranked, reversed(ranked), strict=True)))
    return {b: scores[b] for b in blocks}


def score_probabilities(scores: Sequence[float], mapped: Mapped) -> np.ndarray:
    """Chances from scores.

        proportional  π_l = 0.9·F_l/ΣF + 0.1/L
        clusters      π_l = w_l/Σw, w = 1, 2, 3 for the cluster of lowest, middle, highest mean

    Args:
        scores: F, finite and ≥ 0.
        mapped: Which of the two. Clusters are an exact 1-D k-means with 3 clusters; fewer than 3 distinct scores are
            fewer clusters, with weights from 1.

    Returns:
        π, float64 [L]; uniform if all scores are 0.

    Example:
        >>> score_probabilities([3.0, 1.0], "proportional").round(3).tolist()
        [0.725, 0.275]
        >>> score_probabilities([9.0, 1.0, 5.0], "clusters").tolist()
        [0.5, 0.16666666666666666, 0.3333333333333333]
    """
    values = np.asarray(scores, np.float64)
    if not values.any():
        return np.full(len(values), 1 / max(len(values), 1))
    values = values / values.max()
    if mapped == "clusters":
        weights = cluster_labels(values.tolist(), _CLUSTERS) + 1.0
        return np.asarray(weights / weights.sum())
    return np.asarray((1 - _FLOOR) * values / values.sum() + _FLOOR / len(values))


def cluster_labels(values: Sequence[float], count: int) -> np.ndarray:
    """Exact 1-D k-means: the split into `count` intervals with the least sum of squared distances to their means.

    Solved by dynamic programming over the distinct values, so that equal values never part. Of equally good splits
    the one whose upper clusters are larger wins.

    Args:
        values: Any order.
        count: k; fewer distinct values are fewer clusters.

    Returns:
        The cluster of each value, integers [n], 0 for the lowest mean.

    Example:
        >>> cluster_labels([10.0, 0.0, 11.0, 0.5, 30.0], 3).tolist()
        [1, 0, 1, 0, 2]
    """
    distinct, inverse, times = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    num, count = len(distinct), min(count, len(distinct))
    spread = np.full((num + 1, num + 1), np.inf)
    for start in range(num):
        for stop in range(start + 1, num + 1):
            part, weight = distinct[start:stop], times[start:stop]
            spread[start, stop] = float(weight @ (part - weight @ part / weight.sum()) ** 2)
    best = np.full((count + 1, num + 1), np.inf)
    split = np.zeros((count + 1, num + 1), np.int64)
    best[0, 0] = 0.0
    for k in range(1, count + 1):
        for stop in range(k, num + 1):
            costs = best[k - 1, :stop] + spread[:stop, stop]
            split[k, stop] = int(np.argmin(costs))
            best[k, stop] = costs[split[k, stop]]
    labels = np.zeros(num, np.int64)
    stop = num
    for k in range(count, 0, -1):
        start = int(split[k, stop])
        labels[start:stop] = k - 1
        stop = start
    return labels[inverse]
