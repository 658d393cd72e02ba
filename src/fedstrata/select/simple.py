"""The baselines of a scored selection: the same number of blocks, drawn at random or nearest the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedstrata.aggregate.base import Proposal
from fedstrata.core.rng import generator, sample_without_replacement
from fedstrata.select.base import SELECTORS, SelectContext, Selector
from fedstrata.select.groups import BlockGroup, Choice, accept_portion, check_portion


@SELECTORS.register
@dataclass(frozen=True)
class AcceptRandom(Selector):
    """Accepts S random blocks of every group, drawn anew in every round, without replacement.

        S = max(1, ⌊portion·g + ½⌋)        g: blocks of the group with a holder

    Blocks with the same sequence of tensor shapes form a group. The stream is generator(seed, "selector", round); the
    groups take from it one after the other, by their lowest block. Every block with a holder is accepted with
    probability S/g.

    Args:
        portion: Share of the blocks that is accepted, in (0, 1].
        update_singletons: Whether strata that stand alone (embeddings, head, odd blocks) are always accepted, or never.
    """

    id: ClassVar[str] = "random_blocks"
    portion: float = 0.5
    update_singletons: bool = True

    def __post_init__(self) -> None:
        check_portion(self.portion, self.id)

    def init(self) -> dict[str, Any]:
        """No state."""
        return {}

    def select(
        self, state: dict[str, Any], proposal: Proposal, context: SelectContext
    ) -> tuple[Proposal, dict[str, Any], dict[str, Any]]:
        """Draws from every group."""
        rng = generator(context.seed, "selector", context.server_round)

        def draw(group: BlockGroup, count: int) -> Choice:
            chosen = sample_without_replacement(rng, np.zeros(len(group.candidates)), count)
            return Choice(tuple(group.candidates[i] for i in chosen))

        accepted, why = accept_portion(proposal, context.layout, self.portion, self.update_singletons, draw)
        return accepted, state, {"rule": self.id, "portion": self.portion, **why}


@SELECTORS.register
@dataclass(frozen=True)
class AcceptLast(Selector):
    """Accepts the S blocks of every group that are nearest the output (the largest block ids with a holder).

        S = max(1, ⌊portion·g + ½⌋)        g: blocks of the group with a holder

    Blocks with the same sequence of tensor shapes form a group.

    Args:
        portion: Share of the blocks that is accepted, in (0, 1].
        update_singletons: Whether strata that stand alone (embeddings, head, odd blocks) are always accepted, or never.
    """

    id: ClassVar[str] = "last_blocks"
    portion: float = 0.5
    update_singletons: bool = True

    def __post_init__(self) -> None:
        check_portion(self.portion, self.id)

    def init(self) -> dict[str, Any]:
        """No state."""
        return {}

    def select(
        self, state: dict[str, Any], proposal: Proposal, context: SelectContext
    ) -> tuple[Proposal, dict[str, Any], dict[str, Any]]:
        """Takes the largest ids of every group."""
        accepted, why = accept_portion(
            proposal,
            context.layout,
            self.portion,
            self.update_singletons,
            lambda group, count: Choice(group.candidates[-count:]),
        )
        return accepted, state, {"rule": self.id, "portion": self.portion, **why}
