"""What passes between server and client: tasks down, replies up, each one frame of bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedstrata.aggregate.base import ClientUpdate
from fedstrata.codec.base import CODECS, Codec, wire_id
from fedstrata.core.lora import client_scalings, init_lora
from fedstrata.core.tensors import Kind, Layout, NamedTensors, Stratum, parse_stratum, slice_tensors, stratum_name
from fedstrata.core.wire import REPLY, TASK, Bytes, Frame, Payload, canonical_json, pack_frame, unpack_frame
from fedstrata.errors import PayloadError

Ranks = Mapping[Stratum, int]
H = TypeVar("H")
FISHER = "fisher."
"""Prefix of a stratum's sum in the numbers of a probe's reply."""

_MAX_COUNT = 1 << 40
_MAX_LOSS = 1e30
_FIXED_WIDTH = re.compile(r"[0-9]{10}\.[0-9]{6}")


@dataclass(frozen=True)
class Task:
    """The header of a task: everything that a client needs to know beside the tensors.

    Attributes:
        job: Train, evaluate the model that is sent, or answer a planner's probe with it (`fisher`,
            `gradient`).
        client: Its id.
        server_round: From 1.
        seed: The run's seed, root of all named streams.
        ranks: Trained strata and their ranks.
        reads: Frozen strata in the forward pass and their ranks.
        local: Strata that stay on the client: neither sent nor received.
        sent: Strata in this task's payload; others of `ranks` and `reads` are the ones that the client holds.
        versions: Versions of all strata in `ranks` and `reads` that are not local.
        accepted_round: The round of this client's last accepted reply; its state of that round counts.
        learning_rate: Of this round.
        train: Options of local training (`TrainConfig`).
        objective: Config of the objective.
        uplink: Config of the uplink's codec.
        downlink: Config of the downlink's codec.
        send: What the reply holds.
        keep_downlink: Whether the client keeps what it received (partial downlink).
        threads: CPU threads for training and evaluating.
        reuse: Whether states below the lowest trained block are computed once per example, where the model allows it;
            `always` says so if it does not.
        split: What to evaluate on.
        frozen_kinds: Kinds of tensors in trained strata that are not trained in this round (one factor of each pair).
        local_kinds: Kinds that stay on the client, in every stratum.
        drawn_kinds: Kinds that both sides draw from a named stream instead of sending them.
        drawn_round: The round in that stream's name; 0 for the first values of the run.
        scaling_power: p in s_k = s·(r/r_k)^p, the client's scaling at its rank r_k, with the server's s and r.
        skip_blocks: Whether the model consists of the strata in `ranks` only, other blocks being left out.
        base: [known, number]: the merge that this client is known to stand at, and the one that it trains at.
        merges: Updates of the base that stand before the payload's values, as `pack_merges` says.
        options: Of a probe.
    """

    job: Literal["train", "evaluate", "fisher", "gradient"]
    client: str
    server_round: int
    seed: int
    ranks: dict[str, int]
    reads: dict[str, int] = field(default_factory=dict)
    local: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    accepted_round: int = 0
    learning_rate: float = 0.0
    train: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    uplink: dict[str, Any] = field(default_factory=dict)
    downlink: dict[str, Any] = field(default_factory=dict)
    send: Literal["delta", "weights"] = "delta"
    keep_downlink: bool = False
    threads: int = 1
    reuse: Literal["off", "auto", "always"] = "off"
    split: Literal["", "client_validation", "server_validation", "test"] = ""
    frozen_kinds: list[Kind] = field(default_factory=list)
    local_kinds: list[Kind] = field(default_factory=list)
    drawn_kinds: list[Kind] = field(default_factory=list)
    drawn_round: int = 0
    scaling_power: float = 0.0
    skip_blocks: bool = False
    base: list[int] = field(default_factory=lambda: [0, 0])
    merges: list[list[Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def layouts(self, server_layout: Layout) -> TaskLayouts:
        """The layouts that follow from the plan; both sides compute them alike."""
        where = f"task for client {self.client}"
        trained = {parse_key(s, where): r for s, r in self.ranks.items()}
        present = trained | {parse_key(s, where): r for s, r in self.reads.items()}
        local = {parse_key(s, where) for s in self.local}
        sent = {parse_key(s, where) for s in self.sent}
        check_ranks(present, server_layout, where=where)
        whole = server_layout.with_ranks(present)
        mine = server_layout.with_ranks(trained).without(self.frozen_kinds)
        shared = whole.restrict(s for s in whole.strata if s not in local).without(self.local_kinds)
        return TaskLayouts(
            present=whole,
            trained=mine,
            shared=shared,
            down=shared.restrict(s for s in shared.strata if s in sent).without(self.drawn_kinds),
            up=mine.restrict(s for s in mine.strata if s not in local).without(self.local_kinds),
        )

    def scalings(self, server_scaling: Mapping[str, float], server_layout: Layout, layout: Layout) -> dict[str, float]:
        """s_k = s·(r/r_k)^p for every target of `layout`, the part of the model that the client has."""
        return client_scalings(server_scaling, server_layout, layout, self.scaling_power)


@dataclass(frozen=True)
class TaskLayouts:
    """What stands where.

    Attributes:
        present: In the forward pass.
        trained: Of these, trained.
        shared: Of the present ones, known to the server.
        down: Of the shared ones, in the task (others the client holds, or draws).
        up: In the reply.
    """

    present: Layout
    trained: Layout
    shared: Layout
    down: Layout
    up: Layout


@dataclass(frozen=True)
class Reply:
    """The header of a reply.

    Attributes:
        client: Who answers.
        server_round: Which task it answers.
        num_examples: n_k: distinct examples that it trains on, or that it evaluated.
        num_steps: Optimizer steps.
        loss: Mean training loss over the steps, or the sum of losses of an evaluation.
        num_correct: Of an evaluation.
        ranks: Rank of each stratum in the payload; at most the planned one.
        trained: Strata that really changed.
        warnings: What the client noticed.
        precision: Precision of its base model.
        numbers: What the method itself reports; of a probe, its sums and their count.
        measured: Seconds and bytes as fixed-width text, so that a reply's length does not depend on them.
    """

    client: str
    server_round: int
    num_examples: int
    num_steps: int = 0
    loss: float = 0.0
    num_correct: int = 0
    ranks: dict[str, int] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    precision: str = "fp32"
    numbers: dict[str, float] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)


def drawn_tensors(task: Task, layout: Layout) -> NamedTensors:
    """What both sides draw instead of sending it: the tensors of `task.drawn_kinds` in a layout."""
    kinds = set(task.drawn_kinds)
    wanted = Layout(tuple(s for s in layout if s.kind in kinds))
    return init_lora(task.seed, wanted, server_round=task.drawn_round)


def fixed_width(value: float) -> str:
    """A measured number as text of 17 characters; below 0 and NaN count as 0.

    Example:
        >>> fixed_width(0.25)
        '0000000000.250000'
    """
    return f"{min(max(0.0, value), 9999999999.0):017.6f}"


def rank_keys(ranks: Ranks) -> dict[str, int]:
    """Ranks with the text keys that records and headers use."""
    return {str(s): r for s, r in ranks.items()}


def check_ranks(ranks: Ranks, layout: Layout, *, where: str) -> None:
    """Raises `PayloadError` unless every stratum exists and every rank is between 1 and the server's."""
    largest = {s.stratum: max(s.rank, 1) for s in layout}
    for stratum, rank in ranks.items():
        if stratum not in largest:
            known = ", ".join(map(stratum_name, largest))
            raise PayloadError(f"There is no {stratum_name(stratum)}", where=where, expected=known)
        if not 1 <= rank <= largest[stratum]:
            raise PayloadError(
                f"Rank of {stratum_name(stratum)}", where=where, expected=f"1 to {largest[stratum]}", got=str(rank)
            )


