"""Ctrl-C: once ends after the round with a valid result, twice ends at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from fedstrata.experiment.watch import Watch


class Interrupts:
    """Counts interrupts while it is entered; outside the main thread it leaves signals alone."""

    def __init__(self, watch: Watch) -> None:
        self.asked = False
        self._watch = watch
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._watch.interrupted()
