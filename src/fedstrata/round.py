"""The round: ask, plan, send, train, receive, merge, select, apply, measure, in this order.

`run_round` is the whole pipeline; what it calls is the same in every engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedstrata.aggregate.base import ClientUpdate
from fedstrata.core.wire import Bytes, SectionBytes, frame_sections
from fedstrata.errors import AggregationError, PayloadError, RoundError
from fedstrata.message import unpack_reply
from fedstrata.plan.base import ClientPlan, RoundPlan
from fedstrata.plan.checks import check_state
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.failure import ClientFailure
from fedstrata.server.contest import decide
from fedstrata.server.lanes import open_lanes
from fedstrata.server.measure import Traffic, add_totals, client_record, local_flop, round_record
from fedstrata.server.orders import Answer, Engine, Order
from fedstrata.server.probe import ask
from fedstrata.server.setup import RoundSetup
from fedstrata.server.tasks import plan_round


@dataclass(frozen=True)
class Observer:
    """Hooks for a progress display and for kept payloads; none may change a result."""

    planned: Callable[[RoundPlan], None] = lambda plan: None
    client_done: Callable[[dict[str, Any]], None] = lambda record: None
    payload: Callable[[int, str, str, Bytes], None] = lambda server_round, client, direction, data: None
    client_began: Callable[[str], None] = lambda client: None
    client_back: Callable[[str], None] = lambda client: None


def run_round(
    setup: RoundSetup, state: ServerState, engine: Engine, observer: Observer | None = None
) -> tuple[ServerState, dict[str, Any], list[dict[str, Any]]]:
    """One round.

    Returns:
        The new state, the round's record and one record per client. Measured values stand under `measured`.

    Raises:
        PlanError: If nobody would train anything.
        RoundError: If fewer than `min_replies` good replies came.
    """
    observer = observer or Observer()
    began = time.perf_counter()
    asked = ask(setup, state, engine, observer.payload)
    state = state if asked.base is None else replace(state, base=asked.base)
    plan, planner_state = plan_round(setup, state, asked.answers)
    observer.planned(plan)
    server_round = plan.server_round
    lanes = open_lanes(setup, state, plan)
    sent: dict[str, Traffic] = {}
    traffic: dict[str, Traffic] = {}
    client_records = []

    def pack(client_plan: ClientPlan) -> Bytes:
        client = client_plan.client
        sent[client], data = lanes[client_plan.group].send(client_plan)
        observer.payload(server_round, client, "down", data)
        observer.client_began(client)
        return data

    orders = [
        Order(
            p.client,
            state.accepted.get(p.client, 0),
            partial(pack, p),
            size=local_flop(setup, p),
            arrived=partial(observer.client_back, p.client),
        )
        for p in plan.clients
    ]
    for client, answer in engine.run(orders):
        mine = traffic[client] = sent.pop(client)
        if not isinstance(answer, ClientFailure):
            mine.start = lanes[mine.plan.group].start(mine)
        update = _receive(setup, mine, answer, observer)
        if update is not None and len(update.layout):
            try:
                lanes[mine.plan.group].add(update)
            except AggregationError as error:  # the accumulator is as it was
                mine.refuse("bad reply", str(error))
        mine.start = {}
        client_records.append(client_record(setup, mine))
        observer.client_done(client_records[-1])

    good = [t for t in traffic.values() if t.reply is not None]
    if len(good) < setup.min_replies:
        raise RoundError(
            f"Round {server_round} has {len(good)} good replies of {len(traffic)}",
            expected=f"at least {setup.min_replies} (rounds.min_replies)",
            got=_first_failures(traffic.values()),
            do="mend the clients, or lower rounds.min_replies; the rounds before this one are kept",
        )
    applied = {group: lane.finish(server_round) for group, lane in lanes.items()}
    state = replace(state, accepted=dict(state.accepted) | {t.plan.client: server_round for t in good})
    outcome = decide(setup, state, applied, dict(planner_state), engine, server_round)
    record = round_record(plan, client_records, outcome.record, asked.record)
    planner = setup.method.planner
    learned = planner.observe(outcome.planner, record | {"clients": _without_measured(client_records)})
    new_state = replace(
        state,
        tensors=outcome.applied.tensors,
        groups=outcome.groups,
        server_round=server_round,
        versions=outcome.applied.versions,
        planner=check_state(planner, learned, "observe"),
        selector=outcome.applied.selector,
        base=outcome.applied.base,
        merged=_merged(state, traffic),
        moments=outcome.applied.optimizer.moments,
        optimizer_steps=outcome.applied.optimizer.steps,
        acknowledged=_acknowledge(setup, state, traffic),
        totals=add_totals(state.totals, record),
    )
    record["measured"] = {
        "wall_s": time.perf_counter() - began,
        "train_s": sum(float(t.reply.measured.get("train_s", 0)) for t in good if t.reply),
    }
    return new_state, record, client_records


def _without_measured(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a planner may learn from: the simulated clock, nothing that differs between reruns."""
    return [{k: v for k, v in record.items() if k != "measured"} for record in records]


def _first_failures(traffic: Iterable[Traffic], shown: int = 3) -> str:
    """The first failures, a line each."""
    failed = [t.failure for t in traffic if t.failure]
    lines = [f"{f.client}: {f.detail.splitlines()[0]}" for f in failed[:shown]]
    if len(failed) > shown:
        lines.append(f"and {len(failed) - shown} more")
    return "; ".join(lines)


def _receive(setup: RoundSetup, mine: Traffic, answer: Answer, observer: Observer) -> ClientUpdate | None:
    """The update, or None with the failure noted: a bad reply is data, not an exception."""
    task = mine.task
    if isinstance(answer, ClientFailure):
        mine.failure = answer
        return None
    observer.payload(task.server_round, task.client, "up", answer)
    mine.up = SectionBytes(values=len(answer))
    try:
        registered = setup.workers[task.client].num_examples
        update, mine.reply = unpack_reply(
            answer,
            task,
            setup.layout,
            mine.start,
            num_examples=registered,
            server_scaling=setup.scaling,
            slices=mine.slices,
        )
    except PayloadError as error:
        mine.refuse("bad reply", str(error))
        return None
    mine.up = frame_sections(answer)
    return update


def _acknowledge(
    setup: RoundSetup, state: ServerState, traffic: Mapping[str, Traffic]
) -> Mapping[str, Mapping[str, list[int]]]:
    """What each client holds now. After a failure nothing is known, so that everything is sent again."""
    if not setup.partial_downlink:
        return {}
    known = dict(state.acknowledged)
    for client, mine in traffic.items():
        known.pop(client, None)
        if mine.reply is not None:
            ranks = mine.task.ranks | mine.task.reads
            known[client] = {s: [v, ranks[s]] for s, v in mine.task.versions.items()}
    return dict(sorted(known.items()))


def _merged(state: ServerState, traffic: Mapping[str, Traffic]) -> dict[str, int]:
    """The merge that each client stands at. After a failure nobody knows, so that everything is sent again."""
    if not state.base.number:
        return {}
    known = dict(state.merged)
    for client, mine in traffic.items():
        known.pop(client, None)
        if mine.reply is not None:
            known[client] = state.base.number
    return dict(sorted(known.items()))
