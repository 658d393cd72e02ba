"""LEGEND (Liu et al., 2024): depth from the output per device, ranks that grow towards the output."""

from __future__ import annotations

from typing import Literal

from fedstrata.aggregate.holders import HoldersMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.depth_and_rank import Arm, DepthAndRank
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "liu2024legend",
            ("Liu", "others"),
            "Adaptive Parameter-Efficient Federated Fine-Tuning on Heterogeneous Devices",
            2024,
            arxiv="2412.20004",
        ),
        trains="LoRA factors of its last k blocks, at ranks that grow towards the output",
        sends="what it trained",
        exact=False,
        unequal_depth=True,
    ),
)
def legend(
    rank_budget: int | None = None,
    rank_step: float | None = None,
    rank_start: int | None = None,
    min_depth: int = 1,
    max_wait: float = 0.2,
    target_s: float | None = None,
    infeasible: Literal["error", "exclude"] = "error",
    frozen: Literal["present", "absent"] = "present",
    arm: Arm = "legend",
    forward_s: dict[str, float] | None = None,
    backward_s: dict[str, float] | None = None,
    upload_s: dict[str, float] | None = None,
    fixed_s: dict[str, float] | None = None,
    scaling: Literal["constant", "alpha_over_r"] = "constant",
    weight_by: str = "num_examples",
) -> Method:
    """LEGEND: each device trains its last k_i blocks, so deep that nobody waits long for anybody.

    1. Ranks of all devices grow from the input to the output: r_l = r_0 + λ·l, within the budget ψ.
    2. The seconds of a round on device i at depth k are t_i(k) = c_i + τ_i·(t̂_i + k·μ_i) + β_i·Σ_{l ≥ L−k} r_l,
       from the profile at first, then from moving averages of what is observed.
    3. An anchor scan finds depths k_i whose times lie close together.
    4. Every block is averaged over the clients that held it.

    Args:
        rank_budget: ψ, the sum of ranks; left out: 8·L.
        rank_step: λ; left out: 1, or less where the default budget demands it.
        rank_start: r_0, instead of a budget.
        min_depth: k_min.
        max_wait: ε, the mean wait that is accepted, as a share of the slowest client's time.
        target_s: T, the seconds of a round, instead of a scan.
        infeasible: What happens to a device whose caps do not allow k_min.
        frozen: Whether adapters below a device's depth are `present` in its forward pass, or `absent`.
        arm: `legend`, or a control: `uniform_rank`, `reversed_rank`, `uniform_depth`, `random_strata`.
        forward_s: t̂ per device kind, given together with `backward_s` and `upload_s`, or none of them.
        backward_s: μ per device kind.
        upload_s: β per device kind.
        fixed_s: c per device kind.
        scaling: `constant`: s = 2 in all blocks (alpha_l = 2·r_l); `alpha_over_r`: `adapter.alpha` over the rank.
        weight_by: Weights of the mean.

    References:
        Liu et al., 2024 (arXiv 2412.20004), eq. 12. Differs in: as the plan `depth_and_rank` says.
    """
    return Method(
        planner=DepthAndRank(
            rank_budget,
            rank_step,
            rank_start,
            min_depth,
            max_wait,
            target_s,
            infeasible,
            frozen,
            arm,
            forward_s,
            backward_s,
            upload_s,
            fixed_s,
        ),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=HoldersMean(weight_by),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        scaling=2.0 if scaling == "constant" else "shared",
    )
