"""One short file per published method: a composition of five parts, and what it is good for."""

from importlib import import_module
from pkgutil import iter_modules

from fedstrata.method.base import Method, PairRule
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodEntry, MethodFacts

for _module in sorted(m.name for m in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")  # each registers what it holds

__all__ = ["METHODS", "Citation", "Method", "MethodEntry", "MethodFacts", "PairRule"]
