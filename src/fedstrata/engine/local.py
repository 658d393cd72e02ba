"""The reference engine: clients one after the other in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedstrata.client import Trainer
from fedstrata.engine.work import Job, perform, read_state, settle
from fedstrata.record.clients import ClientStates
from fedstrata.record.failure import ClientFailure
from fedstrata.server.orders import Answer, Order


class LocalEngine:
    """Does every client's work here and now, in ascending client id.

    Args:
        trainer: Model and data.
        states: Where client state lives.
    """

    def __init__(self, trainer: Trainer, states: ClientStates) -> None:
        self.trainer, self.states = trainer, states

    def run(self, orders: Sequence[Order]) -> Iterator[tuple[str, Answer]]:
        """Answers in ascending client id. What a client's work raises becomes a `ClientFailure`."""
        for order in sorted(orders, key=lambda o: o.client):
            job = Job.of(order.client, order.accepted_round, order.pack())
            state = read_state(self.states, job)
            result = state if isinstance(state, ClientFailure) else perform(self.trainer, job, state)
            answer = settle(self.states, job, result)
            order.arrived()
            yield order.client, answer
