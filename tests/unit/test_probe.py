"""A planner's question: who is asked, with which task, what its answer costs, and which answers count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fedstrata.codec import Float32
from fedstrata.core.shape import ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import HEAD, TensorSpec
from fedstrata.core.wire import REPLY, Payload, frame_sections, pack_frame
from fedstrata.device.cost import predict_client_seconds
from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.errors import ConfigError
from fedstrata.message import Task, unpack_task
from fedstrata.method import METHODS
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.failure import ClientFailure
from fedstrata.server.orders import Answer, Order
from fedstrata.server.probe import ask
from fedstrata.server.setup import RoundSetup

HEAD_SPEC = TensorSpec("classifier.bias", (3,), HEAD)
TARGETS = tuple(TargetShape(f"layers.{b}.q", b, 4, 5) for b in range(2))
SHAPE = ModelShape("Small", 2, 4, 16, TARGETS, (HEAD_SPEC,), (HEAD_SPEC,), 400)
LAYOUT = global_layout(SHAPE, "lora", {0: 2, 1: 2, HEAD: 1})
BOX = DeviceProfile("box", 1 << 30, 1e6, 1e3, 1e3)
FLEET = Fleet(tuple(Client(c, BOX, 5) for c in "abc"))
TRAIN = {"learning_rate": 0.1, "schedule": "constant", "batch_size": 4, "local_steps": 2, "local_epochs": None}


@dataclass
class Script:
    """An engine that answers from a script and keeps what it was asked."""

    answers: dict[str, dict[str, Any] | ClientFailure | bytes]
    tasks: dict[str, Task] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    num_values: dict[str, int] = field(default_factory=dict)

    def run(self, orders: Sequence[Order]) -> Iterator[tuple[str, Answer]]:
        for order in orders:
            client = order.client
            task, frame = unpack_task(order.pack())
            self.tasks[client], self.accepted[client] = task, order.accepted_round
            self.num_values[client] = len(frame.payload.values) // 4
            answer = self.answers[client]
            yield client, pack_frame(REPLY, "", answer, Payload()) if isinstance(answer, dict) else answer


def answer(client: str, count: int, *sums: float, server_round: int = 3) -> dict[str, Any]:
    numbers = {f"fisher.{b}": x for b, x in enumerate(sums)}
    return {"client": client, "server_round": server_round, "num_examples": count, "numbers": numbers}


def setup_of(name: str = "fed_hello", **options: Any) -> RoundSetup:
    method = METHODS.build(name, {"warm_rounds": 2, "refresh": 3} | options if name == "fed_hello" else options)
    return RoundSetup(
        method=method, shape=SHAPE, fleet=FLEET, layout=LAYOUT, scaling=dict.fromkeys(LAYOUT.targets, 2.0), seed=7,
        num_rounds=9, clients_per_round=None, min_replies=1, train=TRAIN, max_length=8, downlink=Float32(),
    )  # fmt: skip


def state_of(setup: RoundSetup, server_round: int = 2, **changes: Any) -> ServerState:
    planner = setup.method.planner.init(SHAPE, FLEET)
    return ServerState(LAYOUT.zeros(), server_round, {"0": 1, "1": 0, "head": 2}, planner=planner, **changes)


GOOD = {"a": answer("a", 4, 1.0, 2.0), "b": answer("b", 1, 0.0, 3.0), "c": answer("c", 2, 0.5, 0.25)}


def test_only_a_planner_that_asks_asks_and_only_when_it_is_due() -> None:
    silent = Script({})
    assert ask(setup_of("fedavg"), state_of(setup_of("fedavg")), silent).record is None
    setup = setup_of()
    due = []
    for server_round in range(1, 10):
        answers = {c: a | {"server_round": server_round} for c, a in GOOD.items()}
        asked = ask(setup, state_of(setup, server_round - 1), Script(answers))
        due += [server_round] if asked.record else []
    assert due == [3, 6, 9]  # T_warm + 1, then every T_FIM rounds
    assert silent.tasks == {}


def test_the_cohort_gets_the_whole_adapter_and_trains_nothing() -> None:
    setup, engine = setup_of(), Script(GOOD)
    ask(setup, state_of(setup, accepted={"b": 2}), engine)
    assert list(engine.tasks) == ["a", "b", "c"]
    assert engine.accepted == {"a": 0, "b": 2, "c": 0}
    for task in engine.tasks.values():
        assert (task.job, task.ranks, task.server_round, task.keep_downlink) == ("fisher", {}, 3, False)
        assert task.sent == ["0", "1", "head"]  # also block 1, which nobody has trained yet
        assert task.options["strata"] == [0, 1]
        assert task.layouts(LAYOUT).down == LAYOUT
    assert set(engine.num_values.values()) == {LAYOUT.num_values}


def test_answers_are_kept_by_block_and_cost_bytes_and_seconds() -> None:
    setup, engine, kept = setup_of(), Script(GOOD), {}
    asked = ask(setup, state_of(setup), engine, lambda r, c, way, data: kept.setdefault(way, {}).update({c: data}))
    assert asked.answers == {
        "a": {"sums": {"0": 1.0, "1": 2.0}, "count": 4},
        "b": {"sums": {"0": 0.0, "1": 3.0}, "count": 1},
        "c": {"sums": {"0": 0.5, "1": 0.25}, "count": 2},
    }
    record = asked.record
    assert (record["kind"], record["num_answers"], record["num_examples"]) == ("fisher", 3, 7)
    for way in ("down", "up"):
        sections = [frame_sections(data).to_json() for data in kept[f"probe-{way}"].values()]
        for key, total in record["bytes"][f"{way}link"].items():
            assert total == sum(s[key] for s in sections)
    assert record["bytes"]["uplink"]["values"] == 0
    expected = max(
        predict_client_seconds(
            BOX, SHAPE, setup.server_ranks, 8, GOOD[c]["num_examples"], len(kept["probe-down"][c]),
            len(kept["probe-up"][c]), adapter="lora",
        ).total_s
        for c in "abc"
    )  # fmt: skip
    assert record["predicted_s"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "bad",
    [
        answer("b", 1, 0.5),
        answer("b", 1, 0.5, -0.1),
        answer("b", 1, 0.5, 0.1, 0.2),
        answer("b", 0, 0.5, 0.1),
        answer("a", 1, 0.5, 0.1),
        answer("b", 1, 0.5, 0.1, server_round=2),
        answer("b", 1, 0.5, 0.1) | {"text": "an example"},
        answer("b", 1, 0.5, 0.1) | {"num_steps": -1},
        b"nonsense",
    ],
    ids=str,
)
def test_a_bad_answer_is_a_failure_whose_bytes_count(bad: Any) -> None:
    setup, kept = setup_of(), {}
    engine = Script(GOOD | {"b": bad})
    asked = ask(setup, state_of(setup), engine, lambda r, c, way, data: kept.setdefault(way, []).append(len(data)))
    assert set(asked.answers) == {"a", "c"}
    (failure,) = asked.record["failures"]
    assert (failure["client"], failure["server_round"], failure["reason"]) == ("b", 3, "bad reply")
    assert asked.record["bytes"]["uplink"]["total"] == sum(kept["probe-up"])
    assert asked.record["num_examples"] == 6


@pytest.mark.parametrize(
    ("held_out", "most", "refused"),
    [(4, None, ()), (9, 4, ()), (3, 4, ("a",)), (5, None, ("a",)), (4, 3, ("a",)), (None, None, ())],
)
def test_an_answer_speaks_of_as_many_examples_as_its_client_has_and_was_asked_for(
    held_out: int | None, most: int | None, refused: tuple[str, ...]
) -> None:
    """Client a answers with 4 examples; of b and c nothing is known."""
    setup = replace(setup_of(examples=most), examples_of={"client_heldout": {"a": held_out} if held_out else {}})
    asked = ask(setup, state_of(setup), Script(GOOD))
    failures = asked.record["failures"]
    assert tuple(f["client"] for f in failures) == refused
    assert set(asked.answers) == {*"abc"} - set(refused)
    for failure in failures:
        assert failure["reason"] == "bad reply"
        assert "another number of examples" in failure["detail"]


def test_a_client_that_fails_costs_its_download_and_nothing_else() -> None:
    setup, kept = setup_of(), {}
    lost = ClientFailure("b", 3, "exception", "gone")
    engine = Script(GOOD | {"b": lost})
    asked = ask(setup, state_of(setup), engine, lambda r, c, way, data: kept.setdefault(way, []).append(len(data)))
    assert set(asked.answers) == {"a", "c"}
    assert asked.record["failures"] == [lost.to_json()]
    assert asked.record["bytes"]["downlink"]["total"] == sum(kept["probe-down"])
    assert len(kept["probe-down"]) == 3
    assert len(kept["probe-up"]) == 2


def test_examples_of_the_server_are_asked_without_a_client() -> None:
    setup = replace(
        setup_of(source="public"), server_probe=lambda state, options: {"sums": {"0": 1.0, "1": 2.0}, "count": 3}
    )
    engine = Script({})
    asked = ask(setup, state_of(setup), engine)
    assert asked.answers == {"server": {"sums": {"0": 1.0, "1": 2.0}, "count": 3}}
    assert (asked.record["source"], asked.record["predicted_s"], engine.tasks) == ("public", 0.0, {})
    assert asked.record["bytes"]["downlink"]["total"] == asked.record["bytes"]["uplink"]["total"] == 0
    with pytest.raises(ConfigError, match='"public" examples of the server'):
        ask(replace(setup, server_probe=None), state_of(setup), engine)
