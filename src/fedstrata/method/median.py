"""The median of the clients (Yin et al., 2018)."""

from __future__ import annotations

from typing import Literal

from fedstrata.aggregate.robust import Median
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.blocks import AllStrata
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "yin2018byzantine",
            ("Yin", "others"),
            "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
            2018,
            "ICML",
        ),
        trains="everything that the task trains",
        sends="everything that it trained",
        exact=False,
    ),
    aliases=(
        "fedmedian",
        "coordinate-wise median",
    ),
)
def median(fallback: Literal["mean", "keep"] = "mean") -> Method:
    """Median: coordinate by coordinate over the differences of a block's holders, unweighted; at least 3 of them.

    Args:
        fallback: Where a block has too few holders: `mean` (warned and recorded) or `keep` the server's values.

    References:
        Yin et al., ICML 2018.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=Median(fallback),
        selector=AcceptAll(),
    )
