"""LEGEND's controls, the seconds that it estimates, and mistakes in its options."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fedstrata.core.shape import ModelShape, TargetShape
from fedstrata.core.tensors import EMBEDDINGS, HEAD, TensorSpec
from fedstrata.device import Client, DeviceProfile, Fleet, PlanCost, build_fleet, count_step_flop
from fedstrata.errors import PlanError
from fedstrata.plan import DepthAndRank, PlanContext, check_round_plan
from fedstrata.plan.device_times import ClientTimes, learn_times, times_from_profile

L = 12


def make_shape(num_blocks: int = L, width: int = 16) -> ModelShape:
    targets = tuple(TargetShape(f"layer.{b}.query", b, width, width) for b in range(num_blocks))
    head = (TensorSpec("classifier.weight", (3, width), HEAD),)
    own = tuple(TensorSpec(f"{t.name}.weight", (width, width), t.block) for t in targets)
    return ModelShape("Tiny", num_blocks, width, 32, targets, head, (*own, *head), 4 * width * width * num_blocks)


SHAPE = make_shape()
KINDS = ("laptop-16gb", "jetson-nx", "jetson-tx2")
FLEET = build_fleet(dict.fromkeys(KINDS, 1), {"a": 10, "b": 10, "c": 10})
GIVEN = {
    "forward_s": dict(zip(KINDS, (1.0, 2.0, 4.0), strict=True)),
    "backward_s": dict(zip(KINDS, (0.2, 0.5, 1.0), strict=True)),
    "upload_s": dict(zip(KINDS, (0.002, 0.004, 0.01), strict=True)),
}
GROWING = tuple(range(2, 14))


def world(**changes: Any) -> PlanContext:
    return replace(PlanContext(SHAPE, FLEET, FLEET.ids, 1, 0, 13, SHAPE.blocks), **changes)


def make_plan(planner: DepthAndRank, context: PlanContext | None = None):
    context = context or world()
    made, state = planner.plan(planner.init(context.shape, context.fleet), context)
    check_round_plan(made, context)
    return made, state


def depths_of(planner: DepthAndRank, context: PlanContext | None = None) -> list[int]:
    return [len(p.blocks) for p in make_plan(planner, context)[0].clients]


def capped_world(memory: dict[str, int], traffic: dict[str, int | None] | None = None, **changes: Any) -> PlanContext:
    clients = tuple(
        Client(c, DeviceProfile(kind, memory[c], 1e9, 1e6, 1e6, round_bytes=(traffic or {}).get(c)), 10)
        for c, kind in zip("abc", KINDS, strict=True)
    )
    return world(fleet=Fleet(clients), cost=PlanCost(SHAPE, 8, dict.fromkeys("abc", 1)), **changes)


def memory_at(depth: int) -> int:
    """By hand: the base, all adapters present (32 numbers per unit of rank) and the head, 12 bytes per trained number,
    and activations of 8 tokens, 16 numbers per unit of width 16."""
    trained = 32 * sum(GROWING[L - depth :]) + 48
    present = 32 * 90 + 48
    return 4 * 16 * 16 * L + 4 * present + 12 * trained + 4 * 8 * 16 * 16 * max(depth, 1)


# ---- controls


def test_rank_controls_keep_the_depths():
    plans = {arm: make_plan(DepthAndRank(**GIVEN, arm=arm))[0] for arm in ("legend", "uniform_rank", "reversed_rank")}
    assert len({str(p.why["depths"]) for p in plans.values()}) == 1
    assert dict(plans["reversed_rank"].clients[2].ranks) == {8: 5, 9: 4, 10: 3, 11: 2, HEAD: 1}
    uniform = make_plan(DepthAndRank(**GIVEN, arm="uniform_rank"), world(max_rank=8))[0]
    assert dict(uniform.clients[2].ranks) == {8: 8, 9: 8, 10: 8, 11: 8, HEAD: 1}
    assert uniform.why["depths"] == plans["legend"].why["depths"]


def test_uniform_depth_is_the_mean_within_everyones_caps():
    """(12 + 12 + 4)/3 = 9.33 → 9, or what the weakest device can hold."""
    assert depths_of(DepthAndRank(**GIVEN, arm="uniform_depth")) == [9, 9, 9]
    context = capped_world({"a": memory_at(5), "b": 10**12, "c": 10**12})
    assert depths_of(DepthAndRank(**GIVEN, arm="uniform_depth", target_s=1000.0), context) == [5, 5, 5]


def test_random_strata_are_as_many_and_fresh_every_round():
    planner = DepthAndRank(**GIVEN, arm="random_strata")
    rounds = [make_plan(planner, world(server_round=r))[0] for r in (1, 2, 3)]
    assert {tuple(len(p.blocks) for p in r.clients) for r in rounds} == {(12, 12, 4)}
    drawn = [r.clients[2] for r in rounds]
    assert len({p.blocks for p in drawn}) > 1
    assert all(p.ranks[b] == b + 2 for p in drawn for b in p.blocks)


# ---- seconds


def test_first_estimates_are_the_profiles_cost_of_everything():
    cost = PlanCost(SHAPE, 8, {"a": 5})
    ranks = dict(zip(SHAPE.blocks, GROWING, strict=True))
    device = DeviceProfile("x", 10**12, flop_per_s=1e6, down_bytes_per_s=1000, up_bytes_per_s=100)
    times = times_from_profile(Client("a", device, 10), cost, ranks, head=True)
    flop = count_step_flop(SHAPE, {**ranks, HEAD: 1}, 8)
    assert times.forward_s == flop.forward / 1e6
    assert times.backward_s == flop.backward / 1e6 / 12
    assert times.upload_s == pytest.approx(4 * 32 / 100)
    assert times.fixed_s == pytest.approx(4 * (32 * 90 + 48) / 1000 + 4 * 48 / 100)


def test_estimated_seconds_at_full_depth_are_the_predicted_ones():
    """At k = L nothing is shared out: t_i(L) is what `predict_client_seconds` says."""
    context = capped_world(dict.fromkeys("abc", 10**12))
    made, _ = make_plan(DepthAndRank(target_s=1e9), context)
    ranks = {**dict(zip(SHAPE.blocks, GROWING, strict=True)), HEAD: 1}
    expected = context.cost.seconds(context.fleet["a"], ranks).total_s
    assert made.why["times_s"]["a"] == pytest.approx(expected, rel=1e-9)


def test_without_seconds_nothing_can_be_planned():
    with pytest.raises(PlanError, match="does not know how long clients need"):
        make_plan(DepthAndRank())


def line(client: str, **changes: Any) -> dict[str, Any]:
    seconds = {"forward_s": 8.0, "backward_s": 12.0, "upload_s": 1.5, "download_s": 3.0}
    record = {"client": client, "status": "ok", "num_steps": 4, "planned": {"10": 12, "11": 13, "head": 1}}
    return record | {"predicted": seconds} | changes


def test_estimates_move_by_three_tenths_towards_what_was_seen():
    """Seen: t̂ = 8/4, μ = 12/4/2, β = 1.5/(25 + 5) with a head of 5 units, c = 3 + 5·0.05."""
    new = learn_times(ClientTimes(1.0, 1.0, 1.0, 1.0), line("a"), smoothing=0.3, head_units=5.0)
    assert new.forward_s == pytest.approx(0.7 + 0.3 * 2)
    assert new.backward_s == pytest.approx(0.7 + 0.3 * 1.5)
    assert new.upload_s == pytest.approx(0.7 + 0.3 * 0.05)
    assert new.fixed_s == pytest.approx(0.7 + 0.3 * 3.25)


@pytest.mark.parametrize(
    "changes", [{"status": "failed"}, {"num_steps": 0}, {"predicted": {"forward_s": 1.0}}, {"predicted": None}]
)
def test_lines_that_say_too_little_teach_nothing(changes):
    old = ClientTimes(1.0, 1.0, 1.0, 1.0)
    assert learn_times(old, line("a", **changes), smoothing=0.3, head_units=0.0) == old


def test_the_chosen_clock_counts_more_than_the_prediction():
    measured = {"forward_s": 40.0, "backward_s": 0.0, "upload_s": 0.0, "download_s": 0.0}
    new = learn_times(ClientTimes(0, 0, 0), line("a", times=measured), smoothing=1.0, head_units=0.0)
    assert new == ClientTimes(10.0, 0.0, 0.0, 0.0)


def test_a_planner_learns_about_the_clients_it_planned():
    planner, context = DepthAndRank(), capped_world(dict.fromkeys("abc", 10**12), cohort=("a", "b"))
    _, state = make_plan(planner, context)
    later = planner.observe(json.loads(json.dumps(state)), {"clients": [line("a"), line("c")]})
    assert set(later["clients"]) == {"a", "b"}
    assert later["clients"]["b"] == state["clients"]["b"]
    before = state["clients"]["a"]["forward_s"]
    assert later["clients"]["a"]["forward_s"] == pytest.approx(0.7 * before + 0.3 * 2.0)
    slow = planner.plan(later, context)[0].why["times_s"]["a"]
    assert slow > planner.plan(state, context)[0].why["times_s"]["a"]


def test_what_the_simulated_clock_shows_at_full_depth_changes_no_estimate():
    """Predicted and estimated seconds are the same numbers, so a moving average stays where it is."""
    planner, context = DepthAndRank(target_s=1e9), capped_world(dict.fromkeys("abc", 10**12))
    made, state = make_plan(planner, context)
    records = []
    for p in made.clients:
        t = context.cost.seconds(context.fleet[p.client], p.ranks, p.reads)
        parts = {k: getattr(t, k) for k in ("forward_s", "backward_s", "upload_s", "download_s")}
        planned = {str(s): r for s, r in p.ranks.items()}
        records.append({"client": p.client, "status": "ok", "num_steps": 1, "planned": planned, "predicted": parts})
    later = planner.observe(state, {"clients": records})
    for client, times in state["clients"].items():
        assert later["clients"][client] == pytest.approx(times, rel=1e-9)


def test_given_seconds_are_kept():
    planner = DepthAndRank(**GIVEN)
    _, state = make_plan(planner)
    assert planner.observe(state, {"clients": [line("a")]}) == state


# ---- mistakes


def test_all_mistakes_in_the_options_come_at_once():
    planner = DepthAndRank(
        min_depth=13,
        max_wait=-0.1,
        target_s=0.0,
        smoothing=2.0,
        forward_s={"laptop-16gb": -1.0, "jetson-nx": 1.0},
        fixed_s={"jetson-nx": 1.0, "jetson-tx2": 0.0, "phone": 1.0},
    )
    with pytest.raises(PlanError) as error:
        planner.init(SHAPE, FLEET)
    for text in (
        "min_depth = 13, but the model has 12 blocks",
        "max_wait = -0.1",
        "target_s = 0.0",
        "smoothing = 2.0",
        "backward_s, upload_s missing",
        "fixed_s is given without",
        'forward_s["laptop-16gb"] = -1.0',
        'forward_s says nothing about the device kind "jetson-tx2"',
        'fixed_s names the device kind "phone"',
    ):
        assert text in str(error.value)


def test_a_budget_that_is_too_small_is_found_before_the_first_round():
    with pytest.raises(PlanError, match="= 78"):
        DepthAndRank(rank_budget=77).init(SHAPE, FLEET)


def test_with_full_parameters_every_block_is_in_or_out():
    """T = 8.04 s is four blocks of "c": 4 + 4·1 + 0.01·4; "b" has time for eleven: 2 + 5.5 + 0.044."""
    full = world(strata=(EMBEDDINGS, *SHAPE.blocks), max_rank=1)
    made, _ = make_plan(DepthAndRank(**GIVEN, target_s=8.04), full)
    assert [len(p.blocks) for p in made.clients] == [12, 11, 4]
    assert dict(made.clients[2].ranks) == {8: 1, 9: 1, 10: 1, 11: 1, HEAD: 1}
    assert dict(made.clients[2].reads) == {EMBEDDINGS: 1, **dict.fromkeys(range(8), 1)}
