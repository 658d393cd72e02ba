"""What a planner asks before it plans: pooled scores, counted bytes, failures as data, no examples on the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from fedstrata.core.wire import REPLY, Bytes, Payload, frame_sections, pack_frame, peek_header, unpack_frame
from fedstrata.errors import ConfigError, RoundError
from fedstrata.message import unpack_task
from fedstrata.server.orders import Order

SIZES = {"a": 30, "b": 7, "c": 12, "d": 1}
BLOCKS = 4


def asking(lab: Any, **options: Any) -> Any:
    """Fed-HeLLo that asks in every second round from the third on."""
    return lab.method("fed_hello", **{"warm_rounds": 2, "refresh": 2} | options)


def fisher_world(lab: Any, **options: Any) -> Any:
    return lab.world(asking(lab, **options), sizes=SIZES, num_blocks=BLOCKS, trained_before=False)


def answers_of(world: Any) -> dict[str, dict[str, Any]]:
    """The headers of all answers of the last round, by client."""
    return {c: peek_header(data) for (c, direction), data in world.payloads.items() if direction == "probe-up"}


def test_scores_are_asked_for_in_the_rounds_that_the_schedule_names(lab: Any) -> None:
    """T_warm = 2, T_FIM = 2: rounds 3, 5, 7, …; in between the last scores stay."""
    world = fisher_world(lab)
    scored = {}
    for server_round in range(1, 9):
        record, _ = world.round()
        asked = server_round >= 3 and server_round % 2 == 1
        assert ("probes" in record) == asked
        assert bool(answers_of(world)) == asked
        scored[server_round] = json.dumps(record["why"]["scores"])
        assert record["why"]["phase"] == ("pattern" if server_round < 3 else "scores")
    assert scored[1] == scored[2] == "null"
    assert scored[3] == scored[4] != scored[5] == scored[6] != scored[7] == scored[8]


def test_the_score_is_the_pooled_one_and_its_bytes_are_in_the_ledger(lab: Any) -> None:
    """F_l = Σ_k sums_k[l] / Σ_k count_k, from what the answers hold."""
    world = fisher_world(lab)
    for _ in range(3):
        before = world.state.totals
        record, _ = world.round()
    answers = answers_of(world)
    assert set(answers) == set(SIZES)
    count = sum(a["num_examples"] for a in answers.values())
    pooled = {
        str(b): sum(a["numbers"][f"fisher.{b}"] for a in answers.values()) / count for b in range(BLOCKS)
    }  # fmt: skip
    assert record["why"]["scores"] == pytest.approx(pooled, rel=1e-12)
    probes = record["probes"]
    assert (probes["num_answers"], probes["num_examples"], probes["failures"]) == (4, count, [])
    for way in ("down", "up"):
        crossed = sum(len(d) for (_, direction), d in world.payloads.items() if direction == f"probe-{way}")
        assert probes["bytes"][f"{way}link"]["total"] == crossed
        gained = world.state.totals[f"{way}link"]["total"] - before[f"{way}link"]["total"]
        assert gained == crossed + record["bytes"][f"{way}link"]["total"]
    seconds = probes["predicted_s"] + record["predicted"]["round_s"]
    assert world.state.totals["predicted_s"] - before["predicted_s"] == pytest.approx(seconds)
    assert probes["predicted_s"] > 0


def test_a_probe_sends_the_whole_adapter_down_and_one_number_per_block_up(lab: Any) -> None:
    """An answer is short, whatever the model or the number of examples: no tensor and no example goes up."""
    sizes = {}
    for width in (5, 200):
        world = lab.world(asking(lab), sizes=SIZES, num_blocks=BLOCKS, width=width, rank=2)
        world.round()
        world.round()
        for client in SIZES:
            task, frame = unpack_task(world.payloads[client, "probe-down"])
            assert (task.job, task.ranks) == ("fisher", {})
            assert task.sent == [*map(str, range(BLOCKS)), "head"]
            assert len(frame.payload.values) == 4 * world.setup.layout.num_values
            reply = world.payloads[client, "probe-up"]
            sections = frame_sections(reply)
            assert (sections.values, sections.side) == (0, 0)
            header = unpack_frame(reply, REPLY, where="test").header
            assert set(header) == {"client", "server_round", "num_examples", "numbers"}
            assert set(header["numbers"]) == {f"fisher.{b}" for b in range(BLOCKS)}
            sizes[width] = max(sizes.get(width, 0), len(reply))
    assert sizes[5] <= 80 + 60 + 40 * BLOCKS  # prelude, ids and counts, one number of at most 40 characters per block
    assert abs(sizes[200] - sizes[5]) < 3 * BLOCKS


@pytest.mark.parametrize("how", ["raise", "nan", "damage"])
def test_a_client_that_cannot_answer_is_data(lab: Any, how: str) -> None:
    habits, damage = ({}, {"b"}) if how == "damage" else ({"b": how}, set())
    world = fisher_world(lab)
    for _ in range(2):
        world.round()
    world.trainer.habits, world.line.damage = habits, damage
    record, clients = world.round()
    assert set(record["why"]["answers"]) == {"a", "c", "d"}
    (failure,) = record["probes"]["failures"]
    assert (failure["client"], failure["reason"]) == ("b", "bad reply" if how == "damage" else "exception")
    assert record["probes"]["num_answers"] == 3
    assert clients["b"]["status"] == "failed"  # it fails in training, too
    assert world.state.totals["num_client_failures"] == 2
    crossed = sum(len(d) for (_, direction), d in world.payloads.items() if direction == "probe-up")
    assert record["probes"]["bytes"]["uplink"]["total"] == crossed


@dataclass
class Liar:
    """An engine that answers probes of one client with a header of its own."""

    inner: Any
    header: dict[str, Any]
    asked: list[str] = field(default_factory=list)

    def run(self, orders: Any) -> Iterator[tuple[str, Any]]:
        jobs = {}

        def watched(order: Order) -> Bytes:
            task = order.pack()
            jobs[order.client] = peek_header(task)["job"]
            return task

        for client, answer in self.inner.run([replace(o, pack=partial(watched, o)) for o in orders]):
            if client == "b" and jobs[client] == "fisher":
                answer = pack_frame(REPLY, "", self.header, Payload())
            yield client, answer


GOOD = {"client": "b", "server_round": 3, "num_examples": 8, "numbers": {f"fisher.{b}": 0.5 for b in range(BLOCKS)}}


@pytest.mark.parametrize(
    "change",
    [
        {"client": "a"},
        {"server_round": 2},
        {"num_examples": 0},
        {"num_examples": 9},
        {"num_examples": 7},
        {"num_examples": 1 << 40},
        {"numbers": {}},
        {"numbers": GOOD["numbers"] | {"fisher.9": 1.0}},
        {"numbers": GOOD["numbers"] | {"fisher.0": -1.0}},
        {"numbers": GOOD["numbers"] | {"fisher.head": 1.0}},
        {"numbers": GOOD["numbers"] | {"example": 1.0}},
        {"numbers": {f"fisher.{'9' * 5000}": 1.0}},
        {"numbers": GOOD["numbers"] | {"fisher.٣": 1.0}},
        {"numbers": {"fisher.0": 1.0, "fisher.00": 1.0, "fisher.1": 1.0, "fisher.2": 1.0, "fisher.3": 1.0}},
        {"secret": 1},
    ],
    ids=lambda change: str(change)[:40],
)
def test_an_answer_that_was_not_asked_for_is_a_bad_reply(lab: Any, change: dict[str, Any]) -> None:
    world = fisher_world(lab)
    for _ in range(2):
        world.round()
    world.line = Liar(world.line, GOOD | change)
    record, clients = world.round()
    (failure,) = record["probes"]["failures"]
    assert (failure["client"], failure["reason"]) == ("b", "bad reply")
    assert set(record["why"]["answers"]) == {"a", "c", "d"}
    assert clients["b"]["status"] == "ok"


def test_without_an_answer_the_chances_stay_and_the_record_says_so(lab: Any) -> None:
    world = fisher_world(lab)
    for _ in range(4):
        record, _ = world.round()
    before = record["why"]["scores"]
    fisher, world.trainer.fisher = world.trainer.fisher, lambda task, layouts, tensors: 1 / 0
    record, _ = world.round()
    assert record["why"]["scores"] == before
    assert "nothing to score by" in record["why"]["note"]
    assert (record["probes"]["num_answers"], len(record["probes"]["failures"])) == (0, 4)
    assert record["num_replies"] == 4
    world.trainer.fisher = fisher
    world.round()
    record, _ = world.round()
    assert record["why"]["scores"] != before


def test_examples_of_the_server_cost_no_bytes_and_are_named_in_the_record(lab: Any) -> None:
    asked = []

    def probe(state: Any, options: Any) -> dict[str, Any]:
        asked.append((state.server_round, options["source"]))
        return {"sums": {str(b): float(b + 1) for b in range(BLOCKS)}, "count": 2}

    options = {"sizes": SIZES, "num_blocks": BLOCKS, "trained_before": False}
    world = lab.world(asking(lab, source="public"), server_probe=probe, **options)
    for _ in range(3):
        record, _ = world.round()
    assert asked == [(2, "public")]
    assert record["probes"]["source"] == "public"
    assert record["probes"]["bytes"]["uplink"]["total"] == record["probes"]["bytes"]["downlink"]["total"] == 0
    assert not answers_of(world)
    assert record["why"]["scores"] == {str(b): (b + 1) / 2 for b in range(BLOCKS)}
    without = lab.world(asking(lab, source="public"), **options)
    without.round()
    without.round()
    with pytest.raises(ConfigError, match="public"):
        without.round()


def test_frozen_factors_come_from_gradients_that_are_asked_for_once(lab: Any) -> None:
    """Fed-SB: r·(in + out) numbers per map go up once, and the frames down to everybody once, whoever is drawn when."""
    options = {"sizes": SIZES, "num_blocks": BLOCKS, "rank": 2, "trained_before": False, "clients_per_round": 2}
    world = lab.world(lab.method("fed_sb"), "square", **options)
    pairs = BLOCKS * 2 * ((5 + 7) + (8 + 5))  # maps of 7 × 5 and 5 × 8
    received = set()
    for server_round in range(1, 7):
        record, clients = world.round()
        assert ("probes" in record) == (server_round == 1)
        if server_round == 1:
            assert record["probes"]["kind"] == "gradient"
            assert record["probes"]["bytes"]["uplink"]["values"] == 2 * 4 * pairs
            assert record["why"]["answers"] == {c: SIZES[c] for c in record["cohort"]}
        assert world.state.base.number == 1
        for client in clients:
            task, frame = unpack_task(world.payloads[client, "down"])
            assert [number for number, _ in task.merges] == ([] if client in received else [1])
            own = 4 * task.layouts(world.setup.layout).down.num_values
            assert len(frame.payload.values) == own + (0 if client in received else 4 * pairs)
            received.add(client)
    frames = world.state.base.merges[0].factors
    for b, a in frames.values():
        assert abs(b.T @ b - [[1, 0], [0, 1]]).max() < 1e-6
        assert abs(a @ a.T - [[1, 0], [0, 1]]).max() < 1e-6
    assert received == set(SIZES)


def test_without_any_gradient_there_is_no_run(lab: Any) -> None:
    habits = dict.fromkeys(SIZES, "raise")
    options = {"sizes": SIZES, "num_blocks": BLOCKS, "rank": 2, "trained_before": False}
    world = lab.world(lab.method("fed_sb"), "square", habits=habits, **options)
    with pytest.raises(RoundError, match="No client sent a gradient"):
        world.round()
