"""What one round's record says about why: read with care, since parts, plug-ins and older versions write less or else.

A value of another form than expected counts as not there; nothing in here raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstrata.core.tensors import EMBEDDINGS, HEAD

UNIFORM_RULES = frozenset({"random_k"})


@dataclass(frozen=True)
class SelectionGroup:
    """Blocks that competed in one round.

    Attributes:
        candidates: Those with a holder.
        accepted: Those that the server took over.
        scored_by: The score that they were ranked by; empty where there is none.
        is_flat: Whether their scores were numerically flat.
        tied: Blocks of which a tie at the limit decided.
    """

    candidates: tuple[str, ...]
    accepted: frozenset[str]
    scored_by: str
    is_flat: bool
    tied: tuple[str, ...]


@dataclass(frozen=True)
class Reasons:
    """Why a round went as it did.

    Attributes:
        server_round: Which one.
        rule: The planner's id; empty if unknown.
        chances: π per block; empty if blocks were not drawn, or all are equally likely.
        is_uniform: Whether blocks were drawn with equal chances.
        sets: The fixed blocks of each device kind; empty without a pattern.
        scores: What the planner scored blocks by.
        scored_round: When it did; 0 if never.
        accepted: Strata that the server took over; None without a record of it.
        groups: Who competed; empty if the server takes everything.
        keys: What the selector ranked by; without infinite ones.
        reported: The selector's score as its paper defines it.
        infinite: Blocks whose score is infinite.
        holders: How many clients trained each stratum; None without a record of it.
        depths: Planned number of blocks per client, where the plan is about depth.
        wait_ratio: The wait that the planner expects, as a share of the slowest client's time.
        why: The planner's record as it is.
        selection: The selector's record as it is.
        statistics: The aggregator's record as it is.
    """

    server_round: int
    rule: str
    chances: Mapping[str, float]
    is_uniform: bool
    sets: Mapping[str, frozenset[str]]
    scores: Mapping[str, float]
    scored_round: int
    accepted: frozenset[str] | None
    groups: tuple[SelectionGroup, ...]
    keys: Mapping[str, float]
    reported: Mapping[str, float]
    infinite: frozenset[str]
    holders: Mapping[str, int] | None
    depths: Mapping[str, int]
    wait_ratio: float | None
    why: Mapping[str, Any] = field(repr=False)
    selection: Mapping[str, Any] = field(repr=False)
    statistics: Mapping[str, Any] = field(repr=False)

    @property
    def scored_by(self) -> Mapping[str, str]:
        """Per block the score that it was ranked by."""
        return {block: group.scored_by for group in self.groups for block in group.candidates}


def read_reasons(record: Mapping[str, Any]) -> Reasons:
    """The reasons in a line of `rounds.jsonl`."""
    why, selection = mapping(record.get("why")), mapping(record.get("selection"))
    rule = str(why.get("rule") or "")
    holders = record.get("holders")
    depths = {c: int(k) for c, k in numbers(why.get("depths")).items()} if rule == "depth_and_rank" else {}
    return Reasons(
        server_round=record["server_round"],
        rule=rule,
        chances=_strata_numbers(why.get("probabilities")),
        is_uniform=rule in UNIFORM_RULES or why.get("arm") == "random_strata",
        sets={kind: frozenset(_names(blocks)) for kind, blocks in mapping(why.get("sets")).items()},
        scores=_strata_numbers(why.get("scores")),
        scored_round=int(number(why.get("scored_round")) or 0),
        accepted=frozenset(_names(selection["accepted"])) if "accepted" in selection else None,
        groups=tuple(_group(mapping(g)) for g in sequence(selection.get("groups"))),
        keys=_strata_numbers(selection.get("keys")),
        reported=_strata_numbers(selection.get("scores")),
        infinite=frozenset(filter(is_stratum, mapping(selection.get("flagged")))),
        holders={s: int(n) for s, n in _strata_numbers(holders).items()} if mapping(holders) else None,
        depths=depths,
        wait_ratio=number(why.get("wait_ratio")),
        why=why,
        selection=selection,
        statistics=mapping(record.get("statistics")),
    )


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a table, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Iterable[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list | tuple) else ()


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(value: Any) -> dict[str, float]:
    """The entries of a table that are finite numbers."""
    found = {str(k): number(v) for k, v in mapping(value).items()}
    return {k: v for k, v in found.items() if v is not None}


def is_stratum(key: str) -> bool:
    """Whether a record's key names a stratum: a block's number, `embeddings` or `head`."""
    return key.isdecimal() or key in (EMBEDDINGS, HEAD)


def _strata_numbers(value: Any) -> dict[str, float]:
    return {k: v for k, v in numbers(value).items() if is_stratum(k)}


def _names(value: Any) -> list[str]:
    return [name for name in map(str, sequence(value)) if is_stratum(name)]


def _group(group: Mapping[str, Any]) -> SelectionGroup:
    return SelectionGroup(
        candidates=tuple(_names(group.get("candidates"))),
        accepted=frozenset(_names(group.get("accepted"))),
        scored_by=str(group.get("scored_by") or ""),
        is_flat=group.get("flat") is True,
        tied=tuple(_names(group.get("tied"))),
    )
