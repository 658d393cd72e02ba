"""What the server does with the accepted mean: take it over, or treat it as a gradient."""

from fedstrata.optimize.base import OPTIMIZERS, OptimizerState, ServerOptimizer, check_coordinates
from fedstrata.optimize.optimizers import Adagrad, Adam, Momentum, NoOptimizer, Yogi

__all__ = [
    "OPTIMIZERS",
    "Adagrad",
    "Adam",
    "Momentum",
    "NoOptimizer",
    "OptimizerState",
    "ServerOptimizer",
    "Yogi",
    "check_coordinates",
]
