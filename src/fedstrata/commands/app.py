"""The application that all commands belong to, and what they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="fedstrata",
    help="Federated fine-tuning of language models over unequal clients, stratum by stratum.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts, nothing else.")]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder; runs/<name>-<hash> where left out.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete an earlier run in that folder first.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, e.g. rounds.count=20.")]
Keep = Annotated[bool, typer.Option("--keep-payloads", help="Store every payload as it went over the line.")]
Engine = Annotated[str, typer.Option("--engine", metavar="auto|local|pool", help="How clients run; results are equal.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Clients that train at the same time; as many as cores.")
]
OtherEnvironment = Annotated[
    bool, typer.Option("--other-environment", help="Resume although versions or the CPU differ.")
]


def print_json(value: Any) -> None:
    """Prints a value as JSON to standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def display(quiet: bool) -> Any:
    """The progress display, or a silent one."""
    from contextlib import nullcontext

    from rich.console import Console

    from fedstrata.experiment.progress import RunDisplay
    from fedstrata.experiment.watch import SilentWatch

    return nullcontext(SilentWatch()) if quiet else RunDisplay(Console(stderr=True))


def run_and_print(
    experiment: tuple[Any, Path],
    out: Path | None,
    fresh: bool,
    keep_payloads: bool,
    other_environment: bool,
    extend: bool,
    watch: Any,
    json_: bool,
    engine: str,
    workers: int | None,
) -> None:
    """Runs an experiment and prints its summary."""
    watch.step("starting PyTorch")
    from fedstrata.experiment.runner import RunOptions, run_experiment
    from fedstrata.report.stored import read_run, read_summary
    from fedstrata.report.terminal import print_summary

    options = RunOptions(out, fresh, keep_payloads, other_environment, extend, engine, workers)
    spec, base_dir = experiment
    folder = run_experiment(spec, base_dir, options, watch)
    summary = read_summary(folder.path) or {}
    if json_:
        print_json({"folder": str(folder.path), **summary})
    else:
        print_summary(folder.path, summary, read_run(folder.path))
