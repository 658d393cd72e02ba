"""Files that are whole or absent, whenever the process dies."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedstrata.core.wire import Bytes
from fedstrata.errors import RunFolderError

TEMPORARY_SUFFIX = ".partial"
_ASIDE = ".old" + TEMPORARY_SUFFIX
NEWLINE = b"\n"


@contextmanager
def plain_os_errors(path: Path) -> Iterator[None]:
    """Turns a full disk, a read-only folder or a missing permission into a `RunFolderError`."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"Cannot write {path}",
            got=error.strerror or str(error),
            do="free some space or choose another folder with --out; what was written before is kept",
        ) from error


def atomic_write(path: Path, data: Bytes) -> None:
    """Writes a file that is either the old one or the new one, never a part.

    The bytes go to a sibling, reach the disk, and take the name in one step.
    """
    with plain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + TEMPORARY_SUFFIX)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)


def replace_folder(new: Path, target: Path) -> None:
    """Puts the finished folder `new` in the place of `target`.

    A kill in between leaves the old folder aside; `remove_leftovers` puts it back.
    """
    with plain_os_errors(target):
        aside = target.with_name(target.name + _ASIDE)
        if aside.exists():
            shutil.rmtree(aside)
        if target.exists():
            target.replace(aside)
        new.replace(target)
        _sync_folder(target.parent)
        if aside.exists():
            shutil.rmtree(aside)


def copy_folder(source: Path, target: Path) -> None:
    """Makes `target` a copy of `source`, whole or not at all; an existing one is replaced."""
    partial = target.with_name(target.name + ".new" + TEMPORARY_SUFFIX)
    with plain_os_errors(target):
        if partial.exists():
            shutil.rmtree(partial)
        shutil.copytree(source, partial)
    replace_folder(partial, target)


def remove_leftovers(folder: Path) -> None:
    """Deletes what an interrupted write left beside the files of `folder`; a folder that was put aside comes back."""
    with plain_os_errors(folder):
        for path in sorted(folder.rglob("*" + TEMPORARY_SUFFIX)):
            target = path.with_name(path.name.removesuffix(_ASIDE))
            if path.name.endswith(_ASIDE) and path.is_dir() and not target.exists():
                path.replace(target)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes readable JSON atomically, keys in the given order."""
    atomic_write(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        RunFolderError: If the file is missing or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunFolderError(
            f"{path} is missing", do="name a folder that `fedstrata run` wrote, or restore the file"
        ) from error
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read", got=str(error), do="restore the file, or run anew") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise RunFolderError(f"{path} is damaged", expected="a JSON object", got=kind, do="restore it, or run anew")
    return value


def append_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Appends one JSON line per record and waits until they are on the disk."""
    text = "".join(json.dumps(r, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n" for r in records)
    with plain_os_errors(path), path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; a last line that was cut by a kill is left out.

    Raises:
        RunFolderError: If the file or one of its lines cannot be read.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(NEWLINE)
        return [json.loads(line) for line in lines[:-1]]
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read", got=str(error)) from error


def keep_lines(path: Path, count: int) -> None:
    """Cuts a JSON-lines file to its first `count` lines.

    Raises:
        RunFolderError: If it has fewer.
    """
    data = path.read_bytes() if path.exists() else b""
    end = 0
    for _ in range(count):
        end = data.find(NEWLINE, end) + 1
        if end == 0:
            raise RunFolderError(f"{path} is damaged", expected=f"at least {count} lines", got=f"{data.count(NEWLINE)}")
    if end != len(data) or not path.exists():
        atomic_write(path, data[:end])


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders; its rename is durable enough
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
