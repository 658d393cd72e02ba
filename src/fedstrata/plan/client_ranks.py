"""A rank per client: everyone trains every block, at the first r_k slices of the server's factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.errors import did_you_mean
from fedstrata.plan.base import PLANNERS, PlanContext, Planner, RoundPlan, client_plan
from fedstrata.plan.checks import refuse, uniform_server_ranks
from fedstrata.plan.defaults import ranks_of


@PLANNERS.register
@dataclass(frozen=True)
class ClientRanks(Planner):
    """Client k trains all blocks at rank r_k: rows 0, …, r_k − 1 of lora_A and these columns of lora_B.

    The server keeps r_max = max_k r_k in every block. A client whose accepted reply reports `kept_rank` (HetLoRA's
    self-pruning) stays at that rank for good, if it is smaller.

    Args:
        ranks: r_k, per device kind or per client; a client's own entry counts more than its kind's. 0 trains the
            head only. With full parameters, any rank above 0 trains everything. Left out: by speed, see `ranks_of`.

    References:
        Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models, EMNLP 2024; Bai et
        al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources (FlexLoRA),
        NeurIPS 2024. Differs in: a shrunken rank is kept by the server alone, so that a lost reply changes nothing.
    """

    id: ClassVar[str] = "client_ranks"
    ranks: dict[str, int] | None = None

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No rank has shrunk yet.

        Raises:
            PlanError: If a name is neither a client nor a device kind, a client has no rank, or ranks do not fit; all
                mistakes at once.
        """
        if self.ranks is None:
            return {"kept": {}}
        known = {*fleet.kinds, *fleet.ids}
        problems = [
            f'ranks names "{name}", which is neither a device kind nor a client: {did_you_mean(name, known)}'
            for name in self.ranks
            if name not in known
        ]
        problems += [f'ranks["{name}"] = {rank}: 0 or more' for name, rank in self.ranks.items() if rank < 0]
        bare = {c.device.name: c.id for c in fleet.clients if not {c.id, c.device.name} & self.ranks.keys()}
        problems += [f'ranks says nothing about client "{c}" or its device kind "{kind}"' for kind, c in bare.items()]
        if not any(rank > 0 for rank in self.ranks.values()):
            problems.append("all ranks are 0: nobody would train an adapter")
        refuse(self.id, problems)
        return {"kept": {}}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank of any client in every block."""
        largest = max_rank if self.ranks is None else max([1, *self.ranks.values()])  # where all are 0, `init` says so
        return uniform_server_ranks(shape, largest)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """All blocks at the client's rank."""
        ranks = {client: self._rank(client, state, context) for client in sorted(context.cohort)}
        plans = []
        for client, rank in ranks.items():
            trained = {s: min(rank, context.max_rank if isinstance(s, int) else 1) for s in context.strata}
            plans.append(client_plan(client, trained, context))
        return RoundPlan(context.server_round, tuple(plans), {"rule": self.id, "ranks": ranks}), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Ranks that accepted clients say they keep."""
        kept = dict(state["kept"])
        for line in round_record.get("clients", ()):
            rank = line.get("numbers", {}).get("kept_rank")
            if line.get("status") == "ok" and rank is not None and rank >= 1:
                kept[line["client"]] = min(int(rank), kept.get(line["client"], int(rank)))
        return {**state, "kept": dict(sorted(kept.items()))}

    def _rank(self, client: str, state: Mapping[str, Any], context: PlanContext) -> int:
        ranks, kind = ranks_of(self.ranks, context.fleet, context.max_rank), context.fleet[client].device.name
        rank = ranks[client] if client in ranks else ranks[kind]
        return min(rank, int(state["kept"].get(client, rank)))
