"""Fed-HeLLo's allocations: patterns, chances, draws against their exact distribution, scores and their controls."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedstrata.core.shape import ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import HEAD, TensorSpec
from fedstrata.device import build_fleet
from fedstrata.errors import PlanError
from fedstrata.plan import CoDesign, FisherBlocks, PatternBlocks, PlanContext, Probes, RandomBlocks, RandomPattern
from fedstrata.plan.importance import cluster_labels, control_scores, pool_scores, score_probabilities
from fedstrata.plan.patterns import draw_blocks, pattern_probabilities, pattern_sets

SIZES = {"laptop-16gb": 12, "jetson-nx": 9, "jetson-tx2": 6}


def make_world(num_blocks: int, kinds: dict[str, int], **changes: Any) -> PlanContext:
    targets = tuple(TargetShape(f"encoder.layer.{b}.query", b, 8, 6) for b in range(num_blocks))
    head = (TensorSpec("classifier.weight", (3, 8), HEAD),)
    shape = ModelShape("Tiny", num_blocks, 8, 16, targets, head, head, 0)
    fleet = build_fleet(kinds, {f"c{k:03d}": 10 for k in range(sum(kinds.values()))})
    return replace(PlanContext(shape, fleet, fleet.ids, 1, 0, 4, shape.blocks, num_rounds=20), **changes)


WORLD = make_world(12, {"laptop-16gb": 1, "jetson-nx": 1, "jetson-tx2": 1})


def blocks_of(planner, world: PlanContext = WORLD, state: dict[str, Any] | None = None) -> dict[str, tuple[int, ...]]:
    state = planner.init(world.shape, world.fleet) if state is None else state
    return {p.client: p.blocks for p in planner.plan(state, world)[0].clients}


# ---- patterns


@pytest.mark.parametrize("names", [("triangle", "shallow"), ("inverted_triangle", "deep")])
def test_both_names_of_a_triangle_mean_the_same(names):
    expected = {"triangle": {2: (0, 1), 4: (0, 1, 2, 3)}, "inverted_triangle": {2: (4, 5), 4: (2, 3, 4, 5)}}
    assert pattern_sets(names[0], 6, [4, 2]) == pattern_sets(names[1], 6, [2, 4]) == expected[names[0]]


@pytest.mark.parametrize("pattern", ["shallow", "deep", "bottleneck", "uniform"])
def test_sets_are_nested_and_of_the_asked_size(pattern):
    for num in range(1, 14):
        sets = list(pattern_sets(pattern, num, range(num + 1)).values())
        assert [len(set(s)) for s in sets] == list(range(num + 1))
        assert all(set(small) < set(large) <= set(range(num)) for small, large in itertools.pairwise(sets))


def test_a_bottleneck_starts_at_the_input():
    """0, L−1, 1, L−2, …"""
    assert pattern_sets("bottleneck", 5, [1, 2, 3]) == {1: (0,), 2: (0, 4), 3: (0, 1, 4)}


@pytest.mark.parametrize("size", [-1, 7])
def test_sets_larger_than_the_model_are_refused(size):
    with pytest.raises(PlanError, match=f"no set of {size} strata"):
        pattern_sets("uniform", 6, [2, size])


def test_every_groups_set_counts_once():
    """Bottleneck 6/9/12 of 12: 3,3,3,2,2,1,1,1,2,3,3,3 of 27; two groups of size 1 and one of 2: {0}, {0}, {0, 1}."""
    sets = pattern_sets("bottleneck", 12, SIZES.values()).values()
    assert np.allclose(pattern_probabilities(sets, 12) * 27, [3, 3, 3, 2, 2, 1, 1, 1, 2, 3, 3, 3])
    assert pattern_probabilities([{0}, {0}, {0, 1}], 2).tolist() == [0.75, 0.25]
    assert pattern_probabilities([set(), set()], 4).tolist() == [0.25] * 4


# ---- fixed sets


def test_fixed_sets_follow_the_device():
    planner = PatternBlocks(SIZES)
    assert blocks_of(planner) == {
        "c000": tuple(range(12)),
        "c001": (0, 1, 2, 3, 4, 8, 9, 10, 11),
        "c002": (0, 1, 2, 9, 10, 11),
    }
    assert blocks_of(planner) == blocks_of(planner, replace(WORLD, server_round=7, seed=3))
    why = planner.plan({}, replace(WORLD, cohort=("c002",)))[0].why
    assert why == {"rule": "pattern", "pattern": "bottleneck", "sets": {"jetson-tx2": [0, 1, 2, 9, 10, 11]}}


def test_block_1_is_not_10_or_11():
    """Layer ids are numbers, never parts of names: blocks 0 and 1 alone bring four tensors."""
    world = replace(WORLD, cohort=("c002",))
    plan = PatternBlocks(SIZES | {"jetson-tx2": 2}, "shallow").plan({}, world)[0].clients[0]
    layout = global_layout(world.shape, "lora", {**dict.fromkeys(world.shape.blocks, 4), HEAD: 1})
    assert [s.target for s in layout.with_ranks(plan.ranks) if s.kind == "lora_A"] == [
        "encoder.layer.0.query",
        "encoder.layer.1.query",
    ]
    assert {10, 11} <= set(plan.reads)


def test_a_pattern_lies_over_the_blocks_that_can_be_trained():
    """Blocks 1, 4, 6, 9: both ends are 1 and 9."""
    planner = PatternBlocks({"laptop-16gb": 4, "jetson-nx": 2, "jetson-tx2": 1})
    partly = replace(WORLD, strata=(1, 4, 6, 9))
    assert blocks_of(planner, partly) == {"c000": (1, 4, 6, 9), "c001": (1, 9), "c002": (1,)}
    with pytest.raises(PlanError, match="only 4 can be trained"):
        blocks_of(PatternBlocks(SIZES), partly)


@pytest.mark.parametrize("make", [PatternBlocks, RandomPattern, FisherBlocks, CoDesign])
def test_all_mistakes_of_the_sizes_come_at_once(make):
    with pytest.raises(PlanError) as error:
        make({"jetson-xn": 2, "laptop-16gb": 13, "jetson-nx": 1}).init(WORLD.shape, WORLD.fleet)
    text = str(error.value)
    assert 'did you mean "jetson-nx"' in text
    assert "= 13, but the model has 12 blocks" in text
    assert 'nothing about the device kind "jetson-tx2"' in text


# ---- draws


def exact_sets(chances: list[float], count: int) -> dict[tuple[int, ...], float]:
    """P(S) of successive draws without replacement: Σ over orders of Π π_i/(1 − Σ of those before)."""
    found: Counter[tuple[int, ...]] = Counter()
    for order in itertools.permutations(range(len(chances)), count):
        p, left = 1.0, 1.0
        for item in order:
            p, left = p * chances[item] / left, left - chances[item]
        found[tuple(sorted(order))] += p
    return dict(found)


def chi_square(observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    total = sum(observed.values())
    assert set(observed) <= {s for s, p in expected.items() if p > 0}
    return sum((observed[s] - total * p) ** 2 / (total * p) for s, p in expected.items() if p > 0)


def test_ten_thousand_allocations_match_their_exact_distribution():
    """Sizes 3 and 5 of 5 by a bottleneck: π = 2,2,1,1,2 of 8. 10 sets: χ²(9) is above 27.9 once in 1000."""
    world = make_world(5, {"laptop-16gb": 1, "jetson-nx": 99})
    planner = RandomPattern({"laptop-16gb": 5, "jetson-nx": 3})
    observed: Counter[tuple[int, ...]] = Counter()
    for server_round in range(1, 103):
        drawn = blocks_of(planner, replace(world, server_round=server_round))
        assert drawn.pop("c000") == (0, 1, 2, 3, 4)
        observed.update(drawn.values())
    assert sum(observed.values()) == 99 * 102 > 10_000
    expected = exact_sets([2 / 8, 2 / 8, 1 / 8, 1 / 8, 2 / 8], 3)
    assert sum(expected.values()) == pytest.approx(1)
    assert chi_square(observed, expected) < 27.9
    assert chi_square(observed, exact_sets([1 / 5] * 5, 3)) > 100  # the test can tell them apart


def test_inclusion_is_not_count_times_chance():
    """π = .7, .2, .1 and two draws: the first block is in with .7 + .2·.7/.8 + .1·.7/.9 ≈ .953, not 1.4."""
    world = make_world(3, {"laptop-16gb": 100})
    times = 0
    for server_round in range(1, 41):
        now = replace(world, server_round=server_round)
        times += sum(0 in draw_blocks(np.array([0.7, 0.2, 0.1]), [0, 1, 2], c, 2, now) for c in world.cohort)
    exact = sum(p for s, p in exact_sets([0.7, 0.2, 0.1], 2).items() if 0 in s)
    assert exact == pytest.approx(0.7 + 0.2 * 0.7 / 0.8 + 0.1 * 0.7 / 0.9)
    assert abs(times / 4000 - exact) < 5 * np.sqrt(exact * (1 - exact) / 4000)


def test_draws_differ_by_seed_round_and_client():
    world = make_world(12, {"laptop-16gb": 1, "jetson-nx": 19})
    planner = RandomPattern({"laptop-16gb": 12, "jetson-nx": 6})
    drawn = [blocks_of(planner, replace(world, seed=s, server_round=r)) for s, r in ((0, 1), (1, 1), (0, 2))]
    assert len({tuple(d.values()) for d in drawn}) == 3
    assert len(set(drawn[0].values())) > 1


def test_with_one_group_the_chances_leave_only_its_set():
    world = make_world(12, {"laptop-16gb": 5})
    assert set(blocks_of(RandomPattern({"laptop-16gb": 6}), world).values()) == {(0, 1, 2, 9, 10, 11)}


def test_blocks_without_a_chance_are_never_drawn():
    with pytest.raises(PlanError, match="only 1 have a chance"):
        draw_blocks(np.array([1.0, 0.0]), [0, 1], "c000", 2, WORLD)
    for server_round in range(1, 50):
        assert draw_blocks(np.array([0.5, 0.0, 0.5]), [3, 4, 5], "a", 2, replace(WORLD, server_round=server_round)) == [
            3,
            5,
        ]


def test_the_record_has_chances_and_draws():
    why = RandomPattern(SIZES).plan({}, WORLD)[0].why
    assert why["probabilities"]["0"] == pytest.approx(3 / 27)
    assert {c: len(b) for c, b in why["drawn"].items()} == {"c000": 12, "c001": 9, "c002": 6}
    assert sum(why["times_drawn"].values()) == 27


def test_uniform_chances_draw_like_fedra():
    """One kind that trains everything has uniform chances; the stream is the same as that of `random_k`."""
    world = make_world(12, {"laptop-16gb": 1, "jetson-nx": 3})
    drawn = blocks_of(FisherBlocks({"laptop-16gb": 12, "jetson-nx": 4}), world)
    assert drawn == blocks_of(RandomBlocks({"laptop-16gb": 12, "jetson-nx": 4}), world)


# ---- scores


def test_pooled_scores_are_means_over_all_examples():
    """(1 + 5)/(2 + 4) and (3 + 9)/6, whatever the order and the type of the keys."""
    answers = {"b": {"sums": {"0": 5.0, "1": 9.0}, "count": 4}, "a": {"sums": {0: 1.0, 1: 3.0}, "count": 2}}
    assert pool_scores(answers, [0, 1]) == ({0: 1.0, 1: 2.0}, {"a": 2, "b": 4}, {})


def test_pooling_loses_no_small_numbers():
    """1e16 + 1 − … in float64 would lose the ones; fsum does not: 1e16 + 10·1 over 11 examples."""
    answers = {f"c{k:02d}": {"sums": {0: 1.0}, "count": 1} for k in range(10)}
    answers["a"] = {"sums": {0: 1e16}, "count": 1}
    assert pool_scores(answers, [0])[0] == {0: (1e16 + 10) / 11}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"sums": {0: 1.0}, "count": 1}, r"no sum for blocks \[1\]"),
        ({"sums": {0: 1.0, 1: float("nan")}, "count": 1}, "not finite"),
        ({"sums": {0: 1.0, 1: -1.0}, "count": 1}, "not finite"),
        ({"sums": {0: 1.0, 1: 1.0}, "count": 0}, "count = 0"),
        ({"count": 3}, "not of the form"),
        (None, "not of the form"),
    ],
)
def test_unusable_answers_are_left_out_and_named(answer, reason):
    good = {"sums": {0: 2.0, 1: 4.0}, "count": 2}
    scores, counts, refused = pool_scores({"bad": answer, "good": good}, [0, 1])
    assert scores == {0: 1.0, 1: 2.0}
    assert counts == {"good": 2}
    assert re.search(reason, refused["bad"])
    assert pool_scores({"bad": answer}, [0, 1])[0] is None


def test_proportional_chances_have_a_floor():
    """0.9·F/ΣF + 0.1/L: 0.9·6/8 + 0.025, …"""
    assert score_probabilities([6.0, 2.0, 0.0, 0.0], "proportional") == pytest.approx([0.7, 0.25, 0.025, 0.025])
    assert score_probabilities([0.0, 0.0], "proportional").tolist() == [0.5, 0.5]
    assert score_probabilities([1e300, 1e300], "proportional").tolist() == pytest.approx([0.5, 0.5])


def test_clusters_are_sorted_by_mean():
    """Whatever the order of the blocks, the highest cluster has weight 3: 3 + 1 + 2 + 1 of 7."""
    assert score_probabilities([90.0, 1.0, 40.0, 2.0], "clusters") == pytest.approx(np.array([3, 1, 2, 1]) / 7)
    assert score_probabilities([5.0, 1.0, 5.0], "clusters") == pytest.approx(np.array([2, 1, 2]) / 5)
    assert score_probabilities([5.0, 5.0], "clusters").tolist() == [0.5, 0.5]


def test_clusters_are_the_best_of_all_splits():
    """Every split of the sorted values into three intervals, tried one by one."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        values = np.round(rng.exponential(size=9), 1)
        labels = cluster_labels(values.tolist(), 3)

        def spread(parts):
            return sum(float(((p - p.mean()) ** 2).sum()) for p in parts)

        ordered = np.sort(values)
        best = min(spread(np.split(ordered, cut)) for cut in itertools.combinations(range(1, 9), 2))
        assert spread([values[labels == k] for k in range(3)]) == pytest.approx(best, abs=1e-12)
        means = [values[labels == k].mean() for k in range(3)]
        assert means == sorted(means)
        assert all(labels[i] == labels[j] for i in range(9) for j in range(9) if values[i] == values[j])


