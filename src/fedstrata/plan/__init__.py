"""Who trains which strata, at which rank."""

from fedstrata.plan.base import PLANNERS, ClientPlan, PlanContext, Planner, RoundPlan, client_plan
from fedstrata.plan.blocks import AllStrata, FirstBlocks, LastBlocks
from fedstrata.plan.cohort import check_round_plan, draw_cohort
from fedstrata.plan.fixed import FixedBlocks
from fedstrata.plan.random_blocks import RandomBlocks
from fedstrata.plan.suffix import SuffixByDevice

__all__ = [
    "PLANNERS",
    "AllStrata",
    "ClientPlan",
    "FirstBlocks",
    "FixedBlocks",
    "LastBlocks",
    "PlanContext",
    "Planner",
    "RandomBlocks",
    "RoundPlan",
    "SuffixByDevice",
    "check_round_plan",
    "client_plan",
    "draw_cohort",
]
