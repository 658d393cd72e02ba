"""A kill at any moment, and the same command again, end in the same bytes as a run that nobody disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from fedstrata.record.files import read_json
from fedstrata.report.compare import compare_runs

pytestmark = pytest.mark.engine
Order = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def order() -> Iterator[Order]:
    """Sends one order to a warm process and waits for the answer."""
    script = Path(__file__).parents[1] / "support" / "fork_runner.py"
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def send(**values: Any) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(values) + "\n")
        return dict(json.loads(process.stdout.readline()))

    yield send
    process.stdin.close()
    process.wait(timeout=60)


def write(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps(values))
    return str(path)


def test_thirty_random_kills_resume_to_the_identical_result(
    order: Order, world: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    values = tiny(codec={"uplink": {"id": "error_feedback", "inner": {"id": "int4"}}}, rounds__downlink="changed")
    experiment = write(world, values)
    whole = order(experiment=experiment, out=str(world / "whole"))
    assert whole["status"] == 0
    moments = np.random.default_rng(7).choice(np.arange(1, whole["operations"] + 1), 30, replace=False)
    for moment in moments:
        out = world / f"killed-{moment}"
        assert order(experiment=experiment, out=str(out), kill_at=int(moment))["status"] == -9
        assert order(experiment=experiment, out=str(out))["status"] == 0
        assert compare_runs(world / "whole", out) == []


def test_a_run_that_is_killed_again_and_again_still_arrives(
    order: Order, world: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    experiment = write(world, tiny())
    assert order(experiment=experiment, out=str(world / "whole"))["status"] == 0
    out, kill_at, statuses = world / "killed", 9, []
    while not statuses or statuses[-1] == -9:
        statuses.append(order(experiment=experiment, out=str(out), kill_at=kill_at)["status"])
        kill_at += 7
        assert len(statuses) < 60
    assert statuses[-1] == 0
    assert len(statuses) > 3
    assert compare_runs(world / "whole", out) == []


def test_six_rounds_and_fourteen_more_equal_twenty(
    order: Order, world: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    experiment = write(world, tiny(train__local_steps=1))
    assert order(experiment=experiment, out=str(world / "planned"), set={"rounds.count": 20})["status"] == 0
    assert order(experiment=experiment, out=str(world / "extended"), set={"rounds.count": 6})["status"] == 0
    assert (
        order(experiment=experiment, out=str(world / "extended"), set={"rounds.count": 20}, extend=True)["status"] == 0
    )
    assert compare_runs(world / "planned", world / "extended") == []
    reads = [read_json(world / name / "summary.json")["num_test_reads"] for name in ("planned", "extended")]
    assert reads == [1, 2]


def test_a_kill_while_a_run_is_extended_loses_nothing(
    order: Order, world: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    experiment = write(world, tiny())
    assert order(experiment=experiment, out=str(world / "planned"), set={"rounds.count": 5})["status"] == 0
    for moment in (1, 2, 3, 4, 5, 9, 14):
        out = world / f"extended-{moment}"
        assert order(experiment=experiment, out=str(out))["status"] == 0
        again = {"experiment": experiment, "out": str(out), "set": {"rounds.count": 5}, "extend": True}
        assert order(**again, kill_at=moment)["status"] == -9
        assert order(**again)["status"] == 0
        assert compare_runs(world / "planned", out) == []
