"""Selectors by hand: groups, portions, ties, flags, fallbacks, products, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate.base import Proposal
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, NamedTensors, Stratum, TensorSpec
from fedstrata.errors import AggregationError, ConfigError
from fedstrata.select import SELECTORS, AcceptLast, AcceptRandom, SelectContext, TopBlocks
from fedstrata.select.groups import block_groups
from fedstrata.select.scores import delta_stats, product_stats, zico_clients


def blocks_layout(num_blocks: int, size: int = 4) -> Layout:
    return Layout(tuple(TensorSpec(f"b{b}", (size,), b) for b in range(num_blocks)))


def proposal_of(layout: Layout, deltas: dict[str, Any], holders: int = 5, **more: Any) -> Proposal:
    """Moves from zero; tensors that are not named do not move."""
    tensors = layout.zeros() | {n: np.array(d, np.float32).reshape(layout[n].shape) for n, d in deltas.items()}
    return Proposal(tensors, dict.fromkeys(layout.strata, holders), layout=layout, **more)


def select(selector, proposal: Proposal, current: NamedTensors | None = None, server_round: int = 1, seed: int = 0):
    context = SelectContext(proposal.layout, current or proposal.layout.zeros(), server_round, seed)
    accepted, state, why = selector.select(selector.init(), proposal, context)
    assert state == {}
    assert json.loads(json.dumps(why, allow_nan=False)) == why
    return accepted, why


def wave(mean: float) -> list[float]:
    """Mean `mean`, std 1: x = |mean|, key = √(1 + mean²) − 1."""
    return [mean + 1, mean - 1, mean + 1, mean - 1]


# ---- groups


def test_blocks_of_other_shapes_do_not_compete():
    specs = [TensorSpec(f"b{b}", (4,) if b < 4 else (2, 3), b) for b in range(6)]
    groups, alone = block_groups(Layout(tuple(specs)), dict.fromkeys(range(6), 1))
    assert [(g.blocks, g.candidates) for g in groups] == [((0, 1, 2, 3),) * 2, ((4, 5),) * 2]
    assert alone == []


def test_embeddings_and_head_stand_alone_even_with_a_blocks_shapes():
    strata: list[Stratum] = ["embeddings", 0, 1, "head"]
    layout = Layout(tuple(TensorSpec(f"t{s}", (4,), s) for s in strata))
    groups, alone = block_groups(layout, dict.fromkeys(strata, 1))
    assert [g.blocks for g in groups] == [(0, 1)]
    assert alone == ["embeddings", "head"]


def test_a_block_whose_siblings_nobody_held_still_belongs_to_its_group():
    groups, alone = block_groups(blocks_layout(3), {1: 2})
    assert [(g.blocks, g.candidates) for g in groups] == [((0, 1, 2), (1,))]
    assert alone == []


@pytest.mark.parametrize("make", [TopBlocks, AcceptRandom, AcceptLast], ids=lambda c: c.id)
@pytest.mark.parametrize("update", [True, False])
def test_strata_that_stand_alone_are_always_accepted_or_never(make, update):
    layout = Layout((*blocks_layout(4).specs, TensorSpec("odd", (7,), 4), TensorSpec("classifier", (2, 3), "head")))
    proposal = proposal_of(layout, {n: np.ones(layout[n].shape) for n in layout.names})
    accepted, why = select(make(0.5, update_singletons=update), proposal)
    assert why["singletons"] == ["4", "head"]
    assert (set(accepted.holders) >= {4, "head"}) == update
    assert len(accepted.holders) == 2 + 2 * update


@pytest.mark.parametrize("make", [TopBlocks, AcceptRandom, AcceptLast], ids=lambda c: c.id)
def test_the_portion_counts_blocks_with_a_holder_only(make):
    # 6 blocks, 3 of them held: S = floor(0.5·3 + 0.5) = 2, not 3
    layout = blocks_layout(6)
    held = {1, 2, 4}
    whole = proposal_of(layout, {f"b{b}": wave(b) for b in held})
    accepted, why = select(make(0.5), whole.restrict(held))
    assert len(accepted.holders) == 2
    assert set(accepted.holders) <= held
    assert why["groups"][0]["candidates"] == ["1", "2", "4"]


# ---- the score


def test_the_most_consistent_blocks_win_whatever_their_magnitude():
    # x = 0.1, 2, 0, 1: keys sqrt(1 + x²) − 1 = 0.00499, 1.236, 0, 0.4142
    layout = blocks_layout(4)
    deltas = {"b0": 100 * np.array(wave(0.1)), "b1": 1e-3 * np.array(wave(2)), "b2": wave(0), "b3": wave(1)}
    accepted, why = select(TopBlocks(0.5), proposal_of(layout, deltas))
    assert why["accepted"] == ["1", "3"]
    assert why["keys"]["1"] == pytest.approx(math.sqrt(5) - 1, rel=1e-5)
    assert why["scores"]["3"] == pytest.approx(math.sqrt(2), rel=1e-5)
    assert sorted(accepted.tensors) == ["b1", "b3"]


def test_score_is_taken_from_what_changes_and_not_from_the_weights():
    layout = blocks_layout(2)
    current = {"b0": np.array([8, 2, 4, 2], np.float32), "b1": np.array([1, 1, 1, 2], np.float32)}
    new = {"b0": current["b0"] + np.float32([1, -1, 1, -1]), "b1": current["b1"] + np.float32([2, 0, 2, 0])}
    _, why = select(TopBlocks(0.5), Proposal(new, {0: 1, 1: 1}, layout=layout), current)
    assert why["keys"] == {"0": 0.0, "1": pytest.approx(math.sqrt(2) - 1, rel=1e-12)}


def test_keys_keep_their_digits_where_scores_agree_in_seven():
    # x = 1e-5 and 2e-5: keys x²/2 = 5e-11 and 2e-10, but √(1 + x²) agree to 10 digits
    signs = np.tile([1.0, -1.0], 5000)
    low, high = (delta_stats("w", x + signs, np.zeros(10_000)).excess for x in (1e-5, 2e-5))
    assert (low, high) == (pytest.approx(5e-11, rel=1e-6), pytest.approx(2e-10, rel=1e-6))


def test_std_is_that_of_the_population_over_many_chunks():
    new = generator(0, "stats").standard_normal(100_000).astype(np.float32) * 3 + 100
    stats = delta_stats("w", new.reshape(1000, 100), np.full((1000, 100), 7, np.float32))
    expected = new.astype(np.float64) - 7
    assert stats.mean == pytest.approx(expected.mean(), rel=1e-13)
    assert stats.std == pytest.approx(expected.std(ddof=0), rel=1e-12)


def test_tensors_with_one_entry_are_left_out():
    layout = Layout(tuple(s for b in (0, 1) for s in (TensorSpec(f"w{b}", (4,), b), TensorSpec(f"s{b}", (1,), b))))
    _, why = select(TopBlocks(0.5), proposal_of(layout, {"w0": wave(0), "s0": [5], "w1": wave(1)}))
    assert why["accepted"] == ["1"]
    assert why["flagged"] == {}
    assert why["scores"] == {"0": 1.0, "1": pytest.approx(math.sqrt(2), rel=1e-6)}


def test_block_that_did_not_move_comes_last_even_behind_a_key_of_zero():
    layout = blocks_layout(2)
    _, why = select(TopBlocks(0.5), proposal_of(layout, {"b1": wave(0)}))
    assert why["keys"] == {"0": 0.0, "1": 0.0}
    assert why["scores"] == {"0": 0.0, "1": 1.0}
    assert why["accepted"] == ["1"]
    assert why["ties"] == []


def test_of_equal_keys_the_lower_block_wins_and_the_tie_is_recorded():
    layout = blocks_layout(4)
    deltas = {"b0": wave(0), "b1": wave(1), "b2": wave(1), "b3": wave(2)}
    _, why = select(TopBlocks(0.5), proposal_of(layout, deltas))
    assert why["accepted"] == ["1", "3"]
    assert why["ties"] == [["1", "2"]]


def test_a_tie_that_decides_nothing_is_not_recorded():
    layout = blocks_layout(4)
    _, why = select(TopBlocks(0.5), proposal_of(layout, {"b0": wave(1), "b1": wave(1), "b2": wave(0), "b3": wave(0.1)}))
    assert why["accepted"] == ["0", "1"]
    assert why["ties"] == []


def test_constant_move_is_infinite_in_the_ranking_and_null_in_the_record():
    layout = blocks_layout(2)
    _, why = select(TopBlocks(0.5), proposal_of(layout, {"b0": wave(3), "b1": [0.1] * 4}))
    assert why["accepted"] == ["1"]
    assert why["keys"]["1"] is None
    assert why["scores"]["1"] is None
    assert why["flagged"] == {"1": ["b1"]}
    assert "block 1: b1 moved by one and the same number" in why["warnings"][0]


@pytest.mark.parametrize(("factor", "flat"), [(0.99, True), (1.01, False)])
def test_keys_within_a_thousandth_are_numerically_flat(factor, flat):
    # key(x) = 1e-3·factor where x = √((1 + key)² − 1); the other key is 0
    x = math.sqrt((1 + 1e-3 * factor) ** 2 - 1)
    _, why = select(TopBlocks(0.5), proposal_of(blocks_layout(2), {"b0": wave(x), "b1": wave(0)}))
    assert why["groups"][0]["key_range"] == pytest.approx(1e-3 * factor, rel=1e-3)
    assert why["flat"] == ([["0", "1"]] if flat else [])
    assert any("numerically flat" in w for w in why["warnings"]) == flat


def test_one_candidate_is_not_called_flat():
    layout = blocks_layout(2)
    _, why = select(TopBlocks(0.5), proposal_of(layout, {"b0": wave(0)}).restrict([0]))
    assert why["accepted"] == ["0"]
    assert why["flat"] == []


# ---- magnitude


def test_magnitude_is_the_root_mean_square_of_the_whole_block():
    layout = Layout(tuple(s for b in (0, 1) for s in (TensorSpec(f"w{b}", (3,), b), TensorSpec(f"s{b}", (1,), b))))
    # block 0: √((9 + 16 + 0 + 25)/4); block 1: √((0 + 0 + 0 + 100)/4)
    _, why = select(
        TopBlocks(0.5, score="magnitude"),
        proposal_of(layout, {"w0": [3, 4, 0], "s0": [-5], "w1": [0, 0, 0], "s1": [10]}),
    )
    assert why["keys"] == {"0": pytest.approx(math.sqrt(12.5)), "1": pytest.approx(5.0)}
    assert why["accepted"] == ["1"]


def test_magnitude_is_flat_by_its_relative_range():
    layout = blocks_layout(2)
    for difference, flat in ((1.0005, True), (1.002, False)):
        deltas = {"b0": np.array(wave(0)) * 1e-5, "b1": np.array(wave(0)) * 1e-5 * difference}
        _, why = select(TopBlocks(0.5, score="magnitude"), proposal_of(layout, deltas))
        assert bool(why["flat"]) == flat


# ---- zico


def moments_of(deltas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return deltas.sum(axis=0), (deltas**2).sum(axis=0)


def test_zico_is_the_log_of_summed_means_over_spreads():
    clients = generator(0, "zico").standard_normal((5, 2, 3))
    clients[:, 0, 0] = 0.1  # std 0: skipped
    mean, std = clients.mean(axis=0), clients.std(axis=0)
    used = np.array([[False, True, True], [True, True, True]])
    expected = math.log((np.abs(mean) / np.where(used, std, 1))[used].sum())
    score = zico_clients([moments_of(clients), moments_of(np.full((5, 4), 0.3))], 5)
    assert score.key == pytest.approx(expected, rel=1e-9)  # the second tensor has no spread at all


def zico_proposal(holders: dict[int, int]) -> Proposal:
    layout = blocks_layout(len(holders))
    means = {f"b{b}": wave(b) for b in range(len(holders))}
    noise = generator(1, "clients").standard_normal((5, 4))
    moments = {f"b{b}": moments_of(10.0**-b + noise[:n]) for b, n in holders.items()}  # block 0 is the steadiest
    return Proposal(proposal_of(layout, means).tensors, dict(holders), moments=moments, layout=layout)


@pytest.mark.parametrize("num_holders", [4, 5])
def test_zico_ranks_by_the_clients_agreement_and_not_by_the_mean(num_holders):
    _, why = select(TopBlocks(0.3, score="zico_clients"), zico_proposal(dict.fromkeys(range(3), num_holders)))
    assert why["accepted"] == ["0"]
    assert why["fallback"] is None
    assert why["groups"][0]["scored_by"] == "zico_clients"


def test_zico_with_fewer_than_four_holders_falls_back_and_says_so():
    proposal = zico_proposal({0: 5, 1: 3, 2: 5})
    _, why = select(TopBlocks(0.3, score="zico_clients"), proposal)
    _, plain = select(TopBlocks(0.3), proposal)
    assert why["accepted"] == plain["accepted"] == ["2"]
    assert why["keys"] == plain["keys"]
    assert why["fallback"] == [{"score": "consistency", "num_holders": {"1": 3}}]
    assert "zico_clients needs 4 holders, but block 1 has 3" in why["warnings"][-1]


def test_zico_without_moments_is_an_error_that_says_what_to_do():
    with pytest.raises(AggregationError, match="moments"):
        select(TopBlocks(score="zico_clients"), proposal_of(blocks_layout(2), {"b0": wave(1)}))


# ---- LoRA


def lora_layout(num_blocks: int, rank: int = 2) -> Layout:
    specs = []
    for b in range(num_blocks):
        for t in ("q", "v"):
            specs.append(TensorSpec(f"{b}.{t}.lora_A", (rank, 4), b, "lora_A"))
            specs.append(TensorSpec(f"{b}.{t}.lora_B", (6, rank), b, "lora_B"))
    return Layout(tuple(specs))


def random_tensors(layout: Layout, *path: str | int) -> NamedTensors:
    return {s.name: generator(0, *path, s.name).standard_normal(s.shape, dtype=np.float32) for s in layout}


@pytest.mark.parametrize("score_on", ["factors", "product"])
def test_accepting_a_block_takes_both_factors_of_all_its_pairs(score_on):
    layout = lora_layout(4)
    proposal = Proposal(random_tensors(layout, "new"), dict.fromkeys(range(4), 5), layout=layout)
    accepted, why = select(TopBlocks(0.5, score_on=score_on), proposal, random_tensors(layout, "old"))
    assert set(accepted.tensors) == {s.name for s in layout if str(s.stratum) in why["accepted"]}
    assert len(accepted.tensors) == 8


def test_product_statistics_equal_those_of_the_dense_difference():
    old_a, new_a = (generator(0, "a", i).standard_normal((3, 5)) for i in (0, 1))
    old_b, new_b = (generator(0, "b", i).standard_normal((7, 3)) for i in (0, 1))
    dense = new_b @ new_a - old_b @ old_a
    stats = product_stats("q", (new_a, new_b), (old_a, old_b))
    assert stats.size == 35
    assert (stats.mean, stats.std) == (pytest.approx(dense.mean(), rel=1e-12), pytest.approx(dense.std(), rel=1e-12))
    assert stats.rms == pytest.approx(np.sqrt((dense**2).mean()), rel=1e-12)


def test_product_statistics_keep_their_digits_for_small_steps():
    # Δ = ε·(U·A + B·V) + ε²·U·V, computed term by term as the reference
    rng = generator(0, "small")
    a, v = rng.standard_normal((2, 2, 5))
    b, u = rng.standard_normal((2, 7, 2))
    step = 2.0**-30
    small = u @ a + b @ v + step * (u @ v)
    stats = product_stats("q", (a + step * v, b + step * u), (a, b))
    assert stats.mean / step == pytest.approx(small.mean(), rel=1e-6)  # a + εv itself is rounded
    assert stats.std / step == pytest.approx(small.std(), rel=1e-6)


def test_equal_factors_have_a_product_that_did_not_move():
    a, b = generator(0, "a").standard_normal((2, 4)), generator(0, "b").standard_normal((6, 2))
    assert product_stats("q", (a, b), (a, b)).rms == 0
    assert product_stats("q", (a, np.zeros((6, 2))), (2 * a, np.zeros((6, 2)))).rms == 0


def test_constant_product_is_flagged():
    a, b = np.ones((1, 4)), np.full((6, 1), 0.1)
    assert product_stats("q", (a, b), (a, np.zeros((6, 1)))).is_constant


def test_product_score_does_not_see_how_a_product_is_split():
    layout = lora_layout(3)
    old, new = random_tensors(layout, "old"), random_tensors(layout, "new")
    other = {n: t * np.float32(4 if n.endswith("A") else 0.25) for n, t in new.items()}
    holders = dict.fromkeys(range(3), 5)
    results = {}
    for score_on in ("product", "factors"):
        pair = [select(TopBlocks(score_on=score_on), Proposal(t, holders, layout=layout), old)[1] for t in (new, other)]
        results[score_on] = [np.array(list(why["keys"].values())) for why in pair]
    assert np.allclose(*results["product"], rtol=1e-10)
    assert not np.allclose(*results["factors"], rtol=1e-3)


def test_product_with_one_factor_in_the_proposal_takes_the_other_from_the_server():
    layout = lora_layout(2)
    old, new = random_tensors(layout, "old"), random_tensors(layout, "new")
    only_b = {n: t for n, t in new.items() if n.endswith("lora_B")}
    _, why = select(TopBlocks(score_on="product"), Proposal(only_b, {0: 5, 1: 5}, layout=layout), old)
    expected = 0.0
    for t in ("q", "v"):
        a, b0, b1 = (x.astype(np.float64) for x in (old[f"0.{t}.lora_A"], old[f"0.{t}.lora_B"], new[f"0.{t}.lora_B"]))
        dense = (b1 - b0) @ a
        expected += math.sqrt(1 + (dense.mean() / dense.std()) ** 2) - 1
    assert why["keys"]["0"] == pytest.approx(expected, rel=1e-9)


# ---- the baselines


def test_last_blocks_are_the_largest_ids_with_a_holder():
    proposal = proposal_of(blocks_layout(6), {}).restrict([0, 1, 2, 4])
    assert select(AcceptLast(0.5), proposal)[1]["accepted"] == ["2", "4"]


def test_random_blocks_follow_seed_and_round_and_reach_every_block_equally():
    # 2000 rounds, S = 2 of 6: expected 666.7 times each, standard deviation √(2000·⅓·⅔) = 21.1
    proposal = proposal_of(blocks_layout(6), {})
    selector = AcceptRandom(1 / 3)
    times = dict.fromkeys("012345", 0)
    for server_round in range(2000):
        accepted = select(selector, proposal, server_round=server_round)[1]["accepted"]
        assert len(accepted) == 2
        for b in accepted:
            times[b] += 1
    assert all(abs(n - 2000 / 3) < 5 * 21.1 for n in times.values())
    runs = [[select(selector, proposal, None, r, s)[1]["accepted"] for r in range(20)] for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_random_blocks_draw_from_the_named_stream():
    keys = generator(3, "selector", 7).gumbel(size=5)
    accepted = select(AcceptRandom(0.4), proposal_of(blocks_layout(5), {}), server_round=7, seed=3)[1]["accepted"]
    assert accepted == sorted(str(b) for b in np.argsort(-keys)[:2])


# ---- options


@pytest.mark.parametrize("selector", ["top_blocks", "random_blocks", "last_blocks"])
@pytest.mark.parametrize("portion", [0.0, -0.5, 1.01, math.nan])
def test_portion_outside_zero_to_one_is_refused(selector, portion):
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        SELECTORS.build({"id": selector, "portion": portion})


def test_wrong_scores_are_all_named_at_once():
    with pytest.raises(ConfigError) as error:
        TopBlocks(score="consistent", score_on="products")  # type: ignore[arg-type]
    assert 'did you mean "consistency"' in str(error.value)
    assert 'did you mean "product"' in str(error.value)


def test_zico_on_products_is_refused():
    with pytest.raises(ConfigError, match="factors"):
        TopBlocks(score="zico_clients", score_on="product")


def test_only_zico_asks_the_aggregator_for_moments():
    assert [TopBlocks(score=s).needs_moments for s in ("consistency", "magnitude", "zico_clients")] == [
        False,
        False,
        True,
    ]
