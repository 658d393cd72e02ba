"""What the server hands to an engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from fedstrata.core.wire import Bytes
from fedstrata.record.failure import ClientFailure

Answer: TypeAlias = Bytes | ClientFailure
"""A reply as it came, or why there is none."""


def nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Order:
    """One client's work, before it is packed.

    Attributes:
        client: Its id.
        accepted_round: The round whose state of this client counts.
        pack: Makes the task's bytes; called once, when the work is about to begin, in the server's own thread.
        size: How much work it is, in any unit; decides when it begins, never what comes out.
        arrived: Called once when the answer is there, perhaps long before its turn.
    """

    client: str
    accepted_round: int
    pack: Callable[[], Bytes]
    size: float = 1.0
    arrived: Callable[[], None] = nothing


class Engine(Protocol):
    """How clients are executed."""

    def run(self, orders: Sequence[Order]) -> Iterator[tuple[str, Answer]]:
        """Runs the orders of different clients in any order, perhaps in parallel.

        The answers come in ascending client id. Nothing that the engine keeps grows with the number of orders, beside
        the orders themselves and what waits on the disk.
        """
