"""`run.json` as it was stored, checked before anybody relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import ValidationError

from fedstrata.errors import RunFolderError
from fedstrata.experiment.mistakes import describe_mistake, shown
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.record.files import read_json

RUN_SCHEMA = 1
_RUN_KEYS: dict[str, type | UnionType] = {
    "schema_version": int, "name": str, "status": str, "method": str, "seed": int, "spec": dict, "parts": dict,
    "parts.topology": str, "model": dict, "model.num_blocks": int, "clients": list, "notes": list, "measured": dict,
    "spec.adapter.head": str, "spec.rounds.count": int, "spec.train.schedule": str, "spec.eval.metric": str,
}  # fmt: skip


def read_run_record(folder: Path) -> dict[str, Any]:
    """`run.json` of a run folder, with everything in it that reports and resuming need.

    Raises:
        RunFolderError: If the folder is not one, is damaged, or was written by another version.
    """
    path = folder / "run.json"
    require_run(folder)
    record = read_json(path)
    version = record.get("schema_version")
    if isinstance(version, int) and version != RUN_SCHEMA:
        raise RunFolderError(
            f"{path} was written by another version of Fedstrata", expected=f"schema version {RUN_SCHEMA}",
            got=f"{version}", do="read it with that version",
        )  # fmt: skip
    require_keys(record, _RUN_KEYS, str(path))
    try:
        ExperimentSpec.model_validate(record["spec"])
    except ValidationError as error:
        raise RunFolderError(
            f"{path} is damaged", got=f"under spec, {describe_mistake(error.errors()[0])}", do="start anew with --fresh"
        ) from error
    return record


def require_run(folder: Path) -> None:
    """Refuses what is no run folder.

    Raises:
        RunFolderError: If there is no `run.json`.
    """
    if not (folder / "run.json").is_file():
        raise RunFolderError(
            f"{folder} is not a run folder",
            expected="a folder with run.json",
            got="a folder without one" if folder.is_dir() else "a file" if folder.exists() else "no such folder",
            do="name a folder that `fedstrata run` wrote",
        )


def require_keys(record: Mapping[str, Any], keys: Mapping[str, type | UnionType], where: str) -> None:
    """Refuses a stored record that lacks something.

    Args:
        record: What was read.
        keys: Type by dotted key.
        where: The file, and its line if it has several.

    Raises:
        RunFolderError: With the first key that is missing or holds something else.
    """
    for key, kind in keys.items():
        value: Any = record
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not isinstance(value, kind):
            raise RunFolderError(
                f"{where} is damaged",
                expected=f'a value under "{key}"',
                got="nothing" if value is None else shown(value),
                do="restore the file, or start anew with --fresh",
            )
