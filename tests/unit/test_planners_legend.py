"""LEGEND's plan: ranks, seconds and what is learned of them, depths, caps and controls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedstrata.core.shape import ModelShape, TargetShape
from fedstrata.core.tensors import HEAD, TensorSpec
from fedstrata.device import Client, DeviceProfile, Fleet, PlanCost, build_fleet
from fedstrata.errors import PlanError
from fedstrata.plan import DepthAndRank, PlanContext, check_own_ranks, check_round_plan
from fedstrata.plan.anchor import anchor_scan, wait_ratio
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
