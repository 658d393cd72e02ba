"""Only clients whose devices can train everything take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import HEAD, Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.errors import PlanError, did_you_mean
from fedstrata.plan.base import PLANNERS, InvitingPlanner, PlanContext, RoundPlan, client_plan
from fedstrata.plan.checks import refuse, uniform_server_ranks


@PLANNERS.register
@dataclass(frozen=True)
class Exclusive(InvitingPlanner):
    """Clients that cannot train every stratum at the full rank are left out; the others train everything.

    It is the usual baseline of methods for unequal devices: what is lost are the data of weak devices.

    Args:
        kinds: Device kinds that take part; None: those whose memory and bytes per round allow the whole plan, by
            `PlanContext.cost`.
    """

    id: ClassVar[str] = "exclusive"
    kinds: list[str] | None = None

    def init(self, shape: ModelShape, fleet: Fleet) -> dict[str, Any]:
        """No state.

        Raises:
            PlanError: If a kind is unknown, or none is listed.
        """
        known = f"known: {', '.join(fleet.kinds)}"
        problems = ["kinds is an empty list: nobody would take part; " + known] if self.kinds == [] else []
        problems += [
            f'kinds names the device kind "{kind}", which no client has: {did_you_mean(kind, fleet.kinds)}'
            for kind in self.kinds or []
            if kind not in fleet.kinds
        ]
        refuse(self.id, problems)
        return {}

    def server_ranks(self, shape: ModelShape, max_rank: int) -> dict[Stratum, int]:
        """The largest rank in every block."""
        return uniform_server_ranks(shape, max_rank)

    def invited(self, context: PlanContext) -> tuple[str, ...]:
        """Clients of the fleet that can train everything.

        Raises:
            PlanError: If there are none, or nobody knows what a plan costs.
        """
        broken = self._broken(context)
        able = tuple(c.id for c in context.fleet.clients if not broken[c.device.name])
        if not able:
            raise PlanError(
                "No client can train the whole model",
                where=f'the plan "{self.id}"',
                got="; ".join(f"{kind}: {cap}" for kind, cap in broken.items()),
                do="use larger devices, a smaller rank or batch, or a method for unequal devices",
            )
        return able

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        """Everything for those of the cohort who can.

        Raises:
            PlanError: If nobody in the cohort can.
        """
        able = set(self.invited(context))
        cohort = [client for client in sorted(context.cohort) if client in able]
        if not cohort:
            raise PlanError(
                f"No client of round {context.server_round} can train the whole model",
                expected=f"some of {', '.join(sorted(able))}",
                got=", ".join(sorted(context.cohort)),
                do="draw cohorts among the clients that can, or raise rounds.clients_per_round",
            )
        trained = _everything(context)
        plans = tuple(client_plan(client, trained, context) for client in cohort)
        left_out = {c: context.fleet[c].device.name for c in sorted(context.cohort) if c not in able}
        return RoundPlan(context.server_round, plans, {"rule": self.id, "excluded": left_out}), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        """Learns nothing."""
        return state

    def _broken(self, context: PlanContext) -> dict[str, str]:
        """Per device kind what keeps it from training everything; empty if nothing does."""
        devices = {c.device.name: c.device for c in context.fleet.clients}
        if self.kinds is not None:
            return {name: "" if name in self.kinds else "not listed" for name in devices}
        if context.cost is None:
            raise PlanError(
                f'The plan "{self.id}" does not know what a plan costs',
                do="list the device kinds that take part: kinds",
            )
        head: dict[Stratum, int] = {HEAD: 1} if context.head else {}
        needs = context.cost.needs({**_everything(context), **head})
        return {name: needs.broken_cap(device) for name, device in devices.items()}


def _everything(context: PlanContext) -> dict[Stratum, int]:
    return {s: context.max_rank if isinstance(s, int) else 1 for s in context.strata}
