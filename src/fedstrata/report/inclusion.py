"""How likely a block is among those that a client draws, and how far from that chance alone may lead."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

_STEP = 0.15
_SIGNIFICANCE = 0.01


def inclusion_chances(probabilities: Sequence[float], count: int) -> np.ndarray:
    """The chance of every block to be among `count` blocks drawn one after the other without replacement.

    It is not count·π. With independent waiting times T_l ~ Exp(π_l) the drawn blocks are the first `count` to arrive
    (the order of Gumbel keys log π_l + g_l is the same in law), so that

        P_l = ∫_0^∞ π_l·exp(−π_l·t)·Pr[fewer than `count` of the others have arrived by t] dt

    The number of arrivals among the others is a sum of independent 0/1 variables; its distribution is the convolution
    of that of the blocks before l and that of the blocks after l. The integral is a trapezoid sum over log t, whose
    error falls exponentially in 1/step: the chances add up to `count` to 1e-9.

    Args:
        probabilities: π, ≥ 0, any scale; a block with 0 is never drawn.
        count: How many blocks are drawn; with as many blocks above 0 or fewer, all of them are.

    Returns:
        P, float64 [L].

    Example:
        >>> inclusion_chances([0.5, 0.3, 0.2], 1).round(9).tolist()
        [0.5, 0.3, 0.2]
        >>> inclusion_chances([2.0, 1.0, 1.0], 2).round(6).tolist()  # block 0: 1/2 + 2·(1/4 · 2/3) = 5/6
        [0.833333, 0.583333, 0.583333]
    """
    weights = np.asarray(probabilities, np.float64)
    able = np.flatnonzero(weights > 0)
    chances = np.zeros(len(weights))
    if count >= len(able):
        chances[able] = 1.0
    elif count > 0:
        chances[able] = _drawn(weights[able] / weights[able].max(), count)
    return chances


def _drawn(rates: np.ndarray, count: int) -> np.ndarray:
    """P for rates of at most 1, more of them than are drawn."""
    logs = np.arange(-28.0, 4.0 - np.log(rates.min()), _STEP)
    times = np.exp(logs)
    arrived = -np.expm1(-rates[:, None] * times)  # [L, nodes]
    before = _counts(arrived, count)
    after = _counts(arrived[::-1], count)[::-1]
    result = np.empty(len(rates))
    for block, rate in enumerate(rates):
        at_most = np.cumsum(after[block], axis=0)[::-1]  # entry a: Pr[the blocks after it bring at most count − 1 − a]
        few = (before[block] * at_most).sum(axis=0)
        result[block] = (rate * times * np.exp(-rate * times) * few).sum() * _STEP
    return np.minimum(result, 1.0)


def _counts(arrived: np.ndarray, count: int) -> np.ndarray:
    """Pr[exactly j of the blocks before block l have arrived], shape [L, count, nodes], j < count."""
    table = np.zeros((len(arrived), count, arrived.shape[1]))
    table[0, 0] = 1.0
    for block in range(1, len(arrived)):
        p = arrived[block - 1]
        table[block] = table[block - 1] * (1 - p)
        table[block, 1:] += table[block - 1, :-1] * p
    return table


def chance_limit(num_compared: int) -> float:
    """How many standard deviations the largest of several deviations may have by chance alone.

    z with Pr[|Z| > z] = 0.01/n for each of n standard normal Z (Bonferroni), so that a fair allocation goes beyond it
    at most once in a hundred runs.

    Example:
        >>> round(chance_limit(1), 3), round(chance_limit(12), 3)
        (2.576, 3.341)
    """
    return NormalDist().inv_cdf(1 - _SIGNIFICANCE / (2 * max(num_compared, 1)))
