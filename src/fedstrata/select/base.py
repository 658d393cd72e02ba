"""Which strata the server may change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedstrata.aggregate.base import Proposal
from fedstrata.core.tensors import Layout
from fedstrata.registry import Registry


@dataclass(frozen=True)
class SelectContext:
    """What a selector may look at besides the proposal."""

    layout: Layout
    current: Mapping[str, np.ndarray]
    server_round: int
    seed: int


class Selector(ABC):
    """Accepts a part of a proposal."""

    id: ClassVar[str]

    @abstractmethod
    def init(self) -> dict[str, Any]:
        """The first selector state: JSON-ready, stored in the checkpoint."""

    @abstractmethod
    def select(
        self, state: dict[str, Any], proposal: Proposal, context: SelectContext
    ) -> tuple[Proposal, dict[str, Any], dict[str, Any]]:
        """The accepted part, the new state, and why (JSON-ready, for the record)."""


SELECTORS: Registry[Selector] = Registry("selector")
