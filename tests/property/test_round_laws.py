"""Laws of a round beside the method: every codec, every planner, partial downlinks, and the two bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedstrata.codec import CODECS
from fedstrata.core.rng import generator
from fedstrata.core.tensors import parse_stratum
from fedstrata.core.wire import frame_sections
from fedstrata.device import count_step_flop
from fedstrata.message import unpack_task
from fedstrata.plan import PLANNERS, draw_cohort
from fedstrata.record.client_state import ClientState
from fedstrata.server.tasks import learning_rate

SIZES = {"a": 30, "b": 7, "c": 12, "d": 1}
CODEC_OPTIONS: dict[str, dict[str, Any]] = {
    "int4": {"rounding": "stochastic"},
    "zstd": {"inner": {"id": "int8", "block": 5}},
    "error_feedback": {"inner": "top_k"},
}
PLANNER_OPTIONS: dict[str, dict[str, Any]] = {
    "suffix_by_device": {"depth": {"big": 2, "small": 12}},
    "random_k": {"strata": 5},
    "fixed": {"clients": {"a": [1], "b": [10, 11], "c": [], "d": [0, 1, 2]}},
    "pattern": {"strata": {"big": 9, "small": 6}},
    "random_pattern": {"strata": {"big": 9, "small": 6}},
}
ASKING_OR_OWN_RANKS = {"fisher", "hello", "after_gradient", "depth_and_rank", "client_ranks", "windows"}
"""They need answers, or a server layout of their own ranks: their laws stand in test_planner_laws."""


def bits(tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {n: t.tobytes() for n, t in sorted(tensors.items())}


@pytest.mark.parametrize("codec_id", sorted(CODECS))
def test_the_server_averages_exactly_what_can_be_decoded_from_the_bytes(lab: Any, codec_id: str) -> None:
    codec = CODECS.build({"id": codec_id} | CODEC_OPTIONS.get(codec_id, {}))
    world = lab.world(lab.method("fedavg").with_parts(codec=codec), sizes=SIZES)
    residual: dict[str, Any] = {client: {} for client in SIZES}
    for server_round in (4, 5):
        before = world.state.tensors
        _, clients = world.round()
        decoded = {}
        for client in clients:  # Δ = local − start in float32, then the codec with the client's own stream
            layout = world.trainer.tasks[client].layouts(world.setup.layout).up
            delta = {n: world.trainer.local[client][n] - before[n] for n in layout.names}
            rng = generator(world.setup.seed, "codec", server_round, client)
            payload, residual[client] = codec.encode(delta, layout, residual[client], rng)
            decoded[client] = codec.decode(payload, layout)
            assert clients[client]["bytes"]["uplink"]["values"] == len(payload.values)
            assert clients[client]["bytes"]["uplink"]["side"] == len(payload.side)
        for name, tensor in world.state.tensors.items():
            mean = sum(n * (before[name] + decoded[c][name].astype(np.float64)) for c, n in SIZES.items())
            np.testing.assert_allclose(tensor, mean / sum(SIZES.values()), rtol=3e-7, atol=1e-9)
    if codec_id == "error_feedback":
        kept = ClientState.from_bytes(world.states.read("a", 5), world.setup.layout).residual
        assert bits(kept) == bits(residual["a"])
        assert any(np.any(t) for t in kept.values())


@pytest.mark.parametrize("planner_id", sorted(set(PLANNERS) - ASKING_OR_OWN_RANKS))
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_every_planner_is_carried_out_to_the_letter(lab: Any, planner_id: str, adapter: str) -> None:
    planner = PLANNERS.build({"id": planner_id} | PLANNER_OPTIONS.get(planner_id, {}))
    world = lab.world(lab.method("fedavg").with_parts(planner=planner), adapter, sizes=SIZES)
    record, clients = world.round()
    for client, line in clients.items():
        assert line["status"] == "ok"
        assert line["trained"] == list(line["planned"])  # in the same order: embeddings, blocks, head
        changed = {
            world.setup.layout[n].stratum
            for n, t in world.trainer.local[client].items()
            if not np.array_equal(t, world.trainer.starts[client][n])
        }
        assert changed == {parse_stratum(s) for s in line["planned"]}
        everything = {str(s) for s in world.setup.layout.strata}
        assert set(line["planned"]) | set(line["reads"]) == everything
    if planner_id == "fixed":
        assert {c: [s for s in line["planned"] if s.isdigit()] for c, line in clients.items()} == {
            "a": ["1"], "b": ["10", "11"], "c": [], "d": ["0", "1", "2"],
        }  # fmt: skip
        assert record["holders"] == {"0": 1, "1": 2, "2": 1, "10": 1, "11": 1, "head": 4}


@pytest.mark.parametrize("downlink", ["float32", "float16", "int8", "zstd"])
@pytest.mark.parametrize(
    ("name", "adapter"),
    [("fedra_freeze", "lora"), ("suffix_by_device", "lora"), ("last_k", "lora"), ("last_k", "full")],
)
def test_a_partial_downlink_changes_bytes_and_nothing_else(lab: Any, name: str, adapter: str, downlink: str) -> None:
    method = lab.method(name)
    codec = CODECS.build({"id": "error_feedback", "inner": "int4"})
    worlds = {
        partial: lab.world(
            method.with_parts(codec=codec),
            adapter,
            sizes=SIZES,
            clients_per_round=3,
            num_blocks=4,
            downlink=CODECS.build({"id": downlink} | CODEC_OPTIONS.get(downlink, {})),
            partial_downlink=partial,
        )
        for partial in (False, True)
    }
    saved, must_resend, resent = 0, set(), 0
    for server_round in range(4, 11):
        lines = {}
        for partial, world in worlds.items():
            world.trainer.habits = {"a": "raise"} if server_round == 6 else {}
            world.line.damage = {"b"} if server_round == 7 else set()
            _, lines[partial] = world.round()
        assert bits(worlds[False].state.tensors) == bits(worlds[True].state.tensors)
        assert worlds[False].state.versions == worlds[True].state.versions
        for client, line in lines[True].items():
            full = lines[False][client]
            assert line["status"] == full["status"]
            values = [x["bytes"]["downlink"]["values"] for x in (line, full)]
            assert values[0] <= values[1] or downlink == "zstd"  # two short frames may be longer than one
            saved += values[1] - values[0]
            if client in must_resend:
                assert values[0] == values[1]
                assert unpack_task(worlds[True].payloads[client, "down"])[0].sent == list(
                    unpack_task(worlds[False].payloads[client, "down"])[0].sent
                )
                resent += 1
            must_resend -= {client}
            must_resend |= {client} if line["status"] == "failed" else set()
    assert saved > 0
    assert resent > 0


def test_a_client_that_was_away_gets_all_that_it_missed(lab: Any) -> None:
    """Client a misses rounds 5 and 6; blocks 0 and 1 and the head change in every round, the others never."""
    planner = PLANNERS.build({"id": "first_k", "k": 2})
    world = lab.world(lab.method("fedavg").with_parts(planner=planner), sizes=SIZES, partial_downlink=True)
    _, clients = world.round()
    assert len(unpack_task(world.payloads["a", "down"])[0].sent) == 13  # it held nothing before
    without = lab.without(world, "a")
    without.line.inner.states = world.states
    for _ in range(2):
        without.round()
    world.state = without.state
    _, clients = world.round()
    task = unpack_task(world.payloads["a", "down"])[0]
    assert task.sent == ["0", "1", "head"]
    assert clients["a"]["status"] == "ok"
    assert set(clients["a"]["reads"]) == {str(b) for b in range(2, 12)}


def test_clients_on_their_own_share_nothing_and_go_on_from_where_they_were(lab: Any) -> None:
    planner = PLANNERS.build({"id": "random_k", "strata": 3})
    world = lab.world(lab.method("local_only").with_parts(planner=planner), sizes=SIZES, trained_before=False)
    before, versions = bits(world.state.tensors), dict(world.state.versions)
    mine: dict[str, dict[str, Any]] = {c: {} for c in SIZES}
    for _ in range(3):
        record, clients = world.round()
        for client, line in clients.items():
            start = world.trainer.starts[client]
            first = world.trainer.initial(world.setup.layout)
            expected = {n: mine[client].get(n, first[n]) for n in start}
            assert bits(start) == bits(expected)
            assert set(start) == set(world.setup.layout.names)  # what it trained in earlier rounds stays in its model
            mine[client] |= {n: t.copy() for n, t in world.trainer.local[client].items()}
            assert line["bytes"]["downlink"]["values"] == line["bytes"]["uplink"]["values"] == 0
        assert record["holders"] == {}
    assert bits(world.state.tensors) == before
    assert world.state.versions == versions


def test_central_takes_the_steps_of_the_cohort_that_would_have_been_drawn(lab: Any) -> None:
    for train in ({"local_steps": 2, "local_epochs": None}, {"local_steps": None, "local_epochs": 3}):
        options = {"learning_rate": 0.1, "schedule": "constant", "batch_size": 4} | train
        world = lab.world(lab.method("central"), sizes=SIZES, clients_per_round=2, train=options)
        for server_round in (4, 5, 6):
            record, clients = world.round()
            assert record["cohort"] == [lab.pooled]
            cohort = draw_cohort(world.setup.seed, server_round, list(SIZES), 2)
            # steps = Σ_cohort local_steps, or Σ_cohort local_epochs · ⌈n_k / batch_size⌉
            steps = sum(2 if train["local_steps"] else 3 * -(-SIZES[c] // 4) for c in cohort)
            assert clients[lab.pooled]["num_steps"] == steps
            assert clients[lab.pooled]["num_examples"] == sum(SIZES.values())
            assert clients[lab.pooled]["device"] == "big"


def test_a_round_with_nothing_to_send_is_a_round(lab: Any) -> None:
    """Only heads are trained and they stay local: replies are good, there is nothing to merge."""
    world = lab.world(lab.method("last_k", k=0), sizes=SIZES, head="local")
    before = bits(world.state.tensors)
    record, clients = world.round()
    assert record["num_replies"] == 4
    assert record["holders"] == {}
    assert bits(world.state.tensors) == before
    assert all(c["trained"] == ["head"] for c in clients.values())


def test_the_simulated_clock_counts_only_blocks_that_a_client_runs(lab: Any) -> None:
    """FedRA's client runs what it trains; with the rest frozen in place it runs everything."""
    found = {}
    for name in ("fedra_skip", "fedra_freeze"):
        world = lab.world(lab.method(name), sizes=SIZES, num_blocks=4)
        _, clients = world.round()
        found[name] = {c: line["predicted"] for c, line in clients.items()}
        for client, line in clients.items():
            planned = {parse_stratum(s): r for s, r in line["planned"].items()}
            skips = name == "fedra_skip"
            flop = count_step_flop(world.setup.shape, planned, 4 * 8, skips_blocks=skips)
            seconds = 2 * flop.forward / world.setup.workers[client].device.flop_per_s
            assert line["predicted"]["forward_s"] == pytest.approx(seconds)
    for client, skip in found["fedra_skip"].items():
        assert skip["forward_s"] < found["fedra_freeze"][client]["forward_s"]