def header_of(message: Task | Reply) -> dict[str, Any]:
    """The header's fields; one that equals its default is left out, so that a new field changes no old frame."""

    def default(f: Any) -> Any:
        return f.default if f.default_factory is MISSING else f.default_factory()

    values = {f.name: (getattr(message, f.name), default(f)) for f in fields(message)}
    return {name: value for name, (value, usual) in values.items() if value != usual}


def pack_task(task: Task, codec: Codec, payload: Payload) -> Bytes:
    """One task as bytes."""
    return pack_frame(TASK, wire_id(codec), header_of(task), payload)


def unpack_task(data: Bytes) -> tuple[Task, Frame]:
    """The task and its frame, the payload still encoded.

    Raises:
        PayloadError: If the bytes are not a whole, well-formed task.
    """
    frame = unpack_frame(data, TASK, where="task")
    task = _header(Task, frame, "task")
    if len(task.base) != 2 or not 0 <= task.base[0] <= task.base[1]:
        raise PayloadError(
            "The header's merge numbers make no sense",
            where="task, field base",
            expected="[known, number] with 0 ≤ known ≤ number",
            got=f"{task.base}"[:100],
        )
    return task, frame


def pack_reply(reply: Reply, codec: Codec | None, payload: Payload) -> Bytes:
    """One reply as bytes."""
    return pack_frame(REPLY, wire_id(codec) if codec else "", header_of(reply), payload)


def check_count(got: int, expected: int | None, where: str) -> None:
    """Refuses a reply that speaks of another number of examples than its client has.

    Args:
        got: What the reply says.
        expected: What is known of the client; None accepts anything.
        where: For the message.

    Raises:
        PayloadError: If they differ.
    """
    if expected is not None and got != expected:
        raise PayloadError(
            "The reply names another number of examples", where=where, expected=str(expected), got=str(got)
        )


