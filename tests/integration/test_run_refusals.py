"""Which folders a run goes on in, which it refuses, and that a refusal changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.errors import DataError, FedstrataError, PlanError, RunFolderError
from fedstrata.report.compare import compare_runs


class StopError(Exception):
    """A display that dies."""


def dies_in_round(number: int) -> Callable[..., None]:
    def callback(record: Any) -> None:
        if record["server_round"] == number:
            raise StopError

    return callback


def test_a_longer_run_of_a_falling_learning_rate_is_another_run(runs: Any) -> None:
    folder = runs("run", train__schedule="cosine", rounds__count=2)
    with pytest.raises(RunFolderError, match=r"another experiment[\s\S]*rounds\.count: 2 -> 4"):
        runs("run", options={"extend": True}, train__schedule="cosine", rounds__count=4)
    assert runs.read(folder, "summary")["num_rounds"] == 2


HELLO = {"name": "fed_hello", "warm_rounds": 1}
WINDOWS = {"name": "fedadapter", "window": 2, "step": 4, "max_width": 12}


@pytest.mark.parametrize(
    ("method", "rounds", "differs", "way_out"),
    [
        (HELLO, (2, 16), '"hello" makes of it refresh: 1 -> 2', "`refresh` set to a number"),
        (WINDOWS, (3, 5), "last window ends in round: 3 -> 5", "a multiple of `window`"),
    ],
)
def test_a_longer_run_of_a_plan_that_counts_on_its_rounds_is_another_run(
    runs: Any, method: dict[str, Any], rounds: tuple[int, int], differs: str, way_out: str
) -> None:
    folder = runs("run", method=method, rounds__count=rounds[0])
    before = (folder / "run.json").read_bytes()
    with pytest.raises(RunFolderError) as caught:
        runs("run", options={"extend": True}, method=method, rounds__count=rounds[1])
    for part in ("another experiment", f"rounds.count: {rounds[0]} -> {rounds[1]}", differs, way_out, "--fresh"):
        assert part in str(caught.value)
    assert (folder / "run.json").read_bytes() == before
    assert runs.read(folder, "run")["decided_by_rounds"]


@pytest.mark.parametrize(("method", "rounds"), [(HELLO | {"refresh": 1}, (2, 16)), (HELLO, (2, 3)), (WINDOWS, (2, 4))])
def test_where_the_plan_makes_the_same_of_both_an_extended_run_is_the_planned_one(
    runs: Any, method: dict[str, Any], rounds: tuple[int, int]
) -> None:
    extended = runs("extended", method=method, rounds__count=rounds[0])
    runs("extended", options={"extend": True}, method=method, rounds__count=rounds[1])
    planned = runs("planned", method=method, rounds__count=rounds[1])
    assert compare_runs(planned, extended) == []


@pytest.mark.parametrize("extend", [False, True])
def test_another_experiment_is_refused_with_every_difference(runs: Any, extend: bool) -> None:
    folder = runs("run", rounds__count=1)
    before = (folder / "run.json").read_bytes()
    with pytest.raises(RunFolderError) as caught:
        runs("run", options={"extend": extend}, rounds__count=2, train__learning_rate=0.5, adapter__alpha=4)
    for part in ("adapter.alpha: 8.0 -> 4.0", "rounds.count: 1 -> 2", "train.learning_rate: 0.02 -> 0.5", "--fresh"):
        assert part in str(caught.value)
    assert (folder / "run.json").read_bytes() == before
    assert (folder / "summary.json").exists()


def test_an_extension_must_be_meant(runs: Any) -> None:
    runs("run", rounds__count=1)
    with pytest.raises(RunFolderError, match=r"rounds\.count: 1 -> 2[\s\S]*--resume"):
        runs("run", rounds__count=2)


def test_a_run_cannot_be_shortened(runs: Any) -> None:
    folder = runs("run")
    with pytest.raises(RunFolderError, match=r"finished 3 rounds already[\s\S]*rounds\.count of 3 or more"):
        runs("run", options={"extend": True}, rounds__count=2)
    assert runs.read(folder, "run")["spec"]["rounds"]["count"] == 3
    assert (folder / "summary.json").exists()


def test_an_extension_that_cannot_be_loaded_leaves_the_finished_run_alone(runs: Any) -> None:
    folder = runs("run", rounds__count=1)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    (runs.world / "tiny.jsonl").rename(runs.world / "away.jsonl")
    for options in ({"extend": True}, {"fresh": True}):
        with pytest.raises(FedstrataError, match=r"tiny\.jsonl"):
            runs("run", options=options, rounds__count=2)
        assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_other_data_under_the_same_name_is_refused(runs: Any) -> None:
    whole = runs("whole")
    with pytest.raises(StopError):
        runs("run", watch=runs.watch(round_done=dies_in_round(1)))
    data = runs.world / "tiny.jsonl"
    content = data.read_text()
    data.write_text(content.replace("dog", "fox"))
    with pytest.raises(RunFolderError, match=r"other data[\s\S]*data\.source"):
        runs("run")
    data.write_text(content)
    assert compare_runs(whole, runs("run")) == []


def test_another_model_under_the_same_name_is_refused(runs: Any) -> None:
    with pytest.raises(StopError):
        runs("run", watch=runs.watch(round_done=dies_in_round(1)))
    config = json.loads((runs.world / "tiny_bert.json").read_text())
    (runs.world / "tiny_bert.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(RunFolderError, match=r"another model[\s\S]*model\.identity"):
        runs("run")


@pytest.mark.parametrize("finished", [False, True])
def test_another_environment_is_refused_unless_it_is_allowed(runs: Any, finished: bool) -> None:
    whole = runs("whole")
    if finished:
        folder = runs("run", rounds__count=1)
    else:
        with pytest.raises(StopError):
            runs("run", watch=runs.watch(round_done=dies_in_round(1)))
        folder = runs.world / "run"
    record = runs.read(folder, "run")
    record["measured"]["environment"] |= {"torch": "0.4.1", "cpu": "NEON"}
    (folder / "run.json").write_text(json.dumps(record))
    options = {"extend": finished}
    with pytest.raises(RunFolderError) as caught:
        runs("run", options=options)
    assert "torch: '0.4.1' -> " in str(caught.value)
    assert "cpu: 'NEON' -> " in str(caught.value)
    assert "--other-environment" in str(caught.value)
    assert compare_runs(whole, runs("run", options=options | {"other_environment": True})) == []


def test_fresh_starts_anew(runs: Any) -> None:
    folder = runs("run", run__seed=1, options={"keep_payloads": True})
    runs("run", options={"fresh": True})
    assert compare_runs(runs("whole"), folder) == []
    assert not (folder / "payloads").exists()


def test_a_kill_while_an_old_run_is_deleted_leaves_a_run_folder(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runs("run", run__seed=1)
    unlink = Path.unlink

    def killed(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name == "rounds.jsonl":
            raise KeyboardInterrupt
        unlink(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            runs("run", options={"fresh": True})
    runs("run", options={"fresh": True})
    assert compare_runs(runs("whole"), folder) == []


def test_a_folder_that_holds_something_else_is_left_alone(runs: Any) -> None:
    (runs.world / "thesis").mkdir()
    (runs.world / "thesis" / "chapter.tex").write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(RunFolderError, match="holds something else"):
            runs("thesis", options={"fresh": fresh})
    assert [p.name for p in (runs.world / "thesis").iterdir()] == ["chapter.tex"]
    with pytest.raises(RunFolderError, match="is a file"):
        runs("tiny.jsonl")
    (runs.world / "theirs").mkdir()
    (runs.world / "theirs" / "run.json").write_text('{"project": "another program"}')
    with pytest.raises(RunFolderError, match=r"run\.json"):
        runs("theirs")


def test_two_processes_cannot_work_in_one_folder(runs: Any) -> None:
    with pytest.raises(StopError):
        runs("run", watch=runs.watch(round_done=dies_in_round(1)))
    lock = runs.world / "run" / ".lock"
    code = "lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('in', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys, filelock; {code}", str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "in\n"
        for fresh in (False, True):
            with pytest.raises(RunFolderError, match="Another process is at work"):
                runs("run", options={"fresh": fresh})
        other.stdin.write("\n")
        other.stdin.flush()
    assert runs.read(runs("run"), "summary")["status"] == "success"


def test_what_cannot_work_is_refused_before_anything_is_written(runs: Any) -> None:
    for changes, error in (
        ({"adapter__max_rank": 33}, PlanError),
        ({"simulation__devices": {"laptop-16gb": 500}}, DataError),
        ({"rounds__count": 0}, FedstrataError),
        ({"rounds__clients_per_round": 7}, FedstrataError),
        ({"method": {"name": "last_k", "k": 4}}, PlanError),
    ):
        with pytest.raises(error):
            runs("run", **changes)
        assert not (runs.world / "run" / "run.json").exists()
    with pytest.raises(FedstrataError, match="train anything"):
        runs("none", method={"name": "last_k", "k": 0}, adapter__head="frozen")
