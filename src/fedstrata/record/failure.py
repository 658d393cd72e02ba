"""A client's failure is data, never an exception of the server."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Reason = Literal["exception", "bad reply", "died", "late"]


@dataclass(frozen=True)
class ClientFailure:
    """Why a client's work is missing from a round.

    Attributes:
        client: Its id.
        server_round: The round.
        reason: `exception`: its work raised; `bad reply`: its bytes were refused; `died`: its process ended;
            `late`: it missed the deadline.
        detail: What was raised or found, in one message.
    """

    client: str
    server_round: int
    reason: Reason
    detail: str

    def to_json(self) -> dict[str, Any]:
        """As it stands in the records."""
        return asdict(self)
