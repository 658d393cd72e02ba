"""When clients are told to compute once what enters their lowest trained block: from plan and spec alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedstrata.codec.floats import Float32
from fedstrata.core.shape import ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import EMBEDDINGS, HEAD, Stratum, TensorSpec
from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.message import Task, header_of
from fedstrata.method import METHODS
from fedstrata.plan import PLANNERS
from fedstrata.plan.base import ClientPlan
from fedstrata.record.checkpoint import ServerState
from fedstrata.server.reuse import reuse_of
from fedstrata.server.setup import RoundSetup
from fedstrata.server.tasks import make_task

NUM_BLOCKS, RANK = 4, 4
HEAD_SPEC = TensorSpec("classifier.bias", (3,), HEAD)
TARGETS = tuple(TargetShape(f"layers.{b}.q", b, 6, 5) for b in range(NUM_BLOCKS))
SHAPE = ModelShape("Small", NUM_BLOCKS, 6, 16, TARGETS, (HEAD_SPEC,), (HEAD_SPEC,), 400)
LAYOUT = global_layout(SHAPE, "lora", dict.fromkeys(range(NUM_BLOCKS), RANK) | {HEAD: 1})
BOX = {name: DeviceProfile(name, 1 << 30, 1e9, 1e6, 1e6) for name in ("big", "small")}
SIZES = {"a": 30, "b": 40, "c": 50}  # 120 examples
FLEET = Fleet(tuple(Client(c, BOX["big" if c == "a" else "small"], n) for c, n in SIZES.items()))
LAST: list[Stratum] = [3, HEAD]
ALL_STATES = 120 * 8 * 6 * 4


def train(steps: int | None = None, epochs: int | None = None, batch: int = 4) -> dict[str, Any]:
    return {"learning_rate": 0.1, "schedule": "constant", "batch_size": batch, "local_steps": steps,
            "local_epochs": epochs}  # fmt: skip


def setup_of(name: str = "fedavg", options: dict[str, Any] | None = None, **changes: Any) -> RoundSetup:
    made = RoundSetup(
        method=METHODS.build(name, options or {}), shape=SHAPE, fleet=FLEET, layout=LAYOUT,
        scaling=dict.fromkeys(LAYOUT.targets, 2.0), seed=7, num_rounds=5, clients_per_round=None, min_replies=1,
        train=train(5), max_length=8, downlink=Float32(), reuse="auto", reuse_memory_bytes=1 << 20,
    )  # fmt: skip
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"epochs": 1}, "off"), ({"epochs": 2}, "auto"), ({"epochs": 3}, "auto"),
        ({"steps": 14}, "off"), ({"steps": 15}, "auto"),  # 3·15·4 = 1.5·120
        ({"steps": 7, "batch": 8}, "off"), ({"steps": 8, "batch": 8}, "auto"),
    ],
)  # fmt: skip
def test_enough_visits_in_a_round_decide(options: dict[str, Any], expected: str) -> None:
    setup = setup_of(train=train(**options))
    assert {reuse_of(setup, [*LAST], setup.train)} == {expected}
    assert reuse_of(replace(setup, num_rounds=500), [*LAST], setup.train) == expected


@pytest.mark.parametrize("trained", [[0, 3, HEAD], [EMBEDDINGS, 2], [EMBEDDINGS, HEAD]])
def test_nothing_is_reused_where_nothing_below_is_frozen(trained: list[Stratum]) -> None:
    for reuse in ("auto", "always"):
        assert reuse_of(setup_of(reuse=reuse, train=train(epochs=5)), trained, train(epochs=5)) == "off"


def test_always_and_off_ask_no_question_about_visits() -> None:
    assert reuse_of(setup_of(reuse="always"), LAST, train(1)) == "always"
    assert reuse_of(setup_of(reuse="always"), [HEAD], train(1)) == "always"
    assert reuse_of(setup_of(reuse="off"), LAST, train(epochs=9)) == "off"


def test_a_model_of_trained_blocks_only_has_nothing_below_them() -> None:
    assert reuse_of(setup_of("fedra_skip", {"strata": 2}, reuse="always"), LAST, train(epochs=5)) == "off"


def test_what_can_never_change_is_reused_over_rounds() -> None:
    steps = 3  # 3·3·4 / 120 = 0.3 visits a round
    fixed = setup_of("last_k", {"k": 2}, train=train(steps))
    assert reuse_of(fixed, [2, 3, HEAD], fixed.train) == "auto"
    assert reuse_of(setup_of(train=train(steps)), [2, 3, HEAD], train(steps)) == "off"  # others train below
    assert reuse_of(fixed, LAST, train(2)) == "off"  # block 2 is trained by others, and 0.2 visits
    assert reuse_of(fixed, [2, HEAD], train(2)) == "off"
    assert reuse_of(replace(fixed, clients_per_round=2), [2, 3], fixed.train) == "off"  # 0.2 visits, absences counted
    assert reuse_of(replace(fixed, reuse_memory_bytes=ALL_STATES), [2, 3], fixed.train) == "auto"
    assert reuse_of(replace(fixed, reuse_memory_bytes=ALL_STATES - 1), [2, 3], fixed.train) == "off"
    assert reuse_of(replace(fixed, num_rounds=1), [2, 3], fixed.train) == "auto"  # so that a run can be extended


def test_pooled_data_are_visited_by_one_client() -> None:
    setup = setup_of("central", {})
    assert reuse_of(setup, LAST, train(44)) == "off"
    assert reuse_of(setup, LAST, train(45)) == "auto"


@pytest.mark.parametrize(
    ("config", "lowest"),
    [
        ({"id": "all"}, 0), ({"id": "last_k", "k": 1}, 3), ({"id": "last_k", "k": 0}, 4),
        ({"id": "first_k", "k": 1}, 0),
        ({"id": "suffix_by_device", "depth": {"big": 3, "small": 1}}, 1),
        ({"id": "fixed", "clients": {"a": [3], "b": [2, 3], "c": []}}, 2),
        ({"id": "fixed", "clients": {"a": [], "b": [], "c": []}}, 4),
    ],
)  # fmt: skip
def test_planners_say_which_block_is_the_lowest(config: dict[str, Any], lowest: int) -> None:
    assert PLANNERS.build(config).lowest_block(SHAPE, FLEET) == lowest


def test_the_task_carries_the_decision_and_costs_nothing_without_it() -> None:
    plan = ClientPlan("a", {3: RANK, HEAD: 1})
    tensors = {s.name: None for s in LAYOUT}
    state = ServerState(tensors, 0, {})  # type: ignore[arg-type]
    tasks: list[Task] = [
        make_task(setup_of(train=train(5), reuse=reuse), state, plan)  # type: ignore[arg-type]
        for reuse in ("off", "auto", "always")
    ]
    assert [t.reuse for t in tasks] == ["off", "off", "always"]
    assert ["reuse" in header_of(t) for t in tasks] == [False, False, True]
