"""Chances of being drawn without replacement, and what chance alone explains."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from fedstrata.core.rng import generator, sample_without_replacement
from fedstrata.report.inclusion import chance_limit, inclusion_chances


def enumerated(weights: list[float], count: int) -> list[float]:
    """Σ over all ordered draws that contain l of Π_j π_j / (Σπ − what was drawn before)."""
    chances = [0.0] * len(weights)
    for draw in itertools.permutations(range(len(weights)), count):
        left, chance = sum(weights), 1.0
        for i in draw:
            chance *= weights[i] / left
            left -= weights[i]
        for i in draw:
            chances[i] += chance
    return chances


@pytest.mark.parametrize(
    ("weights", "count"),
    [
        ([0.5, 0.3, 0.2], 1),
        ([2.0, 1.0, 1.0], 2),
        ([0.5, 0.3, 0.1, 0.07, 0.03], 3),
        ([1.0, 1e-3, 1e-6, 1.0], 2),
        ([0.0, 0.4, 0.0, 0.6, 0.2], 2),
    ],
)
def test_inclusion_equals_the_sum_over_all_draws(weights: list[float], count: int) -> None:
    able = [w for w in weights if w > 0]
    expected = iter(enumerated(able, count))
    wanted = [next(expected) if w > 0 else 0.0 for w in weights]
    assert inclusion_chances(weights, count).tolist() == pytest.approx(wanted, abs=1e-9)


def test_two_of_three_by_hand() -> None:
    # π = (1/2, 1/4, 1/4), two drawn: block 0 is missing only after 1 then 2, or 2 then 1: 2 · 1/4 · 1/3 = 1/6
    assert inclusion_chances([0.5, 0.25, 0.25], 2)[0] == pytest.approx(1 - 1 / 6, abs=1e-12)


def test_equal_chances_include_each_block_with_count_over_all() -> None:
    assert inclusion_chances([3.0] * 12, 5).tolist() == pytest.approx([5 / 12] * 12, abs=1e-12)


@pytest.mark.parametrize("count", [1, 40, 99])
def test_chances_of_a_hundred_blocks_add_up_to_the_count(count: int) -> None:
    weights = generator(0, "weights").random(100) ** 3 + 1e-6
    chances = inclusion_chances(weights, count)
    assert chances.sum() == pytest.approx(count, abs=1e-8)
    assert ((chances >= 0) & (chances <= 1)).all()
    assert (np.diff(chances[np.argsort(weights)]) > -1e-12).all()  # who weighs more is drawn more often


def test_as_many_as_there_are_are_all_drawn_and_none_if_none_is_wanted() -> None:
    assert inclusion_chances([0.2, 0.0, 0.8], 2).tolist() == [1.0, 0.0, 1.0]
    assert inclusion_chances([0.2, 0.0, 0.8], 0).tolist() == [0.0, 0.0, 0.0]


def test_the_draws_of_the_planner_have_these_chances() -> None:
    weights, count, draws = np.array([0.6, 0.2, 0.15, 0.05]), 2, 4000
    hits = np.zeros(4)
    for i in range(draws):
        hits[sample_without_replacement(generator(1, "draw", i), np.log(weights), count)] += 1
    chances = inclusion_chances(weights, count)
    z = (hits - draws * chances) / np.sqrt(draws * chances * (1 - chances))
    assert np.abs(z).max() < chance_limit(4)
    too_simple = (hits[0] - draws * min(count * 0.6, 1)) / math.sqrt(draws * 0.25)
    assert abs(too_simple) > 10  # count · π would be far off


def test_the_limit_shares_one_percent_among_all_that_are_compared() -> None:
    for number in (1, 12, 100):
        limit = chance_limit(number)
        assert 2 * (1 - NormalDist().cdf(limit)) * number == pytest.approx(0.01)
