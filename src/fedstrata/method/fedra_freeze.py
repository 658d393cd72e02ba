"""FedRA (Su et al., 2024), the variant that freezes what was not drawn."""

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
        trains="LoRA factors of blocks drawn anew for every client and round",
        sends="what it trained",
        exact=False,
        unequal_depth=True,
    ),
)
def fedra_freeze(strata: int | dict[str, int] | None = None, weight_by: str = "num_examples") -> Method:
    """FedRA with frozen rest: each client trains `strata` blocks drawn at random in every round.

    Blocks are drawn uniformly without replacement from the stream (seed, "allocation", round, client). The other
    blocks' adapters stay in place and frozen; a block is averaged over those who drew it and keeps its value if
    nobody did; the head is averaged over everyone.

    Args:
        strata: How many blocks a client trains, for all or per device kind; left out: by speed.
        weight_by: Weights of the mean.

    References:
        Su et al., ECCV 2024, Algorithm 1. Differs in: the paper's clients run only the drawn blocks.
    """
    return Method(
        planner=RandomBlocks(strata),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=HoldersMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
    )
