"""Laws over every registered planner: valid, deterministic, independent of order and of other clients."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedstrata.core.shape import ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import EMBEDDINGS, HEAD, TensorSpec
from fedstrata.device import build_fleet
from fedstrata.plan import PLANNERS, AskingPlanner, PlanContext, Planner, check_round_plan, draw_cohort
from fedstrata.registry import to_config

NUM_BLOCKS, RANK = 12, 4
KINDS = {"laptop-16gb": 3, "jetson-nx": 4, "jetson-tx2": 5}
FLEET = build_fleet(KINDS, {f"c{k:02d}": 10 + k for k in range(12)})
DEPTHS = {"laptop-16gb": 12, "jetson-nx": 5, "jetson-tx2": 0}
SCORING = {
    "importance": "fisher",
    "source": "client_heldout",
    "fisher_on": "factors",
    "examples": None,
    "mapped": "proportional",
    "control": "none",
    "refresh": None,
    "warm_rounds": 0,
}
LEGEND = {
    "id": "depth_and_rank",
    "rank_budget": None,
    "rank_step": 0.25,
    "rank_start": 1,
    "min_depth": 1,
    "max_wait": 0.2,
    "target_s": None,
    "infeasible": "error",
    "frozen": "present",
    "arm": "legend",
    "forward_s": {"laptop-16gb": 1.0, "jetson-nx": 2.0, "jetson-tx2": 4.0},
    "backward_s": {"laptop-16gb": 0.2, "jetson-nx": 0.5, "jetson-tx2": 1.0},
    "upload_s": {"laptop-16gb": 0.002, "jetson-nx": 0.004, "jetson-tx2": 0.01},
    "fixed_s": None,
    "smoothing": 0.3,
    "rank_limit": None,
}
WINDOWS: dict[str, Any] = {
    "id": "windows",
    "window": 5,
    "start_depth": 1,
    "start_width": 2,
    "step": 1,
    "max_width": RANK,
}

CONFIGS: list[dict[str, Any]] = [
    {"id": "all"},
    {"id": "last_k", "k": 3},
    {"id": "first_k", "k": 3},
    {"id": "suffix_by_device", "depth": DEPTHS},
    {"id": "random_k", "strata": 4},
    {"id": "random_k", "strata": DEPTHS},
    {"id": "pattern", "strata": DEPTHS, "pattern": "uniform"},
    {"id": "random_pattern", "strata": DEPTHS, "pattern": "bottleneck"},
    {"id": "fisher", "strata": DEPTHS, **SCORING},
    {"id": "hello", "strata": DEPTHS, "pattern": "deep", **SCORING, "importance": "updates", "warm_rounds": None},
    LEGEND,
    *(LEGEND | {"arm": arm} for arm in ("uniform_rank", "random_strata")),
    LEGEND | {"target_s": 10.0},
    {"id": "client_ranks", "ranks": {"laptop-16gb": 4, "jetson-nx": 2, "c11": 3, "jetson-tx2": 0}},
    {"id": "exclusive", "kinds": list(KINDS)},
    {"id": "after_gradient", "examples": 8},
    WINDOWS,
    {"id": "fixed", "clients": {c: [k % NUM_BLOCKS, (k + 3) % NUM_BLOCKS] for k, c in enumerate(FLEET.ids)}},
]


OWN_RANKS = {"client_ranks", "windows"}
"""Clients may have smaller ranks than the server."""
FROM_THE_COHORT = {"depth_and_rank", "windows"}
"""Depths by an anchor scan and the candidates that clients are dealt follow from the whole cohort."""


def shape(num_blocks: int = NUM_BLOCKS) -> ModelShape:
    targets = tuple(TargetShape(f"encoder.layer.{b}.query", b, 8, 6) for b in range(num_blocks))
    head = (TensorSpec("classifier.weight", (3, 8), HEAD),)
    own = tuple(TensorSpec(f"{t.name}.weight", (6, 8), t.block) for t in targets)
    embeddings = TensorSpec("embeddings.word.weight", (20, 8), EMBEDDINGS)
    return ModelShape("Tiny", num_blocks, 8, 16, targets, head, (embeddings, *own, *head), 4 * 48 * num_blocks)


SHAPE = shape()


def context(adapter: str = "lora", **changes: Any) -> PlanContext:
    strata = SHAPE.blocks if adapter == "lora" else (EMBEDDINGS, *SHAPE.blocks)
    rank = RANK if adapter == "lora" else 1
    return replace(PlanContext(SHAPE, FLEET, FLEET.ids, 1, 0, rank, strata), **changes)


def plan(planner: Planner, world: PlanContext):
    return planner.plan(planner.init(SHAPE, FLEET), world)[0]


def largest_ranks(planner: Planner, world: PlanContext) -> dict[Any, int]:
    """Rank of every block on the server."""
    full = EMBEDDINGS in world.strata
    return dict.fromkeys(SHAPE.blocks, 1) if full else planner.server_ranks(SHAPE, world.max_rank)


def answered(planner: Planner, world: PlanContext) -> PlanContext:
    """The world after the cohort answered what the planner asked."""
    asked = planner.probes(planner.init(SHAPE, FLEET), world) if isinstance(planner, AskingPlanner) else None
    if asked is None:
        return world
    sums = {str(b): float(b) for b in asked.options.get("strata", ())}
    return replace(world, answers={c: {"sums": sums, "count": 8} for c in world.cohort})


def name_of(config: dict[str, Any]) -> str:
    last = list(config.values())[-1]
    return "-".join(
        [config["id"], config.get("arm", type(last).__name__), *(["target"] if config.get("target_s") else [])]
    )


every_planner = pytest.mark.parametrize("config", CONFIGS, ids=name_of)
RECORD = {
    "server_round": 1,
    "clients": [
        {
            "client": c,
            "status": "ok",
            "num_steps": 4,
            "planned": {"11": 4, "head": 1},
            "predicted": {"forward_s": 1.0, "backward_s": 2.0, "upload_s": 0.5, "download_s": 0.25},
            "numbers": {"kept_rank": 3.0},
        }
        for c in FLEET.ids
    ],
    "statistics": {"mean_squared_delta": {"3": 0.5, "11": 0.125, "head": 1.0}},
}
"""A round's record with everything that a planner may learn from."""

