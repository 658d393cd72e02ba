"""Everything is trained, after one question for the gradient at every map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.plan.base import PLANNERS, AskingPlanner, PlanContext, Probes, RoundPlan
from fedstrata.plan.checks import plan_each, refuse, trainable_blocks, uniform_server_ranks


@PLANNERS.register
@dataclass(frozen=True)
class AfterGradient(AskingPlanner):
    """All clients train all blocks; before round 1 its cohort sends the loss's gradient at every map.

    The answers, truncated to the run's rank, give the frozen factors of `adapter.kind = "square"`.

    Args:
        examples: Most training examples per client that the gradient is taken of.
    """

    id: ClassVar[str] = "after_gradient"
    examples: int = 64

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No state.

        Raises:
            PlanError: If `examples` is below 1.
        """
        refuse(self.id, [] if self.examples >= 1 else [f"examples = {self.examples}: 1 or more"])
        return {}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def probes(self, state: dict[str, Any], context: PlanContext) -> Probes | None:
        """The gradient, once."""
        return Probes("gradient", {"examples": self.examples}) if context.server_round == 1 else None

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """All blocks for everybody."""
        why: dict[str, Any] = {"rule": self.id}
        if context.answers:
            why["answers"] = {client: answer["count"] for client, answer in context.answers.items()}
        blocks: list[Stratum] = [*trainable_blocks(context)]
        return plan_each(context, lambda client: blocks, why), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns nothing."""
        return state
