"""LEGEND's plan: ranks, seconds and what is learned of them, depths, caps and controls."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fedstrata.core.shape import ModelShape, TargetShape
from fedstrata.core.tensors import EMBEDDINGS, HEAD, TensorSpec
from fedstrata.device import Client, DeviceProfile, Fleet, PlanCost, build_fleet, count_step_flop
from fedstrata.errors import PlanError
from fedstrata.plan import DepthAndRank, PlanContext, check_own_ranks, check_round_plan
from fedstrata.plan.anchor import anchor_scan, wait_ratio
from fedstrata.plan.device_times import ClientTimes, learn_times, times_from_profile
from fedstrata.plan.growing_ranks import growing_ranks, uniform_ranks

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


# ---- ranks


def test_ranks_grow_by_a_step_per_block():
    """r_0 = ⌊(ψ − λ·66)/12⌋: (96 − 66)/12 = 2.5 → 2; (96 − 33)/12 = 5.25 → 5, growing by half."""
    assert growing_ranks(L).ranks == GROWING
    assert growing_ranks(L, budget=96, step=0.5).ranks == (5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10)
    assert growing_ranks(L, budget=96, step=0).ranks == (8,) * L


def test_a_step_of_one_tenth_is_exactly_one_tenth():
    """⌊0.1·10⌋ = 1, ⌊0.3·10⌋ = 3 and r_0 = ⌊(11 + 5.5)/11⌋ = 1 without rounding errors."""
    assert growing_ranks(11, start=1, step=0.1).ranks == (1,) * 10 + (2,)
    assert growing_ranks(11, start=1, step=0.3).ranks[-1] == 4
    assert growing_ranks(11, budget=22, step=0.2).start == 1  # 11 + 0.2·55 = 22


@pytest.mark.parametrize(
    ("num_blocks", "step", "start"),
    [(12, 1.0, 2), (15, 1.0, 1), (16, 0.5, 4), (24, 0.5, 2), (32, 0.25, 4), (64, 0.0, 8)],
)
def test_the_step_is_chosen_only_where_nothing_is_given(num_blocks, step, start):
    """ψ = 8L: r_0 = ⌊8 − λ(L − 1)/2⌋, the largest λ of 1, ½, ¼, 0 with r_0 ≥ 1."""
    found = growing_ranks(num_blocks)
    assert (found.step, found.start, found.is_step_chosen) == (step, start, True)


def test_a_given_step_or_budget_is_not_changed():
    """λ = 1 and 24 blocks need 24 + 276 = 300; ψ = 8·24 = 192."""
    for options in ({"step": 1.0}, {"budget": 192}):
        with pytest.raises(PlanError, match=r"at least .* = 300"):
            growing_ranks(24, **options)
    assert growing_ranks(24, budget=300).ranks[0] == 1
    with pytest.raises(PlanError, match=r"at least .* = 300"):
        growing_ranks(24, budget=299)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1.0}, "cannot grow by -1"),
        ({"step": float("nan")}, "cannot grow by nan"),
        ({"start": 0}, "cannot start at 0"),
        ({"start": 2, "budget": 96}, "a budget and a start"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        growing_ranks(L, **options)


def test_uniform_ranks_have_the_same_sum():
    """Σ = 90 = 12·7 + 6: the six blocks nearest the output have one more."""
    assert uniform_ranks(GROWING) == (7,) * 6 + (8,) * 6


@pytest.mark.parametrize(
    ("arm", "expected"), [("legend", GROWING), ("reversed_rank", GROWING[::-1]), ("uniform_rank", (7,) * 6 + (8,) * 6)]
)
def test_the_server_has_the_ranks_of_the_arm(arm, expected):
    assert tuple(DepthAndRank(arm=arm).server_ranks(SHAPE, 8).values()) == expected


def test_own_ranks_exceed_only_a_default():
    ranks = DepthAndRank().server_ranks(SHAPE, 8)
    check_own_ranks("depth_and_rank", ranks, 8, is_set=False)
    check_own_ranks("depth_and_rank", ranks, 13, is_set=True)
    with pytest.raises(PlanError, match="needs rank 13"):
        check_own_ranks("depth_and_rank", ranks, 12, is_set=True)


def test_ranks_above_the_smaller_side_of_a_map_are_refused():
    with pytest.raises(PlanError, match=r"Rank 13 .*"):
        DepthAndRank().server_ranks(make_shape(width=12), 8)
    assert max(DepthAndRank(rank_budget=84).server_ranks(make_shape(width=12), 8).values()) == 12


# ---- depths


def test_clients_train_suffixes_at_the_ranks_of_their_blocks():
    """ε = 0.2: depths 12, 12, 4 (the reference values); below, adapters are read at the server's ranks."""
    made, _ = make_plan(DepthAndRank(**GIVEN))
    assert [p.blocks for p in made.clients] == [tuple(range(12)), tuple(range(12)), (8, 9, 10, 11)]
    slow = made.clients[2]
    assert dict(slow.ranks) == {8: 10, 9: 11, 10: 12, 11: 13, HEAD: 1}
    assert dict(slow.reads) == {b: b + 2 for b in range(8)}


