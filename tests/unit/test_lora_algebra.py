"""LoRA algebra by hand and against dense matrices on non-square maps."""

from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from fedstrata.core.linalg import LowRank, combination_norms, orthonormal_completion, recompress, single_thread
from fedstrata.core.lora import (
    LoraTerm,
    combine_exactness,
    effective_weight,
    exactness_error,
    init_lora,
    lora_scaling,
    product,
    rank_slice,
    refactor,
    stacked,
    truncated_svd_of_stack,
)
from fedstrata.core.tensors import Layout, TensorSpec
from fedstrata.errors import AggregationError

OUT, IN = 7, 4


def term(seed: int, rank: int = 2, *, scaling: float = 1.0, weight: float = 1.0, out: int = OUT) -> LoraTerm:
    rng = np.random.default_rng(seed)
    return LoraTerm(rng.standard_normal((rank, IN)), rng.standard_normal((out, rank)), scaling, weight)


def layout(rank: int) -> Layout:
    return Layout(
        (
            TensorSpec("b.0.q.lora_A", (rank, 9), 0, "lora_A"),
            TensorSpec("b.0.q.lora_B", (5, rank), 0, "lora_B"),
            TensorSpec("b.1.q.lora_A", (rank, 9), 1, "lora_A"),
            TensorSpec("b.1.q.lora_B", (5, rank), 1, "lora_B"),
            TensorSpec("classifier.weight", (3, 5), "head"),
        )
    )


# ---- first values


def test_a_smaller_rank_starts_with_the_first_rows_of_a_larger_one():
    large, small = init_lora(3, layout(8)), init_lora(3, layout(5))
    assert np.array_equal(small["b.0.q.lora_A"], large["b.0.q.lora_A"][:5])
    assert not large["b.0.q.lora_B"].any()
    assert list(large) == list(layout(8).names[:4])


def test_first_values_depend_on_seed_and_target_only():
    tensors = init_lora(3, layout(8))
    assert not np.array_equal(tensors["b.0.q.lora_A"], tensors["b.1.q.lora_A"])
    assert not np.array_equal(tensors["b.0.q.lora_A"], init_lora(4, layout(8))["b.0.q.lora_A"])
    alone = init_lora(3, layout(8).restrict([1]))
    assert np.array_equal(alone["b.1.q.lora_A"], tensors["b.1.q.lora_A"])


def test_first_values_fill_their_interval():
    """U(−1/√in, 1/√in) with in = 9 has bound 1/3 and variance (2/3)²/12 = 1/27."""
    spec = TensorSpec("q.lora_A", (4000, 9), 0, "lora_A")
    a = init_lora(0, Layout((spec,)))["q.lora_A"]
    assert a.dtype == np.float32
    assert 0.33 < np.abs(a).max() <= np.float32(1 / 3)
    assert a.var() == pytest.approx(1 / 27, rel=0.02)


# ---- products and orientation


def test_scaling_rules():
    assert lora_scaling(16, 4) == 4
    assert lora_scaling(16, 4, "alpha_over_sqrt_r") == 8


def test_effective_weight_of_linear_and_conv1d_are_transposes():
    pair = LoraTerm(np.array([[1.0, 2, 0, 0]]), np.array([[1.0], [0], [3]]), scaling=2.0)
    expected = 2 * np.array([[1, 2, 0, 0], [0, 0, 0, 0], [3, 6, 0, 0]])  # [out, in] = [3, 4]
    assert np.array_equal(effective_weight(np.ones((3, 4)), pair), 1 + expected)
    assert np.array_equal(effective_weight(np.ones((4, 3)), pair, fan_in_fan_out=True), 1 + expected.T)


def test_effective_weight_refuses_the_wrong_orientation():
    with pytest.raises(AggregationError, match="fan_in_fan_out"):
        effective_weight(np.ones((IN, OUT)), term(0))


def test_effective_weight_matches_the_forward_pass_of_conv1d():
    """Conv1D computes x @ W with W [in, out]; the adapter adds s·(x Aᵀ) Bᵀ."""
    pair, rng = term(0, scaling=0.5), np.random.default_rng(9)
    x, weight = rng.standard_normal((3, IN)), rng.standard_normal((IN, OUT))
    expected = x @ weight + 0.5 * (x @ pair.lora_A.T) @ pair.lora_B.T
    assert np.allclose(x @ effective_weight(weight, pair, fan_in_fan_out=True), expected, atol=1e-12)


