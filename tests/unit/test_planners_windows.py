"""FedAdapter's windows: who trains which candidate, also where rounds invite fewer clients than candidates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fedstrata.core.shape import ModelShape, TargetShape
from fedstrata.core.tensors import HEAD, TensorSpec
from fedstrata.device import build_fleet
from fedstrata.errors import PlanError
from fedstrata.plan import draw_cohort
from fedstrata.plan.base import PlanContext
from fedstrata.plan.windows import Windows

HEAD_SPEC = (TensorSpec("classifier", (7,), HEAD),)
TARGETS = tuple(TargetShape(f"b.{b}.q", b, 10, 5) for b in range(4))
SHAPE = ModelShape("Tiny", 4, 10, None, TARGETS, HEAD_SPEC, HEAD_SPEC, 0)


def world(num_clients: int = 7, **changes: Any) -> PlanContext:
    fleet = build_fleet({"laptop-8gb": num_clients}, {f"c{i}": 5 for i in range(num_clients)})
    context = PlanContext(SHAPE, fleet, fleet.ids, 1, 0, 64, SHAPE.blocks, num_rounds=12)
    return replace(context, **changes)


def groups(planner: Windows, context: PlanContext, **state: Any) -> dict[str, str]:
    return planner.plan(planner.init(SHAPE, context.fleet) | state, context)[0].why["groups"]


def test_with_everybody_in_every_round_clients_keep_their_candidate_for_a_window() -> None:
    """Golden: seven clients, windows of three rounds, seed 0."""
    first = dict(zip(("c5", "c3", "c2", "c4", "c6", "c1", "c0"), ("same", "deeper", "wider") * 3, strict=False))
    second = dict(zip(("c1", "c5", "c0", "c3", "c2", "c4", "c6"), ("same", "deeper", "wider") * 3, strict=False))
    found = {r: groups(Windows(3), world(server_round=r)) for r in range(1, 7)}
    assert found[1] == found[2] == found[3] == first
    assert found[4] == found[5] == found[6] == second


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("window", [3, 5])
def test_every_candidate_is_trained_in_every_window_however_small_the_cohorts(size: int, window: int) -> None:
    """And equally often, up to one turn."""
    planner = Windows(window)
    for first in (1, 1 + window):
        turns: Counter[str] = Counter()
        for server_round in range(first, first + window):
            cohort = draw_cohort(0, server_round, world().fleet.ids, size)
            turns.update(
                groups(planner, world(server_round=server_round, cohort=cohort, num_rounds=10 * window)).values()
            )
        assert set(turns) == {"same", "deeper", "wider"}
        assert max(turns.values()) - min(turns.values()) <= 1


@pytest.mark.parametrize("num_clients", [1, 2])
def test_a_fleet_smaller_than_the_candidates_trains_them_all_in_turn(num_clients: int) -> None:
    found = [groups(Windows(3), world(num_clients, server_round=r)) for r in (1, 2, 3)]
    assert {group for one in found for group in one.values()} == {"same", "deeper", "wider"}


def test_the_turns_of_two_candidates_go_on_as_well() -> None:
    """At the full depth there is no deeper one."""
    planner = Windows(4)
    found = [groups(planner, world(server_round=r, cohort=("c1",)), depth=4) for r in (1, 2, 3, 4)]
    assert [one["c1"] for one in found] == ["same", "wider", "same", "wider"]


def test_windows_too_short_for_their_cohorts_are_refused() -> None:
    planner = Windows(2)
    with pytest.raises(
        PlanError, match=r"cannot try out its candidates[\s\S]*a window of 2 with 1[\s\S]*clients_per_round"
    ):
        groups(planner, world(cohort=("c1",)))
    with pytest.raises(PlanError, match="a window of 2 with 1"):
        groups(Windows(5), world(cohort=("c1",), num_rounds=2))
    assert groups(planner, world(cohort=("c1", "c2")))


def test_a_last_window_cut_short_has_the_candidates_that_it_can_train() -> None:
    """Rounds 6 and 7 of 7, one client in each: two candidates; round 5 ended a whole window with three."""
    planner = Windows(5)
    plans = [
        planner.plan(planner.init(SHAPE, world().fleet), world(server_round=r, cohort=("c1",), num_rounds=7))[0]
        for r in range(1, 8)
    ]
    assert [list(p.why["candidates"]) for p in plans] == [["same", "deeper", "wider"]] * 5 + [["same", "deeper"]] * 2
    assert [p.why["groups"]["c1"] for p in plans] == ["same", "deeper", "wider", "same", "deeper", "same", "deeper"]
