"""FedAdapter: adapters grow in windows; three candidates train side by side and the best one goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.core.rng import generator
from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import HEAD, Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.errors import PlanError
from fedstrata.plan.base import PLANNERS, ClientPlan, ContestPlanner, PlanContext, RoundPlan
from fedstrata.plan.checks import refuse, trainable_blocks

SAME, DEEPER, WIDER = "same", "deeper", "wider"


@PLANNERS.register
@dataclass(frozen=True)
class Windows(ContestPlanner):
    """In every window of rounds three groups train from one state: as it is, one block deeper, or wider.

    The adapters stand in the top `depth` blocks at a width. A window opens with the candidates

        same: (depth, width),    deeper: (depth + 1, width),    wider: (depth, width + step)

    which all compute the same function: what is added starts with a zero up-projection. Candidates beyond L blocks or
    the largest width are left out. Clients are dealt to the candidates anew in every window: those of a cohort take
    turns in an order of the whole fleet from generator(seed, "groups", window). Where a round invites only some
    clients, it begins with the turn at which the round before it ended, so that cohorts of one or two train every
    candidate as well; a last window too short for that has fewer candidates. After the last round of a window the
    candidates are scored on validation examples; the best goes on, the smaller one on a tie, and its state opens the
    next window.

    Args:
        window: Rounds per window.
        start_depth: Blocks with an adapter at the start, from the output.
        start_width: Width at the start.
        step: What `wider` adds.
        max_width: The largest width.

    References:
        Cai et al., Efficient Federated Learning for Modern NLP (FedAdapter), MobiCom 2023. Differs in: windows are
        counted in rounds and candidates judged on validation examples (ours), never on test data.
    """

    id: ClassVar[str] = "windows"
    to_extend: ClassVar[str] = "a run whose rounds.count is a multiple of `window` can be extended to another multiple"
    window: int = 5
    start_depth: int = 1
    start_width: int = 8
    step: int = 8
    max_width: int = 64

    def decided_by_rounds(self, num_rounds: int) -> dict[str, Any]:
        """The round that cuts the last window short; empty where every window is whole."""
        return {"last window ends in round": num_rounds} if num_rounds % max(self.window, 1) else {}

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """Depth and width of the first window.

        Raises:
            PlanError: If a number is too small, or the model has fewer blocks; all mistakes at once.
        """
        least = {"window": self.window, "start_depth": self.start_depth, "start_width": self.start_width}
        problems = [
            f"{name} = {value}: 1 or more" for name, value in (least | {"step": self.step}).items() if value < 1
        ]
        if self.start_depth > shape.num_blocks:
            problems.append(f"start_depth = {self.start_depth}, but the model has {shape.num_blocks} blocks")
        if self.max_width < self.start_width:
            problems.append(f"max_width = {self.max_width}: {self.start_width} or more, the width at the start")
        refuse(self.id, problems)
        return {"depth": self.start_depth, "width": self.start_width, "won": ""}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest width in every block."""
        return dict.fromkeys(shape.blocks, self.max_width)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """Every client trains its candidate's adapters and the head.

        Raises:
            PlanError: If no window is long enough for its cohorts to train every candidate.
        """
        candidates = self._within_reach(self._candidates(state, context), context)
        dealt = self._dealt(list(candidates), context)
        blocks = trainable_blocks(context)
        plans = []
        for client in sorted(context.cohort):
            depth, width = candidates[dealt[client]]
            ranks: dict[Stratum, int] = dict.fromkeys(blocks[len(blocks) - depth :], width)
            if context.head:
                ranks[HEAD] = 1
            plans.append(ClientPlan(client, ranks, {}, group=dealt[client]))
        sizes = {name: {"depth": d, "width": w} for name, (d, w) in candidates.items()}
        why = {"rule": self.id, "candidates": sizes, "groups": dealt, "won": state["won"]}
        why["window"] = self._window_of(context.server_round)
        return RoundPlan(context.server_round, tuple(plans), why), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns from contests only."""
        return state

    def is_over(self, server_round: int, num_rounds: int) -> bool:
        """Whether a window ends with this round."""
        return server_round % self.window == 0 or server_round == num_rounds

    def settle(
        self, state: dict[str, Any], scores: Mapping[str, Mapping[str, float]], shape: ModelShape
    ) -> tuple[str, dict[str, Any]]:
        """The candidate of the highest accuracy, then of the lowest loss, then the smaller one."""
        if not scores:
            return SAME, state
        sizes = {name: self._size(name, state) for name in scores}
        winner = min(scores, key=lambda n: (-scores[n]["accuracy"], scores[n]["loss"], sizes[n][0] * sizes[n][1], n))
        depth, width = sizes[winner]
        return winner, {"depth": depth, "width": width, "won": winner}

    def _size(self, candidate: str, state: Mapping[str, Any]) -> tuple[int, int]:
        depth, width = int(state["depth"]), int(state["width"])
        return depth + (candidate == DEEPER), width + self.step * (candidate == WIDER)

    def _candidates(self, state: Mapping[str, Any], context: PlanContext) -> dict[str, tuple[int, int]]:
        """Depth and width of the candidates that the model allows."""
        num_blocks = len(trainable_blocks(context))
        sizes = {name: self._size(name, state) for name in (SAME, DEEPER, WIDER)}
        found = {n: (d, w) for n, (d, w) in sizes.items() if d <= num_blocks and w <= self.max_width}
        if not found:
            raise PlanError(f'The plan "{self.id}" has no candidate left', got=f"{sizes}")
        return found

    def _dealt(self, names: list[str], context: PlanContext) -> dict[str, str]:
        """Which candidate each client of the cohort trains: dealt in turn, in a drawn order of the whole fleet.

        The turns of a window go on from round to round; where all clients take part in every round, and suffice, they
        keep theirs.
        """
        rng = generator(context.seed, "groups", self._window_of(context.server_round))
        ids = sorted(context.fleet.ids)
        place = {ids[int(i)]: turn for turn, i in enumerate(rng.permutation(len(ids)))}
        order = sorted(context.cohort, key=place.__getitem__)
        is_settled = len(order) == len(ids) >= len(names)
        first = 0 if is_settled else (context.server_round - 1) % self.window * len(order)
        return {client: names[turn % len(names)] for turn, client in enumerate(order, first)}

    def _within_reach(self, candidates: dict[str, tuple[int, int]], context: PlanContext) -> dict[str, tuple[int, int]]:
        """The candidates that this window's cohorts can train, all of them unless it is cut short."""
        each = len(context.cohort)
        longest = min(self.window, context.num_rounds or self.window)
        if longest * each < len(candidates):
            raise PlanError(
                f'The plan "{self.id}" cannot try out its candidates',
                expected=f"{len(candidates)} or more clients in the rounds of a window: {', '.join(candidates)}",
                got=f"a window of {longest} with {each} in each round",
                do="raise window, rounds.count or rounds.clients_per_round",
            )
        end = (self._window_of(context.server_round) + 1) * self.window
        rounds = self.window - max(0, end - (context.num_rounds or end))
        return dict(list(candidates.items())[: rounds * each])

    def _window_of(self, server_round: int) -> int:
        return (server_round - 1) // self.window
