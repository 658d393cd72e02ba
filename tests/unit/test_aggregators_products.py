"""Aggregators that form products: values of an independent implementation, hand numbers and memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate import (
    AGGREGATORS,
    ClientUpdate,
    ExactnessProbe,
    MergeContext,
    ProductMean,
    Proposal,
    Raflora,
    Stack,
    hand_out,
)
from fedstrata.aggregate.product import slice_weighted
from fedstrata.core.lora import LoraTerm, init_lora, product
from fedstrata.core.tensors import HEAD, Layout, TensorSpec

CASES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())["cases"]
OUT, IN = 5, 4
A, B = "q.lora_A", "q.lora_B"


def pair_layout(rank: int, num_out: int = OUT, num_in: int = IN, head: bool = False) -> Layout:
    specs = [TensorSpec(A, (rank, num_in), 0, "lora_A"), TensorSpec(B, (num_out, rank), 0, "lora_B")]
    return Layout((*specs, TensorSpec("head.bias", (2,), HEAD)) if head else tuple(specs))


def pair(client: str, n: int, a: Any, b: Any, *, scaling: float | None = None, start: Any = None) -> ClientUpdate:
    """A reply with the local values a and b, sent as they are or, with a start, as differences."""
    local = {A: np.array(a, np.float32), B: np.array(b, np.float32)}
    layout = pair_layout(len(local[A]), local[B].shape[0], local[A].shape[1])
    begin = start or layout.zeros()
    values = {x: t - begin[x] for x, t in local.items()} if start else local
    scalings = {} if scaling is None else {"q": scaling}
    return ClientUpdate(client, n, layout, begin, values, "delta" if start else "weights", scaling=scalings)


def replies_of(case: dict[str, Any], scaling: float | None = None) -> list[ClientUpdate]:
    """The clients of a case, with s_k = alpha/r_k or one scaling for all."""
    parts = zip(case["num_examples"], case["lora_A"], case["lora_B"], strict=True)
    return [pair(f"c{k}", n, a, b, scaling=scaling or case["alpha"] / len(a)) for k, (n, a, b) in enumerate(parts)]


def terms_of(case: dict[str, Any], scaling: float | None = None) -> list[LoraTerm]:
    total = sum(case["num_examples"])
    parts = zip(case["num_examples"], case["lora_A"], case["lora_B"], strict=True)
    return [LoraTerm(np.array(a), np.array(b), scaling or case["alpha"] / len(a), n / total) for n, a, b in parts]


def merge(aggregator: Any, updates: list[ClientUpdate], rank: int, scaling: float, **options: Any) -> Proposal:
    layout = options.pop("layout", None) or pair_layout(rank)
    current = options.pop("current", None) or init_lora(7, layout) | {"head.bias": np.zeros(2, np.float32)}
    acc = aggregator.zero(layout, MergeContext({"q": scaling}, seed=7, server_round=1))
    for update in updates:
        acc = aggregator.add(acc, update)
    return aggregator.finish(acc, current)


def effective(proposal: Proposal, scaling: float) -> np.ndarray:
    """What the server's model adds to this round's base: s·B·A and the base update."""
    dense = product(LoraTerm(proposal.tensors[A], proposal.tensors[B], scaling))
    for left, right in proposal.base_update.values():
        dense = dense + left.astype(np.float64) @ right
    return dense


def close(actual: Any, expected: Any, tolerance: float = 1e-9) -> bool:
    return np.allclose(actual, np.array(expected), rtol=tolerance, atol=tolerance)


def truncated(matrix: Any, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(np.array(matrix))
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


FLOAT32 = 2e-6
"""Inputs of order 1 that pass through float32, and the final cast."""


# ---- product_mean


def test_product_mean_is_the_truncated_mean_of_products():
    """Server rank 3, s = 4/3; three singular values of four are kept: tail = σ_4²/Σσ²."""
    case = CASES["product_mean"]
    proposal = merge(ProductMean(), replies_of(case), 3, 4 / 3)
    assert close(effective(proposal, 4 / 3), truncated(case["expected_product"], 3), FLOAT32)
    energy = np.array(case["expected_singular_values"]) ** 2
    assert proposal.statistics["tail_ratio"]["q"] == pytest.approx(energy[3] / energy.sum(), rel=1e-3)
    assert proposal.statistics["denominator"] == "holders"


def test_product_mean_balances_its_factors():
    """B = U·√(S/s), A = √(S/s)·Vᵀ: columns of B and rows of A have the same norms, √(σ_i/s)."""
    case = CASES["product_mean"]
    merged = merge(ProductMean(), replies_of(case), 3, 4 / 3).tensors
    expected = np.sqrt(np.array(case["expected_singular_values"][:3]) / (4 / 3))
    assert close(np.linalg.norm(merged[B], axis=0), expected, FLOAT32)
    assert close(np.linalg.norm(merged[A], axis=1), expected, FLOAT32)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_flexlora_hands_every_client_the_truncation_at_its_rank(rank):
    """s_k·B_k·A_k is the rank-r_k truncation although s_k = 4/r_k differs from the server's 4/3."""
    case = CASES["flexlora_redistribution"]
    merged = merge(ProductMean(), replies_of(case), 3, 4 / 3).tensors
    a, b = hand_out(merged[A], merged[B], rank, scaling=4 / 3, client_scaling=4 / rank)
    assert (a.shape, b.shape, a.dtype, b.dtype) == ((rank, IN), (OUT, rank), np.float32, np.float32)
    assert close(b.astype(np.float64) @ a, case["expected_BA_without_scaling"][str(rank)], FLOAT32)


