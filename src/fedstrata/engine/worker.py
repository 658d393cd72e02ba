"""What a worker process does: open the model once, then one job after the other until its pipe closes.

Only bytes cross the pipes. A message is three blocks: a JSON header, a client state, and a task or a reply.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from fedstrata.client import Trainer
from fedstrata.core.blob import map_blob
from fedstrata.core.wire import Bytes, canonical_json
from fedstrata.engine.base import FollowedBase
from fedstrata.engine.work import Done, Job, perform
from fedstrata.record.failure import ClientFailure
from fedstrata.record.site import Site

Opener: TypeAlias = Callable[[Site], Trainer]
"""Makes a worker's trainer; it can be sent to another process."""


def serve(inbox: Connection, outbox: Connection, opener: Opener, folder: str) -> None:
    """The main function of a worker process.

    Args:
        inbox: Jobs come from here; when it closes, the server is gone and the worker ends at once.
        outbox: `Ready`, then results go here.
        opener: Makes the trainer.
        folder: Where the base model's updates are published.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends its workers
    jobs: queue.SimpleQueue[tuple[Job, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(inbox, jobs), daemon=True).start()
    try:
        trainer = opener(FollowedBase(lambda number: map_blob(base_file(Path(folder), number))))
    except Exception as error:
        send(outbox, {"cannot_start": f"{type(error).__name__}: {error}"})
        return
    send(outbox, {"ready": True})
    while True:
        job, state = jobs.get()
        send_result(outbox, perform(trainer, job, state))


def base_file(folder: Path, number: int) -> Path:
    """Where the log of the base model's updates stands."""
    return folder / f"base-{number}"


def _listen(inbox: Connection, jobs: queue.SimpleQueue[tuple[Job, bytes]]) -> None:
    """Receives the next job while one is at work, and notices when nobody waits for results any more."""
    while True:
        try:
            header, state, task = receive(inbox)
        except (EOFError, OSError):
            os._exit(0)
        base = header["base"]
        jobs.put(
            (
                Job(
                    header["client"],
                    header["accepted_round"],
                    header["server_round"],
                    header["trains"],
                    (base[0], base[1]),
                    task,
                ),
                state,
            )
        )


def send(pipe: Connection, header: dict[str, Any], state: Bytes = b"", data: Bytes = b"") -> None:
    """Sends one message."""
    pipe.send_bytes(canonical_json(header))
    pipe.send_bytes(state)
    pipe.send_bytes(data)


def receive(pipe: Connection) -> tuple[dict[str, Any], bytes, bytes]:
    """Receives one message.

    Raises:
        EOFError: If the other end is gone.
    """
    return json.loads(pipe.recv_bytes()), pipe.recv_bytes(), pipe.recv_bytes()


def send_job(pipe: Connection, job: Job, state: Bytes) -> None:
    """Sends a job to a worker."""
    header = {
        "client": job.client,
        "accepted_round": job.accepted_round,
        "server_round": job.server_round,
        "trains": job.trains,
        "base": list(job.base),
    }
    send(pipe, header, state, job.task)


def send_result(pipe: Connection, result: Done | ClientFailure) -> None:
    """Sends what came of a job."""
    if isinstance(result, ClientFailure):
        send(pipe, {"failure": result.to_json()})
    else:
        send(pipe, {}, result.state, result.reply)
