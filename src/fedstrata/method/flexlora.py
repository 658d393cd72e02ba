"""FlexLoRA (Bai et al., 2024): the mean product, factored again for every rank."""

from __future__ import annotations

from fedstrata.aggregate.product import ProductMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.client_ranks import ClientRanks
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "bai2024flexlora",
            ("Bai", "others"),
            "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources",
            2024,
            "NeurIPS",
        ),
        trains="LoRA factors of all blocks at its own rank",
        sends="A and B at its own rank",
        exact=False,
        unequal_ranks=True,
    ),
    aliases=("flex-lora",),
)
def flexlora(ranks: dict[str, int] | None = None, weight_by: str = "num_examples") -> Method:
    """FlexLoRA: ΔW = Σ p_k·s_k·B_k·A_k, then a truncated SVD per rank.

    The server keeps the best approximation of the mean product at its largest rank; client k receives that of rank
    r_k, with its own scaling s_k = alpha/r_k divided out. The product is never formed densely.

    Args:
        ranks: r_k per device kind or client; left out: `adapter.max_rank` on the fastest kind, half as much on each
            slower one.
        weight_by: Weights of the mean.

    References:
        Bai et al., NeurIPS 2024, Algorithm 1. Differs in: thin QR of the stacked factors instead of a dense SVD;
        directions without weight keep a row of A that can learn.
    """
    return Method(
        planner=ClientRanks(ranks),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=ProductMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        scaling="by_rank",
    )