def test_rank_slices_are_first_rows_of_a_and_first_columns_of_b():
    pair = term(0, rank=4)
    a, b = rank_slice(pair.lora_A, pair.lora_B, 2)
    assert np.array_equal(a, pair.lora_A[:2])
    assert np.array_equal(b, pair.lora_B[:, :2])
    assert np.shares_memory(a, pair.lora_A)


# ---- stacks


def test_a_stack_of_unequal_ranks_is_the_weighted_sum_of_products():
    terms = [term(k, rank, scaling=1 / rank, weight=k + 1) for k, rank in enumerate((1, 3, 2))]
    assert stacked(terms).rank == 6
    assert np.allclose(stacked(terms).dense(), sum(product(t) for t in terms), atol=1e-12)


def test_pairs_of_different_maps_cannot_be_stacked():
    with pytest.raises(AggregationError, match="side by side"):
        stacked([term(0), term(1, out=OUT + 1)])
    with pytest.raises(AggregationError):
        stacked([])


@pytest.mark.parametrize("ranks", [(1,), (2, 1), (3, 4, 5)])
def test_truncated_svd_of_a_stack_equals_the_dense_one(ranks):
    terms = [term(k, rank) for k, rank in enumerate(ranks)]
    u, s, vt = np.linalg.svd(sum(product(t) for t in terms), full_matrices=False)
    rank = min(2, sum(ranks))
    found = truncated_svd_of_stack(terms, rank)
    assert np.allclose(found.s, s[:rank], atol=1e-12)
    assert np.allclose(found.u * found.s @ found.vt, u[:, :rank] * s[:rank] @ vt[:rank], atol=1e-12)
    assert len(found.spectrum) == min(sum(ranks), IN)


def test_left_vectors_have_their_largest_entry_positive():
    found = truncated_svd_of_stack([term(k, 3) for k in range(4)], 4)
    largest = found.u[np.abs(found.u).argmax(axis=0), np.arange(4)]
    assert (largest > 0).all()


def test_the_sign_does_not_depend_on_the_sign_of_the_factors():
    pair = term(0, 3)
    one = truncated_svd_of_stack([pair], 3)
    other = truncated_svd_of_stack([LoraTerm(-pair.lora_A, -pair.lora_B)], 3)
    assert np.allclose(one.u, other.u, atol=1e-10)
    assert np.allclose(one.vt, other.vt, atol=1e-10)


def test_recompression_drops_only_what_is_nothing():
    pair = term(0, 2)
    twice = stacked([pair, pair, term(1, 1)])
    short = recompress(twice)
    assert (twice.rank, short.rank) == (5, 3)
    assert np.allclose(short.dense(), twice.dense(), atol=1e-12)
    assert recompress(LowRank(np.zeros((OUT, 5)), np.ones((5, IN)))).rank == 1


# ---- refactoring (law 10)


@pytest.mark.parametrize("form", ["balanced", "orthonormal_a"])
def test_refactored_pairs_have_the_truncated_product_and_spread_it_as_asked(form):
    svd = truncated_svd_of_stack([term(k, 3) for k in range(3)], 3)
    pair = refactor(svd, np.zeros((3, IN)), scaling=2.0, form=form)
    assert np.allclose(product(pair), svd.u * svd.s @ svd.vt, atol=1e-12)
    if form == "balanced":
        assert np.allclose(np.linalg.norm(pair.lora_A, axis=1), np.linalg.norm(pair.lora_B, axis=0))
    else:
        assert np.allclose(pair.lora_A @ pair.lora_A.T, np.eye(3), atol=1e-12)


def test_spare_directions_take_the_fresh_rows_of_their_index():
    fresh = np.arange(12.0).reshape(3, IN) + 1
    pair = refactor(truncated_svd_of_stack([term(0, 1)], 3), fresh, scaling=1.0)
    assert np.array_equal(pair.lora_A[1:], fresh[1:])
    assert not pair.lora_B[:, 1:].any()
    assert pair.lora_B[:, 0].any()


def test_directions_a_million_times_weaker_are_spare():
    left, right = np.eye(OUT, 3), np.eye(3, IN)
    weak = LoraTerm(right, left * np.array([1.0, 1.1e-6, 0.9e-6]))
    pair = refactor(truncated_svd_of_stack([weak], 3), np.full((3, IN), 7.0), scaling=1.0)
    assert pair.lora_B.any(axis=0).tolist() == [True, True, False]
    assert (pair.lora_A[2] == 7).all()


def test_a_product_of_zero_is_all_spare():
    zero = LoraTerm(np.ones((2, IN)), np.zeros((OUT, 2)))
    pair = refactor(truncated_svd_of_stack([zero], 2), np.full((2, IN), 7.0), scaling=1.0)
    assert not pair.lora_B.any()
    assert (pair.lora_A == 7).all()


