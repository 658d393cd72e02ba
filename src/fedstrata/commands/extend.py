"""Commands for parts and methods of your own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstrata.commands.app import Json, app, print_json
from fedstrata.errors import ConfigError


@app.command("check-part", rich_help_panel="Extend")
def check_part(
    target: Annotated[str, typer.Argument(help="FILE.py:NAME, the name of an installed one, or a built-in id.")],
    kind: Annotated[
        str | None, typer.Option("--kind", help="What it is, if several kinds have that name: codec, planner, …")
    ] = None,
    options: Annotated[str, typer.Option("--options", metavar="JSON", help="Its options, e.g. '{\"k\": 2}'.")] = "{}",
    trials: Annotated[int, typer.Option("--trials", min=1, help="Worlds per law; they grow from tiny ones.")] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Root of the random worlds.")] = 0,
    json_: Json = False,
) -> None:
    """Runs the whole battery of laws on a part or a method and prints counterexamples. Exit code 1 if one is broken.

    Examples:
      fedstrata check-part ./my_codec.py:MyCodec
      fedstrata check-part last_k --kind planner --options '{"k": 2}'
    """
    from fedstrata.check.battery import check
    from fedstrata.check.target import find_target
    from fedstrata.check.terminal import print_report

    report = check(find_target(target, kind=kind, options=_options(options)), trials=trials, seed=seed)
    print_json(report.to_json()) if json_ else print_report(report)
    if not report.holds:
        raise typer.Exit(1)


@app.command("new-method", rich_help_panel="Extend")
def new_method(
    name: Annotated[str, typer.Argument(help="The method's name: lower-case letters, digits and underscores.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder to write.")],
    json_: Json = False,
) -> None:
    """Writes a pip-installable folder with a method, a part of its own, a test that passes, and an experiment.

    Example: fedstrata new-method my_method my-method
    """
    from fedstrata.experiment.scaffold import write_method_package

    written = write_method_package(name, folder)
    if json_:
        print_json({"folder": str(folder), "files": [str(p) for p in written]})
        return
    for path in written:
        typer.echo(f"wrote {path}")
    where = shlex.quote(str(folder))
    typer.echo(f"next: pip install --no-deps -e {where}   then: pytest {where}   and: fedstrata methods {name}")


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError("--options is not JSON", expected="e.g. '{\"k\": 2}'", got=f"{text} ({error})") from error
    if not isinstance(options, dict):
        raise ConfigError("--options holds no options", expected="a JSON object, e.g. '{\"k\": 2}'", got=text)
    return options
