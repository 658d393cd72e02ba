"""The mean of differences that are clipped to the median norm."""

from __future__ import annotations

from typing import Literal

from fedstrata.aggregate.krum import ClippedMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.blocks import AllStrata
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        paper="a robust baseline: norm clipping at the median",
        trains="everything that the task trains",
        sends="everything that it trained",
        exact=False,
    ),
    aliases=(
        "norm clipping",
        "clipping",
    ),
)
def clipped_mean(fallback: Literal["mean", "keep"] = "mean") -> Method:
    """Clipped mean: a block's difference that is longer than the holders' median norm is scaled down to it.

    Args:
        fallback: Where a block has too few holders: `mean` (warned and recorded) or `keep` the server's values.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=ClippedMean(fallback),
        selector=AcceptAll(),
    )
