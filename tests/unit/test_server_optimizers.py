"""Server optimizers by hand, two steps each; what rests while nobody holds it; what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest

from fedstrata.aggregate.base import Proposal
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec
from fedstrata.errors import AggregationError, ConfigError, PlanError
from fedstrata.optimize import OPTIMIZERS, OptimizerState, check_coordinates
from fedstrata.registry import to_config

LAYOUT = Layout((TensorSpec("a", (2, 3), 0), TensorSpec("b", (3,), 1)))
ALL = sorted(OPTIMIZERS)
ADAPTIVE = [name for name in ALL if name != "none"]


def proposal_of(tensors: NamedTensors) -> Proposal:
    strata = {LAYOUT[n].stratum: 3 for n in tensors}
    return Proposal(tensors, strata, {"num_replies": 3}, layout=LAYOUT)


def one(value: float) -> NamedTensors:
    return {"b": np.full(3, value, np.float32)}


def two_steps(optimizer, g1: float, g2: float) -> list[float]:
    """W after rounds with the pseudo-gradients g1 and g2, from W = 0: the mean is W − g."""
    current, state, seen = one(0.0), OptimizerState(), []
    for g in (g1, g2):
        proposal, state = optimizer.step(state, proposal_of(one(current["b"][0] - g)), current)
        current = proposal.tensors
        seen.append(float(current["b"][0]))
    return seen


def test_all_five_are_registered():
    assert ALL == ["adagrad", "adam", "momentum", "none", "yogi"]


@pytest.mark.parametrize("name", ALL)
def test_config_builds_an_equal_optimizer(name):
    optimizer = OPTIMIZERS.build(name)
    assert OPTIMIZERS.build(json.loads(json.dumps(to_config(optimizer)))) == optimizer


def test_none_takes_the_mean_over_bit_for_bit():
    proposal = proposal_of(one(0.1))
    result, state = OPTIMIZERS.build("none").step(OptimizerState(), proposal, one(0.0))
    assert result is proposal
    assert state == OptimizerState()


def test_momentum_without_momentum_is_the_mean():
    rng = generator(0, "momentum")
    current = {s.name: rng.standard_normal(s.shape, dtype=np.float32) for s in LAYOUT}
    mean = {s.name: rng.standard_normal(s.shape, dtype=np.float32) for s in LAYOUT}
    result, _ = OPTIMIZERS.build({"id": "momentum", "beta": 0.0}).step(OptimizerState(), proposal_of(mean), current)
    assert all(np.array_equal(result.tensors[n], mean[n]) for n in mean)


def test_momentum_by_hand():
    # v1 = 0.5, W1 = -0.25; v2 = 0.8·0.5 + 0.25 = 0.65, W2 = -0.25 - 0.5·0.65
    optimizer = OPTIMIZERS.build({"id": "momentum", "learning_rate": 0.5, "beta": 0.8})
    assert two_steps(optimizer, 0.5, 0.25) == pytest.approx([-0.25, -0.575], rel=1e-6)


def test_adam_by_hand():
    # beta1 = 0.5, beta2 = 0.75, tau = 0.1, eta = 0.2; v0 = tau² = 0.01
    # m1 = 0.25, v1 = 0.75·0.01 + 0.25·0.25 = 0.07; m2 = 0.125 - 0.5 = -0.375, v2 = 0.75·0.07 + 0.25 = 0.3025
    first = -0.2 * 0.25 / (math.sqrt(0.07) + 0.1)
    second = first + 0.2 * 0.375 / (math.sqrt(0.3025) + 0.1)
    options = {"learning_rate": 0.2, "beta1": 0.5, "beta2": 0.75, "tau": 0.1}
    assert two_steps(OPTIMIZERS.build({"id": "adam", **options}), 0.5, -1.0) == pytest.approx([first, second], rel=1e-6)


def test_adam_with_bias_correction_starts_with_a_full_step():
    # m̂1 = g, v̂1 = g²: W1 = -eta·g/(|g| + tau)
    # m2 = 0.5·0.25 + 0.5·(-1) = -0.375, m̂2 = -0.5; v2 = 0.75·0.0625 + 0.25 = 0.296875, v̂2 = v2/(1 - 0.75²)
    first = -0.2 * 0.5 / (0.5 + 0.1)
    second = first + 0.2 * 0.5 / (math.sqrt(0.296875 / 0.4375) + 0.1)
    options = {"learning_rate": 0.2, "beta1": 0.5, "beta2": 0.75, "tau": 0.1, "bias_correction": True}
    assert two_steps(OPTIMIZERS.build({"id": "adam", **options}), 0.5, -1.0) == pytest.approx([first, second], rel=1e-6)


def test_yogi_by_hand():
    # v0 = 0.01 < g² = 0.25: v1 = 0.01 + 0.25·0.25 = 0.0725; v1 > g² = 0.04: v2 = 0.0725 - 0.25·0.04 = 0.0625
    # m1 = 0.25, m2 = 0.125 + 0.5·0.2 = 0.225
    first = -0.2 * 0.25 / (math.sqrt(0.0725) + 0.1)
    second = first - 0.2 * 0.225 / (0.25 + 0.1)
    options = {"learning_rate": 0.2, "beta1": 0.5, "beta2": 0.75, "tau": 0.1}
    assert two_steps(OPTIMIZERS.build({"id": "yogi", **options}), 0.5, 0.2) == pytest.approx([first, second], rel=1e-6)


def test_adagrad_by_hand():
    # v1 = 0.01 + 0.25 = 0.26, v2 = 0.26 + 0.04 = 0.3; beta1 = 0: m = g
    first = -0.2 * 0.5 / (math.sqrt(0.26) + 0.1)
    second = first + 0.2 * 0.2 / (math.sqrt(0.3) + 0.1)
    optimizer = OPTIMIZERS.build({"id": "adagrad", "learning_rate": 0.2, "tau": 0.1})
    assert two_steps(optimizer, 0.5, -0.2) == pytest.approx([first, second], rel=1e-6)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_tensor_that_nobody_held_keeps_weight_moments_and_steps(name):
    optimizer, zero = OPTIMIZERS.build(name), LAYOUT.zeros()
    both = {n: t + np.float32(0.5) for n, t in zero.items()}
    first, state = optimizer.step(OptimizerState(), proposal_of(both), zero)
    before = {k: m.copy() for k, m in state.moments.items()}
    second, later = optimizer.step(state, proposal_of({"a": first.tensors["a"] + np.float32(1)}), first.tensors)
    assert set(second.tensors) == {"a"}
    assert later.steps == {"a": 2, "b": 1}
    for key, moment in before.items():
        assert np.array_equal(state.moments[key], moment)  # the old state is a value
        assert np.array_equal(later.moments[key], moment) == key.endswith("/b")


@pytest.mark.parametrize("name", ADAPTIVE)
def test_no_moments_exist_before_a_first_holder(name):
    _, state = OPTIMIZERS.build(name).step(OptimizerState(), proposal_of(one(1.0)), one(0.0))
    assert {k.split("/", 1)[1] for k in state.moments} == {"b"}
    assert all(m.dtype == np.float64 for m in state.moments.values())
    assert state.steps == {"b": 1}


@pytest.mark.parametrize("name", ALL)
def test_the_mean_that_equals_the_server_changes_nothing_at_first(name):
    current = one(0.3)
    result, _ = OPTIMIZERS.build(name).step(OptimizerState(), proposal_of(one(0.3)), current)
    assert np.array_equal(result.tensors["b"], current["b"])


@pytest.mark.parametrize("name", ADAPTIVE)
def test_steps_go_towards_the_mean(name):
    result, _ = OPTIMIZERS.build(name).step(OptimizerState(), proposal_of(one(1.0)), one(0.0))
    assert (result.tensors["b"] > 0).all()
    assert result.tensors["b"].dtype == np.float32


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_rest_of_the_proposal_stays(name):
    proposal = proposal_of(one(1.0))
    result, _ = OPTIMIZERS.build(name).step(OptimizerState(), proposal, one(0.0))
    assert (result.holders, result.statistics, result.layout) == (proposal.holders, proposal.statistics, LAYOUT)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_chunks_do_not_show(name):
    values = generator(0, "large").standard_normal(70_000, dtype=np.float32)
    current = {"w": np.zeros(70_000, np.float32)}
    optimizer = OPTIMIZERS.build(name)
    whole, _ = optimizer.step(OptimizerState(), Proposal({"w": values}, {0: 1}), current)
    tail = slice(40_000, 70_000)
    part, _ = optimizer.step(OptimizerState(), Proposal({"w": values[tail]}, {0: 1}), {"w": current["w"][tail]})
    assert np.array_equal(whole.tensors["w"][tail], part.tensors["w"])


@pytest.mark.parametrize("name", ADAPTIVE)
def test_moments_of_another_shape_are_refused(name):
    optimizer = OPTIMIZERS.build(name)
    _, state = optimizer.step(OptimizerState(), proposal_of(one(1.0)), one(0.0))
    with pytest.raises(AggregationError, match="another model"):
        optimizer.step(state, Proposal({"b": np.ones(4, np.float32)}, {1: 1}), {"b": np.zeros(4, np.float32)})


def test_step_that_leaves_float32_is_refused():
    optimizer = OPTIMIZERS.build({"id": "momentum", "learning_rate": 1e30})
    with pytest.raises(AggregationError, match="tensor b infinite"):
        optimizer.step(OptimizerState(), proposal_of(one(1e10)), one(0.0))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"id": "momentum", "learning_rate": 0.0, "beta": 1.0}, ("learning_rate = 0.0", "beta = 1.0")),
        ({"id": "adam", "beta1": -0.1, "beta2": 1.5, "tau": 0.0}, ("beta1 = -0.1", "beta2 = 1.5", "tau = 0.0")),
        ({"id": "yogi", "learning_rate": math.inf}, ("learning_rate = inf",)),
        ({"id": "adagrad", "tau": math.nan}, ("tau = nan",)),
    ],
)
def test_wrong_numbers_are_all_named_at_once(options, expected):
    with pytest.raises(ConfigError) as error:
        OPTIMIZERS.build(options)
    assert all(text in str(error.value) for text in expected)


@dataclass(frozen=True)
class Turning:
    """As much of an aggregator as the check looks at."""

    fixed_coordinates: bool
    id: str = "product_mean"


@pytest.mark.parametrize("name", ALL)
def test_only_none_may_follow_an_aggregator_without_fixed_coordinates(name):
    optimizer = OPTIMIZERS.build(name)
    assert optimizer.needs_fixed_coordinates == (name != "none")
    check_coordinates(optimizer, Turning(True))  # type: ignore[arg-type]
    if name == "none":
        check_coordinates(optimizer, Turning(False))  # type: ignore[arg-type]
        return
    with pytest.raises(PlanError, match=f'"{name}" cannot follow the aggregator "product_mean"'):
        check_coordinates(optimizer, Turning(False))  # type: ignore[arg-type]
