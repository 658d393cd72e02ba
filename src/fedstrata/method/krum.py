"""Krum and multi-Krum (Blanchard et al., 2017)."""

from __future__ import annotations

from typing import Literal

from fedstrata.aggregate.krum import Krum
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
            "blanchard2017krum",
            ("Blanchard", "others"),
            "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
            2017,
            "NeurIPS",
        ),
        trains="everything that the task trains",
        sends="everything that it trained",
        exact=False,
    ),
)
def krum(f: int = 1, multi: int = 1, fallback: Literal["mean", "keep"] = "mean") -> Method:
    """Krum: per block, the difference whose m − f − 2 nearest neighbors are closest; multi-Krum averages several.

    Args:
        f: How many clients may be bad; needs m ≥ 2f + 3 holders.
        multi: How many differences are averaged; 1 is Krum.
        fallback: Where a block has too few holders: `mean` (warned and recorded) or `keep` the server's values.

    References:
        Blanchard et al., NeurIPS 2017.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=Krum(f, multi, fallback),
        selector=AcceptAll(),
    )
