"""raFLoRA (Wu et al., 2026): the mean product with weights per rank slice."""

from __future__ import annotations

from fedstrata.aggregate.product import Raflora
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
            "wu2026raflora",
            ("Wu", "others"),
            "Preventing Rank Collapse in Federated Low-Rank Adaptation with Client Heterogeneity",
            2026,
        ),
        trains="the rank-r_k truncation of the server's product",
        sends="A and B at its own rank",
        exact=False,
        unequal_ranks=True,
    ),
)
def raflora(ranks: dict[str, int] | None = None, weight_by: str = "num_examples") -> Method:
    """raFLoRA: every rank slice is weighted among the clients that have it, so that high ranks do not fade.

    ΔW = Σ_h Σ_{k: r_k > h} (p_k / Σ_{j: r_j > h} p_j)·s_k·B_k[:, h]·A_k[h, :], then factored as in FlexLoRA.

    Args:
        ranks: r_k per device kind or client; left out: `adapter.max_rank` on the fastest kind, half as much on each
            slower one.
        weight_by: Weights of the mean.

    References:
        Wu et al., 2026. Differs in: the formula follows the abstract; the text was not at hand (ours).
    """
    return Method(
        planner=ClientRanks(ranks),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=Raflora(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        scaling="by_rank",
    )
