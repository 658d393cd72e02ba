"""One short file per published method: a composition of five parts, and what it is good for."""

from fedstrata.method import (
    central,
    fedavg,
    fedit,
    fedprox,
    fedra_freeze,
    last_k,
    local_only,
    suffix_by_device,
)
from fedstrata.method.base import METHODS, Method, MethodEntry, MethodFacts

__all__ = [
    "METHODS",
    "Method",
    "MethodEntry",
    "MethodFacts",
    "central",
    "fedavg",
    "fedit",
    "fedprox",
    "fedra_freeze",
    "last_k",
    "local_only",
    "suffix_by_device",
]
