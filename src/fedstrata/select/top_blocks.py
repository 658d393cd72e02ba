"""The server takes over the blocks whose update scores highest, as FedTLU does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from fedstrata.aggregate.base import Proposal
from fedstrata.core.tensors import TensorSpec
from fedstrata.errors import AggregationError, ConfigError, did_you_mean
from fedstrata.select.base import SELECTORS, SelectContext, Selector
from fedstrata.select.groups import BlockGroup, Choice, accept_portion, check_portion
from fedstrata.select.scores import (
    BlockScore,
    DeltaStats,
    consistency,
    delta_stats,
    magnitude,
    product_stats,
    rank_blocks,
    zico_clients,
)

Score: TypeAlias = Literal["consistency", "zico_clients", "magnitude"]
ScoreOn: TypeAlias = Literal["factors", "product"]
MIN_HOLDERS = 4
"""Fewest clients whose spread says something about a block."""
FLAT_RANGE = 1e-3
"""Keys that differ by less are numerically flat."""


@SELECTORS.register
@dataclass(frozen=True)
class TopBlocks(Selector):
    """Per group of equally shaped blocks, the top S take the aggregate W̄; the others keep the server's W(t).

    With Δ_i = W̄_i − W_i(t) of tensor i with n_i entries,

        Score(i) = ‖Δ_i‖₂ / (√n_i·std(Δ_i)) = √(1 + x_i²),        x_i = |mean(Δ_i)| / std(Δ_i)
        key(block) = Σ_i (√(1 + x_i²) − 1),   reported score = key + number of its tensors with Δ_i ≠ 0
        S = max(1, ⌊portion·g + ½⌋)           g: blocks of the group with a holder

    The key has the order of the paper's Σ Score(i) and none of its cancellation: the scores of large matrices of noise
    differ near the 7th decimal. Standard deviations have ddof 0; everything is computed in float64 from what would be
    applied (after the cast to float32). A block is accepted with all its tensors: never A without B.

    Rules where the paper is silent (ours): a tensor with Δ = 0 adds 0; tensors with fewer than 2 entries are left out;
    std ≤ 1e-12·rms with Δ ≠ 0 makes the key infinite and is flagged; of equal keys the lower block id wins; a block
    that did not move comes last. A group whose keys lie within 1e-3 (`magnitude`: within 1e-3 of the largest) gets a
    "numerically flat" warning.

    The record holds per block the `scores` and `keys` (null where infinite), per group what was compared and accepted,
    `flagged` blocks, `ties` that decided, the groups that are `flat`, the `fallback`, and `warnings` in words.

    Args:
        portion: Share of every group that is accepted, in (0, 1].
        score: `consistency`: as above. `zico_clients`: Σ_i log Σ_ω |mean_k Δ_kω|/std_k Δ_kω over the K ≥ 4 holders'
            own differences, for which the aggregator supplies Σ_k Δ_k and Σ_k Δ_k²; a group with a block of fewer
            holders is scored by `consistency`, and the record says so. `magnitude`: √(Σ‖Δ_i‖²/Σn_i).
        score_on: `factors`: A and B are two tensors. `product`: a pair is one tensor, s·(B̄Ā − BA), whose mean and
            rms come from the factors; independent of how the product is split. Its scaling s, one for all blocks of a
            group, is left out: `consistency` does not depend on it and the order by `magnitude` neither.
        update_singletons: Whether strata that stand alone (embeddings, head, odd blocks) are always accepted, or never.

    References:
        FedTLU: Federated Learning with Targeted Layer Updates (the score and the top-S rule); Li et al., ZiCo:
        Zero-shot NAS via Inverse Coefficient of Variation on Gradients, ICLR 2023 (the form of `zico_clients`).
        Differs in: key without cancellation, groups by shape, LoRA products, and the rules marked ours.
    """

    id: ClassVar[str] = "top_blocks"
    portion: float = 0.5
    score: Score = "consistency"
    score_on: ScoreOn = "factors"
    update_singletons: bool = True

    def __post_init__(self) -> None:
        check_portion(self.portion, self.id)
        problems = [
            f'{name} = "{value}": {did_you_mean(str(value), known)}'
            for name, value, known in (
                ("score", self.score, get_args(Score)),
                ("score_on", self.score_on, get_args(ScoreOn)),
            )
            if value not in known
        ]
        if not problems and self.needs_moments and self.score_on == "product":
            problems.append('score = "zico_clients" looks at the tensors that clients send: score_on = "factors"')
        if problems:
            raise ConfigError(f"The {self.id} selector has wrong options", problems=problems)

    @property
    def needs_moments(self) -> bool:
        """Whether the aggregator has to supply `Proposal.moments`."""
        return self.score == "zico_clients"

    def init(self) -> dict[str, Any]:
        """No state: every round stands alone."""
        return {}

    def select(
        self, state: dict[str, Any], proposal: Proposal, context: SelectContext
    ) -> tuple[Proposal, dict[str, Any], dict[str, Any]]:
        """Ranks every group and takes its best blocks.

        Raises:
            AggregationError: If the score needs moments or pairs that the proposal does not have.
        """
        scores: dict[int, BlockScore] = {}
        fallback: list[dict[str, Any]] = []

        def choose(group: BlockGroup, count: int) -> Choice:
            few = {b: proposal.holders[b] for b in group.candidates if proposal.holders[b] < MIN_HOLDERS}
            score: Score = self.score
            if self.needs_moments and few:
                score = "consistency"
                fallback.append({"score": score, "num_holders": {str(b): n for b, n in few.items()}})
            mine = {b: self._score(score, b, proposal, context) for b in group.candidates}
            scores.update(mine)
            return _take(mine, count, score)

        accepted, why = accept_portion(proposal, context.layout, self.portion, self.update_singletons, choose)
        blocks = sorted(scores)
        flagged = [b for b in blocks if scores[b].flagged]
        flat = [g["candidates"] for g in why["groups"] if g["flat"]]
        record = {
            "rule": self.id,
            "portion": self.portion,
            "score": self.score,
            "score_on": self.score_on,
            **why,
            "scores": {str(b): _finite(scores[b].reported) for b in blocks},
            "keys": {str(b): _finite(scores[b].key) for b in blocks},
            "flagged": {str(b): list(scores[b].flagged) for b in flagged},
            "ties": [g["tied"] for g in why["groups"] if g["tied"]],
            "flat": flat,
            "fallback": fallback or None,
        }
        record["warnings"] = _warnings(record)
        return accepted, state, record

    def _score(self, score: Score, block: int, proposal: Proposal, context: SelectContext) -> BlockScore:
        specs = [s for s in context.layout.of(block) if s.name in proposal.tensors]
        if score == "zico_clients":
            missing = [s.name for s in specs if s.name not in proposal.moments]
            if missing:
                raise AggregationError(
                    "The score zico_clients needs the spread over the clients, which this aggregator does not supply",
                    where=f"block {block}, tensor {missing[0]}",
                    expected="the sums of Δ and Δ² over the holders",
                    do='use an aggregator with "moments", or score = "consistency"',
                )
            return zico_clients([proposal.moments[s.name] for s in specs], proposal.holders[block])
        stats = self._stats(specs, block, proposal, context)
        return consistency(stats) if score == "consistency" else magnitude(stats)

    def _stats(
        self, specs: list[TensorSpec], block: int, proposal: Proposal, context: SelectContext
    ) -> list[DeltaStats]:
        """One entry per tensor, or per LoRA product and plain weight."""
        new, old = proposal.tensors, context.current
        if self.score_on == "factors":
            return [delta_stats(s.name, new[s.name], old[s.name]) for s in specs]
        stats: list[DeltaStats] = []
        for target in dict.fromkeys(s.target for s in specs):
            names = (f"{target}.lora_A", f"{target}.lora_B")
            if target in context.layout:
                stats.append(delta_stats(target, new[target], old[target]))
            elif all(n in old for n in names):
                after = (new.get(names[0], old[names[0]]), new.get(names[1], old[names[1]]))
                stats.append(product_stats(target, after, (old[names[0]], old[names[1]])))
            else:
                raise AggregationError(
                    'score_on = "product" needs both factors of every pair on the server',
                    where=f"block {block}, {target}",
                    do='score_on = "factors"',
                )
        return stats


def _take(scores: Mapping[int, BlockScore], count: int, score: Score) -> Choice:
    """The best `count` blocks, and what there is to say about how clear that was."""
    order = rank_blocks(scores)
    last = scores[order[count - 1]]
    first_out = scores[order[count]] if count < len(order) else None
    tied = []
    if first_out is not None and (first_out.key, first_out.moved) == (last.key, last.moved):
        tied = sorted(b for b, s in scores.items() if (s.key, s.moved) == (last.key, last.moved))
    keys = [s.key for s in scores.values()]
    spread = 0.0 if min(keys) == max(keys) else max(keys) - min(keys)
    limit = FLAT_RANGE * max(keys) if score == "magnitude" else FLAT_RANGE
    flat = len(keys) > 1 and (spread == 0 or spread < limit)
    why = {
        "scored_by": score,
        "order": [str(b) for b in order],
        "key_range": _finite(spread),
        "flat": flat,
        "tied": [str(b) for b in tied],
    }
    return Choice(tuple(order[:count]), why)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _warnings(record: Mapping[str, Any]) -> list[str]:
    """What a user should know, in sentences."""
    lines = [
        f"blocks {', '.join(blocks)} are numerically flat: their keys lie within {FLAT_RANGE:g}, the choice says little"
        for blocks in record["flat"]
    ]
    lines.extend(
        f"block {block}: {', '.join(tensors)} moved by one and the same number, its score is infinite"
        for block, tensors in record["flagged"].items()
    )
    for entry in record["fallback"] or ():
        few = ", ".join(f"block {b} has {n}" for b, n in entry["num_holders"].items())
        lines.append(f"zico_clients needs {MIN_HOLDERS} holders, but {few}: scored by {entry['score']} instead")
    return lines
