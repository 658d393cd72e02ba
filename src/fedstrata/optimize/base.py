"""Server optimizers: the difference between the server's tensors and the accepted mean is a pseudo-gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np

from fedstrata.aggregate.base import Aggregator, Proposal
from fedstrata.core.tensors import NamedTensors, all_finite
from fedstrata.errors import AggregationError, ConfigError, PlanError
from fedstrata.registry import Registry

_CHUNK = 1 << 15

Update: TypeAlias = Callable[[np.ndarray, dict[str, np.ndarray], int], np.ndarray]
"""Pseudo-gradient g of a chunk, the chunk's moments by slot (changed in place) and the step t; returns what W loses."""


@dataclass(frozen=True)
class OptimizerState:
    """What a server optimizer remembers; stored in the checkpoint.

    Attributes:
        moments: float64, by `<slot>/<tensor>`, e.g. `m/encoder.layer.0.query.lora_A`; only of tensors that moved once.
        steps: How often each tensor was updated; JSON-ready.
    """

    moments: NamedTensors = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)


class ServerOptimizer(ABC):
    """Turns an accepted proposal into what the server really applies.

    It stands behind the selector: the pseudo-gradient of a tensor is g = W(t) − W̄ where W̄ was accepted. A tensor that
    nobody held or whose block was rejected keeps its weight, its moments and its step count, to the bit.

    Attributes:
        id: Name in configs.
        needs_fixed_coordinates: Whether entry (i, j) of a tensor must mean the same in all rounds. Aggregators that
            factor a product again, redraw a pair or move the base break that; `check_coordinates` refuses them.
    """

    id: ClassVar[str]
    needs_fixed_coordinates: ClassVar[bool]

    @abstractmethod
    def step(
        self, state: OptimizerState, proposal: Proposal, current: Mapping[str, np.ndarray]
    ) -> tuple[Proposal, OptimizerState]:
        """One step on every tensor of the accepted proposal.

        Args:
            state: After the last round; `OptimizerState()` at first. It is not changed.
            proposal: What the selector accepted.
            current: The server's tensors W(t) before this round.

        Returns:
            The proposal with the new values (float32), everything else as it was, and the new state.

        Raises:
            AggregationError: If a new value is not finite, or the state belongs to another model.
        """


OPTIMIZERS: Registry[ServerOptimizer] = Registry("server optimizer")


def check_coordinates(optimizer: ServerOptimizer, aggregator: Aggregator[Any]) -> None:
    """Raises `PlanError` if `optimizer` remembers coordinates that `aggregator` does not keep."""
    if optimizer.needs_fixed_coordinates and not aggregator.fixed_coordinates:
        raise PlanError(
            f'The server optimizer "{optimizer.id}" cannot follow the aggregator "{aggregator.id}"',
            expected="an aggregator whose tensors mean the same in all rounds, e.g. holders_mean or factor_mean",
            got="one that factors or draws them anew, so that old moments would belong to other directions",
            do='choose the server optimizer "none"',
        )


def check_numbers(optimizer: str, **problems_of: tuple[bool, str, float]) -> None:
    """Raises `ConfigError` with every option that is out of range.

    Args:
        optimizer: Its id.
        **problems_of: Per option: whether its value is right, what would be, and the value.
    """
    problems = [f"{name} = {value!r}: {needed}" for name, (right, needed, value) in problems_of.items() if not right]
    if problems:
        raise ConfigError(f'The server optimizer "{optimizer}" has wrong options', problems=problems)


def step_each(
    state: OptimizerState,
    proposal: Proposal,
    current: Mapping[str, np.ndarray],
    slots: Mapping[str, float],
    update: Update,
) -> tuple[Proposal, OptimizerState]:
    """Applies `update` to every tensor of the proposal, chunk by chunk in float64, with one cast at the end.

    Args:
        state: After the last round.
        proposal: What was accepted.
        current: W(t).
        slots: The moments by name, with the value that they start from.
        update: The rule.
    """
    tensors: NamedTensors = {}
    moments: NamedTensors = dict(state.moments)
    steps: dict[str, int] = dict(state.steps)
    for name, mean in proposal.tensors.items():
        old = current[name]
        mine = {slot: _moment(state, f"{slot}/{name}", old.shape, first) for slot, first in slots.items()}
        steps[name] = steps.get(name, 0) + 1
        result = np.empty(old.shape, np.float32)
        flat = {"old": old.reshape(-1), "mean": mean.reshape(-1), "new": result.reshape(-1)}
        for begin in range(0, old.size, _CHUNK):
            part = slice(begin, begin + _CHUNK)
            weight = flat["old"][part].astype(np.float64)
            change = update(weight - flat["mean"][part], {k: m.reshape(-1)[part] for k, m in mine.items()}, steps[name])
            with np.errstate(over="ignore"):
                flat["new"][part] = weight - change
        if not all_finite(result):
            raise AggregationError(
                f"The server optimizer made tensor {name} infinite or NaN", do="lower the server's learning rate"
            )
        tensors[name] = result
        moments |= {f"{slot}/{name}": m for slot, m in mine.items()}
    return replace(proposal, tensors=tensors), OptimizerState(
        dict(sorted(moments.items())), dict(sorted(steps.items()))
    )


def _moment(state: OptimizerState, key: str, shape: tuple[int, ...], first: float) -> np.ndarray:
    """A copy of one moment that may be changed, or its first value."""
    known: Any = state.moments.get(key)
    if known is None:
        return np.full(shape, first)
    if known.shape != shape or known.dtype != np.float64:
        raise AggregationError(
            f"The stored moment {key} belongs to another model",
            expected=f"float64 {list(shape)}",
            got=f"{known.dtype} {list(known.shape)}",
            do="start anew",
        )
    return np.array(known, order="C")
