"""Tasks and replies as bytes: what is written is read, and anything else than planned is refused."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedstrata.codec import CODECS, Float32
from fedstrata.core.checksum import crc32
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, TensorSpec
from fedstrata.core.wire import REPLY, TASK, Payload, pack_frame, peek_header, unpack_frame
from fedstrata.errors import PayloadError
from fedstrata.message import (
    Reply,
    Task,
    fixed_width,
    header_of,
    pack_reply,
    pack_task,
    reply_header,
    unpack_reply,
    unpack_task,
)

LAYOUT = Layout(
    (
        TensorSpec("a.q.lora_A", (3, 5), 0, "lora_A"),
        TensorSpec("a.q.lora_B", (7, 3), 0, "lora_B"),
        TensorSpec("b.q.lora_A", (3, 5), 10, "lora_A"),
        TensorSpec("b.q.lora_B", (7, 3), 10, "lora_B"),
        TensorSpec("classifier.weight", (2, 5), HEAD),
    )
)
TASK_10 = Task(
    "train", "site a", 4, 7, ranks={"10": 3, "head": 1}, reads={"0": 2}, sent=["0", "10", "head"],
    versions={"0": 2, "10": 3, "head": 3}, uplink={"id": "float32"}, downlink={"id": "float32"},
)  # fmt: skip
START = {s.name: np.full(s.shape, 0.5, np.float32) for s in LAYOUT.with_ranks({0: 2, 10: 3, HEAD: 1})}


def values(ranks: dict[Any, int] | None = None) -> tuple[Layout, NamedTensors]:
    layout = LAYOUT.with_ranks(ranks or {10: 3, HEAD: 1})
    return layout, {s.name: np.arange(s.num_values, dtype=np.float32).reshape(s.shape) for s in layout}


def reply(ranks: dict[Any, int] | None = None, header: dict[str, Any] | None = None, codec: Any = None) -> bytes:
    """A good reply to `TASK_10`, with some fields of its header replaced."""
    layout, tensors = values(ranks)
    codec = codec or Float32()
    payload, _ = codec.encode(tensors, layout, {}, np.random.default_rng(0))
    good = Reply("site a", 4, 30, 5, 0.5, ranks={"10": 3, "head": 1}, trained=["10", "head"])
    return bytes(pack_frame(REPLY, codec.id, header_of(good) | (header or {}), payload))


def read(data: bytes, task: Task = TASK_10, num_examples: int | None = 30) -> Any:
    return unpack_reply(data, task, LAYOUT, START, num_examples=num_examples)


def test_a_task_comes_back_as_it_was_sent() -> None:
    layout = TASK_10.layouts(LAYOUT).down
    payload, _ = Float32().encode({n: START[n] for n in layout.names}, layout, {}, np.random.default_rng(0))
    task, frame = unpack_task(pack_task(TASK_10, Float32(), payload))
    assert task == TASK_10
    assert frame.codec_id == "float32"
    assert bytes(frame.payload.values) == bytes(payload.values)


def test_a_header_leaves_out_what_equals_its_default() -> None:
    header = peek_header(pack_task(TASK_10, Float32(), Payload()))
    assert header.keys() == {
        "job", "client", "server_round", "seed", "ranks", "reads", "sent", "versions", "uplink", "downlink",
    }  # fmt: skip
    assert header_of(Reply("a", 1, 2)) == {"client": "a", "server_round": 1, "num_examples": 2}


def test_layouts_follow_from_the_plan() -> None:
    task = replace(TASK_10, local=["head"], sent=["10"])
    layouts = task.layouts(LAYOUT)
    assert layouts.present.names == LAYOUT.names
    assert layouts.present["a.q.lora_B"].shape == (7, 2)
    assert layouts.trained.names == ("b.q.lora_A", "b.q.lora_B", "classifier.weight")
    assert layouts.shared.strata == (0, 10)
    assert layouts.down.strata == (10,)
    assert layouts.up.strata == (10,)


@pytest.mark.parametrize(("ranks", "said"), [({"10": 4}, "1 to 3"), ({"10": 0}, "1 to 3"), ({"1": 1}, "no block 1")])
def test_a_plan_that_does_not_fit_the_server_is_refused(ranks: dict[str, int], said: str) -> None:
    with pytest.raises(PayloadError, match=said):
        replace(TASK_10, ranks=ranks).layouts(LAYOUT)


def test_a_good_reply_becomes_an_update_with_its_start() -> None:
    update, header = read(reply())
    assert (update.client, update.num_examples, update.send) == ("site a", 30, "delta")
    assert header.trained == ["10", "head"]
    assert update.layout.names == ("b.q.lora_A", "b.q.lora_B", "classifier.weight")
    np.testing.assert_array_equal(update.local("b.q.lora_B"), 0.5 + np.arange(21.0).reshape(7, 3))


def test_a_smaller_rank_than_planned_takes_the_first_slices_of_the_start() -> None:
    start = START | {"b.q.lora_B": np.arange(21, dtype=np.float32).reshape(7, 3)}
    data = reply({10: 2, HEAD: 1}, {"ranks": {"10": 2, "head": 1}})
    update, _ = unpack_reply(data, TASK_10, LAYOUT, start, num_examples=30)
    assert update.layout["b.q.lora_A"].shape == (2, 5)
    np.testing.assert_array_equal(update.start["b.q.lora_B"], start["b.q.lora_B"][:, :2])


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"client": "site b"}, "another client"),
        ({"server_round": 3}, "another round"),
        ({"num_examples": 31}, "another number of examples"),
        ({"ranks": {"10": 4, "head": 1}}, "larger ranks"),
        ({"ranks": {"10": 0, "head": 1}}, "larger ranks"),
        ({"ranks": {"10": 3, "head": 2}}, "larger ranks"),
        ({"ranks": {"10": 3}}, "other strata"),
        ({"ranks": {"0": 2, "10": 3, "head": 1}}, "other strata"),
        ({"ranks": {"10": 3, "tail": 1}}, "stratum that cannot be read"),
        ({"trained": ["0"]}, "trained what was not planned"),
        ({"trained": ["10 "]}, "trained what was not planned"),
        ({"color": "red"}, "unknown fields"),
        ({"num_steps": -1}, "make no sense"),
        ({"num_steps": 10**300}, "not what it should be|make no sense"),
        ({"num_correct": 2**41}, "make no sense"),
        ({"loss": 1e300}, "make no sense"),
        ({"loss": -1e31}, "make no sense"),
        ({"measured": {"train_s": "fast"}}, "make no sense"),
        ({"measured": {"train_s": "00000000000000nan"}}, "make no sense"),
        ({"measured": {"train_s": "1.5"}}, "make no sense"),
        ({"client": 3}, "not what it should be"),
        ({"server_round": "4"}, "not what it should be"),
        ({"server_round": 4.0}, "not what it should be"),
        ({"num_examples": True}, "not what it should be"),
        ({"loss": "low"}, "not what it should be"),
        ({"loss": None}, "not what it should be"),
        ({"ranks": [["10", 3]]}, "not what it should be"),
        ({"ranks": {"10": "3", "head": 1}}, "not what it should be"),
        ({"trained": "10"}, "not what it should be"),
        ({"warnings": [{}]}, "not what it should be"),
        ({"numbers": {"x": "y"}}, "not what it should be"),
        ({"measured": {"train_s": 1.5}}, "not what it should be"),
    ],
)
def test_a_reply_that_is_not_as_planned_is_refused_and_named(header: dict[str, Any], said: str) -> None:
    with pytest.raises(PayloadError, match=said) as caught:
        read(reply(header=header))
    assert "client site a in round 4" in str(caught.value)


def test_a_reply_without_a_needed_field_is_refused() -> None:
    layout, tensors = values()
    payload, _ = Float32().encode(tensors, layout, {}, np.random.default_rng(0))
    with pytest.raises(PayloadError, match="not what it should be"):
        read(bytes(pack_frame(REPLY, "float32", {"client": "site a", "server_round": 4}, payload)))


def test_a_reply_of_another_codec_is_refused() -> None:
    with pytest.raises(PayloadError, match="another codec"):
        read(reply(codec=CODECS.build("float16")))


def test_a_payload_of_another_length_is_refused() -> None:
    with pytest.raises(PayloadError, match="wrong length"):
        read(reply({10: 2, HEAD: 1}))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_and_its_tensor_named(bad: float) -> None:
    layout, tensors = values()
    tensors["b.q.lora_B"][6, 2] = bad
    flat = np.concatenate([tensors[n].reshape(-1) for n in layout.names]).astype("<f4").tobytes()
    data = pack_reply(Reply("site a", 4, 30, ranks={"10": 3, "head": 1}), Float32(), Payload(b"", flat))
    with pytest.raises(PayloadError, match=r"NaN or infinite[\s\S]*client site a"):
        read(bytes(data))


def test_a_task_is_no_reply() -> None:
    with pytest.raises(PayloadError, match="another kind"):
        read(bytes(pack_frame(TASK, "float32", header_of(Reply("site a", 4, 30)), Payload())))


def test_nobody_has_zero_examples() -> None:
    with pytest.raises(PayloadError, match="make no sense"):
        read(reply(header={"num_examples": 0}), num_examples=None)


def test_numbers_that_json_cannot_carry_are_refused() -> None:
    for text in (b'"loss":1e999', b'"loss":NaN', b'"loss":-Infinity'):
        header = json.dumps(header_of(Reply("site a", 4, 30)))[:-1].encode() + b"," + text + b"}"
        data = bytearray(pack_frame(REPLY, "", {}, Payload()))
        data[24:36] = struct.pack("<QI", len(header), crc32(header))
        data[60:64] = struct.pack("<I", crc32(data[:60]))
        with pytest.raises(PayloadError, match=r"header"):
            unpack_frame(bytes(data[:64]) + header, REPLY)


def test_an_evaluation_may_hold_no_examples() -> None:
    frame = unpack_frame(pack_reply(Reply("a", 1, 0), None, Payload()), REPLY)
    assert reply_header(frame, where="here") == Reply("a", 1, 0)


def test_measured_numbers_have_a_fixed_width() -> None:
    texts = [fixed_width(x) for x in (0.0, -1.0, 1.25, 1e12, float("nan"), float("inf"), float("-inf"))]
    assert {len(t) for t in texts} == {17}
    assert texts[:3] == ["0000000000.000000", "0000000000.000000", "0000000001.250000"]
    assert texts[3] == texts[5] == "9999999999.000000"
    assert texts[4] == texts[6] == texts[0]
