"""Rank slices averaged over the clients whose rank covers them."""

from __future__ import annotations

from fedstrata.aggregate.slices import RankSliceMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.client_ranks import ClientRanks
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        paper="a baseline: per-slice averaging of unequal ranks",
        trains="the first r_k rank slices of all blocks",
        sends="A and B at its own rank",
        exact=False,
        unequal_ranks=True,
    ),
    aliases=("slice mean",),
)
def rank_slice_mean(ranks: dict[str, int] | None = None, weight_by: str = "num_examples") -> Method:
    """Rank slice mean: row h of A and column h of B are averaged over the clients whose rank covers h.

    Args:
        ranks: r_k per device kind or client; left out: `adapter.max_rank` on the fastest kind, half as much on each
            slower one.
        weight_by: Weights of the mean.
    """
    return Method(
        planner=ClientRanks(ranks),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=RankSliceMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
    )
