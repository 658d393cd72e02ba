"""Means per rank slice: values of an independent implementation and hand numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate import (
    AGGREGATORS,
    ClientUpdate,
    CohortMean,
    ExactnessProbe,
    FactorMean,
    MergeContext,
    NormWeightedPad,
    Proposal,
    RankSliceMean,
    SketchMean,
    sketch_slices,
)
from fedstrata.core.tensors import HEAD, Layout, TensorSpec
from fedstrata.errors import AggregationError

CASES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())["cases"]
A, B = "q.lora_A", "q.lora_B"
FLOAT32 = 1e-6


def pair_layout(rank: int, num_out: int = 5, num_in: int = 4, head: bool = False) -> Layout:
    specs = [TensorSpec(A, (rank, num_in), 0, "lora_A"), TensorSpec(B, (num_out, rank), 0, "lora_B")]
    return Layout((*specs, TensorSpec("head.bias", (2,), HEAD)) if head else tuple(specs))


def pair(client: str, n: int, a: Any, b: Any, slices: tuple[int, ...] = (), send: str = "weights") -> ClientUpdate:
    """A reply whose values are a and b, from a start of zeros."""
    values = {A: np.array(a, np.float32), B: np.array(b, np.float32)}
    layout = pair_layout(len(values[A]), len(values[B]), values[A].shape[1])
    return ClientUpdate(client, n, layout, layout.zeros(), values, send, slices={0: slices} if slices else {})


def replies_of(case: dict[str, Any]) -> list[ClientUpdate]:
    parts = zip(case["num_examples"], case["lora_A"], case["lora_B"], strict=True)
    return [pair(f"c{k}", n, a, b) for k, (n, a, b) in enumerate(parts)]


def merge(aggregator: Any, updates: list[ClientUpdate], current: dict[str, np.ndarray], layout: Layout) -> Proposal:
    acc = aggregator.zero(layout, MergeContext({"q": 4 / 3}))
    for update in updates:
        acc = aggregator.add(acc, update)
    return aggregator.finish(acc, current)


def sevens(layout: Layout) -> dict[str, np.ndarray]:
    return {s.name: np.full(s.shape, 7, np.float32) for s in layout}


# ---- rank_slice_mean


def test_rank_slices_are_averaged_over_those_who_have_them():
    case, layout = CASES["rank_slice_holders_mean"], pair_layout(3)
    merged = merge(RankSliceMean(), replies_of(case), sevens(layout), layout).tensors
    assert np.allclose(merged[A], case["expected_lora_A"], rtol=FLOAT32, atol=FLOAT32)
    assert np.allclose(merged[B], case["expected_lora_B"], rtol=FLOAT32, atol=FLOAT32)


def test_slices_that_nobody_has_keep_their_bits():
    """Ranks 1 and 2 on a server of rank 4 that holds −0 in slice 2: slices 2 and 3 stay, sign of zero included."""
    layout = pair_layout(4)
    current = sevens(layout)
    current[A][2], current[B][:, 2] = -0.0, -0.0
    updates = [pair("a", 1, np.ones((1, 4)), np.ones((5, 1))), pair("b", 3, 3 * np.ones((2, 4)), np.ones((5, 2)))]
    merged = merge(RankSliceMean(), updates, current, layout).tensors
    assert merged[A][:2].tolist() == [[2.5] * 4, [3.0] * 4]  # (1·1 + 3·3)/4, and b alone
    assert merged[A][2:].tobytes() == current[A][2:].tobytes()
    assert merged[B][:, 2:].tobytes() == current[B][:, 2:].tobytes()


def test_rank_slice_mean_at_equal_ranks_is_the_factor_mean():
    case, layout = CASES["factor_mean"], pair_layout(2)
    one, other = (merge(p, replies_of(case), sevens(layout), layout).tensors for p in (RankSliceMean(), FactorMean()))
    assert all(np.allclose(one[n], other[n], rtol=1e-6, atol=1e-7) for n in (A, B))


def test_a_slice_of_clients_without_examples_counts_as_not_covered():
    layout = pair_layout(2)
    updates = [pair("a", 1, np.ones((1, 4)), np.ones((5, 1))), pair("b", 0, 3 * np.ones((2, 4)), np.ones((5, 2)))]
    merged = merge(RankSliceMean(), updates, sevens(layout), layout).tensors
    assert merged[A].tolist() == [[1.0] * 4, [7.0] * 4]
    uniform = merge(RankSliceMean("uniform"), updates, sevens(layout), layout).tensors
    assert uniform[A].tolist() == [[2.0] * 4, [3.0] * 4]


@pytest.mark.parametrize("part", [RankSliceMean(), SketchMean(), NormWeightedPad()])
def test_larger_ranks_than_the_servers_and_other_sizes_are_refused(part):
    layout = pair_layout(2)
    for a, b, match in (
        (np.ones((3, 4)), np.ones((5, 3)), "same rank"),
        (np.ones((2, 3)), np.ones((5, 2)), "another shape"),
    ):
        with pytest.raises(AggregationError, match=match):
            merge(part, [pair("a", 1, a, b)], sevens(layout), layout)


@pytest.mark.parametrize("part", [p for p in AGGREGATORS if p != "sketch_mean" and AGGREGATORS[p].unequal_ranks])
def test_drawn_slices_are_for_the_sketch_only(part):
    layout = pair_layout(3)
    with pytest.raises(AggregationError, match="leading rank slices only"):
        merge(AGGREGATORS.build(part), [pair("a", 1, np.ones((1, 4)), np.ones((5, 1)), (2,))], sevens(layout), layout)


# ---- norm_weighted_pad


def test_hetlora_weighs_padded_factors_by_the_norm_of_the_product():
    case, layout = CASES["hetlora"], pair_layout(3)
    proposal = merge(NormWeightedPad(), replies_of(case), sevens(layout), layout)
    assert np.allclose(proposal.tensors[A], case["expected_lora_A"], rtol=FLOAT32, atol=FLOAT32)
    assert np.allclose(proposal.tensors[B], case["expected_lora_B"], rtol=FLOAT32, atol=FLOAT32)
    assert list(proposal.weights["q"].values()) == pytest.approx(case["expected_weights"], rel=1e-6)


def test_the_probe_measures_hetlora_with_its_own_weights():
    case, layout, part = CASES["hetlora"], pair_layout(3), NormWeightedPad()
    probe = ExactnessProbe(layout, {"q": 4 / 3}, part)
    for u in replies_of(case):
        probe.add(u)
    found = probe.finish(merge(part, replies_of(case), sevens(layout), layout), layout.zeros())
    assert found["exactness_error"] == pytest.approx(case["expected_relative_exactness_error"], rel=1e-5)


def test_one_client_keeps_its_slices_and_the_server_the_others():
    layout = pair_layout(3)
    merged = merge(NormWeightedPad(), [pair("a", 9, np.ones((2, 4)), np.ones((5, 2)))], sevens(layout), layout).tensors
    assert merged[A].tolist() == [[1.0] * 4, [1.0] * 4, [7.0] * 4]
    assert merged[B][0].tolist() == [1.0, 1.0, 7.0]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (1, 2, 0)])
def test_clients_without_a_product_have_no_weight_beside_those_with_one(order):
    """Products 0, 0 and not 0: ω = (0, 0, 1), whatever the order; the zeros' slice 1 is kept as uncovered."""
    layout = pair_layout(2)
    sent = [
        (np.full((2, 4), 5.0), np.zeros((5, 2))),
        (np.zeros((1, 4)), np.full((5, 1), 5.0)),
        (np.ones((1, 4)), np.ones((5, 1))),
    ]
    updates = [pair(f"c{i}", 10, *sent[k]) for i, k in enumerate(order)]
    proposal = merge(NormWeightedPad(), updates, sevens(layout), layout)
    assert proposal.tensors[A].tolist() == [[1.0] * 4, [7.0] * 4]
    assert proposal.weights["q"] == {f"c{i}": float(k == 2) for i, k in enumerate(order)}


