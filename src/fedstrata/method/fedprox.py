"""FedProx (Li et al., 2020): FedAvg with a proximal term on every client."""

from __future__ import annotations

from fedstrata.aggregate.holders import HoldersMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.citation import PROXIMAL
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.proximal import Proximal
from fedstrata.plan.blocks import AllStrata
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=PROXIMAL,
        trains="all parameters, or LoRA factors of all blocks, close to where it started",
        sends="what it trained",
        exact=None,
        unequal_depth=True,
    ),
)
def fedprox(mu: float = 0.01, weight_by: str = "num_examples") -> Method:
    """FedProx: FedAvg whose clients stay near their start.

    A client minimises loss(w) + (μ/2)·‖w − start‖² over its trainable tensors. μ = 0 leaves the term out and equals
    `fedavg` bit for bit.

    References:
        Li et al., MLSys 2020, Algorithm 2. Differs in: AdamW; the number of local steps is the plan's.
    """
    return Method(
        planner=AllStrata(),
        objective=Proximal(mu),
        codec=Float32(),
        aggregator=HoldersMean(weight_by),
        selector=AcceptAll(),
        open_choices=frozenset({"plan", "codec", "aggregate", "select"}),
    )