def test_inverted_scores_swap_first_and_last():
    assert control_scores({0: 5.0, 1: 1.0, 2: 3.0, 3: 9.0}, "inverted", 0, 1) == {0: 3.0, 1: 9.0, 2: 5.0, 3: 1.0}


def test_permuted_scores_keep_the_histogram_and_change_at_each_refresh():
    scores = {b: float(b * b) for b in range(12)}
    first, second = (control_scores(scores, "permuted", 7, r) for r in (3, 5))
    assert first == control_scores(scores, "permuted", 7, 3)
    assert sorted(first.values()) == sorted(second.values()) == sorted(scores.values())
    assert len({tuple(s.values()) for s in (scores, first, second, control_scores(scores, "permuted", 8, 3))}) == 4


# ---- when scores are asked for and used

SCORES = {b: float(b + 1) for b in range(12)}
ANSWERS = {"c000": {"sums": {str(b): 8 * f for b, f in SCORES.items()}, "count": 8}}
EXPECTED = [0.9 * (b + 1) / 78 + 0.1 / 12 for b in range(12)]


@pytest.mark.parametrize(
    ("num_rounds", "planner", "asked"),
    [
        (20, CoDesign(SIZES), [3, 5, 7, 9]),  # ⌊20/10 + ½⌋ = 2 warm rounds, then every second
        (25, CoDesign(SIZES), [4, 7, 10]),  # ⌊3.0⌋ = 3
        (4, CoDesign(SIZES), [2, 3, 4, 5, 6, 7, 8, 9, 10]),  # max(1, ⌊0.9⌋) = 1
        (20, FisherBlocks(SIZES), [1, 3, 5, 7, 9]),
        (20, CoDesign(SIZES, refresh=4, warm_rounds=1), [2, 6, 10]),
        (20, CoDesign(SIZES, importance="updates"), []),
    ],
)
def test_questions_come_at_the_scheduled_rounds(num_rounds, planner, asked):
    worlds = [replace(WORLD, num_rounds=num_rounds, server_round=r) for r in range(1, 11)]
    assert [w.server_round for w in worlds if planner.probes({}, w) is not None] == asked


