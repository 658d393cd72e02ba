"""Which strata the server may change."""

from fedstrata.select.accept_all import AcceptAll
from fedstrata.select.base import SELECTORS, SelectContext, Selector

__all__ = ["SELECTORS", "AcceptAll", "SelectContext", "Selector"]