@pytest.mark.parametrize("fresh", [np.ones((4, IN)), np.random.default_rng(3).standard_normal((4, IN))])
def test_orthonormal_rows_are_completed_even_from_dependent_candidates(fresh):
    pair = refactor(truncated_svd_of_stack([term(0, 1)], 4), fresh, scaling=1.0, form="orthonormal_a")
    assert np.allclose(pair.lora_A @ pair.lora_A.T, np.eye(4), atol=1e-12)
    assert np.allclose(product(pair), product(term(0, 1)), atol=1e-12)


def test_completion_starts_from_the_candidates():
    rows = orthonormal_completion(np.eye(1, IN), np.array([[3.0, 4, 0, 0]]))
    assert np.allclose(rows, [[0, 1, 0, 0]])


def test_refactoring_refuses_what_it_cannot_do():
    svd = truncated_svd_of_stack([term(0, 3)], 3)
    with pytest.raises(AggregationError, match="factored again"):
        refactor(svd, np.zeros((3, IN)), scaling=0.0)
    with pytest.raises(AggregationError):
        refactor(svd, np.zeros((IN + 1, IN)), scaling=1.0, form="orthonormal_a")
    with pytest.raises(AggregationError):
        refactor(truncated_svd_of_stack([term(0, 3)], 1), np.zeros((2, IN)), scaling=1.0)


# ---- the exactness error (law 7)


def test_exactness_error_equals_the_dense_norms():
    clients = [term(k, k + 1, scaling=2.0, weight=q) for k, q in enumerate((0.2, 0.3, 0.5))]
    starts = [term(9, 2, scaling=2.0, weight=1.0)]
    server = term(7, 3, scaling=2.0)
    mean = sum(product(t) for t in clients)
    found = exactness_error(server, clients, starts)
    error, update = np.linalg.norm(product(server) - mean), np.linalg.norm(mean - product(starts[0]))
    assert found.error == pytest.approx(error, rel=1e-12)
    assert found.relative == pytest.approx(error / np.linalg.norm(mean), rel=1e-12)
    assert found.relative_to_update == pytest.approx(error / update, rel=1e-12)


def test_exactness_error_keeps_its_digits_where_products_cancel():
    """The server's product differs by 1e-11 of the clients'; traces of Gram matrices would see about 1e-8."""
    big = term(0, 3)
    off = LoraTerm(big.lora_A, big.lora_B * (1 + 1e-11))
    assert exactness_error(off, [big], []).relative == pytest.approx(1e-11, rel=1e-3)


def test_exactness_of_a_round_that_changed_nothing_is_zero():
    zero = LoraTerm(np.ones((2, IN)), np.zeros((OUT, 2)))
    found = exactness_error(zero, [zero], [zero])
    assert (found.relative, found.relative_to_update) == (0.0, 0.0)


def test_rounding_alone_does_not_count_as_an_update():
    pair = term(0, 3)
    halves = [LoraTerm(pair.lora_A, pair.lora_B, weight=q) for q in (1 / 3, 2 / 3)]
    found = exactness_error(pair, halves, [pair])
    assert (found.error, found.update_norm, found.relative_to_update) == (0.0, 0.0, 0.0)
    assert found.product_norm == pytest.approx(np.linalg.norm(product(pair)))


def test_an_error_without_an_update_is_infinite():
    pair = term(0, 3)
    assert exactness_error(term(1, 3), [pair], [pair]).relative_to_update == np.inf


def test_exactness_over_targets_adds_squares():
    """Errors 3 and 4 over norms 5 and 12: √(9 + 16) / √(25 + 144) = 5/13."""
    axis = np.eye(1, IN)

    def scaled(x: float) -> LoraTerm:
        return LoraTerm(axis, x * np.eye(OUT, 1))

    parts = [exactness_error(scaled(n + e), [scaled(n)], []) for n, e in ((5, 3), (12, 4))]
    assert combine_exactness(parts).relative == pytest.approx(5 / 13)


def test_norms_of_several_combinations():
    pair = term(0, 2)
    found = combination_norms(pair.lora_B, pair.lora_A, np.array([[1.0, 0.0], [2.0, 2.0]]))
    first = np.outer(pair.lora_B[:, 0], pair.lora_A[0])
    assert found == pytest.approx([np.linalg.norm(first), 2 * np.linalg.norm(product(pair))])


# ---- one thread


def test_server_algebra_runs_on_one_thread():
    with single_thread():
        inside = [pool["num_threads"] for pool in threadpool_info() if "numpy" in pool["filepath"]]
    assert inside
    assert set(inside) == {1}
