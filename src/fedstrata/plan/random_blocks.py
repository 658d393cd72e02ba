"""Random blocks, drawn anew for every client and round, as FedRA allocates them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedstrata.core.rng import generator, sample_without_replacement
from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.plan.base import PLANNERS, PlanContext, Planner, RoundPlan
from fedstrata.plan.checks import (
    count_problems,
    enough_blocks,
    kind_problems,
    plan_each,
    refuse,
    trainable_blocks,
    uniform_server_ranks,
)
from fedstrata.plan.defaults import counts_of


@PLANNERS.register
@dataclass(frozen=True)
class RandomBlocks(Planner):
    """Each client trains c blocks, drawn uniformly without replacement.

    The stream is generator(seed, "allocation", round, client): fresh in every round, independent of the other
    clients. Every block is drawn with probability c/L.

    Args:
        strata: c, for all clients or per device kind, 0 (the head only) to L; left out: by speed, see
            `counts_of`.

    References:
        Su et al., FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous
        Clients, ECCV 2024.
    """

    id: ClassVar[str] = "random_k"
    strata: int | dict[str, int] | None = None

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No state.

        Raises:
            PlanError: If a kind is unknown or left out, or the model has fewer blocks; all mistakes at once.
        """
        if isinstance(self.strata, int):
            refuse(self.id, count_problems("strata", self.strata, shape))
        else:
            refuse(self.id, kind_problems("strata", counts_of(self.strata, shape, fleet), shape, fleet))
        return {}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """Draws for every client; the record says how often each block was drawn."""
        counts = counts_of(self.strata, context.shape, context.fleet)
        drawn = {c: self._draw(c, counts[context.fleet[c].device.name], context) for c in context.cohort}
        times = Counter(block for blocks in drawn.values() for block in blocks)
        blocks = trainable_blocks(context)
        why = {
            "rule": self.id,
            "probabilities": {str(b): 1 / len(blocks) for b in blocks},
            "times_drawn": {str(b): times[b] for b in sorted(times)},
        }
        return plan_each(context, drawn.__getitem__, why), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns nothing."""
        return state

    def _draw(self, client: str, count: int, context: PlanContext) -> list[int]:
        blocks = enough_blocks(count, client, context)
        rng = generator(context.seed, "allocation", context.server_round, client)
        return [blocks[i] for i in sample_without_replacement(rng, np.zeros(len(blocks)), count)]
