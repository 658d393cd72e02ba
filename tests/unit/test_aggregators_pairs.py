"""Aggregators that put factor means right or turn them, and what is common to all that merge pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate import (
    ClientUpdate,
    ExactnessProbe,
    FactorMean,
    Fedex,
    HoldersMean,
    LoraFair,
    MergeContext,
    ProductMean,
    Proposal,
    Raflora,
    Stack,
    SvdMean,
)
from fedstrata.aggregate.residual import factor_residual, mean_factors, refinement
from fedstrata.core.lora import LoraTerm, init_lora, product, stacked
from fedstrata.core.tensors import HEAD, Layout, TensorSpec
from fedstrata.errors import AggregationError, ConfigError

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


FLOAT32 = 2e-6
"""Inputs of order 1 that pass through float32, and the final cast."""


# ---- fedex


def test_fedex_puts_the_residual_into_the_base():
    case, means = CASES["fedex_residual"], CASES["factor_mean"]
    residual = factor_residual(terms_of(case))
    assert residual is not None
    assert close(residual.dense(), case["expected_base_update"])
    proposal = merge(Fedex(), replies_of(case), 2, 2.0)
    assert close(proposal.tensors[A], means["expected_lora_A"], FLOAT32)
    assert close(proposal.tensors[B], means["expected_lora_B"], FLOAT32)
    left, right = proposal.base_update["q"]
    assert close(left.astype(np.float64) @ right, case["expected_base_update"], FLOAT32)
    assert close(effective(proposal, 2.0), stacked(terms_of(case)).dense(), FLOAT32)


@pytest.mark.parametrize("part", [Fedex(), Stack(), ProductMean(), Raflora()], ids=lambda p: p.id)
def test_nothing_is_transposed_on_a_square_map(part):
    """Where out = in, a transposed product would fit: the result must still be the mean product itself."""
    rng = np.random.default_rng(3)
    pairs = [(rng.standard_normal((2, 4)), rng.standard_normal((4, 2))) for _ in range(2)]
    updates = [pair(f"c{k}", 1 + 2 * k, a, b) for k, (a, b) in enumerate(pairs)]
    expected = sum(
        q * 2.0 * b.astype(np.float32) @ a.astype(np.float32) for q, (a, b) in zip((0.25, 0.75), pairs, strict=True)
    )
    proposal = merge(part, updates, 4, 2.0, layout=pair_layout(2 if part.id in ("fedex", "stack") else 4, 4, 4))
    assert close(effective(proposal, 2.0), expected, 1e-5)
    assert not np.allclose(expected, expected.T, atol=0.1)


def test_the_residual_of_k_clients_has_k_minus_one_times_r_directions():
    """Two clients of rank 2: 2 directions where the plain sum over k of (B_k − B̄)(A_k − Ā) stacks 4."""
    rng = np.random.default_rng(0)
    terms = [LoraTerm(rng.standard_normal((2, 9)), rng.standard_normal((8, 2)), 2.0, q) for q in (0.25, 0.75)]
    residual = factor_residual(terms)
    assert residual is not None
    assert residual.rank == 2
    mean_a, mean_b = mean_factors(terms)
    centered = [LoraTerm(t.lora_A - mean_a, t.lora_B - mean_b, t.scaling, t.weight) for t in terms]
    assert close(residual.dense(), stacked(centered).dense(), 1e-12)


def test_clients_that_agree_leave_the_base_alone():
    same = [pair(c, 3, np.eye(2, IN), np.eye(OUT, 2)) for c in ("a", "b", "c")]
    assert merge(Fedex(), same[:1], 2, 2.0).base_update == {}
    assert merge(Fedex(), same, 2, 2.0).base_update == {}


# ---- lora_fair


def test_lora_fair_solves_the_ridge_problem_from_factors():
    """The golden ridge 0.01 is absolute: λ = 0.01·r/tr(Ā·Āᵀ) makes it relative."""
    case = CASES["lora_fair"]
    terms = terms_of(case)
    mean_a, mean_b = mean_factors(terms)
    ridge = case["ridge"] * 2 / float((mean_a * mean_a).sum())
    assert close(refinement(terms, ridge), case["expected_delta_B"])
    merged = merge(LoraFair(ridge=ridge), replies_of(case), 2, 2.0).tensors
    assert close(merged[A], mean_a, FLOAT32)
    assert close(merged[B], mean_b + np.array(case["expected_delta_B"]), FLOAT32)


@pytest.mark.parametrize("ridge", [0.0, 1e-6, 0.01, 1.0, 100.0])
def test_lora_fair_is_closer_to_the_mean_product_than_the_factor_mean(ridge):
    case = CASES["lora_fair"]
    mean = stacked(terms_of(case)).dense()
    fair, plain = (merge(p, replies_of(case), 2, 2.0) for p in (LoraFair(ridge=ridge), FactorMean()))
    errors = [np.linalg.norm(effective(p, 2.0) - mean) for p in (fair, plain)]
    assert errors[0] < errors[1] * (1 - 1e-4)


@pytest.mark.parametrize("ridge", [0.0, 0.01])
def test_lora_fair_survives_a_mean_that_lacks_directions(ridge):
    """A_1 = e1 in both rows and A_2 = −A_1: Ā = 0; with A_2 = A_1 it has rank 1."""
    rows = np.array([[1, 0, 0, 0], [1, 0, 0, 0]])
    one, zero = pair("a", 1, rows, np.ones((OUT, 2))), pair("b", 1, -rows, np.ones((OUT, 2)))
    assert not merge(LoraFair(ridge=ridge), [one, zero], 2, 1.0).tensors[A].any()
    other = pair("b", 1, rows, np.zeros((OUT, 2)))
    merged = merge(LoraFair(ridge=ridge), [one, other], 2, 1.0)
    assert close(effective(merged, 1.0), 0.5 * np.ones((OUT, 2)) @ rows, 1e-6)


@pytest.mark.parametrize("ridge", [-0.1, float("nan"), float("inf")])
def test_a_ridge_below_zero_is_refused(ridge):
    with pytest.raises(ConfigError, match="ridge"):
        LoraFair(ridge=ridge)


# ---- svd_mean


def only_b(client: str, n: int, b: Any, frozen: Any = None) -> ClientUpdate:
    values = {B: np.array(b, np.float32)}
    layout = Layout((TensorSpec(B, values[B].shape, 0, "lora_B"),))
    start = layout.zeros() | ({} if frozen is None else {A: np.array(frozen, np.float32)})
    return ClientUpdate(client, n, layout, start, values)


def test_svd_mean_turns_the_pair_without_changing_its_product():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((3, IN)).astype(np.float32), rng.standard_normal((2, OUT, 3))
    current = {A: a, B: np.zeros((OUT, 3), np.float32)}
    proposal = merge(SvdMean(), [only_b("a", 1, b[0]), only_b("b", 3, b[1])], 3, 2.0, current=current)
    assert close(effective(proposal, 2.0), 2.0 * (0.25 * b[0] + 0.75 * b[1]) @ a, 1e-5)
    rows = proposal.tensors[A].astype(np.float64)
    assert close(rows @ rows.T, np.eye(3), 1e-6)
    columns = proposal.tensors[B].astype(np.float64)
    assert close(columns.T @ columns, np.diag(np.diag(columns.T @ columns)), 1e-5)


def test_svd_mean_completes_missing_directions():
    b = np.zeros((OUT, 3))
    b[0, 0] = 1
    proposal = merge(SvdMean(), [only_b("a", 1, b)], 3, 2.0)
    rows = proposal.tensors[A].astype(np.float64)
    assert close(rows @ rows.T, np.eye(3), 1e-6)
    assert proposal.tensors[B].any(axis=0).tolist() == [True, False, False]


def test_svd_mean_takes_the_frozen_factor_that_clients_had():
    """Clients decoded A = I, the server holds 2·I: the product is theirs."""
    b = np.eye(OUT, 2)
    current = {A: 2 * np.eye(2, IN, dtype=np.float32), B: np.zeros((OUT, 2), np.float32)}
    sent = [only_b(c, 1, b, np.eye(2, IN)) for c in ("a", "b")]
    assert close(effective(merge(SvdMean(), sent, 2, 1.0, current=current), 1.0), np.eye(OUT, IN) * [1, 1, 0, 0], 1e-6)


def test_svd_mean_refuses_trained_and_differing_frozen_factors():
    with pytest.raises(AggregationError, match="B only"):
        merge(SvdMean(), [pair("a", 1, np.eye(2, IN), np.eye(OUT, 2))], 2, 1.0)
    b = np.eye(OUT, 2)
    for other in (2 * np.eye(2, IN), np.eye(3, IN)):
        with pytest.raises(AggregationError, match="one frozen A"):
            merge(SvdMean(), [only_b("a", 1, b, np.eye(2, IN)), only_b("b", 1, b, other)], 2, 1.0)


# ---- what is common


@pytest.mark.parametrize("part", [ProductMean(), Raflora(), Stack(), Fedex(), LoraFair(), SvdMean()])
def test_products_need_the_scaling_of_every_target(part):
    for context in (None, MergeContext(), MergeContext({"q": 0.0})):
        with pytest.raises(AggregationError, match="scaling of every target"):
            part.zero(pair_layout(2), context)


@pytest.mark.parametrize("part", [FactorMean(), HoldersMean(), Fedex(), LoraFair()])
def test_factors_of_different_scalings_do_not_mix(part):
    update = pair("c1", 1, np.eye(2, IN), np.eye(OUT, 2), scaling=1.0)
    with pytest.raises(AggregationError, match="one scaling") as error:
        merge(part, [update], 2, 2.0)
    assert "client c1, target q" in str(error.value)
    assert merge(part, [update], 2, 1.0).holders == {0: 1}


@pytest.mark.parametrize("part", [ProductMean(), Raflora(), Stack(), Fedex(), LoraFair()])
def test_half_a_pair_is_refused_and_changes_nothing(part):
    whole = pair("a", 1, np.eye(2, IN), np.eye(OUT, 2))
    acc = part.zero(pair_layout(2), MergeContext({"q": 1.0}))
    acc = part.add(acc, whole)
    with pytest.raises(AggregationError, match="both factors"):
        part.add(acc, only_b("b", 1, np.eye(OUT, 2)))
    assert part.finish(acc, pair_layout(2).zeros()).holders == {0: 1}


@pytest.mark.parametrize("part", [ProductMean(), Raflora(), Stack(), Fedex(), LoraFair(), SvdMean()])
def test_full_parameters_are_refused_where_pairs_are_merged(part):
    with pytest.raises(AggregationError, match="LoRA factors and the head only"):
        part.zero(Layout((TensorSpec("w", (2,), 0),)), MergeContext())


@pytest.mark.parametrize("part", [ProductMean(), Raflora(), Stack(), Fedex(), LoraFair()])
def test_the_head_is_averaged_beside_the_products(part):
    """(1·2 + 3·6)/4 = 5; with differences from 1: (1·3 + 3·7)/4 = 6."""
    layout = pair_layout(2, head=True)
    for start, expected in ((0.0, 5.0), (1.0, 6.0)):
        updates = []
        for client, n, head in (("a", 1, 2.0), ("b", 3, 6.0)):
            begin = layout.zeros() | {"head.bias": np.full(2, start, np.float32)}
            values = layout.zeros() | {"head.bias": np.full(2, head, np.float32)}
            updates.append(ClientUpdate(client, n, layout, begin, values))
        proposal = merge(part, updates, 2, 1.0, layout=layout)
        assert proposal.tensors["head.bias"].tolist() == [expected] * 2
        assert proposal.holders == {0: 2, HEAD: 2}


@pytest.mark.parametrize("part", [ProductMean(), Stack(), Fedex(), LoraFair()])
def test_differences_and_values_give_the_same_merge(part):
    case = CASES["fedex_residual"]
    start = {A: np.full((2, IN), 0.25, np.float32), B: np.full((OUT, 2), -0.5, np.float32)}
    parts = list(zip(case["num_examples"], case["lora_A"], case["lora_B"], strict=True))
    deltas = [pair(f"c{k}", n, a, b, start=start) for k, (n, a, b) in enumerate(parts)]
    one, other = merge(part, deltas, 2, 2.0), merge(part, replies_of(case), 2, 2.0)
    assert close(effective(one, 2.0), effective(other, 2.0), 5e-6)


def test_exact_aggregators_are_exact_before_the_cast():
    """Law 7: at most 1e-10 in float64, and at most 1e-5 as the probe measures it after the cast."""
    case = CASES["fedex_residual"]
    mean = stacked(terms_of(case)).dense()
    mean_a, mean_b = mean_factors(terms_of(case))
    residual = factor_residual(terms_of(case))
    assert residual is not None
    both = product(LoraTerm(mean_a, mean_b, 2.0)) + residual.dense()
    assert np.linalg.norm(both - mean) <= 1e-10 * np.linalg.norm(mean)
    for part in (Stack(), Fedex()):
        probe = ExactnessProbe(pair_layout(2), {"q": 2.0}, part)
        updates = replies_of(case)
        for u in updates:
            probe.add(u)
        current = pair_layout(2).zeros()
        found = probe.finish(merge(part, updates, 2, 2.0, current=current), current)
        assert found["exactness_error"] <= 1e-5
        assert found["per_target"]["q"]["exactness_error"] <= 1e-5


def test_the_probe_fills_in_the_factor_that_clients_do_not_send():
    """Only B is sent: D_k = s·B_k·A with the server's A; for equal A the factor mean is exact."""
    current = {A: np.eye(2, IN, dtype=np.float32), B: np.zeros((OUT, 2), np.float32)}
    updates = [only_b("a", 1, np.eye(OUT, 2)), only_b("b", 1, np.ones((OUT, 2)))]
    for start_a, expected in ((None, 0.0), (2 * np.eye(2, IN), 0.5)):  # the clients' products are twice the server's
        probe = ExactnessProbe(pair_layout(2), {"q": 2.0}, FactorMean())
        sent = updates if start_a is None else [only_b(u.client, 1, u.values[B], start_a) for u in updates]
        for u in sent:
            probe.add(u)
        found = probe.finish(merge(FactorMean(), sent, 2, 2.0, current=current), current)
        assert found["exactness_error"] == pytest.approx(expected, abs=1e-6)


