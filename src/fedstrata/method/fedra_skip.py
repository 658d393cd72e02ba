"""FedRA (Su et al., 2024) as published: a client runs only the blocks that it drew."""

from __future__ import annotations

from fedstrata.aggregate.holders import HoldersMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.random_blocks import RandomBlocks
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "su2024fedra",
            ("Su", "others"),
            "FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous Clients",
            2024,
            "ECCV",
        ),
        trains="LoRA factors of blocks drawn anew for every client and round; it runs no others",
        sends="what it trained",
        exact=False,
        unequal_depth=True,
    ),
    aliases=("fedra",),
)
def fedra_skip(strata: int | dict[str, int] | None = None, weight_by: str = "num_examples") -> Method:
    """FedRA with the rest skipped: a client runs embeddings, the blocks it drew, final norm and head.

    The blocks keep their order. Needs blocks of equal width that can be left out; others are refused. The server
    evaluates the full depth. The base weights are on the client already; its downlink has adapters only.

    Args:
        strata: How many blocks a client runs and trains, for all or per device kind; left out: by speed.
        weight_by: Weights of the mean.

    References:
        Su et al., ECCV 2024, Algorithm 1. Differs in: the base model is not sent.
    """
    return Method(
        planner=RandomBlocks(strata),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=HoldersMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        skips_blocks=True,
    )
