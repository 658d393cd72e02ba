"""The base model's updates on the clients' side: what came over the line and was kept on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedstrata.core.merges import BaseLog, Merge
from fedstrata.core.wire import canonical_json
from fedstrata.errors import ClientError, RunFolderError
from fedstrata.record.files import atomic_write

_KEY = "fedstrata"


class Site(Protocol):
    """Whoever knows what this machine holds of the base model's updates."""

    def take(self, client: str, known: int, number: int, merges: Sequence[Merge], *, keep: bool = True) -> BaseLog:
        """See `SiteBase.take`."""


class SiteBase:
    """The merges that clients of this machine have received; they share one copy of the base model.

    Args:
        path: Where they are kept between processes; None keeps them in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.log = BaseLog() if path is None else load_log(path)
        self._judged = self.log

    def take(self, client: str, known: int, number: int, merges: Sequence[Merge], *, keep: bool = True) -> BaseLog:
        """Adds what is new, and returns the log at `number`.

        An evaluation comes before the server has stored the round that it judges, and a kill may lose that round: what
        it brings must not stay, or this machine would be ahead of the server for ever.

        Args:
            client: Whose task it is.
            known: The merge that the server knows this client to stand at.
            number: The merge that the task is for.
            merges: What came with the task.
            keep: Whether what is new stays, for later tasks.

        Raises:
            ClientError: If merges are missing, or the machine is ahead of the task.
        """
        log = self.log
        if log.number < known:
            raise _out_of_step(client, f"merge {known} or later", f"merge {log.number}")
        if not keep and self._judged.number == number:
            return self._judged
        for merge in merges:
            log = log.take(merge)
        if log.number != number:
            raise _out_of_step(client, f"merge {number}", f"merge {log.number}")
        if not keep:
            self._judged = log
        elif log is not self.log:
            self.log = log
            if self.path is not None:
                save_log(self.path, log)
        return log


def _out_of_step(client: str, expected: str, got: str) -> ClientError:
    return ClientError(
        f"Client {client} does not stand where the server thinks",
        where="updates of the base model",
        expected=expected,
        got=got,
        do="the server sends everything after a failure",
    )


def save_log(path: Path, log: BaseLog) -> None:
    """Writes a log as one safetensors file, whole or not at all."""
    document = canonical_json({"number": log.number, "snapshot_number": log.snapshot_number}).decode()
    atomic_write(path, save(log.to_tensors(), metadata={_KEY: document}))


def load_log(path: Path) -> BaseLog:
    """Reads it; an empty log where there is no file.

    Raises:
        RunFolderError: If it cannot be read.
    """
    if not path.exists():
        return BaseLog()
    try:
        data = path.read_bytes()
        named = load(data)
        length = int.from_bytes(data[:8], "little")
        document = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])
        ordered = {n: named[n] for n in sorted(named)}
        return BaseLog.from_tensors(int(document["number"]), int(document["snapshot_number"]), ordered)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} cannot be read", got=f"{type(error).__name__}: {error}") from error
