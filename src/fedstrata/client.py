"""The client's side of a round: bytes in, bytes out, in every engine.

`run_client` is the only impure step of a round. Training itself is a `Trainer`, so that this module needs no torch
and a test or a benchmark can put something simple in its place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fedstrata.codec.base import CODECS
from fedstrata.codec.floats import Float32
from fedstrata.core.merges import Merge, unpack_merges
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, NamedTensors, Stratum, parse_stratum, slice_tensors, stratum_name
from fedstrata.core.wire import Bytes, Frame, Payload
from fedstrata.errors import ClientError
from fedstrata.message import FISHER, Reply, Task, TaskLayouts, drawn_tensors, fixed_width, pack_reply, unpack_task
from fedstrata.objective.base import OBJECTIVES, Finished, FinishingObjective
from fedstrata.record.client_state import ClientState

FLOAT32 = Float32()


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
        warnings: What the user should know; the same in every engine.
    """

    tensors: NamedTensors
    num_examples: int
    num_steps: int
    loss: float
    precision: str = "fp32"
    numbers: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Score:
    """Sums of an evaluation."""

    num_examples: int
    loss_sum: float
    num_correct: int


@dataclass(frozen=True)
class FisherSums:
    """Σ over examples of ‖∇ log p(label)‖² by block, and how many examples; they add over clients."""

    sums: Mapping[int, float]
    count: int


class Trainer(Protocol):
    """Whoever really trains. It knows the model and the clients' data."""

    @property
    def server_layout(self) -> Layout:
        """Layout of the server's tensors, the same on both sides."""

    def initial(self, layout: Layout) -> NamedTensors:
        """First values of strata that stay on the client, from the named streams."""

    def take_merges(self, client: str, known: int, number: int, merges: Sequence[Merge], *, keep: bool) -> None:
        """Brings the base model to merge `number`; see `SiteBase.take`."""

    def train(self, task: Task, layouts: TaskLayouts, start: NamedTensors) -> LocalWork:
        """Trains from `start`; must leave what was not planned untouched."""

    def evaluate(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> Score:
        """Evaluates the model made of `tensors` on `task.split`."""

    @property
    def base_layout(self) -> Layout:
        """A pair per map, whose sizes say how updates of the base (or frozen factors) are written."""

    def gradient(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> tuple[NamedTensors, int]:
        """The loss's gradient at every map as a pair in `base_layout`, float32, and over how many examples."""

    def fisher(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> FisherSums:
        """Answers a probe with this client's held-out examples."""


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
    start = _receive(task, frame, layouts, state, trainer)
    if task.job == "train":
        return _train(task, layouts, state, start, trainer)
    if task.job == "evaluate":
        score = trainer.evaluate(task, layouts, start)
        answer = Reply(
            task.client, task.server_round, score.num_examples, loss=score.loss_sum, num_correct=score.num_correct
        )
    elif task.job == "gradient":
        pairs, count = trainer.gradient(task, layouts, start)
        payload, _ = FLOAT32.encode(pairs, trainer.base_layout, {}, generator(task.seed, "codec"))
        return pack_reply(Reply(task.client, task.server_round, count), FLOAT32, payload), client_state
    else:
        found = trainer.fisher(task, layouts, start)
        numbers = {f"{FISHER}{s}": float(x) for s, x in found.sums.items()}
        answer = Reply(task.client, task.server_round, found.count, numbers=numbers)
    return pack_reply(answer, None, Payload()), client_state


def _receive(task: Task, frame: Frame, layouts: TaskLayouts, state: ClientState, trainer: Trainer) -> NamedTensors:
    """Everything that the client starts from; the base model is brought to the task's merge."""
    payload = frame.payload
    known, number = task.base
    if number:
        merges, rest = unpack_merges(task.merges, payload.values, trainer.base_layout)
        trainer.take_merges(task.client, known, number, merges, keep=task.job != "evaluate")
        payload = Payload(payload.side, rest)
    received = CODECS.build(task.downlink).decode(payload, layouts.down) | drawn_tensors(task, layouts.shared)
    return _assemble(task, layouts, received, state, trainer)


def _train(
    task: Task, layouts: TaskLayouts, state: ClientState, start: NamedTensors, trainer: Trainer
) -> tuple[Bytes, Bytes]:
    """Trains, decides what is sent, encodes, and keeps what stays here."""
    work = trainer.train(task, layouts, start)
    trained, warnings = check_trained(work, layouts, start)
    where = f"client {task.client} after training"
    own_layout = Layout(tuple(s for s in layouts.trained if s.name not in layouts.up))
    own = {s.name: work.tensors[s.name] for s in own_layout}
    own_layout.check(own, where=where)
    finished, up = _finish(task, layouts, work, start)
    codec = CODECS.build(task.uplink)
    began = time.perf_counter()
    outgoing = {
        s.name: _delta(work.tensors[s.name], start[s.name]) if task.send == "delta" else work.tensors[s.name]
        for s in layouts.up
    }
    if up is not layouts.up:
        outgoing = slice_tensors(outgoing, up)
    up.check(outgoing, where=where)
    rng = generator(task.seed, "codec", task.server_round, task.client)
    payload, residual = codec.encode(outgoing, up, state.residual, rng)
    measured = dict(work.measured) | {"encode_s": time.perf_counter() - began}
    reply = Reply(
        client=task.client,
        server_round=task.server_round,
        num_examples=work.num_examples,
        num_steps=work.num_steps,
        loss=work.loss,
        ranks={str(s): max(x.rank for x in up.of(s)) or 1 for s in up.strata},
        trained=[str(s) for s in trained],
        warnings=[*work.warnings, *warnings],
        precision=work.precision,
        numbers=dict(work.numbers) | dict(finished.numbers),
        measured={k: fixed_width(v) for k, v in measured.items()},
    )
    keeps = task.keep_downlink
    new_state = ClientState(
        versions={s: [v, _rank(layouts.present, s)] for s, v in task.versions.items()} if keeps else {},
        held={s.name: start[s.name] for s in layouts.shared if s.kind not in task.drawn_kinds} if keeps else {},
        local=state.local | own,
        residual=residual,
    )
    return pack_reply(reply, codec, payload), new_state.to_bytes(task.server_round)


def _finish(task: Task, layouts: TaskLayouts, work: LocalWork, start: NamedTensors) -> tuple[Finished, Layout]:
    """What the objective says about the result, and the layout of what is sent."""
    objective = OBJECTIVES.build(task.objective) if task.objective else None
    if not isinstance(objective, FinishingObjective):
        return Finished(), layouts.up
    names = layouts.trained.names
    finished = objective.finish({n: work.tensors[n] for n in names}, {n: start[n] for n in names})
    if finished.rank is None:
        return finished, layouts.up
    ranks: dict[Stratum, int] = {
        s: min(finished.rank, max(x.rank for x in layouts.up.of(s))) or 1 for s in layouts.up.strata
    }
    return finished, layouts.up.with_ranks(ranks)


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
    own = Layout(tuple(s for s in layouts.present if s.name not in layouts.shared))
    missing = Layout(tuple(s for s in own if s.name not in state.local))
    first = trainer.initial(missing) if len(missing) else {}
    start: NamedTensors = {}
    for spec in layouts.present:
        key = str(spec.stratum)
        if spec.name in received:
            start[spec.name] = received[spec.name]
        elif spec.name in own:
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
