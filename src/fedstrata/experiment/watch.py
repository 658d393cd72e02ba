"""Who looks on while an experiment runs. None of it may change a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.plan.base import RoundPlan
from fedstrata.record.checkpoint import ServerState

if TYPE_CHECKING:
    from fedstrata.experiment.build import Built


class Watch(ABC):
    """What a display is told."""

    @abstractmethod
    def step(self, what: str) -> None:
        """A longer step of the set-up begins."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Something the user should know."""

    @abstractmethod
    def start(self, built: Built, state: ServerState) -> None:
        """Rounds begin, after `state.server_round`."""

    @abstractmethod
    def planned(self, plan: RoundPlan) -> None:
        """A round begins."""

    @abstractmethod
    def client_began(self, client: str) -> None:
        """A client's task was packed: it trains now, or next."""

    @abstractmethod
    def client_back(self, client: str) -> None:
        """A client's answer is there; it is merged when its turn comes."""

    @abstractmethod
    def client_done(self, record: Mapping[str, Any]) -> None:
        """A client's reply was merged, or it failed."""

    @abstractmethod
    def round_done(self, record: Mapping[str, Any]) -> None:
        """A round counts."""

    @abstractmethod
    def interrupted(self) -> None:
        """The user asked to stop after this round."""

    @abstractmethod
    def finishing(self) -> None:
        """The test is read and the folder completed."""

    @abstractmethod
    def finished(self, folder: Path) -> None:
        """Everything is written; `summary.json` is there."""

    @abstractmethod
    def already_finished(self, folder: Path) -> None:
        """There was nothing to do."""


class SilentWatch(Watch):
    """Shows nothing."""

    def step(self, what: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def start(self, built: Built, state: ServerState) -> None:
        """Nothing."""

    def planned(self, plan: RoundPlan) -> None:
        """Nothing."""

    def client_began(self, client: str) -> None:
        """Nothing."""

    def client_back(self, client: str) -> None:
        """Nothing."""

    def client_done(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def round_done(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def interrupted(self) -> None:
        """Nothing."""

    def finishing(self) -> None:
        """Nothing."""

    def finished(self, folder: Path) -> None:
        """Nothing."""

    def already_finished(self, folder: Path) -> None:
        """Nothing."""
