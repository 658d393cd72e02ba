"""The run folder: what is written when, so that a kill at any moment loses nothing but the round at hand."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedstrata.core.wire import Bytes, canonical_json
from fedstrata.errors import RunFolderError
from fedstrata.experiment.stored import require_keys
from fedstrata.record.checkpoint import ServerState, load_checkpoint, save_checkpoint
from fedstrata.record.files import (
    TEMPORARY_SUFFIX,
    append_lines,
    atomic_write,
    keep_lines,
    plain_os_errors,
    read_json,
    read_lines,
    remove_leftovers,
    write_json,
)

SCHEMA_VERSION = 1
LOCK_FILE = ".lock"
FINISHED = ("success", "stopped early")


def spec_hash(resolved_spec: Mapping[str, Any]) -> str:
    """Hash of a resolved spec; the name of the run does not count.

    Returns:
        64 hexadecimal digits.
    """
    counted = {k: v for k, v in resolved_spec.items() if k != "name"}
    return hashlib.sha256(canonical_json(counted)).hexdigest()


def resume_hash(resolved_spec: Mapping[str, Any], decided_by_rounds: Mapping[str, Any] | None = None) -> str:
    """Hash of everything that the rounds so far depend on.

    A constant learning rate does not know how many rounds will follow, so that a run can be extended; neither the
    number of rounds nor the rule for stopping early counts then, only what the planner makes of that number.

    Args:
        resolved_spec: With every default.
        decided_by_rounds: `Planner.decided_by_rounds` of the spec's number of rounds.
    """
    rounds = dict(resolved_spec["rounds"])
    if decided_by_rounds:
        rounds["decided"] = dict(decided_by_rounds)
    if resolved_spec["train"]["schedule"] == "constant":
        rounds.pop("count")
    for key in ("patience", "target"):
        rounds.pop(key, None)
    return spec_hash({**resolved_spec, "rounds": rounds})


def spec_difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every key that differs between two resolved specs: `rounds.count: 6 -> 20`."""
    lines: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines.extend(spec_difference(a, b, f"{prefix}{key}."))
        elif a != b and (prefix or key != "name"):
            lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return lines


class RunFolder:
    """One run's folder.

    Order of writing per round: lines of `rounds.jsonl` and `clients.jsonl`, `best/` if it improved, then the
    checkpoint, which alone says that the round counts. Opening cuts the lines back to what the checkpoint knows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / LOCK_FILE)

    @property
    def run_file(self) -> Path:
        """`run.json`."""
        return self.path / "run.json"

    @property
    def checkpoint_file(self) -> Path:
        """`checkpoint/state.safetensors`."""
        return self.path / "checkpoint" / "state.safetensors"

    @property
    def summary_file(self) -> Path:
        """`summary.json`, written last."""
        return self.path / "summary.json"

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.run_file.exists()

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end and everything was written."""
        return self.summary_file.exists() and read_json(self.run_file)["status"] in FINISHED

    def lock(self) -> None:
        """Keeps other processes out.

        Raises:
            RunFolderError: If one is at work here, or the folder cannot be written or is something else.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file", expected="a folder")
        if self.path.exists() and not self.exists and any(map(_is_foreign, self.path.iterdir())):
            raise RunFolderError(f"{self.path} holds something else", do="choose another folder with --out")
        with plain_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except Timeout as error:
                raise RunFolderError(f"Another process is at work in {self.path}", do="wait for it") from error

    def unlock(self) -> None:
        """Lets others in; a folder in which nothing was begun goes again."""
        self._lock.release()
        if self.path.is_dir() and [p.name for p in self.path.iterdir()] == [LOCK_FILE]:
            with suppress(OSError):
                (self.path / LOCK_FILE).unlink()
                self.path.rmdir()

    def clear(self) -> None:
        """Deletes an earlier run, for `--fresh`; its `run.json` last, so that a kill leaves a run folder."""
        with plain_os_errors(self.path):
            for path in sorted(self.path.iterdir(), key=lambda p: (p == self.run_file, p.name)):
                if path.name == LOCK_FILE:
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def write_run(self, record: Mapping[str, Any]) -> None:
        """Writes `run.json`."""
        write_json(self.run_file, record)

    def reopen(self, record: Mapping[str, Any]) -> None:
        """Makes a run that ended one that goes on; its summary no longer holds."""
        if read_json(self.run_file) != record:
            self.write_run(record)
        with plain_os_errors(self.path):
            self.summary_file.unlink(missing_ok=True)

    def num_finished_rounds(self) -> int:
        """Rounds that count."""
        return load_checkpoint(self.checkpoint_file)[0].server_round if self.checkpoint_file.exists() else 0

    def set_status(self, status: str, **measured: Any) -> None:
        """Changes the status in `run.json` and adds to its measured part."""
        record = read_json(self.run_file)
        self.write_run(record | {"status": status, "measured": record["measured"] | measured})

    def note(self, **measured: Any) -> None:
        """Adds to the measured part of `run.json`, where that changes it."""
        record = read_json(self.run_file)
        if {k: record["measured"].get(k) for k in measured} != measured:
            self.write_run(record | {"measured": record["measured"] | measured})

    def load(self, expected_hash: str) -> ServerState | None:
        """The state to go on from, with all records cut back to it; None before the first finished round."""
        remove_leftovers(self.path)
        state = None
        if self.checkpoint_file.exists():
            state, found = load_checkpoint(self.checkpoint_file)
            if found != expected_hash:
                raise RunFolderError(
                    f"The checkpoint in {self.path} belongs to another experiment",
                    expected=expected_hash[:12],
                    got=found[:12],
                    do="start anew with --fresh",
                )
        keep_lines(self.path / "rounds.jsonl", state.server_round if state else 0)
        keep_lines(self.path / "clients.jsonl", state.totals["num_client_records"] if state else 0)
        for number, record in enumerate(read_lines(self.path / "rounds.jsonl"), 1):
            where = f"{self.path / 'rounds.jsonl'} line {number}"
            require_keys(record, {"server_round": int, "measured.wall_s": float, "measured.train_s": float}, where)
        return state

    def append(self, round_record: dict[str, Any], client_records: list[dict[str, Any]]) -> None:
        """Adds one round's lines."""
        append_lines(self.path / "clients.jsonl", client_records)
        append_lines(self.path / "rounds.jsonl", [round_record])

    def commit(self, state: ServerState, expected_hash: str) -> None:
        """Makes the round count."""
        save_checkpoint(self.checkpoint_file, state, expected_hash)

    def keep_payload(self, server_round: int, client: str, direction: str, data: Bytes) -> None:
        """Stores one payload as it went over the line."""
        atomic_write(self.path / "payloads" / f"{server_round:05d}" / f"{client}.{direction}", data)


def _is_foreign(path: Path) -> bool:
    """Whether a file in a folder without `run.json` is not one that a kill at the very start leaves."""
    return path.name != LOCK_FILE and not path.name.endswith(TEMPORARY_SUFFIX)
