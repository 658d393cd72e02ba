"""Who trains which strata, at which rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import HEAD, Stratum, stratum_order
from fedstrata.device.fleet import Fleet
from fedstrata.device.plan_cost import PlanCost
from fedstrata.registry import Registry


@dataclass(frozen=True)
class ClientPlan:
    """What one client does in one round.

    Attributes:
        client: Its id.
        ranks: Rank of every trained stratum (≥ 1; for head and embeddings 1 means "trained"). Others are frozen.
        reads: Ranks of further strata that stand in its forward pass without being trained ("present").
        group: Which of several models, trained side by side, it trains; empty where there is one.
    """

    client: str
    ranks: Mapping[Stratum, int]
    reads: Mapping[Stratum, int] = field(default_factory=dict)
    group: str = ""

    @property
    def strata(self) -> tuple[Stratum, ...]:
        """Trained strata, from the input to the head."""
        return tuple(sorted((s for s, r in self.ranks.items() if r > 0), key=stratum_order))

    @property
    def blocks(self) -> tuple[int, ...]:
        """Trained blocks, from the input."""
        return tuple(s for s in self.strata if isinstance(s, int))


@dataclass(frozen=True)
class RoundPlan:
    """All client plans of one round, in ascending client id, and why they are as they are (JSON-ready)."""

    server_round: int
    clients: tuple[ClientPlan, ...]
    why: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanContext:
    """The world a planner sees.

    Attributes:
        shape: The model's sizes.
        fleet: All registered clients and their devices.
        cohort: Clients of this round, ascending ids.
        server_round: From 1.
        seed: The run's seed.
        max_rank: Largest LoRA rank of the run.
        strata: Strata that exist on the server besides the head (embeddings only in full-parameter tuning).
        head: Whether the head is trained in this run.
        answers: Clients' answers to the planner's probes, by client; of a Fisher probe `{"sums": {stratum: number},
            "count": examples}`.
        num_rounds: R, the rounds of the whole run; 0 if nobody knows.
        cost: What a plan costs each client; None if nobody knows.
    """

    shape: ModelShape
    fleet: Fleet
    cohort: tuple[str, ...]
    server_round: int
    seed: int
    max_rank: int
    strata: tuple[Stratum, ...]
    head: bool = True
    answers: Mapping[str, Any] = field(default_factory=dict)
    num_rounds: int = 0
    cost: PlanCost | None = None


class Planner(ABC):
    """Makes one plan per client and round. A planner is data; what it learns is its state."""

    id: ClassVar[str]
    to_extend: ClassVar[str] = ""

    def decided_by_rounds(self, num_rounds: int) -> dict[str, Any]:
        """What the planner makes of R, the planned number of rounds: JSON-ready, by name; empty without such a thing.

        Two runs that differ in R only plan alike as long as both have this in common, so that a run may be extended
        to such an R and to no other. Whoever reads `PlanContext.num_rounds` must say so here; `to_extend` then tells
        users what to choose for a run that can be extended.

        Args:
            num_rounds: R.
        """
        return {}

    @abstractmethod
    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """The first planner state: JSON-ready, stored in the checkpoint.

        Raises:
            PlanError: If the options do not fit this model or fleet (a rank above a map's size, an unknown
                device kind or client, more strata than blocks).
        """

    @abstractmethod
    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """Rank of every block's adapter on the server.

        Planners whose ranks are the method's own may return more than `max_rank`, as long as the user did not set it:
        whoever calls this passes the result to `check_own_ranks`.

        Args:
            shape: The model's sizes.
            max_rank: Largest rank of the run, set by the user or the default.
        """

    def lowest_block(self, shape: ModelShape, fleet: Fleet) -> int:
        """The lowest block that any plan may train, the number of blocks for the head alone; 0 if nobody can say.

        It decides only whether states below are worth keeping from round to round: too low a number costs time.
        """
        return 0

    @abstractmethod
    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """Plans one round: a pure function of its arguments."""

    @abstractmethod
    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns from a round's record.

        Beside what `rounds.jsonl` holds, the record may have `clients` (the lines of `clients.jsonl`) and `statistics`
        (`{"mean_squared_delta": {stratum: number}, "zico_clients": …}`); a planner does without what is not there.
        """


@dataclass(frozen=True)
class Probes:
    """Questions that are answered before a round is planned; their bytes and seconds count.

    Attributes:
        kind: What is asked: `fisher`, the sums of squared gradients per stratum; `gradient`, the gradient at every
            map as truncated factors, from which the server makes frozen factors.
        options: How, JSON-ready.
    """

    kind: Literal["fisher", "gradient"]
    options: Mapping[str, Any] = field(default_factory=dict)


class AskingPlanner(Planner):
    """A planner that asks before some of its rounds."""

    @abstractmethod
    def probes(self, state: dict[str, Any], context: PlanContext) -> Probes | None:
        """What the cohort is asked before this round; None asks nothing. The answers stand in the context of `plan`."""


class InvitingPlanner(Planner):
    """A planner that does not want every client of the fleet in its cohorts."""

    @abstractmethod
    def invited(self, context: PlanContext) -> tuple[str, ...]:
        """Clients among whom cohorts are drawn, ascending ids; the cohort of `context` does not matter.

        Raises:
            PlanError: If there are none.
        """


class ContestPlanner(Planner):
    """A planner that lets groups of clients train candidates side by side, and goes on with the best."""

    @abstractmethod
    def is_over(self, server_round: int, num_rounds: int) -> bool:
        """Whether the candidates are judged after this round."""

    @abstractmethod
    def settle(
        self, state: dict[str, Any], scores: Mapping[str, Mapping[str, float]], shape: ModelShape
    ) -> tuple[str, dict[str, Any]]:
        """The winner.

        Args:
            state: The planner's.
            scores: Validation accuracy and loss of every candidate that was trained.
            shape: The model's sizes.

        Returns:
            Its name and the new state.
        """


def client_plan(client: str, trained: Mapping[Stratum, int], context: PlanContext) -> ClientPlan:
    """A plan that trains these strata at these ranks, the head where the run trains it, and reads all others."""
    ranks: dict[Stratum, int] = {s: trained[s] for s in sorted(trained, key=stratum_order) if trained[s] > 0}
    if context.head:
        ranks[HEAD] = 1
    reads: dict[Stratum, int] = {s: context.max_rank for s in context.strata if s not in ranks}
    return ClientPlan(client, ranks, reads)


PLANNERS: Registry[Planner] = Registry("planner")
