"""FedTLU (Park and Joe-Wong, 2025): the server updates the blocks whose change is most consistent."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fedstrata.aggregate.holders import HoldersMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.proximal import Proximal
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.blocks import AllStrata
from fedstrata.select.accept_all import AcceptAll
from fedstrata.select.base import Selector
from fedstrata.select.simple import AcceptLast, AcceptRandom
from fedstrata.select.top_blocks import TopBlocks

FedtluScore: TypeAlias = Literal["consistency", "zico_clients", "magnitude", "random", "last", "all"]


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "park2025fedtlu",
            ("Jong-Ik Park", "Carlee Joe-Wong"),
            "FedTLU: Federated Learning with Targeted Layer Updates",
            2025,
            "ICASSP",
            "2412.17692",
            "10.1109/ICASSP49660.2025.10888369",
        ),
        paper="Park and Joe-Wong, FedTLU: Federated Learning with Targeted Layer Updates, ICASSP 2025",
        trains="everything that the task trains",
        sends="everything that it trained",
        exact=False,
        unequal_depth=True,
    ),
    aliases=("tlu", "targeted layer updates"),
)
def fedtlu(
    portion: float = 0.5,
    score: FedtluScore = "consistency",
    score_on: Literal["factors", "product"] = "factors",
    update_singletons: bool = True,
    mu: float = 0.0,
    weight_by: str = "num_examples",
) -> Method:
    """FedTLU: after the mean, the server takes over the top blocks only; the others keep their weights.

    1. Clients train everything, with FedAvg's objective or FedProx's (`mu` above 0).
    2. The server averages: W̄ = Σ p_k W_k.
    3. Per tensor Score = ‖Δ‖₂/(√n·std(Δ)) of Δ = W̄ − W(t); a block's score is the sum over its tensors.
    4. Among blocks of equal shapes the top S = max(1, ⌊portion·g + ½⌋) take W̄.

    It saves no uplink, because scores need the aggregate; `rounds.downlink = "changed"` can save downlink.

    Args:
        portion: Share of every group of equal blocks that is accepted.
        score: `consistency`, the paper's; `zico_clients`, over the clients' spread; `magnitude`; or a baseline of the
            same budget: `random` blocks, the `last` blocks, `all` blocks (no selection).
        score_on: With LoRA, `factors`: A and B are two tensors, or `product` (ours).
        update_singletons: Whether embeddings, head and final norm, which have no equals, are always accepted, or never.
        mu: Of FedProx's term; 0 leaves it out.
        weight_by: Weights of the mean.

    References:
        Park and Joe-Wong, ICASSP 2025 (arXiv 2412.17692). Differs in: rules for ties, constant and single blocks, the
        key without cancellation, and every score but `consistency` are ours.
    """
    selector: Selector
    if score == "random":
        selector = AcceptRandom(portion, update_singletons)
    elif score == "last":
        selector = AcceptLast(portion, update_singletons)
    elif score == "all":
        selector = AcceptAll()
    else:
        selector = TopBlocks(portion, score, score_on, update_singletons)
    return Method(
        planner=AllStrata(),
        objective=Proximal(mu) if mu else TaskLoss(),
        codec=Float32(),
        aggregator=HoldersMean(weight_by, moments=score == "zico_clients"),
        selector=selector,
        open_choices=frozenset({"codec", "plan"}),
    )
