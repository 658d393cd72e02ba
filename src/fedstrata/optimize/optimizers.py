"""The server optimizers: none, momentum, and the adaptive ones of Adaptive Federated Optimization.

Symbols, per entry of a tensor: W the server's value, W̄ the accepted mean, g = W − W̄ the pseudo-gradient, η =
`learning_rate`, β = `beta`, β₁ = `beta1`, β₂ = `beta2`, τ = `tau`, t the tensor's own step count from 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedstrata.aggregate.base import Proposal
from fedstrata.optimize.base import OPTIMIZERS, OptimizerState, ServerOptimizer, check_numbers, step_each

_FRACTION = "a number from 0 up to, not including, 1"
_POSITIVE = "a finite number above 0"
Slots = dict[str, np.ndarray]


@OPTIMIZERS.register
@dataclass(frozen=True)
class NoOptimizer(ServerOptimizer):
    """The mean is taken over as it is: W ← W̄, bit for bit."""

    id: ClassVar[str] = "none"
    needs_fixed_coordinates: ClassVar[bool] = False

    def step(
        self, state: OptimizerState, proposal: Proposal, current: Mapping[str, np.ndarray]
    ) -> tuple[Proposal, OptimizerState]:
        """Changes nothing and remembers nothing."""
        return proposal, state


@OPTIMIZERS.register
@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """Server momentum (FedAvgM).

        v ← β·v + g,    W ← W − η·v,    v = 0 at first

    With β = 0 and η = 1 it is `none`.

    Args:
        learning_rate: η.
        beta: β.

    References:
        Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification,
        2019. Differs in: v of a tensor rests while nobody holds it.
    """

    id: ClassVar[str] = "momentum"
    needs_fixed_coordinates: ClassVar[bool] = True
    learning_rate: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        check_numbers(
            self.id,
            learning_rate=(0 < self.learning_rate < math.inf, _POSITIVE, self.learning_rate),
            beta=(0 <= self.beta < 1, _FRACTION, self.beta),
        )

    def step(
        self, state: OptimizerState, proposal: Proposal, current: Mapping[str, np.ndarray]
    ) -> tuple[Proposal, OptimizerState]:
        """See `ServerOptimizer.step`."""

        def update(g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
            v = slots["v"]
            v *= self.beta
            v += g
            return self.learning_rate * v

        return step_each(state, proposal, current, {"v": 0.0}, update)


@OPTIMIZERS.register
@dataclass(frozen=True)
class Adam(ServerOptimizer):
    """FedAdam.

        m ← β₁·m + (1 − β₁)·g,    v ← β₂·v + (1 − β₂)·g²,    W ← W − η·m/(√v + τ)

    m = 0 and v = τ² at first. With `bias_correction` v = 0 at first and W ← W − η·m̂/(√v̂ + τ), m̂ = m/(1 − β₁ᵗ),
    v̂ = v/(1 − β₂ᵗ).

    Args:
        learning_rate: η.
        beta1: β₁.
        beta2: β₂.
        tau: τ, how adaptive it is: far above |g| it is plain momentum with rate η/τ.
        bias_correction: Whether m and v are corrected as in Kingma and Ba, Adam, ICLR 2015.

    References:
        Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2. Differs in: v = τ² at first where the
        paper asks for at least that; moments of a tensor rest while nobody holds it.
    """

    id: ClassVar[str] = "adam"
    needs_fixed_coordinates: ClassVar[bool] = True
    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    bias_correction: bool = False

    def __post_init__(self) -> None:
        _check_adaptive(self.id, self.learning_rate, self.tau, beta1=self.beta1, beta2=self.beta2)

    def step(
        self, state: OptimizerState, proposal: Proposal, current: Mapping[str, np.ndarray]
    ) -> tuple[Proposal, OptimizerState]:
        """See `ServerOptimizer.step`."""

        def update(g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
            m = _first_moment(g, slots, self.beta1)
            v = slots["v"]
            v *= self.beta2
            v += (1 - self.beta2) * np.square(g)
            if self.bias_correction:
                m, v = m / (1 - self.beta1**t), v / (1 - self.beta2**t)
            return self.learning_rate * m / (np.sqrt(v) + self.tau)

        first = {"m": 0.0, "v": 0.0 if self.bias_correction else self.tau**2}
        return step_each(state, proposal, current, first, update)


@OPTIMIZERS.register
@dataclass(frozen=True)
class Yogi(ServerOptimizer):
    """FedYogi: v moves towards g² by a step that does not depend on how large v is.

        m ← β₁·m + (1 − β₁)·g,    v ← v − (1 − β₂)·g²·sign(v − g²),    W ← W − η·m/(√v + τ)

    m = 0 and v = τ² at first.

    Args:
        learning_rate: η.
        beta1: β₁.
        beta2: β₂.
        tau: τ.

    References:
        Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2. Differs in: v = τ² at first where the
        paper asks for at least that; moments of a tensor rest while nobody holds it.
    """

    id: ClassVar[str] = "yogi"
    needs_fixed_coordinates: ClassVar[bool] = True
    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_adaptive(self.id, self.learning_rate, self.tau, beta1=self.beta1, beta2=self.beta2)

    def step(
        self, state: OptimizerState, proposal: Proposal, current: Mapping[str, np.ndarray]
    ) -> tuple[Proposal, OptimizerState]:
        """See `ServerOptimizer.step`."""

        def update(g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
            m, v, square = _first_moment(g, slots, self.beta1), slots["v"], np.square(g)
            v -= (1 - self.beta2) * square * np.sign(v - square)
            return self.learning_rate * m / (np.sqrt(v) + self.tau)

        return step_each(state, proposal, current, {"m": 0.0, "v": self.tau**2}, update)


@OPTIMIZERS.register
@dataclass(frozen=True)
class Adagrad(ServerOptimizer):
    """FedAdagrad: v only grows, so that the steps of busy entries shrink.

        m ← β₁·m + (1 − β₁)·g,    v ← v + g²,    W ← W − η·m/(√v + τ)

    m = 0 and v = τ² at first.

    Args:
        learning_rate: η.
        beta1: β₁; 0 as in the paper's experiments.
        tau: τ.

    References:
        Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2. Differs in: v = τ² at first where the
        paper asks for at least that; moments of a tensor rest while nobody holds it.
    """

    id: ClassVar[str] = "adagrad"
    needs_fixed_coordinates: ClassVar[bool] = True
    learning_rate: float = 0.01
    beta1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_adaptive(self.id, self.learning_rate, self.tau, beta1=self.beta1)

    def step(
        self, state: OptimizerState, proposal: Proposal, current: Mapping[str, np.ndarray]
    ) -> tuple[Proposal, OptimizerState]:
        """See `ServerOptimizer.step`."""

        def update(g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
            m, v = _first_moment(g, slots, self.beta1), slots["v"]
            v += np.square(g)
            return self.learning_rate * m / (np.sqrt(v) + self.tau)

        return step_each(state, proposal, current, {"m": 0.0, "v": self.tau**2}, update)


def _first_moment(g: np.ndarray, slots: Slots, beta1: float) -> np.ndarray:
    """Updates m ← β₁·m + (1 − β₁)·g in place."""
    m = slots["m"]
    m *= beta1
    m += (1 - beta1) * g
    return m


def _check_adaptive(optimizer: str, learning_rate: float, tau: float, **betas: float) -> None:
    check_numbers(
        optimizer,
        learning_rate=(0 < learning_rate < math.inf, _POSITIVE, learning_rate),
        tau=(0 < tau < math.inf, _POSITIVE, tau),
        **{name: (0 <= beta < 1, _FRACTION, beta) for name, beta in betas.items()},
    )
