"""FedAvg (McMahan et al., 2017): everyone trains everything, the server averages."""

from __future__ import annotations

from fedstrata.aggregate.holders import HoldersMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.citation import FEDERATED_AVERAGING
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.blocks import AllStrata
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=FEDERATED_AVERAGING,
        trains="all parameters, or LoRA factors of all blocks",
        sends="what it trained",
        exact=None,
        unequal_depth=True,
    ),
    aliases=("federated averaging", "avg"),
)
def fedavg(weight_by: str = "num_examples") -> Method:
    """FedAvg: the mean of what clients trained, weighted by their examples.

    W(t+1) = Σ p_k W_k with p_k = n_k / Σ n over the good replies. `adapter.kind = "full"` is the paper's method;
    with `"lora"` each factor is averaged on its own, which is not the mean of the products (the exactness error
    in the record says how far off). Another planner may be set in `[plan]`: a stratum is then averaged over those
    who trained it.

    References:
        McMahan et al., AISTATS 2017, Algorithm 1. Differs in: AdamW instead of SGD on clients.
    """
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=HoldersMean(weight_by),
        selector=AcceptAll(),
        open_choices=frozenset({"plan", "objective", "codec", "aggregate", "select"}),
    )