def test_the_learning_rate_falls_as_half_a_cosine(lab: Any) -> None:
    train = {"learning_rate": 0.2, "schedule": "cosine", "batch_size": 4, "local_steps": 1, "local_epochs": None}
    world = lab.world(lab.method("fedavg"), sizes=SIZES, num_rounds=4, train=train)
    # lr_t = lr·½(1 + cos π(t − 1)/R) with R = 4
    rates = [learning_rate(world.setup, t) for t in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.2, 0.1 * (1 + 0.5**0.5), 0.1, 0.1 * (1 - 0.5**0.5)])


def test_the_ledger_is_the_sum_of_what_crossed_the_line(lab: Any) -> None:
    world = lab.world(lab.method("fedra_freeze"), sizes=SIZES, clients_per_round=3, partial_downlink=True)
    total = {"down": 0, "up": 0}
    for server_round in range(4):
        world.trainer.habits = {"b": "raise", "c": "raise"} if server_round == 1 else {}
        _, clients = world.round()
        for (client, direction), data in world.payloads.items():
            total[direction] += len(data)
            sections = clients[client]["bytes"][f"{direction}link"]
            assert frame_sections(data).to_json() == sections
            assert len(data) == sections["total"] == sections["header"] + sections["side"] + sections["values"]
    assert world.state.totals["downlink"]["total"] == total["down"]
    assert world.state.totals["uplink"]["total"] == total["up"]
