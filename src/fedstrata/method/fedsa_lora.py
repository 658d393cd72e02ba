"""FedSA-LoRA (Guo et al., 2025): A is shared, B stays on its client."""

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
            "guo2025fedsa",
            ("Guo", "others"),
            "Selective Aggregation for Low-Rank Adaptation in Federated Learning",
            2025,
            "ICLR",
        ),
        trains="A, B and the head",
        sends="A",
        exact=None,
        client_state=True,
        personalised=True,
    ),
    aliases=("fedsalora",),
)
def fedsa_lora(weight_by: str = "num_examples") -> Method:
    """FedSA-LoRA: A learns what is common and is averaged; B and the head stay on their client.

    There is no global model: every client is scored on its own, with `eval.on = "clients"`.

    Args:
        weight_by: Weights of the mean.

    References:
        Guo et al., ICLR 2025.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=FactorMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        pairs=PairRule(local=("lora_B",)),
        head="local",
    )
