"""The client's side of a round: its state, its checks, and what it does with a task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from fedstrata.client import LocalWork, Score, check_trained, run_client
from fedstrata.codec import CODECS, Float32
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, TensorSpec
from fedstrata.core.wire import CLIENT_STATE, REPLY, Payload, pack_frame, unpack_frame
from fedstrata.errors import ClientError, PayloadError
from fedstrata.message import Task, TaskLayouts, pack_task, reply_header, unpack_reply
from fedstrata.record.client_state import ClientState

LAYOUT = Layout(
    (
        TensorSpec("a.q.lora_A", (2, 3), 0, "lora_A"),
        TensorSpec("a.q.lora_B", (4, 2), 0, "lora_B"),
        TensorSpec("b.q.lora_A", (2, 3), 1, "lora_A"),
        TensorSpec("b.q.lora_B", (4, 2), 1, "lora_B"),
        TensorSpec("classifier.weight", (2, 3), HEAD),
    )
)
SERVER = {s.name: np.linspace(-1, 1, s.num_values, dtype=np.float32).reshape(s.shape) for s in LAYOUT}
TRAIN = Task(
    "train", "site a", 3, 7, ranks={"1": 2, "head": 1}, reads={"0": 2}, sent=["0", "1", "head"],
    versions={"0": 1, "1": 2, "head": 2}, uplink={"id": "float32"}, downlink={"id": "float32"},
)  # fmt: skip


@dataclass
class AddOne:
    """Adds 1 to everything that is trained, or does what a test asks for."""

    server_layout: Layout = LAYOUT
    change: dict[str, Any] = field(default_factory=dict)
    leave_out: tuple[str, ...] = ()
    start: NamedTensors = field(default_factory=dict)

    def initial(self, layout: Layout) -> NamedTensors:
        return {s.name: np.full(s.shape, 9, np.float32) for s in layout}

    def train(self, task: Task, layouts: TaskLayouts, start: NamedTensors) -> LocalWork:
        self.start = {n: t.copy() for n, t in start.items()}
        tensors = {n: t + np.float32(n in layouts.trained) for n, t in start.items() if n not in self.leave_out}
        return LocalWork(tensors | self.change, 10, 2, 0.5, measured={"train_s": 1.5})

    def evaluate(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> Score:
        self.start = dict(tensors)
        return Score(8, 4.5, 6)


def packed(task: Task) -> Any:
    layout = task.layouts(LAYOUT).down
    tensors = {s.name: np.ascontiguousarray(SERVER[s.name][tuple(map(slice, s.shape))]) for s in layout}
    return pack_task(task, Float32(), Float32().encode(tensors, layout, {}, np.random.default_rng(0))[0])


def state_bytes(**header: Any) -> Any:
    return pack_frame(CLIENT_STATE, "float32", header, Payload(b"", np.zeros(6, "<f4").tobytes()))


def test_a_reply_holds_the_difference_that_training_made() -> None:
    data, state = run_client(packed(TRAIN), b"", AddOne())
    update, reply = unpack_reply(data, TRAIN, LAYOUT, SERVER, num_examples=10)
    assert state == b""
    assert update.layout.names == ("b.q.lora_A", "b.q.lora_B", "classifier.weight")
    for name in update.layout.names:
        np.testing.assert_allclose(update.values[name], 1, rtol=1e-6)
    assert (reply.trained, reply.warnings, reply.num_steps, reply.loss) == (["1", "head"], [], 2, 0.5)
    assert reply.measured["train_s"] == "0000000001.500000"


def test_weights_are_sent_as_they_are() -> None:
    data, _ = run_client(packed(replace(TRAIN, send="weights")), b"", AddOne())
    update, _ = unpack_reply(data, replace(TRAIN, send="weights"), LAYOUT, SERVER, num_examples=10)
    np.testing.assert_array_equal(update.values["b.q.lora_B"], SERVER["b.q.lora_B"] + np.float32(1))


@pytest.mark.parametrize("name", ["b.q.lora_A", "classifier.weight"])
@pytest.mark.parametrize("local", [[], ["head", "1"]])
def test_nan_is_found_before_anything_is_sent_or_kept(name: str, local: list[str]) -> None:
    bad = np.full(LAYOUT[name].shape, np.nan, np.float32)
    task = replace(TRAIN, local=local, sent=[s for s in TRAIN.sent if s not in local])
    with pytest.raises(PayloadError, match=rf"{name} holds NaN[\s\S]*client site a"):
        run_client(packed(task), b"", AddOne(change={name: bad}))


def test_a_change_of_a_frozen_tensor_is_an_error() -> None:
    for name in ("a.q.lora_A", "not.in.the.layout"):
        with pytest.raises(ClientError, match=f"Training changed {name}"):
            run_client(packed(TRAIN), b"", AddOne(change={name: np.ones((2, 3), np.float32)}))


def test_a_planned_tensor_that_is_missing_is_an_error() -> None:
    with pytest.raises(ClientError, match=r"left b\.q\.lora_B out"):
        run_client(packed(TRAIN), b"", AddOne(leave_out=("b.q.lora_B",)))


def test_one_changed_factor_is_enough_for_a_block() -> None:
    """A may stay as it is in the first step, because B = 0."""
    data, _ = run_client(packed(TRAIN), b"", AddOne(change={"b.q.lora_A": SERVER["b.q.lora_A"]}))
    assert unpack_reply(data, TRAIN, LAYOUT, SERVER, num_examples=10)[1].warnings == []


def test_a_block_that_did_not_change_is_a_warning_with_the_reason() -> None:
    start = {n: SERVER[n] for n in TRAIN.layouts(LAYOUT).present.names}
    for steps, reason in ((0, "no step was taken"), (3, "the learning rate or its gradient is zero")):
        work = LocalWork(dict(start) | {"classifier.weight": start["classifier.weight"] * 2}, 10, steps, 0.0)
        trained, warnings = check_trained(work, TRAIN.layouts(LAYOUT), start)
        assert trained == [HEAD]
        assert warnings == [f"block 1 was planned but did not change: {reason}"]


def test_what_stays_on_the_client_is_kept_and_taken_up_again() -> None:
    task = replace(TRAIN, local=["head"], sent=["0", "1"], versions={"0": 1, "1": 2})
    trainer = AddOne()
    data, state = run_client(packed(task), b"", trainer)
    assert np.all(trainer.start["classifier.weight"] == 9)  # the named first values
    assert "classifier.weight" not in unpack_reply(data, task, LAYOUT, SERVER, num_examples=10)[0].layout
    assert ClientState.from_bytes(state, LAYOUT).local.keys() == {"classifier.weight"}
    run_client(packed(replace(task, server_round=4)), state, trainer)
    assert np.all(trainer.start["classifier.weight"] == 10)


def test_error_feedback_keeps_what_was_not_sent() -> None:
    task = replace(TRAIN, uplink={"id": "error_feedback", "inner": {"id": "top_k", "fraction": 0.2}})
    data, state = run_client(packed(task), b"", AddOne())
    sent = unpack_reply(data, task, LAYOUT, SERVER, num_examples=10)[0].values
    kept = ClientState.from_bytes(state, LAYOUT).residual
    for name in sent:
        np.testing.assert_allclose(sent[name] + kept[name], 1, rtol=1e-6)
        assert np.count_nonzero(sent[name]) < sent[name].size


def test_a_client_goes_on_from_the_download_that_it_holds() -> None:
    _, state = run_client(packed(replace(TRAIN, keep_downlink=True)), b"", AddOne())
    trainer = AddOne()
    later = replace(TRAIN, server_round=4, sent=["1"], keep_downlink=True)
    run_client(packed(later), state, trainer)
    for name in trainer.start:
        np.testing.assert_array_equal(trainer.start[name], SERVER[name])


def test_a_client_that_holds_another_version_says_so() -> None:
    _, state = run_client(packed(replace(TRAIN, keep_downlink=True)), b"", AddOne())
    later = replace(TRAIN, sent=["1"], versions=TRAIN.versions | {"0": 3})
    for given in (state, b""):
        with pytest.raises(ClientError, match=r"site a does not hold block 0 in version 3"):
            run_client(packed(later), given, AddOne())


def test_a_stored_tensor_of_another_rank_is_refused_before_training() -> None:
    held = {"a.q.lora_A": np.zeros((1, 3), np.float32), "a.q.lora_B": np.zeros((4, 1), np.float32)}
    state = ClientState({"0": [1, 1]}, held=held).to_bytes(2)
    with pytest.raises(PayloadError, match=r"a\.q\.lora_A has the wrong shape[\s\S]*client site a starts from"):
        run_client(packed(replace(TRAIN, sent=["1", "head"])), state, AddOne())


def test_an_evaluation_sends_sums_and_keeps_the_state() -> None:
    task = replace(TRAIN, job="evaluate", ranks={}, reads={"0": 2, "1": 2, "head": 1}, split="client_validation")
    state = ClientState(local={"classifier.weight": np.ones((2, 3), np.float32)}).to_bytes(2)
    data, after = run_client(packed(task), state, AddOne())
    reply = reply_header(unpack_frame(data, REPLY), where="here")
    assert (reply.num_examples, reply.loss, reply.num_correct) == (8, 4.5, 6)
    assert after == state


def test_a_state_comes_back_as_it_was_kept() -> None:
    state = ClientState(
        versions={"0": [3, 2]},
        held={"a.q.lora_A": SERVER["a.q.lora_A"], "a.q.lora_B": SERVER["a.q.lora_B"][:, :1]},
        local={"classifier.weight": SERVER["classifier.weight"]},
        residual={"b.q.lora_A": SERVER["b.q.lora_A"]},
    )
    again = ClientState.from_bytes(state.to_bytes(5), LAYOUT)
    assert again.versions == {"0": [3, 2]}
    for part in ("held", "local", "residual"):
        assert getattr(again, part).keys() == getattr(state, part).keys()
        for name, tensor in getattr(state, part).items():
            np.testing.assert_array_equal(getattr(again, part)[name], tensor)
    assert again.to_bytes(5) == state.to_bytes(5)
    assert ClientState().to_bytes(5) == b""
    assert ClientState.from_bytes(b"", LAYOUT) == ClientState()


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"held": [["a.q.lora_A", [2, 3]], ["a.q.lora_B", [4, 2]]]}, "cut short"),
        ({"held": [["a.q.lora_A", [1, 3]]]}, "longer than it says"),
        ({}, "longer than it says"),
        ({"held": [["a.q.lora_A", [2, 4]]]}, "does not fit"),
        ({"held": [["a.q.lora_A", [2**60, 2**60]]]}, "does not fit"),
        ({"held": [["a.q.lora_A", [-2, -3]]]}, "does not fit"),
        ({"held": [["a.q.lora_A", [6]]]}, "does not fit"),
        ({"held": [["what", [2, 3]]]}, "unknown tensor"),
        ({"held": [["a.q.lora_A"]]}, "cannot be read"),
        ({"held": [5]}, "cannot be read"),
        ({"held": [["a.q.lora_A", "2x"]]}, "cannot be read"),
        ({"held": [["a.q.lora_A", [2, None]]]}, "cannot be read"),
        ({"held": 5}, "cannot be read"),
        ({"residual": {"a.q.lora_A": [2, 3]}}, "cannot be read"),
        ({"held": [["a.q.lora_A", [2, 3]]], "versions": [1]}, "cannot be read"),
        ({"held": [["a.q.lora_A", [2, 3]]], "versions": {"0": 3}}, "cannot be read"),
        ({"held": [["a.q.lora_A", [2, 3]]], "versions": {"0": ["3", 2]}}, "cannot be read"),
    ],
)
def test_a_damaged_state_is_refused(header: dict[str, Any], said: str) -> None:
    with pytest.raises(PayloadError, match=said):
        ClientState.from_bytes(state_bytes(**header), LAYOUT)


def test_a_state_with_a_flipped_bit_is_refused() -> None:
    data = bytearray(state_bytes(held=[["a.q.lora_A", [2, 3]]]))
    for place in (0, 30, 70, len(data) - 1):
        flipped = bytes(data[:place]) + bytes([data[place] ^ 4]) + bytes(data[place + 1 :])
        with pytest.raises(PayloadError):
            ClientState.from_bytes(flipped, LAYOUT)


def test_an_unknown_codec_in_a_task_is_an_error_of_the_client() -> None:
    with pytest.raises(Exception, match="Unknown codec"):
        run_client(packed(replace(TRAIN, uplink={"id": "morse"})), b"", AddOne())
    assert "morse" not in CODECS
