"""Runs that end before their time, go on, are extended, or are refused."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedstrata.client import LocalWork
from fedstrata.errors import RoundError, RunFolderError
from fedstrata.report.compare import compare_runs
from fedstrata.train.trainer import TorchTrainer

pytestmark = pytest.mark.engine

STATEFUL = {
    "codec": {"uplink": {"id": "error_feedback", "inner": "int4"}}, "rounds__downlink": "changed",
    "method": {"name": "fedra_freeze", "strata": 2},
}  # fmt: skip


def break_clients(monkeypatch: pytest.MonkeyPatch, broken: Callable[[int, str], bool]) -> None:
    """Training of some clients in some rounds ends in NaN."""
    train = TorchTrainer.train

    def wrapped(self: TorchTrainer, task: Any, layouts: Any, start: Any) -> LocalWork:
        work = train(self, task, layouts, start)
        if broken(task.server_round, task.client):
            work.tensors[layouts.trained.names[0]][:] = np.nan
        return work

    monkeypatch.setattr(TorchTrainer, "train", wrapped)


def interrupt(times: int, in_round: int) -> Callable[..., None]:
    """A callback of the watch that presses Ctrl-C."""

    def callback(record: Any) -> None:
        if record["server_round"] == in_round:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    return callback


def test_a_client_with_nan_is_dropped_and_named_and_the_round_goes_on(
    runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_clients(monkeypatch, lambda r, client: (r, client) == (1, "client-03"))
    folder = runs("run")
    first, *others = runs.lines(folder, "rounds")
    (failure,) = first["failures"]
    assert (failure["client"], failure["server_round"], failure["reason"]) == ("client-03", 1, "exception")
    assert "holds NaN" in failure["detail"]
    assert "client client-03" in failure["detail"]
    assert first["num_replies"] == 2
    assert all(r["num_replies"] == 3 and not r["failures"] for r in others)
    assert runs.read(folder, "summary")["num_client_failures"] == 1
    (line,) = [c for c in runs.lines(folder, "clients") if c["status"] == "failed"]
    assert line["client"] == "client-03"
    assert line["bytes"]["uplink"]["total"] == 0 < line["bytes"]["downlink"]["total"]


def test_too_few_replies_stop_the_run_and_keep_the_rounds_before(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = STATEFUL | {"rounds__min_replies": 2}
    whole = runs("whole", **changes)
    with monkeypatch.context() as patch:
        break_clients(patch, lambda r, client: r == 2)
        with pytest.raises(RoundError) as caught:
            runs("run", **changes)
    text = str(caught.value)
    assert "Round 2 has 0 good replies of 3" in text
    assert "at least 2 (rounds.min_replies)" in text
    assert "NaN" in text
    folder = runs.world / "run"
    record = runs.read(folder, "run")
    assert record["status"] == "failed"
    assert "Round 2" in record["measured"]["error"]
    assert not (folder / "summary.json").exists()
    assert [r["server_round"] for r in runs.lines(folder, "rounds")] == [1]
    runs("run", **changes)
    assert compare_runs(whole, folder) == []
    assert "error" not in runs.read(folder, "run")["measured"]


def test_ctrl_c_once_ends_after_the_round_and_the_same_command_goes_on(runs: Any) -> None:
    whole = runs("whole", rounds__count=5, **STATEFUL)
    before, told = signal.getsignal(signal.SIGINT), []
    watch = runs.watch(client_done=interrupt(1, in_round=2), interrupted=lambda: told.append("interrupted"))
    # three clients per round, one key press each: only the first counts, so press in one of them
    presses = iter([True])

    def once(record: Any) -> None:
        if record["server_round"] == 2 and next(presses, False):
            os.kill(os.getpid(), signal.SIGINT)

    watch.client_done = once
    folder = runs("run", watch=watch, rounds__count=5, **STATEFUL)
    assert told == ["interrupted"]
    assert signal.getsignal(signal.SIGINT) is before
    summary, record = runs.read(folder, "summary"), runs.read(folder, "run")
    assert (summary["status"], summary["stop_reason"], summary["num_rounds"]) == ("stopped early", "interrupted", 2)
    assert (record["status"], record["stop_reason"]) == ("stopped early", "interrupted")
    assert 0 <= summary["metrics"]["test"]["accuracy"] <= 1
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    runs("run", rounds__count=5, **STATEFUL)
    assert compare_runs(whole, folder) == []
    summary = runs.read(folder, "summary")
    assert (summary["status"], summary["num_rounds"], summary["num_test_reads"]) == ("success", 5, 2)


def test_ctrl_c_in_the_last_round_changes_nothing(runs: Any) -> None:
    whole = runs("whole", rounds__count=2)
    folder = runs("run", watch=runs.watch(round_done=interrupt(1, in_round=2)), rounds__count=2)
    assert runs.read(folder, "summary")["status"] == "success"
    assert compare_runs(whole, folder) == []


@pytest.mark.parametrize("callback", ["client_done", "round_done", "finishing"])
def test_ctrl_c_twice_ends_at_once_and_loses_only_the_round_at_hand(runs: Any, callback: str) -> None:
    whole = runs("whole", **STATEFUL)
    press = interrupt(2, in_round=2)
    watch = runs.watch(**{callback: (lambda: press({"server_round": 2})) if callback == "finishing" else press})
    with pytest.raises(KeyboardInterrupt):
        runs("run", watch=watch, **STATEFUL)
    folder = runs.world / "run"
    assert runs.read(folder, "run")["status"] == "cancelled"
    assert not (folder / "summary.json").exists()
    runs("run", **STATEFUL)
    assert runs.read(folder, "run")["status"] == "success"
    assert compare_runs(whole, folder) == []


def test_patience_stops_after_so_many_evaluations_without_a_better_one(runs: Any) -> None:
    folder = runs("run", rounds={"count": 9, "patience": 2}, train__learning_rate=0.0)
    summary = runs.read(folder, "summary")  # nothing is learnt: round 1 is the best, rounds 2 and 3 are not better
    assert (summary["status"], summary["stop_reason"], summary["num_rounds"]) == ("stopped early", "patience", 3)
    assert summary["kept_round"] == 1
    warnings = {w for c in runs.lines(folder, "clients") for w in c["warnings"]}
    assert "block 0 was planned but did not change: the learning rate or its gradient is zero" in warnings


def test_a_target_stops_as_soon_as_it_is_reached_and_can_be_lifted(runs: Any) -> None:
    folder = runs("run", rounds__target=0.01)
    assert runs.read(folder, "summary")["stop_reason"] == "target"
    assert runs.read(folder, "summary")["num_rounds"] == 1
    runs("run", options={"extend": True})
    assert compare_runs(runs("whole"), folder) == []
    low = runs("low", eval__metric="loss", rounds__target=99.0)
    assert runs.read(low, "summary")["num_rounds"] == 1


def test_the_same_command_again_finds_the_run_finished(runs: Any) -> None:
    folder, told = runs("run"), []
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
    runs("run", watch=runs.watch(already_finished=told.append))
    runs("run", watch=runs.watch(already_finished=told.append), name="other")
    assert told == [folder, folder]
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.engine
def test_a_full_disk_is_said_and_nothing_is_lost(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up after so many writes and stays full, so that not even the failure can be noted."""
    fsync, synced = os.fsync, [0]

    def full_after(limit: int) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            synced[0] += 1
            if synced[0] > limit:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        synced[0] = 0
        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_after(10**9))
        whole = runs("whole", **STATEFUL)
    for after in np.linspace(0, synced[0] - 1, 8).astype(int).tolist():
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full_after(after))
            with pytest.raises(RunFolderError, match="No space left on device"):
                runs(f"run-{after}", **STATEFUL)
        folder = runs(f"run-{after}", **STATEFUL)
        assert compare_runs(whole, folder) == []


def test_no_client_that_can_evaluate_is_a_plain_error(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = TorchTrainer.evaluate

    def nothing(self: TorchTrainer, *args: Any) -> Any:
        return replace(evaluate(self, *args), num_examples=0, loss_sum=0.0, num_correct=0)

    monkeypatch.setattr(TorchTrainer, "evaluate", nothing)
    with pytest.raises(RoundError, match="No client could evaluate"):
        runs("run", eval__on="clients", data__client_validation_fraction=0.3)


def test_a_client_that_fails_to_evaluate_is_recorded_and_counted(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = TorchTrainer.evaluate

    def fails(self: TorchTrainer, task: Any, *args: Any) -> Any:
        if (task.client, task.server_round) == ("client-01", 2):
            raise ValueError("no data today")
        return evaluate(self, task, *args)

    monkeypatch.setattr(TorchTrainer, "evaluate", fails)
    folder = runs("run", eval__on="clients", data__client_validation_fraction=0.3)
    failures = [(f["client"], f["server_round"]) for r in runs.lines(folder, "rounds") for f in r["failures"]]
    assert failures == [("client-01", 2)]
    assert runs.read(folder, "summary")["num_client_failures"] == 1
