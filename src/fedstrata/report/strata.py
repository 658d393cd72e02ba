"""What a run's records say about each stratum: scores, chances, selection, training. Plain values, JSON-ready."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from fedstrata.report.inclusion import chance_limit
from fedstrata.report.view import Point

Target: TypeAlias = Literal["chances", "pattern", "plan"]


@dataclass(frozen=True)
class Tally:
    """How often something happened to a stratum, beside what was to be expected.

    Attributes:
        num_cases: In how many cases it could have happened.
        num_hits: In how many it did.
        expected: Σ P over the cases, P the chance of each.
        variance: Σ P(1 − P): cases are drawn independently.
    """

    num_cases: int
    num_hits: int
    expected: float
    variance: float

    @property
    def deviation(self) -> float:
        """Hits − expected."""
        return self.num_hits - self.expected

    @property
    def std(self) -> float:
        """What chance alone gives: one standard deviation, √(Σ P(1 − P)); 0 where nothing was left to chance."""
        return math.sqrt(self.variance)

    @property
    def z(self) -> float | None:
        """The deviation in standard deviations; None where nothing was left to chance."""
        return self.deviation / self.std if self.variance > 1e-9 else None

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        derived = {"deviation": self.deviation, "std": self.std, "z": self.z}
        return {**asdict(self), **derived}


@dataclass(frozen=True)
class StratumHistory:
    """One stratum over the rounds; tuples have one entry per round of the view.

    Attributes:
        stratum: `"5"`, `"head"` or `"embeddings"`.
        holders: How many clients trained it.
        chances: π of the round's plan; None where blocks were not drawn by chances.
        selected: Whether the server took it over; None where it had no holder, or nothing is recorded.
        num_planned: In how many good replies it was to be trained.
        trained: Good replies in which it was trained, against the target.
        by_kind: The same per device kind.
        taken: Rounds in which the server took it over, of those in which it competed, against a draw at random; None
            where it never competed.
    """

    stratum: str
    holders: tuple[int, ...]
    chances: tuple[float | None, ...]
    selected: tuple[bool | None, ...]
    num_planned: int
    trained: Tally
    by_kind: Mapping[str, Tally]
    taken: Tally | None


@dataclass(frozen=True)
class ScoreMap:
    """A score per stratum and round.

    Attributes:
        source: Who scored: the planner before the round, or the selector after it.
        name: The score: `fisher`, `updates`, `consistency`, `magnitude`, `zico_clients`, …
        values: What decides, per stratum and round: the planner's score, or the selector's ranking key. None where
            there is none, or it is infinite.
        reported: The selector's score as its paper defines it; empty where that is the same.
        infinite: Round and stratum of infinite scores.
        other: Round and stratum of values of another score, because that round's had to be replaced.
        computed_in: Rounds in which scores were computed; a planner keeps them until the next.
        note: What else a reader must know: whose examples, which control.
    """

    source: Literal["planner", "selector"]
    name: str
    values: Mapping[str, tuple[float | None, ...]]
    reported: Mapping[str, tuple[float | None, ...]]
    infinite: frozenset[tuple[int, str]]
    other: frozenset[tuple[int, str]]
    computed_in: tuple[int, ...]
    note: str

    def comparable(self, rounds: tuple[int, ...]) -> list[float]:
        """All finite values of the one score, for a common scale.

        Args:
            rounds: Of the view.
        """
        return [
            value
            for stratum, row in self.values.items()
            for r, value in zip(rounds, row, strict=True)
            if value is not None and (r, stratum) not in self.other
        ]


@dataclass(frozen=True)
class Exactness:
    """How far the merged model is from the mean of the clients', per round.

    Attributes:
        name: `exactness_error`, or `distance_to_mean` of robust means, which are meant to differ from it.
        product: Relative to the mean of the clients' products.
        update: Relative to the mean of what they changed.
        reason: Why there is no number, or what to know about it.
    """

    name: Literal["exactness_error", "distance_to_mean"]
    product: list[Point]
    update: list[Point]
    reason: str | None


@dataclass(frozen=True)
class ProbeTotals:
    """What the planner's questions cost.

    Attributes:
        rounds: Before which rounds it asked.
        sources: Whose examples.
        num_answers: Usable answers.
        num_examples: Examples behind them.
        downlink_bytes: To the clients.
        uplink_bytes: From the clients.
        predicted_s: By the clients' device profiles.
        num_failures: Clients that did not answer, or wrongly.
    """

    rounds: tuple[int, ...]
    sources: tuple[str, ...]
    num_answers: int
    num_examples: int
    downlink_bytes: int
    uplink_bytes: int
    predicted_s: float
    num_failures: int


@dataclass(frozen=True)
class KindHistory:
    """What the clients of one device kind were to train, as means over those in the round.

    Attributes:
        kind: The device.
        num_clients: How many of it took part in any round.
        depth: Blocks.
        rank: Rank of these blocks.
    """

    kind: str
    num_clients: int
    depth: list[Point]
    rank: list[Point]


@dataclass(frozen=True)
class Devices:
    """Depth, rank and waiting, where the plan is about devices.

    Attributes:
        kinds: The most frequent kind first.
        block_ranks: The plan's rank per block; empty where ranks belong to clients.
        planned_wait: The wait that the planner expected, as a share of the slowest client's time.
        simulated_wait: The same as the round went, by the device profiles.
        max_wait: What the planner accepts; None where it has no such limit.
    """

    kinds: list[KindHistory]
    block_ranks: Mapping[str, int]
    planned_wait: list[Point]
    simulated_wait: list[Point]
    max_wait: float | None


@dataclass(frozen=True)
class Flag:
    """Something to know before believing the numbers.

    Attributes:
        kind: One word for scripts: `flat`, `tie`, `fallback`, `wait`, `never_trained`, …
        text: One sentence.
        rounds: Where it happened.
        strata: To which strata.
        clients: To which clients.
    """

    kind: str
    text: str
    rounds: tuple[int, ...] = ()
    strata: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()


@dataclass(frozen=True)
class StrataView:
    """Why a run trained what it trained.

    Attributes:
        rounds: Finished rounds, ascending.
        num_replies: Good replies per round.
        num_clients: How many clients a round had at most.
        strata: From the input to the head.
        target: What training is held against: the chances of a draw, a fixed pattern, or the plan itself.
        scores: None, the planner's, the selector's, or both.
        exactness: None where nothing is recorded about it.
        probes: None where nobody asked.
        devices: None where the plan is not about devices.
        flags: Warnings.
    """

    rounds: tuple[int, ...]
    num_replies: tuple[int, ...]
    num_clients: int
    strata: tuple[StratumHistory, ...]
    target: Target
    scores: tuple[ScoreMap, ...]
    exactness: Exactness | None
    probes: ProbeTotals | None
    devices: Devices | None
    flags: tuple[Flag, ...]

    @property
    def chance_limit(self) -> float:
        """Standard deviations that the largest deviation may have by chance alone; see `inclusion.chance_limit`."""
        return chance_limit(sum(h.trained.z is not None for h in self.strata))

    @property
    def largest_deviation(self) -> StratumHistory | None:
        """The stratum furthest from its target, in standard deviations; None where nothing was left to chance."""
        drawn = [h for h in self.strata if h.trained.z is not None]
        return max(drawn, key=lambda h: abs(h.trained.z or 0.0), default=None)

    @property
    def has_selection(self) -> bool:
        """Whether the server left something out by choice."""
        return any(h.taken is not None for h in self.strata)

    def to_json(self) -> dict[str, Any]:
        """Everything, for scripts; lists have one entry per round."""
        largest = self.largest_deviation
        return {
            "rounds": list(self.rounds),
            "num_replies": list(self.num_replies),
            "strata": [_history_json(h) for h in self.strata],
            "scores": [_scores_json(s) for s in self.scores],
            "allocation": {
                "target": self.target,
                "largest_deviation": None if largest is None else {"stratum": largest.stratum, "z": largest.trained.z},
                "chance_limit": self.chance_limit,
            },
            "exactness": None if self.exactness is None else asdict(self.exactness),
            "probes": None if self.probes is None else asdict(self.probes),
            "devices": None if self.devices is None else asdict(self.devices),
            "flags": [asdict(f) for f in self.flags],
        }


def _history_json(history: StratumHistory) -> dict[str, Any]:
    return {
        "stratum": history.stratum,
        "holders": list(history.holders),
        "chances": list(history.chances),
        "selected": list(history.selected),
        "num_planned": history.num_planned,
        "trained": history.trained.to_json(),
        "by_kind": {kind: tally.to_json() for kind, tally in history.by_kind.items()},
        "taken": None if history.taken is None else history.taken.to_json(),
    }


def _scores_json(scores: ScoreMap) -> dict[str, Any]:
    return {
        "source": scores.source,
        "name": scores.name,
        "values": {s: list(v) for s, v in scores.values.items()},
        "reported": {s: list(v) for s, v in scores.reported.items()},
        "infinite": sorted(map(list, scores.infinite)),
        "other": sorted(map(list, scores.other)),
        "computed_in": list(scores.computed_in),
        "note": scores.note,
    }
