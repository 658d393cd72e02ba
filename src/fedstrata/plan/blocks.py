"""The same blocks on every client: all, the last k, the first k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.plan.base import PLANNERS, PlanContext, Planner, RoundPlan
from fedstrata.plan.checks import count_problems, enough_blocks, plan_each, refuse, uniform_server_ranks


@PLANNERS.register
@dataclass(frozen=True)
class AllStrata(Planner):
    """Every client trains every stratum: all blocks, the head, and the embeddings in full-parameter tuning."""

    id: ClassVar[str] = "all"

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No state; fits every model and fleet."""
        return {}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """Everything for everyone."""
        return plan_each(context, lambda client: context.strata, {"rule": self.id}), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns nothing."""
        return state


@PLANNERS.register
@dataclass(frozen=True)
class LastBlocks(Planner):
    """Every client trains the k blocks nearest the output: L−k, …, L−1. Nothing below them is differentiated.

    Args:
        k: Number of blocks, 0 (the head only) to L.
    """

    id: ClassVar[str] = "last_k"
    k: int = 1

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No state.

        Raises:
            PlanError: If the model has fewer than k blocks.
        """
        refuse(self.id, count_problems("k", self.k, shape))
        return {}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def lowest_block(self, shape: ModelShape, fleet: Fleet) -> int:
        """L − k."""
        return shape.num_blocks - self.k

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """The same suffix for everyone."""
        return plan_each(context, lambda client: suffix(self.k, client, context), {"rule": self.id, "k": self.k}), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns nothing."""
        return state


@PLANNERS.register
@dataclass(frozen=True)
class FirstBlocks(Planner):
    """Every client trains the k blocks nearest the input: 0, …, k−1. Gradients pass through all blocks.

    Args:
        k: Number of blocks, 0 (the head only) to L.
    """

    id: ClassVar[str] = "first_k"
    k: int = 1

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No state.

        Raises:
            PlanError: If the model has fewer than k blocks.
        """
        refuse(self.id, count_problems("k", self.k, shape))
        return {}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """The same prefix for everyone."""
        why = {"rule": self.id, "k": self.k}
        return plan_each(context, lambda client: enough_blocks(self.k, client, context)[: self.k], why), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns nothing."""
        return state


def suffix(depth: int, client: str, context: PlanContext) -> list[int]:
    """The `depth` trainable blocks nearest the output."""
    blocks = enough_blocks(depth, client, context)
    return blocks[len(blocks) - depth :]
