"""What a round does with too few replies, hostile replies and evaluations that fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fedstrata.core.wire import REPLY, Bytes, Payload, pack_frame
from fedstrata.errors import RoundError, RunFolderError
from fedstrata.message import unpack_task
from fedstrata.record.checkpoint import save_checkpoint
from fedstrata.server.evaluate import evaluate_on_clients
from fedstrata.server.orders import Answer, Order

SIZES = {"a": 30, "b": 7, "c": 12, "d": 1}


@dataclass
class Forger:
    """An engine that answers for some clients with a header of its own, and lets the others through."""

    inner: Any
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, orders: Sequence[Order]) -> Iterator[tuple[str, Answer]]:
        for client, answer in self.inner.run(orders):
            header = self.headers.get(client)
            yield client, answer if header is None else pack_frame(REPLY, "float32", header, Payload())


def test_too_few_replies_are_an_error_that_names_clients_and_reasons(lab: Any) -> None:
    habits = {"b": "raise", "d": "nan"}
    world = lab.world(lab.method("fedavg"), sizes=SIZES, habits=habits, min_replies=3)
    before = world.state
    with pytest.raises(RoundError) as caught:
        world.round()
    text = str(caught.value)
    assert "Round 4 has 2 good replies of 4" in text
    assert "at least 3 (rounds.min_replies)" in text
    assert "b: ValueError: the disk of this client is full" in text
    assert "d: " in text
    assert "NaN" in text
    assert world.state is before
    world.trainer.habits = {"d": "nan"}
    record, _ = world.round()
    assert (record["server_round"], record["num_replies"]) == (4, 3)


@pytest.mark.parametrize(
    "header",
    [
        {"measured": {"train_s": "fast"}},
        {"loss": 1e308, "num_steps": 2**40},
        {"num_steps": 10**400},
        {"num_steps": 2**63},
        {"numbers": {"x": 10**400}},
        {"trained": ["../../etc"]},
        {"ranks": {"9" * 5000: 1}},
        {"warnings": "w"},
        {"client": "a"},
    ],
)
def test_no_header_that_a_client_may_send_stops_the_server(lab: Any, tmp_path: Any, header: dict[str, Any]) -> None:
    """The clients train heads that stay local, so that an empty payload is what is planned."""
    world = lab.world(lab.method("local_only"), sizes=SIZES)
    good = {"client": "b", "server_round": 4, "num_examples": 7}
    inner = world.line
    world.line = Forger(inner, {"b": good | header})
    record, clients = world.round()
    assert [f["client"] for f in record["failures"]] == ["b"]
    assert (clients["b"]["failure"]["reason"], record["num_replies"]) == ("bad reply", 3)
    assert clients["b"]["bytes"]["uplink"]["total"] == len(world.payloads["b", "up"]) > 0
    save_checkpoint(tmp_path / "s", world.state, "h")


def test_the_server_goes_down_with_its_disk_and_not_with_a_client(lab: Any) -> None:
    world = lab.world(lab.method("fedavg"), sizes=SIZES, partial_downlink=True)

    def full(*args: Any) -> None:
        raise RunFolderError("Cannot write x", got="No space left on device")

    world.states.write = full
    with pytest.raises(RunFolderError, match="No space"):
        world.round()


def test_an_evaluation_sums_what_clients_answer_and_counts_the_bytes(lab: Any) -> None:
    world = lab.world(lab.method("fedra_freeze"), sizes=SIZES)
    world.round()
    kept: dict[str, list[int]] = {}
    scores = evaluate_on_clients(
        world.setup, world.state, world.line, "client_validation", SIZES,
        lambda r, client, direction, data: kept.setdefault(direction, []).append(len(data)),
    )  # fmt: skip
    assert scores.sums == {c: {"num_examples": 4, "loss_sum": 2.0, "num_correct": 3} for c in SIZES}
    assert scores.downlink.total == sum(kept["evaluation-down"])
    assert scores.uplink.total == sum(kept["evaluation-up"])
    assert {d: len(sizes) for d, sizes in kept.items()} == {"evaluation-down": 4, "evaluation-up": 4}


@pytest.mark.parametrize(
    "header",
    [
        {"client": "a", "server_round": 4, "num_examples": 4},
        {"client": "b", "server_round": 3, "num_examples": 4},
        {"client": "b", "server_round": 4, "num_examples": 4, "num_correct": 5},
        {"client": "b", "server_round": 4, "num_examples": 2**60},
        {"client": "b", "server_round": 4, "num_examples": 5, "num_correct": 5},
        {"client": "b", "server_round": 4, "num_examples": 3, "num_correct": 3},
        {"client": "b", "server_round": 4, "num_examples": -1},
        {"client": "b", "server_round": 4},
    ],
)
def test_a_wrong_answer_to_an_evaluation_is_a_failure_whose_bytes_count(lab: Any, header: dict[str, Any]) -> None:
    world = lab.world(lab.method("fedavg"), sizes=SIZES, examples_of={"test": dict.fromkeys(SIZES, 4)})
    world.round()
    honest = evaluate_on_clients(world.setup, world.state, world.line, "test", ("a", "c", "d"))
    line = Forger(world.line, {"b": header})
    sizes: dict[str, int] = {}
    scores = evaluate_on_clients(
        world.setup, world.state, line, "test", SIZES,
        lambda r, client, direction, data: sizes.update({f"{client} {direction}": len(data)}),
    )  # fmt: skip
    assert scores.sums == honest.sums
    assert [(f.client, f.server_round, f.reason) for f in scores.failures] == [("b", 4, "bad reply")]
    assert scores.uplink.total == honest.uplink.total + sizes["b evaluation-up"]


def test_an_evaluation_sends_the_whole_model_and_trains_nothing(lab: Any) -> None:
    world = lab.world(lab.method("last_k"), sizes=SIZES, head="local", partial_downlink=True)
    world.round()
    tasks: dict[str, Bytes] = {}
    evaluate_on_clients(
        world.setup, world.state, world.line, "client_validation", ["c"],
        lambda r, client, direction, data: tasks.update({direction: data}),
    )  # fmt: skip
    task = unpack_task(tasks["evaluation-down"])[0]
    assert (task.job, task.ranks, task.keep_downlink, task.accepted_round) == ("evaluate", {}, False, 4)
    assert task.sent == [str(b) for b in range(12)]
    assert set(task.reads) == {*task.sent, "head"}
