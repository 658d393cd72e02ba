"""A suffix of blocks whose depth is given per device kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.plan.base import PLANNERS, PlanContext, Planner, RoundPlan
from fedstrata.plan.blocks import suffix
from fedstrata.plan.checks import kind_problems, plan_each, refuse, uniform_server_ranks
from fedstrata.plan.defaults import counts_of


@PLANNERS.register
@dataclass(frozen=True)
class SuffixByDevice(Planner):
    """Each client trains the last `depth[kind]` blocks, counted from the output.

    Adapters below stay in its forward pass, frozen.

    Args:
        depth: Number of blocks per device kind, 0 (the head only) to L, exactly the kinds of the fleet; left out: by
            speed, see `counts_of`.
    """

    id: ClassVar[str] = "suffix_by_device"
    depth: dict[str, int] | None = None

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No state.

        Raises:
            PlanError: If a kind is unknown or left out, or the model has fewer blocks; all mistakes at once.
        """
        refuse(self.id, kind_problems("depth", counts_of(self.depth, shape, fleet), shape, fleet))
        return {}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def lowest_block(self, shape: ModelShape, fleet: Fleet) -> int:
        """L less the largest depth of a device in the fleet."""
        depth = counts_of(self.depth, shape, fleet)
        return shape.num_blocks - max(depth[client.device.name] for client in fleet.clients)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """Depth by the client's device."""
        kinds = {client: context.fleet[client].device.name for client in context.cohort}
        depth = counts_of(self.depth, context.shape, context.fleet)
        why = {"rule": self.id, "depth": {kind: depth[kind] for kind in sorted(set(kinds.values()))}}
        return plan_each(context, lambda client: suffix(depth[kinds[client]], client, context), why), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns nothing."""
        return state
