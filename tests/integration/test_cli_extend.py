"""The commands for parts and methods of one's own: check-part, new-method, cite and the comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomli_w

from fedstrata.cli import run_cli
from fedstrata.experiment.plugins import KINDS
from fedstrata.method import METHODS

Capture = pytest.CaptureFixture[str]

PLANNER = """
from dataclasses import dataclass
from typing import ClassVar
from fedstrata.plan import AllStrata, Planner, RoundPlan, client_plan

@dataclass(frozen=True)
class Edge(Planner):
    id: ClassVar[str] = "edge"
    count: int = 1
    def init(self, shape, fleet):
        return {}
    def server_ranks(self, shape, max_rank):
        return AllStrata().server_ranks(shape, max_rank)
    def plan(self, state, context):
        blocks = dict.fromkeys(range(self.count), context.max_rank)
        plans = [client_plan(c, blocks, context) for c in context.cohort]
        return RoundPlan(context.server_round, tuple(plans)), state
    def observe(self, state, round_record):
        return state
"""


@pytest.fixture(autouse=True)
def _forget_files() -> Iterator[None]:
    yield
    for name in [n for n in sys.modules if n.startswith("fedstrata_file_")]:
        for kind in KINDS.values():
            kind.registry.forget(name)
        METHODS.forget(name)
        del sys.modules[name]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edge.py").write_text(PLANNER)
    return tmp_path


def test_a_part_that_keeps_its_laws_ends_with_zero(capsys: Capture) -> None:
    assert run_cli(["check-part", "int8", "--trials", "4", "--options", '{"block": 5}']) == 0
    out = capsys.readouterr().out
    assert "codec int8" in out
    assert "0 broken" in out


def test_a_broken_law_ends_with_one_and_shows_the_smallest_world(here: Path, capsys: Capture) -> None:
    """The plans follow the cohort's order, which is not the order of client ids."""
    assert run_cli(["check-part", "./edge.py:Edge", "--trials", "6"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN    order" in out
    assert "counterexample to order" in out
    assert "world 0 of seed 0:" in out
    assert "the cohort in another order gave" in out
    assert "edge: " not in out


def test_options_and_seed_reach_the_part_and_json_has_everything(here: Path, capsys: Capture) -> None:
    words = ["check-part", "./edge.py:Edge", "--options", '{"count": 30}', "--trials", "3", "--seed", "7", "--json"]
    assert run_cli(words) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["seed"], report["holds"]) == ("planner", 7, False)
    (valid,) = [law for law in report["laws"] if law["law"] == "valid"]
    assert "cannot train block 12" in valid["text"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["krum"], "Several kinds of parts"),
        (["int9"], 'did you mean "int8"'),
        (["int8", "--options", "{"], "--options is not JSON"),
        (["int8", "--options", "[1]"], "holds no options"),
        (["int8", "--options", '{"blok": 1}'], 'did you mean "block"'),
        (["./nope.py:X"], "cannot be read"),
        (["last_k", "--kind", "planner", "--options", '{"k": 99}'], "No law of this planner could be tried"),
    ],
)
def test_what_cannot_be_checked_ends_with_two(words: list[str], told: str, capsys: Capture) -> None:
    assert run_cli(["check-part", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "My",
        "1x",
        "a-b",
        "class",
        "json",
        "fedavg",
        "numpy",
        "x",
        "a_",
        "peft",
        "yaml",
        "pip",
        "con",
        "conftest",
        "é",
        "",
    ],
)
def test_names_that_a_package_cannot_have_are_refused(here: Path, name: str, capsys: Capture) -> None:
    assert run_cli(["new-method", name, "there"]) == 2
    assert name in capsys.readouterr().err
    assert not (here / "there").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["new-method", "my_way", "x" * 400],
        ["new-method", "my_way", "a\0b"],
        ["new-method", "my_way", "edge.py/below"],
        ["report", "x" * 400],
        ["report", "a\0b"],
        ["cite", "x" * 5000],
        ["check-part", "~nobody-has-this-name/x.py:f"],
        ["check-part", "./edge.py"],
        ["methods", "./edge.py:Edge"],
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_a_path_that_cannot_be_one_is_told_and_nothing_is_written(
    here: Path, words: list[str], capsys: Capture
) -> None:
    assert run_cli(words) == 2
    shown = capsys.readouterr()
    assert "error: " in shown.err
    assert "Traceback" not in shown.err
    assert [p.name for p in here.iterdir()] == ["edge.py"]


