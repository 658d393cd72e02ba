"""Kills and seeds: every method goes on from files as if nothing had happened, and only the seed decides draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.core.tensors import parse_stratum
from fedstrata.core.wire import peek_header
from fedstrata.message import drawn_tensors
from fedstrata.optimize import Momentum
from fedstrata.record.checkpoint import ServerState, save_checkpoint
from fedstrata.server.evaluate import evaluate_on_clients
from fedstrata.server.tasks import cohort_of

pytestmark = pytest.mark.engine

Case = tuple[str, str]
SIZES = {"a": 30, "b": 7, "c": 12, "d": 1, "e": 8}
BLOCKS = 3
FAILING = {2: "b", 3: "a", 4: "central"}
"""Per round of the run, who would fail if it is drawn."""


def small_world(lab: Any, case: Case, **options: Any) -> Any:
    train = {"learning_rate": 0.1, "schedule": "cosine", "batch_size": 4, "local_steps": 2, "local_epochs": None}
    method = lab.method(case[0], **({"window": 2} if case[0] == "fedadapter" else {}))
    if method.aggregator.fixed_coordinates:
        method = method.with_parts(optimizer=Momentum(0.5, 0.5))
    shown = {"sizes": SIZES, "num_blocks": BLOCKS, "rank": 2, "trained_before": False, "num_rounds": 5, "train": train}
    return lab.world(method, case[1], **shown | {"clients_per_round": 3} | options)


def as_bytes(state: ServerState, path: Path) -> bytes:
    """Everything that the next round depends on."""
    save_checkpoint(path, state, "hash")
    return path.read_bytes()


def fail(world: Any, server_round: int) -> None:
    """Lets one client fail, unless nobody would be left."""
    failing = FAILING.get(server_round, "")
    world.trainer.habits = {failing: "raise"} if world.setup.method.topology != "pooled" else {}


def without_measured(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k != "measured"}


def test_a_run_that_was_killed_in_every_round_ends_with_the_same_bits(lab: Any, case: Case, tmp_path: Path) -> None:
    """Four rounds with three of five clients and a failing one. The other run loses the end of every round: clients
    have trained, kept their state and evaluated, the server has stored nothing; then all is read from files again."""
    folder = tmp_path / "killed"
    whole, killed = small_world(lab, case), small_world(lab, case, folder=folder)
    failed = 0
    for server_round in range(1, 5):
        fail(whole, server_round)
        record, clients = whole.round()
        lost = killed.reopen(folder)
        fail(lost, server_round)
        lost.round()
        judged = evaluate_on_clients(lost.setup, lost.state, lost.line, "client_validation", lost.setup.workers.ids)
        assert len(judged.sums) + len(lost.trainer.habits) >= len(lost.setup.workers.ids)
        killed = killed.reopen(folder)
        fail(killed, server_round)
        again, others = killed.round()
        assert without_measured(again) == without_measured(record)
        assert {c: without_measured(x) for c, x in others.items()} == {
            c: without_measured(x) for c, x in clients.items()
        }
        assert as_bytes(killed.state, tmp_path / "one") == as_bytes(whole.state, tmp_path / "other")
        for (client, direction), data in killed.payloads.items():
            header = peek_header(data)
            assert header["client"] == client
            assert direction.endswith("up") or bytes(data) == bytes(whole.payloads[client, direction])
        failed += record["num_replies"] < len(record["cohort"])
    assert failed or whole.setup.method.topology == "pooled"
    for client, accepted in whole.state.accepted.items():
        assert bytes(killed.states.read(client, accepted)) == bytes(whole.states.read(client, accepted))
    first = whole.trainer.initial(whole.setup.layout)
    changed = any(not np.array_equal(t, first[n]) for n, t in whole.state.tensors.items())
    assert changed == (whole.setup.method.topology != "alone")


def test_other_seeds_draw_other_cohorts(lab: Any, case: Case) -> None:
    worlds = [small_world(lab, case, seed=seed, clients_per_round=2) for seed in (1, 1, 2)]
    drawn = [[cohort_of(world.setup, r) for r in range(1, 9)] for world in worlds]
    assert drawn[0] == drawn[1]
    assert (drawn[0] != drawn[2]) == (worlds[0].setup.method.topology != "pooled")
    assert all(len(c) == (1 if worlds[0].setup.method.topology == "pooled" else 2) for c in drawn[0])


DRAWN_BLOCKS = ["fedra_freeze", "fedra_skip", "fed_hello"]


@pytest.mark.parametrize("name", DRAWN_BLOCKS)
def test_other_seeds_and_other_rounds_draw_other_blocks(lab: Any, name: str) -> None:
    planned = []
    for seed in (1, 1, 2):
        options = {"strata": {"big": 5, "small": 4}}
        world = lab.world(lab.method(name, **options), sizes=SIZES, seed=seed, trained_before=False)
        planned.append([{c: tuple(x["planned"]) for c, x in world.round()[1].items()} for _ in range(3)])
    assert planned[0] == planned[1]
    assert planned[0] != planned[2]
    assert planned[0][0] != planned[0][1]
    assert len(set(planned[0][0].values())) > 1  # not one draw for all clients


@pytest.mark.parametrize("name", ["flora", "ffa_lora"])
def test_drawn_factors_follow_the_seed_and_only_redrawn_ones_the_round(lab: Any, name: str) -> None:
    drawn = []
    for seed in (1, 1, 2):
        world = lab.world(lab.method(name), sizes=SIZES, seed=seed, num_blocks=BLOCKS)
        for _ in range(2):
            world.round()
            task = world.trainer.tasks["a"]
            layouts = task.layouts(world.setup.layout)
            tensors = drawn_tensors(task, layouts.present)
            assert tensors
            assert all(np.array_equal(world.trainer.starts["a"][n], t) for n, t in tensors.items())
            drawn.append({n: t.tobytes() for n, t in tensors.items() if n.endswith("lora_A")})
    first, later, again, _, other, _ = drawn
    assert first == again
    assert first != other
    assert (first != later) == (name == "flora")


def test_drawn_slices_follow_the_seed_the_round_and_the_client(lab: Any) -> None:
    drawn = []
    for seed in (1, 1, 2):
        options = {"rank": 5, "kinds": ["small", "big"], "num_blocks": 1}
        world = lab.world(lab.method("fslora"), sizes=SIZES, seed=seed, **options)
        for _ in range(4):
            world.round()
            drawn.append({c: tuple(world.slices(c, parse_stratum("0"))) for c in SIZES})
    assert drawn[:4] == drawn[4:8]
    assert drawn[:4] != drawn[8:]
    assert len({d["a"] for d in drawn[:4]}) > 1
    assert len({d[c] for d in drawn[:4] for c in ("a", "c", "e")}) > 2
    assert {len(x) for d in drawn for c, x in d.items() if c in "ace"} == {2}  # half of 5
