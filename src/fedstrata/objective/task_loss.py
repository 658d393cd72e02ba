"""Nothing but the task's loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.objective.base import OBJECTIVES, Objective


@OBJECTIVES.register
@dataclass(frozen=True)
class TaskLoss(Objective):
    """The task's loss without a penalty."""

    id: ClassVar[str] = "task_loss"
    is_plain = True

    def penalty(self, trained: Mapping[str, Any], start: Mapping[str, Any]) -> Any:
        """Zero."""
        return 0.0
