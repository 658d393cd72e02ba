"""Planners by hand, their mistakes, cohorts, and the check of a round's plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fedstrata.core.shape import ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import EMBEDDINGS, HEAD, TensorSpec
from fedstrata.device import build_fleet
from fedstrata.errors import ConfigError, PlanError
from fedstrata.plan import (
    PLANNERS,
    AllStrata,
    ClientPlan,
    FirstBlocks,
    FixedBlocks,
    LastBlocks,
    PlanContext,
    RandomBlocks,
    RoundPlan,
    SuffixByDevice,
    check_round_plan,
    draw_cohort,
)

FLEET = build_fleet({"laptop-16gb": 1, "jetson-nx": 1, "jetson-tx2": 1}, {"a": 3, "b": 4, "c": 5})


def make_shape(num_blocks: int = 12, adapted: tuple[int, ...] | None = None) -> ModelShape:
    blocks = range(num_blocks) if adapted is None else adapted
    targets = tuple(TargetShape(f"encoder.layer.{b}.query", b, 8, 6) for b in blocks)
    head = (TensorSpec("classifier.weight", (3, 8), HEAD),)
    return ModelShape("Tiny", num_blocks, 8, 16, targets, head, head, 0)


SHAPE = make_shape()


def world(**changes: Any) -> PlanContext:
    return replace(PlanContext(SHAPE, FLEET, FLEET.ids, 1, 0, 4, SHAPE.blocks), **changes)


def blocks_of(planner, context=None) -> dict[str, tuple[int, ...]]:
    return {p.client: p.blocks for p in planner.plan({}, context or world())[0].clients}


# ---- what is chosen


def test_all_trains_every_block_and_with_full_parameters_the_embeddings():
    assert blocks_of(AllStrata())["a"] == tuple(range(12))
    full = world(strata=(EMBEDDINGS, *SHAPE.blocks), max_rank=1)
    first = AllStrata().plan({}, full)[0].clients[0]
    assert first.strata == (EMBEDDINGS, *range(12), HEAD)
    assert first.ranks[EMBEDDINGS] == 1


def test_prefixes_and_suffixes():
    assert blocks_of(LastBlocks(3))["b"] == (9, 10, 11)
    assert blocks_of(FirstBlocks(3))["b"] == (0, 1, 2)
    assert blocks_of(LastBlocks(0))["b"] == blocks_of(FirstBlocks(0))["b"] == ()


def test_depth_follows_the_device():
    planner = SuffixByDevice({"laptop-16gb": 12, "jetson-nx": 2, "jetson-tx2": 0})
    assert blocks_of(planner) == {"a": tuple(range(12)), "b": (10, 11), "c": ()}
    why = planner.plan({}, world(cohort=("b",)))[0].why
    assert why == {"rule": "suffix_by_device", "depth": {"jetson-nx": 2}}


def test_choosing_block_1_leaves_10_and_11_alone():
    """Layer ids are numbers, never parts of names."""
    plan = FixedBlocks({"a": [1], "b": [], "c": []}).plan({}, world())[0].clients[0]
    layout = global_layout(SHAPE, "lora", {**dict.fromkeys(SHAPE.blocks, 4), HEAD: 1})
    assert layout.with_ranks(plan.ranks).names == (
        "encoder.layer.1.query.lora_A",
        "encoder.layer.1.query.lora_B",
        "classifier.weight",
    )
    assert {10, 11} <= set(plan.reads)
    assert 1 not in plan.reads


def test_a_frozen_head_is_not_trained():
    plan = LastBlocks(1).plan({}, world(head=False))[0]
    assert plan.clients[0].strata == (11,)


def test_random_blocks_are_fresh_for_every_client_and_round():
    planner = RandomBlocks(3)
    first, second = blocks_of(planner), blocks_of(planner, world(server_round=2))
    assert all(len(set(b)) == 3 and list(b) == sorted(b) for b in first.values())
    assert len(set(first.values())) > 1
    assert first != second
    assert first != blocks_of(planner, world(seed=1))


def test_every_block_is_drawn_equally_often():
    """c/L = 3/12 of 3 clients × 400 rounds: 300 each, σ = √(1200·¼·¾) = 15; five σ are allowed."""
    times: Counter[int] = Counter()
    for server_round in range(1, 401):
        for drawn in blocks_of(RandomBlocks(3), world(server_round=server_round)).values():
            times.update(drawn)
    assert set(times) == set(range(12))
    assert all(abs(n - 300) <= 75 for n in times.values())


def test_random_blocks_say_how_often_each_was_drawn():
    plan = RandomBlocks(12).plan({}, world())[0]
    assert plan.why["times_drawn"] == {str(b): 3 for b in range(12)}
    assert plan.why["probabilities"] == {str(b): 1 / 12 for b in range(12)}


def test_random_counts_may_differ_by_device():
    drawn = blocks_of(RandomBlocks({"laptop-16gb": 12, "jetson-nx": 5, "jetson-tx2": 0}))
    assert [len(b) for b in drawn.values()] == [12, 5, 0]


def test_blocks_without_an_adapter_are_not_counted():
    partly = world(strata=(2, 3, 7))
    assert blocks_of(LastBlocks(2), partly)["a"] == (3, 7)
    assert blocks_of(FirstBlocks(2), partly)["a"] == (2, 3)
    assert set(blocks_of(RandomBlocks(3), partly)["a"]) == {2, 3, 7}
    with pytest.raises(PlanError, match="only 3 can be trained"):
        blocks_of(LastBlocks(4), partly)
    with pytest.raises(PlanError, match=r"blocks \[1\]"):
        blocks_of(FixedBlocks({c: [1] for c in "abc"}), partly)


# ---- mistakes in the options


@pytest.mark.parametrize("planner", [LastBlocks(13), FirstBlocks(13), RandomBlocks(13)], ids=lambda p: p.id)
def test_more_blocks_than_the_model_has_are_refused(planner):
    with pytest.raises(PlanError, match="= 13, but the model has 12 blocks"):
        planner.init(SHAPE, FLEET)


@pytest.mark.parametrize("planner", [LastBlocks(-1), FirstBlocks(-1), RandomBlocks(-1)], ids=lambda p: p.id)
def test_negative_numbers_of_blocks_are_refused(planner):
    with pytest.raises(PlanError, match="0 or more"):
        planner.init(SHAPE, FLEET)


@pytest.mark.parametrize("make", [SuffixByDevice, RandomBlocks])
def test_all_mistakes_of_a_device_table_come_at_once(make):
    with pytest.raises(PlanError) as error:
        make({"jetson-xn": 2, "laptop-16gb": 13, "jetson-nx": 1}).init(SHAPE, FLEET)
    text = str(error.value)
    assert '"jetson-xn", which no client has: did you mean "jetson-nx"' in text
    assert 'says nothing about the device kind "jetson-tx2"' in text
    assert "= 13, but the model has 12 blocks" in text


def test_all_mistakes_of_a_fixed_list_come_at_once():
    with pytest.raises(PlanError) as error:
        FixedBlocks({"a": [1, 1], "bb": [2], "c": [12, -1]}).init(SHAPE, FLEET)
    text = str(error.value)
    assert 'client "a": a block is named twice' in text
    assert 'unknown client "bb": did you mean "b"' in text
    assert 'client "c": there is no block [-1, 12]; blocks are 0 to 11' in text
    assert 'client "b" is not listed' in text


def test_clients_outside_a_fixed_list_are_refused():
    with pytest.raises(PlanError, match='does not list client "c"'):
        blocks_of(FixedBlocks({"a": [1], "b": [1]}))


@pytest.mark.parametrize("planner", [AllStrata(), LastBlocks(1), RandomBlocks(1)], ids=lambda p: p.id)
def test_ranks_above_the_smaller_side_of_a_map_are_refused(planner):
    """The maps are 8 × 6."""
    assert planner.server_ranks(SHAPE, 6) == dict.fromkeys(range(12), 6)
    with pytest.raises(PlanError, match=r"encoder\.layer\.0\.query \(6\)") as error:
        planner.server_ranks(SHAPE, 7)
    assert "at most 6" in str(error.value)
    assert "7 more" in str(error.value)
    with pytest.raises(PlanError):
        planner.server_ranks(SHAPE, 0)


def test_unknown_planners_and_options_are_refused():
    with pytest.raises(ConfigError, match='did you mean "last_k"'):
        PLANNERS.build("lastk")
    with pytest.raises(ConfigError, match='unknown option "kk"'):
        PLANNERS.build({"id": "last_k", "kk": 2})
    with pytest.raises(ConfigError, match='"clients" is needed'):
        PLANNERS.build("fixed")


# ---- cohorts


def test_everyone_takes_part_without_a_count():
    assert draw_cohort(0, 1, ("b", "c", "a"), None) == ("a", "b", "c")


def test_cohorts_change_with_round_and_seed():
    ids = [f"c{k:03d}" for k in range(100)]
    first = draw_cohort(0, 1, ids, 10)
    assert first == draw_cohort(0, 1, ids, 10)
    assert first != draw_cohort(0, 2, ids, 10)
    assert first != draw_cohort(1, 1, ids, 10)


def test_clients_are_drawn_equally_often():
    """2 of 8 in 800 rounds: 200 each, σ = √(800·¼·¾) ≈ 12.2; five σ are allowed."""
    ids = [f"c{k}" for k in range(8)]
    times = Counter(c for r in range(1, 801) for c in draw_cohort(5, r, ids, 2))
    assert all(abs(times[c] - 200) <= 61 for c in ids)


@pytest.mark.parametrize(("ids", "count"), [("abc", 4), ("abc", 0), ("", None), ("", 1)])
def test_cohorts_that_cannot_be_drawn_are_refused(ids, count):
    with pytest.raises(PlanError, match="clients_per_round"):
        draw_cohort(0, 1, tuple(ids), count)


# ---- the check of a round's plan


def check(*clients: ClientPlan, **changes: Any) -> None:
    context = world(**changes)
    check_round_plan(RoundPlan(context.server_round, clients), context)


def test_a_round_in_which_nobody_trains_is_refused():
    with pytest.raises(PlanError, match="Nobody would train anything"):
        check(ClientPlan("a", {}), ClientPlan("b", {3: 0}), head=False)
    check(ClientPlan("a", {}), ClientPlan("b", {3: 1}), head=False)
    with pytest.raises(PlanError, match="Nobody would train anything"):
        check()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ClientPlan("a", {12: 1}), "cannot train block 12"),
        (ClientPlan("a", {EMBEDDINGS: 1}), "cannot train embeddings"),
        (ClientPlan("a", {3: 5}), "train block 3 at rank 5, the server has 4"),
        (ClientPlan("a", {3: -1}), "at rank -1"),
        (ClientPlan("a", {3: 1}, {4: 5}), "read block 4 at rank 5"),
        (ClientPlan("a", {3: 1}, {12: 1}), "cannot read block 12"),
        (ClientPlan("a", {3: 1}, {3: 1}), "train and only read block 3"),
        (ClientPlan("a", {HEAD: 2}), "train head at rank 2"),
        (ClientPlan("z", {3: 1}), '"z" is not in this round'),
    ],
)
def test_plans_that_do_not_fit_the_server_are_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        check(plan)


def test_a_frozen_head_may_be_read_and_not_trained():
    check(ClientPlan("a", {3: 1}, {HEAD: 1}), head=False)
    with pytest.raises(PlanError, match="cannot train head"):
        check(ClientPlan("a", {HEAD: 1}), head=False)


def test_clients_out_of_order_or_repeated_are_refused():
    a, b = ClientPlan("a", {3: 1}), ClientPlan("b", {3: 1})
    check(a, b)
    for wrong in ((b, a), (a, a)):
        with pytest.raises(PlanError, match="ascending order"):
            check(*wrong)


def test_a_plan_of_another_round_is_refused():
    with pytest.raises(PlanError, match="made for round 2"):
        check_round_plan(RoundPlan(2, (ClientPlan("a", {3: 1}),)), world())
