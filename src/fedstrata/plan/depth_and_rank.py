"""LEGEND's plan: as many blocks from the output as a device has time for, at ranks that grow towards the output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.errors import PlanError
from fedstrata.plan.anchor import Depths, anchor_scan, wait_ratio
from fedstrata.plan.base import PLANNERS, ClientPlan, PlanContext, Planner, RoundPlan, client_plan
from fedstrata.plan.checks import check_map_sizes, count_problems, refuse, trainable_blocks
from fedstrata.plan.device_times import (
    ClientTimes,
    head_in_units_of_rank,
    learn_times,
    time_problems,
    times_from_profile,
)
from fedstrata.plan.growing_ranks import GrowingRanks, growing_ranks, uniform_ranks
from fedstrata.plan.patterns import draw_blocks

Arm: TypeAlias = Literal["legend", "uniform_rank", "reversed_rank", "uniform_depth", "random_strata"]


@PLANNERS.register
@dataclass(frozen=True)
class DepthAndRank(Planner):
    """Each client trains its last k_i blocks, at ranks that grow towards the output and are the same for everyone.

    Ranks r_l = r_0 + ⌊λ·l⌋: `growing_ranks`. They are the method's own and may exceed `adapter.max_rank`, unless the
    user set it (`check_own_ranks`). Depths: `anchor_scan` over the seconds

        t_i(k) = c_i + τ_i·(t̂_i + k·μ_i) + β_i·Σ_{l ≥ L−k} r_l

    with τ_i local steps, t̂_i forward and μ_i backward-per-block seconds of one step, β_i upload seconds per unit of
    rank, c_i the rest. They start from the device's profile (`times_from_profile`) and follow the rounds
    (`learn_times`); given ones stay as they are. The caps of a device, memory and bytes of a round, limit its depth.
    Depths depend on who else is in the cohort, unless `target_s` is set.

    Args:
        rank_budget: ψ, all blocks' ranks together; None: 8·L.
        rank_step: λ; None: 1, or less where nothing else is given and the default budget demands it.
        rank_start: r_0, instead of a budget.
        min_depth: k_min, 0 (the head only) to L.
        max_wait: ε, the mean wait that is accepted, as a share of the slowest client's time.
        target_s: T, the seconds of a round, instead of a scan; whoever cannot keep it trains k_min.
        infeasible: What happens to a client whose caps do not allow k_min.
        frozen: Whether adapters below a client's depth are `present` in its forward pass and downlink, or `absent`:
            then it optimizes another function. The server evaluates the full adapter in both cases.
        arm: `legend`, or a control that differs from it in one thing. The ranks: `uniform_rank` (the same sum, spread
            evenly), `reversed_rank`. The blocks: `uniform_depth` (⌊mean k_i + ½⌋ for everyone, where caps allow),
            `random_strata` (k_i blocks drawn uniformly). Depths are always those of growing ranks on suffixes.
        forward_s: t̂ per device kind; given together with `backward_s` and `upload_s`, or none of them.
        backward_s: μ per device kind.
        upload_s: β per device kind.
        fixed_s: c per device kind; 0 if left out.
        smoothing: Weight of the newest observation.
        rank_limit: The largest rank that the default budget may lead to: `adapter.max_rank`, where that is set.

    References:
        Liu et al., Adaptive Parameter-Efficient Federated Fine-Tuning on Heterogeneous Devices (LEGEND), 2024
        (arXiv 2412.20004), eq. 12. Differs in: the fixed time c_i, where ranks start, the choice of λ, the anchor
        scan, caps, and the weight of the moving average are ours; transfer and compute are estimated apart. As in the
        paper, μ does not depend on the rank (measured rounds can show otherwise).
    """

    id: ClassVar[str] = "depth_and_rank"
    rank_budget: int | None = None
    rank_step: float | None = None
    rank_start: int | None = None
    min_depth: int = 1
    max_wait: float = 0.2
    target_s: float | None = None
    infeasible: Literal["error", "exclude"] = "error"
    frozen: Literal["present", "absent"] = "present"
    arm: Arm = "legend"
    forward_s: dict[str, float] | None = None
    backward_s: dict[str, float] | None = None
    upload_s: dict[str, float] | None = None
    fixed_s: dict[str, float] | None = None
    smoothing: float = 0.3
    rank_limit: int | None = None

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """Nothing is known yet beside what is given.

        Raises:
            PlanError: If options do not fit the model or the fleet; all mistakes at once.
        """
        problems = count_problems("min_depth", self.min_depth, shape)
        if not self.max_wait >= 0:
            problems.append(f"max_wait = {self.max_wait}: 0 or more")
        if self.target_s is not None and not self.target_s > 0:
            problems.append(f"target_s = {self.target_s}: above 0")
        if not 0 <= self.smoothing <= 1:
            problems.append(f"smoothing = {self.smoothing}: between 0 and 1")
        times = {"forward_s": self.forward_s, "backward_s": self.backward_s, "upload_s": self.upload_s}
        refuse(self.id, problems + time_problems(times, self.fixed_s, fleet))
        self._growing(shape)
        return {"clients": {}, "head_units": 0.0}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The ranks of the arm; blocks without an adapted map have none."""
        ranks = self._arm_ranks(self._growing(shape).ranks)
        found: dict[Stratum, int] = dict(zip(_adapted(shape), ranks, strict=True))
        check_map_sizes(shape, found, where="rank_budget")
        return found

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """Depths by the estimated seconds of this cohort."""
        rule = self._growing(context.shape)
        growing = _on_server(rule.ranks, context)
        ranks = _on_server(self._arm_ranks(rule.ranks), context)
        deepest, excluded = self._caps(growing, context)
        times, state = self._estimates(state, growing, context)
        blocks = trainable_blocks(context)
        steps = {c: context.cost.steps[c] if context.cost else 1 for c in deepest}
        sums = [sum(growing[b] for b in blocks[len(blocks) - k :]) for k in range(len(blocks) + 1)]
        seconds = {c: [times[c].round_s(steps[c], k, s) for k, s in enumerate(sums)] for c in deepest}
        scan = anchor_scan(seconds, deepest, min_depth=self.min_depth, max_wait=self.max_wait, target_s=self.target_s)
        if self.arm == "uniform_depth":
            scan = self._same_depth(scan, seconds, deepest)
        plans = [self._client(c, k, blocks, ranks, context) for c, k in scan.depths.items()]
        why = self._why(rule, ranks, scan, seconds, excluded)
        why["capped"] = {c: k for c, k in deepest.items() if k < len(blocks)}
        return RoundPlan(context.server_round, tuple(plans), why), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """A moving average of every client's seconds; given ones are kept."""
        if self.forward_s is not None:
            return state
        clients = dict(state["clients"])
        for line in round_record.get("clients", ()):
            if line["client"] in clients:
                old = ClientTimes(**clients[line["client"]])
                new = learn_times(old, line, smoothing=self.smoothing, head_units=state["head_units"])
                clients[line["client"]] = new.to_json()
        return {**state, "clients": clients}

    def _growing(self, shape: ModelShape) -> GrowingRanks:
        num_blocks = len(_adapted(shape))
        return growing_ranks(
            num_blocks, budget=self.rank_budget, step=self.rank_step, start=self.rank_start, limit=self.rank_limit
        )

    def _arm_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if self.arm == "uniform_rank":
            return uniform_ranks(ranks)
        return ranks[::-1] if self.arm == "reversed_rank" else ranks

    def _caps(self, ranks: Mapping[Stratum, int], context: PlanContext) -> tuple[dict[str, int], dict[str, str]]:
        """The deepest plan that each client's caps allow, and why clients are left out."""
        blocks = trainable_blocks(context)
        cost, needs = context.cost, []
        for depth in range(len(blocks) + 1):
            plan = self._plan("", blocks[len(blocks) - depth :], ranks, context)
            needs.append(cost.needs(plan.ranks, plan.reads) if cost else None)
        deepest: dict[str, int] = {}
        excluded: dict[str, str] = {}
        for client in sorted(context.cohort):
            device = context.fleet[client].device
            broken = [need.broken_cap(device) if need else "" for need in needs]
            able = [k for k in range(self.min_depth, len(needs)) if not broken[k]]
            if able:
                deepest[client] = able[-1]
            else:
                short = f"only {len(blocks)} blocks can be trained"
                excluded[client] = broken[self.min_depth] if self.min_depth < len(needs) else short
        if excluded and (self.infeasible == "error" or not deepest):
            lines = [f"{c} ({context.fleet[c].device.name}): {cap}" for c, cap in excluded.items()]
            raise PlanError(
                f"{len(excluded)} of {len(context.cohort)} clients cannot train their last {self.min_depth} blocks",
                got="; ".join(lines),
                where=f'the plan "{self.id}" of round {context.server_round}',
                do='lower min_depth or the batch, use larger devices, or set infeasible = "exclude"',
            )
        return deepest, excluded

    def _estimates(
        self, state: dict[str, Any], ranks: Mapping[Stratum, int], context: PlanContext
    ) -> tuple[dict[str, ClientTimes], dict[str, Any]]:
        cohort = [context.fleet[c] for c in sorted(context.cohort)]
        if self.forward_s is not None and self.backward_s is not None and self.upload_s is not None:
            kinds = {c.id: c.device.name for c in cohort}
            fixed = self.fixed_s or {}
            given = {
                c: ClientTimes(self.forward_s[k], self.backward_s[k], self.upload_s[k], fixed.get(k, 0.0))
                for c, k in kinds.items()
            }
            return given, state
        if context.cost is None:
            raise PlanError(
                f'The plan "{self.id}" does not know how long clients need',
                do="give forward_s, backward_s and upload_s per device kind, or the cost of plans",
            )
        known = dict(state["clients"])
        for client in cohort:
            if client.id not in known:
                known[client.id] = times_from_profile(client, context.cost, ranks, head=context.head).to_json()
        head_units = head_in_units_of_rank(context.cost, ranks, head=context.head)
        times = {c.id: ClientTimes(**known[c.id]) for c in cohort}
        return times, {**state, "clients": dict(sorted(known.items())), "head_units": head_units}

    def _same_depth(self, scan: Depths, seconds: Mapping[str, Sequence[float]], deepest: Mapping[str, int]) -> Depths:
        mean = math.floor(sum(scan.depths.values()) / len(scan.depths) + 0.5)
        depth = min(mean, *deepest.values())
        wait = wait_ratio([t[depth] for t in seconds.values()])
        return replace(scan, depths=dict.fromkeys(scan.depths, depth), wait_ratio=wait)

    def _client(
        self, client: str, depth: int, blocks: Sequence[int], ranks: Mapping[Stratum, int], context: PlanContext
    ) -> ClientPlan:
        chosen = blocks[len(blocks) - depth :]
        if self.arm == "random_strata":
            chosen = draw_blocks(np.full(len(blocks), 1 / max(len(blocks), 1)), blocks, client, depth, context)
        return self._plan(client, chosen, ranks, context)

    def _plan(
        self, client: str, chosen: Sequence[int], ranks: Mapping[Stratum, int], context: PlanContext
    ) -> ClientPlan:
        plan = client_plan(client, {b: ranks[b] for b in chosen}, context)
        if self.frozen == "absent":
            return replace(plan, reads={})
        return replace(plan, reads={s: ranks.get(s, r) for s, r in plan.reads.items()})

    def _why(
        self,
        rule: GrowingRanks,
        ranks: Mapping[Stratum, int],
        scan: Depths,
        seconds: Mapping[str, Sequence[float]],
        excluded: Mapping[str, str],
    ) -> dict[str, Any]:
        return {
            "rule": self.id,
            "arm": self.arm,
            "ranks": {str(b): r for b, r in ranks.items()},
            "rank_start": rule.start,
            "rank_step": rule.step,
            "rank_budget": rule.budget,
            "rank_step_chosen": rule.is_step_chosen,
            "times": "estimated" if self.forward_s is None else "given",
            "target_s": scan.target_s,
            "anchor_depth": scan.anchor_depth,
            "depths": dict(scan.depths),
            "times_s": {c: seconds[c][k] for c, k in scan.depths.items()},
            "wait_ratio": scan.wait_ratio,
            "wait_target_met": scan.wait_ratio <= self.max_wait,
            "over_target": [c for c, k in scan.depths.items() if self.target_s and seconds[c][k] > self.target_s],
            "excluded": dict(excluded),
        }


def _adapted(shape: ModelShape) -> list[int]:
    """Blocks that carry a pair; without any, all blocks."""
    return sorted({t.block for t in shape.targets}) or list(shape.blocks)


def _on_server(ranks: Sequence[int], context: PlanContext) -> dict[Stratum, int]:
    """Ranks of the trainable blocks; with full parameters, where the largest rank is 1, a block is in or out."""
    by_block = dict(zip(_adapted(context.shape), ranks, strict=True))
    return {b: by_block.get(b, 1) if context.max_rank > 1 else 1 for b in trainable_blocks(context)}
