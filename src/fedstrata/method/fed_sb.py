"""Fed-SB (Singhal et al., 2025): a small square matrix between two frozen factors."""

from __future__ import annotations

from typing import Literal

from fedstrata.aggregate.factors import FactorMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method, PairRule
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.after_gradient import AfterGradient
from fedstrata.plan.blocks import AllStrata
from fedstrata.select.accept_all import AcceptAll

DRAWN = 'frozen factors drawn from the seed (init = "orthonormal"): a variant of ours, not Fed-SB as published'


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "singhal2025fedsb",
            ("Singhal", "others"),
            "Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in (Private) "
            "Federated LoRA Fine-Tuning",
            2025,
        ),
        trains="R [r, r] between frozen B and A, in all blocks",
        sends="R; once a truncated gradient",
        exact=True,
    ),
    aliases=("lora-sb",),
)
def fed_sb(
    init: Literal["gradient_svd", "orthonormal"] = "gradient_svd", examples: int = 64, weight_by: str = "num_examples"
) -> Method:
    """Fed-SB: ΔW = s·B·R·A, of which only R is trained, sent and averaged.

    1. Before round 1 its cohort sends the loss's gradient at every map, truncated to rank r (counted bytes).
    2. B and A are the leading singular vectors of the mean gradient: orthonormal, frozen, sent to every client once.
    3. R = 0 at the start; the mean of R is the mean of the products. An upload has r² numbers per map.

    Args:
        init: `gradient_svd`, as published; `orthonormal`: both sides draw B and A from the seed and nothing is sent.
            That is ours, not Fed-SB: say so wherever its results are shown.
        examples: Most training examples per client that the gradient is taken of.
        weight_by: Weights of the mean.

    References:
        Singhal et al., 2025. Differs in: the mean gradient of the clients' examples stands for the first update, and R
        starts at 0.
    """
    return Method(
        planner=AfterGradient(examples) if init == "gradient_svd" else AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=FactorMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"square"}),
        pairs=PairRule(trained=(("lora_R",),)),
        notes=() if init == "gradient_svd" else (DRAWN,),
    )
