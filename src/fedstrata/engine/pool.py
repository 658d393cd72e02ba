"""Worker processes on this machine."""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, final

from fedstrata.core.merges import BaseLog
from fedstrata.core.wire import Bytes
from fedstrata.engine.base import write_log
from fedstrata.engine.crew import Crew, Gone, Happened, Ready
from fedstrata.engine.work import Done, Job
from fedstrata.engine.worker import Opener, base_file, receive, send_job, serve
from fedstrata.record.failure import ClientFailure
from fedstrata.record.files import TEMPORARY_SUFFIX, plain_os_errors

_PATIENCE_S = 5.0
_TICK_S = 0.5
"""A wait without an end would not notice Ctrl-C on Windows."""


@dataclass(frozen=True, eq=False)
class _Worker:
    process: BaseProcess
    jobs: Connection
    results: Connection


@final
class ProcessCrew(Crew):
    """Spawned processes, each with a trainer of its own over shared files.

    Args:
        opener: Makes a worker's trainer.
        size: How many workers.
        folder: For what they share; made here, and removed by `close`.
    """

    def __init__(self, opener: Opener, size: int, folder: Path) -> None:
        self._opener, self._size, self._folder = opener, size, folder
        self._numbers = itertools.count()
        self._workers: dict[int, _Worker] = {}
        self._news: queue.SimpleQueue[tuple[int, Happened]] = queue.SimpleQueue()
        with plain_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def size(self) -> int:
        """How many workers there should be."""
        return self._size

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by worker."""
        return {n: int(w.process.pid or 0) for n, w in self._workers.items()}

    def hire(self) -> int:
        """Starts a process."""
        number = next(self._numbers)
        spawn = multiprocessing.get_context("spawn")
        inbox, jobs = spawn.Pipe(duplex=False)
        results, outbox = spawn.Pipe(duplex=False)
        process = spawn.Process(
            target=serve,
            args=(inbox, outbox, self._opener, str(self._folder)),
            name=f"fedstrata worker {number}",
            daemon=True,
        )
        with _as_a_fresh_start():
            process.start()
        inbox.close()
        outbox.close()
        worker = self._workers[number] = _Worker(process, jobs, results)
        threading.Thread(target=self._listen, args=(number, worker), daemon=True).start()
        return number

    def give(self, worker: int, job: Job, state: Bytes) -> None:
        """Sends a job; a worker that is gone says so itself."""
        with suppress(OSError):
            send_job(self._workers[worker].jobs, job, state)

    def happened(self, *, wait: bool) -> tuple[int, Happened] | None:
        """The next thing that happened."""
        while True:
            with suppress(queue.Empty):
                return self._news.get(block=wait, timeout=_TICK_S if wait else None)
            if not wait:
                return None

    def publish(self, log: BaseLog) -> None:
        """Writes the log beside what the workers share; the one before is no longer needed."""
        path = base_file(self._folder, log.number)
        with plain_os_errors(path):
            partial = path.with_name(path.name + TEMPORARY_SUFFIX)
            with partial.open("wb") as file:
                write_log(file, log)
            partial.replace(path)
        for old in self._folder.glob("base-*"):
            if old != path:
                with suppress(OSError):  # a file that is still mapped cannot be deleted on Windows
                    old.unlink()

    def dismiss(self, worker: int) -> None:
        """Kills a process."""
        gone = self._workers.pop(worker)
        gone.process.kill()
        gone.process.join(_PATIENCE_S)
        gone.jobs.close()

    def close(self) -> None:
        """Kills all processes: between rounds they hold nothing that anybody needs."""
        for worker in list(self._workers):
            self.dismiss(worker)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self, number: int, worker: _Worker) -> None:
        """Takes what a worker sends as soon as it is there, so that it can go on."""
        try:
            while True:
                header, state, reply = receive(worker.results)
                self._news.put((number, _read(header, state, reply)))
        except (EOFError, OSError):
            pass
        worker.process.join(_PATIENCE_S)
        self._news.put((number, Gone(_reason(worker.process.exitcode))))


def _read(header: dict[str, Any], state: bytes, reply: bytes) -> Happened:
    if "ready" in header:
        return Ready()
    if "cannot_start" in header:
        return Gone(str(header["cannot_start"]))
    if "failure" in header:
        return ClientFailure(**header["failure"])
    return Done(reply, state)


def _reason(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return f"the process was ended by {signal.Signals(-exit_code).name}; perhaps memory ran out"
    return f"the process ended with exit code {exit_code}"


@contextmanager
def _as_a_fresh_start() -> Iterator[None]:
    """What a child process begins with.

    `spawn` would run the user's script again, as a module; with nothing but an empty main module it does not, so that
    scripts need no `if __name__ == "__main__"` and notebooks work. And a child that starts while Ctrl-C is ignored
    ignores it from its first instruction on.
    """
    main = sys.modules["__main__"]
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if in_main_thread:
            signal.signal(signal.SIGINT, before)
