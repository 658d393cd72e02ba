"""Law 7: the logged distance from the mean product is the dense one, with the weights that the method itself uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.method import METHODS

Case = tuple[str, str]
FEW = settings(max_examples=2, deadline=None)

shapes = st.fixed_dictionaries(
    {"width": st.integers(5, 9), "height": st.integers(5, 9), "rank": st.integers(2, 3), "seed": st.integers(0, 2**31)}
)
sizes = st.lists(st.integers(1, 500), min_size=2, max_size=5).map(lambda n: {f"site {i}": k for i, k in enumerate(n)})


def product(world: Any, client: str, target: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """D_k = s_k·B_k·A_k in float64, or R itself where it stands between orthonormal factors: ‖B·R·A‖ = ‖R‖."""
    scaling = world.client_scaling(client, target)
    if f"{target}.lora_R" in world.setup.layout:
        return np.asarray(scaling * tensors[f"{target}.lora_R"].astype(np.float64))
    a, b = world.pair(client, target, tensors)
    return np.asarray(scaling * (b @ a))


def added(world: Any, target: str) -> np.ndarray:
    """D_s: s·B·A of the server after the round, and what its base weight has gained in it."""
    if f"{target}.lora_R" in world.setup.layout:
        return np.asarray(world.setup.scaling[target] * world.state.tensors[f"{target}.lora_R"].astype(np.float64))
    before = world.weight(target, world.before.base)
    return np.asarray(world.effective(world.state, target) - before)


def shares(world: Any, target: str, holders: list[str]) -> dict[str, float]:
    """q_k: hetlora's ω_k = ‖B_k·A_k‖ / Σ ‖B·A‖, 1/m of robust and uniform means, else n_k / Σ_holders n."""
    aggregator = world.setup.method.aggregator
    weights = {c: float(world.trainer.sizes[c]) for c in holders}
    if aggregator.id == "norm_weighted_pad":
        weights = {c: float(np.linalg.norm(product(world, c, target, world.trainer.local[c]))) for c in holders}
    elif aggregator.robust or aggregator.weight_by == "uniform":
        weights = dict.fromkeys(holders, 1.0)
    return {c: w / sum(weights.values()) for c, w in weights.items()}


@FEW
@given(shape=shapes, sizes=sizes)
def test_the_logged_exactness_error_is_the_dense_one(
    lab: Any, case: Case, shape: dict[str, int], sizes: dict[str, int]
) -> None:
    """E = ‖D_s − Σ q_k·D_k‖, divided by ‖Σ q_k·D_k‖ and by ‖Σ q_k·(D_k − D_k,start)‖, norms over all targets."""
    world = lab.world(lab.plain(case[0]), case[1], sizes=sizes, num_blocks=4, **shape)
    record, clients = world.round()
    found, method = record["exactness"], world.setup.method
    if method.topology == "alone" or case[1] == "bottleneck":
        assert found is None
        return
    if case[1] == "full" or world.setup.is_personal:
        assert (found["exactness_error"], found["exactness_error_update"], found["per_target"]) == (None, None, {})
        assert {"full": "LoRA", "lora": "a model of its own"}[case[1]] in found["reason"]
        return
    layout, held = world.setup.layout, lab.trained_by(world, record, clients)
    keys = ("exactness_error", "exactness_error_update")
    if method.aggregator.robust:
        assert [found[k] for k in keys] == [None, None]
        keys = ("distance_to_mean", "distance_to_mean_update")
    norms = {}
    for target in layout.targets:
        stratum = next(s.stratum for s in layout if s.target == target)
        q = shares(world, target, held.get(stratum, []))
        if q:
            mean = sum(q[c] * product(world, c, target, world.trainer.local[c]) for c in q)
            start = sum(q[c] * product(world, c, target, world.trainer.starts[c]) for c in q)
            parts = [np.linalg.norm(x) for x in (added(world, target) - mean, mean, mean - start)]
            norms[target] = np.array(parts)
            each = [found["per_target"][target][k] for k in keys]
            assert each == pytest.approx([parts[0] / parts[1], parts[0] / parts[2]], rel=1e-3, abs=3e-6)
    whole = np.sqrt(sum(n * n for n in norms.values()))
    assert [found[k] for k in keys] == pytest.approx([whole[0] / whole[1], whole[0] / whole[2]], rel=1e-3, abs=3e-6)
    assert set(found["per_target"]) == set(norms)
    if METHODS.entries[case[0]].facts.exact:
        assert found["exactness_error"] <= 1e-5


def test_who_is_called_exact_is_and_who_is_not_is_not(lab: Any, case: Case) -> None:
    """The table of `fedstrata methods --compare` against two rounds: each factor takes its turn in rolora."""
    facts = METHODS.entries[case[0]].facts
    world = lab.world(lab.plain(case[0]), case[1], sizes={"a": 3, "b": 9, "c": 5, "d": 2, "e": 4}, num_blocks=3)
    errors = []
    for _ in range(2):
        found = world.round()[0]["exactness"] or {}
        errors.append(found.get("distance_to_mean", found.get("exactness_error")))
    if facts.exact:
        assert all(e <= 1e-5 for e in errors)
    elif facts.exact is False and case[1] == "lora":
        assert all(e > 1e-3 for e in errors)
    if facts.personalised:
        assert errors == [None] * 2
    assert bool(facts.personalised) == (world.setup.is_personal or world.setup.method.topology == "alone")
