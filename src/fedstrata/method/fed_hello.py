"""Fed-HeLLo (Zhang et al., 2025): who trains which block, by shape first and by importance afterwards."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fedstrata.aggregate.holders import HoldersMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.allocation import PatternBlocks, RandomPattern
from fedstrata.plan.base import Planner
from fedstrata.plan.fisher import CoDesign, FisherBlocks
from fedstrata.plan.importance import Control, Mapped
from fedstrata.plan.patterns import Pattern
from fedstrata.plan.random_blocks import RandomBlocks
from fedstrata.plan.scoring import FisherOn, Importance, Source
from fedstrata.select.accept_all import AcceptAll

Arm: TypeAlias = Literal["co_design", "pattern", "random_pattern", "importance", "uniform"]

LEAKY = 'blocks are scored with the test set (source = "test_leaky"): for checking a claim, never for a comparison'


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "zhang2025fedhello",
            ("Zhang", "others"),
            "Fed-HeLLo: Efficient Federated Foundation Model Fine-Tuning with Heterogeneous LoRA Allocation",
            2025,
            arxiv="2506.12213",
        ),
        trains="LoRA factors of as many blocks as its device allows, drawn by their importance",
        sends="what it trained; from time to time one score per block",
        exact=False,
        unequal_depth=True,
    ),
    aliases=("fedhello", "hello"),
)
def fed_hello(
    strata: dict[str, int] | None = None,
    pattern: Pattern = "bottleneck",
    arm: Arm = "co_design",
    importance: Importance = "fisher",
    source: Source = "client_heldout",
    fisher_on: FisherOn = "factors",
    examples: int | None = None,
    mapped: Mapped = "proportional",
    control: Control = "none",
    refresh: int | None = None,
    warm_rounds: int | None = None,
    weight_by: str = "num_examples",
) -> Method:
    """Fed-HeLLo: geometric chances while the adapters are young, importance afterwards.

    1. Rounds 1 … T_warm: a client of group g draws c_g blocks by the chances of a geometric pattern (RGD-HLA).
    2. At the start of rounds T_warm + 1, T_warm + 1 + T_FIM, …: the cohort computes the empirical Fisher score of
       every block on held-out examples and sends one number per block and a count.
    3. From then on blocks are drawn by these scores (FIM-HLA), in every round.
    4. Every block is averaged over the clients that held it.

    In all arms 10 % of every client's examples (at least 8) are left out of training, so that the arms see the same
    data (`data.client_proxy_fraction`). The rank is the same in all blocks: `adapter.max_rank`; the paper's is 16.

    Args:
        strata: c_g per device kind; left out: by speed.
        pattern: `triangle`, `inverted_triangle`, `bottleneck` or `uniform`.
        arm: `co_design`, the method; or a part of it: `pattern` (fixed sets, GD-HLA), `random_pattern` (RGD-HLA),
            `importance` (FIM-HLA from the first round), `uniform` (blocks drawn uniformly).
        importance: `fisher`, or the clients' own differences, without a proxy (ours): `updates`, their mean square, or
            `zico_clients`, how well they agree.
        source: Whose examples: the clients' held-out ones, or a file of the server's.
        fisher_on: Gradients of the `factors` or of the whole `weight` (ours).
        examples: Most examples per client.
        mapped: From scores to chances: `proportional` (ours) or `clusters`.
        control: `permuted` or `inverted` scores.
        refresh: T_FIM; left out: max(1, ⌊R/10 + ½⌋).
        warm_rounds: T_warm; left out: T_FIM.
        weight_by: Weights of the mean.

    References:
        Zhang et al., 2025 (arXiv 2506.12213). Differs in: as the plans `pattern`, `random_pattern`, `fisher` and
        `hello` say.
    """
    how = (importance, source, fisher_on, examples, mapped, control, refresh)
    planners: dict[str, Planner] = {
        "co_design": CoDesign(strata, pattern, *how, warm_rounds),
        "pattern": PatternBlocks(strata, pattern),
        "random_pattern": RandomPattern(strata, pattern),
        "importance": FisherBlocks(strata, *how, warm_rounds or 0),
        "uniform": RandomBlocks(strata),
    }
    asks = importance == "fisher" and arm in ("co_design", "importance")
    return Method(
        planner=planners[arm],
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=HoldersMean(weight_by, moments=importance != "fisher"),
        selector=AcceptAll(),
        adapters=frozenset({"lora"}),
        open_choices=frozenset({"codec", "aggregate"}),
        held_out=0.1,
        notes=(LEAKY,) if asks and source == "test_leaky" else (),
    )
