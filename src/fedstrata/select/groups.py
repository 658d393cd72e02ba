"""Blocks that may be compared with each other, and what is common to all selectors of a portion of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fedstrata.aggregate.base import Proposal
from fedstrata.core.tensors import Layout, Stratum, stratum_order
from fedstrata.errors import ConfigError


@dataclass(frozen=True)
class BlockGroup:
    """Blocks with the same sequence of tensor shapes.

    Attributes:
        blocks: All of them, from the input; at least two.
        candidates: Those with a holder in this round.
    """

    blocks: tuple[int, ...]
    candidates: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """What a selector takes of one group, and why (JSON-ready)."""

    accepted: tuple[int, ...]
    why: Mapping[str, Any] = field(default_factory=dict)


Choose: TypeAlias = Callable[[BlockGroup, int], Choice]
"""Takes `count` of a group's candidates."""


def check_portion(portion: float, selector: str) -> None:
    """Raises `ConfigError` unless 0 < portion ≤ 1."""
    if not 0 < portion <= 1:
        raise ConfigError(
            f"The {selector} selector accepts a share of the blocks",
            where=f"{selector}.portion",
            expected="a number above 0 and at most 1",
            got=str(portion),
        )


def num_accepted(portion: float, size: int) -> int:
    """S = max(1, ⌊portion·size + ½⌋): halves are rounded up, and at least one block is always accepted.

    Example:
        >>> [num_accepted(0.25, size) for size in (1, 2, 6, 10, 12)]
        [1, 1, 2, 3, 3]
    """
    return max(1, math.floor(portion * size + 0.5))


def block_groups(layout: Layout, holders: Mapping[Stratum, int]) -> tuple[list[BlockGroup], list[Stratum]]:
    """Sorts the strata of a round into groups that compete and strata that stand alone.

    Args:
        layout: The server's. It decides who stands alone, so that this does not change with who took part.
        holders: Strata with a holder.

    Returns:
        The groups with at least one candidate, by their lowest block; and the held strata that have no block of the
        same shapes beside them (embeddings, head and odd blocks), in order.
    """
    shapes: dict[Stratum, list[tuple[int, ...]]] = {s: [] for s in layout.strata}
    for spec in layout:
        shapes[spec.stratum].append(spec.shape)
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    alone: list[Stratum] = []
    for stratum, sizes in shapes.items():
        if isinstance(stratum, int):
            alike.setdefault(tuple(sizes), []).append(stratum)
        else:
            alone.append(stratum)
    groups = []
    for blocks in alike.values():
        candidates = tuple(b for b in blocks if b in holders)
        if len(blocks) == 1:
            alone.extend(blocks)
        elif candidates:
            groups.append(BlockGroup(tuple(blocks), candidates))
    return groups, sorted((s for s in alone if s in holders), key=stratum_order)


def accept_portion(
    proposal: Proposal, layout: Layout, portion: float, update_singletons: bool, choose: Choose
) -> tuple[Proposal, dict[str, Any]]:
    """Lets `choose` take S blocks of every group; strata that stand alone follow `update_singletons`.

    Returns:
        The accepted part and its record: `groups` (each with its `blocks`, `candidates`, `accepted` and what `choose`
        says), `singletons` and, over everything, `accepted`.
    """
    groups, singletons = block_groups(layout, proposal.holders)
    accepted: list[Stratum] = list(singletons) if update_singletons else []
    records = []
    for group in groups:
        choice = choose(group, num_accepted(portion, len(group.candidates)))
        accepted.extend(choice.accepted)
        records.append(
            {
                "blocks": _names(group.blocks),
                "candidates": _names(group.candidates),
                "accepted": _names(sorted(choice.accepted)),
                **choice.why,
            }
        )
    accepted.sort(key=stratum_order)
    why = {"groups": records, "singletons": _names(singletons), "accepted": _names(accepted)}
    return proposal.restrict(accepted), why


def _names(strata: tuple[int, ...] | list[int] | list[Stratum]) -> list[str]:
    return [str(s) for s in strata]
