"""Ranks that grow towards the output under a budget, and the controls at the same sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from fedstrata.errors import PlanError

BUDGET_PER_BLOCK = 8
STEPS = (1.0, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class GrowingRanks:
    """Ranks of L blocks and how they came about.

    Attributes:
        ranks: r_l, l = 0 … L−1 from the input.
        start: r_0.
        step: λ.
        budget: ψ; None if r_0 was given.
        is_step_chosen: Whether λ was chosen because the user set neither λ nor ψ nor r_0.
    """

    ranks: tuple[int, ...]
    start: int
    step: float
    budget: int | None
    is_step_chosen: bool


def growing_ranks(
    num_blocks: int,
    *,
    budget: int | None = None,
    step: float | None = None,
    start: int | None = None,
    limit: int | None = None,
) -> GrowingRanks:
    """Ranks that grow by λ per block towards the output.

        r_l = r_0 + ⌊λ·l⌋,   r_0 = ⌊(ψ − λ·L·(L−1)/2)/L⌋

    Args:
        num_blocks: L.
        budget: ψ, the ranks of all blocks together; None: 8·L.
        step: λ; None: 1. If neither ψ nor λ nor r_0 is given, the largest of 1, ½, ¼, 0 that the budget allows.
        start: r_0, instead of a budget.
        limit: The largest rank that the default budget may lead to; a given ψ, λ or r_0 counts more.

    Raises:
        PlanError: If λ is below 0, r_0 below 1, both ψ and r_0 are given, or the budget is too small (the message
            names the smallest one that is not).

    Example:
        >>> growing_ranks(12).ranks
        (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)
        >>> growing_ranks(24).step
        0.5
    """
    if step is not None and not (math.isfinite(step) and step >= 0):
        raise PlanError(f"Ranks cannot grow by {step}", where="rank_step", expected="a number of 0 or more")
    if start is not None:
        if budget is not None:
            raise PlanError(
                "Ranks have a budget and a start", where="rank_budget, rank_start", do="leave one of them out"
            )
        if start < 1:
            raise PlanError(f"Ranks cannot start at {start}", where="rank_start", expected="1 or more")
        step = 1.0 if step is None else step
        return GrowingRanks(_grow(start, step, num_blocks), start, step, None, False)
    chosen = budget is None and step is None
    budget = BUDGET_PER_BLOCK * num_blocks if budget is None else budget
    for candidate in STEPS if chosen else (1.0 if step is None else step,):
        added = _exact(candidate) * num_blocks * (num_blocks - 1) / 2
        first = math.floor((budget - added) / num_blocks) if num_blocks else 0
        if chosen and limit is not None:
            capped = limit - math.floor(_exact(candidate) * max(num_blocks - 1, 0))
            if 1 <= capped < first:
                ranks = _grow(capped, candidate, num_blocks)
                return GrowingRanks(ranks, capped, candidate, sum(ranks), True)
            first = min(first, capped)
        if first >= 1:
            return GrowingRanks(_grow(first, candidate, num_blocks), first, candidate, budget, chosen)
    raise PlanError(
        f"A rank budget of {budget} is too small for {num_blocks} blocks whose ranks grow by {candidate:g}",
        where="rank_budget",
        expected=f"at least L + step*L*(L-1)/2 = {math.ceil(num_blocks + added)}",
        do="raise rank_budget, or lower rank_step",
    )


def _exact(step: float) -> Fraction:
    """λ as it was written: 0.1 is one tenth."""
    return Fraction(repr(float(step)))


def _grow(start: int, step: float, num_blocks: int) -> tuple[int, ...]:
    return tuple(start + math.floor(_exact(step) * block) for block in range(num_blocks))


def uniform_ranks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The same sum spread evenly: ⌊Σ/L⌋ everywhere, one more on the blocks nearest the output.

    Example:
        >>> uniform_ranks((1, 2, 3, 5))
        (2, 3, 3, 3)
    """
    each, more = divmod(sum(ranks), len(ranks))
    return tuple(each + (block >= len(ranks) - more) for block in range(len(ranks)))
