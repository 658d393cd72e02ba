"""What a client minimises besides the task's loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

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


@dataclass(frozen=True)
class Finished:
    """What a client decides after training, before it encodes.

    Attributes:
        rank: The rank that it sends in all of its blocks; None sends what was planned.
        numbers: For the reply's header.
    """

    rank: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


class FinishingObjective(Objective):
    """An objective that looks at the result of local training."""

    @abstractmethod
    def finish(self, trained: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray]) -> Finished:
        """Decides how much of what was trained is sent. Pure.

        Args:
            trained: Local values of everything trained, by name.
            start: Their values at the start of the round.
        """


OBJECTIVES: Registry[Objective] = Registry("objective")
