"""Whatever a header says: it is read, or it is a plain error; nothing else ever comes out, and nothing is allocated."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedstrata.client import run_client
from fedstrata.codec import Float32
from fedstrata.core.merges import pack_merges, unpack_merges
from fedstrata.core.tensors import HEAD, Layout, TensorSpec
from fedstrata.core.wire import REPLY, TASK, Payload, pack_frame, peek_header, unpack_frame
from fedstrata.errors import FedstrataError, PayloadError
from fedstrata.message import Reply, Task, unpack_reply, unpack_task

LAYOUT = Layout(
    (
        TensorSpec("a.q.lora_A", (3, 5), 0, "lora_A"),
        TensorSpec("a.q.lora_B", (7, 3), 0, "lora_B"),
        TensorSpec("b.q.lora_A", (3, 6), 10, "lora_A"),
        TensorSpec("b.q.lora_B", (4, 3), 10, "lora_B"),
        TensorSpec("classifier.weight", (2, 5), HEAD),
    )
)
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**400]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
    st.sampled_from(["0", "1", "10", "-1", "head", "embeddings", "1_0", "٣", "9" * 5000, "lora_A", "weight", "\ud800"]),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["0", "10", "head"]), inner, max_size=4)
    ),
    max_leaves=8,
)


def fields_of(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """A few fields of a header with anything in them, and perhaps one that does not exist."""
    names = st.sampled_from([*kind.__dataclass_fields__, "unknown"])
    return st.dictionaries(names, values, min_size=1, max_size=3)


def frame(kind: int, header: dict[str, Any], payload: Payload = Payload()) -> bytes:  # noqa: B008
    return bytes(pack_frame(kind, "float32", header, payload))


def writable(header: dict[str, Any]) -> bool:
    """Whether anybody could have written it: text that is no UTF-8 cannot travel."""
    try:
        frame(TASK, header)
    except (UnicodeEncodeError, ValueError):
        return False
    return True


GOOD_TASK = {
    "job": "train", "client": "a", "server_round": 2, "seed": 3, "ranks": {"0": 2, "head": 1}, "reads": {"10": 3},
    "sent": ["0", "10", "head"], "versions": {"0": 1, "10": 1, "head": 1}, "uplink": {"id": "float32"},
    "downlink": {"id": "float32"}, "learning_rate": 0.1,
}  # fmt: skip


@MANY
@given(change=fields_of(Task))
@example(change={"ranks": {"x": 1}})
@example(change={"local": ["9" * 5000]})
@example(change={"sent": ["one"]})
def test_a_hostile_task_header_is_read_or_a_payload_error(change: dict[str, Any]) -> None:
    header = GOOD_TASK | change
    if not writable(header):
        return
    try:
        task, _ = unpack_task(frame(TASK, header))
        layouts = task.layouts(LAYOUT)
    except PayloadError:
        return
    assert set(layouts.up.names) <= set(LAYOUT.names)
    assert all(s.rank <= LAYOUT[s.name].rank for s in layouts.present)


@settings(max_examples=25, deadline=None)
@given(change=fields_of(Task))
@example(change={"base": []})
@example(change={"base": [1, 2, 3]})
@example(change={"base": [0, 1], "merges": [[1, [1, 1]]]})
@example(change={"merges": [None]})
@example(change={"scaling_power": 1e308})
@example(change={"objective": {"id": "proximal", "mu": -1}})
@example(change={"downlink": {"id": "float32", "x": 1}})
@example(change={"drawn_kinds": ["weight"]})
@example(change={"local_kinds": ["lora_B"], "accepted_round": -3})
@example(change={"job": "fisher"})
def test_a_hostile_task_ends_in_a_reply_or_in_an_error_with_a_name(lab: Any, change: dict[str, Any]) -> None:
    """What `run_client` raises is ours, so that the other side learns what was wrong."""
    world = lab.world(lab.method("fedavg"), sizes={"a": 3, "b": 2}, num_blocks=2)
    world.round()
    data = world.payloads["a", "down"]
    header = peek_header(data) | change
    if not writable(header):
        return
    world.trainer.tasks.clear()
    payload = unpack_frame(data, TASK, where="test").payload
    try:
        reply, _ = run_client(frame(TASK, header, payload), b"", world.trainer)
    except FedstrataError:
        return
    except (KeyError, TypeError, ValueError, OverflowError):
        if world.trainer.tasks or header["job"] != "train":
            return  # the trainer's own reading of its options, after everything else was accepted
        raise
    assert unpack_frame(reply, REPLY, where="test")


TASK_0 = Task(
    "train",
    "a",
    2,
    3,
    ranks={"0": 2, "head": 1},
    uplink={"id": "float32"},
    downlink={"id": "float32"},
    sent=["0", "head"],
)
START = {s.name: np.full(s.shape, 0.5, np.float32) for s in LAYOUT.with_ranks({0: 2, HEAD: 1})}
UP = TASK_0.layouts(LAYOUT).up
UP_PAYLOAD = Float32().encode({n: START[n] for n in UP.names}, UP, {}, np.random.default_rng(0))[0]
GOOD_REPLY = {
    "client": "a", "server_round": 2, "num_examples": 5, "num_steps": 2, "loss": 0.5, "ranks": {"0": 2, "head": 1},
    "trained": ["0", "head"],
}  # fmt: skip


@MANY
@given(change=fields_of(Reply))
@example(change={"ranks": {"0": 1, "head": 1}})
@example(change={"ranks": {"٠": 2, "head": 1}})
@example(change={"numbers": {"kept_rank": 1e308}})
def test_a_hostile_reply_header_is_read_or_a_payload_error(change: dict[str, Any]) -> None:
    header = GOOD_REPLY | change
    if not writable(header):
        return
    try:
        update, reply = unpack_reply(frame(REPLY, header, UP_PAYLOAD), TASK_0, LAYOUT, START, num_examples=5)
    except PayloadError:
        return
    assert (reply.client, reply.server_round, reply.num_examples) == ("a", 2, 5)
    assert update.layout.names == UP.names


@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=200), kind=st.sampled_from([TASK, REPLY]))
def test_any_other_bytes_are_a_payload_error(data: bytes, kind: int) -> None:
    with pytest.raises(PayloadError):
        unpack_frame(data, kind, where="test")


ranks = st.integers(-3, 9) | st.sampled_from([2**31, 2**63, 10**30, True, None, "1", 1.0])
entries = st.lists(
    st.one_of(values, st.lists(st.one_of(values, st.integers(-1, 5), st.lists(ranks, max_size=3)), max_size=3)),
    max_size=4,
)


@MANY
@given(entries=entries, values=st.binary(max_size=400))
@example(entries=[[1, [3, 4]]], values=b"")
@example(entries=[[1, [-1, -1]]], values=b"\0" * 4 * 59)
@example(entries=[[2, [1, 0]], [1, [0, 1]]], values=b"\0" * 400)
@example(entries=[[1, [1, 0]]], values=b"\xff" * 48)
@example(entries=[[1, [True, 0]]], values=b"\0" * 48)
def test_hostile_merges_are_read_or_a_payload_error(entries: Any, values: bytes) -> None:
    """Ranks are bounded by the map, and the bytes are there before anything is read."""
    try:
        merges, rest = unpack_merges(entries, values, LAYOUT)
    except PayloadError:
        return
    numbers = [m.number for m in merges]
    assert numbers == sorted(set(numbers))
    assert all(n >= 1 for n in numbers)
    assert sum(m.num_values for m in merges) * 4 + len(rest) == len(values)
    for merge in merges:
        for target, (b, a) in merge.factors.items():
            assert b.shape[1] == a.shape[0] <= min(b.shape[0], a.shape[1])
            assert b.shape[0] == LAYOUT[f"{target}.lora_B"].shape[0]
        assert all(
            np.isfinite(x).all() for x in (*merge.dense.values(), *(f for p in merge.factors.values() for f in p))
        )
    again, packed = pack_merges(merges, LAYOUT)
    assert again == [[int(n), [int(r) for r in line]] for n, line in entries]
    assert packed + bytes(rest) == values


def test_a_header_that_claims_a_large_merge_allocates_nothing() -> None:
    big = Layout((TensorSpec("q.lora_A", (4, 20000), 0, "lora_A"), TensorSpec("q.lora_B", (20000, 4), 0, "lora_B")))
    tracemalloc.start()
    with pytest.raises(PayloadError, match="cut short"):
        unpack_merges([[1, [-1]]], b"\0" * 100, big)
    with pytest.raises(PayloadError, match="cut short"):
        unpack_merges([[1, [20000]]], b"\0" * 100, big)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6
