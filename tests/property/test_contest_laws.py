"""Candidates that were trained side by side: on what they are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedstrata.client import Score
from fedstrata.core.tensors import HEAD
from fedstrata.record.checkpoint import ServerState

SIZES = {"a": 30, "b": 7, "c": 12, "d": 5}
NAMES = ("same", "deeper", "wider")


def contest_world(lab: Any, **options: Any) -> tuple[Any, list[tuple[str, str, dict[str, np.ndarray]]]]:
    """Windows of two rounds, and what every evaluation on a client was given."""
    seen: list[tuple[str, str, dict[str, np.ndarray]]] = []
    method = lab.method("fedadapter", window=2)
    world = lab.world(method, "bottleneck", sizes=SIZES, num_blocks=4, trained_before=False, **options)

    def evaluate(task: Any, layouts: Any, tensors: Mapping[str, np.ndarray]) -> Score:
        seen.append((task.client, task.split, {n: t.copy() for n, t in tensors.items()}))
        return Score(4, 2.0, 3)

    world.trainer.evaluate = evaluate
    return world, seen


def test_every_client_judges_every_candidate_with_the_head_that_it_holds_now(lab: Any) -> None:
    """Not with the head of the round before, nor with the first one."""
    world, seen = contest_world(lab, head="local")
    head = [s.name for s in world.setup.layout.of(HEAD)]
    for server_round in (1, 2, 3, 4):
        record, _ = world.round()
        assert bool(seen) == ("contest" in record) == (server_round % 2 == 0)
        if seen:
            assert [c for c, _, _ in seen] == [*SIZES] * len(record["contest"]["scores"])
            assert {split for _, split, _ in seen} == {"client_validation"}
        for client, _, tensors in seen:
            for name in head:
                np.testing.assert_array_equal(tensors[name], world.trainer.local[client][name])
        seen.clear()


def test_a_client_whose_reply_was_lost_judges_with_what_counts(lab: Any) -> None:
    """Its head of the last accepted round; one without any accepted reply has nothing to judge with."""
    world, seen = contest_world(lab, head="local")
    head = [s.name for s in world.setup.layout.of(HEAD)]
    world.line.damage = {"d"}
    world.round()
    held = {n: world.trainer.local["a"][n].copy() for n in head}
    world.line.damage = {"a", "d"}
    record, clients = world.round()
    assert (clients["a"]["status"], clients["d"]["status"]) == ("failed", "failed")
    assert {c for c, _, _ in seen} == {"a", "b", "c"}
    for client, _, tensors in seen:
        for name in head:
            now = held if client == "a" else world.trainer.local[client]
            np.testing.assert_array_equal(tensors[name], now[name])
    assert set(record["contest"]["scores"]) <= set(NAMES)


@pytest.mark.parametrize("head", ["local", "aggregate"])
def test_the_server_judges_by_itself_only_where_it_holds_the_whole_model(lab: Any, head: str) -> None:
    judged = []

    def server_score(state: ServerState) -> Mapping[str, float]:
        judged.append(state.server_round)
        return {"accuracy": 0.5, "loss": 1.0}

    world, seen = contest_world(lab, head=head, server_score=server_score)
    world.round()
    record, _ = world.round()
    num_candidates = len(record["contest"]["scores"])
    assert num_candidates == len(set(record["why"]["groups"].values())) == 3
    assert judged == ([] if head == "local" else [2] * 3)
    assert {split for _, split, _ in seen} == ({"server_validation"} if head == "local" else set())
    assert record["contest"]["bytes"]["downlink"]["total"] == record["contest"]["bytes"]["uplink"]["total"] == 0
