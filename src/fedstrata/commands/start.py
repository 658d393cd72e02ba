"""Commands for a first result."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedstrata.commands.app import (
    Engine,
    Fresh,
    Json,
    Keep,
    Out,
    Set,
    Workers,
    app,
    display,
    print_json,
    run_and_print,
)
from fedstrata.errors import ConfigError


@app.command(rich_help_panel="Start")
def quickstart(
    out: Out = None,
    fresh: Fresh = False,
    set_: Set = None,
    keep_payloads: Keep = False,
    engine: Engine = "auto",
    workers: Workers = None,
    json_: Json = False,
) -> None:
    """A first result: MiniLM sorts BBC News over 12 unequal clients (about a minute on two cores).

    Example: fedstrata quickstart
    """
    from fedstrata.experiment.quickstart import quickstart_experiment

    with display(json_) as watch:
        experiment = quickstart_experiment(watch, set_ or [])
        run_and_print(experiment, out, fresh, keep_payloads, False, False, watch, json_, engine, workers)


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
        print_json(result)
        return
    for line in result["reasons"]:
        typer.echo(f"· {line}")
    typer.echo(f"wrote {result['path']}")
    path = shlex.quote(result["path"])
    typer.echo(f"next: fedstrata plan {path}   then: fedstrata run {path}")


@app.command(rich_help_panel="Start")
def schema(json_: Json = True) -> None:
    """Prints the JSON schema of the experiment file, for editors.

    Example: fedstrata schema > fedstrata.schema.json
    """
    from fedstrata.experiment.load import json_schema

    print_json(json_schema())


def _pair(text: str) -> tuple[str, str]:
    role, _, name = (part.strip() for part in text.partition("="))
    if not role or not name:
        raise ConfigError("--column is not understood", expected="--column ROLE=NAME, e.g. label=stars", got=text)
    return role, name