def test_where_all_products_are_zero_the_examples_count():
    """B = 0 everywhere; n = 1 and 3, ranks 1 and 2: slice 0 of A is (1·1 + 3·2)/4, slice 1 is padded: 3·2/4."""
    layout = pair_layout(2)
    updates = [pair("a", 1, np.ones((1, 4)), np.zeros((5, 1))), pair("b", 3, 2 * np.ones((2, 4)), np.zeros((5, 2)))]
    proposal = merge(NormWeightedPad(), updates, sevens(layout), layout)
    assert proposal.weights["q"] == {"a": 0.25, "b": 0.75}
    assert proposal.tensors[A].tolist() == [[1.75] * 4, [1.5] * 4]
    assert not proposal.tensors[B].any()
    uniform = merge(NormWeightedPad("uniform"), updates, sevens(layout), layout)
    assert uniform.tensors[A].tolist() == [[1.5] * 4, [1.0] * 4]


def test_norms_are_taken_target_by_target_and_the_head_by_examples():
    """In q the norms of a and b are 1 : 3, in v 3 : 1; the head is (1·0 + 3·4)/4 = 3."""
    specs = [
        TensorSpec(f"{t}.lora_{x}", (1, 1), 0, f"lora_{x}")  # type: ignore[arg-type]
        for t in ("q", "v")
        for x in "AB"
    ]
    layout = Layout((*specs, TensorSpec("head.bias", (1,), HEAD)))
    updates = []
    for client, n, b_q, b_v, head in (("a", 1, 1, 3, 0), ("b", 3, 3, 1, 4)):
        numbers = {"q.lora_A": 1, "q.lora_B": b_q, "v.lora_A": 1, "v.lora_B": b_v, "head.bias": head}
        values = {s.name: np.full(s.shape, numbers[s.name], np.float32) for s in layout}
        updates.append(ClientUpdate(client, n, layout, layout.zeros(), values))
    proposal = merge(NormWeightedPad(), updates, layout.zeros(), layout)
    assert {t: [round(q, 12) for q in w.values()] for t, w in proposal.weights.items()} == {
        "q": [0.25, 0.75],
        "v": [0.75, 0.25],
    }
    assert proposal.tensors["head.bias"].tolist() == [3]
    assert proposal.tensors["q.lora_B"].item() == pytest.approx(2.5)  # (1·1 + 3·3)/4


