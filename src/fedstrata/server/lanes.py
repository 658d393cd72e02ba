"""One model of a round, from its tasks to what its replies make of it; usually there is only one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedstrata.aggregate.base import ClientUpdate, MergeContext
from fedstrata.aggregate.exactness import ExactnessProbe
from fedstrata.core.tensors import NamedTensors
from fedstrata.core.wire import Bytes, frame_sections
from fedstrata.plan.base import ClientPlan, RoundPlan
from fedstrata.record.checkpoint import ServerState
from fedstrata.server.apply import Applied, apply_proposal, unchanged
from fedstrata.server.downlink import Downlink
from fedstrata.server.measure import Traffic
from fedstrata.server.setup import RoundSetup
from fedstrata.server.tasks import make_task


class Lane:
    """Sends tasks of one model and merges the replies.

    Args:
        setup: What all rounds share.
        state: With this model's tensors.
        server_round: From 1.
    """

    def __init__(self, setup: RoundSetup, state: ServerState, server_round: int) -> None:
        self._setup, self._state = setup, state
        self._downlink = Downlink(setup, state)
        aggregator = setup.method.aggregator
        self._accumulator: Any = aggregator.zero(setup.layout, MergeContext(setup.scaling, setup.seed, server_round))
        self._probe = ExactnessProbe(
            setup.layout, setup.scaling, aggregator, max_values=setup.exactness_values, personal=setup.is_personal
        )
        self._num_merged = 0

    def send(self, plan: ClientPlan) -> tuple[Traffic, Bytes]:
        """What is noted about the task of one client, and its bytes."""
        sent = self._downlink.pack(make_task(self._setup, self._state, plan))
        return Traffic(plan, sent.task, slices=sent.slices, down=frame_sections(sent.data)), sent.data

    def start(self, mine: Traffic) -> NamedTensors:
        """What the server knows about a client's start; made when its reply is read, for a round has many clients."""
        return self._downlink.start(mine.task, mine.task.layouts(self._setup.layout), dict(mine.slices))

    def add(self, update: ClientUpdate) -> None:
        """Merges one reply.

        Raises:
            AggregationError: If it cannot be merged; nothing has changed then.
        """
        self._accumulator = self._setup.method.aggregator.add(self._accumulator, update)
        self._probe.add(update)
        self._num_merged += 1

    def finish(self, server_round: int) -> Applied:
        """What the replies make of the model."""
        if not self._num_merged:
            return unchanged(self._state)
        proposal = self._setup.method.aggregator.finish(self._accumulator, self._state.tensors)
        applied = apply_proposal(self._setup, self._state, proposal, server_round)
        applied.record["exactness"] = self._probe.finish(proposal, self._state.tensors)
        return applied


def open_lanes(setup: RoundSetup, state: ServerState, plan: RoundPlan) -> Mapping[str, Lane]:
    """A lane per group of the plan; a group that is new starts from the server's tensors."""
    groups = sorted({p.group for p in plan.clients})
    return {
        g: Lane(setup, replace(state, tensors=state.groups.get(g, state.tensors)), plan.server_round) for g in groups
    }
