"""Means that a few wrong replies cannot move far: what is common to them, the median and the trimmed mean.

All of them look at the differences Δ_k of the m holders of a stratum, unweighted, and move the mean of the holders'
starts s_k (which are usually one and the same):

    W̄ = (1/m)·Σ s_k + T(Δ_1, …, Δ_m)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np

from fedstrata.aggregate.admit import Roll, admit, normalized_weights
from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.core.tensors import Layout, NamedTensors, Stratum, TensorSpec, stratum_name
from fedstrata.errors import AggregationError, ConfigError, did_you_mean

Fallback: TypeAlias = Literal["mean", "keep"]
_CHUNK = 1 << 15


@dataclass
class CollectedUpdates:
    """The accumulator of robust means: the whole cohort's replies."""

    roll: Roll
    updates: list[ClientUpdate] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class StratumReplies:
    """What the cohort sent for one stratum.

    Attributes:
        stratum: Which one.
        specs: Its tensors that were trained.
        holders: The replies, in ascending client id.
    """

    stratum: Stratum
    specs: tuple[TensorSpec, ...]
    holders: tuple[ClientUpdate, ...]

    def chunks(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        """The holders' Δ of one tensor in cache-sized parts: where, and float64 values of shape [m, part]."""
        flat = [(u.values[name].reshape(-1), u.start[name].reshape(-1), u.send) for u in self.holders]
        for begin in range(0, flat[0][0].size, _CHUNK):
            part = slice(begin, begin + _CHUNK)
            rows = [v[part].astype(np.float64) - (s[part] if send == "weights" else 0.0) for v, s, send in flat]
            yield part, np.stack(rows)

    def start(self, name: str) -> np.ndarray:
        """The mean of the holders' starts, flat: the start itself where it is one and the same."""
        starts = [u.start[name].reshape(-1) for u in self.holders]
        if all(np.array_equal(x, starts[0]) for x in starts[1:]):
            return starts[0]
        total = np.zeros(starts[0].size)
        for x in starts:
            total += x
        return total / len(starts)


Combine: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""From Δ of shape [m, n] to one Δ of shape [n], entry by entry."""


@dataclass(frozen=True)
class Rule:
    """How one stratum is merged.

    Attributes:
        combine: T, the same for all parts of the stratum.
        why: For the record.
    """

    combine: Combine
    why: Mapping[str, Any] = field(default_factory=dict)


def check_fallback(fallback: str, part_id: str) -> None:
    """Raises `ConfigError` unless `fallback` is `mean` or `keep`."""
    known = get_args(Fallback)
    if fallback not in known:
        raise ConfigError(
            f'Unknown fallback "{fallback}"', where=f"{part_id}.fallback", do=did_you_mean(fallback, known)
        )


def collect_update(acc: CollectedUpdates, update: ClientUpdate, part: Aggregator[Any]) -> CollectedUpdates:
    """Keeps an update."""
    admit(acc.roll, update, 1.0, part)
    acc.updates.append(update)
    return acc


def uniform_weights(updates: Mapping[str, int]) -> dict[str, float]:
    """1/m for each holder."""
    return normalized_weights(updates, "uniform")


def finish_robust(
    acc: CollectedUpdates,
    fallback: Fallback,
    minimum: int,
    rule: Callable[[StratumReplies], Rule],
) -> Proposal:
    """Merges every held stratum; one with too few holders takes the fallback, which is recorded and warned about.

    Args:
        acc: The replies.
        fallback: `mean`: the unweighted mean. `keep`: the stratum is left out of the proposal.
        minimum: Fewest holders for the rule.
        rule: The robust mean of one stratum.

    Raises:
        AggregationError: If there is no reply.
    """
    acc.roll.check_any()
    layout = acc.roll.layout
    merged: NamedTensors = {}
    kept: dict[Stratum, int] = {}
    why: dict[str, dict[str, Any]] = {}
    warnings = []
    for stratum, m in acc.roll.held().items():
        replies = _replies(acc, stratum)
        if m < minimum:
            done = "took the plain mean" if fallback == "mean" else "stays as it is"
            warnings.append(f"{stratum_name(stratum)} has {m} of at least {minimum} holders and {done}")
            why[str(stratum)] = {"num_holders": m, "fallback": fallback}
            if fallback == "keep":
                continue
            chosen = Rule(_mean)
        else:
            chosen = rule(replies)
            why[str(stratum)] = {"num_holders": m, "fallback": None, **chosen.why}
        kept[stratum] = m
        for spec in replies.specs:
            merged[spec.name] = _merge_tensor(replies, spec, chosen.combine)
    return Proposal(
        {n: merged[n] for n in layout.names if n in merged},
        kept,
        {"denominator": "holders", "num_replies": acc.roll.num_replies, "strata": why, "warnings": warnings},
        layout=layout,
    )


def _replies(acc: CollectedUpdates, stratum: Stratum) -> StratumReplies:
    holders = tuple(u for u in acc.updates if u.layout.of(stratum))
    specs = holders[0].layout.of(stratum)
    for u in holders:
        if u.layout.of(stratum) != specs:
            raise AggregationError(
                "A robust mean needs the same tensors from all holders of a block",
                where=f"{stratum_name(stratum)}, reply of client {u.client}",
                expected=f"{[s.name for s in specs]}"[:200],
                got=f"{[s.name for s in u.layout.of(stratum)]}"[:200],
            )
    return StratumReplies(stratum, specs, holders)


def _merge_tensor(replies: StratumReplies, spec: TensorSpec, combine: Combine) -> np.ndarray:
    result = np.empty(spec.shape, np.float32)
    flat, start = result.reshape(-1), replies.start(spec.name)
    for part, deltas in replies.chunks(spec.name):
        flat[part] = start[part] + combine(deltas)
    return result


def _mean(deltas: np.ndarray) -> np.ndarray:
    return np.asarray(deltas.mean(axis=0))


def _median(deltas: np.ndarray) -> np.ndarray:
    return np.asarray(np.median(deltas, axis=0))


@AGGREGATORS.register
@dataclass(frozen=True)
class Median(Aggregator[CollectedUpdates]):
    """Entry by entry, the median of the holders' differences; m ≥ 3 holders.

        W̄ = s + median_k(Δ_k)

    with s the holders' start; of an even number the mean of the two middle values.

    Args:
        fallback: For a stratum with fewer holders. `mean`: their plain mean. `keep`: it stays as it is.

    References:
        Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018. Differs in:
        taken per stratum over its holders.
    """

    id: ClassVar[str] = "median"
    needs: ClassVar[Literal["sum", "all updates"]] = "all updates"
    unequal_ranks: ClassVar[bool] = False
    robust: ClassVar[bool] = True
    fallback: Fallback = "mean"

    def __post_init__(self) -> None:
        check_fallback(self.fallback, self.id)

    def zero(self, layout: Layout, context: MergeContext | None = None) -> CollectedUpdates:
        """Nothing collected."""
        return CollectedUpdates(Roll(layout, context))

    def add(self, acc: CollectedUpdates, update: ClientUpdate) -> CollectedUpdates:
        """Keeps the update."""
        return collect_update(acc, update, self)

    def finish(self, acc: CollectedUpdates, current: Mapping[str, np.ndarray]) -> Proposal:
        """The median of each held stratum."""
        return finish_robust(acc, self.fallback, 3, lambda replies: Rule(_median))

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """1/m: the mean that the distance is measured to."""
        return uniform_weights(updates)


@AGGREGATORS.register
@dataclass(frozen=True)
class TrimmedMean(Aggregator[CollectedUpdates]):
    """Entry by entry, the mean without the g smallest and the g largest differences.

        W̄ = s + 1/(m − 2g)·Σ_{j = g+1 … m−g} Δ_(j),    g = ⌊β·m⌋

    with s the holders' start, m their number, Δ_(1) ≤ … ≤ Δ_(m) the sorted differences and β the argument `beta`. It
    needs g ≥ 1 and m > 2g.

    Args:
        beta: Share that is cut on each side, 0 < β < ½.
        fallback: For a stratum with fewer holders. `mean`: their plain mean. `keep`: it stays as it is.

    References:
        Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018. Differs in:
        taken per stratum over its holders.
    """

    id: ClassVar[str] = "trimmed_mean"
    needs: ClassVar[Literal["sum", "all updates"]] = "all updates"
    unequal_ranks: ClassVar[bool] = False
    robust: ClassVar[bool] = True
    beta: float = 0.2
    fallback: Fallback = "mean"

    def __post_init__(self) -> None:
        check_fallback(self.fallback, self.id)
        if not 0 < self.beta < 0.5:
            raise ConfigError(
                "The share that a trimmed mean cuts on each side",
                where=f"{self.id}.beta",
                expected="a number above 0 and below 0.5",
                got=str(self.beta),
            )

    def zero(self, layout: Layout, context: MergeContext | None = None) -> CollectedUpdates:
        """Nothing collected."""
        return CollectedUpdates(Roll(layout, context))

    def add(self, acc: CollectedUpdates, update: ClientUpdate) -> CollectedUpdates:
        """Keeps the update."""
        return collect_update(acc, update, self)

    def finish(self, acc: CollectedUpdates, current: Mapping[str, np.ndarray]) -> Proposal:
        """The trimmed mean of each held stratum."""
        return finish_robust(acc, self.fallback, self.min_holders, self._rule)

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        """1/m: the mean that the distance is measured to."""
        return uniform_weights(updates)

    def num_trimmed(self, num_holders: int) -> int:
        """How many are cut on each side: g = ⌊β·m⌋ with m > 2g; a product that is whole up to rounding is whole.

        Example:
            >>> TrimmedMean(0.29).num_trimmed(100)
            29
        """
        return min(math.floor(self.beta * num_holders + 1e-9), (num_holders - 1) // 2)

    @property
    def min_holders(self) -> int:
        """The smallest m with ⌊β·m⌋ ≥ 1."""
        least = max(3, math.floor(1 / self.beta))
        return least if self.num_trimmed(least) >= 1 else least + 1

    def _rule(self, replies: StratumReplies) -> Rule:
        m = len(replies.holders)
        g = self.num_trimmed(m)
        return Rule(lambda deltas: np.asarray(np.sort(deltas, axis=0)[g : m - g].mean(axis=0)), {"num_trimmed": g})
