"""Who takes part in a round, and whether the round's plan can be carried out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstrata.core.rng import generator, sample_without_replacement
from fedstrata.core.tensors import HEAD, stratum_name
from fedstrata.core.wire import canonical_json
from fedstrata.errors import PlanError
from fedstrata.plan.base import ClientPlan, PlanContext, RoundPlan


def draw_cohort(seed: int, server_round: int, ids: Sequence[str], count: int | None) -> tuple[str, ...]:
    """The clients of one round, drawn uniformly without replacement from generator(seed, "cohort", round).

    Args:
        seed: The run's seed.
        server_round: From 1.
        ids: The fleet; its order does not matter.
        count: How many; None invites everyone.

    Returns:
        Ascending ids.

    Raises:
        PlanError: If the fleet is empty or smaller than `count`, or `count` is below 1.
    """
    fleet = sorted(ids)
    wanted = len(fleet) if count is None else count
    if not 1 <= wanted <= len(fleet):
        raise PlanError(
            f"A round cannot invite {wanted} clients",
            where="rounds.clients_per_round",
            expected=f"1 to {len(fleet)}, the size of the fleet" if fleet else "a fleet with clients",
        )
    if wanted == len(fleet):
        return tuple(fleet)
    rng = generator(seed, "cohort", server_round)
    return tuple(fleet[i] for i in sample_without_replacement(rng, np.zeros(len(fleet)), wanted))


def check_round_plan(plan: RoundPlan, context: PlanContext) -> None:
    """Refuses a plan that cannot be carried out, before anything is sent.

    Raises:
        PlanError: If nobody would train anything; or with every mistake at once: clients out of order, repeated or
            not in the cohort, strata that do not exist, ranks that are not between 1 and the server's.
    """
    if not isinstance(plan, RoundPlan) or not all(isinstance(p, ClientPlan) for p in plan.clients):
        raise PlanError(
            "A planner handed back no plan", expected="a RoundPlan of ClientPlans, and a state", got=f"{plan!r}"[:200]
        )
    try:
        canonical_json(dict(plan.why))
    except (TypeError, ValueError) as error:
        raise PlanError("A plan's reasons cannot be recorded", where="RoundPlan.why", got=f"{error}"[:200]) from error
    clients = [p.client for p in plan.clients]
    problems = [f'client "{c}" is not in this round\'s cohort' for c in clients if c not in context.cohort]
    if clients != sorted(set(clients)):
        problems.append("clients are not in ascending order, each once")
    if plan.server_round != context.server_round:
        problems.append(f"it is made for round {plan.server_round}")
    for client in plan.clients:
        problems += _client_problems(client, context)
    if problems:
        lines = [f"The plan of round {context.server_round} cannot be carried out", *(f"  - {p}" for p in problems)]
        raise PlanError("\n".join(lines))
    if not any(p.strata for p in plan.clients):
        raise PlanError(
            "Nobody would train anything",
            where=f"the plan of round {context.server_round}",
            do="give at least one client a block, or train the head",
        )


def _client_problems(plan: ClientPlan, context: PlanContext) -> list[str]:
    largest = {s: context.max_rank if isinstance(s, int) else 1 for s in context.strata}
    if context.head:
        largest[HEAD] = 1
    problems = []
    for verb, ranks in (("train", plan.ranks), ("read", plan.reads)):
        for stratum, rank in ranks.items():
            known = largest.get(stratum, 1 if stratum == HEAD and verb == "read" else None)
            if known is None:
                problems.append(f"client {plan.client} cannot {verb} {stratum_name(stratum)}: nothing to train there")
            elif type(rank) is not int:
                problems.append(f"client {plan.client} would {verb} {stratum_name(stratum)} at rank {rank!r}")
            elif not 0 <= rank <= known:
                what = f"client {plan.client} would {verb} {stratum_name(stratum)} at rank {rank}"
                problems.append(f"{what}, the server has {known}")
    both = sorted(stratum_name(s) for s in plan.strata if s in plan.reads)
    if both:
        problems.append(f"client {plan.client} would train and only read {', '.join(both)}")
    return problems
