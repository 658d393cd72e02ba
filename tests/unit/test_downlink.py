"""What a client is sent, and what the server knows that it then has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate import sketch_slices
from fedstrata.codec import CODECS, Float32
from fedstrata.core.lora import init_lora
from fedstrata.core.shape import ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import HEAD, TensorSpec
from fedstrata.core.wire import Payload, pack_frame
from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.message import Task, header_of, unpack_reply, unpack_task
from fedstrata.method import METHODS
from fedstrata.plan.base import ClientPlan
from fedstrata.record.checkpoint import ServerState
from fedstrata.server.downlink import Downlink
from fedstrata.server.setup import RoundSetup
from fedstrata.server.tasks import make_task

RANK = 4
HEAD_SPEC = TensorSpec("classifier.bias", (3,), HEAD)
TARGETS = tuple(TargetShape(f"layers.{b}.q", b, 6, 5) for b in range(2))
SHAPE = ModelShape("Small", 2, 6, 16, TARGETS, (HEAD_SPEC,), (HEAD_SPEC,), 400)
LAYOUT = global_layout(SHAPE, "lora", {0: RANK, 1: RANK, HEAD: 1})
FLEET = Fleet(tuple(Client(c, DeviceProfile("box", 1 << 30, 1e9, 1e6, 1e6), 5) for c in "ab"))
TRAIN = {"learning_rate": 0.1, "schedule": "constant", "batch_size": 4, "local_steps": 2, "local_epochs": None}


def setup_of(name: str, **changes: Any) -> RoundSetup:
    method = METHODS.build(name, {})
    power = 1.0 if method.scaling in ("by_rank", "by_sketch") else 0.0
    made = RoundSetup(
        method=method, shape=SHAPE, fleet=FLEET, layout=LAYOUT, scaling=dict.fromkeys(LAYOUT.targets, 2.0), seed=7,
        num_rounds=5, clients_per_round=None, min_replies=1, train=TRAIN, max_length=8, downlink=Float32(),
        scaling_power=power,
    )  # fmt: skip
    return replace(made, **changes)


def state_of(server_round: int = 3, **changes: Any) -> ServerState:
    rng = np.random.default_rng(0)
    tensors = {s.name: rng.standard_normal(s.shape).astype(np.float32) for s in LAYOUT}
    versions = {"0": 1, "1": 2, "head": 3}
    return replace(ServerState(tensors, server_round, versions), **changes)


def packed(setup: RoundSetup, state: ServerState, rank: int, client: str = "a", **plan: Any) -> tuple[Any, Any, Any]:
    """The packed task, its decoded tensors, and the start as the server knows it."""
    downlink = Downlink(setup, state)
    mine = downlink.pack(make_task(setup, state, ClientPlan(client, {0: rank, HEAD: 1}, **plan)))
    task, frame = unpack_task(mine.data)
    layouts = task.layouts(LAYOUT)
    received = setup.downlink.decode(frame.payload, layouts.down) if not task.merges else {}
    return mine, received, downlink.start(mine.task, layouts, mine.slices)


def test_leading_slices_go_down_and_are_the_start() -> None:
    state = state_of()
    mine, received, start = packed(setup_of("rank_slice_mean"), state, 2, reads={1: RANK})
    assert mine.slices == {}
    assert received["layers.0.q.lora_A"].tobytes() == state.tensors["layers.0.q.lora_A"][:2].tobytes()
    assert received["layers.0.q.lora_B"].tolist() == state.tensors["layers.0.q.lora_B"][:, :2].tolist()
    assert received["layers.1.q.lora_A"].tobytes() == state.tensors["layers.1.q.lora_A"].tobytes()
    assert {n: t.tobytes() for n, t in received.items()} == {n: t.tobytes() for n, t in start.items()}


@pytest.mark.parametrize("codec", ["float16", "int8", "int4"])
def test_with_a_lossy_downlink_the_server_knows_what_was_really_received(codec: str) -> None:
    """Also of strata that were not sent this time, because the client holds them."""
    setup = setup_of("fedavg", downlink=CODECS.build(codec), partial_downlink=True)
    whole, received, start = packed(setup, state_of(), RANK, reads={1: RANK})
    assert whole.task.sent == ["0", "1", "head"]
    assert {n: t.tobytes() for n, t in received.items()} == {n: t.tobytes() for n, t in start.items()}
    holds = {"a": {"1": [2, RANK], "head": [3, 1]}}
    part, fewer, same = packed(setup, state_of(acknowledged=holds), RANK, reads={1: RANK})
    assert part.task.sent == ["0"]
    assert set(fewer) == {"layers.0.q.lora_A", "layers.0.q.lora_B"}
    assert {n: t.tobytes() for n, t in same.items()} == {n: t.tobytes() for n, t in start.items()}


def test_a_client_of_smaller_rank_gets_a_pair_whose_product_is_the_servers() -> None:
    """By rank: s_k = 2·4/2 = 4; s_k·B_k·A_k = s·B[:, :2]·A[:2], and √(s/s_k) stands on both factors."""
    state = state_of()
    _, received, start = packed(setup_of("flexlora"), state, 2)
    a, b = (state.tensors[f"layers.0.q.lora_{x}"].astype(np.float64) for x in "AB")
    mine_a, mine_b = (received[f"layers.0.q.lora_{x}"].astype(np.float64) for x in "AB")
    np.testing.assert_allclose(4.0 * mine_b @ mine_a, 2.0 * b[:, :2] @ a[:2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mine_a, a[:2] * 0.5**0.5, rtol=1e-6)
    assert {n: t.tobytes() for n, t in received.items()} == {n: t.tobytes() for n, t in start.items()}
    _, whole, _ = packed(setup_of("flexlora"), state, RANK)
    assert whole["layers.0.q.lora_A"].tobytes() == state.tensors["layers.0.q.lora_A"].tobytes()


def test_drawn_slices_are_those_of_the_named_stream() -> None:
    state = state_of()
    for client in "ab":
        mine, received, start = packed(setup_of("fslora"), state, 2, client)
        drawn = sketch_slices(7, 4, client, RANK, 2)
        assert mine.slices == {0: drawn}
        assert received["layers.0.q.lora_A"].tobytes() == state.tensors["layers.0.q.lora_A"][list(drawn)].tobytes()
        assert received["layers.0.q.lora_B"].tolist() == state.tensors["layers.0.q.lora_B"][:, list(drawn)].tolist()
        assert {n: t.tobytes() for n, t in received.items()} == {n: t.tobytes() for n, t in start.items()}
    assert len({sketch_slices(7, r, c, RANK, 2) for r in range(6) for c in "ab"}) > 2


def test_an_evaluation_has_all_slices_in_order() -> None:
    setup, state = setup_of("fslora"), state_of()
    task = replace(make_task(setup, state, ClientPlan("a", {}, {0: RANK, 1: RANK})), job="evaluate")
    assert Downlink(setup, state).slices(task) == {}


def test_what_both_sides_draw_is_not_sent_but_known() -> None:
    for name, expected in (("ffa_lora", 0), ("flora", 4)):
        setup = setup_of(name)
        mine, received, start = packed(setup, state_of(), 2)
        drawn = init_lora(7, LAYOUT.with_ranks({0: 2}), server_round=expected)
        assert "layers.0.q.lora_A" not in received
        assert start["layers.0.q.lora_A"].tobytes() == drawn["layers.0.q.lora_A"].tobytes()
        assert ("layers.0.q.lora_B" in received) == (name == "ffa_lora")
        assert mine.task.drawn_round == expected
    assert not start["layers.0.q.lora_B"].any()


def test_a_payload_is_encoded_once_for_all_clients_of_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    encode = Float32.encode
    monkeypatch.setattr(Float32, "encode", lambda self, *rest: (calls.append(1), encode(self, *rest))[1])
    setup, state = setup_of("fedavg"), state_of()
    downlink = Downlink(setup, state)
    tasks = [make_task(setup, state, ClientPlan(c, {0: RANK, HEAD: 1})) for c in "ab"]
    first, second = (downlink.pack(t) for t in tasks)
    assert len(calls) == 1
    payloads = [bytes(unpack_task(p.data)[1].payload.values) for p in (first, second)]
    assert payloads[0] == payloads[1]


def merged_state() -> ServerState:
    log = state_of().base
    for number in (1, 2, 3):
        pair = (np.full((5, 1), number, np.float32), np.ones((1, 6), np.float32))
        log = log.append(dict.fromkeys(LAYOUT.targets, pair))
    return state_of(base=log, merged={"a": 2})


def test_a_client_gets_the_merges_after_the_one_that_it_stands_at() -> None:
    """Three merges of rank 1 on maps of 5 × 6: 11 numbers each. All three are 33 > 30, so that the sum goes dense."""
    setup, state = setup_of("fedex_lora"), merged_state()
    near, _, _ = packed(setup, state, RANK, "a")
    assert (near.task.base, near.task.merges) == ([2, 3], [[3, [1, 1]]])
    far, _, _ = packed(setup, state, RANK, "b")
    assert (far.task.base, far.task.merges) == ([0, 3], [[2, [0, 0]], [3, [-1, -1]]])
    down = near.task.layouts(LAYOUT).down
    sizes = [len(unpack_task(p.data)[1].payload.values) - 4 * down.num_values for p in (near, far)]
    assert sizes == [4 * 2 * 11, 4 * 2 * 30]


def test_whoever_is_up_to_date_gets_no_merges() -> None:
    state = replace(merged_state(), merged={"a": 3})
    mine, received, _ = packed(setup_of("fedex_lora"), state, RANK)
    assert (mine.task.base, mine.task.merges) == ([3, 3], [])
    assert received["layers.0.q.lora_A"].tobytes() == state.tensors["layers.0.q.lora_A"].tobytes()


def test_a_reply_of_fewer_slices_keeps_the_scaling_that_the_client_trained_with() -> None:
    """Planned rank 2: s_k = 2·4/2 = 4, also for a reply that states rank 1."""
    setup, state = setup_of("flexlora"), state_of()
    mine, _, start = packed(setup, state, 2)
    task: Task = mine.task
    layout = task.layouts(LAYOUT).up.with_ranks({0: 1, HEAD: 1})
    payload = Float32().encode(layout.zeros(), layout, {}, np.random.default_rng(0))[0]
    header = {"client": "a", "server_round": 4, "num_examples": 5, "ranks": {"0": 1, "head": 1}}
    data = pack_frame(2, "float32", header, Payload(payload.side, payload.values))
    update, reply = unpack_reply(data, task, LAYOUT, start, num_examples=5, server_scaling=setup.scaling)
    assert update.layout["layers.0.q.lora_A"].rank == 1
    assert update.scaling == {"layers.0.q": 4.0}
    assert header_of(reply) == header
