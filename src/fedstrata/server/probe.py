"""What a planner asks before it plans: its bytes, seconds and failures count like those of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedstrata.core.merges import BaseLog
from fedstrata.core.tensors import HEAD, Stratum
from fedstrata.core.wire import REPLY, Bytes, SectionBytes, frame_sections, unpack_frame
from fedstrata.device.cost import predict_client_seconds
from fedstrata.errors import ConfigError, PayloadError
from fedstrata.message import FISHER, check_count, rank_keys, reply_header
from fedstrata.plan.base import AskingPlanner, ClientPlan, Probes
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.failure import ClientFailure
from fedstrata.server.downlink import Downlink
from fedstrata.server.evaluate import KeepPayload, drop_payload
from fedstrata.server.gradients import frames_log, read_gradient
from fedstrata.server.orders import Engine, Order
from fedstrata.server.setup import RoundSetup
from fedstrata.server.tasks import cohort_of, make_task, plan_context

CLIENT_SOURCE = "client_heldout"
_MAX_SUM = 1e30
"""Larger sums of squared gradients make no sense, and could overflow when they are added."""


@dataclass(frozen=True)
class Asked:
    """The answers to a planner's probe.

    Attributes:
        answers: By client (`server` where its own examples were used): `{"sums": {block: number}, "count": number}`.
        record: What the round's record says about it; None without a question.
        base: What every client's machine receives from now on because of the answers; None leaves it as it was.
    """

    answers: Mapping[str, Any] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    base: BaseLog | None = None


def ask(setup: RoundSetup, state: ServerState, engine: Engine, keep: KeepPayload = drop_payload) -> Asked:
    """Puts the planner's question, if it has one, to this round's cohort or to the server's own examples."""
    planner = setup.method.planner
    if not isinstance(planner, AskingPlanner):
        return Asked()
    server_round = state.server_round + 1
    cohort = cohort_of(setup, server_round)
    probes = planner.probes(dict(state.planner), plan_context(setup, cohort, server_round))
    if probes is None:
        return Asked()
    if probes.options.get("source", CLIENT_SOURCE) != CLIENT_SOURCE:
        return _ask_server(setup, state, probes)
    return _ask_clients(setup, state, engine, cohort, probes, keep)


def _ask_server(setup: RoundSetup, state: ServerState, probes: Probes) -> Asked:
    if setup.server_probe is None:
        raise ConfigError(
            f'The planner asks for "{probes.options["source"]}" examples of the server, and there are none here'
        )
    answer = setup.server_probe(state, probes.options)
    record = _record(probes, {"server": answer}, SectionBytes(), SectionBytes(), (), 0.0)
    return Asked({"server": answer}, record)


def _ask_clients(
    setup: RoundSetup,
    state: ServerState,
    engine: Engine,
    cohort: tuple[str, ...],
    probes: Probes,
    keep: KeepPayload,
) -> Asked:
    downlink = Downlink(setup, state)
    sent: dict[str, SectionBytes] = {}
    server_round = state.server_round + 1
    blocks: dict[Stratum, int] = {s: r for s, r in setup.server_ranks.items() if s != HEAD}

    def pack(client: str) -> Bytes:
        task = make_task(setup, state, ClientPlan(client, {}, blocks))
        present = rank_keys(setup.server_ranks)
        task = replace(
            task,
            job=probes.kind,
            reads=present,
            sent=[s for s in present if s not in task.local],
            versions={s: state.versions.get(s, 0) for s in present if s not in task.local},
            keep_downlink=False,
            skip_blocks=False,
            frozen_kinds=[],
            uplink={"id": "float32"},
            options=dict(probes.options),
        )
        data = downlink.pack(task).data
        sent[client] = frame_sections(data)
        keep(server_round, client, "probe-down", data)
        return data

    orders = [Order(c, state.accepted.get(c, 0), partial(pack, c), size=setup.workers[c].num_examples) for c in cohort]
    read = partial(_read, blocks=set(probes.options.get("strata", ())))
    if probes.kind == "gradient":
        read = partial(read_gradient, layout=setup.base_layout)
    answers, failures, up, seconds = {}, [], SectionBytes(), [0.0]
    for client, reply in engine.run(orders):
        if isinstance(reply, ClientFailure):
            failures.append(reply)
            continue
        keep(server_round, client, "probe-up", reply)
        try:
            answer = read(reply, client, server_round)
            where = f"probe of client {client} in round {server_round}"
            check_count(answer["count"], _expected_count(setup, probes, client), where)
        except PayloadError as error:
            up += SectionBytes(values=len(reply))
            failures.append(ClientFailure(client, server_round, "bad reply", str(error)))
            continue
        answers[client] = answer
        mine = frame_sections(reply)
        up += mine
        seconds.append(_seconds(setup, client, answers[client]["count"], sent[client].total, mine.total))
    down = SectionBytes()
    for section in sent.values():
        down += section
    record = _record(probes, answers, down, up, failures, max(seconds))
    if probes.kind == "gradient":
        counts = {client: {"count": answer["count"]} for client, answer in answers.items()}
        return Asked(counts, record, frames_log(setup, answers))
    return Asked(answers, record)


def _expected_count(setup: RoundSetup, probes: Probes, client: str) -> int | None:
    """How many examples a client answers with: its held-out or training ones, at most as many as were asked for."""
    known = setup.examples_of.get(CLIENT_SOURCE, {}).get(client)
    if probes.kind == "gradient":
        known = setup.workers[client].num_examples
    most = probes.options.get("examples")
    return known if known is None or most is None else min(known, int(most))


def _seconds(setup: RoundSetup, client: str, count: int, down: int, up: int) -> float:
    """Seconds that the client's device would need: one example per step, forward and backward."""
    device = setup.workers[client].device
    time = predict_client_seconds(
        device, setup.shape, setup.server_ranks, setup.max_length, count, down, up, adapter=setup.adapter
    )
    return time.total_s


def _read(data: Bytes, client: str, server_round: int, *, blocks: set[Any]) -> dict[str, Any]:
    """A probe's answer, checked: a sum for every block that was asked for, and a count."""
    where = f"probe of client {client} in round {server_round}"
    reply = reply_header(unpack_frame(data, REPLY, where=where), where=where)
    asked = {f"{FISHER}{b}": str(b) for b in sorted(blocks)}
    fits = set(reply.numbers) == set(asked) and all(0 <= x <= _MAX_SUM for x in reply.numbers.values())
    if (reply.client, reply.server_round) != (client, server_round) or reply.num_examples < 1 or not fits:
        raise PayloadError(
            "The answer is not what was asked for",
            where=where,
            expected=f"client {client}, a sum of 0 to {_MAX_SUM:g} for {len(blocks)} blocks, and at least one example",
            got=f"{reply}"[:200],
        )
    return {"sums": {b: reply.numbers[name] for name, b in asked.items()}, "count": reply.num_examples}


def _record(
    probes: Probes,
    answers: Mapping[str, Any],
    down: SectionBytes,
    up: SectionBytes,
    failures: Any,
    seconds: float,
) -> dict[str, Any]:
    return {
        "kind": probes.kind,
        "source": probes.options.get("source", CLIENT_SOURCE),
        "options": dict(probes.options),
        "num_answers": len(answers),
        "num_examples": math.fsum(a["count"] for a in answers.values()),
        "bytes": {"downlink": down.to_json(), "uplink": up.to_json()},
        "predicted_s": seconds,
        "failures": [f.to_json() for f in failures],
    }
