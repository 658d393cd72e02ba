"""FFA-LoRA (Sun et al., 2024): A is frozen, B is trained."""

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
            "sun2024ffa",
            ("Sun", "others"),
            "Improving LoRA in Privacy-preserving Federated Learning",
            2024,
            "ICLR",
        ),
        trains="B of all blocks",
        sends="B",
        exact=True,
    ),
    aliases=("ffalora",),
)
def ffa_lora(weight_by: str = "num_examples") -> Method:
    """FFA-LoRA: both sides draw A from the seed and never train or send it; B̄ = Σ p_k B_k is exact.

    Args:
        weight_by: Weights of the mean.

    References:
        Sun et al., ICLR 2024.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=FactorMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        pairs=PairRule(trained=(("lora_B",),), drawn=("lora_A",)),
    )
