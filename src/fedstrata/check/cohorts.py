"""Small cohorts of replies for the laws of aggregators, and what their effective weights are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from fedstrata.aggregate.base import Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.check.law import LeftOut, Trial
from fedstrata.core.lora import LoraTerm, product
from fedstrata.core.rng import generator
from fedstrata.core.tensors import HEAD, Kind, Layout, NamedTensors, Stratum, TensorSpec, stratum_name
from fedstrata.errors import AggregationError

Diet: TypeAlias = Literal["A and B", "B only", "A only", "whole weights"]
"""What clients train in a world."""

_FROZEN: dict[Diet, tuple[Kind, ...]] = {"A and B": (), "B only": ("lora_A",), "A only": ("lora_B",)}
SCALING = 2.0


@dataclass(frozen=True)
class Cohort:
    """A server's tensors and the replies of one round.

    Attributes:
        layout: The server's.
        current: Its tensors.
        context: Scaling, seed and round.
        updates: In ascending client id.
    """

    layout: Layout
    current: NamedTensors
    context: MergeContext
    updates: tuple[ClientUpdate, ...]

    @property
    def strata(self) -> list[Stratum]:
        """Held strata, in the layout's order."""
        return [s for s in self.layout.strata if self.holders(s)]

    def holders(self, stratum: Stratum) -> list[ClientUpdate]:
        """Who trained a stratum."""
        return [u for u in self.updates if stratum in u.layout.strata]

    def merge(self, aggregator: Aggregator[Any], updates: Sequence[ClientUpdate] | None = None) -> Proposal:
        """What the aggregator makes of the replies."""
        acc = aggregator.zero(self.layout, self.context)
        for update in self.updates if updates is None else updates:
            acc = aggregator.add(acc, update)
        return aggregator.finish(acc, self.current)

    def effective(self, tensors: Mapping[str, np.ndarray], name: str, scaling: float = SCALING) -> np.ndarray:
        """s·B·A of a map, or a plain weight; what is not in `tensors` is the server's."""
        known = self.current | dict(tensors)
        if name in self.layout:
            return known[name].astype(np.float64)
        return product(LoraTerm(known[f"{name}.lora_A"], known[f"{name}.lora_B"], scaling))

    def merged(self, proposal: Proposal, name: str) -> np.ndarray:
        """What the server's model has at a map after the proposal, without this round's base."""
        dense = self.effective(proposal.tensors, name)
        if name in proposal.base_update:
            left, right = proposal.base_update[name]
            dense = dense + left.astype(np.float64) @ right
        return dense

    def maps(self, update: ClientUpdate) -> list[str]:
        """Maps and plain weights that an update trained a part of."""
        return list(dict.fromkeys(s.target for s in update.layout))


@dataclass
class Taster:
    """An aggregator, and what kinds of replies it takes; found out by trying, once.

    Attributes:
        aggregator: The part.
        diets: What it takes.
    """

    aggregator: Aggregator[Any]
    diets: tuple[Diet, ...] = field(init=False)

    def __post_init__(self) -> None:
        pairs: list[Diet] = [d for d in _FROZEN if self._takes(d)]
        # Whoever takes whole pairs is not asked about single factors: which of them come is the method's choice.
        self.diets = (*pairs[:1], *(("whole weights",) if self._takes("whole weights") else ()))

    def _takes(self, diet: Diet) -> bool:
        try:
            trial = Trial(0, 0)
            world = make_cohort(trial, diet, num_clients=1)
            everything = make_update(trial, world.layout, world.current, diet, "c0", 3, world.layout.strata)
            world.merge(self.aggregator, [everything])
        except AggregationError:
            return False
        return True

    def cohort(self, trial: Trial, *, pairs_only: bool = False, num_clients: int | None = None) -> Cohort:
        """A world that it takes; every third is of whole weights, if it takes them."""
        diets = [d for d in self.diets if not (pairs_only and d == "whole weights")]
        if not diets:
            raise LeftOut("it takes no such replies")
        diet = diets[1] if len(diets) > 1 and trial.index % 3 == 2 else diets[0]
        return make_cohort(trial, diet, num_clients=num_clients)


def make_layout(trial: Trial, diet: Diet) -> Layout:
    """Blocks with one map each, never square, and a head; from one block of rank 1 upwards."""
    rng = trial.rng("layout")
    num_blocks = 1 + min(trial.index // 3, 3)
    rank = 1 if trial.index == 0 else int(rng.integers(1, 4))
    wide, high = rank + 1 + int(rng.integers(3)), rank + 4 + int(rng.integers(3))
    specs: list[TensorSpec] = []
    for b in range(num_blocks):
        if diet == "whole weights":
            specs.append(TensorSpec(f"b.{b}.q.weight", (high, wide), b))
        else:
            specs.append(TensorSpec(f"b.{b}.q.lora_A", (rank, wide), b, "lora_A"))
            specs.append(TensorSpec(f"b.{b}.q.lora_B", (high, rank), b, "lora_B"))
    return Layout((*specs, TensorSpec("head.weight", (2, high), HEAD), TensorSpec("head.bias", (2,), HEAD)))


def make_cohort(trial: Trial, diet: Diet, *, num_clients: int | None = None) -> Cohort:
    """One to five clients, each with some of the strata; the second client never has the head."""
    layout = make_layout(trial, diet)
    rng = trial.rng("cohort")
    count = num_clients or 1 + min(trial.index, 4)
    current = _values(layout, trial, "current")
    context = MergeContext(dict.fromkeys(layout.targets, SCALING), seed=trial.seed, server_round=1)
    updates = []
    for k in range(count):
        chosen = [s for s in layout.strata if rng.random() < 0.6 and not (k == 1 and s == HEAD)]
        strata = chosen or [0]
        if k == 0 and HEAD not in strata:
            strata = [*strata, HEAD]
        size = int(rng.integers(1, 40))
        updates.append(make_update(trial, layout, current, diet, f"c{k}", size, strata))
        names = ", ".join(stratum_name(s) for s in layout.strata if s in strata)
        trial.note(f"client c{k}: {size} examples, trains {names} ({diet})")
    return Cohort(layout, current, context, tuple(updates))


def make_update(
    trial: Trial, layout: Layout, current: NamedTensors, diet: Diet, client: str, size: int, strata: Sequence[Stratum]
) -> ClientUpdate:
    """A reply that trained these strata; even clients send differences, odd ones values."""
    mine = layout.restrict(strata).without(_FROZEN.get(diet, ()))
    start = {n: current[n] for n in layout.restrict(strata).names}
    send: Literal["delta", "weights"] = "weights" if client[-1] in "13579" else "delta"
    return ClientUpdate(client, size, mine, start, _values(mine, trial, client), send)


def cut(update: ClientUpdate, rank: int) -> ClientUpdate:
    """The same reply at a smaller rank: the leading slices."""
    ranks: dict[Stratum, int] = dict.fromkeys(update.layout.strata, rank)
    layout = update.layout.with_ranks(ranks)

    def part(tensors: NamedTensors, name: str) -> np.ndarray:
        whole = tensors[name]
        smaller = layout[name].shape if name in layout else whole.shape
        return np.ascontiguousarray(whole[tuple(slice(n) for n in smaller)])

    start = {n: part(update.start, n) for n in layout.names}
    return replace(update, layout=layout, start=start, values={n: part(update.values, n) for n in layout.names})


def _values(layout: Layout, trial: Trial, whose: str) -> NamedTensors:
    return {
        s.name: generator(trial.seed, "check", trial.index, whose, s.name).standard_normal(s.shape).astype(np.float32)
        for s in layout
    }
