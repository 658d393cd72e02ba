"""A planner of one's own that raises or hands back the wrong thing: told with its place, before anything is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstrata.cli import run_cli
from fedstrata.experiment.plugins import KINDS
from fedstrata.method import METHODS

Capture = pytest.CaptureFixture[str]

PLANNER = """
import sys
from dataclasses import dataclass
from typing import ClassVar
from fedstrata.plan import AllStrata, Planner, RoundPlan, client_plan

@dataclass(frozen=True)
class Edge(Planner):
    id: ClassVar[str] = "edge"
    def init(self, shape, fleet):
        {init}
    def server_ranks(self, shape, max_rank):
        {server_ranks}
    def plan(self, state, context):
        {plan}
        plans = [client_plan(c, {{0: context.max_rank}}, context) for c in sorted(context.cohort)]
        return RoundPlan(context.server_round, tuple(plans)), state
    def observe(self, state, round_record):
        {observe}
"""
GOOD = {
    "init": "return {}",
    "server_ranks": "return AllStrata().server_ranks(shape, max_rank)",
    "plan": "pass",
    "observe": "return state",
}
PLANS = "tuple(client_plan(c, {{0: {rank}}}, context) for c in sorted(context.cohort))"


@pytest.fixture
def run(world: Path, tiny: Callable[..., dict[str, Any]]) -> Iterator[Callable[..., int]]:
    """Runs the tiny experiment with a planner of which some functions are replaced."""

    def go(*words: str, **functions: str) -> int:
        (world / "edge.py").write_text(PLANNER.format(**{**GOOD, **functions}))
        (world / "tiny.toml").write_text(tomli_w.dumps(tiny(plan={"id": "./edge.py:Edge"})))
        return run_cli(["run", "tiny.toml", "--out", "r", *words])

    yield go
    for name in [n for n in sys.modules if n.startswith("fedstrata_file_")]:
        for kind in KINDS.values():
            kind.registry.forget(name)
        METHODS.forget(name)
        del sys.modules[name]


@pytest.mark.parametrize(
    ("functions", "told"),
    [
        ({"init": "return 1 / 0"}, ["edge.py, line 11", "ZeroDivisionError"]),
        ({"init": "sys.exit(0)"}, ["edge.py, line 11", "SystemExit: 0"]),
        ({"init": "return None"}, ['state of "edge" cannot be stored', "edge.py:Edge, init", "None"]),
        ({"init": "return {1}"}, ["cannot be stored", "Object of type set"]),
        ({"init": "return {'a': float('nan')}"}, ["cannot be stored", "without NaN"]),
        ({"init": "return {'a': object()}"}, ["cannot be stored", "object"]),
        ({"server_ranks": "raise KeyError(3)"}, ["edge.py, line 13", "KeyError: 3"]),
        ({"server_ranks": "return None"}, ["gives the server no ranks", "got: None"]),
        ({"server_ranks": "return {0: 2.5}"}, ["gives the server no ranks", "2.5"]),
        ({"server_ranks": "return {0: -1}"}, ["gives the server no ranks", "-1"]),
        ({"plan": "return None"}, ["handed back no plan", "got: None"]),
        ({"plan": "return RoundPlan(1, (3,)), state"}, ["handed back no plan"]),
        ({"plan": f"return RoundPlan(1, {PLANS.format(rank=1.5)}), state"}, ["train block 0 at rank 1.5"]),
        ({"plan": f"return RoundPlan(1, {PLANS.format(rank=1)}, {{'x': object()}}), state"}, ["reasons cannot be"]),
        ({"plan": f"return RoundPlan(1, {PLANS.format(rank=1)}), [1]"}, ["cannot be stored", "Edge, plan", "[1]"]),
        ({"plan": "context.fleet.nonesuch"}, ["edge.py, line 15", "nonesuch"]),
        ({"plan": "return RoundPlan(1, None), state"}, ["takes part in", "edge.py:Edge", "check-part"]),
    ],
)
def test_a_planner_that_does_wrong_is_told_before_anything_is_written(
    run: Callable[..., int], world: Path, capsys: Capture, functions: dict[str, str], told: list[str]
) -> None:
    assert run(**functions) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert all(part in shown.err for part in told), shown.err
    assert not (world / "r").exists()


def test_what_goes_wrong_later_ends_the_run_and_keeps_its_rounds(
    run: Callable[..., int], world: Path, capsys: Capture
) -> None:
    assert run(plan="if context.server_round == 2: raise ValueError('\\ud800')") == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "edge.py, line 15" in error
    record = json.loads((world / "r" / "run.json").read_text())
    assert (record["status"], record["measured"]["error"]) == ("failed", "ValueError: ?")
    assert len((world / "r" / "rounds.jsonl").read_text().splitlines()) == 1
    assert run_cli(["report", "r", "--json"]) == 0
    capsys.readouterr()
    assert run() == 2  # mended, it is another planner
    error = capsys.readouterr().err
    assert "edge.py" in error or "sha256" in error
    assert "--fresh" in error
    assert run("--fresh") == 0


def test_an_observation_that_cannot_be_stored_is_told(run: Callable[..., int], capsys: Capture) -> None:
    assert run(observe="return {'a': {1, 2}}") == 2
    assert "Edge, observe" in capsys.readouterr().err


def test_a_client_whose_codec_asks_python_to_end_is_a_failed_client(
    run: Callable[..., int], world: Path, capsys: Capture
) -> None:
    code = """
import sys
from dataclasses import dataclass
from typing import ClassVar
from fedstrata.codec import Float32

@dataclass(frozen=True)
class Ends(Float32):
    id: ClassVar[str] = "ends"
    def encode(self, tensors, layout, residual, rng):
        sys.exit(0)
"""
    (world / "ends.py").write_text(code)
    assert run("--set", 'codec.uplink="./ends.py:Ends"') == 2
    error = capsys.readouterr().err
    assert "Round 1 has 0 good replies" in error
    assert "SystemExit: 0" in error
