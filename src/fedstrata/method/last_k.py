"""The blocks nearest the output, on every client."""

from __future__ import annotations

from fedstrata.aggregate.holders import HoldersMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.blocks import LastBlocks
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        paper="the usual baseline",
        trains="the last k blocks",
        sends="what it trained",
        exact=False,
    ),
    aliases=("last-layer", "last", "last_blocks"),
)
def last_k(k: int = 1, weight_by: str = "num_examples") -> Method:
    """Last k: every client trains the k blocks nearest the output, and the head.

    Nothing below them is differentiated, so that memory and time fall with k.
    """
    return Method(
        planner=LastBlocks(k),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=HoldersMean(weight_by),
        selector=AcceptAll(),
    )