def test_nothing_is_overwritten(here: Path, capsys: Capture) -> None:
    assert run_cli(["new-method", "my_way", "there", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert len(files) == 5
    before = {f: (here / f).read_bytes() for f in files}
    assert run_cli(["new-method", "another", "there"]) == 2
    assert "there is already there" in capsys.readouterr().err
    assert {f: (here / f).read_bytes() for f in files} == before
    assert not any(b"{{" in text for text in before.values())


def test_a_written_method_keeps_its_laws_from_its_file(here: Path, capsys: Capture) -> None:
    run_cli(["new-method", "my_way", "there"])
    assert run_cli(["check-part", "there/src/my_way/__init__.py:my_way", "--trials", "3"]) == 0
    assert "0 broken" in capsys.readouterr().out


def test_a_methods_bibtex_is_all_of_standard_output(capsys: Capture) -> None:
    assert run_cli(["cite", "hetlora"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("@inproceedings{cho2024hetlora,")
    assert shown.out.count("@") == 2
    assert shown.err == ""
    assert run_cli(["cite", "central", "--json"]) == 0
    shown = capsys.readouterr()
    assert [c["key"] for c in json.loads(shown.out)] == ["mcmahan2017communication"]
    assert "without a publication: central" in shown.err


def test_methods_are_compared_side_by_side(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run_cli(["methods", "hetlora", "fedit", "--compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (ranks,) = [line.split() for line in lines if line.startswith("unequal ranks  ") and "clients" not in line]
    assert ranks == ["unequal", "ranks", "yes", "no"]
    assert run_cli(["methods", "nonesuch"]) == 2


def call(*words: str | Path, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        [str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.engine
@pytest.mark.skipif(find_spec("hatchling") is None, reason="building needs hatchling here")
def test_a_new_package_is_built_installed_tested_and_found_by_name(
    tmp_path: Path, make_world: Callable[[Path], None], tiny: Callable[..., dict[str, object]]
) -> None:
    """In a fresh environment that sees the packages of this one, without the network."""
    package, env_dir = tmp_path / "my-way", tmp_path / "env"
    assert run_cli(["new-method", "my_way", str(package)]) == 0
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    call(sys.executable, "-m", "venv", "--without-pip", env_dir, cwd=tmp_path, env=env)
    python = env_dir / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    (site,) = env_dir.rglob("site-packages")
    here = [p for p in sys.path if p.endswith("site-packages")] + [str(Path(__file__).resolve().parents[2] / "src")]
    (site / "world.pth").write_text("\n".join(here) + "\n")
    words = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist", package]
    call(sys.executable, *words, cwd=tmp_path, env=env)
    (wheel,) = (tmp_path / "dist").glob("my_way-*.whl")
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=tmp_path, env=env)
    call(python, "-m", "pytest", "-q", "-p", "no:randomly", "-o", "pythonpath=", package, cwd=tmp_path, env=env)
    cli = [python, "-c", "from fedstrata.cli import main; main()"]
    rows = json.loads(call(*cli, "methods", "my_way", "--json", cwd=tmp_path, env=env))
    assert (rows[0]["name"], rows[0]["sends"]) == ("my_way", "what it trained")
    assert "my_way" in {row["name"] for row in json.loads(call(*cli, "methods", "--json", cwd=tmp_path, env=env))}
    assert "0 broken" in call(*cli, "check-part", "my_way_moving", "--trials", "4", cwd=tmp_path, env=env)
    world = tmp_path / "world"
    world.mkdir()
    make_world(world)
    (world / "tiny.toml").write_text(tomli_w.dumps(tiny(method={"name": "my_way", "share": 0.5}, rounds__count=1)))
    summary = json.loads(call(*cli, "run", "tiny.toml", "--out", "r", "--json", cwd=world, env=env))
    assert "metrics" in summary
    selection = json.loads((world / "r" / "rounds.jsonl").read_text().splitlines()[0])["selection"]
    assert selection["rule"] == "my_way_moving"
