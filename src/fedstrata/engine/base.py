"""The base model's updates on a machine with several workers: the server's process owns them, workers follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from fedstrata.core.blob import write_blob
from fedstrata.core.merges import BaseLog, Merge, unpack_merges
from fedstrata.core.tensors import Layout
from fedstrata.engine.work import Job
from fedstrata.errors import ClientError
from fedstrata.message import unpack_task
from fedstrata.record.site import SiteBase

Blob = tuple[Mapping[str, np.ndarray], Mapping[str, Any]]


class MachineBase:
    """What this machine received of the base model's updates; one copy for all workers.

    Args:
        site: Keeps it.
        layout: A pair per map, as updates are written.
        condense: What workers need of a log to stand at its number.
    """

    def __init__(self, site: SiteBase, layout: Layout, condense: Callable[[BaseLog], BaseLog]) -> None:
        self._site, self._layout, self._condense = site, layout, condense
        self._told = 0

    def receive(self, job: Job, publish: Callable[[BaseLog], None]) -> None:
        """Takes what came with a task, and publishes where its client works if no worker knows that yet.

        Raises:
            ClientError: If the client does not stand where the server thinks.
            PayloadError: If the task cannot be read.
        """
        known, number = job.base
        if number == 0 or number == self._told == self._site.log.number:
            return
        task, frame = unpack_task(job.task)
        merges, _ = unpack_merges(task.merges, frame.payload.values, self._layout)
        log = self._site.take(job.client, known, number, merges, keep=task.job != "evaluate")
        if number != self._told:
            publish(self._condense(log))
            self._told = number


class FollowedBase:
    """A worker's view: what the server's process published, whatever came with the task at hand.

    Args:
        fetch: The published log of a number, as arrays and their description.
    """

    def __init__(self, fetch: Callable[[int], Blob]) -> None:
        self._fetch = fetch
        self._log = BaseLog()

    def take(self, client: str, known: int, number: int, merges: Sequence[Merge], *, keep: bool = True) -> BaseLog:
        """The log at `number`.

        Raises:
            ClientError: If another one was published.
        """
        if self._log.number != number:
            self._log = log_of(*self._fetch(number))
        if self._log.number != number:
            raise ClientError(f"Client {client} works at merge {number}", got=f"merge {self._log.number} on its worker")
        return self._log


def write_log(file: BinaryIO, log: BaseLog) -> None:
    """A log as a block of arrays."""
    write_blob(file, log.to_tensors(), {"number": log.number, "snapshot_number": log.snapshot_number})


def log_of(arrays: Mapping[str, np.ndarray], info: Mapping[str, Any]) -> BaseLog:
    """The log that `write_log` wrote; its tensors are views."""
    ordered = {n: arrays[n] for n in sorted(arrays)}
    return BaseLog.from_tensors(int(info["number"]), int(info["snapshot_number"]), ordered)
