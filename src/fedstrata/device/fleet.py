"""Devices and the clients that own them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fedstrata.errors import PlanError, did_you_mean


@dataclass(frozen=True)
class DeviceProfile:
    """What one kind of device can do.

    Attributes:
        name: Its kind, e.g. `laptop-16gb`.
        memory_bytes: Memory that training may use.
        flop_per_s: Sustained float32 rate in training.
        down_bytes_per_s: Download rate.
        up_bytes_per_s: Upload rate.
        basis: How the numbers were found.
        source: Where they come from.
        round_bytes: Most bytes, down and up together, that one round may cost it; None without a cap.
    """

    name: str
    memory_bytes: int
    flop_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    basis: Literal["measured", "vendor", "assumed"] = "assumed"
    source: str = ""
    round_bytes: int | None = None


@dataclass(frozen=True)
class Client:
    """One registered client."""

    id: str
    device: DeviceProfile
    num_examples: int


@dataclass(frozen=True)
class Fleet:
    """All registered clients, in ascending id."""

    clients: tuple[Client, ...]

    @cached_property
    def _by_id(self) -> dict[str, Client]:
        return {c.id: c for c in self.clients}

    def __len__(self) -> int:
        return len(self.clients)

    def __contains__(self, client: object) -> bool:
        return client in self._by_id

    def __getitem__(self, client: str) -> Client:
        if client not in self._by_id:
            raise PlanError(f'Unknown client "{client}"', do=did_you_mean(client, self.ids))
        return self._by_id[client]

    @property
    def ids(self) -> tuple[str, ...]:
        """Client ids, ascending."""
        return tuple(c.id for c in self.clients)

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Device kinds and how many clients have each."""
        return dict(sorted(Counter(c.device.name for c in self.clients).items()))
