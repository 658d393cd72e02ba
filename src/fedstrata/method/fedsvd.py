"""FedSVD (Lee et al., 2025): B is trained; then the pair is turned so that A is orthonormal."""

from __future__ import annotations

from fedstrata.aggregate.svd import SvdMean
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
            "lee2025fedsvd",
            ("Lee", "others"),
            "FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA",
            2025,
            "NeurIPS",
        ),
        trains="B of all blocks",
        sends="B; receives both factors",
        exact=True,
    ),
)
def fedsvd(weight_by: str = "num_examples") -> Method:
    """FedSVD: B̄ = Σ p_k B_k with one frozen A is exact; U·Σ·Vᵀ = B̄·A gives the next A ← Vᵀ and B ← U·Σ.

    The first A has orthonormal rows, B = 0.

    Args:
        weight_by: Weights of the mean.

    References:
        Lee et al., NeurIPS 2025. Differs in: spare directions are completed from the run's initial A.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=SvdMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        pairs=PairRule(trained=(("lora_B",),), start="orthonormal"),
    )