def test_the_record_says_why():
    why = make_plan(DepthAndRank(**GIVEN))[0].why
    assert why["depths"] == {"a": 12, "b": 12, "c": 4}
    assert (why["anchor_depth"], why["wait_target_met"], why["rank_step_chosen"]) == (4, True, True)
    assert why["target_s"] == pytest.approx(4 + 4 * 1 + 0.01 * (10 + 11 + 12 + 13))
    assert why["times_s"]["a"] == pytest.approx(1 + 12 * 0.2 + 0.002 * 90)
    assert why["ranks"] == {str(b): b + 2 for b in range(12)}
    assert why["times"] == "given"


def test_absent_adapters_are_not_read():
    made, _ = make_plan(DepthAndRank(**GIVEN, frozen="absent"))
    assert [dict(p.reads) for p in made.clients] == [{}, {}, {}]


def test_fixed_seconds_count_once_a_round():
    """T = 8.46; with c = 6 for "b" it has 2.46 − 2 left, not even one block: 8.552 > 8.46 at k = 1 for k_a = 4."""
    assert depths_of(DepthAndRank(**GIVEN, target_s=8.46)) == [12, 12, 4]
    slow = {"laptop-16gb": 0.0, "jetson-nx": 6.0, "jetson-tx2": 0.0}
    made, _ = make_plan(DepthAndRank(**GIVEN, fixed_s=slow, target_s=8.46))
    assert made.why["depths"] == {"a": 12, "b": 1, "c": 4}
    assert made.why["over_target"] == ["b"]
    assert made.why["times_s"]["b"] == pytest.approx(6 + 2 + 0.5 + 0.004 * 13)


def test_local_steps_multiply_compute_and_not_upload():
    """Three steps of "a": 3·(1 + 0.2·k) + 0.002·Σr ≤ 5 up to k = 3: 4.8 + 0.072."""
    cost = PlanCost(SHAPE, 1, {"a": 3, "b": 1, "c": 1})
    context = world(cohort=("a",), cost=cost)
    made, _ = make_plan(DepthAndRank(**GIVEN, target_s=5.0), context)
    assert made.why["depths"] == {"a": 3}
    assert made.why["times_s"]["a"] == pytest.approx(3 * 1.6 + 0.002 * (13 + 12 + 11))


