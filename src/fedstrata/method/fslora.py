"""FSLoRA (Fang et al., 2025): every client trains drawn rank slices."""

from __future__ import annotations

from fedstrata.aggregate.sketch import SketchMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method, PairRule
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.client_ranks import ClientRanks
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "fang2025fslora",
            ("Fang", "others"),
            "Federated Sketching LoRA: On-Device Collaborative Fine-Tuning of Large Language Models",
            2025,
        ),
        trains="k_k drawn rank slices of all blocks",
        sends="the differences of these slices",
        exact=False,
        unequal_ranks=True,
    ),
    aliases=("federated sketching lora",),
)
def fslora(ranks: dict[str, int] | None = None, weight_by: str = "num_examples") -> Method:
    """FSLoRA: client k works with k_k of the r rank slices, drawn anew in every round.

    Its forward pass is s·(r/k_k)·B[:, S]·A[S, :]; the server adds W ← W + Σ p_k·Δ_k, zero-filled outside S.
    With k_k = r it is FedIT with the cohort as denominator.

    Args:
        ranks: r_k per device kind or client; left out: `adapter.max_rank` on the fastest kind, half as much on each
            slower one.
        weight_by: Weights of the mean.

    References:
        Fang et al., 2025.
    """
    return Method(
        planner=ClientRanks(ranks),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=SketchMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        scaling="by_sketch",
        pairs=PairRule(slices="drawn"),
    )