def test_handing_out_spares_the_rows_of_slices_that_add_nothing():
    """√(s/s_k) = √(1/4) = ½ on the slice in use; the second has B = 0 and keeps its row."""
    a, b = np.array([[2.0, 4.0], [6.0, 8.0]]), np.array([[2.0, 0.0]])
    small_a, small_b = hand_out(a, b, 2, scaling=1.0, client_scaling=4.0)
    assert small_a.tolist() == [[1, 2], [6, 8]]
    assert small_b.tolist() == [[1, 0]]
    same = hand_out(a, b, 1, scaling=3.0, client_scaling=3.0)
    assert (same[0].tolist(), same[1].tolist()) == ([[2, 4]], [[2]])


def test_rank_deficient_products_leave_directions_that_can_learn():
    """One client of rank 1 on a server of rank 3: two columns of B are 0, their rows of A the initial ones."""
    case = CASES["rank_deficient_redistribution"]
    update = pair("c0", 1, case["lora_A"], case["lora_B"], scaling=case["scaling"])
    proposal = merge(ProductMean(), [update], case["target_rank"], 4 / 3)
    assert close(effective(proposal, 4 / 3), case["expected_product"], 1e-5)
    assert (~proposal.tensors[B].any(axis=0)).sum() == case["expected_zero_columns_of_B"]
    assert (~proposal.tensors[A].any(axis=1)).sum() == case["expected_zero_rows_of_A"]
    fresh = init_lora(7, pair_layout(3))[A]
    assert np.array_equal(proposal.tensors[A][1:], fresh[1:])
    assert proposal.statistics["tail_ratio"]["q"] < 1e-12  # rounding: the second singular value is 1e-7 at most


def test_given_initial_rows_win_over_the_named_stream():
    spec = pair_layout(2)[A]
    given = np.full((2, IN), 0.5, np.float32)
    assert MergeContext(initial={A: given}).fresh_A(spec) is given
    assert np.array_equal(MergeContext(seed=3).fresh_A(spec), init_lora(3, pair_layout(2))[A])


def test_product_mean_without_a_clients_scaling_takes_the_servers():
    update = pair("c0", 1, [[1, 0, 0, 0]], [[1], [0], [0], [0], [0]])
    assert effective(merge(ProductMean(), [update], 1, 3.0), 3.0)[0, 0] == pytest.approx(3)


# ---- raflora


def test_raflora_weighs_every_slice_by_those_who_have_it():
    case = CASES["raflora"]
    assert close(slice_weighted(terms_of(case, case["scaling"])).dense(), case["expected_product"])
    proposal = merge(Raflora(), replies_of(case, case["scaling"]), 3, case["scaling"])
    assert close(effective(proposal, case["scaling"]), truncated(case["expected_product"], 3), FLOAT32)
    assert set(proposal.statistics["tail_ratio"]) == {"q"}


def test_raflora_folds_each_clients_own_scaling():
    """Slice 0 of a (s = 2) and b (s = 1), equal weights: (2 + 1)/2 at [0, 0]; slice 1 is b's alone: 1 at [1, 1]."""
    a = LoraTerm(np.eye(2)[:1], np.eye(2)[:, :1], 2.0, 0.5)
    b = LoraTerm(np.eye(2), np.eye(2), 1.0, 0.5)
    assert slice_weighted([a, b]).dense().tolist() == [[1.5, 0], [0, 1]]