def test_the_anchor_is_the_slowest_client_and_its_depth_the_largest_that_waits_little():
    """t = k for "s" and k/2 for "f", at most 4 blocks: at k_a = 4 wait is (4 − 2)/2/4 = ¼, at 2 and 1 too or less.

    k_a = 1: f takes k = 2 (1 s): wait 0. k_a = 2: f takes 4 (2 s): 0. k_a = 3: f is full (2 s): 1/2/3 = 1/6.
    """
    times = {"s": [float(k) for k in range(5)], "f": [k / 2 for k in range(5)]}
    full = {"s": 4, "f": 4}
    assert anchor_scan(times, full, max_wait=0.0).depths == {"f": 4, "s": 2}
    assert anchor_scan(times, full, max_wait=0.17).depths == {"f": 4, "s": 3}
    assert anchor_scan(times, full, max_wait=0.25).depths == {"f": 4, "s": 4}
    assert anchor_scan(times, full, max_wait=0.25).wait_ratio == 0.25
    capped = anchor_scan(times, {"s": 4, "f": 1}, max_wait=0.1)  # f: ½ s; k_a = 1: ¼, 2: ⅜, …
    assert (capped.depths, capped.wait_ratio, capped.wait_target_met) == ({"f": 1, "s": 1}, 0.25, False)


def test_equal_waits_take_the_deeper_anchor():
    times = {"s": [0.0, 2.0, 2.0], "f": [0.0, 1.0, 1.0]}
    assert anchor_scan(times, {"s": 2, "f": 2}, max_wait=0.1).anchor_depth == 2


def test_rounding_does_not_cost_a_block():
    """0.1 + 0.2 > 0.3 in float64; T(1 + 1e-9) forgives it."""
    times = {"s": [0.0, 0.3], "f": [0.0, 0.1 + 0.2]}
    assert anchor_scan(times, {"s": 1, "f": 1}, min_depth=1, target_s=0.3).depths == {"f": 1, "s": 1}
    times = {"f": [0.0, 0.1, 0.1 + 0.2]}
    assert anchor_scan(times, {"f": 2}, target_s=0.3).depths == {"f": 2}


def test_wait_is_a_share_of_the_slowest():
    """((4 − 1) + (4 − 3) + 0)/3/4 = 1/3."""
    assert wait_ratio([1.0, 3.0, 4.0]) == pytest.approx(1 / 3)
    assert wait_ratio([0.0, 0.0]) == 0.0


# ---- caps


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


def test_memory_caps_the_depth():
    context = capped_world({"a": memory_at(5), "b": memory_at(5) - 1, "c": 10**12})
    made, _ = make_plan(DepthAndRank(**GIVEN, target_s=1000.0), context)
    assert made.why["depths"] == {"a": 5, "b": 4, "c": 12}
    assert made.why["capped"] == {"a": 5, "b": 4}


def test_bytes_of_a_round_cap_the_depth():
    """Down: 32·90 + 48 numbers; up at depth 3: 32·(13 + 12 + 11) + 48; four bytes each."""
    plenty, room = dict.fromkeys("abc", 10**12), 4 * (32 * 90 + 48) + 4 * (32 * 36 + 48)
    context = capped_world(plenty, {"a": room, "b": room - 1})
    assert depths_of(DepthAndRank(**GIVEN, target_s=1000.0), context) == [3, 2, 12]


def test_a_client_that_cannot_do_the_least_depth_is_named_with_its_cap():
    context = capped_world({"a": memory_at(2) - 1, "b": 10**12, "c": 10**12})
    with pytest.raises(PlanError) as error:
        make_plan(DepthAndRank(**GIVEN, min_depth=2), context)
    text = str(error.value)
    assert f"a (laptop-16gb): memory: needs {memory_at(2)} bytes, has {memory_at(2) - 1}" in text
    assert "1 of 3 clients cannot train their last 2 blocks" in text


def test_a_client_that_cannot_do_the_least_depth_may_be_left_out():
    context = capped_world({"a": 1, "b": 10**12, "c": 10**12})
    planner = DepthAndRank(**GIVEN, infeasible="exclude")
    made, _ = make_plan(planner, context)
    assert [p.client for p in made.clients] == ["b", "c"]
    assert list(made.why["excluded"]) == ["a"]
    with pytest.raises(PlanError, match="1 of 1 clients"):
        make_plan(planner, replace(context, cohort=("a",)))


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
