"""The reference engine: clients one after the other in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fedstrata.client import Trainer, run_client
from fedstrata.core.wire import Bytes, peek_header
from fedstrata.errors import FedstrataError, RunFolderError
from fedstrata.record.clients import ClientStates
from fedstrata.record.failure import ClientFailure

_MAX_DETAIL = 4000


class LocalEngine:
    """Runs every task here and now.

    Args:
        trainer: Model and data.
        states: Where client state lives.
    """

    def __init__(self, trainer: Trainer, states: ClientStates) -> None:
        self.trainer, self.states = trainer, states

    def run(self, tasks: Iterable[tuple[str, int, Bytes]]) -> Iterator[tuple[str, Bytes | ClientFailure]]:
        """Replies in the order of the tasks. What a client's work raises becomes a `ClientFailure`."""
        for client, accepted_round, task in tasks:
            yield client, run_one(self.trainer, self.states, client, accepted_round, task)


def run_one(
    trainer: Trainer, states: ClientStates, client: str, accepted_round: int, task: Bytes
) -> Bytes | ClientFailure:
    """One client's work with its state read before and kept after."""
    header = peek_header(task)
    server_round = int(header["server_round"])
    try:
        reply, state = run_client(task, states.read(client, accepted_round), trainer)
        if header["job"] == "train":
            states.write(client, accepted_round, server_round, state)
    except RunFolderError:
        raise
    except (Exception, SystemExit) as error:  # a part from outside may even ask Python to end
        detail = str(error) if isinstance(error, FedstrataError) else f"{type(error).__name__}: {error}"
        readable = detail.encode(errors="replace").decode()[:_MAX_DETAIL]  # a file name may hold what is no text
        return ClientFailure(client, server_round, "exception", readable)
    return reply
