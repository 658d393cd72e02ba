"""Streaming sums in float64: O(model) memory, one division and one cast at the end.

The mean of the local values is kept apart as

    Σ n_k·local_k = Σ n_k·start_k + Σ n_k·Δ_k

because all clients of a round usually start from the same tensor: then the first sum costs a comparison instead of
a pass over memory. It is the same sum, to the bit, while Σ n_k < 2^29: n·start of a float32 is exact in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from fedstrata.aggregate.admit import Roll
from fedstrata.aggregate.base import ClientUpdate, MergeContext, Proposal
from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec, stratum_name
from fedstrata.errors import AggregationError

Denominator: TypeAlias = Literal["holders", "cohort"]
_CHUNK = 1 << 15


@dataclass
class WeightedSum:
    """Σ w_k·x_k of one tensor, flat; allocated when the first x comes."""

    total: np.ndarray | None = None

    def add(self, weight: float, values: np.ndarray, minus: np.ndarray | None = None) -> None:
        """Adds weight·(values − minus), chunk by chunk so that temporaries stay in the cache."""
        flat = values.reshape(-1)
        less = None if minus is None else minus.reshape(-1)
        if self.total is None:
            self.total = np.zeros(flat.size)
        term, other = np.empty(min(_CHUNK, flat.size)), np.empty(min(_CHUNK, flat.size))
        for part in _chunks(flat.size):
            x = term[: part.stop - part.start]
            x[...] = flat[part]
            if less is not None:
                y = other[: part.stop - part.start]
                y[...] = less[part]
                x -= y
            x *= weight
            self.total[part] += x


@dataclass
class StartSum:
    """Σ n_k·start_k of one tensor: runs of equal starts are counted, not added.

    Attributes:
        latest: The start of the current run.
        weight: Σ n_k of the current run.
        earlier: The runs before it.
    """

    latest: np.ndarray | None = None
    weight: float = 0.0
    earlier: WeightedSum = field(default_factory=WeightedSum)

    def add(self, weight: float, start: np.ndarray) -> None:
        """Adds weight·start. The array is kept by reference: it must not change until the sum is read."""
        if self.latest is not None and _equal(self.latest, start):
            self.weight += weight
            return
        if self.latest is not None:
            self.earlier.add(self.weight, self.latest)
        self.latest, self.weight = start, weight


@dataclass
class Sums:
    """The accumulator of every mean.

    Attributes:
        roll: Who has answered.
        moved: Per tensor, Σ n_k of what arrived (differences or values).
        starts: Per tensor, Σ n_k·start_k where differences arrived and local values are averaged.
        weights: Per tensor, Σ n_k over its holders.
        moments: Per tensor, Σ Δ_k and Σ Δ_k², unweighted, where they are asked for.
    """

    roll: Roll
    moved: dict[str, WeightedSum] = field(default_factory=dict)
    starts: dict[str, StartSum] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    moments: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @property
    def num_replies(self) -> int:
        """How many replies were added."""
        return self.roll.num_replies


def no_sums(layout: Layout, context: MergeContext | None) -> Sums:
    """An empty accumulator; a tensor's sum is allocated with its first holder."""
    return Sums(Roll(layout, context))


def add_local_values(acc: Sums, update: ClientUpdate, weight: float, names: Iterable[str]) -> Sums:
    """Adds n_k·local_k of these tensors; the update has been admitted."""
    for name in names:
        acc.weights[name] = acc.weights.get(name, 0.0) + weight
        acc.moved.setdefault(name, WeightedSum()).add(weight, update.values[name])
        if update.send == "delta":
            acc.starts.setdefault(name, StartSum()).add(weight, update.start[name])
    return acc


