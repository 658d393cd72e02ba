"""What a newcomer reads first: help, hints, and a README whose commands exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from fedstrata import __version__
from fedstrata.cli import click_command, run_cli

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "quickstart", "init", "plan", "run", "report", "assets", "methods", "diff", "cite", "schema", "check-part",
    "new-method",
)  # fmt: skip
HEAVY = ("torch", "transformers", "peft", "datasets", "altair", "pandas")


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert run_cli([*command, "--help"]) == 0
    return capsys.readouterr().out


def written_commands() -> Iterator[tuple[str, str]]:
    """Every command line `fedstrata …` of the documentation, in code blocks and between backticks."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for match in re.finditer(r"(?:^|`)(?:\.venv/bin/)?fedstrata ([^`#\n]+)", path.read_text("utf-8"), re.MULTILINE):
            yield path.name, match[1].strip()


def parse(words: list[str]) -> None:
    """Raises click's usage error where a command or an option does not exist, or an argument is missing."""
    command = click_command()
    with command.make_context("fedstrata", list(words)) as context:
        name, sub, rest = command.resolve_command(context, list(words))
        sub.make_context(name, rest, parent=context)


def test_the_bare_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    run_cli([])
    shown = capsys.readouterr()
    assert "Usage: fedstrata" in shown.out + shown.err
    assert all(name in shown.out + shown.err for name in COMMANDS)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["--version"]) == 0
    assert capsys.readouterr().out == f"fedstrata {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_argument_has_help(name: str) -> None:
    parameters = click_command().commands[name].params
    assert [p.name for p in parameters if not getattr(p, "help", None)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_that_parses(capsys: pytest.CaptureFixture[str], name: str) -> None:
    examples = re.findall(r"fedstrata (\w+ ?[^\n>]*?)\s*(?:>|\n)", click_command().commands[name].help + "\n")
    assert examples, "no example"
    for example in examples:
        parse(shlex.split(example))
    assert "Example" in help_of(capsys, name)


def test_arguments_are_explained_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not needed with --resume" in help_of(capsys, "run")


@pytest.mark.parametrize(("typed", "meant"), [("rnu", "run"), ("shema", "schema")])
def test_a_mistyped_command_is_suggested_once(capsys: pytest.CaptureFixture[str], typed: str, meant: str) -> None:
    assert run_cli([typed]) == 2
    assert capsys.readouterr().err.count(f"Did you mean '{meant}'") == 1


@pytest.mark.parametrize("columns", ["40", "60", "80"])
def test_tables_keep_to_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for command in (["methods"], ["methods", "--compare"], ["methods", "hetlora", "flexlora", "--compare"]):
        assert run_cli(command) == 0
        assert max(map(cell_len, capsys.readouterr().out.splitlines())) <= int(columns)


def test_methods_and_schema_and_assets_print_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for name in ("methods", "schema", "assets"):
        assert run_cli([name, "--json"]) == 0
        shown = capsys.readouterr()
        found[name] = json.loads(shown.out)
        assert shown.err == ""
    assert {"fedavg", "central"} <= {row["name"] for row in found["methods"]}
    assert "rounds" in found["schema"]["properties"]
    assert {row["kind"] for row in found["assets"]} == {"model", "data"}


@pytest.mark.parametrize("code", ["import fedstrata", "from fedstrata.cli import run_cli; run_cli(['--help'])"])
def test_looking_around_loads_no_heavy_package(code: str) -> None:
    check = f"import sys\n{code}\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_stops_early_is_no_error() -> None:
    code = "from fedstrata.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_every_command_of_the_documentation_exists() -> None:
    found = list(written_commands())
    assert ("README.md", "init --data reviews.csv") in found
    for path, line in found:
        words = shlex.split(line.strip("…. "))
        try:
            parse(words) if len(words) > 1 else click_command().commands[words[0]]
        except Exception as error:
            raise AssertionError(f"{path}: fedstrata {line}: {error}") from error