def unpack_reply(
    data: Bytes,
    task: Task,
    server_layout: Layout,
    start: NamedTensors,
    *,
    num_examples: int | None,
    server_scaling: Mapping[str, float] | None = None,
    slices: Mapping[Stratum, tuple[int, ...]] | None = None,
) -> tuple[ClientUpdate, Reply]:
    """Reads and checks a client's answer to `task`.

    Args:
        data: The bytes that arrived.
        task: The task they answer.
        server_layout: The server's tensors.
        start: The decoded downlink that the client started from, as in `task.layouts().present` at least.
        num_examples: What the client registered with; None accepts what it says.
        server_scaling: s per target.
        slices: Which rank slices the client was given, where they are not the leading ones.

    Raises:
        PayloadError: If anything is not as planned: checksum, layout, a larger rank, another client or round,
            another codec, a stratum that was not to be trained, a value that is not finite.
    """
    where = f"reply of client {task.client} in round {task.server_round}"
    frame = unpack_frame(data, REPLY, where=where)
    reply = reply_header(frame, where=where)
    codec = CODECS.build(task.uplink)
    for name, expected, got in (
        ("client", task.client, reply.client),
        ("round", task.server_round, reply.server_round),
        ("codec", wire_id(codec), frame.codec_id),
    ):
        if expected != got:
            raise PayloadError(f"The reply names another {name}", where=where, expected=str(expected), got=str(got))
    check_count(reply.num_examples, num_examples, where)
    if reply.num_examples < 1:
        raise _senseless(reply, where)
    not_planned = [s for s in reply.trained if s not in task.ranks]
    if not_planned:
        raise PayloadError(
            "The reply says that it trained what was not planned",
            where=where,
            expected=f"some of {', '.join(task.ranks)}",
            got=", ".join(not_planned[:5])[:200],
        )
    planned = task.layouts(server_layout).up
    ranks = {s: max(x.rank for x in planned.of(s)) or 1 for s in planned.strata}
    stated = {parse_key(k, where): r for k, r in reply.ranks.items()}
    if set(stated) != set(ranks) or any(not 1 <= r <= ranks[s] for s, r in stated.items()):
        raise PayloadError(
            "The reply holds other strata or larger ranks than planned",
            where=where,
            expected=str(rank_keys(ranks)),
            got=str(dict(list(reply.ranks.items())[:50])),
        )
    layout = planned.with_ranks(stated)
    try:
        values = codec.decode(frame.payload, layout)
        layout.check_shapes(values, where=where)  # decode has refused what is not finite
    except PayloadError as error:
        raise PayloadError(error.what, where=where, expected=error.expected, got=error.got, do=error.do) from error
    whole = server_layout.with_ranks(stated)  # with the factors that were not trained
    known = Layout(tuple(s for s in whole if s.name in start))
    begin = {s.name: start[s.name] for s in known}
    if any(begin[s.name].shape != s.shape for s in known):
        begin = slice_tensors(begin, known)
    scalings = task.scalings(server_scaling, server_layout, planned) if server_scaling else {}
    update = ClientUpdate(
        reply.client, reply.num_examples, layout, begin, values, task.send, reply.numbers, scalings, dict(slices or {})
    )
    return update, reply


def reply_header(frame: Frame, *, where: str) -> Reply:
    """The header of a reply's frame, checked."""
    reply = _header(Reply, frame, where)
    counts = (reply.num_examples, reply.num_steps, reply.num_correct)
    if (
        not all(0 <= n <= _MAX_COUNT for n in counts)
        or not abs(reply.loss) <= _MAX_LOSS
        or not all(math.isfinite(n) for n in reply.numbers.values())
        or not all(_FIXED_WIDTH.fullmatch(text) for text in reply.measured.values())
    ):
        raise _senseless(reply, where)
    return reply


def _senseless(reply: Reply, where: str) -> PayloadError:
    return PayloadError("The reply's numbers make no sense", where=where, got=f"{reply}"[:200])


def parse_key(key: str, where: str) -> Stratum:
    """The stratum that a header's key names; anything else is a bad header."""
    try:
        return parse_stratum(key)
    except ValueError as error:
        raise PayloadError("The header names a stratum that cannot be read", where=where, got=repr(key[:40])) from error


def _header(kind: type[H], frame: Frame, where: str) -> H:
    known = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    extra = sorted(set(frame.header) - known)
    if extra:
        raise PayloadError("The header holds unknown fields", where=where, got=", ".join(extra[:5])[:200])
    try:
        message: H = _ADAPTERS[kind].validate_json(canonical_json(frame.header), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise PayloadError(
            "The header is not what it should be",
            where=f"{where}, field {'.'.join(map(str, first['loc']))}"[:200],
            got=first["msg"],
        ) from error
    return message


_ADAPTERS: dict[type, TypeAdapter[Any]] = {Task: TypeAdapter(Task), Reply: TypeAdapter(Reply)}
