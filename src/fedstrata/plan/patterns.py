"""Geometric patterns: nested sets of strata per group size, and the chances that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from fedstrata.core.rng import generator, sample_without_replacement
from fedstrata.errors import PlanError
from fedstrata.plan.base import PlanContext

Pattern: TypeAlias = Literal["triangle", "shallow", "inverted_triangle", "deep", "bottleneck", "uniform"]


def pattern_sets(pattern: Pattern, num_strata: int, sizes: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """The set of strata of every group size; a smaller set lies in each larger one.

    - `triangle` (or `shallow`): prefixes 0, …, c−1.
    - `inverted_triangle` (or `deep`): suffixes L−c, …, L−1.
    - `bottleneck`: alternately from both ends, starting at the input: 0, L−1, 1, L−2, …
    - `uniform`: the smallest size takes ⌊j·L/c⌋ for j = 0, …, c−1; each larger one adds a strata from the sorted
      complement C of the one before, at positions ⌊j·|C|/a⌋ for j = 0, …, a−1.

    Args:
        pattern: Its name.
        num_strata: L.
        sizes: Group sizes c, 0 to L; repeated ones count once.

    Returns:
        Ascending strata per size, sizes ascending.

    Raises:
        PlanError: If a size is not between 0 and L.

    Example:
        >>> pattern_sets("bottleneck", 12, [6])[6]
        (0, 1, 2, 9, 10, 11)
        >>> pattern_sets("uniform", 6, [2, 4])
        {2: (0, 3), 4: (0, 1, 3, 4)}
    """
    wanted = sorted(set(sizes))
    wrong = [c for c in wanted if not 0 <= c <= num_strata]
    if wrong:
        raise PlanError(f"There is no set of {wrong[0]} strata", expected=f"0 to {num_strata}", where=pattern)
    if pattern == "uniform":
        return _uniform_sets(num_strata, wanted)
    order = _order(pattern, num_strata)
    return {c: tuple(sorted(order[:c])) for c in wanted}


def _order(pattern: Pattern, num_strata: int) -> list[int]:
    """Strata in the order in which growing sets take them."""
    if pattern in ("triangle", "shallow"):
        return list(range(num_strata))
    if pattern in ("inverted_triangle", "deep"):
        return list(reversed(range(num_strata)))
    return [j // 2 if j % 2 == 0 else num_strata - 1 - j // 2 for j in range(num_strata)]


def _uniform_sets(num_strata: int, sizes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    taken: set[int] = set()
    sets = {}
    for size in sizes:
        left = [s for s in range(num_strata) if s not in taken]
        added = size - len(taken)
        taken |= {left[j * len(left) // added] for j in range(added)}
        sets[size] = tuple(sorted(taken))
    return sets


def pattern_probabilities(sets: Iterable[Collection[int]], num_strata: int) -> np.ndarray:
    """Chances by how many groups' sets contain a stratum, each group's set once.

        π_l = |{g : l ∈ S_g}| / Σ_g |S_g|

    Args:
        sets: S_g, one per group; empty ones add nothing.
        num_strata: L.

    Returns:
        π, float64 [L]; uniform if all sets are empty.

    Example:
        >>> pattern_probabilities([{0}, {0, 1}], 2).tolist()
        [0.6666666666666666, 0.3333333333333333]
    """
    times = Counter(s for members in sets for s in members)
    counts = np.array([times[s] for s in range(num_strata)], np.float64)
    return counts / counts.sum() if counts.any() else np.full(num_strata, 1 / max(num_strata, 1))


def draw_blocks(
    probabilities: np.ndarray, blocks: Sequence[int], client: str, count: int, context: PlanContext
) -> list[int]:
    """Draws a client's blocks without replacement, by Gumbel keys from generator(seed, "allocation", round, client).

    The stream depends on nothing but seed, round and client. A block's chance to be among the drawn ones is not
    count·π: the record says how often each was drawn.

    Args:
        probabilities: π over `blocks`; 0 excludes a block.
        blocks: Block numbers, ascending.
        client: Who trains.
        count: How many.
        context: Seed and round.

    Returns:
        Ascending block numbers.

    Raises:
        PlanError: If fewer than `count` blocks have a chance above 0.
    """
    able = int(np.count_nonzero(probabilities))
    if able < count:
        raise PlanError(f"Client {client} should draw {count} blocks, but only {able} have a chance above 0")
    with np.errstate(divide="ignore"):
        log_weights = np.log(probabilities)
    rng = generator(context.seed, "allocation", context.server_round, client)
    return [blocks[i] for i in sample_without_replacement(rng, log_weights, count)]
