"""The records of a run folder, as the report reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.errors import RunFolderError
from fedstrata.record.files import read_json, read_lines

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
ROUNDS_FILE = "rounds.jsonl"
CLIENTS_FILE = "clients.jsonl"


def read_run(folder: Path) -> dict[str, Any]:
    """`run.json` of a run folder.

    Raises:
        RunFolderError: If the folder is not one, or the file is damaged.
    """
    if not (folder / RUN_FILE).is_file():
        raise RunFolderError(
            f"{folder} is not a run folder",
            expected=f"a folder with {RUN_FILE}",
            got="no such file" if folder.is_dir() else "no such folder",
            do="name a folder that `fedstrata run` wrote",
        )
    return read_json(folder / RUN_FILE)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """`summary.json`, or None before the end of the run."""
    path = folder / SUMMARY_FILE
    return read_json(path) if path.exists() else None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, without a last line that a kill cut; none if there is no such file.

    Raises:
        RunFolderError: If a line is damaged.
    """
    try:
        records = read_lines(path)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read", got=str(error)) from error
    if not all(isinstance(r, dict) for r in records):
        raise RunFolderError(f"{path} is damaged", expected="one JSON object per line")
    return records


def is_personal(run_record: Mapping[str, Any]) -> bool:
    """Whether clients end with models of their own, so that scores are means over clients."""
    alone = run_record["parts"]["topology"] == "alone"
    return bool(alone or run_record["spec"]["adapter"]["head"] == "local")


def num_blocks_trained(client_record: Mapping[str, Any]) -> int:
    """How many transformer blocks a client trained in one round; the head and the embeddings do not count."""
    return sum(key.isdigit() for key in client_record["trained"])
