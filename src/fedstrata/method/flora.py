"""FLoRA (Wang et al., 2024): stacked factors are the mean product, which moves the base."""

from __future__ import annotations

from fedstrata.aggregate.stack import Stack
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
            "wang2024flora",
            ("Wang", "others"),
            "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations",
            2024,
            "NeurIPS",
        ),
        trains="a fresh LoRA pair per round, at its own rank",
        sends="A and B at its own rank; receives what was merged into the base",
        exact=True,
        unequal_ranks=True,
    ),
)
def flora(ranks: dict[str, int] | None = None, weight_by: str = "num_examples") -> Method:
    """FLoRA: base ← base + Σ p_k·s_k·B_k·A_k, by stacking the factors; the pairs start anew.

    1. In every round both sides draw A from the stream (seed, "lora_init", round, target); B = 0.
    2. The server stacks A = [p_k·s_k·A_k] and B = [B_k]: their product is the mean, without error.
    3. The base takes it over; a client receives every merge since the last one that it is known to have.

    Args:
        ranks: r_k per device kind or client; left out: `adapter.max_rank` on the fastest kind, half as much on each
            slower one.
        weight_by: Weights of the mean.

    References:
        Wang et al., NeurIPS 2024. Differs in: the stack is recompressed without loss before it is sent.
    """
    return Method(
        planner=ClientRanks(ranks),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=Stack(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        scaling="by_rank",
        pairs=PairRule(drawn=("lora_A", "lora_B"), redrawn=True),
    )
