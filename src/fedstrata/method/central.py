"""All data in one place (an upper bound)."""

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
        trains="everything, on everybody's data",
        sends="nothing over a network",
        exact=None,
    ),
    aliases=("centralized", "centralised", "pooled"),
)
def central() -> Method:
    """Central: one client holds the pooled training data.

    It takes the steps of a whole cohort in every round, one after the other: the same number of steps and tokens
    as the federated run, the same evaluation.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=HoldersMean("num_examples"),
        selector=AcceptAll(),
        topology="pooled",
        open_choices=frozenset({"plan", "objective"}),
    )