def test_a_question_says_what_is_asked():
    planner = FisherBlocks(SIZES, fisher_on="weight", source="public", examples=32)
    options = {"source": "public", "fisher_on": "weight", "examples": 32, "strata": list(range(12))}
    assert planner.probes({}, WORLD) == Probes("fisher", options)


def run(planner, rounds: int, answers: dict[int, Any]) -> list[dict[str, Any]]:
    """Reasons of the first rounds; the state passes through JSON as in a checkpoint."""
    state, reasons = planner.init(WORLD.shape, WORLD.fleet), []
    for server_round in range(1, rounds + 1):
        world = replace(WORLD, server_round=server_round, answers=answers.get(server_round, {}))
        plan, state = planner.plan(json.loads(json.dumps(state)), world)
        reasons.append(dict(plan.why))
    return reasons


def test_scores_are_used_in_every_round_until_the_next():
    """Warm rounds 1 and 2 by the pattern; scores of round 3 in 3 and 4; new ones in 5."""
    later = {"c000": {"sums": {str(b): 12.0 - b for b in range(12)}, "count": 1}}
    reasons = run(CoDesign(SIZES), 6, {3: ANSWERS, 5: later})
    assert [r["phase"] for r in reasons] == ["pattern"] * 2 + ["scores"] * 4
    assert [r["scored_round"] for r in reasons] == [0, 0, 3, 3, 5, 5]
    assert list(reasons[0]["probabilities"].values()) == pytest.approx(
        np.array([3, 3, 3, 2, 2, 1, 1, 1, 2, 3, 3, 3]) / 27
    )
    assert list(reasons[2]["probabilities"].values()) == pytest.approx(EXPECTED)
    assert reasons[3]["probabilities"] == reasons[2]["probabilities"]
    assert list(reasons[4]["probabilities"].values()) == pytest.approx(EXPECTED[::-1])
    assert reasons[2]["scores"] == {str(b): f for b, f in SCORES.items()}
    assert reasons[2]["source"] == "client_heldout"
    assert reasons[2]["answers"] == {"c000": 8}


