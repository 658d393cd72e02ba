"""Commands that compare: methods with each other, runs bit for bit; and citations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.commands.app import Json, app, print_json


@app.command(rich_help_panel="Compare")
def methods(
    names: Annotated[list[str] | None, typer.Argument(help="Only these; all where left out.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="One table with every column, side by side.")] = False,
    json_: Json = False,
) -> None:
    """The methods by name, installed ones included: what clients train and send, and what each allows.

    Examples:
      fedstrata methods --json
      fedstrata methods hetlora flexlora --compare
    """
    from fedstrata.method.columns import entries, method_row
    from fedstrata.method.registry import METHODS
    from fedstrata.report.methods import print_comparison
    from fedstrata.report.terminal import print_methods

    chosen = [METHODS.find(name) for name in names or ()]
    problems = () if chosen else METHODS.load_installed()
    rows = [method_row(entry) for entry in chosen or entries()]
    if json_:
        print_json(rows)
    else:
        print_comparison(rows) if compare else print_methods(rows)
    for problem in problems:
        typer.secho(f"left out: {problem}", fg="yellow", err=True)


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
        print_json({"equal": not differences, "differences": differences})
    else:
        for line in differences:
            typer.echo(line)
        if not differences:
            typer.echo("equal: records, adapters, checkpoint and ledger are the same, byte for byte")
    if differences:
        raise typer.Exit(1)


@app.command(rich_help_panel="Compare")
def cite(
    target: Annotated[str, typer.Argument(metavar="RUN|METHOD", help="A run folder, or a method's name.")],
    json_: Json = False,
) -> None:
    """BibTeX of a method and of the parts that it builds on; of a run also of Fedstrata itself.

    Examples:
      fedstrata cite hetlora
      fedstrata cite runs/quickstart-1a2b3c4d > references.bib
    """
    from dataclasses import asdict

    from fedstrata.experiment.citations import cite as find_citations

    found, missing = find_citations(target)
    if json_:
        print_json([asdict(c) | {"bibtex": c.bibtex} for c in found])
    else:
        typer.echo("\n\n".join(c.bibtex for c in found))
    for name in missing:
        typer.secho(f"without a publication: {name}", fg="yellow", err=True)
