"""Running from the command line: results, exit codes, repeated runs, damaged folders, hostile names."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedstrata as fs
from fedstrata.cli import main, run_cli
from fedstrata.errors import RunFolderError


@pytest.fixture
def experiment(world: Path, tiny: Callable[..., dict[str, Any]]) -> Path:
    """The tiny experiment with two rounds of one step, in a file whose name needs quoting."""
    path = world / "my tiny ü.toml"
    values = tiny(rounds__count=2, train__local_steps=1)
    path.write_text(tomli_w.dumps(values), "utf-8")
    return path


@pytest.fixture
def finished(experiment: Path) -> Path:
    """A finished run folder."""
    assert run_cli(["run", experiment.name, "--out", "r"]) == 0
    return Path("r")


def spoken(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return shown.err


def test_json_is_all_that_a_script_sees(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["plan", experiment.name, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["clients"]) == 3
    assert run_cli(["run", experiment.name, "--json", "--out", "r"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["num_rounds"] == 2
    assert shown.err == ""
    assert run_cli(["report", "r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["r/report.svg", "r/report.png"]


def test_progress_goes_to_standard_error_and_the_result_to_standard_output(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", experiment.name, "--out", "r"]) == 0
    shown = capsys.readouterr()
    assert "round 1/2: training loss" in shown.err
    assert "round 2/2: training loss" in shown.err
    assert "Test accuracy" in shown.out
    assert "fedstrata report r\n" in shown.out


def test_paths_in_the_file_start_at_its_folder_wherever_one_stands(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run_cli(["run", f"../{experiment.name}"]) == 0
    assert [p.name for p in Path.cwd().iterdir()] == ["runs"]
    assert len(list(Path("runs").glob("tiny-*/summary.json"))) == 1


def test_the_run_is_named_after_a_file_with_any_name(experiment: Path, tiny: Callable[..., dict[str, Any]]) -> None:
    values = tiny(rounds__count=1, train__local_steps=1)
    values.pop("name")
    Path("Résumé ü.toml").write_text(tomli_w.dumps(values), "utf-8")
    assert run_cli(["run", "Résumé ü.toml"]) == 0
    assert [p.name.rsplit("-", 1)[0] for p in Path("runs").iterdir()] == ["R-sum"]


def test_the_same_command_again_says_that_it_is_finished(
    finished: Path, experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "summary.json").read_bytes()
    assert run_cli(["run", experiment.name, "--out", "r"]) == 0
    assert "already finished" in spoken(capsys)
    assert (finished / "summary.json").read_bytes() == before


def test_another_spec_in_the_same_folder_is_refused_with_the_difference(
    finished: Path, experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", experiment.name, "--out", "r", "--set", "run.seed=4"]) == 2
    assert "run.seed: 0 -> 4" in spoken(capsys)


def test_diff_says_equal_or_what_differs_in_its_exit_code(
    finished: Path, experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", experiment.name, "--out", "same"]) == 0
    assert run_cli(["run", experiment.name, "--out", "other", "--set", "run.seed=1"]) == 0
    capsys.readouterr()
    assert run_cli(["diff", "r", "same"]) == 0
    assert run_cli(["diff", "r", "other"]) == 1
    assert "run.json: seed: 0 != 1" in capsys.readouterr().out
    assert run_cli(["diff", "r", "other", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False


def without(*keys: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        record = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps({k: v for k, v in record.items() if k not in keys}))

    return damage


def holding(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("run.json", holding(b"{"), "run.json cannot be read"),
        ("run.json", holding(b"[]"), "run.json is damaged"),
        ("run.json", holding(b"{}"), "run.json is damaged"),
        ("run.json", holding(b'{"schema_version": 99}'), "another version of Fedstrata"),
        ("run.json", without("spec"), 'a value under "spec"'),
        ("run.json", without("parts"), 'a value under "parts"'),
        ("run.json", without("clients"), 'a value under "clients"'),
        ("run.json", Path.unlink, "is not a run folder"),
        ("summary.json", holding(b"{"), "summary.json cannot be read"),
        ("summary.json", holding(b"{}"), "summary.json is damaged"),
        ("rounds.jsonl", holding(b"{{{\n{}\n"), "rounds.jsonl cannot be read"),
        ("rounds.jsonl", holding(b"{}\n{}\n"), "rounds.jsonl line 1 is damaged"),
        ("rounds.jsonl", holding(b""), "no finished round"),
        ("clients.jsonl", holding(b"1\n"), "clients.jsonl is damaged"),
        ("clients.jsonl", holding(b'{"client": "a"}\n'), "clients.jsonl line 1 is damaged"),
    ],
)
def test_a_damaged_record_is_named_by_report_and_by_python(
    finished: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None], words: str
) -> None:
    damage(finished / name)
    capsys.readouterr()
    assert run_cli(["report", "r"]) == 2
    assert words in spoken(capsys)
    if words != "no finished round":
        with pytest.raises(RunFolderError, match=name.replace("run.json", "r")):
            fs.load("r").summary, fs.load("r").rounds, fs.load("r").clients


@pytest.mark.parametrize("name", ["run.json", "checkpoint/state.safetensors", "clients.jsonl"])
def test_a_damaged_folder_is_not_resumed_and_keeps_its_tensors(
    finished: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (finished / name).write_bytes(b"{}")
    before = {p: p.read_bytes() for p in finished.rglob("*.safetensors")}
    assert len(before) == 4, "checkpoint, best, last, adapter"
    capsys.readouterr()
    assert run_cli(["run", "--resume", "r", "--set", "rounds.count=3"]) == 2
    assert Path(name).name in spoken(capsys)
    assert {p: p.read_bytes() for p in finished.rglob("*.safetensors")} == before


def test_names_that_look_like_markup_are_shown_as_they_are(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a[red]b[").mkdir()
    shutil.copy("tiny.jsonl", "a[red]b[/x].jsonl")
    overrides = ["--set", "data.source=a[red]b[/x].jsonl"]
    assert run_cli(["run", experiment.name, "--out", "r[bold]", *overrides]) == 0
    assert "reading a[red]b[/x].jsonl" in spoken(capsys)
    assert run_cli(["run", experiment.name, "--out", "r[bold]", *overrides]) == 0
    assert "r[bold] is already finished" in spoken(capsys)


def test_hostile_client_ids_stay_below_the_run_folder(
    experiment: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owners = ["../../up", "..", "/etc/x", "CON", "[bold]", "x" * 400]
    lines = [json.loads(line) for line in Path("tiny.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(line | {"client": owners[i % 6]}) + "\n" for i, line in enumerate(lines))
    Path("evil.jsonl").write_text(text)
    before = {p.name for p in world.parent.iterdir()} | {p.name for p in world.iterdir()}
    overrides = ["--set", "data.source=evil.jsonl", "--set", "simulation.partition={kind='natural'}"]
    assert run_cli(["run", experiment.name, "--out", "r", "--keep-payloads", *overrides]) == 0
    assert {p.name for p in world.parent.iterdir()} | {p.name for p in world.iterdir()} == before | {"r"}
    ids = [c["client"] for c in json.loads((Path("r") / "run.json").read_text("utf-8"))["clients"]]
    assert len(set(ids)) == 6
    assert all(len(c) <= 100 and "/" not in c and not c.startswith(".") for c in ids)


def test_cut_emoji_in_json_are_replaced_and_counted(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in Path("tiny.jsonl").read_text().splitlines()]
    lines[4]["text"] += " \ud83d"
    Path("cut.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_cli(["run", experiment.name, "--out", "r", "--set", "data.source=cut.jsonl"]) == 0
    assert "1 cell with half a character" in spoken(capsys)


def test_long_texts_are_cut_counted_and_said(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["plan", experiment.name, "--set", "model.max_length=1000000000"]) == 0
    assert "reads at most 64 tokens, so max_length 1000000000 became 64" in spoken(capsys)
    assert run_cli(["plan", experiment.name, "--set", "model.max_length=8"]) == 0
    assert "longer than 8 tokens: cut" in spoken(capsys)


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.batch_size=1000000000",),
        ("run.seed=18446744073709551617",),
        ("simulation.devices={laptop-16gb=1}", "rounds.clients_per_round=1"),
        ("simulation.devices={laptop-16gb=115}",),
        ("simulation.partition.alpha=1e-300",),
    ],
)
def test_extreme_but_possible_experiments_run(experiment: Path, overrides: tuple[str, ...]) -> None:
    flags = [word for text in ("rounds.count=1", *overrides) for word in ("--set", text)]
    assert run_cli(["run", experiment.name, "--out", "r", *flags]) == 0
    assert fs.load("r").summary["num_rounds"] == 1


def test_a_terminal_without_unicode_gets_a_readable_plan(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    monkeypatch.setattr(sys, "argv", ["fedstrata", "plan", experiment.name])
    with pytest.raises(SystemExit) as end:
        main()
    sys.stdout.flush()
    assert end.value.code == 0
    assert b"### 3/3" in raw.getvalue()
    assert b"blocks 0?2" in raw.getvalue()
