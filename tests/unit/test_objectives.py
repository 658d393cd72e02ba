"""Objectives by hand, in numpy and in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstrata.errors import ConfigError
from fedstrata.objective import OBJECTIVES, Proximal, TaskLoss
from fedstrata.registry import to_config

TRAINED = {"a": np.array([1.0, 2.0]), "b": np.array([[3.0]])}
START = {"a": np.array([0.0, 0.0]), "b": np.array([[1.0]])}


def test_the_proximal_term_by_hand():
    """(0.2/2)·((1² + 2²) + 2²) = 0.9."""
    assert Proximal(0.2).penalty(TRAINED, START) == pytest.approx(0.9)


def test_the_proximal_gradient_is_mu_times_the_distance():
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    Proximal(0.5).penalty({"w": w}, {"w": torch.tensor([0.0, 2.0])}).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [0.5, -2.0]


def test_mu_zero_is_plain_and_so_is_the_task_loss():
    assert Proximal(0.0).is_plain
    assert TaskLoss().is_plain
    assert not Proximal(1e-12).is_plain
    assert TaskLoss().penalty(TRAINED, START) == 0


def test_no_tensors_cost_nothing():
    assert Proximal(0.2).penalty({}, {}) == 0


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_a_proximal_term_that_makes_no_sense_is_refused(mu):
    with pytest.raises(ConfigError, match="mu"):
        Proximal(mu)


@pytest.mark.parametrize("part", list(OBJECTIVES))
def test_objectives_are_rebuilt_from_their_config(part):
    built = OBJECTIVES.build(part)
    assert OBJECTIVES.build(to_config(built)) == built
    if part == "proximal":
        assert OBJECTIVES.build({"id": part, "mu": 0.5}) != built
