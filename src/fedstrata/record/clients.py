"""State that stays on the client's side, versioned by round."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from fedstrata.core.wire import Bytes
from fedstrata.errors import ClientError
from fedstrata.record.files import atomic_write


class ClientStates(Protocol):
    """Where a client's state lives.

    The state of round r counts only once the server's next task names r as the round whose reply it
    accepted; a reply that was lost leaves the state before it in force.
    """

    def read(self, client: str, accepted_round: int) -> Bytes:
        """The state after `accepted_round`; empty where there is none."""

    def write(self, client: str, accepted_round: int, server_round: int, state: Bytes) -> None:
        """Keeps the state after `server_round` beside the accepted one and drops all others."""


class FolderStates:
    """Client states as files `<folder>/<client>/<round>.state`.

    A client that never had a state (the usual case) leaves no file; one that had has a file, perhaps an empty one, for
    its accepted round and for the round after it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, client: str, accepted_round: int) -> Bytes:
        """The state after `accepted_round`.

        Raises:
            ClientError: If this client has states, but not that one.
        """
        folder = self._of(client)
        if accepted_round == 0 or not folder.exists():
            return b""
        path = folder / f"{accepted_round}.state"
        if not path.exists():
            raise ClientError(
                f"Client {client} has no state of round {accepted_round}",
                got=", ".join(sorted(p.name for p in folder.iterdir())) or "an empty folder",
                do="resume from the checkpoint that belongs to this run folder",
            )
        return path.read_bytes()

    def write(self, client: str, accepted_round: int, server_round: int, state: Bytes) -> None:
        """Keeps the new state and the accepted one."""
        folder = self._of(client)
        if not state and not folder.exists():
            return
        accepted, new = folder / f"{accepted_round}.state", folder / f"{server_round}.state"
        if accepted_round and not accepted.exists():  # until now there was nothing to keep
            atomic_write(accepted, b"")
        atomic_write(new, state)
        for path in list(folder.iterdir()):
            if path.name not in (accepted.name, new.name):
                path.unlink(missing_ok=True)

    def _of(self, client: str) -> Path:
        return self.folder / quote(client, safe="")


class MemoryStates:
    """Client states in memory, for runs without a folder."""

    def __init__(self) -> None:
        self._states: dict[str, dict[int, Bytes]] = {}

    def read(self, client: str, accepted_round: int) -> Bytes:
        """The state after `accepted_round`."""
        return self._states.get(client, {}).get(accepted_round, b"")

    def write(self, client: str, accepted_round: int, server_round: int, state: Bytes) -> None:
        """Keeps the new state and the accepted one."""
        known = self._states.get(client, {})
        kept = {r: s for r, s in known.items() if r == accepted_round}
        if state:
            kept[server_round] = state
        if kept or known:
            self._states[client] = kept
