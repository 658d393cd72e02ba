"""Blocks drawn by importance: Fisher scores from the clients' held-out examples, or the clients' own updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.plan.allocation import group_probabilities, plan_draws
from fedstrata.plan.base import PLANNERS, AskingPlanner, PlanContext, Probes, RoundPlan
from fedstrata.plan.checks import kind_problems, refuse, trainable_blocks, uniform_server_ranks
from fedstrata.plan.defaults import counts_of
from fedstrata.plan.importance import Control, Mapped
from fedstrata.plan.patterns import Pattern
from fedstrata.plan.scoring import NO_SCORES, TO_EXTEND, FisherOn, Importance, Scoring, Source


@PLANNERS.register
@dataclass(frozen=True)
class FisherBlocks(AskingPlanner):
    """Every client draws its blocks, fresh in every round, by the blocks' importance (FIM-HLA).

    The empirical Fisher score of block l is F_l = mean over examples of ‖∇ log p(label)‖², the gradient taken with
    respect to the block's adapter. Clients send L sums and a count; no example leaves them. F becomes chances by
    `score_probabilities`, and client k draws c_g blocks without replacement: `draw_blocks`. Scores are computed at
    the start of rounds T_warm + 1, T_warm + 1 + T_FIM, … and used in every round until the next ones; before the
    first ones all blocks are equally likely.

    Args:
        strata: c_g, the number of blocks per device kind, 0 (the head only) to L; left out: by speed, see `counts_of`.
        importance: `fisher`, or without a proxy (ours) from the clients' own deltas: `updates`, their mean square, or
            `zico_clients`, the score of `TopBlocks` over the spread of at least 4 holders; below 0 it counts as 0. A
            block that has no score yet counts like the mean of the others.
        source: Whose examples: `client_heldout`, examples that are kept out of the clients' training; or a file of
            the server's (`public`, `other_domain`, `random_tokens`; `test_leaky` for checking a claim only).
        fisher_on: `factors`: lora_A and lora_B (where lora_B is 0 only lora_B counts); `weight`: ‖∂ℓ/∂W‖² (ours).
        examples: Most examples per client; None takes all that are held out.
        mapped: `proportional` (ours) or `clusters`.
        control: `permuted` or `inverted` scores, for a comparison; uniform chances are the plan `random_k`.
        refresh: T_FIM; None: max(1, ⌊R/10 + ½⌋).
        warm_rounds: T_warm.

    References:
        Zhang et al., Fed-HeLLo: Efficient Federated Foundation Model Fine-Tuning with Heterogeneous LoRA
        Allocation, 2025 (arXiv 2506.12213). Differs in: scores come from held-out examples of the clients (the
        server needs no data), chances are proportional with a floor by default, and both are part of the record.
    """

    id: ClassVar[str] = "fisher"
    to_extend: ClassVar[str] = TO_EXTEND
    strata: dict[str, int] | None = None
    importance: Importance = "fisher"
    source: Source = "client_heldout"
    fisher_on: FisherOn = "factors"
    examples: int | None = None
    mapped: Mapped = "proportional"
    control: Control = "none"
    refresh: int | None = None
    warm_rounds: int = 0

    def decided_by_rounds(self, num_rounds: int) -> dict[str, Any]:
        """T_FIM and T_warm, where they are left out."""
        return Scoring.of(self).decided_by_rounds(num_rounds)

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No scores yet.

        Raises:
            PlanError: If a kind is unknown or left out, the model has fewer blocks, or a number is too small; all
                mistakes at once.
        """
        refuse(
            self.id,
            kind_problems("strata", counts_of(self.strata, shape, fleet), shape, fleet) + Scoring.of(self).problems(),
        )
        return dict(NO_SCORES)

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def probes(self, state: dict[str, Any], context: PlanContext) -> Probes | None:
        """Fisher sums, where they are due."""
        return Scoring.of(self).probes(context)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """Takes in the answers, then draws for every client."""
        counts = counts_of(self.strata, context.shape, context.fleet)
        state, why = Scoring.of(self).learn(state, context)
        blocks = trainable_blocks(context)
        chances = state["chances"] or dict.fromkeys(map(str, blocks), 1 / max(len(blocks), 1))
        phase = "scores" if state["chances"] else "no scores yet"
        reasons = {"rule": self.id, "phase": phase, **why}
        return plan_draws(np.array([chances[str(b)] for b in blocks]), counts, context, reasons), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Where the clients' updates are the scores, what the round's update says."""
        return Scoring.of(self).observe(state, round_record)


@PLANNERS.register
@dataclass(frozen=True)
class CoDesign(AskingPlanner):
    """Geometric chances while the adapters are young, importance afterwards: the co-design of Fed-HeLLo.

    Draws as `random_pattern` (RGD-HLA) for T_warm rounds, then as `fisher` (FIM-HLA) until the end.

    Args:
        strata: c_g, the number of blocks per device kind, 0 (the head only) to L; left out: by speed, see `counts_of`.
        pattern: Of the warm rounds.
        importance: As in `fisher`, like all options below.
        source: Whose examples.
        fisher_on: Gradients of the factors or of the whole weight.
        examples: Most examples per client; None takes all that are held out.
        mapped: From scores to chances.
        control: Permuted or inverted scores.
        refresh: T_FIM; None: max(1, ⌊R/10 + ½⌋).
        warm_rounds: T_warm; None: T_FIM.

    References:
        Zhang et al., Fed-HeLLo: Efficient Federated Foundation Model Fine-Tuning with Heterogeneous LoRA
        Allocation, 2025 (arXiv 2506.12213). Differs in: as `random_pattern` and `fisher` say.
    """

    id: ClassVar[str] = "hello"
    to_extend: ClassVar[str] = TO_EXTEND
    strata: dict[str, int] | None = None
    pattern: Pattern = "bottleneck"
    importance: Importance = "fisher"
    source: Source = "client_heldout"
    fisher_on: FisherOn = "factors"
    examples: int | None = None
    mapped: Mapped = "proportional"
    control: Control = "none"
    refresh: int | None = None
    warm_rounds: int | None = None

    def decided_by_rounds(self, num_rounds: int) -> dict[str, Any]:
        """T_FIM and T_warm, where they are left out."""
        return Scoring.of(self).decided_by_rounds(num_rounds)

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No scores yet.

        Raises:
            PlanError: As in `fisher`.
        """
        refuse(
            self.id,
            kind_problems("strata", counts_of(self.strata, shape, fleet), shape, fleet) + Scoring.of(self).problems(),
        )
        return dict(NO_SCORES)

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def probes(self, state: dict[str, Any], context: PlanContext) -> Probes | None:
        """Fisher sums, where they are due."""
        return Scoring.of(self).probes(context)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """Takes in the answers, then draws for every client: by the pattern until there are scores."""
        counts = counts_of(self.strata, context.shape, context.fleet)
        state, why = Scoring.of(self).learn(state, context)
        if state["chances"]:
            phase, chances = "scores", np.array([state["chances"][str(b)] for b in trainable_blocks(context)])
        else:
            phase, chances = (
                "pattern",
                group_probabilities(self.pattern, counts, context),
            )
        reasons = {"rule": self.id, "phase": phase, "pattern": self.pattern, **why}
        return plan_draws(chances, counts, context, reasons), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Where the clients' updates are the scores, what the round's update says."""
        return Scoring.of(self).observe(state, round_record)
