"""LoRA-FAIR (Bian et al., 2025): B̄ is refined towards the mean product."""

from __future__ import annotations

from fedstrata.aggregate.residual import LoraFair
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
            "bian2025lorafair",
            ("Bian", "others"),
            "LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement",
            2025,
            "ICCV",
        ),
        trains="LoRA factors of all blocks at one rank",
        sends="A and B",
        exact=False,
    ),
    aliases=("fair",),
)
def lora_fair(ridge: float = 0.01, weight_by: str = "num_examples") -> Method:
    """LoRA-FAIR: Ā stays, B̄ gets the correction that brings B̄·Ā closest to Σ p_k B_k A_k.

    Args:
        ridge: λ, relative to the mean eigenvalue of Ā·Āᵀ.
        weight_by: Weights of the mean.

    References:
        Bian et al., ICCV 2025. Differs in: closed form of a ridge regression (ours).
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=LoraFair(weight_by, ridge),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
    )
