"""Which strata the server may change: all, the top ones by a score, random ones, the last ones."""

from fedstrata.select.accept_all import AcceptAll
from fedstrata.select.base import SELECTORS, SelectContext, Selector
from fedstrata.select.simple import AcceptLast, AcceptRandom
from fedstrata.select.top_blocks import TopBlocks

__all__ = ["SELECTORS", "AcceptAll", "AcceptLast", "AcceptRandom", "SelectContext", "Selector", "TopBlocks"]