# ---- sketch_mean


def test_sketches_add_differences_where_the_client_had_slices():
    """n = 1 with slice 2, n = 3 with slices 0 and 2: 7 + 3·1/4, 7, 7 + (1·2 + 3·1)/4."""
    layout = pair_layout(3)
    updates = [
        pair("a", 1, 2 * np.ones((1, 4)), 2 * np.ones((5, 1)), (2,), "delta"),
        pair("b", 3, np.ones((2, 4)), np.ones((5, 2)), (0, 2), "delta"),
    ]
    proposal = merge(SketchMean(), updates, sevens(layout), layout)
    assert proposal.tensors[A][:, 0].tolist() == [7.75, 7, 8.25]
    assert proposal.tensors[B][0].tolist() == [7.75, 7, 8.25]
    assert proposal.statistics["denominator"] == "cohort"


def test_clients_that_do_not_hold_the_block_dilute_a_sketch():
    """b (n = 3) trains the head alone: Δ = 4 of a (n = 1) counts a quarter; the head moves by 3·4/4 = 3."""
    layout = pair_layout(1, head=True)
    head = layout.restrict([HEAD])
    sent = ClientUpdate("b", 3, head, head.zeros(), {"head.bias": np.full(2, 4, np.float32)})
    updates = [pair("a", 1, 4 * np.ones((1, 4)), np.zeros((5, 1)), send="delta"), sent]
    merged = merge(SketchMean(), updates, sevens(layout), layout).tensors
    assert merged[A].tolist() == [[8.0] * 4]
    assert merged["head.bias"].tolist() == [10, 10]


def test_a_sketch_of_all_slices_is_the_cohort_mean():
    case, layout = CASES["factor_mean"], pair_layout(2)
    one, other = (merge(p, replies_of(case), sevens(layout), layout).tensors for p in (SketchMean(), CohortMean()))
    assert all(np.array_equal(one[n], other[n]) for n in (A, B))


@pytest.mark.parametrize("slices", [(0, 0), (0, 3), (-1, 0), (0,)])
def test_slices_that_make_no_sense_are_refused(slices):
    layout = pair_layout(3)
    with pytest.raises(AggregationError, match="make no sense"):
        merge(SketchMean(), [pair("a", 1, np.ones((2, 4)), np.ones((5, 2)), slices)], sevens(layout), layout)


def test_sketches_are_drawn_per_seed_round_and_client():
    drawn = {
        (seed, r, c): sketch_slices(seed, r, c, 64, 8)
        for seed, r, c in ((0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b"))
    }
    assert len(set(drawn.values())) == 4
    assert drawn[0, 1, "a"] == sketch_slices(0, 1, "a", 64, 8)
    assert all(list(s) == sorted(set(s)) and len(s) == 8 for s in drawn.values())
    assert set(sketch_slices(0, 1, "a", 64, 4)) < set(drawn[0, 1, "a"])
    assert sketch_slices(0, 1, "a", 5, 5) == (0, 1, 2, 3, 4)
    for count in (0, 6):
        with pytest.raises(AggregationError, match="1 to 5"):
            sketch_slices(0, 1, "a", 5, count)


def test_every_slice_is_drawn_equally_often():
    """2,000 draws of 2 of 8: each slice 500 times, standard deviation √(2000·¼·¾) = 19.4; four of them allowed."""
    counts = np.zeros(8)
    for r in range(2000):
        counts[list(sketch_slices(3, r, "a", 8, 2))] += 1
    assert np.abs(counts - 500).max() < 4 * 19.4


def test_the_probe_compares_drawn_slices_with_the_servers_same_slices():
    """One client with slice 1 of a server that holds nothing else: D_s = s·b·a at that slice, error 0."""
    layout, part = pair_layout(2), SketchMean()
    update = pair("a", 1, np.ones((1, 4)), np.ones((5, 1)), (1,), "delta")
    probe = ExactnessProbe(layout, {"q": 2.0}, part)
    probe.add(update)
    found = probe.finish(merge(part, [update], layout.zeros(), layout), layout.zeros())
    assert found["exactness_error"] == pytest.approx(0, abs=1e-7)