worlds = st.builds(
    context,
    adapter=st.sampled_from(["lora", "full"]),
    cohort=st.sets(st.sampled_from(FLEET.ids), min_size=1).map(lambda s: tuple(sorted(s))),
    server_round=st.integers(1, 1000),
    seed=st.integers(0, 2**40),
)
few = settings(max_examples=8, deadline=None)


def test_every_registered_planner_is_in_this_battery():
    assert {c["id"] for c in CONFIGS} == set(PLANNERS)


@every_planner
@few
@given(world=worlds)
def test_plans_are_valid_and_cover_the_cohort(config, world):
    assume(config["id"] != "windows" or EMBEDDINGS not in world.strata)  # of adapters only
    planner = PLANNERS.build(config)
    made = plan(planner, answered(planner, world))
    check_round_plan(made, world)
    server = largest_ranks(planner, world)
    assert tuple(p.client for p in made.clients) == world.cohort
    assert made.server_round == world.server_round
    for p in made.clients:
        assert set(p.blocks) <= set(SHAPE.blocks)
        assert p.ranks[HEAD] == 1
        if config["id"] in OWN_RANKS:
            assert {p.ranks[b] for b in p.blocks} <= {1, 2, 3, 4}
        else:
            assert all(p.ranks[b] == server[b] for b in p.blocks)


@every_planner
@few
@given(world=worlds)
def test_what_is_not_trained_stays_in_the_forward_pass(config, world):
    """But for candidates of different sizes: what lies outside of one is exactly zero."""
    for p in plan(PLANNERS.build(config), world).clients:
        everything = {*p.strata, HEAD} if config["id"] == "windows" else {*world.strata, HEAD}
        assert set(p.strata) | set(p.reads) == everything
        assert not set(p.strata) & set(p.reads)


@every_planner
@few
@given(world=worlds)
def test_the_same_arguments_give_the_same_plan(config, world):
    assert plan(PLANNERS.build(config), world) == plan(PLANNERS.build(config), world)


@every_planner
@few
@given(world=worlds, data=st.data())
def test_the_order_of_the_cohort_does_not_matter(config, world, data):
    shuffled = replace(world, cohort=tuple(data.draw(st.permutations(world.cohort))))
    planner = PLANNERS.build(config)
    assert plan(planner, shuffled) == plan(planner, world)


# With a target for the seconds of a round, depths do not follow from the cohort.
@pytest.mark.parametrize(
    "config", [c for c in CONFIGS if c["id"] not in FROM_THE_COHORT or c.get("target_s") is not None], ids=name_of
)
@few
@given(world=worlds)
def test_a_client_is_planned_whoever_else_takes_part(config, world):
    planner = PLANNERS.build(config)
    world = answered(planner, world)
    for p in plan(planner, world).clients:
        assert plan(planner, replace(world, cohort=(p.client,))).clients == (p,)


@every_planner
@few
@given(world=worlds)
def test_state_and_reasons_survive_json(config, world):
    planner = PLANNERS.build(config)
    first = planner.init(SHAPE, FLEET)
    made, state = planner.plan(json.loads(json.dumps(first)), answered(planner, world))
    later = planner.observe(planner.observe(state, {"server_round": 1}), RECORD)
    for value in (first, state, later, dict(made.why)):
        assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert planner.plan(json.loads(json.dumps(later)), world)[0].server_round == world.server_round


@every_planner
def test_a_planner_is_rebuilt_from_its_config(config):
    planner = PLANNERS.build(config)
    written = json.loads(json.dumps(to_config(planner)))
    assert written == config
    assert PLANNERS.build(written) == planner


@every_planner
@few
@given(world=worlds)
def test_plans_lay_out_a_part_of_the_servers_tensors(config, world):
    planner = PLANNERS.build(config)
    full = EMBEDDINGS in world.strata
    ranks = dict.fromkeys(world.strata, 1) | largest_ranks(planner, world)
    layout = global_layout(SHAPE, "full" if full else "lora", {**ranks, HEAD: 1})
    for p in plan(planner, world).clients:
        mine = layout.with_ranks(p.ranks)
        assert set(mine.strata) == set(p.strata)
        if config["id"] not in OWN_RANKS:
            assert all(mine[n].shape == layout[n].shape for n in mine.names)


@few
@given(seed=st.integers(0, 2**40), server_round=st.integers(1, 10**6), count=st.integers(1, 12), data=st.data())
def test_cohorts_are_ascending_and_independent_of_the_fleets_order(seed, server_round, count, data):
    cohort = draw_cohort(seed, server_round, FLEET.ids, count)
    assert len(set(cohort)) == count
    assert list(cohort) == sorted(cohort)
    assert set(cohort) <= set(FLEET.ids)
    assert draw_cohort(seed, server_round, data.draw(st.permutations(FLEET.ids)), count) == cohort
