"""`fedstrata init`: an experiment file for somebody's data, with what was guessed and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from fedstrata.data.guess import guess_experiment
from fedstrata.data.render import render_experiment
from fedstrata.errors import ConfigError
from fedstrata.experiment.load import check_spec, read_toml_text, resolved
from fedstrata.experiment.quickstart import quickstart_path
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.record.files import atomic_write


def write_experiment(data: Path | None, out: Path | None, *, full: bool, force: bool) -> dict[str, Any]:
    """Writes an experiment file.

    Args:
        data: What to look at; None copies the quick start's experiment.
        out: The file to write; named after the data where None.
        full: Write every key with its default instead of the commented short form.
        force: Replace an existing file.

    Returns:
        `path`, and `reasons`: what was guessed and why.

    Raises:
        ConfigError: If the file exists.
        DataError: If the data cannot be used.
    """
    path = out or Path(f"{data.stem if data else 'experiment'}.toml")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists", do="choose another name with --out, or replace it with --force")
    reasons: list[str] = []
    if data is None:
        text = quickstart_path().read_text(encoding="utf-8")
    else:
        guess = guess_experiment(data)
        text = render_experiment(guess, folder=path.resolve().parent)
        reasons = [
            line.lstrip("# ") for line in text.splitlines() if line.startswith(("# Guessed", "# Read as", "# Note"))
        ]
    spec = check_spec(read_toml_text(text, str(path)), where=str(path))
    if full:
        text = _every_key(spec)
    atomic_write(path, text.encode())
    return {"path": str(path), "reasons": reasons}


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
