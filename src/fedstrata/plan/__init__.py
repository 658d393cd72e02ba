"""Who trains which strata, at which rank."""

from fedstrata.plan.after_gradient import AfterGradient
from fedstrata.plan.allocation import PatternBlocks, RandomPattern
from fedstrata.plan.base import (
    PLANNERS,
    AskingPlanner,
    ClientPlan,
    ContestPlanner,
    InvitingPlanner,
    PlanContext,
    Planner,
    Probes,
    RoundPlan,
    client_plan,
)
from fedstrata.plan.blocks import AllStrata, FirstBlocks, LastBlocks
from fedstrata.plan.checks import check_own_ranks
from fedstrata.plan.client_ranks import ClientRanks
from fedstrata.plan.cohort import check_round_plan, draw_cohort
from fedstrata.plan.depth_and_rank import DepthAndRank
from fedstrata.plan.exclusive import Exclusive
from fedstrata.plan.fisher import CoDesign, FisherBlocks
from fedstrata.plan.fixed import FixedBlocks
from fedstrata.plan.random_blocks import RandomBlocks
from fedstrata.plan.suffix import SuffixByDevice
from fedstrata.plan.windows import Windows

__all__ = [
    "PLANNERS",
    "AfterGradient",
    "AllStrata",
    "AskingPlanner",
    "ClientPlan",
    "ClientRanks",
    "CoDesign",
    "ContestPlanner",
    "DepthAndRank",
    "Exclusive",
    "FirstBlocks",
    "FisherBlocks",
    "FixedBlocks",
    "InvitingPlanner",
    "LastBlocks",
    "PatternBlocks",
    "PlanContext",
    "Planner",
    "Probes",
    "RandomBlocks",
    "RandomPattern",
    "RoundPlan",
    "SuffixByDevice",
    "Windows",
    "check_own_ranks",
    "check_round_plan",
    "client_plan",
    "draw_cohort",
]
