"""The command line: a thin skin over the Python API. The commands stand in `fedstrata.commands`."""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstrata import __version__
from fedstrata.commands import compare, extend, running, start
from fedstrata.commands.app import app, print_json
from fedstrata.errors import ConfigError, FedstrataError, RunFolderError

_INTERRUPTED = 130
_PANELS = (start, running, compare, extend)
"""Each registers its commands when it is imported; their order is that of the help page."""


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
        return _say_error(error, args)
    except OSError as error:
        if error.filename is None:  # no path that a user named
            raise
        what = f"A file or folder cannot be used: {error.strerror}"
        return _say_error(RunFolderError(what, where=f"{error.filename}"[:300]), args)
    except KeyboardInterrupt:
        _say_stopped(args)
        return _INTERRUPTED
    return 0


def _say_error(error: FedstrataError, args: Sequence[str]) -> int:
    """Prints an error, with `--json` also as JSON to standard output; returns the exit code."""
    if "--json" in args:
        print_json({"error": {"kind": type(error).__name__, "message": str(error)}})
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(str(error), err=True)
    return 2


def _check_names(args: Sequence[str]) -> None:
    """Refuses names that no record could hold: Python reads bytes that are no characters as half surrogate pairs."""
    if any("\0" in name for name in args):
        raise ConfigError("A name holds a null character", got=ascii(next(n for n in args if "\0" in n)))
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


if __name__ == "__main__":
    main()
