"""The accumulator of those who need the whole cohort's pairs at once, and the loop over targets that ends a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedstrata.aggregate.admit import (
    Roll,
    admit,
    check_adapters_only,
    check_scalings_known,
    client_weight,
    normalized_weights,
)
from fedstrata.aggregate.base import Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.sums import Sums, add_local_values, mean_statistics, mean_tensors
from fedstrata.core.linalg import LowRank
from fedstrata.core.lora import LoraTerm
from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.errors import AggregationError


@dataclass
class CollectedPairs:
    """LoRA pairs of the whole cohort; plain weights (the head) stream into a mean.

    Attributes:
        roll: Who has answered.
        plain: Sums of the plain weights.
        updates: The replies, cut to their LoRA factors.
    """

    roll: Roll
    plain: Sums
    updates: list[ClientUpdate] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class TargetReplies:
    """What the cohort sent for one target.

    Attributes:
        terms: Local pairs of its holders in float64, each with its own scaling s_k and share q_k.
        scaling: s, the server's.
        fresh_A: Initial rows of A at the server's rank.
        current: The server's A and B.
    """

    terms: tuple[LoraTerm, ...]
    scaling: float
    fresh_A: np.ndarray
    current: tuple[np.ndarray, np.ndarray]

    @property
    def rank(self) -> int:
        """The server's rank."""
        return int(self.fresh_A.shape[0])


@dataclass(frozen=True, eq=False)
class Merged:
    """What becomes of one target.

    Attributes:
        lora_A: The server's new A.
        lora_B: The server's new B.
        base: What the base weight takes over, everything folded in.
        numbers: For the record.
    """

    lora_A: np.ndarray
    lora_B: np.ndarray
    base: LowRank | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


def no_pairs(layout: Layout, context: MergeContext | None, part: Aggregator[Any]) -> CollectedPairs:
    """An empty accumulator.

    Raises:
        AggregationError: If the layout holds plain weights outside the head, or a target's scaling is not known.
    """
    check_adapters_only(layout, part.id)
    check_scalings_known(layout, context, part.id)
    roll = Roll(layout, context)
    return CollectedPairs(roll, Sums(roll))


def collect(acc: CollectedPairs, update: ClientUpdate, part: Aggregator[Any], weight_by: str) -> CollectedPairs:
    """Keeps an update's pairs and adds its plain weights.

    Raises:
        AggregationError: If it is not admitted, or holds one factor of a pair only.
    """
    where = f"reply of client {update.client}"
    check_whole_pairs(update, part.id, where)
    weight = client_weight(update.num_examples, weight_by)
    admit(acc.roll, update, weight, part)
    add_local_values(acc.plain, update, weight, [s.name for s in update.layout if s.kind == "weight"])
    pairs = Layout(tuple(s for s in update.layout if s.kind != "weight"))
    acc.updates.append(
        replace(
            update,
            layout=pairs,
            start={n: update.start[n] for n in pairs.names},
            values={n: update.values[n] for n in pairs.names},
        )
    )
    return acc


def check_whole_pairs(update: ClientUpdate, part_id: str, where: str) -> None:
    """Raises `AggregationError` if an update holds one factor of a pair only."""
    for target in update.layout.targets:
        missing = [n for n in (f"{target}.lora_A", f"{target}.lora_B") if n not in update.layout]
        if missing:
            raise AggregationError(
                f"{part_id} needs both factors of every pair", where=f"{where}, target {target}", got=f"no {missing[0]}"
            )


def finish_pairs(
    acc: CollectedPairs,
    current: Mapping[str, np.ndarray],
    weight_by: str,
    merge: Callable[[TargetReplies], Merged],
) -> Proposal:
    """Merges every held target with `merge`, target by target, and casts once to float32.

    Raises:
        AggregationError: If there is no reply, or the holders of a target have no weight.
    """
    acc.roll.check_any()
    layout = acc.roll.layout
    merged: NamedTensors = mean_tensors(acc.plain, "holders", current)
    base: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    numbers: dict[str, dict[str, float]] = {}
    for target in layout.targets:
        names = (f"{target}.lora_A", f"{target}.lora_B")
        holders = [u for u in acc.updates if names[0] in u.layout]
        if not holders:
            continue
        result = merge(_replies(acc, target, holders, weight_by, current))
        merged[names[0]] = result.lora_A.astype(np.float32)
        merged[names[1]] = result.lora_B.astype(np.float32)
        if result.base is not None:
            base[target] = (result.base.left.astype(np.float32), result.base.right.astype(np.float32))
        for key, value in result.numbers.items():
            numbers.setdefault(key, {})[target] = value
    return Proposal(
        {name: merged[name] for name in layout.names if name in merged},
        acc.roll.held(),
        mean_statistics(acc.roll, "holders") | numbers,
        base_update=base,
        layout=layout,
    )


def _replies(
    acc: CollectedPairs, target: str, holders: list[ClientUpdate], weight_by: str, current: Mapping[str, np.ndarray]
) -> TargetReplies:
    a, b = f"{target}.lora_A", f"{target}.lora_B"
    context = acc.roll.context or MergeContext()
    common = context.scaling[target]
    shares = normalized_weights({u.client: u.num_examples for u in holders}, weight_by)
    terms = [LoraTerm(u.local(a), u.local(b), u.scaling.get(target, common), shares[u.client]) for u in holders]
    return TargetReplies(tuple(terms), common, context.fresh_A(acc.roll.layout[a]), (current[a], current[b]))
