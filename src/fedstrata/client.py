"""The client's side of a round: bytes in, bytes out, in every engine.

`run_client` is the only impure step of a round. Training itself is a `Trainer`, so that this module needs no torch
and a test or a benchmark can put something simple in its place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fedstrata.codec.base import CODECS
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, NamedTensors, Stratum, TensorSpec, parse_stratum, stratum_name
from fedstrata.core.wire import CLIENT_STATE, Bytes, Payload, pack_frame, unpack_frame
from fedstrata.errors import ClientError, PayloadError
from fedstrata.message import Reply, Task, TaskLayouts, fixed_width, pack_reply, unpack_task


@dataclass(frozen=True)
class LocalWork:
    """What local training leaves.

    Attributes:
        tensors: Local values of everything that was planned, float32; handed over, they may be overwritten.
        num_examples: Distinct training examples.
        num_steps: Optimizer steps.
        loss: Mean loss over the steps.
        precision: Of the base model.
        numbers: What the method reports.
        measured: Seconds and bytes.
    """

    tensors: NamedTensors
    num_examples: int
    num_steps: int
    loss: float
    precision: str = "fp32"
    numbers: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """Sums of an evaluation."""

    num_examples: int
    loss_sum: float
    num_correct: int


class Trainer(Protocol):
    """Whoever really trains. It knows the model and the clients' data."""

    @property
    def server_layout(self) -> Layout:
        """Layout of the server's tensors, the same on both sides."""

    def initial(self, layout: Layout) -> NamedTensors:
        """First values of strata that stay on the client, from the named streams."""

    def train(self, task: Task, layouts: TaskLayouts, start: NamedTensors) -> LocalWork:
        """Trains from `start`; must leave what was not planned untouched."""

    def evaluate(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> Score:
        """Evaluates the model made of `tensors` on `task.split`."""


@dataclass(frozen=True)
class ClientState:
    """What stays on the client between rounds.

    Attributes:
        held: Decoded downlink that it keeps (partial downlink), and per stratum `[version, rank]`.
        local: Strata that never leave it.
        residual: What its codec left unsent.
    """

    versions: Mapping[str, list[int]] = field(default_factory=dict)
    held: NamedTensors = field(default_factory=dict)
    local: NamedTensors = field(default_factory=dict)
    residual: NamedTensors = field(default_factory=dict)

    def to_bytes(self, server_round: int) -> Bytes:
        """One frame; empty bytes for an empty state."""
        parts = {"held": self.held, "local": self.local, "residual": self.residual}
        if not any(parts.values()):
            return b""
        header: dict[str, Any] = {"server_round": server_round, "versions": dict(self.versions)}
        header |= {k: [[n, list(t.shape)] for n, t in p.items()] for k, p in parts.items()}
        values = b"".join(np.ascontiguousarray(t, "<f4").tobytes() for p in parts.values() for t in p.values())
        return pack_frame(CLIENT_STATE, "float32", header, Payload(b"", values))

    @staticmethod
    def from_bytes(data: Bytes, server_layout: Layout) -> ClientState:
        """Reads a state; every tensor must fit into the server's layout.

        Raises:
            PayloadError: If it does not.
        """
        if not data:
            return ClientState()
        frame = unpack_frame(data, CLIENT_STATE, where="client state")
        versions = _state_versions(frame.header.get("versions", {}))
        offset, parts = 0, {}
        values = memoryview(frame.payload.values)
        for part in ("held", "local", "residual"):
            tensors: NamedTensors = {}
            entries = frame.header.get(part, [])
            if not isinstance(entries, list):
                raise PayloadError("The client state's header cannot be read", where=part)
            for entry in entries:
                name, shape = _state_entry(entry, server_layout)
                size = 4 * int(np.prod(shape, dtype=np.int64))
                if offset + size > len(values):
                    raise PayloadError("The client state is cut short", where=name)
                tensors[name] = np.frombuffer(values[offset : offset + size], "<f4").reshape(shape)
                offset += size
            parts[part] = tensors
        if offset != len(values):
            raise PayloadError("The client state is longer than it says", expected=str(offset), got=str(len(values)))
        return ClientState(versions=versions, **parts)


def run_client(task_bytes: Bytes, client_state: Bytes, trainer: Trainer) -> tuple[Bytes, Bytes]:
    """Does one task.

    Args:
        task_bytes: The task, as it came.
        client_state: This client's state after its last accepted reply; empty without one.
        trainer: Model and data.

    Returns:
        The reply and the new client state, both bytes.

    Raises:
        PayloadError: If the task or the state cannot be read.
        ClientError: If training changed what was not planned, or failed.
    """
    task, frame = unpack_task(task_bytes)
    layouts = task.layouts(trainer.server_layout)
    state = ClientState.from_bytes(client_state, trainer.server_layout)
    received = CODECS.build(task.downlink).decode(frame.payload, layouts.down)
    start = _assemble(task, layouts, received, state, trainer)
    if task.job == "evaluate":
        score = trainer.evaluate(task, layouts, start)
        reply = Reply(
            task.client, task.server_round, score.num_examples, loss=score.loss_sum, num_correct=score.num_correct
        )
        return pack_reply(reply, None, Payload()), client_state
    work = trainer.train(task, layouts, start)
    trained, warnings = check_trained(work, layouts, start)
    where = f"client {task.client} after training"
    local = {parse_stratum(s) for s in task.local}
    own = {s.name: work.tensors[s.name] for s in layouts.trained if s.stratum in local}
    layouts.trained.restrict(local).check(own, where=where)
    codec = CODECS.build(task.uplink)
    began = time.perf_counter()
    outgoing = {
        s.name: _delta(work.tensors[s.name], start[s.name]) if task.send == "delta" else work.tensors[s.name]
        for s in layouts.up
    }
    layouts.up.check(outgoing, where=where)
    rng = generator(task.seed, "codec", task.server_round, task.client)
    payload, residual = codec.encode(outgoing, layouts.up, state.residual, rng)
    measured = dict(work.measured) | {"encode_s": time.perf_counter() - began}
    reply = Reply(
        client=task.client,
        server_round=task.server_round,
        num_examples=work.num_examples,
        num_steps=work.num_steps,
        loss=work.loss,
        ranks={str(s): max(x.rank for x in layouts.up.of(s)) or 1 for s in layouts.up.strata},
        trained=[str(s) for s in trained],
        warnings=warnings,
        precision=work.precision,
        numbers=dict(work.numbers),
        measured={k: fixed_width(v) for k, v in measured.items()},
    )
    new_state = ClientState(
        versions={s: [v, _rank(layouts.present, s)] for s, v in task.versions.items()} if task.keep_downlink else {},
        held={s.name: start[s.name] for s in layouts.present if s.stratum not in local} if task.keep_downlink else {},
        local=state.local | own,
        residual=residual,
    )
    return pack_reply(reply, codec, payload), new_state.to_bytes(task.server_round)


def check_trained(work: LocalWork, layouts: TaskLayouts, start: NamedTensors) -> tuple[list[Stratum], list[str]]:
    """Compares the trained set with the planned set.

    Returns:
        The strata that changed, and a warning with its likely reason for every planned one that did not.

    Raises:
        ClientError: If something changed that was not planned, or something planned is missing.
    """
    for name, tensor in work.tensors.items():
        if name not in layouts.trained and not (name in start and np.array_equal(tensor, start[name])):
            raise ClientError(f"Training changed {name}, which was not planned", do="report this as a bug")
    missing = [name for name in layouts.trained.names if name not in work.tensors]
    if missing:
        raise ClientError(f"Training left {missing[0]} out, which was planned", do="report this as a bug")
    changed = {
        s.stratum for s in layouts.trained if not np.array_equal(work.tensors[s.name], start[s.name], equal_nan=False)
    }
    reason = "no step was taken" if work.num_steps == 0 else "the learning rate or its gradient is zero"
    strata = layouts.trained.strata
    warnings = [f"{stratum_name(s)} was planned but did not change: {reason}" for s in strata if s not in changed]
    return [s for s in strata if s in changed], warnings


def _delta(local: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Local − start, in the place of `local` where that may be written."""
    delta: np.ndarray = np.subtract(local, start, out=local if local.flags.writeable else None)
    return delta


def _assemble(
    task: Task, layouts: TaskLayouts, received: NamedTensors, state: ClientState, trainer: Trainer
) -> NamedTensors:
    """The start of this round: what came, what the client holds, and what is its own."""
    local = {parse_stratum(s) for s in task.local}
    own = layouts.present.restrict(local)
    missing = Layout(tuple(s for s in own if s.name not in state.local))
    first = trainer.initial(missing) if len(missing) else {}
    start: NamedTensors = {}
    for spec in layouts.present:
        key = str(spec.stratum)
        if spec.name in received:
            start[spec.name] = received[spec.name]
        elif spec.stratum in local:
            start[spec.name] = state.local.get(spec.name, first.get(spec.name))  # type: ignore[assignment]
        elif state.versions.get(key, [-1, 0])[0] == task.versions.get(key) and spec.name in state.held:
            start[spec.name] = state.held[spec.name]
        else:
            raise ClientError(
                f"Client {task.client} does not hold {stratum_name(spec.stratum)} in version {task.versions.get(key)}",
                do="the server sends everything after a failure",
            )
    layouts.present.check_shapes(start, where=f"what client {task.client} starts from")
    return start


def _rank(layout: Layout, stratum: str) -> int:
    return max((s.rank for s in layout.of(parse_stratum(stratum))), default=0)


def _state_versions(value: Any) -> dict[str, list[int]]:
    """Versions as `{stratum: [version, rank]}`, or an error."""
    fits = isinstance(value, dict) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) for n in pair) for pair in value.values()
    )
    if not fits:
        raise PayloadError("The client state's header cannot be read", where="versions")
    return dict(value)


def _state_entry(entry: Any, layout: Layout) -> tuple[str, tuple[int, ...]]:
    try:
        name, shape = str(entry[0]), tuple(int(n) for n in entry[1])
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise PayloadError("The client state's header cannot be read") from error
    if name not in layout:
        raise PayloadError("The client state holds an unknown tensor", got=name[:200])
    spec: TensorSpec = layout[name]
    if len(shape) != len(spec.shape) or any(not 0 <= n <= m for n, m in zip(shape, spec.shape, strict=True)):
        raise PayloadError(f"The client state's {name} does not fit", expected=f"{spec.shape}", got=f"{shape}")
    return name, shape
