"""When and how strata are scored, and what a planner remembers of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from fedstrata.plan.base import PlanContext, Planner, Probes
from fedstrata.plan.checks import trainable_blocks
from fedstrata.plan.importance import Control, Mapped, control_scores, pool_scores, score_probabilities

Importance: TypeAlias = Literal["fisher", "updates", "zico_clients"]
Source: TypeAlias = Literal["client_heldout", "public", "other_domain", "random_tokens", "test_leaky"]
FisherOn: TypeAlias = Literal["factors", "weight"]

TO_EXTEND = "a run with `refresh` set to a number can be extended"
STATISTICS = {"updates": "mean_squared_delta", "zico_clients": "zico_clients"}
"""What a round's record calls the score that comes from the clients' own updates."""

NO_SCORES: dict[str, Any] = {"scores": None, "chances": None, "scored_round": 0, "updates": {}}
"""State before the first scores."""


@dataclass(frozen=True)
class Scoring:
    """How and when strata are scored: what `fisher` and `hello` share.

    Attributes:
        importance: `fisher`: asked for. `updates` (mean squared delta) and `zico_clients` (agreement over clients): per
            stratum, from the rounds' records.
        source: Whose examples.
        fisher_on: Gradients of the factors or of the whole weight.
        examples: Most examples per client; None takes all that are held out.
        mapped: From scores to chances.
        control: What happens to the scores before.
        refresh: T_FIM; None: max(1, ⌊R/10 + ½⌋).
        warm_rounds: T_warm; None: T_FIM.
    """

    importance: Importance
    source: Source
    fisher_on: FisherOn
    examples: int | None
    mapped: Mapped
    control: Control
    refresh: int | None
    warm_rounds: int | None

    @classmethod
    def of(cls, planner: Planner) -> Scoring:
        """The scoring that a planner's options of the same names describe."""
        return cls(**{f.name: getattr(planner, f.name) for f in fields(cls)})

    def problems(self) -> list[str]:
        """Wrong options."""
        least = {"examples": (self.examples, 1), "refresh": (self.refresh, 1), "warm_rounds": (self.warm_rounds, 0)}
        return [f"{k} = {v}: {low} or more" for k, (v, low) in least.items() if v is not None and v < low]

    def schedule(self, num_rounds: int) -> tuple[int, int]:
        """T_warm and T_FIM for R rounds."""
        refresh = self.refresh or max(1, math.floor(num_rounds / 10 + 0.5))
        return (refresh if self.warm_rounds is None else self.warm_rounds), refresh

    def decided_by_rounds(self, num_rounds: int) -> dict[str, Any]:
        """T_warm and T_FIM, where they follow from R."""
        if self.refresh is not None:
            return {}
        warm, refresh = self.schedule(num_rounds)
        return {"refresh": refresh} if self.warm_rounds is not None else {"refresh": refresh, "warm_rounds": warm}

    def is_due(self, context: PlanContext) -> bool:
        """Whether scores are computed at the start of this round: T_warm + 1, then every T_FIM rounds."""
        warm, refresh = self.schedule(context.num_rounds)
        return context.server_round > warm and (context.server_round - warm - 1) % refresh == 0

    def probes(self, context: PlanContext) -> Probes | None:
        """The question of a round in which scores are due."""
        if self.importance != "fisher" or not self.is_due(context):
            return None
        options: dict[str, Any] = {"source": self.source, "fisher_on": self.fisher_on, "examples": self.examples}
        return Probes("fisher", {**options, "strata": trainable_blocks(context)})

    def learn(self, state: dict[str, Any], context: PlanContext) -> tuple[dict[str, Any], dict[str, Any]]:
        """New scores and chances where they are due and can be had; else those from before.

        Returns:
            The new state, and what the record says about it.
        """
        why: dict[str, Any] = {"importance": self.importance, "mapped": self.mapped, "control": self.control}
        why |= dict(zip(("warm_rounds", "refresh"), self.schedule(context.num_rounds), strict=True))
        if self.importance == "fisher":
            why |= {"source": self.source, "fisher_on": self.fisher_on}
        if self.is_due(context):
            scores = self._fresh_scores(state, context, why)
            if scores is not None:
                state = {**state, **self._chances(scores, context)}
        return state, {**why, "scored_round": state["scored_round"], "scores": state["scores"]}

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps the newest score of every block that was held; below 0, which a logarithm may be, it counts as 0."""
        if self.importance not in STATISTICS:
            return state
        fresh = dict((round_record.get("statistics") or {}).get(STATISTICS[self.importance]) or {})
        kept = {str(s): max(float(x), 0.0) for s, x in fresh.items() if str(s).isdecimal() and math.isfinite(x)}
        return {**state, "updates": {**state["updates"], **kept}}

    def _fresh_scores(
        self, state: Mapping[str, Any], context: PlanContext, why: dict[str, Any]
    ) -> dict[int, float] | None:
        blocks = trainable_blocks(context)
        if self.importance == "fisher":
            scores, counts, refused = pool_scores(context.answers, blocks)
            why |= {"answers": counts, "refused_answers": refused}
            if scores is not None and context.server_round == 1 and self.fisher_on == "factors":
                why["note"] = "before the first update lora_B is 0: only gradients of lora_B count"
        else:
            known = {b: state["updates"][str(b)] for b in blocks if str(b) in state["updates"]}
            usual = math.fsum(known.values()) / len(known) if known else 0.0
            scores = {b: known.get(b, usual) for b in blocks} if known else None
            why["never_held"] = [b for b in blocks if b not in known]
        if scores is None:
            why["note"] = "nothing to score by: the chances stay as they were"
        return scores

    def _chances(self, scores: Mapping[int, float], context: PlanContext) -> dict[str, Any]:
        used = control_scores(scores, self.control, context.seed, context.server_round)
        chances = score_probabilities(list(used.values()), self.mapped)
        return {
            "scores": {str(b): x for b, x in scores.items()},
            "chances": {str(b): float(p) for b, p in zip(used, chances, strict=True)},
            "scored_round": context.server_round,
        }