def test_without_any_answer_the_chances_stay_and_the_record_says_so():
    reasons = run(CoDesign(SIZES), 5, {3: ANSWERS, 5: {"c000": {"count": 0}}})
    assert reasons[4]["probabilities"] == reasons[3]["probabilities"]
    assert "stay as they were" in reasons[4]["note"]
    assert reasons[4]["refused_answers"] == {"c000": "not of the form {sums, count}"}
    assert "note" not in reasons[3]
    unasked = run(FisherBlocks(SIZES), 1, {})[0]
    assert set(unasked["probabilities"].values()) == {1 / 12}
    assert unasked["phase"] == "no scores yet"


def test_scores_before_the_first_update_say_that_only_lora_b_counts():
    assert "only gradients of lora_B" in run(FisherBlocks(SIZES), 1, {1: ANSWERS})[0]["note"]
    assert "note" not in run(FisherBlocks(SIZES, fisher_on="weight"), 1, {1: ANSWERS})[0]


def test_controls_change_the_chances_and_keep_the_scores():
    plain, inverted, permuted = (
        run(FisherBlocks(SIZES, control=c), 1, {1: ANSWERS})[0] for c in ("none", "inverted", "permuted")
    )
    assert plain["scores"] == inverted["scores"] == permuted["scores"]
    assert list(inverted["probabilities"].values()) == pytest.approx(EXPECTED[::-1])
    assert sorted(permuted["probabilities"].values()) == pytest.approx(sorted(EXPECTED))
    assert list(permuted["probabilities"].values()) != pytest.approx(EXPECTED)


