"""FedAdapter (Cai et al., 2023): bottleneck adapters that grow in depth and width, tried out side by side."""

from __future__ import annotations

from fedstrata.aggregate.slices import RankSliceMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.windows import Windows
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "cai2023fedadapter",
            ("Cai", "others"),
            "Efficient Federated Learning for Modern NLP",
            2023,
            "MobiCom",
        ),
        trains="bottleneck adapters of the top blocks, in three sizes by three groups",
        sends="the adapters of its group",
        exact=None,
        unequal_depth=True,
    ),
    aliases=("adafl",),
)
def fedadapter(
    window: int = 5,
    start_depth: int = 1,
    start_width: int = 8,
    step: int = 8,
    max_width: int = 64,
    weight_by: str = "num_examples",
) -> Method:
    """FedAdapter: in windows of rounds three groups train adapters as they are, one block deeper, or wider.

    1. A window opens with three candidates that compute the same function, because new parts start at zero.
    2. Every client of a round trains one of them, dealt in turn, so that small cohorts train every candidate, too; each
       candidate is averaged on its own.
    3. At the end of the window the candidate with the best validation accuracy goes on, of equal ones that with the
       lower loss (ours: few examples tie often), of equal ones again the smaller. All are scored on the same
       examples; where clients keep their heads, with the heads that they hold now.

    Bytes and seconds of all groups count. It needs validation examples, on the server or on the clients.

    Args:
        window: Rounds per window.
        start_depth: Blocks with an adapter at first, from the output.
        start_width: Width of the adapters at first.
        step: What the wider candidate adds.
        max_width: The largest width.
        weight_by: Weights of the mean.

    References:
        Cai et al., MobiCom 2023. Differs in: windows in rounds, and candidates judged on validation examples (ours).
    """
    return Method(
        planner=Windows(window, start_depth, start_width, step, max_width),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=RankSliceMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"bottleneck"}),
    )
