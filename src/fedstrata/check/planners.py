"""The laws of planners."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedstrata.check.common import config_law, is_json
from fedstrata.check.fleets import Names, make_fleet, make_shape
from fedstrata.check.law import Law, LeftOut, Trial
from fedstrata.core.shape import ModelShape, global_layout
from fedstrata.core.tensors import HEAD, Stratum
from fedstrata.device.fleet import Fleet
from fedstrata.device.plan_cost import PlanCost
from fedstrata.errors import PlanError
from fedstrata.plan.base import (
    PLANNERS,
    AskingPlanner,
    ContestPlanner,
    InvitingPlanner,
    PlanContext,
    Planner,
    RoundPlan,
)
from fedstrata.plan.cohort import check_round_plan

_RANK = 4


@dataclass(frozen=True)
class PlannerSubject:
    """A planner and the names that its options speak of."""

    planner: Planner
    names: Names


@dataclass(frozen=True)
class _World:
    shape: ModelShape
    fleet: Fleet
    context: PlanContext
    state: dict[str, Any]


def _world(subject: PlannerSubject, trial: Trial) -> _World:
    """A fleet of two clients or more; the whole fleet takes part, or a part of it."""
    planner = subject.planner
    shape = make_shape(trial)
    fleet = make_fleet(subject.names, 2 + min(trial.index, 10), trial)
    rng = trial.rng("cohort")
    server_round = 1 + (trial.index * 3) % 20
    ids = fleet.ids
    cohort = tuple(c for c in ids if rng.random() < 0.7) if trial.index % 2 else ids
    trial.note(f"model: {shape.num_blocks} blocks; round {server_round} of 20, largest rank {_RANK}")
    try:
        state = planner.init(shape, fleet)
        ranks = planner.server_ranks(shape, _RANK)
    except PlanError as error:
        raise LeftOut(f"it refuses the worlds that were tried: {error.one_line}") from error
    context = PlanContext(
        shape=shape,
        fleet=fleet,
        cohort=cohort or ids[:1],
        server_round=server_round,
        seed=trial.seed + trial.index,
        max_rank=max(ranks.values(), default=0) or 1,
        strata=tuple(b for b in shape.blocks if ranks.get(b, 0) > 0),
        num_rounds=20,
        cost=PlanCost(shape, 64, dict.fromkeys(ids, 4)),
    )
    if isinstance(planner, InvitingPlanner):
        context = replace(context, cohort=_invited(planner, context, trial))
    trial.note(f"cohort: {', '.join(context.cohort)}")
    return _World(shape, fleet, _answered(planner, state, context), state)


def _invited(planner: InvitingPlanner, context: PlanContext, trial: Trial) -> tuple[str, ...]:
    try:
        invited = planner.invited(context)
    except PlanError as error:
        raise LeftOut(f"it invites nobody here: {error.one_line}") from error
    good = list(invited) == sorted(set(invited)) and set(invited) <= set(context.fleet.ids) and len(invited) > 0
    trial.demand(good, f"invited() gives {invited}", "expected ascending ids of the fleet")
    return invited


def _answered(planner: Planner, state: dict[str, Any], context: PlanContext) -> PlanContext:
    """The world after the cohort answered what the planner asked."""
    asked = planner.probes(state, context) if isinstance(planner, AskingPlanner) else None
    if asked is None:
        return context
    sums = {str(b): 1.0 + float(b) for b in asked.options.get("strata", context.shape.blocks)}
    return replace(context, answers={c: {"sums": sums, "count": 8} for c in context.cohort})


def _plan(subject: PlannerSubject, world: _World, context: PlanContext | None = None) -> RoundPlan:
    return subject.planner.plan(copy.deepcopy(world.state), context or world.context)[0]


def _valid(subject: PlannerSubject, trial: Trial) -> None:
    world = _world(subject, trial)
    plan = _plan(subject, world)
    try:
        check_round_plan(plan, world.context)
    except PlanError as error:
        trial.broken(str(error))
    planned = tuple(p.client for p in plan.clients)
    left = set(world.context.cohort) - set(planned)
    says = " ".join(str(v) for v in plan.why.values())
    silent = sorted(c for c in left if c not in says)
    trial.demand(not silent, f"no plan for {', '.join(silent)}, and `why` does not name them")


def _fits_server(subject: PlannerSubject, trial: Trial) -> None:
    world = _world(subject, trial)
    ranks: dict[Stratum, int] = {**subject.planner.server_ranks(world.shape, _RANK), HEAD: 1}
    strangers = [s for s in ranks if s != HEAD and s not in world.shape.blocks]
    trial.demand(not strangers, f"server_ranks speaks of {strangers}; blocks are 0 to {world.shape.num_blocks - 1}")
    layout = global_layout(world.shape, "lora", ranks)
    for p in _plan(subject, world).clients:
        high = {s: (r, ranks.get(s, 0)) for s, r in p.ranks.items() if r > ranks.get(s, 0)}
        trial.demand(not high, f"client {p.client} would train {high} (planned rank, server's rank)")
        mine = set(layout.with_ranks(p.ranks).strata)
        trial.demand(
            mine == set(p.strata), f"client {p.client} trains {p.strata}, laid out are {sorted(mine, key=str)}"
        )


def _pure(subject: PlannerSubject, trial: Trial) -> None:
    world = _world(subject, trial)
    state = copy.deepcopy(world.state)
    first, _ = subject.planner.plan(state, world.context)
    trial.demand(state == world.state, f"plan() changed the state it was given: {world.state} became {state}")
    again = _plan(subject, world)
    trial.demand(first == again, "the same arguments gave", f"first  {_show(first)}", f"then   {_show(again)}")


def _order(subject: PlannerSubject, trial: Trial) -> None:
    world = _world(subject, trial)
    turned = replace(world.context, cohort=world.context.cohort[::-1])
    one, other = _plan(subject, world), _plan(subject, world, turned)
    trial.demand(one == other, "the cohort in another order gave", f"first  {_show(one)}", f"then   {_show(other)}")


def _json(subject: PlannerSubject, trial: Trial) -> None:
    world = _world(subject, trial)
    plan, state = subject.planner.plan(copy.deepcopy(world.state), world.context)
    record = _record(plan)
    later = subject.planner.observe(copy.deepcopy(state), record)
    bare = subject.planner.observe(copy.deepcopy(state), {"server_round": world.context.server_round})
    trial.demand(isinstance(world.state, dict), f"init() gives {world.state!r:.200}, and not a dict")
    for what, value in (
        ("the state of init()", world.state),
        ("why", dict(plan.why)),
        ("the state after plan()", state),
        ("the state after observe()", later),
        ("the state after observe() of a bare record", bare),
    ):
        trial.demand(is_json(value), f"{what} does not survive JSON: {value!r}"[:400])
    subject.planner.plan(later, replace(world.context, server_round=world.context.server_round + 1))


def _record(plan: RoundPlan) -> Mapping[str, Any]:
    predicted = {"forward_s": 1.0, "backward_s": 2.0, "upload_s": 0.5, "download_s": 0.25}
    clients = [
        {
            "client": p.client,
            "status": "ok",
            "num_steps": 4,
            "planned": {str(s): r for s, r in p.ranks.items()},
            "predicted": predicted,
            "numbers": {"kept_rank": 1.0},
        }
        for p in plan.clients
    ]
    held = {str(s): 0.5 for p in plan.clients for s in p.strata}
    statistics = {"mean_squared_delta": held, "zico_clients": held}
    return {"server_round": plan.server_round, "clients": clients, "statistics": statistics}


def _seeds(subject: PlannerSubject, trial: Trial) -> None:
    """A draw that changes from round to round must also change from seed to seed."""
    world = _world(subject, trial)
    everyone = replace(world.context, cohort=world.context.cohort)

    def rounds(seed: int) -> list[Any]:
        return [_what(_plan(subject, world, replace(everyone, seed=seed, server_round=r))) for r in range(1, 9)]

    mine = rounds(0)
    kinds = {c.id: c.device.name for c in world.fleet.clients}
    varies = any(
        len({repr(ranks) for client, ranks in plan.items() if kinds.get(client) == kind}) > 1
        for plan in mine
        for kind in world.fleet.kinds
    )
    if not varies or all(plan == mine[0] for plan in mine):
        raise LeftOut("it draws nothing anew: clients of one device kind always do the same")
    others = [rounds(seed) for seed in range(1, 5)]
    trial.demand(
        any(plan != mine for plan in others),
        "plans change from round to round, but are the same for the seeds 0 to 4",
        f"round 1: {mine[0]}",
        "draw from generator(context.seed, …)",
    )


def _rounds(subject: PlannerSubject, trial: Trial) -> None:
    """Longer runs of which the planner makes the same as of this one."""
    planner, world = subject.planner, _world(subject, trial)
    now = world.context.num_rounds
    longer = [n for n in (now + 1, now + 4, 2 * now, 10 * now) if _decided(planner, n) == _decided(planner, now)]
    if not longer:
        raise LeftOut("what it says under decided_by_rounds differs in all longer runs that were tried")
    for other in longer:
        contexts = [_answered(planner, world.state, replace(world.context, num_rounds=n)) for n in (now, other)]
        plans = [_plan(subject, world, c) for c in contexts]
        judged = [
            [planner.is_over(r, n) for r in range(1, now + 1)] if isinstance(planner, ContestPlanner) else []
            for n in (now, other)
        ]
        trial.demand(
            plans[0] == plans[1] and judged[0] == judged[1],
            f"a run of {now} and one of {other} rounds differ although decided_by_rounds says the same of both",
            f"of {now}  {_show(plans[0])} {judged[0] or ''}",
            f"of {other}  {_show(plans[1])} {judged[1] or ''}",
            "say in decided_by_rounds what is made of PlanContext.num_rounds",
        )


def _decided(planner: Planner, num_rounds: int) -> dict[str, Any]:
    return planner.decided_by_rounds(num_rounds)


def _what(plan: RoundPlan) -> dict[str, Any]:
    return {p.client: (dict(p.ranks), p.group) for p in plan.clients}


def _show(plan: RoundPlan) -> str:
    return "; ".join(f"{p.client}: {dict(p.ranks)}" for p in plan.clients) + f"; why {dict(plan.why)}"


PLANNER_LAWS: tuple[Law[PlannerSubject], ...] = (
    Law("config", "its config survives JSON and builds an equal part, found by its id",
        lambda subject, trial: config_law(PLANNERS).check(subject.planner, trial)),
    Law("valid", "plans are in ascending client id, fit the model, and cover the cohort or say whom not", _valid),
    Law("fits the server", "nobody trains at a rank above the server's, or what the server lacks", _fits_server),
    Law("pure", "the same arguments give the same plan, and nothing that came in is changed", _pure),
    Law("order", "the order of the cohort does not matter", _order),
    Law("json", "states and reasons survive JSON, and an observed state plans on", _json),
    Law("rounds", "the planned number of rounds changes a plan only through decided_by_rounds", _rounds),
    Law("seeds", "a draw that changes over rounds changes over seeds", _seeds),
)  # fmt: skip
