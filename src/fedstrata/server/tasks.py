"""From a state to tasks: who takes part, what each client does, and the bytes that tell it so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedstrata.core.tensors import HEAD, Kind, stratum_name, stratum_order
from fedstrata.device.plan_cost import PlanCost
from fedstrata.errors import PlanError
from fedstrata.message import Task, rank_keys
from fedstrata.plan.base import ClientPlan, InvitingPlanner, PlanContext, RoundPlan
from fedstrata.plan.checks import check_state
from fedstrata.plan.cohort import check_round_plan, draw_cohort
from fedstrata.record.checkpoint import ServerState
from fedstrata.registry import to_config
from fedstrata.server.reuse import reuse_of
from fedstrata.server.setup import POOLED_CLIENT, RoundSetup

FACTORS: tuple[Kind, ...] = ("lora_A", "lora_B")


def plan_round(
    setup: RoundSetup, state: ServerState, answers: Mapping[str, Any] | None = None
) -> tuple[RoundPlan, Mapping[str, Any]]:
    """Draws the cohort and asks the planner. Pure.

    Args:
        setup: What all rounds share.
        state: After the last round.
        answers: To the planner's probes, by client.

    Raises:
        PlanError: If nobody would train anything, or a plan does not fit the model or the aggregator.
    """
    server_round = state.server_round + 1
    context = replace(plan_context(setup, cohort_of(setup, server_round), server_round), answers=answers or {})
    planner = setup.method.planner
    made = planner.plan(dict(state.planner), context)
    plan, planner_state = made if isinstance(made, tuple) and len(made) == 2 else (made, state.planner)
    check_round_plan(plan, context)
    kept = check_state(planner, planner_state, "plan")
    _check_ranks(setup, plan)
    return plan, kept


def _check_ranks(setup: RoundSetup, plan: RoundPlan) -> None:
    """Refuses ranks that the aggregator could not merge, before anything is sent."""
    aggregator = setup.method.aggregator
    if aggregator.unequal_ranks or setup.method.topology != "federated":
        return
    other = [
        f"client {p.client} would train {stratum_name(s)} at rank {r}, the server has {setup.server_ranks[s]}"
        for p in plan.clients
        for s, r in p.ranks.items()
        if isinstance(s, int) and 0 < r != setup.server_ranks[s]
    ]
    if other:
        raise PlanError(
            f'The aggregator "{aggregator.id}" needs the server\'s rank on every client',
            where=f"the plan of round {plan.server_round}",
            got=other[0] + (f" (and {len(other) - 1} more)" if len(other) > 1 else ""),
            do="plan equal ranks, or use a method for unequal ranks: `fedstrata methods --compare`",
        )


def cohort_of(setup: RoundSetup, server_round: int) -> tuple[str, ...]:
    """Who takes part in this round; with pooled data always the one client that holds them."""
    if setup.method.topology == "pooled":
        return (POOLED_CLIENT,)
    planner, ids = setup.method.planner, setup.fleet.ids
    if isinstance(planner, InvitingPlanner):
        ids = planner.invited(plan_context(setup, ids, server_round))
    count = None if setup.clients_per_round is None else min(setup.clients_per_round, len(ids))
    return draw_cohort(setup.seed, server_round, ids, count)


def plan_context(setup: RoundSetup, cohort: tuple[str, ...], server_round: int) -> PlanContext:
    """What the planner may see."""
    return PlanContext(
        shape=setup.shape,
        fleet=setup.workers,
        cohort=cohort,
        server_round=server_round,
        seed=setup.seed,
        max_rank=max((s.rank for s in setup.layout), default=0) or 1,
        strata=tuple(s for s in setup.layout.strata if s != HEAD),
        head=setup.head != "frozen" and HEAD in setup.layout.strata,
        num_rounds=setup.num_rounds,
        cost=plan_cost(setup),
    )


def plan_cost(setup: RoundSetup) -> PlanCost:
    """What a planner may ask about seconds, bytes and memory, from the simulated devices."""
    per_value = [sum(c.max_bytes(setup.layout)) / max(setup.layout.num_values, 1) for c in setup.codecs]
    return PlanCost(
        shape=setup.shape,
        tokens_per_step=int(setup.train["batch_size"]) * setup.max_length,
        steps={c.id: local_steps(setup.train, c.num_examples) for c in setup.workers.clients},
        adapter=setup.adapter,
        up_bytes_per_value=per_value[0],
        down_bytes_per_value=per_value[1],
        skips_blocks=setup.method.skips_blocks,
    )


def make_task(setup: RoundSetup, state: ServerState, plan: ClientPlan) -> Task:
    """The header of one client's task.

    An adapter that nobody has ever trained is exactly zero (B = 0), so a plan that only reads it does without it.
    Whether a stratum that stays on its client was trained there is not for the server to know: it is always read.
    """
    ranks = {s: r for s, r in plan.ranks.items() if r > 0}
    reads = {
        s: min(r, setup.server_ranks[s])
        for s, r in plan.reads.items()
        if s not in ranks and s in setup.server_ranks and (state.versions.get(str(s), 0) > 0 or s in setup.local_strata)
    }
    if setup.method.skips_blocks:
        reads = {}
    if HEAD in setup.server_ranks and HEAD not in ranks:
        reads[HEAD] = 1
    present = ranks | reads
    shared = {s: present[s] for s in sorted(present, key=stratum_order) if s not in setup.local_strata}
    versions = {str(s): state.versions.get(str(s), 0) for s in shared}
    known = state.acknowledged.get(plan.client, {}) if setup.partial_downlink else {}
    sent = [str(s) for s, r in shared.items() if list(known.get(str(s), ())) != [versions[str(s)], r]]
    train = dict(setup.train)
    if setup.method.topology == "pooled":
        train |= {"local_steps": _pooled_steps(setup, state.server_round + 1), "local_epochs": None}
    pairs, server_round = setup.method.pairs, state.server_round + 1
    return Task(
        job="train",
        client=plan.client,
        server_round=server_round,
        seed=setup.seed,
        ranks=rank_keys(ranks),
        reads=rank_keys(reads),
        local=[str(s) for s in sorted(setup.local_strata, key=stratum_order)],
        sent=sent,
        versions=versions,
        accepted_round=state.accepted.get(plan.client, 0),
        learning_rate=learning_rate(setup, server_round),
        train=train,
        objective=to_config(setup.method.objective),
        uplink=to_config(setup.method.codec),
        downlink=to_config(setup.downlink),
        send=setup.method.send,
        keep_downlink=setup.partial_downlink,
        threads=setup.threads,
        reuse=reuse_of(setup, ranks, train),
        frozen_kinds=[k for k in FACTORS if k not in pairs.trained_in(server_round)],
        local_kinds=list(pairs.local),
        drawn_kinds=list(pairs.drawn),
        drawn_round=server_round if pairs.redrawn else 0,
        scaling_power=setup.scaling_power,
        skip_blocks=setup.method.skips_blocks,
        base=[state.merged.get(plan.client, 0), state.base.number],
    )


def learning_rate(setup: RoundSetup, server_round: int) -> float:
    """lr_t = lr, or lr·½(1 + cos π(t − 1)/R) with `schedule = "cosine"`."""
    rate = float(setup.train["learning_rate"])
    if setup.train["schedule"] == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * (server_round - 1) / setup.num_rounds))
    return rate


def local_steps(train: Mapping[str, Any], num_examples: int) -> int:
    """Optimizer steps of a client: as set, or epochs times batches."""
    if train.get("local_epochs"):
        return int(train["local_epochs"]) * math.ceil(num_examples / int(train["batch_size"]))
    return int(train["local_steps"])


def _pooled_steps(setup: RoundSetup, server_round: int) -> int:
    """The steps of the cohort that a federated run would draw in this round, one after the other."""
    members = draw_cohort(setup.seed, server_round, setup.fleet.ids, setup.clients_per_round)
    return sum(local_steps(setup.train, setup.fleet[c].num_examples) for c in members)
