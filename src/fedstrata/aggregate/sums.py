"""Streaming sums in float64: O(model) memory, one division and one cast at the end.

The mean of the local values is kept apart as

    Σ n_k·local_k = Σ n_k·start_k + Σ n_k·Δ_k

because all clients of a round usually start from the same tensor: then the first sum costs a comparison instead of
a pass over memory. It is the same sum, to the bit, while Σ n_k < 2^29: n·start of a float32 is exact in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from fedstrata.aggregate.base import AGGREGATORS, ClientUpdate, Proposal
from fedstrata.core.tensors import Layout, Stratum, TensorSpec, stratum_name
from fedstrata.errors import AggregationError, ConfigError, did_you_mean

Denominator: TypeAlias = Literal["holders", "cohort"]
WEIGHTINGS = ("num_examples", "uniform")
_CHUNK = 1 << 15


def check_weighting(weight_by: str, aggregator: str) -> None:
    """Raises `ConfigError` unless `weight_by` is `num_examples` or `uniform`."""
    if weight_by not in WEIGHTINGS:
        raise ConfigError(
            f'Unknown weighting "{weight_by}"', where=f"{aggregator}.weight_by", do=did_you_mean(weight_by, WEIGHTINGS)
        )


def client_weight(num_examples: int, weight_by: str) -> float:
    """n_k, or 1 with `uniform`."""
    return float(num_examples) if weight_by == "num_examples" else 1.0


def normalized_weights(updates: Mapping[str, int], weight_by: str) -> dict[str, float]:
    """q_k = w_k / Σ w among these clients (client → n_k).

    Raises:
        AggregationError: If there is no client or all weights are zero.
    """
    weights = {client: client_weight(n, weight_by) for client, n in updates.items()}
    total = sum(weights.values())
    if not total > 0:
        raise AggregationError("The weights of the replies add up to zero", got=f"{len(weights)} replies")
    return {client: w / total for client, w in weights.items()}


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
        layout: The server's.
        moved: Per tensor, Σ n_k of what arrived (differences or values).
        starts: Per tensor, Σ n_k·start_k where differences arrived and local values are averaged.
        weights: Per tensor, Σ n_k over its holders.
        holders: Per stratum, how many clients trained it.
        total_weight: Σ n_k over all replies.
        num_replies: How many replies were added.
        last_client: The client of the latest one.
    """

    layout: Layout
    moved: dict[str, WeightedSum] = field(default_factory=dict)
    starts: dict[str, StartSum] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    holders: dict[Stratum, int] = field(default_factory=dict)
    total_weight: float = 0.0
    num_replies: int = 0
    last_client: str = ""


def add_local_values(acc: Sums, update: ClientUpdate, weight: float) -> Sums:
    """Adds n_k·local_k of every tensor that the client trained.

    Raises:
        AggregationError: If the update does not fit (see `_admit`); the accumulator is then unchanged.
    """
    _admit(acc, update, weight)
    for name in update.layout.names:
        acc.moved.setdefault(name, WeightedSum()).add(weight, update.values[name])
        if update.send == "delta":
            acc.starts.setdefault(name, StartSum()).add(weight, update.start[name])
    return acc


def add_deltas(acc: Sums, update: ClientUpdate, weight: float) -> Sums:
    """Adds n_k·Δ_k of every tensor that the client trained.

    Raises:
        AggregationError: If the update does not fit (see `_admit`); the accumulator is then unchanged.
    """
    _admit(acc, update, weight)
    for name in update.layout.names:
        minus = update.start[name] if update.send == "weights" else None
        acc.moved.setdefault(name, WeightedSum()).add(weight, update.values[name], minus)
    return acc


