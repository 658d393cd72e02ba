"""Evaluation on clients: sums and counts come back, never examples, and their bytes are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from fedstrata.core.tensors import HEAD, Stratum
from fedstrata.core.wire import REPLY, Bytes, SectionBytes, frame_sections, unpack_frame
from fedstrata.errors import PayloadError
from fedstrata.message import Reply, Task, check_count, rank_keys, reply_header
from fedstrata.plan.base import ClientPlan
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.failure import ClientFailure
from fedstrata.server.downlink import Downlink
from fedstrata.server.orders import Engine, Order
from fedstrata.server.setup import RoundSetup
from fedstrata.server.tasks import make_task

Split = Literal["client_validation", "server_validation", "test"]
KeepPayload = Callable[[int, str, str, Bytes], None]
"""Called with round, client, direction and the bytes that went over the line."""


def drop_payload(server_round: int, client: str, direction: str, data: Bytes) -> None:
    """Keeps nothing."""


@dataclass(frozen=True)
class ClientScores:
    """What clients answered.

    Attributes:
        sums: Per client: number of examples, sum of losses, number of correct answers.
        downlink: Bytes of the tasks.
        uplink: Bytes of the replies; those of a bad one count as values.
        failures: Clients without a usable answer.
    """

    sums: dict[str, dict[str, float]]
    downlink: SectionBytes
    uplink: SectionBytes
    failures: tuple[ClientFailure, ...]


def evaluate_on_clients(
    setup: RoundSetup,
    state: ServerState,
    engine: Engine,
    split: Split,
    clients: Iterable[str],
    keep: KeepPayload = drop_payload,
) -> ClientScores:
    """Lets clients evaluate the current model, with the parts that are their own.

    Args:
        setup: What all rounds share.
        state: The model.
        engine: Runs the clients.
        split: The examples to evaluate on.
        clients: Who is asked.
        keep: Is given every payload, with the direction `evaluation-down` or `evaluation-up`.
    """
    downlink = Downlink(setup, state)
    sent: dict[str, SectionBytes] = {}

    def pack(client: str) -> Bytes:
        data = downlink.pack(evaluation_task(setup, state, client, split)).data
        sent[client] = frame_sections(data)
        keep(state.server_round, client, "evaluation-down", data)
        return data

    orders = [Order(c, state.accepted.get(c, 0), partial(pack, c), size=setup.workers[c].num_examples) for c in clients]
    sums, failures, up = {}, [], SectionBytes()
    for client, answer in engine.run(orders):
        if isinstance(answer, ClientFailure):
            failures.append(answer)
            continue
        keep(state.server_round, client, "evaluation-up", answer)
        try:
            reply = _read(answer, client, max(state.server_round, 1))
            known = setup.examples_of.get(split, {}).get(client)
            check_count(reply.num_examples, known, f"evaluation of client {client}")
        except PayloadError as error:
            up += SectionBytes(values=len(answer))
            failures.append(ClientFailure(client, state.server_round, "bad reply", str(error)))
            continue
        up += frame_sections(answer)
        sums[client] = {"num_examples": reply.num_examples, "loss_sum": reply.loss, "num_correct": reply.num_correct}
    down = SectionBytes()
    for section in sent.values():
        down += section
    return ClientScores(sums, down, up, tuple(failures))


def _read(answer: Bytes, client: str, server_round: int) -> Reply:
    where = f"evaluation of client {client}"
    reply = reply_header(unpack_frame(answer, REPLY, where=where), where=where)
    if (reply.client, reply.server_round) != (client, server_round) or reply.num_correct > reply.num_examples:
        raise PayloadError(
            "The evaluation is not the one that was asked for",
            where=where,
            expected=f"client {client}, round {server_round}, at most as many correct answers as examples",
            got=f"{reply}"[:200],
        )
    return reply


def evaluation_task(setup: RoundSetup, state: ServerState, client: str, split: Split) -> Task:
    """A task that trains nothing and evaluates the whole model."""
    everything: dict[Stratum, int] = {s: r for s, r in setup.server_ranks.items() if s != HEAD}
    task = make_task(setup, state, ClientPlan(client, {}, everything))
    if setup.method.topology == "alone":
        task = replace(task, reads=rank_keys(setup.server_ranks))
    sent = [s for s in task.reads if s not in task.local]
    return replace(
        task,
        job="evaluate",
        skip_blocks=False,
        server_round=max(state.server_round, 1),
        sent=sent,
        keep_downlink=False,
        split=split,
        uplink={"id": "float32"},
    )
