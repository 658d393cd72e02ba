"""The server-side mathematics against values of an independent implementation (`vectors.json`, compared to 1e-9)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate import AGGREGATORS, ClientUpdate, ExactnessProbe, Proposal
from fedstrata.core.linalg import LowRank
from fedstrata.core.lora import (
    LoraTerm,
    exactness_error,
    product,
    recompressed_stack,
    refactor,
    stacked,
    truncated_svd_of_stack,
)
from fedstrata.core.tensors import Layout, TensorSpec

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())["cases"]
FLOAT32 = 2e-7
"""Values that pass through a float32 payload and the final cast."""


def terms_of(case: dict[str, Any], scaling: float | None = None) -> list[LoraTerm]:
    """p_k·s_k·B_k·A_k with p_k = n_k/Σn and s_k = alpha/r_k (or one scaling for all)."""
    total = sum(case["num_examples"])
    pairs = [(np.array(a), np.array(b)) for a, b in zip(case["lora_A"], case["lora_B"], strict=True)]
    shares = [n / total for n in case["num_examples"]]
    return [LoraTerm(a, b, scaling or case["alpha"] / len(a), q) for (a, b), q in zip(pairs, shares, strict=True)]


def close(actual: np.ndarray, expected: Any, tolerance: float = 1e-9) -> bool:
    return np.allclose(actual, np.array(expected), rtol=tolerance, atol=tolerance)


def test_product_mean_and_its_truncation():
    case = CASES["product_mean"]
    terms = terms_of(case)
    svd = truncated_svd_of_stack(terms, 2)
    assert close(stacked(terms).dense(), case["expected_product"])
    assert close(svd.spectrum, case["expected_singular_values"])
    assert close(svd.u * svd.s @ svd.vt, case["expected_truncated_product_rank2"])
    energy = np.array(case["expected_singular_values"]) ** 2
    assert svd.tail_ratio == pytest.approx(energy[2:].sum() / energy.sum(), rel=1e-9)


def test_stacking_recompresses_without_loss():
    case = CASES["stacking"]
    terms = terms_of(case)
    short = recompressed_stack(terms)
    assert stacked(terms).rank == case["expected_rank_before_recompression"]
    assert short.rank == case["expected_rank_after_recompression"]
    assert close(short.dense(), case["expected_product"])


@pytest.mark.parametrize("form", ["balanced", "orthonormal_a"])
def test_flexlora_redistribution_divides_the_scaling_out(form):
    case = CASES["flexlora_redistribution"]
    for rank, expected in case["expected_BA_without_scaling"].items():
        svd = truncated_svd_of_stack(terms_of(case), int(rank))
        pair = refactor(svd, np.zeros((int(rank), 4)), scaling=case["alpha"] / int(rank), form=form)
        assert close(pair.lora_B @ pair.lora_A, expected)


@pytest.mark.parametrize("form", ["balanced", "orthonormal_a"])
def test_rank_deficient_redistribution_leaves_directions_that_can_learn(form):
    case = CASES["rank_deficient_redistribution"]
    term = LoraTerm(np.array(case["lora_A"]), np.array(case["lora_B"]), case["scaling"])
    fresh = np.random.default_rng(0).uniform(-0.5, 0.5, (case["target_rank"], 4))
    pair = refactor(truncated_svd_of_stack([term], case["target_rank"]), fresh, scaling=case["scaling"], form=form)
    assert close(product(pair), case["expected_product"])
    assert (~pair.lora_B.any(axis=0)).sum() == case["expected_zero_columns_of_B"]
    assert (~pair.lora_A.any(axis=1)).sum() == case["expected_zero_rows_of_A"]


def test_hetlora_weights_and_exactness_error():
    case = CASES["hetlora"]
    terms = terms_of(case, scaling=case["alpha"] / case["server_rank"])
    norms = np.array([LowRank(t.lora_B, t.lora_A).norm() for t in terms])
    weights = norms / norms.sum()
    assert close(weights, case["expected_weights"])
    clients = [LoraTerm(t.lora_A, t.lora_B, t.scaling, w) for t, w in zip(terms, weights, strict=True)]
    server = LoraTerm(np.array(case["expected_lora_A"]), np.array(case["expected_lora_B"]), terms[0].scaling)
    exactness = exactness_error(server, clients, [])
    assert exactness.relative == pytest.approx(case["expected_relative_exactness_error"], rel=1e-9)


def pair_layout(rank: int) -> Layout:
    return Layout((TensorSpec("q.lora_A", (rank, 4), 0, "lora_A"), TensorSpec("q.lora_B", (5, rank), 0, "lora_B")))


def merged_factors(case: dict[str, Any], send: str) -> tuple[Proposal, dict[str, Any]]:
    layout, aggregator = pair_layout(case["rank"]), AGGREGATORS.build("factor_mean")
    start = {s.name: np.full(s.shape, 0.25, np.float32) for s in layout}
    acc = aggregator.zero(layout)
    probe = ExactnessProbe(layout, {"q": case["alpha"] / case["rank"]}, aggregator)
    for k, (a, b) in enumerate(zip(case["lora_A"], case["lora_B"], strict=True)):
        local = {"q.lora_A": np.array(a), "q.lora_B": np.array(b)}
        values = {n: (x - start[n] if send == "delta" else x).astype(np.float32) for n, x in local.items()}
        update = ClientUpdate(f"c{k}", case["num_examples"][k], layout, start, values, send)
        probe.add(update)
        acc = aggregator.add(acc, update)
    proposal = aggregator.finish(acc, start)
    return proposal, probe.finish(proposal, start)


@pytest.mark.parametrize("send", ["delta", "weights"])
def test_factor_mean_and_how_far_off_it_is(send):
    case = CASES["factor_mean"]
    proposal, exactness = merged_factors(case, send)
    assert close(proposal.tensors["q.lora_A"], case["expected_lora_A"], FLOAT32)
    assert close(proposal.tensors["q.lora_B"], case["expected_lora_B"], FLOAT32)
    expected = case["expected_relative_exactness_error"]
    assert exactness["exactness_error"] == pytest.approx(expected, abs=1e-6)  # float32 in, float32 cast


def test_factor_mean_exactness_error_in_float64():
    case = CASES["factor_mean"]
    server = LoraTerm(np.array(case["expected_lora_A"]), np.array(case["expected_lora_B"]), case["alpha"] / 2)
    exactness = exactness_error(server, terms_of(case), [])
    assert exactness.relative == pytest.approx(case["expected_relative_exactness_error"], rel=1e-9)


def test_fedex_residual_is_the_exactness_error_of_the_factor_mean():
    """s·Σ q_k (B_k − B̄)(A_k − Ā), and its norm is E."""
    case, means = CASES["fedex_residual"], CASES["factor_mean"]
    mean_a, mean_b = np.array(means["expected_lora_A"]), np.array(means["expected_lora_B"])
    terms = terms_of(case)
    centered = [LoraTerm(t.lora_A - mean_a, t.lora_B - mean_b, t.scaling, t.weight) for t in terms]
    residual = stacked(centered)
    assert close(residual.dense(), case["expected_base_update"])
    error = exactness_error(LoraTerm(mean_a, mean_b, terms[0].scaling), terms, []).error
    assert residual.norm() == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize(("weight_by", "key"), [("num_examples", "expected"), ("uniform", "expected_uniform")])
@pytest.mark.parametrize("send", ["delta", "weights"])
def test_holders_mean_per_stratum(weight_by, key, send):
    case = CASES["holders_mean"]
    layout = Layout(tuple(TensorSpec(f"w{s}", (3,), s) for s in range(4)))
    start = layout.zeros()
    aggregator = AGGREGATORS.build({"id": "holders_mean", "weight_by": weight_by})
    acc = aggregator.zero(layout)
    for client, deltas in case["deltas"].items():
        values = {f"w{s}": np.array(d, np.float32) for s, d in deltas.items()}
        mine = layout.restrict(int(s) for s in deltas)
        update = ClientUpdate(client, case["num_examples"][int(client)], mine, start, values, send)
        acc = aggregator.add(acc, update)
    merged = start | aggregator.finish(acc, start).tensors
    assert "w3" not in aggregator.finish(acc, start).tensors
    for stratum, expected in case[key].items():
        assert close(merged[f"w{stratum}"], expected, FLOAT32)