def test_personal_methods_have_no_exactness_error():
    probe = ExactnessProbe(pair_layout(2), {"q": 2.0}, FactorMean(), personal=True)
    probe.add(only_b("a", 1, np.eye(OUT, 2)))
    found = probe.finish(Proposal({}, {}), {})
    assert found["exactness_error"] is None
    assert "model of its own" in found["reason"]


def test_restricting_a_proposal_cuts_everything_alike():
    specs = [
        TensorSpec(f"{b}.q.lora_{x}", shape, b, f"lora_{x}")  # type: ignore[arg-type]
        for b in (0, 1)
        for x, shape in (("A", (1, IN)), ("B", (OUT, 1)))
    ]
    layout = Layout(tuple(specs))
    tensors = layout.zeros()
    moments = {n: (t, t) for n, t in tensors.items()}
    base = {f"{b}.q": (np.zeros((OUT, 1)), np.zeros((1, IN))) for b in (0, 1)}
    weights = {t: {"a": 1.0} for t in base}
    whole = Proposal(tensors, {0: 2, 1: 1}, {"x": 1}, base, weights, moments, layout)
    part = whole.restrict([1])
    assert list(part.tensors) == list(part.moments) == ["1.q.lora_A", "1.q.lora_B"]
    assert list(part.base_update) == list(part.weights) == ["1.q"]
    assert (part.holders, part.statistics) == ({1: 1}, {"x": 1})
    assert whole.restrict([0, 1]) == whole
    assert whole.restrict([]).tensors == {}
    with pytest.raises(AggregationError, match="layout"):
        Proposal(tensors, {0: 1}).restrict([0])


def test_moments_are_unweighted_sums_over_the_holders():
    """Δ = 1 and −3 (one sent as the value −2 from a start of 1): Σ = −2, Σ² = 10, whatever n_k is."""
    layout = Layout((TensorSpec("w", (2,), 0),))
    start = {"w": np.ones(2, np.float32)}
    updates = [
        ClientUpdate("a", 5, layout, start, {"w": np.array([1, 0], np.float32)}),
        ClientUpdate("b", 9, layout, start, {"w": np.array([-2, 1], np.float32)}, "weights"),
    ]
    part = HoldersMean(moments=True)
    acc = part.zero(layout)
    for u in updates:
        acc = part.add(acc, u)
    total, squares = part.finish(acc, start).moments["w"]
    assert (total.tolist(), squares.tolist()) == ([-2, 0], [10, 0])
    assert (total.dtype, squares.dtype) == (np.float64, np.float64)
