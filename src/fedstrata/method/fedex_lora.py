"""FedEx-LoRA (Singhal et al., 2025): the mean of the factors, and its error merged into the base."""

from __future__ import annotations

from fedstrata.aggregate.residual import Fedex
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
            "singhal2025fedex",
            ("Singhal", "others"),
            "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language Models",
            2025,
            "ACL",
        ),
        trains="LoRA factors of all blocks at one rank",
        sends="A and B; receives what was merged into the base",
        exact=True,
    ),
    aliases=("fedex",),
)
def fedex_lora(weight_by: str = "num_examples") -> Method:
    """FedEx-LoRA: Ā = Σ p_k A_k, B̄ = Σ p_k B_k, base ← base + s·Σ p_k (B_k − B̄)(A_k − Ā).

    Together they are the mean product. The residual travels as factors of rank (K − 1)·r at most.

    Args:
        weight_by: Weights of the mean.

    References:
        Singhal et al., ACL 2025. Differs in: the residual travels as factors, never as a matrix.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=Fedex(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
    )
