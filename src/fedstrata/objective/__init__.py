"""What a client minimizes besides the task's loss."""

from fedstrata.objective.base import OBJECTIVES, Finished, FinishingObjective, Objective
from fedstrata.objective.proximal import Proximal
from fedstrata.objective.rank_decay import RankDecay
from fedstrata.objective.task_loss import TaskLoss

__all__ = ["OBJECTIVES", "Finished", "FinishingObjective", "Objective", "Proximal", "RankDecay", "TaskLoss"]