def add_deltas(acc: Sums, update: ClientUpdate, weight: float, names: Iterable[str]) -> Sums:
    """Adds n_k·Δ_k of these tensors; the update has been admitted."""
    for name in names:
        acc.weights[name] = acc.weights.get(name, 0.0) + weight
        minus = update.start[name] if update.send == "weights" else None
        acc.moved.setdefault(name, WeightedSum()).add(weight, update.values[name], minus)
    return acc


def add_moments(acc: Sums, update: ClientUpdate) -> None:
    """Adds Δ_k and Δ_k² of every tensor of the update, unweighted."""
    for spec in update.layout:
        total, squares = acc.moments.setdefault(spec.name, (np.zeros(spec.shape), np.zeros(spec.shape)))
        values, start = update.values[spec.name].reshape(-1), update.start[spec.name].reshape(-1)
        for part in _chunks(total.size):
            delta = values[part].astype(np.float64)
            if update.send == "weights":
                delta -= start[part]
            total.reshape(-1)[part] += delta
            delta *= delta
            squares.reshape(-1)[part] += delta


def finish_mean(acc: Sums, denominator: Denominator, current: Mapping[str, np.ndarray]) -> Proposal:
    """Divides once and casts once.

        holders    W̄ = Σ n_k·local_k / Σ_holders n_k            after `add_local_values`
        cohort     W̄ = W + Σ n_k·Δ_k / Σ_cohort n_k             after `add_deltas`

    Raises:
        AggregationError: If there is no reply or a total weight is zero.
    """
    acc.roll.check_any()
    return Proposal(
        mean_tensors(acc, denominator, current),
        acc.roll.held(),
        mean_statistics(acc.roll, denominator),
        moments=acc.moments,
        layout=acc.roll.layout,
    )


def mean_statistics(roll: Roll, denominator: Denominator) -> dict[str, Any]:
    """What every mean records."""
    return {"denominator": denominator, "num_replies": roll.num_replies, "total_weight": roll.total_weight}


def mean_tensors(
    acc: Sums,
    denominator: Denominator,
    current: Mapping[str, np.ndarray],
    dtype: type[np.floating[Any]] = np.float32,
) -> NamedTensors:
    """The new values of every tensor that was added, in the layout's order."""
    tensors: NamedTensors = {}
    for spec in acc.roll.layout:
        if spec.name in acc.moved:
            weight = acc.weights[spec.name] if denominator == "holders" else acc.roll.total_weight
            base = current[spec.name] if denominator == "cohort" else None
            tensors[spec.name] = _mean(acc, spec, weight, base, dtype)
    return tensors


def _mean(
    acc: Sums, spec: TensorSpec, weight: float, base: np.ndarray | None, dtype: type[np.floating[Any]]
) -> np.ndarray:
    """The new value of one tensor."""
    if not weight > 0:
        raise AggregationError(
            f"The replies that trained {stratum_name(spec.stratum)} have no weight",
            where=f"tensor {spec.name}",
            expected="at least one of them with examples",
        )
    moved, start = acc.moved[spec.name].total, acc.starts.get(spec.name)
    result = np.empty(spec.shape, dtype)
    out, old = result.reshape(-1), None if base is None else base.reshape(-1)
    for part in _chunks(out.size):
        x = moved[part].copy() if moved is not None else np.zeros(part.stop - part.start)
        if start is not None and start.latest is not None:
            if start.earlier.total is not None:
                x += start.earlier.total[part]
            x += start.weight * start.latest.reshape(-1)[part].astype(np.float64)
        x /= weight
        if old is not None:
            x += old[part]
        out[part] = x
    return result


def _chunks(size: int) -> Iterator[slice]:
    for begin in range(0, size, _CHUNK):
        yield slice(begin, min(begin + _CHUNK, size))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays hold the same bits; at once where they are the same memory."""
    if a is b or (a.shape == b.shape and a.strides == b.strides and a.ctypes.data == b.ctypes.data):
        return True
    return a.shape == b.shape and np.array_equal(a.reshape(-1).view(np.uint32), b.reshape(-1).view(np.uint32))
