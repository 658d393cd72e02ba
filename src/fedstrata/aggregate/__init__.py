"""How updates become one: the mean over holders, over the cohort, and of factors."""

from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, Proposal
from fedstrata.aggregate.cohort import CohortMean
from fedstrata.aggregate.exactness import ExactnessProbe
from fedstrata.aggregate.factors import FactorMean
from fedstrata.aggregate.holders import HoldersMean

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "ClientUpdate",
    "CohortMean",
    "ExactnessProbe",
    "FactorMean",
    "HoldersMean",
    "Proposal",
]
