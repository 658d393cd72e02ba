"""How many blocks per device kind, which ones by a geometric pattern: fixed sets, or draws by their chances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.plan.base import PLANNERS, PlanContext, Planner, RoundPlan
from fedstrata.plan.checks import (
    enough_blocks,
    kind_problems,
    plan_each,
    refuse,
    trainable_blocks,
    uniform_server_ranks,
)
from fedstrata.plan.defaults import counts_of
from fedstrata.plan.patterns import Pattern, draw_blocks, pattern_probabilities, pattern_sets


@PLANNERS.register
@dataclass(frozen=True)
class PatternBlocks(Planner):
    """Every device kind trains a fixed set of blocks, nested by a geometric pattern (GD-HLA).

    Where blocks without an adapted map exist, the pattern is laid over the others, in their order.

    Args:
        strata: c_g, the number of blocks per device kind, 0 (the head only) to L; left out: by speed, see `counts_of`.
        pattern: `triangle` (`shallow`): prefixes; `inverted_triangle` (`deep`): suffixes; `bottleneck`: both ends;
            `uniform`: spread evenly. Formulas: `pattern_sets`.

    References:
        Zhang et al., Fed-HeLLo: Efficient Federated Foundation Model Fine-Tuning with Heterogeneous LoRA
        Allocation, 2025 (arXiv 2506.12213).
        Differs in: which triangle is heavy at which end, and the completion of `uniform` to nested sets, are ours.
    """

    id: ClassVar[str] = "pattern"
    strata: dict[str, int] | None = None
    pattern: Pattern = "bottleneck"

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No state.

        Raises:
            PlanError: If a kind is unknown or left out, or the model has fewer blocks; all mistakes at once.
        """
        refuse(self.id, kind_problems("strata", counts_of(self.strata, shape, fleet), shape, fleet))
        return {}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """The set of the client's kind."""
        blocks, kinds = sized_blocks(counts_of(self.strata, context.shape, context.fleet), context)
        sets = sets_by_kind(self.pattern, blocks, counts_of(self.strata, context.shape, context.fleet))
        why = {
            "rule": self.id,
            "pattern": self.pattern,
            "sets": {kind: sets[kind] for kind in sorted({*kinds.values()})},
        }
        return plan_each(context, lambda client: sets[kinds[client]], why), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns nothing."""
        return state


@PLANNERS.register
@dataclass(frozen=True)
class RandomPattern(Planner):
    """Every client draws its blocks, fresh in every round, by chances that follow from a pattern (RGD-HLA).

        π_l = how many kinds' sets contain block l / the sizes of all these sets

    with the sets of `pattern_sets`, each kind's set once. Client k draws c_g blocks without replacement:
    `draw_blocks`.

    Args:
        strata: c_g, the number of blocks per device kind, 0 (the head only) to L; left out: by speed, see `counts_of`.
        pattern: As in `pattern`.

    References:
        Zhang et al., Fed-HeLLo: Efficient Federated Foundation Model Fine-Tuning with Heterogeneous LoRA
        Allocation, 2025 (arXiv 2506.12213).
        Differs in: kinds of equal size count as two groups (ours).
    """

    id: ClassVar[str] = "random_pattern"
    strata: dict[str, int] | None = None
    pattern: Pattern = "bottleneck"

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No state.

        Raises:
            PlanError: If a kind is unknown or left out, or the model has fewer blocks; all mistakes at once.
        """
        refuse(self.id, kind_problems("strata", counts_of(self.strata, shape, fleet), shape, fleet))
        return {}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """Draws for every client; the record has the chances and what was drawn."""
        chances = group_probabilities(self.pattern, counts_of(self.strata, context.shape, context.fleet), context)
        why = {"rule": self.id, "pattern": self.pattern}
        return plan_draws(chances, counts_of(self.strata, context.shape, context.fleet), context, why), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns nothing."""
        return state


def sized_blocks(strata: Mapping[str, int], context: PlanContext) -> tuple[list[int], dict[str, str]]:
    """The trainable blocks, enough for everyone, and the device kind of every client of the cohort.

    Raises:
        PlanError: If a kind should train more blocks than can be trained.
    """
    kinds = {client: context.fleet[client].device.name for client in sorted(context.cohort)}
    for client in kinds:
        enough_blocks(strata[kinds[client]], client, context)
    return trainable_blocks(context), kinds


def sets_by_kind(pattern: Pattern, blocks: Sequence[int], strata: Mapping[str, int]) -> dict[str, list[int]]:
    """The blocks of every device kind under a pattern."""
    counts = {kind: min(count, len(blocks)) for kind, count in strata.items()}
    sets = pattern_sets(pattern, len(blocks), counts.values())
    return {kind: [blocks[i] for i in sets[count]] for kind, count in counts.items()}


def group_probabilities(pattern: Pattern, strata: Mapping[str, int], context: PlanContext) -> np.ndarray:
    """π over the trainable blocks, every device kind one group."""
    blocks = trainable_blocks(context)
    place = {block: i for i, block in enumerate(blocks)}
    sets = sets_by_kind(pattern, blocks, strata).values()
    return pattern_probabilities([[place[b] for b in members] for members in sets], len(blocks))


def plan_draws(
    probabilities: np.ndarray, strata: Mapping[str, int], context: PlanContext, why: Mapping[str, Any]
) -> RoundPlan:
    """A plan in which every client draws its number of blocks; adds chances and draws to the reasons."""
    blocks, kinds = sized_blocks(strata, context)
    drawn = {c: draw_blocks(probabilities, blocks, c, strata[kind], context) for c, kind in kinds.items()}
    times = Counter(block for members in drawn.values() for block in members)
    reasons = {
        **why,
        "probabilities": {str(b): float(p) for b, p in zip(blocks, probabilities, strict=True)},
        "drawn": drawn,
        "times_drawn": {str(b): times[b] for b in sorted(times)},
    }
    return plan_each(context, drawn.__getitem__, reasons)
