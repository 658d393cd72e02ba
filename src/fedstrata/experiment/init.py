"""`fedstrata init`: an experiment file for somebody's data, with what was guessed and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedstrata.data.guess import guess_experiment
from fedstrata.data.render import explain, render_experiment
from fedstrata.errors import ConfigError
from fedstrata.experiment.load import check_spec, read_toml_text, resolved
from fedstrata.experiment.quickstart import quickstart_path
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.record.files import atomic_write


def write_experiment(
    data: Path | None, out: Path | None, *, full: bool, force: bool, columns: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Writes an experiment file.

    Args:
        data: What to look at; None copies the quick start's experiment.
        out: The file to write; named after the data where None.
        full: Write every key with its default instead of the commented short form.
        force: Replace an existing file.
        columns: Columns by role that need no guess.

    Returns:
        `path`, and `reasons`: what was guessed and why.

    Raises:
        ConfigError: If the file exists.
        DataError: If the data cannot be used.
    """
    if data is None and columns:
        raise ConfigError("--column says what a column of the data holds", got="no --data")
    guess = guess_experiment(data, columns) if data is not None else None
    path = out or Path(f"{_stem(data) if data is not None else 'experiment'}.toml")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", expected="a file to write, e.g. --out reviews.toml")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists", do="choose another name with --out, or replace it with --force")
    if guess is None:
        text, reasons = quickstart_path().read_text(encoding="utf-8"), ["a copy of the quick start's experiment"]
    else:
        text, reasons = render_experiment(guess, folder=path.resolve().parent), explain(guess)
    spec = check_spec(read_toml_text(text, str(path)), where=str(path))
    if full:
        text = _every_key(spec)
    atomic_write(path, text.encode())
    return {"path": str(path), "reasons": reasons}


def _stem(data: Path) -> str:
    """The data's name without the ending of a file."""
    path = data.resolve()
    return (path.name if path.is_dir() else path.stem) or "experiment"


def _every_key(spec: ExperimentSpec) -> str:
    """All keys with their values; those whose default is "not set" or that exclude each other stand as comments."""
    values = resolved(spec)
    kind = spec.simulation.partition.kind
    used = {"dirichlet": ["alpha"], "quantity": ["alpha"], "shards": ["shards_per_client"], "natural": ["column"]}
    partition = values["simulation"]["partition"]
    for key in {"alpha", "shards_per_client", "column"} - set(used.get(kind, [])):
        partition.pop(key)
    if spec.adapter.kind == "full":
        for key in ("max_rank", "alpha", "scaling", "targets", "dropout"):
            values["adapter"].pop(key)
    unset: list[str] = []
    text = tomli_w.dumps(_without_none(values, "", unset))
    note = "".join(f"#   {key}\n" for key in unset)
    return f"# Every key of an experiment. Not set here, and not needed:\n{note}\n{text}"


def _without_none(table: dict[str, Any], prefix: str, unset: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in table.items():
        if value is None:
            unset.append(prefix + key)
        else:
            kept[key] = _without_none(value, f"{prefix}{key}.", unset) if isinstance(value, dict) else value
    return kept
