"""Scores as levels between 0 and 1, on one scale for all strata and rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from fedstrata.report.strata import ScoreMap

LOG_SPAN = 100.0
"""Positive scores that differ by more than this are shown on a logarithmic scale."""
_LOWEST = 1e-6

Level: TypeAlias = float | None
"""Between 0 and 1; None where there is no value."""


@dataclass(frozen=True)
class Scale:
    """From values to levels.

    Attributes:
        low: Level 0 on the scale; on a logarithmic one the smallest positive value.
        high: Level 1.
        is_log: Whether equal ratios are equal steps.
    """

    low: float
    high: float
    is_log: bool

    def level(self, value: float) -> float:
        """A level above 0, so that the lowest score does not look like none; a scale of one value is all middle."""
        if self.high <= self.low:
            return 0.5
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, _LOWEST), 1.0)

    def levels(self, scores: ScoreMap, stratum: str, rounds: Sequence[int]) -> list[Level]:
        """A stratum's levels, one per round; infinite scores are 1, those of another score None."""
        found: list[Level] = []
        for r, value in zip(rounds, scores.values.get(stratum, ()), strict=False):
            if (r, stratum) in scores.infinite:
                found.append(1.0)
            else:
                found.append(None if value is None or (r, stratum) in scores.other else self.level(value))
        return found


def score_scale(scores: ScoreMap, rounds: tuple[int, ...]) -> Scale | None:
    """The scale of a map: logarithmic where no value is below 0 and the positive ones span more than 100 times.

    Returns:
        None without a value that can be compared.
    """
    values = scores.comparable(rounds)
    if not values:
        return None
    positive = [v for v in values if v > 0]
    is_log = min(values) >= 0 and len(positive) > 0 and max(positive) > LOG_SPAN * min(positive)
    return Scale(min(positive) if is_log else min(values), max(values), is_log)


def binned(levels: Sequence[Level], length: int) -> list[Level]:
    """At most `length` cells: means over neighboring rounds, None only where all of them are.

    Example:
        >>> binned([1.0, 0.0, None, 1.0, None, None], 3)
        [0.5, 1.0, None]
    """
    if len(levels) <= length:
        return list(levels)
    edges = [i * len(levels) // length for i in range(length + 1)]
    bins = [[x for x in levels[a:b] if x is not None] for a, b in pairwise(edges)]
    return [sum(found) / len(found) if found else None for found in bins]
