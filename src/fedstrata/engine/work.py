"""One client's work from its order to its answer: the same in every engine, wherever the work itself is done."""

from __future__ import annotations

from dataclasses import dataclass

from fedstrata.client import Trainer, run_client
from fedstrata.core.wire import Bytes, peek_header
from fedstrata.errors import FedstrataError, RunFolderError
from fedstrata.record.clients import ClientStates
from fedstrata.record.failure import ClientFailure
from fedstrata.server.orders import Answer

_MAX_DETAIL = 4000


@dataclass(frozen=True)
class Done:
    """What a client's work leaves: the reply, and the client's state after it."""

    reply: Bytes
    state: Bytes


@dataclass(frozen=True)
class Job:
    """A packed task and where it stands.

    Attributes:
        client: Its id.
        accepted_round: The round whose state of this client counts.
        server_round: Of the task.
        trains: Whether the client's state changes.
        base: [known, number]: the merges of the base that the client is known to have, and the one it works at.
        task: Its bytes.
    """

    client: str
    accepted_round: int
    server_round: int
    trains: bool
    base: tuple[int, int]
    task: Bytes

    @staticmethod
    def of(client: str, accepted_round: int, task: Bytes) -> Job:
        """Reads the task's header."""
        header = peek_header(task)
        known, number = header.get("base", (0, 0))
        trains = header["job"] == "train"
        return Job(client, accepted_round, int(header["server_round"]), trains, (known, number), task)

    def failed(self, error: Exception | SystemExit) -> ClientFailure:
        """What the work raised, as data."""
        detail = str(error) if isinstance(error, FedstrataError) else f"{type(error).__name__}: {error}"
        readable = detail.encode(errors="replace").decode()[:_MAX_DETAIL]  # a file name may hold what is no text
        return ClientFailure(self.client, self.server_round, "exception", readable)


def perform(trainer: Trainer, job: Job, state: Bytes) -> Done | ClientFailure:
    """Does the work. What it raises becomes a `ClientFailure`, but for a run folder that cannot be written."""
    try:
        return Done(*run_client(job.task, state, trainer))
    except RunFolderError:
        raise
    except (Exception, SystemExit) as error:  # a part from outside may even ask Python to end
        return job.failed(error)


def settle(states: ClientStates, job: Job, result: Done | ClientFailure) -> Answer:
    """Keeps the client's state, and leaves the answer."""
    if isinstance(result, ClientFailure):
        return result
    if job.trains:
        try:
            states.write(job.client, job.accepted_round, job.server_round, result.state)
        except RunFolderError:
            raise
        except Exception as error:
            return job.failed(error)
    return result.reply


def read_state(states: ClientStates, job: Job) -> Bytes | ClientFailure:
    """The state that counts for this work."""
    try:
        return states.read(job.client, job.accepted_round)
    except RunFolderError:
        raise
    except Exception as error:
        return job.failed(error)
