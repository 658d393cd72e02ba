"""No federation: every client on its own (a lower bound)."""

from __future__ import annotations

from fedstrata.aggregate.holders import HoldersMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.blocks import AllStrata
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        paper="a bound",
        trains="everything, on its own data only",
        sends="nothing",
        exact=None,
        client_state=True,
        personalised=True,
    ),
    aliases=("local", "alone"),
)
def local_only() -> Method:
    """Local only: each client trains its own model and shares nothing.

    Same steps, tokens and evaluation as a federated run; every client is scored on its own.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=HoldersMean("num_examples"),
        selector=AcceptAll(),
        topology="alone",
        open_choices=frozenset({"plan", "objective"}),
    )
