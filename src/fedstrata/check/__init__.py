"""The laws as a battery for anybody's part: worlds that grow from tiny ones, so that a counterexample is small.

Needs numpy and named streams; only the gradients of an objective need torch.
"""

from fedstrata.check.battery import check
from fedstrata.check.law import CheckReport, LawResult
from fedstrata.check.target import Target, find_target, target_of

__all__ = ["CheckReport", "LawResult", "Target", "check", "find_target", "target_of"]
