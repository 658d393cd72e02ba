"""Which replies an aggregator takes, and who held what: the same checks for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext
from fedstrata.core.tensors import HEAD, Layout, Stratum, TensorSpec, stratum_name
from fedstrata.errors import AggregationError, ConfigError, did_you_mean

WEIGHTINGS = ("num_examples", "uniform")


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
class Roll:
    """Who has answered so far.

    Attributes:
        layout: The server's.
        context: What is known about the run.
        holders: Per stratum, how many clients trained it.
        total_weight: Σ w_k over all replies.
        num_replies: How many replies were added.
        last_client: The client of the latest one.
    """

    layout: Layout
    context: MergeContext | None = None
    holders: dict[Stratum, int] = field(default_factory=dict)
    total_weight: float = 0.0
    num_replies: int = 0
    last_client: str = ""

    def held(self) -> dict[Stratum, int]:
        """The holders in the layout's order."""
        return {s: self.holders[s] for s in self.layout.strata if s in self.holders}

    def check_any(self) -> None:
        """Raises `AggregationError` if there is no reply, or none with a weight."""
        if self.num_replies == 0 or not self.total_weight > 0:
            raise AggregationError(
                "There is nothing to average",
                expected="at least one reply with a weight above zero",
                got=f"{self.num_replies} replies, total weight {self.total_weight:g}",
            )


def admit(roll: Roll, update: ClientUpdate, weight: float, part: Aggregator[Any], *, any_slices: bool = False) -> None:
    """Checks an update and counts it; the roll is unchanged if it is refused.

    Args:
        roll: Changed in place.
        update: The reply.
        weight: w_k.
        part: The aggregator: it decides about unequal ranks and scalings.
        any_slices: Whether other than the leading rank slices may come.

    Raises:
        AggregationError: If the update comes out of order, holds a tensor that the server lacks, a rank, rank slices
            or a scaling that the aggregator does not take, or a negative weight.
    """
    where = f"reply of client {update.client}"
    if roll.num_replies and update.client <= roll.last_client:
        raise AggregationError(
            "Replies are added in ascending client id, each client once",
            where=where,
            expected=f"an id after {roll.last_client}",
        )
    if not weight >= 0:
        raise AggregationError("A reply has a negative weight", where=where, got=f"{weight:g}")
    for spec in update.layout:
        _check_tensor(roll, update, spec, part, where)
    if not part.folds_scaling and not any_slices:
        _check_scaling(roll.context, update, part, where)
    if update.slices:
        if not any_slices:
            raise AggregationError(
                f"{part.id} takes the leading rank slices only", where=where, got=f"slices {dict(update.slices)}"[:200]
            )
        _check_slices(roll, update, where)
    for stratum in update.layout.strata:
        roll.holders[stratum] = roll.holders.get(stratum, 0) + 1
    roll.total_weight += weight
    roll.num_replies += 1
    roll.last_client = update.client


def check_adapters_only(layout: Layout, part_id: str) -> None:
    """Raises `AggregationError` if the layout holds plain weights outside the head."""
    plain = [s.name for s in layout if s.kind == "weight" and s.stratum != HEAD]
    if plain:
        raise AggregationError(
            f"{part_id} takes LoRA factors and the head only",
            got=f"{len(plain)} plain weights, e.g. {plain[0]}",
            do='use holders_mean, or adapter.kind = "lora"',
        )


def check_scalings_known(layout: Layout, context: MergeContext | None, part_id: str) -> None:
    """Raises `AggregationError` unless the server's scaling of every target is known and positive."""
    known = context.scaling if context is not None else {}
    missing = [t for t in layout.targets if not known.get(t, 0.0) > 0]
    if missing:
        raise AggregationError(
            f"{part_id} forms products and needs the scaling of every target",
            where=f"target {missing[0]}",
            expected="a number above 0 in MergeContext.scaling",
            got=str(known.get(missing[0])),
        )


def _check_tensor(roll: Roll, update: ClientUpdate, spec: TensorSpec, part: Aggregator[Any], where: str) -> None:
    if spec.name not in roll.layout:
        raise AggregationError(f"The server has no tensor {spec.name}", where=where)
    whole = roll.layout[spec.name]
    fits = spec.shape == whole.shape
    if part.unequal_ranks and spec.kind != "weight":
        fits = 1 <= spec.rank <= whole.rank and spec.with_rank(whole.rank).shape == whole.shape
    if not fits:
        raise _other_rank(spec, whole, where)
    shapes = {update.values[spec.name].shape, update.start[spec.name].shape}
    if shapes != {spec.shape}:
        raise AggregationError(
            f"Tensor {spec.name} is not as its layout says",
            where=where,
            expected=str(list(spec.shape)),
            got=" and ".join(str(list(s)) for s in sorted(shapes)),
        )


def _check_scaling(context: MergeContext | None, update: ClientUpdate, part: Aggregator[Any], where: str) -> None:
    known = context.scaling if context is not None else {}
    for target in update.layout.targets:
        mine, common = update.scaling.get(target), known.get(target)
        if mine is not None and common is not None and not math.isclose(mine, common, rel_tol=1e-12):
            raise AggregationError(
                f"{part.id} merges factors, which must all have one scaling",
                where=f"{where}, target {target}",
                expected=f"{common:g}",
                got=f"{mine:g}",
                do="give every client the server's scaling, or use an aggregator that forms products",
            )


def _check_slices(roll: Roll, update: ClientUpdate, where: str) -> None:
    for stratum, slices in update.slices.items():
        for spec in update.layout.of(stratum):
            whole = roll.layout[spec.name].rank
            if spec.kind != "weight" and (
                len(slices) != spec.rank or len(set(slices)) != spec.rank or not all(0 <= h < whole for h in slices)
            ):
                raise AggregationError(
                    f"The rank slices of {stratum_name(stratum)} make no sense",
                    where=where,
                    expected=f"{spec.rank} different numbers from 0 to {whole - 1}",
                    got=str(slices)[:200],
                )


def _other_rank(spec: TensorSpec, whole: TensorSpec, where: str) -> AggregationError:
    if spec.kind == "weight" or spec.with_rank(whole.rank).shape != whole.shape:
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