def finish_mean(acc: Sums, denominator: Denominator, current: Mapping[str, np.ndarray]) -> Proposal:
    """Divides once and casts once.

        holders    W̄ = Σ n_k·local_k / Σ_holders n_k            after `add_local_values`
        cohort     W̄ = W + Σ n_k·Δ_k / Σ_cohort n_k             after `add_deltas`

    Raises:
        AggregationError: If there is no reply or a total weight is zero.
    """
    if acc.num_replies == 0 or not acc.total_weight > 0:
        raise AggregationError(
            "There is nothing to average",
            expected="at least one reply with a weight above zero",
            got=f"{acc.num_replies} replies, total weight {acc.total_weight:g}",
        )
    tensors = {}
    for spec in acc.layout:
        if spec.name in acc.moved:
            weight = acc.weights[spec.name] if denominator == "holders" else acc.total_weight
            base = current[spec.name] if denominator == "cohort" else None
            tensors[spec.name] = _mean(acc, spec, weight, base)
    holders = {s: acc.holders[s] for s in acc.layout.strata if s in acc.holders}
    statistics = {"denominator": denominator, "num_replies": acc.num_replies, "total_weight": acc.total_weight}
    return Proposal(tensors, holders, statistics)


def _mean(acc: Sums, spec: TensorSpec, weight: float, base: np.ndarray | None) -> np.ndarray:
    """The new value of one tensor, float32."""
    if not weight > 0:
        raise AggregationError(
            f"The replies that trained {stratum_name(spec.stratum)} have no weight",
            where=f"tensor {spec.name}",
            expected="at least one of them with examples",
        )
    moved, start = acc.moved[spec.name].total, acc.starts.get(spec.name)
    result = np.empty(spec.shape, np.float32)
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


def _admit(acc: Sums, update: ClientUpdate, weight: float) -> None:
    """Checks an update and counts it.

    Raises:
        AggregationError: If it comes out of order, holds a tensor that the server lacks, has another rank than
            the server, or a negative weight.
    """
    where = f"reply of client {update.client}"
    if acc.num_replies and update.client <= acc.last_client:
        raise AggregationError(
            "Replies are added in ascending client id, each client once",
            where=where,
            expected=f"an id after {acc.last_client}",
        )
    if not weight >= 0:
        raise AggregationError("A reply has a negative weight", where=where, got=f"{weight:g}")
    for spec in update.layout:
        if spec.name not in acc.layout:
            raise AggregationError(f"The server has no tensor {spec.name}", where=where)
        whole = acc.layout[spec.name]
        if spec.shape != whole.shape:
            raise _other_rank(spec, whole, where)
        shapes = {update.values[spec.name].shape, update.start[spec.name].shape}
        if shapes != {spec.shape}:
            raise AggregationError(
                f"Tensor {spec.name} is not as its layout says",
                where=where,
                expected=str(list(spec.shape)),
                got=" and ".join(str(list(s)) for s in sorted(shapes)),
            )
    for name in update.layout.names:
        acc.weights[name] = acc.weights.get(name, 0.0) + weight
    for stratum in update.layout.strata:
        acc.holders[stratum] = acc.holders.get(stratum, 0) + 1
    acc.total_weight += weight
    acc.num_replies += 1
    acc.last_client = update.client


def _other_rank(spec: TensorSpec, whole: TensorSpec, where: str) -> AggregationError:
    if spec.kind == "weight":
        return AggregationError(
            f"Tensor {spec.name} has another shape than the server's",
            where=where,
            expected=str(list(whole.shape)),
            got=str(list(spec.shape)),
        )
    able = [part for part in AGGREGATORS if AGGREGATORS[part].unequal_ranks]
    return AggregationError(
        f"This mean needs the same rank on every client of {stratum_name(spec.stratum)}",
        where=where,
        expected=f"rank {whole.rank}",
        got=f"rank {spec.rank}",
        do="give every client that rank, or use an aggregator for unequal ranks"
        + (f": {', '.join(able)}" if able else ""),
    )


def _chunks(size: int) -> Iterator[slice]:
    for begin in range(0, size, _CHUNK):
        yield slice(begin, min(begin + _CHUNK, size))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays hold the same bits; at once where they are the same memory."""
    if a is b or (a.shape == b.shape and a.strides == b.strides and a.ctypes.data == b.ctypes.data):
        return True
    return a.shape == b.shape and np.array_equal(a.reshape(-1).view(np.uint32), b.reshape(-1).view(np.uint32))
