"""Blocks written down client by client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.errors import PlanError, did_you_mean
from fedstrata.plan.base import PLANNERS, PlanContext, Planner, RoundPlan
from fedstrata.plan.checks import plan_each, refuse, trainable_blocks, uniform_server_ranks


@PLANNERS.register
@dataclass(frozen=True)
class FixedBlocks(Planner):
    """Each client trains the blocks that are written down for it, in every round.

    Args:
        clients: Block numbers, from 0 at the input, per client; an empty list trains the head only. Every client
            of the fleet must be listed.
    """

    id: ClassVar[str] = "fixed"
    clients: dict[str, list[int]]

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No state.

        Raises:
            PlanError: If clients are unknown or left out, or blocks do not exist or are named twice; all mistakes
                at once.
        """
        problems = []
        for client, blocks in self.clients.items():
            if client not in fleet:
                problems.append(f'unknown client "{client}": {did_you_mean(client, fleet.ids)}')
            wrong = sorted({b for b in blocks if b not in shape.blocks})
            if wrong:
                problems.append(f'client "{client}": there is no block {wrong}; blocks are 0 to {shape.num_blocks - 1}')
            if len(set(blocks)) != len(blocks):
                problems.append(f'client "{client}": a block is named twice in {blocks}')
        problems += [f'client "{client}" is not listed' for client in fleet.ids if client not in self.clients]
        refuse(self.id, problems)
        return {}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def lowest_block(self, shape: ModelShape, fleet: Fleet) -> int:
        """The lowest that is written down."""
        return min((b for blocks in self.clients.values() for b in blocks), default=shape.num_blocks)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """What is written down."""
        return plan_each(context, lambda client: self._blocks(client, context), {"rule": self.id}), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns nothing."""
        return state

    def _blocks(self, client: str, context: PlanContext) -> list[int]:
        if client not in self.clients:
            raise PlanError(f'The plan "{self.id}" does not list client "{client}"', do="add it under plan.clients")
        able = trainable_blocks(context)
        missing = sorted(set(self.clients[client]) - set(able))
        if missing:
            raise PlanError(
                f"Client {client} should train blocks {missing}, which have nothing to train",
                expected=f"blocks among {able}",
                do="adapter.targets decides which blocks carry adapters",
            )
        return sorted(self.clients[client])
