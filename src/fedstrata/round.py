"""The round: plan, send, train, receive, merge, select, apply, measure, in this order.

`run_round` is the whole pipeline; what it calls is the same in every engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedstrata.aggregate.base import ClientUpdate, MergeContext
from fedstrata.aggregate.exactness import ExactnessProbe
from fedstrata.core.tensors import stratum_order
from fedstrata.core.wire import Bytes, SectionBytes, frame_sections
from fedstrata.errors import AggregationError, PayloadError, RoundError
from fedstrata.message import pack_task, rank_keys, unpack_reply
from fedstrata.plan.base import RoundPlan
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.failure import ClientFailure
from fedstrata.select.base import SelectContext
from fedstrata.server.measure import Traffic, add_totals, client_record, round_record
from fedstrata.server.setup import Engine, RoundSetup
from fedstrata.server.tasks import Downlink, make_task, plan_round


@dataclass(frozen=True)
class Observer:
    """Hooks for a progress display and for kept payloads; none may change a result."""

    planned: Callable[[RoundPlan], None] = lambda plan: None
    client_done: Callable[[dict[str, Any]], None] = lambda record: None
    payload: Callable[[int, str, str, Bytes], None] = lambda server_round, client, direction, data: None


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
    plan, planner_state = plan_round(setup, state)
    observer.planned(plan)
    server_round = plan.server_round
    downlink = Downlink(setup, state.tensors)
    traffic: dict[str, Traffic] = {}
    aggregator = setup.method.aggregator
    accumulator = aggregator.zero(setup.layout, MergeContext(setup.scaling, setup.seed, server_round))
    probe = ExactnessProbe(setup.layout, setup.scaling, aggregator, max_values=setup.exactness_values)
    client_records = []
    num_merged = 0

    def tasks() -> Iterator[tuple[str, int, Bytes]]:
        for client_plan in plan.clients:
            task = make_task(setup, state, client_plan)
            layouts = task.layouts(setup.layout)
            data = pack_task(task, setup.downlink, downlink.payload(layouts.down))
            mine = Traffic(client_plan, task, downlink.start(layouts.shared), down=frame_sections(data))
            traffic[task.client] = mine
            observer.payload(server_round, task.client, "down", data)
            yield task.client, task.accepted_round, data

    for client, answer in engine.run(tasks()):
        mine = traffic[client]
        update = _receive(setup, mine, answer, observer)
        if update is not None and len(update.layout):
            try:
                accumulator = aggregator.add(accumulator, update)
                probe.add(update)
                num_merged += 1
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
    tensors, versions, selector_state = state.tensors, dict(state.versions), dict(state.selector)
    merged: dict[str, Any] = {"holders": {}, "exactness": None, "selection": None, "statistics": {}}
    if num_merged:  # else everything that was trained stays on its client
        proposal = aggregator.finish(accumulator, state.tensors)
        merged["holders"] = rank_keys(dict(sorted(proposal.holders.items(), key=lambda i: stratum_order(i[0]))))
        merged["statistics"] = dict(proposal.statistics)
        merged["exactness"] = probe.finish(proposal, state.tensors)
        context = SelectContext(setup.layout, state.tensors, server_round, setup.seed)
        accepted, selector_state, merged["selection"] = setup.method.selector.select(selector_state, proposal, context)
        tensors = state.tensors | accepted.tensors
        versions |= {str(s): server_round for s in accepted.holders}
    record = round_record(plan, client_records, merged)
    new_state = replace(
        state,
        tensors=tensors,
        server_round=server_round,
        versions=versions,
        planner=setup.method.planner.observe(
            dict(planner_state), record | {"clients": _without_measured(client_records)}
        ),
        selector=selector_state,
        accepted=dict(state.accepted) | {t.plan.client: server_round for t in good},
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


def _receive(
    setup: RoundSetup, mine: Traffic, answer: Bytes | ClientFailure, observer: Observer
) -> ClientUpdate | None:
    """The update, or None with the failure noted: a bad reply is data, not an exception."""
    task = mine.task
    if isinstance(answer, ClientFailure):
        mine.failure = answer
        return None
    observer.payload(task.server_round, task.client, "up", answer)
    mine.up = SectionBytes(values=len(answer))
    try:
        registered = setup.workers[task.client].num_examples
        update, mine.reply = unpack_reply(answer, task, setup.layout, mine.start, num_examples=registered)
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
