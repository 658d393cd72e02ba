"""FedIT (Zhang et al., 2024): LoRA factors of all blocks, averaged one by one."""

from __future__ import annotations

from fedstrata.aggregate.factors import FactorMean
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
            "zhang2024fedit",
            ("Zhang", "others"),
            "Towards Building the Federated GPT: Federated Instruction Tuning",
            2024,
            "ICASSP",
        ),
        trains="LoRA factors of all blocks at one rank",
        sends="A and B",
        exact=False,
    ),
    aliases=("fedlora", "fed-lora"),
)
def fedit(weight_by: str = "num_examples") -> Method:
    """FedIT: A and B are averaged separately over the clients.

    Ā = Σ p_k A_k, B̄ = Σ p_k B_k. B̄Ā is not Σ p_k B_k A_k: the exactness error in the record says how far off.
    The paper's rank and alpha are 16 (`adapter.max_rank`, `adapter.alpha`).

    References:
        Zhang et al., ICASSP 2024, Section 3.2.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=FactorMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
    )
