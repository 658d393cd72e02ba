"""What a client minimizes besides the task's loss."""

from fedstrata.objective.base import OBJECTIVES, Objective
from fedstrata.objective.proximal import Proximal
from fedstrata.objective.task_loss import TaskLoss

__all__ = ["OBJECTIVES", "Objective", "Proximal", "TaskLoss"]