def test_raflora_leaves_out_slices_without_weight():
    a = LoraTerm(np.eye(2)[:1], np.eye(2)[:, :1], 1.0, 1.0)
    b = LoraTerm(np.eye(2), np.eye(2), 1.0, 0.0)
    assert slice_weighted([a, b]).dense().tolist() == [[1, 0], [0, 0]]


# ---- stack


def test_stacking_moves_the_base_by_the_mean_product_without_loss():
    case = CASES["stacking"]
    current = {A: np.full((3, IN), 0.5, np.float32), B: np.full((OUT, 3), 9.0, np.float32)}
    proposal = merge(Stack(), replies_of(case), 3, 4 / 3, current=current)
    left, right = proposal.base_update["q"]
    assert (left.dtype, right.dtype) == (np.float32, np.float32)
    assert left.shape == (OUT, case["expected_rank_after_recompression"])
    assert close(effective(proposal, 4 / 3), case["expected_product"], FLOAT32)
    assert np.array_equal(proposal.tensors[A], current[A])
    assert not proposal.tensors[B].any()


def test_stacking_can_keep_the_factors_as_they_are():
    """left = [B_1 B_2 …] to the bit: weight and scaling stand on A alone."""
    case = CASES["stacking"]
    proposal = merge(Stack(recompress=False), replies_of(case), 3, 4 / 3)
    left, right = proposal.base_update["q"]
    assert left.shape[1] == case["expected_rank_before_recompression"]
    assert np.array_equal(left, np.concatenate([np.array(b, np.float32) for b in case["lora_B"]], axis=1))
    assert close(right[0], 0.1 * 4 * np.array(case["lora_A"][0][0]), FLOAT32)


@pytest.mark.parametrize("recompress", [True, False])
def test_nothing_moves_the_base_where_all_products_are_zero(recompress):
    update = pair("c0", 1, [[1, 0, 0, 0]], np.zeros((OUT, 1)))
    proposal = merge(Stack(recompress=recompress), [update], 1, 1.0)
    assert proposal.base_update == {}
    assert proposal.statistics["base_update_rank"] == {"q": 0.0}


# ---- what holds for all that form products


def test_the_probe_uses_each_clients_scaling_and_the_base_update():
    """Stacked ranks 1, 2, 3 with s_k = 4/r_k are exact; without the base update the whole product is missing."""
    case = CASES["stacking"]
    part, updates, current = Stack(), replies_of(case), pair_layout(3).zeros()
    proposal = merge(part, updates, 3, 4 / 3, current=current)
    for sent, expected in ((proposal, 0.0), (Proposal(proposal.tensors, proposal.holders), 1.0)):
        probe = ExactnessProbe(pair_layout(3), {"q": 4 / 3}, part)
        for u in updates:
            probe.add(u)
        assert probe.finish(sent, current)["exactness_error"] == pytest.approx(expected, abs=1e-6)


def only_b(client: str, n: int, b: Any, frozen: Any = None) -> ClientUpdate:
    values = {B: np.array(b, np.float32)}
    layout = Layout((TensorSpec(B, values[B].shape, 0, "lora_B"),))
    start = layout.zeros() | ({} if frozen is None else {A: np.array(frozen, np.float32)})
    return ClientUpdate(client, n, layout, start, values)


@pytest.mark.parametrize("part", ["product_mean", "raflora", "stack", "fedex", "lora_fair", "svd_mean"])
def test_no_dense_map_is_ever_formed(part):
    """4096 × 4096 in float32 is 67 MB, in float64 134 MB; six clients of rank 4 need about 1.6 MB per copy."""
    size, rank = 4096, 4
    aggregator, layout = AGGREGATORS.build(part), pair_layout(rank, size, size)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((rank, size)).astype(np.float32), rng.standard_normal((size, rank)).astype(np.float32)
    current, updates = init_lora(0, layout), []
    for k in range(6):
        if part == "svd_mean":
            updates.append(only_b(f"c{k}", 1, b + k))
        else:
            updates.append(pair(f"c{k}", 1, a + np.float32(0.1 * k), b * np.float32(1 + k)))
    probe = ExactnessProbe(layout, {"q": 2.0}, aggregator)
    tracemalloc.start()
    acc = aggregator.zero(layout, MergeContext({"q": 2.0}))
    for u in updates:
        acc = aggregator.add(acc, u)
        probe.add(u)
    proposal = aggregator.finish(acc, current)
    probe.finish(proposal, current)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert proposal.tensors[B].shape == (size, rank)
    assert peak < 40e6
