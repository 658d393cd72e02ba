"""Answers that came before their turn wait here, encoded: a bounded part in memory, the rest on the disk."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from fedstrata.record.failure import ClientFailure
from fedstrata.record.files import plain_os_errors
from fedstrata.server.orders import Answer

DEFAULT_MEMORY_BYTES = 256 << 20


class Spool:
    """Keeps answers until they are taken, each once.

    Args:
        folder: Where to put what does not fit; made when it is needed and deleted on leaving. None: a temporary folder.
        memory_bytes: Largest sum of the replies' lengths in memory.
    """

    def __init__(self, folder: Path | None = None, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        self._wanted, self._free = folder, memory_bytes
        self._folder: Path | None = None
        self._kept: dict[str, Answer | Path] = {}
        self._num_spilled = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Deletes what nobody took."""
        self._kept.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __contains__(self, client: str) -> bool:
        return client in self._kept

    @property
    def num_spilled(self) -> int:
        """How many replies went to the disk so far."""
        return self._num_spilled

    def put(self, client: str, answer: Answer) -> None:
        """Keeps an answer.

        Raises:
            RunFolderError: If it does not fit into memory and the disk is full.
        """
        if isinstance(answer, ClientFailure):
            self._kept[client] = answer
        elif len(answer) <= self._free:
            self._free -= len(answer)
            self._kept[client] = answer
        else:
            path = self._place() / f"{self._num_spilled}.reply"
            self._num_spilled += 1
            with plain_os_errors(path):
                path.write_bytes(answer)
            self._kept[client] = path

    def take(self, client: str) -> Answer:
        """Hands an answer over.

        Raises:
            RunFolderError: If it was on the disk and cannot be read.
        """
        kept = self._kept.pop(client)
        if isinstance(kept, Path):
            with plain_os_errors(kept):
                data = kept.read_bytes()
                kept.unlink(missing_ok=True)
            return data
        if not isinstance(kept, ClientFailure):
            self._free += len(kept)
        return kept

    def _place(self) -> Path:
        if self._folder is None:
            folder = self._wanted or Path(tempfile.mkdtemp(prefix="fedstrata-"))
            with plain_os_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._folder = folder
        return self._folder
