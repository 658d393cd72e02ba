"""How updates become one: means over holders, of factors, of products and of rank slices, and robust means."""

from fedstrata.aggregate.base import AGGREGATORS, Aggregator, ClientUpdate, MergeContext, Proposal
from fedstrata.aggregate.cohort import CohortMean
from fedstrata.aggregate.exactness import ExactnessProbe
from fedstrata.aggregate.factors import FactorMean
from fedstrata.aggregate.holders import HoldersMean
from fedstrata.aggregate.krum import ClippedMean, Krum
from fedstrata.aggregate.norms import NormWeightedPad
from fedstrata.aggregate.product import ProductMean, Raflora, hand_out
from fedstrata.aggregate.residual import Fedex, LoraFair
from fedstrata.aggregate.robust import Median, TrimmedMean
from fedstrata.aggregate.sketch import SketchMean, sketch_slices
from fedstrata.aggregate.slices import RankSliceMean
from fedstrata.aggregate.stack import Stack
from fedstrata.aggregate.svd import SvdMean

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "ClientUpdate",
    "ClippedMean",
    "CohortMean",
    "ExactnessProbe",
    "FactorMean",
    "Fedex",
    "HoldersMean",
    "Krum",
    "LoraFair",
    "Median",
    "MergeContext",
    "NormWeightedPad",
    "ProductMean",
    "Proposal",
    "Raflora",
    "RankSliceMean",
    "SketchMean",
    "Stack",
    "SvdMean",
    "TrimmedMean",
    "hand_out",
    "sketch_slices",
]