def test_importance_without_a_proxy_comes_from_the_updates():
    """Scores 1 and 3, blocks that nobody held count like their mean 2; the head is no block."""
    planner = CoDesign(SIZES, importance="updates")
    state = planner.init(WORLD.shape, WORLD.fleet)
    state = planner.observe(state, {"statistics": {"mean_squared_delta": {"0": 9.0, "head": 5.0}}})
    state = planner.observe(state, {"statistics": {"mean_squared_delta": {"0": 1.0, "11": 3.0}}})
    state = planner.observe(planner.observe(state, {}), {"statistics": None})
    plan, state = planner.plan(state, replace(WORLD, server_round=3))
    assert plan.why["scores"] == {str(b): {0: 1.0, 11: 3.0}.get(b, 2.0) for b in range(12)}
    assert plan.why["never_held"] == list(range(1, 11))
    assert plan.why["phase"] == "scores"
    assert FisherBlocks(SIZES).observe({"updates": {}}, {"statistics": {"mean_squared_delta": {"0": 1.0}}}) == {
        "updates": {}
    }


def test_agreement_over_clients_may_score_blocks_too():
    """Each importance reads its own statistic; a logarithm below 0 counts as 0."""
    statistics = {"mean_squared_delta": {"0": 9.0}, "zico_clients": {"0": 4.0, "11": -2.0}}
    planner = CoDesign(SIZES, importance="zico_clients")
    state = planner.observe(planner.init(WORLD.shape, WORLD.fleet), {"statistics": statistics})
    plan, state = planner.plan(state, replace(WORLD, server_round=3))
    assert plan.why["scores"] == {str(b): {0: 4.0, 11: 0.0}.get(b, 2.0) for b in range(12)}


def test_wrong_schedules_are_refused():
    with pytest.raises(PlanError) as error:
        FisherBlocks(SIZES, refresh=0, examples=0, warm_rounds=-1).init(WORLD.shape, WORLD.fleet)
    for text in ("refresh = 0", "examples = 0", "warm_rounds = -1"):
        assert text in str(error.value)
