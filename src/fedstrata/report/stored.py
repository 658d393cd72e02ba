"""The records of a run folder, as the report reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from fedstrata.errors import RunFolderError
from fedstrata.experiment.stored import read_run_record, require_keys, require_run
from fedstrata.record.files import read_json, read_lines

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
ROUNDS_FILE = "rounds.jsonl"
CLIENTS_FILE = "clients.jsonl"

_SUMMARY_KEYS = {
    "status": str, "method": str, "seed": int, "num_rounds": int, "kept": str, "kept_round": int,
    "metrics.test.accuracy": int | float, "metrics.base.accuracy": int | float, "metrics.validation": dict,
    "totals.uplink_bytes": int, "totals.downlink_bytes": int, "totals.predicted_s": int | float, "base_bytes": int,
    "measured.wall_s": int | float, "measured.train_s": int | float, "num_client_failures": int,
}  # fmt: skip
_LINE_KEYS: dict[str, dict[str, type | UnionType]] = {
    ROUNDS_FILE: {
        "server_round": int, "num_replies": int, "metrics": dict, "bytes.uplink.total": int,
        "bytes.downlink.total": int,
    },
    CLIENTS_FILE: {"server_round": int, "client": str, "device": str, "status": str, "trained": list, "planned": dict},
}  # fmt: skip


def read_run(folder: Path) -> dict[str, Any]:
    """`run.json` of a run folder.

    Raises:
        RunFolderError: If the folder is not one, or the file is damaged.
    """
    return read_run_record(folder)


def read_any_run(folder: Path) -> dict[str, Any]:
    """`run.json` of a run folder, whatever it holds.

    Raises:
        RunFolderError: If the folder is not one, or the file is no JSON object.
    """
    require_run(folder)
    return read_json(folder / RUN_FILE)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """`summary.json`, or None before the end of the run."""
    path = folder / SUMMARY_FILE
    if not path.exists():
        return None
    summary = read_json(path)
    require_keys(summary, _SUMMARY_KEYS, str(path))
    return summary


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, with everything in them that reports need.

    Raises:
        RunFolderError: If a line is damaged or lacks something.
    """
    records = read_any_records(path)
    for number, record in enumerate(records, start=1):
        require_keys(record, _LINE_KEYS[path.name], f"{path} line {number}")
    return records


def read_any_records(path: Path) -> list[dict[str, Any]]:
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
