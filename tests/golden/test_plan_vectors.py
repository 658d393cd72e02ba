"""Patterns, ranks, seconds and depths against values of an independent implementation (`vectors.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.errors import PlanError
from fedstrata.plan.anchor import anchor_scan
from fedstrata.plan.device_times import ClientTimes
from fedstrata.plan.growing_ranks import growing_ranks
from fedstrata.plan.patterns import pattern_probabilities, pattern_sets

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())["cases"]
LEGEND = CASES["legend"]
L = LEGEND["num_strata"]


def sets_of(case: dict[str, Any], name: str = "expected_sets") -> dict[int, tuple[int, ...]]:
    return {int(size): tuple(members) for size, members in case[name].items()}


def seconds() -> dict[str, list[float]]:
    """t_i(k) for k = 0 … L with one local step and no fixed time."""
    ranks = LEGEND["expected_ranks"]
    parts = zip(LEGEND["forward_s"], LEGEND["backward_s_per_stratum"], LEGEND["upload_s_per_rank"], strict=True)
    times = [ClientTimes(*p) for p in parts]
    return {f"c{i}": [t.round_s(1, k, sum(ranks[L - k :])) for k in range(L + 1)] for i, t in enumerate(times)}


DEEPEST = dict.fromkeys(seconds(), L)


def test_bottleneck_sets_and_their_chances():
    case = CASES["bottleneck"]
    sets = pattern_sets("bottleneck", case["num_strata"], case["group_sizes"])
    assert sets == sets_of(case)
    chances = pattern_probabilities(sets.values(), case["num_strata"])
    assert np.allclose(chances, case["expected_probability"], rtol=1e-9, atol=0)


def test_uniform_sets():
    case = CASES["uniform_pattern"]
    assert pattern_sets("uniform", case["num_strata"], [6, 9, 12]) == sets_of(case)
    assert pattern_sets("uniform", 6, [2, 4]) == sets_of(case, "expected_sets_L6_sizes_2_4")


def test_growing_ranks_within_a_budget():
    found = growing_ranks(L, budget=LEGEND["rank_budget"], step=LEGEND["rank_step"])
    assert list(found.ranks) == LEGEND["expected_ranks"]
    assert sum(found.ranks) == LEGEND["expected_rank_sum"]


def test_a_budget_that_is_too_small_names_the_smallest_that_is_not():
    ((budget, message),) = LEGEND["expected_error_for_budget"].items()
    smallest = message.rsplit(" = ", 1)[1]
    with pytest.raises(PlanError, match=rf"at least .* = {smallest}"):
        growing_ranks(L, budget=int(budget), step=LEGEND["rank_step"])
    assert growing_ranks(L, budget=int(smallest), step=LEGEND["rank_step"]).start == 1


@pytest.mark.parametrize("depth", [1, 6, 12])
def test_seconds_of_a_depth(depth):
    found = [t[depth] for t in seconds().values()]
    assert np.allclose(found, LEGEND["expected_time_s"][str(depth)], rtol=1e-9, atol=0)


@pytest.mark.parametrize("target", ["6.0", "10.0"])
def test_depths_for_given_seconds(target):
    found = anchor_scan(seconds(), DEEPEST, target_s=float(target))
    assert list(found.depths.values()) == LEGEND["expected_depth_for_target_s"][target]


@pytest.mark.parametrize("max_wait", ["0.1", "0.2", "0.3"])
def test_depths_by_the_anchor_scan(max_wait):
    expected = LEGEND["expected_plan"][max_wait]
    found = anchor_scan(seconds(), DEEPEST, max_wait=float(max_wait))
    assert list(found.depths.values()) == expected["depths"]
    assert found.anchor_depth == expected["anchor_depth"]
    assert found.target_s == pytest.approx(expected["target_s"], rel=1e-9)
    assert found.wait_ratio == pytest.approx(expected["wait_ratio"], rel=1e-9)
    assert found.wait_target_met is expected["wait_target_met"]
