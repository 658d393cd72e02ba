"""Who trained what against who was to: tallies per stratum, with the error bar that chance alone gives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from fedstrata.report.inclusion import inclusion_chances
from fedstrata.report.reasons import Reasons, numbers
from fedstrata.report.strata import Tally, Target

_TARGETS: tuple[Target, ...] = ("plan", "pattern", "chances")
"""From the weakest to the strongest; a run is named after its strongest."""


def planned_strata(client: Mapping[str, Any]) -> dict[str, int]:
    """Rank of every stratum that a client was to train."""
    return {s: int(r) for s, r in numbers(client["planned"]).items() if r > 0}


def reply_targets(reasons: Reasons, client: Mapping[str, Any], num_blocks: int) -> tuple[dict[str, float], Target]:
    """The chance of every block to be in this client's plan.

    Drawn blocks have `inclusion_chances` for as many blocks as the client drew. A pattern's are 1 or 0, and so are
    those of other plans, which are held against themselves.

    Args:
        reasons: Of the round.
        client: The client's line.
        num_blocks: L; with equal chances all of them count.

    Returns:
        P per stratum (absent: 0), and what it comes from.
    """
    planned = planned_strata(client)
    named: dict[str, float] = {s: 1.0 for s in planned if not s.isdecimal()}
    count = len(planned) - len(named)
    if reasons.chances:
        blocks = tuple(reasons.chances)
        chances = _inclusion(tuple(reasons.chances.values()), count)
        return named | dict(zip(blocks, chances, strict=True)), "chances"
    if reasons.is_uniform:
        return named | dict.fromkeys(map(str, range(num_blocks)), min(count / num_blocks, 1.0)), "chances"
    if client["device"] in reasons.sets:
        return named | dict.fromkeys(reasons.sets[client["device"]], 1.0), "pattern"
    return dict.fromkeys(planned, 1.0), "plan"


@lru_cache(maxsize=4096)
def _inclusion(probabilities: tuple[float, ...], count: int) -> tuple[float, ...]:
    return tuple(inclusion_chances(probabilities, count).tolist())


class TrainingTally:
    """Counts good replies, stratum by stratum and device kind by device kind."""

    def __init__(self, strata: Sequence[str], num_blocks: int) -> None:
        self.target: Target = "plan"
        self.num_planned: Counter[str] = Counter()
        self._strata, self._num_blocks = tuple(strata), num_blocks
        self._cases: Counter[str] = Counter()
        self._hits: Counter[tuple[str, str]] = Counter()
        self._expected: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._variance: defaultdict[tuple[str, str], float] = defaultdict(float)

    def add(self, reasons: Reasons, client: Mapping[str, Any]) -> None:
        """Counts one good reply."""
        chances, target = reply_targets(reasons, client, self._num_blocks)
        self.target = max(self.target, target, key=_TARGETS.index)
        kind = client["device"]
        self._cases[kind] += 1
        self.num_planned.update(planned_strata(client).keys())
        self._hits.update((kind, str(s)) for s in client["trained"])
        for stratum, chance in chances.items():
            self._expected[kind, stratum] += chance
            self._variance[kind, stratum] += chance * (1 - chance)

    @property
    def kinds(self) -> list[str]:
        """Device kinds, the most frequent first."""
        return sorted(self._cases, key=lambda kind: (-self._cases[kind], kind))

    def of(self, stratum: str, kinds: Iterable[str] | None = None) -> Tally:
        """A stratum's count over some kinds, or all of them."""
        chosen = self.kinds if kinds is None else list(kinds)
        return Tally(
            num_cases=sum(self._cases[kind] for kind in chosen),
            num_hits=sum(self._hits[kind, stratum] for kind in chosen),
            expected=sum(self._expected.get((kind, stratum), 0.0) for kind in chosen),
            variance=sum(self._variance.get((kind, stratum), 0.0) for kind in chosen),
        )


def count_taken(rounds: Iterable[Reasons], stratum: str) -> Tally | None:
    """How often the server took a stratum over, beside a draw of as many at random from its group.

    A group of g candidates of which S were taken gives every one of them the chance S/g.

    Returns:
        None where it never competed.
    """
    cases, hits, expected, variance = 0, 0, 0.0, 0.0
    for reasons in rounds:
        for group in reasons.groups:
            if stratum in group.candidates:
                chance = len(group.accepted) / len(group.candidates)
                cases += 1
                hits += stratum in group.accepted
                expected += chance
                variance += chance * (1 - chance)
    return Tally(cases, hits, expected, variance) if cases else None
