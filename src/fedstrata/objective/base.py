"""What a client minimises besides the task's loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from fedstrata.registry import Registry


class Objective(ABC):
    """Adds a penalty to the task's loss. Works on the arrays it is given, so that it needs no torch import."""

    id: ClassVar[str]

    @property
    @abstractmethod
    def is_plain(self) -> bool:
        """Whether there is no penalty at all, so that the term is skipped."""

    @abstractmethod
    def penalty(self, trained: Mapping[str, Any], start: Mapping[str, Any]) -> Any:
        """The penalty, a differentiable scalar.

        Args:
            trained: The client's trainable tensors by name.
            start: Their values at the start of the round.
        """


OBJECTIVES: Registry[Objective] = Registry("objective")
