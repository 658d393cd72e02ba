"""FedAdapter's contest: candidates, limits, and who goes on."""

from __future__ import annotations

from typing import Any

import pytest

from fedstrata.core.shape import ModelShape, TargetShape
from fedstrata.core.tensors import HEAD, TensorSpec
from fedstrata.device import build_fleet
from fedstrata.plan import PlanContext, Windows

HEAD_SPEC = TensorSpec("classifier.weight", (3, 8), HEAD)
SHAPE = ModelShape("T", 4, 8, 16, tuple(TargetShape(f"b.{i}.q", i, 8, 8) for i in range(4)), (HEAD_SPEC,), (), 0)
FLEET = build_fleet({"laptop-16gb": 6}, {f"c{k}": 10 for k in range(6)})
STATE = {"depth": 2, "width": 16, "won": "deeper"}


def context(server_round: int = 1) -> PlanContext:
    return PlanContext(SHAPE, FLEET, FLEET.ids, server_round, 0, 64, SHAPE.blocks, num_rounds=10)


def candidates(state: dict[str, Any], **options: Any) -> dict[str, tuple[int, int]]:
    plan, _ = Windows(**options).plan(state, context())
    return {name: (c["depth"], c["width"]) for name, c in plan.why["candidates"].items()}


def test_a_window_has_three_candidates_within_the_model_and_the_largest_width() -> None:
    assert candidates({"depth": 1, "width": 8, "won": ""}) == {"same": (1, 8), "deeper": (2, 8), "wider": (1, 16)}
    assert candidates({"depth": 4, "width": 8, "won": ""}) == {"same": (4, 8), "wider": (4, 16)}
    assert candidates({"depth": 4, "width": 64, "won": ""}) == {"same": (4, 64)}


def test_adapters_stand_in_the_top_blocks_at_the_candidates_width() -> None:
    plan, _ = Windows().plan(STATE, context())
    sizes = {"same": {2: 16, 3: 16}, "deeper": {1: 16, 2: 16, 3: 16}, "wider": {2: 24, 3: 24}}
    assert {p.group for p in plan.clients} == set(sizes)
    assert all(dict(p.ranks) == sizes[p.group] | {HEAD: 1} for p in plan.clients)


@pytest.mark.parametrize(
    ("scores", "winner", "size"),
    [
        ({"same": (0.6, 1.0), "deeper": (0.7, 2.0), "wider": (0.5, 0.1)}, "deeper", (3, 16)),
        ({"same": (0.6, 1.0), "deeper": (0.6, 0.9), "wider": (0.6, 0.8)}, "wider", (2, 24)),
        ({"same": (0.6, 0.9), "deeper": (0.6, 0.9), "wider": (0.6, 0.9)}, "same", (2, 16)),
        ({"deeper": (0.6, 0.9), "wider": (0.6, 0.9)}, "deeper", (3, 16)),  # 3 · 16 = 2 · 24: then by name
        ({}, "same", (2, 16)),
    ],
)
def test_the_best_accuracy_goes_on_then_the_lower_loss_then_the_smaller_one(
    scores: dict[str, tuple[float, float]], winner: str, size: tuple[int, int]
) -> None:
    judged = {name: {"accuracy": a, "loss": b} for name, (a, b) in scores.items()}
    won, state = Windows().settle(STATE, judged, SHAPE)
    assert (won, state["depth"], state["width"]) == (winner, *size)


def test_windows_end_after_their_rounds_and_with_the_run() -> None:
    assert [r for r in range(1, 13) if Windows(window=5).is_over(r, 12)] == [5, 10, 12]
