"""RoLoRA (Chen et al., 2024): B and A take turns."""

from __future__ import annotations

from fedstrata.aggregate.factors import FactorMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method, PairRule
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.blocks import AllStrata
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "chen2024rolora",
            ("Chen", "others"),
            "Robust Federated Finetuning of Foundation Models via Alternating Minimization of LoRA",
            2024,
        ),
        trains="B in odd rounds, A in even ones",
        sends="the factor that it trained",
        exact=True,
    ),
)
def rolora(weight_by: str = "num_examples") -> Method:
    """RoLoRA: in rounds 1, 3, 5, … B is trained and averaged, in rounds 2, 4, … A; the other factor is frozen.

    With one factor common to all clients the mean of the other one is the mean of the products.

    Args:
        weight_by: Weights of the mean.

    References:
        Chen et al., 2024. Differs in: B comes first, because B = 0 at the start leaves A without a gradient.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=FactorMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        pairs=PairRule(trained=(("lora_B",), ("lora_A",))),
    )
