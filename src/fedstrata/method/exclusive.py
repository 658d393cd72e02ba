"""The usual baseline for unequal devices: weak ones stay out."""

from __future__ import annotations

from fedstrata.aggregate.factors import FactorMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.exclusive import Exclusive
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        paper="a baseline: only devices that can train everything",
        trains="LoRA factors of all blocks, on capable devices only",
        sends="A and B",
        exact=False,
    ),
)
def exclusive(kinds: list[str] | None = None, weight_by: str = "num_examples") -> Method:
    """Exclusive: only clients whose devices can train everything take part; then FedIT.

    What is lost are the data of the others. Where nobody can, it is an error.

    Args:
        kinds: Device kinds that take part; left out: those whose memory allows the whole plan.
        weight_by: Weights of the mean.
    """
    return Method(
        planner=Exclusive(kinds),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=FactorMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
    )
