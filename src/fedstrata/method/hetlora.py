"""HetLoRA (Cho et al., 2024): a rank per client, rank decay, and weights by the norm of the product."""

from __future__ import annotations

from fedstrata.aggregate.norms import NormWeightedPad
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.rank_decay import RankDecay
from fedstrata.plan.client_ranks import ClientRanks
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "cho2024hetlora",
            ("Cho", "others"),
            "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models",
            2024,
            "EMNLP",
        ),
        trains="the first r_k rank slices of all blocks, with rank decay",
        sends="A and B at its own rank, which may shrink",
        exact=False,
        unequal_ranks=True,
    ),
    aliases=("het-lora",),
)
def hetlora(
    ranks: dict[str, int] | None = None,
    gamma: float = 0.99,
    decay: float = 1e-3,
    min_rank: int = 1,
    weight_by: str = "num_examples",
) -> Method:
    """HetLoRA: clients hold the leading slices of the global factors; the server pads with zeros and weights by norm.

    1. Client k trains the first r_k rows of A and columns of B; its loss has the penalty
       λ·Σ_targets ‖B[:, m:]‖_F·‖A[m:, :]‖_F with m = ⌊γ·r_k⌋.
    2. Where that tail shrank in this round, the client keeps rank max(m, r_min) from now on (self-pruning).
    3. The server pads with zeros and averages with ω_k = ‖B_k·A_k‖_F / Σ_j ‖B_j·A_j‖_F per target.

    Args:
        ranks: r_k per device kind or client; left out: `adapter.max_rank` on the fastest kind, half as much on each
            slower one.
        gamma: γ.
        decay: λ.
        min_rank: r_min, the smallest rank that a client may shrink to.
        weight_by: Of the head, and of targets without any norm.

    References:
        Cho et al., EMNLP 2024. Differs in: slices that nobody covers keep the server's values; one scaling for all.
    """
    return Method(
        planner=ClientRanks(ranks),
        objective=RankDecay(gamma, decay, min_rank),
        codec=Float32(),
        aggregator=NormWeightedPad(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
    )
